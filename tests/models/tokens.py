"""An embedding's call: a table of any bits, ids with padding, outputs of other values than any right ones."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from epicute.quant import DelayedScale
from epicute.testing.poison import Guarded, guarded

FP8 = torch.float8_e4m3fn
INITIAL = 2.0**-4
"""First scale: some of what is usual saturates."""


@dataclass
class Call:
    """Everything that ``EmbeddingPlan.run`` takes; ``fp8`` adds codes and a site."""

    ids: torch.Tensor
    table: torch.Tensor
    fp8: bool = True
    outputs: dict[str, Guarded] = field(init=False)
    strays: torch.Tensor = field(init=False)
    site: DelayedScale = field(init=False)

    def __post_init__(self) -> None:
        rows, (_, hidden), device = len(self.ids), self.table.shape, self.table.device
        self.strays = torch.zeros(1, dtype=torch.int64, device=device)
        self.site = DelayedScale.create(device, initial=INITIAL)
        made = {
            "x": ((rows, hidden), self.table.dtype, (hidden + 8, 1)),
            "sumsq": ((rows, -(-hidden // 64)), torch.float32, (-(-hidden // 64) + 3, 1)),
            "codes": ((rows, hidden), FP8, (hidden + 16, 1)),
        }
        if not self.fp8:
            del made["codes"]
        self.outputs = {n: guarded(*of, device=device, name=n) for n, of in made.items()}

    @property
    def arguments(self) -> dict[str, object]:
        """By name."""
        found = {n: out.tensor for n, out in self.outputs.items()}
        site = {"site": self.site} if self.fp8 else {}
        return {"ids": self.ids, "table": self.table, "strays": self.strays, **found, **site}

    @property
    def memory(self) -> tuple[torch.Tensor, ...]:
        """All tensors that the kernel may touch."""
        site = (self.site.scale_used, self.site.amax_next, self.site.saturated, self.site.nans)
        written = [out.tensor for out in self.outputs.values()]
        return (self.ids, self.table, self.strays, *written, *(site if self.fp8 else ()))


def ids(rows: int, vocabulary: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """(rows,) of tokens, some of them padding."""
    generator = torch.Generator().manual_seed(seed)
    found = torch.randint(0, vocabulary, (rows,), generator=generator)
    found[torch.rand(rows, generator=generator) < 0.2] = -1
    return found.to(dtype)
