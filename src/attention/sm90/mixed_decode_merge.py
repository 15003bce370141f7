"""A part's end: warpgroups meet, then the parts of a head, in the order of their keys. Imports the DSL.

second warpgroup   leaves its outputs and sums in shared memory, and goes on
first warpgroup    adds its own; a warp then takes whole columns, a lane adjacent channels
one part           is the output
several            go to the workspace; who has no further part of the head says how many it has left there, and
                   whoever comes last to a head adds them from the first one on
"""

from __future__ import annotations

from typing import Any

import cutlass
from cutlass import Boolean, Float32, Int32, Int64, cute

from epicute.attention.mixed_decode_spec import MixedDecodeSchedule, MixedDecodeSpec
from epicute.attention.mixed_decode_spec import decode_at as at
from epicute.attention.sm90.mixed_decode_places import (
    Layout,
    Shared,
    global_view,
    load_from,
    shared_view,
)
from epicute.attention.sm90.mixed_decode_steps import MEET, DecodeTiles
from epicute.attention.sm90.softmax import LOG2_E, exp2, fma, maximum
from epicute.epilogues.dsl import pack_words, pure_asm
from epicute.gemm.memory import PACKED
from epicute.quant.dsl import asm

__all__ = ["Meeting"]

MANY, FEW = 16, 8
"""Parts whose outputs a merge has in registers, or on their way there, as there is room. They divide 32."""

THERE, FREE = 3, 4
"""Named barriers of both warpgroups: the second one's outputs are there; have been read."""


