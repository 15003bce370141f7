"""Which schedule: a model of the H200. Rates of weights were measured on one; those of sums and of a kernel's ends
(``SENT``, ``FINISH``, ``START``, ``END``) and ``COPY`` are estimates, which no table has tried yet.

A kernel takes as long as its bytes, unless products or the copies of x take longer; while x is copied, nothing is
multiplied, and what the ring holds hides it. Clusters make shares of x small and exchanges of sums longer; tiles whose
sums are held together share a copy of x.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from itertools import product

from epicute.decode.geometry import MMAS, epilogue_tasks
from epicute.decode.schedule import (
    CLUSTERS,
    FewRowProblem,
    FewRowSchedule,
    Shared,
    clusters_of,
    most_wide,
)
from epicute.errors import UnsupportedError, require
from epicute.jit import Target

__all__ = ["STREAM", "choose", "expected_microseconds", "rounds_of"]

IN_FLIGHT = 48 << 10
"""Bytes of weights that may be under way to an SM: beyond, activations queue behind them."""

RING = 96 << 10
"""Bytes of the ring where there is room."""

FEWEST_SLOTS = 3

PHASE = 48 << 10
"""Bytes of x that are copied at once where it is read again and again: fewer are waited for too often."""

REFERENCE_SMS = 132
STREAM = 4.4e6
"""Bytes of weights that all SMs read together, per microsecond."""

PER_SM = 60e3
"""Bytes that one SM reads per microsecond with ``IN_FLIGHT`` under way."""

PRODUCTS = {
    "sync": {8: 70e3, 16: 48e3, 32: 35e3, 64: 24e3},
    "wgmma": {8: 42e3, 16: 42e3, 32: 42e3, 64: 38e3},
}
"""Weights that one team multiplies per microsecond, by MMA and rows of x: latencies decide, of codes and products."""

SECOND = 1.6
"""How many times that two teams do."""

INGRESS = 100e3
"""Bytes that one SM takes in per microsecond from L2 and memory together."""

COPY = 35e3
"""Bytes of x that one SM copies per microsecond: 32 KB under way, of an L2 that all SMs ask at once."""

SENT = 60e3
"""Bytes of partial sums that the consumers of one SM hand on per microsecond."""

FINISH = 0.4
"""Microseconds of an epilogue's eight rows, of which three warps do a share each."""

EXCHANGE, EXCHANGED = 0.45, 0.026
"""Microseconds of a tile's exchange of sums and its epilogue, and what each row of x adds: of all clusters alike."""

START = 1.5
"""Microseconds until the first products."""

END = {1: 1.0, 2: 1.6, 4: 1.8, 8: 2.2}
"""Microseconds at the end of a kernel: the last sums' way and their epilogue."""


@lru_cache(maxsize=1024)
def choose(
    problem: FewRowProblem,
    rows: int,
    target: Target,
    invariant: bool = False,
    mma: str | None = None,
) -> FewRowSchedule:
    """A legal schedule for ``rows`` of x (a bucket), by a model of the H200.

    Args:
        invariant: choose what orders and rounds sums alike for all buckets.
        mma: ``"sync"`` or ``"wgmma"`` alone; by default the better one: up to 16 rows, and for all where ``invariant``,
            ``"sync"``.

    Raises UnsupportedError where no schedule fits: units or heads too wide for so many rows.
    """
    judged = 32 if invariant else rows
    forms = (mma,) if mma else MMAS[: 1 if invariant or rows <= 16 else 2]
    found = []
    for form in forms:
        exact = invariant or rows > 16 or form == "wgmma"
        plain = FewRowSchedule(rows, conversion="registers" if exact else "sums", mma=form)
        for cluster, teams in product(CLUSTERS, _teams(problem, rows, invariant)):
            if cluster > problem.records.along:
                continue
            tried = replace(plain, cluster=cluster, teams=teams)
            mine = _fitted(problem, tried, target)
            like = _fitted(problem, replace(tried, rows=judged), target)
            if mine is not None:
                expected = expected_microseconds(problem, like or mine)
                # What does not serve all rows alike is for weights that nothing does.
                found.append((like is None, expected, cluster, forms.index(form), mine))
    require(
        bool(found),
        "composition",
        f"units of {problem.unit} rows, {rows} rows of x",
        f"sums and operands that fit {target.smem_per_block} B of shared memory",
        "use fewer rows, or a projection for each range of columns",
        UnsupportedError,
    )
    return min(found, key=lambda entry: entry[:4])[4]


