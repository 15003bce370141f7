"""Few-row projection for Hopper: D = epilogue(X · Wᵀ) for up to 64 rows of X at a time. Imports the DSL.

The weight is the MMA's A operand, dequantised in registers; the rows of X are its columns. It is streamed record by
record (``layouts.decode_order``) through a ring, from before the kernel in front has ended on: with programmatic
dependent launch as much of it as the ring holds is read while that is still at work.

    warp 0        one bulk copy a record, at most ``in_flight`` under way; X by TMA (``produce``)   (few registers)
    warps 1-3     stage the epilogue's vector operands, one tile ahead; in turns the epilogue, eight rows of X a warp
    warps 4-11    multiply: every warp has a share of each record, or a warpgroup every other record   (the rest)

    barriers      full[s]     one producer arrive + bytes of a record                        ring -> consumers
                  empty[s]    the eight consumer warps                                       consumers -> ring
                  x full[s], x empty[s]     the same of a chunk of X
                  ready[2]    96 staging threads; taken[2]: the parts of the tile's epilogue
                  added[b]    every consumer warp: what it has of a tile's sums is written
                  read[b]     warps 1-3: the sums may be written over
                  came[b]     in a cluster: one arrive + bytes of the sums of all its CTAs   warps 1-3 -> warps 1-3
                  used[b]     warps 1-3 of every CTA: what has come may be written over; not of the last tiles
    named         1           consumers, around what they copy of X, and behind what they make integers of

    warp 0        |record 0|record 1| ...  as the ring allows, from before ``griddepcontrol.wait`` on; X behind it
    consumers            |record 0|record 1| ... |send|record 0 of the next tile ...
    a warp of 1-3        |stage|stage the next|    |    |epilogue|

Where shared memory cannot hold a CTA's share of X, X has a ring too, and several tiles' sums stay in registers
(``wide``), so that a chunk serves them all:

    consumers            |tile 0|tile 1|  the next chunk: |tile 0|tile 1| ... |send both| ...

What is not multiplied as it is (gains, integers), and eight rows, consumers copy themselves (``stage``), all of a CTA's
share or phase by phase, and wait for it. Integers of `wgmma` they make where TMA has brought X, once for all tiles.

Warps multiply each by itself, or four as a warpgroup (``multiply``, ``warpgroup``): sums stand in the same registers. A
warpgroup has tiles of its own where several are held, else records in turns.

A slot is given back behind ``__syncwarp``: lanes leave a wait one by one, and an arrival of lane 0 alone says nothing
of what the others have read. A CTA of a cluster has a share of k; its warps 1-3 send its sums, over distributed shared
memory, to the CTA that finishes their row of X (``exchange``), and run epilogues one tile behind.
"""

from __future__ import annotations

from typing import Any

import cutlass
from cutlass import Int32, Int64, Uint8, cute
from cutlass import memory as cutlass_memory

from epicute.decode.geometry import FINISHERS, WARPS
from epicute.decode.schedule import STAGED
from epicute.decode.sm90.integer_warpgroup import IntegerWarpgroupMultiplier, TurnedActivations
from epicute.decode.sm90.integers import IntegerActivations, IntegerMultiplier
from epicute.decode.sm90.multiply import Multiplier
from epicute.decode.sm90.produce import PARITY, SLOT, X_PARITY, X_SLOT, Producer
from epicute.decode.sm90.ptx import barrier_at
from epicute.decode.sm90.stage import Activations
from epicute.decode.sm90.warpgroup import WarpgroupMultiplier
from epicute.decode.spec import FewRowSpec
from epicute.gemm.staging import STAGERS
from epicute.layouts import split

__all__ = ["FewRowGemm"]

CONSUMERS = 32 * WARPS
THREADS = 128 + CONSUMERS
FEW, MANY = 88, 208
"""Registers of a thread of the first warpgroup and of the consumers, after they have traded. A launch gives each
168 of them.

Tried and gone, as slower: two CTAs to an SM, the next kernel's beside this one's, since an empty SM takes both of one
cluster while others idle; sixteen consumer warps in two teams that take records in turns, at 104 registers (tried
with the slower copies of x that ``stage`` names).
"""

TILE = 4
"""Of a consumer's state, whose first four are the producer's too: tiles whose sums it has sent."""

AROUND_X = 1
"""The named barrier of the consumers."""


