"""What is compiled for a problem: tile, cluster and stages.

A tile is ``tile_m`` rows of A by ``tile_n`` packed rows of B; each pipeline stage holds 128 bytes of K of both. Shared
memory is a tested sum, so that a schedule that does not fit is refused before anything is traced.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import torch

from epicute.errors import require
from epicute.gemm.panels import ring_bytes
from epicute.jit import Target

__all__ = ["DTYPES", "Problem", "Schedule", "accumulation", "shared_memory", "typed"]

DTYPES = (torch.bfloat16, torch.float16, torch.float8_e4m3fn)
"""Dtypes of A and B."""

DEPTH_BYTES = 128
"""Bytes of K in a stage: one swizzle atom."""

BARRIER_BYTES = 16
"""Bytes of a stage's two barriers."""

RESERVED = 384
"""Bytes that aligning the buffers may cost: three begin at multiples of 128."""

WGMMA_WIDTH = 256
"""Columns of the widest WGMMA, and rows of the tallest box of TMA; a wider tile is loaded and multiplied in halves."""

ACCUMULATORS = 192
"""Most accumulators of a thread, of 240 registers."""


@dataclass(frozen=True)
class Problem:
    """What a projection asks for.

    Attributes:
        columns: N, logical output features. rows: packed rows of B, padding included. depth: K, elements.
        dtype: of A and B. unit: packed rows that must stay in one tile. staged: bytes per tile of operands that are
            kept in shared memory, for one buffer: (per tile row, per unit). streamed: bytes that a row of a unit has of
            a matrix operand that comes by TMA. policies: that a column goes through, at most.
        expected_m: rows to tune for; None where unknown.
        accumulate: ``"fast"`` or ``"precise"``; see ``accumulation``.
    """

    columns: int
    rows: int
    depth: int
    dtype: torch.dtype
    unit: int
    staged: tuple[int, int] = (0, 0)
    expected_m: int | None = None
    accumulate: str = "fast"
    streamed: int = 0
    policies: int = 1


