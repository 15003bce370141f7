"""What a schedule should cost, in clocks of an SM: the arithmetic behind ``choose``.

A pipeline stage, 128 bytes of K of a tile, takes as long as the slowest of three:

    tensor cores    tile_m * tile_n / 32 clocks, in 8 and 16 bits alike (measured: 1024 for 128x256)
    shared memory   what WGMMA reads (A and B again for each 64 rows) and TMA writes, at 128 bytes a clock
    L2              the CTA's own loads, at 64 bytes a clock

and a projection as many turns as its tiles need on the clusters that run at once. 128x256 is the one tile whose shared
memory keeps up with its tensor cores; narrower ones win where they fill the last turn.
"""

from __future__ import annotations

from epicute.gemm.schedule import DEPTH_BYTES, Problem, Schedule

__all__ = ["clocks"]

SHARED_BYTES = 128
L2_BYTES = 64
DRAM_BYTES = 2500
"""Bytes a clock; the last two are assumed, DRAM for the whole GPU: 4.6 TB/s at 1.85 GHz."""

EPILOGUE = 9.0
"""Clocks per column of a tile between its last product and the next tile's first (measured: 2300 for 256 columns)."""

START = 2500.0
"""Clocks from a kernel's start to its first product: barriers, descriptors, and a way through DRAM."""


def clocks(schedule: Schedule, problem: Problem, rows: int, sms: int) -> float:
    """Clocks that a projection of ``rows`` rows takes on ``sms`` SMs, by the arithmetic above."""
    tile_m, tile_n = schedule.tile_m, schedule.tile_n
    tiles_m = -(-rows // (tile_m * schedule.cluster_m))
    tiles_n = -(-problem.rows // tile_n) // schedule.cluster_n
    at_once = sms // schedule.cluster
    turns = -(-tiles_m * tiles_n // at_once)
    depth = -(-problem.depth * problem.dtype.itemsize // DEPTH_BYTES)
    tensor = tile_m * tile_n / 32
    blocks = schedule.blocks * schedule.sharers
    read = blocks * (64 + tile_n) * DEPTH_BYTES
    written = (tile_m + tile_n) * DEPTH_BYTES
    shared = (read + written) / SHARED_BYTES
    loaded = (tile_m / schedule.cluster_n + tile_n / schedule.cluster_m) * DEPTH_BYTES
    stage = max(tensor, shared, loaded / L2_BYTES)
    epilogue = EPILOGUE * tile_n * schedule.blocks
    beside = 1 if schedule.pingpong else turns
    total = START + turns * depth * stage + beside * epilogue
    read_once = (rows + problem.rows) * problem.depth * problem.dtype.itemsize
    stored = rows * problem.columns * 2
    return max(total, START + (read_once + stored) / DRAM_BYTES)
