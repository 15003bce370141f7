"""The end of a piece: warps meet, the CTA leaves its partial result, the last of a head merges all. Imports the DSL.

    warps       maxima, sums and outputs to shared memory, some channels at a time; outputs, each rescaled to the
                common maximum, are added in order of the warps
    CTA         maximum, sum and outputs of each column to its slot in the workspace
    counter     each CTA adds one; who finds that all others have been, merges, and sets it back to zero
    merging     partial results in order of their keys, whoever merges them

The last two are the scribe's while the others go on with the next piece (``alone``), and of a CTA's last piece
everybody's, a warp for each column (``run``).

No float is added atomically, and bits do not depend on who comes last.
"""

from __future__ import annotations

from typing import Any

import cutlass
from cutlass import Boolean, Float32, Int32, Int64, cute

from epicute.attention.decode_arguments import at
from epicute.attention.decode_fragments import local_channel, natural_channel
from epicute.attention.decode_schedule import DecodeSchedule
from epicute.attention.decode_spec import DecodeSpec
from epicute.attention.decode_work import slot_of
from epicute.attention.sm90.decode_ptx import (
    copy_if,
    floats_at,
    load_float,
    rotate_lanes,
    shared_load,
    shared_store,
    store_runs_if,
    store_words,
)
from epicute.attention.sm90.decode_references import (
    finite_reference,
    fold_piece,
    largest_of_warp,
)
from epicute.attention.sm90.decode_steps import MERGING, DecodeSteps
from epicute.attention.sm90.softmax import LOG2_E, exp2, fma, maximum
from epicute.attention.sm90.store import store_float_if
from epicute.epilogues.dsl import opaque, pack_words, pure_asm
from epicute.gemm.memory import PACKED
from epicute.layouts import split
from epicute.quant.dsl import (
    Peak,
    Tally,
    add_count,
    is_nan,
    is_saturated,
    magnitude,
    raise_maximum,
    reciprocal,
)

__all__ = ["Merge"]

LANES = 32

AHEAD = 8
"""Of a lane's vectors of partial results, how many are on their way; a power of two."""

NOTHING = -1.0
"""What a maximum over no finite value is."""


