"""Several candidates beside each other: built, checked, and timed in interleaved slices.

    round 0 (dropped)   … A A A | … C C C | … B B B        one slice each: a lead-in, then timed
    round 1             … C C C | … A A A | … B B B        a new order every round
    round 2             … B B B | … A A A | … C C C

The order is drawn at random, so that nobody always runs behind the same neighbour. It depends on the
case and the round alone, so that every run has the same orders.

A call's time is the median over rounds of the median over a slice. Whatever a candidate raises, in
building, checking, capturing or timing, is kept under ``failed`` and takes it out of the session,
and nothing else.
"""

from __future__ import annotations

import gc
import hashlib
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any, Protocol, TypeVar

import torch

from benchmarks.check import Error
from benchmarks.power import Reading
from benchmarks.resume import Progress, place
from benchmarks.table import Row, Table, label
from benchmarks.timing import Run, Slice, Timer

__all__ = ["LAYERS", "PROTOCOL", "SHARDS", "Options", "Session", "fill", "shuffled"]

LAYERS = ("qkv", "o", "gate_up", "down")

SHARDS = {
    f"shard-{n}x{k}": (n, k) for n, k in ((1280, 8192), (2304, 16384), (3584, 8192), (7168, 8192))
}
"""(N, K) of projections as one GPU of a tensor-parallel group has them, by the table's name."""

PROTOCOL = (
    "candidates interleaved in one process in a new random order every round, each in a CUDA graph "
    "over rotating copies of weights, activations and outputs (at least 300 MB between two reads of "
    "a byte), random normal data, CUDA events, median over {rounds} rounds of the median over a "
    "slice of {slice_ms:g} ms, which begins after {lead_ms:g} ms of the candidate's own untimed "
    "calls, default clocks; error: worst output of the timed kernel against float64 on "
    "{rows} rows, an FP8 output's own rounding (about 0.026) included"
)


@dataclass(frozen=True)
class Options:
    """What a run measures and how long it takes over it.

    Attributes:
        shapes, layers, M: every layer of every shape at every M.
        shards: whether the tensor-parallel shards come behind them.
        lengths: tokens of a request, in tables of attention, layers and models.
        checkpoint, text: folder of the model in ``prefill-model``, and what it is to read.
        device: torch's name of it.
        rounds: slices per candidate that count.
        lead_us: untimed calls at the beginning of a slice.
        slice_us: the timed calls behind them.
        check_rows: rows that are checked.
        quack: whether quack is a peer.
        tries: schedules that ``search`` times beside the chosen one.
        accumulate: how float8 products are added in ``search``.
        progress: rows of earlier runs, and until when this one may go on.
    """

    shapes: tuple[str, ...]
    layers: tuple[str, ...] = LAYERS
    M: tuple[int, ...] = (2048,)
    shards: bool = False
    lengths: tuple[int, ...] = ()
    checkpoint: Path | None = None
    text: Path | None = None
    device: str = "cuda"
    rounds: int = 5
    lead_us: float = 60000.0
    slice_us: float = 30000.0
    check_rows: int = 64
    quack: bool = False
    tries: int = 12
    accumulate: str = "fast"
    progress: Progress = field(default_factory=Progress, compare=False)

    def shortened(self) -> Options:
        """The same in about a tenth of the time, for a look rather than a claim."""
        return replace(self, rounds=3, lead_us=10000.0, slice_us=6000.0)

    @property
    def protocol(self) -> str:
        """The protocol sentence of these options."""
        lead, timed = self.lead_us / 1000, self.slice_us / 1000
        return PROTOCOL.format(
            rounds=self.rounds, lead_ms=lead, slice_ms=timed, rows=self.check_rows
        )


def shuffled(names: Iterable[str], text: str, turn: int) -> list[str]:
    """``names``, each different, in the order drawn for round ``turn`` of the case ``text``.

    The same in every process; who is missing does not change the order of the others.
    """

    def drawn(name: str) -> bytes:
        return hashlib.sha256(f"{text}\n{turn}\n{name}".encode()).digest()

    return sorted(names, key=drawn)


