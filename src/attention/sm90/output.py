"""What becomes of a work item's sums: output, LSE, and the next FP8 scale's data. Imports the DSL."""

from __future__ import annotations

from typing import Any

import cutlass
import torch
from cutlass import Boolean, Float32, Int32, Int64, cute

from epicute.attention.arguments import at
from epicute.attention.sm90.softmax import LOG2_E, Rows, by_rows, exp2, fma
from epicute.attention.sm90.store import store_float_if, store_rows
from epicute.attention.spec import AttentionSpec
from epicute.epilogues.dsl import pure_asm
from epicute.gemm.driver import add_count, raise_maximum
from epicute.gemm.memory import load_global

__all__ = ["Finish"]

E4M3_MAX = 448.0
NOTHING = -1.0
"""What a maximum over no finite value is."""


class Finish:
    """Device code behind the last product of a work item."""

    def __init__(self, spec: AttentionSpec) -> None:
        self.spec = spec

    def open(self, arguments: Any) -> dict[str, Any]:
        """What a thread keeps over all of its items."""
        tally: dict[str, Any] = {}
        if self.spec.out_is_fp8:
            scale = load_global(torch.float32, arguments[at("out_scale")])[0]
            tally["inverse"] = pure_asm("rcp.rn.f32 $0, $1;", "=f,f", Float32, scale)
            tally["amax"] = cute.make_rmem_tensor(1, Float32)
            tally["amax"][0] = Float32(NOTHING)
            tally["counts"] = cute.make_rmem_tensor(2, Int32)
            tally["counts"].fill(0)
        return tally

    def close(self, tally: dict[str, Any], arguments: Any, lane: Any) -> None:
        """Add the warp's share to the maximum and the counters in memory."""
        if not self.spec.out_is_fp8:
            return
        bits = cute.arch.warp_redux_sync(tally["amax"][0].bitcast(Int32), "max")
        raise_maximum(arguments[at("amax")], bits, (lane == 0) & (bits >= 0))
        for i, name in enumerate(("saturated", "nans")):
            total = cute.arch.warp_redux_sync(tally["counts"][i], "add")
            add_count(arguments[at(name)], Int64(total), (lane == 0) & (total > 0))

    @cute.jit
    def run(self, steps, item, head, arguments, tally) -> None:
        """Normalise and store a thread's two rows."""
        spec, out, lane = self.spec, steps.out, steps.lane
        columns = by_rows(out)
        size = spec.out_dtype.itemsize
        for r in cutlass.range_constexpr(2):
            factor, lse = self._normaliser(steps.rows, r, head, arguments)
            if cutlass.const_expr(spec.kv_dtype != spec.dtype):
                scale = arguments[at("v_scale")] + Int64(head // spec.group) * 4
                factor = factor * load_global(torch.float32, scale)[0]
            m = steps.row + 8 * r
            inside = Boolean(m < item.q_length)
            if cutlass.const_expr(spec.lse):
                batch = Int32(0) if cutlass.const_expr(spec.packed) else item.request
                address = (
                    Int64(head) * arguments[at("lse_head")]
                    + Int64(batch) * arguments[at("lse_batch")]
                    + Int64(item.q_row + m)
                ) * 4 + arguments[at("lse")]
                store_float_if(address, lse, Boolean(inside & (lane % 4 == 0)))
            values = [columns[r, c] * factor for c in range(cute.size(out) // 2)]
            if cutlass.const_expr(spec.out_is_fp8):
                values = self._quantise(values, tally, inside)
            offset = (
                Int64(item.q_row + m) * arguments[at("out_row")]
                + Int64(head) * arguments[at("out_head")]
            )
            if cutlass.const_expr(not spec.packed):
                offset = offset + Int64(item.request) * arguments[at("out_batch")]
            store_rows(spec.out_dtype, values, arguments[at("out")] + offset * size, lane, inside)

    def _normaliser(self, rows: Rows, r: int, head: Any, arguments: Any) -> tuple[Any, Any]:
        """(factor of the output, natural logarithm of the sum) of a row; 0 and -inf where it sees no key."""
        total = rows.total[r]
        for distance in (1, 2):
            total = total + cute.arch.shuffle_sync_bfly(total, distance)
        best = rows.maximum[r]
        nothing = best == -Float32.inf
        best = Float32(cutlass.select_(nothing, Float32(0.0), best)) * rows.scale
        correction = Float32(1.0)
        if self.spec.sinks:
            address = arguments[at("sinks")] + Int64(head) * 4
            sink = load_global(torch.float32, address)[0] * LOG2_E
            # The larger of the two is the reference, or the exponential of the other overflows.
            reference = Float32(cutlass.select_(nothing | (sink > best), sink, best))
            correction = Float32(cutlass.select_(nothing, Float32(0.0), exp2(best - reference)))
            # A sink of -inf is none; beside nothing it would be -inf - -inf.
            weight = Float32(
                cutlass.select_(sink == -Float32.inf, Float32(0.0), exp2(sink - reference))
            )
            total = fma(total, correction, weight)
            best = reference
        empty = total == Float32(0.0)
        safe = Float32(cutlass.select_(empty, Float32(1.0), total))
        inverse = pure_asm("rcp.approx.ftz.f32 $0, $1;", "=f,f", Float32, safe) * correction
        logarithm = pure_asm("lg2.approx.ftz.f32 $0, $1;", "=f,f", Float32, safe)
        lse = (best + logarithm) * (1.0 / LOG2_E)
        # Where all logits are NaN, no maximum was seen either, but the sum is NaN, and so is this.
        unseen = empty | (nothing & (total == total))
        return inverse, Float32(cutlass.select_(unseen, -Float32.inf, lse))

    def _quantise(self, values: list[Any], tally: dict[str, Any], inside: Any) -> list[Any]:
        """Values under the delayed scale, while the next one's data is collected (FuTransformer 3.2.3)."""
        scaled = []
        amax, counts = tally["amax"], tally["counts"]
        saturated, nans = Int32(0), Int32(0)
        best = Float32(NOTHING)
        for x in values:
            size = pure_asm("abs.f32 $0, $1;", "=f,f", Float32, x)
            finite = size < Float32.inf
            best = pure_asm(
                "max.f32 $0, $1, $2;",
                "=f,f,f",
                Float32,
                best,
                Float32(cutlass.select_(finite, size, Float32(NOTHING))),
            )
            y = x * tally["inverse"]
            over = pure_asm("abs.f32 $0, $1;", "=f,f", Float32, y) > Float32(E4M3_MAX)
            saturated = saturated + Int32(cutlass.select_(over, Int32(1), Int32(0)))
            nans = nans + Int32(cutlass.select_(x != x, Int32(1), Int32(0)))
            scaled.append(y)
        counted = Int32(cutlass.select_(inside, Int32(1), Int32(0)))
        counts[0] = counts[0] + saturated * counted
        counts[1] = counts[1] + nans * counted
        amax[0] = Float32(cutlass.select_(inside & (best > amax[0]), best, amax[0]))
        return scaled
