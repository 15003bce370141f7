"""A part's end: warpgroups meet, then the parts of a head, in the order of their keys. Imports the DSL.

second warpgroup   leaves its outputs and sums in shared memory, and goes on; of the next part it is the first one
first warpgroup    adds its own; a warp then takes whole columns, a lane adjacent channels
first parts        of a head, up to all of them, are folded in shared memory, one after the other; all are the output
others             go to the workspace, and so does what is folded, in the place of its last part; who has no further
                   part of the head says how many it has left there, and both warpgroups of whoever comes last to a
                   head fold them from the first one on

Folding is m' = max(m, m_p), O' = O · 2^(m - m') + O_p · 2^(m_p - m'), from -inf and 0 on: the same operations wherever
they take place, so that bits do not depend on which parts a CTA has.
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

THERE, LAST = 3, 5
"""Named barriers of both warpgroups: the second one's outputs are there, of parts in turn; whether a head is to be
merged is known."""


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
        self.own = min(spec.group, spec.columns)
        self.turns = -(-self.own // 4)
        # Of a merge: warps of a column, channels of a lane, columns of a warp.
        self.shares = 2 if self.own <= 4 and self.width > 2 else 1
        self.share = self.width // self.shares
        self.rounds = -(-self.own * self.shares // 8)
        tight = schedule.ctas > 1 and self.share > 2
        self.ahead = FEW if tight else MANY
        self.lift = tiles.lift

    @cute.jit
    def run(self, part, mail, arguments) -> None:
        """End the ``mail``-th part."""
        # With one barrier, who leaves this part's and is early to join the next one's would be both that it counts.
        there = THERE + mail % 2
        Meeting._add_lanes(self)
        merges = (part.arrivals > 0) & (part.arrivals < part.pieces)
        if self.tiles.role == 1:
            # It has joined the part before: all of its warps are done with that.
            Meeting._barrier(self)
            Meeting._leave_all(self)
            cute.arch.barrier_arrive(barrier_id=there, number_of_threads=256)
        else:
            # Sums lie where the other one, which has joined the part before, has read those of that.
            cute.arch.barrier(barrier_id=there, number_of_threads=256)
            Meeting._leave_sums(self)
            Meeting._barrier(self)
            Meeting._join_all(self)
            Meeting._barrier(self)
            Meeting._rows(self, part, arguments)
            if merges:
                Meeting._arrive(self, part, arguments)
        if merges:
            Meeting._end(self, part, arguments)

    def _add_lanes(self) -> None:
        """Sums of the thread's columns over the warp's tokens."""
        tiles = self.tiles
        for i in range(tiles.count):
            for distance in (4, 8, 16):
                other = cute.arch.shuffle_sync_bfly(tiles.total[i], distance)
                tiles.total[i] = tiles.total[i] + other

    @cute.jit
    def _leave_all(self) -> None:
        """The second warpgroup's sums and outputs."""
        self._leave_sums()
        for i in cutlass.range_constexpr(self.tiles.count):
            if self.tiles.column(i) < self.own:
                self._leave_column(i)

    def _leave_column(self, i: int) -> None:
        for e in self._elements(i):
            shared_view(Float32, self._cell(e))[0] = self.tiles.out[e]

    @cute.jit
    def _join_all(self) -> None:
        """Outputs of both."""
        for i in cutlass.range_constexpr(self.tiles.count):
            if self.tiles.column(i) < self.own:
                self._join_column(i)

    def _join_column(self, i: int) -> None:
        _, weights, _ = self._joined(self.tiles.column(i))
        for e in self._elements(i):
            cell = shared_view(Float32, self._cell(e))
            cell[0] = fma(cell[0], weights[1], self.tiles.out[e] * weights[0])

    def _elements(self, i: int) -> list[int]:
        """Accumulators of the thread's ``i``-th column."""
        each = 4 * self.tiles.eights
        count = cute.size(self.tiles.out)
        return [e for e in range(count) if e % each // 4 * 2 + e % 2 == i]

    def _barrier(self) -> None:
        """Of the warpgroup."""
        cute.arch.barrier(barrier_id=MEET + self.tiles.number, number_of_threads=128)

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
            place = self._sum_place(tiles.role, tiles.warp, column)
            _put_if(place, tiles.total[i], Boolean(tiles.g == 0))
            place = self._sum_place(tiles.role, 4, column)
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
        """The part's columns, by whole warps."""
        first = part.head % self.spec.blocks * self.spec.columns
        for i in cutlass.range_constexpr(self.turns):
            column = 4 * i + self.tiles.warp
            if first + column < self.spec.group:
                Meeting._row(self, part, column, first, arguments)

    @cute.jit
    def _row(self, part, column, first, arguments) -> None:
        """To the output, to what is folded, or to the workspace."""
        best, _, total = Meeting._joined(self, column)
        offset = column * (4 * self.layout.pitch)
        mine = self.tiles.lane * (4 * self.width)
        values = load_from(shared_view(Float32, self.shared.out + offset + mine, self.width))
        held = cute.make_rmem_tensor(self.width + 2, Float32)
        if part.folds != 0:
            folded = shared_view(Float32, self.shared.folded + offset + mine, self.width)
            place = self.shared.folded + offset + 4 * self.spec.page.head_dim
            sums = shared_view(Float32, place, 2)
            _nothing(held)
            if part.first > 0:
                _gather(folded, sums, held)
                cute.arch.sync_warp()
            before = held[self.width]
            most = maximum(before, best)
            weights = _weights(before, best, most)
            for k in cutlass.range_constexpr(self.width):
                held[k] = _fold(held[k], values[k], weights)
            held[self.width] = most
            held[self.width + 1] = _fold(held[self.width + 1], total, weights)
            if part.arrivals == part.pieces:
                Meeting._finish(self, part, first + column, held, self.tiles.lane, arguments)
            elif part.arrivals == 0:
                _scatter(held, folded, sums, Boolean(self.tiles.lane == 0))
            else:
                Meeting._leave(self, part, column, held, arguments)
                Meeting._blank(self, part, column, arguments)
        else:
            for k in cutlass.range_constexpr(self.width):
                held[k] = values[k]
            held[self.width], held[self.width + 1] = best, total
            Meeting._leave(self, part, column, held, arguments)

    def _stats(self, slot: Any, column: Any, arguments: Any) -> Any:
        place = Int64(slot) * self.spec.columns + Int64(column)
        return arguments[at("stats")] + place * 8

    def _partial(self, slot: Any, column: Any, channel: Any, arguments: Any) -> Any:
        place = Int64(slot) * self.spec.columns + Int64(column)
        place = place * self.spec.page.head_dim + Int64(channel)
        return arguments[at("partials")] + place * 4

    def _leave(self, part: Any, column: Any, held: Any, arguments: Any) -> None:
        """A column of a part, or of what is folded, to the workspace."""
        lane = self.tiles.lane
        target = self._partial(part.slot, column, lane * self.width, arguments)
        source = cute.make_tensor(held.iterator, cute.make_layout(self.width))
        cute.autovec_copy(source, global_view(Float32, target, self.width))
        pair = cute.make_rmem_tensor(2, Float32)
        pair[0], pair[1] = held[self.width], held[self.width + 1]
        target = global_view(Float32, self._stats(part.slot, column, arguments), 2)
        _copy_if(pair, target, Boolean(lane == 0))

    @cute.jit
    def _blank(self, part, column, arguments) -> None:
        """Say of the parts before that they are in this one."""
        pair = cute.make_rmem_tensor(2, Float32)
        pair[0], pair[1] = Float32(-Float32.inf), Float32(0.0)
        for start in cutlass.range(part.origin, part.slot, 32, unroll=1):
            slot = start + self.tiles.lane
            target = global_view(Float32, self._stats(slot, column, arguments), 2)
            _copy_if(pair, target, Boolean(slot < part.slot))

    @cute.jit
    def _arrive(self, part, arguments) -> None:
        """Say in ``flag`` whether all parts of the head are there."""
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

    @cute.jit
    def _end(self, part, arguments) -> None:
        """Merge a head whose parts are all there, in both warpgroups."""
        cute.arch.barrier(barrier_id=LAST, number_of_threads=256)
        if shared_view(Int32, self.shared.flag)[0] != 0:
            first = part.head % self.spec.blocks * self.spec.columns
            for i in cutlass.range_constexpr(self.rounds):
                number = 8 * i + 4 * self.tiles.number + self.tiles.warp
                column, share = number // self.shares, number % self.shares
                if (column < self.own) & (first + column < self.spec.group):
                    Meeting._merge(self, part, column, share, first, arguments)

    @cute.jit
    def _merge(self, part, column, share, first, arguments) -> None:
        """Fold a column's parts, the first one first. ``ahead`` of them are on their way at any time."""
        lane, width, ahead = self.tiles.lane, self.share, self.ahead
        place = share * 32 + lane
        step = self.spec.columns * self.spec.page.head_dim * 4
        base = self._partial(part.origin, column, place * width, arguments)
        fetched = cute.make_rmem_tensor(ahead * width, Float32)
        fetched.fill(0.0)
        for i in cutlass.range_constexpr(ahead):
            self._fetch(base + i * step, fetched, i, i < part.pieces)
        pair = cute.make_rmem_tensor(2, Float32)
        self._pair(part, lane, column, pair, arguments)
        # Of 32 parts: a lane has the weights of one, and of what is before it.
        weights = cute.make_rmem_tensor(2, Float32)
        weights.fill(0.0)
        held = cute.make_rmem_tensor(width + 2, Float32)
        _nothing(held)
        for start in cutlass.range(0, part.pieces, ahead, unroll=1):
            # One address for all, not one for each of the loads.
            base = asm("mov.b64 $0, $1;", "=l,l", Int64, base + ahead * step, effects=True)
            if start & 31 == 0:
                if start > 0:
                    self._pair(part, start + lane, column, pair, arguments)
                held[width] = self._scan(pair[0], held[width], weights)
            for i in cutlass.range_constexpr(ahead):
                number, source = start + i, (start & 31) + i
                both = [cute.arch.shuffle_sync(weights[k], source) for k in range(2)]
                total = cute.arch.shuffle_sync(pair[1], source)
                # What is in a later part has no sum of its own.
                there = Boolean(number < part.pieces) & (total != Float32(0.0))
                values = [fetched[i * width + k] for k in range(width)]
                self._take(held, [*values, total], both, there)
                self._fetch(base + i * step, fetched, i, number + ahead < part.pieces)
        Meeting._finish(self, part, first + column, held, place, arguments)

    def _pair(self, part: Any, number: Any, column: Any, pair: Any, arguments: Any) -> None:
        """Maximum and sum of a part, the last one's where there is none."""
        number = part.origin + cutlass.min(number, part.pieces - 1)
        source = global_view(Float32, self._stats(number, column, arguments), 2)
        cute.autovec_copy(source, pair)

    def _scan(self, own: Any, before: Any, weights: Any) -> Any:
        """Weights of 32 parts of the maxima ``own``, behind ``before``; the maximum of them all."""
        lane, most = self.tiles.lane, maximum(own, before)
        for step in range(5):
            other = cute.arch.shuffle_sync(most, lane - (1 << step))
            most = maximum(most, _either(lane >= 1 << step, other, most))
        last = _either(lane > 0, cute.arch.shuffle_sync(most, lane - 1), before)
        weights[0], weights[1] = _weights(last, own, most)
        return cute.arch.shuffle_sync(most, 31)

    def _fetch(self, source: Any, fetched: Any, i: int, there: Any) -> None:
        """A part's outputs to the ``i``-th place of ``fetched``."""
        width = self.share
        target = cute.make_tensor(fetched.iterator + i * width, cute.make_layout(width))
        _copy_if(global_view(Float32, source, width), target, Boolean(there))

    def _take(self, held: Any, values: list[Any], weights: list[Any], there: Any) -> None:
        """Fold a part in, its sum behind its outputs."""
        places = [*range(self.share), self.share + 1]
        for k, x in zip(places, values, strict=True):
            held[k] = _either(there, _fold(held[k], x, weights), held[k])

    def _finish(self, part: Any, query: Any, held: Any, lane: Any, arguments: Any) -> None:
        """A head's LSE, and output: what is adjacent in ``lane``; 0 and -inf where it sees no key."""
        spec, width = self.spec, cute.size(held) - 2
        values, best, total = [held[k] for k in range(width)], held[width], held[width + 1]
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
        place += Int64(lane * (2 * width)) + arguments[at("out")]
        cute.autovec_copy(found, global_view(Int32, place, len(words)))
        if spec.lse:
            logarithm = pure_asm("lg2.approx.ftz.f32 $0, $1;", "=f,f", Float32, safe)
            lse = (best + logarithm - self.lift) * (1.0 / LOG2_E)
            single = cute.make_rmem_tensor(1, Float32)
            single[0] = Float32(cutlass.select_(empty, -Float32.inf, lse))
            place = Int64(part.request) * arguments[at("lse_batch")]
            place += Int64(head) * arguments[at("lse_head")] + arguments[at("lse")]
            _copy_if(single, global_view(Float32, place), Boolean(lane == 0))


def _either(condition: Any, a: Any, b: Any) -> Any:
    return Float32(cutlass.select_(condition, Float32(a), Float32(b)))


def _nothing(held: Any) -> None:
    """Outputs, maximum and sum of no key."""
    held.fill(0.0)
    held[cute.size(held) - 2] = Float32(-Float32.inf)


def _weights(before: Any, own: Any, most: Any) -> list[Any]:
    """Of what is folded and of a part, whose larger maximum is ``most``."""
    zero = _either(most == -Float32.inf, Float32(0.0), most)
    return [exp2(before - zero), exp2(own - zero)]


def _fold(before: Any, own: Any, weights: Any) -> Any:
    return fma(before, weights[0], _times(own, weights[1]))


def _times(a: Any, b: Any) -> Any:
    """a · b, rounded."""
    return pure_asm("mul.rn.f32 $0, $1, $2;", "=f,f,f", Float32, Float32(a), Float32(b))


@cute.jit
def _gather(outputs, sums, held) -> None:
    width = cute.size(outputs)
    cute.autovec_copy(outputs, cute.make_tensor(held.iterator, cute.make_layout(width)))
    for k in cutlass.range_constexpr(2):
        held[width + k] = sums[k]


@cute.jit
def _scatter(held, outputs, sums, first) -> None:
    width = cute.size(outputs)
    cute.autovec_copy(cute.make_tensor(held.iterator, cute.make_layout(width)), outputs)
    if first:
        for k in cutlass.range_constexpr(2):
            sums[k] = held[width + k]


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
