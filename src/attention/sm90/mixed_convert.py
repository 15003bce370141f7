"""What the converting warpgroup does: keys and queries to what is multiplied, values transposed. Imports the DSL.

A thread takes a row of keys or queries: the eight threads of a quarter warp read one unit each of eight rows, which
swizzling keeps in different banks, and write so. Values are transposed by a warp in blocks of 16 tokens and 32
channels: a transposing load of pairs of bytes, two byte selections, and stores of four tokens, which the permutation of
tokens makes adjacent.
"""

from __future__ import annotations

from typing import Any

import cutlass
import torch
from cutlass import Float32, Int32, cute

from epicute.attention import mixed_places as places
from epicute.attention.mixed import MixedSchedule, MixedSpec
from epicute.attention.sm90.convert import floats, load_vector, store_vector
from epicute.epilogues.dsl import pack_words, pure_asm
from epicute.layouts.qk4pv8 import exact16_pairs
from epicute.quant.dsl import asm

__all__ = ["WIDE_UNIT", "MixedConverter", "load_floats", "this_thread"]

WIDE_UNIT = 2.0**7
"""What a product of exact16 is short of: keys are held at 2^-7."""

TWO_TO_15 = 0x78007800
SIGNS = 0x80808080 - 2**32
MAGNITUDES = 0x77777777
OUTER_TERMS = 3
"""Terms of bfloat16 that hold ΔS whole in the accumulators' unit, whatever is stored; there are sixteen places."""

LOWEST, HIGHEST = 127 - 32, 127 + 100
"""Range of the exponents of rows' scales, biased."""


def word_at(address: Any) -> Any:
    """A word of shared memory, as a tensor of one."""
    pointer = cute.make_ptr(Int32, address, cute.AddressSpace.smem, assumed_align=4)
    return cute.make_tensor(pointer, cute.make_layout(1))


def store_float(address: Any, value: Any) -> None:
    """One float32 to shared memory."""
    pointer = cute.make_ptr(Float32, address, cute.AddressSpace.smem, assumed_align=4)
    cute.make_tensor(pointer, cute.make_layout(1))[0] = value


def load_words(address: Any, count: int) -> list[Any]:
    """Two or four words of shared memory."""
    pointer = cute.make_ptr(Int32, address, cute.AddressSpace.smem, assumed_align=4 * count)
    fragment = cute.make_rmem_tensor(count, Int32)
    cute.autovec_copy(cute.make_tensor(pointer, cute.make_layout(count)), fragment)
    return [fragment[i] for i in range(count)]


def load_floats(address: Any) -> list[Any]:
    """Four float32 of shared memory."""
    pointer = cute.make_ptr(Float32, address, cute.AddressSpace.smem, assumed_align=16)
    fragment = cute.make_rmem_tensor(4, Float32)
    cute.autovec_copy(cute.make_tensor(pointer, cute.make_layout(4)), fragment)
    return [fragment[i] for i in range(4)]


def permute(a: Any, b: Any, selector: Any) -> Any:
    """Bytes of two words, by a selector."""
    return pure_asm("prmt.b32 $0, $1, $2, $3;", "=r,r,r,r", Int32, a, b, Int32(selector))


def times(a: Any, b: Any) -> Any:
    """Product of pairs of float16."""
    return pure_asm("mul.rn.f16x2 $0, $1, $2;", "=r,r,r", Int32, a, b)


def to_float(word: Any, high: bool) -> Any:
    """The low or high bfloat16 of a word as float32."""
    text = "and.b32 $0, $1, 0xffff0000;" if high else "shl.b32 $0, $1, 16;"
    return pure_asm(text, "=r,r", Int32, word).bitcast(Float32)


def largest(a: Any, b: Any) -> Any:
    """The larger one; NaN where either is."""
    return pure_asm("max.NaN.f32 $0, $1, $2;", "=f,f,f", Float32, a, b)


def magnitude(x: Any) -> Any:
    """|x|."""
    return pure_asm("abs.f32 $0, $1;", "=f,f", Float32, x)


def load_transposed(address: Any) -> list[Any]:
    """Four 8x8 matrices of 16-bit elements, each transposed; lanes 8i to 8i + 7 give the rows of the i-th."""
    return list(
        cute.arch.inline_ptx(
            "ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {{$w0}, {$w1}, {$w2}, {$w3}}, [{$r0}];",
            write_only_types=[Int32] * 4,
            read_only_args=[address],
        )
    )


def this_thread(first: int) -> Any:
    """This thread's number less ``first``, read anew, so that what follows from it is computed where it is wanted.

    Kept over all tiles, the addresses of a row's units alone are more registers than a converting thread has.
    """
    return asm("mov.u32 $0, %tid.x;", "=r", Int32, effects=True) - first