class Meeting:
    """Device code behind the last tile of a part."""

    def __init__(
        self,
        spec: MixedDecodeSpec,
        schedule: MixedDecodeSchedule,
        layout: Layout,
        shared: Shared,
        tiles: DecodeTiles,
    ) -> None:
        self.spec, self.schedule, self.layout = spec, schedule, layout
        self.shared, self.tiles = shared, tiles
        self.width = spec.page.head_dim // 32
        tight = schedule.ctas > 1 and self.width > 2 and (spec.terms > 0 or spec.lse)
        self.ahead = FEW if tight else MANY
        self.turns = -(-min(spec.group, spec.columns) // 4)
        self.lift = tiles.lift

    @cute.jit
    def open(self) -> None:
        """Nothing is to be read yet."""
        if self.tiles.number == 0:
            cute.arch.barrier_arrive(barrier_id=FREE, number_of_threads=256)

    @cute.jit
    def run(self, part, arguments) -> None:
        """End a part."""
        Meeting._add_lanes(self)
        if self.tiles.number == 1:
            cute.arch.barrier(barrier_id=FREE, number_of_threads=256)
            Meeting._leave_all(self)
            cute.arch.barrier_arrive(barrier_id=THERE, number_of_threads=256)
        else:
            Meeting._leave_sums(self)
            cute.arch.barrier(barrier_id=THERE, number_of_threads=256)
            Meeting._join_all(self)
            Meeting._barrier(self)
            Meeting._rows(self, part, arguments)
            cute.arch.barrier_arrive(barrier_id=FREE, number_of_threads=256)

    def _add_lanes(self) -> None:
        """Sums of the thread's columns over the warp's tokens."""
        tiles = self.tiles
        for i in range(tiles.count):
            for distance in (4, 8, 16):
                other = cute.arch.shuffle_sync_bfly(tiles.total[i], distance)
                tiles.total[i] = tiles.total[i] + other

    def _leave_all(self) -> None:
        """The second warpgroup's sums and outputs."""
        self._leave_sums()
        for e in range(cute.size(self.tiles.out)):
            shared_view(Float32, self._cell(e))[0] = self.tiles.out[e]

    def _join_all(self) -> None:
        """Outputs of both."""
        tiles = self.tiles
        for i in range(tiles.count):
            _, weights, _ = self._joined(tiles.column(i))
            for e in range(cute.size(tiles.out)):
                if e % (4 * tiles.eights) // 4 * 2 + e % 2 == i:
                    cell = shared_view(Float32, self._cell(e))
                    cell[0] = fma(cell[0], weights[1], tiles.out[e] * weights[0])

    def _barrier(self) -> None:
        """Of the first warpgroup."""
        cute.arch.barrier(barrier_id=MEET, number_of_threads=128)

    def _cell(self, e: int) -> Any:
        """Where an accumulator of the output lies."""
        tiles = self.tiles
        i = e % (4 * tiles.eights) // 4 * 2 + e % 2
        channel = e // (4 * tiles.eights) * 64 + 16 * tiles.warp + tiles.g + e // 2 % 2 * 8
        return self.shared.out + (tiles.column(i) * self.layout.pitch + channel) * 4

    def _sum_place(self, number: Any, row: Any, column: Any) -> Any:
        columns = self.spec.columns
        return self.shared.sums + ((number * 5 + row) * columns + column) * 4

    def _leave_sums(self) -> None:
        """A warp's sums, and the warpgroup's maxima."""
        tiles = self.tiles
        for i in range(tiles.count):
            column = tiles.column(i)
            place = self._sum_place(tiles.number, tiles.warp, column)
            _put_if(place, tiles.total[i], Boolean(tiles.g == 0))
            place = self._sum_place(tiles.number, 4, column)
            _put_if(place, tiles.best[i], Boolean((tiles.g == 0) & (tiles.warp == 0)))

    def _joined(self, column: Any) -> tuple[Any, list[Any], Any]:
        """(maximum in powers of two, weights of the warpgroups, sum) of a column."""
        unit = self.tiles.unit
        bests = [shared_view(Float32, self._sum_place(n, 4, column))[0] for n in range(2)]
        best = maximum(*bests)
        zero = Float32(cutlass.select_(best == -Float32.inf, Float32(0.0), best))
        weights = [exp2((x - zero) * unit) for x in bests]
        total = Float32(0.0)
        for n in range(2):
            mine = Float32(0.0)
            for w in range(4):
                mine = mine + shared_view(Float32, self._sum_place(n, w, column))[0]
            total = fma(mine, weights[n], total)
        return best * unit, weights, total

    # --- columns ---

    @cute.jit
    def _rows(self, part, arguments) -> None:
        """The part's columns, by whole warps: to the output, or to the workspace."""
        first = part.head % self.spec.blocks * self.spec.columns
        for i in cutlass.range_constexpr(self.turns):
            column = 4 * i + self.tiles.warp
            if first + column < self.spec.group:
                Meeting._row(self, part, column, first, arguments)
        if (part.pieces > 1) & (part.arrivals > 0):
            last = Meeting._arrive(self, part, arguments)
            if last != 0:
                for i in cutlass.range_constexpr(self.turns):
                    own = 4 * i + self.tiles.warp
                    if first + own < self.spec.group:
                        Meeting._merge(self, part, own, first, arguments)

    @cute.jit
    def _row(self, part, column, first, arguments) -> None:
        best, _, total = Meeting._joined(self, column)
        place = self.shared.out + column * (4 * self.layout.pitch)
        place += self.tiles.lane * (4 * self.width)
        values = load_from(shared_view(Float32, place, self.width))
        if part.pieces == 1:
            Meeting._finish(self, part, first + column, values, (best, total), arguments)
        else:
            Meeting._leave(self, part, column, values, (best, total), arguments)

    def _stats(self, slot: Any, column: Any, arguments: Any) -> Any:
        place = Int64(slot) * self.spec.columns + Int64(column)
        return arguments[at("stats")] + place * 8

    def _partial(self, slot: Any, column: Any, arguments: Any) -> Any:
        place = Int64(slot) * self.spec.columns + Int64(column)
        place = place * self.spec.page.head_dim + Int64(self.tiles.lane * self.width)
        return arguments[at("partials")] + place * 4

    def _leave(self, part: Any, column: Any, values: Any, sums: Any, arguments: Any) -> None:
        """A column of a part to the workspace."""
        found = cute.make_rmem_tensor(self.width, Float32)
        for i, x in enumerate(values):
            found[i] = x
        target = self._partial(part.slot, column, arguments)
        cute.autovec_copy(found, global_view(Float32, target, self.width))
        pair = cute.make_rmem_tensor(2, Float32)
        pair[0], pair[1] = sums
        _copy_if(
            pair,
            global_view(Float32, self._stats(part.slot, column, arguments), 2),
            Boolean(self.tiles.lane == 0),
        )

    @cute.jit
    def _arrive(self, part, arguments) -> Int32:
        """Whether all parts of the head are there: 1 in the warpgroup that is last."""
        # All have stored before the barrier; what one thread then releases and acquires, it does for all.
        Meeting._barrier(self)
        heads = self.spec.kv_heads * self.spec.blocks
        place = Int64(part.request) * heads + Int64(part.head)
        counter = cute.make_ptr(
            Int32,
            arguments[at("counters")] + place * 4,
            cute.AddressSpace.gmem,
            assumed_align=4,
        )
        flag = shared_view(Int32, self.shared.flag)
        parts = (part.arrivals, part.pieces)
        _count(counter, flag, parts, Boolean(self.tiles.thread == 0))
        Meeting._barrier(self)
        return shared_view(Int32, self.shared.flag)[0]

    @cute.jit
    def _merge(self, part, column, first, arguments) -> None:
        """Add a column's parts, the first one first. ``ahead`` of them are on their way at any time."""
        lane, width, ahead = self.tiles.lane, self.width, self.ahead
        step = self.spec.columns * self.spec.page.head_dim * 4
        base = self._partial(part.origin, column, arguments)
        held = cute.make_rmem_tensor(ahead * width, Float32)
        held.fill(0.0)
        for i in cutlass.range_constexpr(ahead):
            self._fetch(base + i * step, held, i, i < part.pieces)
        pair = cute.make_rmem_tensor(2, Float32)
        self._pair(part, lane, column, pair, arguments)
        most = Meeting._most(self, part, column, pair, arguments)
        zero = Float32(cutlass.select_(most == -Float32.inf, Float32(0.0), most))
        sums = cute.make_rmem_tensor(width + 1, Float32)
        sums.fill(0.0)
        # The column's own row, which this warp alone has read, holds 32 parts' weights, then their sums.
        place = self.shared.out + column * (4 * self.layout.pitch)
        for start in cutlass.range(0, part.pieces, ahead, unroll=1):
            # One address for all, not one for each of the loads.
            base = asm("mov.b64 $0, $1;", "=l,l", Int64, base + ahead * step, effects=True)
            if start & 31 == 0:
                if start > 0:
                    self._pair(part, start + lane, column, pair, arguments)
                cute.arch.sync_warp()
                shared_view(Float32, place + lane * 4)[0] = exp2(pair[0] - zero)
                shared_view(Float32, place + 128 + lane * 4)[0] = pair[1]
                cute.arch.sync_warp()
            for both in cutlass.range_constexpr(ahead // 2):
                row = place + (start & 31) * 4 + both * 8
                weights = load_from(shared_view(Float32, row, 2))
                totals = load_from(shared_view(Float32, row + 128, 2))
                for j in cutlass.range_constexpr(2):
                    i, number = 2 * both + j, start + 2 * both + j
                    self._add(sums, held, i, (weights[j], totals[j]), number < part.pieces)
                    self._fetch(base + i * step, held, i, number + ahead < part.pieces)
        found = [sums[k] for k in range(width)]
        Meeting._finish(self, part, first + column, found, (most, sums[width]), arguments)

    def _pair(self, part: Any, number: Any, column: Any, pair: Any, arguments: Any) -> None:
        """Maximum and sum of a part, the last one's where there is none."""
        number = part.origin + cutlass.min(number, part.pieces - 1)
        source = global_view(Float32, self._stats(number, column, arguments), 2)
        cute.autovec_copy(source, pair)

    @cute.jit
    def _most(self, part, column, pair, arguments) -> Float32:
        """The largest maximum of a column's parts; ``pair``: of the lane's part."""
        best = cute.make_rmem_tensor(1, Float32)
        best[0] = pair[0]
        for start in cutlass.range(32, part.pieces, 32, unroll=1):
            number = part.origin + cutlass.min(start + self.tiles.lane, part.pieces - 1)
            found = global_view(Float32, self._stats(number, column, arguments))[0]
            best[0] = maximum(best[0], found)
        most = best[0]
        for distance in cutlass.range_constexpr(5):
            most = maximum(most, cute.arch.shuffle_sync_bfly(most, 1 << distance))
        return most

    def _fetch(self, source: Any, held: Any, i: int, there: Any) -> None:
        """A part's outputs to the ``i``-th place of ``held``."""
        target = cute.make_tensor(held.iterator + i * self.width, cute.make_layout(self.width))
        _copy_if(global_view(Float32, source, self.width), target, Boolean(there))

    def _add(self, sums: Any, held: Any, i: int, pair: tuple[Any, Any], there: Any) -> None:
        """A part's outputs and sum, times its weight."""
        weight, total = pair
        values = [held[i * self.width + k] for k in range(self.width)] + [total]
        for k, x in enumerate(values):
            added = fma(weight, x, sums[k])
            sums[k] = Float32(cutlass.select_(there, added, sums[k]))

    def _finish(self, part: Any, query: Any, values: Any, sums: Any, arguments: Any) -> None:
        """A head's output and LSE; 0 and -inf where it sees no key."""
        spec, (best, total) = self.spec, sums
        head = part.head // spec.blocks * spec.group + query
        empty = total == Float32(0.0)
        safe = Float32(cutlass.select_(empty, Float32(1.0), total))
        inverse = pure_asm("rcp.approx.ftz.f32 $0, $1;", "=f,f", Float32, safe)
        factor = inverse * Int32(arguments[at("v_scale")]).bitcast(Float32)
        factor = Float32(cutlass.select_(empty, Float32(0.0), factor))
        words = pack_words([x * factor for x in values], PACKED[spec.dtype])
        found = cute.make_rmem_tensor(len(words), Int32)
        for i, word in enumerate(words):
            found[i] = word
        place = Int64(part.request) * arguments[at("out_batch")]
        place += Int64(head) * arguments[at("out_head")]
        place += Int64(self.tiles.lane * (2 * self.width)) + arguments[at("out")]
        cute.autovec_copy(found, global_view(Int32, place, len(words)))
        if spec.lse:
            logarithm = pure_asm("lg2.approx.ftz.f32 $0, $1;", "=f,f", Float32, safe)
            lse = (best + logarithm - self.lift) * (1.0 / LOG2_E)
            single = cute.make_rmem_tensor(1, Float32)
            single[0] = Float32(cutlass.select_(empty, -Float32.inf, lse))
            place = Int64(part.request) * arguments[at("lse_batch")]
            place += Int64(head) * arguments[at("lse_head")] + arguments[at("lse")]
            _copy_if(single, global_view(Float32, place), Boolean(self.tiles.lane == 0))


@cute.jit
def _copy_if(source: cute.Tensor, target: cute.Tensor, condition: Boolean) -> None:
    if condition:
        cute.autovec_copy(source, target)


@cute.jit
def _count(counter, flag, parts, condition) -> None:
    """Say in ``flag`` whether these parts are the last ones, and leave the counter at 0 behind them."""
    arrivals, pieces = parts
    if condition:
        before = cute.arch.atomic_add(counter, arrivals, sem="acq_rel", scope="gpu")
        flag[0] = Int32(before + arrivals == pieces)
        if before + arrivals == pieces:
            cute.make_tensor(counter, cute.make_layout(1))[0] = Int32(0)


@cute.jit
def _put_if(place: Int32, value: Float32, condition: Boolean) -> None:
    if condition:
        shared_view(Float32, place)[0] = value
