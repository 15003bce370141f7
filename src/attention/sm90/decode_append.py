"""New rows of an INT4 cache: quantised and stored by the scribe, used by the warps that multiply. Imports the DSL.

The new rows of a request lie in a 16-bit buffer and their slots hold what they held before. While the tiles of a piece
are on their way, the scribe rotates and quantises keys and values of the new tokens that are in it; it stores nibbles
and scales in the cache, and in shared memory (``prepare``). Of the warps that come to the sixteen tokens, the one that
has the first columns puts them in place among the others, which all that share the tokens then multiply (``run``).
"""

from __future__ import annotations

from typing import Any

import cutlass
from cutlass import Boolean, Float32, Int32, Int64, cute

from epicute.attention.decode_arguments import at
from epicute.attention.decode_schedule import NEW_ROW_BYTES, DecodeSchedule
from epicute.attention.decode_spec import DecodeSpec
from epicute.attention.sm90.decode_ptx import rotate_lanes, shared_load, shared_store
from epicute.attention.sm90.scheduler import load_int
from epicute.epilogues.dsl import opaque
from epicute.kv.append_row import pack_nibbles, unpack_halves
from epicute.kv.int4 import INT4_MAX
from epicute.layouts import split
from epicute.layouts.kv_int4 import ZERO_CODE, Int4Record
from epicute.quant.dsl import Peak, asm, divide, magnitude, multiply, reciprocal
from epicute.quant.fp8 import SCALE_MIN

__all__ = ["Appender"]


HALF_ROW = 64
"""Bytes of shared memory of a new row's nibbles of keys, or of values."""

CODE = """{ .reg .f32 a; min.f32 a, $1, 0f40E00000; max.f32 a, a, 0fC0E00000;
cvt.rni.s32.f32 $0, a; }"""
"""The nearest integer from -7 to 7."""

APPENDED = 2
"""First of the named barriers of warps that share tokens."""


