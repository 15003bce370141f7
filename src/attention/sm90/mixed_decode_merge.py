"""A part's end: warpgroups meet, then the parts of a head, in the order of their keys. Imports the DSL.

second warpgroup   leaves its outputs and sums in shared memory, and goes on
first warpgroup    adds its own; a warp then takes whole columns, a lane adjacent channels
one part           is the output
several            go to the workspace; whoever comes last to a head adds them from the first one on
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

__all__ = ["Meeting"]

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
        for i in cutlass.range_constexpr(self.spec.columns // 4):
            column = 4 * i + self.tiles.warp
            if first + column < self.spec.group:
                Meeting._row(self, part, column, first, arguments)
        if part.pieces > 1:
            last = Meeting._arrive(self, part, arguments)
            if last != 0:
                for i in cutlass.range_constexpr(self.spec.columns // 4):
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
        cute.arch.fence_acq_rel_gpu()
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
        _count(counter, flag, part.pieces, Boolean(self.tiles.thread == 0))
        Meeting._barrier(self)
        last = shared_view(Int32, self.shared.flag)[0]
        cute.arch.fence_acq_rel_gpu()
        return last

    @cute.jit
    def _merge(self, part, column, first, arguments) -> None:
        """Add a column's parts, the first one first."""
        lane = self.tiles.lane
        best = cute.make_rmem_tensor(1, Float32)
        best[0] = -Float32.inf
        for start in cutlass.range(0, part.pieces, 32, unroll=1):
            number = part.origin + cutlass.min(start + lane, part.pieces - 1)
            found = global_view(Float32, self._stats(number, column, arguments))[0]
            best[0] = maximum(best[0], found)
        most = best[0]
        for distance in cutlass.range_constexpr(5):
            most = maximum(most, cute.arch.shuffle_sync_bfly(most, 1 << distance))
        zero = Float32(cutlass.select_(most == -Float32.inf, Float32(0.0), most))
        values, total = (
            cute.make_rmem_tensor(self.width, Float32),
            cute.make_rmem_tensor(1, Float32),
        )
        values.fill(0.0)
        total.fill(0.0)
        for number in cutlass.range(part.pieces, unroll=8):
            slot = part.origin + number
            pair = load_from(global_view(Float32, self._stats(slot, column, arguments), 2))
            weight = exp2(pair[0] - zero)
            total[0] = fma(weight, pair[1], total[0])
            found = load_from(
                global_view(Float32, self._partial(slot, column, arguments), self.width)
            )
            for i in cutlass.range_constexpr(self.width):
                values[i] = fma(weight, found[i], values[i])
        sums = (most, total[0])
        Meeting._finish(
            self, part, first + column, [values[i] for i in range(self.width)], sums, arguments
        )

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
def _count(counter, flag, pieces, condition) -> None:
    """Say in ``flag`` whether this part is the last one, and leave the counter at 0 behind it."""
    if condition:
        before = cute.arch.atomic_add(counter, Int32(1), sem="acq_rel", scope="gpu")
        flag[0] = Int32(before == pieces - 1)
        if before == pieces - 1:
            cute.make_tensor(counter, cute.make_layout(1))[0] = Int32(0)


@cute.jit
def _put_if(place: Int32, value: Float32, condition: Boolean) -> None:
    if condition:
        shared_view(Float32, place)[0] = value
