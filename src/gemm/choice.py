"""Which schedule a projection gets: a pure function of the problem.

Where the number of rows is not known, the widest tile that the composition's unit divides: it loads and reads fewest
bytes. Where it is known, the legal schedule of least ``clocks``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache
from math import lcm

from epicute.errors import ArgumentError, UnsupportedError, require
from epicute.gemm.model import clocks
from epicute.gemm.schedule import Problem, Schedule, shared_memory, staged_bytes
from epicute.jit import Target

__all__ = ["WIDTHS", "choose", "narrower", "ranked", "schedules"]

SMS = 132
"""Of an H100 or H200 with SXM; nothing is asked of the machine that compiles."""

DEEPEST = 16
"""Most stages that are taken. At M = 64 twelve take 0.72 to 0.78 of the time of six, and eighteen as long as twelve."""

TALL = 1.01
"""What 256x128 with 1x2 saves a plain store over what ``clocks`` says: 128x256 with 2x1 took 1.02 of its time, over 49
products at M = 1024 to 8192, and a tile that fills the last turn better gains less than that at the power limit."""

ACCUMULATORS = 192
"""Most accumulators of a thread in a tile that is chosen: all that is legal. What an epilogue needs beside them is seen
only by compiling it; where it spills, ``compile_fitting`` takes a narrower tile."""

SHAPES = ((128, False), (256, False), (64, True), (128, True))
"""Rows of a tile, ping-pong."""

CLUSTERS = ((1, 2), (2, 1), (1, 1))
"""CTAs along M, along N."""

WIDTHS = 3
"""Schedules worth timing that differ in the width of the tile alone: neighbours take about as long."""


@lru_cache(maxsize=4096)
def choose(problem: Problem, target: Target) -> Schedule:
    """The schedule for a problem; legal for any N and K, or UnsupportedError naming why none is."""
    if target.arch != "sm_90a":
        raise UnsupportedError(
            f"target: got {target.arch}, expected sm_90a. Fix: compile the GEMM for a Hopper GPU"
        )
    if problem.unit > 256:
        raise ArgumentError(
            f"composition: got a unit of {problem.unit} columns, expected at most 256. "
            "Fix: split the composition"
        )
    widest = _widest(problem, target)
    rows = problem.expected_m
    if not rows:
        return widest
    return min(schedules(problem, target), key=lambda s: _rank(s, problem, rows))


def _rank(schedule: Schedule, problem: Problem, rows: int) -> tuple[float, int, bool, int]:
    """Clocks, a little more for all but 256x128 with 1x2; of equals, no rows in vain, then wide tiles."""
    height = schedule.tile_m * schedule.cluster_m
    tall = schedule.blocks > 1 and schedule.cluster_n > 1 and problem.policies <= 2
    cost = clocks(schedule, problem, rows, SMS) * (1.0 if tall else TALL)
    return cost, -rows % height, not tall, -schedule.tile_n


def _widest(problem: Problem, target: Target) -> Schedule:
    tile_n = min(256 // problem.unit, problem.rows // problem.unit) * problem.unit
    cluster = 1 if tile_n % 16 else 2
    found = _deepest(Schedule(128, tile_n, cluster), problem, target)
    need = shared_memory(found, problem)
    require(
        need <= target.smem_per_block,
        "composition",
        f"{staged_bytes(found, problem)} bytes of operands to stage ({need} in all)",
        f"at most {target.smem_per_block} bytes of shared memory",
        "merge vector operands, or split the composition",
        UnsupportedError,
    )
    return found


def schedules(problem: Problem, target: Target, most: int = ACCUMULATORS) -> Iterator[Schedule]:
    """Every legal schedule of at most ``most`` accumulators a thread, each with as many stages as fit: by default what
    ``choose`` chooses from.
    """
    units = min(2 * most // problem.unit, problem.rows // problem.unit)
    for count in range(units, 0, -1):
        for tile_m, pingpong in SHAPES:
            for cluster_m, cluster_n in CLUSTERS:
                found = Schedule(
                    tile_m,
                    count * problem.unit,
                    cluster_m,
                    cluster_n=cluster_n,
                    pingpong=pingpong,
                )
                if found.accumulators > most:
                    continue
                found = _deepest(found, problem, target)
                try:
                    found.check(problem, target)
                except ArgumentError:
                    continue
                yield found


def ranked(
    problem: Problem, target: Target, rows: int, most: int = ACCUMULATORS
) -> Iterator[Schedule]:
    """Those of ``schedules`` of least clocks for ``rows`` rows; of those that differ in width alone, ``WIDTHS``."""
    seen: Counter[Schedule] = Counter()
    legal = schedules(problem, target, most)
    for schedule in sorted(legal, key=lambda s: clocks(s, problem, rows, SMS)):
        family = replace(schedule, tile_n=8, stages=2)
        seen[family] += 1
        if seen[family] <= WIDTHS:
            yield schedule


def _deepest(schedule: Schedule, problem: Problem, target: Target) -> Schedule:
    """With as many stages as fit, ``DEEPEST`` at most and two at least."""
    for stages in range(DEEPEST, 2, -1):
        found = replace(schedule, stages=stages)
        if shared_memory(found, problem) <= target.smem_per_block:
            return found
    return replace(schedule, stages=2)


def narrower(schedule: Schedule, problem: Problem, target: Target) -> Schedule | None:
    """The like of a schedule with the next narrower tile, which needs fewer registers; None where there is none."""
    for step in (lcm(64, problem.unit), problem.unit):
        tile_n = (schedule.tile_n - 1) // step * step
        if tile_n:
            cluster = schedule.cluster_m if tile_n % 16 == 0 else 1
            found = replace(schedule, tile_n=tile_n, cluster_m=cluster, cluster_n=1)
            return _deepest(found, problem, target)
    return None
