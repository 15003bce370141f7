"""The kernel's epilogue driver in NumPy: 128 threads of a warpgroup in lockstep, one array a register.

It has what the device has: accumulator registers where WGMMA leaves them, a packed weight's row order,
blocks and steps of ``resolve``, staged column operands, shuffles within a quad, stores by column. What
it computes must equal ``evaluate`` bit for bit. Padding holds NaN here, where the device has zeros, so
that any use of it shows; every output element must be written exactly once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from epicute.epilogues import Composition
from epicute.epilogues.context import ROUNDING, Context, run_body
from epicute.epilogues.numpy_ops import NUMPY_OPERATIONS
from epicute.epilogues.operands import (
    Cells,
    ColumnVector,
    Counter,
    Matrix,
    Maximum,
    Operand,
    Output,
    Partials,
    PartialsOutput,
    PerHead,
    Scalar,
)
from epicute.epilogues.policy import Pairwise
from epicute.epilogues.resolve import Domain, Resolved, Step, resolve
from epicute.epilogues.values import Value
from epicute.gemm.stage_plan import StagePlan
from epicute.layouts import WGMMA_ROWS, WGMMA_THREADS, accumulator_coord

__all__ = ["emulate"]

THREADS = np.arange(WGMMA_THREADS)
QUAD_LANE = THREADS % 4
Lanes = list[Any]


def _lifted(function: Callable[..., Any]) -> Callable[..., Lanes]:
    """A function on arrays over lists of lanes; a list of one is broadcast, as in the kernel."""

    def call(*arguments: Any) -> Lanes:
        lists = [a if isinstance(a, list) else [a] for a in arguments]
        count = max(map(len, lists))
        return [function(*(x[i] if len(x) > 1 else x[0] for x in lists)) for i in range(count)]

    return call


LANE_OPERATIONS = {name: _lifted(function) for name, function in NUMPY_OPERATIONS.items()}


def emulate(
    composition: Composition, acc: torch.Tensor, operands: dict[str, Any], units: int = 1
) -> dict[str, torch.Tensor]:
    """Outputs by name, as ``evaluate`` returns them; tiles are ``units`` units wide."""
    resolved = resolve(composition, acc.shape[1])
    memory = _Memory.of(resolved, acc.shape[0], operands)
    unit = resolved.order.unit
    for first in range(0, resolved.order.rows, unit * units):
        for top in range(0, acc.shape[0], WGMMA_ROWS):
            registers = _tile(resolved, acc.numpy(), top, first, unit * units)
            for u in range(units):
                _unit(resolved, memory, registers, top, u, first // unit + u)
    return memory.results()


def _tile(resolved: Resolved, acc: np.ndarray, top: int, first: int, width: int) -> Lanes:
    """Registers of the tile at row ``top`` and physical row ``first`` of the weight; NaN in padding."""
    tile = np.full((WGMMA_ROWS, width), np.nan, np.float32)
    logical = resolved.order.logical()[first : first + width]
    rows = acc[top : top + WGMMA_ROWS]
    held = np.nonzero(logical >= 0)[0]
    tile[: len(rows), held] = rows[:, logical[held]]
    return [tile[accumulator_coord(THREADS, r)] for r in range(width // 2)]


def _unit(
    resolved: Resolved, memory: _Memory, registers: Lanes, top: int, u: int, unit: int
) -> None:
    for r, span in enumerate(resolved.ranges):
        index = unit - span.first_unit
        if not 0 <= index < span.units:
            continue
        for half in range(2):
            row = top + accumulator_coord(THREADS, 2 * half)[0]
            place = _Place(memory, r, index, row)
            base = u * (resolved.order.unit // 8) * 4 + 2 * half
            lanes = [
                registers[base + 4 * b + e] for p in span.pieces for b in p.blocks for e in (0, 1)
            ]
            for step in span.head:
                lanes = _step(step, lanes, place)
            for block in span.blocks:
                found = [lanes[i] for i in block.lanes]
                for step in block.steps:
                    found = _step(step, found, place)


def _step(step: Step, lanes: Lanes, place: _Place) -> Lanes:
    if not isinstance(step.policy, Pairwise):
        ctx = LaneContext(step, step.domain, place)
        out = run_body(ctx, Value(lanes, LANE_OPERATIONS))
        return lanes if out is None else _widen(out.raw, len(lanes))
    split = step.split
    assert split is not None
    if not split.first:
        return lanes
    ctx = LaneContext(step, split.domain, place)
    pair = [Value([lanes[i] for i in s], LANE_OPERATIONS) for s in (split.first, split.second)]
    out = run_body(ctx, *pair)
    if isinstance(out, Value):
        return _widen(out.raw, len(split.first))
    found = list(lanes)
    for at, value in zip((split.first, split.second), out, strict=True):
        for i, lane in zip(at, _widen(value.raw, len(at)), strict=True):
            found[i] = lane
    return found


def _widen(raw: Lanes, count: int) -> Lanes:
    found = raw if len(raw) == count else raw * count
    return [np.broadcast_to(x, THREADS.shape) for x in found]


@dataclass
class _Memory:
    """Operands as arrays, outputs, and how often each of their elements was written."""

    resolved: Resolved
    rows: int
    given: dict[str, Any]
    out: dict[str, Any] = field(default_factory=dict)
    writes: dict[str, np.ndarray] = field(default_factory=dict)
    shuffled: bool = False

    @staticmethod
    def of(resolved: Resolved, rows: int, given: dict[str, Any]) -> _Memory:
        made = _Memory(resolved, rows, given)
        for name, kind in resolved.kinds.items():
            if isinstance(kind, Output | PartialsOutput):
                shape = [rows if d == "M" else int(d) for d in resolved.shapes[name]]
                made.out[name] = np.zeros(shape, np.float32)
                made.writes[name] = np.zeros(shape, np.int64)
            elif isinstance(kind, Cells):
                made.out[name] = given[name].to(torch.float32).numpy().copy()
            elif isinstance(kind, Maximum | Counter):
                start = given.get(name)
                made.out[name] = np.zeros(1) if start is None else start.numpy().copy()
        return made

    def array(self, name: str) -> np.ndarray:
        return np.asarray(torch.as_tensor(self.given[name]).to(torch.float32).numpy())

    def slots(self, name: str) -> np.ndarray:
        return np.asarray(self.given[name].numpy())

    def write(self, name: str, row: np.ndarray, column: np.ndarray, x: Any, on: np.ndarray) -> None:
        values = np.broadcast_to(x, THREADS.shape)
        self.out[name][row[on], column[on]] = values[on]
        np.add.at(self.writes[name], (row[on], column[on]), 1)

    def results(self) -> dict[str, torch.Tensor]:
        for name, count in self.writes.items():
            assert (count == 1).all(), f"{name}: elements written {np.unique(count)} times"
        found = {}
        for name, value in self.out.items():
            dtype = self.resolved.kinds[name].dtype
            found[name] = torch.from_numpy(np.asarray(value)).to(dtype)
        return found


class _Place:
    """One row of a unit in every thread."""

    def __init__(self, memory: _Memory, r: int, index: int, row: np.ndarray) -> None:
        self.memory, self.index, self.row = memory, index, row
        self.live = row < memory.rows
        self.safe_row = np.minimum(row, memory.rows - 1)
        self.columns = StagePlan(memory.resolved).columns[r]

    def staged(self, name: str) -> np.ndarray:
        """A column operand as the staging warps leave it for this unit."""
        operand = self.columns[name]
        values = self.memory.array(name)
        slots = np.arange(operand.slots)
        at = operand.element(self.index, slots)
        if isinstance(operand.kind, PerHead):
            live = at < len(values)
        else:
            remaining = operand.domain.remaining(self.index, slots)
            live = np.full(len(slots), True) if remaining is None else remaining > 0
        return np.where(live, values[np.where(live, at, 0)], np.float32("nan"))


class LaneContext(Context):
    """A policy's view of the lanes that every thread holds."""

    def __init__(self, step: Step, domain: Domain, place: _Place) -> None:
        super().__init__(step.policy, LANE_OPERATIONS, step.kept)
        self._step, self._domain, self._at = step, domain, place

    def _lanes(self) -> list[tuple[int, int, np.ndarray]]:
        """(group's first slot, lanes of a group, slot in each thread) per lane."""
        return [(s, n, s + n * QUAD_LANE + i) for s, n in self._domain.groups for i in range(n)]

    def _valid(self, slot: np.ndarray) -> np.ndarray:
        left = self._domain.remaining(self._at.index, slot)
        return np.full(THREADS.shape, True) if left is None else left > 0

    def _columns(self, slot: np.ndarray) -> np.ndarray:
        return self._domain.column(self._at.index, slot) + self._step.first_column

    def _read(self, name: str, kind: Operand) -> Any:
        bound, place = self._step.names[name], self._at
        if isinstance(kind, Scalar):
            return [place.memory.array(bound).reshape(-1)[0]]
        if isinstance(kind, ColumnVector):
            return [place.memory.array(bound)[place.safe_row]]
        if isinstance(kind, Partials):
            total = np.zeros(place.memory.rows, np.float32)
            for column in place.memory.array(bound).T:
                total = total + column
            return [total[place.safe_row]]
        if isinstance(kind, Matrix):
            matrix = place.memory.array(bound)
            found = []
            for _, _, slot in self._lanes():
                valid = self._valid(slot)
                column = np.where(valid, self._columns(slot), 0)
                found.append(np.where(valid, matrix[place.safe_row, column], np.float32(0)))
            return found
        staged = place.staged(bound)
        if isinstance(kind, PerHead):
            return [staged[slot // kind.head_dim] for _, _, slot in self._lanes()]
        return [staged[slot] for _, _, slot in self._lanes()]

    def _masked(self, raw: Lanes, otherwise: float) -> Lanes:
        lanes = _widen(raw, len(self._lanes()))
        at = zip(self._lanes(), lanes, strict=True)
        return [np.where(self._valid(slot), x, np.float32(otherwise)) for (_, _, slot), x in at]

    def _reduce(self, raw: Any, operation: str) -> Any:
        over = self._step.policy.over  # type: ignore[attr-defined]
        combine = NUMPY_OPERATIONS[operation]
        lanes = self._masked(raw, 0.0 if operation == "add" else -np.inf)
        out: Lanes = [None] * len(lanes)
        for start in range(0, self._domain.unit, over):
            mine = [i for i, (s, _, _) in enumerate(self._lanes()) if start <= s < start + over]
            found = lanes[mine[0]]
            for i in mine[1:]:
                found = combine(found, lanes[i])
            for distance in (1, 2):
                found = combine(found, found[THREADS ^ distance])
            for i in mine:
                out[i] = found
        return out

    def _store(self, name: str, kind: Operand, raw: Any) -> Any:
        bound, place = self._step.names[name], self._at
        kept = self._rounded(_widen(raw, len(self._lanes())), kind)
        for (_, _, slot), x in zip(self._lanes(), kept, strict=True):
            on = place.live & self._valid(slot)
            place.memory.write(bound, place.row, self._columns(slot), x, on)
        return kept

    def _rounded(self, lanes: Lanes, kind: Operand) -> Lanes:
        operation = ROUNDING.get(kind.dtype)
        return LANE_OPERATIONS[operation](lanes) if operation else lanes

    def _partials(self, name: str, kind: Operand, raw: Any) -> None:
        over, place = kind.over, self._at  # type: ignore[attr-defined]
        lanes = _widen(raw, len(self._lanes()))
        for start in range(0, self._domain.unit, over):
            first = next(i for i, (s, _, _) in enumerate(self._lanes()) if s == start)
            slot = np.full(THREADS.shape, start)
            on = place.live & self._valid(slot) & (QUAD_LANE == 0)
            column = self._columns(slot) // over
            place.memory.write(self._step.names[name], place.row, column, lanes[first], on)

    def _record_max(self, name: str, raw: Any) -> None:
        out = self._at.memory.out[self._step.names[name]]
        for x in self._masked(raw, np.nan):
            seen = x[self._at.live & np.isfinite(x)]
            out[0] = max(out[0], seen.max(initial=out[0]))

    def _count(self, name: str, raw: Any) -> None:
        lanes = [x.astype(np.float32) for x in _widen(raw, len(self._lanes()))]
        for x in self._masked(lanes, 0.0):
            self._at.memory.out[self._step.names[name]][0] += int(x[self._at.live].sum())

    def _cell(self, name: str, kind: Operand) -> tuple[np.ndarray, np.ndarray]:
        """(slot, whether it is one) of every thread's row; dead rows have none."""
        cells = self._at.memory.out[self._step.names[name]]
        slots = self._at.memory.slots(self._step.names[kind.slots])  # type: ignore[attr-defined]
        slot = np.where(self._at.live, slots[self._at.safe_row], -1)
        return slot, (slot >= 0) & (slot < cells.shape[0] * cells.shape[1])

    def _placed(self, name: str, kind: Operand) -> Any:
        return [self._cell(name, kind)[1]]

    def _place(self, name: str, kind: Operand, raw: Any) -> Any:
        assert isinstance(kind, Cells)
        cells = self._at.memory.out[self._step.names[name]]
        slot, placed = self._cell(name, kind)
        kept = self._rounded(_widen(raw, len(self._lanes())), kind)
        heads = self._domain.unit // kind.head_dim
        for (_, _, at), x in zip(self._lanes(), kept, strict=True):
            on = placed & self._valid(at)
            page, token = slot[on] // cells.shape[1], slot[on] % cells.shape[1]
            head = self._at.index * heads + at[on] // kind.head_dim
            cells[page, token, head, at[on] % kind.head_dim] = x[on]
        return kept
