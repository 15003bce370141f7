"""Persistent warp-specialised Hopper GEMM with a composed epilogue. Imports the DSL.

D = epilogue(A · Bᵀ); A (M, K) and packed B (rows, K), K innermost. A cluster is one CTA, two along M that share B, or
two along N that share A.

    warpgroup 0   warp 0      TMA: per stage its share of A and of B, and a tile's matrix operand, which it may fetch
                              into L2 half-way (prefetch)
                  warps 1-3   stage the epilogue's vector operands, one tile ahead        (24 registers)
    warpgroup 1   consumer    WGMMA on rows 0-63, then the epilogue on its accumulators   (240 registers)
    warpgroup 2   consumer    rows 64-127; in ping-pong both have tiles of their own

    barriers      full[s]     one producer arrive + bytes of A and B            TMA -> consumers
                  empty[s]    the tile's consumer warps, of every CTA it shares with  -> TMA
                  ready[2]    96 staging threads                                stagers -> consumers
                  taken[2]    the tile's consumer threads                       consumers -> stagers
                  boxed[2,2]  ping-pong alone: as full and empty, for buffers of a matrix operand
    turn[2]     ping-pong alone: named barriers                   consumers -> each other

    cooperative   TMA         |tile 0 ............|tile 1, as far as stages allow ...
                  stagers     |0|1|               |2 ...
                  consumers        |WGMMA 0 ......|epilogue 0|WGMMA 1 ......|epilogue 1|
    ping-pong     consumer 1       |WGMMA 0 |epilogue 0|     |WGMMA 2 |epilogue 2|
                  consumer 2                |WGMMA 1 |epilogue 1|     |WGMMA 3 |epilogue 3|

Measured on an H200 at its power limit, M = 2048: in the loop the tensor cores never wait (FP8: 1024 clocks a stage of
128x256), and an epilogue of 2300 (plain store) is what is left, 6 % of a tile with K = 4096. Hiding it does not pay:
ping-pong with 64x256 and 128x128 was 5 to 7 % slower in FP8, for the bytes it loads. Tried and dropped: letting
warpgroup 2 follow warpgroup 1 by one or two stages (FP8 within 1.6 %, BF16 from 3 % faster to 2.5 % slower); an output
ring by default (within 3 %); three stages (within 1 %, and as often slower); the next tile's first stages beside the
epilogue of half of the columns (ptxas serialises, C7511: the half's accumulators are part of the wide WGMMA's).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import cutlass
import torch
from cutlass import Float32, Int16, Int32, Int64, cute, pipeline
from cutlass import memory as cutlass_memory
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warpgroup

from epicute.epilogues.dsl import opaque
from epicute.gemm.driver import Driver, Tile, TileState
from epicute.gemm.loads import EVICT_FIRST, EVICT_LAST, Loader, loader
from epicute.gemm.memory import DSL_DTYPES
from epicute.gemm.panels import panelled, ring_bytes
from epicute.gemm.ring import Ring, store_atoms
from epicute.gemm.spec import GemmSpec
from epicute.gemm.staging import STAGERS, Stager
from epicute.gemm.stream_plan import stream_plan
from epicute.gemm.streams import Boxes, Stages, Stream, fill, prefetch, stream_atom

__all__ = ["HopperGemm"]

THREADS = 384
PRODUCER_REGISTERS = 24
CONSUMER_REGISTERS = 240
"""Per thread, after the warpgroups have traded. A launch of 384 threads gets 168 each: 504 for the three warpgroups,
and one register more than that is waited for forever."""

TURN = 3
"""First of the two named barriers by which warpgroups take turns; the output rings have 1 and 2."""

GROUP_M = 8
"""Cluster tiles along M whose A stays in L2 while B streams past."""

K_MAJOR = OperandMajorMode.K


class Walk(NamedTuple):
    """The tiles of one CTA: every ``step``-th cluster tile from ``first`` on, ``count`` in all."""

    rank: Any
    first: Any
    step: Any
    tiles_m: Any
    count: Any


class HopperGemm:
    """The device code of one ``GemmSpec``; calling it traces the launch."""

    def __init__(self, spec: GemmSpec) -> None:
        self.spec = spec
        schedule = spec.schedule
        self.tile_m, self.tile_n = schedule.tile_m, schedule.tile_n
        self.cluster_m, self.cluster_n = schedule.cluster_m, schedule.cluster_n
        self.cluster, self.stages = schedule.cluster, schedule.stages
        self.sharers = schedule.sharers
        self.dtype = DSL_DTYPES[spec.problem.dtype]
        self.tile_k = 128 * 8 // self.dtype.width
        self.k_tiles = -(-spec.problem.depth // self.tile_k)
        self.n_tiles = -(-spec.problem.rows // self.tile_n)
        self.stager = Stager(spec.resolved, spec.layout, self.tile_m, self.tile_n)
        self.precise = spec.problem.accumulate == "precise"
        self.parts = 2 if self.precise else schedule.parts
        self.driver = Driver(spec.resolved, spec.layout, schedule, self.parts)
        self.staged = not self.stager.plan.empty
        self.stream = stream_plan(spec.resolved, spec.layout, schedule)
        self.apart = self.stream is not None and self.stream.apart
        self.stream_stages = self.stream.stages if self.stream and not self.apart else 0
        self.steps = self.k_tiles + self.stream_stages
        self.prefetched = schedule.prefetch and self.stream is not None
        self.early = self.k_tiles // 2 if self.prefetched else self.k_tiles
        self.slots = schedule.slots
        self.panelled = panelled(spec.resolved, spec.layout) if self.slots else ()

    def _mma(self) -> cute.TiledMma:
        """The MMA of a consumer warpgroup: all of ``tile_n``, or half of it where that is too wide or added apart."""
        width = self.tile_n // self.parts
        source = warpgroup.OperandSource.SMEM
        if self.spec.problem.dtype == torch.float8_e4m3fn:
            shape = (64, width, 32)
            operation = warpgroup.MmaF8Op(
                self.dtype, self.dtype, Float32, shape, source, K_MAJOR, K_MAJOR
            )
        else:
            shape = (64, width, 16)
            operation = warpgroup.MmaF16BF16Op(self.dtype, Float32, shape, source, K_MAJOR, K_MAJOR)
        return cute.make_tiled_mma(cute.make_mma_atom(operation), (self.sharers, 1, 1))

    def _smem_layout(self, rows: int) -> cute.ComposedLayout:
        atom = warpgroup.make_smem_layout_atom(warpgroup.SmemLayoutAtomKind.K_SW128, self.dtype)
        return cute.tile_to_shape(atom, (rows, self.tile_k, self.stages), (0, 1, 2))

    @cute.jit
    def __call__(self, b: cute.Tensor, arguments: Any, stream: Any) -> None:
        """Launch. ``b``: packed bytes; ``arguments``: see ``ArgumentLayout``."""
        problem = self.spec.problem
        size = problem.dtype.itemsize
        rows = cutlass.max(Int32(arguments[2]), 1)  # a tensor map has no empty dimension
        stride = cute.assume(arguments[1] // size, 16 // size)
        a_pointer = cute.make_ptr(
            self.dtype, arguments[0], cute.AddressSpace.gmem, assumed_align=16
        )
        a = cute.make_tensor(a_pointer, cute.make_layout((rows, problem.depth), stride=(stride, 1)))
        pitch = self.spec.pitch
        b = cute.make_tensor(
            cute.recast_ptr(b.iterator, dtype=self.dtype),
            cute.make_layout((problem.rows, pitch), stride=(pitch, 1)),
        )
        a_layout, b_layout = self._smem_layout(self.tile_m), self._smem_layout(self.tile_n)
        load = cpasync.CopyBulkTensorTileG2SOp()
        share = cpasync.CopyBulkTensorTileG2SMulticastOp()
        a_atom, a = cpasync.make_tiled_tma_atom(
            share if self.cluster_n > 1 else load,
            a,
            cute.slice_(a_layout, (None, None, 0)),
            (self.tile_m, self.tile_k),
            num_multicast=self.cluster_n,
        )
        b_atom, b = cpasync.make_tiled_tma_atom(
            share if self.cluster_m > 1 else load,
            b,
            cute.slice_(b_layout, (None, None, 0)),
            (self.tile_n, self.tile_k),
            num_multicast=self.cluster_m,
        )
        self.kernel.set_name_prefix(self.spec.name)
        stores = store_atoms(self.spec.layout, self.panelled, arguments, rows)
        matrix = stream_atom(self.spec.layout, self.stream, arguments, rows, self.tile_m)
        mma = self._mma()
        self.kernel(
            a_atom, a, b_atom, b, mma, a_layout, b_layout, stores, matrix, arguments
        ).launch(
            grid=(Int32(arguments[3]) * self.cluster, 1, 1),
            block=(THREADS, 1, 1),
            cluster=(self.cluster, 1, 1),
            stream=stream,
            min_blocks_per_mp=1,
            use_pdl=True,
        )

    @cute.kernel
    def kernel(
        self,
        a_atom: cute.CopyAtom,
        a: cute.Tensor,
        b_atom: cute.CopyAtom,
        b: cute.Tensor,
        mma: cute.TiledMma,
        a_layout: cute.ComposedLayout,
        b_layout: cute.ComposedLayout,
        stores: Any,
        matrix: Any,
        arguments: Any,
    ):
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        # The next kernel may set itself up on SMs that are through; all of ours wait before they touch memory.
        cute.arch.griddepcontrol_launch_dependents()
        if warp == 0:
            cpasync.prefetch_descriptor(a_atom)
            cpasync.prefetch_descriptor(b_atom)
        shared = self._allocate(a_layout, b_layout)
        loads, staging, boxes = self._pipelines(shared)
        rows = self.tile_m * self.cluster_m
        tiles_m = (Int32(arguments[2]) + (rows - 1)) // rows
        first, step = block // self.cluster, Int32(arguments[3])
        count = (tiles_m * (self.n_tiles // self.cluster_n) - first + step - 1) // step
        walk = Walk(block % self.cluster, first, step, tiles_m, count)
        cute.arch.griddepcontrol_wait()

        if warp < 4:
            cute.arch.setmaxregister_decrease(PRODUCER_REGISTERS)
            if warp == 0:
                self._produce(a_atom, a, b_atom, b, matrix, arguments, shared, loads, boxes, walk)
            elif cutlass.const_expr(self.staged):
                self._stage(arguments, shared, staging, walk, thread)
        else:
            cute.arch.setmaxregister_increase(CONSUMER_REGISTERS)
            self._consume(mma, arguments, shared, loads, staging, boxes, walk, thread, stores)

    def _allocate(self, a_layout: Any, b_layout: Any) -> dict[str, Any]:
        allocator = cutlass_memory.SmemAllocator()
        plan = self.stager.plan
        shared = {
            "a": allocator.allocate_tensor(
                self.dtype, a_layout.outer, 1024, swizzle=a_layout.inner
            ),
            "b": allocator.allocate_tensor(
                self.dtype, b_layout.outer, 1024, swizzle=b_layout.inner
            ),
        }
        if self.apart:
            assert self.stream is not None
            layout = cute.make_layout(2 * self.stream.boxes * self.stream.box * self.tile_m)
            shared["boxes"] = allocator.allocate_tensor(cutlass.Uint8, layout, 1024)
        for name, count in (("loads", 2 * self.stages), ("staging", 4), ("boxed", 4)):
            shared[name] = allocator.allocate_array(Int64, count)
        if self.panelled:
            layout = cute.make_layout(ring_bytes(self.slots))
            shared["ring"] = allocator.allocate_tensor(cutlass.Uint8, layout, 128)
        floats, integers = plan.floats(self.tile_m, self.tile_n), plan.integers(self.tile_m)
        for name, dtype, count in (("floats", Float32, floats), ("integers", Int64, integers)):
            layout = cute.make_layout((max(count, 1), 2))
            shared[name] = allocator.allocate_tensor(dtype, layout, 128) if count else None
        return shared

    def _stages(self, shared: dict[str, Any]) -> Stages:
        a, b = (Int32(shared[name].iterator.toint()) for name in ("a", "b"))
        assert self.stream is not None
        return Stages(a, b, self.tile_m * 128, self.tile_n * 128, self.tile_m * self.stream.box)

    def _boxes(self, shared: dict[str, Any]) -> Boxes:
        """The warpgroups' buffers of a streamed operand in ping-pong."""
        assert self.stream is not None
        box = self.tile_m * self.stream.box
        return Boxes(Int32(shared["boxes"].iterator.toint()), self.stream.boxes * box, box)

    def _pipelines(self, shared: dict[str, Any]) -> tuple[Any, Any, Any]:
        group, agent = pipeline.CooperativeGroup, pipeline.Agent.Thread
        staging = pipeline.PipelineAsync.create(
            barrier_storage=shared["staging"],
            num_stages=2,
            producer_group=group(agent, STAGERS),
            consumer_group=group(agent, 128 * self.sharers),
            defer_sync=True,
        )
        boxes: Any = None
        if self.apart:
            buffers = self._boxes(shared)
            boxes = pipeline.PipelineTmaAsync.create(
                barrier_storage=shared["boxed"],
                num_stages=2,
                producer_group=group(agent),
                consumer_group=group(agent, 4),
                tx_count=buffers.stage_bytes,
                cta_layout_vmnk=cute.make_layout((1, 1, 1, 1)),
                defer_sync=True,
            )
        loads = pipeline.PipelineTmaAsync.create(
            barrier_storage=shared["loads"],
            num_stages=self.stages,
            producer_group=group(agent),
            consumer_group=group(agent, 4 * self.sharers * (self.cluster_m + self.cluster_n - 1)),
            tx_count=(self.tile_m + self.tile_n) * 128,
            cta_layout_vmnk=cute.make_layout((1, self.cluster_m, self.cluster_n, 1)),
        )
        return loads, staging, boxes

    def _ranks(self, walk: Walk) -> tuple[Any, Any]:
        """A CTA's place along M and along N of its cluster."""
        return walk.rank % self.cluster_m, walk.rank // self.cluster_m

    def _tile(self, walk: Walk, i: Any) -> tuple[Any, Any]:
        """(m, n) of a CTA's ``i``-th tile: groups of ``GROUP_M`` cluster tiles along M, walked N-wise."""
        linear, size = walk.first + i * walk.step, GROUP_M * (self.n_tiles // self.cluster_n)
        group = linear // size
        within = linear - group * size
        height = cutlass.min(walk.tiles_m - group * GROUP_M, GROUP_M)
        n = within // height
        m = group * GROUP_M + within - n * height
        rank_m, rank_n = self._ranks(walk)
        return m * self.cluster_m + rank_m, n * self.cluster_n + rank_n

    def _place(self, walk: Walk, i: Any) -> tuple[Any, Any]:
        """``_tile``, computed here and kept: beside products, its divisions cost nothing."""
        m, n = self._tile(walk, i)
        return opaque(Int32(m)), opaque(Int32(n))

    @cute.jit
    def _produce(self, a_atom, a, b_atom, b, matrix, arguments, shared, loads, boxes, walk) -> None:
        rank_m, rank_n = self._ranks(walk)
        # Ranks count along M first: those that share A are cluster_m apart, those that share B are adjacent.
        a_mask = Int16(sum(1 << (self.cluster_m * i) for i in range(self.cluster_n))) << Int16(
            rank_m
        )
        b_mask = Int16((1 << self.cluster_m) - 1) << Int16(rank_n * self.cluster_m)
        keep = self.spec.schedule.keep
        a_shape, b_shape = (self.tile_m, self.tile_k), (self.tile_n, self.tile_k)
        a_policy, b_policy = (EVICT_LAST, EVICT_FIRST) if keep else (None, None)
        a_load = loader(a_atom, a, shared["a"], a_shape, rank_n, self.cluster_n, a_mask, a_policy)
        b_load = loader(b_atom, b, shared["b"], b_shape, rank_m, self.cluster_m, b_mask, b_policy)
        state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, self.stages)
        boxed = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, 2)
        for i in cutlass.range(walk.count, unroll=1):
            m, n = self._tile(walk, i)
            for k in cutlass.range(self.early, unroll=1):
                self._fill(loads, state, a_load, b_load, m, n, k)
                state.advance()
            if cutlass.const_expr(self.prefetched):
                prefetch(self.stream, self.tile_m, matrix, m, n)
                for k in cutlass.range(self.early, self.k_tiles, unroll=1):
                    self._fill(loads, state, a_load, b_load, m, n, k)
                    state.advance()
            for stage in cutlass.range_constexpr(self.stream_stages):
                fill(self.stream, stage, self._stages(shared), loads, state, matrix, m, n)
                state.advance()
            if cutlass.const_expr(self.apart):
                # By now the warpgroup multiplies, so that its epilogue before is through with the buffer.
                fill(self.stream, 0, self._boxes(shared), boxes, boxed, matrix, m, n)
                boxed.advance()
        loads.producer_tail(state)

    def _fill(self, loads: Any, state: Any, a: Loader, b: Loader, m: Any, n: Any, k: Any) -> None:
        """Load one stage."""
        loads.producer_acquire(state)
        barrier = loads.producer_get_barrier(state)
        a.load(m, k, state.index, barrier)
        b.load(n, k, state.index, barrier)

    @cute.jit
    def _stage(self, arguments, shared, staging, walk, thread) -> None:
        state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, 2)
        for i in cutlass.range(walk.count, unroll=1):
            m, n = self._tile(walk, i)
            staging.producer_acquire(state)
            floats, integers = self._buffers(shared, state.index)
            self.stager.run(arguments, floats, integers, m, n, thread - 32)
            staging.producer_commit(state)
            state.advance()

    def _buffers(self, shared: dict[str, Any], index: Any) -> tuple[Any, Any]:
        floats, integers = shared["floats"], shared["integers"]
        return (
            None if floats is None else floats[None, index],
            None if integers is None else integers[None, index],
        )

    @cute.jit
    def _consume(self, mma, arguments, shared, loads, staging, boxes, walk, thread, stores) -> None:
        consumer = thread - 128
        group = cute.arch.make_warp_uniform(consumer // 128)
        share = cute.make_layout(self.sharers, stride=128)(group % self.sharers)
        part = mma.get_slice(share)
        a = part.make_fragment_A(part.partition_A(shared["a"]))
        b = part.make_fragment_B(part.partition_B(shared["b"]))
        acc = part.make_fragment_C(part.partition_shape_C((self.tile_m, self.tile_n)))
        tile_state = TileState(self.spec.layout, arguments)
        ring: Any = None
        if cutlass.const_expr(len(self.panelled) > 0):
            ring = Ring(self.spec.layout, self.panelled, stores, self.slots, self.sharers)
            ring.open(shared["ring"], consumer)
        full = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, self.stages)
        done = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, self.stages)
        staged = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, 2)
        boxed = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, 2)
        unboxed = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, 2)
        first, every = Int32(0), 1
        if cutlass.const_expr(self.sharers == 1):
            first, every = group, 2
            full.advance(group * self.steps)
            done.advance(group * self.steps)
            staged.advance(group)
            boxed.advance(group)
            unboxed.advance(group)
            if group == 1:
                self._end_turn(group)
        for i in cutlass.range(first, walk.count, every, unroll=1):
            floats, integers = self._buffers(shared, staged.index)
            if cutlass.const_expr(self.precise):
                self._await_turn(group)
                self._multiply_precisely(mma, acc, part, a, b, loads, full, True)
                full.advance()
                m, n = self._place(walk, i)
                for _ in cutlass.range(self.k_tiles - 1, unroll=1):
                    self._multiply_precisely(mma, acc, part, a, b, loads, full, False)
                    full.advance()
                done.advance(self.k_tiles)
            else:
                self._await_turn(group)
                self._multiply(mma, acc, a, b, loads, full, False)
                full.advance()
                m, n = self._place(walk, i)
                for _ in cutlass.range(self.k_tiles - 1, unroll=1):
                    self._multiply(mma, acc, a, b, loads, full, True)
                    warpgroup.wait_group(1)
                    loads.consumer_release(done)
                    full.advance()
                    done.advance()
            # Behind the loops, which put new states in place of those they were given.
            stream: Any = None
            if cutlass.const_expr(self.apart):
                stream = Stream(self.stream, self._boxes(shared), boxes, boxed, unboxed)
            elif cutlass.const_expr(self.stream_stages > 0):
                stream = Stream(self.stream, self._stages(shared), loads, full, done)
            self._end_turn(group)
            if cutlass.const_expr(not self.precise):
                warpgroup.wait_group(0)
                loads.consumer_release(done)
                done.advance()
            if cutlass.const_expr(self.staged):
                staging.consumer_wait(staged)
            tile = Tile(arguments, tile_state, floats, integers, m, n, ring, stream)
            self.driver.run(acc, tile, consumer)
            if cutlass.const_expr(self.staged):
                staging.consumer_release(staged)
                staged.advance(every)
            if cutlass.const_expr(every > 1):
                full.advance(self.steps)
                done.advance(self.steps)
            if cutlass.const_expr(self.apart):
                boxed.advance()
                unboxed.advance()
        tile_state.flush(thread % 32)
        if cutlass.const_expr(len(self.panelled) > 0):
            ring.close()

    def _await_turn(self, group: Any) -> None:
        """Warpgroups that have tiles of their own multiply in turn.

        A warpgroup may wait for a stage only when the stage's last use has arrived: the phase bit tells two uses
        apart, not three.
        """
        if self.sharers == 1:
            cute.arch.barrier(barrier_id=TURN + group, number_of_threads=256)

    def _end_turn(self, group: Any) -> None:
        if self.sharers == 1:
            cute.arch.barrier_arrive(barrier_id=TURN + 1 - group, number_of_threads=256)

    @cute.jit
    def _multiply(self, mma, acc, a, b, loads, full, accumulate: cutlass.Constexpr) -> None:
        """One stage: four WGMMAs of 32 bytes of K each, as one group."""
        atom = cute.make_mma_atom(mma.op)
        atom.set(warpgroup.Field.ACCUMULATE, accumulate)
        loads.consumer_wait(full)
        warpgroup.fence()
        for k in cutlass.range_constexpr(4):
            cute.gemm(atom, acc, a[None, None, k, full.index], b[None, None, k, full.index], acc)
            atom.set(warpgroup.Field.ACCUMULATE, True)
        warpgroup.commit_group()

    @cute.jit
    def _multiply_precisely(
        self, mma, acc, part, a, b, loads, full, first: cutlass.Constexpr
    ) -> None:
        """One stage, added to ``acc`` in float32: each half of the columns in turn, so that nothing spills."""
        loads.consumer_wait(full)
        count = cute.size(acc) // 2
        for half in cutlass.range_constexpr(2):
            shape = part.partition_shape_C((self.tile_m, self.tile_n // 2))
            products = part.make_fragment_C(shape)
            atom = cute.make_mma_atom(mma.op)
            atom.set(warpgroup.Field.ACCUMULATE, False)
            warpgroup.fence()
            for k in cutlass.range_constexpr(4):
                b_half = b[None, half, k, full.index]
                b_half = cute.make_tensor(
                    b_half.iterator, cute.append(b_half.layout, cute.make_layout(1))
                )
                cute.gemm(atom, products, a[None, None, k, full.index], b_half, products)
                atom.set(warpgroup.Field.ACCUMULATE, True)
            warpgroup.commit_group()
            warpgroup.wait_group(0)
            if cutlass.const_expr(half == 1):
                loads.consumer_release(full)
            # Register by register: loading the fragments as vectors spills 500 bytes.
            for row in cutlass.range_constexpr(count // 4):
                for i in cutlass.range_constexpr(4):
                    at = half * count + 4 * row + i
                    found = products[4 * row + i]
                    acc[at] = found if first else acc[at] + found
