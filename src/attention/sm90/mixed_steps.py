"""What a consumer warpgroup does with each tile of keys in mixed precision. Imports the DSL.

direct      |S(j+1) O += P(j)·V(j)|  softmax of S(j+1)  |O · factor
two_level   |S(j+1) T = P(j)·V(j)|  softmax of S(j+1)  |O = O · factor + T
            of 128 channels S, O and T do not fit beside each other: T is half as wide, and the second half is
            issued when the first one is added, before the softmax
in turn     |T|O = O · factor + T|S(j+1)|  softmax; the other warpgroup's products alone fill the gaps
"""

from __future__ import annotations

from typing import Any

import cutlass
from cutlass import Float32, Int32, cute
from cutlass.cute.nvgpu import warpgroup

from epicute.attention import mixed_places as places
from epicute.attention.mixed import MixedSchedule, MixedSpec
from epicute.attention.sm90.mixed_convert import load_floats, this_thread
from epicute.attention.sm90.mixed_softmax import MixedRows, cap_rows
from epicute.attention.sm90.scheduler import Item
from epicute.attention.sm90.softmax import LOG2_E, by_rows, fma, mask
from epicute.attention.sm90.steps import Steps
from epicute.epilogues.dsl import opaque, pack_words
from epicute.layouts.qk4pv8 import token_at

__all__ = ["MixedSteps"]


