"""Which schedule: a model of the H200. Its rates were fitted to times of many schedules on one, which no published
table holds: what a choice takes beside the other MMA's best is in ``projections``.

A kernel takes as long as its bytes, x among them as often as it is read, unless products take longer. Clusters make
shares of x small and exchanges of sums longer; tiles whose sums are held together read x together. Where consumers copy
x, nothing is multiplied meanwhile, and what the ring holds hides it.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from itertools import product

from epicute.decode.geometry import MMAS, epilogue_tasks
from epicute.decode.schedule import (
    BUCKETS,
    CLUSTERS,
    FEWEST,
    FewRowProblem,
    FewRowSchedule,
    Shared,
    clusters_of,
    most_wide,
    turned,
    turns,
)
from epicute.errors import UnsupportedError, require
from epicute.jit import Target

__all__ = ["STREAM", "choose", "expected_microseconds", "rounds_of"]

IN_FLIGHT = 48 << 10
"""Bytes of weights that may be under way to an SM: beyond, activations queue behind them."""

RING = 96 << 10
"""Bytes of the ring where there is room."""

FEWEST_SLOTS = 3
REFERENCE_SMS = 132
STREAM = 4.53e6
"""Bytes of weights that all SMs read together, per microsecond."""

PER_SM = 67.4e3
"""Bytes that one SM reads per microsecond with ``IN_FLIGHT`` under way."""

PRODUCTS = {
    "sync": {8: 81e3, 16: 62e3, 32: 43.5e3, 64: 22e3},
    "wgmma": {8: 58e3, 16: 57.6e3, 32: 50.7e3, 64: 37.2e3},
    "integers": {8: 84e3, 16: 70e3, 32: 40e3, 64: 21e3},
    "turned": {8: 84e3, 16: 73.6e3},
}
"""Weights that one SM multiplies per microsecond, by MMA, or conversion, and rows of x; latencies are among what
decides them.
"""

INGRESS = 72e3
"""Bytes that one SM takes in per microsecond from L2 and memory together."""

COPY = 28.8e3
"""Bytes of x that one SM copies per microsecond: 32 KB under way, of an L2 that all SMs ask at once."""

INTEGERS = 8.9e3
"""The same where they become integers."""

TURN = 45.7e3
"""The same of what TMA has brought, where it is."""

FIRST = 0.57
"""Microseconds that the first rows of x take to come by TMA."""

LIVE = (1 + FEWEST) / 2
"""Rows that become integers, on average: those that are there."""

SENT = 126e3
"""Bytes of partial sums that the consumers of one SM hand on per microsecond."""

FINISH = 0.27
"""Microseconds of an epilogue's eight rows, of which three warps do a share each."""

EXCHANGE, EXCHANGED = 0.436, 0.0216
"""Microseconds of a tile's exchange of sums in a cluster and its epilogue, and what each row of x adds."""

START = 1.26
"""Microseconds until the first products."""

END = {1: 0.6, 2: 1.3, 4: 1.35, 8: 1.6}
"""Microseconds at the end of a kernel: the last sums' way and their epilogue."""


@lru_cache(maxsize=1024)
def choose(
    problem: FewRowProblem,
    rows: int,
    target: Target,
    invariant: bool = False,
    mma: str | None = None,
) -> FewRowSchedule:
    """A legal schedule for ``rows`` of x (a bucket, or ``FEWEST``), by a model of the H200.

    Args:
        invariant: choose what orders and rounds sums alike for all buckets.
        mma: ``"sync"`` or ``"wgmma"`` alone; by default the better one: up to 8 rows, and for all where ``invariant``,
            ``"sync"``. With ``"wgmma"`` tiles that are held together may still differ between buckets.

    Raises UnsupportedError where no schedule fits: units or heads too wide for so many rows.
    """
    fewest = rows == FEWEST and problem.record.bits == 4
    rows = max(rows, BUCKETS[0])
    judged = 32 if invariant else rows
    forms = (mma,) if mma else MMAS[: 1 if invariant or rows <= BUCKETS[0] else 2]
    found = []
    for form in forms:
        copied = fewest and form == "sync" and not invariant
        conversion = "integers" if copied else "registers"
        kinds = [FewRowSchedule(rows, conversion=conversion, mma=form)]
        if form == "wgmma" and turns(problem, rows) and not invariant:
            kinds.append(FewRowSchedule(rows, conversion="integers", mma=form))
        for plain, cluster in product(kinds, CLUSTERS):
            if cluster > problem.records.along:
                continue
            mine = _fitted(problem, replace(plain, cluster=cluster), target)
            like = _fitted(problem, replace(plain, cluster=cluster, rows=judged), target)
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


