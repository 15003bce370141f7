"""Few-row projection for Hopper: D = epilogue(X · Wᵀ) for up to 64 rows of X at a time. Imports the DSL.

The weight is the MMA's A operand, dequantised in registers; the rows of X are its columns. It is streamed record by
record (``layouts.decode_order``) through a ring by a thread that waits for nobody: with programmatic dependent launch
it reads weights while the kernel before is still at work, up to what the ring holds.

    warp 0        ring: one bulk copy a record, at most ``in_flight`` under way              (few registers)
    warps 1-3     stage the epilogue's vector operands, one tile ahead; in turns the epilogue, eight rows of X a warp
    warps 4-11    copy X once, then multiply: every warp has a share of each record          (the rest)

    barriers      full[s]     one producer arrive + bytes of a record                        ring -> consumers
                  empty[s]    the eight consumer warps                                       consumers -> ring
                  ready[2]    96 staging threads; taken[2]: the parts of the tile's epilogue
                  added[b]    every consumer warp: its sums of a tile are written
                  read[b]     warps 1-3: the sums may be written over
                  came[b]     in a cluster: one arrive + bytes of the sums of all its CTAs   warps 1-3 -> warps 1-3
                  used[b]     warps 1-3 of every CTA: what has come may be written over; not of the last tiles
    named         1           consumers, around X

    warp 0        |record 0|record 1| ...  as the ring allows, from before ``griddepcontrol.wait`` on
    consumers            |X|record 0|record 1| ... |send|record 0 of the next tile ...
    a warp of 1-3        |stage|stage the next|    |    |epilogue|

Where shared memory cannot hold a CTA's share of X, X is copied phase by phase; several tiles' sums then stay in
registers (``wide``), so that a phase serves them all:

    consumers            |X|tile 0|tile 1|X|tile 0|tile 1| ... |send both|X| ...

Warps multiply each by itself, or four as a warpgroup (``multiply``, ``warpgroup``): sums stand in the same registers.

A slot is given back behind ``__syncwarp``: lanes leave a wait one by one, and an arrival of lane 0 alone says nothing
of what the others have read. A CTA of a cluster has a share of k; its warps 1-3 send its sums, over distributed shared
memory, to the CTA that finishes their row of X (``exchange``), and run epilogues one tile behind.
"""

from __future__ import annotations

from typing import Any

import cutlass
from cutlass import Int32, Int64, Uint8, cute
from cutlass import memory as cutlass_memory

from epicute.decode.geometry import FINISHERS, WARPS, share_of
from epicute.decode.schedule import STAGED
from epicute.decode.sm90.finishers import Finishers, Walk
from epicute.decode.sm90.integers import IntegerActivations, IntegerMultiplier
from epicute.decode.sm90.multiply import Multiplier
from epicute.decode.sm90.ptx import (
    arrive,
    barrier_at,
    bulk_copy,
    streaming,
)
from epicute.decode.sm90.stage import Activations
from epicute.decode.sm90.warpgroup import WarpgroupMultiplier
from epicute.decode.spec import FewRowSpec
from epicute.epilogues.dsl import opaque
from epicute.gemm.staging import STAGERS

__all__ = ["FewRowGemm"]

CONSUMERS = 32 * WARPS
THREADS = 128 + CONSUMERS
FEW, MANY = 80, 208
"""Registers of a thread of the first warpgroup and of the consumers, after they have traded. A launch gives each
168 of them.

Tried and gone, as slower: two CTAs to an SM, the next kernel's beside this one's, since an empty SM takes both of one
cluster while others idle; sixteen consumer warps in two teams that take records in turns, at 104 registers (tried
with the slower copies of x that ``stage`` names).
"""

AROUND_X = 1
"""The named barrier of the consumers."""


