"""What a composition means for N columns: a legal row order for any N, and blocks that cover each unit once."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from epicute.epilogues import (
    Bias,
    Columns,
    Composition,
    Dequantize,
    EmitFP8,
    HeadNorm,
    PlaceKV,
    ResidualAdd,
    RoPE,
    RowScale,
    Store,
    SumSquares,
    SwiGLU,
    compose,
)
from epicute.epilogues.resolve import Resolved, ResolvedRange, resolve
from epicute.errors import CompositionError
from tests.epilogues.compositions import compositions

BF16, FP8 = torch.bfloat16, torch.float8_e4m3fn


def check_order(resolved: Resolved, columns: int) -> None:
    """Every column has one physical row, the rest is padding, and nothing is cut by a tile's edge."""
    order = resolved.order
    logical = order.logical()
    assert order.columns == columns
    assert order.unit <= 256
    assert order.unit % 8 == 0
    assert len(logical) == order.rows
    assert order.rows % order.unit == 0
    assert sorted(logical[logical >= 0]) == list(range(columns))


def check_range(resolved: Resolved, span: ResolvedRange) -> None:
    """Slots, registers and columns of a range agree with the packed order, padding included."""
    unit, domain = resolved.order.unit, span.steps[0].domain
    rows = resolved.order.logical()[span.first_unit * unit :][: span.units * unit]
    slots = np.full(unit, -1)
    for piece in span.pieces:
        for t in range(4):
            for i, b in enumerate(piece.blocks):
                for e in (0, 1):
                    assert slots[8 * b + 2 * t + e] == -1, "a register in two pieces"
                    slots[8 * b + 2 * t + e] = piece.column + piece.lanes * t + 2 * i + e
    assert sorted(slots) == list(range(unit)), "pieces cover the unit once"
    index = np.arange(span.units)[:, None]
    column = np.broadcast_to(domain.column(index, slots[None, :]), (span.units, unit))
    left = domain.remaining(index, slots[None, :])
    valid = np.full(column.shape, True) if left is None else left > 0
    found = np.where(valid, column + span.first_column, -1)
    assert np.array_equal(found.ravel(), rows)


def check_blocks(span: ResolvedRange) -> None:
    """Blocks run what the head leaves of the chain, on lanes that together are all of the unit's."""
    assert span.head == span.steps[: len(span.head)]
    rest = span.steps[len(span.head) :]
    if rest:
        entering = sum(lanes for _, lanes in rest[0].domain.groups)
        assert sorted(i for block in span.blocks for i in block.lanes) == list(range(entering))
    for i, step in enumerate(rest):
        parts = [block.steps[i] for block in span.blocks]
        for part in parts:
            assert (part.policy, dict(part.names)) == (step.policy, dict(step.names))
            assert (part.first_column, part.kept) == (step.first_column, step.kept)
            assert part.domain.columns == step.domain.columns
            assert part.domain.unit == step.domain.unit
        groups = [group for part in parts for group in part.domain.groups]
        assert sorted(groups) == sorted(step.domain.groups)
        if step.split:
            pairs = [part.split for part in parts if part.split]
            found = [group for split in pairs for group in split.domain.groups]
            assert sorted(found) == sorted(step.split.domain.groups)
            lanes = sum(n for _, n in step.domain.groups)
            held = (*step.split.first, *step.split.second, *step.split.rest)
            assert sorted(held) == list(range(lanes))


@settings(max_examples=120)
@given(drawn=compositions())
def test_any_composition(drawn: tuple[Composition, int]) -> None:
    composition, columns = drawn
    resolved = resolve(composition, columns)
    check_order(resolved, columns)
    assert composition.row_order(columns) == resolved.order
    unit = 0
    for span in resolved.ranges:
        assert span.first_unit == unit
        unit += span.units
        check_range(resolved, span)
        check_blocks(span)
    assert unit * resolved.order.unit == resolved.order.rows


PLAIN = Dequantize() >> Bias() >> Store(BF16)
GATED = Dequantize() >> RowScale(64) >> SwiGLU() >> EmitFP8()
SUMS = ResidualAdd() >> SumSquares() >> Store(BF16)


@given(columns=st.integers(1, 5000))
def test_any_number_of_columns(columns: int) -> None:
    for composition, step in ((PLAIN, 1), (SUMS, 1), (GATED, 2)):
        check_order(resolve(composition, columns * step), columns * step)


