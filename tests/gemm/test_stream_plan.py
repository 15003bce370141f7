"""A streamed operand's boxes cover its tile once, and every unit finds its columns among the stages it may read."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from epicute.epilogues import (
    Bias,
    Columns,
    HeadNorm,
    ResidualAdd,
    RoPE,
    Store,
    SwiGLU,
    compose,
)
from epicute.epilogues.resolve import resolve
from epicute.gemm import Schedule, kernel_for
from epicute.gemm.arguments import ArgumentLayout
from epicute.gemm.schedule import streamed_bytes
from epicute.gemm.stream_plan import BOX_BYTES, StreamPlan, stream_plan

BF16, FP32 = torch.bfloat16, torch.float32
DEFAULT = Schedule()

plans = st.builds(
    StreamPlan,
    name=st.just("residual"),
    dtype=st.sampled_from((BF16, torch.float16, FP32)),
    width=st.sampled_from((64, 96, 128, 160, 192, 256, 320, 512, 1024)),
    units=st.integers(1, 8),
    capacity=st.integers(1, 5),
)


@given(plans)
def test_every_byte_of_a_row_has_one_place(plan: StreamPlan) -> None:
    assume(plan.width * plan.units % BOX_BYTES == 0)
    places = [plan.place(byte) for byte in range(plan.width * plan.units)]
    assert len(set(places)) == len(places)
    assert {(s, w) for s, w, _ in places} == {
        (s, w) for s in range(plan.stages) for w in range(len(plan.boxes_of(s)))
    }
    assert sum(len(plan.boxes_of(s)) for s in range(plan.stages)) == plan.boxes
    assert all(1 <= len(plan.boxes_of(s)) <= plan.capacity for s in range(plan.stages))


@given(plans)
def test_units_read_between_arrival_and_departure(plan: StreamPlan) -> None:
    assume(plan.width * plan.units % BOX_BYTES == 0)
    for unit in range(plan.units):
        for byte in range(unit * plan.width, (unit + 1) * plan.width):
            stage, _, _ = plan.place(byte)
            assert plan.first_unit(stage) <= unit <= plan.last_unit(stage)
    firsts = [plan.first_unit(stage) for stage in range(plan.stages)]
    lasts = [plan.last_unit(stage) for stage in range(plan.stages)]
    assert firsts == sorted(firsts)
    assert lasts == sorted(lasts)
    assert lasts[-1] == plan.units - 1


def plan_of(chain: object, n: int, schedule: Schedule = DEFAULT, **layout: object) -> StreamPlan:
    """The plan of a composition that has one."""
    found = maybe(chain, n, schedule, **layout)
    assert found is not None
    return found


def maybe(chain: object, n: int, schedule: Schedule = DEFAULT, **layout: object):
    composition = compose(chain)
    resolved = resolve(composition, n)
    return stream_plan(resolved, ArgumentLayout.of(resolved, **layout), schedule)


def test_a_residual_comes_behind_the_k_tiles() -> None:
    plan = plan_of(ResidualAdd() >> Store(BF16), 4096)
    assert (plan.name, plan.boxes, plan.stages) == ("residual", 4, 2)
    assert [list(plan.boxes_of(s)) for s in range(2)] == [[0, 1], [2, 3]]
    fp32 = plan_of(ResidualAdd() >> Store(BF16), 4096, dtypes={"residual": FP32}, alignments=None)
    assert (fp32.boxes, fp32.stages) == (8, 3)
    tall = plan_of(ResidualAdd() >> Store(BF16), 4096, Schedule(256, 128))
    assert (tall.boxes, tall.capacity) == (2, 1)
    small = plan_of(ResidualAdd() >> Store(BF16), 4096, Schedule(64, 256, pingpong=True))
    assert (small.boxes, small.stages, small.apart) == (4, 1, True)


def test_behind_a_pair_it_has_the_pairs_columns() -> None:
    plan = plan_of(SwiGLU() >> ResidualAdd() >> Store(BF16), 4096)
    assert plan.boxes == 2


@pytest.mark.parametrize(
    ("chain", "n", "layout"),
    [
        (Bias() >> Store(BF16), 4096, {}),
        (ResidualAdd() >> SwiGLU() >> Store(BF16), 4096, {}),
        (ResidualAdd() >> Store(BF16), 4096, {"alignments": {"residual": 2}}),
        (
            Columns(a=(2048, ResidualAdd() >> Store(BF16)), b=(2048, ResidualAdd() >> Store(BF16))),
            4096,
            {},
        ),
    ],
    ids=["none", "halves", "unaligned", "ranges"],
)
def test_what_is_not_streamed(chain: object, n: int, layout: dict[str, object]) -> None:
    assert maybe(chain, n, **layout) is None


def test_narrow_units_share_a_box() -> None:
    plan = plan_of(ResidualAdd() >> Store(BF16), 4096)
    assert plan.width == 64
    shared = replace(plan, capacity=1)
    assert [shared.first_unit(s) for s in range(4)] == [0, 2, 4, 6]
    assert [shared.last_unit(s) for s in range(4)] == [1, 3, 5, 7]


HEADS = [
    (64, 0),
    (64, 32),
    (80, 0),
    (80, 32),
    (96, 0),
    (96, 48),
    (128, 0),
    (128, 80),
    (128, 96),
    (256, 96),
]


@pytest.mark.parametrize("dtype", [BF16, FP32])
@pytest.mark.parametrize(("head_dim", "rotary_dim"), HEADS)
def test_a_quad_reads_within_one_box(head_dim: int, rotary_dim: int, dtype: torch.dtype) -> None:
    """Quad lane t has the bytes from first + t / 4 of the group on: an address is formed once for all four."""
    chain = ResidualAdd() >> RoPE(head_dim, rotary_dim) >> Store(BF16)
    width = 256 // head_dim * head_dim
    schedule = Schedule(tile_n=width, cluster_m=1)
    plan = maybe(chain, 12 * head_dim, schedule, dtypes={"residual": dtype})
    resolved = resolve(compose(chain), 12 * head_dim)
    groups = resolved.ranges[0].steps[0].domain.groups
    size = dtype.itemsize
    straddles = any(
        (u * head_dim + slot) * size // BOX_BYTES
        != (u * head_dim + slot + 4 * n - 1) * size // BOX_BYTES
        for u in range(width // head_dim)
        for slot, n in groups
    )
    if width * size % BOX_BYTES or straddles:
        assert plan is None
    elif plan is None:
        assert schedule.stages < 2  # nothing else forbids it
    else:
        for u in range(plan.units):
            for slot, n in groups:
                places = {plan.place((u * head_dim + slot + i) * size)[:2] for i in range(4 * n)}
                assert len(places) == 1


def test_an_operand_waits_for_no_stage_that_is_not_there() -> None:
    layout = {"dtypes": {"residual": FP32}}
    wide = HeadNorm(256) >> ResidualAdd() >> Store(BF16)
    assert plan_of(wide, 4096, Schedule(stages=3), **layout).held == 3
    assert maybe(wide, 4096, Schedule(stages=2), **layout) is None
    beside = Schedule(64, 256, stages=2, pingpong=True)
    assert plan_of(wide, 4096, beside, **layout).held == 0


@given(st.integers(1, 64), st.sampled_from((64, 128)), st.sampled_from((BF16, FP32)))
def test_in_ping_pong_the_memory_holds_a_whole_tile_for_each(
    units: int, tile_m: int, dtype: torch.dtype
) -> None:
    chain, layout = ResidualAdd() >> Store(BF16), {"dtypes": {"residual": dtype}}
    schedule = Schedule(tile_m, min(32 * units, 16384 // tile_m), stages=2, pingpong=True)
    kernel = kernel_for(chain, n=4096, k=4096, **layout)
    plan = maybe(chain, 4096, schedule, **layout)
    reserved = streamed_bytes(schedule, kernel.spec.problem)
    assert reserved == 2 * tile_m * schedule.tile_n * dtype.itemsize
    if plan is not None:
        assert reserved == 2 * plan.boxes * tile_m * BOX_BYTES
