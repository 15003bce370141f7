"""Which thread and register of a warpgroup holds which cell of a WGMMA accumulator.

`wgmma.mma_async` of shape m64nNk leaves a 64 x N tile of FP32 in 128 threads, N/2 registers each
(PTX ISA, "Register Fragments for wgmma.mma_async.m64nNk"). Warp w holds rows 16w to 16w+15:

    columns      0   1  |  2   3  |  4   5  |  6   7     8 ... : the next n8 block, registers 4 to 7
    row 0      t0 r0 r1 | t1 r0 r1| t2 r0 r1| t3 r0 r1
    row 1      t4 r0 r1 | t5 ...
    ...
    row 8      t0 r2 r3 | t1 r2 r3| ...

The functions are integer algebra alone and run on int, on NumPy arrays and on DSL integers alike.
"""

from __future__ import annotations

from typing import Any

from epicute.errors import require

__all__ = [
    "WGMMA_ROWS",
    "WGMMA_THREADS",
    "accumulator_coord",
    "accumulator_owner",
    "accumulator_registers",
]

WGMMA_ROWS = 64
"""Rows (M) of one warpgroup's accumulator tile."""

WGMMA_THREADS = 128
"""Threads of a warpgroup."""


def accumulator_registers(columns: int) -> int:
    """FP32 registers per thread of a 64 x ``columns`` accumulator: ``columns / 2``.

    Raises:
        ArgumentError: ``columns`` is no legal WGMMA N (a multiple of 8 from 8 to 256).
    """
    require(
        8 <= columns <= 256 and columns % 8 == 0,
        "columns",
        columns,
        "a WGMMA N: a multiple of 8 from 8 to 256",
        "choose a legal tile width",
    )
    return columns // 2


def accumulator_coord(thread: Any, register: Any) -> tuple[Any, Any]:
    """(row, column) of the 64 x N tile that ``register`` (< N/2) of ``thread`` (< 128) holds."""
    lane = thread % 32
    row = thread // 32 * 16 + lane // 4 + register // 2 % 2 * 8
    column = register // 4 * 8 + lane % 4 * 2 + register % 2
    return row, column


def accumulator_owner(row: Any, column: Any) -> tuple[Any, Any]:
    """(thread, register) that hold cell (row, column): the inverse of ``accumulator_coord``."""
    thread = row // 16 * 32 + row % 8 * 4 + column % 8 // 2
    register = column // 8 * 4 + row % 16 // 8 * 2 + column % 2
    return thread, register
