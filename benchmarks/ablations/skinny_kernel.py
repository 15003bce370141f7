"""Few rows of x against sixteen rows of a row-major BF16 weight. Imports the DSL.

warp w     k from w · K / 8 on, 64 at a time: lane 4g + t has 16 adjacent k, those from 16t on, of the weight's rows
           g and g + 8 and of x's rows 8j + g; a sum over k has no order, so that these are the fragments of four
           products m16n8k16
CTA        the warps' sums meet in shared memory, added in their order, and are stored
"""

from __future__ import annotations

from typing import Any

import cutlass
import torch
from cutlass import Float32, Int32, Int64, cute
from cutlass import memory as cutlass_memory

from benchmarks.ablations.skinny import ARGUMENTS, AT_ONCE, CHUNK, FEATURES, WARPS, SkinnyKernel
from epicute.decode.sm90.ptx import mma
from epicute.quant.dsl import Launched, begin

__all__ = ["Skinny"]

WORDS = CHUNK // 8
"""Words of a lane and row of a chunk."""


class Skinny(Launched):
    """Device code of one ``SkinnyKernel``; calling it traces the launch. ``arguments``: see ``skinny.ARGUMENTS``."""

    names = ARGUMENTS

    def __init__(self, thing: SkinnyKernel) -> None:
        self.columns, self.depth, self.rows = thing.columns, thing.depth, thing.rows
        self.tiles = self.rows // 8

    @cute.jit
    def __call__(self, anchor: cute.Tensor, arguments: Any, stream: Any) -> None:
        """Launch. ``anchor``: see ``Launcher``."""
        self.kernel.set_name_prefix(f"benchmark_skinny_{self.rows}")
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
        allocator = cutlass_memory.SmemAllocator()
        sums = allocator.allocate_tensor(
            Float32, cute.make_layout(WARPS * FEATURES * self.rows), 16
        )
        if Int32(self.given(arguments, "rows")) > 0:
            self._run(arguments, thread, block, sums)

    @cute.jit
    def _run(self, arguments, thread, block, sums) -> None:
        warp, lane = cute.arch.make_warp_uniform(thread // 32), thread % 32
        g, t = lane // 4, lane % 4
        start = warp * (self.depth // WARPS) + t * (CHUNK // 4)
        feature = block * FEATURES + g
        weight = self._place(arguments, "weight", feature, start)
        last = Int32(self.given(arguments, "rows")) - 1
        # Beyond the last row that row again, whose sums nobody stores.
        places = [
            self._place(arguments, "x", cutlass.min(8 * j + g, last), start)
            for j in range(self.tiles)
        ]
        found = cute.make_rmem_tensor(4 * self.tiles, Float32)
        found.fill(0.0)
        for i in cutlass.range(self.depth // WARPS // (CHUNK * AT_ONCE), unroll=2):
            self._chunks(weight, places, Int64(i) * (2 * CHUNK * AT_ONCE), found)
        for j in cutlass.range_constexpr(self.tiles):
            for r in cutlass.range_constexpr(4):
                row = g + 8 * (r // 2)
                m = 8 * j + 2 * t + r % 2
                sums[(warp * self.rows + m) * FEATURES + row] = found[4 * j + r]
        cute.arch.sync_threads()
        for number in cutlass.range(thread, (last + 1) * FEATURES, 32 * WARPS, unroll=1):
            self._store(arguments, sums, block, number)

    def _place(self, arguments: Any, name: str, row: Any, start: Any) -> Any:
        """Address of an element of x or of the weight."""
        return self.given(arguments, name) + (Int64(row) * self.depth + Int64(start)) * 2

    def _chunks(self, weight: Any, places: list[Any], offset: Any, found: Any) -> None:
        """The products of some chunks, whose loads all come first."""
        rows = (weight, weight + Int64(8 * self.depth * 2), *places)
        steps = [2 * CHUNK * i for i in range(AT_ONCE)]
        loaded = [[_words(place + (offset + step)) for place in rows] for step in steps]
        for first, second, *b in loaded:
            for s in range(0, WORDS, 2):
                left = [first[s], second[s], first[s + 1], second[s + 1]]
                for j, words in enumerate(b):
                    sums = [found[4 * j + r] for r in range(4)]
                    for r, x in enumerate(mma(torch.bfloat16, left, words[s : s + 2], sums)):
                        found[4 * j + r] = x

    def _store(self, arguments: Any, sums: Any, block: Any, number: Any) -> None:
        """One element of the result."""
        m, row = number // FEATURES, number % FEATURES
        total = Float32(0.0)
        for w in range(WARPS):
            total = total + sums[w * (self.rows * FEATURES) + number]
        place = Int64(m) * self.columns + Int64(block * FEATURES + row)
        pointer = cute.make_ptr(
            cutlass.BFloat16,
            self.given(arguments, "out") + place * 2,
            cute.AddressSpace.gmem,
            assumed_align=2,
        )
        cute.make_tensor(pointer, cute.make_layout(1))[0] = total.to(cutlass.BFloat16)


def _words(address: Any) -> list[Any]:
    """A lane's words of a row's chunk, at a multiple of 32 bytes."""
    fragment = cute.make_rmem_tensor(WORDS, Int32)
    for half in range(2):
        pointer = cute.make_ptr(
            Int32, address + 16 * half, cute.AddressSpace.gmem, assumed_align=16
        )
        part = cute.make_tensor(fragment.iterator + 4 * half, cute.make_layout(4))
        cute.autovec_copy(cute.make_tensor(pointer, cute.make_layout(4)), part)
    return [fragment[i] for i in range(WORDS)]
