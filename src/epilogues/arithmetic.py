"""Scales, gains, residuals and activations."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from epicute.epilogues.context import Context
from epicute.epilogues.operands import (
    ColumnVector,
    Matrix,
    Operand,
    Partials,
    PartialsOutput,
    RowVector,
    Scalar,
)
from epicute.epilogues.policy import Elementwise, Pairwise, Tap
from epicute.epilogues.values import Value
from epicute.errors import require

__all__ = ["Bias", "Dequantize", "Gain", "ResidualAdd", "RowScale", "SumSquares", "SwiGLU"]

PARTIAL = 64
"""Columns of one partial sum of squares."""


@dataclass(frozen=True)
class Dequantize(Elementwise):
    """x * (weight_scale * scale), or (x * weight_scale) * scale where scale is one per row (FuTransformer 2.3).

    Args:
        activation: ``"tensor"`` (``scale`` (1,) float32), ``"row"`` (``scale`` (M,) float32) or None.
        weight: ``"column"`` (``weight_scale`` (N,) float32), ``"tensor"`` ((1,) float32) or None. Bound from the packed
            weight where it is not given.
    """

    activation: str | None = "tensor"
    weight: str | None = "column"

    def __post_init__(self) -> None:
        known = (("activation", self.activation, "row"), ("weight", self.weight, "column"))
        for field, got, vector in known:
            require(
                got in ("tensor", vector, None),
                f"Dequantize.{field}",
                repr(got),
                f"'tensor', {vector!r} or None",
                "name the granularity of the scale",
            )

    @property
    def operands(self) -> Mapping[str, Operand]:
        found: dict[str, Operand] = {}
        if self.activation:
            one = self.activation == "tensor"
            found["scale"] = Scalar(positive=True) if one else ColumnVector()
        if self.weight:
            one = self.weight == "tensor"
            found["weight_scale"] = Scalar(positive=True) if one else RowVector()
        return found

    def apply(self, x: Value, ctx: Context) -> Value:
        if self.weight and self.activation == "tensor":
            return x * (ctx.weight_scale * ctx.scale)
        if self.weight:
            x = x * ctx.weight_scale
        return x * ctx.scale if self.activation else x


@dataclass(frozen=True)
class Bias(Elementwise):
    """x + bias, ``bias`` (n,)."""

    @property
    def operands(self) -> Mapping[str, Operand]:
        return {"bias": RowVector()}

    def apply(self, x: Value, ctx: Context) -> Value:
        return x + ctx.bias


@dataclass(frozen=True)
class Gain(Elementwise):
    """x * (gain + offset), the sum in float32; ``gain`` (n,).

    Gives the next projection its RMSNorm gain where that projection's weights could not absorb it. Gemma's norms have
    offset 1.
    """

    offset: float = 0.0

    @property
    def operands(self) -> Mapping[str, Operand]:
        return {"gain": RowVector()}

    def apply(self, x: Value, ctx: Context) -> Value:
        return x * (ctx.gain + self.offset) if self.offset else x * ctx.gain


@dataclass(frozen=True)
class RowScale(Elementwise):
    """x * rsqrt(sumsq / width + eps): RMSNorm's row factor, behind the projection (FuTransformer 3.2.2).

    ``sumsq`` (M, ceil(width / 64)) float32 are the partial sums of squares that ``SumSquares`` wrote of the
    projection's input, ``width`` columns wide; each row's are added left to right. ``width`` is the K of the projection
    (without the padding of its packed rows): ``linear`` and ``plan`` refuse a weight of another.
    """

    width: int
    eps: float = 1e-5

    def __post_init__(self) -> None:
        require(self.width > 0, "RowScale.width", self.width, "a positive count", "give K")

    @property
    def operands(self) -> Mapping[str, Operand]:
        return {"sumsq": Partials(width=self.width)}

    def apply(self, x: Value, ctx: Context) -> Value:
        return x * ctx.rsqrt(ctx.sumsq * (1.0 / self.width) + self.eps)


@dataclass(frozen=True)
class ResidualAdd(Elementwise):
    """x + residual; ``residual`` (M, n), bfloat16 unless the plan says otherwise."""

    @property
    def operands(self) -> Mapping[str, Operand]:
        return {"residual": Matrix()}

    def apply(self, x: Value, ctx: Context) -> Value:
        return x + ctx.residual


@dataclass(frozen=True)
class SumSquares(Tap):
    """Write sums of squares over 64 columns of the value, as the chain's next ``Store`` keeps it.

    ``sumsq_out`` (M, ceil(n / 64)) float32. Each quad lane adds the squares of its columns in ascending order (lane t
    owns columns 8t … 8t + 7 of every 32), then the lanes are added as (0 + 1) + (2 + 3). Passes the value on. Where 64
    does not divide n, the last sum is of the columns that are left.
    """

    ragged = True

    @property
    def over(self) -> int:
        return PARTIAL

    @property
    def operands(self) -> Mapping[str, Operand]:
        return {"sumsq_out": PartialsOutput(over=PARTIAL)}

    def apply(self, x: Value, ctx: Context) -> Value:
        kept = ctx.as_kept(x)
        ctx.partials("sumsq_out", ctx.total(kept * kept))
        return x


@dataclass(frozen=True)
class SwiGLU(Pairwise):
    """gate * sigmoid(alpha * gate) * up; the first n/2 columns are the gate, the others up.

    Args:
        alpha: factor inside the sigmoid; 1 is SiLU.
        limit: clamp gate to at most ``limit`` and up to ± ``limit`` first; None for no clamp.
    """

    alpha: float = 1.0
    limit: float | None = None

    def __post_init__(self) -> None:
        require(
            self.limit is None or self.limit > 0,
            "SwiGLU.limit",
            self.limit,
            "a positive number or None",
            "drop it for the plain activation",
        )

    def apply(self, first: Value, second: Value, ctx: Context) -> Value:
        gate, up = first, second
        if self.limit is not None:
            gate = ctx.min(gate, self.limit)
            up = ctx.max(ctx.min(up, self.limit), -self.limit)
        return gate * ctx.sigmoid(gate * self.alpha if self.alpha != 1.0 else gate) * up
