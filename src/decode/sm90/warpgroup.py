"""A record by a warpgroup: A from registers, x from shared memory by descriptor. Imports the DSL.

Warp w of the four has row tile w of the record, in the registers in which `mma.sync` would have it; sums stand where
`mma.sync` would leave them. What a group's products are while they run:

    convert block 0 | begin, convert block 1 meanwhile | wait for what was before | begin, convert block 2 meanwhile ...

A block's four products take 4 · 14 to 4 · 32 clocks (8 to 64 rows of x), meanwhile the next is converted: two
blocks' registers of A are as many as are ever alive. All products are awaited at a record's end, while the other
warpgroup keeps the tensor cores busy. Tried and gone: a step's conversion between two products, which the assembler
does not take apart better by itself, and puts a `WARPGROUP.ARRIVE` in front of each product for.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from cutlass import Int32

from epicute.decode.geometry import OPERAND_ROW
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

NARROW = 4
"""Eights of rows of x up to which a group's products may run while the next group's begin: beyond, two groups' sums do
not fit the registers.
"""

STEP_BYTES = 32
"""Bytes of a row of x that one product reads."""


class Batch(NamedTuple):
    """Products that are begun together: of one block, or of a half where groups are 32 wide.

    ``group``: where a group has its sums of its own; ``last`` of it.
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

    def held(self) -> int:
        """Of tiles that are held together each warpgroup has every other one."""
        return -(-self.schedule.wide // 2)

    def run(self, record: Int32, x: Int32, which: int = 0, piece: int = 0) -> None:
        """Multiply a piece of the record at ``record`` with the activations at ``x``. ``which``: of the warpgroup's own
        bands.
        """
        self.which = which
        codes = Int32(record) + Int32(self.record.load_offset(0, self.part, 0, self.lane))
        rows = wgmma_descriptor(Int32(x))
        scaled = self.record.group > 0
        held = [self.sums[self._register(0, 0, i)] for i in range(self.count)]
        sums = None if scaled else held
        before: tuple[Any, ...] | None = None
        batches = self._batches(piece)
        loads = self._loads(codes, batches[0].block, 0)
        found = self._fragments(loads, batches[0], self._offsets(record, batches[0]))
        for i, batch in enumerate(batches):
            if i + 1 < len(batches):
                following = batches[i + 1]
                # Before the products: what comes behind them can be converted while they are issued.
                loads = self._loads(codes, following.block, 0)
                offsets = self._offsets(record, following)
            if before is not None and before[2] and self.columns > NARROW:
                self._settle(record, before, 0)
                before = None
            sums = self._begin(found, rows, batch, sums)
            if i + 1 < len(batches):
                found = self._fragments(loads, following, offsets)
            self._settle(record, before, 1)
            before = (batch.group, sums, batch.last)
            if batch.last and scaled:
                sums = None
        self._settle(record, before, 0)

    def _batches(self, piece: int) -> list[Batch]:
        """What a piece of a record is multiplied in."""
        blocks = self.record.blocks // self.shared.pieces
        group = self.record.group
        steps = 2 if group == 32 else STEPS
        one = group in (0, self.record.depth)
        whole = blocks * BLOCK if one else group
        found = []
        first = piece * blocks * STEPS
        for start in range(first, first + blocks * STEPS, steps):
            block, step = divmod(start, STEPS)
            end = (start + steps) * 16
            last = end % whole == 0
            index = 0 if one else (end - 1) // whole
            found.append(Batch(block, range(step, step + steps), index, last))
        return found

    def _offsets(self, record: Any, batch: Batch) -> Any:
        """What a batch's codes are too large by, negative; None where they are not."""
        negatives = self._negatives(self._zeros(record, batch.group))
        return None if negatives is None else negatives[0]

    def _fragments(self, loads: Any, batch: Batch, offsets: Any) -> list[Any]:
        """Registers of A of a batch, from its block's codes."""
        return [a for step in batch.steps for a in self.convert.fragment(loads, step, offsets)]

    def _begin(self, found: list[Any], rows: Any, batch: Batch, sums: Any) -> Any:
        """Begin a batch's products."""
        found, sums = wgmma_fence(found, sums)
        for i, step in enumerate(batch.steps):
            block = batch.block % (self.record.blocks // self.shared.pieces)
            b = rows + (block * self.block_bytes + step * STEP_BYTES) // UNIT
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
