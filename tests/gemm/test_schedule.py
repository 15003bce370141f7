"""``choose`` is legal for any problem, and ``Schedule.check`` refuses by name what is not."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from epicute.epilogues import (
    Bias,
    Dequantize,
    EmitFP8,
    ResidualAdd,
    RowScale,
    Store,
    SumSquares,
    SwiGLU,
    compose,
)
from epicute.errors import ArgumentError, UnsupportedError
from epicute.gemm import Problem, Schedule, choose, kernel_for, schedules, shared_memory
from epicute.gemm.choice import SMS, narrower
from epicute.gemm.model import clocks
from epicute.gemm.schedule import DTYPES, staged_bytes
from epicute.jit import Target
from tests.gemm.compositions import DTYPES as FORMATS
from tests.gemm.compositions import SKELETONS, projection

HOPPER = Target("sm_90a")
PLAIN_FP8 = Dequantize() >> Store()
PLAIN = Problem(columns=4096, rows=4096, depth=4096, dtype=torch.bfloat16, unit=32)


@st.composite
def problems(draw: st.DrawFn) -> Problem:
    """Any unit that a composition can have, with operands to stage."""
    unit = 16 * draw(st.integers(1, 16))
    units = draw(st.one_of(st.integers(1, 20), st.integers(1, 4096)))
    padding = draw(st.integers(0, unit - 1))
    per_row = draw(st.integers(0, 8)) * 4 + draw(st.integers(0, 3)) * 8
    per_unit = 4 * unit * draw(st.integers(0, 6))
    return Problem(
        columns=max(1, units * unit - padding),
        rows=units * unit,
        depth=draw(st.one_of(st.integers(1, 300), st.integers(1, 2**31 - 1))),
        dtype=draw(st.sampled_from(DTYPES)),
        unit=unit,
        staged=(per_row, per_unit),
        expected_m=draw(st.one_of(st.none(), st.integers(0, 2**20))),
        accumulate=draw(st.sampled_from(("fast", "precise"))),
        streamed=draw(st.sampled_from((0, 2, 4))) * unit,
        policies=draw(st.integers(1, 6)),
    )


@given(problems())
def test_the_choice_is_legal(problem: Problem) -> None:
    schedule = choose(problem, HOPPER)
    schedule.check(problem, HOPPER)
    assert shared_memory(schedule, problem) <= 227 * 1024


@given(problems())
def test_for_unknown_rows_it_is_as_wide_and_deep_as_fits(problem: Problem) -> None:
    problem = replace(problem, expected_m=None)
    schedule = choose(problem, HOPPER)
    wider = replace(schedule, tile_n=schedule.tile_n + problem.unit)
    assert wider.tile_n > 256 or schedule.tile_n >= problem.rows
    deeper = replace(schedule, stages=schedule.stages + 1)
    assert schedule.stages == 6 or shared_memory(deeper, problem) > HOPPER.smem_per_block


@given(problems(), st.integers(1, 20000))
def test_for_known_rows_it_costs_least(problem: Problem, rows: int) -> None:
    known, unknown = replace(problem, expected_m=rows), replace(problem, expected_m=None)
    chosen, widest = choose(known, HOPPER), choose(unknown, HOPPER)
    least = min(clocks(s, known, rows, SMS) for s in schedules(known, HOPPER))
    assert clocks(chosen, known, rows, SMS) <= clocks(widest, known, rows, SMS)
    assert clocks(chosen, known, rows, SMS) == least


@given(problems())
def test_every_schedule_it_chooses_from_is_legal_and_new(problem: Problem) -> None:
    found = list(schedules(problem, HOPPER))
    for schedule in found:
        schedule.check(problem, HOPPER)
    assert len(set(found)) == len(found) > 0
    assert choose(replace(problem, expected_m=None), HOPPER) in found


def test_waves_and_weights_decide() -> None:
    """1B: 3072 columns in 12 tiles of 256 leave half of a second turn empty, 16 of 192 fill one; for a few rows the
    weight's way is what counts, and all SMs must fetch it. Whole epilogues want tiles of 64 rows to a warpgroup."""
    fp8 = torch.float8_e4m3fn

    def chosen(n: int, k: int, rows: int, chain: object = PLAIN_FP8, how: str = "fast") -> Schedule:
        kernel = kernel_for(chain, n=n, k=k, dtype=fp8, expected_m=rows, accumulate=how)
        return kernel.spec.schedule

    assert chosen(3072, 2048, 2048) == Schedule(256, 192, 1, 4, 0, 2)
    assert chosen(28672, 4096, 2048) == Schedule(256, 160, 1, 4, 0, 2)
    assert chosen(28672, 4096, 2048, how="precise") == Schedule()
    whole = Dequantize() >> RowScale(4096) >> SwiGLU() >> EmitFP8()
    residual = Dequantize() >> ResidualAdd() >> SumSquares() >> Store() >> EmitFP8()
    assert chosen(28672, 4096, 2048, whole) == Schedule(128, 320, 2, 3)
    assert chosen(4096, 14336, 2048, residual) == Schedule()
    few = chosen(4096, 4096, 64)
    assert few.tile_m == 64
    assert few.stages > 8
    assert 4096 // few.tile_n >= 64


