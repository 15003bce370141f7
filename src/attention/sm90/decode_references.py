"""References of decode's columns, how they move, and what they are among each other. Imports the DSL."""

from __future__ import annotations

from typing import Any

import cutlass
from cutlass import Boolean, Float32, Int32, cute

from epicute.attention.sm90.softmax import exp2, fma, maximum
from epicute.epilogues.dsl import pure_asm

__all__ = ["UNSEEN", "finite_reference", "fold_piece", "largest_of_warp", "move_references"]

UNSEEN = -(2.0**-30)
"""A bias that is no whole number, and too small to be seen in a logit that is rounded up."""


def scale_columns(out: Any, correction: Any) -> None:
    """Multiply accumulators by the factor of their column."""
    share = cute.size(out) // (cute.size(correction) // 2)
    for i in range(cute.size(out)):
        out[i] = out[i] * correction[i // share * 2 + i % 2]


def move_references(heights: Any, state: Any, out: Any, levels: tuple[int, int]) -> None:
    """Bring columns with a logit above their limit down to ``shift``: biases, sums, outputs, and the logits at hand.

    ``levels``: shift and slack. A column decides for itself alone.
    """
    bias, limit, total, correction = state
    columns, highest = cute.size(bias), float(sum(levels))
    some = Float32(highest)
    for c in range(columns):
        best = column_maximum(heights, c, columns)
        # Where nothing was seen, sums are 0, and the way to the first reference has no bound.
        fresh = bias[c] == Float32(UNSEEN)
        follows = best > Float32(cutlass.select_(fresh, -Float32.inf, Float32(highest)))
        up = pure_asm("cvt.rpi.f32.f32 $0, $1;", "=f,f", Float32, best)
        move = Float32(cutlass.select_(follows, float(levels[0]) - up, Float32(0.0)))
        correction[c] = Float32(cutlass.select_(fresh, Float32(1.0), exp2(move)))
        first = Float32(cutlass.select_(follows, move, bias[c]))
        bias[c] = Float32(cutlass.select_(fresh, first, bias[c] + move))
        some = Float32(cutlass.select_(bias[c] == Float32(UNSEEN), -Float32.inf, some))
        total[c] = total[c] * correction[c]
        for place in places_of(heights, c, columns):
            heights[place] = heights[place] + move
    limit[0] = some
    scale_columns(out, correction)


def places_of(heights: Any, column: int, columns: int) -> list[int]:
    """Where a column's logits are, of all parts."""
    first = column // 2 * 4 + column % 2
    return [
        first + part + row for part in range(0, cute.size(heights), 2 * columns) for row in (0, 2)
    ]


def column_maximum(heights: Any, column: int, columns: int) -> Any:
    """The largest of a column's logits in any lane of the warp."""
    best = Float32(-Float32.inf)
    for place in places_of(heights, column, columns):
        best = maximum(best, heights[place])
    for distance in (4, 8, 16):
        best = maximum(best, cute.arch.shuffle_sync_bfly(best, distance))
    return best


def finite_reference(best: Any) -> Any:
    """A maximum, 0 where it is of nothing: what exponents are relative to."""
    return Float32(cutlass.select_(best == -Float32.inf, Float32(0.0), best))


def largest_of_warp(x: Any) -> Any:
    """The warp's largest; NaN where one has it."""
    # Of bits that order like integers.
    bits = x.bitcast(Int32)
    bits = cute.arch.warp_redux_sync(bits ^ (bits >> 31 & 0x7FFFFFFF), "max")
    return (bits ^ (bits >> 31 & 0x7FFFFFFF)).bitcast(Float32)


@cute.jit
def fold_piece(sums, fetched, first: cutlass.Constexpr, part, there: Boolean) -> None:
    """Add a piece's outputs, which begin at ``first``, and its sum, if there is one."""
    if there:
        (out, total, _), (weight, mine) = sums, part
        total[0] = total[0] + mine
        for k in cutlass.range_constexpr(cute.size(out)):
            out[k] = fma(weight, fetched[first + k], out[k])
