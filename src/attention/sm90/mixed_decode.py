"""Decode attention over QK4PV8 pages for Hopper: one query token of each request. Imports the DSL.

One or two CTAs on an SM take equal stripes of all parts of all heads (``decode_work``).

    warpgroups 0, 1   multiply a tile of 128 tokens each in turn, from a part's last tile back (``mixed_decode_steps``);
                      the first one, which is the other one of the next part, adds both and ends the part
                      (``mixed_decode_merge``)
    warp 8            finds parts, posts them, and streams their pages into a ring (``mixed_decode_producer``)
    warp 9            prepares a part's queries, quantises and stores a request's new row (``mixed_decode_scribe``)

    ring        full[f] counts bytes; empty[s] of values, and keys_empty[s] of keys with ΔS, the four warps of the
                warpgroup whose tile it was
    mailbox     posted[m] one thread; taken[m] ten warps less the producer
    queries     q_full[s] one thread; q_empty[s] the eight warps that multiply

A warpgroup passes over the other one's tiles without waiting for them, and copies come in any order. A phase's bit
tells two uses of an mbarrier apart, not three: with one for each stage, a tile would seem to be there while that of a
turn of the ring before, the other warpgroup's, is still on its way to the stage. So ``full`` has twice as many as there
are stages. Of two turns before all have come: whoever waits for a tile knows that the one a turn before it was begun,
and that is begun in a stage of values whose last tile has been read.

Warpgroups change roles at every part of a CTA, so that each ends every other one.

The kernel lets the next one start at once, and waits for the one in front before it reads what that may write. Where
there is about a part for each SM, one CTA on each leaves room for the next launch's, whose first tiles come meanwhile.
"""

from __future__ import annotations

from typing import Any

import cutlass
from cutlass import Boolean, Float32, Int32, cute
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warpgroup

from epicute.attention.mixed_decode_spec import (
    GROUPS,
    MAIL_SLOTS,
    MixedDecodeSchedule,
    MixedDecodeSpec,
)
from epicute.attention.mixed_decode_spec import decode_at as at
from epicute.attention.sm90.mixed_decode_merge import Meeting
from epicute.attention.sm90.mixed_decode_places import FULL_TURNS, Barriers, Layout, Shared
from epicute.attention.sm90.mixed_decode_producer import Producer, read_part
from epicute.attention.sm90.mixed_decode_scribe import Scribe
from epicute.attention.sm90.mixed_decode_steps import DecodeTiles

__all__ = ["HopperMixedDecode"]

THREADS = 128 * GROUPS + 64


