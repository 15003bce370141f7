"""What a few-row kernel is asked to do, and how it goes about it.

A schedule's ``cluster`` and ``conversion`` decide in which order a sum is added and how it is rounded; nothing else
does. With them fixed, a row has the same bits whatever else is in its batch.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

import torch

from epicute.decode.geometry import BAND, pitch_of, shares_of
from epicute.errors import UnsupportedError, require
from epicute.jit import Target
from epicute.layouts import Record, Records

__all__ = [
    "BUCKETS",
    "CONVERSIONS",
    "FewRowProblem",
    "FewRowSchedule",
    "Shared",
    "bucket_of",
    "choose",
    "clusters_of",
    "expected_microseconds",
]

BUCKETS = (8, 16, 32, 64)
"""Rows of x that a kernel can be compiled for; more are served in tiles of the last."""

CLUSTERS = (1, 2, 4, 8)
CONVERSIONS = ("sums", "registers", "bias")

STAGED = 2
"""Buffers of staged operands."""

BARRIERS = 6
"""Barriers beside the ring's: of the sums, and of the staged operands."""

IN_FLIGHT = 48 << 10
"""Bytes of weights that may be under way to an SM: beyond, activations queue behind them."""

RING = 96 << 10
"""Bytes of the ring where there is room."""

FEWEST_SLOTS = 3
RESERVED = 1024
"""Bytes that each CTA takes beside what it asks for."""

REFERENCE_SMS = 132
STREAM = 4.4e6
"""Bytes of weights that all SMs read together, per microsecond."""

PER_SM = 60e3
"""Bytes that one SM reads per microsecond with ``IN_FLIGHT`` under way."""

PRODUCTS = {8: 91e3, 16: 85e3, 32: 75e3, 64: 38e3}
"""Weights that one SM multiplies per microsecond, by rows of x: conversion decides, then the tensor cores."""

INGRESS = 100e3
"""Bytes that one SM takes in per microsecond from L2 and memory together."""

EXCHANGE = {1: 0.0, 2: 0.4, 4: 0.6, 8: 0.9}
"""Microseconds at the end of a kernel for the exchange of sums in a cluster."""


