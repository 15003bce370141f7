"""Row orders: bijections in which pairs and vectors of features meet in one lane."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from epicute.errors import ArgumentError
from epicute.layouts import (
    CHUNKS,
    Range,
    RowOrder,
    accumulator_owner,
    chunk_feature,
    chunks_of,
)


@st.composite
def ranges(draw: st.DrawFn) -> Range:
    kind = draw(st.sampled_from(["single", "halves", "heads"]))
    if kind == "single":
        return Range(kind, draw(st.integers(1, 200)))
    if kind == "halves":
        return Range(kind, 2 * draw(st.integers(1, 120)))
    head = 16 * draw(st.integers(1, 16))
    rotary = 16 * draw(st.integers(0, head // 16))
    return Range(kind, head * draw(st.integers(1, 5)), head, rotary)


@st.composite
def orders(draw: st.DrawFn) -> RowOrder:
    several = tuple(draw(st.lists(ranges(), min_size=1, max_size=4)))
    smallest = int(np.lcm.reduce([r.smallest_unit for r in several]))
    assume(smallest <= 4096)
    return RowOrder(several, smallest * draw(st.integers(1, 2)))


def lane(row: int) -> int:
    """Quad lane that holds accumulator column ``row``: the packed weight's rows are its columns."""
    return accumulator_owner(0, row)[0]


@given(orders())
def test_logical_and_physical_are_inverse_bijections(order: RowOrder) -> None:
    logical, physical = order.logical(), order.physical()
    assert logical.dtype == physical.dtype == np.int64
    assert logical.shape == (order.rows,)
    assert physical.shape == (order.columns,)
    assert np.array_equal(logical[physical], np.arange(order.columns))
    assert np.array_equal(np.sort(logical[logical >= 0]), np.arange(order.columns))
    assert set(logical[logical < 0]) <= {-1}


@given(orders())
def test_padding_is_rows_minus_columns_and_whole_units(order: RowOrder) -> None:
    logical = order.logical()
    assert (logical < 0).sum() == order.rows - order.columns
    assert order.rows % order.unit == 0
    for r, (row, column) in zip(order.ranges, order.starts(), strict=True):
        mine = logical[row : row + r.rows(order.unit)]
        assert r.rows(order.unit) - r.columns < order.unit
        assert np.array_equal(np.sort(mine[mine >= 0]), np.arange(column, column + r.columns))


@given(orders())
def test_a_quad_lane_owns_adjacent_features(order: RowOrder) -> None:
    logical = order.logical()
    for r, (row, start) in zip(order.ranges, order.starts(), strict=True):
        for piece in r.pieces(order.unit):
            assert piece.lanes in (2, 4, 8)
            for t in range(4):
                rows = [row + 8 * b + 2 * t + e for b in piece.blocks for e in range(2)]
                assert {lane(place) for place in rows} == {t}
                slots = piece.column + piece.lanes * t + np.arange(piece.lanes)
                wanted = start + r.unit_column(0, slots, order.unit)
                valid = r.valid(0, slots, order.unit)
                assert np.array_equal(np.diff(wanted), np.ones(piece.lanes - 1))
                assert np.array_equal(logical[rows], np.where(valid, wanted, -1))