@pytest.mark.parametrize(("n", "k"), [(512, 512), (4096, 4096), (14336, 2048)])
def test_no_cta_of_a_cluster_is_without_rows(n: int, k: int) -> None:
    for rows in (1, 16, 64):
        schedule = kernel_for(Store(), n=n, k=k, expected_m=rows).spec.schedule
        assert schedule.cluster_m == 1 or rows > schedule.tile_m


@given(problems(), st.integers(1, 20000))
def test_clocks_grow_with_the_work(problem: Problem, rows: int) -> None:
    schedule = choose(replace(problem, expected_m=None), HOPPER)
    more = replace(problem, depth=min(2 * problem.depth + 128, 2**31 - 1))
    assert 0 < clocks(schedule, problem, rows, SMS) <= clocks(schedule, problem, 2 * rows, SMS)
    assert clocks(schedule, problem, rows, SMS) <= clocks(schedule, more, rows, SMS)
    assert clocks(schedule, problem, rows, 2 * SMS) <= clocks(schedule, problem, rows, SMS)


@given(
    skeleton=st.sampled_from(sorted(SKELETONS)),
    groups=st.integers(1, 40),
    k=st.integers(1, 20000),
    dtype=st.sampled_from(sorted(FORMATS)),
    expected_m=st.one_of(st.none(), st.integers(0, 5000)),
)
def test_every_composition_has_a_legal_kernel(
    skeleton: str, groups: int, k: int, dtype: str, expected_m: int | None
) -> None:
    chosen = SKELETONS[skeleton]
    n = groups * (chosen.group if chosen.group > 1 else 2)
    composition = chosen.composition(n, k, FORMATS[dtype])
    kernel = kernel_for(composition, n=n, k=k, dtype=FORMATS[dtype], expected_m=expected_m)
    spec = kernel.spec
    spec.schedule.check(spec.problem, HOPPER)
    assert kernel.shared_memory <= 227 * 1024
    assert spec.problem.rows >= n
    assert spec.problem.rows % spec.problem.unit == 0
    assert spec.pitch >= k
    assert spec.pitch * FORMATS[dtype].itemsize % 16 == 0


