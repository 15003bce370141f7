"""Policies of a user's own, one of every role, each with an operand; and one that runs every operation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from epicute.epilogues import (
    Counter,
    HeadVector,
    Matrix,
    Maximum,
    Operand,
    Output,
    PartialsOutput,
    RowVector,
    Scalar,
    Tap,
    pairwise,
    policy,
    reducing,
    tap,
)

FP32 = torch.float32


@policy(shift=RowVector)
def shifted(x, ctx):
    """x + shift, one per column."""
    return x + ctx.shift


@policy
def soft_cap(x, ctx, *, cap: float):
    """Squash to (-cap, cap)."""
    return cap * ctx.tanh(x / cap)


@pairwise(mix=RowVector)
def blended(first, second, ctx, *, floor: float):
    """max(first, floor) * mix + second; mix has one value per pair."""
    return ctx.max(first, floor) * ctx.mix + second


@pairwise(keeps=True, head_dim=64, turn=HeadVector(length=32))
def sheared(first, second, ctx):
    """Both halves of a head stay: the second gains turn * first."""
    return first, second + first * ctx.turn


@reducing(over=64, ragged=True, pull=Scalar)
def centred(x, ctx):
    """x less pull times the mean of its 64 columns, or of those that are left."""
    return x - ctx.mean(x) * ctx.pull


@reducing(over=128, ragged=True, low=RowVector)
def clipped_to_largest(x, ctx):
    """The largest of 128 columns where x exceeds low, else x."""
    return ctx.where(x > ctx.low, ctx.largest(x), x)


@tap(
    over=32,
    ragged=True,
    peaks=PartialsOutput(over=32),
    top=Maximum,
    above=Counter,
    copy=Output(dtype=FP32),
    bound=Matrix,
)
def watched(x, ctx):
    """Largest of every 32 columns, the largest of all, how many exceed bound, and a copy."""
    ctx.partials("peaks", ctx.largest(x))
    ctx.record_max("top", abs(x))
    ctx.count("above", x > ctx.bound)
    ctx.store("copy", x)


@tap(copy=Output(dtype=torch.bfloat16), lost=Output(dtype=FP32))
def rounded_away(x, ctx):
    """A copy in BF16, and what that lost."""
    ctx.store("lost", x - ctx.store("copy", x))


@tap(top=Maximum, bad=Counter, divisor=Scalar)
def suspected(x, ctx):
    """The largest of all, and how many are NaN once divided."""
    ctx.record_max("top", abs(x))
    ctx.count("bad", ctx.isnan(x * ctx.reciprocal(ctx.divisor)))


NUMBERS = ("add", "sub", "mul", "div", "min", "max", "neg", "abs", "floor", "where")
CURVES = ("exp", "exp2", "log", "log2", "sqrt", "rsqrt", "reciprocal")
ROUNDING = ("round_bfloat16", "round_float16", "round_float8")
WAVES = ("sin", "cos", "tanh", "sigmoid")
TRUTHS = ("lt", "le", "gt", "ge", "eq", "ne", "isnan")
LOGIC = ("logical_and", "logical_or", "logical_not")
OPERATION_GROUPS = (NUMBERS, CURVES, (*WAVES, *ROUNDING), TRUTHS, LOGIC)

EXACT_OPERATIONS = frozenset((*NUMBERS, *TRUTHS, *LOGIC, *ROUNDING, "sqrt", "reciprocal")) - {"div"}
"""Rounded alike by both interpreters; the others are approximations of a few units in the last place."""


@dataclass(frozen=True, kw_only=True)
class Operations(Tap):
    """Stores f(x), f(x, other) or, for ``where``, x where it is less than other; float32, one output each.

    Truth values are stored as 1 and 0; the logical operations combine x < other and x < 0.
    """

    chosen: tuple[str, ...] = ()

    @property
    def operands(self) -> Mapping[str, Operand]:
        outputs = {f"{name}_out": Output(dtype=FP32) for name in self.chosen}
        return {"other": Matrix(dtype=FP32), **outputs}

    def apply(self, x: Any, ctx: Any) -> None:
        other = ctx.other
        less, negative = x < other, x < 0.0
        for name in self.chosen:
            run = getattr(ctx, name)
            if name == "where":
                found = run(less, x, other)
            elif name == "logical_not":
                found = ctx.where(run(less), 1.0, 0.0)
            elif name.startswith("logical"):
                found = ctx.where(run(less, negative), 1.0, 0.0)
            elif name in TRUTHS:
                arguments = (x,) if name == "isnan" else (x, other)
                found = ctx.where(run(*arguments), 1.0, 0.0)
            elif name in ("add", "sub", "mul", "div", "min", "max"):
                found = run(x, other)
            else:
                found = run(x)
            ctx.store(f"{name}_out", found)
