"""The warp that works ahead of those that multiply, and behind them. Imports the DSL.

ahead     a piece's queries are rotated, and its new rows quantised, where the cache has records, while those that
          multiply are still at the piece before. Queries of the first piece they rotate themselves: they are more, and
          have nothing else to do
behind    a piece whose partial result they have left in the workspace is counted, and its head merged where it is
          the last one, while they go on; the CTA's last piece they end themselves, as they are more
"""

from __future__ import annotations

from typing import Any

import cutlass
from cutlass import Boolean, Float32, Int32, Int64, cute

from epicute.attention.decode_schedule import MAIL_SLOTS
from epicute.attention.decode_spec import DecodeSpec
from epicute.attention.sm90.decode_append import Appender
from epicute.attention.sm90.decode_merge import Merge
from epicute.attention.sm90.decode_operands import level_of
from epicute.attention.sm90.decode_producer import Item, read_item
from epicute.attention.sm90.decode_steps import DecodeSteps
from epicute.layouts import split
from epicute.quant.dsl import asm

__all__ = ["Queries", "Scribe"]


class Queries:
    """The queries of a piece over records, which one warp rotates, or all that multiply.

    ``steps``: of a warp, on their way into the piece.
    """

    def __init__(self, steps: DecodeSteps) -> None:
        self.steps, self.spec, self.schedule = steps, steps.spec, steps.schedule
        self.live = self.schedule.live_columns(self.spec)

    @cute.jit
    def rotate(self, first: Int32, apart: cutlass.Constexpr) -> None:
        """Columns from ``first`` on, so far ``apart``. Those that pad, in blocks that are not full, are zeros."""
        for mine in cutlass.range(first, self.live, apart, unroll=4 if apart == 1 else 1):
            self._rotate(mine, self._address(mine))
        self._pad(self.live + first, apart)

    @cute.jit
    def rotate_share(self, first: Int32, ahead: Int64) -> None:
        """The share of one of the warps that multiply, whose first query is at ``ahead``."""
        if cutlass.const_expr(self.live > self.schedule.warps):
            Queries.rotate(self, first, self.schedule.warps)
        else:
            if first < self.live:
                self._rotate(first, ahead)
            self._pad(self.live + first, self.schedule.warps)

    def ahead(self, first: Any) -> Any:
        """Address of the query in a column, which is made here, and not where it is used."""
        return asm("mov.b64 $0, $1;", "=l,l", Int64, self._address(first), effects=True)

    def _number(self, mine: Any) -> Any:
        """Of a column of the CTA among those of the KV head."""
        return self.steps.block * self.steps.block_columns + mine

    def _address(self, mine: Any) -> Any:
        return self.steps.row_of_query(self._number(mine))

    def _rotate(self, mine: Any, address: Any) -> None:
        steps = self.steps
        level = level_of(steps.prepared, mine, steps.lane, self.spec, self.schedule)
        row = steps.prepared + mine * self.schedule.query_pitch(self.spec)
        inside = Boolean(self._number(mine) < self.spec.columns)
        steps.preparer.prepare(address, inside, steps.scale(), row, *level)

    @cute.jit
    def _pad(self, first, apart: cutlass.Constexpr) -> None:
        for mine in cutlass.range(first, self.schedule.columns(self.spec), apart, unroll=1):
            self._leave_nothing(mine)

    def _leave_nothing(self, mine: Any) -> None:
        steps = self.steps
        level = level_of(steps.prepared, mine, steps.lane, self.spec, self.schedule)
        steps.preparer.put_levels(*level, Float32(0.0), Int32(0))


class Scribe:
    """Device code of the scribe; ``steps`` and ``merge`` are its own."""

    def __init__(
        self,
        spec: DecodeSpec,
        shared: dict[str, Any],
        barriers: dict[str, Any],
        steps: DecodeSteps,
        merge: Merge,
    ) -> None:
        self.spec, self.shared, self.barriers = spec, shared, barriers
        self.steps, self.merge = steps, merge

    @cute.jit
    def run(self, arguments, lane) -> None:
        """All pieces of this CTA."""
        self._item(Int32(0))
        cute.arch.griddepcontrol_wait()
        self.merge.open(arguments)
        mail, valid = Int32(0), Int32(1)
        while valid != 0:
            item = self._item(mail)
            valid = item.valid
            Scribe._prepare(self, item, mail, arguments, lane)
            if mail > 0:
                Scribe._end(self, mail - 1, arguments, lane)
            mail += 1
        self.merge.close(arguments, lane)

    def _item(self, mail: Any) -> Item:
        """Wait for an item and read it."""
        turn, place = split(mail, MAIL_SLOTS)
        cute.arch.mbarrier_wait(self.barriers["posted"] + place, turn & 1)
        return read_item(self.shared["mail"], place)

    @cute.jit
    def _end(self, mail, arguments, lane) -> None:
        """End a piece, if it is not the CTA's last one, and give its slot of the mailbox back."""
        turn, desk = split(mail, 2)
        cute.arch.mbarrier_wait(self.barriers["left"] + desk, turn & 1)
        place = split(mail, MAIL_SLOTS)[1]
        item = read_item(self.shared["mail"], place)
        if item.final == 0:
            Merge.alone(self.merge, item, arguments)
        cute.arch.sync_warp()
        Scribe._arrive(self, "taken", place, lane)

    @cute.jit
    def _prepare(self, item, mail, arguments, lane) -> None:
        """Queries and new rows of a piece. What lay in their place was of the piece that was ended last."""
        if item.valid != 0:
            DecodeSteps.open(self.steps, item, arguments, mail)
            if cutlass.const_expr(self.spec.packed):
                Scribe._queries(self, mail)
            cute.arch.sync_warp()
            Scribe._arrive(self, "ready", mail & 1, lane)
            if cutlass.const_expr(self.spec.append):
                Appender.prepare(self.steps.appender, self.steps)
                Scribe._arrive(self, "rows", mail & 1, lane)

    @cute.jit
    def _queries(self, mail) -> None:
        if mail > 0:
            Queries.rotate(Queries(self.steps), Int32(0), 1)

    @cute.jit
    def _arrive(self, name, place, lane) -> None:
        if lane == 0:
            cute.arch.mbarrier_arrive(self.barriers[name] + place)
