"""INT4 records to a matrix of 16-bit rows: a warp takes 16 rows x 64 k, its lane 16 of k of two rows. Imports the DSL.

A lane takes one MMA step: its word of the 16 bytes of each lane of its quad. These hold, of row g and of row g + 8,
twice eight adjacent k: each becomes one store of 16 bytes. value = (code - zero) * scale, the product in float32,
rounded once.
"""

from __future__ import annotations

from typing import Any

import cutlass
from cutlass import Boolean, Float32, Int32, Int64, Uint8, cute

from epicute.decode.dequantize import ARGUMENTS, WARPS, DequantizeKernel
from epicute.gemm.memory import load_global, store_global
from epicute.layouts import BLOCK, TILE_ROWS, code_place
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
        step = lane % 4
        words = []
        for t in cutlass.range_constexpr(4):
            place = base + Int64(record.load_offset(block, tile, 0, lane // 4 * 4 + t) + step * 4)
            pointer = cute.make_ptr(Int32, place, cute.AddressSpace.gmem, assumed_align=4)
            words.append(cute.make_tensor(pointer, cute.make_layout(1))[0])
        for half in cutlass.range_constexpr(2):
            row = tile * TILE_ROWS + lane // 4 + half * 8
            for part in cutlass.range_constexpr(2):
                k = block * BLOCK + step * 16 + part * VECTOR
                self._vector(arguments, base, (down, along), (row, k), words, part * 2 + half)

    def _vector(
        self, arguments: Any, base: Any, record: Any, cell: Any, words: Any, which: int
    ) -> None:
        """Eight adjacent k of a row. ``which``: the register of the step that holds two of them in each lane's word."""
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
            _, bit = code_place(0, which, i % 2, 4)
            code = (words[i // 2] >> bit) & 15
            lanes.append(multiply(Float32(code - zero), scale))
        at_row = down * self.record.rows + row
        at_k = along * self.record.depth + k
        pitch = self.described.pitch
        inside = Boolean(at_row < self.described.rows) & Boolean(at_k < pitch)
        target = self.given(arguments, "target") + (Int64(at_row) * pitch + at_k) * 2
        store_global(self.described.dtype, target, lanes, 16, inside)()
