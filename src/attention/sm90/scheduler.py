"""Work items on the device: one warp walks the order of ``attention.work`` and posts them. Imports the DSL."""

from __future__ import annotations

from typing import Any, NamedTuple

import cutlass
from cutlass import Int32, Int64, cute

from epicute.attention.arguments import at
from epicute.attention.schedule import AttentionSchedule
from epicute.attention.spec import AttentionSpec
from epicute.attention.work import item_at, tiles_of

__all__ = ["ITEM_FIELDS", "Item", "Scheduler", "read_item", "span"]

ITEM_FIELDS = 8
"""32-bit integers of a posted item."""

LANES = 32


class Item(NamedTuple):
    """A work item. ``valid``: 0 behind the last one. ``head``: of the cluster's first CTA."""

    valid: Any
    request: Any
    tile: Any
    head: Any
    q_length: Any
    kv_length: Any
    q_row: Any
    kv_row: Any


def read_item(slot: Any) -> Item:
    """The item in a slot of the mailbox."""
    return Item(*(slot[i] for i in range(ITEM_FIELDS)))


def span(spec: AttentionSpec, schedule: AttentionSchedule, item: Item) -> tuple[Any, Any]:
    """(first, last) tile of keys of an item; never empty, though all of it may be masked."""
    offset = item.kv_length - item.q_length
    end = item.kv_length
    first = Int32(0)
    if spec.causal:
        row = item.tile * schedule.tile_m
        end = cutlass.min(end, row + schedule.tile_m + offset)
        if spec.window is not None:
            since = cutlass.max(row + offset - (spec.window - 1), 0)
            first = since // schedule.tile_n
    last = cutlass.max((end + (schedule.tile_n - 1)) // schedule.tile_n - 1, 0)
    return cutlass.min(first, last), last


def integers(address: Any) -> Any:
    """A tensor of int32 at a global address."""
    pointer = cute.make_ptr(Int32, address, cute.AddressSpace.gmem, assumed_align=4)
    return cute.make_tensor(pointer, cute.make_layout(1))


def load_int(address: Any, index: Any) -> Any:
    """The ``index``-th int32 behind ``address``."""
    return integers(address + Int64(index) * 4)[0]


class Scheduler:
    """Device code of the scheduling warp."""

    def __init__(self, spec: AttentionSpec, schedule: AttentionSchedule) -> None:
        self.spec, self.schedule = spec, schedule
        self.per_kv_head = spec.group // schedule.cluster

    def rows(self, arguments: Any, request: Any) -> tuple[Any, Any]:
        """(length of q, first row of q) of a request."""
        if self.spec.packed:
            first = load_int(arguments[at("q_starts")], request)
            return load_int(arguments[at("q_starts")], request + 1) - first, first
        length = Int32(arguments[at("q_rows")])
        return self._given(arguments, "q_lengths", request, length), Int32(0)

    def keys(self, arguments: Any, request: Any) -> tuple[Any, Any]:
        """(length of k and v, first row of theirs) of a request."""
        if self.spec.page is not None:
            return load_int(arguments[at("kv_lengths")], request), Int32(0)
        if self.spec.packed:
            first = load_int(arguments[at("kv_starts")], request)
            return load_int(arguments[at("kv_starts")], request + 1) - first, first
        length = Int32(arguments[at("kv_rows")])
        return self._given(arguments, "kv_lengths", request, length), Int32(0)

    def _given(self, arguments: Any, name: str, request: Any, otherwise: Any) -> Any:
        """A request's length where lengths are given, within what there is memory for."""
        found = cute.make_rmem_tensor(1, Int32)
        found[0] = otherwise
        read_length(arguments[at(name)], request, found)
        return cutlass.min(found[0], otherwise)

    def tiles(self, arguments: Any, request: Any) -> Any:
        """Tiles of a request; none beyond the batch."""
        found = cute.make_rmem_tensor(1, Int32)
        found[0] = Int32(0)
        self._tiles(arguments, request, found)
        return found[0]

    @cute.jit
    def _tiles(self, arguments, request, found) -> None:
        if request < Int32(arguments[at("batch")]):
            length, _ = self.rows(arguments, request)
            found[0] = tiles_of(length, self.schedule.tile_m)

    @cute.jit
    def run(self, arguments, slots, mailbox, cluster, lane) -> None:
        """Post this cluster's items in order, then one that is not valid."""
        batch, clusters = Int32(arguments[at("batch")]), Int32(arguments[at("clusters")])
        section = Int32(arguments[at("section")])
        heads = section * self.per_kv_head
        chunks = (batch + (LANES - 1)) // LANES
        total, most = Int32(0), Int32(0)
        for chunk in cutlass.range(chunks, unroll=1):
            tiles = self.tiles(arguments, chunk * LANES + lane)
            total += cute.arch.warp_redux_sync(tiles, "add")
            most = cutlass.max(most, cute.arch.warp_redux_sync(tiles, "max"))
        in_section = total * heads
        sections = self.spec.kv_heads // section
        state = cutlass.pipeline.make_pipeline_state(
            cutlass.pipeline.PipelineUserType.Producer, slots.shape[1]
        )
        # Before the first section, so that its first item opens it.
        at_section, level, base, count, step = Int32(-1), most, Int32(0), Int32(0), Int32(-1)
        turn = Int32(0)
        position = item_at(turn, cluster, clusters)
        while position < in_section * sections:
            within = position - at_section * in_section
            if within >= in_section:
                at_section = position // in_section
                within = position - at_section * in_section
                step = 2 * ((sections - at_section + 1) % 2) - 1
                level = cutlass.select_(step > 0, Int32(-1), most)
                base, count = Int32(0), Int32(0)
            while within >= base + count:
                base += count
                level += step
                count = self._having(arguments, level, chunks, lane) * heads
            index = within - base
            order = index // heads
            head = (at_section * heads + index - order * heads) * self.schedule.cluster
            request = self._find(arguments, level, order, chunks, lane)
            self._post(arguments, slots, mailbox, state, request, level, head, lane)
            state.advance()
            turn += 1
            position = item_at(turn, cluster, clusters)
        mailbox.producer_acquire(state)
        if lane == 0:
            slots[0, state.index] = Int32(0)
        mailbox.producer_commit(state)

    @cute.jit
    def _having(self, arguments, level, chunks, lane) -> Int32:
        """Requests that have tile ``level``."""
        found = Int32(0)
        for chunk in cutlass.range(chunks, unroll=1):
            has = self.tiles(arguments, chunk * LANES + lane) > level
            found += cute.arch.popc(cute.arch.vote_ballot_sync(has))
        return found

    @cute.jit
    def _find(self, arguments, level, order, chunks, lane) -> Int32:
        """The ``order``-th request that has tile ``level``."""
        found, before = Int32(0), Int32(0)
        for chunk in cutlass.range(chunks, unroll=1):
            has = self.tiles(arguments, chunk * LANES + lane) > level
            votes = cute.arch.vote_ballot_sync(has)
            rank = before + cute.arch.popc(votes & cute.arch.lanemask_lt())
            mine = cutlass.select_(has & (rank == order), chunk * LANES + lane, Int32(0))
            found += cute.arch.warp_redux_sync(mine, "add")
            before += cute.arch.popc(votes)
        return found

    @cute.jit
    def _post(self, arguments, slots, mailbox, state, request, tile, head, lane) -> None:
        q_length, q_row = self.rows(arguments, request)
        kv_length, kv_row = self.keys(arguments, request)
        mailbox.producer_acquire(state)
        if lane == 0:
            item = Item(Int32(1), request, tile, head, q_length, kv_length, q_row, kv_row)
            for i in cutlass.range_constexpr(ITEM_FIELDS):
                slots[i, state.index] = item[i]
        mailbox.producer_commit(state)


@cute.jit
def read_length(address: Int64, request: Int32, found: cute.Tensor) -> None:
    """Put a request's length in ``found`` where there is a list of them."""
    if address != 0:
        found[0] = load_int(address, request)
