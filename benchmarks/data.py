"""Random inputs of one layer, in both formats, and the copies a candidate rotates over.

Activations are N(0, 1) and weights N(0, 1/K), so that a product is about N(0, 1). FP8 weights have
one scale per output channel; FP8 activations carry one scale per row (``rows``) or one per tensor
(``tensor``), as an earlier kernel of a layer would have left it. Ours and peers read the same
quantised values.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from benchmarks.floors import Gemm
from benchmarks.harness import SHARDS, Options
from benchmarks.table import label
from benchmarks.timing import copies_for
from epicute.models.shapes import SHAPES, LayerShape, projections
from epicute.quant import E4M3_MAX, quantize_rows, quantize_tensor
from epicute.weights import Packed, Quantized, Weight

__all__ = ["ACTIVATION_SCALE", "Layer", "clones", "exactly", "layers", "rows_of"]

ACTIVATION_SCALE = 8.0 / E4M3_MAX
"""One scale for N(0, 1) activations: a tensor of 10⁸ of them has an amax of about 6."""

CHUNK = 8192  # output features whose float64 weights are held at a time


def exactly(x: Tensor) -> Tensor:
    """``x`` in float64, by way of float32: FP8 has no direct conversion everywhere."""
    return x.float().double()


def rows_of(x: Tensor, rows: Tensor) -> Tensor:
    """Those rows of ``x``, of any dtype; FP8 is indexed as bytes."""
    return x.view(torch.uint8)[rows].view(x.dtype) if x.element_size() == 1 else x[rows]


def clones(first: Tensor, count: int) -> list[Tensor]:
    """``first`` and count - 1 copies of it, each at its own address."""
    return [first, *(first.clone() for _ in range(count - 1))]


@dataclass
class Layer:
    """One projection of one shape, or a shard: y = x Wᵀ with x (M, K) and W (N, K).

    Attributes:
        shape: the model's layer shape; None of a shard.
        name: ``qkv``, ``o``, ``gate_up`` or ``down``, or one of SHARDS.
        M: rows of x.
        options: device, and how many rows are checked.
        copies: of everything a call reads or writes; as many as keep the L2 cold where not given.
        seed: of the random values.
    """

    shape: LayerShape | None
    name: str
    M: int
    options: Options
    copies: int = 0
    seed: int = 0
    random: torch.Generator = field(init=False)

    def __post_init__(self) -> None:
        sizes = SHARDS if self.shape is None else projections(self.shape)
        self.N, self.K = sizes[self.name]
        # FP8 operands: the candidate whose calls touch the fewest bytes.
        self.copies = self.copies or copies_for(Gemm(self.M, self.N, self.K, "fp8").input_bytes)
        self.random = torch.Generator(self.options.device).manual_seed(self.seed)

    def __str__(self) -> str:
        return label(self.case)

    @property
    def case(self) -> dict[str, Any]:
        """The fields of a table's case that every row of this layer has."""
        shape = {} if self.shape is None else {"shape": self.shape.name}
        return {**shape, "layer": self.name, "M": self.M, "N": self.N, "K": self.K}

    @cached_property
    def rows(self) -> Tensor:
        """Rows that are checked: the first, the last, and random ones between."""
        count = min(self.options.check_rows, self.M)
        found = torch.randperm(self.M, generator=self.random, device=self.options.device)[:count]
        found[0], found[-1] = 0, self.M - 1
        return found.unique()

    @property
    def least_us(self) -> float:
        """A time no candidate's call is below, µs."""
        return Gemm(self.M, self.N, self.K, "fp8").floor(0).us

    def normal(self, *size: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        """N(0, 1) of this size on the device."""
        device = self.options.device
        return torch.randn(*size, dtype=dtype, device=device, generator=self.random)

    def poisoned(self, *size: int, dtype: torch.dtype) -> Tensor:
        """Poisoned: NaN in every element, so that one that nobody writes is seen."""
        return torch.full(size, float("nan"), device=self.options.device).to(dtype)

    def scalar(self, value: float, dtype: torch.dtype = torch.float32) -> Tensor:
        """(1,) on the device."""
        return torch.full((1,), value, dtype=dtype, device=self.options.device)

    # --- activations ---

    @cached_property
    def x(self) -> list[Tensor]:
        """(M, K) bfloat16, one per copy."""
        return clones(self.normal(self.M, self.K), self.copies)

    @cached_property
    def x_rows(self) -> tuple[list[Tensor], Tensor]:
        """E4M3 codes, one per copy, and their (M,) scales."""
        codes, scale = quantize_rows(self.x[0])
        return clones(codes, self.copies), scale

    @cached_property
    def x_tensor(self) -> tuple[list[Tensor], Tensor]:
        """E4M3 codes, one per copy, and their (1,) scale."""
        scale = self.scalar(ACTIVATION_SCALE)
        return clones(quantize_tensor(self.x[0], scale), self.copies), scale

    # --- weights ---

    @cached_property
    def weight(self) -> list[Tensor]:
        """(N, K) bfloat16 in logical order, one per copy."""
        return clones(self.normal(self.N, self.K).mul_(self.K**-0.5), self.copies)

    @cached_property
    def quantized(self) -> Quantized:
        """The same weight in FP8, one scale per output channel."""
        return Weight(self.weight[0]).quantize("fp8")

    @cached_property
    def codes(self) -> list[Tensor]:
        """(N, K) E4M3 in logical order, one per copy."""
        return clones(self.quantized.codes, self.copies)

    def packed(self, composition: Any, weights: str) -> list[Packed]:
        """The weight in the row order the composition wants, one per copy."""
        fp8 = weights == "fp8"
        logical = self.quantized if fp8 else Weight(self.weight[0]).quantize(weights)
        first = logical.pack(composition.row_order(self.N))
        rest = clones(first.codes, self.copies)[1:]
        return [first, *(replace(first, codes=codes) for codes in rest)]

    # --- reference ---

    def product(self, x: Tensor, weights: str) -> Tensor:
        """(rows, N) float64: checked rows of x (codes where FP8) times the dequantised weights."""
        left = exactly(rows_of(x, self.rows))
        parts = []
        for start in range(0, self.N, CHUNK):
            chosen = slice(start, start + CHUNK)
            if weights == "fp8":
                scale = self.quantized.scale
                assert scale is not None  # FP8 always has one
                part = exactly(self.quantized.codes[chosen]) * scale[chosen, None].double()
            else:
                part = exactly(self.weight[0][chosen])
            parts.append(left @ part.T)
        return torch.cat(parts, dim=1)


def layers(options: Options) -> Iterator[Layer]:
    """Every layer that ``options`` names, shape by shape and then the shards, each at every M."""
    named: list[tuple[LayerShape | None, str]] = []
    named += [(SHAPES[shape], name) for shape in options.shapes for name in options.layers]
    named += [(None, name) for name in SHARDS if options.shards]
    for shape, name in named:
        for rows in options.M:
            yield Layer(shape, name, rows, options)
