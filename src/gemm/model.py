"""What a schedule should cost, in clocks of an SM: the arithmetic behind ``choose``.

A pipeline stage, 128 bytes of K of a tile, takes as long as the slowest of three:

    tensor cores    tile_m * tile_n / 32 clocks, in 8 and 16 bits alike (measured: 1024 for 128x256)
    shared memory   TMA's writes at 128 bytes a clock, and WGMMA's reads (A and B again for each 64 rows) at 192
    L2              the CTA's own loads, at 64 bytes a clock

but no less than ``STEP``. A projection takes as many turns as its tiles need on the clusters that run at once. Large
products run at the board's power limit, where a byte from L2 costs time although its way is free, and an epilogue costs
as much beside another warpgroup's products as alone: ping-pong gains nothing there. The constants are fitted to times
of 1B to 405B and of tensor-parallel shards at M = 64 to 8192 on an H200, in BF16 and FP8, under the protocol of the
published tables. Slices too short for the power controller say otherwise: in them ping-pong wins.
"""

from __future__ import annotations

from epicute.gemm.schedule import DEPTH_BYTES, Problem, Schedule

__all__ = ["clocks"]

WRITTEN_BYTES, READ_BYTES = 128, 192
"""Bytes a clock of an SM. They fit ping-pong, whose tiles took, beside 128x128: 64x256 1.03 of the time, 64x224 1.07,
128x96 1.15, 64x128 1.25."""

L2_BYTES = 64
DRAM_BYTES = 2120
"""Bytes a clock, of an SM, which is assumed, and of the GPU: gate/up of 8B and 70B at M = 64 read 4.2 TB/s at 1.98 GHz.
"""

STEP = 280.0
"""Clocks that a stage takes at least: four products one after another, and its barriers. Measured at M = 64 with rings
of 12 and more stages, in 64x32 and 64x64 alike; with nine it is 325 and with six 400, the latency of a load."""

PAIRED = 1.02
"""What waiting on each other costs a cluster; at M = 64 it was 1.04 to 1.07."""

EPILOGUE = 5.0
"""Clocks per column of a tile and policy, between the last product and the next tile's first: 1200 for 256 columns of
Store, 2300 of Dequantize and Store, 5000 to 8000 of whole projections."""

ENERGY = 0.003
"""Slowdown for each byte a clock that an SM loads from L2, where its tensor cores are busy: 2 to 4 % for 128x256 with
1x2 instead of 2x1 (8 bytes), 5 to 7 % for 64x256 and 128x128 in ping-pong (16 bytes)."""

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
    read = schedule.blocks * schedule.sharers * (64 * schedule.parts + tile_n) * DEPTH_BYTES
    written = (tile_m + tile_n) * DEPTH_BYTES
    shared = written / WRITTEN_BYTES + read / READ_BYTES
    loaded = (tile_m / schedule.cluster_n + tile_n / schedule.cluster_m) * DEPTH_BYTES
    stage = max(tensor, shared, loaded / L2_BYTES, STEP)
    epilogue = EPILOGUE * problem.policies * tile_n * schedule.blocks
    if schedule.blocks > 1 and problem.policies > 2:
        epilogue *= TALL
    each = -(-turns * schedule.sharers // 2)  # of a warpgroup
    total = START + turns * depth * stage + each * epilogue
    total *= 1 + ENERGY * loaded / stage * tensor / stage
    if schedule.cluster > 1:
        total *= PAIRED
    read_once = (rows + problem.rows) * problem.depth * problem.dtype.itemsize
    stored = rows * problem.columns * 2
    memory = START + (read_once + stored) / DRAM_BYTES
    # Near a bound both count, and no two schedules are equal at it.
    return (total**4 + memory**4) ** 0.25
