"""INT4 weights times 16-bit integers: activations with a power of two for each row and span of k. Imports the DSL.

What `mma.sync` of BF16 takes for eight codes, nine instructions that make numbers of them, is one here:

    word of a lane      8 codes: in each byte that of row g below, that of row g + 8 above it, both of one k
    A, row g            word & 0x0F0F0F0F
    A, row g + 8        the word itself, bytes 16 h + l: 16 times the sum of h is what that of row g is less
    B                   signed high bytes and unsigned low bytes of x · 2^(14 - e), e the exponent of the span's largest

Sums of a span are exact, zero points' share of them too. An activation loses what is below 2^-14 of the power of two
of the largest one of its row and span (a group, at most 128 k): nothing where it is within 2^-7 of it (BF16) or 2^-4
(FP16), half a unit of 2^-14 of that power of two at most, where the largest one's own rounding may have lost 2^-9 of it
(BF16). A span that holds an infinity or NaN makes its row NaN.
"""

from __future__ import annotations

from typing import Any

import cutlass
import torch
from cutlass import Boolean, Float32, Int32, Int64, cute

from epicute.decode.geometry import WARPS, integer_place, span_of
from epicute.decode.schedule import FewRowProblem, FewRowSchedule, Shared
from epicute.decode.sm90.multiply import Multiplier
from epicute.decode.sm90.ptx import fma, load_words, multiply_bytes, store_pair
from epicute.decode.sm90.stage import Activations
from epicute.epilogues.dsl import pure_asm
from epicute.layouts import split
from epicute.quant.dsl import WIDTH, Vector, unpack

__all__ = [
    "NIBBLES",
    "IntegerActivations",
    "IntegerMultiplier",
    "powers_of",
    "put_pair",
    "quad",
    "summed",
]

NIBBLES = 0x0F0F0F0F
MAGIC = 12582912.0
"""1.5 · 2^23: the sum of it and a number below 2^22 has the nearest integer in its low bits."""

EXPONENT = 14
"""Of the largest activation of a span, as an integer. A class may have its own."""

BATCH = 4
"""Vectors of a thread under way at once."""

EACH = 2
"""Adjacent vectors of a thread: a step of an MMA."""

VECTORS = 512
"""Bytes of one vector for each lane."""


