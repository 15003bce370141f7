"""New rows of keys and values into an INT4 cache: rotated, quantised, stored. Imports the DSL.

A warp takes a row and a head, keys and then values: two or four adjacent channels in each lane, nibbles of eight
channels joined to a word, the scale by lane 0. Rows whose slot is no place are skipped.
"""

from __future__ import annotations

from typing import Any

import cutlass
from cutlass import Boolean, Int32, Int64, cute

from epicute.kv.append import ARGUMENTS, WARPS, AppendSpec
from epicute.kv.append_row import butterfly, pack_nibbles, quantize_lanes, unpack_halves
from epicute.quant.dsl import Launched, begin, load_integer

__all__ = ["Append"]


class Append(Launched):
    """Device code of one ``AppendSpec``; calling it traces the launch. ``arguments``: see ``append.ARGUMENTS``."""

    names = ARGUMENTS

    def __init__(self, spec: AppendSpec) -> None:
        self.spec = spec
        self.count = spec.head_dim // 32

    @cute.jit
    def __call__(self, anchor: cute.Tensor, arguments: Any, stream: Any) -> None:
        """Launch. ``anchor``: see ``Launcher``."""
        self.kernel.set_name_prefix(f"epicute_append_int4_{self.spec.head_dim}")
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
        number = block * WARPS + cute.arch.make_warp_uniform(thread // 32)
        if number < Int32(self.given(arguments, "rows")) * self.spec.kv_heads:
            Append._row(
                self,
                arguments,
                number // self.spec.kv_heads,
                number % self.spec.kv_heads,
                thread % 32,
            )

    @cute.jit
    def _row(self, arguments: Any, row: Int32, head: Int32, lane: Int32) -> None:
        slot = load_integer(self.given(arguments, "slots") + Int64(row) * 8)
        tokens = self.given(arguments, "tokens")
        capacity = tokens * self.given(arguments, "pages")
        if (slot >= 0) & (slot < capacity):
            page = slot // tokens
            start = (
                self.given(arguments, "memory")
                + page * self.given(arguments, "page_stride")
                + Int64(head) * self.given(arguments, "head_stride")
            )
            for side in cutlass.range_constexpr(2):
                self._side(arguments, row, head, lane, (start, slot - page * tokens), side)

    def _side(self, arguments: Any, row: Any, head: Any, lane: Any, place: Any, side: int) -> None:
        """Keys, or values."""
        spec, name, (start, token) = self.spec, "kv"[side], place
        offset = (
            Int64(row) * self.given(arguments, f"{name}_stride")
            + Int64(head) * self.given(arguments, f"{name}_head")
            + Int64(lane * self.count)
        )
        words = self.count // 2
        source = cute.make_ptr(
            Int32,
            self.given(arguments, name) + offset * 2,
            cute.AddressSpace.gmem,
            assumed_align=4 * words,
        )
        fragment = cute.make_rmem_tensor(words, Int32)
        cute.autovec_copy(cute.make_tensor(source, cute.make_layout(words)), fragment)
        lanes = unpack_halves([fragment[i] for i in range(words)], spec.dtype)
        width = 0 if side == 1 and spec.values_folded else spec.width
        nibbles, scale = quantize_lanes(butterfly(lanes, width, lane, self.count))
        word, tokens = pack_nibbles(nibbles, lane), self.given(arguments, "tokens")
        size = spec.head_dim // 2
        row_place = start + (tokens * side + token) * size + Int64(lane * self.count // 8 * 4)
        scale_place = start + tokens * (2 * size) + (tokens * side + token) * 4
        store_word(row_place, word, Boolean(lane % (8 // self.count) == 0))
        store_word(scale_place, scale.bitcast(Int32), Boolean(lane == 0))


@cute.jit
def store_word(address: Int64, word: Int32, condition: Boolean) -> None:
    """Store one word where ``condition``."""
    if condition:
        pointer = cute.make_ptr(Int32, address, cute.AddressSpace.gmem, assumed_align=4)
        cute.make_tensor(pointer, cute.make_layout(1))[0] = word
