"""Staged operands stand apart in shared memory, and every element is staged where its column is."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from epicute.epilogues import (
    Bias,
    Columns,
    Composition,
    Dequantize,
    Gain,
    HeadNorm,
    PerHead,
    PlaceKV,
    RoPE,
    RowScale,
    Store,
    SwiGLU,
    compose,
)
from epicute.epilogues.operands import HeadVector
from epicute.epilogues.resolve import Resolved, resolve
from epicute.gemm import Problem, Schedule
from epicute.gemm.schedule import staged_bytes
from epicute.gemm.stage_plan import ALIGN, ColumnOperand, StagePlan
from tests.gemm.compositions import SKELETONS, WIDTHS

BF16, FP8 = torch.bfloat16, torch.float8_e4m3fn


def resolved_of(skeleton: str, width: int) -> Resolved:
    chosen = SKELETONS[skeleton]
    n = chosen.columns(width)
    return resolve(chosen.composition(n, 576, FP8), n)


def staged(operand: ColumnOperand, units: int) -> np.ndarray:
    """(units, slots) element at every slot, -1 where the column is padding."""
    index, slot = np.arange(units)[:, None], np.arange(operand.slots)[None, :]
    element = np.broadcast_to(operand.element(index, slot), (units, operand.slots))
    if isinstance(operand.kind, PerHead):
        heads = operand.domain.columns // operand.kind.head_dim
        return np.where(element < heads, element, -1)
    remaining = operand.domain.remaining(index, slot)
    return element if remaining is None else np.where(remaining > 0, element, -1)


@given(st.sampled_from(sorted(SKELETONS)), st.sampled_from(WIDTHS))
def test_regions_do_not_overlap(skeleton: str, width: int) -> None:
    plan = StagePlan(resolved_of(skeleton, width))
    for operands in plan.columns:
        end = 0
        for operand in sorted(operands.values(), key=lambda o: o.offset):
            assert operand.offset >= end
            assert operand.offset % ALIGN == 0
            end = operand.offset + operand.slots
        assert end <= plan.region
    assert sorted(plan.rows.values()) == list(range(len(plan.rows)))
    assert sorted(place for place, _ in plan.cells.values()) == list(range(len(plan.cells)))


@given(st.sampled_from(sorted(SKELETONS)), st.sampled_from(WIDTHS))
def test_every_element_is_staged_once(skeleton: str, width: int) -> None:
    """Over all units of a range, live slots hold each element as often as the range has columns for it."""
    resolved = resolved_of(skeleton, width)
    plan = StagePlan(resolved)
    for span, operands in zip(resolved.ranges, plan.columns, strict=True):
        for operand in operands.values():
            found = staged(operand, span.units)
            counts = np.bincount(found[found >= 0])
            if isinstance(operand.kind, HeadVector):
                assert set(counts) == {operand.domain.columns // operand.kind.length}
            elif isinstance(operand.kind, PerHead):
                assert list(counts) == [1] * (operand.domain.columns // operand.kind.head_dim)
            else:
                first = operand.first_column
                assert set(counts[first:]) == {1}
                assert len(counts) == first + operand.domain.columns
                assert not counts[:first].any()


@given(st.sampled_from(sorted(SKELETONS)), st.sampled_from(WIDTHS), st.sampled_from((128, 256)))
def test_what_the_schedule_sets_aside_is_what_is_used(
    skeleton: str, width: int, tile_m: int
) -> None:
    resolved = resolved_of(skeleton, width)
    plan = StagePlan(resolved)
    unit = resolved.order.unit
    tile_n = 256 // unit * unit
    problem = Problem(resolved.columns, resolved.order.rows, 576, FP8, unit, plan.bytes)
    used = 2 * (4 * plan.floats(tile_m, tile_n) + 8 * plan.integers(tile_m))
    assert used == staged_bytes(Schedule(tile_m, tile_n, 1, 3), problem)
    assert plan.empty == (used == 0)


def test_columns_of_a_gate_stand_beside_those_of_its_up() -> None:
    """A vector over both streams: a unit of 64 rows holds 32 columns of each."""
    plan = StagePlan(resolve(Bias() >> SwiGLU() >> Bias(name="down") >> Store(BF16), 200))
    wide, narrow = plan.columns[0]["bias"], plan.columns[0]["down_bias"]
    assert staged(wide, 4)[1].tolist() == [*range(32, 64), *range(132, 164)]
    assert staged(wide, 4)[3].tolist() == [
        *range(96, 100),
        *[-1] * 28,
        *range(196, 200),
        *[-1] * 28,
    ]
    assert staged(narrow, 4)[3].tolist() == [*range(96, 100), *[-1] * 28]


def test_ranges_share_what_they_name_alike() -> None:
    chain = Gain() >> Columns(
        q=(128, HeadNorm(64) >> RoPE(64, 32) >> Store(BF16)),
        k=(64, RoPE(64, 32) >> PlaceKV(64, FP8)),
        v=(64, PlaceKV(64)),
    )
    plan = StagePlan(resolve(compose(chain), 256))
    assert plan.rows == {"positions": 0}
    assert plan.cells == {"k_cells": (0, "slots"), "v_cells": (1, "slots")}
    q, k, v = plan.columns
    assert set(q) == {"gain", "q_head_gain", "inv_freq"}
    assert set(k) == {"gain", "inv_freq", "k_cell_scale"}
    assert set(v) == {"gain"}
    assert staged(k["gain"], 1)[0].tolist() == list(range(128, 192))
    assert staged(k["inv_freq"], 1)[0].tolist() == list(range(16))
    assert staged(q["q_head_gain"], 2)[1].tolist() == list(range(64))


@pytest.mark.parametrize(
    ("chain", "expected"),
    [
        (compose(Store(BF16)), (0, 0)),
        (Dequantize("tensor", "tensor") >> Store(BF16), (0, 0)),
        (RowScale(576) >> Store(BF16), (4, 0)),
        (Dequantize("row") >> Store(BF16), (4, 4 * 32)),
        (Bias() >> SwiGLU() >> Store(BF16), (0, 4 * 64)),
        (RoPE(128, 64) >> PlaceKV(128, FP8), (4 + 8, 4 * (32 + 8))),
    ],
)
def test_bytes_per_tile_row_and_unit(chain: Composition, expected: tuple[int, int]) -> None:
    assert StagePlan(resolve(chain, 256)).bytes == expected
