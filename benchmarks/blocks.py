"""Random weights and inputs of one whole layer, and what it gives in float64.

The residual stream is N(0, 1), weights are N(0, 1/K), gains of both norms about 1. Candidates are
given the same BF16 weights under their Hugging Face names and quantise them their own way, so that
an error is of everything: weights, activations, accumulation.

    rows         of all requests, one after another         (tokens, hidden)
    padded       each request's, up to LONGEST of them      (requests * longest, hidden)

Rows that only pad hold values like the others.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.attention import attended
from benchmarks.check import Error
from benchmarks.data import CHUNK, clones, exactly
from benchmarks.floors import BYTES
from benchmarks.harness import Options
from benchmarks.mixes import LONGEST
from benchmarks.peers import EPS, Tensors, rotate
from benchmarks.projections import THETA
from benchmarks.timing import COLD_BYTES
from benchmarks.work import layer_floor
from epicute.models.shapes import LayerShape

__all__ = ["Block", "allowed"]

GAINS = ("input_layernorm", "post_attention_layernorm")
FUSED = {
    "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "o": ("self_attn.o_proj",),
    "gate_up": ("mlp.gate_proj", "mlp.up_proj"),
    "down": ("mlp.down_proj",),
}
"""Projection → its weights, by their Hugging Face names in a layer, in the order of its columns."""


def allowed(weights: str) -> Error:
    """What a layer's output may be off by: in BF16 about 0.003, in FP8 about 0.035 of its norm."""
    return Error(0.06, 0.10) if weights == "fp8" else Error(0.01, 0.02)