@given(problems(), st.sampled_from((128, 256)), st.integers(1, 32))
def test_shared_memory_is_the_sum_of_its_parts(problem: Problem, tile_m: int, eights: int) -> None:
    tile_n = eights * 8
    one, two = (Schedule(tile_m, tile_n, 1, stages) for stages in (3, 4))
    assert shared_memory(two, problem) - shared_memory(one, problem) == (tile_m + tile_n) * 128 + 16
    ring = replace(one, slots=3)  # for each of two warpgroups, 64 rows of 32 columns of 2 bytes
    assert shared_memory(ring, problem) - shared_memory(one, problem) == 2 * 3 * 64 * 32 * 2
    bare = replace(problem, staged=(0, 0))
    assert shared_memory(one, problem) - shared_memory(one, bare) == staged_bytes(one, problem)
    assert staged_bytes(one, bare) == 0
    dry = replace(problem, streamed=0)
    turns = replace(one, pingpong=True)
    assert shared_memory(one, problem) == shared_memory(one, dry)
    boxes = 2 * tile_m * (tile_n // problem.unit) * problem.streamed
    assert shared_memory(turns, problem) - shared_memory(turns, dry) == boxes


def test_the_published_default() -> None:
    """128 x 256, pairs of blocks, four stages of 128 bytes."""
    assert choose(PLAIN, HOPPER) == Schedule(128, 256, 2, 4)
    for layer, width in (("qkv", 256), ("gate_up", 256), ("o", 256), ("down", 256)):
        schedule = projection(layer, "8B", "fp8").kernel().spec.schedule
        assert (schedule.tile_n, schedule.stages) == (width, 4), layer


@pytest.mark.parametrize(
    ("change", "argument", "expected"),
    [
        ({"tile_m": 64}, "Schedule.tile_m", "128 or 256"),
        ({"tile_m": 256, "pingpong": True}, "Schedule.tile_m", "64 or 128"),
        ({"tile_m": 128, "tile_n": 224, "pingpong": True}, "Schedule", "at most 64x384"),
        ({"tile_n": 416}, "Schedule", "at most 128x384"),
        ({"tile_m": 192}, "Schedule.tile_m", "128 or 256"),
        ({"tile_n": 0}, "Schedule.tile_n", "multiple of 8"),
        ({"tile_n": 100}, "Schedule.tile_n", "multiple of 8"),
        ({"tile_n": 264}, "Schedule.tile_n", "up to 256"),
        ({"tile_n": 544}, "Schedule.tile_n", "up to 512"),
        ({"tile_n": 272, "unit": 16}, "Schedule.cluster_m", "multiple of 32"),
        ({"tile_n": 40}, "Schedule.tile_n", "unit, 32"),
        ({"tile_m": 256, "tile_n": 256}, "Schedule", "at most 128x384"),
        ({"cluster_m": 3}, "Schedule.cluster_m", "1, or 2"),
        ({"cluster_m": 0}, "Schedule.cluster_m", "1, or 2"),
        ({"cluster_n": 3}, "Schedule.cluster_n", "1, or 2"),
        ({"cluster_n": 2}, "Schedule.cluster_n", "where cluster_m is 1"),
        ({"cluster_m": 1, "cluster_n": 2, "rows": 768}, "Schedule.cluster_n", "even in number"),
        ({"stages": 1}, "Schedule.stages", "at least 2"),
        ({"stages": 5}, "Schedule.stages", "at most 232448 bytes"),
        ({"stages": 4, "slots": 5}, "Schedule.stages", "at most 232448 bytes"),
        ({"stages": 2, "slots": 1}, "Schedule.slots", "0, or 2 to 16"),
        ({"stages": 2, "slots": -1}, "Schedule.slots", "0, or 2 to 16"),
        ({"tile_n": 64, "stages": 2, "slots": 17}, "Schedule.slots", "0, or 2 to 16"),
        ({"tile_m": 256, "tile_n": 64, "slots": 2}, "Schedule.slots", "with tile_m 128"),
    ],
)
def test_illegal_schedules_are_refused_by_name(
    change: dict[str, Any], argument: str, expected: str
) -> None:
    rows, unit = change.pop("rows", PLAIN.rows), change.pop("unit", PLAIN.unit)
    schedule = replace(Schedule(), **change)
    with pytest.raises(ArgumentError, match=expected) as error:
        schedule.check(replace(PLAIN, rows=rows, columns=rows, unit=unit), HOPPER)
    assert str(error.value).startswith(f"{argument}: got ")
    assert "Fix: " in str(error.value)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"stages": 1}, "got 1, expected at least 2.*Fix: use 3 or more"),
        ({"stages": 0}, "got 0, expected at least 2.*Fix: use 3 or more"),
        ({"stages": 9}, r"got 9 \(.*bytes .* with 128x256\).*Fix: use 4 stages or a smaller tile$"),
        ({"stages": 4, "slots": 8}, "256 and 8 slots.*Fix: use 3 stages or .* or fewer slots$"),
        ({"slots": 99}, "slots: got 99, expected 0, or 2 to 16. Fix: use 0"),
        ({"stages": 99, "slots": 99}, "slots: got 99"),
        ({"tile_m": 64}, "Fix: use 128, or set pingpong=True, which makes 64 legal"),
        ({"tile_m": 256, "pingpong": True}, "use 64, or leave pingpong out, which makes 256 legal"),
        ({"tile_m": 192}, "Fix: use 128$"),
        ({"tile_m": 256}, "Fix: use a tile_n of at most 192"),
        ({"prefetch": 1}, r"prefetch: got 1 \(int\), expected True or False"),
        ({"tile_m": "64"}, r"tile_m: got '64' \(str\), expected an int. Fix: .* tile_m=128"),
        ({"tile_n": 128.0}, r"tile_n: got 128.0 \(float\), expected an int"),
        ({"stages": True}, r"stages: got True \(bool\), expected an int"),
        ({"slots": None}, r"slots: got None \(NoneType\), expected an int"),
        ({"pingpong": 1}, r"pingpong: got 1 \(int\), expected True or False"),
    ],
)
def test_the_fix_is_what_helps(change: dict[str, Any], said: str) -> None:
    with pytest.raises(ArgumentError, match=said):
        replace(Schedule(), **change).check(PLAIN, HOPPER)


