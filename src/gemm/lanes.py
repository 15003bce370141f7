"""What one thread holds of a row of a unit, and what a policy body sees of it. Imports the DSL."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from math import gcd
from typing import Any

import cutlass
from cutlass import Boolean, Float32, Int32, Int64, cute

from epicute.epilogues.context import ROUNDING, Context
from epicute.epilogues.dsl import (
    DSL_OPERATIONS,
    Lazy,
    Shared,
    add_square,
    again,
    anchor,
    force,
    keep,
    opaque,
    select,
)
from epicute.epilogues.operands import (
    Cells,
    ColumnVector,
    HeadVector,
    Matrix,
    Operand,
    Partials,
    PerHead,
    RowVector,
    Scalar,
)
from epicute.epilogues.resolve import Domain, Step
from epicute.gemm.arguments import OperandSpec
from epicute.gemm.memory import (
    fetched,
    load_global,
    load_shared,
    load_some,
    packed,
    store_global,
    store_word_if,
)
from epicute.gemm.work import Largest, Work, operands_of, scalar

__all__ = ["KernelContext", "Place", "Scopes", "Tile", "widen"]

INFINITY = float("inf")

NOTHING = -1.0
"""Maximum of no values; as float32 bits below those of every value that is not negative."""


@dataclass(frozen=True)
class Tile:
    """What the epilogue of one tile needs: arguments, thread state, the staged buffer and the tile's place."""

    arguments: Any
    state: Any
    floats: Any
    integers: Any
    m: Any
    n: Any
    ring: Any = None
    stream: Any = None


@dataclass(frozen=True)
class Scopes:
    """Where lanes are kept that a row has in common with others; without one, every row of a unit has its own.

    Attributes:
        tile: scalars. unit: column operands, the same in all rows of a unit. row: row operands, and vectors of a head's
            channels, the same in all units of a row. first: index of the tile's first unit in its range; where it is
            given, a row's addresses are kept for all units.
    """

    tile: Shared | None = None
    unit: Shared | None = None
    row: Shared | None = None
    first: Any = None


ALONE = Scopes()


@dataclass(frozen=True)
class _Item:
    """An element of a vector that is loaded when the first is needed."""

    vector: Lazy
    at: int

    def __call__(self) -> Any:
        return self.vector.get()[self.at]


def elements(vector: Lazy, count: int) -> list[Any]:
    """Lanes of a vector that is loaded when the first of them is needed."""
    return [Lazy(_Item(vector, i)) for i in range(count)]


def widen(raw: list[Any], count: int) -> list[Any]:
    return raw if len(raw) == count else raw * count


class Place:
    """Where a thread is: unit, row and quad lane, and the tile's buffers."""

    def __init__(
        self,
        driver: Any,
        tile: Tile,
        r: int,
        u: int,
        index: Any,
        tile_row: Any,
        lane: Any,
        scopes: Scopes = ALONE,
    ) -> None:
        self.driver, self.arguments, self.state = driver, tile.arguments, tile.state
        self.floats, self.integers = tile.floats, tile.integers
        self.columns = driver.plan.columns[r]
        self.u, self.index = u, index
        # Unknown to be the same in every row, or the compiler keeps all addresses of a unit alive for the next row.
        self.lane = opaque(Int32(lane))
        self.tile_row = tile_row
        self.row = tile.m * driver.tile_m + tile_row
        rows = Int32(tile.arguments[2])
        self.live = self.row < rows
        self.safe_row = Int32(cutlass.select_(self.live, self.row, rows - Int32(1)))
        self._read: dict[str, Any] = {}
        self.stream = tile.stream
        self.work = Work(False)
        self.block, self.half = 0, 0
        self.scopes = scopes

    def kept(self, name: Any, make: Callable[[], Any]) -> Any:
        """What all units of the row have in common."""
        scope = self.scopes.tile
        assert scope is not None
        return force(scope.lane((name, self.block, self.half), make))

    def scalar(self, name: str) -> Any:
        """A scalar operand."""
        register, scope = self.state.scalars[name], self.scopes.tile
        return register if scope is None else scope.lane(name, lambda: register)

    def row_value(self, name: str) -> Any:
        """A staged row operand."""
        plan, tile_m = self.driver.plan, self.driver.tile_m
        at = plan.rows[name] * tile_m + self.tile_row
        if self.scopes.row is not None:
            return self.scopes.row.lane(name, lambda: self.floats[at])
        if name not in self._read:
            self._read[name] = self.floats[at]
        return self._read[name]

    def cell(self, name: str) -> Any:
        """Byte offset of the row's cell, negative where it has none."""
        if name not in self._read:
            plan, tile_m = self.driver.plan, self.driver.tile_m
            self._read[name] = self.integers[plan.cells[name][0] * tile_m + self.tile_row]
        return self._read[name]

    def column_values(self, name: str, groups: tuple[tuple[int, int], ...]) -> list[Any]:
        """A staged column operand at the lanes of ``groups``."""
        plan = self.driver.plan
        operand = self.columns[name]
        base = len(plan.rows) * self.driver.tile_m + self.u * plan.region + operand.offset
        if isinstance(operand.kind, PerHead):
            return self._per_head(base, operand.kind.head_dim, groups)
        channels = isinstance(operand.kind, HeadVector) and operand.kind.shared
        scope = self.scopes.row if channels else self.scopes.unit
        found: list[Any] = []
        for slot, lanes in groups:
            load = partial(self._load, base + slot, lanes)
            if scope is None:
                found += elements(Lazy(load), lanes)
                continue
            vector = scope.lane((name, slot), load)
            found += [scope.lane((name, slot, i), _Item(vector, i)) for i in range(lanes)]
        return found

    def _load(self, slot: int, lanes: int) -> list[Any]:
        at = Int32(slot) + self.lane * lanes
        return load_shared(self.floats, at, lanes, min(16, 4 * lanes))

    def _per_head(self, base: int, head_dim: int, groups: tuple[tuple[int, int], ...]) -> list[Any]:
        heads: dict[int, Any] = {}
        found = []
        for slot, lanes in groups:
            head = slot // head_dim
            if head not in heads:
                heads[head] = self.floats[base + head]
            found += [heads[head]] * lanes
        return found


