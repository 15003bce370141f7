"""Persistent warp-specialised attention for Hopper: O = softmax(scale · Q·Kᵀ + mask) · V. Imports the DSL.

A cluster is one CTA, or two that work on the same rows of two query heads of one KV head: each loads half of every
tile of K and V, for both. A work item is ``tile_m`` query rows of a head; keys are walked from the last tile back.

    warpgroup 0   warp 0      TMA: Q of an item, then K and V tile by tile              (40 registers)
                  warp 1      walks the work list and posts items
                  warps 2, 3  convert FP8 keys and values, where they are FP8
    warpgroup 1…  consumers   64 rows each: S = Q·Kᵀ, softmax, O += P·V, P in registers  (232 registers)

    barriers      mailbox[2]  32 posting threads; the TMA warp's and all consumers' threads take
                  q[s]        bytes of Q; the consumers' warps give back
                  k[s], v[s]  bytes of a tile; the consumers' warps of every CTA of the cluster give back
    turn[w]       named barriers: one warpgroup issues products while the other does its softmax

    warpgroup 1   |S0|softmax 0|S1 P0·V0|softmax 1 |       |S2 P1·V1|softmax 2 |
    warpgroup 2      |S0|softmax 0      |S1 P0·V0|softmax 1|        |S2 P1·V1|softmax 2

Measured on an H200 in short slices without a published table, causal, 32:8 heads of 128, before rows kept a factor of
one: pairs of CTAs were up to 6 % faster than CTAs alone, turns up to 3 % than
none. Tried and dropped: Q as A operand from registers (nothing spills; 2 to 5 % slower in pairs).

Keys and values behind a request's end are masked, and its last tile of V is cleared there before it is multiplied: what
memory holds behind the end may be NaN.
"""

from __future__ import annotations

from typing import Any

import cutlass
import torch
from cutlass import Float32, Int16, Int32, Int64, cute, pipeline
from cutlass import memory as cutlass_memory
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warpgroup

from epicute.attention.arguments import at
from epicute.attention.schedule import MAILBOX, RAW_STAGES, AttentionSchedule
from epicute.attention.sm90.convert import CONVERTERS, Converter
from epicute.attention.sm90.output import Finish
from epicute.attention.sm90.scheduler import ITEM_FIELDS, Scheduler, read_item, span
from epicute.attention.sm90.steps import Steps
from epicute.attention.spec import AttentionSpec
from epicute.gemm.memory import DSL_DTYPES, load_global

__all__ = ["HopperAttention"]

CONSUMER, PRODUCER = pipeline.PipelineUserType.Consumer, pipeline.PipelineUserType.Producer