class FewRowGemm(Producer):
    """The device code of one ``FewRowSpec``; calling it traces the launch."""

    def __init__(self, spec: FewRowSpec) -> None:
        super().__init__(spec)
        integers = spec.schedule.conversion == "integers"
        self.wgmma = self.schedule.mma == "wgmma"
        self.turned = integers and self.wgmma
        kinds: dict[tuple[bool, bool], tuple[type[Activations], type[Multiplier]]] = {
            (False, False): (Activations, Multiplier),
            (False, True): (IntegerActivations, IntegerMultiplier),
            (True, False): (Activations, WarpgroupMultiplier),
            (True, True): (TurnedActivations, IntegerWarpgroupMultiplier),
        }
        activations, self.multiplier = kinds[self.wgmma, integers]
        self.activations: Any = activations(spec.problem, spec.schedule)
        self.teams = self.wgmma and self.schedule.wide > 1

    @cute.jit
    def __call__(self, weight: cute.Tensor, arguments: Any, stream: Any) -> None:
        """Launch. ``weight``: its records as bytes; ``arguments``: see ``FewRowSpec``."""
        self.kernel.set_name_prefix(self.spec.name)
        self.kernel(self._rows_in_memory(arguments), weight, arguments).launch(
            grid=(Int32(arguments[3]) * self.cluster, 1, 1),
            block=(THREADS, 1, 1),
            cluster=(self.cluster, 1, 1),
            stream=stream,
            min_blocks_per_mp=1,
            preferred_smem_carveout=100,
            use_pdl=True,
        )

    @cute.kernel
    def kernel(self, loads: Any, weight: cute.Tensor, arguments: Any) -> None:
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
                walk = self._walk(arguments, block)
                self._produce(loads, memory, weight, arguments, base, walk, thread)
            else:
                cute.arch.griddepcontrol_wait()
                self._finish_all(arguments, base, self._walk(arguments, block), thread)
        else:
            cute.arch.setmaxregister_increase(MANY)
            if cutlass.const_expr(not self.direct):
                self._prefetch(arguments, self._walk(arguments, block), thread - 128)
                cute.arch.griddepcontrol_wait()
            self._consume(arguments, base, self._walk(arguments, block), thread - 128)

    @cute.jit
    def _open(self, base, thread) -> None:
        """Set the barriers up, so that all of the cluster see them."""
        if thread == 0:
            slots, lanes = self.schedule.slots, self.schedule.arriving_lanes
            for slot in cutlass.range_constexpr(slots):
                cute.arch.mbarrier_init(barrier_at(self._full(base, slot)), 1)
                cute.arch.mbarrier_init(barrier_at(self._empty(base, slot)), WARPS * lanes)
            counts = [c for c in (STAGERS, self.tasks * lanes) for _ in range(STAGED)]
            both = (WARPS * lanes, FINISHERS * lanes)
            counts += [c for c in both for _ in range(self.schedule.sums)]
            both = (1, FINISHERS * self.cluster)
            counts += [c for c in both for _ in range(self.shared.arriving)]
            chunks = self.schedule.chunks * self.direct
            counts += [c for c in (1, WARPS * lanes) for _ in range(chunks)]
            for i in cutlass.range_constexpr(len(counts)):
                cute.arch.mbarrier_init(barrier_at(self._other(base, i)), counts[i])
        cute.arch.mbarrier_init_fence()
        if cutlass.const_expr(self.cluster > 1):
            cute.arch.cluster_arrive_relaxed()
            cute.arch.cluster_wait()
        else:
            cute.arch.sync_threads()

    @cute.jit
    def _consume(self, arguments, base, walk, thread) -> None:
        warp, lane = cute.arch.make_warp_uniform(thread // 32), thread % 32
        multiplier = self.multiplier(self.problem, self.schedule, self.spec.scale_dtype, warp, lane)
        turn = cute.make_rmem_tensor(5, Int32)
        turn.fill(0)
        for m in cutlass.range(walk.m_tiles, unroll=1):
            if cutlass.const_expr(self.resident and not self.direct):
                self._copy(arguments, base, walk, m, Int32(0), thread)
            if cutlass.const_expr(self.turned):
                self._turn(base, walk, m, warp, lane)
            if cutlass.const_expr(self.schedule.wide > 1):
                for first in cutlass.range(0, walk.count, self.schedule.wide, unroll=1):
                    self._wide(arguments, base, walk, multiplier, turn, m, first, thread)
                    for which in cutlass.range_constexpr(self.schedule.wide):
                        self._send_alive(base, walk, multiplier, turn, first + which, which)
            else:
                for i in cutlass.range(walk.count, unroll=1):
                    tile = walk.first + i * walk.step
                    bands = self._bands(tile)
                    for band in cutlass.range(bands, unroll=1):
                        self._band(arguments, base, walk, multiplier, turn, m, band, thread)
                    self.multiplier.announce(multiplier, self._added(base, turn[TILE]))
                    turn[TILE] = turn[TILE] + 1
            if cutlass.const_expr(self.resident and self.direct):
                for chunk in cutlass.range(walk.chunks * self.pieces, unroll=1):
                    self._arrive(self._x_empty(base, chunk), lane)

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
    def _turn(self, base, walk, m, warp, lane) -> None:
        """Make integers of what TMA has brought, where it is: a warp takes every eighth share, two at a time."""
        count = split(walk.chunks * self.activations.turns + (WARPS - 1 - warp), WARPS)[0]
        for i in cutlass.range(split(count, 2)[0], unroll=1):
            self._turn_some(base, m, warp + i * (2 * WARPS), lane, 2)
        if count & 1:
            self._turn_some(base, m, warp + (count - 1) * WARPS, lane, 1)
        # Products read it by way of the asynchronous proxy, and TMA writes the next rows there.
        cute.arch.fence_view_async_shared()
        cute.arch.barrier(barrier_id=AROUND_X, number_of_threads=CONSUMERS)

    @cute.jit
    def _turn_some(self, base, m, first, lane, count: cutlass.Constexpr) -> None:
        shares = []
        for i in cutlass.range_constexpr(count):
            chunk, unit = split(first + i * WARPS, self.activations.turns)
            cute.arch.mbarrier_wait(barrier_at(self._x_full(base, chunk)), m & 1)
            shares.append((base + self.shared.x + chunk * self.shared.chunk, unit))
        self.activations.turn(shares, lane)

    @cute.jit
    def _band(self, arguments, base, walk, multiplier, turn, m, band, thread) -> None:
        self.multiplier.clear(multiplier)
        if cutlass.const_expr(self.resident):
            for chunk in cutlass.range(walk.chunks, unroll=1):
                for piece in cutlass.range_constexpr(self.pieces):
                    place = chunk * self.pieces + piece
                    self._await_rows(base, place, m & 1)
                    self._record(base, multiplier, turn, place, chunk, piece)
        elif cutlass.const_expr(self.direct):
            for chunk in cutlass.range(walk.chunks, unroll=1):
                for piece in cutlass.range_constexpr(self.pieces):
                    self._await_rows(base, turn[X_SLOT], turn[X_PARITY])
                    self._record(base, multiplier, turn, turn[X_SLOT], chunk, piece)
                    self._end_phase(base, multiplier, turn)
        else:
            for phase in cutlass.range(self._phases(walk), unroll=1):
                self._copy(arguments, base, walk, m, phase, thread)
                start = phase * self.phase
                for chunk in cutlass.range(cutlass.min(walk.chunks - start, self.phase), unroll=1):
                    self._record(base, multiplier, turn, chunk, start + chunk, 0)
        if band == 0:
            self._await_read(base, turn[TILE])
        self.multiplier.send(multiplier, self._sums(base, turn[TILE]), band)

    @cute.jit
    def _wide(self, arguments, base, walk, multiplier, turn, m, first, thread) -> None:
        """Multiply tiles from the ``first``-th on that are held together: all of them with each chunk of x."""
        self.multiplier.clear(multiplier)
        for phase in cutlass.range(self._phases(walk), unroll=1):
            self._begin_phase(arguments, base, walk, turn, m, phase, thread)
            count = cutlass.min(walk.chunks - phase * self.phase, self.phase)
            if cutlass.const_expr(self.teams):
                for pair in cutlass.range_constexpr(0, self.schedule.wide, 2):
                    self._pair(base, walk, multiplier, turn, first + pair, count, pair)
            else:
                for which in cutlass.range_constexpr(self.schedule.wide):
                    some = count * Int32(first + which < walk.count)
                    self._records(base, multiplier, turn, some, which)
            self._end_phase(base, multiplier, turn)

    @cute.jit
    def _pair(self, base, walk, multiplier, turn, first, count, pair: cutlass.Constexpr) -> None:
        """Two tiles' records, each by its warpgroup; the other passes them over."""
        both = pair + 1 < self.schedule.wide
        one = count * Int32(first < walk.count)
        two = count * Int32(first + 1 < walk.count) * int(both)
        team = multiplier.team
        self._pass(base, multiplier, turn, one * team)
        mine = cutlass.select_(team == 0, one, two)
        self._records(base, multiplier, turn, Int32(mine), pair // 2)
        self._pass(base, multiplier, turn, two * (1 - team))

    @cute.jit
    def _begin_phase(self, arguments, base, walk, turn, m, phase, thread) -> None:
        """Until the activations of a phase are there."""
        if cutlass.const_expr(self.direct):
            self._await_rows(base, turn[X_SLOT], turn[X_PARITY])
        else:
            self._copy(arguments, base, walk, m, phase, thread)

    @cute.jit
    def _end_phase(self, base, multiplier, turn) -> None:
        """The activations of a phase may be written over."""
        if cutlass.const_expr(self.direct):
            cute.arch.sync_warp()
            self._arrive(self._x_empty(base, turn[X_SLOT]), multiplier.lane)
            self._next(turn, X_SLOT, self.schedule.chunks)

    @cute.jit
    def _await_rows(self, base, slot, parity) -> None:
        if cutlass.const_expr(self.direct and not self.turned):
            cute.arch.mbarrier_wait(barrier_at(self._x_full(base, slot)), parity)

    def _place(self, turn: Any, chunk: Any) -> Any:
        """Where the activations of a phase's ``chunk``-th record are, counted in chunks."""
        return turn[X_SLOT] if self.direct else chunk

    @cute.jit
    def _send_alive(self, base, walk, multiplier, turn, i, which: cutlass.Constexpr) -> None:
        """Hand the sums of the ``i``-th tile on, where there is one: of warpgroups with tiles of their own, its owner.

        The other sees every phase of the barriers too: one that passes unseen would be taken for another.
        """
        if i < walk.count:
            self._await_read(base, turn[TILE])
            if cutlass.const_expr(self.teams):
                if multiplier.team == which % 2:
                    self._send(base, multiplier, turn, which // 2)
            else:
                self._send(base, multiplier, turn, which)
            self.multiplier.announce(multiplier, self._added(base, turn[TILE]))
            turn[TILE] = turn[TILE] + 1

    def _send(self, base: Any, multiplier: Any, turn: Any, which: int) -> None:
        self.multiplier.send(multiplier, self._sums(base, turn[TILE]), Int32(0), which)

    def _await_read(self, base: Any, count: Any) -> None:
        """Until the buffer of the ``count``-th tile's sums is free."""
        parity = (count // self.schedule.sums & 1) ^ 1
        cute.arch.mbarrier_wait(barrier_at(self._read(base, count)), parity)

    @cute.jit
    def _records(self, base, multiplier, turn, count, which: cutlass.Constexpr) -> None:
        """Multiply the records of a phase of a tile that is held with others."""
        for chunk in cutlass.range(count, unroll=1):
            self._multiply(base, multiplier, turn, self._place(turn, chunk), which, 0)

    @cute.jit
    def _record(self, base, multiplier, turn, place, chunk, piece: cutlass.Constexpr) -> None:
        """Multiply a piece of a record, the ``chunk``-th along k, with the chunk of x at ``place``; warpgroups take
        records in turns.
        """
        if cutlass.const_expr(self.wgmma):
            if multiplier.team == chunk % 2:
                self._multiply(base, multiplier, turn, place, 0, piece)
            elif cutlass.const_expr(piece == self.pieces - 1):
                self._pass(base, multiplier, turn, Int32(1))
        else:
            self._multiply(base, multiplier, turn, place, 0, piece)

    @cute.jit
    def _multiply(
        self, base, multiplier, turn, place, which: cutlass.Constexpr, piece: cutlass.Constexpr
    ) -> None:
        slot = turn[SLOT]
        cute.arch.mbarrier_wait(barrier_at(self._full(base, slot)), turn[PARITY])
        at = base + slot * self.shared.slot
        x = base + self.shared.x + place * self.shared.chunk
        self.multiplier.run(multiplier, at, x, which, piece)
        cute.arch.sync_warp()
        if cutlass.const_expr(piece == self.pieces - 1):
            self._arrive(self._empty(base, slot), multiplier.lane)
            self._next(turn, SLOT, self.schedule.slots)

    @cute.jit
    def _pass(self, base, multiplier, turn, count) -> None:
        """Pass ``count`` records over, which the other warpgroup multiplies; each phase of their barriers is seen."""
        for _ in cutlass.range(count, unroll=1):
            slot = turn[SLOT]
            cute.arch.mbarrier_wait(barrier_at(self._full(base, slot)), turn[PARITY])
            cute.arch.sync_warp()
            self._arrive(self._empty(base, slot), multiplier.lane)
            self._next(turn, SLOT, self.schedule.slots)
