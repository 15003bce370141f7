"""Tables that take more than one session with a card: rows measured before are kept, and a run ends in time.

A case counts as measured where all its rows are there and none has failed. A run measures the others in
their order until the budget would not hold another case as long as the longest so far. The file then has
the rows of all runs, each with its own commit and date; the head's are those of the last run.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

from benchmarks.mixes import MIXES
from benchmarks.provenance import Provenance
from epicute.models.shapes import SHAPES

__all__ = ["Progress", "earlier_rows", "of_case", "place"]

FOUND = ("weights", "accumulate", "cache", "page", "variant")
"""What the rows of a case have beside the fields of the case, found out while it is measured."""

SAME = ("device", "torch", "dsl")
"""Fields of a head that rows of one table share."""


class Case(Protocol):
    """Something that a table measures."""

    @property
    def case(self) -> dict[str, Any]:
        """The fields that every row of it has."""


C = TypeVar("C", bound=Case)


def of_case(case: Mapping[str, Any]) -> dict[str, Any]:
    """The fields that tell cases apart, of a row's case or of a case."""
    return {name: value for name, value in case.items() if name not in FOUND}


def place(case: Mapping[str, Any]) -> tuple[Any, ...]:
    """Where a row stands in its table: quality before time, by shape, heads, mix, length, batch and context."""
    shapes, mixes = list(SHAPES), list(MIXES)
    return (
        "batch" in case,
        shapes.index(case["shape"]) if case.get("shape") in shapes else -1,
        -case.get("head_dim", 0),
        mixes.index(case["mix"]) if case.get("mix") in mixes else -1,
        case.get("length", 0),
        case.get("batch", 0),
        case.get("context", 0),
    )


def earlier_rows(paths: Iterable[Path], source: Provenance, protocol: str) -> list[dict[str, Any]]:
    """Rows of the first file that is there, unless another card, library or protocol measured them.

    ``protocol``: what the file's has to begin with.
    """
    path = next((path for path in paths if path.is_file()), None)
    if path is None:
        return []
    content = json.loads(path.read_text(encoding="utf-8"))
    other = [name for name in SAME if content[name] != getattr(source, name)]
    other += ["protocol"] * (not content["protocol"].startswith(protocol))
    rows: list[dict[str, Any]] = content["rows"]
    if other:
        print(f"{path}: {len(rows)} rows are left out, as they differ in {', '.join(other)}")
        return []
    stamp = {name: content[name] for name in ("commit", "date")}
    return [{**stamp, **row} for row in rows]


@dataclass
class Progress:
    """What was measured before, and until when a run may go on.

    Attributes:
        rows: of earlier runs, each with ``commit`` and ``date``.
        deadline: of ``time.monotonic``; None for no end.
        longest: seconds of the longest case so far.
        passed: cases that there was no time for.
        identity: the fields that tell cases apart.
    """

    rows: Sequence[dict[str, Any]] = ()
    deadline: float | None = None
    longest: float = 0.0
    passed: int = 0
    identity: Callable[[Mapping[str, Any]], dict[str, Any]] = of_case

    def left(self, cases: Iterable[C], count: int) -> Iterator[C]:
        """Those that have not all of their ``count`` rows yet."""

        def open_(case: C) -> bool:
            wanted = self.identity(case.case)
            found = [row for row in self.rows if self.identity(row["case"]) == wanted]
            return len(found) < count or any("failed" in row for row in found)

        return filter(open_, cases)  # which holds none of them, and with it its memory, any longer

    def begins(self) -> bool:
        """Whether there is time for one more case; counts those there is none for."""
        fits = self.deadline is None or time.monotonic() + self.longest <= self.deadline
        self.passed += not fits
        return fits

    def took(self, seconds: float) -> None:
        """A case has taken so long."""
        self.longest = max(self.longest, seconds)
