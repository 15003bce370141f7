"""Row-wise dynamic quantisation: a row's codes and its scale in one pass. Imports the DSL.

    K up to 2048     a warp to a row, four rows to a block
    beyond           a block of 128, 256 or 512 threads to a row

    thread t         vectors t, t + threads, …: 16 bytes each, kept in registers
    all              largest finite magnitude: in the warp by redux, then through shared memory
    all              scale, its inverse, codes: 8 bytes a vector; where a norm's gain goes in, it is multiplied in for
                     the maximum, and again for the codes
    thread 0         the scale, times the row factor where the row's partial sums of squares are given

A row is read once: its codes are made of the registers that its scale came from.
"""

from __future__ import annotations

from typing import Any

import cutlass
import torch
from cutlass import Float32, Int32, Int64, cute
from cutlass import memory as cutlass_memory

from epicute.quant.dsl import (
    Launched,
    Peak,
    Vector,
    add,
    again,
    begin,
    divide,
    load_vectors,
    magnitude,
    multiply,
    pack_e4m3,
    reciprocal,
    root,
    select,
    store_float,
    sum_partials,
    unpack,
    within_range,
)
from epicute.quant.fp8 import E4M3_MAX
from epicute.quant.rowwise import ARGUMENTS, RowsSpec

__all__ = ["Rowwise"]


class Rowwise(Launched):
    """Device code of one ``RowsSpec``; calling it traces the launch. ``arguments``: see ``rowwise.ARGUMENTS``."""

    names = ARGUMENTS

    def __init__(self, spec: RowsSpec) -> None:
        self.spec = spec
        self.warps = spec.threads // 32

    @cute.jit
    def __call__(self, anchor: cute.Tensor, arguments: Any, stream: Any) -> None:
        """Launch. ``anchor``: see ``Launcher``."""
        self.kernel.set_name_prefix(f"epicute_quantize_rows_{self.spec.columns}")
        self.kernel(arguments).launch(
            grid=(Int32(self.given(arguments, "blocks")), 1, 1),
            block=(self.spec.threads * self.spec.rows_of_a_block, 1, 1),
            stream=stream,
            use_pdl=True,
        )

    @cute.kernel
    def kernel(self, arguments: Any) -> None:
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        shared: Any = None
        if cutlass.const_expr(self.warps > 1):
            layout = cute.make_layout(self.warps)
            shared = cutlass_memory.SmemAllocator().allocate_tensor(Float32, layout, 16)
        begin()
        row = block
        if cutlass.const_expr(self.warps == 1):
            row = block * self.spec.rows_of_a_block + cute.arch.make_warp_uniform(thread // 32)
        if row < Int32(self.given(arguments, "rows")):
            self._row(arguments, shared, row, thread % self.spec.threads)

    def _row(self, arguments: Any, shared: Any, row: Any, thread: Any) -> None:
        spec = self.spec
        source = self.row(arguments, "x", row)
        target = self.row(arguments, "codes", row)
        vectors = [
            Vector(thread + i * spec.threads, spec.columns, (i + 1) * spec.threads - 1)
            for i in range(spec.vectors)
        ]
        words = [vector.load(source) for vector in vectors]
        peak = Peak(0.0)
        for vector, found in zip(vectors, words, strict=True):
            for x in self._lanes(arguments, vector, found):
                peak.see(magnitude(x, 0.0))
        amax = self._of_row(peak.of_warp().bitcast(Float32), shared, thread)
        scale = within_range(divide(amax, E4M3_MAX))
        scale = select(amax == Float32(0.0), Float32(1.0), scale)
        inverse = reciprocal(scale)
        for vector, found in zip(vectors, words, strict=True):
            lanes = self._lanes(arguments, vector, again(found))
            vector.store(target, pack_e4m3([multiply(x, inverse) for x in lanes]), 8)
        self._store_scale(arguments, row, scale, thread == 0)

    def _lanes(self, arguments: Any, vector: Vector, words: Any) -> list[Any]:
        """The eight values of a vector, times their gains where there are any."""
        spec = self.spec
        found = unpack(words, spec.dtype)
        if not spec.gain:
            return found
        base = self.given(arguments, "gain")
        gains = load_vectors(base, vector, spec.columns, spec.reach, torch.float32)
        return [multiply(x, gain) for x, gain in zip(found, gains, strict=True)]

    def _of_row(self, amax: Any, shared: Any, thread: Any) -> Any:
        """The largest of all warps of the row."""
        if self.warps == 1:
            return amax
        shared[thread // 32] = amax  # all lanes of a warp have the same
        cute.arch.sync_threads()
        peak = Peak(0.0)
        for i in range(self.warps):
            peak.see(shared[i])
        return peak.register[0]

    @cute.jit
    def _store_scale(self, arguments: Any, row: Any, scale: Any, first: Any) -> None:
        spec = self.spec
        if first:
            found = scale
            if cutlass.const_expr(spec.eps is not None):
                partials = self.row(arguments, "sumsq", row)
                mean = multiply(sum_partials(partials, Int32(spec.groups)), 1.0 / spec.columns)
                found = multiply(scale, reciprocal(root(add(mean, spec.eps))))
            store_float(self.given(arguments, "scale") + Int64(row) * 4, found, True)
