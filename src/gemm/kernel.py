"""Persistent warp-specialised Hopper GEMM with a composed epilogue. Imports the DSL.

D = epilogue(A · Bᵀ); A (M, K) and packed B (rows, K), K innermost. A cluster is one or two CTAs along M that share B.

    warpgroup 0   warp 0      TMA: per stage one box of A, its share of B multicast to the cluster
                  warps 1-3   stage the epilogue's vector operands, one tile ahead        (40 registers)
    warpgroup 1   consumer    WGMMA on rows 0-63, then the epilogue on its accumulators   (232 registers)
    warpgroup 2   consumer    rows 64-127

    barriers      full[s]     one producer arrive + bytes of A and B            TMA -> consumers
                  empty[s]    8 consumer warps x cluster                        consumers -> TMA of every CTA
                  ready[2]    96 staging threads                                stagers -> consumers
                  taken[2]    256 consumer threads                              consumers -> stagers

    Tried and dropped: letting warpgroup 2 follow warpgroup 1 by one or two stages. One run of 8B, M = 2048: FP8 within
    1.6 %, BF16 from 3 % faster (qkv) to 2.5 % slower (gate/up).

    TMA         |fill tile 0 ............|fill tile 1, as far as stages allow ...
    stagers     |tile 0|tile 1|          |tile 2 ...
    consumers         |WGMMA tile 0 .....|epilogue 0|WGMMA tile 1 ...
"""

from __future__ import annotations

from typing import Any, NamedTuple

import cutlass
import torch
from cutlass import Float32, Int16, Int32, Int64, cute, pipeline
from cutlass import memory as cutlass_memory
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warpgroup

from epicute.gemm.driver import Driver, Tile, TileState
from epicute.gemm.memory import DSL_DTYPES
from epicute.gemm.panels import panelled, ring_bytes
from epicute.gemm.ring import Ring, store_atoms
from epicute.gemm.spec import GemmSpec
from epicute.gemm.staging import STAGERS, Stager

__all__ = ["HopperGemm"]

