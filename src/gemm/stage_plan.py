"""Where staged operands stand in shared memory.

buffer:  [row operands: tile_m each] [unit 0: column operands of its range] [unit 1: …]      float32
         [cells: tile_m each]                                                             int64
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from epicute.epilogues.operands import (
    Cells,
    ColumnVector,
    HeadVector,
    Operand,
    Partials,
    PerHead,
    RowVector,
)
from epicute.epilogues.resolve import Domain, Resolved, Step

__all__ = ["ColumnOperand", "StagePlan"]

ALIGN = 8
"""Elements to which column operands are rounded up, so that lanes read whole vectors."""


@dataclass(frozen=True)
class ColumnOperand:
    """A staged column operand of one range: ``slots`` float32 per unit, from ``offset`` in the unit's region."""

    name: str
    kind: Operand
    domain: Domain
    first_column: int
    offset: int
    slots: int

    def element(self, index: Any, slot: Any) -> Any:
        """Element of the operand at ``slot`` of unit ``index`` of the range."""
        if isinstance(self.kind, PerHead):
            return index * self.slots + slot
        column = self.domain.column(index, slot)
        if isinstance(self.kind, HeadVector):
            return (column + self.first_column) % self.kind.length
        return column + self.first_column


class StagePlan:
    """Where everything stands in a buffer."""

    def __init__(self, resolved: Resolved) -> None:
        self.unit = resolved.order.unit
        self.rows: dict[str, int] = {}
        self.cells: dict[str, tuple[int, str]] = {}
        self.columns: list[dict[str, ColumnOperand]] = []
        self.region = 0
        for span in resolved.ranges:
            found: dict[str, ColumnOperand] = {}
            offset = 0
            for step in span.steps:
                for local, kind in step.policy.operands.items():
                    offset = self._add(step, local, kind, found, offset)
            self.columns.append(found)
            self.region = max(self.region, offset)

    def _add(
        self, step: Step, local: str, kind: Operand, found: dict[str, ColumnOperand], offset: int
    ) -> int:
        name = step.names[local]
        if isinstance(kind, (ColumnVector, Partials)):
            self.rows.setdefault(name, len(self.rows))
        elif isinstance(kind, Cells):
            self.cells.setdefault(name, (len(self.cells), step.names[kind.slots]))
        elif isinstance(kind, (RowVector, HeadVector, PerHead)) and name not in found:
            domain = step.split.domain if step.split else step.domain
            slots = domain.unit // kind.head_dim if isinstance(kind, PerHead) else domain.unit
            found[name] = ColumnOperand(name, kind, domain, step.first_column, offset, slots)
            return offset + -(-slots // ALIGN) * ALIGN
        return offset

    @property
    def bytes(self) -> tuple[int, int]:
        """Bytes of one buffer: per tile row, per unit."""
        return 4 * len(self.rows) + 8 * len(self.cells), 4 * self.region

    @property
    def empty(self) -> bool:
        """Whether nothing is staged."""
        return not (self.rows or self.cells or self.region)

    def floats(self, tile_m: int, tile_n: int) -> int:
        """Float32 elements of one buffer, rounded to whole vectors."""
        count = len(self.rows) * tile_m + self.region * (tile_n // self.unit)
        return -(-count // 32) * 32

    def integers(self, tile_m: int) -> int:
        """Int64 elements of one buffer."""
        return len(self.cells) * tile_m
