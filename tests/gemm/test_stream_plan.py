"""A streamed operand's boxes cover its tile once, and every unit finds its columns among the stages it may read."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from epicute.epilogues import (
    Bias,
    Columns,
    EmitFP8,
    HeadNorm,
    ResidualAdd,
    RoPE,
    Store,
    SumSquares,
    SwiGLU,
    compose,
)
from epicute.epilogues.operands import Matrix
from epicute.epilogues.resolve import resolve
from epicute.gemm import Schedule, kernel_for
from epicute.gemm.arguments import ArgumentLayout
from epicute.gemm.schedule import streamed_bytes
from epicute.gemm.stream_plan import NARROW, WIDE, StreamPlan, stream_plan

BF16, FP32 = torch.bfloat16, torch.float32
DEFAULT = Schedule()

plans = st.builds(
    StreamPlan,
    name=st.just("residual"),
    dtype=st.sampled_from((BF16, torch.float16, FP32)),
    width=st.sampled_from((64, 96, 128, 160, 192, 256, 320, 512, 1024)),
    units=st.integers(1, 8),
    capacity=st.integers(1, 5),
    box=st.sampled_from((NARROW, WIDE)),
)


@given(plans)
def test_every_byte_of_a_row_has_one_place(plan: StreamPlan) -> None:
    assume(plan.width * plan.units % plan.box == 0)
    places = [plan.place(byte) for byte in range(plan.width * plan.units)]
    assert len(set(places)) == len(places)
    assert {(s, w) for s, w, _ in places} == {
        (s, w) for s in range(plan.stages) for w in range(len(plan.boxes_of(s)))
    }
    assert sum(len(plan.boxes_of(s)) for s in range(plan.stages)) == plan.boxes
    assert all(1 <= len(plan.boxes_of(s)) <= plan.capacity for s in range(plan.stages))


@given(plans)
def test_units_read_between_arrival_and_departure(plan: StreamPlan) -> None:
    assume(plan.width * plan.units % plan.box == 0)
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
    assert (plan.name, plan.box, plan.boxes, plan.stages) == ("residual", NARROW, 8, 2)
    assert [list(plan.boxes_of(s)) for s in range(2)] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    fp32 = plan_of(ResidualAdd() >> Store(BF16), 4096, dtypes={"residual": FP32}, alignments=None)
    assert (fp32.box, fp32.boxes, fp32.stages) == (WIDE, 8, 3)
    tall = plan_of(ResidualAdd() >> Store(BF16), 4096, Schedule(256, 128))
    assert (tall.boxes, tall.capacity, tall.stages) == (4, 3, 2)
    small = plan_of(ResidualAdd() >> Store(BF16), 4096, Schedule(64, 256, pingpong=True))
    assert (small.boxes, small.stages, small.apart) == (8, 1, True)


def test_behind_a_pair_it_has_the_pairs_columns() -> None:
    plan = plan_of(SwiGLU() >> ResidualAdd() >> Store(BF16), 4096)
    assert plan.boxes * plan.box == 256


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
    shared = replace(plan, capacity=1, box=WIDE)
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
    box = NARROW if all(4 * n * size == NARROW for _, n in groups) else WIDE
    straddles = any(
        (u * head_dim + slot) * size // box != (u * head_dim + slot + 4 * n - 1) * size // box
        for u in range(width // head_dim)
        for slot, n in groups
    )
    if width * size % box or straddles:
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
        assert reserved == 2 * plan.boxes * tile_m * plan.box


# --- banks


def wavefronts(addresses: np.ndarray, count: int) -> int:
    """Passes over the banks that a warp's load of ``count`` bytes a lane takes.

    Lanes are served as many at a time as fill the banks with ``count`` bytes each; every bank gives one word a pass.
    """
    passes = 0
    for group in addresses.reshape(-1, min(32, 128 // count)):
        words = {int(a) // 4 + i for a in group for i in range(count // 4)}
        passes += max(Counter(word % 32 for word in words).values())
    return passes


def loads(
    plan: StreamPlan, groups: tuple[tuple[int, int], ...]
) -> Iterator[tuple[np.ndarray, int]]:
    """(address of each lane, bytes) of every load of a warp's rows of one tile, as ``Stream.load`` forms them."""
    row, lane = np.arange(32) // 4, np.arange(32) % 4
    for unit, half, (slot, lanes) in product(range(plan.units), range(2), groups):
        _, _, byte = plan.place(unit * plan.width + slot * plan.size)
        count = min(lanes, 16 // plan.size)
        for first in range(0, lanes, count):
            column = lane * (lanes * plan.size) + byte + first * plan.size
            r = row + 8 * half
            column = column ^ (r % 8 * 16) if plan.swizzled else column
            yield r * plan.box + column, count * plan.size


def excess(chain: object, n: int, schedule: Schedule, wide: bool, **layout: object) -> int:
    """Passes beyond the least of one warp's loads of a tile."""
    composition = compose(chain)
    resolved = resolve(composition, n)
    plan = plan_of(chain, n, schedule, **layout)
    if wide:
        plan = replace(plan, box=WIDE)
    groups = next(
        step.domain.groups
        for step in resolved.ranges[0].steps
        if any(isinstance(kind, Matrix) for kind in step.policy.operands.values())
    )
    found = list(loads(plan, groups))
    assert all(len(np.unique(addresses)) == 32 for addresses, _ in found)
    return sum(wavefronts(addresses, count) - count // 4 for addresses, count in found)


WHOLE = ResidualAdd() >> SumSquares() >> Store(BF16) >> EmitFP8()


@pytest.mark.parametrize(
    "schedule", [DEFAULT, Schedule(256, 128), Schedule(64, 256, pingpong=True)]
)
@pytest.mark.parametrize("chain", [ResidualAdd() >> Store(BF16), WHOLE])
@pytest.mark.parametrize("dtype", [BF16, torch.float16, FP32])
def test_a_residual_is_read_without_bank_conflicts(
    chain: object, dtype: torch.dtype, schedule: Schedule
) -> None:
    assert excess(chain, 4096, schedule, False, dtypes={"residual": dtype}) == 0


def test_rows_of_128_bytes_would_conflict_as_often_as_was_counted() -> None:
    """8B's o at M = 2048 had 131 072 excess wavefronts a launch with boxes of 128 bytes."""
    tiles, warps = 16 * 16, 8
    assert tiles * warps * excess(WHOLE, 4096, DEFAULT, True) == 131072
