"""Schedules: legal for any problem, refused where they do not fit, and the same sums for all rows where asked."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from epicute.decode.geometry import MMAS, RECORD_BYTES, TILES
from epicute.decode.model import STREAM, choose, expected_microseconds, rounds_of
from epicute.decode.schedule import (
    BUCKETS,
    FEWEST,
    FewRowProblem,
    FewRowSchedule,
    Shared,
    bucket_of,
    clusters_of,
    most_wide,
    turned,
)
from epicute.errors import ArgumentError, UnsupportedError
from epicute.jit import DEFAULT_TARGET
from epicute.layouts import CHANNEL, GROUPS, Records
from epicute.models.shapes import SHAPES, projections


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
@given(
    problems(), st.sampled_from((FEWEST, *BUCKETS)), st.booleans(), st.sampled_from([None, *MMAS])
)
def test_what_is_chosen_is_legal(
    problem: FewRowProblem, rows: int, invariant: bool, mma: str | None
) -> None:
    try:
        schedule = choose(problem, rows, DEFAULT_TARGET, invariant, mma)
    except UnsupportedError:
        assert rows * problem.tile > 32 * 64  # what fits no schedule is wide, and of many rows
        return
    schedule.check(problem, DEFAULT_TARGET)
    assert schedule.rows == max(rows, BUCKETS[0])
    assert mma is None or schedule.mma == mma
    assert expected_microseconds(problem, schedule) > 0


@settings(max_examples=200)
@given(problems(), st.sampled_from(BUCKETS))
def test_what_is_chosen_keeps_the_memory_busy(problem: FewRowProblem, rows: int) -> None:
    """Enough bytes under way, no idle CTA of a cluster, and no form or cluster that the model takes to be faster."""
    try:
        schedule = choose(problem, rows, DEFAULT_TARGET)
    except UnsupportedError:
        return
    size, ring = problem.record.size, Shared(problem, schedule)
    assert min(schedule.in_flight * size, ring.x) >= min(36 << 10, 2 * size)
    assert schedule.cluster <= problem.records.along
    pairs = schedule.mma == "wgmma" and schedule.wide > 1
    assert schedule.wide <= max(rounds_of(problem, schedule), 1) + pairs
    best = expected_microseconds(problem, schedule)
    forms = MMAS if rows > 8 else ("sync",)
    for mma in forms:
        try:
            other = choose(problem, rows, DEFAULT_TARGET, mma=mma)
        except UnsupportedError:
            continue
        assert best <= expected_microseconds(problem, other)


@settings(max_examples=200)
@given(problems(), st.sampled_from(BUCKETS), st.sampled_from(MMAS), st.sampled_from([1, 2, 4, 8]))
def test_every_record_is_multiplied_once(
    problem: FewRowProblem, rows: int, mma: str, cluster: int
) -> None:
    """Tiles dealt out over clusters, and groups of tiles held together, as the kernel walks them."""
    cluster = min(cluster, problem.records.along)
    schedule = FewRowSchedule(rows, cluster, conversion="registers", mma=mma)
    wide = most_wide(problem, schedule)
    step = min(clusters_of(132, cluster), problem.tiles)
    for first in {0, step // 2, step - 1}:
        tiles = list(range(first, problem.tiles, step))
        assert len(tiles) == (problem.tiles - first + step - 1) // step
        groups = [tiles[g : g + wide] for g in range(0, len(tiles), wide)]
        assert [t for group in groups for t in group] == tiles
        assert all(len(group) <= wide for group in groups)
    registers = rows * (16 if mma == "wgmma" or problem.record.bits == 16 else 32) // 32
    assert 1 <= wide <= 8
    held = -(-wide // 2) if mma == "wgmma" else wide
    assert wide == 1 or held * registers <= (160 - rows if mma == "wgmma" else 96)


@settings(max_examples=200)
@given(problems())
def test_batch_invariant_schedules_add_and_round_alike(problem: FewRowProblem) -> None:
    found = []
    for rows in BUCKETS:
        try:
            found.append(choose(problem, rows, DEFAULT_TARGET, True))
        except UnsupportedError:
            continue
    fitting = {(s.mma, s.cluster, s.conversion) for s in found if s.rows <= 32}
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
    assert shared.size <= DEFAULT_TARGET.smem_per_block


@settings(max_examples=60)
@given(problems(), st.sampled_from(MMAS))
def test_activations_stand_at_multiples_of_their_swizzle(problem: FewRowProblem, mma: str) -> None:
    for rows in BUCKETS:
        try:
            schedule = choose(problem, rows, DEFAULT_TARGET, mma=mma)
        except UnsupportedError:
            continue
        shared = Shared(problem, schedule)
        copied = schedule.conversion == "integers" and not turned(schedule)
        assert shared.alignment == (128 if copied else 1024)
        assert shared.x % shared.alignment == shared.chunk % shared.alignment == 0


def simple(k: int = 4096) -> FewRowProblem:
    records = Records.of(4096, k, 4, 128, False, TILES, RECORD_BYTES)
    return FewRowProblem(records, k, 64, 64, torch.bfloat16, (0, 0, 0))


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"rows": 24}, "schedule.rows"),
        ({"cluster": 3}, "schedule.cluster"),
        ({"conversion": "table"}, "schedule.conversion"),
        ({"slots": 1}, "schedule.in_flight"),
        ({"in_flight": 9}, "schedule.in_flight"),
        ({"chunks": 9}, "schedule.chunks"),
        ({"slots": 40, "in_flight": 2}, "shared memory"),
        ({"mma": "simt"}, "schedule.mma"),
        ({"mma": "wgmma", "conversion": "sums"}, "schedule.conversion"),
        ({"mma": "wgmma", "conversion": "bias"}, "schedule.conversion"),
        ({"mma": "wgmma", "conversion": "integers", "chunks": 1}, "schedule.conversion"),
        ({"wide": 2}, "schedule.wide"),
        ({"wide": 17, "chunks": 1}, "schedule.wide"),
        ({"sums": 9}, "schedule.sums"),
        ({"sums": 0}, "schedule.sums"),
    ],
)
def test_what_does_not_fit_is_refused(changes: dict, named: str) -> None:
    problem = simple()
    schedule = choose(problem, 8, DEFAULT_TARGET)
    with pytest.raises(ArgumentError, match=named):
        replace(schedule, **changes).check(problem, DEFAULT_TARGET)


@pytest.mark.parametrize("shape", ["1B", "8B", "70B", "405B"])
@pytest.mark.parametrize("layer", ["qkv", "o", "gate_up", "down"])
@pytest.mark.parametrize("format", ["int4", "fp8", "bf16"])
def test_published_layers_are_expected_near_their_bytes(
    shape: str, layer: str, format: str
) -> None:
    """By the model: few rows within a fifth and the ends of a plain stream; sums take long from M = 32 on."""
    n, k = projections(SHAPES[shape])[layer]
    bits = {"int4": 4, "fp8": 8, "bf16": 16}[format]
    records = Records.of(n, k, bits, 128 if bits == 4 else 0, False, TILES, RECORD_BYTES)
    problem = FewRowProblem(records, k, 64, 64, torch.bfloat16, (1, 0, 0))
    floor = records.nbytes / STREAM
    for rows, factor, fixed in ((8, 1.2, 4.1), (16, 1.6, 5.8), (32, 2.0, 6.0), (64, 4.2, 20.0)):
        schedule = choose(problem, rows, DEFAULT_TARGET)
        found = expected_microseconds(problem, schedule)
        assert found <= floor * factor + fixed, f"{rows} rows: {found:.2f} of {floor:.2f} us"
        busy = min(problem.tiles, clusters_of(132, schedule.cluster)) * schedule.cluster
        assert busy >= 60 or problem.tiles < 60


@pytest.mark.parametrize("reason", ["odd blocks", "a gain", "eight bits", "many rows"])
def test_integers_in_place_are_refused_where_they_cannot_be_made(reason: str) -> None:
    problem = simple()
    schedule = choose(problem, 16, DEFAULT_TARGET, mma="wgmma")
    most = Shared(problem, replace(schedule, wide=1)).held
    schedule = replace(schedule, conversion="integers", chunks=most, wide=1, sums=1, slots=3)
    schedule = replace(schedule, in_flight=2)
    schedule.check(problem, DEFAULT_TARGET)
    if reason == "a gain":
        problem = replace(problem, gain=True)
    elif reason == "many rows":
        schedule = replace(schedule, rows=32, cluster=4, chunks=2)
    else:
        bits, group, k = (4, 64, 5 * 64) if reason == "odd blocks" else (8, 0, 4096)
        records = Records.of(4096, k, bits, group, False, TILES, RECORD_BYTES)
        assert reason != "odd blocks" or records.record.blocks % 2
        problem = replace(problem, records=records, depth=k)
        schedule = replace(schedule, cluster=1, chunks=problem.chunks(1))
    with pytest.raises(ArgumentError, match=r"schedule\.conversion"):
        schedule.check(problem, DEFAULT_TARGET)


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
