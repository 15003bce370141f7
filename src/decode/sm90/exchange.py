"""How the CTAs of a cluster come by the sums of all their shares of k. Imports the DSL.

Three warps add a CTA's partial sums up, in the order of its shares, four features a thread, and send what they have to
the CTA that finishes that row of x: one `st.async` of 16 bytes, which counts on an mbarrier there. The receiver adds
what has come from all CTAs, in their order.

    partial sums of this CTA        share 0 | share 1 | ...     each: rows of x, by features of the tile
    sums that arrive at this CTA    CTA 0   | CTA 1   | ...     each: rows that this CTA finishes, by features
"""

from __future__ import annotations

from typing import Any

import cutlass
from cutlass import Int32, cute

from epicute.decode.geometry import FINISHERS, partial_place
from epicute.decode.schedule import FewRowProblem, FewRowSchedule, Shared
from epicute.decode.sm90.ptx import add, load_four, remote, store_async
from epicute.layouts import split

__all__ = ["Exchange"]

THREADS = 32 * FINISHERS
FOUR = 4
UNROLLED = 2


class Exchange:
    """Device code that adds up and sends a tile's sums."""

    def __init__(self, problem: FewRowProblem, schedule: FewRowSchedule) -> None:
        self.problem, self.schedule = problem, schedule
        self.shared = Shared(problem, schedule)
        self.quads = problem.tile // FOUR

    @cute.jit
    def send(
        self, sums: Int32, arrivals: Int32, barrier: Int32, rank: Int32, thread: Int32
    ) -> None:
        """Add a tile's partial sums at ``sums`` up and send them.

        Args:
            arrivals: where the tile's sums arrive, alike in every CTA. barrier: where they count their bytes.
            rank: of this CTA. thread: of the ``THREADS`` that share the work.
        """
        total = self.schedule.rows * self.quads
        for start in cutlass.range(thread, total, UNROLLED * THREADS, unroll=1):
            found = []
            for i in cutlass.range_constexpr(UNROLLED):
                at = start + i * THREADS
                row, feature = self._cell(at)
                found.append((at, row, feature, self._sum(sums, row, feature)))
            for i in cutlass.range_constexpr(UNROLLED):
                at, row, feature, values = found[i]
                self._store((arrivals, barrier, rank), row, feature, values, at < total)

    def _cell(self, at: Any) -> tuple[Any, Any]:
        """(row of x, first feature); beyond the last, those of some other."""
        row, quad = split(at, self.quads)
        return split(row, self.schedule.rows)[1], quad * FOUR

    def _sum(self, sums: Any, row: Any, feature: Any) -> list[Any]:
        rows, tile = self.schedule.rows, self.problem.tile
        parts = [
            load_four(Int32(sums) + Int32(partial_place(s, row, feature, rows, tile)) * 4)
            for s in range(self.shared.shares)
        ]
        found = parts[0]
        for part in parts[1:]:
            found = [add(a, b) for a, b in zip(found, part, strict=True)]
        return found

    @cute.jit
    def _store(
        self, target: Any, row: Int32, feature: Int32, values: Any, inside: cutlass.Boolean
    ) -> None:
        if inside:
            arrivals, barrier, rank = target
            owned = self.schedule.owned
            owner, mine = split(row, owned)
            place = partial_place(rank, mine, feature, owned, self.problem.tile)
            store_async(remote(arrivals + Int32(place) * 4, owner), values, remote(barrier, owner))
