"""Rows of keys and values to QK4PV8 pages in one pass. Imports the DSL.

A block takes 64 adjacent rows of one KV head, all of which are on their way to shared memory, keys first, while it
finds their places. Their slots are cut in chunks: adjacent rows whose slots lie in the same sixteen. A wave is four
chunks, one of each warp, whose lanes are 4g + t:

    keys        a block of 16 channels, number t and then t + 4, of tokens g and g + 8: centred, their amax, nibbles
                and scales straight to the page
    ΔS          mma.sync of 16 tokens, 8 channels and 4 query heads, whose means have two columns each: TF32 and the
                rest; so have keys. Where rows have means of their own, sixteen products a lane, then a sum over a
                quad. Either way lane t has query head t of four, tokens g and g + 8, and adds up what blocks give in
                shared memory, from which eight tokens are one store
    values      four tokens (2w, 2w + 1, 2w + 8, 2w + 9) of a channel are one word of V^T; a lane has eight channels;
                through shared memory, sixteen tokens of a channel to a store

    row_of[chunk * 16 + token]      row in the block, -1 for none
    keys[row][16 bytes], value_rows[row][channel]         of the block, as they came; keys swizzled
    values[channel][chunk][16]                            rows of V^T of a wave, 16 bytes more behind eight channels;
                                                          before there are values, means in two terms, swizzled
    delta[query head][chunk][token]                       ΔS of a wave
    slots[chunk], homes[chunk]                            first slot; record, and a sixteenth of the token in it

Where slots follow each other, as in prefill, a wave is the whole block and every store is full. Rows scattered one by
one take a wave for four: right, and slow. The bits of a row do not depend on the rows beside it.

Instructions of a warp with one term of ΔS and four query heads (sm_90a, by SASS): about 270 before keys, 1260 for keys,
180 for values, 60 to store. Splitting keys in BF16 (key - BF16(mean) is two terms, exactly) takes 96 for every 64 here.
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
"""Blocks of an SM, with neither counters nor a scale of keys, and with means by row: as many as shared memory and
registers hold."""


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
        slots = cute.make_rmem_tensor(2, Int64)
        slots.fill(-1)
        # Slots come before rows, not behind them; by a table they come in steps, for which rows do not wait.
        if cutlass.const_expr(not self.spec.table):
            self._find_slots(arguments, first, thread, slots)
        self._fetch(arguments, shared, first, head, thread)
        if cutlass.const_expr(self.spec.table):
            self._find_slots(arguments, first, thread, slots)
        if cutlass.const_expr(self.matrix):
            # An idle launch has neither rows nor means.
            there = first < Int32(self.given(arguments, "rows"))
            self._stage_if(there, arguments, shared, head, thread)
        for i in cutlass.range_constexpr(ROWS * TOKENS // 4 // THREADS):
            place = shared.row_of + (thread + i * THREADS) * 4
            shared_view(Int32, place, 1, 4)[0] = Int32(-1)
        cute.arch.sync_threads()
        chunks = self._map(arguments, shared, head, thread, slots)
        for start in cutlass.range(0, chunks, CHUNKS, unroll=1):
            own = forgotten(thread)
            if cutlass.const_expr(self.matrix):
                # Where means were are the values of the last wave.
                self._stage_if(start > 0, arguments, shared, forgotten(head), own)
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
            self._store_values(shared, start, chunks, forgotten(thread))
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
                    self._store_sums(address, [p[term] for p in pairs], present)

    @cute.jit
    def _store_sums(self, address, words, present) -> None:
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
    def _store_values(self, shared, start, chunks, thread) -> None:
        """Rows of V^T of a wave: a thread takes sixteen tokens of a channel, then of every 32nd one behind it."""
        page, step = self.page, THREADS // CHUNKS
        chunk, eight, ours = digits(thread, CHUNKS, 8)
        if start + chunk < chunks:
            address, token = self._home(shared, start + chunk)
            present = read(shared_view(Int32, shared.row_of + (start + chunk) * TOKENS, 4, 16))
            whole = ((present[0] | present[1] | present[2] | present[3]) & SIGNS) == 0
            channel = ours * 8 + eight
            place = shared.values + channel * (CHUNKS * TOKENS) + ours * 16 + chunk * TOKENS
            address += Int64(page.values_start + channel * page.page_size + token)
            for i in cutlass.range_constexpr(page.head_dim // step):
                there = place + i * (step * CHUNKS * TOKENS + step // 8 * 16)
                words = read(shared_view(Int32, there, 4, 16))
                self._store_tokens(address + i * step * page.page_size, words, present, whole)

    @cute.jit
    def _store_tokens(self, address, words, present, whole) -> None:
        """Sixteen tokens of a channel, or those of them that there are."""
        if whole:
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
