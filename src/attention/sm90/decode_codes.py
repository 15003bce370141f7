"""Keys that are multiplied as integers, and the choice of a cache's operands. Imports the DSL."""

from __future__ import annotations

from typing import Any

import cutlass
from cutlass import Boolean, Float32, Int32, cute

from epicute.attention.decode_schedule import DecodeSchedule
from epicute.attention.decode_spec import DecodeSpec
from epicute.attention.sm90.decode_operands import (
    Fp8Operands,
    HalfOperands,
    Int4Operands,
    Operands,
    TableOperands,
    query_place,
)
from epicute.attention.sm90.decode_ptx import permute_bytes, shared_store
from epicute.attention.sm90.softmax import fma
from epicute.epilogues.dsl import pure_asm
from epicute.quant.dsl import magnitude

__all__ = ["CodeOperands", "operands_of"]

QUERY_UNIT = 15000.0
"""Of a query between -2 and 2: 17/16 of its largest integer still has 16 bits."""


class CodeOperands(Int4Operands):
    """Records of nibbles that are hardly unpacked: two channels that share a byte, 16h + l, are taken together.

        keys      bytes as they are, and their low nibbles, are unsigned 8-bit operands of integer products, which are
                  exact. h · a + l · b = (16h + l) · a/16 + l · (b - a/16): a query has a factor of bytes and one of low
                  nibbles, of 16 bits each, in two planes of signed bytes
        values    bytes and low nibbles are float16 by a mask: u at bit 0 of a half is u · 2^-24, subnormal, and as
                  exact as others. Outputs of h are what is left of those of bytes, at the end of a piece

    The nibble of the value 0, 8, is taken out of sums: of logits where they begin, of outputs at the end of a piece, by
    products of the same exponentials with nothing but eights, and with nothing but bytes of two (``value_zeros``).
    Sums of both kinds then have one of nearly their own size beside them, from which what the tensor core cuts off at
    each step differs little: over a million tokens that is more than outputs of mean 0.
    """

    joint, codes = 2, True
    value_zeros: tuple[int, int] | None = (0x00080008, 0x00880088)

    def key_codes(self, step: int) -> list[Any]:
        """The A operand of step ``step`` of low nibbles; of the same channels' bytes, as many steps further."""
        low, half = divmod(step, self.run // 2)
        words = [row[w] for w in range(2) for row in self._key_pairs(half)]
        return words if low else [w & 0x0F0F0F0F for w in words]

    def _key_pairs(self, half: int) -> list[list[Any]]:
        """Two words of each of the two tokens."""
        if self.run == 2:
            return [a + b for a, b in zip(self._keys(0), self._keys(1), strict=True)]
        return self._keys(half)

    def value(self, tile: int, kept: list[Any] | None) -> list[Any]:
        # Codes are finite whatever memory holds, and need no mask.
        words = self.merged[tile // 4]
        if tile % 4 > 1:
            words = [permute_bytes(w, Int32(0), 0x4341) for w in words]
        if tile % 4 != 3:
            words = [w & (0x00FF00FF if tile % 2 else 0x000F000F) for w in words]
        return words

    def prepare(
        self, address: Any, inside: Any, scale: Any, row: Any, levels: Any, mine: Any
    ) -> None:
        lanes = self._rotated(address, inside)
        infinite = Boolean(False)
        for x in lanes:
            infinite = infinite | (magnitude(x, -1.0) < 0.0)
        lanes, power = self._normalised(lanes, (1, 2, 4, 8, 16), QUERY_UNIT)
        # Integers have no NaN.
        spoiled = cute.arch.vote_any_sync(Boolean(infinite))
        power = Float32(cutlass.select_(spoiled, Float32(float("nan")), power))
        four, last = lanes, Boolean(True)
        if len(lanes) == 2:
            # Neighbours have the two halves of a byte's channels; either makes all.
            other = [cute.arch.shuffle_sync_bfly(x, 1) for x in lanes]
            last = Boolean(self.lane % 2 == 1)
            both = [(x, y) for x, y in zip(lanes, other, strict=True)]
            four = [Float32(cutlass.select_(last, y, x)) for x, y in both]
            four += [Float32(cutlass.select_(last, x, y)) for x, y in both]
        high = [_rounded(x) for x in four[2:]]
        low = [
            _rounded(fma(h.to(Float32), -1.0 / 16.0, x)) for x, h in zip(four, high, strict=False)
        ]
        origin = (high[0] + high[1]) * 136 + (low[0] + low[1]) * 128
        origin = Int32(cutlass.select_(last, origin, Int32(0)))
        origin = cute.arch.warp_redux_sync(origin, "add")
        self._put_planes(row, low, high)
        self.put_levels(levels, mine, power * scale * (1.0 / (16.0 * QUERY_UNIT)), -origin)

    def _put_planes(self, row: Any, low: list[Any], high: list[Any]) -> None:
        """Store factors of two bytes: those of a word are in lanes beside each other."""
        distance = 4 // self.run
        place = self.lane // distance
        word, second = place // 2, place % 2
        words = []
        for pair in (low, high):
            upper = [x + 128 >> 8 for x in pair]
            for plane in (upper, pair):
                some = plane[0] & 0xFF | (plane[1] & 0xFF) << 16
                some = some << 8 * second
                words.append(some | cute.arch.shuffle_sync_bfly(some, distance))
        t, w = word // self.run, word % self.run
        start = row + query_place(t * (self.spec.head_dim // 4), self.spec.head_dim)
        first = start + (w // 2 * 16 + w % 2 * 4)
        _store_planes(first, words, 8 * self.run, Boolean(self.lane % (2 * distance) == 0))


@cute.jit
def _store_planes(
    first: Int32, words: list, further: cutlass.Constexpr, condition: Boolean
) -> None:
    """Two planes of low nibbles' factors, and ``further`` of bytes'."""
    if condition:
        for i in cutlass.range_constexpr(4):
            shared_store(Int32, first + (i // 2 * further + i % 2 * 8), [words[i]])


def _rounded(x: Any) -> Any:
    """The nearest integer."""
    return pure_asm("cvt.rni.s32.f32 $0, $1;", "=r,f", Int32, x)


def operands_of(spec: DecodeSpec, schedule: DecodeSchedule, lane: Any, table: Any) -> Operands:
    """The operands of a spec's cache. ``table``: address of the tables, where the schedule has them."""
    if schedule.tabled:
        return TableOperands(spec, schedule, lane, table)
    if spec.packed:
        return CodeOperands(spec, schedule, lane)
    return (Fp8Operands if spec.cache == "fp8" else HalfOperands)(spec, schedule, lane)