class HopperMixedDecode:
    """The device code of one spec and schedule; calling it traces the launch."""

    def __init__(self, spec: MixedDecodeSpec, schedule: MixedDecodeSchedule, name: str) -> None:
        self.spec, self.schedule, self.name = spec, schedule, name
        self.layout = Layout(spec, schedule)

    def _products(self) -> tuple[cute.TiledMma, cute.TiledMma]:
        """The MMAs of K · Q^T, whose A is in registers, and of V^T · P^T."""
        major, source = OperandMajorMode.K, warpgroup.OperandSource
        e4m3, half, columns = cutlass.Float8E4M3FN, cutlass.Float16, self.spec.columns
        qk = warpgroup.MmaF16BF16Op(half, Float32, (64, columns, 16), source.RMEM, major, major)
        pv = warpgroup.MmaF8Op(e4m3, e4m3, Float32, (64, columns, 32), source.SMEM, major, major)
        return cute.make_tiled_mma(qk), cute.make_tiled_mma(pv)

    def _values(self, arguments: Any) -> Any:
        """(head_dim, page_size, kv_heads, pages) of V^T."""
        page = self.spec.page
        pointer = cute.make_ptr(
            cutlass.Float8E4M3FN,
            arguments[at("records")] + page.values_start,
            cute.AddressSpace.gmem,
            assumed_align=16,
        )
        head, whole = (cute.assume(arguments[at(f"{n}_stride")], 16) for n in ("head", "page"))
        pages = cutlass.max(Int32(arguments[at("pages")]), 1)
        layout = cute.make_layout(
            (page.head_dim, page.page_size, self.spec.kv_heads, pages),
            stride=(page.page_size, 1, head, whole),
        )
        return cute.make_tensor(pointer, layout)

    @cute.jit
    def __call__(self, anchor: cute.Tensor, arguments: Any, stream: Any) -> None:
        """Launch. ``anchor``: see ``epicute.quant.launch``; ``arguments``: see ``MIXED_DECODE_ARGUMENTS``."""
        page = self.spec.page
        box = (page.head_dim, page.page_size)
        placed = cute.tile_to_shape(self.layout.value_atom(), box, (0, 1))
        atom, values = cpasync.make_tiled_tma_atom(
            cpasync.CopyBulkTensorTileG2SOp(), self._values(arguments), placed, box
        )
        layouts = self.layout.tensors()
        self.kernel.set_name_prefix(self.name)
        self.kernel(
            atom, values, self._products(), (layouts["v"], layouts["q"], layouts["p"]), arguments
        ).launch(
            grid=(Int32(arguments[at("ctas")]), 1, 1),
            block=(THREADS, 1, 1),
            stream=stream,
            min_blocks_per_mp=self.schedule.ctas,
            preferred_smem_carveout=self.schedule.carveout,
            use_pdl=True,
        )

    @cute.kernel
    def kernel(self, atom: Any, values: Any, products: Any, layouts: Any, arguments: Any):
        cute.arch.griddepcontrol_launch_dependents()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        named = dict(zip(("v", "q", "p"), layouts, strict=True))
        shared, barriers = self.layout.allocate(named)
        if warp == 0:
            self._set_up(barriers, thread)
        cute.arch.sync_threads()
        if warp < 4 * GROUPS:
            self._consume(products, shared, barriers, arguments, thread)
        elif warp == 4 * GROUPS:
            if cutlass.const_expr(not self.spec.prefetch):
                cute.arch.griddepcontrol_wait()
            self._produce(atom, values, shared, barriers, arguments, block, thread % 32)
        else:
            scribe = Scribe(self.spec, self.layout, shared, barriers)
            scribe.run(arguments, thread % 32)

    @cute.jit
    def _set_up(self, barriers, lane) -> None:
        stages = self.schedule.stages
        if lane == 0:
            for name, count, arrivals in (
                ("full", FULL_TURNS * stages, 1),
                ("empty", stages, 4),
                ("keys_empty", self.schedule.key_stages, 4),
                ("posted", MAIL_SLOTS, 1),
                ("taken", MAIL_SLOTS, 4 * GROUPS + 1),
                ("q_full", 2, 1),
                ("q_empty", 2, 4 * GROUPS),
            ):
                for i in cutlass.range_constexpr(count):
                    cute.arch.mbarrier_init(getattr(barriers, name) + i, arrivals)
        cute.arch.mbarrier_init_fence()

    @cute.jit
    def _produce(self, atom, values, shared, barriers, arguments, block, lane) -> None:
        page = self.spec.page
        box = (page.head_dim, page.page_size)
        cpasync.prefetch_descriptor(atom)
        tiles = cute.local_tile(values, box, (None, None, None, None))
        places = cute.local_tile(shared.v_tensor, box, (None, None, None))
        target, source = cpasync.tma_partition(
            atom,
            0,
            cute.make_layout(1),
            cute.group_modes(places, 0, 2),
            cute.group_modes(tiles, 0, 2),
        )
        # A box of shared memory: (box, 0, page of the tile, stage).
        boxes = (atom, source, target[None, 0, None, None])
        producer = Producer(self.spec, self.schedule, self.layout, shared, barriers, boxes)
        producer.run(arguments, block, lane)

    @cute.jit
    def _consume(self, products, shared, barriers, arguments, thread) -> None:
        tiles = DecodeTiles(self.spec, self.layout, products, shared, thread)
        meeting = Meeting(self.spec, self.schedule, self.layout, shared, tiles)
        ring, mail = Int32(0), Int32(0)
        part = self._take(shared, barriers, mail, thread)
        cute.arch.griddepcontrol_wait()
        while part.valid != 0:
            slot, turn = mail % 2, mail // 2 % 2
            cute.arch.mbarrier_wait(barriers.q_full + slot, turn)
            DecodeTiles.begin(tiles, part, mail, arguments)
            for i in cutlass.range(part.count, unroll=1):
                if i % GROUPS == tiles.role:
                    key, value = self.layout.stages(ring)
                    full, phase = self.layout.full(ring)
                    cute.arch.mbarrier_wait(barriers.full + full, phase)
                    tile = part.first + part.count - 1 - i
                    DecodeTiles.tile(tiles, tile, (key, value), barriers.keys_empty + key)
                    self._release(barriers.empty, value, thread)
                ring += 1
            self._release(barriers.q_empty, slot, thread)
            Meeting.run(meeting, part, mail, arguments)
            mail += 1
            part = self._take(shared, barriers, mail, thread)

    def _take(self, shared: Shared, barriers: Barriers, mail: Any, thread: Any) -> Any:
        """Wait for the next part, read it and give its slot back."""
        place, turn = mail % MAIL_SLOTS, mail // MAIL_SLOTS % 2
        cute.arch.mbarrier_wait(barriers.posted + place, turn)
        part = read_part(shared.mail, place)
        self._release(barriers.taken, place, thread)
        return part

    def _release(self, barrier: Any, place: Any, thread: Any) -> None:
        """This warp is done with a slot."""
        cute.arch.sync_warp()
        _arrive_if(barrier + place, Boolean(thread % 32 == 0))


@cute.jit
def _arrive_if(barrier, condition) -> None:
    if condition:
        cute.arch.mbarrier_arrive(barrier)