def _teams(problem: FewRowProblem, rows: int, invariant: bool) -> tuple[int, ...]:
    """Teams that may fit the registers, and that serve all rows alike where that is asked for."""
    return (1,) if invariant or rows > 32 or problem.held > 16 else (1, 2)


def _fitted(
    problem: FewRowProblem, schedule: FewRowSchedule, target: Target
) -> FewRowSchedule | None:
    """With ring and activations of the best sizes there is room for."""
    shared = Shared(problem, schedule)
    slot, margin = shared.slot, 256 + shared.alignment
    whole = problem.chunks(schedule.cluster)
    flight = max((IN_FLIGHT + slot // 2) // slot, 1)
    wanted = max(RING // slot, FEWEST_SLOTS)
    # Two CTAs to an SM: an empty GPU then has both of a cluster on one SM, and others idle (measured: twice the time).
    for chunks, ahead in ((whole, False), (0, True), (0, False)):
        if chunks == 0 and whole == 1:
            continue
        tried = replace(schedule, slots=max(flight, FEWEST_SLOTS), chunks=chunks or 1, ahead=ahead)
        if chunks == 0:
            rounds = rounds_of(problem, tried)
            readings = -(-rounds // most_wide(problem, tried))
            tried = replace(tried, wide=-(-rounds // readings))
        left = target.smem_per_block - Shared(problem, tried).size
        if left < 0:
            continue
        shared = Shared(problem, tried)
        kept = max(flight + 1 - tried.slots, 0) * slot
        sums = min(1 + max(left - kept, 0) // shared.exchange, max(tried.wide, 2))
        left -= (sums - 1) * shared.exchange
        if chunks == 0:
            phase = shared.chunk * (2 if ahead else 1)
            more = min(max(left - margin, 0) // phase, max(PHASE // shared.chunk - 1, 0))
            tried = replace(tried, chunks=min(1 + more, whole - 1))
        tried = replace(tried, sums=sums)
        left = target.smem_per_block - Shared(problem, tried).size
        slots = min(tried.slots + max(left - margin, 0) // slot, max(wanted, tried.slots))
        return replace(tried, slots=slots, in_flight=min(flight, slots))
    return None


def rounds_of(problem: FewRowProblem, schedule: FewRowSchedule) -> int:
    """Tiles that the busiest cluster of the reference GPU has."""
    return -(-problem.tiles // clusters_of(REFERENCE_SMS, schedule.cluster))


def expected_microseconds(problem: FewRowProblem, schedule: FewRowSchedule) -> float:
    """What a kernel is expected to take on the reference GPU, launch apart."""
    record, cluster = problem.record, schedule.cluster
    rounds = rounds_of(problem, schedule)
    chunks = problem.chunks(cluster)
    records = rounds * problem.bands * chunks
    weights = records * record.size
    whole = schedule.chunks >= chunks
    readings = 1 if whole else -(-rounds // schedule.wide) * problem.bands
    copies = readings * -(-chunks // schedule.chunks)
    x = readings * chunks * record.depth * schedule.rows * 2
    rate = PRODUCTS[schedule.mma][schedule.rows] * (SECOND if schedule.teams > 1 else 1.0)
    work = records * record.rows * record.depth / rate
    # While x is copied, the ring fills and nothing is multiplied: at the start, and wherever x is read again and does
    # not come ahead.
    ring = schedule.slots * record.size / PER_SM
    exposed = max(x / copies / COPY - ring, 0.0) * (1 if schedule.ahead else copies)
    busy = work if whole or schedule.ahead else work + x / COPY - exposed
    if schedule.ahead:
        busy = max(busy, x / COPY)
    stream = max(problem.records.nbytes / STREAM, weights / PER_SM, (weights + x) / INGRESS)
    sums = Shared(problem, schedule).exchange
    busy += rounds * sums / SENT
    finish = rounds * epilogue_tasks(schedule.owned) * FINISH
    if cluster > 1:
        finish = rounds * (EXCHANGE + EXCHANGED * schedule.rows)
    fixed = START + END[cluster]
    return max(stream, busy, finish) + exposed + fixed
