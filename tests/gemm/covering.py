"""A small set of cases in which every pair of choices that matters stands together at least once.

Greedy: each case is the best of a few random completions of a pair that is still missing. The same in every process.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from functools import cache
from itertools import product
from typing import NamedTuple

from tests.gemm.compositions import DEPTHS, MODES, SCHEDULES, SKELETONS, WIDTHS, Case, Skeleton

INTERACTIONS = (
    ("skeleton",),
    ("family", "schedule"),
    ("family", "mode"),
    ("family", "width"),
    ("mode", "schedule"),
    ("mode", "width"),
    ("mode", "k"),
    ("width", "k"),
    ("schedule", "k"),
    ("head_dim", "style"),
    ("head_dim", "cells"),
    ("head_dim", "mode"),
    ("style", "cells"),
    ("style", "norm"),
    ("norm", "cells"),
)
"""Groups of choices whose every legal combination is wanted. ``skeleton`` counts outside heads."""

TRIES = 40

Wanted = tuple[tuple[str, str], ...]


class Choice(NamedTuple):
    """What a case is made of."""

    skeleton: Skeleton
    mode: str
    width: int
    k: int
    schedule: str

    @property
    def case(self) -> Case:
        """The kernel."""
        return self.skeleton.case(self.mode, self.width, self.k, self.schedule)

    def covers(self) -> set[Wanted]:
        """The combinations of ``INTERACTIONS`` it holds."""
        known = {
            "family": self.skeleton.family,
            "mode": self.mode,
            "width": str(self.width),
            "k": str(self.k),
            "schedule": self.schedule,
            **(self.skeleton.features or {"skeleton": self.skeleton.name}),
        }
        return {
            tuple((axis, known[axis]) for axis in axes)
            for axes in INTERACTIONS
            if all(axis in known for axis in axes)
        }


def legal(skeletons: list[Skeleton]) -> Iterator[Choice]:
    """Every choice whose tile holds whole units."""
    free = list(product(MODES, WIDTHS, DEPTHS))
    for skeleton, schedule in product(skeletons, SCHEDULES):
        for some in free:
            if skeleton.allows(schedule, some[0]):
                yield Choice(skeleton, *some, schedule)


def required() -> set[Wanted]:
    """Every combination that some legal choice holds."""
    return set().union(*(choice.covers() for choice in legal(list(SKELETONS.values()))))


def covering() -> list[Case]:
    """The covering set."""
    return [choice.case for choice in choices()]


@cache
def choices() -> tuple[Choice, ...]:
    """What the covering set is made of."""
    source = random.Random(0)
    holders: dict[Wanted, list[Choice]] = {}
    for choice in legal(list(SKELETONS.values())):
        for some in choice.covers():
            holders.setdefault(some, []).append(choice)
    missing, found = dict.fromkeys(sorted(holders)), []
    while missing:
        rarest = min(missing, key=lambda some: len(holders[some]))
        candidates = source.choices(holders[rarest], k=TRIES)
        best = max(candidates, key=lambda choice: len(choice.covers() & missing.keys()))
        for some in best.covers():
            missing.pop(some, None)
        found.append(best)
    return tuple(found)