@dataclass(frozen=True)
class Schedule:
    """How the tiles are computed.

    Attributes:
        tile_m: rows of A; tile_n: packed rows of B. cluster_m, cluster_n: CTAs of a cluster along M, which share B, and
            along N, which share A. stages: of the pipeline.
        slots: panels of each consumer warpgroup's output ring (see ``panels``); 0 stores straight from registers.
        pingpong: each consumer warpgroup has tiles of its own, and one's epilogue runs beside the other's mainloop;
            otherwise both share every tile.
        prefetch: half-way through a tile's products, its part of a streamed matrix operand is fetched into L2, from
            which it comes behind them; otherwise it comes from memory then, for all SMs at the same time.
        keep: L2 is asked to keep A, which all tiles along N read again, rather than B, which passes once.
    """

    tile_m: int = 128
    tile_n: int = 256
    cluster_m: int = 2
    stages: int = 4
    slots: int = 0
    cluster_n: int = 1
    pingpong: bool = False
    prefetch: bool = False
    keep: bool = False

    @property
    def sharers(self) -> int:
        """Consumer warpgroups that share a tile."""
        return 1 if self.pingpong else 2

    @property
    def blocks(self) -> int:
        """Blocks of 64 tile rows that a consumer warpgroup has."""
        return self.tile_m // (64 * self.sharers)

    @property
    def parts(self) -> int:
        """Halves in which the columns of a tile are loaded and multiplied; 1 where they fit one WGMMA."""
        return 2 if self.tile_n > WGMMA_WIDTH else 1

    @property
    def accumulators(self) -> int:
        """Of a consumer thread."""
        return self.blocks * self.tile_n // 2

    @property
    def cluster(self) -> int:
        """CTAs of a cluster."""
        return self.cluster_m * self.cluster_n

    def check(self, problem: Problem, target: Target) -> None:
        """Refuse a schedule that the problem or the target does not allow.

        Clusters of four are no part of it: with 32 of them on an H200, 2x2 and 4x1 took 1.5 to 1.9
        times as long as 2x1.
        """
        self._check_types()
        legal = (64 * self.sharers, 128 * self.sharers)
        # What is wrong for one mode may be right for the other.
        other = "leave pingpong out" if self.pingpong else "set pingpong=True"
        swapped = self.tile_m in ((128, 256) if self.pingpong else (64, 128))
        require(
            self.tile_m in legal,
            "Schedule.tile_m",
            self.tile_m,
            f"{legal[0]} or {legal[1]} {'with' if self.pingpong else 'without'} ping-pong "
            "(64 or 128 rows for each consumer warpgroup)",
            f"use {legal[0]}"
            + (f", or {other}, which makes {self.tile_m} legal" if swapped else ""),
        )
        require(
            self.tile_n % (8 * self.parts) == 0 and 8 <= self.tile_n <= 2 * WGMMA_WIDTH,
            "Schedule.tile_n",
            self.tile_n,
            f"a multiple of 8 up to {WGMMA_WIDTH}, the width of a WGMMA, or of 16 up to {2 * WGMMA_WIDTH}",
            "use 256, 192, 160 or 128",
        )
        require(
            self.tile_n % problem.unit == 0,
            "Schedule.tile_n",
            self.tile_n,
            f"a multiple of the composition's unit, {problem.unit} columns",
            f"use {WGMMA_WIDTH // problem.unit * problem.unit}",
        )
        require(
            problem.accumulate == "fast"
            or (self.blocks == self.parts == 1 and self.tile_n % 16 == 0),
            "Schedule",
            f"{self.tile_m}x{self.tile_n} with precise accumulation",
            f"{64 * self.sharers} rows and a multiple of 16 columns up to 256 (halves are added apart; more spills)",
            f"use {64 * self.sharers}x256, or accumulate='fast'",
        )
        require(
            self.accumulators <= ACCUMULATORS,
            "Schedule",
            f"{self.tile_m}x{self.tile_n}",
            f"at most {64 * self.sharers}x{2 * ACCUMULATORS} accumulators, {ACCUMULATORS} registers a thread",
            f"use a tile_n of at most {2 * ACCUMULATORS // self.blocks}",
        )
        require(
            self.blocks == 1 or problem.unit <= 64,
            "Schedule.tile_m",
            f"{self.tile_m} with a unit of {problem.unit} columns",
            f"{64 * self.sharers} where a unit is wider than 64 columns (four rows of it spill)",
            f"use {64 * self.sharers}",
        )
        require(
            self.cluster_m == 1 or (self.cluster_m == 2 and self.tile_n % (16 * self.parts) == 0),
            "Schedule.cluster_m",
            self.cluster_m,
            f"1, or 2 where tile_n is a multiple of {16 * self.parts} (each CTA loads half of B)",
            "use 1",
        )
        even = -(-problem.rows // self.tile_n) % 2 == 0
        require(
            self.cluster_n == 1 or (self.cluster_n == 2 and self.cluster_m == 1 and even),
            "Schedule.cluster_n",
            self.cluster_n,
            "1, or 2 where cluster_m is 1 and the tiles along N are even in number",
            "use 1",
        )
        require(
            self.slots == 0 or 2 <= self.slots <= 16,
            "Schedule.slots",
            self.slots,
            "0, or 2 to 16",
            "use 0, which stores straight from registers",
        )
        require(
            self.slots == 0 or self.blocks == 1,
            "Schedule.slots",
            f"{self.slots} with tile_m {self.tile_m}",
            f"0, or 2 to 16 with tile_m {64 * self.sharers}",
            f"use 0, or tile_m={64 * self.sharers}",
        )
        require(
            self.stages >= 2,
            "Schedule.stages",
            self.stages,
            "at least 2 (one is filled while another is multiplied)",
            "use 3 or more",
        )
        self._check_memory(problem, target.smem_per_block)

    def _check_types(self) -> None:
        for field in fields(self):
            wanted, given = type(field.default), getattr(self, field.name)
            if type(given) is not wanted:
                require(
                    False,
                    f"Schedule.{field.name}",
                    typed(given),
                    "True or False" if wanted is bool else "an int",
                    f"write one, as {field.name}={field.default}",
                )

    def _check_memory(self, problem: Problem, most: int) -> None:
        need = shared_memory(self, problem)
        stages = self.stages - -(-max(need - most, 0) // (stage_bytes(self) + BARRIER_BYTES))
        fixes = [f"{stages} stages"] if stages >= 2 else []
        fixes += ["a smaller tile", *(["fewer slots"] if self.slots else [])]
        slots = f" and {self.slots} slots" if self.slots else ""
        require(
            need <= most,
            "Schedule.stages",
            f"{self.stages} ({need} bytes of shared memory with {self.tile_m}x{self.tile_n}{slots})",
            f"at most {most} bytes",
            f"use {' or '.join(fixes)}",
        )

    def __str__(self) -> str:
        ring = f", output ring of {self.slots}" if self.slots else ""
        tile = f"{self.tile_m}x{self.tile_n}{' ping-pong' if self.pingpong else ''}"
        more = f"{', prefetch' if self.prefetch else ''}{', keep' if self.keep else ''}"
        cluster = f"cluster {self.cluster_m}x{self.cluster_n}"
        return f"{tile}, {cluster}, {self.stages} stages{ring}{more}"


def typed(given: Any) -> str:
    """A value of the wrong type as an error shows it: ``'64' (str)``."""
    return f"{given!r} ({type(given).__name__})"


def accumulation(dtype: torch.dtype, depth: int, asked: str | None) -> str:
    """How products are added: ``asked``, or the default for a dtype and K.

    ``"fast"``: in the tensor core alone, which for float8 keeps 13 fraction bits and truncates every product.
    ``"precise"``: float8 in blocks of 128 products, added in float32. The default is fast for 16-bit operands, whose
    tensor core accumulates in float32, and for float8 up to K = 256, two blocks; beyond, the error of fast grows with
    K where the operands have a mean.
    """
    require(
        asked in (None, "fast", "precise"),
        "accumulate",
        repr(asked),
        "'fast', 'precise' or None",
        "leave it out for the default",
    )
    if dtype != torch.float8_e4m3fn:
        require(
            asked != "precise",
            "accumulate",
            "'precise'",
            f"'fast' for {dtype}, which accumulates in float32 anyway",
            "leave it out",
        )
        return "fast"
    return asked or ("fast" if depth <= 256 else "precise")


def stage_bytes(schedule: Schedule) -> int:
    """Bytes of one pipeline stage."""
    return (schedule.tile_m + schedule.tile_n) * DEPTH_BYTES


def staged_bytes(schedule: Schedule, problem: Problem) -> int:
    """Bytes of both buffers of staged operands."""
    per_row, per_unit = problem.staged
    one = per_row * schedule.tile_m + per_unit * (schedule.tile_n // problem.unit)
    return 2 * (-(-one // 128) * 128)


def streamed_bytes(schedule: Schedule, problem: Problem) -> int:
    """Bytes of both warpgroups' buffers of a streamed operand in ping-pong; otherwise it takes stages."""
    if not schedule.pingpong:
        return 0
    return 2 * schedule.tile_m * (schedule.tile_n // problem.unit) * problem.streamed


def shared_memory(schedule: Schedule, problem: Problem) -> int:
    """Bytes of shared memory a CTA needs."""
    barriers = BARRIER_BYTES * schedule.stages + 64
    return (
        schedule.stages * stage_bytes(schedule)
        + staged_bytes(schedule, problem)
        + streamed_bytes(schedule, problem)
        + ring_bytes(schedule.slots)
        + barriers
        + RESERVED
    )
