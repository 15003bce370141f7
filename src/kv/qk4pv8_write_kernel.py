"""Rows of keys and values to QK4PV8 pages in one pass. Imports the DSL.

A block takes 64 adjacent rows of one KV head, all of which are on their way to shared memory while it finds their
places. Their slots are cut in chunks: adjacent rows whose slots lie in the same sixteen. A wave is four chunks, and a
unit of a wave is four tokens of a chunk and eight channels:

    thread      row of tokens 2w, 2w + 1, 2w + 8, 2w + 9 of a chunk, 16 bytes of each: what one word of V^T holds
    keys        centred; amax of a block over two lanes; word of nibbles and scale bytes straight to the page
    ΔS          eight products a thread, then a tree over the head's lanes, which gives every lane the sum of one
                (row, query head); through shared memory, 16 bytes of tokens to a store
    values      four rows of a channel are one word; through shared memory, sixteen tokens of a channel to a store

    row_of[chunk * 16 + token]      row in the block, -1 for none
    keys[row][channel], value_rows[row][channel]          of the block, as they came
    values[channel][chunk][16]                            rows of V^T of a wave, 16 bytes more behind eight channels
    delta[query head][chunk][token]                       ΔS of a wave

Where slots follow each other, as in prefill, a wave is the whole block and every store is full. Rows scattered one by
one take a wave for four: right, and slow. The bits of a row do not depend on the rows beside it.
"""

from __future__ import annotations

from typing import Any

import cutlass
from cutlass import Float32, Int32, Int64, Uint32, cute

from epicute.kv.qk4pv8_write import CHUNKS, ROWS, THREADS, TOKENS
from epicute.kv.qk4pv8_write_arithmetic import in_terms
from epicute.kv.qk4pv8_write_places import SIGNS, read, shared_view, store_if, view
from epicute.kv.qk4pv8_write_units import COUNTERS, Units, forgotten
from epicute.layouts.qk4pv8 import token_at
from epicute.quant.dsl import add_count, begin

__all__ = ["CacheWriter"]


PLAIN, USUAL, GROUPED = 5, 4, 3
"""Blocks of an SM, with neither ΔS nor counters nor a scale of keys, and with means by row: as many as shared memory
and registers hold."""


def digits(x: Any, *radices: int) -> list[Any]:
    """Digits of a number that is not negative, the last one first; what is left over comes last."""
    rest, found = Uint32(x), []
    for radix in radices:
        found.append(Int32(rest % radix))
        rest = rest // radix
    return [*found, Int32(rest)]


