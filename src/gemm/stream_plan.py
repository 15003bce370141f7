"""How a matrix operand comes through the pipeline.

Behind the K tiles of A and B, a tile's part of the operand arrives in boxes of ``tile_m`` rows by 64 or 128 bytes, a
few boxes to a stage:

    stages    | A B | A B | … | A B | boxes 0, 1 | boxes 2, 3 | A B of the next tile …
    epilogue                        | unit 0 … 1 | unit 2 … 3 |

so that it is on its way during the multiplication, waits in shared memory, and costs no registers. In ping-pong each
warpgroup has a buffer for all boxes of its tile instead: an epilogue that held stages would starve the other's
multiplication (8B's o and down in FP8: 11 and 6 % slower than cooperative; with the buffers 2 and 7 %).

A warp reads eight rows at once, of each what a quad holds. Eight of its threads, two rows, are served together where
each takes 16 bytes. Where a quad holds 64 bytes, rows of 64 bytes stand end to end and the two fill the banks; in rows
of 128 bytes, swizzled, both would want the same half of them, as the swizzle of a row and of the next differ in the
lowest bit alone. Where a quad holds 128 bytes the swizzle keeps the rows apart.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from epicute.epilogues.operands import Matrix
from epicute.epilogues.resolve import Resolved, Step
from epicute.gemm.arguments import VECTOR, ArgumentLayout, OperandSpec
from epicute.gemm.schedule import Schedule

__all__ = ["NARROW", "WIDE", "StreamPlan", "stream_plan", "streamed_bytes"]

WIDE, NARROW = 128, 64
"""Bytes of a box's rows: the width of the swizzle, or what a quad holds of 32 columns of 16 bits, unswizzled."""


@dataclass(frozen=True)
class StreamPlan:
    """A matrix operand in boxes.

    Attributes:
        name, dtype: of the operand. width: bytes of a unit's columns. units: of a tile.
        capacity: boxes that a stage holds, in place of A and of B. apart: in a buffer beside the pipeline, as one
            stage. box: bytes of a box's rows, which are swizzled where these are ``WIDE``.
    """

    name: str
    dtype: torch.dtype
    width: int
    units: int
    capacity: int
    apart: bool = False
    box: int = WIDE

    @property
    def size(self) -> int:
        """Bytes of an element."""
        return self.dtype.itemsize

    @property
    def boxes(self) -> int:
        """Boxes of a tile."""
        return self.width * self.units // self.box

    @property
    def columns(self) -> int:
        """Columns of a box."""
        return self.box // self.size

    @property
    def swizzled(self) -> bool:
        """Whether 16 bytes at ``c`` of row ``r`` of a box stand at ``c ^ 16 (r % 8)``."""
        return self.box == WIDE

    @property
    def stages(self) -> int:
        """Stages of a tile."""
        return -(-self.boxes // self.capacity)

    @property
    def share(self) -> int:
        """Boxes of each stage but the last."""
        return -(-self.boxes // self.stages)

    def boxes_of(self, stage: int) -> range:
        """Boxes of a stage."""
        return range(self.share * stage, min(self.share * (stage + 1), self.boxes))

    def first_unit(self, stage: int) -> int:
        """The first unit that reads of the stage."""
        return self.boxes_of(stage)[0] * self.box // self.width

    def last_unit(self, stage: int) -> int:
        """The last unit that reads of the stage."""
        return ((self.boxes_of(stage)[-1] + 1) * self.box - 1) // self.width

    def holds(self, groups: list[tuple[int, int]]) -> bool:
        """Whether each group of a quad, (first byte in the unit, bytes), lies in one box, in every unit."""
        return all(
            (unit * self.width + first) % self.box + count <= self.box
            for unit in range(self.units)
            for first, count in groups
        )

    @property
    def held(self) -> int:
        """Stages of the pipeline that must be there at once: those of one unit."""
        if self.apart:
            return 0
        reads = [(self.first_unit(s), self.last_unit(s)) for s in range(self.stages)]
        return max(sum(a <= unit <= b for a, b in reads) for unit in range(self.units))

    def place(self, byte: int) -> tuple[int, int, int]:
        """(stage, box in the stage, byte in its row) of a byte of a tile's row."""
        box, rest = divmod(byte, self.box)
        stage, within = divmod(box, self.share)
        return stage, within, rest


def streamed(resolved: Resolved, layout: ArgumentLayout) -> tuple[Step, OperandSpec] | None:
    """The first matrix operand that may be streamed, and the step that reads it; None without one.

    Its columns must be those of the packed order, and its rows begin at multiples of 16 bytes.
    """
    if len(resolved.ranges) > 1:
        return None
    for step in resolved.ranges[0].steps:
        if step.split or step.domain.halves or step.first_column:
            continue
        for local, kind in step.policy.operands.items():
            spec = layout[step.names[local]]
            if isinstance(kind, Matrix) and spec.alignment % VECTOR == 0:
                return step, spec
    return None


def streamed_bytes(resolved: Resolved, layout: ArgumentLayout) -> int:
    """Bytes that a row of a unit has of the operand that may be streamed; 0 without one."""
    found = streamed(resolved, layout)
    return found[0].domain.unit * found[1].dtype.itemsize if found else 0


def stream_plan(
    resolved: Resolved, layout: ArgumentLayout, schedule: Schedule
) -> StreamPlan | None:
    """The plan of the operand that may be streamed; None where none is, or the tiles do not allow it.

    A tile's columns must be whole boxes, what a quad reads at once lie in one box, and the pipeline be deep enough.
    Others are loaded by the epilogue itself.
    """
    found = streamed(resolved, layout)
    if found is None:
        return None
    step, spec = found
    size = spec.dtype.itemsize
    units, width = schedule.tile_n // resolved.order.unit, step.domain.unit * size
    groups = [(slot * size, 4 * lanes * size) for slot, lanes in step.domain.groups]
    box = NARROW if all(count == NARROW for _, count in groups) else WIDE
    if width * units % box:
        return None
    capacity = WIDE // box + WIDE * schedule.tile_n // (box * schedule.tile_m)
    if schedule.pingpong:
        capacity = width * units // box
    plan = StreamPlan(spec.name, spec.dtype, width, units, capacity, schedule.pingpong, box)
    return plan if plan.holds(groups) and plan.held <= schedule.stages else None