@dataclass
class Session:
    """One case: candidates that are built, checked against a reference and timed together.

    Attributes:
        timer: how a slice is timed.
        rounds: slices per candidate that count.
        text: the case in words; the order of candidates depends on it.
        errors: worst error of each checked candidate.
        failed: what each failed candidate raised.
        times: median µs of each round, by candidate.
        readings: the card's sensors in each round, by candidate.
    """

    timer: Timer
    rounds: int
    text: str = ""
    errors: dict[str, Error] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
    times: dict[str, list[float]] = field(default_factory=dict)
    readings: dict[str, list[Reading]] = field(default_factory=dict)
    _ready: dict[str, Run] = field(default_factory=dict)

    @contextmanager
    def _keeping(self, name: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            self.failed[name] = told(error)
            self._ready.pop(name, None)
            self.times.pop(name, None)
            self.readings.pop(name, None)

    def add(
        self, name: str, build: Callable[[], Run], check: Callable[[Run], Error] | None = None
    ) -> None:
        """Build a candidate and check its result; ``check`` raises where it is wrong."""
        with self._keeping(name):
            run = build()
            if check is not None:
                self.errors[name] = check(run)
            self._ready[name] = run

    def measure(self, copies: int, least_us: float) -> None:
        """Time every candidate that went through so far; see Timer for the arguments."""
        slices: dict[str, Slice] = {}
        for name, run in list(self._ready.items()):
            with self._keeping(name):
                slices[name] = self.timer.prepare(run, copies, least_us)
                self.times[name], self.readings[name] = [], []
        for turn in range(self.rounds + 1):
            left = [name for name in slices if name not in self.failed]
            for name in shuffled(left, self.text, turn):
                with self._keeping(name):
                    sample = slices[name]()
                    if turn:  # the first round warms the card up
                        self.times[name].append(median(sample.times))
                        self.readings[name].append(sample.reading)
        self._print_spread()

    def _print_spread(self) -> None:
        """(slowest − fastest) / median over a candidate's rounds: the noise of its time."""
        spread = {n: (max(t) - min(t)) / median(t) for n, t in self.times.items()}
        print("spread over rounds:", *(f"{n} {s:.1%}" for n, s in spread.items()), flush=True)

    def row(
        self, case: Mapping[str, Any], mine: str, peers: Mapping[str, str], floor_us: float
    ) -> Row:
        """The table's row of candidate ``mine``.

        ``peers``: name in the table → candidate; those that were not added are left out.
        """
        times = {name: median(found) for name, found in self.times.items()}
        failed = {name: self.failed[peer] for name, peer in peers.items() if peer in self.failed}
        if mine in self.failed:
            failed["ours"] = self.failed[mine]
        error = self.errors.get(mine)
        candidates = {"ours": mine, **peers}
        return Row(
            case=case,
            ours_us=times.get(mine),
            floor_us=floor_us,
            peers_us={name: times[peer] for name, peer in peers.items() if peer in times},
            error=error.json() if error else None,
            failed=failed,
            clocks_mhz=self._sensed(candidates, lambda reading: reading.clock_mhz),
            watts=self._sensed(candidates, lambda reading: reading.watts),
        )

    def _sensed(
        self, candidates: Mapping[str, str], sensor: Callable[[Reading], float | None]
    ) -> dict[str, float]:
        """Median over rounds of what a sensor said; who it said nothing of is left out.

        ``candidates``: name in the table → candidate.
        """
        found = {}
        for name, candidate in candidates.items():
            said = map(sensor, self.readings.get(candidate, []))
            if values := [value for value in said if value is not None]:
                found[name] = median(values)
        return found


class Case(Protocol):
    """Something a session measures."""

    @property
    def case(self) -> dict[str, Any]:
        """The fields of a table's case that every row of it has."""


C = TypeVar("C", bound=Case)


def fill(
    table: Table,
    cases: Iterable[C],
    measure: Callable[[C, Session], list[Row]],
    timer: Timer,
    rounds: int,
    progress: Progress | None = None,
) -> Table:
    """Measure every case in a session of its own and add its rows; memory goes back after each.

    A case whose data or reference cannot be made becomes a row that says so. ``progress``: rows to begin with, and how
    long to go on.
    """
    if progress is not None:
        table.keep(progress.rows, place)
    for case in cases:
        if progress is not None and not progress.begins():
            continue
        start = time.monotonic()
        try:
            found = measure(case, Session(timer, rounds, label(case.case)))
        except Exception as error:
            found = [Row(case.case, None, 0.0, failed={"ours": told(error)})]
        if progress is not None:
            same, mine = progress.identity, progress.identity(case.case)
            table.drop(lambda row, same=same, mine=mine: same(row) == mine)  # type: ignore[misc]
        for row in found:
            table.add(row)
        del case
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.synchronize()  # raises where a kernel has taken the context with it
            torch.cuda.empty_cache()
        if progress is not None:
            progress.took(time.monotonic() - start)
    if progress is not None and progress.passed:
        print(f"{table.content['table']}: no time for {progress.passed} cases", flush=True)
    return table


def told(error: Exception) -> str:
    """An exception as a table keeps it."""
    return f"{type(error).__name__}: {error}"
