"""Few-row projection for Hopper: D = epilogue(X · Wᵀ) for up to 64 rows of X at a time. Imports the DSL.

The weight is the MMA's A operand, dequantised in registers; the rows of X are its columns. It is streamed record by
record (``layouts.decode_order``) through a ring by a thread that waits for nobody: with programmatic dependent launch
it reads weights while the kernel before is still at work, up to what the ring holds.

    warp 0        ring: one bulk copy a record, at most ``in_flight`` under way              (few registers)
    warps 1-3     stage the epilogue's vector operands, one tile ahead; in turns the epilogue, eight rows of X a warp
    warps 4-11    copy X once, then multiply: every warp has a share of each record          (the rest)
    warps 12-19   where there are two teams: they multiply records of odd k, and warps 4-11 those of even k

    barriers      full[s]     one producer arrive + bytes of a record                        ring -> consumers
                  empty[s]    every consumer warp, of both teams                             consumers -> ring
                  ready[2]    96 staging threads; taken[2]: the parts of the tile's epilogue
                  added[b]    every consumer warp: its sums of a tile are written
                  read[b]     warps 1-3: the sums may be written over
                  came[b]     in a cluster: one arrive + bytes of the sums of all its CTAs   warps 1-3 -> warps 1-3
                  used[b]     warps 1-3 of every CTA: what has come may be written over
    named         1           consumers, around X

    warp 0        |record 0|record 1| ...  as the ring allows, from before ``griddepcontrol.wait`` on
    consumers            |X|record 0|record 1| ... |send|record 0 of the next tile ...
    a warp of 1-3        |stage|stage the next|    |    |epilogue|

Where shared memory cannot hold a CTA's share of X, X is copied phase by phase, the next phase while this one is
multiplied if there is room (``ahead``); several tiles' sums then stay in registers (``wide``), so that a phase serves
them all:

    copies         |phase 0|phase 1      |phase 2      | ...
    consumers              |tile 0|tile 1|tile 0|tile 1| ... |send both| ...

Warps multiply each by itself, or four as a warpgroup (``multiply``, ``warpgroup``): sums stand in the same registers.

A slot is given back behind ``__syncwarp``: lanes leave a wait one by one, and an arrival of lane 0 alone says nothing
of what the others have read. A CTA of a cluster has a share of k; its warps 1-3 send its sums, over distributed shared
memory, to the CTA that finishes their row of X (``exchange``), and run epilogues one tile behind.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import cutlass
from cutlass import Float32, Int32, Int64, Uint8, cute
from cutlass import memory as cutlass_memory

from epicute.decode.geometry import FINISHERS, WARPS, epilogue_tasks, finisher, share_of
from epicute.decode.schedule import BARRIERS, STAGED, Shared
from epicute.decode.sm90.exchange import Exchange
from epicute.decode.sm90.finish import FewRowDriver
from epicute.decode.sm90.multiply import Multiplier
from epicute.decode.sm90.ptx import (
    arrive,
    arrive_remote,
    barrier_at,
    bulk_copy,
    expect,
    remote,
    streaming,
)
from epicute.decode.sm90.stage import Activations
from epicute.decode.sm90.warpgroup import WarpgroupMultiplier
from epicute.decode.spec import FewRowSpec
from epicute.epilogues.dsl import opaque
from epicute.gemm.driver import Tile, TileState
from epicute.gemm.staging import STAGERS, Stager

__all__ = ["FewRowGemm"]

REGISTERS = {1: (80, 208), 2: (64, 104)}
"""Per thread of the first warpgroup and of the consumers, by teams, after they have traded. A launch of 384 threads has
168 each, one of 640 has 96: there is no more to trade.
"""

AROUND_X = 1
"""The named barrier of the consumers."""


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


class FewRowGemm:
    """The device code of one ``FewRowSpec``; calling it traces the launch."""

    def __init__(self, spec: FewRowSpec) -> None:
        self.spec, self.problem, self.schedule = spec, spec.problem, spec.schedule
        self.shared = Shared(spec.problem, spec.schedule)
        self.cluster, self.rows = spec.schedule.cluster, spec.schedule.rows
        self.records, self.record = spec.problem.records, spec.problem.record
        self.driver = FewRowDriver(spec.resolved, spec.layout, spec.problem, spec.schedule)
        self.exchange = Exchange(spec.problem, spec.schedule)
        self.stager = Stager(spec.resolved, spec.layout, self.rows, spec.problem.staged_rows)
        self.staged = not self.stager.plan.empty
        self.activations = Activations(spec.problem, spec.schedule)
        self.most = self.problem.chunks(self.cluster)
        self.resident = self.schedule.chunks >= self.most
        self.tasks = epilogue_tasks(self.schedule.owned)
        self.wgmma = self.schedule.mma == "wgmma"
        self.multiplier = WarpgroupMultiplier if self.wgmma else Multiplier
        self.teams = self.schedule.teams
        self.warps = WARPS * self.teams

    @cute.jit
    def __call__(self, weight: cute.Tensor, arguments: Any, stream: Any) -> None:
        """Launch. ``weight``: its records as bytes; ``arguments``: see ``FewRowSpec``."""
        self.kernel.set_name_prefix(self.spec.name)
        self.kernel(weight, arguments).launch(
            grid=(Int32(arguments[3]) * self.cluster, 1, 1),
            block=(128 + 32 * self.warps, 1, 1),
            cluster=(self.cluster, 1, 1),
            stream=stream,
            min_blocks_per_mp=1,
            preferred_smem_carveout=100,
            use_pdl=True,
        )

    @cute.kernel
    def kernel(self, weight: cute.Tensor, arguments: Any) -> None:
        if cutlass.const_expr(not self.schedule.late):
            cute.arch.griddepcontrol_launch_dependents()
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        warp = cute.arch.make_warp_uniform(thread // 32)
        allocator = cutlass_memory.SmemAllocator()
        align = self.shared.alignment
        memory = allocator.allocate_tensor(Uint8, cute.make_layout(self.shared.size), align)
        base = Int32(memory.iterator.toint())
        self._open(base, thread)
        few, many = REGISTERS[self.teams]
        if warp < 4:
            cute.arch.setmaxregister_decrease(few)
            if warp == 0:
                if thread == 0:
                    self._produce(weight, arguments, base, self._walk(arguments, block))
            else:
                cute.arch.griddepcontrol_wait()
                self._finish_all(arguments, base, self._walk(arguments, block), thread)
        else:
            cute.arch.setmaxregister_increase(many)
            cute.arch.griddepcontrol_wait()
            self._consume(arguments, base, self._walk(arguments, block), thread - 128)
        if cutlass.const_expr(self.cluster > 1):
            cute.arch.sync_warp()
            cute.arch.cluster_arrive()
            cute.arch.cluster_wait()

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

    @cute.jit
    def _open(self, base, thread) -> None:
        """Set the barriers up, so that all of the cluster see them."""
        if thread == 0:
            slots = self.schedule.slots
            for slot in cutlass.range_constexpr(slots):
                cute.arch.mbarrier_init(barrier_at(self._full(base, slot)), 1)
                cute.arch.mbarrier_init(barrier_at(self._empty(base, slot)), self.warps)
            counts = [c for c in (STAGERS, self.tasks) for _ in range(STAGED)]
            counts += [c for c in (self.warps, FINISHERS) for _ in range(self.schedule.sums)]
            both = (1, FINISHERS * self.cluster)
            counts += [c for c in both for _ in range(self.shared.arriving)]
            for i in cutlass.range_constexpr(len(counts)):
                cute.arch.mbarrier_init(barrier_at(self._other(base, i)), counts[i])
        cute.arch.mbarrier_init_fence()
        if cutlass.const_expr(self.cluster > 1):
            cute.arch.cluster_arrive_relaxed()
            cute.arch.cluster_wait()
        else:
            cute.arch.sync_threads()

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

    @cute.jit
    def _produce(self, weight, arguments, base, walk) -> None:
        if Int32(arguments[self.spec.at("early")]) == 0:
            cute.arch.griddepcontrol_wait()
        turn = cute.make_rmem_tensor(2, Int32)
        turn.fill(0)
        address = weight.iterator.toint()
        for _ in cutlass.range(walk.m_tiles, unroll=1):
            if cutlass.const_expr(self.schedule.wide > 1):
                for group in cutlass.range(self._groups(walk), unroll=1):
                    self._produce_wide(base, turn, address, walk, group * self.schedule.wide)
            else:
                for i in cutlass.range(walk.count, unroll=1):
                    tile = walk.first + i * walk.step
                    for band in cutlass.range(self._bands(tile), unroll=1):
                        at = self._row(address, walk, tile * self.problem.bands + band)
                        self._fetch_all(base, turn, at, walk.chunks)
        if cutlass.const_expr(self.schedule.late):
            cute.arch.griddepcontrol_launch_dependents()

    @cute.jit
    def _produce_wide(self, base, turn, address, walk, first) -> None:
        """Records of tiles that are held together, in the order in which x is read: phase by phase."""
        tiles = cutlass.min(walk.count - first, self.schedule.wide)
        chunks = self.schedule.chunks
        for phase in cutlass.range(self._phases(walk), unroll=1):
            count = cutlass.min(walk.chunks - phase * chunks, chunks)
            for i in cutlass.range(first, first + tiles, unroll=1):
                at = self._row(address, walk, walk.first + i * walk.step)
                self._fetch_all(base, turn, at + Int64(phase * chunks) * self.record.size, count)

    def _groups(self, walk: Walk) -> Any:
        """Groups of tiles that are held together."""
        return (walk.count + (self.schedule.wide - 1)) // self.schedule.wide

    def _phases(self, walk: Walk) -> Any:
        """Copies of x that a CTA's share of k takes."""
        return (walk.chunks + (self.schedule.chunks - 1)) // self.schedule.chunks

    def _row(self, address: Any, walk: Walk, down: Any) -> Any:
        """Where a CTA's records of a band begin."""
        return address + self.records.record_offset(Int64(down), Int64(walk.along))

    @cute.jit
    def _fetch_all(self, base, turn, source, count) -> None:
        for chunk in cutlass.range(count, unroll=1):
            self._fetch(base, turn, source + Int64(chunk) * self.record.size)

    @cute.jit
    def _fetch(self, base, turn, source) -> None:
        """Begin a record's copy, once its slot is free and few enough others are under way."""
        slots, flight = self.schedule.slots, self.schedule.in_flight
        slot, parity = turn[0], turn[1]
        cute.arch.mbarrier_wait(barrier_at(self._empty(base, slot)), parity ^ 1)
        if cutlass.const_expr(flight < slots):
            inside = Int32(slot >= flight)
            before = slot - flight + (1 - inside) * slots
            cute.arch.mbarrier_wait(barrier_at(self._full(base, before)), parity ^ 1 ^ inside)
        full = self._full(base, slot)
        cute.arch.mbarrier_arrive_and_expect_tx(barrier_at(full), self.record.size)
        policy = streaming() if cutlass.const_expr(self.schedule.evict_first) else None
        bulk_copy(base + slot * self.shared.slot, source, self.record.size, full, policy)
        self._next(turn)

    def _next(self, turn: Any) -> None:
        """Go on to the next slot; the parity turns where the ring begins again."""
        last = Int32(turn[0] == self.schedule.slots - 1)
        turn[0] = (turn[0] + 1) * (1 - last)
        turn[1] = turn[1] ^ last

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
            arrive(self._read(base, count), Int32(thread % 32 == 0))
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
    def _consume(self, arguments, base, walk, thread) -> None:
        warp, lane = cute.arch.make_warp_uniform(thread // 32), thread % 32
        multiplier = self.multiplier(self.problem, self.schedule, self.spec.scale_dtype, warp, lane)
        turn = cute.make_rmem_tensor(4, Int32)
        turn.fill(0)
        for m in cutlass.range(walk.m_tiles, unroll=1):
            self._around_x()
            if cutlass.const_expr(self.resident or self.schedule.ahead):
                self._begin_x(arguments, base, turn, walk, m, Int32(0), thread)
            if cutlass.const_expr(self.resident):
                self._settle_x()
            if cutlass.const_expr(self.schedule.wide > 1):
                for group in cutlass.range(self._groups(walk), unroll=1):
                    first = group * self.schedule.wide
                    last = Int32(first + self.schedule.wide >= walk.count)
                    self._wide(arguments, base, walk, multiplier, turn, m, first, last, thread)
                    for which in cutlass.range_constexpr(self.schedule.wide):
                        self._send_alive(base, walk, multiplier, turn, first + which, which)
            else:
                for i in cutlass.range(walk.count, unroll=1):
                    tile = walk.first + i * walk.step
                    bands = self._bands(tile)
                    for band in cutlass.range(bands, unroll=1):
                        last = Int32(i == walk.count - 1) * Int32(band == bands - 1)
                        self._band(arguments, base, walk, multiplier, turn, m, band, last, thread)
                    self.multiplier.announce(multiplier, self._added(base, turn[2]))
                    turn[2] = turn[2] + 1

    @cute.jit
    def _begin_x(self, arguments, base, turn, walk, m, phase, thread) -> None:
        """Begin to copy the activations of a phase, beside those of the phase before."""
        chunks = self.schedule.chunks
        first = phase * chunks
        count = cutlass.min(walk.chunks - first, chunks)
        stride = arguments[1]
        source = arguments[0] + Int64(m * self.rows) * stride
        live = Int32(arguments[2]) - m * self.rows
        gain = arguments[self.spec.at("gain")]
        target = self._x(base, turn[3])
        self.activations.begin(
            source, stride, gain, target, (walk.along + first, count), live, thread
        )

    def _x(self, base: Any, count: Any) -> Any:
        """Where the activations of the ``count``-th phase are."""
        if not self.schedule.ahead:
            return base + self.shared.x
        return base + self.shared.x + count % 2 * self.shared.phase

    @cute.jit
    def _settle_x(self) -> None:
        """Wait for this thread's copies, then for everyone's; nobody reads the phase before any more."""
        cute.arch.cp_async_wait_group(0)
        if cutlass.const_expr(self.wgmma):
            cute.arch.fence_view_async_shared()
        self._around_x()

    def _around_x(self) -> None:
        cute.arch.barrier(barrier_id=AROUND_X, number_of_threads=32 * self.warps)

    @cute.jit
    def _next_x(self, arguments, base, turn, walk, m, phase, last, thread) -> None:
        """The activations of a phase; those of the next begin to come where there is room: of the first again behind
        the last, where ``last`` is not 1.
        """
        if cutlass.const_expr(self.schedule.ahead):
            self._settle_x()
            turn[3] = turn[3] + 1
            following = (phase + 1) * Int32(phase + 1 < self._phases(walk))
            if (following > 0) | (last == 0):
                self._begin_x(arguments, base, turn, walk, m, following, thread)
        else:
            self._around_x()
            self._begin_x(arguments, base, turn, walk, m, phase, thread)
            self._settle_x()

    @cute.jit
    def _band(self, arguments, base, walk, multiplier, turn, m, band, last, thread) -> None:
        self.multiplier.clear(multiplier)
        if cutlass.const_expr(self.resident):
            self._records(base, multiplier, turn, walk.along, walk.chunks, 0)
        else:
            chunks = self.schedule.chunks
            for phase in cutlass.range(self._phases(walk), unroll=1):
                self._next_x(arguments, base, turn, walk, m, phase, last, thread)
                count = cutlass.min(walk.chunks - phase * chunks, chunks)
                along = walk.along + phase * chunks
                self._records(base, multiplier, turn, along, count, 0)
        if band == 0:
            self._await_read(base, turn[2])
        self.multiplier.send(multiplier, self._sums(base, turn[2]), band)

    @cute.jit
    def _wide(self, arguments, base, walk, multiplier, turn, m, first, last, thread) -> None:
        """Multiply tiles from the ``first``-th on that are held together: all of them with each copy of x."""
        self.multiplier.clear(multiplier)
        chunks = self.schedule.chunks
        for phase in cutlass.range(self._phases(walk), unroll=1):
            self._next_x(arguments, base, turn, walk, m, phase, last, thread)
            count = cutlass.min(walk.chunks - phase * chunks, chunks)
            for which in cutlass.range_constexpr(self.schedule.wide):
                some = count * Int32(first + which < walk.count)
                along = walk.along + phase * chunks
                self._records(base, multiplier, turn, along, some, which)

    @cute.jit
    def _send_alive(self, base, walk, multiplier, turn, i, which: cutlass.Constexpr) -> None:
        """Hand the sums of the ``i``-th tile on, where there is one."""
        if i < walk.count:
            self._await_read(base, turn[2])
            self.multiplier.send(multiplier, self._sums(base, turn[2]), Int32(0), which)
            self.multiplier.announce(multiplier, self._added(base, turn[2]))
            turn[2] = turn[2] + 1

    def _await_read(self, base: Any, count: Any) -> None:
        """Until the buffer of the ``count``-th tile's sums is free."""
        parity = (count // self.schedule.sums & 1) ^ 1
        cute.arch.mbarrier_wait(barrier_at(self._read(base, count)), parity)

    def _sums(self, base: Any, count: Any) -> Any:
        """``base``, or as much behind it as the ``count``-th tile's buffer of sums is behind the first."""
        if self.schedule.sums == 1:
            return base
        return base + count % self.schedule.sums * self.shared.exchange

    @cute.jit
    def _records(self, base, multiplier, turn, along, count, which: cutlass.Constexpr) -> None:
        """Multiply ``count`` records; ``along``: the first one's place along k, by which teams take turns."""
        for chunk in cutlass.range(count, unroll=1):
            self._record(base, multiplier, turn, along, chunk, which)

    @cute.jit
    def _record(self, base, multiplier, turn, along, chunk, which: cutlass.Constexpr) -> None:
        """A team sees the other's records come, and says so: it would take a phase that passed unseen for another."""
        slot = turn[0]
        cute.arch.mbarrier_wait(barrier_at(self._full(base, slot)), turn[1])
        place = base + slot * self.shared.slot
        x = self._x(base, turn[3] + 1) + chunk * self.shared.chunk
        if cutlass.const_expr(self.teams > 1):
            self._in_turn(multiplier, place, x, (along + chunk) % 2 == multiplier.team, which)
        else:
            self.multiplier.run(multiplier, place, x, which)
        cute.arch.sync_warp()
        arrive(self._empty(base, slot), Int32(multiplier.lane == 0))
        self._next(turn)

    @cute.jit
    def _in_turn(self, multiplier, place, x, mine, which: cutlass.Constexpr) -> None:
        if mine:
            self.multiplier.run(multiplier, place, x, which)

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
            there = remote(self._used(base, count), cutlass.min(lane, self.cluster - 1))
            arrive_remote(there, Int32(lane < self.cluster))
        else:
            arrive(self._read(base, count), Int32(lane == 0))

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
            arrive(self._taken(base, buffer), Int32(lane == 0))
