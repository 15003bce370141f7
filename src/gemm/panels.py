"""Which outputs can leave through shared memory, and what it costs.

A panel is what a consumer warpgroup holds of 32 adjacent output columns: 64 rows, written by all its threads, stored by
one TMA instruction. Panels go through a ring in shared memory, so that the next one is written while the last is on its
way. With rows of 64 bytes (32 for float8) a warp's writes touch every bank once, unswizzled.
"""

from __future__ import annotations

from epicute.epilogues.operands import Output
from epicute.epilogues.resolve import Resolved, Step
from epicute.gemm.arguments import VECTOR, ArgumentLayout

__all__ = ["PANEL_BYTES", "PANEL_COLUMNS", "PANEL_ROWS", "panelled", "ring_bytes"]

PANEL_COLUMNS = 32
PANEL_ROWS = 64
PANEL_BYTES = PANEL_ROWS * PANEL_COLUMNS * 2
CONSUMERS = 2


def panelled(resolved: Resolved, layout: ArgumentLayout) -> tuple[str, ...]:
    """Names of the outputs whose columns always come in whole panels and whose rows TMA can address."""
    unfit = set()
    names = set()
    for span in resolved.ranges:
        for step in span.steps:
            for local, kind in step.policy.operands.items():
                if isinstance(kind, Output):
                    name = step.names[local]
                    names.add(name)
                    spec = layout[name]
                    unaligned = spec.dtype.itemsize > 2 or spec.alignment < VECTOR
                    if unaligned or not _whole(step, int(spec.shape[1])):
                        unfit.add(name)
    return tuple(sorted(names - unfit))


def _whole(step: Step, columns: int) -> bool:
    """Whether each group of the step's value is 32 adjacent columns from a multiple of 32.

    Padding must lie behind the last of the output's ``columns``, where TMA writes nothing.
    """
    domain = step.split.domain if step.split else step.domain
    inside = domain.halves or step.first_column + domain.columns < columns
    cut = inside and domain.remaining(0, 0) is not None
    starts = [step.first_column, domain.origin(1), *(domain.offset(s) for s, _ in domain.groups)]
    wide = all(lanes * 4 == PANEL_COLUMNS for _, lanes in domain.groups)
    return wide and not cut and not any(start % PANEL_COLUMNS for start in starts)


def ring_bytes(slots: int) -> int:
    """Shared memory of both warpgroups' rings."""
    return CONSUMERS * slots * PANEL_BYTES
