"""Runs a composition on an accumulator. Imports the DSL.

Each consumer thread walks its tile unit by unit and row by row: it gathers the lanes it holds of one row of a unit, in
logical order, and hands them through the steps of the unit's range. Everything is unrolled; only the choice of the
range, where there are several, is made at run time.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import cutlass
import torch
from cutlass import Float32, Int32, Int64, cute

from epicute.epilogues.context import run_body
from epicute.epilogues.dsl import DSL_OPERATIONS, Shared, opaque
from epicute.epilogues.operands import Counter, HeadVector, Maximum, Scalar
from epicute.epilogues.policy import Pairwise
from epicute.epilogues.resolve import Resolved, Step
from epicute.epilogues.values import Value
from epicute.gemm.arguments import ArgumentLayout
from epicute.gemm.lanes import NOTHING, KernelContext, Place, Scopes, Tile, widen
from epicute.gemm.memory import (
    load_global,
)
from epicute.gemm.schedule import Schedule
from epicute.gemm.stage_plan import StagePlan
from epicute.gemm.staging import when
from epicute.gemm.work import Work

__all__ = ["Driver", "Tile", "TileState"]

DEFERRED_COLUMNS = 64
"""Most columns of a unit, times blocks of rows, whose stores wait for all of the rows; beyond, or with several ranges,
that was seen to spill."""


class TileState:
    """What a consumer thread keeps across tiles: scalars, and its share of maxima and counters."""

    def __init__(self, layout: ArgumentLayout, arguments: Any) -> None:
        self.scalars: dict[str, Any] = {}
        self.maxima: dict[str, Any] = {}
        self.counters: dict[str, Any] = {}
        self._layout = layout
        self._arguments = arguments
        for spec in layout.operands:
            if isinstance(spec.kind, Scalar):
                address = arguments[spec.at("address")]
                self.scalars[spec.name] = load_global(torch.float32, address)[0]
            elif isinstance(spec.kind, Maximum):
                self.maxima[spec.name] = cute.make_rmem_tensor(1, Float32)
                self.maxima[spec.name][0] = Float32(NOTHING)
            elif isinstance(spec.kind, Counter):
                self.counters[spec.name] = cute.make_rmem_tensor(1, Int32)
                self.counters[spec.name][0] = Int32(0)

    def flush(self, lane: Any) -> None:
        """Add the warp's share to the maxima and counters in memory."""
        for name, register in self.maxima.items():
            bits = cute.arch.warp_redux_sync(register[0].bitcast(Int32), "max")
            address = self._arguments[self._layout[name].at("address")]
            raise_maximum(address, bits, (lane == 0) & (bits >= 0))
        for name, register in self.counters.items():
            total = cute.arch.warp_redux_sync(register[0], "add")
            address = self._arguments[self._layout[name].at("address")]
            add_count(address, Int64(total), (lane == 0) & (total > 0))


