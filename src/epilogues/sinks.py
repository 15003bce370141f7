"""Taps that write the projection's results."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from epicute.epilogues.context import Context
from epicute.epilogues.operands import STORED, Counter, Maximum, Operand, Output, Scalar
from epicute.epilogues.policy import Tap
from epicute.epilogues.values import Value
from epicute.errors import require

__all__ = ["EmitFP8", "Store"]

E4M3_MAX = 448.0

SPELT = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "fp8": "float8_e4m3fn"}
"""Short names of dtypes, and torch's."""


def _dtype_fix(given: object) -> str:
    """What to write instead of a dtype that cannot be stored, or is no dtype."""
    if not isinstance(given, str):
        return "choose a dtype the kernels can store"
    name = given.removeprefix("torch.")
    return f"write torch.{SPELT.get(name, name)}, torch's own object"


@dataclass(frozen=True)
class Store(Tap):
    """Write the value to ``out`` (M, n), rounded once to ``dtype``; passes on what was stored.

    float8 saturates at ±448 without a scale; ``EmitFP8`` is the scaled one.
    """

    dtype: torch.dtype = torch.bfloat16

    def __post_init__(self) -> None:
        require(
            self.dtype in STORED,
            "Store.dtype",
            repr(self.dtype),
            ", ".join(map(str, STORED)),
            _dtype_fix(self.dtype),
        )

    @property
    def operands(self) -> Mapping[str, Operand]:
        return {"out": Output(dtype=self.dtype)}

    @property
    def keeps(self) -> torch.dtype:
        return self.dtype

    def apply(self, x: Value, ctx: Context) -> Value:
        return ctx.store("out", x)


@dataclass(frozen=True)
class EmitFP8(Tap):
    """Write e4m3 codes with a delayed per-tensor scale (FuTransformer 3.2.3).

    code = e4m3(x * (1 / out_scale)), rounded once from float32, saturating; the reciprocal is rounded to float32.
    Meanwhile the next scale's data is collected: ``amax`` (1,) float32 is raised to the largest finite |x|,
    ``saturated`` (1,) int64 counts |x / out_scale| > 448 (infinities too, NaN not), ``nans`` (1,) int64 counts NaN.
    None of the three is reset here. Passes on code * out_scale.

    The counters see x and x / out_scale, not the scale itself: with an ``out_scale`` of 0, infinity or NaN every code
    is wrong, and ``nans`` still counts the NaN among x alone. A scale is finite and above 0: a Python number is
    checked, a tensor's value not looked at.

    Operands: ``out_fp8`` (M, n) float8_e4m3fn, ``out_scale`` (1,) float32, ``amax``, ``saturated``, ``nans``.
    """

    @property
    def operands(self) -> Mapping[str, Operand]:
        return {
            "out_fp8": Output(dtype=torch.float8_e4m3fn),
            "out_scale": Scalar(positive=True),
            "amax": Maximum(),
            "saturated": Counter(),
            "nans": Counter(),
        }

    def apply(self, x: Value, ctx: Context) -> Value:
        magnitude = abs(x)
        scaled = x * ctx.reciprocal(ctx.out_scale)
        ctx.record_max("amax", magnitude)
        ctx.count("saturated", abs(scaled) > E4M3_MAX)
        ctx.count("nans", ctx.isnan(x))
        return ctx.store("out_fp8", scaled) * ctx.out_scale