class CacheWriter(Units):
    """Device code of one ``WriteSpec``; calling it traces the launch."""

    @property
    def blocks(self) -> int:
        """Of an SM at least."""
        if self.spec.grouped:
            return GROUPED
        plain = not (self.spec.counted or self.spec.k_scaled)
        return PLAIN if plain else USUAL

    @cute.jit
    def __call__(self, anchor: cute.Tensor, arguments: Any, stream: Any) -> None:
        """Launch. ``anchor``: see ``Launcher``."""
        page = self.page
        self.kernel.set_name_prefix(f"epicute_write_qk4pv8_{page.head_dim}_{page.page_size}")
        self.kernel(arguments).launch(
            grid=(Int32(self.given(arguments, "blocks")), 1, 1),
            block=(THREADS, 1, 1),
            stream=stream,
            min_blocks_per_mp=self.blocks,
            preferred_smem_carveout=100,
            use_pdl=True,
        )

    @cute.kernel
    def kernel(self, arguments: Any):
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        shared = self._allocate()
        begin()
        heads = Int32(self.given(arguments, "kv_heads"))
        first, head = block // heads * ROWS, block % heads
        losses = cute.make_rmem_tensor(len(COUNTERS), Int32)
        losses.fill(0)
        self._fetch(arguments, shared, first, head, thread)
        for i in cutlass.range_constexpr(ROWS * TOKENS // 4 // THREADS):
            place = shared.row_of + (thread + i * THREADS) * 4
            shared_view(Int32, place, 1, 4)[0] = Int32(-1)
        cute.arch.sync_threads()
        chunks = self._map(arguments, shared, first, thread)
        for wave in cutlass.range((chunks + (CHUNKS - 1)) // CHUNKS, unroll=1):
            start, own = wave * CHUNKS, forgotten(thread)
            if cutlass.const_expr(self.matrix):
                self._stage(arguments, shared, forgotten(head), own)
            cute.arch.cp_async_wait_group(1)
            cute.arch.sync_threads()
            mine = (start, own >> 5, own & 31)
            if start + (own >> 5) < chunks:
                self._keys(arguments, shared, forgotten(first), forgotten(head), mine, losses)
            cute.arch.cp_async_wait_group(0)
            cute.arch.sync_threads()
            if start + (own >> 5) < chunks:
                self._values(arguments, shared, mine, losses)
            cute.arch.sync_threads()
            self._store_values(arguments, shared, forgotten(head), start, chunks, forgotten(thread))
            if cutlass.const_expr(self.spec.terms > 0):
                self._store_delta(
                    arguments, shared, forgotten(head), start, chunks, forgotten(thread)
                )
            cute.arch.sync_threads()
        if cutlass.const_expr(self.spec.counted):
            self._count(arguments, losses, thread % 32 == 0)

    @cute.jit
    def _store_delta(self, arguments, shared, head, start, chunks, thread) -> None:
        """ΔS of a wave in its terms: a thread takes eight tokens of a query head."""
        spec, page = self.spec, self.page
        units = spec.group * CHUNKS * 2
        for i in cutlass.range_constexpr(-(-units // THREADS)):
            unit = thread + i * THREADS
            half, chunk, query = digits(unit, 2, CHUNKS)
            if (unit < units) & (start + chunk < chunks):
                index, token = self._place(arguments, shared, start + chunk)
                cell = shared.delta + ((query * CHUNKS + chunk) * TOKENS + half * 8) * 4
                sums = read(shared_view(Float32, cell, 8, 16))
                rows = shared.row_of + (start + chunk) * TOKENS + half * 8
                present = read(shared_view(Int32, rows, 2, 8))
                pairs = [in_terms((sums[2 * k], sums[2 * k + 1]), spec.terms) for k in range(4)]
                heads = index * self.given(arguments, "q_mean_heads")
                line = (heads + Int64(head * spec.group + query)) * spec.terms
                for term in cutlass.range_constexpr(spec.terms):
                    element = (line + term) * page.page_size + Int64(token + half * 8)
                    address = self.given(arguments, "delta") + element * 2
                    self._store_tokens(address, [p[term] for p in pairs], present)

    @cute.jit
    def _store_tokens(self, address, words, present) -> None:
        """Eight adjacent 16-bit elements, or those of them whose tokens there are."""
        if ((present[0] | present[1]) & SIGNS) == 0:
            whole = cute.make_rmem_tensor(4, Int32)
            for k in cutlass.range_constexpr(4):
                whole[k] = words[k]
            cute.autovec_copy(whole, view(Int32, address, 4, 16))
        else:
            for k in cutlass.range_constexpr(8):
                there = ((present[k // 4] >> (8 * (k % 4))) & 128) == 0
                half = words[k // 2] >> (16 * (k % 2))
                store_if(there, 2, address + 2 * k, half)

    @cute.jit
    def _store_values(self, arguments, shared, head, start, chunks, thread) -> None:
        """Rows of V^T of a wave: a thread takes sixteen tokens of a channel."""
        page = self.page
        for i in cutlass.range_constexpr(page.head_dim * CHUNKS // THREADS):
            unit = thread + i * THREADS
            chunk, eight, ours = digits(unit, CHUNKS, 8)
            channel = ours * 8 + eight
            if start + chunk < chunks:
                index, token = self._place(arguments, shared, start + chunk)
                place = shared.values + channel * (CHUNKS * TOKENS) + ours * 16 + chunk * TOKENS
                words = read(shared_view(Int32, place, 4, 16))
                rows = shared.row_of + (start + chunk) * TOKENS
                present = read(shared_view(Int32, rows, 4, 16))
                address = self._record(arguments, index, head)
                address += Int64(page.values_start + channel * page.page_size + token)
                if ((present[0] | present[1] | present[2] | present[3]) & SIGNS) == 0:
                    cute.autovec_copy(words, view(Int32, address, 4, 16))
                else:
                    for u in cutlass.range_constexpr(TOKENS):
                        own = token_at(u)
                        there = ((present[own // 4] >> (8 * (own % 4))) & 128) == 0
                        store_if(there, 1, address + u, words[u // 4] >> (8 * (u % 4)))

    @cute.jit
    def _count(self, arguments, losses, first) -> None:
        """Add what the warp lost to the counters."""
        for i in cutlass.range_constexpr(len(COUNTERS)):
            total = cute.arch.warp_redux_sync(losses[i], "add")
            add_count(self.given(arguments, COUNTERS[i]), Int64(total), first & (total > 0))
