"""Runs a composition on an accumulator. Imports the DSL.

Each consumer thread walks its tile unit by unit and row by row: it gathers the lanes it holds of one row of a unit, in
logical order, and hands them through the steps of the unit's range. Everything is unrolled; only the choice of the
range, where there are several, is made at run time.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import cutlass
import torch
from cutlass import Float32, Int32, Int64, cute

from epicute.epilogues.context import run_body
from epicute.epilogues.dsl import DSL_OPERATIONS, opaque
from epicute.epilogues.operands import (
    Counter,
    Maximum,
    Scalar,
)
from epicute.epilogues.policy import Pairwise
from epicute.epilogues.resolve import Resolved, Step
from epicute.epilogues.values import Value
from epicute.gemm.arguments import ArgumentLayout
from epicute.gemm.lanes import NOTHING, KernelContext, Place, Tile, widen
from epicute.gemm.memory import (
    load_global,
)
from epicute.gemm.schedule import Schedule
from epicute.gemm.stage_plan import StagePlan
from epicute.gemm.staging import when
from epicute.gemm.work import Work

__all__ = ["Driver", "Tile", "TileState"]

DEFERRED_COLUMNS = 64
"""Widest unit whose stores wait for all of its rows; beyond, or with several ranges, that was seen to spill."""


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
        for u in range(self.units):
            if tile.stream is not None:
                tile.stream.arrive(u)
            unit = tile.n * self.units + u
            for r, span in enumerate(self.resolved.ranges):
                index = unit - span.first_unit

                def body(r: int = r, u: int = u, index: Any = index) -> None:
                    work = Work(self._defers(), tile.ring, tile.m)
                    for block, half, place in self._places(tile, r, u, index, thread):
                        place.work, place.half = work, half
                        self._row(acc, place, r, u, block, half)
                    work.settle()

                if self._one_range():
                    body()
                else:
                    when((index >= 0) & (index < span.units), body)
            if tile.stream is not None:
                tile.stream.depart(u)

    def _defers(self) -> bool:
        """Whether a unit is small enough for its stores to wait until all its rows are computed."""
        spans = self.resolved.ranges
        narrow = self.unit * self.blocks <= DEFERRED_COLUMNS
        return narrow and len(spans) == 1 and spans[0].steps[0].domain.remaining(0, 0) is None

    def _one_range(self) -> bool:
        """Whether every unit of every tile is a unit of the only range."""
        total = sum(span.units for span in self.resolved.ranges)
        return len(self.resolved.ranges) == 1 and total % self.units == 0

    def _places(self, tile: Tile, r: int, u: int, index: Any, thread: Any) -> Iterator[Any]:
        """(block, half, place) of each row the thread holds."""
        group, within = thread // 128 % self.sharers, thread % 128
        for block in range(self.blocks):
            first = (block * self.sharers + group) * 64
            for half in range(2):
                row = first + within // 32 * 16 + within % 32 // 4 + 8 * half
                yield block, half, Place(self, tile, r, u, index, row, thread % 4)

    def _row(self, acc: Any, place: Place, r: int, u: int, block: int, half: int) -> None:
        span = self.resolved.ranges[r]
        lanes = [
            acc[self._register(u * (self.unit // 8) + b, block, half) + e]
            for p in span.pieces
            for b in p.blocks
            for e in (0, 1)
        ]
        for i, step in enumerate(span.head):
            lanes = self._step(step, lanes, place, i == len(span.steps) - 1)
        for part in span.blocks:
            some = [lanes[i] for i in part.lanes]
            for i, step in enumerate(part.steps):
                some = self._step(step, some, place, i == len(part.steps) - 1)

    def _register(self, n8: int, block: int, half: int) -> int:
        """Accumulator of the first of two columns of n8 block ``n8``; parts of the tile follow each other."""
        part, within = divmod(n8, self.tile_n // 8 // self.parts)
        registers = self.tile_n // 2 // self.parts
        return (part * self.blocks + block) * registers + 4 * within + 2 * half

    def _step(self, step: Step, lanes: list[Any], place: Place, last: bool) -> list[Any]:
        if not isinstance(step.policy, Pairwise):
            ctx = KernelContext(step, step.domain, place, last)
            out = run_body(ctx, Value(lanes, DSL_OPERATIONS))
            ctx.finish()
            return lanes if out is None else widen(out.raw, len(lanes))
        split = step.split
        assert split is not None
        ctx = KernelContext(step, split.domain, place, last)
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
