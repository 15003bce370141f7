"""The order in which a packed weight keeps its output features.

A WGMMA accumulator gives a quad lane t (t < 4) the columns 8i + 2t + e (e < 2) of its n8 blocks i.
Physical row 8i + 2t + e of a chunk therefore holds feature 2It + 2i + e, where the chunk has I
blocks (32, 16 or 8 rows): the lane owns 2I adjacent features. Paired streams (gate and up, the
halves of a RoPE head) alternate block by block, so that both members of a pair meet in one lane.

    one chunk of 32, single                     one chunk of 2 x 32, paired
    block   lane 0   lane 1   lane 2   lane 3   block  stream   lane 0 ...
      0      0  1     8  9    16 17    24 25      0    first     0  1
      1      2  3    10 11    18 19    26 27      1    second    0  1
      2      4  5    12 13    20 21    28 29      2    first     2  3
      3      6  7    14 15    22 23    30 31      3    second    2  3  ...

The order never depends on the tile. Only the packer and the epilogue driver know it; operands,
references and outputs are in logical order.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import cached_property
from math import lcm
from typing import Any

import numpy as np

from epicute.errors import require

__all__ = ["CHUNKS", "Piece", "Range", "RowOrder", "chunk_feature", "chunks_of"]

CHUNKS = (32, 16, 8)
"""Chunk sizes in rows; a stream uses the largest that fits, over and over."""

KINDS = ("single", "halves", "heads")


def chunk_feature(row: Any, chunk: int) -> Any:
    """Feature of a chunk held by its physical ``row``; int, NumPy array or DSL integer alike."""
    blocks = chunk // 8
    return row % 8 // 2 * (2 * blocks) + row // 8 * 2 + row % 2


def chunks_of(columns: int) -> Iterator[tuple[int, int]]:
    """Cut a stream of ``columns`` (a multiple of 8) into (start, size) chunks of 32, 16 and 8."""
    start = 0
    for size in CHUNKS:
        while columns - start >= size:
            yield start, size
            start += size


@dataclass(frozen=True)
class Piece:
    """What one quad lane t holds of one chunk: ``lanes`` adjacent columns of a unit.

    Attributes:
        column: first column of lane 0, counted in the unit's own logical order (see
            ``Range.unit_column``); lane t starts at ``column + lanes * t``.
        lanes: adjacent columns per quad lane: 8, 4 or 2.
        blocks: the n8 blocks of the unit that hold them, two columns each.
        member: 0 for the first of a pair, 1 for the second, None where unpaired.
        pair: index of the first column among the unit's pairs; None where unpaired.
    """

    column: int
    lanes: int
    blocks: tuple[int, ...]
    member: int | None = None
    pair: int | None = None


def _single(columns: int, base: int, block: int) -> Iterator[Piece]:
    for start, size in chunks_of(columns):
        count = size // 8
        yield Piece(base + start, size // 4, tuple(range(block, block + count)))
        block += count


def _paired(pairs: int, first: int, second: int, pair: int, block: int) -> Iterator[Piece]:
    for start, size in chunks_of(pairs):
        count = size // 8
        both = tuple(range(block, block + 2 * count))
        yield Piece(first + start, size // 4, both[0::2], 0, pair + start)
        yield Piece(second + start, size // 4, both[1::2], 1, pair + start)
        block += 2 * count


@dataclass(frozen=True)
class Range:
    """Consecutive logical columns that share one order.

    kind ``single``: columns on their own. ``halves``: column j pairs with j + columns/2. ``heads``:
    inside each head of ``head_dim`` columns, channel j pairs with j + rotary_dim/2 for
    j < rotary_dim/2; the rest stand alone.
    """

    kind: str
    columns: int
    head_dim: int = 0
    rotary_dim: int = 0

    def __post_init__(self) -> None:
        require(self.kind in KINDS, "kind", self.kind, f"one of {KINDS}", "name a known order")
        require(self.columns > 0, "columns", self.columns, "a positive count", "drop empty ranges")
        if self.kind == "halves":
            require(
                self.columns % 2 == 0,
                "columns",
                self.columns,
                "an even count (two equal streams)",
                "give both streams the same width",
            )
        if self.kind != "heads":
            require(
                self.head_dim == self.rotary_dim == 0,
                "head_dim",
                (self.head_dim, self.rotary_dim),
                f"0 and no rotary_dim for kind {self.kind!r}",
                "use kind 'heads'",
            )
        else:
            require(
                self.head_dim > 0 and self.columns % self.head_dim == 0,
                "head_dim",
                self.head_dim,
                f"a divisor of the range's {self.columns} columns",
                "give whole heads",
            )
            require(
                self.head_dim % 16 == 0 and self.head_dim <= 256,
                "head_dim",
                self.head_dim,
                "a multiple of 16 up to 256",
                "pad the head",
            )
            require(
                0 <= self.rotary_dim <= self.head_dim and self.rotary_dim % 16 == 0,
                "rotary_dim",
                self.rotary_dim,
                f"a multiple of 16 from 0 to head_dim={self.head_dim}",
                "round the rotary dimension",
            )

    @property
    def smallest_unit(self) -> int:
        """Physical rows that one tile must hold for the range's pairs and vectors to be whole."""
        return {"single": 32, "halves": 64, "heads": self.head_dim}[self.kind]

    def rows(self, unit: int) -> int:
        """Physical rows, padded to whole units."""
        return -(-self.columns // unit) * unit

    def pieces(self, unit: int) -> tuple[Piece, ...]:
        """What a quad lane holds of one unit, in the unit's logical order."""
        if self.kind == "single":
            found = list(_single(unit, 0, 0))
        elif self.kind == "halves":
            found = list(_paired(unit // 2, 0, unit // 2, 0, 0))
        else:
            found = []
            half, head = self.rotary_dim // 2, self.head_dim
            for h in range(unit // head):
                base, block = h * head, h * head // 8
                found += _paired(half, base, base + half, h * half, block)
                found += _single(head - 2 * half, base + 2 * half, block + half // 4)
        return tuple(sorted(found, key=lambda piece: piece.column))

    def unit_column(self, index: Any, slot: Any, unit: int) -> Any:
        """Logical column of the range at ``slot`` of unit ``index``.

        Works on int, NumPy and DSL integers. For ``halves`` the first unit/2 slots are first
        members. Where the row is padding (see ``valid``) the result is past the end, or, for
        ``halves``, a column of the other member.
        """
        if self.kind != "halves":
            return index * unit + slot
        half = unit // 2
        return index * half + slot % half + slot // half * (self.columns // 2)

    def valid(self, index: Any, slot: Any, unit: int) -> Any:
        """Whether that slot is a column and not padding; NumPy arrays or ints."""
        if self.kind != "halves":
            return index * unit + slot < self.columns
        return index * (unit // 2) + slot % (unit // 2) < self.columns // 2


@dataclass(frozen=True)
class RowOrder:
    """Physical order of all output features of a packed weight, and where padding stands.

    Each range is padded with zero rows to whole units, and a tile is a multiple of the unit.
    """

    ranges: tuple[Range, ...]
    unit: int

    def __post_init__(self) -> None:
        require(
            len(self.ranges) > 0, "ranges", self.ranges, "at least one range", "name the columns"
        )
        smallest = lcm(*(r.smallest_unit for r in self.ranges))
        require(
            self.unit > 0 and self.unit % smallest == 0,
            "unit",
            self.unit,
            f"a multiple of {smallest} (the ranges' pairs and heads)",
            f"use unit={smallest}",
        )

    @staticmethod
    def plain(columns: int) -> RowOrder:
        """The order of a composition without pairs or heads."""
        return RowOrder((Range("single", columns),), 32)

    @cached_property
    def columns(self) -> int:
        """Logical output features N."""
        return sum(r.columns for r in self.ranges)

    @cached_property
    def rows(self) -> int:
        """Physical rows, padding included."""
        return sum(r.rows(self.unit) for r in self.ranges)

    def starts(self) -> tuple[tuple[int, int], ...]:
        """(first physical row, first logical column) of every range."""
        found, row, column = [], 0, 0
        for r in self.ranges:
            found.append((row, column))
            row, column = row + r.rows(self.unit), column + r.columns
        return tuple(found)

    def logical(self) -> np.ndarray:
        """(rows,) int64: logical column of each physical row, -1 for padding."""
        parts = []
        for r, (_, column) in zip(self.ranges, self.starts(), strict=True):
            slots = _slots(r.pieces(self.unit), self.unit)
            index = np.arange(r.rows(self.unit) // self.unit)[:, None]
            found = r.unit_column(index, slots[None, :], self.unit) + column
            parts.append(np.where(r.valid(index, slots[None, :], self.unit), found, -1).ravel())
        return np.concatenate(parts).astype(np.int64)

    def physical(self) -> np.ndarray:
        """(columns,) int64: physical row of each logical column."""
        logical = self.logical()
        rows = np.nonzero(logical >= 0)[0]
        found = np.empty(self.columns, np.int64)
        found[logical[rows]] = rows
        return found

    def to_json(self) -> str:
        """Text that ``from_json`` turns back into an equal order."""
        return json.dumps(
            {"ranges": [asdict(r) for r in self.ranges], "unit": self.unit}, sort_keys=True
        )

    @staticmethod
    def from_json(text: str) -> RowOrder:
        """Inverse of ``to_json``."""
        found = json.loads(text)
        return RowOrder(tuple(Range(**r) for r in found["ranges"]), found["unit"])

    def __str__(self) -> str:
        parts = ", ".join(
            f"{r.kind} {r.columns}"
            + (f" (heads of {r.head_dim}, rotary {r.rotary_dim})" if r.kind == "heads" else "")
            for r in self.ranges
        )
        return f"{parts}; unit {self.unit}, {self.rows} rows for {self.columns} columns"


def _slots(pieces: tuple[Piece, ...], unit: int) -> np.ndarray:
    """(unit,) slot of each physical row of a unit."""
    slots = np.full(unit, -1, np.int64)
    for piece in pieces:
        for i, block in enumerate(piece.blocks):
            for t in range(4):
                for e in range(2):
                    slots[block * 8 + 2 * t + e] = piece.column + piece.lanes * t + 2 * i + e
    return slots
