"""What one warp of a few-row kernel brings to shared memory: weights, and rows of x by TMA. Imports the DSL.

Both come in the order in which they are multiplied. Weights do not wait for the kernel in front of this one: as many as
the ring holds are under way before the first rows of x are.

    once x fits        w w w w | x x x ... | w w w ...            ``|``: the kernel in front has ended
    else               w w w w | x x | w w x w w x ...            a chunk of x, then that of every tile that is held
"""

from __future__ import annotations

from typing import Any

import cutlass
from cutlass import Int32, Int64, cute
from cutlass.cute.nvgpu import cpasync, warpgroup

from epicute.decode.geometry import share_of
from epicute.decode.sm90.finishers import Finishers, Walk
from epicute.decode.sm90.multiply import NATIVE
from epicute.decode.sm90.ptx import barrier_at, bulk_copy, expect, streaming
from epicute.decode.spec import FewRowSpec
from epicute.epilogues.dsl import opaque
from epicute.layouts import BLOCK

__all__ = ["Producer"]

SLOT, PARITY, X_SLOT, X_PARITY, ISSUED, PENDING = range(6)
"""The producer's state: where the rings stand; weights that were begun; chunks of x that wait for the kernel in front,
-1 from when it has ended on.
"""


class Producer(Finishers):
    """The ring of weights and that of x, as their producer sees them."""

    def __init__(self, spec: FewRowSpec) -> None:
        super().__init__(spec)
        self.records, self.record = spec.problem.records, spec.problem.record
        self.resident = self.schedule.chunks >= self.shared.held
        self.direct, self.pieces = self.shared.direct, self.shared.pieces
        self.blocks = self.record.blocks // self.pieces
        self.phase = 1 if self.direct else self.schedule.chunks

    # --- x in memory ---

    def _rows_in_memory(self, arguments: Any) -> tuple[Any, ...]:
        """TMA atom and tensor of x; host code."""
        if not self.direct:
            return ()
        dtype = NATIVE[self.problem.dtype]
        pointer = cute.make_ptr(dtype, arguments[0], cute.AddressSpace.gmem, assumed_align=16)
        stride = cute.assume(arguments[1] // 2, 8)
        rows = cutlass.max(Int32(arguments[2]), 1)
        layout = cute.make_layout((rows, self.problem.depth), stride=(stride, 1))
        operation = cpasync.CopyBulkTensorTileG2SOp()
        tensor = cute.make_tensor(pointer, layout)
        return tuple(cpasync.make_tiled_tma_atom(operation, tensor, self._box(), self._shape()))

    def _shape(self) -> tuple[int, int]:
        return self.rows, BLOCK

    def _box(self) -> Any:
        kind = warpgroup.SmemLayoutAtomKind.K_SW128
        atom = warpgroup.make_smem_layout_atom(kind, NATIVE[self.problem.dtype])
        return cute.tile_to_shape(atom, self._shape(), (0, 1))

    def _boxes(self, loads: Any, memory: Any) -> tuple[Any, ...]:
        """TMA atom, boxes of x in memory by row tile and block, and their places by chunk and block."""
        if not self.direct:
            return ()
        atom, tensor = loads
        cpasync.prefetch_descriptor(atom)
        one, step = self._box(), self.shared.chunk // 2
        pointer = cute.recast_ptr(
            memory.iterator + self.shared.x, one.inner, dtype=NATIVE[self.problem.dtype]
        )
        count = (self.blocks, self.schedule.chunks)
        places = cute.make_layout(count, stride=(self.rows * BLOCK, step))
        outer = cute.append(one.outer, places)
        places = cute.group_modes(cute.make_tensor(pointer, outer), 0, 2)
        tiles = cute.group_modes(cute.local_tile(tensor, self._shape(), (None, None)), 0, 2)
        target, source = cpasync.tma_partition(atom, 0, cute.make_layout(1), places, tiles)
        return atom, source, target

    # --- barriers of x ---

    def _x_full(self, base: Any, slot: Any) -> Any:
        return self._other(base, self.shared.others + slot)

    def _x_empty(self, base: Any, slot: Any) -> Any:
        return self._other(base, self.shared.others + self.schedule.chunks + slot)

    # --- where a CTA works ---

    def _walk(self, arguments: Any, block: Any) -> Walk:
        # Unknown to be the same for every role, or registers hold it across all of them.
        block = opaque(Int32(block))
        rank, first, step = block % self.cluster, block // self.cluster, Int32(arguments[3])
        count = (self.problem.tiles - first + step - 1) // step
        m_tiles = (Int32(arguments[2]) + (self.rows - 1)) // self.rows
        along, end = share_of(rank, self.cluster, self.records.along)
        chunks = end - along
        if self.records.along % self.cluster == 0:
            # Unknown too: unrolled, all loads of a few records would be moved up, and then do not fit the registers.
            chunks = opaque(Int32(self.records.along // self.cluster))
        return Walk(rank, first, step, count, m_tiles, along, chunks)

    def _bands(self, tile: Any) -> Any:
        """Bands of a tile: fewer of the last, where the weight ends in it."""
        if self.records.down % self.problem.bands == 0:
            return Int32(self.problem.bands)
        return cutlass.min(self.records.down - tile * self.problem.bands, self.problem.bands)

    def _phases(self, walk: Walk) -> Any:
        """Parts of a CTA's share of k that tiles held together go through one by one: chunks, or copies of x."""
        return (walk.chunks + (self.phase - 1)) // self.phase

    # --- the warp ---

    @cute.jit
    def _produce(self, loads, memory, weight, arguments, base, walk, lane) -> None:
        boxes = self._boxes(loads, memory)
        if Int32(arguments[self.spec.at("early")]) == 0:
            cute.arch.griddepcontrol_wait()
        turn = cute.make_rmem_tensor(6, Int32)
        turn.fill(0)
        address = weight.iterator.toint()
        for m in cutlass.range(walk.m_tiles, unroll=1):
            if cutlass.const_expr(self.resident):
                for chunk in cutlass.range(walk.chunks * self.pieces, unroll=1):
                    self._ask_rows(boxes, base, turn, walk, m, chunk, lane)
            if cutlass.const_expr(self.schedule.wide > 1):
                for first in cutlass.range(0, walk.count, self.schedule.wide, unroll=1):
                    self._produce_wide(boxes, base, turn, address, walk, m, first, lane)
            else:
                for i in cutlass.range(walk.count, unroll=1):
                    tile = walk.first + i * walk.step
                    for band in cutlass.range(self._bands(tile), unroll=1):
                        at = self._row(address, walk, tile * self.problem.bands + band)
                        self._produce_band(boxes, base, turn, at, walk, m, lane)
            if cutlass.const_expr(self.direct):
                self._open_rows(boxes, base, turn, walk, lane)
        if cutlass.const_expr(self.schedule.late):
            cute.arch.griddepcontrol_launch_dependents()

    @cute.jit
    def _produce_band(self, boxes, base, turn, at, walk, m, lane) -> None:
        for chunk in cutlass.range(walk.chunks, unroll=1):
            if cutlass.const_expr(not self.resident):
                self._ask_rows(boxes, base, turn, walk, m, chunk * self.pieces, lane)
            self._fetch(boxes, base, turn, walk, at + Int64(chunk) * self.record.size, lane)
            if cutlass.const_expr(not self.resident and self.pieces > 1):
                # Behind the record: the first half has to be multiplied before there may be room for it.
                self._ask_rows(boxes, base, turn, walk, m, chunk * self.pieces + 1, lane)

    @cute.jit
    def _produce_wide(self, boxes, base, turn, address, walk, m, first, lane) -> None:
        """Records of tiles that are held together, in the order in which x is read: phase by phase."""
        tiles = cutlass.min(walk.count - first, self.schedule.wide)
        for phase in cutlass.range(self._phases(walk), unroll=1):
            start = phase * self.phase
            count = cutlass.min(walk.chunks - start, self.phase)
            self._ask_rows(boxes, base, turn, walk, m, start, lane)
            for i in cutlass.range(first, first + tiles, unroll=1):
                at = self._row(address, walk, walk.first + i * walk.step)
                at = at + Int64(start) * self.record.size
                for chunk in cutlass.range(count, unroll=1):
                    self._fetch(boxes, base, turn, walk, at + Int64(chunk) * self.record.size, lane)

    def _row(self, address: Any, walk: Walk, down: Any) -> Any:
        """Where a CTA's records of a band begin."""
        return address + self.records.record_offset(Int64(down), Int64(walk.along))

    @cute.jit
    def _ask_rows(self, boxes, base, turn, walk, m, chunk, lane) -> None:
        """Begin the copy of a chunk of x, or note that it is to come."""
        if cutlass.const_expr(self.direct):
            if turn[PENDING] >= 0:
                turn[PENDING] = turn[PENDING] + 1
            else:
                self._fetch_rows(boxes, base, turn, walk, m, chunk, lane)

    @cute.jit
    def _open_rows(self, boxes, base, turn, walk, lane) -> None:
        """Wait for the kernel in front, unless that has been done, and begin what was asked for: of the first rows."""
        pending = turn[PENDING]
        if pending >= 0:
            cute.arch.griddepcontrol_wait()
            count = walk.chunks * self.pieces
            for i in cutlass.range(pending, unroll=1):
                self._fetch_rows(boxes, base, turn, walk, Int32(0), i % count, lane)
            turn[PENDING] = Int32(-1)

    @cute.jit
    def _fetch_rows(self, boxes, base, turn, walk, m, chunk, lane) -> None:
        """Begin the copy of a CTA's ``chunk``-th chunk of x, once its place is free; zeros where there is nothing."""
        atom, source, target = boxes
        slot, parity, blocks = turn[X_SLOT], turn[X_PARITY], self.blocks
        if cutlass.const_expr(self.resident):
            # Every chunk has its place, also where this CTA has fewer of them than others of its cluster.
            slot, parity = chunk, m & 1
        cute.arch.mbarrier_wait(barrier_at(self._x_empty(base, slot)), parity ^ 1)
        full = self._x_full(base, slot)
        expect(full, self.shared.brought, Int32(lane == 0))
        cute.arch.sync_warp()
        for block in cutlass.range_constexpr(blocks):
            cute.copy(
                atom,
                source[None, m, (walk.along * self.pieces + chunk) * blocks + block],
                target[None, (block, slot)],
                tma_bar_ptr=barrier_at(full),
            )
        self._next(turn, X_SLOT, self.schedule.chunks)

    @cute.jit
    def _fetch(self, boxes, base, turn, walk, source, lane) -> None:
        """Begin a record's copy, once its slot is free and few enough others are under way."""
        slots, flight = self.schedule.slots, self.schedule.in_flight
        if cutlass.const_expr(self.direct):
            if turn[ISSUED] == slots:
                self._open_rows(boxes, base, turn, walk, lane)
            turn[ISSUED] = turn[ISSUED] + 1
        slot, parity = turn[SLOT], turn[PARITY]
        cute.arch.mbarrier_wait(barrier_at(self._empty(base, slot)), parity ^ 1)
        if cutlass.const_expr(flight < slots):
            inside = Int32(slot >= flight)
            before = slot - flight + (1 - inside) * slots
            cute.arch.mbarrier_wait(barrier_at(self._full(base, before)), parity ^ 1 ^ inside)
        full = self._full(base, slot)
        if lane == 0:
            cute.arch.mbarrier_arrive_and_expect_tx(barrier_at(full), self.record.size)
            policy = streaming() if cutlass.const_expr(self.schedule.evict_first) else None
            bulk_copy(base + slot * self.shared.slot, source, self.record.size, full, policy)
        cute.arch.sync_warp()
        self._next(turn, SLOT, slots)

    def _next(self, turn: Any, at: int, count: int) -> None:
        """Go on to the next of ``count`` slots, in the state at ``at``; the parity turns where they begin again."""
        last = Int32(turn[at] == count - 1)
        turn[at] = (turn[at] + 1) * (1 - last)
        turn[at + 1] = turn[at + 1] ^ last
