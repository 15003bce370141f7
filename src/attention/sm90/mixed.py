"""Persistent warp-specialised attention in mixed precision for Hopper (MpFA 4, 5). Imports the DSL.

As the BF16 kernel, with a warpgroup more that makes of what arrives what is multiplied:

    warpgroup 0     warp 0    TMA: Q of an item, its mean; then tile by tile what belongs to it
                    warp 1    walks the work list and posts items
    warpgroup 1     converts  Q in place: centred, to FP16 or to E4M3 with a scale for each row
                              NVFP4: codes and scales to K in FP16 or E4M3; ΔS to FP32
                              FP8:   values transposed, tokens permuted
    warpgroups 2, 3 consume   64 rows each: S = Q·Kᵀ, softmax, P in E4M3, O += P·V

    NVFP4   TMA -> raw keys, scales, ΔS -> (1) -> k      TMA -> v
    FP8     TMA -> k                                     TMA -> raw values -> (1) -> v

    barriers   mailbox[2]  a posting warp; the TMA warp, the converting and the consuming threads take
               q[2]        bytes of Q; given back by consumers' warps. ready[2]: Q is converted
               raw[s]      bytes; given back by the converting warps of every CTA of the cluster
               k[s], v[s]  either bytes, given back by consumers' warps of every CTA, or 128 converting threads,
                           given back by consumers' threads
               turn[w]     named: one warpgroup issues products while the other does its softmax

A pair of CTAs loads each half of the tokens of K and of the channels of V for both; ΔS is each one's own, as its query
head is. Behind a request's end pages are not read (TMA fills zeros for page -1), keys are masked, and values of the
last tile are cleared before they are multiplied: what memory holds there may be NaN.
"""

from __future__ import annotations

from typing import Any

import cutlass
import torch
from cutlass import Float32, Int32, Int64, cute, pipeline
from cutlass.cute.nvgpu import cpasync

from epicute.attention.mixed import mixed_at as at
from epicute.attention.mixed_places import delta_bytes
from epicute.attention.schedule import MAILBOX
from epicute.attention.sm90.kernel import CONSUMER, PRODUCER
from epicute.attention.sm90.mixed_buffers import CONVERTING, E4M3
from epicute.attention.sm90.mixed_convert import WIDE_UNIT, this_thread
from epicute.attention.sm90.mixed_loads import MixedLoads
from epicute.attention.sm90.mixed_steps import MixedSteps
from epicute.attention.sm90.scheduler import ITEM_FIELDS, Item, read_item, span
from epicute.epilogues.dsl import pure_asm
from epicute.gemm.memory import load_global

__all__ = ["MixedAttention"]

CONVERTED = 4
"""Named barrier of the converting threads; those of consumers are below."""


