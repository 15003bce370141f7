"""The warp that works ahead of those that multiply, and behind them. Imports the DSL.

ahead     a piece's queries are rotated, and its new rows quantised, where the cache has records, while those that
          multiply are still at the piece before
behind    a piece whose partial result they have left in the workspace is counted, and its head merged where it is
          the last one, while they go on; the CTA's last piece they end themselves, as they are more
"""

from __future__ import annotations

from typing import Any

import cutlass
from cutlass import Int32, cute

from epicute.attention.decode_schedule import MAIL_SLOTS
from epicute.attention.decode_spec import DecodeSpec
from epicute.attention.sm90.decode_append import Appender
from epicute.attention.sm90.decode_merge import Merge
from epicute.attention.sm90.decode_producer import Item, read_item
from epicute.attention.sm90.decode_steps import DecodeSteps

__all__ = ["Scribe"]


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
        self.merge.open(arguments)
        mail = Int32(0)
        item = self._item(mail)
        Scribe._prepare(self, item, mail, arguments, lane)
        while item.valid != 0:
            Scribe._prepare(self, self._item(mail + 1), mail + 1, arguments, lane)
            cute.arch.mbarrier_wait(self.barriers["left"] + mail % 2, mail // 2 % 2)
            item = read_item(self.shared["mail"], mail % MAIL_SLOTS)
            if item.final == 0:
                Merge.alone(self.merge, item, arguments)
            cute.arch.sync_warp()
            Scribe._arrive(self, "taken", mail % MAIL_SLOTS, lane)
            mail += 1
            item = self._item(mail)
        self.merge.close(arguments, lane)

    def _item(self, mail: Any) -> Item:
        """Wait for an item and read it."""
        place, turn = mail % MAIL_SLOTS, mail // MAIL_SLOTS % 2
        cute.arch.mbarrier_wait(self.barriers["posted"] + place, turn)
        return read_item(self.shared["mail"], place)

    @cute.jit
    def _prepare(self, item, mail, arguments, lane) -> None:
        """Queries and new rows of a piece. What lay in their place was of the piece that was ended last."""
        if item.valid != 0:
            DecodeSteps.open(self.steps, item, arguments, mail)
            if cutlass.const_expr(self.spec.packed):
                DecodeSteps.prepare(self.steps)
            cute.arch.sync_warp()
            Scribe._arrive(self, "ready", mail % 2, lane)
            if cutlass.const_expr(self.spec.append):
                Appender.prepare(self.steps.appender, self.steps)
                Scribe._arrive(self, "rows", mail % 2, lane)

    @cute.jit
    def _arrive(self, name, place, lane) -> None:
        if lane == 0:
            cute.arch.mbarrier_arrive(self.barriers[name] + place)
