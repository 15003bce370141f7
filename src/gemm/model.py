"""What a schedule should cost, in clocks of an SM: the arithmetic behind ``choose``.

A pipeline stage, 128 bytes of K of a tile, takes as long as the slowest of three:

    tensor cores    tile_m * tile_n / 32 clocks, in 8 and 16 bits alike (measured: 1024 for 128x256)
    shared memory   TMA's writes at 128 bytes a clock, and WGMMA's reads (A and B again for each 64 rows) at 192
    L2              the CTA's own loads, at 64 bytes a clock

and a projection as many turns as its tiles need on the clusters that run at once. Large products run at the board's
power limit, where a byte from L2 costs time although its way is free, and an epilogue costs as much beside another
warpgroup's products as alone: ping-pong gains nothing there. The constants are fitted to times of 8B, 70B and 405B at
M = 2048 on an H200, in BF16 and FP8, under the protocol of the published tables. Slices too short for the power
controller say otherwise: in them ping-pong wins.
"""

from __future__ import annotations

from epicute.gemm.schedule import DEPTH_BYTES, Problem, Schedule

__all__ = ["clocks"]

WRITTEN_BYTES, READ_BYTES = 128, 192
"""Bytes a clock of an SM. They fit ping-pong, whose tiles took, beside 128x128: 64x256 1.03 of the time, 64x224 1.07,
128x96 1.15, 64x128 1.25."""

L2_BYTES = 64
DRAM_BYTES = 2500
"""Bytes a clock, of an SM and of the GPU: 4.6 TB/s at 1.85 GHz. Both are assumed."""

EPILOGUE = 5.0
"""Clocks per column of a tile and policy, between the last product and the next tile's first: 1200 for 256 columns of
Store, 2300 of Dequantize and Store, 5000 to 8000 of whole projections."""

ENERGY = 0.003
"""Slowdown for each byte a clock that an SM loads from L2: 2 to 4 % for 128x256 with 1x2 instead of 2x1 (8 bytes), 5 to
7 % for 64x256 and 128x128 in ping-pong (16 bytes)."""

TALL = 4.0
"""Factor of an epilogue of more than two policies where a warpgroup has 128 rows: its stores cannot wait for all rows,
and 8B's gate/up was 40 % slower."""

APART = 1.5
"""Precise accumulation with one warpgroup at a time: nobody multiplies while it adds."""

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
    if problem.accumulate == "precise" and schedule.pingpong:
        tensor *= APART
    read = schedule.blocks * schedule.sharers * (64 + tile_n) * DEPTH_BYTES
    written = (tile_m + tile_n) * DEPTH_BYTES
    shared = written / WRITTEN_BYTES + read / READ_BYTES
    loaded = (tile_m / schedule.cluster_n + tile_n / schedule.cluster_m) * DEPTH_BYTES
    stage = max(tensor, shared, loaded / L2_BYTES)
    epilogue = EPILOGUE * problem.policies * tile_n * schedule.blocks
    if schedule.blocks > 1 and problem.policies > 2:
        epilogue *= TALL
    each = -(-turns * schedule.sharers // 2)  # of a warpgroup
    total = START + turns * depth * stage + each * epilogue
    total *= 1 + ENERGY * loaded / stage
    read_once = (rows + problem.rows) * problem.depth * problem.dtype.itemsize
    stored = rows * problem.columns * 2
    return max(total, START + (read_once + stored) / DRAM_BYTES)