THREADS = 384
PRODUCER_REGISTERS = 40
CONSUMER_REGISTERS = 232
"""Per thread, after the warpgroups have traded. A launch of 384 threads gets 168 each: 504 for the three warpgroups,
and one register more than that is waited for forever."""

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
        self.cluster, self.stages = schedule.cluster_m, schedule.stages
        self.dtype = DSL_DTYPES[spec.problem.dtype]
        self.tile_k = 128 * 8 // self.dtype.width
        self.k_tiles = -(-spec.problem.depth // self.tile_k)
        self.n_tiles = -(-spec.problem.rows // self.tile_n)
        sizes = (spec.resolved, spec.layout, self.tile_m, self.tile_n)
        self.stager = Stager(*sizes)
        self.precise = spec.problem.accumulate == "precise"
        self.driver = Driver(*sizes, parts=2 if self.precise else 1)
        self.staged = not self.stager.plan.empty
        self.slots = schedule.slots
        self.panelled = panelled(spec.resolved, spec.layout) if self.slots else ()

    def _mma(self) -> cute.TiledMma:
        """The MMA of a consumer warpgroup: all of ``tile_n``, or half of it where both halves are added apart."""
        width = self.tile_n // 2 if self.precise else self.tile_n
        source = warpgroup.OperandSource.SMEM
        if self.spec.problem.dtype == torch.float8_e4m3fn:
            shape = (64, width, 32)
            operation = warpgroup.MmaF8Op(
                self.dtype, self.dtype, Float32, shape, source, K_MAJOR, K_MAJOR
            )
        else:
            shape = (64, width, 16)
            operation = warpgroup.MmaF16BF16Op(self.dtype, Float32, shape, source, K_MAJOR, K_MAJOR)
        return cute.make_tiled_mma(cute.make_mma_atom(operation), (2, 1, 1))

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
        share = cpasync.CopyBulkTensorTileG2SMulticastOp() if self.cluster > 1 else load
        a_atom, a = cpasync.make_tiled_tma_atom(
            load, a, cute.slice_(a_layout, (None, None, 0)), (self.tile_m, self.tile_k)
        )
        b_atom, b = cpasync.make_tiled_tma_atom(
            share,
            b,
            cute.slice_(b_layout, (None, None, 0)),
            (self.tile_n, self.tile_k),
            num_multicast=self.cluster,
        )
        self.kernel.set_name_prefix(self.spec.name)
        stores = store_atoms(self.spec.layout, self.panelled, arguments, rows)
        mma = self._mma()
        self.kernel(a_atom, a, b_atom, b, mma, a_layout, b_layout, stores, arguments).launch(
            grid=(Int32(arguments[3]) * self.cluster, 1, 1),
            block=(THREADS, 1, 1),
            cluster=(self.cluster, 1, 1),
            stream=stream,
            min_blocks_per_mp=1,
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
        arguments: Any,
    ):
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        shared = self._allocate(a_layout, b_layout)
        loads, staging = self._pipelines(shared)
        tiles_m = (Int32(arguments[2]) + (self.tile_m * self.cluster - 1)) // (
            self.tile_m * self.cluster
        )
        first, step = block // self.cluster, Int32(arguments[3])
        count = (tiles_m * self.n_tiles - first + step - 1) // step
        walk = Walk(block % self.cluster, first, step, tiles_m, count)

        if warp == 0:
            cute.arch.setmaxregister_decrease(PRODUCER_REGISTERS)
            self._produce(a_atom, a, b_atom, b, shared, loads, walk)
        elif warp < 4:
            cute.arch.setmaxregister_decrease(PRODUCER_REGISTERS)
            if cutlass.const_expr(self.staged):
                self._stage(arguments, shared, staging, walk, thread)
        else:
            cute.arch.setmaxregister_increase(CONSUMER_REGISTERS)
            self._consume(mma, arguments, shared, loads, staging, walk, thread, stores)

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
            "loads": allocator.allocate_array(Int64, 2 * self.stages),
            "staging": allocator.allocate_array(Int64, 4),
        }
        if self.panelled:
            layout = cute.make_layout(ring_bytes(self.slots))
            shared["ring"] = allocator.allocate_tensor(cutlass.Uint8, layout, 128)
        floats, integers = plan.floats(self.tile_m, self.tile_n), plan.integers(self.tile_m)
        for name, dtype, count in (("floats", Float32, floats), ("integers", Int64, integers)):
            layout = cute.make_layout((max(count, 1), 2))
            shared[name] = allocator.allocate_tensor(dtype, layout, 128) if count else None
        return shared

    def _pipelines(self, shared: dict[str, Any]) -> tuple[Any, Any]:
        group, agent = pipeline.CooperativeGroup, pipeline.Agent.Thread
        staging = pipeline.PipelineAsync.create(
            barrier_storage=shared["staging"],
            num_stages=2,
            producer_group=group(agent, STAGERS),
            consumer_group=group(agent, 256),
            defer_sync=True,
        )
        loads = pipeline.PipelineTmaAsync.create(
            barrier_storage=shared["loads"],
            num_stages=self.stages,
            producer_group=group(agent),
            consumer_group=group(agent, 8 * self.cluster),
            tx_count=(self.tile_m + self.tile_n) * 128,
            cta_layout_vmnk=cute.make_layout((1, self.cluster, 1, 1)),
        )
        return loads, staging

    def _tile(self, walk: Walk, i: Any) -> tuple[Any, Any]:
        """(m, n) of a CTA's ``i``-th tile: groups of ``GROUP_M`` cluster tiles along M, walked N-wise."""
        linear = walk.first + i * walk.step
        group = linear // (GROUP_M * self.n_tiles)
        within = linear - group * (GROUP_M * self.n_tiles)
        height = cutlass.min(walk.tiles_m - group * GROUP_M, GROUP_M)
        n = within // height
        m = group * GROUP_M + within - n * height
        return m * self.cluster + walk.rank, n

    @cute.jit
    def _produce(self, a_atom, a, b_atom, b, shared, loads, walk) -> None:
        a_tiles = cute.local_tile(a, (self.tile_m, self.tile_k), (None, None))
        b_tiles = cute.local_tile(b, (self.tile_n, self.tile_k), (None, None))
        a_to, a_from = cpasync.tma_partition(
            a_atom,
            0,
            cute.make_layout(1),
            cute.group_modes(shared["a"], 0, 2),
            cute.group_modes(a_tiles, 0, 2),
        )
        b_to, b_from = cpasync.tma_partition(
            b_atom,
            walk.rank,
            cute.make_layout(self.cluster),
            cute.group_modes(shared["b"], 0, 2),
            cute.group_modes(b_tiles, 0, 2),
        )
        state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, self.stages)
        for i in cutlass.range(walk.count, unroll=1):
            m, n = self._tile(walk, i)
            for k in cutlass.range(self.k_tiles, unroll=1):
                loads.producer_acquire(state)
                barrier = loads.producer_get_barrier(state)
                cute.copy(a_atom, a_from[None, m, k], a_to[None, state.index], tma_bar_ptr=barrier)
                self._load_b(b_atom, b_from[None, n, k], b_to[None, state.index], barrier)
                state.advance()
        loads.producer_tail(state)

    def _load_b(self, atom: Any, source: Any, target: Any, barrier: Any) -> None:
        if self.cluster > 1:
            everyone = Int16((1 << self.cluster) - 1)
            cute.copy(atom, source, target, tma_bar_ptr=barrier, mcast_mask=everyone)
        else:
            cute.copy(atom, source, target, tma_bar_ptr=barrier)

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
    def _consume(self, mma, arguments, shared, loads, staging, walk, thread, stores) -> None:
        consumer = thread - 128
        group = cute.arch.make_warp_uniform(consumer // 128)
        part = mma.get_slice(cute.make_layout(2, stride=128)(group))
        a = part.make_fragment_A(part.partition_A(shared["a"]))
        b = part.make_fragment_B(part.partition_B(shared["b"]))
        acc = part.make_fragment_C(part.partition_shape_C((self.tile_m, self.tile_n)))
        tile_state = TileState(self.spec.layout, arguments)
        ring: Any = None
        if cutlass.const_expr(len(self.panelled) > 0):
            ring = Ring(self.spec.layout, self.panelled, stores, self.slots)
            ring.open(shared["ring"], consumer)
        full = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, self.stages)
        done = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, self.stages)
        staged = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, 2)
        for i in cutlass.range(walk.count, unroll=1):
            m, n = self._tile(walk, i)
            floats, integers = self._buffers(shared, staged.index)
            tile = Tile(arguments, tile_state, floats, integers, m, n, ring)
            if cutlass.const_expr(self.precise):
                self._multiply_precisely(mma, acc, part, a, b, loads, full, True)
                full.advance()
                for _ in cutlass.range(self.k_tiles - 1, unroll=1):
                    self._multiply_precisely(mma, acc, part, a, b, loads, full, False)
                    full.advance()
                # Not before: the products of half a tile leave no registers for what is on its way.
                sent = self.driver.begin(tile, consumer)
            else:
                sent = self.driver.begin(tile, consumer)
                self._multiply(mma, acc, a, b, loads, full, False)
                full.advance()
                for _ in cutlass.range(self.k_tiles - 1, unroll=1):
                    self._multiply(mma, acc, a, b, loads, full, True)
                    warpgroup.wait_group(1)
                    loads.consumer_release(done)
                    full.advance()
                    done.advance()
                warpgroup.wait_group(0)
                loads.consumer_release(done)
                done.advance()
            if cutlass.const_expr(self.staged):
                staging.consumer_wait(staged)
            self.driver.run(acc, tile, consumer, sent)
            if cutlass.const_expr(self.staged):
                staging.consumer_release(staged)
                staged.advance()
        tile_state.flush(thread % 32)
        if cutlass.const_expr(len(self.panelled) > 0):
            ring.close()

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
