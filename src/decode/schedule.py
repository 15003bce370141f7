"""What a few-row kernel is asked to do, and how it goes about it.

A schedule's ``mma``, ``cluster`` and ``conversion`` decide in which order a sum is added and how it is rounded, and of
``wgmma`` whether several tiles are held together; nothing else does. With them fixed, a row has the same bits whatever
else is in its batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from epicute.decode.geometry import BAND, MMAS, pitch_of, shares_of, span_of, warp_rows
from epicute.errors import require
from epicute.jit import Target
from epicute.layouts import BLOCK, Record, Records

__all__ = [
    "BUCKETS",
    "CONVERSIONS",
    "FEWEST",
    "FewRowProblem",
    "FewRowSchedule",
    "Shared",
    "bucket_of",
    "clusters_of",
    "most_wide",
    "turned",
    "turns",
]

BUCKETS = (8, 16, 32, 64)
"""Rows of x that a kernel can be compiled for; more are served in tiles of the last."""

FEWEST = 4
"""Rows up to which INT4 weights have a kernel of eight rows of their own, to which activations are integers: what these
cost is by the row, and what they save is not.
"""

MOST_TURNED = 16
"""Rows that become integers where TMA has brought them: sums of more spill, and what they save is what they cost."""

CLUSTERS = (1, 2, 4, 8)
CONVERSIONS = ("integers", "sums", "registers", "bias")

LINE = 128
ATOM = 1024
"""Bytes of eight rows of the 128-byte swizzle."""

WARP = 32
STAGED = 2
"""Buffers of staged operands."""

BARRIERS = 2 * STAGED
"""Barriers of the staged operands; each buffer of partial sums has two more, and so has each of a cluster's sums."""

ARRIVING = {8: 4, 16: 4, 32: 2, 64: 2}
"""Tiles whose sums may be on their way to a CTA of a cluster at once, by rows of x."""

HELD = {"sync": 80, "wgmma": 120}
"""Registers of a thread for sums that are held while x is read; of ``wgmma``, those of products under way too."""

