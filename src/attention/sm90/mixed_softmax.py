"""Online softmax for E4M3 probabilities, and what becomes of a row's sums. Imports the DSL.

Probabilities fill the range of E4M3: with c = log2 P - m·λ, they are 2^(S·λ + c), at most P. So a row's reference is
its maximum, always: one that lags behind would saturate. Rescaling is left out where it is by 1, which is exact.
"""

from __future__ import annotations

from math import log2
from typing import Any

import cutlass
import torch
from cutlass import Float32, Int64, cute

from epicute.attention.arguments import at
from epicute.attention.sm90.output import Finish
from epicute.attention.sm90.softmax import LOG2_E, Rows, by_rows, exp2, fma, maximum
from epicute.epilogues.dsl import pure_asm
from epicute.gemm.memory import load_global

__all__ = ["MixedFinish", "MixedRows", "cap_rows"]


def multiply(a: Any, b: Any) -> Any:
    """a · b, rounded, and never part of another operation: a maximum that stays gives the same bits again."""
    return pure_asm("mul.rn.f32 $0, $1, $2;", "=f,f,f", Float32, Float32(a), Float32(b))


def subtract(a: Any, b: Any) -> Any:
    """a - b, rounded."""
    return pure_asm("sub.rn.f32 $0, $1, $2;", "=f,f,f", Float32, Float32(a), Float32(b))


class MixedRows(Rows):
    """The running maximum and sum of a thread's two rows; sums are of P times the exponentials."""

    def __init__(self, p_scale: int) -> None:
        super().__init__()
        self.lift = Float32(log2(p_scale))

    def begin(self, scale: Any) -> None:
        """Nothing seen yet. ``scale``: of each row's logits to powers of two."""
        super().begin(scale)
        self.factor.fill(1.0)

    def take(self, acc: cute.Tensor) -> None:
        """Turn logits into probabilities, in place; ``factor`` is what the output before is multiplied by."""
        rows = by_rows(acc)
        columns = cute.size(acc) // 2
        for r in range(2):
            best = rows[r, 0]
            for c in range(1, columns):
                best = maximum(best, rows[r, c])
            for distance in (1, 2):
                best = maximum(best, cute.arch.shuffle_sync_bfly(best, distance))
            old, scale = self.maximum[r], self.scale[r]
            best = maximum(best, old)
            # Behind no key at all the offset before is +inf, and what it weighs is nothing.
            before = subtract(self.lift, multiply(old, scale))
            zero = Float32(cutlass.select_(best == -Float32.inf, Float32(0.0), best))
            offset = subtract(self.lift, multiply(zero, scale))
            self.factor[r] = exp2(subtract(offset, before))
            self.maximum[r] = best
            total = self.total[r] * self.factor[r]
            for c in range(columns):
                p = exp2(fma(rows[r, c], scale, offset))
                rows[r, c] = p
                total = total + p
            self.total[r] = total


def cap_rows(acc: cute.Tensor, scales: list[Any], softcap: float) -> None:
    """As ``softmax.cap``, with a scale for each row."""
    rows = by_rows(acc)
    for r in range(2):
        slope = scales[r] * (2.0 * LOG2_E / softcap)
        for c in range(cute.size(acc) // 2):
            power = exp2(rows[r, c] * slope)
            inverse = pure_asm("rcp.approx.ftz.f32 $0, $1;", "=f,f", Float32, power + 1.0)
            rows[r, c] = fma(inverse, -2.0 * softcap, softcap)


class MixedFinish(Finish):
    """Device code behind the last product of a work item: the scale of probabilities cancels."""

    spec: Any

    def _normaliser(self, rows: Any, r: int, head: Any, arguments: Any) -> tuple[Any, Any]:
        """(factor of the output, natural logarithm of the sum) of a row; 0 and -inf where it sees no key."""
        p_scale = float(self.spec.p_scale)
        total = rows.total[r]
        for distance in (1, 2):
            total = total + cute.arch.shuffle_sync_bfly(total, distance)
        best = rows.maximum[r]
        nothing = best == -Float32.inf
        best = multiply(cutlass.select_(nothing, Float32(0.0), best), rows.scale[r])
        correction = Float32(1.0)
        if self.spec.sinks:
            address = arguments[at("sinks")] + Int64(head) * 4
            sink = load_global(torch.float32, address)[0] * LOG2_E
            # The larger of the two is the reference, or the exponential of the other overflows.
            reference = Float32(cutlass.select_(nothing | (sink > best), sink, best))
            correction = Float32(cutlass.select_(nothing, Float32(0.0), exp2(best - reference)))
            total = fma(total, correction, exp2(sink - reference) * p_scale)
            best = reference
        empty = total == Float32(0.0)
        safe = Float32(cutlass.select_(empty, Float32(1.0), total))
        inverse = pure_asm("rcp.approx.ftz.f32 $0, $1;", "=f,f", Float32, safe) * correction
        logarithm = pure_asm("lg2.approx.ftz.f32 $0, $1;", "=f,f", Float32, safe)
        lse = (best + (logarithm - log2(p_scale))) * (1.0 / LOG2_E)
        return inverse, Float32(cutlass.select_(empty | nothing, -Float32.inf, lse))
