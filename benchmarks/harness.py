"""Several candidates beside each other: built, checked, and timed in interleaved slices.

    round 0 (dropped)   A A A | B B B | C C C        one slice each
    round 1             B B B | C C C | A A A        the order rotates
    round 2             C C C | A A A | B B B

A call's time is the median over rounds of the median over a slice. Whatever a candidate raises, in
building, checking, capturing or timing, is kept under ``failed`` and takes it out of the session,
and nothing else.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Any, Protocol, TypeVar

import torch

from benchmarks.check import Error
from benchmarks.table import Row, Table
from benchmarks.timing import Run, Slice, Timer

__all__ = ["LAYERS", "PROTOCOL", "Options", "Session", "fill", "rotated"]

LAYERS = ("qkv", "o", "gate_up", "down")

PROTOCOL = (
    "candidates interleaved in one process in rotating order, each in a CUDA graph over rotating "
    "copies of weights, activations and outputs (at least 300 MB between two reads of a byte), "
    "random normal data, CUDA events, median over {rounds} rounds of the median over a slice of "
    "{slice_ms:g} ms, default clocks; error: worst output of the timed kernel against float64 on "
    "{rows} rows, an FP8 output's own rounding (about 0.026) included"
)


@dataclass(frozen=True)
class Options:
    """What a run measures and how long it takes over it."""

    shapes: tuple[str, ...]
    layers: tuple[str, ...] = LAYERS
    M: int = 2048
    device: str = "cuda"
    rounds: int = 8
    slice_us: float = 15000.0
    check_rows: int = 64
    quack: bool = False

    def shortened(self) -> Options:
        """The same in a tenth of the slices' time, for a look rather than a claim."""
        return replace(self, rounds=3, slice_us=4000.0)

    @property
    def protocol(self) -> str:
        """The protocol sentence of these options."""
        ms = self.slice_us / 1000
        return PROTOCOL.format(rounds=self.rounds, slice_ms=ms, rows=self.check_rows)


def rotated(names: list[str], turn: int) -> list[str]:
    """``names`` beginning at the turn-th."""
    start = turn % len(names) if names else 0
    return names[start:] + names[:start]


@dataclass
class Session:
    """One case: candidates that are built, checked against a reference and timed together.

    Attributes:
        timer: how a slice is timed.
        rounds: slices per candidate that count.
        errors: worst error of each checked candidate.
        failed: what each failed candidate raised.
        times: median µs of each round, by candidate.
    """

    timer: Timer
    rounds: int
    errors: dict[str, Error] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
    times: dict[str, list[float]] = field(default_factory=dict)
    _ready: dict[str, Run] = field(default_factory=dict)

    @contextmanager
    def _keeping(self, name: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            self.failed[name] = told(error)
            self._ready.pop(name, None)
            self.times.pop(name, None)

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
                self.times[name] = []
        for turn in range(self.rounds + 1):
            for name in rotated([name for name in slices if name not in self.failed], turn):
                with self._keeping(name):
                    found = median(slices[name]())
                    if turn:  # the first round warms the card up
                        self.times[name].append(found)
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
        return Row(
            case=case,
            ours_us=times.get(mine),
            floor_us=floor_us,
            peers_us={name: times[peer] for name, peer in peers.items() if peer in times},
            error=error.json() if error else None,
            failed=failed,
        )


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
) -> Table:
    """Measure every case in a session of its own and add its rows; memory goes back after each.

    A case whose data or reference cannot be made becomes a row that says so.
    """
    for case in cases:
        try:
            found = measure(case, Session(timer, rounds))
        except Exception as error:
            found = [Row(case.case, None, 0.0, failed={"ours": told(error)})]
        for row in found:
            table.add(row)
        del case
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    return table


def told(error: Exception) -> str:
    """An exception as a table keeps it."""
    return f"{type(error).__name__}: {error}"
