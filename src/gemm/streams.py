"""A matrix operand's boxes: loaded by the producer, read by the epilogue. Imports the DSL."""

from __future__ import annotations

from typing import Any, NamedTuple

from cutlass import Int32, Int64, cute
from cutlass.cute.nvgpu import cpasync, warpgroup

from epicute.gemm.arguments import ArgumentLayout
from epicute.gemm.memory import DSL_DTYPES
from epicute.gemm.stream_plan import StreamPlan

__all__ = ["Boxes", "Stages", "Stream", "fill", "prefetch", "stream_atom"]


class Stages(NamedTuple):
    """Shared memory of the pipeline: addresses of stage 0 of A and of B, bytes of a stage of each and of a box.

    The first boxes of a stage stand in A, as many as fill it, and the others in B.
    """

    a: Any
    b: Any
    a_bytes: int
    b_bytes: int
    box_bytes: int

    def box(self, stage: Any, within: int) -> Any:
        """Address of a stage's box."""
        behind = within - self.a_bytes // self.box_bytes
        if behind < 0:
            return self.a + stage * self.a_bytes + within * self.box_bytes
        return self.b + stage * self.b_bytes + behind * self.box_bytes


class Boxes(NamedTuple):
    """A buffer beside the pipeline: its address, bytes from stage to stage and of a box."""

    base: Any
    stage_bytes: int
    box_bytes: int

    def box(self, stage: Any, within: int) -> Any:
        """Address of a stage's box."""
        return self.base + stage * self.stage_bytes + within * self.box_bytes


def stream_atom(
    layout: ArgumentLayout, plan: StreamPlan | None, arguments: Any, rows: Any, tile_m: int
) -> tuple[Any, ...]:
    """TMA atom and tensor of the operand, nothing without one; host code."""
    if plan is None:
        return ()
    spec = layout[plan.name]
    address, stride = arguments[spec.at("address")], arguments[spec.at("row_stride")]
    dtype, size = DSL_DTYPES[plan.dtype], plan.size
    pointer = cute.make_ptr(dtype, address, cute.AddressSpace.gmem, assumed_align=16)
    stride = cute.assume(stride // size, 16 // size)
    tensor = cute.make_tensor(pointer, cute.make_layout((rows, spec.shape[1]), stride=(stride, 1)))
    shape = (tile_m, plan.columns)
    box: Any = cute.make_layout(shape, stride=(plan.columns, 1))
    if plan.swizzled:
        atom = warpgroup.make_smem_layout_atom(warpgroup.SmemLayoutAtomKind.K_SW128, dtype)
        box = cute.tile_to_shape(atom, shape, (0, 1))
    operation = cpasync.CopyBulkTensorTileG2SOp()
    return tuple(cpasync.make_tiled_tma_atom(operation, tensor, box, shape))


def fill(
    plan: StreamPlan | None,
    stage: int,
    stages: Stages | Boxes,
    loads: Any,
    state: Any,
    matrix: tuple[Any, ...],
    m: Any,
    n: Any,
) -> None:
    """Load the boxes of one stage of a tile; ``matrix`` is what ``stream_atom`` returned."""
    assert plan is not None
    atom, tensor = matrix
    boxes = plan.boxes_of(stage)
    loads.sync_object_empty.wait(state.index, state.phase)
    barrier = loads.producer_get_barrier(state)
    with cute.arch.elect_one():
        cute.arch.mbarrier_arrive_and_expect_tx(barrier, len(boxes) * stages.box_bytes)
    dtype = DSL_DTYPES[plan.dtype]
    shape = (stages.box_bytes // plan.box, plan.columns)
    tiles = cute.group_modes(cute.local_tile(tensor, shape, (None, None)), 0, 2)
    for within, box in enumerate(boxes):
        address = stages.box(state.index, within)
        pointer = cute.make_ptr(dtype, address, cute.AddressSpace.smem, assumed_align=1024)
        target = cute.make_tensor(pointer, cute.make_layout(shape, stride=(shape[1], 1)))
        to, source = cpasync.tma_partition(
            atom, 0, cute.make_layout(1), cute.group_modes(target, 0, 2), tiles
        )
        cute.copy(atom, source[None, m, n * plan.boxes + box], to, tma_bar_ptr=barrier)


def prefetch(plan: StreamPlan | None, tile_m: int, matrix: tuple[Any, ...], m: Any, n: Any) -> None:
    """Fetch a tile's boxes into L2; ``matrix`` is what ``stream_atom`` returned."""
    assert plan is not None
    atom, tensor = matrix
    tiles = cute.local_tile(tensor, (tile_m, plan.columns), (None, None))
    _, source = cpasync.tma_partition(
        atom,
        0,
        cute.make_layout(1),
        cute.group_modes(_nowhere(plan, tile_m), 0, 2),
        cute.group_modes(tiles, 0, 2),
    )
    with cute.arch.elect_one():
        for box in range(plan.boxes):
            cute.prefetch(atom, source[None, m, n * plan.boxes + box])


def _nowhere(plan: StreamPlan, tile_m: int) -> Any:
    """A box in shared memory that is never touched: ``tma_partition`` wants to know its shape."""
    pointer = cute.make_ptr(DSL_DTYPES[plan.dtype], 0, cute.AddressSpace.smem, assumed_align=1024)
    layout = cute.make_layout((tile_m, plan.columns), stride=(plan.columns, 1))
    return cute.make_tensor(pointer, layout)


class Stream:
    """The boxes of one tile, as a consumer thread sees them."""

    def __init__(
        self, plan: StreamPlan | None, stages: Stages | Boxes, loads: Any, full: Any, done: Any
    ) -> None:
        assert plan is not None
        self.plan, self._stages, self._loads = plan, stages, loads
        self._full, self._done = full, done
        self._index: list[Any] = []

    def arrive(self, unit: int) -> None:
        """Wait for the stages that ``unit`` is the first to read of."""
        for stage in range(len(self._index), self.plan.stages):
            if self.plan.first_unit(stage) == unit:
                self._await()

    def _await(self) -> None:
        self._loads.consumer_wait(self._full)
        self._index.append(Int32(self._full.index))
        self._full.advance()

    def depart(self, unit: int) -> None:
        """Hand back the stages that ``unit`` is the last to read of."""
        for stage in range(self.plan.stages):
            if self.plan.last_unit(stage) == unit:
                # Loads of ours, then writes of TMA: another proxy. The lane that hands back speaks for its warp.
                cute.arch.fence_view_async_shared()
                cute.arch.sync_warp()
                self._loads.consumer_release(self._done)
                self._done.advance()

    def load(self, unit: int, slot: int, lanes: int, lane: Any, row: Any) -> Any:
        """A register fragment of the quad lane's elements of a group of the unit's columns, in a row of the tile."""
        dtype, size = DSL_DTYPES[self.plan.dtype], self.plan.size
        stage, within, byte = self.plan.place(unit * self.plan.width + slot * size)
        base = self._stages.box(self._index[stage], within) + row * self.plan.box
        fragment = cute.make_rmem_tensor(lanes, dtype)
        count = min(lanes, 16 // size)
        for first in range(0, lanes, count):
            column = lane * (lanes * size) + (byte + first * size)
            address = base + (column ^ ((row & 7) * 16) if self.plan.swizzled else column)
            pointer = cute.make_ptr(
                dtype,
                Int64(address),
                cute.AddressSpace.smem,
                assumed_align=count * size,
            )
            part = cute.make_tensor(fragment.iterator + first, cute.make_layout(count))
            cute.autovec_copy(cute.make_tensor(pointer, cute.make_layout(count)), part)
        return fragment
