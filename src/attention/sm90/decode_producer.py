"""The warp that finds a CTA's pieces, posts them, and streams their keys and values. Imports the DSL.

Pieces are those of ``decode_work``: each CTA adds up the units of all requests once, then walks its own stripe, with
the units of 32 requests in its lanes. Page ids come 32 at a time, and the next 32 before they are needed.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import cutlass
from cutlass import Boolean, Int32, Int64, cute
from cutlass.cute.nvgpu import cpasync

from epicute.attention.decode_arguments import at
from epicute.attention.decode_schedule import MAIL_FIELDS, MAIL_SLOTS, DecodeSchedule
from epicute.attention.decode_spec import DecodeSpec
from epicute.attention.decode_work import (
    owner,
    part_tiles,
    slot_of,
    stripe,
    tile_span,
    units_of,
    whole_slot,
)
from epicute.attention.sm90.decode_ptx import bulk_copy
from epicute.attention.sm90.scheduler import load_int
from epicute.layouts import split
from epicute.layouts.kv_int4 import Int4Record

__all__ = ["Item", "Producer", "read_item"]

LANES = 32


class Item(NamedTuple):
    """A piece in shared memory.

    ``valid``: 0 behind the last one; ``length``: keys of the request; ``final``: whether it is the CTA's last one.
    """

    valid: Any
    request: Any
    head: Any
    first: Any
    count: Any
    length: Any
    slot: Any
    pieces: Any
    origin: Any
    final: Any


def read_item(mail: Any, place: Any) -> Item:
    """The item in a slot of the mailbox."""
    return Item(*(mail[place * MAIL_FIELDS + i] for i in range(len(Item._fields))))


def write_item(mail: Any, place: Any, item: Item) -> None:
    """Put an item in a slot of the mailbox."""
    for i, x in enumerate(item):
        mail[place * MAIL_FIELDS + i] = Int32(x)


class Producer:
    """Device code of the loading warp.

    ``barriers``: pointers to ``full`` and ``empty`` of the ring, ``posted`` and ``taken`` of the mailbox.
    """

    def __init__(
        self,
        spec: DecodeSpec,
        schedule: DecodeSchedule,
        loads: Any,
        shared: dict[str, Any],
        barriers: dict[str, Any],
    ) -> None:
        self.spec, self.schedule, self.cut = spec, schedule, schedule.cut(spec)
        self.loads, self.shared, self.barriers = loads, shared, barriers
        self.unit = schedule.unit(spec)
        self.units, self.page = schedule.tile // self.unit, spec.page or 1

    # --- pieces ---

    @cute.jit
    def _length(self, arguments, request) -> Int32:
        """Keys of a request; -1 beyond the batch."""
        found = cute.make_rmem_tensor(1, Int32)
        found[0] = Int32(-1)
        if request < Int32(arguments[at("batch")]):
            found[0] = cutlass.max(load_int(arguments[at("kv_lengths")], request), 0)
        return found[0]

    def _units(self, length: Any) -> Any:
        """Units of all heads of a request; none where the length is -1."""
        cut = self.cut
        _, tiles = tile_span(length, cut.rows, cut.window, cut.tile)
        units = units_of(tiles, cut.parts, cut.least) * cut.heads
        return Int32(cutlass.select_(length < 0, Int32(0), units))

    @cute.jit
    def run(self, arguments, cta, lane) -> None:
        """All pieces of this CTA, then an item that is none."""
        batch, ctas = Int32(arguments[at("batch")]), Int32(arguments[at("ctas")])
        chunks = (batch + (LANES - 1)) // LANES
        total = Int32(0)
        for chunk in cutlass.range(chunks, unroll=4):
            units = self._units(self._length(arguments, chunk * LANES + lane))
            total += cute.arch.warp_redux_sync(units, "add")
        position, end = stripe(cta, ctas, total)
        # Before the first 32 requests, so that the first piece opens them.
        chunk, before, count = Int32(-1), Int32(0), Int32(0)
        length, ends = Int32(0), Int32(0)
        ring, mail = Int32(0), Int32(0)
        while position < end:
            while position >= before + count:
                before += count
                chunk += 1
                length = self._length(arguments, chunk * LANES + lane)
                ends = _running_sum(self._units(length), lane)
                count = cute.arch.shuffle_sync(ends, LANES - 1)
            mine = cute.arch.popc(cute.arch.vote_ballot_sync(before + ends <= position))
            keys = cute.arch.shuffle_sync(length, mine)
            base = before + cute.arch.shuffle_sync(ends, mine) - self._units(keys)
            item, taken = self._piece(
                (chunk * LANES + mine, keys, base), (position, end), (cta, ctas, total)
            )
            Producer._post(self, item, mail, lane)
            mail += 1
            position += taken
            ring = Producer._stream(self, arguments, item, ring, lane)
        Producer._post(self, Item(*[Int32(0)] * len(Item._fields)), mail, lane)

    def _piece(self, request: Any, span: Any, place: Any) -> tuple[Item, Any]:
        """The piece at a position, and its units."""
        cut = self.cut
        (number, length, base), (position, end), (cta, ctas, total) = request, span, place
        first, tiles = tile_span(length, cut.rows, cut.window, cut.tile)
        units = units_of(tiles, cut.parts, cut.least)
        head = (position - base) // units
        unit = position - base - head * units
        if cut.parts is not None:
            each = part_tiles(tiles, cut.parts, cut.least)
            origin = (number * cut.heads + head) * cut.parts
            count = cutlass.min(each, tiles - unit * each)
            slot = slot_of(unit, origin, cut.parts)
            place = first + unit * each
            final = position + 1 >= end
            return Item(Int32(1), number, head, place, count, length, slot, units, origin, final), 1
        start = base + head * units
        origin = owner(start, ctas, total)
        count = cutlass.min(units - unit, end - position)
        pieces = owner(start + units - 1, ctas, total) - origin + 1
        whole = whole_slot(number * cut.heads + head, cta, ctas)
        slot = slot_of(cta - origin, origin, None)
        slot = Int32(cutlass.select_(pieces == 1, Int32(whole), Int32(slot)))
        place = first + unit
        final = position + count >= end
        item = Item(Int32(1), number, head, place, count, length, slot, pieces, origin, final)
        return item, count

    @cute.jit
    def _post(self, item, mail, lane) -> None:
        """Put an item into the mailbox."""
        turn, place = split(mail, MAIL_SLOTS)
        cute.arch.mbarrier_wait(self.barriers["taken"] + place, turn & 1 ^ 1)
        posted, slots = self.barriers["posted"] + place, self.shared["mail"]
        if lane == 0:
            write_item(slots, place, item)
            cute.arch.mbarrier_arrive(posted)
        cute.arch.sync_warp()

    # --- keys and values ---

    @cute.jit
    def _stream(self, arguments, item, ring, lane) -> Int32:
        """Load the tiles of a piece; the number of tiles so far."""
        paged = self.spec.page is not None
        window, ids, later = Int32(0), Int32(0), Int32(0)
        if cutlass.const_expr(paged):
            window = self._stretch(item.first) // LANES * LANES
            ids = self._ids(arguments, item, window + lane)
            later = self._ids(arguments, item, window + LANES + lane)
        for i in cutlass.range(item.count, unroll=1):
            tile = item.first + i
            if self._beyond(tile, window):
                window += LANES
                ids = later
                later = self._ids(arguments, item, window + LANES + lane)
            if self._fresh(item, tile):
                cute.arch.griddepcontrol_wait()
            place, turn = ring % self.schedule.stages, ring // self.schedule.stages % 2
            cute.arch.mbarrier_wait(self.barriers["empty"] + place, turn ^ 1)
            self._load(arguments, item, (tile, place), (ids, window), lane)
            ring += 1
        return ring

    def _beyond(self, tile: Any, window: Any) -> Any:
        """Whether the page that a tile begins in is beyond the ids at hand."""
        return False if self.spec.page is None else self._stretch(tile) >= window + LANES

    def _fresh(self, item: Any, tile: Any) -> Any:
        """Whether a tile may hold what the kernel in front writes, and nobody has waited for that yet."""
        if self.spec.append or not self.spec.prefetch:
            return False
        return (tile + 1) * self.schedule.tile > item.length - self.spec.rows

    def _stretch(self, tile: Any) -> Any:
        """Number of the page that a tile begins in."""
        return split(tile * self.schedule.tile, self.page)[0]

    @cute.jit
    def _ids(self, arguments, item, stretch) -> Int32:
        """Id of a request's ``stretch``-th page; -1 behind its end."""
        found = cute.make_rmem_tensor(1, Int32)
        found[0] = Int32(-1)
        if stretch * self.page < item.length:
            offset = Int64(item.request) * arguments[at("table_row")] + Int64(stretch)
            found[0] = load_int(arguments[at("page_table")], offset)
        return found[0]

    def _load(self, arguments: Any, item: Any, where: Any, pages: Any, lane: Any) -> None:
        if self.spec.packed:
            Producer._load_records(self, arguments, item, where, pages, lane)
        else:
            Producer._load_boxes(self, item, where, pages, lane)

    @cute.jit
    def _load_boxes(self, item, where, pages, lane) -> None:
        """16- or 8-bit rows by TMA, a page at a time; zeros for what no memory is behind."""
        (tile, place), (ids, window) = where, pages
        spec, tokens = self.spec, self.schedule.tile
        barrier = self.barriers["full"] + place
        if lane == 0:
            cute.arch.mbarrier_arrive_and_expect_tx(barrier, self.schedule.stage_bytes(spec))
        cute.arch.sync_warp()
        blocks = self.schedule.blocks(spec)
        for number in cutlass.range_constexpr(self.units):
            row, page = Int32(tile), item.request
            if cutlass.const_expr(spec.page is not None):
                token = tile * tokens + number * self.unit
                page = cute.arch.shuffle_sync(ids, token // spec.page - window)
                row = token % spec.page // self.unit
            for side in cutlass.range_constexpr(2):
                atom, source, target, chunks = self.loads[side]
                for c in cutlass.range_constexpr(chunks):
                    cute.copy(
                        atom,
                        source[None, row, c, item.head // blocks, page],
                        target[None, number, c, place],
                        tma_bar_ptr=barrier,
                    )

    @cute.jit
    def _load_records(self, arguments, item, where, pages, lane) -> None:
        """Records of nibbles by bulk copies: a page's in one, part of a contiguous one in four."""
        (tile, place), (ids, window) = where, pages
        spec, tokens = self.spec, self.schedule.tile
        record = Int4Record(self.unit, spec.head_dim)
        barrier = self.barriers["full"] + place
        target = self.shared["ring"] + place * self.schedule.stage_bytes(spec)
        head = (
            arguments[at("k")]
            + Int64(item.head // self.schedule.blocks(spec)) * arguments[at("k_head")]
        )
        mine, size, source = Boolean(False), Int32(record.bytes), head
        if cutlass.const_expr(spec.page is not None):
            stretch = self._stretch(tile) + lane
            page = cute.arch.shuffle_sync(ids, cutlass.min(stretch - window, LANES - 1))
            mine = Boolean((lane < self.units) & (page >= 0))
            target = target + lane * record.bytes
            source = source + Int64(page) * arguments[at("k_page")]
        else:
            # Lane 0 copies nibbles of keys, 1 of values, 2 and 3 their scales.
            mine = Boolean((lane < 4) & (tile * tokens < item.length))
            width = Int32(cutlass.select_(lane < 2, Int32(record.row_bytes), Int32(4)))
            behind = Int32(cutlass.select_(lane < 2, Int32(0), Int32(2 * record.row_bytes)))
            all_tokens = arguments[at("tokens")]
            count = Int32(cutlass.min(all_tokens - Int64(tile) * tokens, Int64(tokens)))
            side = lane % 2
            size = count * width
            target = target + behind * tokens + side * (width * tokens)
            source = source + Int64(item.request) * arguments[at("k_page")]
            source = source + all_tokens * Int64(behind + side * width)
            source = source + Int64(tile) * tokens * Int64(width)
        whole = Int32(cutlass.select_(mine, size, Int32(0)))
        whole = cute.arch.warp_redux_sync(whole, "add")
        if lane == 0:
            cute.arch.mbarrier_arrive_and_expect_tx(barrier, whole)
        cute.arch.sync_warp()
        if mine:
            bulk_copy(target, source, size, Int32(barrier.toint()))


def _running_sum(x: Any, lane: Any) -> Any:
    """Sum over the lanes up to this one."""
    for distance in (1, 2, 4, 8, 16):
        other = cute.arch.shuffle_sync(x, lane - distance)
        x = x + Int32(cutlass.select_(lane >= distance, other, Int32(0)))
    return x


def boxes_of(
    shared: Any, tensor: Any, atom: Any, box: tuple[int, int]
) -> tuple[Any, Any, Any, int]:
    """(atom, boxes of global memory, boxes of shared memory, column chunks) of keys or values."""
    tiles = cute.local_tile(tensor, box, (None, None, None, None))
    places = cute.group_modes(cute.local_tile(shared, box, (None, None, None)), 0, 2)
    target, source = cpasync.tma_partition(
        atom, 0, cute.make_layout(1), places, cute.group_modes(tiles, 0, 2)
    )
    return atom, source, target, cute.size(tensor, mode=[1]) // box[1]