class MixedAttention(MixedLoads):
    """The device code of one spec and schedule; calling it traces the launch."""

    @cute.jit
    def __call__(self, anchor: cute.Tensor, arguments: Any, stream: Any) -> None:
        """Launch. ``anchor``: any int32 on the device, which tells the launcher the device; ``arguments``: see
        ``MIXED_ARGUMENTS``.
        """
        spec = self.spec
        q_batches = Int32(1) if spec.packed else Int32(arguments[at("batch")])
        q_rows = cutlass.max(Int32(arguments[at("q_rows")]), 1)
        q = self._global(arguments, "q", spec.heads, q_rows, q_batches)
        load = cpasync.CopyBulkTensorTileG2SOp()
        share = cpasync.CopyBulkTensorTileG2SMulticastOp() if self.cluster > 1 else load
        q_box = self._tile(self.dtype, self.tile_m, self.chunk, 128)
        loads = {}
        loads["q"] = cpasync.make_tiled_tma_atom(load, q, q_box, (self.tile_m, self.chunk))
        if cutlass.const_expr(spec.recorded):
            boxes = self._boxes_of()
            for name, view in self._record_views(arguments).items():
                op = load if name in ("terms", "mean") else share
                loads[name] = cpasync.make_tiled_tma_atom(op, view, *boxes[name])
        else:
            kv_rows = cutlass.max(Int32(arguments[at("kv_rows")]), 1)
            kv_batches = cutlass.max(Int32(arguments[at("kv_batches")]), 1)
            shape = (self.box, self.head_dim)
            for name in ("k", "v"):
                view = self._global(arguments, name, spec.kv_heads, kv_rows, kv_batches)
                box = self._tile(E4M3, *shape, min(self.head_dim, 128))
                loads[name] = cpasync.make_tiled_tma_atom(share, view, box, shape)
        names = tuple(loads)
        self.names = names
        qk, pv, outer = self._products()
        flat = [x for name in names for x in loads[name]]
        layouts = self._layouts()
        self.buffers = {name: dtype for name, (dtype, _) in layouts.items()}
        self.kernel.set_name_prefix(self.name)
        self.kernel(
            tuple(flat), qk, pv, outer, tuple(layout for _, layout in layouts.values()), arguments
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
        outer: cute.TiledMma,
        layouts: Any,
        arguments: Any,
    ):
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        cute.arch.griddepcontrol_launch_dependents()
        if warp == 0:
            for atom in cutlass.range_constexpr(0, 2 * len(self.names), 2):
                cpasync.prefetch_descriptor(loads[atom])
        given = dict(
            zip(self.buffers, zip(self.buffers.values(), layouts, strict=True), strict=True)
        )
        shared = self._allocate_all(given)
        self._multiplied(shared)
        pipes = self._pipelines(shared)
        rank, cluster = block % self.cluster, block // self.cluster
        cute.arch.griddepcontrol_wait()
        few, some, many = self.schedule.registers
        if warp < 4:
            cute.arch.setmaxregister_decrease(few)
            if warp == 0:
                self._produce(loads, shared, pipes, arguments, rank)
            elif warp == 1:
                self.scheduler.run(arguments, shared["mail"], pipes["mail"], cluster, thread % 32)
        elif warp < 8:
            cute.arch.setmaxregister_decrease(some)
            self._convert_all(shared, pipes, arguments, thread - 128)
        else:
            cute.arch.setmaxregister_increase(many)
            self._multiply(qk, pv, outer, shared, pipes, arguments, rank, thread - 256)

    # --- converting ---

    def _unit(self, arguments: Any, head: Any) -> Any:
        """What a logit of codes is short of, rows' scales aside."""
        spec = self.spec
        address = arguments[at("k_scale")] + Int64(head // spec.group) * 4
        scale = load_global(torch.float32, address)[0]
        if spec.wide:
            return scale * WIDE_UNIT
        if spec.recorded:
            shift = Int32(arguments[at("shift")])
            return scale * ((127 + shift) << 23).bitcast(Float32)
        return scale

    @cute.jit
    def _convert_all(self, shared, pipes, arguments, thread) -> None:
        spec, schedule = self.spec, self.schedule
        if cutlass.const_expr(spec.recorded and not spec.wide):
            table = Int32(shared["table"].iterator.toint())
            self.converter.line(table, thread, Int32(arguments[at("shift")]))
            cute.arch.barrier(barrier_id=CONVERTED, number_of_threads=CONVERTING)
        mail = pipeline.make_pipeline_state(CONSUMER, MAILBOX)
        q_state = pipeline.make_pipeline_state(CONSUMER, 2)
        ready = pipeline.make_pipeline_state(PRODUCER, 2)
        raw = pipeline.make_pipeline_state(CONSUMER, schedule.raw_stages)
        stages = self.stages if spec.recorded else schedule.v_stages
        state = pipeline.make_pipeline_state(PRODUCER, stages)
        pipes["mail"].consumer_wait(mail)
        item = read_item(shared["mail"][None, mail.index])
        while item.valid != 0:
            pipes["mail"].consumer_release(mail)
            mail.advance()
            self._convert_queries(shared, pipes, q_state, ready)
            q_state.advance()
            ready.advance()
            first, last = span(spec, schedule, item)
            unit = Float32(1.0)
            if cutlass.const_expr(spec.terms > 0):
                unit = pure_asm(
                    "rcp.rn.f32 $0, $1;", "=f,f", Float32, self._unit(arguments, item.head)
                )
            for _ in cutlass.range(last - first + 1, unroll=1):
                if cutlass.const_expr(spec.recorded):
                    self._convert_keys(shared, pipes, raw, state, unit)
                else:
                    self._transpose_values(shared, pipes, raw, state)
                raw.advance()
                state.advance()
            pipes["mail"].consumer_wait(mail)
            item = read_item(shared["mail"][None, mail.index])

    @cute.jit
    def _convert_queries(self, shared, pipes, q_state, ready) -> None:
        stage = 2 * self.tile_m * self.head_dim
        tile = Int32(shared["q"].iterator.toint()) + q_state.index * stage
        scales = Int32(shared["scales"].iterator.toint()) + q_state.index * (4 * self.tile_m)
        mean = Int32(0)
        if cutlass.const_expr(self.spec.terms > 0):
            mean = Int32(shared["mean"].iterator.toint()) + q_state.index * (4 * self.head_dim)
        pipes["q"].consumer_wait(q_state)
        row = this_thread(CONVERTING)
        self.converter.queries(tile, mean, scales, row)
        if cutlass.const_expr(self.outer):
            one = Int32(shared["one"].iterator.toint()) + q_state.index * (32 * self.tile_m)
            self.converter.ones(one, scales, row)
        cute.arch.fence_view_async_shared()
        pipes["ready"].producer_commit(ready)

    @cute.jit
    def _convert_keys(self, shared, pipes, raw, state, unit) -> None:
        spec, n, d = self.spec, self.tile_n, self.head_dim
        source = Int32(shared["raw"].iterator.toint()) + raw.index * (n * d // 2)
        factors = Int32(shared["factors"].iterator.toint()) + raw.index * (n * d // 16)
        size = n * d * self.key_dtype.width // 8
        target = Int32(shared["k"].iterator.toint()) + state.index * size
        table = Int32(0)
        if cutlass.const_expr(not spec.wide):
            table = Int32(shared["table"].iterator.toint())
        pipes["raw"].consumer_wait(raw)
        pipes["k"].producer_acquire(state)
        row = this_thread(CONVERTING)
        self.converter.keys(source, factors, target, table, row)
        if cutlass.const_expr(spec.terms > 0):
            step = n // spec.page * delta_bytes(spec.page, spec.terms)
            terms = Int32(shared["terms"].iterator.toint()) + raw.index * step
            size = n * (32 if self.outer else 4)
            delta = Int32(shared["delta"].iterator.toint()) + state.index * size
            self.converter.compensation(terms, delta, unit, row)
        cute.arch.fence_view_async_shared()
        pipes["k"].producer_commit(state)
        cute.arch.sync_warp()
        pipes["raw"].consumer_release(raw)

    @cute.jit
    def _transpose_values(self, shared, pipes, raw, state) -> None:
        size = self.tile_n * self.head_dim
        source = Int32(shared["raw"].iterator.toint()) + raw.index * size
        target = Int32(shared["v"].iterator.toint()) + state.index * size
        pipes["raw"].consumer_wait(raw)
        pipes["v"].producer_acquire(state)
        self.converter.values(source, target, this_thread(CONVERTING))
        cute.arch.fence_view_async_shared()
        pipes["v"].producer_commit(state)
        cute.arch.sync_warp()
        pipes["raw"].consumer_release(raw)

    # --- multiplying ---

    @cute.jit
    def _multiply(self, qk, pv, outer, shared, pipes, arguments, rank, thread) -> None:
        spec, schedule = self.spec, self.schedule
        mail = pipeline.make_pipeline_state(CONSUMER, MAILBOX)
        q_state = pipeline.make_pipeline_state(CONSUMER, 2)
        k_state = pipeline.make_pipeline_state(CONSUMER, self.stages)
        v_state = pipeline.make_pipeline_state(CONSUMER, schedule.v_stages)
        steps = MixedSteps(spec, schedule, (qk, pv, outer), shared, pipes, thread)
        tally = self.finish.open(arguments)
        steps.open()
        pipes["mail"].consumer_wait(mail)
        item = uniform_item(shared["mail"][None, mail.index])
        while item.valid != 0:
            pipes["mail"].consumer_release(mail)
            mail.advance()
            first, last = span(spec, schedule, item)
            head = item.head + rank
            pipes["ready"].consumer_wait(q_state)
            MixedSteps.begin_mixed(steps, item, self._unit(arguments, head), q_state.index)
            masked, windowed = MixedSteps.cut(steps, first, last)
            MixedSteps.first(steps, q_state, k_state, v_state, last)
            k_state.advance()
            for i in cutlass.range(masked, unroll=1):
                MixedSteps.next(steps, q_state, k_state, v_state, last - 1 - i, True)
                k_state.advance()
                v_state.advance()
            for _ in cutlass.range(last - first - masked - windowed, unroll=1):
                MixedSteps.next(steps, q_state, k_state, v_state, last, False)
                k_state.advance()
                v_state.advance()
            if cutlass.const_expr(spec.window is not None):
                for i in cutlass.range(windowed, unroll=1):
                    MixedSteps.next(
                        steps, q_state, k_state, v_state, first + windowed - 1 - i, True
                    )
                    k_state.advance()
                    v_state.advance()
            MixedSteps.end(steps, q_state, v_state)
            q_state.advance()
            v_state.advance()
            MixedSteps.relocate(steps)
            self.finish.run(steps, item, head, arguments, tally)
            pipes["mail"].consumer_wait(mail)
            item = uniform_item(shared["mail"][None, mail.index])
        self.finish.close(tally, arguments, thread % 32)


def uniform_item(slot: Any) -> Item:
    """The item in a slot of the mailbox, in registers that a warp shares: the others are wanted for accumulators."""
    return Item(*(cute.arch.make_warp_uniform(slot[i]) for i in range(ITEM_FIELDS)))
