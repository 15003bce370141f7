"""Keys in natural channel order, by way of a tile in shared memory (FuTransformer 4.6). Imports the DSL.

A warp expands its sixteen tokens' keys into float16, stores them as rows of a swizzled tile of its own, and reads the
fragments back by ldmatrix; queries are read in the same order. Everything else is the library's kernel: ring, softmax,
values, partial results.
"""

from __future__ import annotations

from typing import Any

from cutlass import Float32, Int32, cute

from epicute.attention.decode_fragments import TileLayout
from epicute.attention.sm90.decode_kernel import HopperDecode
from epicute.attention.sm90.decode_operands import Int4Operands, TableOperands, query_place
from epicute.attention.sm90.decode_ptx import (
    permute_bytes,
    shared_load,
    shared_store,
    shift_right,
)
from epicute.attention.sm90.decode_steps import DecodeSteps
from epicute.decode.sm90.ptx import load_matrices
from epicute.epilogues.dsl import pack_words
from epicute.layouts.kv_int4 import ZERO_CODE, nibble_of_channel

__all__ = ["HopperStaged"]

ROWS = 16
"""Tokens of a warp's tile."""


class Staged(Int4Operands):
    """Int4 operands whose keys pass through a tile. ``place``: where the warp's is."""

    joint, key_zero, lift = 1, 0.0, 1.0
    place: Any

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.layout = TileLayout(ROWS, 2 * self.spec.head_dim)
        row, half = self.lane % 8 + self.lane // 8 % 2 * 8, self.lane // 16
        self._row, self._turn = row * self.layout.chunk, self.layout.turn(row) ^ half

    def _expanded(self, word: Any) -> list[Any]:
        """Four words of float16: the eight channels of a word, in their order."""
        raise NotImplementedError

    def begin(self, stage: Any, slab: Any) -> None:
        super().begin(stage, slab)
        words = [self._key_words(2 * i) for i in range(self.run)]
        cute.arch.sync_warp()
        for i, both in enumerate(words):
            for half, word in enumerate(both):
                self._put(self.g + 8 * half, i, self._expanded(word))
        cute.arch.sync_warp()

    def _put(self, row: Any, i: int, words: list[Any]) -> None:
        """Store the ``i``-th eight channels of this lane's run."""
        unit = self.t * self.run + i
        shared_store(type(words[0]), self.place + self.layout.offset(row, unit), words)

    def key(self, step: int) -> list[Any]:
        unit = 2 * step
        moved = (self._turn ^ (unit % self.layout.units)) * 16
        return load_matrices(self.place + self._row + moved + self.layout.chunk_offset(unit))

    _put_query = Int4Operands._put_query

    def prepared(self, row: Any, step: int) -> list[list[Any]]:
        return [[self._pair(row, 16 * s + depth) for depth in (0, 8)] for s in (step, step + 1)]

    def _pair(self, row: Any, first: int) -> Any:
        """Two channels of a query, of the eight from ``first`` on."""
        place = query_place(self.t * 2 + first, self.spec.head_dim)
        return shared_load(Int32, row + place)[0]


class StagedTable(Staged, TableOperands):
    """By the table of byte codes; values by it too."""

    def _expanded(self, word: Any) -> list[Any]:
        # A byte holds channels 2 apart: of bytes 0 and 2 the first four, of 1 and 3 the others.
        codes = [self._looked_up(word, byte) for byte in range(4)]
        return [
            permute_bytes(codes[first], codes[first + 2], selection)
            for first in range(2)
            for selection in (0x5410, 0x7632)
        ]


class StagedNibbles(Staged):
    """Every nibble by itself: shifted, masked, converted, and 8 subtracted."""

    value_zeros = None

    def _expanded(self, word: Any) -> list[Any]:
        lanes = [number(word, 4 * nibble_of_channel(c)) for c in range(8)]
        return pack_words(lanes, "f16")

    def value(self, tile: int, kept: list[Any] | None) -> list[Any]:
        found = []
        for word in self.merged[tile // 4]:
            lanes = [number(word, 4 * (tile % 4) + half) for half in (0, 16)]
            found += pack_words(lanes, "f16")
        return found


def number(word: Any, shift: int) -> Any:
    """The nibble at a bit, as float32."""
    return (shift_right(word, shift) & 0xF).to(Float32) - float(ZERO_CODE)


class HopperStaged(HopperDecode):
    """The library's kernel with staged keys; by the table where the schedule has one."""

    def _resident(self) -> int:
        return 1

    def _areas(self) -> dict[str, int]:
        return {**super()._areas(), "staged": self.schedule.warps * self._bytes() // 4}

    def _bytes(self) -> int:
        """Of a warp's tile."""
        return ROWS * 2 * self.spec.head_dim

    def _steps(self, shared: dict[str, Any], warp: Any, lane: Any) -> DecodeSteps:
        kind = StagedTable if self.schedule.tabled else StagedNibbles
        given = (self.spec, self.schedule, lane)
        operands = kind(*given, shared["table"]) if self.schedule.tabled else kind(*given)
        operands.place = shared["staged"] + warp * self._bytes()
        return DecodeSteps(self.spec, self.schedule, shared, warp, lane, operands)
