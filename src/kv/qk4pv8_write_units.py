"""What a thread does with four tokens and eight channels of keys and of values. Imports the DSL."""

from __future__ import annotations

from typing import Any

import cutlass
from cutlass import Boolean, Float32, Int8, Int32, Int64, Uint32, cute

from epicute.kv.qk4pv8_write import CHUNKS, TOKENS
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
from epicute.kv.qk4pv8_write_places import Places, read, shared_view, store_if, view
from epicute.quant.dsl import asm, divide, is_nan, is_saturated, select, unpack

__all__ = ["COUNTERS", "Units"]

NANS, INFINITIES, SATURATED, FLUSHED, V_NANS, V_INFINITIES, V_SATURATED = range(7)
COUNTERS = (
    *("k_nans", "k_infinities", "k_saturated", "k_flushed"),
    *("v_nans", "v_infinities", "v_saturated"),
)


def pick(chosen: Any, a: Any, b: Any) -> Any:
    """``a`` where ``chosen``, else ``b``."""
    return a if chosen is True else select(chosen, a, b)


def here(x: Any) -> Any:
    """The same number, which nobody has outside of the branch in which it is asked for.

    Else both sides of a branch are computed, and one is chosen.
    """
    return asm("mov.b32 $0, $1;", "=f,f", Float32, Float32(x), effects=True)


def products(values: list[Any], mean: list[Any]) -> Any:
    """Sum of eight products, left to right, each step rounded once."""
    total = Float32(0.0)
    for x, m in zip(values, mean, strict=True):
        total = asm("fma.rn.f32 $0, $1, $2, $3;", "=f,f,f,f", Float32, x, Float32(m), total)
    return total


