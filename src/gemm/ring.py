"""The output ring: panels from registers through shared memory to TMA stores. Imports the DSL.

Each consumer warpgroup has a ring of its own. For every panel all threads write their rows; one warp then waits until
the slot after this one has been read, a barrier of the warpgroup makes both facts known, and that warp sends the panel.
"""

from __future__ import annotations

from typing import Any

import cutlass
from cutlass import Boolean, Int32, Int64, cute
from cutlass.cute.nvgpu import cpasync

from epicute.gemm.arguments import ArgumentLayout
from epicute.gemm.memory import DSL_DTYPES
from epicute.gemm.panels import PANEL_BYTES, PANEL_COLUMNS, PANEL_ROWS

__all__ = ["Ring", "store_atoms"]

SHAPE = (PANEL_ROWS, PANEL_COLUMNS)


def _panel_layout() -> Any:
    return cute.make_layout(SHAPE, stride=(PANEL_COLUMNS, 1))


def store_atoms(
    layout: ArgumentLayout, names: tuple[str, ...], arguments: Any, rows: Any
) -> tuple[Any, ...]:
    """TMA atom and tensor of each output, one after the other; host code."""
    found: list[Any] = []
    for name in names:
        spec = layout[name]
        size, width = spec.dtype.itemsize, spec.shape[1]
        address = arguments[spec.at("address")]
        stride = cute.assume(arguments[spec.at("row_stride")] // size, 16 // size)
        pointer = cute.make_ptr(
            DSL_DTYPES[spec.dtype], address, cute.AddressSpace.gmem, assumed_align=16
        )
        tensor = cute.make_tensor(pointer, cute.make_layout((rows, width), stride=(stride, 1)))
        operation = cpasync.CopyBulkTensorTileS2GOp()
        atom, view = cpasync.make_tiled_tma_atom(operation, tensor, _panel_layout(), SHAPE)
        found += (atom, view)
    return tuple(found)


class Ring:
    """A warpgroup's ring, as its threads see it."""

    def __init__(
        self,
        layout: ArgumentLayout,
        names: tuple[str, ...],
        atoms: tuple[Any, ...],
        slots: int,
        sharers: int,
    ) -> None:
        self.layout, self.names, self.slots, self.sharers = layout, names, slots, sharers
        self._atoms = dict(zip(names, zip(atoms[0::2], atoms[1::2], strict=True), strict=True))

    def open(self, memory: Any, thread: Any) -> None:
        """Take the warpgroup's part of ``memory``; ``thread`` among both consumer warpgroups."""
        self.group = cute.arch.make_warp_uniform(thread // 128)
        self.warp = cute.arch.make_warp_uniform(thread % 128 // 32)
        self.thread = thread % 128
        base = Int64(memory.iterator.toint())
        self._base = base + Int64(self.group) * (self.slots * PANEL_BYTES)
        self._next = cute.make_rmem_tensor(1, Int32)
        self._next[0] = Int32(0)

    def send(self, name: str, halves: dict[int, Any], m_tile: Any, column: Any) -> None:
        """Write a panel and store it.

        ``halves``: for rows g and g + 8 of each warp's sixteen, the thread's eight columns as a register fragment.
        ``column``: first output column, a multiple of 32.
        """
        spec = self.layout[name]
        size = spec.dtype.itemsize
        slot = self._next[0]
        address = self._base + Int64(slot) * PANEL_BYTES
        for half, fragment in halves.items():
            row = self.thread // 32 * 16 + self.thread % 32 // 4 + 8 * half
            offset = (row * PANEL_COLUMNS + self.thread % 4 * 8) * size
            pointer = cute.make_ptr(
                fragment.element_type,
                address + Int64(offset),
                cute.AddressSpace.smem,
                assumed_align=8 * size,
            )
            target = cute.make_tensor(pointer, cute.make_layout(cute.size(fragment)))
            cute.autovec_copy(fragment, target)
        cute.arch.fence_view_async_shared()
        wait_for_slots(self.warp, self.slots - 2)
        cute.arch.barrier(barrier_id=1 + self.group, number_of_threads=128)
        atom, tensor = self._atoms[name]
        panel = cute.make_tensor(
            cute.make_ptr(
                DSL_DTYPES[spec.dtype], address, cute.AddressSpace.smem, assumed_align=128
            ),
            _panel_layout(),
        )
        source, target = cpasync.tma_partition(
            atom,
            0,
            cute.make_layout(1),
            cute.group_modes(panel, 0, 2),
            cute.group_modes(cute.local_tile(tensor, SHAPE, (None, None)), 0, 2),
        )
        row = m_tile * self.sharers + self.group % self.sharers
        at = target[None, row, column // PANEL_COLUMNS]
        # Of an output of one panel, every panel would be the first: an extent of one has no stride.
        inside = Boolean(column < spec.shape[1])
        send_panel(self.warp, inside, atom, source, at)
        self._next[0] = Int32(cutlass.select_(slot == self.slots - 1, Int32(0), slot + 1))

    def close(self) -> None:
        """Wait until every panel has left shared memory."""
        wait_for_slots(self.warp, 0)


@cute.jit
def wait_for_slots(warp: Int32, pending: cutlass.Constexpr) -> None:
    """The sending warp waits until at most ``pending`` panels are still being read."""
    if warp == 0:
        cute.arch.cp_async_bulk_wait_group(pending, read=True)


@cute.jit
def send_panel(
    warp: Int32, inside: Boolean, atom: cute.CopyAtom, source: cute.Tensor, target: cute.Tensor
) -> None:
    """One warp stores the panel, where the output has any of its columns, and closes the group."""
    if warp == 0:
        if inside:
            cute.copy(atom, source, target)
        cute.arch.cp_async_bulk_commit_group()