class Driver:
    """Device code of the epilogue for one composition, tile and operand layout."""

    def __init__(
        self, resolved: Resolved, layout: ArgumentLayout, schedule: Schedule, parts: int = 1
    ) -> None:
        self.resolved = resolved
        self.layout = layout
        self.plan = StagePlan(resolved)
        self.tile_m, self.tile_n, self.parts = schedule.tile_m, schedule.tile_n, parts
        self.blocks, self.sharers = schedule.blocks, schedule.sharers
        self.unit = resolved.order.unit
        self.units = self.tile_n // self.unit

    def run(self, acc: Any, tile: Tile, thread: Any) -> None:
        """Apply the composition to a tile.

        ``acc``: the thread's accumulators, blocks of 64 rows of ``tile_n`` columns. ``thread``: among the two consumer
        warpgroups.
        """
        # Opaque, or whatever depends on the thread alone is kept in registers across the multiplication.
        thread = opaque(Int32(thread))
        if self._by_rows(tile):
            self._run_by_rows(acc, tile, thread)
            return
        rows, whole = list(self._held(thread)), Scopes(Shared(), first=tile.n * self.units)
        for u in range(self.units):
            if tile.stream is not None:
                tile.stream.arrive(u)
            unit = tile.n * self.units + u
            for r, span in enumerate(self.resolved.ranges):
                index = unit - span.first_unit

                def body(
                    r: int = r, u: int = u, index: Any = index, scopes: Scopes | None = None
                ) -> None:
                    self._unit(acc, tile, (r, u, index), rows, scopes or Scopes(Shared()))

                if self._one_range():
                    body(scopes=whole)
                else:
                    when((index >= 0) & (index < span.units), body)
            if tile.stream is not None and not self._one_range():
                tile.stream.depart(u)

    def _unit(
        self, acc: Any, tile: Tile, at: tuple[int, int, Any], rows: list[Any], scopes: Scopes
    ) -> None:
        """A range's chain on the rows that a thread holds of a unit; ``at``: range, unit of the tile and of the range.

        Stores wait for all rows of the unit, or for those of a block of 64, or for none.
        """
        r, u, index = at
        defers = self._defers()
        if defers:
            scopes = replace(scopes, unit=Shared(scopes.tile))
        together = self.unit * self.blocks <= DEFERRED_COLUMNS or not defers
        blocks = [rows] if together else [rows[i : i + 2] for i in range(0, len(rows), 2)]
        for some in blocks:
            work = Work(defers, tile.ring, tile.m)
            for block, half, row, lane in some:
                place = Place(self, tile, r, u, index, row, lane, scopes)
                place.work, place.block, place.half = work, block, half
                self._row(acc, place, r, u, block, half)
            if tile.stream is not None and some is blocks[-1] and self._one_range():
                # Before what was put off: the next tile's loads begin while stores are on their way.
                tile.stream.depart(u)
            work.settle()

    def _by_rows(self, tile: Tile) -> bool:
        """Whether the tile is walked row by row instead, each row through all units.

        Where they turn by the same angle: sines and cosines take longer than all other arithmetic, and are then
        computed once. Every tile must lie in one range, and nothing wait for both rows or need a whole head at once.
        """
        spans = self.resolved.ranges
        steps = [step for span in spans for step in span.steps]
        angles = [k for s in steps for k in s.policy.operands.values() if isinstance(k, HeadVector)]
        return (
            self.units > 1
            and any(kind.shared for kind in angles)
            and not any(getattr(step.policy, "over", 0) for step in steps)
            and all(span.units % self.units == 0 for span in spans)
            and tile.stream is None
            and tile.ring is None
        )

    def _run_by_rows(self, acc: Any, tile: Tile, thread: Any) -> None:
        for r, span in enumerate(self.resolved.ranges):
            first = tile.n * self.units - span.first_unit

            def body(r: int = r, first: Any = first) -> None:
                for held in self._held(thread):
                    # A branch for each row: in one piece, both rows' sines and cosines are wanted at once, and spill.
                    live = tile.m * self.tile_m + held[2] < Int32(tile.arguments[2])
                    when(live, partial(self._whole_row, acc, tile, r, first, held))

            if len(self.resolved.ranges) == 1:
                body()
            else:
                when((first >= 0) & (first < span.units), body)

    def _whole_row(
        self, acc: Any, tile: Tile, r: int, first: Any, held: tuple[int, int, Any, Any]
    ) -> None:
        """A range's chain on all units of a row; ``first``: index of the first of them in the range."""
        block, half, row, lane = held
        scalars = Shared()
        scopes = Scopes(scalars, None, Shared(scalars), first)
        for u in range(self.units):
            place = Place(self, tile, r, u, first + u, row, lane, scopes)
            place.block, place.half = block, half
            self._row(acc, place, r, u, block, half)
            place.work.settle()

    def _defers(self) -> bool:
        """Whether a unit is small enough for its stores to wait until all its rows, or a block's, are computed."""
        spans = self.resolved.ranges
        narrow = self.unit <= DEFERRED_COLUMNS
        return narrow and len(spans) == 1 and spans[0].steps[0].domain.remaining(0, 0) is None

    def _one_range(self) -> bool:
        """Whether every unit of every tile is a unit of the only range."""
        total = sum(span.units for span in self.resolved.ranges)
        return len(self.resolved.ranges) == 1 and total % self.units == 0

    def _held(self, thread: Any) -> Iterator[tuple[int, int, Any, Any]]:
        """(block, half, row of the tile, quad lane) of each row the thread holds."""
        # Shifts: a quotient of signed integers takes many instructions, and these stand before everything else.
        group, lane = (thread >> 7) & (self.sharers - 1), thread & 3
        within = ((thread & 127) >> 5) * 16 + ((thread & 31) >> 2)
        for block in range(self.blocks):
            first = (block * self.sharers + group) * 64
            for half in range(2):
                yield block, half, first + within + 8 * half, lane

    def _row(self, acc: Any, place: Place, r: int, u: int, block: int, half: int) -> None:
        span = self.resolved.ranges[r]
        lanes = [
            acc[self._register(u * (self.unit // 8) + b, block, half) + e]
            for p in span.pieces
            for b in p.blocks
            for e in (0, 1)
        ]
        for step in span.head:
            lanes = self._step(step, lanes, place)
        for part in span.blocks:
            some = [lanes[i] for i in part.lanes]
            for step in part.steps:
                some = self._step(step, some, place)

    def _register(self, n8: int, block: int, half: int) -> int:
        """Accumulator of the first of two columns of n8 block ``n8``; parts of the tile follow each other."""
        part, within = divmod(n8, self.tile_n // 8 // self.parts)
        registers = self.tile_n // 2 // self.parts
        return (part * self.blocks + block) * registers + 4 * within + 2 * half

    def _step(self, step: Step, lanes: list[Any], place: Place) -> list[Any]:
        if not isinstance(step.policy, Pairwise):
            ctx = KernelContext(step, step.domain, place)
            out = run_body(ctx, Value(lanes, DSL_OPERATIONS))
            ctx.finish()
            return lanes if out is None else widen(out.raw, len(lanes))
        split = step.split
        assert split is not None
        ctx = KernelContext(step, split.domain, place)
        if not split.first:
            return lanes
        pair = [Value([lanes[i] for i in s], DSL_OPERATIONS) for s in (split.first, split.second)]
        out = run_body(ctx, *pair)
        ctx.finish()
        if isinstance(out, Value):
            return widen(out.raw, len(split.first))
        found = list(lanes)
        for positions, value in zip((split.first, split.second), out, strict=True):
            for i, lane in zip(positions, widen(value.raw, len(positions)), strict=True):
                found[i] = lane
        return found


@cute.jit
def raise_maximum(address: Int64, bits: Int32, condition: cutlass.Boolean) -> None:
    """Atomic maximum of non-negative float32 bits, which order like integers."""
    if condition:
        pointer = cute.make_ptr(Int32, address, cute.AddressSpace.gmem, assumed_align=4)
        cute.arch.atomic_max(pointer, bits)


@cute.jit
def add_count(address: Int64, count: Int64, condition: cutlass.Boolean) -> None:
    """Atomic addition to an int64 counter."""
    if condition:
        pointer = cute.make_ptr(Int64, address, cute.AddressSpace.gmem, assumed_align=8)
        cute.arch.atomic_add(pointer, count)
