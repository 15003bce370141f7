"""Operands of a tile in shared memory. Imports the DSL.

The producer warpgroup's idle warps fetch, one tile ahead, what the epilogue will read of vectors: column operands in
the order in which quad lanes hold the columns, row operands (row factors summed from partials, positions) per tile
row, and for cache cells the byte offset of each row's cell. Two buffers; the consumers hand one back when a tile is
done.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import cutlass
import torch
from cutlass import Float32, Int32, Int64, cute

from epicute.epilogues.operands import (
    HeadVector,
    Partials,
    PerHead,
)
from epicute.epilogues.resolve import Resolved
from epicute.gemm.arguments import ArgumentLayout, OperandSpec
from epicute.gemm.memory import load_global, load_integer
from epicute.gemm.stage_plan import ColumnOperand, StagePlan

__all__ = ["STAGERS", "Stager"]

STAGERS = 96
"""Threads that stage: warps 1 to 3."""


class Stager:
    """Device code of the staging warps."""

    def __init__(
        self, resolved: Resolved, layout: ArgumentLayout, tile_m: int, tile_n: int
    ) -> None:
        self.resolved = resolved
        self.layout = layout
        self.plan = StagePlan(resolved)
        self.tile_m, self.tile_n = tile_m, tile_n
        self.units = tile_n // resolved.order.unit

    @cute.jit
    def run(
        self, arguments: Any, floats: Any, integers: Any, m_tile: Any, n_tile: Any, thread: Any
    ) -> None:
        """Fill one buffer, given as flat tensors, for the tile; ``thread`` < ``STAGERS``.

        Loops stay loops: unrolled, they would not fit the registers of these warps.
        """
        rows = Int32(arguments[2])
        for i in cutlass.range(-(-self.tile_m // STAGERS), unroll=1):
            row = thread + i * STAGERS
            self._rows(arguments, floats, integers, row, m_tile * self.tile_m + row, rows)
        if cutlass.const_expr(self.plan.region > 0):
            for u in cutlass.range(self.units, unroll=1):
                self._unit(arguments, floats, n_tile * self.units + u, u, thread)

    def _unit(self, arguments: Any, floats: Any, unit: Any, u: Any, thread: Any) -> None:
        base = len(self.plan.rows) * self.tile_m
        for span, operands in zip(self.resolved.ranges, self.plan.columns, strict=True):
            if operands:
                index = unit - span.first_unit
                inside = (index >= 0) & (index < span.units)
                fill = self._unit_filler(arguments, floats, base, u, operands, index, thread)
                when(inside, fill)

    def _rows(
        self, arguments: Any, floats: Any, integers: Any, row: Any, at: Any, rows: Any
    ) -> None:
        inside, live = row < self.tile_m, at < rows
        for name, place in self.plan.rows.items():
            spec = self.layout[name]
            read = (
                partial(self._partial_sum, arguments, spec, at)
                if isinstance(spec.kind, Partials)
                else partial(_element, arguments, spec, at)
            )
            write_if(inside, live, floats, place * self.tile_m + row, read, Float32(0.0))
        for name, (place, slots) in self.plan.cells.items():
            cells, where = self.layout[name], self.layout[slots]
            read = partial(_cell_offset, arguments, cells, where, at)
            write_if(inside, live, integers, place * self.tile_m + row, read, Int64(-1))

    def _partial_sum(self, arguments: Any, spec: OperandSpec, at: Any) -> Any:
        count = spec.shape[1]
        stride = arguments[spec.at("row_stride")]
        return sum_row(arguments[spec.at("address")] + Int64(at) * stride, count)

    def _unit_filler(
        self,
        arguments: Any,
        floats: Any,
        base: int,
        u: Any,
        operands: dict[str, ColumnOperand],
        index: Any,
        thread: Any,
    ) -> Callable[[], None]:
        def fill() -> None:
            for operand in operands.values():
                spec = self.layout[operand.name]
                place = base + u * self.plan.region + operand.offset
                limit = spec.shape[0]
                for i in range(-(-operand.slots // STAGERS)):
                    slot = thread + i * STAGERS
                    element = operand.element(index, slot)
                    read = partial(_element, arguments, spec, element)
                    inside, live = slot < operand.slots, self._live(operand, index, slot, limit)
                    write_if(inside, live, floats, place + slot, read, Float32(0.0))

        return fill

    def _live(self, operand: ColumnOperand, index: Any, slot: Any, limit: Any) -> Any:
        if isinstance(operand.kind, HeadVector):
            return cutlass.Boolean(True)
        if isinstance(operand.kind, PerHead):
            return operand.element(index, slot) < limit
        remaining = operand.domain.remaining(index, slot)
        return cutlass.Boolean(True) if remaining is None else remaining > 0


def _element(arguments: Any, spec: OperandSpec, at: Any) -> Any:
    address = arguments[spec.at("address")] + Int64(at) * spec.dtype.itemsize
    return load_global(spec.dtype, address)[0]


def _cell_offset(arguments: Any, cells: OperandSpec, slots: OperandSpec, at: Any) -> Any:
    """Byte offset of a row's cell in the cache, -1 where the row has none."""
    slot = load_integer(arguments[slots.at("address")] + Int64(at) * 8)
    live = (slot >= 0) & (slot < arguments[cells.at("capacity")])
    # In 32 bits, which a plan makes sure of: a division in 64 takes more registers than these warps have.
    index = Int32(cutlass.select_(live, slot, Int64(0)))
    size = Int32(arguments[cells.at("page_size")])
    page = index // size
    token = index - page * size
    offset = Int64(page) * arguments[cells.at("page_stride")]
    offset = offset + Int64(token) * arguments[cells.at("token_stride")]
    return Int64(cutlass.select_(live, offset, Int64(-1)))


@cute.jit
def sum_row(address: Int64, count: cutlass.Constexpr) -> Float32:
    """Sum of ``count`` float32 from ``address``, added left to right."""
    total = Float32(0.0)
    for i in cutlass.range(count, unroll=8):
        total = total + load_global(torch.float32, address + Int64(i) * 4)[0]
    return total


@cute.jit
def when(condition: cutlass.Boolean, body: cutlass.Constexpr) -> None:
    """Run ``body`` where ``condition``."""
    if condition:
        body()


@cute.jit
def write_if(
    inside: cutlass.Boolean,
    live: cutlass.Boolean,
    tensor: cute.Tensor,
    index: Int32,
    read: cutlass.Constexpr,
    otherwise: cutlass.Constexpr,
) -> None:
    """``tensor[index] = read() if live else otherwise``, where ``inside``."""
    if inside:
        tensor[index] = otherwise
        if live:
            tensor[index] = read()