class HopperAttention:
    """The device code of one spec and schedule; calling it traces the launch."""

    def __init__(self, spec: AttentionSpec, schedule: AttentionSchedule, name: str) -> None:
        self.spec, self.schedule, self.name = spec, schedule, name
        self.dtype = DSL_DTYPES[spec.dtype]
        self.tile_m, self.tile_n = schedule.tile_m, schedule.tile_n
        self.head_dim, self.cluster = spec.head_dim, schedule.cluster
        self.groups, self.stages = schedule.groups, schedule.stages
        self.chunk = 64 if self.head_dim % 64 == 0 else 32 if self.head_dim % 32 == 0 else 16
        self.chunks = self.head_dim // self.chunk
        self.share = self.tile_n // self.cluster
        self.box = self.share if spec.page is None else min(spec.page, self.share)
        self.tile_bytes = self.tile_n * self.head_dim * 2
        self.scheduler = Scheduler(spec, schedule)
        self.finish = Finish(spec)
        self.converted = spec.kv_dtype != spec.dtype
        self.raw_dtype = DSL_DTYPES[spec.kv_dtype]
        if self.converted:
            self.converter = Converter(spec, schedule)

    def _atom(self) -> Any:
        kinds = warpgroup.SmemLayoutAtomKind
        kind = {64: kinds.K_SW128, 32: kinds.K_SW64, 16: kinds.K_SW32}[self.chunk]
        return warpgroup.make_smem_layout_atom(kind, self.dtype)

    def _smem_layout(self, rows: int, stages: int) -> cute.ComposedLayout:
        return cute.tile_to_shape(self._atom(), (rows, self.head_dim, stages), (0, 1, 2))

    def _products(self) -> tuple[cute.TiledMma, cute.TiledMma]:
        """The MMAs of S = Q·Kᵀ and of O += P·V, whose A is in registers."""
        k_major, mn_major = OperandMajorMode.K, OperandMajorMode.MN
        source = warpgroup.OperandSource
        qk = warpgroup.MmaF16BF16Op(
            self.dtype,
            Float32,
            (64, self.tile_n, 16),
            source.SMEM,
            k_major,
            k_major,
        )
        pv = warpgroup.MmaF16BF16Op(
            self.dtype, Float32, (64, self.head_dim, 16), source.RMEM, k_major, mn_major
        )
        layout = (self.groups, 1, 1)
        return tuple(cute.make_tiled_mma(cute.make_mma_atom(op), layout) for op in (qk, pv))

    def _global(self, arguments: Any, name: str, heads: int, rows: Any, batches: Any) -> Any:
        """(rows, head_dim, heads, batches) of an operand."""
        dtype = self.dtype if name == "q" else self.raw_dtype
        steps = [
            cute.assume(arguments[at(f"{name}_{axis}")], 128 // dtype.width)
            for axis in ("row", "head", "batch")
        ]
        pointer = cute.make_ptr(
            dtype, arguments[at(name)], cute.AddressSpace.gmem, assumed_align=16
        )
        layout = cute.make_layout(
            (rows, self.head_dim, heads, batches), stride=(steps[0], 1, steps[1], steps[2])
        )
        return cute.make_tensor(pointer, layout)

    @cute.jit
    def __call__(self, anchor: cute.Tensor, arguments: Any, stream: Any) -> None:
        """Launch. ``anchor``: any memory on the device, which tells the launcher the device; ``arguments``: see
        ``ARGUMENTS``.
        """
        spec = self.spec
        q_batches = Int32(1) if spec.packed else Int32(arguments[at("batch")])
        q_rows = cutlass.max(Int32(arguments[at("q_rows")]), 1)
        kv_rows = cutlass.max(Int32(arguments[at("kv_rows")]), 1)
        kv_batches = cutlass.max(Int32(arguments[at("kv_batches")]), 1)
        q = self._global(arguments, "q", spec.heads, q_rows, q_batches)
        k = self._global(arguments, "k", spec.kv_heads, kv_rows, kv_batches)
        v = self._global(arguments, "v", spec.kv_heads, kv_rows, kv_batches)
        load = cpasync.CopyBulkTensorTileG2SOp()
        share = cpasync.CopyBulkTensorTileG2SMulticastOp() if self.cluster > 1 else load
        q_box = cute.tile_to_shape(self._atom(), (self.tile_m, self.chunk), (0, 1))
        kv_box = cute.tile_to_shape(self._atom(), (self.box, self.chunk), (0, 1))
        width = self.chunk
        if cutlass.const_expr(self.converted):
            width = self.head_dim
            kv_box = cute.make_layout((self.box, width), stride=(width, 1))
        q_atom, q = cpasync.make_tiled_tma_atom(load, q, q_box, (self.tile_m, self.chunk))
        k_atom, k = cpasync.make_tiled_tma_atom(share, k, kv_box, (self.box, width))
        v_atom, v = cpasync.make_tiled_tma_atom(share, v, kv_box, (self.box, width))
        qk, pv = self._products()
        self.kernel.set_name_prefix(self.name)
        self.kernel(
            (q_atom, q, k_atom, k, v_atom, v),
            qk,
            pv,
            self._smem_layout(self.tile_m, self.schedule.q_stages),
            self._smem_layout(self.tile_n, self.stages),
            arguments,
        ).launch(
            grid=(Int32(arguments[at("clusters")]) * self.cluster, 1, 1),
            block=(self.schedule.threads, 1, 1),
            cluster=(self.cluster, 1, 1),
            stream=stream,
            min_blocks_per_mp=1,
            use_pdl=True,
        )

    @cute.kernel
    def kernel(
        self,
        loads: Any,
        qk: cute.TiledMma,
        pv: cute.TiledMma,
        q_layout: cute.ComposedLayout,
        kv_layout: cute.ComposedLayout,
        arguments: Any,
    ):
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        cute.arch.griddepcontrol_launch_dependents()
        if warp == 0:
            for atom in cutlass.range_constexpr(0, 6, 2):
                cpasync.prefetch_descriptor(loads[atom])
        shared = self._allocate(q_layout, kv_layout)
        pipes = self._pipelines(shared)
        rank, cluster = block % self.cluster, block // self.cluster
        cute.arch.griddepcontrol_wait()
        few, many = self.schedule.registers
        if warp < 4:
            cute.arch.setmaxregister_decrease(few)
            if warp == 0:
                self._produce(loads, shared, pipes, arguments, rank)
            elif warp == 1:
                self.scheduler.run(arguments, shared["mail"], pipes["mail"], cluster, thread % 32)
            elif cutlass.const_expr(self.converted):
                self._convert(shared, pipes, thread - 64)
        else:
            cute.arch.setmaxregister_increase(many)
            self._consume(qk, pv, shared, pipes, arguments, rank, thread - 128)

    def _allocate(self, q_layout: Any, kv_layout: Any) -> dict[str, Any]:
        allocator = cutlass_memory.SmemAllocator()
        shared = {}
        for name, layout in (("q", q_layout), ("k", kv_layout), ("v", kv_layout)):
            shared[name] = allocator.allocate_tensor(
                self.dtype, layout.outer, 1024, swizzle=layout.inner
            )
        counts = {"q": self.schedule.q_stages, "k": self.stages, "v": self.stages, "mail": MAILBOX}
        if self.converted:
            layout = cute.make_layout(
                (self.tile_n, self.head_dim, RAW_STAGES),
                stride=(self.head_dim, 1, self.tile_n * self.head_dim),
            )
            shared["raw"] = allocator.allocate_tensor(self.raw_dtype, layout, 1024)
            counts["raw"] = RAW_STAGES
        for name, count in counts.items():
            shared[f"{name}_barriers"] = allocator.allocate_array(Int64, 2 * count)
        shared["mail"] = allocator.allocate_tensor(
            Int32, cute.make_layout((ITEM_FIELDS, MAILBOX)), 16
        )
        return shared

    def _pipelines(self, shared: dict[str, Any]) -> dict[str, Any]:
        group, agent = pipeline.CooperativeGroup, pipeline.Agent.Thread
        warps = 4 * self.groups
        found = {
            "mail": pipeline.PipelineAsync.create(
                barrier_storage=shared["mail_barriers"],
                num_stages=MAILBOX,
                producer_group=group(agent, 32),
                consumer_group=group(agent, 32 + 32 * warps + CONVERTERS * self.converted),
                defer_sync=True,
            ),
            "q": pipeline.PipelineTmaAsync.create(
                barrier_storage=shared["q_barriers"],
                num_stages=self.schedule.q_stages,
                producer_group=group(agent),
                consumer_group=group(agent, warps),
                tx_count=self.tile_m * self.head_dim * 2,
                cta_layout_vmnk=cute.make_layout((1, 1, 1, 1)),
                defer_sync=True,
            ),
        }
        names: tuple[str, ...] = ("k", "v")
        if self.converted:
            for name in names:
                found[name] = pipeline.PipelineAsync.create(
                    barrier_storage=shared[f"{name}_barriers"],
                    num_stages=self.stages,
                    producer_group=group(agent, CONVERTERS),
                    consumer_group=group(agent, 32 * warps),
                    defer_sync=True,
                )
            names = ("raw",)
        for name in names:
            found[name] = pipeline.PipelineTmaAsync.create(
                barrier_storage=shared[f"{name}_barriers"],
                num_stages=RAW_STAGES if self.converted else self.stages,
                producer_group=group(agent),
                consumer_group=group(agent, (2 if self.converted else warps) * self.cluster),
                tx_count=self.tile_n * self.head_dim * self.raw_dtype.width // 8,
                cta_layout_vmnk=cute.make_layout((1, self.cluster, 1, 1)),
                defer_sync=name == "k",
            )
        return found

    @cute.jit
    def _produce(self, loads, shared, pipes, arguments, rank) -> None:
        q_atom, q, k_atom, k, v_atom, v = loads
        mail = pipeline.make_pipeline_state(CONSUMER, MAILBOX)
        q_state = pipeline.make_pipeline_state(PRODUCER, self.schedule.q_stages)
        kv_state = pipeline.make_pipeline_state(
            PRODUCER, RAW_STAGES if self.converted else self.stages
        )
        pipes["mail"].consumer_wait(mail)
        item = read_item(shared["mail"][None, mail.index])
        while item.valid != 0:
            pipes["mail"].consumer_release(mail)
            mail.advance()
            self._load_q(q_atom, q, shared["q"], pipes["q"], q_state, item, rank)
            q_state.advance()
            first, last = span(self.spec, self.schedule, item)
            kv_head = item.head // self.spec.group
            for i in cutlass.range(last - first + 1, unroll=1):
                place = (arguments, item, last - i, kv_head, rank)
                if cutlass.const_expr(self.converted):
                    self._load(k_atom, k, shared["raw"], pipes["raw"], kv_state, place)
                    kv_state.advance()
                    self._load(v_atom, v, shared["raw"], pipes["raw"], kv_state, place)
                else:
                    self._load(k_atom, k, shared["k"], pipes["k"], kv_state, place)
                    self._load(v_atom, v, shared["v"], pipes["v"], kv_state, place)
                kv_state.advance()
            pipes["mail"].consumer_wait(mail)
            item = read_item(shared["mail"][None, mail.index])
        pipes["q"].producer_tail(q_state)
        # The tail moves its state on.
        if cutlass.const_expr(self.converted):
            pipes["raw"].producer_tail(kv_state)
        else:
            pipes["k"].producer_tail(kv_state.clone())
            pipes["v"].producer_tail(kv_state)

    def _boxes(self, shared: Any, box: tuple[int, int]) -> Any:
        """A buffer cut in boxes: (box, row, column chunk, stage)."""
        tiles = cute.local_tile(shared, box, (None, None, None))
        return cute.group_modes(tiles, 0, 2)

    @cute.jit
    def _load_q(self, atom, q, shared, pipe, state, item, rank) -> None:
        batch = 0 if self.spec.packed else item.request
        source = cute.domain_offset((item.q_row + item.tile * self.tile_m, 0, 0, 0), q)
        tiles = cute.local_tile(source, (self.tile_m, self.chunk), (None, None, None, None))
        target, source = cpasync.tma_partition(
            atom,
            0,
            cute.make_layout(1),
            self._boxes(shared, (self.tile_m, self.chunk)),
            cute.group_modes(tiles, 0, 2),
        )
        pipe.producer_acquire(state)
        barrier = pipe.producer_get_barrier(state)
        for c in cutlass.range_constexpr(self.chunks):
            cute.copy(
                atom,
                source[None, 0, c, item.head + rank, batch],
                target[None, 0, c, state.index],
                tma_bar_ptr=barrier,
            )

    @cute.jit
    def _load(self, atom, tensor, shared, pipe, state, place) -> None:
        """This CTA's share of a tile of K or of V, to every CTA of the cluster."""
        arguments, item, tile, head, rank = place
        spec, box = self.spec, self.box
        width = self.head_dim if self.converted else self.chunk
        paged = spec.page is not None
        first = tile * self.tile_n + rank * self.share
        start = Int32(0) if paged else item.kv_row + first
        source = cute.domain_offset((start, 0, 0, 0), tensor)
        tiles = cute.local_tile(source, (box, width), (None, None, None, None))
        target, source = cpasync.tma_partition(
            atom,
            0,
            cute.make_layout(1),
            self._boxes(shared, (box, width)),
            cute.group_modes(tiles, 0, 2),
        )
        pipe.producer_acquire(state)
        barrier = pipe.producer_get_barrier(state)
        mask = Int16((1 << self.cluster) - 1)
        for i in cutlass.range_constexpr(self.share // box):
            row, batch = Int32(i), Int32(0)
            if cutlass.const_expr(paged):
                token = first + i * box
                batch = self._page(arguments, item, token)
                row = token % spec.page // box
            elif cutlass.const_expr(not spec.packed):
                batch = item.request
            for c in cutlass.range_constexpr(self.head_dim // width):
                from_ = source[None, row, c, head, batch]
                to = target[None, rank * (self.share // box) + i, c, state.index]
                if cutlass.const_expr(self.cluster > 1):
                    cute.copy(atom, from_, to, tma_bar_ptr=barrier, mcast_mask=mask)
                else:
                    cute.copy(atom, from_, to, tma_bar_ptr=barrier)

    @cute.jit
    def _convert(self, shared, pipes, thread) -> None:
        """Raw tiles to tiles, K and V in turn."""
        mail = pipeline.make_pipeline_state(CONSUMER, MAILBOX)
        raw = pipeline.make_pipeline_state(CONSUMER, RAW_STAGES)
        state = pipeline.make_pipeline_state(PRODUCER, self.stages)
        pipes["mail"].consumer_wait(mail)
        item = read_item(shared["mail"][None, mail.index])
        while item.valid != 0:
            pipes["mail"].consumer_release(mail)
            mail.advance()
            first, last = span(self.spec, self.schedule, item)
            for _ in cutlass.range(last - first + 1, unroll=1):
                self._convert_tile(shared, pipes, "k", raw, state, thread)
                raw.advance()
                self._convert_tile(shared, pipes, "v", raw, state, thread)
                raw.advance()
                state.advance()
            pipes["mail"].consumer_wait(mail)
            item = read_item(shared["mail"][None, mail.index])

    @cute.jit
    def _convert_tile(self, shared, pipes, name: cutlass.Constexpr, raw, state, thread) -> None:
        source = Int32(shared["raw"].iterator.toint()) + raw.index * (self.tile_bytes // 2)
        target = Int32(shared[name].iterator.toint()) + state.index * self.tile_bytes
        pipes["raw"].consumer_wait(raw)
        pipes[name].producer_acquire(state)
        self.converter.tile(source, target, thread)
        cute.arch.fence_view_async_shared()
        pipes[name].producer_commit(state)
        cute.arch.sync_warp()
        pipes["raw"].consumer_release(raw)

    @cute.jit
    def _page(self, arguments, item, token) -> Int32:
        """The page of a token; -1, which the hardware fills with zeros, behind the request's end."""
        found = cute.make_rmem_tensor(1, Int32)
        found[0] = Int32(-1)
        if token < item.kv_length:
            offset = Int64(item.request) * arguments[at("table_row")] + token // self.spec.page
            pointer = cute.make_ptr(
                Int32,
                arguments[at("page_table")] + offset * 4,
                cute.AddressSpace.gmem,
                assumed_align=4,
            )
            found[0] = cute.make_tensor(pointer, cute.make_layout(1))[0]
        return found[0]

    @cute.jit
    def _consume(self, qk, pv, shared, pipes, arguments, rank, thread) -> None:
        mail = pipeline.make_pipeline_state(CONSUMER, MAILBOX)
        q_state = pipeline.make_pipeline_state(CONSUMER, self.schedule.q_stages)
        k_state = pipeline.make_pipeline_state(CONSUMER, self.stages)
        v_state = pipeline.make_pipeline_state(CONSUMER, self.stages)
        steps = Steps(self.spec, self.schedule, (qk, pv), shared, pipes, thread)
        tally = self.finish.open(arguments)
        steps.open()
        pipes["mail"].consumer_wait(mail)
        item = read_item(shared["mail"][None, mail.index])
        while item.valid != 0:
            pipes["mail"].consumer_release(mail)
            mail.advance()
            first, last = span(self.spec, self.schedule, item)
            head = item.head + rank
            Steps.begin(steps, item, self._key_scale(arguments, head))
            masked, windowed = Steps.cut(steps, first, last)
            Steps.first(steps, q_state, k_state, v_state, last)
            k_state.advance()
            for i in cutlass.range(masked, unroll=1):
                Steps.next(steps, q_state, k_state, v_state, last - 1 - i, True)
                k_state.advance()
                v_state.advance()
            for _ in cutlass.range(last - first - masked - windowed, unroll=1):
                Steps.next(steps, q_state, k_state, v_state, last, False)
                k_state.advance()
                v_state.advance()
            if cutlass.const_expr(self.spec.window is not None):
                for i in cutlass.range(windowed, unroll=1):
                    Steps.next(steps, q_state, k_state, v_state, first + windowed - 1 - i, True)
                    k_state.advance()
                    v_state.advance()
            Steps.end(steps, q_state, v_state)
            q_state.advance()
            v_state.advance()
            self.finish.run(steps, item, head, arguments, tally)
            pipes["mail"].consumer_wait(mail)
            item = read_item(shared["mail"][None, mail.index])
        self.finish.close(tally, arguments, thread % 32)

    def _key_scale(self, arguments: Any, head: Any) -> Any:
        """Scale of the head's keys."""
        if not self.converted:
            return Float32(1.0)
        address = arguments[at("k_scale")] + Int64(head // self.spec.group) * 4
        return load_global(torch.float32, address)[0]