def _fitted(
    problem: FewRowProblem, schedule: FewRowSchedule, target: Target
) -> FewRowSchedule | None:
    """With ring and activations of the best sizes there is room for."""
    shared = Shared(problem, schedule)
    slot, margin = shared.slot, 256 + shared.alignment
    whole = shared.held
    flight = max((IN_FLIGHT + slot // 2) // slot, 1)
    wanted = max(RING // slot, FEWEST_SLOTS)
    least = min(2, whole) if shared.direct else 1
    sizes = [(whole, True), (least, False), (1, False)]
    for chunks, resident in sizes[:1] if turned(schedule) else sizes:
        tried = replace(schedule, slots=max(flight, FEWEST_SLOTS), chunks=chunks)
        if not resident:
            rounds = rounds_of(problem, tried)
            readings = -(-rounds // most_wide(problem, tried))
            wide = -(-rounds // readings)
            if schedule.mma == "wgmma" and wide > 1:
                wide = min(wide + wide % 2, most_wide(problem, tried))
            tried = replace(tried, wide=wide)
            whole = Shared(problem, tried).held
        left = target.smem_per_block - Shared(problem, tried).size
        if left < 0 or chunks > whole:
            continue
        shared = Shared(problem, tried)
        kept = max(flight + 1 - tried.slots, 0) * slot
        sums = min(1 + max(left - kept, 0) // shared.exchange, max(tried.wide, 2))
        left -= (sums - 1) * shared.exchange
        more = 0 if resident else max(left - margin, 0) // shared.chunk
        if shared.direct:
            # As far ahead as the ring is, and one to multiply with.
            ahead = -(-wanted // tried.wide) * shared.pieces
            more = min(more, max(ahead + 1 - chunks, 0))
        else:
            # A copy that takes longer than the ring's filling keeps the memory waiting.
            hidden = int(COPY / PER_SM * slot * wanted) // shared.chunk
            more = min(more, max(hidden - 1, 0))
        tried = replace(tried, sums=sums, chunks=min(tried.chunks + more, whole))
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
    whole = schedule.chunks >= Shared(problem, schedule).held
    kind, copy = schedule.mma, COPY
    if schedule.conversion == "integers":
        kind, copy = ("turned", TURN) if turned(schedule) else ("integers", INTEGERS)
    readings = 1 if whole else -(-rounds // schedule.wide) * problem.bands
    copies = readings * -(-chunks // schedule.chunks)
    x = 2.0 * readings * chunks * record.depth * schedule.rows
    if kind == "integers" and schedule.rows == BUCKETS[0]:
        x *= LIVE / schedule.rows
    work = records * record.rows * record.depth / PRODUCTS[kind][schedule.rows]
    # While x is copied, the ring fills and nothing is multiplied: at the start, and wherever x is read again.
    ring = copies * schedule.slots * record.size / PER_SM
    exposed = max(x / copy - ring, 0.0)
    busy = work if whole else work + x / copy - exposed
    if Shared(problem, schedule).direct:
        busy, exposed = work, FIRST + (x / TURN if turned(schedule) else 0.0)
        if not whole and schedule.chunks == 1:
            busy += x / INGRESS  # nothing is multiplied while it comes
    stream = max(problem.records.nbytes / STREAM, weights / PER_SM, (weights + x) / INGRESS)
    sums = Shared(problem, schedule).exchange
    busy += rounds * sums / SENT
    finish = rounds * epilogue_tasks(schedule.owned) * FINISH
    if cluster > 1:
        finish = rounds * (EXCHANGE + EXCHANGED * schedule.rows)
    fixed = START + END[cluster]
    return max(stream, busy, finish) + exposed + fixed
