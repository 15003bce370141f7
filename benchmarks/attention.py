"""Table ``attention``: causal BF16 attention, beside FlashAttention-4 and PyTorch's back-ends.

Requests of equal length are padded tensors (batch, length, heads, head_dim) for everyone, at least
16384 tokens of them; the mixes are packed row after row, and only FlashAttention-4 takes those as
they are. The columns of keys and values are dense.

FlashAttention-4 (package ``flash-attn-4``) imports quack, which replaces a part of the DSL's argument
conversion for the whole process. Ours is compiled before, in processes of its own, and only loaded
beside it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import epicute.attention
from benchmarks.check import checker
from benchmarks.data import clones, exactly
from benchmarks.harness import Options, Session, fill
from benchmarks.mixes import LONGEST, MIXES, requests
from benchmarks.ours import once
from benchmarks.provenance import Provenance
from benchmarks.table import Row, Table
from benchmarks.timing import Run, Timer, copies_for
from benchmarks.work import ATTENTION_FLOOR, attention_floor
from epicute.attention import AttentionSpec, kernel_for

__all__ = ["PAPER", "Attention", "cases", "kernels", "measure", "table"]

PAPER = (
    "FuTransformer (arXiv 2610.23796), sections 3.2 and 4.1: the attention of prefill, of the 8B and "
    "1B shapes' heads"
)

HEADS, KV_HEADS = 32, 8
HEAD_DIMS = (128, 64)
TOKENS = 16384
"""Tokens of a case at least: short requests come in batches."""

RAGGED = 4
"""Mixes are run at this many times their lengths, up to 8192 tokens."""

BACKENDS = {
    "sdpa-cudnn": SDPBackend.CUDNN_ATTENTION,
    "sdpa-flash": SDPBackend.FLASH_ATTENTION,
}
"""Peer → back-end of scaled_dot_product_attention."""


@dataclass
class Attention:
    """Causal self-attention over requests; values N(0, 1).

    Attributes:
        lengths: tokens of each request.
        head_dim: channels of a head.
        options: device, and how many rows are checked.
        mix: the lengths' name; None where they are equal.
        copies: of q, k, v and the result.
        seed: of the random values.
    """

    lengths: tuple[int, ...]
    head_dim: int
    options: Options
    mix: str | None = None
    heads: int = HEADS
    kv_heads: int = KV_HEADS
    copies: int = 0
    seed: int = 0
    random: torch.Generator = field(init=False)

    def __post_init__(self) -> None:
        touched = 4 * self.tokens * (self.heads + self.kv_heads) * self.head_dim
        self.copies = self.copies or copies_for(touched)
        self.random = torch.Generator(self.options.device).manual_seed(self.seed)

    @property
    def tokens(self) -> int:
        """Rows of q."""
        return sum(self.lengths)

    @property
    def case(self) -> dict[str, Any]:
        """The fields of the table's case."""
        if self.mix is None:
            sizes: dict[str, Any] = {"batch": len(self.lengths), "length": self.lengths[0]}
        else:
            factor = max(1, self.lengths[0] // MIXES[self.mix][0])
            sizes = {"M": self.tokens, "batch": len(self.lengths), "length": factor * LONGEST}
            sizes["mix"] = self.mix
        heads = {"heads": self.heads, "kv_heads": self.kv_heads, "head_dim": self.head_dim}
        return {"cache": "bf16", **sizes, **heads, "causal": True}

    @property
    def floor_us(self) -> float:
        """See ATTENTION_FLOOR."""
        return attention_floor(self.lengths, self.heads, self.kv_heads, self.head_dim)

    # --- data: rows of all requests, one after another ---

    def _normal(self, heads: int) -> list[Tensor]:
        size = (self.tokens, heads, self.head_dim)
        made = torch.randn(
            size, dtype=torch.bfloat16, device=self.options.device, generator=self.random
        )
        return clones(made, self.copies)

    @cached_property
    def q(self) -> list[Tensor]:
        """(tokens, heads, head_dim) bfloat16, one per copy."""
        return self._normal(self.heads)

    @cached_property
    def k(self) -> list[Tensor]:
        """(tokens, kv_heads, head_dim) bfloat16, one per copy."""
        return self._normal(self.kv_heads)

    @cached_property
    def v(self) -> list[Tensor]:
        """(tokens, kv_heads, head_dim) bfloat16, one per copy."""
        return self._normal(self.kv_heads)

    @cached_property
    def starts(self) -> Tensor:
        """(requests + 1,) int32: first row of each request, and the end."""
        ends = torch.tensor((0, *self.lengths)).cumsum(0)
        return ends.to(self.options.device, torch.int32)

    def laid_out(self, x: Tensor) -> Tensor:
        """(batch, length, heads, head_dim) of equal requests; of a mix the rows as they are."""
        return x if self.mix else x.view(len(self.lengths), self.lengths[0], *x.shape[1:])

    def poisoned(self) -> Tensor:
        """A result of NaN, laid out."""
        return self.laid_out(torch.full_like(self.q[0], float("nan")))

    # --- reference ---

    @cached_property
    def rows(self) -> Tensor:
        """Rows that are checked: the first, the last, and random ones between."""
        count = min(self.options.check_rows, self.tokens)
        found = torch.randperm(self.tokens, generator=self.random, device=self.options.device)[
            :count
        ]
        found[0], found[-1] = 0, self.tokens - 1
        return found.unique()

    def view(self, name: str, out: Tensor) -> Tensor:
        """The checked rows of a result."""
        return out.reshape(self.tokens, -1)[self.rows]

    def exact(self) -> Tensor:
        """(rows, heads * head_dim) float64 of the checked rows."""
        starts = self.starts.tolist()
        found = []
        for first, end in pairwise(starts):
            mine = self.rows[(self.rows >= first) & (self.rows < end)]
            if mine.numel():
                k, v = (exactly(x[0][first:end]) for x in (self.k, self.v))
                found.append(attended(exactly(self.q[0][mine]), k, v, mine - first))
        return torch.cat(found)


def attended(q: Tensor, k: Tensor, v: Tensor, positions: Tensor) -> Tensor:
    """(n, heads * head_dim): rows q (n, heads, head_dim) over keys up to their ``positions``.

    k and v: (keys, kv_heads, head_dim) of the rows' request.
    """
    n, heads, dim = q.shape
    groups = q.view(n, k.shape[1], heads // k.shape[1], dim)
    scores = torch.einsum("nhgd,shd->nhgs", groups, k) * dim**-0.5
    later = torch.arange(len(k), device=k.device) > positions[:, None]
    weights = scores.masked_fill_(later[:, None, None], float("-inf")).softmax(dim=-1)
    return torch.einsum("nhgs,shd->nhgd", weights, v).reshape(n, -1)


# --- candidates ---


def spec(found: Attention) -> AttentionSpec:
    """What ours is compiled for."""
    return AttentionSpec(
        heads=found.heads,
        kv_heads=found.kv_heads,
        head_dim=found.head_dim,
        packed=found.mix is not None,
    )


def ours(found: Attention) -> Run:
    """epicute's attention, padded without lengths or packed."""
    plan = epicute.attention.plan_attention(spec(found))
    outputs = [found.poisoned() for _ in range(found.copies)]
    given = {"q_starts": found.starts, "kv_starts": found.starts} if found.mix else {}

    def run(copy: int) -> dict[str, Tensor]:
        q, k, v = (found.laid_out(x[copy]) for x in (found.q, found.k, found.v))
        plan.run(q, k, v, out=outputs[copy], **given)
        return {"out": outputs[copy]}

    return run


def fa4(found: Attention) -> Run:
    """FlashAttention-4 as its users call it; on Hopper its sm_90 kernels run."""
    from flash_attn.cute import (  # type: ignore[import-not-found]
        flash_attn_func,
        flash_attn_varlen_func,
    )

    longest = max(found.lengths)
    known = inspect.signature(flash_attn_varlen_func).parameters
    most = {name: longest for name in ("max_seqlen_q", "max_seqlen_k") if name in known}

    def run(copy: int) -> dict[str, Tensor]:
        q, k, v = (found.laid_out(x[copy]) for x in (found.q, found.k, found.v))
        if found.mix is None:
            out = flash_attn_func(q, k, v, causal=True)
        else:
            out = flash_attn_varlen_func(
                q,
                k,
                v,
                cu_seqlens_q=found.starts,
                cu_seqlens_k=found.starts,
                causal=True,
                **most,
            )
        return {"out": out[0] if isinstance(out, tuple) else out}

    return run


def sdpa(found: Attention, backend: SDPBackend) -> Run:
    """scaled_dot_product_attention with one back-end, on transposed views."""

    def run(copy: int) -> dict[str, Tensor]:
        q, k, v = (found.laid_out(x[copy]).transpose(1, 2) for x in (found.q, found.k, found.v))
        with sdpa_kernel(backend):
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return {"out": out.transpose(1, 2)}

    return run


def peers(found: Attention) -> dict[str, Callable[[Attention], Run]]:
    """The peers that take these requests as they are laid out."""
    if found.mix is not None:
        return {"fa4": fa4}
    dense = {name: partial(sdpa, backend=backend) for name, backend in BACKENDS.items()}
    return {"fa4": fa4, **dense}


# --- the table ---


def measure(found: Attention, session: Session) -> list[Row]:
    """The row of one case."""
    check = checker({"out": found.exact()}, found.view)
    session.add("ours", partial(ours, found), check)
    for name, build in peers(found).items():
        session.add(name, partial(build, found), check)
    session.measure(found.copies, found.floor_us)
    return [session.row(found.case, "ours", {name: name for name in peers(found)}, found.floor_us)]


def cases(options: Options) -> Iterator[Attention]:
    """Equal lengths with either head_dim, then the mixes with the first."""
    for head_dim in HEAD_DIMS:
        for length in options.lengths:
            batch = -(-TOKENS // length)
            yield Attention((length,) * batch, head_dim, options)
    for mix in MIXES:
        if len(set(MIXES[mix])) > 1:
            yield Attention(requests(mix, RAGGED), HEAD_DIMS[0], options, mix=mix)


def kernels(options: Options) -> Iterator[Any]:
    """Every kernel the table runs, each once."""
    return once(kernel_for(spec(found)) for found in options.progress.left(cases(options), 1))


def table(options: Options, timer: Timer, source: Provenance, folder: Path) -> Table:
    """Measure every case and write ``attention.json`` into ``folder``."""
    path = folder / "attention.json"
    found = Table("attention", PAPER, options.protocol, ATTENTION_FLOOR, source, path)
    left = options.progress.left(cases(options), 1)
    return fill(found, left, measure, timer, options.rounds, options.progress)