class MixedConverter:
    """Device code of the converting threads; addresses are of shared memory, 32 bits."""

    def __init__(self, spec: MixedSpec, schedule: MixedSchedule) -> None:
        self.spec, self.schedule = spec, schedule
        self.head_dim = spec.head_dim
        self.centred = spec.terms > 0

    # --- queries ---

    @cute.jit
    def queries(self, tile, mean, scales, row) -> None:
        """A row of a tile of queries, in place; ``mean``: of the head, where there is one; ``scales``: of the rows."""
        if cutlass.const_expr(self.spec.wide):
            for unit in cutlass.range(self.head_dim // 8, unroll=2):
                self._halves(tile, mean, row, unit)
        else:
            peak = Float32(0.0)
            for unit in cutlass.range(self.head_dim // 8, unroll=2):
                peak = self._peak(peak, self._values(tile, mean, row, unit))
            scale, inverse = self._power(peak)
            store_float(scales + row * 4, scale)
            for unit in cutlass.range(self.head_dim // 16, unroll=1):
                self._codes(tile, mean, row, unit, inverse)

    def _place(self, tile: Any, row: Any, unit: Any) -> Any:
        """Address of a unit of queries."""
        return tile + places.tile_byte(row, unit, 128, self.schedule.tile_m)

    def _halves(self, tile: Any, mean: Any, row: Any, unit: Any) -> None:
        words = pack_words(self._values(tile, mean, row, unit), "f16")
        store_vector(self._place(tile, row, unit), words)

    def _codes(self, tile: Any, mean: Any, row: Any, unit: Any, inverse: Any) -> None:
        # Behind units 2u and 2u + 1, which are read before, unit u is not needed any more.
        values = [x for i in range(2) for x in self._values(tile, mean, row, 2 * unit + i)]
        words = pack_words([x * inverse for x in values], "e4m3")
        store_vector(self._place(tile, row, unit), words)

    def _peak(self, peak: Any, values: list[Any]) -> Any:
        for x in values:
            peak = largest(peak, magnitude(x))
        return peak

    def _values(self, tile: Any, mean: Any, row: Any, unit: Any) -> list[Any]:
        """Eight values of a unit, the mean taken out in float32."""
        found = []
        for word in load_vector(self._place(tile, row, unit)):
            if self.spec.dtype == torch.bfloat16:
                found += [to_float(word, False), to_float(word, True)]
            else:
                found += floats(word)
        if not self.centred:
            return found
        means = load_floats(mean + unit * 32) + load_floats(mean + unit * 32 + 16)
        return [x - m for x, m in zip(found, means, strict=True)]

    def _power(self, peak: Any) -> tuple[Any, Any]:
        """(scale, its inverse): the least power of two by which a row divided is within 448. Of infinity: NaN."""
        # 1.75 * 2^8 is 448: a mantissa above 0.75 takes the next exponent.
        exponent = ((peak.bitcast(Int32) + 0x1FFFFF) >> 23) - 8
        exponent = cutlass.min(cutlass.max(exponent, LOWEST), HIGHEST)
        scale = (exponent << 23).bitcast(Float32)
        inverse = ((254 - exponent) << 23).bitcast(Float32)
        return scale, Float32(cutlass.select_(peak < Float32.inf, inverse, Float32.nan))

    @cute.jit
    def ones(self, tile, scales, row) -> None:
        """A row of the left factor of ΔS: the inverse of the row's scale in the columns of the terms, else zero."""
        unit = Float32(1.0)
        if cutlass.const_expr(not self.spec.wide):
            exponent = word_at(scales + row * 4)[0] >> 23
            unit = ((254 - exponent) << 23).bitcast(Float32)
        self._sixteen(tile, row, [unit] * OUTER_TERMS, self.schedule.tile_m)

    def _sixteen(self, tile: Any, row: Any, values: list[Any], rows: int) -> None:
        """A row of sixteen bfloat16, those behind ``values`` zero."""
        filled = values + [Float32(0.0)] * (8 - len(values))
        zeros = [Int32(0)] * 4
        for unit, words in enumerate((pack_words(filled, "bf16"), zeros)):
            store_vector(tile + places.tile_byte(row, unit, 32, rows), words)

    # --- keys of NVFP4 ---

    @cute.jit
    def keys(self, raw, scales, target, table, row) -> None:
        """A row of a tile of keys."""
        d, n = self.head_dim, self.schedule.tile_n
        words: list[Any] = []
        for piece in cutlass.range_constexpr(d // 32):
            words += load_vector(raw + places.tile_byte(row, piece, d // 2, n))
        first, _, _ = places.scale_place(d, row, 0)
        factors = load_words(scales + first, d // 32)
        for block in cutlass.range_constexpr(d // 16):
            _, word, byte = places.scale_place(d, row, block)
            pair = words[2 * block : 2 * block + 2]
            if cutlass.const_expr(self.spec.wide):
                self._wide(target, row, block, pair, factors[word], byte)
            else:
                self._narrow(target, row, block, pair, factors[word], byte, table)

    def _wide(self, target: Any, row: Any, block: int, pair: Any, factors: Any, byte: Any) -> None:
        """Sixteen channels to FP16 at 2^-7."""
        # The scale's byte on top of both halves, then as FP16 times 2^-8: see ``exact16_scale``.
        selector = Int32(0x0404) | (byte << 4) | (byte << 12)
        scale = permute(factors, Int32(0), selector)
        scale = pure_asm("shr.u32 $0, $1, 1;", "=r,r", Int32, scale)
        scale = times(scale, Int32(TWO_TO_15))
        for i, word in enumerate(pair):
            place = places.tile_byte(row, 2 * block + i, 128, self.schedule.tile_n)
            store_vector(target + place, [times(x, scale) for x in exact16_pairs(word)])

    def _narrow(
        self, target: Any, row: Any, block: int, pair: Any, factors: Any, byte: Any, table: Any
    ) -> None:
        """Sixteen channels to E4M3, by the table's line of their scale."""
        index = permute(factors, Int32(0), Int32(0x4440) | byte)
        low, high = load_words(table + index * 8, 2)
        found = []
        for word in pair:
            magnitudes = word & MAGNITUDES
            found.append(permute(low, high, magnitudes) | (word & SIGNS))
            found.append(permute(low, high, magnitudes >> 16) | ((word << 4) & SIGNS))
        place = places.tile_byte(row, block, self.head_dim, self.schedule.tile_n)
        store_vector(target + place, found)

    def line(self, table: Any, scale: Any, shift: Any) -> None:
        """The table's line of one byte of scale: E4M3 of the eight magnitudes times it and 2^-shift."""
        text = "{ .reg .b16 c; .reg .b32 h; cvt.u16.u32 c, $1; cvt.rn.f16x2.e4m3x2 h, c; "
        text += ".reg .b16 l, u; mov.b32 {l, u}, h; cvt.f32.f16 $0, l; }"
        value = pure_asm(text, "=f,r", Float32, scale) * ((127 - shift) << 23).bitcast(Float32)
        lanes = [value * m for m in (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)]
        for i, word in enumerate(pack_words(lanes, "e4m3")):
            word_at(table + scale * 8 + 4 * i)[0] = word

    # --- ΔS ---

    @cute.jit
    def compensation(self, raw, target, unit, row) -> None:
        """ΔS of a token, in the accumulators' unit; ``unit``: what takes a logit to it."""
        spec = self.spec
        total = Float32(0.0)
        for term in cutlass.range_constexpr(spec.terms):
            address = raw + places.delta_raw_byte(row, term, spec.page or 0, spec.terms)
            pointer = cute.make_ptr(
                cutlass.BFloat16, address, cute.AddressSpace.smem, assumed_align=2
            )
            value = cute.make_tensor(pointer, cute.make_layout(1))[0].to(Float32)
            total = value if term == 0 else total + value
        total = total * unit
        if cutlass.const_expr(spec.placement == "mma"):
            self._sixteen(target, row, split(total, OUTER_TERMS), self.schedule.tile_n)
        else:
            store_float(target + places.delta_index(row) * 4, total)

    # --- values of FP8 ---

    @cute.jit
    def values(self, raw, target, thread) -> None:
        """A tile of values, (tokens, channels) to (channels, tokens), the tokens permuted."""
        lane, warp = thread % 32, thread // 32
        chunks = self.head_dim // 32
        for i in cutlass.range(warp, self.schedule.tile_n // 16 * chunks, 4, unroll=2):
            group, chunk = i // chunks, i % chunks
            self._block(raw, target, group, chunk, lane)

    def _block(self, raw: Any, target: Any, group: Any, chunk: Any, lane: Any) -> None:
        d, n = self.head_dim, self.schedule.tile_n
        token, unit = places.value_source(lane)
        source = places.tile_byte(group * 16 + token, chunk * 2 + unit, d, n)
        words = load_transposed(raw + source)
        # The upper half of the lanes store the odd channel first: their even ones have the lower half's banks.
        late = lane // 16
        for half in range(2):
            pair = words[2 * half : 2 * half + 2]
            even, odd = (permute(pair[0], pair[1], bytes_) for bytes_ in (0x6420, 0x7531))
            for turn in range(2):
                part = late ^ turn
                channel = chunk * 32 + places.transposed_row(lane, half, part)
                place = places.value_address(channel, group, lane, d)
                word_at(target + place)[0] = Int32(cutlass.select_(part == 0, even, odd))


def split(x: Any, terms: int) -> list[Any]:
    """Terms of bfloat16, as float32, each the rounded rest of those before."""
    found = []
    for _ in range(terms):
        term = to_float(pack_words([x, x], "bf16")[0], True)
        found.append(term)
        x = x - term
    return found
