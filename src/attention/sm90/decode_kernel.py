"""Split-KV attention of few query rows over a cache, for Hopper. Imports the DSL.

One CTA on each SM takes an equal stripe of all tiles of keys (``decode_work``).

    warps 0 …    multiply: each takes sixteen tokens of a tile at a time, the rows of A; query rows of one KV head, all
                 its heads and new tokens, are the columns of B (``decode_steps``)
    next warp    finds pieces, posts them, and streams their keys and values into a ring (``decode_producer``)
    scribe       rotates a piece's queries, but the first one's, and quantises its new rows, of records, ahead of the
                 others, and ends pieces behind them, but the last one (``decode_scribe``)

    ring         stages of a tile of keys and values: full[s] counts bytes, empty[s] the warps that multiply
    mailbox      four pieces: posted[m] one thread, taken[m] the warps that multiply, and the scribe, at a piece's end
    desk         of every other piece: ready[d] the scribe, with queries, and with what it had to do for the piece two
                 before, rows[d] likewise, with new rows, left[d] the warps that multiply, when their partial result is
                 in the workspace
    workspace    partial results of pieces, and a counter for each head of each request (``decode_merge``)

K and V come in natural channel order: queries and outputs are permuted instead, once. The stripe of a CTA ends
anywhere in a head; whoever comes last to a head merges its pieces in the order of their keys.

The kernel lets the next one start at once, and waits for the one in front before it reads what that may write.
"""

from __future__ import annotations

from typing import Any

import cutlass
from cutlass import Int32, Int64, cute
from cutlass import memory as cutlass_memory
from cutlass.cute.nvgpu import cpasync, warpgroup

from epicute.attention.decode_arguments import at
from epicute.attention.decode_fragments import TileLayout
from epicute.attention.decode_schedule import (
    MAIL_FIELDS,
    MAIL_SLOTS,
    TABLE_BYTES,
    TRADED,
    DecodeSchedule,
)
from epicute.attention.decode_spec import CACHES, DecodeSpec
from epicute.attention.sm90.decode_merge import Merge
from epicute.attention.sm90.decode_operands import fill_table
from epicute.attention.sm90.decode_producer import Producer, boxes_of, read_item
from epicute.attention.sm90.decode_scribe import Queries, Scribe
from epicute.attention.sm90.decode_steps import MERGING, DecodeSteps
from epicute.epilogues.dsl import opaque
from epicute.gemm.memory import DSL_DTYPES
from epicute.layouts import split

__all__ = ["HopperDecode"]


STAGE = 0xFF
"""Bits of a stage's number; the one above is the parity of its turn."""


