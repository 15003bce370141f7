"""Packed and padded rows: a bijection between tokens and slots, whatever the lengths."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from epicute.errors import ArgumentError
from epicute.models.requests import Requests

PAGE = 16
LENGTHS = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40)), min_size=1, max_size=5)


def table_for(count: int, seed: int) -> torch.Tensor:
    """Pages of 80 positions per request, in random order."""
    order = torch.randperm(5 * count, generator=torch.Generator().manual_seed(seed))
    return order.reshape(count, 5)


def tokens(requests: Requests, table: torch.Tensor, page: int) -> list[tuple[int, int]]:
    """(request, position) of each slot that is used, looked up in the table."""
    owner = {int(p): (b, i) for b, row in enumerate(table.tolist()) for i, p in enumerate(row)}
    found = []
    for slot in requests.slots[requests.slots >= 0].tolist():
        b, i = owner[slot // page]
        found.append((b, i * page + slot % page))
    return found


@given(LENGTHS, st.integers(0, 9), st.integers(0, 50), st.booleans())
def test_every_token_has_the_slot_of_its_position(
    sizes: list[tuple[int, int]], slack: int, seed: int, packed: bool
) -> None:
    lengths, cached = [n for n, _ in sizes], [c for _, c in sizes]
    table = table_for(len(sizes), seed)
    if packed:
        found = Requests.packed(lengths, PAGE, table, cached=cached, rows=sum(lengths) + slack)
        assert found.starts.tolist() == [sum(lengths[:b]) for b in range(len(sizes) + 1)]
        assert found.rows == sum(lengths) + slack
    else:
        width = max(lengths) + slack
        found = Requests.padded(lengths, PAGE, table, cached=cached, width=width)
        assert found.lengths.tolist() == lengths
        assert found.rows == len(sizes) * width
        rows = torch.arange(width) < torch.tensor(lengths)[:, None]
        assert torch.equal(found.slots.reshape(len(sizes), width) >= 0, rows)
    wanted = [(b, c + i) for b, (n, c) in enumerate(sizes) for i in range(n)]
    assert tokens(found, table, PAGE) == wanted
    assert found.positions[found.slots >= 0].tolist() == [p for _, p in wanted]
    assert (found.positions >= 0).all()
    assert found.kv_lengths.tolist() == [n + c for n, c in sizes]
    assert found.page_table.dtype == torch.int32


def test_a_dense_cache_needs_no_table() -> None:
    found = Requests.padded([2, 3], 10, cached=[1, 0])
    assert found.page_table is None
    assert found.slots.tolist() == [1, 2, -1, 10, 11, 12]


def test_kv_18_positions_are_counted_from_what_is_cached_once() -> None:
    first = Requests.packed([3], PAGE, table_for(1, 0))
    second = Requests.packed([2], PAGE, table_for(1, 0), cached=[3])
    whole = Requests.packed([5], PAGE, table_for(1, 0))
    for name in ("positions", "slots"):
        both = torch.cat([getattr(first, name), getattr(second, name)])
        assert torch.equal(both, getattr(whole, name)), name
    assert torch.equal(second.kv_lengths, whole.kv_lengths)


def test_another_batch_is_taken_over_in_place() -> None:
    table = table_for(2, 0)
    found = Requests.packed([5, 3], PAGE, table, rows=9)
    other = Requests.packed([0, 9], PAGE, table.flip(0), cached=[2, 4], rows=9)
    places = {n: getattr(found, n).data_ptr() for n in ("positions", "slots", "starts")}
    found.copy_(other)
    for name in ("positions", "slots", "starts", "kv_lengths", "page_table"):
        assert torch.equal(getattr(found, name), getattr(other, name)), name
    assert {n: getattr(found, n).data_ptr() for n in places} == places
    with pytest.raises(ArgumentError, match="positions"):
        found.copy_(Requests.packed([5, 3], PAGE, table))
    with pytest.raises(ArgumentError, match="kv_lengths"):
        found.copy_(Requests(other.positions, other.slots, other.kv_lengths[:1], other.starts[:2]))
    assert torch.equal(found.slots, other.slots)


@pytest.mark.parametrize(
    ("change", "argument"),
    [
        ({"lengths": []}, "lengths"),
        ({"lengths": [-1, 3]}, "lengths"),
        ({"cached": [1]}, "cached"),
        ({"cached": [1, -2]}, "cached"),
        ({"rows": 7}, "rows"),
        ({"page_table": torch.zeros(3, 5, dtype=torch.int32)}, "page_table"),
        ({"page_table": torch.zeros(2, 1, dtype=torch.int32), "lengths": [17, 1]}, "positions"),
    ],
)
def test_what_cannot_be_described_is_refused(change: dict[str, Any], argument: str) -> None:
    given_: dict[str, Any] = {"lengths": [5, 3], "page": PAGE, "page_table": table_for(2, 0)}
    with pytest.raises(ArgumentError, match=argument):
        Requests.packed(**(given_ | change))


def test_tensors_of_another_kind_are_refused() -> None:
    right = Requests.packed([5, 3], PAGE, table_for(2, 0))
    given_ = {n: getattr(right, n) for n in ("positions", "slots", "kv_lengths", "starts")}
    with pytest.raises(ArgumentError, match="slots: got .* torch.int32"):
        Requests(**given_ | {"slots": right.slots.int()})
    with pytest.raises(ArgumentError, match="starts: got"):
        Requests(**given_ | {"starts": right.starts[:2]})
    with pytest.raises(ArgumentError, match="starts and lengths"):
        Requests(**given_, lengths=right.kv_lengths)
    with pytest.raises(ArgumentError, match="neither"):
        Requests(**given_ | {"starts": None})
    with pytest.raises(ArgumentError, match="page_table"):
        Requests(**given_, page_table=table_for(2, 0))
    odd = {"starts": None, "positions": right.positions[:7], "slots": right.slots[:7]}
    with pytest.raises(ArgumentError, match="same number of rows"):
        Requests(**given_ | odd, lengths=right.kv_lengths)
    none = {"starts": None, "kv_lengths": right.kv_lengths[:0], "lengths": right.kv_lengths[:0]}
    with pytest.raises(ArgumentError, match="positions: got 8 rows of 0 requests"):
        Requests(**given_ | none)
    empty = {name: given_[name][:0] for name in ("positions", "slots")}
    assert Requests(**given_ | none | empty).rows == 0
    with pytest.raises(ArgumentError, match="width"):
        Requests.padded([5, 3], PAGE, table_for(2, 0), width=4)