class Merge:
    """Device code behind a piece's last tile; one object for all pieces.

    ``shared``: addresses of ``merge`` (rows of channels), ``stats`` (two floats for each of them) and ``flag``.
    """

    def __init__(self, spec: DecodeSpec, schedule: DecodeSchedule, shared: dict[str, Any]) -> None:
        self.spec, self.schedule, self.shared = spec, schedule, shared
        self.tiles = schedule.merge_tiles(spec)
        self.columns, self.sharers = schedule.columns(spec), schedule.sharers(spec)
        self.order = schedule.order(spec)
        self.shift = 0 if spec.cache == "bf16" else 12
        self.pitch = 16 * self.tiles + 4
        self.width = 2 if spec.head_dim == 64 else 4
        self.vectors = -(-spec.head_dim // (32 * self.width))

    def open(self, arguments: Any) -> None:
        """What a thread keeps over all of its pieces."""
        if self.spec.out_is_fp8:
            self.inverse = reciprocal(load_float(arguments[at("out_scale")]))
            self.peak, self.saturated, self.nans = Peak(NOTHING), Tally(), Tally()

    def borrow(self, stage: Any) -> None:
        """Meet at ``stage``."""
        self.shared = {**self.shared, "merge": stage}

    def close(self, arguments: Any, lane: Any) -> None:
        """Add the warp's share to the maximum and the counters in memory."""
        if not self.spec.out_is_fp8:
            return
        bits = self.peak.of_warp()
        raise_maximum(arguments[at("amax")], bits, Boolean((lane == 0) & (bits >= 0)))
        for name, tally in (("saturated", self.saturated), ("nans", self.nans)):
            total = tally.of_warp()
            add_count(arguments[at(name)], cutlass.Int64(total), Boolean((lane == 0) & (total > 0)))

    def meet(self, steps: DecodeSteps, slot: Any, arguments: Any) -> None:
        """Leave the partial result of a piece."""
        self._settle()
        self._meet(steps, slot, arguments)

    @cute.jit
    def run(self, item, arguments) -> None:
        """End a piece behind ``meet``, all warps that multiply together."""
        self._settle()
        last = Merge._arrive(self, item, arguments)
        if last != 0:
            for i in cutlass.range(-(-self.columns // self.schedule.warps), unroll=1):
                column = i * self.schedule.warps + self.warp
                if (column < self.columns) & (self._number(item, column) < self.spec.columns):
                    Merge._finish(self, item, arguments, column, 1)

    @cute.jit
    def alone(self, item, arguments) -> None:
        """End a piece whose partial result others have left: one warp."""
        self._settle()
        last = cute.make_rmem_tensor(1, Int32)
        last[0] = Int32(1)
        if item.pieces > 1:
            found = cute.make_rmem_tensor(1, Int32)
            found[0] = Int32(0)
            if self.lane == 0:
                found[0] = Merge._count(self, item, arguments)
            cute.arch.sync_warp()
            last[0] = cute.arch.shuffle_sync(found[0], 0)
        if last[0] != 0:
            # Two at a time, as none of their loads waits for another.
            single = self.schedule.trades(self.spec) or self.columns % 2 > 0
            together = 1 if single else min(2, self.live)
            for i in cutlass.range(-(-self.live // together), unroll=1):
                Merge._finish(self, item, arguments, i * together, together)

    def _number(self, item: Any, column: Any) -> Any:
        """Of a column of the CTA among those of the KV head."""
        block = split(item.head, self.schedule.blocks(self.spec))[1]
        return block * self.schedule.block_columns(self.spec) + column

    def _settle(self) -> None:
        """Say which thread this is: anew for each piece, or registers hold places all the way through its tiles."""
        thread, _, _ = cute.arch.thread_idx()
        self.thread = opaque(thread)
        self.warp, self.lane = split(self.thread, 32)
        group, self.sharer = split(self.warp, self.sharers)
        self.column = group * (8 * self.schedule.column_tiles(self.spec))

    def _barrier(self) -> None:
        cute.arch.barrier(barrier_id=MERGING, number_of_threads=32 * self.schedule.warps)

    def _row(self, sharer: Any, column: Any) -> Any:
        """Of the memory in which warps meet, which has rows for live columns alone."""
        return sharer * self.live + column

    # --- within the CTA ---

    def _meet(self, steps: DecodeSteps, slot: Any, arguments: Any) -> None:
        """Add the warps' outputs, and leave them in the slot."""
        for c in range(2 * steps.columns):
            for distance in (4, 8, 16):
                other = cute.arch.shuffle_sync_bfly(steps.total[c], distance)
                steps.total[c] = steps.total[c] + other
        places = [
            self.column + 8 * (c // 2) + (self.lane & 3) * 2 + c % 2
            for c in range(2 * steps.columns)
        ]
        for c, place in enumerate(places):
            address = self._stats_of(self.sharer, place)
            _store_pair(address, steps.maximum[c], steps.total[c], Boolean(self.lane < 4))
        if self.schedule.borrows(self.spec):
            # Others may still be reading the tile that lies there.
            self._barrier()
        for first in range(0, steps.steps, self.tiles):
            count = min(self.tiles, steps.steps - first)
            self._leave(steps, places, first, count)
            self._barrier()
            self._gather(steps, slot, arguments, first, count, weighs=True)
            self._barrier()

    def _stats_of(self, sharer: Any, column: Any) -> Any:
        """Where a warp leaves maximum and sum of a column."""
        return self.shared["stats"] + (sharer * self.columns + column) * 8

    def _leave(self, steps: DecodeSteps, places: list[Any], first: int, count: int) -> None:
        """This warp's outputs of ``count`` sixteens of channels from the ``first`` on."""
        for c, place in enumerate(places):
            row = self.shared["merge"] + self._row(self.sharer, place) * (4 * self.pitch)
            values = {}
            for tile in range(count):
                at_first = ((c // 2) * steps.tiles + first + tile) * 4 + c % 2
                for half in range(2):
                    local = local_channel(self.order, tile, 8 * half, count)
                    values[local] = steps.out[at_first + 2 * half]
            step = local_channel(self.order, 0, 1, count) - local_channel(self.order, 0, 0, count)
            lane = self.lane >> 2
            if count % 2 == 0 and step % 4 == 0:
                # Four channels of a lane are adjacent, and those of the next lane ``step`` further.
                runs = [[values[n + i] for i in range(4)] for n in sorted(values)[::4]]
                places_of_runs = [lane * step + n for n in sorted(values)[::4]]
            else:
                runs = [[x] for x in values.values()]
                places_of_runs = [
                    local_channel(self.order, tile, lane + 8 * half, count)
                    for tile in range(count)
                    for half in range(2)
                ]
            inside = Boolean(place < self.live)
            store_runs_if([row + local * 4 for local in places_of_runs], runs, inside)

    @property
    def live(self) -> int:
        """Columns of the CTA that anybody asks for."""
        return min(self.columns, self.spec.columns)

    def _gather(
        self,
        steps: DecodeSteps,
        slot: Any,
        arguments: Any,
        first: int,
        count: int,
        weighs: bool = False,
    ) -> None:
        """Sums over the warps of four channels at a time, to the slot.

        ``weighs``: outputs are relative to their warp's maximum; the column's maximum and sum go to the slot too.
        """
        fours, threads = 4 * count, 32 * self.schedule.warps
        for i in range(-(-self.live * fours // threads)):
            number = self.thread + i * threads
            column, local = split(number, fours)
            inside = Boolean(number < self.live * fours)
            place = (slot, column, local * 4)
            Merge._gather_if(self, place, arguments, (first, count, weighs), inside)

    @cute.jit
    def _gather_if(self, place, arguments, tiles: cutlass.Constexpr, inside: Boolean) -> None:
        if inside:
            self._gather_four(place, arguments, *tiles)

    def _gather_four(
        self, place: Any, arguments: Any, first: int, count: int, weighs: bool
    ) -> None:
        """Four channels of a column."""
        slot, column, local = place
        number = Int64(slot * self.columns + column)
        weights: list[Any] = [Float32(1.0)] * self.sharers
        if weighs:
            weights, sums = self._weights(column)
            if first == 0:
                address = arguments[at("stats")] + number * 8
                _store_global(address, sums, Boolean(local == 0))
        total = [Float32(0.0)] * 4
        for w, weight in enumerate(weights):
            row = self.shared["merge"] + self._row(w, column) * (4 * self.pitch)
            part = shared_load(Float32, row + local * 4, 4)
            total = [fma(weight, b, a) for a, b in zip(total, part, strict=True)]
        channel = natural_channel(self.order, local, first, count, self.spec.head_dim)
        address = arguments[at("partials")] + (number * self.spec.head_dim + Int64(channel)) * 4
        _store_global(address, total, Boolean(True))

    def _weights(self, column: Any) -> tuple[list[Any], list[Any]]:
        """(factors of the warps' outputs, [maximum, sum] of all) of a column."""
        found = [shared_load(Float32, self._stats_of(w, column), 2) for w in range(self.sharers)]
        best = found[0][0]
        for other, _ in found[1:]:
            best = maximum(best, other)
        weights = [exp2(other - finite_reference(best)) for other, _ in found]
        total = Float32(0.0)
        for weight, (_, part) in zip(weights, found, strict=True):
            total = fma(weight, part, total)
        return weights, [best, total]

    # --- among the CTAs ---

    @cute.jit
    def _arrive(self, item, arguments) -> Int32:
        """Whether all pieces of the head are there: 1 in all threads of the CTA that is last."""
        last = cute.make_rmem_tensor(1, Int32)
        last[0] = Int32(1)
        if item.pieces > 1:
            # All of the CTA has stored, in the last of the barriers before; what one thread then releases and
            # acquires, it does for all.
            if self.thread == 0:
                shared_store(Int32, self.shared["flag"], [Merge._count(self, item, arguments)])
            self._barrier()
            last[0] = shared_load(Int32, self.shared["flag"])[0]
        return last[0]

    @cute.jit
    def _count(self, item, arguments) -> Int32:
        """One thread adds its CTA to those that have been; whether all have."""
        heads = self.spec.kv_heads * self.schedule.blocks(self.spec)
        place = Int64(item.request) * heads + Int64(item.head)
        counter = cute.make_ptr(
            Int32, arguments[at("counters")] + place * 4, cute.AddressSpace.gmem, assumed_align=4
        )
        before = cute.arch.atomic_add(counter, Int32(1), sem="acq_rel", scope="gpu")
        found = Int32(before == item.pieces - 1)
        if found != 0:
            cute.make_tensor(counter, cute.make_layout(1))[0] = Int32(0)
        return found

    @cute.jit
    def _finish(self, item, arguments, first, count: cutlass.Constexpr) -> None:
        """Merge the partial results of ``count`` columns from ``first`` on, and write what becomes of them.

        Outputs of several pieces come at once, the first ones together with the maxima of up to 32 pieces, of which a
        lane has one. What a piece counts follows from the largest of those and of all before.
        """
        width, ahead = self.width * self.vectors, AHEAD // (count * self.vectors)
        sums = [self._sums() for _ in range(count)]
        pairs = [cute.make_rmem_tensor(2, Float32) for _ in range(count)]
        constants = [self._constants(item, first + i, arguments) for i in range(count)]
        fetched = [cute.make_rmem_tensor(ahead * width, Float32) for _ in range(count)]
        for i in cutlass.range_constexpr(count):
            fetched[i].fill(0.0)
        for start in cutlass.range(0, item.pieces, ahead, unroll=1):
            self._fetch(item, arguments, first, start, fetched)
            if start & (LANES - 1) == 0:
                self._fetch_pairs(item, arguments, first, start + self.lane, pairs)
                for i in cutlass.range_constexpr(count):
                    self._weigh(pairs[i], sums[i])
            for n in cutlass.range_constexpr(ahead):
                for i in cutlass.range_constexpr(count):
                    part = self._share(pairs[i], start + n)
                    there = Boolean(start + n < item.pieces)
                    fold_piece(sums[i], fetched[i], n * width, part, there)
        for i in cutlass.range_constexpr(count):
            if (first + i < self.live) & (self._number(item, first + i) < self.spec.columns):
                Merge._write(self, item, arguments, first + i, sums[i], constants[i])
        # Lanes may come from where some have stored, and some have not.
        cute.arch.sync_warp()

    def _sums(self) -> tuple[Any, Any, Any]:
        """(outputs, total, maximum) of nothing."""
        out = cute.make_rmem_tensor(self.width * self.vectors, Float32)
        total, best = (cute.make_rmem_tensor(1, Float32) for _ in range(2))
        out.fill(0.0)
        total.fill(0.0)
        best.fill(-Float32.inf)
        return out, total, best

    def _fetch(self, item: Any, arguments: Any, first: Any, start: Any, fetched: list[Any]) -> None:
        """Have pieces of a head from the ``start``-th on, as far as there are, on their way: of ``fetched`` columns."""
        step = 2 if self.schedule.parts(self.spec) is None else 1
        row, width = self.spec.head_dim * 4, self.width
        # Slots are equally far apart but for the first piece's: one address, and offsets.
        places = [
            arguments[at("partials")] + Int64(slot * self.columns + first) * row
            for slot in (self._slot(item, Int32(0)), (item.origin + start) * step)
        ]
        beginning = Int64(cutlass.select_(start == 0, *places))
        for v in range(self.vectors):
            channel = (v * 32 + self.lane) * width
            if self.spec.head_dim % (32 * width):
                channel = cutlass.min(channel, self.spec.head_dim - width)
            for i, target in enumerate(fetched):
                for n in range(cute.size(target) // (self.vectors * width)):
                    address = (places[1] if n else beginning) + Int64(channel) * 4
                    address = address + (n * step * self.columns + i) * row
                    at_first = (n * self.vectors + v) * width
                    cell = cute.make_tensor(target.iterator + at_first, cute.make_layout(width))
                    copy_if(floats_at(address, width), cell, Boolean(start + n < item.pieces))

    def _fetch_pairs(
        self, item: Any, arguments: Any, first: Any, number: Any, pairs: list[Any]
    ) -> None:
        """The same of maxima and sums of the ``number``-th piece; of nothing where there is none."""
        slot, there = self._slot(item, number), Boolean(number < item.pieces)
        address = arguments[at("stats")] + Int64(slot * self.columns + first) * 8
        for i, pair in enumerate(pairs):
            pair[0], pair[1] = -Float32.inf, Float32(0.0)
            copy_if(floats_at(address + 8 * i, 2), pair, there)

    def _share(self, pair: Any, number: Any) -> tuple[Any, Any]:
        """(weight, weighed sum) of a piece, which a lane has."""
        lane = number & (LANES - 1)
        return cute.arch.shuffle_sync(pair[0], lane), cute.arch.shuffle_sync(pair[1], lane)

    def _weigh(self, pair: Any, sums: Any) -> None:
        """Turn the lane's maximum and sum to weight and weighed sum; what was before is brought to the new maximum."""
        out, total, best = sums
        old, new = best[0], maximum(best[0], largest_of_warp(pair[0]))
        before, weight = (exp2(x - finite_reference(new)) for x in (old, pair[0]))
        best[0], total[0] = new, total[0] * before
        for k in range(cute.size(out)):
            out[k] = out[k] * before
        pair[0], pair[1] = weight, weight * pair[1]

    def _constants(self, item: Any, column: Any, arguments: Any) -> tuple[Any, Any]:
        """(scale of values, sink) of a column: they come with its pieces."""
        spec, scale, sink = self.spec, None, None
        kv_head = split(item.head, self.schedule.blocks(spec))[0]
        if spec.cache == "fp8":
            scale = load_float(arguments[at("v_scale")] + Int64(kv_head) * 4)
        if spec.sinks:
            number = cutlass.min(self._number(item, column), spec.columns - 1)
            head = kv_head * spec.group + split(number, spec.group)[1]
            sink = load_float(arguments[at("sinks")] + Int64(head) * 4) * LOG2_E
        return scale, sink

    @cute.jit
    def _write(self, item, arguments, column, sums, constants) -> None:
        """Write what becomes of a column's sums."""
        spec, lane = self.spec, self.lane
        (out, total, best), (scale, sink) = sums, constants
        nothing, zero = best[0] == -Float32.inf, finite_reference(best[0])
        there, kv_head = self._number(item, column), split(item.head, self.schedule.blocks(spec))[0]
        row, within = split(there, spec.group) if spec.rows > 1 else (0, there)
        head = kv_head * spec.group + within
        factor, lse = self._normaliser(total[0], zero, nothing, sink)
        if cutlass.const_expr(spec.lse):
            address = (
                Int64(item.request) * arguments[at("lse_batch")]
                + Int64(head) * arguments[at("lse_head")]
                + Int64(row)
            ) * 4 + arguments[at("lse")]
            store_float_if(address, lse, Boolean(lane == 0))
        if cutlass.const_expr(spec.cache == "fp8"):
            factor = factor * scale
        values = [out[i] * factor for i in range(self.width * self.vectors)]
        if cutlass.const_expr(spec.rotation > 0 and not spec.values_folded):
            values = rotate_lanes(values, spec.rotation, lane, spec.head_dim // 32)
        address = (
            Int64(item.request) * arguments[at("out_batch")]
            + Int64(row) * arguments[at("out_row")]
            + Int64(head) * arguments[at("out_head")]
        ) * spec.out_dtype.itemsize + arguments[at("out")]
        self._store(values, address, lane, Boolean(item.length > 0))

    def _slot(self, item: Any, number: Any) -> Any:
        """The slot of a head's ``number``-th piece, ``item`` being one of them."""
        slot = slot_of(number, item.origin, self.schedule.parts(self.spec))
        return Int32(cutlass.select_(item.pieces == 1, item.slot, Int32(slot)))

    def _normaliser(self, total: Any, best: Any, nothing: Any, sink: Any) -> tuple[Any, Any]:
        """(factor of the output, natural logarithm of the sum); 0 and -inf where the column sees no key."""
        down = Float32(2.0**-self.shift)
        correction, total = down, total * down
        if self.spec.sinks:
            # The larger of the two is the reference, or the exponential of the other overflows.
            reference = Float32(cutlass.select_(nothing | (sink > best), sink, best))
            smaller = Float32(cutlass.select_(nothing, Float32(0.0), exp2(best - reference)))
            total = fma(total, smaller, exp2(sink - reference))
            correction, best = correction * smaller, reference
        empty = nothing | (total == Float32(0.0))
        safe = Float32(cutlass.select_(empty, Float32(1.0), total))
        inverse = pure_asm("rcp.approx.ftz.f32 $0, $1;", "=f,f", Float32, safe) * correction
        logarithm = pure_asm("lg2.approx.ftz.f32 $0, $1;", "=f,f", Float32, safe)
        lse = (best + logarithm) * (1.0 / LOG2_E)
        return (
            Float32(cutlass.select_(empty, Float32(0.0), inverse)),
            Float32(cutlass.select_(empty, -Float32.inf, lse)),
        )

    def _store(self, values: list[Any], address: Any, lane: Any, live: Any) -> None:
        """Round, or quantise under the delayed scale, and store. Rows of no request are zeros that do not count."""
        spec, size = self.spec, self.spec.out_dtype.itemsize
        for v in range(self.vectors):
            channel = (v * 32 + lane) * self.width
            inside = Boolean(channel < spec.head_dim)
            lanes = values[v * self.width : (v + 1) * self.width]
            if spec.out_is_fp8:
                lanes = [self._counted(x, Boolean(inside & live)) for x in lanes]
            words = pack_words(lanes, PACKED[spec.out_dtype])
            store_words(address + Int64(channel) * size, words, self.width * size, inside)

    def _counted(self, x: Any, counts: Any) -> Any:
        """A value under the delayed scale, while the next one's data is collected (FuTransformer 3.2.3)."""
        one = Int32(cutlass.select_(counts, Int32(1), Int32(0)))
        self.peak.see(Float32(cutlass.select_(counts, magnitude(x, NOTHING), Float32(NOTHING))))
        y = x * self.inverse
        self.saturated.add(is_saturated(y) * one)
        self.nans.add(is_nan(x) * one)
        return y


@cute.jit
def _store_pair(address: Int32, a: Float32, b: Float32, condition: Boolean) -> None:
    if condition:
        shared_store(Float32, address, [a, b])


def _store_global(address: Any, values: list[Any], condition: Any) -> None:
    """Floats to a multiple of their size together, where ``condition``."""
    fragment = cute.make_rmem_tensor(len(values), Float32)
    for i, value in enumerate(values):
        fragment[i] = value
    pointer = cute.make_ptr(Float32, address, cute.AddressSpace.gmem, assumed_align=4 * len(values))
    copy_if(fragment, cute.make_tensor(pointer, cute.make_layout(len(values))), condition)
