"""What a consumer warpgroup does with a tile of 128 tokens. Imports the DSL.

Heads are the columns of both products, tokens and channels their rows:

    S^T (64 tokens, columns) = K · Q^T    twice; K from registers, dequantised from the ring, ΔS where it begins
    O^T (D, columns)        += V^T · P^T  V^T from the ring, P from shared memory, both E4M3

Warp w has of each 64 tokens the sixteen 16w to 16w + 15, and lane 4g + t the tokens 2g and 2g + 1 of them and a quarter
t of their channels. Row g of the product is the even token where g is even and the odd one where it is odd, so that the
lanes' loads do not collide; logits change places behind the product. E4M3 sums are promoted behind every tile.
"""

from __future__ import annotations

from math import log2
from typing import Any

import cutlass
from cutlass import Boolean, Float32, Int8, Int16, Int32, cute
from cutlass.cute.nvgpu import warpgroup

from epicute.attention.mixed_decode_spec import TILE, MixedDecodeSpec
from epicute.attention.mixed_decode_spec import decode_at as at
from epicute.attention.sm90.mixed_decode_places import (
    Layout,
    Shared,
    load_from,
    shared_view,
    value_place,
)
from epicute.attention.sm90.softmax import exp2, fma, maximum
from epicute.epilogues.dsl import pure_asm
from epicute.layouts.qk4pv8 import exact16_pairs, position_of, token_at
from epicute.quant.dsl import asm, divide

__all__ = ["DecodeTiles"]

MEET = 1
"""First of the named barriers of one warpgroup each."""

UNIT = 2.0**-7
"""Of a product: dequantised keys are that much too small."""


