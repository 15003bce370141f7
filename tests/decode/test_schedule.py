"""Schedules: legal for any problem, refused where they do not fit, and the same sums for all rows where asked."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from epicute.decode.geometry import RECORD_BYTES, TILES
from epicute.decode.schedule import (
    BUCKETS,
    FewRowProblem,
    Shared,
    bucket_of,
    choose,
    clusters_of,
    expected_microseconds,
    room,
)
from epicute.errors import ArgumentError, UnsupportedError
from epicute.jit import DEFAULT_TARGET
from epicute.layouts import CHANNEL, GROUPS, Records


@st.composite
def problems(draw: st.DrawFn) -> FewRowProblem:
    bits = draw(st.sampled_from([4, 8, 16]))
    group = draw(st.sampled_from([CHANNEL, *GROUPS])) if bits == 4 else 0
    rows, k = draw(st.integers(1, 60000)), draw(st.integers(1, 60000))
    zeros = bits == 4 and draw(st.booleans())
    records = Records.of(rows, k, bits, group, zeros, TILES, RECORD_BYTES)
    tile, unit = draw(st.sampled_from([(64, 32), (64, 64), (64, 128), (128, 128), (256, 256)]))
    staged = (draw(st.integers(0, 4)), draw(st.integers(0, 2)), draw(st.integers(0, 3)) * 64)
    return FewRowProblem(records, k, tile, unit, torch.bfloat16, staged, gain=draw(st.booleans()))


@settings(max_examples=300)
@given(problems(), st.sampled_from(BUCKETS), st.booleans())
def test_what_is_chosen_is_legal(problem: FewRowProblem, rows: int, invariant: bool) -> None:
    try:
        schedule = choose(problem, rows, DEFAULT_TARGET, invariant)
    except UnsupportedError:
        assert rows * problem.tile > 32 * 64  # what fits no schedule is wide, and of many rows
        return
    schedule.check(problem, DEFAULT_TARGET)
    assert schedule.rows == rows
    assert expected_microseconds(problem, schedule) > 0


@settings(max_examples=200)
@given(problems())
def test_batch_invariant_schedules_add_and_round_alike(problem: FewRowProblem) -> None:
    found = []
    for rows in BUCKETS:
        try:
            found.append(choose(problem, rows, DEFAULT_TARGET, True))
        except UnsupportedError:
            continue
    fitting = {(s.cluster, s.conversion) for s in found if s.rows <= 32}
    assert len(fitting) <= 1
    assert {s.conversion for s in found} <= {"registers"}


@settings(max_examples=100)
@given(problems(), st.sampled_from(BUCKETS))
def test_shared_memory_is_divided_without_overlap(problem: FewRowProblem, rows: int) -> None:
    try:
        schedule = choose(problem, rows, DEFAULT_TARGET)
    except UnsupportedError:
        return
    shared = Shared(problem, schedule)
    starts = [
        0,
        shared.x,
        shared.sums,
        shared.floats,
        shared.integers,
        shared.barriers,
        shared.size,
    ]
    assert starts == sorted(starts)
    assert all(start % 128 == 0 for start in starts)
    assert shared.slot >= problem.record.size
    assert shared.size <= room(DEFAULT_TARGET, schedule.resident)
    assert 2 * room(DEFAULT_TARGET, 2) <= room(DEFAULT_TARGET, 1)


def simple(k: int = 4096) -> FewRowProblem:
    records = Records.of(4096, k, 4, 128, False, TILES, RECORD_BYTES)
    return FewRowProblem(records, k, 64, 64, torch.bfloat16, (0, 0, 0))


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"rows": 24}, "schedule.rows"),
        ({"cluster": 3}, "schedule.cluster"),
        ({"conversion": "table"}, "schedule.conversion"),
        ({"resident": 3}, "schedule.resident"),
        ({"slots": 1}, "schedule.in_flight"),
        ({"in_flight": 9}, "schedule.in_flight"),
        ({"chunks": 9}, "schedule.chunks"),
        ({"slots": 40, "in_flight": 2}, "shared memory"),
    ],
)
def test_what_does_not_fit_is_refused(changes: dict, named: str) -> None:
    problem = simple()
    schedule = choose(problem, 8, DEFAULT_TARGET)
    with pytest.raises(ArgumentError, match=named):
        replace(schedule, **changes).check(problem, DEFAULT_TARGET)


def test_a_cluster_has_no_more_ctas_than_records() -> None:
    problem = simple(500)
    schedule = replace(choose(problem, 8, DEFAULT_TARGET), cluster=2, chunks=1)
    with pytest.raises(ArgumentError, match="records along k"):
        schedule.check(problem, DEFAULT_TARGET)


@given(st.integers(1, 300))
def test_buckets(rows: int) -> None:
    found = bucket_of(rows)
    assert found in BUCKETS
    assert rows <= found or found == BUCKETS[-1]
    assert found == BUCKETS[0] or rows > BUCKETS[BUCKETS.index(found) - 1]


@given(st.integers(1, 200), st.sampled_from([1, 2, 4, 8]))
def test_clusters_fit_the_device(multiprocessors: int, cluster: int) -> None:
    found = clusters_of(multiprocessors, cluster)
    assert found >= 1
    assert found * cluster <= max(multiprocessors, cluster)
