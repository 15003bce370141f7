"""The composition on complete sums: the same policies, driver and operands as the large GEMM's. Imports the DSL.

Sums stand in shared memory, transposed: a warp takes eight rows of x, and lane 4g + t reads of row g the features that
a quad lane of a WGMMA accumulator would hold. What the driver then does with a row is what it does there.
"""

from __future__ import annotations

from typing import Any

from cutlass import Int32

from epicute.decode.geometry import lane_blocks, partial_place
from epicute.decode.schedule import FewRowProblem, FewRowSchedule, Shared
from epicute.decode.sm90.ptx import add, load_pair
from epicute.epilogues.dsl import Lazy, opaque
from epicute.epilogues.resolve import Resolved
from epicute.gemm.arguments import ArgumentLayout
from epicute.gemm.driver import Driver
from epicute.gemm.lanes import Place, Tile
from epicute.gemm.stage_plan import StagePlan
from epicute.gemm.staging import when
from epicute.gemm.work import Work

__all__ = ["FewRowDriver"]


class FewRowPlace(Place):
    """A place whose row may be none of this CTA's."""

    def __init__(self, driver: Any, tile: Tile, at: tuple[Any, ...], alive: Any) -> None:
        super().__init__(driver, tile, *at)
        self.live = self.live & alive


class FewRowDriver(Driver):
    """Device code of the epilogue for one composition, tile and operand layout."""

    def __init__(
        self,
        resolved: Resolved,
        layout: ArgumentLayout,
        problem: FewRowProblem,
        schedule: FewRowSchedule,
    ) -> None:
        self.resolved, self.layout = resolved, layout
        self.plan = StagePlan(resolved)
        self.tile_m, self.tile_n, self.blocks = schedule.rows, problem.staged_rows, 1
        self.unit = resolved.order.unit
        self.units = self.tile_n // self.unit
        self.problem, self.schedule = problem, schedule
        self.shared = Shared(problem, schedule)

    def finish(self, base: Any, tile: Tile, part: Any, place: tuple[Any, Any, Any]) -> None:
        """Run the composition on eight rows, whose sums are at ``base``: of a CTA's shares, or of a cluster's CTAs.

        ``tile.n``: the tile, or the unit whose ``part`` it is. ``place``: (first of the rows that this CTA finishes,
        row among them, lane).
        """
        first, row, lane = place
        row, lane = opaque(Int32(row)), opaque(Int32(lane))
        owned = self.schedule.owned
        alive = row < owned
        row = row % owned
        for u in range(self.units):
            unit = tile.n * self.units + u
            for r, span in enumerate(self.resolved.ranges):
                index = unit - span.first_unit

                def body(r: int = r, u: int = u, index: Any = index) -> None:
                    self._parts(base, tile, (r, u, index), part, (first, row, lane % 4, alive))

                if self._one_range():
                    body()
                else:
                    when((index >= 0) & (index < span.units), body)

    def _parts(self, base: Any, tile: Tile, at: Any, part: Any, who: Any) -> None:
        """A range's chain on a unit, or on the part of it that is this tile."""
        r, u, index = at
        first, row, lane, alive = who
        span, parts, size = self.resolved.ranges[r], self.problem.parts, self.problem.tile
        blocks = lane_blocks(span)
        for p in range(parts):
            mine = [b for b in span.blocks if blocks[b.lanes[0]] * 8 // size == p or parts == 1]

            def body(p: int = p, mine: Any = mine) -> None:
                place = FewRowPlace(self, tile, (r, u, index, first + row, lane), alive)
                place.work = Work(self._defers(), None, tile.m)
                found = self._lanes(base, blocks, u * self.unit - p * size, row, place.lane)
                for step in span.head:
                    found = self._step(step, found, place)
                for block in mine:
                    some = [found[i] for i in block.lanes]
                    for step in block.steps:
                        some = self._step(step, some, place)
                place.work.settle()

            if parts == 1:
                body()
            else:
                when(part == p, body)

    def _lanes(self, base: Any, blocks: list[int], start: int, row: Any, lane: Any) -> list[Any]:
        """Values of a row of a unit, loaded and added up when they are first needed."""
        found: list[Any] = []
        for block in blocks[::2]:
            pair = Lazy(lambda b=block: self._sum(base, start + 8 * b, row, lane))
            found += [Lazy(lambda p=pair, e=e: p.get()[e]) for e in range(2)]
        return found

    def _sum(self, base: Any, feature: int, row: Any, lane: Any) -> list[Any]:
        """Two adjacent features' partial sums, added up in the order of their shares."""
        owned, tile, cluster = self.schedule.owned, self.problem.tile, self.schedule.cluster
        senders = cluster if cluster > 1 else self.shared.shares
        column = Int32(feature) + 2 * lane
        pairs = [
            load_pair(Int32(base) + Int32(partial_place(s, row, column, owned, tile)) * 4)
            for s in range(senders)
        ]
        total = pairs[0]
        for pair in pairs[1:]:
            total = [add(a, b) for a, b in zip(total, pair, strict=True)]
        return total