WIDEST = 8
"""Tiles held together, at most: each has code of its own."""


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
        chunks: of x along k that shared memory holds, a record's worth each, or half of that (``Shared.pieces``).
            Where that is all of a CTA's share, x is read once; else again for every ``wide`` tiles.
        conversion: how INT4 codes become numbers (see ``sm90.convert``): ``"sums"``, ``"registers"`` or ``"bias"``; or
            ``"integers"``, x becomes integers (see ``sm90.integers``). With ``mma`` ``"wgmma"`` one of
            ``"registers"`` and ``"integers"``: the others would be one more product for each.
        evict_first: whether weights leave L2 before anything else does.
        late: start the next kernel when this one's last weights are under way, not at once. Slower: CTAs of one kernel
            then crowd some SMs and leave others idle, which is what tests of the ring want.
        wide: tiles whose sums a CTA holds in registers while it goes once along k, where x is read again for each: x is
            read that many times less. sums: buffers of a tile's partial sums: with two, the sums of a tile are added
            up while those of the next are written.
        each_lane: whether every lane of a warp arrives where else its first does for all, behind a barrier of the warp:
            as correct and slower, but all that racecheck of compute-sanitizer follows.
        mma: ``"sync"``, each warp by itself with `mma.sync`, or ``"wgmma"``, two warpgroups with the weights as the
            register operand of `wgmma`, from the same packed bytes.
    """

    rows: int
    cluster: int = 1
    slots: int = 6
    in_flight: int = 3
    chunks: int = 1
    conversion: str = "registers"
    evict_first: bool = True
    late: bool = False
    each_lane: bool = False
    mma: str = "sync"
    wide: int = 1
    sums: int = 1

    def check(self, problem: FewRowProblem, target: Target) -> None:
        """Raise ArgumentError unless the schedule fits problem and target."""
        fix = "leave schedule out to have one chosen"
        for name, choices in (
            ("rows", BUCKETS),
            ("cluster", CLUSTERS),
            ("conversion", CONVERSIONS),
            ("mma", MMAS),
        ):
            got = getattr(self, name)
            require(got in choices, f"schedule.{name}", repr(got), f"one of {choices}", fix)
        require(
            self.mma == "sync" or self.conversion in ("registers", "integers"),
            "schedule.conversion",
            repr(self.conversion),
            "'registers' or 'integers' with mma 'wgmma': offsets of sums would cost it a second product",
            "write replace(schedule, conversion='registers')",
        )
        along = problem.records.along
        require(
            self.conversion != "integers" or problem.record.bits == 4,
            "schedule.conversion",
            repr(self.conversion),
            f"'registers' for weights of {problem.record.bits} bits",
            "write replace(schedule, conversion='registers')",
        )
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
        most = Shared(problem, self).held
        require(
            1 <= self.chunks <= most,
            "schedule.chunks",
            self.chunks,
            f"1 to {most}, those of a CTA's share of k",
            fix,
        )
        if turned(self):
            require(
                turns(problem, self.rows) and self.chunks == most,
                "schedule.conversion",
                f"'integers' with mma 'wgmma', {self.rows} rows, {self.chunks} of {most} chunks of x held",
                f"up to {MOST_TURNED} rows, all chunks, of an even number of blocks of 64 k, no gain",
                "write replace(schedule, conversion='registers')",
            )
        limit = most_wide(problem, self)
        require(
            1 <= self.wide <= limit and (self.wide == 1 or self.chunks < most),
            "schedule.wide",
            f"{self.wide}, {self.chunks} of {most} chunks of x held",
            f"1 to {limit}, beyond 1 where x is read again",
            fix,
        )
        require(1 <= self.sums <= WIDEST, "schedule.sums", self.sums, f"1 to {WIDEST} buffers", fix)
        size, limit = Shared(problem, self).size, target.smem_per_block
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

    @property
    def arriving_lanes(self) -> int:
        """Lanes of a warp that arrive where all of it has."""
        return WARP if self.each_lane else 1

    def __str__(self) -> str:
        return (
            f"{self.rows} rows, cluster of {self.cluster}, {self.slots} slots, {self.in_flight} in flight, "
            f"{self.chunks} chunks of x, {self.wide} tiles wide, {self.mma}, {self.conversion}"
        )


@dataclass(frozen=True)
class Shared:
    """Where everything stands in shared memory, in bytes from its start.

    ring | x | partial sums | sums that arrive | staged float32, two buffers | staged int64, two buffers | barriers
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
        return _rounded(self.slot * self.schedule.slots, self.alignment)

    @property
    def alignment(self) -> int:
        """Bytes that the whole, and the activations in it, start at a multiple of: of the swizzle's."""
        return LINE if self.schedule.conversion == "integers" and not self.direct else ATOM

    @property
    def direct(self) -> bool:
        """Whether x comes by TMA as it is. Else consumers copy it: with gains, so few rows that they are there as soon,
        as integers of `mma.sync`, or of one block of k, of which TMA would not know where it ends. Integers of `wgmma`
        are made of what it has brought, where that is.
        """
        if self.problem.gain or self.problem.depth <= BLOCK:
            return False
        if self.schedule.conversion == "integers":
            return turned(self.schedule)
        return self.schedule.rows > BUCKETS[0]

    @property
    def pieces(self) -> int:
        """Chunks of x that go with a record: two where so many rows of it are so large that few whole ones fit."""
        record, schedule = self.problem.record, self.schedule
        wanted = schedule.mma == "wgmma" and schedule.rows == BUCKETS[-1] and schedule.wide == 1
        alone = record.group == 0 or record.depth // 2 % record.group == 0  # not one scale for all
        return 2 if self.direct and wanted and alone and record.blocks % 2 == 0 else 1

    @property
    def held(self) -> int:
        """Chunks of x of a CTA's whole share of k, at most."""
        return self.problem.chunks(self.schedule.cluster) * self.pieces

    @property
    def brought(self) -> int:
        """Bytes of one chunk of x, its factors apart."""
        return self.problem.record.depth // self.pieces * self.schedule.rows * 2

    @property
    def chunk(self) -> int:
        """Bytes from one chunk of x to the next."""
        if self.schedule.conversion != "integers":
            return self.brought
        spans = self.problem.record.depth // span_of(self.problem.record)
        return self.brought + _rounded(8 * spans * self.schedule.rows, self.alignment)

    def factor_place(self, span: Any, row: Any) -> Any:
        """Where the factor of a span of a row of x is, as integers, from its record's start on: a float32 and the sum
        of the integers.
        """
        rows = self.schedule.rows
        return self.problem.record.depth * rows * 2 + (span * rows + row) * 8

    @property
    def sums(self) -> int:
        """Start of the partial sums."""
        return self.x + self.chunk * self.schedule.chunks

    @property
    def shares(self) -> int:
        """Partial sums of one sum in a CTA."""
        return shares_of(self.problem.record.bits, self.schedule.mma, self.schedule.wide > 1)

    @property
    def sum(self) -> int:
        """Bytes of one sum of all of a tile, as it lies in shared memory."""
        return 4 * self.schedule.rows * pitch_of(self.problem.tile)

    @property
    def exchange(self) -> int:
        """Bytes of one tile's partial sums."""
        return _rounded(self.shares * self.sum)

    @property
    def arrivals(self) -> int:
        """Start of the sums that CTAs of a cluster send each other: of every sender, the rows of x that this one
        finishes.
        """
        return self.sums + self.exchange * self.schedule.sums

    @property
    def arrival(self) -> int:
        """Bytes of one tile's sums that arrive."""
        return _rounded(self.sum)

    @property
    def arriving(self) -> int:
        """Buffers of sums that arrive."""
        return ARRIVING[self.schedule.rows] if self.schedule.cluster > 1 else 0

    @property
    def others(self) -> int:
        """Barriers beside those of the ring of weights and of x."""
        return BARRIERS + 2 * (self.schedule.sums + self.arriving)

    @property
    def floats(self) -> int:
        """Start of the staged float32."""
        return self.arrivals + self.arrival * self.arriving

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
        pairs = self.schedule.slots + self.schedule.sums + self.arriving
        count = 2 * (pairs + self.schedule.chunks * self.direct) + BARRIERS
        return self.barriers + _rounded(8 * count)


