"""The warp that finds a CTA's parts, posts them, and streams their pages. Imports the DSL.

Parts are those of ``decode_work``; where there are many, stripes are of whole runs of them, so that more heads are one
CTA's. A tile's pages come as bulk copies of nibbles with their scales and of ΔS, by one lane a page, and of V^T by TMA.
A part is walked from its last tile back. Page ids come 32 at a time.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import cutlass
from cutlass import Int32, Int64, Uint32, cute

from epicute.attention.decode_work import part_tiles, slot_of, stripe, units_of
from epicute.attention.mixed_decode_spec import (
    MAIL_SLOTS,
    TILE,
    MixedDecodeSchedule,
    MixedDecodeSpec,
)
from epicute.attention.mixed_decode_spec import decode_at as at
from epicute.attention.sm90.decode_ptx import bulk_copy
from epicute.attention.sm90.mixed_decode_places import (
    MAIL_BYTES,
    MAIL_FIELDS,
    Barriers,
    Layout,
    Shared,
    shared_view,
)
from epicute.attention.sm90.scheduler import load_int

__all__ = ["Part", "Producer", "read_part"]

LANES = 32

RUN_BITS = (2, 3, 4)
"""log2 of runs of parts. A run of all parts of a head leaves nothing to merge."""


class Part(NamedTuple):
    """A part of a head's keys.

    ``valid``: 0 behind the last one; ``first``, ``count``: its tiles; ``tiles``, ``length``: tiles and keys of the
    request; ``slot``: of the partial result; ``pieces``: parts of the head, from slot ``origin`` on; ``arrivals``: how
    many of them this CTA has taken when this one is done, 0 where the next part is of the same head; ``folds``: whether
    it has all parts of the head up to this one.
    """

    valid: Any
    request: Any
    head: Any
    first: Any
    count: Any
    tiles: Any
    length: Any
    slot: Any
    pieces: Any
    origin: Any
    arrivals: Any
    folds: Any


def read_part(mail: Any, place: Any) -> Part:
    """The part in a slot of the mailbox."""
    cells = shared_view(Int32, mail + place * MAIL_BYTES, MAIL_FIELDS, 16)
    return Part(*(cells[i] for i in range(MAIL_FIELDS)))


class Producer:
    """Device code of the loading warp."""

    def __init__(
        self,
        spec: MixedDecodeSpec,
        schedule: MixedDecodeSchedule,
        layout: Layout,
        shared: Shared,
        barriers: Barriers,
        values: tuple[Any, Any, Any],
    ) -> None:
        self.spec, self.schedule, self.layout = spec, schedule, layout
        self.cut, self.shared, self.barriers = schedule.cut(spec), shared, barriers
        self.values = values

    # --- parts ---

    @cute.jit
    def _length(self, arguments, request) -> Int32:
        """Keys of a request; -1 beyond the batch."""
        found = cute.make_rmem_tensor(1, Int32)
        found[0] = Int32(-1)
        if request < Int32(arguments[at("batch")]):
            found[0] = cutlass.max(load_int(arguments[at("kv_lengths")], request), 0)
        return found[0]

    def _tiles(self, length: Any) -> Any:
        """Tiles of a request, at least one."""
        return cutlass.max((length + (TILE - 1)) // TILE, 1)

    def _pieces(self, length: Any) -> Any:
        """Parts of each head of a request; none where the length is -1."""
        pieces = units_of(self._tiles(length), self.cut.parts, self.cut.least)
        return Int32(cutlass.select_(length < 0, Int32(0), pieces))

    @cute.jit
    def run(self, arguments, cta, lane) -> None:
        """All parts of this CTA, then one that is none."""
        heads = self.cut.heads
        batch, ctas = Int32(arguments[at("batch")]), Int32(arguments[at("ctas")])
        # Of each lane's request, 32 of them at a time: its length, its heads' parts, and where its parts end.
        length = self._length(arguments, lane)
        pieces = self._pieces(length)
        total = cute.arch.warp_redux_sync(pieces * heads, "add")
        chunk, before, count = Int32(0), Int32(0), total
        ends = running_sum(pieces * heads, lane)
        for later in cutlass.range(1, (batch + (LANES - 1)) // LANES, unroll=4):
            found = self._pieces(self._length(arguments, later * LANES + lane))
            total += cute.arch.warp_redux_sync(found * heads, "add")
        first, end = self._stripe(cta, ctas, total)
        position = first
        ring, mail = Int32(0), Int32(0)
        while position < end:
            while position >= before + count:
                before += count
                chunk += 1
                length = self._length(arguments, chunk * LANES + lane)
                pieces = self._pieces(length)
                ends = running_sum(pieces * heads, lane)
                count = cute.arch.shuffle_sync(ends, LANES - 1)
            mine = cute.arch.popc(cute.arch.vote_ballot_sync(before + ends <= position))
            keys, own = (cute.arch.shuffle_sync(x, mine) for x in (length, pieces))
            base = before + cute.arch.shuffle_sync(ends, mine) - own * heads
            place = (position - base, position - first, end - position)
            part = self._part(chunk * LANES + mine, keys, own, place)
            pages = self._open(arguments, part, lane)
            Producer._post(self, part, mail, lane)
            mail += 1
            position += 1
            ring = Producer._stream(self, arguments, part, pages, ring, lane)
        Producer._post(self, Part(*[Int32(0)] * MAIL_FIELDS), mail, lane)

    @cute.jit
    def _stripe(self, cta, ctas, total) -> tuple[Int32, Int32]:
        """(first, end) of this CTA's parts: whole runs, where they are many."""
        bits = cute.make_rmem_tensor(1, Int32)
        bits[0] = Int32(0)
        if total > 2 * ctas:
            bits[0] = self._run_bits(ctas, total)
        runs = (total + ((1 << bits[0]) - 1)) >> bits[0]
        first, end = stripe(*(Uint32(x) for x in (cta, ctas, runs)))
        first, end = Int32(first) << bits[0], Int32(end) << bits[0]
        return cutlass.min(first, total), cutlass.min(end, total)

    def _run_bits(self, ctas: Any, total: Any) -> Any:
        """log2 of the longest run that lengthens no CTA's stripe by more than a sixteenth."""
        most, found = _above(total, ctas), Int32(0)
        for bits in RUN_BITS:
            longest = _above((total + ((1 << bits) - 1)) >> bits, ctas) << bits
            found = Int32(cutlass.select_(longest * 16 <= most * 17, Int32(bits), found))
        return found

    def _part(self, request: Any, length: Any, pieces: Any, place: tuple[Any, Any, Any]) -> Part:
        """A part of a request. ``place``: among its parts; parts before it and from it on in the CTA's stripe."""
        cut, (unit, taken, left) = self.cut, place
        tiles = self._tiles(length)
        each = part_tiles(tiles, int(cut.parts or 1), cut.least)
        head = Int32(Uint32(unit) // Uint32(pieces))
        number = unit - head * pieces
        origin = (request * cut.heads + head) * int(cut.parts or 1)
        count = cutlass.min(each, tiles - number * each)
        slot = slot_of(number, origin, cut.parts)
        goes_on = (number < pieces - 1) & (left > 1)
        arrivals = cutlass.select_(goes_on, Int32(0), cutlass.min(number, taken) + 1)
        folds = cutlass.select_(number <= taken, Int32(1), Int32(0))
        found = (Int32(1), request, head, number * each, count, tiles, length, slot, pieces, origin)
        return Part(*(Int32(x) for x in (*found, arrivals, folds)))

    @cute.jit
    def _post(self, part, mail, lane) -> None:
        """Put a part into the mailbox."""
        place, turn = mail % MAIL_SLOTS, mail // MAIL_SLOTS % 2
        cute.arch.mbarrier_wait(self.barriers.taken + place, turn ^ 1)
        cells = shared_view(Int32, self.shared.mail + place * MAIL_BYTES, MAIL_FIELDS, 16)
        if lane == 0:
            for i in cutlass.range_constexpr(MAIL_FIELDS):
                cells[i] = part[i]
            cute.arch.mbarrier_arrive(self.barriers.posted + place)
        cute.arch.sync_warp()

    # --- pages ---

    def _open(self, arguments: Any, part: Part, lane: Any) -> tuple[Any, Any, Any]:
        """(page behind a part's last one, first of 32 pages that end with its last tile's, their ids)."""
        end = cutlass.min(part.length, (part.first + part.count) * TILE)
        last = (end + (self.layout.page_tokens - 1)) // self.layout.page_tokens
        window = cutlass.max((part.first + part.count) * self.layout.pages - LANES, 0)
        return last, window, self._ids(arguments, part.request, window + lane, last)

    @cute.jit
    def _stream(self, arguments, part, opened, ring, lane) -> Int32:
        """Load the tiles of a part; the number of tiles so far."""
        pages = self.layout.pages
        last, window, ids = opened
        for i in cutlass.range(part.count, unroll=1):
            tile = part.first + part.count - 1 - i
            first = tile * pages
            if first < window:
                window = cutlass.max(first + pages - LANES, 0)
                ids = self._ids(arguments, part.request, window + lane, last)
            there = cutlass.min(last - first, pages)
            self._load(arguments, part.head, (ids, first - window, there), ring, lane)
            ring += 1
        return ring

    @cute.jit
    def _ids(self, arguments, request, number, last) -> Int32:
        """Id of a request's page; -1 behind its end."""
        found = cute.make_rmem_tensor(1, Int32)
        found[0] = Int32(-1)
        if number < last:
            offset = Int64(request) * arguments[at("table_row")] + Int64(number) * 4
            found[0] = load_int(arguments[at("page_table")] + offset, Int32(0))
        return found[0]

    @cute.jit
    def _load(self, arguments, head, pages, ring, lane) -> None:
        """A tile's pages, as many as there are, to its stages as they become free, for an mbarrier of ``full``."""
        ids, start, there = pages
        spec, layout, schedule = self.spec, self.layout, self.schedule
        full, _ = layout.full(ring)
        key, value = layout.stages(ring)
        barrier = self.barriers.full + full
        turn = ring // schedule.stages % 2
        cute.arch.mbarrier_wait(self.barriers.empty + value, turn ^ 1)
        each = layout.key_page + layout.delta_page + spec.page.head_dim * spec.page.page_size
        kv_head = head // spec.blocks
        if lane == 0:
            if there > 0:
                cute.arch.mbarrier_arrive_and_expect_tx(barrier, there * each)
            else:
                cute.arch.mbarrier_arrive(barrier)
        cute.arch.sync_warp()
        atom, source, target = self.values
        for number in cutlass.range_constexpr(layout.pages):
            page = cute.arch.shuffle_sync(ids, cutlass.min(start + number, LANES - 1))
            if number < there:
                cute.copy(
                    atom,
                    source[None, 0, 0, kv_head, page],
                    target[None, number, value],
                    tma_bar_ptr=barrier,
                )
        turn = ring // schedule.key_stages % 2
        cute.arch.mbarrier_wait(self.barriers.keys_empty + key, turn ^ 1)
        mine = cute.arch.shuffle_sync(ids, cutlass.min(start + lane, LANES - 1))
        if lane < there:
            self._load_keys(arguments, kv_head, mine, key, lane, barrier)

    def _load_keys(
        self, arguments: Any, kv_head: Any, page: Any, place: Any, number: Any, barrier: Any
    ) -> None:
        """One page's nibbles and scales, and its ΔS, by one lane."""
        spec, layout = self.spec, self.layout
        record = Int64(page) * arguments[at("page_stride")]
        record += Int64(kv_head) * arguments[at("head_stride")] + arguments[at("records")]
        count = Int32(barrier.toint())
        target = self.shared.k + place * layout.key_stage + number * layout.key_page
        bulk_copy(target, record, Int32(layout.key_page), count)
        if spec.terms:
            source = Int64(page) * spec.kv_heads + Int64(kv_head)
            source = source * layout.delta_page + arguments[at("delta")]
            target = self.shared.delta + place * layout.delta_stage + number * layout.delta_page
            bulk_copy(target, source, Int32(layout.delta_page), count)


def _above(a: Any, b: Any) -> Any:
    """a / b, rounded up, of positive numbers."""
    return Int32((Uint32(a) + (Uint32(b) - 1)) // Uint32(b))


def running_sum(x: Any, lane: Any) -> Any:
    """Sum over the lanes up to this one."""
    for distance in (1, 2, 4, 8, 16):
        other = cute.arch.shuffle_sync(x, lane - distance)
        x = x + Int32(cutlass.select_(lane >= distance, other, Int32(0)))
    return x
