"""A warpgroup's share of a record: A from registers, x from shared memory by descriptor. Imports the DSL.

Warp w of the four has row tile w of the record, in the registers in which `mma.sync` would have it; sums stand where
`mma.sync` would leave them. What a group's products are while they run:

    convert block 0 | begin | convert block 1 | begin | wait for 0 | convert block 2 | begin | wait for 1 ...

A block's four products take 4 · 14 to 4 · 32 clocks (8 to 64 rows of x), the conversion of the next about 100: it is
what the tensor cores wait for until rows are 64, and two blocks' registers of A are as many as are ever alive. All
products are awaited at a record's end, while the other warpgroup keeps the tensor cores busy.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import cutlass
from cutlass import Int32, cute

from epicute.decode.geometry import OPERAND_ROW, segment_blocks, segments_of, share_of
from epicute.decode.sm90.multiply import Multiplier
from epicute.decode.sm90.ptx import (
    wgmma,
    wgmma_commit,
    wgmma_descriptor,
    wgmma_fence,
    wgmma_wait,
)
from epicute.layouts import BLOCK

__all__ = ["WarpgroupMultiplier"]

STEPS = BLOCK // 16
"""Products of a block."""

UNIT = 16
"""Bytes that a descriptor counts in."""

STEP_BYTES = 32
"""Bytes of a row of x that one product reads."""


class Batch(NamedTuple):
    """Products that are begun together: of one block, or of a half where groups are 32 wide.

    ``group``: counted from the first of the share, where a group has its sums of its own; ``last`` of it.
    """

    block: int
    steps: range
    group: int
    last: bool


class WarpgroupMultiplier(Multiplier):
    """A ``Multiplier`` that multiplies with `wgmma`."""

    @property
    def block_bytes(self) -> int:
        """Bytes of x from one block of k to the next."""
        return self.schedule.rows * OPERAND_ROW

    @cute.jit
    def run(self, record: Int32, x: Int32, which: cutlass.Constexpr = 0) -> None:
        """Multiply the warpgroup's share of the record at ``record`` with the activations at ``x``."""
        self.which = which
        segments = segments_of(self.record)
        if cutlass.const_expr(segments % self.shares == 0):
            count = segments // self.shares
            self._share(record, x, self.share * count, count)
        else:
            first, end = share_of(self.share, self.shares, segments)
            for i in cutlass.range(first, end, unroll=1):
                self._share(record, x, i, 1)

    def _batches(self, blocks: int) -> list[Batch]:
        """What a share of ``blocks`` blocks is multiplied in."""
        group = self.record.group
        steps = 2 if group == 32 else STEPS
        whole = blocks * BLOCK if group in (0, self.record.depth) else group
        found = []
        for start in range(0, blocks * STEPS, steps):
            block, step = divmod(start, STEPS)
            end = (start + steps) * 16
            last = end % whole == 0
            found.append(Batch(block, range(step, step + steps), (end - 1) // whole, last))
        return found

    def _share(self, record: Any, x: Any, segment: Any, count: int) -> None:
        """Multiply ``count`` segments from ``segment`` on."""
        first, blocks = segment * segment_blocks(self.record), count * segment_blocks(self.record)
        codes = Int32(record) + Int32(self.record.load_offset(first, self.part, 0, self.lane))
        rows = wgmma_descriptor(Int32(x) + Int32(first * self.block_bytes))
        scaled = self.record.group > 0
        index = Int32(0)
        if self.record.group not in (0, self.record.depth):
            index = Int32(first * BLOCK // self.record.group)
        held = [self.sums[self._register(0, 0, i)] for i in range(self.count)]
        sums = None if scaled else held
        zeros: Any = None
        before: tuple[Any, ...] | None = None
        for batch in self._batches(blocks):
            if zeros is None:
                zeros = self._zeros(record, index + batch.group)
                negatives = self._negatives(zeros)
            sums = self._begin(codes, rows, batch, negatives, sums)
            self._settle(record, before, 1)
            before = (index + batch.group, sums, batch.last)
            if batch.last and scaled:
                sums, zeros = None, None
        self._settle(record, before, 0)

    def _begin(self, codes: Any, rows: Any, batch: Batch, negatives: Any, sums: Any) -> Any:
        """Convert a batch's codes and begin its products."""
        loads = self._loads(codes, batch.block, 0)
        minus = None if negatives is None else negatives[0]
        found = [a for step in batch.steps for a in self.convert.fragment(loads, step, minus)]
        found, sums = wgmma_fence(found, sums)
        for i, step in enumerate(batch.steps):
            b = rows + (batch.block * self.block_bytes + step * STEP_BYTES) // UNIT
            a = found[4 * i : 4 * i + 4]
            sums = wgmma(self.problem.dtype, a, b, self.schedule.rows, sums)
        wgmma_commit()
        return sums

    def _settle(self, record: Any, before: tuple[Any, ...] | None, pending: int) -> None:
        """Wait for a batch that was begun before, and take up the sums of a group that is complete."""
        if before is None:
            return
        index, sums, last = before
        if not last:
            wgmma_wait(pending, [])
            return
        scales = self._scales(record, index)
        sums = wgmma_wait(pending, sums)
        found = {(0, j): sums[4 * j : 4 * j + 4] for j in range(self.columns)}
        self._finish(scales, found, dict.fromkeys(range(self.columns)), None)