@given(problems(), st.integers(2, 12), st.sampled_from((0, 2, 5)))
def test_the_stages_of_the_fix_fit_and_one_more_does_not(
    problem: Problem, stages: int, slots: int
) -> None:
    schedule = replace(choose(problem, HOPPER), stages=stages, slots=slots)
    if schedule.blocks > 1 and slots:
        return
    try:
        schedule.check(problem, HOPPER)
    except ArgumentError as error:
        if fits := re.search(r"Fix: use (\d+) stages", str(error)):
            replace(schedule, stages=int(fits[1])).check(problem, HOPPER)
            with pytest.raises(ArgumentError):
                replace(schedule, stages=int(fits[1]) + 1).check(problem, HOPPER)


def test_half_a_narrow_tile_is_no_share() -> None:
    narrow = replace(PLAIN, unit=8, rows=8, columns=8)
    with pytest.raises(ArgumentError, match=r"Schedule.cluster_m: got 2.*multiple of 16"):
        Schedule(128, 8, 2, 4).check(narrow, HOPPER)
    Schedule(128, 8, 1, 4).check(narrow, HOPPER)


def test_tiles_wider_than_a_wgmma_come_in_halves() -> None:
    """Each half is a box and a WGMMA of its own; a CTA of two loads half of each."""
    free = replace(PLAIN, unit=16)
    for tile_n, cluster in ((272, 1), (288, 2), (320, 2), (352, 1), (384, 2)):
        schedule = Schedule(128, tile_n, cluster, 3)
        schedule.check(free, HOPPER)
        assert schedule.parts == 2
        assert tile_n // schedule.parts // cluster % 8 == 0
        assert schedule.accumulators == tile_n // 2
    Schedule(256, 192, 1, 3, cluster_n=2).check(replace(free, rows=6144, columns=6144), HOPPER)
    with pytest.raises(ArgumentError, match=r"Schedule: got 128x320 with precise.*up to 256"):
        precise = replace(free, dtype=torch.float8_e4m3fn, accumulate="precise")
        Schedule(128, 320, 2, 3).check(precise, HOPPER)


@given(problems(), st.integers(1, 20000))
def test_a_thread_has_at_most_192_accumulators(problem: Problem, rows: int) -> None:
    every, fewer = list(schedules(problem, HOPPER)), list(schedules(problem, HOPPER, 128))
    assert len(set(every)) == len(every)
    assert set(fewer) <= set(every)
    assert all(schedule.accumulators <= 128 for schedule in fewer)
    for schedule in every:
        schedule.check(problem, HOPPER)
        assert schedule.accumulators <= 192
    assert choose(replace(problem, expected_m=rows), HOPPER) in every