class DecodeTiles:
    """A consumer thread's fragments and the steps over them; one object for all of its parts.

    Attributes:
        number, role: of the warpgroup; which one it is of the part.
        out: O^T, in FP32.
        best, total: of each of the thread's columns, its largest logit and the sum of probabilities of its own tokens.
        lift, unit: log2 of P's scale; what makes powers of two of a product.
    """

    def __init__(
        self,
        spec: MixedDecodeSpec,
        layout: Layout,
        products: tuple[Any, Any],
        shared: Shared,
        thread: Any,
    ) -> None:
        self.spec, self.page, self.layout, self.shared = spec, spec.page, layout, shared
        self.number = cute.arch.make_warp_uniform(thread // 128)
        self.warp = cute.arch.make_warp_uniform(thread // 32 % 4)
        self.role = self.number
        self._stand(thread)
        self.qk, self.pv = products
        self.qk_part, pv_part = self.qk.get_slice(0), self.pv.get_slice(0)
        self.b_q = self.qk_part.make_fragment_B(self.qk_part.partition_B(shared.q_tensor))
        self.a_v = pv_part.make_fragment_A(pv_part.partition_A(shared.v_tensor))
        self.b_p = pv_part.make_fragment_B(pv_part.partition_B(shared.p_tensor))
        shape = pv_part.partition_shape_C((spec.page.head_dim, spec.columns))
        self.out, self.sums = pv_part.make_fragment_C(shape), pv_part.make_fragment_C(shape)
        self.eights = spec.columns // 8
        self.count = 2 * self.eights
        self.best = cute.make_rmem_tensor(self.count, Float32)
        self.total = cute.make_rmem_tensor(self.count, Float32)
        self.lift = log2(spec.p_scale)

    def _stand(self, thread: Any) -> None:
        """Take a place in the warpgroup."""
        self.thread, self.lane = thread % 128, thread % 32
        self.g, self.t = self.lane // 4, self.lane % 4

    def column(self, i: int) -> Any:
        """The thread's ``i``-th column."""
        return i // 2 * 8 + 2 * self.t + i % 2

    def begin(self, part: Any, mail: Any, arguments: Any) -> None:
        """Set out on the ``mail``-th part."""
        # What places follow from the thread is found again for each part: registers do not hold it over the merge.
        self._stand(asm("mov.b32 $0, $1;", "=r,r", Int32, self.thread, effects=True))
        self.part, self.slot, self.role = part, mail % 2, self.number ^ mail % 2
        self.unit = Int32(arguments[at("unit")]).bitcast(Float32)
        k_scale = Int32(arguments[at("k_scale")]).bitcast(Float32)
        self.inverse = divide(UNIT, k_scale)
        self.out.fill(0.0)
        self.best.fill(-Float32.inf)
        self.total.fill(0.0)

    @cute.jit
    def tile(self, tile, stages, keys_empty) -> None:
        """Take in a tile. ``stages``: of its keys and of its values; ``keys_empty``: the mbarrier of its keys'."""
        stage, values = stages
        kept = self.part.length - tile * TILE
        if tile == self.part.tiles - 1:
            DecodeTiles._complete(self, kept, stages)
        first, second = self._logits(stage, 0), self._logits(stage, 1)
        cute.arch.sync_warp()
        _arrive_if(keys_empty, Boolean(self.lane == 0))
        if kept < TILE:
            DecodeTiles._mask(self, first, kept, 0)
            DecodeTiles._mask(self, second, kept, 1)
        factors = self._soften(first, second)
        self._barrier()
        self._weigh(values)
        self._add(factors)

    def _barrier(self) -> None:
        cute.arch.barrier(barrier_id=MEET + self.number, number_of_threads=128)

    # --- a request's last tile ---

    @cute.jit
    def _complete(self, kept, stages) -> None:
        """Clear values behind the end, and enter the new row."""
        # Nothing of this is computed ahead of the tiles, where it would have to be kept in registers.
        thread = asm("mov.b32 $0, $1;", "=r,r", Int32, self.thread, effects=True)
        base = self.shared.v + stages[1] * self.layout.value_stage
        for i in cutlass.range_constexpr(TILE // 16 * self.page.head_dim // 128):
            unit = thread + i * 128
            chunk, channel = unit // self.page.head_dim, unit % self.page.head_dim
            if chunk * 16 + 16 > kept:
                place = value_place(channel, chunk * 16, self.page.head_dim, self.page.page_size)
                DecodeTiles._clear(self, base + place, kept - chunk * 16)
        if cutlass.const_expr(self.spec.append):
            DecodeTiles._append(self, kept, stages, thread)
        cute.arch.fence_view_async_shared()
        self._barrier()

    @cute.jit
    def _append(self, kept, stages, thread) -> None:
        if kept > 0:
            DecodeTiles._enter(self, kept - 1, stages, thread)

    def _clear(self, address: Any, kept: Any) -> None:
        """Zero of sixteen tokens those from ``kept`` on."""
        cells = shared_view(Int32, address, 4)
        words = load_from(cells)
        found = cute.make_rmem_tensor(4, Int32)
        for w in range(4):
            mask = Int32(0)
            for byte in range(4):
                token = token_at(4 * w + byte)
                bits = 0xFF << (8 * byte)
                bits -= (bits >> 31) << 32
                mask = mask | Int32(cutlass.select_(kept > token, Int32(bits), Int32(0)))
            found[w] = words[w] & mask
        cute.autovec_copy(found, cells)

    def _enter(self, token: Any, stages: tuple[Any, Any], thread: Any) -> None:
        """The new row to its place in the tile, as the scribe left it."""
        stage, values = stages
        spec, page, layout = self.spec, self.page, self.layout
        row = self.shared.rows + self.slot * layout.row_bytes
        number, own = token // page.page_size, token % page.page_size
        keys = self.shared.k + stage * layout.key_stage + number * layout.key_page
        source = shared_view(Int32, row + thread * 4)
        target = shared_view(Int32, keys + page.key_row(own) + thread * 4)
        _copy_if(source, target, Boolean(thread < page.head_dim // 8))
        source = shared_view(Int8, row + layout.row_scales + thread)
        target = shared_view(Int8, keys + page.scale_byte(own, thread))
        _copy_if(source, target, Boolean(thread < page.blocks))
        # The thread that has cleared the sixteen tokens around: another one's byte would be lost in what it writes.
        chunk, channel = token // 16, thread % page.head_dim
        mine = Boolean((chunk * page.head_dim + channel) % 128 == thread)
        place = value_place(
            channel, chunk * 16 + position_of(token % 16), page.head_dim, page.page_size
        )
        source = shared_view(Int8, row + layout.row_values + channel)
        target = shared_view(Int8, self.shared.v + values * layout.value_stage + place)
        _copy_if(source, target, mine)
        if spec.terms:
            column, term = thread // spec.terms, thread % spec.terms
            query = self.part.head % spec.blocks * spec.columns + column
            line = (query * spec.terms + term) * page.page_size + own
            delta = self.shared.delta + stage * layout.delta_stage + number * layout.delta_page
            source = shared_view(Int16, row + layout.row_delta + thread * 2)
            inside = Boolean((column < spec.columns) & (query < spec.group))
            _copy_if(source, shared_view(Int16, delta + line * 2), inside)

    # --- logits ---

    def _logits(self, stage: Any, half: int) -> Any:
        """64 tokens' products with the queries, in order."""
        part = self.qk_part
        keys = part.make_fragment_A(part.partition_shape_A((64, self.page.head_dim)))
        logits = part.make_fragment_C(part.partition_shape_C((64, self.spec.columns)))
        token = half * 64 + 16 * self.warp + 2 * self.g
        odd = self.g % 2
        self._dequantize(keys, stage, token, odd)
        self._start(logits, stage, token, odd)
        atom = cute.make_mma_atom(self.qk.op)
        atom.set(warpgroup.Field.ACCUMULATE, self.spec.terms > 0)
        warpgroup.fence()
        for k in range(self.page.head_dim // 16):
            cute.gemm(atom, logits, keys[None, None, k], self.b_q[None, None, k, self.slot], logits)
            atom.set(warpgroup.Field.ACCUMULATE, True)
        warpgroup.commit_group()
        warpgroup.wait_group(0)
        for i in range(self.count):
            low, high = i % 2 + i // 2 * 4, i % 2 + i // 2 * 4 + 2
            a, b = logits[low], logits[high]
            logits[low] = _either(odd != 0, b, a)
            logits[high] = _either(odd != 0, a, b)
        return logits

    def _page_of(self, base: Any, token: Any, size: int) -> tuple[Any, Any]:
        """(address of a token's page, token in it) in the ring."""
        return base + token // self.page.page_size * size, token % self.page.page_size

    def _dequantize(self, keys: Any, stage: Any, token: Any, odd: Any) -> None:
        """Two tokens' channels of this lane as float16 · 2^-7."""
        page, layout = self.page, self.layout
        base = self.shared.k + stage * layout.key_stage
        base, own = self._page_of(base, token, layout.key_page)
        registers = cute.recast_tensor(keys, Int32)
        words, run = page.head_dim // 32, page.head_dim // 64
        codes = self._codes(base + page.scale_byte(own, self.t * run), odd, run)
        for row in range(2):
            place = base + page.key_row(own + (odd ^ row)) + self.t * (4 * words)
            found = load_from(shared_view(Int32, place, words))
            for w in range(words):
                byte = row * run + w * run // words
                scale = _scale(codes, byte)
                pairs = _pairs(found[w], page.order, scale)
                for pair, value in enumerate(pairs):
                    step = 2 * w + pair // 2
                    registers[4 * step + 2 * (pair % 2) + row] = value

    def _codes(self, address: Any, odd: Any, run: int) -> Any:
        """Scale codes of the two rows of the product, in order."""
        if run == 2:
            word = shared_view(Int32, address)[0]
            selection = _select(odd != 0, Int32(0x1032), Int32(0x3210))
        else:
            word = Int32(shared_view(Int16, address)[0])
            selection = _select(odd != 0, Int32(0x3201), Int32(0x3210))
        return pure_asm("prmt.b32 $0, $1, 0, $2;", "=r,r,r", Int32, word, selection)

    def _start(self, logits: Any, stage: Any, token: Any, odd: Any) -> None:
        """Accumulators at ΔS, in units of the product."""
        spec = self.spec
        if spec.terms == 0:
            return
        base = self.shared.delta + stage * self.layout.delta_stage
        base, own = self._page_of(base, token, self.layout.delta_page)
        block = self.part.head % spec.blocks * spec.columns
        for i in range(self.count):
            query = cutlass.min(block + self.column(i), spec.group - 1)
            found = [Float32(0.0), Float32(0.0)]
            for term in range(spec.terms):
                line = (query * spec.terms + term) * self.page.page_size + own
                word = shared_view(Int32, base + line * 2)[0]
                pair = (word << 16).bitcast(Float32), (word & -65536).bitcast(Float32)
                found = [a + b for a, b in zip(found, pair, strict=True)] if term else list(pair)
            even, behind = (x * self.inverse for x in found)
            low = i % 2 + i // 2 * 4
            logits[low] = _either(odd != 0, behind, even)
            logits[low + 2] = _either(odd != 0, even, behind)

    @cute.jit
    def _mask(self, logits, kept, half: cutlass.Constexpr) -> None:
        """Take tokens behind the end out."""
        token = half * 64 + 16 * self.warp + 2 * self.g
        for i in cutlass.range_constexpr(self.count):
            for row in cutlass.range_constexpr(2):
                place = i % 2 + i // 2 * 4 + 2 * row
                logits[place] = _either(token + row < kept, logits[place], Float32(-Float32.inf))

    # --- probabilities ---

    def _soften(self, first: Any, second: Any) -> list[Any]:
        """Logits to probabilities in shared memory; what the output before is multiplied by, of each column."""
        peaks = self.shared.peaks + self.number * (16 * self.spec.columns)
        for i in range(self.count):
            low = i % 2 + i // 2 * 4
            found = maximum(first[low], first[low + 2])
            found = maximum(found, maximum(second[low], second[low + 2]))
            for distance in (4, 8, 16):
                found = maximum(found, cute.arch.shuffle_sync_bfly(found, distance))
            place = peaks + (self.warp * self.spec.columns + self.column(i)) * 4
            _store_if(place, found, Boolean(self.g == 0))
        self._barrier()
        factors = []
        for i in range(self.count):
            best = self.best[i]
            for w in range(4):
                place = peaks + (w * self.spec.columns + self.column(i)) * 4
                best = maximum(best, shared_view(Float32, place)[0])
            factors.append(self._take(first, second, i, best))
        cute.arch.fence_view_async_shared()
        return factors

    def _take(self, first: Any, second: Any, i: int, best: Any) -> Any:
        """A column's probabilities."""
        # Behind no key at all the offset before is +inf, and what it weighs is nothing.
        before = self.lift - _times(self.best[i], self.unit)
        zero = _either(best == -Float32.inf, Float32(0.0), best)
        offset = self.lift - _times(zero, self.unit)
        factor = exp2(offset - before)
        self.best[i] = best
        low = i % 2 + i // 2 * 4
        total = self.total[i] * factor
        for half, logits in enumerate((first, second)):
            pair = [exp2(fma(logits[low + 2 * r], self.unit, offset)) for r in range(2)]
            total = total + pair[0]
            total = total + pair[1]
            self._put(pair, self.column(i), half)
        self.total[i] = total
        return factor

    def _put(self, pair: list[Any], column: Any, half: int) -> None:
        """Two adjacent tokens' probabilities as E4M3, to where V^T has these tokens."""
        text = "{ .reg .b16 c; cvt.rn.satfinite.e4m3x2.f32 c, $2, $1; cvt.u32.u16 $0, c; }"
        code = pure_asm(text, "=r,f,f", Int32, *pair)
        position = (4 * half + self.warp) * 16 + self.g % 4 * 4 + self.g // 4 * 2
        place = column * TILE + (position ^ (column % 8 * 16))
        place = self.shared.p + self.number * self.layout.p_bytes + place
        shared_view(Int16, place)[0] = Int16(code)

    # --- values ---

    def _weigh(self, stage: Any) -> None:
        """The tile's product with values, by itself."""
        atom = cute.make_mma_atom(self.pv.op)
        atom.set(warpgroup.Field.ACCUMULATE, False)
        warpgroup.fence()
        for k in range(TILE // 32):
            a, b = self.a_v[None, None, k, stage], self.b_p[None, None, k, self.number]
            cute.gemm(atom, self.sums, a, b, self.sums)
            atom.set(warpgroup.Field.ACCUMULATE, True)
        warpgroup.commit_group()
        warpgroup.wait_group(0)

    def _add(self, factors: list[Any]) -> None:
        """Promote: the output before, rescaled, and the tile's."""
        for e in range(cute.size(self.out)):
            i = e % (4 * self.eights) // 4 * 2 + e % 2
            self.out[e] = fma(self.out[e], factors[i], self.sums[e])


def _either(condition: Any, a: Any, b: Any) -> Any:
    return Float32(cutlass.select_(condition, Float32(a), Float32(b)))


def _select(condition: Any, a: Any, b: Any) -> Any:
    return Int32(cutlass.select_(condition, a, b))


def _times(a: Any, b: Any) -> Any:
    """a · b, rounded, and never part of another operation: a maximum that stays gives the same bits again."""
    return pure_asm("mul.rn.f32 $0, $1, $2;", "=f,f,f", Float32, Float32(a), Float32(b))


def _scale(codes: Any, byte: int) -> Any:
    """A pair of float16 of scale · 2^7, of the E4M3 code in a byte of ``codes``."""
    text = f"""{{ .reg .b32 t, k; prmt.b32 t, $1, 0, 0x4{byte}4{byte}; shl.b32 t, t, 7;
mov.b32 k, 0x78007800; mul.rn.f16x2 $0, t, k; }}"""
    return pure_asm(text, "=r,r", Int32, codes)


def _pairs(word: Any, order: str, scale: Any) -> list[Any]:
    """Four pairs of channels as float16 of code · scale · 2^-7."""
    if order == "exact16":
        units = [Int32(x) for x in exact16_pairs(word)]
    else:
        units = _halves_of_nibbles(word)
    text = "mul.rn.f16x2 $0, $1, $2;"
    return [pure_asm(text, "=r,r,r", Int32, x, scale) for x in units]


def _halves_of_nibbles(word: Any) -> list[Any]:
    """Pairs of float16 of code · 2^-14, of a ``fast8`` word: high bytes come from a table of eight."""
    found = []
    for half in range(2):
        text = f"""{{ .reg .b32 m, s, y; and.b32 m, $1, 0x77777777; shr.u32 m, m, {16 * half};
shl.b32 s, $1, {4 * half}; prmt.b32 y, 0x06040200, 0x0E0C0A08, m;
lop3.b32 y, s, 0x80808080, y, 0xEA; mov.b32 $0, y; }}"""
        found.append(pure_asm(text, "=r,r", Int32, word))
    pairs = []
    for high in found:
        for selection in ("0x1404", "0x3424"):
            pairs.append(pure_asm(f"prmt.b32 $0, $1, 0, {selection};", "=r,r", Int32, high))
    return pairs


@cute.jit
def _copy_if(source: cute.Tensor, target: cute.Tensor, condition: Boolean) -> None:
    if condition:
        target[0] = source[0]


@cute.jit
def _store_if(place: Int32, value: Float32, condition: Boolean) -> None:
    if condition:
        shared_view(Float32, place)[0] = value


@cute.jit
def _arrive_if(barrier, condition) -> None:
    if condition:
        cute.arch.mbarrier_arrive(barrier)