@dataclass(frozen=True)
class FewRowProblem:
    """What decides which schedules are possible and good.

    Attributes:
        records: of the weight. depth: K. tile: physical rows of a tile (``geometry.tile_rows``).
        unit: physical rows of a unit. dtype: of x.
        staged: staged operands: float32 and int64 of a row of x, float32 of a unit.
        held: values of a row that a thread of the epilogue holds at once.
        gain: whether x is multiplied by a gain on its way in.
    """

    records: Records
    depth: int
    tile: int
    unit: int
    dtype: torch.dtype
    staged: tuple[int, int, int]
    held: int = 16
    gain: bool = False

    @property
    def record(self) -> Record:
        """One of the records."""
        return self.records.record

    @property
    def bands(self) -> int:
        """Bands of a tile."""
        return self.tile // BAND

    @property
    def tiles(self) -> int:
        """Tiles of the weight."""
        return -(-self.records.down // self.bands)

    @property
    def staged_rows(self) -> int:
        """Physical rows whose column operands are staged together: of a tile, or of the unit it is a part of."""
        return max(self.tile, self.unit)

    @property
    def parts(self) -> int:
        """Tiles of a unit; 1 where a tile holds whole units."""
        return self.staged_rows // self.tile

    def chunks(self, cluster: int) -> int:
        """Records along k of one CTA of a cluster, at most."""
        return -(-self.records.along // cluster)


@dataclass(frozen=True)
class FewRowSchedule:
    """How a kernel goes about it.

    Attributes:
        rows: of x that a tile serves: 8, 16, 32 or 64.
        cluster: CTAs that share a tile's k: 1, 2, 4 or 8.
        slots: records that the ring holds. in_flight: of them under way at once.
        chunks: records' worth of x along k that shared memory holds. Where that is all of a CTA's share, x is read
            once; else it is read again for every band.
        conversion: how INT4 codes become numbers (see ``sm90.convert``): ``"sums"``, ``"registers"`` or ``"bias"``.
        resident: CTAs on an SM, 1 or 2: with 2, that of the next kernel loads weights beside this one's.
        evict_first: whether weights leave L2 before anything else does.
        late: start the next kernel when this one's last weights are under way, not at once. Slower: CTAs of one kernel
            then crowd some SMs and leave others idle, which is what tests of the ring want.
    """

    rows: int
    cluster: int = 1
    slots: int = 6
    in_flight: int = 3
    chunks: int = 1
    conversion: str = "registers"
    resident: int = 1
    evict_first: bool = True
    late: bool = False

    def check(self, problem: FewRowProblem, target: Target) -> None:
        """Raise ArgumentError unless the schedule fits problem and target."""
        fix = "leave schedule out to have one chosen"
        for name, choices in (
            ("rows", BUCKETS),
            ("cluster", CLUSTERS),
            ("conversion", CONVERSIONS),
            ("resident", (1, 2)),
        ):
            got = getattr(self, name)
            require(got in choices, f"schedule.{name}", repr(got), f"one of {choices}", fix)
        along = problem.records.along
        require(
            self.cluster <= along,
            "schedule.cluster",
            self.cluster,
            f"at most {along}, the records along k",
            "use a smaller cluster",
        )
        require(
            self.slots >= 2 and 1 <= self.in_flight <= self.slots,
            "schedule.in_flight",
            f"{self.in_flight} of {self.slots} slots",
            "at least one, at most all, of two or more",
            "give a ring of more slots",
        )
        most = problem.chunks(self.cluster)
        require(
            1 <= self.chunks <= most,
            "schedule.chunks",
            self.chunks,
            f"1 to {most}, the records along k of a CTA",
            fix,
        )
        size, limit = Shared(problem, self).size, room(target, self.resident)
        require(
            size <= limit,
            "schedule",
            f"{size} B of shared memory",
            f"at most {limit} B",
            "use fewer slots or chunks",
        )

    @property
    def owned(self) -> int:
        """Rows of x whose sums one CTA finishes."""
        return self.rows // self.cluster

    def __str__(self) -> str:
        return (
            f"{self.rows} rows, cluster of {self.cluster}, {self.slots} slots, {self.in_flight} in flight, "
            f"{self.chunks} chunks of x, {self.conversion}, {self.resident} to an SM"
        )


@dataclass(frozen=True)
class Shared:
    """Where everything stands in shared memory, in bytes from its start.

    ring | x | partial sums | staged float32, two buffers | staged int64, two buffers | barriers
    """

    problem: FewRowProblem
    schedule: FewRowSchedule

    @property
    def slot(self) -> int:
        """Bytes from one record in the ring to the next."""
        return _rounded(self.problem.record.size)

    @property
    def x(self) -> int:
        """Start of the activations."""
        return self.slot * self.schedule.slots

    @property
    def chunk(self) -> int:
        """Bytes of one record's worth of x."""
        return self.problem.record.depth * self.schedule.rows * 2

    @property
    def sums(self) -> int:
        """Start of the partial sums."""
        return self.x + self.chunk * self.schedule.chunks

    @property
    def senders(self) -> int:
        """Partial sums of one sum."""
        return shares_of(self.problem.record.bits) * self.schedule.cluster

    @property
    def floats(self) -> int:
        """Start of the staged float32."""
        count = self.senders * self.schedule.owned * pitch_of(self.problem.tile)
        return self.sums + _rounded(4 * count)

    @property
    def float_count(self) -> int:
        """Staged float32 of one buffer."""
        row, _, unit = self.problem.staged
        count = row * self.schedule.rows + unit * (self.problem.staged_rows // self.problem.unit)
        return -(-count // 32) * 32

    @property
    def integers(self) -> int:
        """Start of the staged int64."""
        return self.floats + _rounded(STAGED * 4 * self.float_count)

    @property
    def integer_count(self) -> int:
        """Staged int64 of one buffer."""
        return self.problem.staged[1] * self.schedule.rows

    @property
    def barriers(self) -> int:
        """Start of the barriers: full and empty of each slot, then the others."""
        return self.integers + _rounded(STAGED * 8 * self.integer_count)

    @property
    def size(self) -> int:
        """Bytes of all."""
        return self.barriers + _rounded(8 * (2 * self.schedule.slots + BARRIERS))


def _rounded(size: int) -> int:
    return -(-size // 128) * 128


def room(target: Target, resident: int) -> int:
    """Bytes of shared memory that each of ``resident`` CTAs on an SM may have."""
    whole = target.smem_per_block
    return whole if resident == 1 else whole // resident - RESERVED


def clusters_of(multiprocessors: int, cluster: int) -> int:
    """Clusters that are sure to run at once: those of 4 and 8 stay within the 16 SMs that every GPC has."""
    if cluster <= 2:
        return max(multiprocessors // cluster, 1)
    return max(multiprocessors // 16 * (16 // cluster), 1)


def bucket_of(rows: int) -> int:
    """The smallest bucket that holds ``rows`` of x, the largest where none does."""
    return next((b for b in BUCKETS if rows <= b), BUCKETS[-1])


@lru_cache(maxsize=1024)
def choose(
    problem: FewRowProblem, rows: int, target: Target, invariant: bool = False
) -> FewRowSchedule:
    """A legal schedule for ``rows`` of x (a bucket), by a model of the H200.

    Args:
        invariant: choose what orders and rounds sums alike for all buckets.

    Raises UnsupportedError where no schedule fits: units or heads too wide for so many rows.
    """
    judged = 32 if invariant else rows
    conversion = "registers" if invariant or rows > 16 else "sums"
    found = []
    for cluster in CLUSTERS:
        if cluster <= problem.records.along:
            mine = _fitted(problem, FewRowSchedule(rows, cluster, conversion=conversion), target)
            like = _fitted(problem, FewRowSchedule(judged, cluster, conversion=conversion), target)
            if mine is not None:
                found.append((expected_microseconds(problem, like or mine), cluster, mine))
    require(
        bool(found),
        "composition",
        f"units of {problem.unit} rows, {rows} rows of x",
        f"sums and operands that fit {target.smem_per_block} B of shared memory",
        "use fewer rows, or a projection for each range of columns",
        UnsupportedError,
    )
    return min(found, key=lambda entry: entry[:2])[2]


def _fitted(
    problem: FewRowProblem, schedule: FewRowSchedule, target: Target
) -> FewRowSchedule | None:
    """With ring and activations of the best sizes there is room for."""
    slot = Shared(problem, schedule).slot
    whole = problem.chunks(schedule.cluster)
    flight = max((IN_FLIGHT + slot // 2) // slot, 1)
    wanted = max(RING // slot, FEWEST_SLOTS)
    for resident, chunks, least in ((2, whole, flight + 1), (1, whole, flight), (1, 0, flight)):
        if resident == 2 and (schedule.rows > 16 or problem.held > 16):
            continue  # they would not fit the registers
        tried = replace(
            schedule, resident=resident, slots=max(least, FEWEST_SLOTS), chunks=chunks or 1
        )
        left = room(target, resident) - Shared(problem, tried).size
        if left < 0:
            continue
        more = left // Shared(problem, tried).chunk if chunks == 0 else 0
        tried = replace(tried, chunks=min(tried.chunks + more, whole))
        left = room(target, resident) - Shared(problem, tried).size
        slots = min(tried.slots + max(left - 256, 0) // slot, max(wanted, tried.slots))
        return replace(tried, slots=slots, in_flight=min(flight, slots))
    return None


def expected_microseconds(problem: FewRowProblem, schedule: FewRowSchedule) -> float:
    """What a kernel is expected to take on the reference GPU, launch apart."""
    record, cluster = problem.record, schedule.cluster
    rounds = -(-problem.tiles // clusters_of(REFERENCE_SMS, cluster))
    chunks = problem.chunks(cluster)
    records = rounds * problem.bands * chunks
    weights = records * record.size
    whole = schedule.chunks >= chunks
    x = (1 if whole else rounds * problem.bands) * chunks * record.depth * schedule.rows * 2
    products = records * record.rows * record.depth / PRODUCTS[schedule.rows]
    slowest = max(weights / PER_SM, products, (weights + x) / INGRESS)
    # While x comes in, the ring fills; beyond, and wherever x is read again, nothing is multiplied.
    ring = schedule.slots * record.size / PER_SM if whole else 0.0
    exposed = max(x / INGRESS - ring, 0.0)
    return max(problem.records.nbytes / STREAM, slowest) + exposed + EXCHANGE[cluster]