def test_half_a_tile_must_be_a_wgmma_where_halves_are_added_apart() -> None:
    precise = replace(PLAIN, dtype=torch.float8_e4m3fn, unit=8, accumulate="precise")
    with pytest.raises(ArgumentError, match=r"Schedule: got 128x24 with precise.*multiple of 16"):
        Schedule(128, 24, 1, 4).check(precise, HOPPER)
    with pytest.raises(ArgumentError, match=r"Schedule: got 256x128 with precise.*128 rows"):
        Schedule(256, 128, 1, 4).check(precise, HOPPER)
    Schedule(128, 32, 1, 4).check(precise, HOPPER)
    Schedule(128, 24, 1, 4).check(replace(precise, accumulate="fast"), HOPPER)


def test_tall_tiles_take_narrow_units() -> None:
    with pytest.raises(ArgumentError, match=r"Schedule.tile_m: got 256 with a unit of 128"):
        Schedule(256, 128, 1, 4).check(replace(PLAIN, unit=128), HOPPER)


@given(problems())
def test_narrower_tiles_are_legal_and_end(problem: Problem) -> None:
    schedule, seen = choose(problem, HOPPER), []
    while schedule is not None:
        schedule.check(problem, HOPPER)
        seen.append(schedule.tile_n)
        schedule = narrower(schedule, problem, HOPPER)
    assert seen == sorted(set(seen), reverse=True)
    assert seen[-1] == problem.unit


@pytest.mark.parametrize(
    ("dtype", "k", "asked", "found"),
    [
        (torch.bfloat16, 4096, None, "fast"),
        (torch.float16, 4096, "fast", "fast"),
        (torch.float8_e4m3fn, 256, None, "fast"),
        (torch.float8_e4m3fn, 257, None, "precise"),
        (torch.float8_e4m3fn, 4096, "fast", "fast"),
        (torch.float8_e4m3fn, 64, "precise", "precise"),
    ],
)
def test_ge_04_long_sums_of_float8_are_added_in_float32(
    dtype: torch.dtype, k: int, asked: str | None, found: str
) -> None:
    kernel = kernel_for(Store(), n=64, k=k, dtype=dtype, accumulate=asked)
    assert kernel.spec.problem.accumulate == found


@pytest.mark.parametrize(
    ("dtype", "asked", "said"),
    [
        (torch.float8_e4m3fn, "exact", r"accumulate: got 'exact', expected 'fast', 'precise'"),
        (torch.bfloat16, "precise", r"accumulate: got 'precise', expected 'fast' for torch.bf"),
    ],
)
def test_unknown_accumulation_is_refused(dtype: torch.dtype, asked: str, said: str) -> None:
    with pytest.raises(ArgumentError, match=said):
        kernel_for(Store(), n=64, k=512, dtype=dtype, accumulate=asked)


def test_a_given_schedule_is_checked() -> None:
    with pytest.raises(ArgumentError, match=r"Schedule.tile_n: got 160.*unit, 64"):
        kernel = SKELETONS["swiglu.store"].case("bf16", 4720, 576).composition
        kernel_for(kernel, n=4720, k=576, schedule=Schedule(128, 160, 2, 4))


def test_blackwell_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="target: got sm_100a, expected sm_90a"):
        choose(PLAIN, Target("sm_100a"))


def test_a_unit_wider_than_a_tile_is_refused() -> None:
    with pytest.raises(ArgumentError, match="a unit of 288 columns"):
        choose(replace(PLAIN, unit=288), HOPPER)


def test_more_operands_than_shared_memory_holds_are_refused() -> None:
    chain = compose(*(Bias(name=f"b{i}") for i in range(150)), Store())
    with pytest.raises(UnsupportedError, match="operands"):
        kernel_for(chain, n=4096, k=4096)


@pytest.mark.parametrize(("name", "value"), [("n", 0), ("k", 0), ("n", -8), ("n", 2**31)])
def test_impossible_sizes_are_refused(name: str, value: int) -> None:
    sizes = {"n": 64, "k": 64, name: value}
    with pytest.raises(ArgumentError, match=rf"{name}: got {value}, expected an integer from 1"):
        kernel_for(Store(), **sizes)


def test_an_unserved_dtype_is_refused() -> None:
    with pytest.raises(ArgumentError, match=r"dtype: got torch.float32, expected torch.bfloat16"):
        kernel_for(Store(), n=64, k=64, dtype=torch.float32)
