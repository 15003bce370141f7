"""Reads memory and keeps nothing of it. Imports the DSL."""

from __future__ import annotations

from typing import Any

import cutlass
from cutlass import Int32, Int64, cute

from benchmarks.stream import DEPTH, THREADS, VECTOR
from epicute.epilogues.dsl import pure_asm

__all__ = ["Read"]


def load(address: Any) -> Any:
    """The four words at an address, folded into one."""
    text = (
        "{ .reg .b32 a, b, c, d; ld.global.nc.L1::no_allocate.v4.b32 {a, b, c, d}, [$1]; "
        "xor.b32 a, a, b; xor.b32 c, c, d; xor.b32 $0, a, c; }"
    )
    return pure_asm(text, "=r,l", Int32, address)


class Read:
    """Device code; calling it traces the launch. ``arguments``: address, vectors of 16 bytes, blocks."""

    @cute.jit
    def __call__(self, anchor: cute.Tensor, arguments: Any, stream: Any) -> None:
        """Launch. ``anchor``: see ``Launcher``."""
        self.kernel.set_name_prefix("benchmark_read")
        self.kernel(arguments).launch(
            grid=(Int32(arguments[2]), 1, 1), block=(THREADS, 1, 1), stream=stream
        )

    @cute.kernel
    def kernel(self, arguments: Any) -> None:
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        step = Int32(arguments[2]) * THREADS
        first, count = block * THREADS + thread, Int32(arguments[1])
        kept = cute.make_rmem_tensor(1, Int32)
        kept[0] = Int32(0)
        whole = count // (step * DEPTH)
        for i in cutlass.range(whole, unroll=1):
            for j in cutlass.range_constexpr(DEPTH):
                at = (i * DEPTH + j) * step + first
                kept[0] = kept[0] ^ load(arguments[0] + Int64(at) * VECTOR)
        for i in cutlass.range(whole * DEPTH * step + first, count, step, unroll=1):
            kept[0] = kept[0] ^ load(arguments[0] + Int64(i) * VECTOR)
        # Never so, as far as anyone knows: without it the loads would be dropped.
        if kept[0] == 0x5EED5EED:
            pointer = cute.make_ptr(Int32, arguments[0], cute.AddressSpace.gmem, assumed_align=16)
            cute.make_tensor(pointer, cute.make_layout(1))[0] = kept[0]
