"""What a warp does with a chunk of keys and of values. Imports the DSL."""

from __future__ import annotations

from typing import Any

import cutlass
from cutlass import Boolean, Float32, Int8, Int32, Int64, Uint32, cute
from cutlass._mlir import ir
from cutlass._mlir.dialects import llvm

from epicute.kv.qk4pv8_write import BLOCK, CHUNKS, THREADS, TOKENS
from epicute.kv.qk4pv8_write_arithmetic import (
    block_scale,
    encode_finite,
    encode_word,
    finite_maximum,
    is_finite,
    loudest,
    pack_quad,
    subtract,
)
from epicute.kv.qk4pv8_write_places import (
    Places,
    read,
    shared_view,
    store_if,
    store_words,
    store_words_if,
    view,
)
from epicute.quant.dsl import add, asm, divide, is_nan, is_saturated, select, unpack

__all__ = ["COUNTERS", "Units", "forgotten"]

NANS, INFINITIES, SATURATED, FLUSHED, V_NANS, V_INFINITIES, V_SATURATED = range(7)
COUNTERS = (
    *("k_nans", "k_infinities", "k_saturated", "k_flushed"),
    *("v_nans", "v_infinities", "v_saturated"),
)


def forgotten(x: Any) -> Any:
    """The same integer, of which nothing is computed ahead of its loop: that would have to be kept in registers."""
    return asm("mov.b32 $0, $1;", "=r,r", Int32, x, effects=True)


def here(x: Any) -> Any:
    """The same number, which nobody has outside of the branch in which it is asked for.

    Else both sides of a branch are computed, and one is chosen.
    """
    return asm("mov.b32 $0, $1;", "=f,f", Float32, Float32(x), effects=True)


def two_terms(x: Any) -> tuple[Any, Any]:
    """Bits of ``x`` as TF32, cut, and of the rest, of which the tensor cores leave out two bits."""
    high = asm("{ .reg .b32 t; mov.b32 t, $1; and.b32 $0, t, 0xFFFFE000; }", "=r,f", Int32, x)
    return high, subtract(x, high.bitcast(Float32)).bitcast(Int32)


def nearest_terms(x: Any) -> list[Any]:
    """Bits of ``x`` rounded to TF32, and of the rest, rounded."""
    high = asm("cvt.rna.tf32.f32 $0, $1;", "=r,f", Int32, x)
    rest = subtract(x, high.bitcast(Float32))
    return [high, asm("cvt.rna.tf32.f32 $0, $1;", "=r,f", Int32, rest)]


def multiply_tf32(a: Any, b: Any, c: list[Any]) -> list[Any]:
    """C + A · B of 16 × 8 × 8, sums in float32.

    Lane 4g + t has of A rows g and g + 8 at depth t (words 0, 1) and t + 4 (words 2, 3); of B column g at the same
    depths; of C rows g (two) and g + 8 (two) at columns 2t and 2t + 1.
    """
    text = """mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32
{$0, $1, $2, $3}, {$4, $5, $6, $7}, {$8, $9}, {$10, $11, $12, $13};"""
    result = Float32.mlir_type
    found = llvm.inline_asm(
        llvm.StructType.get_literal([result] * 4),
        [x.ir_value() for x in (*a, *b, *c)],
        text,
        "=f,=f,=f,=f,r,r,r,r,r,r,f,f,f,f",
        has_side_effects=False,
        is_align_stack=False,
        asm_dialect=llvm.AsmDialect.AD_ATT,
    )
    places = (ir.DenseI64ArrayAttr.get([i]) for i in range(4))
    return [Float32(llvm.extractvalue(result, found, place)) for place in places]


def products(rows: list[list[Any]], mean: list[Any]) -> list[Any]:
    """Sums of products of rows, left to right, each step rounded once; side by side, as each waits for the last."""
    totals = [Float32(0.0) for _ in rows]
    for i, m in enumerate(mean):
        for r, row in enumerate(rows):
            operands = (row[i], Float32(m), totals[r])
            totals[r] = asm("fma.rn.f32 $0, $1, $2, $3;", "=f,f,f,f", Float32, *operands)
    return totals