@given(
    dim=st.sampled_from([16, 64, 80, 96, 112, 128, 256]),
    heads=st.integers(1, 9),
    data=st.data(),
)
def test_any_number_of_heads(dim: int, heads: int, data: st.DataObject) -> None:
    rotary = data.draw(st.integers(1, dim // 16)) * 16
    rope = RoPE(dim, rotary) >> PlaceKV(dim)
    check_order(resolve(rope, heads * dim), heads * dim)


@pytest.mark.parametrize(
    ("composition", "columns", "unit", "blocks"),
    [
        (PLAIN, 100, 32, 1),
        (GATED, 400, 64, 1),
        (SUMS, 576, 64, 2),
        (SumSquares() >> SwiGLU() >> Store(BF16), 256, 128, 2),
        (RoPE(64) >> Store(BF16), 192, 64, 1),
        (RoPE(128) >> Store(BF16), 256, 128, 2),
        (RoPE(128, 64) >> Store(BF16), 256, 128, 3),
        (RoPE(80) >> Store(BF16), 160, 80, 2),
        (RoPE(128, 64, "interleaved") >> Store(BF16), 256, 128, 4),
        (HeadNorm(128) >> RoPE(128) >> Store(BF16), 256, 128, 2),
    ],
)
def test_unit_and_blocks(composition: Composition, columns: int, unit: int, blocks: int) -> None:
    """The unit is the least that holds pairs, heads and groups; blocks are as small as these allow."""
    resolved = resolve(composition, columns)
    assert resolved.order.unit == unit
    assert len(resolved.ranges[0].blocks) == blocks


def test_ranges_share_one_unit() -> None:
    fused = Dequantize("row") >> Columns(
        q=(256, RoPE(128) >> Store(BF16)),
        k=(96, HeadNorm(32) >> PlaceKV(32, FP8)),
        v=(16, SwiGLU() >> Store(BF16)),
    )
    resolved = resolve(fused, 368)
    assert resolved.order.unit == 128
    assert [span.units for span in resolved.ranges] == [2, 1, 1]
    assert [span.first_column for span in resolved.ranges] == [0, 256, 352]
    assert [span.steps[0].first_column for span in resolved.ranges] == [0, 256, 352]
    assert [span.steps[1].first_column for span in resolved.ranges] == [0, 0, 0]


def test_shapes_of_operands() -> None:
    fused = (
        Dequantize("row")
        >> RowScale(576)
        >> Columns(
            q=(128, HeadNorm(64) >> RoPE(64, 32) >> Store(BF16)),
            k=(64, PlaceKV(64, FP8)),
            g=(192, SwiGLU() >> SumSquares() >> Store(BF16)),
        )
    )
    assert dict(resolve(fused, 384).shapes) == {
        "scale": ("M",),
        "weight_scale": (384,),
        "sumsq": ("M", 9),
        "q_head_gain": (64,),
        "positions": ("M",),
        "inv_freq": (16,),
        "q_out": ("M", 128),
        "k_cells": ("pages", "page_size", 1, 64),
        "slots": ("M",),
        "k_cell_scale": (1,),
        "k_cells_saturated": (1,),
        "k_cells_nans": (1,),
        "g_sumsq_out": ("M", 2),
        "g_out": ("M", 96),
    }


def test_the_order_does_not_depend_on_what_does_not_pair() -> None:
    """A weight packed for one composition serves every other of the same form."""
    one = compose(RoPE(64) >> Store(BF16)).row_order(192)
    other = (Dequantize() >> HeadNorm(64) >> RoPE(64) >> PlaceKV(64)).row_order(192)
    assert one == other


@pytest.mark.parametrize("activation", ["row", "tensor", None])
def test_scales_of_the_weight_stand_before_a_pair_becomes_one(activation: str | None) -> None:
    late = SwiGLU() >> Dequantize(activation) >> Store(BF16)
    said = r"SwiGLU >> Dequantize: got a scale per weight column on 64 values.*put Dequantize first"
    with pytest.raises(CompositionError, match=said):
        late.row_order(128)
    for other in ("tensor", None):
        (SwiGLU() >> Dequantize(activation, other) >> Store(BF16)).row_order(128)
    (Dequantize(activation) >> SwiGLU() >> Store(BF16)).row_order(128)
    with pytest.raises(CompositionError, match="SwiGLU >> Dequantize"):
        compose(Columns(a=(64, Store(BF16)), b=(128, late))).row_order(192)