def _rounded(size: int, unit: int = LINE) -> int:
    return -(-size // unit) * unit


def turned(schedule: FewRowSchedule) -> bool:
    """Whether activations become integers where TMA has brought them."""
    return schedule.mma == "wgmma" and schedule.conversion == "integers"


def turns(problem: FewRowProblem, rows: int) -> bool:
    """Whether they may (``turned``): of codes, without gains; two blocks of 64 k become rows of 128 bytes."""
    record = problem.record
    whole = record.blocks % 2 == 0 and problem.depth > BLOCK
    return record.bits == 4 and whole and not problem.gain and rows <= MOST_TURNED


def most_wide(problem: FewRowProblem, schedule: FewRowSchedule) -> int:
    """Tiles whose sums fit the registers; 1 where a tile is several bands. Of `wgmma` each warpgroup holds half of
    them.
    """
    if problem.bands > 1:
        return 1
    registers = schedule.rows * warp_rows(problem.record.bits, schedule.mma) // WARP
    if schedule.mma == "wgmma":
        held = (HELD[schedule.mma] - schedule.rows) // registers
        return min(2 * held, WIDEST) if held else 1
    return min(max(HELD[schedule.mma] // registers, 1), WIDEST)


def clusters_of(multiprocessors: int, cluster: int) -> int:
    """Clusters that are sure to run at once. Those of 4 and 8 stay within a GPC and leave SMs of most idle: of an
    eighth of the SMs nothing is expected (see ``occupancy``).
    """
    share = multiprocessors if cluster <= 2 else multiprocessors * 7 // 8
    return max(share // cluster, 1)


def bucket_of(rows: int) -> int:
    """The smallest bucket that holds ``rows`` of x, the largest where none does."""
    return next((b for b in BUCKETS if rows <= b), BUCKETS[-1])