class Units(Places):
    """A warp's part of a chunk."""

    # --- keys ---

    @cute.jit
    def _keys(self, arguments, shared, first, head, place, losses) -> None:
        """Nibbles, scales and ΔS of a chunk's keys: a lane has 16 adjacent channels of two rows at a time."""
        start, chunk, lane = place
        if cutlass.const_expr(self.spec.terms > 0):
            self._clear_delta(shared, chunk, lane)
        for turn in cutlass.range(self.run, unroll=1):
            part = (head, chunk, lane, turn)
            self._key_blocks(arguments, shared, first, start, part, losses)

    def _rows(self, shared: Any, chunk: Any, lane: Any) -> tuple[Any, Any]:
        """Two rows of a lane, and whether they are there."""
        rows, live = cute.make_rmem_tensor(2, Int32), cute.make_rmem_tensor(2, Int32)
        for r in range(2):
            at = shared.row_of + chunk * TOKENS + ((lane >> 2) + 8 * r)
            rows[r] = Int32(shared_view(Int8, at, 1, 1)[0])
            live[r] = Int32(cutlass.select_(rows[r] >= 0, Int32(1), Int32(0)))
        return rows, live

    def _channel(self, lane: Any, turn: Any) -> Any:
        """First channel of a lane's block."""
        return (turn * 4 + (lane & 3)) * BLOCK

    @cute.jit
    def _key_blocks(self, arguments, shared, first, start, place, losses) -> None:
        """One block of each of two rows, in eights: two of the one row, then two of the other."""
        head, chunk, lane, turn = place
        rows, live = self._rows(shared, start + chunk, lane)
        groups = cute.make_rmem_tensor(2, Int32)
        groups.fill(0)
        if cutlass.const_expr(self.spec.grouped):
            self._groups(arguments, first, rows, live, groups)
        channel = self._channel(lane, turn)
        centred, whole = cute.make_rmem_tensor(32, Float32), cute.make_rmem_tensor(1, Int32)
        for r in cutlass.range_constexpr(2):
            address = shared.keys + self._key_piece(rows[r], channel >> 3)
            for half in cutlass.range_constexpr(2):
                # Pieces of a block are neighbours, whichever comes first.
                piece = read(shared_view(Int32, address ^ (16 * half), 4, 16))
                for i, x in enumerate(unpack(piece, self.spec.dtype)):
                    centred[16 * r + 8 * half + i] = x
        if cutlass.const_expr(self.spec.terms > 0):
            if cutlass.const_expr(self.matrix):
                self._centre_all(shared, channel, centred)
            else:
                self._centre(arguments, head, channel, groups, centred)
            self._deltas(arguments, shared, place, groups, centred)
            # Registers of products are not to live beside those of codes.
            cute.arch.sync_warp()
        codes, inverses = self._scales(arguments, centred, whole, live, losses)
        words = self._words(centred, inverses, whole)
        self._store_keys(shared, start, place, words, codes)

    @cute.jit
    def _store_keys(self, shared, start, place, words, codes) -> None:
        """Nibbles and scales of a block of two rows, to the page."""
        # Where they go is found behind the codes: in front of them registers are scarce.
        _, chunk, lane, turn = (forgotten(x) for x in place)
        _, live = self._rows(shared, start + chunk, lane)
        record, token = self._home(shared, start + chunk)
        channel = self._channel(lane, turn)
        for r in cutlass.range_constexpr(2):
            own, there = token + (lane >> 2) + 8 * r, Boolean(live[r] != 0)
            address = record + Int64(self.page.key_row(own) + (channel >> 1))
            store_words_if(there, address, [words[2 * r], words[2 * r + 1]])
            address = record + Int64(self.page.scale_byte(Uint32(own), Uint32(channel) // BLOCK))
            store_if(there, 1, address, codes[r])

    def _words(self, centred: Any, inverses: Any, whole: Any) -> Any:
        """Words of four eights."""
        words = cute.make_rmem_tensor(4, Int32)
        encode = encode_word if self.spec.k_scaled else encode_finite
        for j in range(4):
            lanes = [centred[8 * j + i] for i in range(8)]
            words[j] = encode(lanes, inverses[j // 2], self.page.order)
        if not self.spec.k_scaled:
            self._encode_again(centred, inverses, whole, words)
        return words

    @cute.jit
    def _encode_again(self, centred, inverses, whole, words) -> None:
        """Eights that are not finite."""
        if whole[0] != 15:
            for j in cutlass.range_constexpr(4):
                if whole[0] & (1 << j) == 0:
                    lanes = [centred[8 * j + i] for i in range(8)]
                    words[j] = encode_word(lanes, here(inverses[j // 2]), self.page.order)

    @cute.jit
    def _groups(self, arguments, first, rows, live, groups) -> None:
        """Group of the means of each row; that of the other one where a row is none."""
        for r in cutlass.range_constexpr(2):
            if live[r] != 0:
                groups[r] = self._integer(arguments, "group", first + rows[r])
        for r in cutlass.range_constexpr(2):
            if (live[r] == 0) & (live[1 - r] != 0):
                groups[r] = groups[1 - r]

    def _mean(self, arguments: Any, name: str, group: Any, head: Any, channel: Any) -> list[Any]:
        """Sixteen channels of a mean."""
        heads = self.given(arguments, f"{name}_heads")
        row = Int64(group) * heads + Int64(head)
        address = self.given(arguments, name) + (row * self.page.head_dim + Int64(channel)) * 4
        found = []
        for i in range(4):
            quad = read(view(Float32, address + 16 * i, 4, 16))
            found += [quad[k] for k in range(4)]
        return found

    def _passes(self, groups: Any) -> Any:
        """1 where the two rows of every lane have the means of one group, which is usual; else 2, one for each."""
        same = cute.arch.vote_all_sync(groups[0] == groups[1])
        return Int32(cutlass.select_(same, Int32(1), Int32(2)))

    def _turn(self, groups: Any, passes: Any, turn: Any) -> tuple[Any, list[Any]]:
        """The group whose means are taken in a pass, and which rows they are for."""
        group = Int32(cutlass.select_(turn == 1, groups[1], groups[0]))
        return group, [(passes == 1) | (turn == r) for r in range(2)]

    @cute.jit
    def _centre(self, arguments, head, channel, groups, centred) -> None:
        """Take the means of each row's group out of the keys."""
        passes = self._passes(groups)
        for turn in cutlass.range(passes, unroll=1):
            group, chosen = self._turn(groups, passes, turn)
            mean = self._mean(arguments, "k_mean", group, head, channel)
            for r in cutlass.range_constexpr(2):
                for i in cutlass.range_constexpr(BLOCK):
                    x = centred[16 * r + i]
                    centred[16 * r + i] = select(chosen[r], subtract(x, mean[i]), x)

    def _centre_all(self, shared: Any, channel: Any, centred: Any) -> None:
        """Take the mean of the one group out of the keys."""
        address = self._staged(shared, self.spec.group, 0, channel)
        for four in range(BLOCK // 4):
            mean = read(shared_view(Float32, address ^ (16 * four), 4, 16))
            for at in (4 * four, BLOCK + 4 * four):
                for i in range(4):
                    centred[at + i] = subtract(centred[at + i], mean[i])

    def _k_scale(self, arguments: Any) -> Any:
        if not self.spec.k_scaled:
            return None
        return Int32(self.given(arguments, "k_scale")).bitcast(Float32)

    def _scales(
        self, arguments: Any, centred: Any, whole: Any, live: Any, losses: Any
    ) -> tuple[list[Any], list[Any]]:
        """Codes of both rows' scales, and their inverses. ``whole``: bits of the eights that are finite."""
        amax = cute.make_rmem_tensor(4, Float32)
        whole[0] = Int32(0)
        for j in range(4):
            amax[j] = loudest([centred[8 * j + i] for i in range(8)])
            whole[0] |= Int32(cutlass.select_(is_finite(amax[j]), Int32(1 << j), Int32(0)))
        self._mend(centred, amax, whole, live, losses)
        codes, inverses = [], []
        for r in range(2):
            best = asm("max.f32 $0, $1, $2;", "=f,f,f", Float32, amax[2 * r], amax[2 * r + 1])
            code, inverse, wanted = block_scale(best, self._k_scale(arguments))
            codes.append(code)
            inverses.append(inverse)
            if self.spec.counted:
                mine = Boolean(live[r] != 0)
                clipped = mine & (wanted > Float32(448.0))
                flushed = mine & (best > Float32(0.0)) & (code == Int32(0))
                losses[SATURATED] += Int32(cutlass.select_(clipped, Int32(1), Int32(0)))
                losses[FLUSHED] += Int32(cutlass.select_(flushed, Int32(1), Int32(0)))
        return codes, inverses

    @cute.jit
    def _mend(self, centred, amax, whole, live, losses) -> None:
        """Leave what is not finite out of the maxima, and count it."""
        if whole[0] != 15:
            for j in cutlass.range_constexpr(4):
                if whole[0] & (1 << j) == 0:
                    centred[8 * j] = here(centred[8 * j])
                    finite_maximum(centred, amax, j)
                    if cutlass.const_expr(self.spec.counted):
                        # A row that is none has no key, and what its mean may hold is not counted.
                        for i in cutlass.range_constexpr(8):
                            x = centred[8 * j + i]
                            nan, broken = is_nan(x), Boolean(~is_finite(x))
                            infinite = Int32(cutlass.select_(broken, Int32(1), Int32(0))) - nan
                            losses[NANS] += nan * live[j // 2]
                            losses[INFINITIES] += infinite * live[j // 2]

    # --- ΔS ---

    def _delta_cell(self, shared: Any, query: Any, chunk: Any, token: Any) -> Any:
        """ΔS of a token so far. It is its lane's alone until all channels are in."""
        cell = (query * CHUNKS + chunk) * TOKENS + token
        return shared_view(Float32, shared.delta + cell * 4, 1, 4)

    @cute.jit
    def _clear_delta(self, shared, chunk, lane) -> None:
        for i in cutlass.range_constexpr(-(-self.spec.group // 4)):
            query = 4 * i + (lane & 3)
            cells = [self._delta_cell(shared, query, chunk, (lane >> 2) + 8 * r) for r in range(2)]
            if query < self.spec.group:
                for r in cutlass.range_constexpr(2):
                    cells[r][0] = Float32(0.0)

    @cute.jit
    def _deltas(self, arguments, shared, place, groups, centred) -> None:
        """What these channels add to ΔS of all query heads, four at a time."""
        fours = -(-self.spec.group // 4)
        if cutlass.const_expr(fours == 1):
            self._delta(arguments, shared, place, groups, centred, 0)
        else:
            # Eight at a time take more registers than five blocks have. Keys are split once, before the loop.
            for i in cutlass.range(fours, unroll=1):
                self._delta(arguments, shared, place, groups, centred, 4 * i)

    @cute.jit
    def _delta(self, arguments, shared, place, groups, centred, query) -> None:
        """The same of four query heads: lane t of a quad adds to ``query + t``."""
        _, chunk, lane, _ = place
        found = self._products(arguments, shared, place, groups, centred, query)
        own = query + (lane & 3)
        cells = [self._delta_cell(shared, own, chunk, (lane >> 2) + 8 * r) for r in range(2)]
        if own < self.spec.group:
            for r in cutlass.range_constexpr(2):
                cells[r][0] = cells[r][0] + found[r]

    def _products(
        self, arguments: Any, shared: Any, place: Any, groups: Any, centred: Any, query: Any
    ) -> list[Any]:
        """Sums over a quad's channels of two rows and one query head."""
        head, _, lane, turn = place
        if self.matrix:
            return self._matrix_products(shared, lane, turn, centred, query)
        channel = self._channel(lane, turn)
        sums = cute.make_rmem_tensor(8, Float32)
        sums.fill(0.0)
        self._sums(arguments, (head, channel, query), groups, centred, sums)
        found = [sums[i] for i in range(8)]
        for distance in (2, 1):
            half = len(found) // 2
            upper = (lane & distance) != 0
            pairs = list(zip(found[:half], found[half:], strict=True))
            kept = [select(upper, high, low) for low, high in pairs]
            sent = [select(upper, low, high) for low, high in pairs]
            found = [
                k + cute.arch.shuffle_sync_bfly(x, offset=distance)
                for k, x in zip(kept, sent, strict=True)
            ]
        return found

    def _matrix_products(
        self, shared: Any, lane: Any, turn: Any, centred: Any, query: Any
    ) -> list[Any]:
        """The same of one group of means, by the tensor cores: keys and means in two terms each."""
        own = cutlass.min(Int32(query) + (lane >> 3), self.spec.group - 1)
        address = self._staged(shared, own, (lane >> 2) & 1, self._channel(lane, turn))
        sums = [[Float32(0.0)] * 4, [Float32(0.0)] * 4]
        for four in range(BLOCK // 4):
            means = read(shared_view(Int32, address ^ (16 * four), 4, 16))
            for k in (0, 2):
                keys = [centred[16 * r + 4 * four + k + j] for j in range(2) for r in range(2)]
                for term, part in enumerate(zip(*(two_terms(x) for x in keys), strict=True)):
                    sums[term] = multiply_tf32(part, [means[k], means[k + 1]], sums[term])
        high, low = sums
        return [add(add(high[i], high[i + 1]), add(low[i], low[i + 1])) for i in (0, 2)]

    def _staged(self, shared: Any, query: Any, term: Any, channel: Any) -> Any:
        """Place of four channels, from a multiple of four on, of a term of a query head's mean.

        Of a block they change places such that eight lanes, which read two terms of four blocks, read from all banks.
        """
        four = (channel >> 2) ^ (channel >> 4 & 2) ^ term
        return shared.values + ((query * 2 + term) * (self.page.head_dim // 4) + four) * 16

    @cute.jit
    def _stage_if(self, condition, arguments, shared, head, thread) -> None:
        if condition:
            self._stage(arguments, shared, head, thread)

    @cute.jit
    def _stage(self, arguments, shared, head, thread) -> None:
        """Means of queries in two TF32 terms, then that of keys, where values will stand."""
        spec, quads = self.spec, self.page.head_dim // 4
        if thread < quads:
            row = Int64(head) * self.page.head_dim + Int64(thread) * 4
            found = read(view(Int32, self.given(arguments, "k_mean") + row * 4, 4, 16))
            place = self._staged(shared, spec.group, 0, thread * 4)
            store_words(shared_view(Int32, place, 4, 16), [found[k] for k in range(4)])
        for i in cutlass.range(-(-spec.group * quads // THREADS), unroll=1):
            unit = thread + i * THREADS
            query, quad = Uint32(unit) // quads, Uint32(unit) % quads
            if unit < spec.group * quads:
                row = Int64(head * spec.group + Int32(query)) * self.page.head_dim + Int64(quad) * 4
                found = read(view(Float32, self.given(arguments, "q_mean") + row * 4, 4, 16))
                pairs = [nearest_terms(found[k]) for k in range(4)]
                for term in cutlass.range_constexpr(2):
                    place = self._staged(shared, Int32(query), term, Int32(quad) * 4)
                    store_words(shared_view(Int32, place, 4, 16), [p[term] for p in pairs])

    @cute.jit
    def _sums(self, arguments, at, groups, centred, sums) -> None:
        """Sums over a lane's channels of two rows of four query heads."""
        head, channel, query = at
        passes = self._passes(groups)
        for turn in cutlass.range(passes, unroll=1):
            group, chosen = self._turn(groups, passes, turn)
            for i in cutlass.range_constexpr(4):
                # Behind the last query head the last one again, which is not stored.
                own = cutlass.min(Int32(query + i), self.spec.group - 1)
                mean = self._mean(arguments, "q_mean", group, head * self.spec.group + own, channel)
                rows = [[centred[16 * r + k] for k in range(BLOCK)] for r in range(2)]
                totals = products(rows, mean)
                for r in cutlass.range_constexpr(2):
                    sums[2 * i + r] = select(chosen[r], totals[r], sums[2 * i + r])

    # --- values ---

    @cute.jit
    def _values(self, arguments, shared, place, losses) -> None:
        """A chunk's values, transposed, in shared memory."""
        start, chunk, lane = place
        for i in cutlass.range(self.run, unroll=1):
            unit = lane + 32 * i
            where = (start, chunk, unit >> (self.lanes.bit_length() - 1), unit & (self.lanes - 1))
            self._value_words(arguments, shared, where, losses)

    @cute.jit
    def _value_words(self, arguments, shared, place, losses) -> None:
        """Words of V^T of eight channels: tokens 2w, 2w + 1, 2w + 8 and 2w + 9 of a chunk."""
        spec = self.spec
        start, chunk, word, lane = place
        words, live = [], cute.make_rmem_tensor(4, Int32)
        for j in cutlass.range_constexpr(4):
            token = 2 * word + (j % 2 + j // 2 * 8)
            at = shared.row_of + (start + chunk) * TOKENS + token
            row = Int32(shared_view(Int8, at, 1, 1)[0])
            live[j] = Int32(cutlass.select_(row >= 0, Int32(1), Int32(0)))
            # Of the first row of the block where there is none.
            source = shared.value_rows + cutlass.max(row, 0) * (2 * self.page.head_dim) + lane * 16
            words.append(read(shared_view(Int32, source, 4, 16)))
        rows = [unpack(w, spec.dtype) for w in words]
        if cutlass.const_expr(spec.v_scaled):
            v_scale = Int32(self.given(arguments, "v_scale")).bitcast(Float32)
            rows = [[divide(x, v_scale) for x in row] for row in rows]
        if cutlass.const_expr(spec.counted):
            for j in cutlass.range_constexpr(4):
                if not (loudest(rows[j]) <= Float32(448.0)):
                    for i in cutlass.range_constexpr(8):
                        raw = unpack(words[j], spec.dtype)[i]
                        nan, broken = is_nan(raw), Boolean(~is_finite(raw))
                        beyond = Int32(cutlass.select_(broken, Int32(1), Int32(0)))
                        losses[V_NANS] += nan * live[j]
                        losses[V_INFINITIES] += (beyond - nan) * live[j]
                        losses[V_SATURATED] += is_saturated(rows[j][i]) * (1 - beyond) * live[j]
        base = shared.values + lane * (8 * CHUNKS * TOKENS + 16)
        base += chunk * TOKENS + word * 4
        for i in cutlass.range_constexpr(8):
            found = pack_quad([row[i] for row in rows])
            shared_view(Int32, base + i * (CHUNKS * TOKENS), 1, 4)[0] = found
