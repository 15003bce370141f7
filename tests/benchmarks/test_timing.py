"""A slice: a lead-in that is not timed, timed replays, and the sensors in their middle.

The card is a queue: what is launched runs when somebody waits for it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from benchmarks import timing
from benchmarks.power import Reading
from benchmarks.timing import CudaTimer, Sample, Slice


@dataclass
class Card:
    """Runs graphs of ``us`` each; those of the first ``lent_us`` behind a switch in 0.85 of it."""

    us: float
    lent_us: float = 0.0
    queued: list[float] = field(default_factory=list)
    done: int = 0
    since: float = 0.0
    read_at: list[tuple[int, int]] = field(default_factory=list)

    def switch(self) -> None:
        """Another candidate ran meanwhile."""
        self.queued.clear()
        self.done, self.since = 0, 0.0

    def replay(self) -> None:
        spent = self.us * (0.85 if self.since < self.lent_us else 1.0)
        self.since += spent
        self.queued.append(spent)

    def synchronize(self) -> None:
        self.done = len(self.queued)

    def read(self) -> Reading:
        """Notes how many replays are done, and how many are queued."""
        self.read_at.append((self.done, len(self.queued)))
        return Reading(1400.0, 690.0)


class Event:
    """A mark between two replays."""

    def __init__(self, card: Card) -> None:
        self.card, self.at = card, 0

    def record(self) -> None:
        self.at = len(self.card.queued)

    def synchronize(self) -> None:
        self.card.done = max(self.card.done, self.at)

    def elapsed_time(self, end: Event) -> float:
        assert end.at <= self.card.done, "nobody waited"
        return sum(self.card.queued[self.at : end.at]) / 1e3


@contextmanager
def prepared(card: Card, timer: CudaTimer, copies: int, least_us: float) -> Iterator[Slice]:
    """A slice of one candidate on this card."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(timing, "_captured", lambda run, copies, passes: card)
        patch.setattr(CudaTimer, "_warm_up", lambda timer, run, copies: None)
        patch.setattr(torch.cuda, "Event", lambda enable_timing: Event(card))
        patch.setattr(torch.cuda, "synchronize", card.synchronize)
        yield timer.prepare(lambda copy: {}, copies, least_us)


TIMES = st.floats(1.0, 1e5)


@given(us=TIMES, lead_us=TIMES, slice_us=TIMES)
def test_a_slice_is_a_lead_in_and_timed_replays(us: float, lead_us: float, slice_us: float) -> None:
    card = Card(us)
    timer = CudaTimer(slice_us, lead_us, card.read)
    with prepared(card, timer, copies=4, least_us=250.0) as run:
        card.switch()
        sample = run()
    timed = len(sample.times)
    lead = len(card.queued) - timed
    assert timed >= 2
    assert slice_us * 0.999 <= timed * us
    assert timed == 2 or (timed - 1) * us < slice_us * 1.001
    assert lead_us * 0.999 <= lead * us
    assert lead == 1 or (lead - 1) * us < lead_us * 1.001
    assert sample.times == pytest.approx([us / 4] * timed)  # one pass of four calls
    assert card.read_at == [(lead + timed // 2, lead + timed)]  # in the middle, the rest queued
    assert sample.reading == Reading(1400.0, 690.0)


def test_the_lead_in_outlasts_what_the_neighbour_left() -> None:
    card = Card(us=1000.0, lent_us=40e3)
    samples = {}
    for lead_us in (0.0, 60e3):
        with prepared(card, CudaTimer(30e3, lead_us), copies=4, least_us=250.0) as run:
            card.switch()
            samples[lead_us] = run().times
    assert samples[0.0] == pytest.approx([0.85 * 250.0] * len(samples[0.0]))
    assert samples[60e3] == pytest.approx([250.0] * len(samples[60e3]))


def test_without_a_reader_the_sensors_are_silent() -> None:
    card = Card(us=1000.0)
    with prepared(card, CudaTimer(6e3, 10e3), copies=4, least_us=250.0) as run:
        assert run() == Sample(pytest.approx([250.0] * 6), Reading())