class IntegerMultiplier(Multiplier):
    """A ``Multiplier`` of bytes."""

    def _group(self, at: Any, number: Any, index: Any, steps: range, columns: range) -> None:
        record, codes, vectors, x = at
        zeros = self._zeros(record, index)
        factors = x + Int32(self.shared.factor_place(number, 0)) + self.lane % 4 * 16
        found = {j: load_words(factors + j * 64) for j in columns}
        places = [(t, j) for t in range(self.row_tiles) for j in columns]
        high = {p: [Int32(0)] * 4 for p in places}
        low = {(t, j): self._origin(found[j], zeros, t) for t, j in places}
        loads: list[Any] = []
        for first in steps[::2]:
            block, step = divmod(first, 4)
            if step == 0 or first == steps[0]:
                loads = [self._loads(codes, block, t)[0] for t in range(self.row_tiles)]
            bytes_ = {j: self._half(vectors, block, j, step // 2) for j in columns}
            for t, words in enumerate(loads):
                pair = words[step : step + 2]
                a = [word for w in pair for word in (w & NIBBLES, w)]
                for j, b in bytes_.items():
                    high[t, j] = multiply_bytes(True, a, b[::2], high[t, j])
                    low[t, j] = multiply_bytes(False, a, b[1::2], low[t, j])
        scales = self._scales(record, index)
        for t, j in places:
            for e in range(2):
                sums = [high[t, j][2 * h + e] * 256 + low[t, j][2 * h + e] for h in range(2)]
                powers = powers_of(found[j][2 * e])
                for half, value in enumerate((sums[0], sums[1] - sums[0])):
                    at = self._register(t, j, 2 * half + e)
                    scaled = value.to(Float32) * powers[half]
                    self.sums[at] = fma(scales[t, half], scaled, self.sums[at])

    def _vectors(self, x: Any, first: Any) -> list[Any]:
        """Where a lane's integers are, of each pair of steps of block ``first`` and of the next: see
        ``integer_place``.
        """
        start = Int32(x) + Int32(first * (self.columns * 2 * VECTORS))
        slot = self.lane ^ split(first * 2, 8)[1]
        return [start + (slot ^ pair) * 16 for pair in range(4)]

    def _half(self, vectors: list[Any], block: int, column: int, half: int) -> list[Any]:
        """Two steps' words of eight rows of x: high bytes and low bytes of the first, and of the second."""
        pair = 2 * block + half
        return load_words(vectors[pair] + (pair * self.columns + column) * VECTORS)

    def _origin(self, found: list[Any], zeros: Any, t: int) -> list[Any]:
        """Where sums begin, so that zero points are taken out: rows g and g + 8, of two rows of x each.

        ``found``: for each of the two the power of two, as bits, and the sum of its integers.
        """
        both = zeros[t, 0] + 16 * zeros[t, 1]
        return [found[2 * e + 1] * -zero for zero in (zeros[t, 0], both) for e in range(2)]


class IntegerActivations(Activations):
    """Rows of x as bytes, with their factors; rows beyond M are left as they are.

    Some adjacent lanes take a span of a row.
    """

    exponent, middle = EXPONENT, 0
    """Of the largest activation of a span; what is added to every integer before it is cut in two bytes."""

    def __init__(self, problem: FewRowProblem, schedule: FewRowSchedule) -> None:
        super().__init__(problem, schedule)
        self.shared = Shared(problem, schedule)
        self.span = span_of(problem.record)
        self.lanes = self.span // WIDTH // EACH
        self.spans = problem.record.depth // self.span
        self.units = BATCH // EACH

    @cute.jit
    def copy(
        self,
        source: Int64,
        stride: Int64,
        gain: Int64,
        target: Int32,
        span: Any,
        live: Int32,
        thread: Int32,
    ) -> None:
        first, count = span
        warp, lane = split(thread, 32)
        spans = count * self.spans
        # A warp takes as many adjacent spans of a row as it has lanes for, then those that eight warps further do.
        at_once = 32 // self.lanes
        passes = split(spans + (at_once - 1), at_once)[0]
        # Of numbers so small a float32's product is right, and a division takes five times as long.
        each = pure_asm("rcp.rn.f32 $0, $1;", "=f,f", Float32, passes.to(Float32))
        live = cutlass.min(live, self.rows)
        place, inside = split(lane, self.lanes)
        for start in cutlass.range(warp, live * passes, WARPS * self.units, unroll=1):
            found = []
            for i in cutlass.range_constexpr(self.units):
                at = start + i * WARPS
                row = ((at.to(Float32) + 0.5) * each).to(Int32)
                mine = (at - row * passes) * at_once + place
                here = (at < live * passes) & (mine < spans)
                vectors = []
                for v in cutlass.range_constexpr(EACH):
                    vector = mine * (self.span // WIDTH) + (inside * EACH + v)
                    words = Vector(
                        first * self.vectors + vector, self.problem.depth, self.beyond, here
                    ).load(source + Int64(row) * stride)
                    # Gains at once with what they multiply: one wait for both.
                    gains = self._gains(gain, first * self.vectors + vector)
                    vectors.append((vector, words, gains))
                found.append((row, mine, here, vectors))
            for i in cutlass.range_constexpr(self.units):
                row, mine, here, vectors = found[i]
                some = Boolean(start + i * WARPS < live * passes)
                self._put_if(target, row, mine, here, vectors, inside, some)

    @cute.jit
    def _put_if(self, target, row, number, here, vectors, inside, some) -> None:
        """What a warp has loaded, where that is anything."""
        if some:
            self._put(target, row, number, here, vectors, inside)

    def _put(
        self, target: Any, row: Any, number: Any, here: Any, vectors: Any, inside: Any
    ) -> None:
        """A lane's vectors of a span as integers, and from the first lane their factors."""
        vectors = [(v, self._taken(words, gains)) for v, words, gains in vectors]
        largest = self._largest([words for _, words in vectors])
        distance = 1
        while distance < self.lanes:
            other = cute.arch.shuffle_sync_bfly(largest, distance)
            largest, distance = cutlass.max(largest, other), 2 * distance
        inverse, power = self._powers(largest)
        integers = [x for _, words in vectors for x in self._rounded(words, inverse)]
        step, in_chunk = split(vectors[0][0], self.vectors)
        step, in_chunk = step * self.shared.chunk, split(in_chunk, EACH)[0]
        total = Int32(0)
        for t in range(4):
            high, low = quad(integers, t)
            total = summed(low, "u32", 1, summed(high, "s32", 256, total))
            place = step + integer_place(row, in_chunk, t, self.rows)
            put_pair(target + place, high, low, Boolean(here))
        distance = 1
        while distance < self.lanes:
            total = total + cute.arch.shuffle_sync_bfly(total, distance)
            distance *= 2
        chunk, mine = split(number, self.spans)
        place = chunk * self.shared.chunk + self.shared.factor_place(mine, row)
        put_pair(target + place, power, total, Boolean(here) & (inside == 0))

    def _largest(self, vectors: list[Any]) -> Any:
        """Bits of the largest magnitude in vectors of words."""
        largest = Int32(0)
        for words in vectors:
            for i in range(WIDTH // 2):
                word = Int32(words[i]) & 0x7FFF7FFF
                largest = pure_asm("max.u16x2 $0, $1, $2;", "=r,r,r", Int32, largest, word)
        return cutlass.max(largest >> 16 & 0xFFFF, largest & 0xFFFF)

    def _powers(self, largest: Any) -> tuple[Any, Any]:
        """Bits of 2^(14 - e), ``exponent`` for 14, and of its inverse, of the bits of the largest magnitude, which has
        exponent e.
        """
        if self.problem.dtype == torch.float16:
            text = "{ .reg .b16 l, h; .reg .f32 x; mov.b32 {l, h}, $1; cvt.f32.f16 x, l; mov.b32 $0, x; }"
            bits = pure_asm(text, "=r,r", Int32, largest)
        else:
            bits = largest << 16
        exponent = cutlass.max(bits >> 23, self.exponent + 1)
        spoiled = exponent == 255
        power = cutlass.select_(spoiled, Int32(0x7FC00000), exponent - self.exponent << 23)
        return (254 + self.exponent - exponent) << 23, Int32(power)

    def _rounded(self, words: Any, inverse: Any) -> list[Any]:
        """Eight integers, in the low 16 bits of words."""
        factor = Int32(inverse).bitcast(Float32)
        lanes = unpack(words, self.problem.dtype)
        return [fma(x, factor, Float32(MAGIC + self.middle)).bitcast(Int32) for x in lanes]


def powers_of(bits: Any) -> tuple[Any, Any]:
    """The power of two of a row and span, and what sums of rows g + 8 take in its place: they are 16 times as large."""
    power = bits.bitcast(Float32)
    return power, power * Float32(1.0 / 16)


def quad(integers: list[Any], t: int) -> tuple[Any, Any]:
    """High and low bytes of a step's integers that quad lane ``t`` multiplies: 2t, 2t + 8, 2t + 1, 2t + 9, as codes
    stand in a word.
    """
    first, second = (
        permuted(integers[2 * t + i], integers[2 * t + 8 + i], 0x5140) for i in range(2)
    )
    return permuted(first, second, 0x7632), permuted(first, second, 0x5410)


def summed(bytes_: Any, kind: str, factor: int, total: Any) -> Any:
    """``total`` and ``factor`` times the sum of four bytes of ``kind``."""
    text = "{ .reg .b32 d; dp4a.%s.%s d, $1, 0x01010101, 0; mad.lo.s32 $0, d, %d, $2; }"
    return pure_asm(text % (kind, kind, factor), "=r,r,r", Int32, bytes_, total)


def permuted(a: Any, b: Any, selection: int) -> Any:
    """Four bytes of ``a`` (0 to 3) and ``b`` (4 to 7)."""
    return pure_asm(f"prmt.b32 $0, $1, $2, {selection:#x};", "=r,r,r", Int32, a, b)


@cute.jit
def put_pair(place: Int32, first: Int32, second: Int32, inside: Boolean) -> None:
    if inside:
        store_pair(place, first, second)
