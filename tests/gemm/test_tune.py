"""``autotune`` keeps the fastest legal schedule, times once for each kernel, M and device, and spoils nothing."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch

from epicute.epilogues import Store
from epicute.errors import ArgumentError, CompileError
from epicute.gemm import Plan, Schedule, autotune, tune
from epicute.jit import ObjectCache
from tests.gemm.planned import OUT, QKV, Launch, M, Recorder, fake_plan, operands_for, weight

BF16 = torch.bfloat16


class Clock:
    """Stands in for the GPU: the ``fastest``-th plan takes 1 µs, all others more."""

    def __init__(self, fastest: int) -> None:
        self.fastest = fastest
        self.timed: list[list[Plan]] = []
        self.operands: dict[str, torch.Tensor] = {}
        self.loaded: list[Plan] = []

    def __call__(self, plans: list[Plan], x: Any, packed: Any, operands: Any) -> list[float]:
        self.timed.append(plans)
        self.operands = dict(operands)
        return [1.0 if i == self.fastest else 2.0 + i for i in range(len(plans))]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    found = Clock(2)
    monkeypatch.setattr(tune, "time_all", found)
    monkeypatch.setattr(tune, "precompile", lambda *_, **__: [])
    monkeypatch.setattr(tune, "compile", lambda *_, **__: Recorder())
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "a GPU")
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(Plan, "load", lambda plan, _: found.loaded.append(plan))
    return found


@pytest.fixture
def cache(tmp_path: Path) -> ObjectCache:
    return ObjectCache(tmp_path / "cache")


def tuned(launch: Launch, cache: ObjectCache, **options: Any) -> Plan:
    return autotune(launch.plan, launch.x, launch.packed, launch.operands, cache=cache, **options)


def test_the_fastest_is_returned_and_found_again(clock: Clock, cache: ObjectCache) -> None:
    first = tuned(Launch(OUT, torch.float8_e4m3fn, "fp8"), cache)
    assert first.schedule == clock.timed[0][2].schedule
    again = tuned(Launch(OUT, torch.float8_e4m3fn, "fp8"), cache)
    assert again.schedule == first.schedule
    assert len(clock.timed) == 1
    assert {first, again} <= set(clock.loaded)  # either may be captured right away
    assert [entry.kernel for entry in cache.entries()] == ["gemm.autotune"]


def test_the_plans_own_schedule_is_timed_first_and_stays_where_it_is_best(
    clock: Clock, cache: ObjectCache
) -> None:
    clock.fastest = 0
    launch = Launch(OUT, torch.float8_e4m3fn, "fp8")
    assert tuned(launch, cache) is launch.plan
    assert clock.timed[0][0] is launch.plan
    assert tuned(launch, cache) is launch.plan
    assert len(clock.timed) == 1


def test_candidates_are_legal_and_distinct(clock: Clock, cache: ObjectCache) -> None:
    launch = Launch(OUT, torch.float8_e4m3fn, "fp8")
    tuned(launch, cache, tries=9)
    (plans,) = clock.timed
    schedules = [plan.schedule for plan in plans]
    assert len(set(schedules)) == len(schedules)
    assert 9 <= len(schedules) <= 10
    for schedule in schedules:
        schedule.check(launch.plan.kernel.spec.problem, launch.plan.kernel.target)


def test_what_does_not_compile_is_passed_over(
    clock: Clock, cache: ObjectCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: Iterator[int] = count()

    def precompile(*_: Any, **__: Any) -> None:
        raise CompileError("one of them")

    def compile(kernel: Any, **_: Any) -> Recorder:
        if next(calls) == 0:
            raise CompileError("spills")
        return Recorder()

    monkeypatch.setattr(tune, "compile", compile)
    monkeypatch.setattr(tune, "precompile", precompile)
    tuned(Launch(OUT, torch.float8_e4m3fn, "fp8"), cache, tries=5)
    assert 4 <= len(clock.timed[0]) <= 5


@pytest.mark.parametrize("other", ["rows", "device", "tries", "composition"])
def test_another_case_is_another_finding(
    clock: Clock, cache: ObjectCache, other: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    launch = Launch(OUT, torch.float8_e4m3fn, "fp8")
    tuned(launch, cache)
    options = {}
    if other == "rows":
        launch.x = torch.zeros(M + 1, *launch.x.shape[1:]).to(torch.float8_e4m3fn)
        launch.operands = operands_for(launch.plan, M + 1)
    elif other == "device":
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "another")
    elif other == "tries":
        options["tries"] = 7
    else:
        launch = Launch(QKV)
    tuned(launch, cache, **options)
    assert len(clock.timed) == 2


def test_the_schedule_it_starts_from_is_no_part_of_the_key(
    clock: Clock, cache: ObjectCache
) -> None:
    schedules = (None, Schedule(64, 64, 1, 3, pingpong=True))
    plans = [fake_plan(Store(BF16), 192, 64, BF16, schedule=s) for s in schedules]
    packed, x = weight(Store(BF16), 192, 64), torch.zeros(M, 64, dtype=BF16)
    found = [autotune(p, x, packed, operands_for(p, M), cache=cache) for p in plans]
    assert len(clock.timed) == 1
    assert found[0].schedule == found[1].schedule


def test_nothing_that_is_written_is_spoilt_but_cells(clock: Clock, cache: ObjectCache) -> None:
    for chain in (OUT, QKV):
        launch = Launch(chain)
        tuned(launch, cache)
        for spec in launch.plan.kernel.spec.layout.operands:
            same = clock.operands[spec.name] is launch.operands[spec.name]
            assert same == (not spec.kind.written or spec.name.endswith("cells")), spec.name


def test_a_finding_that_is_damaged_is_measured_again(clock: Clock, cache: ObjectCache) -> None:
    launch = Launch(OUT, torch.float8_e4m3fn, "fp8")
    tuned(launch, cache)
    (entry,) = cache.entries()
    entry.object.write_text('{"tile_m": 7}')
    tuned(launch, cache)
    assert len(clock.timed) == 2


def test_a_finding_that_is_not_legal_any_more_is_measured_again(
    clock: Clock, cache: ObjectCache
) -> None:
    launch = Launch(OUT, torch.float8_e4m3fn, "fp8")
    key = tune.key_of(launch.plan.kernel, M, "a GPU", tune.TRIES)
    wrong = fake_plan(Store(BF16), 192, 64, BF16)
    wrong.kernel = type(wrong.kernel)(
        type(wrong.kernel.spec)(
            wrong.kernel.spec.resolved,
            wrong.kernel.spec.layout,
            wrong.kernel.spec.problem,
            Schedule(stages=40),
        ),
        wrong.kernel.target,
    )
    tune.write(cache, key, wrong)
    assert tuned(launch, cache).schedule != wrong.schedule
    assert len(clock.timed) == 1


def test_the_finding_is_told(
    clock: Clock, cache: ObjectCache, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "epicute.gemm"):
        tuned(Launch(OUT, torch.float8_e4m3fn, "fp8"), cache)
    assert "takes 1.0 µs, the fastest of" in caplog.text


def test_no_rows_are_not_tuned_for(clock: Clock, cache: ObjectCache) -> None:
    launch = Launch(QKV)
    launch.x, launch.operands = launch.x[:0], operands_for(launch.plan, 0)
    assert tuned(launch, cache) is launch.plan
    assert clock.timed == []


def test_what_is_wrong_is_refused_before_anything_is_compiled(
    clock: Clock, cache: ObjectCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    launch = Launch(OUT, torch.float8_e4m3fn, "fp8")
    with pytest.raises(ArgumentError, match=r"tries: got 0, expected a count from 1"):
        tuned(launch, cache, tries=0)
    spoilt = {**launch.operands, "residual": launch.operands["residual"].float()}
    with pytest.raises(ArgumentError, match="residual: got"):
        autotune(launch.plan, launch.x, launch.packed, spoilt, cache=cache)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(ArgumentError, match="autotune: got a call inside a CUDA graph capture"):
        tuned(launch, cache)
    assert clock.timed == []