class HopperDecode:
    """The device code of one spec and schedule; calling it traces the launch."""

    def __init__(self, spec: DecodeSpec, schedule: DecodeSchedule, name: str) -> None:
        self.spec, self.schedule, self.name = spec, schedule, name
        self.layout = TileLayout(schedule.tile, spec.row_bytes)
        self.dtype = DSL_DTYPES[spec.dtype if spec.packed else CACHES[spec.cache]]
        self.chunk = self.layout.chunk * 8 // self.dtype.width

    def _box(self, rows: int) -> Any:
        """Layout of a copy's rows in shared memory."""
        if not self.layout.swizzled:
            return cute.make_layout((rows, self.chunk), stride=(self.chunk, 1))
        return cute.tile_to_shape(self._atom(), (rows, self.chunk), (0, 1))

    def _atom(self) -> Any:
        kinds = warpgroup.SmemLayoutAtomKind
        kind = {128: kinds.K_SW128, 64: kinds.K_SW64}[self.layout.chunk]
        return warpgroup.make_smem_layout_atom(kind, self.dtype)

    def _global(self, arguments: Any, name: str) -> Any:
        """(tokens, head_dim, kv_heads, pages) of keys or values."""
        steps = [
            cute.assume(arguments[at(f"{name}_{axis}")], 128 // self.dtype.width)
            for axis in ("token", "head", "page")
        ]
        pointer = cute.make_ptr(
            self.dtype, arguments[at(name)], cute.AddressSpace.gmem, assumed_align=16
        )
        tokens, pages = (cutlass.max(Int32(arguments[at(name)]), 1) for name in ("tokens", "pages"))
        layout = cute.make_layout(
            (tokens, self.spec.head_dim, self.spec.kv_heads, pages),
            stride=(steps[0], 1, steps[1], steps[2]),
        )
        return cute.make_tensor(pointer, layout)

    @cute.jit
    def __call__(self, anchor: cute.Tensor, arguments: Any, stream: Any) -> None:
        """Launch. ``anchor``: see ``epicute.quant.launch``; ``arguments``: see ``DECODE_ARGUMENTS``."""
        loads = ()
        if cutlass.const_expr(not self.spec.packed):
            box = (self.schedule.unit(self.spec), self.chunk)
            kind = cpasync.CopyBulkTensorTileG2SOp()
            for name in ("k", "v"):
                tensor = self._global(arguments, name)
                loads += tuple(cpasync.make_tiled_tma_atom(kind, tensor, self._box(box[0]), box))
        self.kernel.set_name_prefix(self.name)
        self.kernel(loads, arguments).launch(
            grid=(Int32(arguments[at("ctas")]), 1, 1),
            block=(self.schedule.threads(self.spec), 1, 1),
            stream=stream,
            min_blocks_per_mp=self._resident(),
            use_pdl=True,
            preferred_smem_carveout=self.schedule.carveout,
        )

    @cute.kernel
    def kernel(self, loads: Any, arguments: Any):
        cute.arch.griddepcontrol_launch_dependents()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        lane = cute.arch.lane_idx()
        block, _, _ = cute.arch.block_idx()
        shared, barriers = self._allocate()
        if warp == 0:
            self._set_up(barriers, lane)
        if cutlass.const_expr(self.schedule.tabled):
            thread, _, _ = cute.arch.thread_idx()
            fill_table(shared["table"], thread, self.schedule.threads(self.spec))
        cute.arch.sync_threads()
        trades = self.schedule.trades(self.spec)
        if warp >= self.schedule.warps:
            if cutlass.const_expr(trades):
                cute.arch.setmaxregister_decrease(TRADED[0])
            if warp == self.schedule.warps:
                self._produce(loads, shared, barriers, arguments, block, lane)
            if warp == self.schedule.warps + 1:
                self._write(shared, barriers, arguments, lane)
        else:
            if cutlass.const_expr(trades):
                cute.arch.setmaxregister_increase(TRADED[1])
            self._consume(shared, barriers, arguments, warp, lane)

    def _resident(self) -> int:
        """CTAs for which registers suffice; look-ups of codes need more of them than two have."""
        return 1 if self.schedule.tabled else self.schedule.resident

    def _allocate(self) -> tuple[dict[str, Any], dict[str, Any]]:
        spec, schedule = self.spec, self.schedule
        allocator = cutlass_memory.SmemAllocator()
        shared: dict[str, Any] = {}
        size = schedule.stages * schedule.stage_bytes(spec)
        ring = allocator.allocate_array(cutlass.Uint8, size, byte_alignment=1024)
        shared["ring"], shared["pointer"] = Int32(ring.toint()), ring
        for name, count in self._areas().items():
            if count == 0:
                continue
            place = allocator.allocate_array(Int32, count, byte_alignment=16)
            shared[name] = Int32(place.toint())
        shared["mail"] = allocator.allocate_tensor(
            Int32, cute.make_layout(MAIL_FIELDS * MAIL_SLOTS), 16
        )
        counts = {"full": schedule.stages, "empty": schedule.stages}
        counts |= {"posted": MAIL_SLOTS, "taken": MAIL_SLOTS}
        counts |= {"ready": 2, "rows": 2, "left": 2}
        barriers = {name: allocator.allocate_array(Int64, n) for name, n in counts.items()}
        shared["rows"] = barriers["rows"]
        return shared, barriers

    def _areas(self) -> dict[str, int]:
        """Words of shared memory that warps address by themselves, by name."""
        spec, schedule = self.spec, self.schedule
        rows = schedule.warps * 8 * schedule.column_tiles(spec)
        return {
            "table": TABLE_BYTES // 4 if schedule.tabled else 0,
            "merge": schedule.merge_bytes(spec) // 4,
            "append": 2 * schedule.append_bytes(spec) // 4,
            "queries": 2 * schedule.query_bytes(spec) // 4,
            "stats": 2 * rows,
            "flag": 4,
        }

    def _steps(self, shared: dict[str, Any], warp: Any, lane: Any) -> DecodeSteps:
        """What a warp does with the tiles of a piece; a kernel with other arithmetic has its own."""
        return DecodeSteps(self.spec, self.schedule, shared, warp, lane)

    def _merge(self, shared: dict[str, Any]) -> Merge:
        """How a piece ends, likewise."""
        return Merge(self.spec, self.schedule, shared)

    @cute.jit
    def _set_up(self, barriers, lane) -> None:
        schedule = self.schedule
        if lane == 0:
            for name, count, arrivals in (
                ("full", schedule.stages, 1),
                ("empty", schedule.stages, schedule.warps),
                ("posted", MAIL_SLOTS, 1),
                ("taken", MAIL_SLOTS, schedule.warps + 1),
                ("ready", 2, 1),
                ("rows", 2, 1),
                ("left", 2, schedule.warps),
            ):
                for i in cutlass.range_constexpr(count):
                    cute.arch.mbarrier_init(barriers[name] + i, arrivals)
        cute.arch.mbarrier_init_fence()

    def _tiles(self, shared: dict[str, Any], side: int) -> Any:
        """(tokens, head_dim, stages) of the ring's keys, or values."""
        spec, schedule = self.spec, self.schedule
        size = schedule.tile * spec.row_bytes
        stages = schedule.stages
        pointer = shared["pointer"] + side * size
        shape = (schedule.tile, spec.head_dim)
        step = 2 * size * 8 // self.dtype.width
        if not self.layout.swizzled:
            pointer = cute.recast_ptr(pointer, dtype=self.dtype)
            layout = cute.make_layout((*shape, stages), stride=(spec.head_dim, 1, step))
            return cute.make_tensor(pointer, layout)
        one = cute.tile_to_shape(self._atom(), shape, (0, 1))
        pointer = cute.recast_ptr(pointer, one.inner, dtype=self.dtype)
        outer = cute.append(one.outer, cute.make_layout(stages, stride=step))
        return cute.make_tensor(pointer, outer)

    @cute.jit
    def _produce(self, loads, shared, barriers, arguments, block, lane) -> None:
        if cutlass.const_expr(not self.spec.prefetch):
            cute.arch.griddepcontrol_wait()
        boxes = self._boxes(loads, shared)
        producer = Producer(self.spec, self.schedule, boxes, shared, barriers)
        producer.run(arguments, block, lane)

    def _boxes(self, loads: Any, shared: dict[str, Any]) -> list[Any]:
        """What is copied from where to where, of keys and of values; nothing of records."""
        found = []
        box = (self.schedule.unit(self.spec), self.chunk)
        for side in range(len(loads) // 2):
            atom, tensor = loads[2 * side : 2 * side + 2]
            cpasync.prefetch_descriptor(atom)
            found.append(boxes_of(self._tiles(shared, side), tensor, atom, box))
        return found

    @cute.jit
    def _write(self, shared, barriers, arguments, lane) -> None:
        steps, merge = self._steps(shared, Int32(0), lane), self._merge(shared)
        scribe = Scribe(self.spec, shared, barriers, steps, merge)
        scribe.run(arguments, lane)

    @cute.jit
    def _consume(self, shared, barriers, arguments, warp, lane) -> None:
        steps, merge = self._steps(shared, warp, lane), self._merge(shared)
        mail, place = Int32(0), Int32(0)
        item = self._next(shared, barriers, mail)
        if cutlass.const_expr(self.spec.packed):
            self._first_queries(steps, barriers, item, arguments, warp)
        else:
            cute.arch.griddepcontrol_wait()
        merge.open(arguments)
        while item.valid != 0:
            turn, desk = split(mail, 2)
            cute.arch.mbarrier_wait(barriers["ready"] + desk, turn & 1)
            DecodeSteps.begin(steps, item, arguments, mail)
            if cutlass.const_expr(self.spec.packed):
                # The first piece's queries are of all warps. And without it, the compiler takes the warps for
                # divergent, and has no uniform registers.
                cute.arch.barrier(barrier_id=MERGING, number_of_threads=32 * self.schedule.warps)
            for i in cutlass.range(0, item.count, steps.joint, unroll=1):
                found = [place]
                for _ in cutlass.range_constexpr(steps.joint):
                    found.append(self._following(found[-1]))
                left = item.count - i
                self._wait_if(barriers["full"], found[0], True)
                if cutlass.const_expr(steps.joint > 1):
                    self._wait_if(barriers["full"], found[1], left > 1)
                stages = [
                    shared["ring"] + (x & STAGE) * self.schedule.stage_bytes(self.spec)
                    for x in found[: steps.joint]
                ]
                DecodeSteps.take(steps, stages, item.first + i, left)
                cute.arch.sync_warp()
                # The last stage is kept, as the place where warps meet.
                self._arrive_if(barriers["empty"], found[0] & STAGE, (lane == 0) & (left > 1))
                place = found[1]
                if cutlass.const_expr(steps.joint > 1):
                    self._arrive_if(barriers["empty"], place & STAGE, (lane == 0) & (left > 2))
                    place = Int32(cutlass.select_(left > 1, found[2], place))
            held = place & STAGE
            held = Int32(cutlass.select_(held == 0, Int32(self.schedule.stages), held)) - 1
            type(steps)._settle(steps)
            # Anew, or registers hold the item through its tiles, and through the meeting of the warps.
            item = read_item(shared["mail"], split(opaque(mail), MAIL_SLOTS)[1])
            if cutlass.const_expr(self.schedule.borrows(self.spec)):
                stage = shared["ring"] + held * self.schedule.stage_bytes(self.spec)
                Merge.borrow(merge, stage)
            Merge.meet(merge, steps, item.slot, arguments)
            item = read_item(shared["mail"], split(opaque(mail), MAIL_SLOTS)[1])
            if item.final != 0:
                # Nobody waits for the stage any more, and for the head everybody does.
                Merge.run(merge, item, arguments)
            else:
                # The stage is filled again by the asynchronous proxy.
                cute.arch.fence_view_async_shared()
                cute.arch.sync_warp()
                self._arrive_if(barriers["empty"], held, lane == 0)
            cute.arch.sync_warp()
            self._arrive_if(barriers["left"], mail & 1, lane == 0)
            self._arrive_if(barriers["taken"], split(mail, MAIL_SLOTS)[1], lane == 0)
            mail += 1
            item = self._next(shared, barriers, mail)
        merge.close(arguments, lane)

    @cute.jit
    def _first_queries(self, steps, barriers, item, arguments, warp) -> None:
        """The warps that multiply prepare the queries of the CTA's first piece, each its share."""
        DecodeSteps.open(steps, item, arguments, Int32(0))
        queries = Queries(steps)
        ahead = queries.ahead(warp)
        # It is over; but what is before a wait for an mbarrier is done before it, and not behind the other wait.
        cute.arch.mbarrier_wait(barriers["posted"], 0)
        cute.arch.griddepcontrol_wait()
        if item.valid != 0:
            Queries.rotate_share(queries, warp, ahead)

    def _following(self, place: Any) -> Any:
        """What is behind a stage with the parity of its turn, one number as registers are few."""
        wraps = (place & STAGE) + 1 == self.schedule.stages
        first = (place ^ (STAGE + 1)) - (self.schedule.stages - 1)
        return Int32(cutlass.select_(wraps, first, place + 1))

    @cute.jit
    def _wait_if(self, barriers, place, condition) -> None:
        if condition:
            cute.arch.mbarrier_wait(barriers + (place & STAGE), split(place, STAGE + 1)[0])

    @cute.jit
    def _arrive_if(self, barriers, place, condition) -> None:
        if condition:
            cute.arch.mbarrier_arrive(barriers + place)

    def _next(self, shared: Any, barriers: Any, mail: Any) -> Any:
        """Wait for an item and read it; its slot is given back behind its end."""
        turn, place = split(mail, MAIL_SLOTS)
        cute.arch.mbarrier_wait(barriers["posted"] + place, turn & 1)
        return read_item(shared["mail"], place)
