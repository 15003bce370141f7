"""Online softmax on a warpgroup's accumulators, and the masks. Imports the DSL.

A thread holds two rows, g and g + 8 of its warp's sixteen, and of each the columns 8b + 2t and 8b + 2t + 1; the four
threads of a quad share a row.
"""

from __future__ import annotations

from math import log2
from typing import Any

import cutlass
from cutlass import Float32, Int32, cute

from epicute.epilogues.dsl import pure_asm

__all__ = ["LOG2_E", "Rows", "by_rows", "exp2", "fma"]

LOG2_E = log2(2.718281828459045)

LIMIT = 8.0
"""A row's reference maximum follows its maximum only when that is 2^8 above: exponentials up to 256 are as exact as
those up to 1, and the output is rescaled seldom."""


def exp2(x: Any) -> Any:
    """2^x by the hardware's approximation."""
    return pure_asm("ex2.approx.ftz.f32 $0, $1;", "=f,f", Float32, Float32(x))


def fma(a: Any, b: Any, c: Any) -> Any:
    """a · b + c, rounded once."""
    arguments = (Float32(a), Float32(b), Float32(c))
    return pure_asm("fma.rn.f32 $0, $1, $2, $3;", "=f,f,f,f", Float32, *arguments)


def maximum(a: Any, b: Any) -> Any:
    """The larger one; the other where one is NaN."""
    return pure_asm("max.f32 $0, $1, $2;", "=f,f,f", Float32, Float32(a), Float32(b))


def by_rows(acc: cute.Tensor) -> Any:
    """Accumulators as (row, column) of the thread."""
    columns = cute.size(acc) // 2
    layout = cute.make_layout((2, (2, columns // 2)), stride=(2, (1, 4)))
    return cute.make_tensor(acc.iterator, layout)


class Rows:
    """The running maximum and sum of a thread's two rows."""

    def __init__(self) -> None:
        self.maximum = cute.make_rmem_tensor(2, Float32)
        self.total = cute.make_rmem_tensor(2, Float32)
        self.factor = cute.make_rmem_tensor(2, Float32)

    def begin(self, scale: Any) -> None:
        """Nothing seen yet. ``scale``: of a logit to powers of two."""
        self.scale = scale
        self.maximum.fill(-Float32.inf)
        self.total.fill(0.0)

    def take(self, acc: cute.Tensor) -> None:
        """Turn logits into exponentials, in place; ``factor`` is what the output before is multiplied by.

        A row decides for itself alone, so that its bits do not depend on its neighbours.
        """
        rows = by_rows(acc)
        columns = cute.size(acc) // 2
        for r in range(2):
            best = rows[r, 0]
            for c in range(1, columns):
                best = maximum(best, rows[r, c])
            for distance in (1, 2):
                best = maximum(best, cute.arch.shuffle_sync_bfly(best, distance))
            old = self.maximum[r]
            best = maximum(best, old)
            # -inf - -inf is NaN, and no comparison holds for it.
            follows = (best - old) * self.scale > LIMIT
            new = Float32(cutlass.select_(follows, best, old))
            zero = Float32(cutlass.select_(new == -Float32.inf, Float32(0.0), new))
            offset = zero * self.scale
            # One exactly where nothing moves: the product's own rounding would make it a little more or less.
            moved = exp2(fma(old, self.scale, -offset))
            self.factor[r] = Float32(cutlass.select_(follows, moved, Float32(1.0)))
            self.maximum[r] = new
            total = self.total[r] * self.factor[r]
            for c in range(columns):
                p = exp2(fma(rows[r, c], self.scale, -offset))
                rows[r, c] = p
                total = total + p
            self.total[r] = total

    @cute.jit
    def rescale(self, out) -> None:
        """Multiply the output before by ``factor``, where any row of the warp has one other than 1."""
        rows = by_rows(out)
        if cute.arch.vote_any_sync((self.factor[0] != 1.0) | (self.factor[1] != 1.0)):
            for r in cutlass.range_constexpr(2):
                for c in cutlass.range_constexpr(cute.size(out) // 2):
                    rows[r, c] = rows[r, c] * self.factor[r]


def mask(acc: cute.Tensor, first: Any, right: list[Any], left: list[Any] | None) -> None:
    """Take keys out of a step's logits.

    ``first``: the thread's first column, as key. ``right``, ``left``: for each row the first key that it does not see
    any more, and the first that it sees.
    """
    rows = by_rows(acc)
    for r in range(2):
        until = right[r] - first
        since = None if left is None else left[r] - first
        for c in range(cute.size(acc) // 2):
            column = Int32(8 * (c // 2) + c % 2)
            seen = column < until
            if since is not None:
                seen = seen & (column >= since)
            rows[r, c] = Float32(cutlass.select_(seen, rows[r, c], -Float32.inf))


def cap(acc: cute.Tensor, scale: Any, softcap: float) -> None:
    """Logits to softcap · tanh(scale · logit / softcap), by exponentials, good to 1e-6 of the cap."""
    slope = scale * (2.0 * LOG2_E / softcap)
    for i in range(cute.size(acc)):
        # 1 - 2 / (1 + e^2x), which neither overflows nor loses a large argument's sign.
        power = exp2(acc[i] * slope)
        inverse = pure_asm("rcp.approx.ftz.f32 $0, $1;", "=f,f", Float32, power + 1.0)
        acc[i] = fma(inverse, -2.0 * softcap, softcap)