class KernelContext(Context):
    """A policy's view of one thread's lanes of one row of a unit."""

    def __init__(self, step: Step, domain: Domain, place: Place) -> None:
        super().__init__(step.policy, DSL_OPERATIONS, step.kept)
        self._step, self._domain, self._place_at = step, domain, place
        self._cache: dict[str, Any] = {}
        self._origins: dict[tuple[str, int], Any] = {}
        self._maxima: list[tuple[Any, list[Any]]] = []
        self._counts: list[tuple[Any, list[Any]]] = []

    def _read(self, name: str, kind: Operand) -> Any:
        if name not in self._cache:
            self._cache[name] = self._fetch(self._step.names[name], kind)
        return self._cache[name]

    def _fetch(self, bound: str, kind: Operand) -> list[Any]:
        place = self._place_at
        if isinstance(kind, Scalar):
            return [place.scalar(bound)]
        if isinstance(kind, (ColumnVector, Partials)):
            return [place.row_value(bound)]
        if isinstance(kind, (RowVector, HeadVector, PerHead)):
            return place.column_values(bound, self._domain.groups)
        assert isinstance(kind, Matrix), kind
        return self._matrix(bound)

    def _row_of(self, spec: OperandSpec) -> Any:
        """Address of the row in a matrix; of one that is read, where there is none, of the last."""
        place = self._place_at
        row = place.row if spec.kind.written else place.safe_row
        stride = place.arguments[spec.at("row_stride")]
        return place.arguments[spec.at("address")] + Int64(row) * stride

    def _matrix(self, bound: str) -> list[Any]:
        place, spec = self._place_at, self._place_at.driver.layout[bound]
        found: list[Any] = []
        if place.stream is not None and place.stream.plan.name == bound:
            for slot, lanes in self._domain.groups:
                found += elements(Lazy(partial(self._streamed, slot, lanes)), lanes)
            return found
        row = partial(self._row_of, spec)
        remaining = self._remaining()
        for slot, lanes in self._domain.groups:
            address = self._address(row, slot, lanes, spec)
            if remaining is None:
                found += load_global(spec.dtype, address, lanes, spec.alignment)
            else:
                found += load_some(spec.dtype, address, lanes, remaining[len(found)][0])
        return found

    def _streamed(self, slot: int, lanes: int) -> list[Any]:
        place = self._place_at
        return fetched(place.stream.load(place.u, slot, lanes, place.lane, place.tile_row))

    def _address(self, row: Callable[[], Any], slot: int, lanes: int, spec: OperandSpec) -> Any:
        """Address of the group's first lane in a ``row``: a sum shared by all groups, plus a constant."""
        place, domain, size = self._place_at, self._domain, spec.dtype.itemsize
        constant = (domain.offset(slot) + self._step.first_column) * size
        first = place.scopes.first

        def base(index: Any) -> Any:
            return row() + Int64(domain.origin(index) + place.lane * lanes) * size

        if first is not None:
            start = place.kept((spec.name, lanes), lambda: base(first))
            return start + (domain.origin(place.u) * size + constant)
        if (spec.name, lanes) not in self._origins:
            self._origins[spec.name, lanes] = base(place.index)
        return self._origins[spec.name, lanes] + constant

    def _lane_count(self) -> int:
        return sum(lanes for _, lanes in self._domain.groups)

    def _remaining(self) -> list[tuple[Any, int]] | None:
        """(columns from the group's first lane on, position in the group) per lane; None where nothing is padding.

        A lane is a column where the first is greater than the second.
        """
        if self._domain.remaining(0, 0) is None:
            return None
        place = self._place_at
        found = []
        for slot, lanes in self._domain.groups:
            at = Int32(slot) + place.lane * lanes
            left = opaque(Int32(self._domain.remaining(place.index, at)))
            found += [(left, i) for i in range(lanes)]
        return found

    def _reduce(self, raw: Any, operation: str) -> Any:
        over = self._step.policy.over  # type: ignore[attr-defined]
        lanes = self._masked(
            widen(raw, self._lane_count()), 0.0 if operation == "add" else -INFINITY
        )
        combine = partial(scalar, operation)
        out: list[Any] = []
        position = 0
        for start in range(0, self._domain.unit, over):
            count = sum(n for slot, n in self._domain.groups if start <= slot < start + over)
            found = force(lanes[position])
            for x in lanes[position + 1 : position + count]:
                square = add_square(found, x) if operation == "add" else None
                found = combine(found, x) if square is None else square
            for distance in (1, 2):
                found = combine(found, cute.arch.shuffle_sync_bfly(found, offset=distance))
            out += [found] * count
            position += count
        return out

    def _store(self, name: str, kind: Operand, raw: Any) -> Any:
        place = self._place_at
        bound = self._step.names[name]
        spec = place.driver.layout[bound]
        lanes = widen(raw, self._lane_count())
        self._write(lanes, spec, place.live)
        return self._kept_lanes(lanes, kind)

    def _write(self, lanes: list[Any], spec: OperandSpec, live: Any) -> None:
        """Store lanes at their columns of the row, whole vectors where no group is cut by the last column."""
        place, size = self._place_at, spec.dtype.itemsize
        if place.work.ring is not None and spec.name in place.work.ring.names:
            self._send(lanes, spec)
            return
        position = 0
        remaining = self._remaining()
        for slot, count in self._domain.groups:
            address = self._address(partial(self._row_of, spec), slot, count, spec)
            found = lanes[position : position + count]
            if remaining is None:
                place.work.later(store_global(spec.dtype, address, found, spec.alignment, live))
            elif self._domain.columns % (16 if self._domain.halves else 8) == 0:
                condition = live & (remaining[position][0] > 0)
                place.work.later(
                    store_global(spec.dtype, address, found, spec.alignment, condition)
                )
            else:
                left = remaining[position][0]
                second = self._domain.columns // 2 * size if self._domain.halves else 0
                aligned = gcd(spec.alignment, second)
                place.work.later(store_global(spec.dtype, address, found, aligned, live, left))
            position += count

    def _send(self, lanes: list[Any], spec: OperandSpec) -> None:
        """Hand the lanes to the output ring, a panel for each group."""
        place, domain = self._place_at, self._domain
        position = 0
        for slot, count in domain.groups:
            column = domain.origin(place.index) + (domain.offset(slot) + self._step.first_column)
            fragment = packed(spec.dtype, lanes[position : position + count])
            place.work.panel(spec.name, slot, place.half, fragment, column)
            position += count

    def _kept_lanes(self, lanes: list[Any], kind: Operand) -> list[Any]:
        """The lanes as stored; a rounding that nobody reads is left out by the compiler."""
        rounding = ROUNDING.get(kind.dtype)
        return lanes if rounding is None else DSL_OPERATIONS[rounding](lanes)

    def _partials(self, name: str, kind: Operand, raw: Any) -> None:
        place = self._place_at
        spec = place.driver.layout[self._step.names[name]]
        over = kind.over  # type: ignore[attr-defined]
        lanes = widen(raw, self._lane_count())
        position = 0
        for start in range(0, self._domain.unit, over):
            column = self._domain.column(place.index, Int32(start))
            left = self._domain.remaining(place.index, Int32(start))
            condition = place.live & (place.lane == 0)
            if left is not None:
                condition = condition & (left > 0)
            address = self._partial(spec, over, start, column)
            value = Float32(force(lanes[position]))
            place.work.later(partial(store_word_if, address, value, condition))
            position += sum(n for slot, n in self._domain.groups if start <= slot < start + over)

    def _partial(self, spec: OperandSpec, over: int, start: int, column: Any) -> Any:
        """Address of the partial of the group of columns at ``start``, whose first is ``column``."""
        place, domain, first = self._place_at, self._domain, self._place_at.scopes.first
        if first is None or domain.origin(1) % over:
            return self._row_of(spec) + Int64((column + self._step.first_column) // over) * 4
        each = domain.origin(1) // over
        at = (domain.column(place.u, start) + self._step.first_column) // over
        return (
            place.kept((spec.name,), lambda: self._row_of(spec) + Int64(first * each) * 4) + at * 4
        )

    def _masked(self, lanes: list[Any], otherwise: float) -> list[Any]:
        remaining = self._remaining()
        if remaining is None:
            return lanes
        return [keep(*at, force(x), otherwise) for at, x in zip(remaining, lanes, strict=True)]

    def _record_max(self, name: str, raw: Any) -> None:
        register = self._place_at.state.maxima[self._step.names[name]]
        self._maxima.append((register, self._masked(widen(raw, self._lane_count()), NOTHING)))

    def _count(self, name: str, raw: Any) -> None:
        register = self._place_at.state.counters[self._step.names[name]]
        self._counts.append((register, widen(raw, self._lane_count())))

    def finish(self) -> None:
        """Settle the step's maxima and counters.

        Nearly always every value is finite and nothing is counted, which the largest values show: an instruction a
        lane. What is not so is done over, lane by lane.
        """
        if not self._maxima and not self._counts:
            return
        place, largest = self._place_at, Largest()
        unusual = Boolean(False)
        for register, lanes in self._maxima:
            found = largest.of(lanes)
            finite = found < Float32(INFINITY)
            usual = select(finite & place.live, found, Float32(NOTHING))
            register[0] = scalar("max", register[0], usual)
            unusual = unusual | (found >= Float32(INFINITY)) | (found != found)
        for _, masks in self._counts:
            unusual = unusual | self._any(masks, largest)
        for _, lanes in (*self._maxima, *self._counts):
            for lane in lanes:
                anchor(lane)
        place.work.watch(unusual & place.live, self._settle)

    def _any(self, masks: list[Any], largest: Largest) -> Any:
        """Whether any lane counts, or could; padding may."""
        pairs = operands_of(masks, "gt")
        if pairs is not None and len({id(limit) for _, limit in pairs}) == 1:
            found = largest.of([x for x, _ in pairs])
            return (found > Float32(force(pairs[0][1]))) | (found != found)
        tested = operands_of(masks, "isnan")
        if tested is not None:
            found = largest.magnitude([x for (x,) in tested])
            # Where a factor is infinite, so is the product of the largest; that of a zero is NaN.
            return (found != found) | (found >= Float32(INFINITY))
        some = Boolean(False)
        for mask in masks:
            some = some | Boolean(force(mask))
        return some

    def _settle(self) -> None:
        nothing, zero, live = Float32(NOTHING), Float32(0.0), self._place_at.live
        for register, lanes in self._maxima:
            found = nothing
            for lane in lanes:
                x = Float32(again(lane))
                finite = select(x < Float32(INFINITY), x, nothing)
                found = scalar("max", found, finite)
            found = select(live, found, nothing)
            register[0] = scalar("max", register[0], found)
        remaining = self._remaining() if self._counts else None
        for register, masks in self._counts:
            total = zero
            for i, mask in enumerate(masks):
                one = select(Boolean(again(mask)), Float32(1.0), zero)
                total = total + (one if remaining is None else keep(*remaining[i], one, 0.0))
            register[0] = register[0] + Int32(select(live, total, zero))

    def _placed(self, name: str, kind: Operand) -> Any:
        return [Boolean(self._place_at.cell(self._step.names[name]) >= Int64(0))]

    def _place(self, name: str, kind: Operand, raw: Any) -> Any:
        assert isinstance(kind, Cells)
        place = self._place_at
        spec = place.driver.layout[self._step.names[name]]
        lanes = widen(raw, self._lane_count())
        offset = place.cell(spec.name)
        placed = Boolean(offset >= Int64(0))
        size, heads = kind.dtype.itemsize, self._domain.unit // kind.head_dim
        first_head = Int64(place.index * heads) * place.arguments[spec.at("head_stride")]
        base = place.arguments[spec.at("address")] + offset + first_head
        position = 0
        remaining = self._remaining()
        for slot, count in self._domain.groups:
            head = base + slot // kind.head_dim * place.arguments[spec.at("head_stride")]
            channel = Int64(place.lane * count) * size + slot % kind.head_dim * size
            condition = placed if remaining is None else placed & (remaining[position][0] > 0)
            store = store_global(
                kind.dtype,
                head + channel,
                lanes[position : position + count],
                spec.alignment,
                condition,
            )
            place.work.later(store)
            position += count
        return self._kept_lanes(lanes, kind)