class Appender:
    """Device code of the new rows. ``steps.new_rows`` says where quantised ones are."""

    def __init__(self, spec: DecodeSpec, schedule: DecodeSchedule, lane: Any) -> None:
        self.spec, self.schedule, self.lane = spec, schedule, lane
        self.unit, self.groups = schedule.unit(spec), schedule.groups(spec)
        self.record = Int4Record(self.unit, spec.head_dim)
        self.count = spec.head_dim // 32

    @cute.jit
    def run(self, steps, stage, slab, token) -> None:
        """Put the new ones of sixteen tokens from ``token`` on in place."""
        rows = self.spec.rows
        if token + 16 > steps.length - rows:
            ready = self._there(steps)
            for row in cutlass.range(rows, unroll=1):
                mine = steps.length - (rows - row)
                there = (mine >= token) & (mine < token + 16) & (mine >= 0)
                if there & (steps.column == 0):
                    Appender._put(self, (stage, slab, mine - token), ready + row * NEW_ROW_BYTES)
            # The stage is filled again by the asynchronous proxy; and other lanes read these bytes now.
            cute.arch.fence_view_async_shared()
            if cutlass.const_expr(self.groups == 1):
                cute.arch.sync_warp()
            else:
                cute.arch.barrier(
                    barrier_id=APPENDED + steps.sharer, number_of_threads=32 * self.groups
                )

    def _there(self, steps: Any) -> Any:
        """Where the piece's rows are, once the scribe has quantised them."""
        place, barrier, phase = steps.new_rows()
        cute.arch.mbarrier_wait(barrier, phase)
        return place

    def _place(self, steps: Any) -> Any:
        """Where the piece's rows go."""
        return steps.new_rows()[0]

    @cute.jit
    def prepare(self, steps) -> None:
        """Quantise the new rows of a piece."""
        rows, tile = self.spec.rows, self.schedule.tile
        for row in cutlass.range(rows, unroll=1):
            mine = steps.length - (rows - row)
            place = mine - steps.item.first * tile
            if (mine >= 0) & (place >= 0) & (place < steps.item.count * tile):
                Appender._row(self, steps, row, mine)
        cute.arch.sync_warp()

    @cute.jit
    def _put(self, place, source) -> None:
        """Copy a quantised row to its place in a stage."""
        lane = opaque(self.lane)
        stage, slab, within = place
        per_unit = self.unit // 16
        number, slab = split(slab, per_unit)
        base = stage + number * self.record.bytes
        local = slab * 16 + within
        words = self.record.row_bytes // 4
        side, word = split(lane, words)
        to = self.record.key_row(local) + side * self.record.value_row(0) + word * 4
        found = shared_load(Int32, source + side % 2 * HALF_ROW + word * 4)[0]
        _store_shared(base + to, found, Boolean(side < 2))
        scale = shared_load(Int32, source + (2 * HALF_ROW + lane % 2 * 4))[0]
        further = self.record.value_scale(0) - self.record.key_scale(0)
        _store_shared(
            base + self.record.key_scale(local) + lane % 2 * further, scale, Boolean(lane < 2)
        )

    @cute.jit
    def _row(self, steps, row, token) -> None:
        spec, arguments, item = self.spec, steps.arguments, steps.item
        place = self._place(steps)
        # Anew for each row, or registers hold places all the way.
        lane = opaque(self.lane)
        # All is loaded before any of it is looked at.
        words = [self._loaded(name, steps, row, lane) for name in ("new_k", "new_v")]
        page, slot, tokens = item.request, token, arguments[at("tokens")]
        if cutlass.const_expr(spec.page is not None):
            stretch, slot = split(token, spec.page or 1)
            offset = Int64(item.request) * arguments[at("table_row")] + stretch
            page = load_int(arguments[at("page_table")], offset)
        start = (
            arguments[at("k")]
            + Int64(page) * arguments[at("k_page")]
            + Int64(steps.kv_head) * arguments[at("k_head")]
        )
        stores = (steps.block == 0) & (page >= 0)
        size = tokens * self.record.row_bytes
        found = self._quantised(self._rotated(words, lane), lane)
        for side in cutlass.range_constexpr(2):
            nibbles, scale = found[side]
            word = pack_nibbles(nibbles, lane)
            first = split(lane, 8 // self.count)[1] == 0
            part = split(lane * self.count, 8)[0] * 4
            here = place + row * NEW_ROW_BYTES
            _store_shared(here + (HALF_ROW * side + part), word, Boolean(first))
            _store_shared(
                here + (2 * HALF_ROW + 4 * side), scale.bitcast(Int32), Boolean(lane == 0)
            )
            _store_global(
                start + size * side + Int64(slot) * self.record.row_bytes + Int64(part),
                word,
                Boolean(first & stores),
            )
            _store_global(
                start + size * 2 + (tokens * side + Int64(slot)) * 4,
                scale.bitcast(Int32),
                Boolean((lane == 0) & stores),
            )

    def _loaded(self, name: str, steps: Any, row: Any, lane: Any) -> list[Any]:
        """Words of this lane's channels of a new row."""
        arguments, item = steps.arguments, steps.item
        offset = (
            Int64(item.request) * arguments[at(f"{name}_batch")]
            + Int64(steps.kv_head) * arguments[at(f"{name}_head")]
            + Int64(row) * arguments[at(f"{name}_row")]
            + Int64(lane * self.count)
        )
        words = self.count // 2
        pointer = cute.make_ptr(
            Int32,
            arguments[at(name)] + offset * 2,
            cute.AddressSpace.gmem,
            assumed_align=4 * words,
        )
        fragment = cute.make_rmem_tensor(words, Int32)
        cute.autovec_copy(cute.make_tensor(pointer, cute.make_layout(words)), fragment)
        return [fragment[i] for i in range(words)]

    def _quantised(self, rows: list[list[Any]], lane: Any) -> list[tuple[list[Any], Any]]:
        """``kv.append_row.quantize_lanes`` of keys and of values, to the bit.

        Lanes in turn have the one's maximum and the other's, so that the divisions, which are long, come once.
        """
        peaks = [Peak(0.0) for _ in rows]
        for peak, lanes in zip(peaks, rows, strict=True):
            for x in lanes:
                peak.see(magnitude(x, 0.0))
        keys, values = (peak.of_warp().bitcast(Float32) for peak in peaks)
        mine = Float32(cutlass.select_((lane & 1) == 0, keys, values))
        scale = divide(mine, INT4_MAX)
        scale = asm("max.f32 $0, $1, $2;", "=f,f,f", Float32, scale, Float32(SCALE_MIN))
        inverse = reciprocal(scale)
        found = []
        for side, lanes in enumerate(rows):
            factor = cute.arch.shuffle_sync(inverse, side)
            codes = [asm(CODE, "=r,f", Int32, multiply(x, factor)) for x in lanes]
            found.append(
                ([code + ZERO_CODE for code in codes], cute.arch.shuffle_sync(scale, side))
            )
        return found

    def _rotated(self, words: list[list[Any]], lane: Any) -> list[list[Any]]:
        """This lane's channels of a new row of keys, and of values."""
        spec, count = self.spec, self.count
        keys, values = (unpack_halves(some, spec.dtype) for some in words)
        if spec.values_folded:
            return [rotate_lanes(keys, spec.rotation, lane, count), values]
        # Both at once, or one's shuffles wait for the other's.
        both = rotate_lanes(keys + values, spec.rotation, lane, count)
        return [both[:count], both[count:]]


@cute.jit
def _store_shared(address: Int32, word: Int32, condition: Boolean) -> None:
    if condition:
        shared_store(Int32, address, [word])


@cute.jit
def _store_global(address: Int64, word: Int32, condition: Boolean) -> None:
    if condition:
        pointer = cute.make_ptr(Int32, address, cute.AddressSpace.gmem, assumed_align=4)
        cute.make_tensor(pointer, cute.make_layout(1))[0] = word
