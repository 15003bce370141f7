"""INT4 weights times 16-bit integers by a warpgroup: A from registers, bytes of x by descriptor. Imports the DSL.

What ``integers`` does with `mma.sync`, of activations that TMA has brought: they become integers where they are, once
for all tiles. Both bytes of an integer are signed here, and so are columns of one product:

    brought         blocks of 64 k, in them rows of 128 bytes, whose 16-byte vectors the 128-byte swizzle exchanges
    turned          pairs of blocks: rows of 128 high bytes, and behind them rows of 128 low bytes, swizzled alike
    B               of a pair, 2 · rows columns: sums with the high bytes, then sums with the low bytes
    A               row g: word & 0x0F0F0F0F, row g + 8: the word itself, as in ``integers``

x = 256 h + l, both within a byte, needs one bit of room: the power of two of a span makes its largest 2^13 to 2^14.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import cutlass
from cutlass import Boolean, Float32, Int32, cute

from epicute.decode.geometry import span_of, vector_place
from epicute.decode.sm90.integers import (
    NIBBLES,
    IntegerActivations,
    powers_of,
    put_pair,
    quad,
    summed,
)
from epicute.decode.sm90.ptx import (
    fma,
    load_words,
    signed,
    store_words,
    wgmma_bytes,
    wgmma_commit,
    wgmma_descriptor,
    wgmma_fence,
    wgmma_wait,
)
from epicute.decode.sm90.warpgroup import STEP_BYTES, UNIT, WarpgroupMultiplier
from epicute.layouts import BLOCK, split
from epicute.quant.dsl import WIDTH

__all__ = ["IntegerWarpgroupMultiplier", "TurnedActivations"]

PAIR = 2
"""Blocks of 64 k whose bytes are rows of 128."""

LANE = 4
"""Vectors of a lane: 32 k of a row, which no span cuts."""

SIGN = 0x80808080


class TurnedActivations(IntegerActivations):
    """Makes integers of x where TMA has brought it: a warp of eight rows and 128 k at a time, a lane of 32 k of a row.

    Zeros beyond M and K become zeros.
    """

    exponent, middle = 13, 128

    @property
    def turns(self) -> int:
        """Warps' shares of a chunk."""
        return self.problem.record.blocks // PAIR * (self.rows // 8)

    def turn(self, shares: list[tuple[Any, Any]], lane: Any) -> None:
        """Turn shares of chunks, each an address and ``unit``-th of ``turns``: in turns, as one has to wait often."""
        turned = [self._integers(chunk, unit, lane) for chunk, unit in shares]
        # What other lanes read is written over.
        cute.arch.sync_warp()
        for store in turned:
            store()

    def _integers(self, chunk: Any, unit: Any, lane: Any) -> Callable[[], None]:
        """The integers of a share; to call where they may be stored."""
        pair, eight = split(unit, self.rows // 8)
        quarter, inside = split(lane, 8)
        row, half = eight * 8 + inside, split(quarter, 2)
        blocks = [
            Int32(chunk) + Int32(vector_place(row, (pair * PAIR + b) * 8, self.rows))
            for b in range(PAIR)
        ]
        mine = cutlass.select_(half[0] == 0, blocks[0], blocks[1])
        vectors = [load_words(Int32(mine) ^ (half[1] * 64 + v * 16)) for v in range(LANE)]
        lanes = self.span // (WIDTH * LANE)
        largest = self._largest(vectors)
        for step in range(lanes.bit_length() - 1):
            largest = cutlass.max(largest, cute.arch.shuffle_sync_bfly(largest, 8 << step))
        inverse, power = self._powers(largest)
        total, kept = Int32(0), []
        for which in range(LANE // 2):
            some = vectors[2 * which : 2 * which + 2]
            integers = [x for v in some for x in self._rounded(v, inverse)]
            quads = [quad(integers, t) for t in range(4)]
            planes = [[high for high, _ in quads], [low ^ signed(SIGN) for _, low in quads]]
            for factor, start, words in zip((256, 1), blocks, planes, strict=True):
                for word in words:
                    total = summed(word, "s32", factor, total)
                kept.append((start ^ (quarter * 32 + which * 16), words))

        def store() -> None:
            for place, words in kept:
                store_words(place, fragment(words))
            whole = total
            for step in range(lanes.bit_length() - 1):
                whole = whole + cute.arch.shuffle_sync_bfly(whole, 8 << step)
            spans = PAIR * BLOCK // self.span
            span = pair * spans + split(quarter, lanes)[0]
            place = Int32(chunk) + Int32(self.shared.factor_place(span, row))
            put_pair(place, power, whole, Boolean(split(quarter, lanes)[1] == 0))

        return store


class IntegerWarpgroupMultiplier(WarpgroupMultiplier):
    """A ``WarpgroupMultiplier`` of bytes: a span's products run while the sums of the one before are scaled."""

    def run(self, record: Int32, x: Int32, which: int = 0, piece: int = 0) -> None:
        """Multiply the record at ``record`` with the activations at ``x``."""
        self.which = which
        codes = Int32(record) + Int32(self.record.load_offset(0, self.part, 0, self.lane))
        rows = wgmma_descriptor(Int32(x))
        span = span_of(self.record)
        before: tuple[int, list[Any]] | None = None
        words = self._words(codes, 0, span)
        for number in range(self.record.depth // span):
            mine, last = words, (number + 1) * span == self.record.depth
            if not last:
                words = self._words(codes, (number + 1) * span, span)
            sums = self._products(mine, rows, number * span)
            self._scaled(record, x, before, 1)
            before = number, sums
        self._scaled(record, x, before, 0)

    def _words(self, codes: Any, first: int, count: int) -> list[Any]:
        """Codes of ``count`` k from the ``first`` on."""
        words = []
        for block in range(first // BLOCK, -(-(first + count) // BLOCK)):
            words += self._loads(codes, block, 0)[0]
        start = first % BLOCK // 16
        return words[start : start + count // 16]

    def _products(self, words: list[Any], rows: Any, first: int) -> list[Any]:
        """Begin the products of codes from k ``first`` on."""
        found = [a for word in words for a in (word & NIBBLES, word)]
        found, sums = wgmma_fence(found, None)
        for i in range(0, 16 * len(words), 32):
            pair, within = divmod(first + i, PAIR * BLOCK)
            b = rows + (pair * PAIR * self.block_bytes + within // 32 * STEP_BYTES) // UNIT
            sums = wgmma_bytes(found[i // 8 : i // 8 + 4], b, 2 * self.schedule.rows, sums)
        wgmma_commit()
        assert sums is not None
        return sums

    def _scaled(
        self, record: Any, x: Any, before: tuple[int, list[Any]] | None, pending: int
    ) -> None:
        """Wait for a span's sums, take zero points' share out, and add them to the band's."""
        if before is None:
            return
        number, sums = before
        index = number if self.record.group != self.record.depth else 0
        scales, zeros = self._scales(record, index), self._zeros(record, index)
        factors = Int32(x) + Int32(self.shared.factor_place(number, 0)) + self.lane % 4 * 16
        found = [load_words(factors + j * 64) for j in range(self.columns)]
        sums = wgmma_wait(pending, sums)
        both = zeros[0, 0] + 16 * zeros[0, 1]
        for j in range(self.columns):
            for e in range(2):
                powers, total = powers_of(found[j][2 * e]), found[j][2 * e + 1]
                values = []
                for half, zero in enumerate((zeros[0, 0], both)):
                    at = 4 * j + 2 * half + e
                    low = sums[4 * self.columns + at] - total * zero
                    values.append(sums[at] * 256 + low)
                for half, value in enumerate((values[0], values[1] - values[0])):
                    at = self._register(0, j, 2 * half + e)
                    scaled = value.to(Float32) * powers[half]
                    self.sums[at] = fma(scales[0, half], scaled, self.sums[at])


def fragment(words: list[Any]) -> Any:
    """Words as a register fragment."""
    found = cute.make_rmem_tensor(len(words), Int32)
    for i, word in enumerate(words):
        found[i] = word
    return found
