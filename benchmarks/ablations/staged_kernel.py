"""Keys in natural channel order, by way of a tile in shared memory (FuTransformer 4.6). Imports the DSL.

A warp expands its sixteen tokens' keys into float16, stores them as rows of a swizzled tile of its own, and reads the
fragments back by ldmatrix; queries go the same way, once. Everything else is the library's kernel: ring, softmax,
values, partial results.
"""

from __future__ import annotations

from typing import Any

from cutlass import Float32, cute

from epicute.attention.decode_fragments import TileLayout
from epicute.attention.sm90.decode_kernel import HopperDecode
from epicute.attention.sm90.decode_operands import Int4Operands, TableOperands
from epicute.attention.sm90.decode_ptx import (
    load_matrices,
    permute_bytes,
    shared_store,
    shift_right,
)
from epicute.attention.sm90.decode_steps import DecodeSteps
from epicute.epilogues.dsl import pack_words
from epicute.layouts.kv_int4 import ZERO_CODE, nibble_of_channel

__all__ = ["HopperStaged"]

ROWS = 16
"""Tokens of a warp's tile."""


class Staged(Int4Operands):
    """Int4 operands whose keys pass through a tile. ``place``: where the warp's is."""

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
        rows = self._keys()
        cute.arch.sync_warp()
        for half, words in enumerate(rows):
            for i, word in enumerate(words):
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

    def query(self, address: Any, inside: Any) -> tuple[list[list[Any]], Any]:
        pairs, power = super().query(address, inside)
        words = [word for pair in pairs for word in pair]
        cute.arch.sync_warp()
        for i in range(self.run):
            self._put(self.g, i, words[4 * i : 4 * i + 4])
        cute.arch.sync_warp()
        found = []
        for step in range(0, self.steps, 2):
            unit = 2 * step + self.lane // 8
            some = load_matrices(self.place + self.layout.offset(self.lane % 8, unit))
            found += [some[:2], some[2:]]
        return found, power

    def _ordered(self, lanes: list[Any]) -> list[Any]:
        return lanes


class StagedTable(Staged, TableOperands):
    """By the table of byte codes; values by it too."""

    def _expanded(self, word: Any) -> list[Any]:
        # A byte holds channels 2 apart: of bytes 0 and 2 the first four, of 1 and 3 the others.
        codes = [self._looked_up(word, byte, 0) for byte in range(4)]
        return [
            permute_bytes(codes[first], codes[first + 2], selection)
            for first in range(2)
            for selection in (0x5410, 0x7632)
        ]


class StagedNibbles(Staged):
    """Every nibble by itself: shifted, masked, converted, and 8 subtracted."""

    def _expanded(self, word: Any) -> list[Any]:
        lanes = [number(word, 4 * nibble_of_channel(c)) for c in range(8)]
        return pack_words(lanes, "f16")

    def value(self, tile: int, kept: list[Any] | None) -> list[Any]:
        if not self.merged:
            self._load_values()
        found = []
        for word in self.merged[tile // 4]:
            lanes = [number(word, 4 * (tile % 4) + half) for half in (0, 16)]
            found += pack_words(lanes, "bf16")
        return found


def number(word: Any, shift: int) -> Any:
    """The nibble at a bit, as float32."""
    return (shift_right(word, shift) & 0xF).to(Float32) - float(ZERO_CODE)


class HopperStaged(HopperDecode):
    """The library's kernel with staged keys; by the table where the schedule has one."""

    def _areas(self) -> dict[str, int]:
        return {**super()._areas(), "staged": self.schedule.warps * self._bytes() // 4}

    def _bytes(self) -> int:
        """Of a warp's tile."""
        return ROWS * 2 * self.spec.head_dim

    def _steps(self, shared: dict[str, Any], warp: Any, lane: Any) -> DecodeSteps:
        steps = super()._steps(shared, warp, lane)
        kind = StagedTable if self.schedule.tabled else StagedNibbles
        given = (self.spec, self.schedule, lane)
        operands = kind(*given, shared["table"]) if self.schedule.tabled else kind(*given)
        operands.place = shared["staged"] + warp * self._bytes()
        steps.operands = operands
        return steps