class MixedSteps(Steps):
    """A consumer thread's fragments and the steps over them; one object for all of its items."""

    spec: Any
    schedule: Any
    rows: Any

    def __init__(
        self,
        spec: MixedSpec,
        schedule: MixedSchedule,
        products: tuple[Any, Any, Any],
        shared: dict[str, Any],
        pipes: dict[str, Any],
        thread: Any,
    ) -> None:
        self.spec, self.schedule, self.pipes = spec, schedule, pipes
        self.shared = shared
        self.tile_m, self.tile_n = schedule.tile_m, schedule.tile_n
        self.group = cute.arch.make_warp_uniform(thread // 128)
        self.thread, self.lane = thread, thread % 32
        self.qk, self.pv, self.outer = products
        place = cute.make_layout(schedule.groups, stride=128)(self.group)
        self.part, self.pv_part = self.qk.get_slice(place), self.pv.get_slice(place)
        self.a_q = self.part.make_fragment_A(self.part.partition_A(shared["q_mma"]))
        self.b_k = self.part.make_fragment_B(self.part.partition_B(shared["k"]))
        self.b_v = self.pv_part.make_fragment_B(self.pv_part.partition_B(shared["v"]))
        self.out = self._sums()
        shape = self.pv_part.partition_shape_A((self.tile_m, self.tile_n))
        self.p = self.pv_part.make_fragment_A(shape)
        self.depth, self.halves = 16 if spec.wide else 32, schedule.halves(spec)
        self.placement = spec.placement if spec.terms else ""
        if self.placement == "mma":
            outer = self.outer.get_slice(place)
            self.a_one = outer.make_fragment_A(outer.partition_A(shared["one"]))
            self.b_delta = outer.make_fragment_B(outer.partition_B(shared["delta"]))
        self.rows = MixedRows(spec.p_scale)

    def _sums(self) -> Any:
        """Accumulators of a product with values."""
        return self.pv_part.make_fragment_C(
            self.pv_part.partition_shape_C((self.tile_m, self.spec.head_dim))
        )

    def begin_mixed(self, item: Item, unit: Any, q_index: Any) -> None:
        """Set out on an item, whose queries are there. ``unit``: of the logits, where rows have no scale."""
        spec = self.spec
        self.item = item
        self.inverse = [Float32(1.0), Float32(1.0)]
        units = [unit, unit]
        if not spec.wide:
            _, row = self.locate()
            found = [self.shared["scales"][row + 8 * r, q_index] for r in range(2)]
            units = [unit * scale for scale in found]
            self.inverse = [
                ((254 - (x.bitcast(Int32) >> 23)) << 23).bitcast(Float32) for x in found
            ]
        self.scales = [spec.scale * x for x in units]
        factor = LOG2_E
        capped = spec.softcap is not None
        self.rows.begin([Float32(factor) if capped else x * factor for x in self.scales])
        self.out.fill(0.0)

    def locate(self) -> tuple[Any, Any]:
        """(lane, first row of the tile), found anew: between their few uses registers are wanted for accumulators."""
        thread = this_thread(self.schedule.threads - 128 * self.schedule.groups)
        return thread % 32, thread // 128 * 64 + thread % 128 // 32 * 16 + thread % 32 // 4

    def relocate(self) -> None:
        """Lane and row for what follows an item's last step."""
        self.lane, row = self.locate()
        self.row = self.item.tile * self.tile_m + row

    # --- steps ---

    @cute.jit
    def first(self, q_state, k_state, v_state, tile) -> None:
        """The last keys: there are no values to multiply yet."""
        self.pipes["k"].consumer_wait(k_state)
        logits = self._logits(q_state.index, k_state.index)
        self._clear_behind(tile, v_state)
        warpgroup.wait_group(0)
        self._compensate(logits, k_state.index)
        self.pipes["k"].consumer_release(k_state)
        self._soften(logits, tile, True)
        self._pack(logits)

    @cute.jit
    def next(self, q_state, k_state, v_state, tile, masked: cutlass.Constexpr) -> None:
        """The logits of a tile, and the product of the one before with its values."""
        if cutlass.const_expr(self.spec.pv == "direct"):
            self._together(q_state, k_state, v_state, tile, masked)
        else:
            # Masks want registers that halves beside the softmax do not leave.
            apart = not self.schedule.overlap or (masked and self.halves > 1)
            if cutlass.const_expr(apart):
                self._in_turn(q_state, k_state, v_state, tile, masked)
            elif cutlass.const_expr(self.halves == 1):
                self._beside(q_state, k_state, v_state, tile, masked)
            else:
                self._by_halves(q_state, k_state, v_state, tile, masked)

    @cute.jit
    def _together(self, q_state, k_state, v_state, tile, masked: cutlass.Constexpr) -> None:
        self.pipes["k"].consumer_wait(k_state)
        self._await_turn()
        logits = self._logits(q_state.index, k_state.index)
        self.pipes["v"].consumer_wait(v_state)
        self._weigh(v_state.index)
        self._end_turn()
        warpgroup.wait_group(1)
        self._compensate(logits, k_state.index)
        self.pipes["k"].consumer_release(k_state)
        self._soften(logits, tile, masked)
        warpgroup.wait_group(0)
        self.pipes["v"].consumer_release(v_state)
        self._pack(logits)
        self.rows.rescale(self.out)

    @cute.jit
    def _in_turn(self, q_state, k_state, v_state, tile, masked: cutlass.Constexpr) -> None:
        self.pipes["v"].consumer_wait(v_state)
        self._await_turn()
        self._promote(v_state)
        self.pipes["k"].consumer_wait(k_state)
        logits = self._logits(q_state.index, k_state.index)
        self._end_turn()
        warpgroup.wait_group(0)
        self._compensate(logits, k_state.index)
        self.pipes["k"].consumer_release(k_state)
        self._soften(logits, tile, masked)
        self._pack(logits)

    @cute.jit
    def _beside(self, q_state, k_state, v_state, tile, masked: cutlass.Constexpr) -> None:
        self.pipes["k"].consumer_wait(k_state)
        self._await_turn()
        logits = self._logits(q_state.index, k_state.index)
        self.pipes["v"].consumer_wait(v_state)
        part = self._part(v_state.index, 0)
        self._end_turn()
        warpgroup.wait_group(1)
        self._compensate(logits, k_state.index)
        self.pipes["k"].consumer_release(k_state)
        factors = [self.rows.factor[0], self.rows.factor[1]]
        self._soften(logits, tile, masked)
        warpgroup.wait_group(0)
        self.pipes["v"].consumer_release(v_state)
        promote(self.out, part, factors)
        self._pack(logits)

    @cute.jit
    def _by_halves(self, q_state, k_state, v_state, tile, masked: cutlass.Constexpr) -> None:
        self.pipes["k"].consumer_wait(k_state)
        self._await_turn()
        logits = self._logits(q_state.index, k_state.index)
        self.pipes["v"].consumer_wait(v_state)
        part = self._part(v_state.index, 0)
        self._end_turn()
        warpgroup.wait_group(0)
        self._compensate(logits, k_state.index)
        self.pipes["k"].consumer_release(k_state)
        factors = [self.rows.factor[0], self.rows.factor[1]]
        promote(self.out, part, factors)
        rest = self._part(v_state.index, 1)
        self._soften(logits, tile, masked)
        warpgroup.wait_group(0)
        self.pipes["v"].consumer_release(v_state)
        promote(self.out, rest, factors, cute.size(rest))
        self._pack(logits)

    @cute.jit
    def end(self, q_state, v_state) -> None:
        """The product of the first keys, which were last."""
        self.pipes["q"].consumer_release(q_state)
        self.pipes["v"].consumer_wait(v_state)
        if cutlass.const_expr(self.spec.pv == "direct"):
            self._weigh(v_state.index)
            warpgroup.wait_group(0)
            self.pipes["v"].consumer_release(v_state)
        else:
            self._promote(v_state)

    # --- parts of steps ---

    def _promote(self, v_state: Any) -> None:
        """T = P·V, waited for, and O = O · factor + T."""
        part = self._sums()
        self._product(part, v_state.index, False)
        warpgroup.wait_group(0)
        self.pipes["v"].consumer_release(v_state)
        promote(self.out, part, self.rows.factor)

    def _weigh(self, index: Any) -> None:
        """Issue O += P·V."""
        self._product(self.out, index, True)

    def _part(self, index: Any, half: int) -> Any:
        """Issue a part of T = P·V."""
        columns = self.spec.head_dim // self.halves
        part = self.pv_part.make_fragment_C(self.pv_part.partition_shape_C((self.tile_m, columns)))
        self._product(part, index, False, half)
        return part

    def _product(self, sums: Any, index: Any, accumulate: bool, half: int | None = None) -> None:
        """Issue a product of P with values, of all channels or of the ``half``."""
        atom = cute.make_mma_atom(self.pv.op)
        atom.set(warpgroup.Field.ACCUMULATE, accumulate)
        warpgroup.fence()
        for k in range(self.tile_n // 32):
            a, b = self.p[None, None, k], self.b_v[None, None, k, index]
            if half is not None:
                b = self.b_v[None, half, k, index]
                b = cute.make_tensor(b.iterator, cute.append(b.layout, cute.make_layout(1)))
            cute.gemm(atom, sums, a, b, sums)
            atom.set(warpgroup.Field.ACCUMULATE, True)
        warpgroup.commit_group()

    def _logits(self, q_index: Any, k_index: Any) -> Any:
        """Issue S = Q·Kᵀ, from ΔS on where accumulators begin with it."""
        shape = self.part.partition_shape_C((self.tile_m, self.tile_n))
        logits = self.part.make_fragment_C(shape)
        atom = cute.make_mma_atom(self.qk.op)
        atom.set(warpgroup.Field.ACCUMULATE, self.placement in ("acc_init", "mma"))
        if self.placement == "acc_init":
            self._delta(logits, k_index, False)
        warpgroup.fence()
        if self.placement == "mma":
            outer = cute.make_mma_atom(self.outer.op)
            outer.set(warpgroup.Field.ACCUMULATE, False)
            a, b = self.a_one[None, None, 0, q_index], self.b_delta[None, None, 0, k_index]
            cute.gemm(outer, logits, a, b, logits)
        for k in range(self.spec.head_dim // self.depth):
            a, b = self.a_q[None, None, k, q_index], self.b_k[None, None, k, k_index]
            cute.gemm(atom, logits, a, b, logits)
            atom.set(warpgroup.Field.ACCUMULATE, True)
        warpgroup.commit_group()
        return logits

    def _compensate(self, logits: Any, k_index: Any) -> None:
        """Add ΔS to finished logits, where that is its place."""
        if self.placement == "elementwise":
            self._delta(logits, k_index, True)

    def _delta(self, logits: Any, k_index: Any, add: bool) -> None:
        """Begin or finish accumulators with ΔS, in their unit."""
        rows = by_rows(logits)
        base = Int32(self.shared["delta"].iterator.toint()) + k_index * (4 * self.tile_n)
        for j in range(self.tile_n // 16):
            found = load_floats(base + (places.delta_index(16 * j) * 4 + self.lane % 4 * 16))
            for i, value in enumerate(found):
                for r in range(2):
                    c = 4 * j + i
                    if self.spec.wide:
                        rows[r, c] = rows[r, c] + value if add else value
                    elif add:
                        rows[r, c] = fma(value, self.inverse[r], rows[r, c])
                    else:
                        rows[r, c] = value * self.inverse[r]

    def _soften(self, logits: Any, tile: Any, masked: bool) -> None:
        """Cap, mask and probabilities of a step."""
        spec, item = self.spec, self.item
        if spec.softcap is not None:
            cap_rows(logits, self.scales, spec.softcap)
        if masked:
            lane, row = self.locate()
            row = item.tile * self.tile_m + row
            offset = item.kv_length - item.q_length
            first = tile * self.tile_n + lane % 4 * 2
            seen = [row + 8 * r + offset for r in range(2)]
            # The rows' equal bounds are made to look different: predicates that are shared, row by row, are kept.
            right = [item.kv_length, opaque(item.kv_length)]
            left = None
            if spec.causal:
                right = [cutlass.min(item.kv_length, s + 1) for s in seen]
            if spec.window is not None:
                left = [s - (spec.window - 1) for s in seen]
            mask(logits, first, right, left)
        self.rows.take(logits)

    def _pack(self, logits: Any) -> None:
        """Probabilities to the A fragment, register by register: values' tokens are permuted for that."""
        words = cute.recast_tensor(self.p, Int32)
        for i in range(cute.size(words)):
            lanes = [logits[lane] for lane in places.probability_lane(i)]
            words[i] = pack_words(lanes, "e4m3")[0]

    @cute.jit
    def _clear(self, kept, index) -> None:
        """Zero values of tokens from ``kept`` on: whole units, and of one unit the tokens behind."""
        d = self.spec.head_dim
        width = places.value_width(self.spec.page if self.spec.recorded else None)
        base = Int32(self.shared["v"].iterator.toint()) + index * (self.tile_n * d)
        units = self.tile_n // 16
        count = (units - kept // 16) * d
        for i in cutlass.range(self.thread, count, 128 * self.schedule.groups, unroll=1):
            unit, channel = kept // 16 + i // d, i % d
            clear_tokens(base + places.tile_byte(channel, unit, width, d), kept - unit * 16)


def promote(out: Any, part: Any, factors: Any, first: int = 0) -> None:
    """O = O · factor + T, of the accumulators from ``first`` on."""
    for i in range(cute.size(part)):
        out[first + i] = fma(out[first + i], factors[i // 2 % 2], part[i])


def clear_tokens(address: Any, kept: Any) -> None:
    """Of sixteen permuted tokens of a channel, zero all from ``kept`` on."""
    pointer = cute.make_ptr(Int32, address, cute.AddressSpace.smem, assumed_align=16)
    unit = cute.make_tensor(pointer, cute.make_layout(4))
    words = cute.make_rmem_tensor(4, Int32)
    cute.autovec_copy(unit, words)
    for w in range(4):
        cleared = Int32(0)
        for byte in range(4):
            whole = Int32(255 << 8 * byte if byte < 3 else -(1 << 24))
            seen = token_at(4 * w + byte) < kept
            cleared = cleared | Int32(cutlass.select_(seen, whole, Int32(0)))
        words[w] = words[w] & cleared
    cute.autovec_copy(words, unit)
