"""What warps 1-3 of a few-row kernel do: stage operands, add sums up, run epilogues. Imports the DSL.

See ``kernel`` for the roles, the barriers and what passes between them.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import cutlass
from cutlass import Float32, Int32, Int64, cute

from epicute.decode.geometry import FINISHERS, epilogue_tasks, finisher
from epicute.decode.schedule import BARRIERS, STAGED, Shared
from epicute.decode.sm90.exchange import Exchange
from epicute.decode.sm90.finish import FewRowDriver
from epicute.decode.sm90.ptx import arrive, arrive_remote, barrier_at, expect, remote
from epicute.decode.spec import FewRowSpec
from epicute.gemm.driver import Tile, TileState
from epicute.gemm.staging import Stager

__all__ = ["Finishers", "Walk"]


class Walk(NamedTuple):
    """The tiles of a CTA: every ``step``-th from ``first`` on, ``count`` in all, for each of ``m_tiles``; and its
    records along k, ``chunks`` from ``along`` on.
    """

    rank: Any
    first: Any
    step: Any
    count: Any
    m_tiles: Any
    along: Any
    chunks: Any


class Finishers:
    """Places of the barriers and of the sums, and the warps that finish tiles."""

    def __init__(self, spec: FewRowSpec) -> None:
        self.spec, self.problem, self.schedule = spec, spec.problem, spec.schedule
        self.shared = Shared(spec.problem, spec.schedule)
        self.cluster, self.rows = spec.schedule.cluster, spec.schedule.rows
        self.driver = FewRowDriver(spec.resolved, spec.layout, spec.problem, spec.schedule)
        self.exchange = Exchange(spec.problem, spec.schedule)
        self.stager = Stager(spec.resolved, spec.layout, self.rows, spec.problem.staged_rows)
        self.staged = not self.stager.plan.empty
        self.tasks = epilogue_tasks(self.schedule.owned)

    def _barrier(self, base: Any, index: Any) -> Any:
        """Address of a barrier: full and empty of each slot, then the others in the order of the module's table."""
        return base + self.shared.barriers + index * 8

    def _full(self, base: Any, slot: Any) -> Any:
        return self._barrier(base, slot)

    def _empty(self, base: Any, slot: Any) -> Any:
        return self._barrier(base, self.schedule.slots + slot)

    def _other(self, base: Any, index: Any) -> Any:
        return self._barrier(base, 2 * self.schedule.slots + index)

    def _ready(self, base: Any, buffer: Any) -> Any:
        return self._other(base, buffer)

    def _taken(self, base: Any, buffer: Any) -> Any:
        return self._other(base, STAGED + buffer)

    def _added(self, base: Any, count: Any) -> Any:
        """Of the ``count``-th tile."""
        return self._other(base, BARRIERS + count % self.schedule.sums)

    def _read(self, base: Any, count: Any) -> Any:
        return self._other(base, BARRIERS + self.schedule.sums + count % self.schedule.sums)

    def _came(self, base: Any, count: Any) -> Any:
        return self._other(base, BARRIERS + 2 * self.schedule.sums + count % self.shared.arriving)

    def _used(self, base: Any, count: Any) -> Any:
        first = BARRIERS + 2 * self.schedule.sums + self.shared.arriving
        return self._other(base, first + count % self.shared.arriving)

    def _sums(self, base: Any, count: Any) -> Any:
        """``base``, or as much behind it as the ``count``-th tile's buffer of sums is behind the first."""
        if self.schedule.sums == 1:
            return base
        return base + count % self.schedule.sums * self.shared.exchange

    def _arrive(self, barrier: Any, lane: Any) -> None:
        """Arrive for a warp, behind a barrier of it."""
        arrive(barrier, Int32(lane < self.schedule.arriving_lanes))

    @cute.jit
    def _finish_all(self, arguments, base, walk, thread) -> None:
        """Stage the operands of every tile, one ahead, and run this warp's part of every epilogue.

        In a cluster, a tile's sums are sent before the epilogue of the tile in front of it: they are under way then.
        """
        warp, lane = cute.arch.make_warp_uniform(thread // 32) - 1, thread % 32
        state = TileState(self.spec.layout, arguments)
        turn = cute.make_rmem_tensor(3, Int32)
        turn.fill(0)
        for m in cutlass.range(walk.m_tiles, unroll=1):
            if cutlass.const_expr(self.cluster > 1):
                for i in cutlass.range(walk.count + 1, unroll=1):
                    if cutlass.const_expr(self.staged):
                        self._stage_one(arguments, base, turn, walk, m, i, thread)
                    self._send_one(base, turn, walk, i, thread)
                    self._finish_one(arguments, base, walk, state, turn, m, i - 1, warp, lane)
            else:
                if cutlass.const_expr(self.staged):
                    self._stage_one(arguments, base, turn, walk, m, 0, thread)
                for i in cutlass.range(walk.count, unroll=1):
                    if cutlass.const_expr(self.staged):
                        self._stage_one(arguments, base, turn, walk, m, i + 1, thread)
                    self._finish_one(arguments, base, walk, state, turn, m, i, warp, lane)
        state.flush(lane)

    @cute.jit
    def _send_one(self, base, turn, walk, i, thread) -> None:
        """Add the CTA's sums of the ``i``-th tile up and send them, where there is one."""
        if i < walk.count:
            count = turn[2]
            come, arriving = count % self.shared.arriving, count // self.shared.arriving
            came = self._came(base, count)
            expect(came, 4 * self.rows * self.problem.tile, Int32(thread == 32))
            parity = count // self.schedule.sums & 1
            cute.arch.mbarrier_wait(barrier_at(self._added(base, count)), parity)
            cute.arch.mbarrier_wait(barrier_at(self._used(base, count)), (arriving & 1) ^ 1)
            sums = self._sums(base, count) + self.shared.sums
            arrivals = base + self.shared.arrivals + come * self.shared.arrival
            self.exchange.send(sums, arrivals, came, walk.rank, thread - 32)
            cute.arch.sync_warp()
            self._arrive(self._read(base, count), thread % 32)
            turn[2] = count + 1

    @cute.jit
    def _finish_one(self, arguments, base, walk, state, turn, m, i, warp, lane) -> None:
        """This warp's part of the ``i``-th tile's epilogue, where there is one."""
        if i >= 0:
            tile = walk.first + i * walk.step
            self._finish(arguments, base, walk, state, turn[1], m, tile, warp, lane)
            turn[1] = turn[1] + 1

    @cute.jit
    def _stage_one(self, arguments, base, turn, walk, m, i, thread) -> None:
        """Stage the operands of the ``i``-th tile, where there is one."""
        if i < walk.count:
            self._stage_tile(arguments, base, turn, m, walk.first + i * walk.step, thread)

    def _stage_tile(self, arguments, base, turn, m, tile, thread) -> None:
        buffer, parity = turn[0] % 2, turn[0] // 2 % 2
        cute.arch.mbarrier_wait(barrier_at(self._taken(base, buffer)), parity ^ 1)
        floats, integers = self._buffers(base, buffer)
        self.stager.run(arguments, floats, integers, m, tile // self.problem.parts, thread - 32)
        cute.arch.mbarrier_arrive(barrier_at(self._ready(base, buffer)))
        turn[0] = turn[0] + 1

    def _buffers(self, base: Any, index: Any) -> tuple[Any, Any]:
        """Staged operands of a tile as flat tensors; None where there are none."""
        found = []
        for dtype, start, count, size in (
            (Float32, self.shared.floats, self.shared.float_count, 4),
            (Int64, self.shared.integers, self.shared.integer_count, 8),
        ):
            place = base + start + index * (count * size)
            alignment = 16 if size == 4 else 8
            pointer = cute.make_ptr(dtype, place, cute.AddressSpace.smem, assumed_align=alignment)
            found.append(cute.make_tensor(pointer, cute.make_layout(count)) if count else None)
        return found[0], found[1]

    @cute.jit
    def _finish(self, arguments, base, walk, state, count, m, tile, warp, lane) -> None:
        """This warp's part of a tile's epilogue, if it has one.

        It sees every tile's sums complete, and says so: phases of a barrier that pass unseen would be taken for others.
        """
        if cutlass.const_expr(self.cluster > 1):
            parity = count // self.shared.arriving & 1
            cute.arch.mbarrier_wait(barrier_at(self._came(base, count)), parity)
        else:
            parity = count // self.schedule.sums & 1
            cute.arch.mbarrier_wait(barrier_at(self._added(base, count)), parity)
        cute.arch.sync_warp()
        first = finisher(warp, count, self.schedule.owned)
        for task in cutlass.range(first, self.tasks, FINISHERS, unroll=1):
            self._task(arguments, base, walk, state, count, m, tile, task, lane)
        cute.arch.sync_warp()
        if cutlass.const_expr(self.cluster > 1):
            # Only where somebody waits for it: no CTA is called behind its end, and none has to wait for the others.
            awaited = count < walk.m_tiles * walk.count - self.shared.arriving
            there = remote(self._used(base, count), cutlass.min(lane, self.cluster - 1))
            arrive_remote(there, Int32((lane < self.cluster) & awaited))
        else:
            self._arrive(self._read(base, count), lane)

    @cute.jit
    def _task(self, arguments, base, walk, state, count, m, tile, task, lane) -> None:
        """Eight rows of a tile's epilogue."""
        buffer = count % 2
        if cutlass.const_expr(self.staged):
            cute.arch.mbarrier_wait(barrier_at(self._ready(base, buffer)), count // 2 % 2)
        floats, integers = self._buffers(base, buffer)
        parts = self.problem.parts
        found = Tile(arguments, state, floats, integers, m, tile // parts)
        first = walk.rank * self.schedule.owned
        row = task * 8 + lane // 4
        if cutlass.const_expr(self.cluster > 1):
            sums = base + self.shared.arrivals + count % self.shared.arriving * self.shared.arrival
        else:
            sums = self._sums(base, count) + self.shared.sums
        self.driver.finish(sums, found, tile % parts, (first, row, lane))
        cute.arch.sync_warp()
        if cutlass.const_expr(self.staged):
            self._arrive(self._taken(base, buffer), lane)