class Units(Places):
    """A unit of work."""

    @cute.jit
    def _unit(self, arguments, shared, first, head, place, losses) -> None:
        start, chunk, word, lane = place
        rows, live = cute.make_rmem_tensor(4, Int32), cute.make_rmem_tensor(4, Int32)
        for j in cutlass.range_constexpr(4):
            token = 2 * word + (j % 2 + j // 2 * 8)
            at = shared.row_of + (start + chunk) * TOKENS + token
            rows[j] = Int32(shared_view(Int8, at, 1, 1)[0])
            live[j] = Int32(cutlass.select_(rows[j] >= 0, Int32(1), Int32(0)))
        words = [self._load(shared.keys, rows[j], lane) for j in range(4)]
        centred = self._centred(arguments, shared, first, head, place, words, (rows, live))
        self._keys(arguments, shared, head, place, centred, live, losses)
        # Registers of values are not to live beside those of keys.
        cute.arch.sync_warp()
        words = [self._load(shared.value_rows, rows[j], lane) for j in range(4)]
        self._values(arguments, shared, place, words, live, losses)

    def _load(self, base: Any, row: Any, lane: Any) -> Any:
        """Four words of a row of the block; of its first one where there is none."""
        address = base + cutlass.max(row, 0) * (2 * self.page.head_dim) + lane * 16
        return read(shared_view(Int32, address, 4, 16))

    def _centred(
        self, arguments: Any, shared: Any, first: Any, head: Any, place: Any, words: Any, who: Any
    ) -> Any:
        """Centred keys of four rows, whose ΔS is entered."""
        spec, (rows, live) = self.spec, who
        centred, groups = cute.make_rmem_tensor(32, Float32), cute.make_rmem_tensor(4, Int32)
        for j in range(4):
            for i, x in enumerate(unpack(words[j], spec.dtype)):
                centred[8 * j + i] = x
        groups.fill(0)
        if spec.grouped:
            self._groups(arguments, first, rows, live, groups)
        if spec.terms:
            self._centre(arguments, head, place[3], groups, centred)
            self._deltas(arguments, shared, head, place, groups, centred)
        return centred

    @cute.jit
    def _deltas(self, arguments, shared, head, place, groups, centred) -> None:
        """ΔS of all query heads, four at a time."""
        whole, rest = divmod(self.spec.group, 4)
        if cutlass.const_expr(whole == 1):
            self._delta(arguments, shared, head, place, groups, centred, (0, 4))
        elif cutlass.const_expr(whole > 1):
            for batch in cutlass.range(whole, unroll=1):
                self._delta(arguments, shared, head, place, groups, centred, (4 * batch, 4))
        if cutlass.const_expr(rest > 0):
            width = 1 << (rest - 1).bit_length()
            self._delta(arguments, shared, head, place, groups, centred, (4 * whole, width))

    @cute.jit
    def _keys(self, arguments, shared, head, place, centred, live, losses) -> None:
        """Nibbles and scales of four rows, to the page."""
        page = self.page
        start, chunk, word, lane = place
        whole = cute.make_rmem_tensor(1, Int32)
        codes, inverses = self._scales(arguments, centred, whole, live, lane, losses)
        index, token = self._place(arguments, shared, start + chunk)
        record = self._record(arguments, index, head)
        words = self._words(centred, inverses, whole)
        address = record + Int64(page.key_row(token + 2 * word) + 4 * lane)
        for j in cutlass.range_constexpr(4):
            own = address + page.key_row(j % 2 + j // 2 * 8)
            store_if(Boolean(live[j] != 0), 4, own, words[j])
        self._store_scales(record, token + 2 * word, lane, codes, live)

    def _words(self, centred: Any, inverses: Any, whole: Any) -> Any:
        """Words of four rows."""
        words = cute.make_rmem_tensor(4, Int32)
        encode = encode_word if self.spec.k_scaled else encode_finite
        for j in range(4):
            lanes = [centred[8 * j + i] for i in range(8)]
            words[j] = encode(lanes, inverses[j], self.page.order)
        if not self.spec.k_scaled:
            self._encode_again(centred, inverses, whole, words)
        return words

    @cute.jit
    def _encode_again(self, centred, inverses, whole, words) -> None:
        """Rows that are not finite."""
        if whole[0] != 15:
            for j in cutlass.range_constexpr(4):
                if whole[0] & (1 << j) == 0:
                    lanes = [centred[8 * j + i] for i in range(8)]
                    words[j] = encode_word(lanes, here(inverses[j]), self.page.order)

    @cute.jit
    def _groups(self, arguments, first, rows, live, groups) -> None:
        """Group of the means of each row; that of a live one where a row is none."""
        for j in cutlass.range_constexpr(4):
            if live[j] != 0:
                groups[j] = self._integer(arguments, "group", first + rows[j])
        for j in cutlass.range_constexpr(4):
            if live[j] == 0:
                for i in cutlass.range_constexpr(4):
                    if live[i] != 0:
                        groups[j] = groups[i]

    def _mean(self, arguments: Any, name: str, group: Any, head: Any, lane: Any) -> list[Any]:
        """Eight channels of a mean."""
        heads = self.given(arguments, f"{name}_heads")
        row = Int64(group) * heads + Int64(head)
        address = self.given(arguments, name) + row * (4 * self.page.head_dim) + Int64(lane) * 32
        found = []
        for i in (0, 1):
            quad = read(view(Float32, address + 16 * i, 4, 16))
            found += [quad[k] for k in range(4)]
        return found

    def _passes(self, groups: Any) -> Any:
        """1 where the four rows of every lane have the means of one group, which is usual; else 4, one for each."""
        if not self.spec.grouped:
            return 1
        same = groups[0] == groups[1]
        same = same & (groups[0] == groups[2]) & (groups[0] == groups[3])
        return Int32(cutlass.select_(cute.arch.vote_all_sync(same), Int32(1), Int32(4)))

    def _turn(self, groups: Any, passes: Any, turn: Any) -> tuple[Any, list[Any]]:
        """The group whose means are taken in a pass, and which rows they are for."""
        if not self.spec.grouped:
            return Int32(0), [True] * 4
        group = groups[0]
        for j in range(1, 4):
            group = Int32(cutlass.select_(turn == j, groups[j], group))
        return group, [(passes == 1) | (turn == j) for j in range(4)]

    @cute.jit
    def _centre(self, arguments, head, lane, groups, centred) -> None:
        """Take the means out of the keys."""
        passes = self._passes(groups)
        for turn in cutlass.range(passes, unroll=1):
            group, chosen = self._turn(groups, passes, turn)
            mean = self._mean(arguments, "k_mean", group, head, lane)
            for j in cutlass.range_constexpr(4):
                for i in cutlass.range_constexpr(8):
                    x = centred[8 * j + i]
                    centred[8 * j + i] = pick(chosen[j], subtract(x, mean[i]), x)

    def _k_scale(self, arguments: Any) -> Any:
        if not self.spec.k_scaled:
            return None
        return Int32(self.given(arguments, "k_scale")).bitcast(Float32)

    def _scales(
        self, arguments: Any, centred: Any, whole: Any, live: Any, lane: Any, losses: Any
    ) -> tuple[Any, list[Any]]:
        """Codes of the four rows' scales as the bytes of a word, and their inverses. ``whole``: bits of finite rows."""
        amax = cute.make_rmem_tensor(4, Float32)
        whole[0] = Int32(0)
        for j in range(4):
            amax[j] = loudest([centred[8 * j + i] for i in range(8)])
            whole[0] |= Int32(cutlass.select_(is_finite(amax[j]), Int32(1 << j), Int32(0)))
        self._mend(centred, amax, whole, live, losses)
        word, inverses = Int32(0), []
        for j in range(4):
            other = cute.arch.shuffle_sync_bfly(amax[j], offset=1)
            best = asm("max.f32 $0, $1, $2;", "=f,f,f", Float32, amax[j], other)
            code, inverse, wanted = block_scale(best, self._k_scale(arguments))
            word |= code << (8 * j)
            inverses.append(inverse)
            if self.spec.counted:
                mine = Boolean(live[j] != 0) & (lane & 1 == 0)
                clipped = mine & (wanted > Float32(448.0))
                flushed = mine & (best > Float32(0.0)) & (code == Int32(0))
                losses[SATURATED] += Int32(cutlass.select_(clipped, Int32(1), Int32(0)))
                losses[FLUSHED] += Int32(cutlass.select_(flushed, Int32(1), Int32(0)))
        return word, inverses

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
                            losses[NANS] += nan * live[j]
                            losses[INFINITIES] += infinite * live[j]

    @cute.jit
    def _store_scales(self, record, token, lane, codes, live) -> None:
        """Scales of two token pairs: in a quarter of the channels they are one word (D = 128) or half of one."""
        other, step = codes, 2
        if cutlass.const_expr(self.run == 2):
            other, step = cute.arch.shuffle_sync_bfly(codes, offset=2), 4
        pair = lane & (step - 1)
        # The even lane of the quarter's first block has the pair (0, 1), its neighbour (2, 3).
        own = codes >> (pair * 16)
        beside = other >> (pair * 16)
        block = Uint32(lane) // 2
        base = record + Int64(self.page.scale_byte(Uint32(token + 8 * pair), block))
        if pair < 2:
            a = Int32(cutlass.select_(pair == 0, live[0], live[2])) != 0
            b = Int32(cutlass.select_(pair == 0, live[1], live[3])) != 0
            low, high = own & 255, (own >> 8) & 255
            if cutlass.const_expr(self.run == 2):
                low |= (beside & 255) << 8
                high |= beside & 0xFF00
                store_if(a & b, 4, base, low | (high << 16))
                store_if(a & ~b, 2, base, low)
                store_if(b & ~a, 2, base + 2, high)
            else:
                store_if(a & b, 2, base, low | (high << 8))
                store_if(a & ~b, 1, base, low)
                store_if(b & ~a, 1, base + 1, high)

    # --- ΔS ---

    @cute.jit
    def _delta(self, arguments, shared, head, place, groups, centred, queries) -> None:
        """ΔS of four rows and of up to four query heads (from one on, so many) into shared memory."""
        _, chunk, word, lane = place
        query, width = queries
        sums = cute.make_rmem_tensor(4 * width, Float32)
        sums.fill(0.0)
        passes = self._passes(groups)
        for turn in cutlass.range(passes, unroll=1):
            group, chosen = self._turn(groups, passes, turn)
            for i in cutlass.range_constexpr(width):
                # Behind the last query head the last one again, which is not stored.
                own = cutlass.min(Int32(query + i), self.spec.group - 1)
                mean = self._mean(arguments, "q_mean", group, head * self.spec.group + own, lane)
                for j in cutlass.range_constexpr(4):
                    total = products([centred[8 * j + k] for k in range(8)], mean)
                    sums[4 * i + j] = pick(chosen[j], total, sums[4 * i + j])
        found, index = self._gather([sums[i] for i in range(4 * width)], lane)
        for i in cutlass.range_constexpr(len(found)):
            at = index + i
            j, own = at & 3, query + (at >> 2)
            token = 2 * word + (j & 1) + (j >> 1) * 8
            cell = (own * CHUNKS + chunk) * TOKENS + token
            if own < self.spec.group:
                shared_view(Float32, shared.delta + cell * 4, 1, 4)[0] = found[i]

    def _gather(self, sums: list[Any], lane: Any) -> tuple[list[Any], Any]:
        """Sums over a head's lanes: those that are left to this lane, which are adjacent, and the index of the first.

        Every value is added over the same tree: lanes at distance L/2, then L/4, … 1. While a lane has several, it
        keeps one half of them and gives the other half away.
        """
        index, distance = Int32(0), self.lanes // 2
        while distance:
            if len(sums) > 1:
                half = len(sums) // 2
                upper = (lane & distance) != 0
                index += Int32(cutlass.select_(upper, Int32(half), Int32(0)))
                kept, sent = [], []
                for low, high in zip(sums[:half], sums[half:], strict=True):
                    kept.append(Float32(cutlass.select_(upper, high, low)))
                    sent.append(Float32(cutlass.select_(upper, low, high)))
            else:
                kept = sent = sums
            sums = [
                k + cute.arch.shuffle_sync_bfly(s, offset=distance)
                for k, s in zip(kept, sent, strict=True)
            ]
            distance //= 2
        return sums, index

    # --- values ---

    @cute.jit
    def _values(self, arguments, shared, place, words, live, losses) -> None:
        """Four rows' values as words of V^T, in shared memory."""
        spec = self.spec
        _, chunk, word, lane = place
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
