"""One captured step, replayed while requests grow, end and begin anew: what a graph may not remember.

    phase     0  1 … wait  wait + 1 …  period - 1        advanced on the device, between replays
    position     none      low, low + 1, …, high - 1     of the request's new token
                 (takes no part)

Below ``low`` a request has history that stays. At and above it each replay writes the row of the position where it
stands, of an x that is the position's own, and so the same one every time. So all that a step sees repeats with the
least common multiple of the periods, and what it gives must repeat with it, to the bit.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from epicute.models.block_state import Stream
from epicute.models.decode_block import DecodeBlock
from epicute.models.decode_cache import DecodeCache
from epicute.models.decode_step import DecodeStep
from epicute.testing import assert_equal_bits
from tests.models.decode_blocks import Scene

TOKENS = 31
"""Different rows of x."""


@dataclass(frozen=True)
class Walk:
    """A request that goes through positions ``low`` to ``high`` - 1, one a replay, and then waits for some."""

    low: int
    high: int
    wait: int = 0

    @property
    def period(self) -> int:
        """Replays until it is where it was."""
        return self.high - self.low + self.wait


def bytes_of(cache: DecodeCache) -> list[Tensor]:
    """All that a cache holds, in copies: cells, records, ΔS."""
    copies = [] if cache.main is None else [cache.main]
    copies += [
        y for x in copies for y in (getattr(x, "main", None), getattr(x, "mirror", None)) if y
    ]
    found: list[Tensor | None] = [x for copy in copies for x in (copy.k, copy.v)]
    found.append(cache.records)
    found += [] if cache.memory is None else [cache.memory.records, cache.memory.delta]
    return [x.contiguous().view(torch.uint8).clone() for x in found if x is not None]


@dataclass(eq=False)
class Replays:
    """A scene whose requests walk; its lengths are those of the first positions.

    Attributes:
        at: of lengths ``low`` + 1. block: planned for it. walks: one for each request.
        period: replays until all are where they were.
    """

    at: Scene
    block: DecodeBlock
    walks: Sequence[Walk]
    period: int = field(init=False)

    def __post_init__(self) -> None:
        device = self.at.device

        def each(name: str) -> Tensor:
            values = [getattr(walk, name) for walk in self.walks]
            return torch.tensor(values, dtype=torch.int64, device=device)

        self.low, self.wait, self.periods = each("low"), each("wait"), each("period")
        self.period = math.lcm(*(walk.period for walk in self.walks))
        self.phase = torch.full_like(self.low, -1)
        assert self.at.table is not None
        self.table = self.at.table.long().to(device)
        self.held = DecodeStep.of([0] * self.at.count, self.at.tokens, self.at.table, device=device)
        self.x, self.out = self.at.stream(), self.at.out()
        random = torch.Generator().manual_seed(1)
        values = torch.randn(TOKENS, self.x.values.shape[1], generator=random)
        self.tokens = Stream.of(self.at.layer.spec.block, values.to(device))
        self.rows = torch.arange(self.at.count, device=device)

    @staticmethod
    def lengths(walks: Sequence[Walk]) -> tuple[int, ...]:
        """Of the scene that is to hold the history of ``walks``."""
        return tuple(walk.low + 1 for walk in walks)

    def advance(self) -> None:
        """The next positions and what stands there, in place: device work alone."""
        size = self.at.tokens
        self.phase.add_(1).remainder_(self.periods)
        place = self.low + self.phase - self.wait
        live = self.phase >= self.wait
        page = self.table.gather(1, (place.clamp_min(0) // size)[:, None])[:, 0]
        self.held.positions.copy_(torch.where(live, place, -1))
        self.held.slots.copy_(torch.where(live, page * size + place % size, -1))
        self.held.lengths.copy_(torch.where(live, place + 1, 0))
        token = (7 * place + 3 * self.rows) % TOKENS
        self.x.values.copy_(self.tokens.values[token])
        self.x.sumsq.copy_(self.tokens.sumsq[token])

    def run(self, count: int) -> None:
        """``count`` replays of one graph that was captured when nobody took part; at the end the last one against
        float64, what must have repeated has.
        """
        assert count > self.period
        self.block.run(self.x, self.held, self.at.cache, self.out)  # loads what is loaded lazily
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self.block.run(self.x, self.held, self.at.cache, self.out)
        shape = (self.period, *self.out.values.shape)
        seen = torch.empty(shape, dtype=torch.int16, device=self.at.device)
        differ = torch.zeros(2, dtype=torch.int64, device=self.at.device)
        made = self.out.values.view(torch.int16)
        first: list[Tensor] = []
        for number in range(count):
            self.advance()
            self.out.values.fill_(math.nan)
            graph.replay()
            place = number % self.period
            if number < self.period:
                seen[place].copy_(made)
            else:
                differ[:1].add_((made != seen[place]).any())
            if place == self.period - 1:
                now = bytes_of(self.at.cache)
                for x, y in zip(now, first, strict=False):
                    differ[1:].add_((x != y).any())
                first = first or now
        assert differ.tolist() == [0, 0], "replays, caches that differ"
        self._check(count, seen)

    def _check(self, count: int, seen: Tensor) -> None:
        values = seen.cpu().view(self.out.values.dtype)
        assert values.isfinite().all()
        for row, walk in enumerate(self.walks):
            waiting = torch.arange(self.period) % walk.period < walk.wait
            assert (values[waiting, row] == 0).all()
            assert (values[~waiting, row] != 0).any(1).all()
            # Every position has a result of its own.
            some = values[~waiting, row][: walk.period - walk.wait]
            assert len(torch.unique(some.view(torch.int16), dim=0)) == len(some)
        last = [walk.low + (count - 1) % walk.period - walk.wait + 1 for walk in self.walks]
        waits = [(count - 1) % walk.period < walk.wait for walk in self.walks]
        self.at.x = self.x.values.cpu().clone()
        self.at.lengths = [0 if w else n for n, w in zip(last, waits, strict=True)]
        assert self.held.lengths.tolist() == list(self.at.lengths)
        self.at.check(self.block, self.out.values.cpu().clone())
        assert_equal_bits(
            self.out.values.cpu().view(torch.int16), seen[(count - 1) % self.period].cpu()
        )
