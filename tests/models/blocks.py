"""A planned block with everything one invocation needs, on either kind of machine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from epicute.models.block_spec import BlockSpec
from epicute.models.block_state import BlockScales, LayerCache, Stream
from epicute.models.kernels import GPU, Kernels
from epicute.models.layer_weights import LayerWeights
from epicute.models.prefill import PrefillBlock
from epicute.models.requests import Requests
from epicute.quant import DelayedScale
from tests.models.layers import PAGE, cache_of, inv_freq, state_of

LARGEST = 8.0
"""What the entering stream's scale can represent; draws of N(0, 1) stay below."""


@dataclass
class Setting:
    """A layer with random weights and its reference; ``pages`` is what each request may fill."""

    spec: BlockSpec
    kernels: Kernels = GPU
    device: str = "cpu"
    page: int = PAGE
    pages: int = 4
    seed: int = 0
    max_rows: int = 128
    state: dict[str, torch.Tensor] = field(init=False)
    weights: LayerWeights = field(init=False)

    def __post_init__(self) -> None:
        self.state = state_of(self.spec, self.seed)
        following, state = None, {f"this.{name}": x for name, x in self.state.items()}
        if self.spec.gains == "operand" and not self.spec.last:
            following, next_ = "next.", state_of(self.spec, self.seed + 1, "next.")
            state["next.input_layernorm.weight"] = next_["next.input_layernorm.weight"]
        self.weights = LayerWeights.build(
            state, self.spec, "this.", device=self.device, following=following
        )

    def plan(self, **options: Any) -> PrefillBlock:
        """A block; packed and in pages unless told otherwise."""
        frequencies = inv_freq(self.spec).to(self.device)
        given = {"max_rows": self.max_rows, "page": self.page, "kernels": self.kernels, **options}
        return PrefillBlock.plan(self.weights, frequencies, **given)

    def table(self, requests: int, seed: int = 3) -> torch.Tensor:
        """(requests, pages) int32, pages in random order, with some that nobody owns."""
        order = torch.randperm(requests * self.pages + 2, generator=_random(seed))
        return order[: requests * self.pages].reshape(requests, self.pages).int()

    def cache(self, requests: int) -> LayerCache:
        """Cells of NaN for ``table``."""
        return cache_of(self.spec, requests * self.pages + 2, self.page, device=self.device)

    def scales(self) -> BlockScales | None:
        """States whose scales hold what the layer's activations are, with some room."""
        if not self.spec.delayed:
            return None
        found = BlockScales.create(self.device, history=4, last=self.spec.last)
        for site, largest in zip(found.sites, (64.0, 16.0, 512.0, 64.0), strict=False):
            site.scale_used.fill_(largest / 448)
        return found

    def entry(self) -> DelayedScale | None:
        """The entering stream's state."""
        if not self.spec.delayed:
            return None
        return DelayedScale.create(self.device, initial=LARGEST / 448)

    def stream(self, values: torch.Tensor) -> Stream:
        """The entering stream."""
        return Stream.of(self.spec, values.to(self.device), self.entry(), gain=self.weights.x_gain)

    def coded(self, values: torch.Tensor) -> torch.Tensor:
        """What the codes of a stream that leaves stand for."""
        gain = self.weights.y_gain
        return values if gain is None else values.double() * gain.double()

    def run(
        self,
        block: PrefillBlock,
        values: torch.Tensor,
        requests: Requests,
        cache: LayerCache,
        scales: BlockScales | None = None,
        **options: Any,
    ) -> Stream:
        """One invocation into fresh memory; the scales are as they are unless ``roll=True``."""
        out = Stream.allocate(self.spec, len(values), self.device)
        out.values.fill_(torch.nan)
        out.sumsq.fill_(torch.nan)
        options = {"roll": False, **options}
        scales = scales if scales is not None else self.scales()
        return block.run(self.stream(values), requests, cache, out, scales, **options)


def _random(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def split(values: torch.Tensor, lengths: Sequence[int]) -> list[torch.Tensor]:
    """Rows of each request."""
    return list(values[: sum(lengths)].split(list(lengths)))


def pad(values: torch.Tensor, lengths: Sequence[int], width: int) -> torch.Tensor:
    """(B * width, …) of packed rows, NaN where there is no token."""
    found = torch.full((len(lengths), width, *values.shape[1:]), torch.nan, dtype=values.dtype)
    for b, rows in enumerate(split(values, lengths)):
        found[b, : len(rows)] = rows
    return found.flatten(0, 1)


def unpad(values: torch.Tensor, lengths: Sequence[int]) -> torch.Tensor:
    """Packed rows of padded ones."""
    rows = values.reshape(len(lengths), -1, *values.shape[1:])
    return torch.cat([rows[b, :n] for b, n in enumerate(lengths)])


def tokens(cells: torch.Tensor, table: torch.Tensor, request: int, count: int) -> torch.Tensor:
    """(count, kv_heads, head_dim) that a request has in the cache."""
    found = cells.double()[table[request].long().to(cells.device)].flatten(0, 1)[:count]
    return found.to(cells.dtype)