@dataclass
class Block:
    """One layer over requests that begin at position 0.

    Attributes:
        shape: the layer's.
        lengths: tokens of each request.
        options: device, and how many rows are checked.
        mix: the lengths' name; None where they are equal.
        outliers: whether every 256th channel of the residual stream is 16 times as large.
        copies: of everything a call reads or writes; as many as keep the L2 cold where not given.
        seed: of the random values.
    """

    shape: LayerShape
    lengths: tuple[int, ...]
    options: Options
    mix: str | None = None
    outliers: bool = False
    copies: int = 0
    seed: int = 0
    random: torch.Generator = field(init=False)
    compiled: dict[str, list[Tensors]] = field(init=False, default_factory=dict)
    """Format → every copy of what PyTorch's layers multiply by; theirs in common (``torch_block``)."""

    def __post_init__(self) -> None:
        touched = self.shape.weights * BYTES["fp8"]
        self.copies = self.copies or 1 + -int(-COLD_BYTES // touched)
        self.random = torch.Generator(self.options.device).manual_seed(self.seed)

    # --- sizes ---

    @property
    def batch(self) -> int:
        """Requests."""
        return len(self.lengths)

    @property
    def tokens(self) -> int:
        """Rows of all requests."""
        return sum(self.lengths)

    @property
    def longest(self) -> int:
        """Rows of a request when padded."""
        return self.lengths[0] if self.mix is None else max(LONGEST, *self.lengths)

    @property
    def case(self) -> dict[str, Any]:
        """The fields of the table's case that every row of this block has."""
        shape = self.shape
        sizes: dict[str, Any] = {"batch": self.batch, "length": self.longest}
        heads = {"heads": shape.heads, "kv_heads": shape.kv_heads, "head_dim": shape.head_dim}
        mix = {} if self.mix is None else {"M": self.tokens, "mix": self.mix}
        return {"shape": shape.name, "cache": "bf16", **sizes, **heads, "causal": True, **mix}

    @property
    def least_us(self) -> float:
        """A time no candidate's call is below, µs."""
        return layer_floor(self.shape, self.lengths, "fp8")

    # --- data ---

    def normal(self, *size: int) -> Tensor:
        """N(0, 1) bfloat16 of this size on the device."""
        device = self.options.device
        return torch.randn(*size, dtype=torch.bfloat16, device=device, generator=self.random)

    @cached_property
    def weights(self) -> dict[str, Tensor]:
        """Hugging Face name in the layer → (out, in) bfloat16, or (hidden,) of a gain."""
        shape = self.shape
        hidden, wide, kv = shape.hidden, shape.intermediate, shape.kv_width
        sizes = {
            "self_attn.q_proj": (shape.q_width, hidden),
            "self_attn.k_proj": (kv, hidden),
            "self_attn.v_proj": (kv, hidden),
            "self_attn.o_proj": (hidden, shape.q_width),
            "mlp.gate_proj": (wide, hidden),
            "mlp.up_proj": (wide, hidden),
            "mlp.down_proj": (hidden, wide),
        }
        gains = {name: self.normal(hidden).mul_(0.1).add_(1.0) for name in GAINS}
        return gains | {n: self.normal(*size).mul_(size[1] ** -0.5) for n, size in sizes.items()}

    def fused(self, projection: str) -> Tensor:
        """(N, K) bfloat16 of a projection."""
        return torch.cat([self.weights[name] for name in FUSED[projection]])

    @cached_property
    def x(self) -> list[Tensor]:
        """(tokens, hidden) bfloat16, one per copy."""
        first = self.normal(self.tokens, self.shape.hidden)
        if self.outliers:
            first[:, ::256] *= 16
        return clones(first, self.copies)

    @cached_property
    def x_padded(self) -> list[Tensor]:
        """(batch, longest, hidden) bfloat16, one per copy."""
        if self.mix is None:
            return [x.view(self.batch, self.longest, -1) for x in self.x]
        first = self.normal(self.batch * self.longest, self.shape.hidden)
        first[self.places] = self.x[0]
        return clones(first.view(self.batch, self.longest, -1), self.copies)

    @cached_property
    def starts(self) -> Tensor:
        """(requests + 1,) int32: first row of each request, and the end."""
        ends = torch.tensor((0, *self.lengths)).cumsum(0)
        return ends.to(self.options.device, torch.int32)

    @cached_property
    def positions(self) -> Tensor:
        """(tokens,) int64 of each row in its request."""
        return torch.cat([torch.arange(n, device=self.options.device) for n in self.lengths])

    @cached_property
    def places(self) -> Tensor:
        """(tokens,) int64: each row's among the padded ones."""
        device = self.options.device
        request = torch.arange(self.batch, device=device).repeat_interleave(
            torch.tensor(self.lengths, device=device)
        )
        return request * self.longest + self.positions

    @cached_property
    def inv_freq(self) -> Tensor:
        """(head_dim/2,) float32."""
        half = self.shape.head_dim // 2
        exponent = torch.arange(half, device=self.options.device).double() / half
        return (THETA**-exponent).float()

    def angles(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Cosine and sine (n, head_dim/2) in float64 of the float32 angles."""
        angle = (positions.float()[:, None] * self.inv_freq).double()
        return angle.cos(), angle.sin()

    # --- reference ---

    @cached_property
    def rows(self) -> Tensor:
        """Rows that are checked: the first, the last, and random ones between."""
        count = min(self.options.check_rows, self.tokens)
        device = self.options.device
        found = torch.randperm(self.tokens, generator=self.random, device=device)[:count]
        found[0], found[-1] = 0, self.tokens - 1
        return found.unique()

    def view(self, name: str, out: Tensor) -> Tensor:
        """The checked rows of a layer's output, packed or padded."""
        flat = out.reshape(-1, self.shape.hidden)
        return flat[self.rows if len(flat) == self.tokens else self.places[self.rows]]

    def exact(self) -> Tensor:
        """(rows, hidden) float64: the layer's output on the checked rows."""
        rows, shape = self.rows, self.shape
        x = exactly(self.x[0])
        h = self._normed(x, GAINS[0])
        cos, sin = self.angles(self.positions)
        k = rotate(self._product(h, "self_attn.k_proj"), cos, sin, torch.float64)
        v = self._product(h, "self_attn.v_proj")
        q = self._product(h[rows], "self_attn.q_proj")
        q = rotate(q, cos[rows], sin[rows], torch.float64).view(len(rows), shape.heads, -1)
        found = []
        for first, end in self._requests():
            mine = (rows >= first) & (rows < end)
            if mine.any():
                keys, values = (y[first:end].view(end - first, shape.kv_heads, -1) for y in (k, v))
                found.append(attended(q[mine], keys, values, rows[mine] - first))
        x = x[rows] + self._product(torch.cat(found), "self_attn.o_proj")
        h = self._normed(x, GAINS[1])
        gate, up = (self._product(h, f"mlp.{name}_proj") for name in ("gate", "up"))
        return x + self._product(F.silu(gate) * up, "mlp.down_proj")

    def _requests(self) -> Iterator[tuple[int, int]]:
        starts = self.starts.tolist()
        return pairwise(starts)

    def _normed(self, x: Tensor, gain: str) -> Tensor:
        factor = torch.rsqrt(x.square().mean(dim=1, keepdim=True) + EPS)
        return x * factor * exactly(self.weights[gain])

    def _product(self, x: Tensor, name: str) -> Tensor:
        """``x`` times a weight, some of its rows at a time."""
        weight = self.weights[name]
        parts = [x @ exactly(weight[at : at + CHUNK]).T for at in range(0, len(weight), CHUNK)]
        return torch.cat(parts, dim=1)
