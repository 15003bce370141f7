"""INT4 records to a matrix of 16-bit rows: a warp takes 16 rows x 64 k, its lane 16 of k of two rows. Imports the DSL.

A lane's 16 bytes hold, of row g and of row g + 8, two runs of eight adjacent k (one of 16 where no group is 32 wide):
each becomes one store of 16 bytes. value = (code - zero) * scale, the product in float32, rounded once.
"""

from __future__ import annotations

from typing import Any

import cutlass
from cutlass import Boolean, Float32, Int32, Int64, Uint8, cute

from epicute.decode.dequantize import ARGUMENTS, WARPS, DequantizeKernel
from epicute.gemm.memory import load_global, store_global
from epicute.layouts import TILE_ROWS, fragment_cell
from epicute.quant.dsl import Launched, begin, multiply
from epicute.quant.int4 import MIDDLE

__all__ = ["Dequantizer"]

VECTOR = 8
"""Elements of a store."""


class Dequantizer(Launched):
    """Device code; calling it traces the launch. ``arguments``: see ``dequantize.ARGUMENTS``."""

    names = ARGUMENTS

    def __init__(self, kernel: DequantizeKernel) -> None:
        self.described, self.records = kernel, kernel.form.records
        self.record = kernel.form.records.record

    @cute.jit
    def __call__(self, anchor: cute.Tensor, arguments: Any, stream: Any) -> None:
        """Launch. ``anchor``: see ``Launcher``."""
        self.kernel.set_name_prefix("epicute_dequantize")
        self.kernel(arguments).launch(
            grid=(Int32(self.given(arguments, "blocks")), 1, 1),
            block=(32 * WARPS, 1, 1),
            stream=stream,
            use_pdl=True,
        )

    @cute.kernel
    def kernel(self, arguments: Any) -> None:
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        begin()
        step = Int32(self.given(arguments, "blocks")) * WARPS
        first = block * WARPS + cute.arch.make_warp_uniform(thread // 32)
        pieces = Int32(self.given(arguments, "pieces"))
        for piece in cutlass.range(first, pieces, step, unroll=1):
            self._piece(arguments, piece, thread % 32)

    @cute.jit
    def _piece(self, arguments: Any, piece: Any, lane: Any) -> None:
        record, records = self.record, self.records
        tile = piece % record.tiles
        piece = piece // record.tiles
        block = piece % record.blocks
        piece = piece // record.blocks
        along, down = piece % records.along, piece // records.along
        base = self.given(arguments, "codes") + records.record_offset(Int64(down), Int64(along))
        words = cute.make_rmem_tensor(4, Int32)
        place = base + Int64(record.load_offset(block, tile, 0, lane))
        pointer = cute.make_ptr(Int32, place, cute.AddressSpace.gmem, assumed_align=16)
        cute.autovec_copy(cute.make_tensor(pointer, cute.make_layout(4)), words)
        for half in cutlass.range_constexpr(2):
            row = tile * TILE_ROWS + lane // 4 + half * 8
            for part in cutlass.range_constexpr(2):
                _, k = fragment_cell(lane, 2 * part, 0, 0, record.run)
                self._vector(
                    arguments, base, (down, along), (row, block * 64 + k), words, part * 2 + half
                )

    def _vector(
        self, arguments: Any, base: Any, record: Any, cell: Any, words: Any, which: int
    ) -> None:
        """Eight adjacent k of a row. ``which``: two times the pair of steps, plus the half of the rows."""
        (down, along), (row, k) = record, cell
        group = k // self.record.group
        place = base + Int64(self.record.scale_offset(row, group))
        assert self.described.form.scale_dtype is not None
        scale = load_global(self.described.form.scale_dtype, place)[0]
        zero = Int32(MIDDLE)
        if self.record.zeros:
            place = base + Int64(self.record.zero_offset(row, group))
            pointer = cute.make_ptr(Uint8, place, cute.AddressSpace.gmem, assumed_align=1)
            zero = Int32(cute.make_tensor(pointer, cute.make_layout(1))[0])
        lanes = []
        for i in range(VECTOR):
            word = words[which // 2 * 2 + i // 4]
            shift = (which % 2 + i % 4 // 2 * 2) * 4 + i % 2 * 16
            code = (word >> shift) & 15
            lanes.append(multiply(Float32(code - zero), scale))
        at_row = down * self.record.rows + row
        at_k = along * self.record.depth + k
        pitch = self.described.pitch
        inside = Boolean(at_row < self.described.rows) & Boolean(at_k < pitch)
        target = self.given(arguments, "target") + (Int64(at_row) * pitch + at_k) * 2
        store_global(self.described.dtype, target, lanes, 16, inside)()