@given(orders())
def test_pieces_cover_a_unit_once(order: RowOrder) -> None:
    for r in order.ranges:
        pieces = r.pieces(order.unit)
        blocks = sorted(b for piece in pieces for b in piece.blocks)
        assert blocks == list(range(order.unit // 8))
        slots = sorted(s for p in pieces for s in range(p.column, p.column + 4 * p.lanes))
        assert slots == list(range(order.unit))


def pairs_of(r: Range, column: int) -> list[tuple[int, int]]:
    """Logical pairs of a range that starts at ``column``, from what the kinds mean."""
    if r.kind == "halves":
        half = r.columns // 2
        return [(column + j, column + j + half) for j in range(half)]
    half = r.rotary_dim // 2
    heads = range(column, column + r.columns, r.head_dim) if r.kind == "heads" else ()
    return [(head + j, head + j + half) for head in heads for j in range(half)]


@given(orders())
def test_both_members_of_a_pair_meet_in_one_lane(order: RowOrder) -> None:
    physical = order.physical()
    for r, (_, column) in zip(order.ranges, order.starts(), strict=True):
        for first, second in pairs_of(r, column):
            a, b = int(physical[first]), int(physical[second])
            assert b == a + 8, "neighbouring blocks, the same place in each"
            assert lane(a) == lane(b)
            assert a // order.unit == b // order.unit


@given(orders())
def test_pairs_sit_in_rows_g_and_g_plus_8_of_an_operand_tile(order: RowOrder) -> None:
    """The few-row kernels' A operand has tiles of 16 rows; heads of 8, 24, 40, ... rows shift."""
    physical = order.physical()
    for r, (_, column) in zip(order.ranges, order.starts(), strict=True):
        for first, second in pairs_of(r, column):
            assert physical[first] % 16 < 8
            assert physical[first] // 16 == physical[second] // 16


@given(orders())
def test_unit_aligned_tiles_split_no_pair_and_no_head(order: RowOrder) -> None:
    physical = order.physical()
    for r, (_, column) in zip(order.ranges, order.starts(), strict=True):
        if r.kind == "heads":
            heads = physical[column : column + r.columns].reshape(-1, r.head_dim)
            assert (heads // order.unit == heads[:, :1] // order.unit).all()
            assert (np.ptp(heads, axis=1) == r.head_dim - 1).all()
        for first, second in pairs_of(r, column):
            assert physical[first] // order.unit == physical[second] // order.unit


@given(orders())
def test_paired_pieces_say_which_pair(order: RowOrder) -> None:
    for r in order.ranges:
        pieces = r.pieces(order.unit)
        firsts = {p.pair: p for p in pieces if p.member == 0}
        seconds = {p.pair: p for p in pieces if p.member == 1}
        assert set(firsts) == set(seconds)
        assert all((p.pair is None) == (p.member is None) for p in pieces)
        starts = sorted((p.pair, 4 * p.lanes) for p in firsts.values())
        assert all(a + n == b for (a, n), (b, _) in pairwise(starts))
        for pair, first in firsts.items():
            assert first.lanes == seconds[pair].lanes
            assert seconds[pair].blocks == tuple(b + 1 for b in first.blocks)


@given(orders())
def test_json_round_trip(order: RowOrder) -> None:
    again = RowOrder.from_json(order.to_json())
    assert again == order
    assert hash(again) == hash(order)
    assert again.to_json() == order.to_json()


@given(orders(), st.data())
def test_int_and_numpy_agree_on_unit_column(order: RowOrder, data: st.DataObject) -> None:
    r = data.draw(st.sampled_from(order.ranges))
    index = np.arange(r.rows(order.unit) // order.unit)[:, None]
    slot = np.arange(order.unit)[None, :]
    columns = np.broadcast_to(r.unit_column(index, slot, order.unit), (len(index), order.unit))
    valid = np.broadcast_to(r.valid(index, slot, order.unit), columns.shape)
    i = data.draw(st.integers(0, len(index) - 1))
    s = data.draw(st.integers(0, order.unit - 1))
    one = r.unit_column(i, s, order.unit)
    assert type(one) is int
    assert one == columns[i, s]
    assert bool(r.valid(i, s, order.unit)) == valid[i, s]
    assert np.array_equal(np.sort(columns[valid]), np.arange(r.columns))


def test_int_and_numpy_agree_on_chunks() -> None:
    for chunk in CHUNKS:
        rows = np.arange(chunk)
        features = chunk_feature(rows, chunk)
        assert features.tolist() == [chunk_feature(int(row), chunk) for row in rows]
        assert sorted(features.tolist()) == list(range(chunk))


@given(st.integers(0, 64).map(lambda n: 8 * n))
def test_chunks_cut_a_stream_without_gaps(columns: int) -> None:
    end = 0
    for start, size in chunks_of(columns):
        assert start == end
        assert size in CHUNKS
        end += size
    assert end == columns


def test_the_picture_in_the_module() -> None:
    single = RowOrder.plain(32).logical().reshape(4, 8)
    assert single[0].tolist() == [0, 1, 8, 9, 16, 17, 24, 25]
    assert single[1, :2].tolist() == [2, 3]
    paired = RowOrder((Range("halves", 64),), 64).logical().reshape(8, 8)
    assert paired[0].tolist() == [0, 1, 8, 9, 16, 17, 24, 25]
    assert paired[1].tolist() == [c + 32 for c in paired[0].tolist()]
    assert paired[2, :2].tolist() == [2, 3]


def test_a_padding_slot_of_halves_is_not_past_the_end() -> None:
    """Why readers must ask ``valid``: the number alone is a column of the other member."""
    r = Range("halves", 80)
    assert r.unit_column(1, 20, 64) == 52 < r.columns
    assert not r.valid(1, 20, 64)


def test_heads_of_80_end_in_a_smaller_chunk() -> None:
    r = Range("heads", 160, head_dim=80, rotary_dim=80)
    pieces = r.pieces(80)
    assert sorted(p.lanes for p in pieces) == [2, 2, 8, 8]
    assert RowOrder((r,), 80).rows == 160


@pytest.mark.parametrize(
    ("argument", "given_"),
    [
        ("kind", {"kind": "rows", "columns": 32}),
        ("columns", {"kind": "single", "columns": 0}),
        ("columns", {"kind": "single", "columns": -8}),
        ("columns", {"kind": "halves", "columns": 33}),
        ("head_dim", {"kind": "heads", "columns": 128}),
        ("head_dim", {"kind": "heads", "columns": 100, "head_dim": 64}),
        ("head_dim", {"kind": "heads", "columns": 80, "head_dim": 40}),
        ("head_dim", {"kind": "single", "columns": 64, "head_dim": 64}),
        ("head_dim", {"kind": "halves", "columns": 64, "rotary_dim": 16}),
        ("head_dim", {"kind": "heads", "columns": 264, "head_dim": 264}),
        ("rotary_dim", {"kind": "heads", "columns": 64, "head_dim": 64, "rotary_dim": 80}),
        ("rotary_dim", {"kind": "heads", "columns": 96, "head_dim": 96, "rotary_dim": 24}),
        ("rotary_dim", {"kind": "heads", "columns": 64, "head_dim": 64, "rotary_dim": -16}),
    ],
)
def test_ranges_are_refused_by_name(argument: str, given_: dict) -> None:
    with pytest.raises(ArgumentError, match=f"^{argument}: got"):
        Range(**given_)


@pytest.mark.parametrize("unit", [32, 0, -64, 96])
def test_units_that_split_a_pair_are_refused(unit: int) -> None:
    with pytest.raises(ArgumentError, match="^unit: got"):
        RowOrder((Range("halves", 64),), unit)


def test_an_order_of_nothing_is_refused() -> None:
    with pytest.raises(ArgumentError, match="^ranges: got"):
        RowOrder((), 32)


def test_orders_of_other_fields_differ() -> None:
    order = RowOrder((Range("heads", 256, 128, 128),), 128)
    assert order != replace(order, unit=256)
    assert order != RowOrder((Range("heads", 256, 128, 64),), 128)
    assert "heads of 128, rotary 128" in str(order)