class FewRowGemm(Finishers):
    """The device code of one ``FewRowSpec``; calling it traces the launch."""

    def __init__(self, spec: FewRowSpec) -> None:
        super().__init__(spec)
        self.records, self.record = spec.problem.records, spec.problem.record
        integers = spec.schedule.conversion == "integers"
        self.activations = (IntegerActivations if integers else Activations)(
            spec.problem, spec.schedule
        )
        self.most = self.problem.chunks(self.cluster)
        self.resident = self.schedule.chunks >= self.most
        self.wgmma = self.schedule.mma == "wgmma"
        self.multiplier = IntegerMultiplier if integers else Multiplier
        if self.wgmma:
            self.multiplier = WarpgroupMultiplier

    @cute.jit
    def __call__(self, weight: cute.Tensor, arguments: Any, stream: Any) -> None:
        """Launch. ``weight``: its records as bytes; ``arguments``: see ``FewRowSpec``."""
        self.kernel.set_name_prefix(self.spec.name)
        self.kernel(weight, arguments).launch(
            grid=(Int32(arguments[3]) * self.cluster, 1, 1),
            block=(THREADS, 1, 1),
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
        if warp < 4:
            cute.arch.setmaxregister_decrease(FEW)
            if warp == 0:
                if thread == 0:
                    self._produce(weight, arguments, base, self._walk(arguments, block))
            else:
                cute.arch.griddepcontrol_wait()
                self._finish_all(arguments, base, self._walk(arguments, block), thread)
        else:
            cute.arch.setmaxregister_increase(MANY)
            self._prefetch(arguments, self._walk(arguments, block), thread - 128)
            cute.arch.griddepcontrol_wait()
            self._consume(arguments, base, self._walk(arguments, block), thread - 128)

    @cute.jit
    def _open(self, base, thread) -> None:
        """Set the barriers up, so that all of the cluster see them."""
        if thread == 0:
            slots = self.schedule.slots
            for slot in cutlass.range_constexpr(slots):
                cute.arch.mbarrier_init(barrier_at(self._full(base, slot)), 1)
                cute.arch.mbarrier_init(barrier_at(self._empty(base, slot)), WARPS)
            counts = [c for c in (STAGERS, self.tasks) for _ in range(STAGED)]
            counts += [c for c in (WARPS, FINISHERS) for _ in range(self.schedule.sums)]
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
    def _consume(self, arguments, base, walk, thread) -> None:
        warp, lane = cute.arch.make_warp_uniform(thread // 32), thread % 32
        multiplier = self.multiplier(self.problem, self.schedule, self.spec.scale_dtype, warp, lane)
        turn = cute.make_rmem_tensor(3, Int32)
        turn.fill(0)
        for m in cutlass.range(walk.m_tiles, unroll=1):
            if cutlass.const_expr(self.resident):
                self._copy(arguments, base, walk, m, Int32(0), thread)
            if cutlass.const_expr(self.schedule.wide > 1):
                for group in cutlass.range(self._groups(walk), unroll=1):
                    first = group * self.schedule.wide
                    self._wide(arguments, base, walk, multiplier, turn, m, first, thread)
                    for which in cutlass.range_constexpr(self.schedule.wide):
                        self._send_alive(base, walk, multiplier, turn, first + which, which)
            else:
                for i in cutlass.range(walk.count, unroll=1):
                    tile = walk.first + i * walk.step
                    bands = self._bands(tile)
                    for band in cutlass.range(bands, unroll=1):
                        self._band(arguments, base, walk, multiplier, turn, m, band, thread)
                    self.multiplier.announce(multiplier, self._added(base, turn[2]))
                    turn[2] = turn[2] + 1

    @cute.jit
    def _prefetch(self, arguments, walk, thread) -> None:
        self.activations.prefetch(arguments[self.spec.at("gain")], walk.along, walk.chunks, thread)

    @cute.jit
    def _copy(self, arguments, base, walk, m, phase, thread) -> None:
        """Copy the activations of a phase, between those of two uses."""
        chunks = self.schedule.chunks
        first = phase * chunks
        count = cutlass.min(walk.chunks - first, chunks)
        stride = arguments[1]
        source = arguments[0] + Int64(m * self.rows) * stride
        live = Int32(arguments[2]) - m * self.rows
        gain = arguments[self.spec.at("gain")]
        cute.arch.barrier(barrier_id=AROUND_X, number_of_threads=CONSUMERS)
        self.activations.copy(
            source,
            stride,
            gain,
            base + self.shared.x,
            (walk.along + first, count),
            live,
            thread,
        )
        if cutlass.const_expr(self.wgmma):
            cute.arch.fence_view_async_shared()
        cute.arch.barrier(barrier_id=AROUND_X, number_of_threads=CONSUMERS)

    @cute.jit
    def _band(self, arguments, base, walk, multiplier, turn, m, band, thread) -> None:
        self.multiplier.clear(multiplier)
        if cutlass.const_expr(self.resident):
            self._records(base, multiplier, turn, walk.chunks, 0)
        else:
            chunks = self.schedule.chunks
            for phase in cutlass.range(self._phases(walk), unroll=1):
                self._copy(arguments, base, walk, m, phase, thread)
                count = cutlass.min(walk.chunks - phase * chunks, chunks)
                self._records(base, multiplier, turn, count, 0)
        if band == 0:
            self._await_read(base, turn[2])
        self.multiplier.send(multiplier, self._sums(base, turn[2]), band)

    @cute.jit
    def _wide(self, arguments, base, walk, multiplier, turn, m, first, thread) -> None:
        """Multiply tiles from the ``first``-th on that are held together: all of them with each copy of x."""
        self.multiplier.clear(multiplier)
        chunks = self.schedule.chunks
        for phase in cutlass.range(self._phases(walk), unroll=1):
            self._copy(arguments, base, walk, m, phase, thread)
            count = cutlass.min(walk.chunks - phase * chunks, chunks)
            for which in cutlass.range_constexpr(self.schedule.wide):
                some = count * Int32(first + which < walk.count)
                self._records(base, multiplier, turn, some, which)

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

    @cute.jit
    def _records(self, base, multiplier, turn, count, which: cutlass.Constexpr) -> None:
        for chunk in cutlass.range(count, unroll=1):
            self._record(base, multiplier, turn, chunk, which)

    @cute.jit
    def _record(self, base, multiplier, turn, chunk, which: cutlass.Constexpr) -> None:
        slot = turn[0]
        cute.arch.mbarrier_wait(barrier_at(self._full(base, slot)), turn[1])
        place = base + slot * self.shared.slot
        x = base + self.shared.x + chunk * self.shared.chunk
        self.multiplier.run(multiplier, place, x, which)
        cute.arch.sync_warp()
        arrive(self._empty(base, slot), Int32(multiplier.lane == 0))
        self._next(turn)
