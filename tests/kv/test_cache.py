"""The KV cache: pages have one owner, slots one token, and the device knows what the host knows."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from epicute.errors import ArgumentError
from epicute.kv import NO_SLOT, KVPool, split_slot
from epicute.kv.cache import CacheSpec, CapacityError, KVCache

FP8 = torch.float8_e4m3fn
SPEC = CacheSpec(layers=2, kv_heads=3, head_dim=16, page_size=16)


def paged(requests: int = 4, max_length: int = 70, pages: int = 9) -> KVCache:
    return KVCache.paged(SPEC, requests, max_length, pages)


def check(cache: KVCache) -> None:
    """What holds whatever was done: no page twice, none lost, table and lengths as the host has them."""
    rows = cache.page_table.tolist()
    owned = [page for row in rows for page in row if page >= 0]
    assert len(set(owned)) == len(owned)
    assert len(owned) + cache.free_pages == cache.pages
    assert cache.lengths.tolist() == list(cache.held)
    assert cache.host_table().tolist() == rows
    assert cache.host_table([3, 1]).tolist() == [rows[3], rows[1]]
    for row, held in zip(rows, cache.held, strict=True):
        given_pages = [page for page in row if page >= 0]
        assert row[: len(given_pages)] == given_pages
        assert len(given_pages) * SPEC.page_size >= held


actions = st.lists(
    st.one_of(
        st.tuples(st.just("grow"), st.integers(0, 3), st.integers(0, 40)),
        st.tuples(st.just("both"), st.integers(0, 20), st.integers(0, 20)),
        st.tuples(st.just("free"), st.integers(0, 3), st.just(0)),
        st.tuples(st.just("step"), st.integers(0, 4), st.integers(0, 40)),
        st.tuples(st.just("reset"), st.just(0), st.just(0)),
    ),
    max_size=25,
)


@given(actions, st.booleans())
def test_any_sequence_of_growing_and_freeing(todo: list[tuple[str, int, int]], dense: bool) -> None:
    """Against a dictionary slot -> (request, position), which every token enters once."""
    cache = KVCache.dense(SPEC, 4, 70) if dense else paged()
    places: dict[int, tuple[int, int]] = {}
    held = [0] * 4

    def place(slots: list[int], tokens: list[tuple[int, int]]) -> None:
        for slot, token in zip(slots, tokens, strict=True):
            assert slot not in places
            page, within = split_slot(slot, SPEC.page_size)
            assert cache.page_table[token[0], token[1] // SPEC.page_size] == page
            assert within == token[1] % SPEC.page_size
            places[slot] = token

    for what, first, second in todo:
        before = cache.held, cache.page_table.clone(), cache.free_pages
        try:
            if what in ("grow", "both"):
                rows = [first] if what == "grow" else [3, 1]
                counts = [second] if what == "grow" else [first, second]
                slots = cache.slots(counts, rows)
                tokens = [
                    (r, held[r] + i) for r, n in zip(rows, counts, strict=True) for i in range(n)
                ]
                assert cache.positions(counts, rows).tolist() == [p for _, p in tokens]
                place(slots.tolist(), tokens)
                cache.advance(counts, rows)
                for r, n in zip(rows, counts, strict=True):
                    held[r] += n
            elif what == "step":
                live = [r for r in range(4) if held[r]]
                cache.reserve_step()
                at = list(held)
                held = [n + (n > 0) for n in held]
                if first < 4 and held[first]:  # meanwhile one that takes part is freed
                    cache.free(first)
                    places = {s: t for s, t in places.items() if t[0] != first}
                    live.remove(first)
                    held[first] = at[first] = 0
                new = next((r for r in range(4) if not held[r]), None)
                if new is not None and second <= cache.free_pages * SPEC.page_size * (not dense):
                    slots = cache.slots([second], [new])  # and another one comes
                    place(slots.tolist(), [(new, i) for i in range(second)])
                    cache.advance([second], [new])
                    held[new] = at[new] = second
                assert cache.lengths.tolist() == at
                cache.begin_step()
                place([int(cache.step_slots[r]) for r in live], [(r, at[r]) for r in live])
                idle = [r for r in range(4) if r not in live]
                assert all(cache.step_slots[r] == NO_SLOT for r in idle)
                assert all(cache.step_positions[r] == NO_SLOT for r in idle)
                assert cache.step_lengths.tolist() == held
                cache.end_step()
                assert (cache.step_waiting == 0).all()
            else:
                gone = [first] if what == "free" else [0, 1, 2, 3]
                cache.free(first) if what == "free" else cache.reset()
                places = {s: t for s, t in places.items() if t[0] not in gone}
                held = [0 if r in gone else n for r, n in enumerate(held)]
        except CapacityError:
            after = cache.held, cache.page_table, cache.free_pages
            assert after[0] == before[0]
            assert torch.equal(after[1], before[1])
            assert after[2] == before[2]
        check(cache)
        assert cache.held == tuple(held)


def test_a_full_cache_takes_all_it_says_and_no_token_more() -> None:
    cache = paged(requests=3, max_length=64, pages=9)
    cache.slots([64, 64, 16])
    assert cache.free_pages == 0
    with pytest.raises(
        CapacityError, match="^request 0: got 0 tokens and 65 more, expected at most 64"
    ):
        cache.slots([65])
    with pytest.raises(CapacityError, match="^pages: got 0 free, expected 1"):
        cache.slots([17], [2])
    cache.advance([64, 64, 16])
    with pytest.raises(CapacityError, match="^request 0"):
        cache.reserve_step()
    assert cache.held == (64, 64, 16)
    cache.free(0)
    assert cache.slots([17], [0]).numel() == 17


def test_failing_for_one_request_reserves_for_none() -> None:
    cache = paged(pages=3)
    with pytest.raises(CapacityError, match="^pages"):
        cache.reserve([16, 33])
    assert cache.free_pages == 3
    assert (cache.page_table == -1).all()


def test_tokens_without_pages_are_not_counted() -> None:
    cache = paged()
    with pytest.raises(CapacityError, match="^request 0"):
        cache.advance([1])
    cache.reserve([1])
    cache.advance([16])  # what the page holds
    with pytest.raises(CapacityError, match="^request 0"):
        cache.advance([1])
    assert cache.held[0] == 16


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, FP8])
def test_views_are_pools_that_placekv_describes(dtype: torch.dtype, layout: str) -> None:
    spec = CacheSpec(3, 2, 8, dtype, 32, layout)
    scales = (0.5, torch.full((3, 2), 2.0)) if dtype == FP8 else None
    cache = KVCache.paged(spec, 2, 100, 5, scales=scales)
    seen = set()
    for layer in range(3):
        for view in (cache.keys(layer), cache.values(layer)):
            pool = KVPool.paged(view)
            assert pool.sizes == (5, 32, 2, 8)
            assert pool.strides.head == (8 if layout == "NHD" else 256)
            seen.add(view.data_ptr())
        cells = cache.cells(layer)
        assert cells["k_cells"].data_ptr() == cache.keys(layer).data_ptr()
        assert cells["v_cells"].data_ptr() == cache.values(layer).data_ptr()
        assert len(cells) == (8 if dtype == FP8 else 2)
        found = cache.attention(layer)
        if dtype == FP8:
            assert found["k_scale"].tolist() == [0.5, 0.5]
            assert found["v_scale"].tolist() == [2.0, 2.0]
            cells["v_cells_nans"] += 1
            assert cache.nans[layer].tolist() == [0, 1]
        else:
            assert found["k_scale"] is found["v_scale"] is None
    assert len(seen) == 6
    assert cache.nbytes == 5 * 32 * spec.token_bytes


def test_a_dense_cache_is_also_read_by_request_and_position() -> None:
    cache = KVCache.dense(SPEC, 3, 40)
    assert cache.max_length == 48
    slots = cache.slots([5, 40, 0])
    values = torch.randn(45, 3, 16).bfloat16()
    page, token = split_slot(slots, SPEC.page_size)
    cache.keys(1)[page, token] = values
    assert torch.equal(cache.dense_keys(1)[0, :5], values[:5])
    assert torch.equal(cache.dense_keys(1)[1, :40], values[5:])
    assert cache.dense_values(0).shape == (3, 48, 3, 16)
    with pytest.raises(ArgumentError, match="^cache"):
        paged().dense_keys(0)
    other = KVCache.dense(CacheSpec(1, 2, 8, layout="HND"), 1, 64)
    with pytest.raises(ArgumentError, match="^cache"):
        other.dense_values(0)


def test_cg_08_what_kernels_read_stays_where_it_is() -> None:
    """A captured graph holds addresses: nothing that requests do may move a tensor."""
    cache = paged()
    names = (
        "page_table",
        "lengths",
        "step_positions",
        "step_slots",
        "step_lengths",
        "step_waiting",
        "saturated",
    )

    def addresses() -> list[int]:
        pools = [view(layer).data_ptr() for view in (cache.keys, cache.values) for layer in (0, 1)]
        return [getattr(cache, name).data_ptr() for name in names] + pools

    before = addresses()
    cache.slots([20, 3])
    cache.advance([20, 3])
    cache.reserve_step()
    cache.begin_step()
    cache.end_step()
    cache.free(0)
    cache.reset()
    assert addresses() == before


def test_cg_08_a_step_is_of_those_that_were_chosen_and_not_freed_since() -> None:
    """What a scheduler does between the host's half of a step and its replay: free, prefill another."""
    cache = KVCache.paged(SPEC, 4, 64, 12)
    cache.slots([10, 5])
    cache.advance([10, 5])
    cache.reserve_step()
    cache.free(1)
    cache.slots([7], [2])
    cache.advance([7], [2])
    assert cache.lengths.tolist() == [10, 0, 7, 0]
    cache.begin_step()
    assert cache.step_positions.tolist() == [10, -1, -1, -1]
    assert cache.step_lengths.tolist() == [11, 0, 7, 0]
    cache.end_step()
    check(cache)
    assert cache.held == (11, 0, 7, 0)
    # A replay that nobody has announced does nothing, and one freed while the step runs stays freed.
    cache.begin_step()
    cache.end_step()
    check(cache)
    cache.reserve_step()
    cache.begin_step()
    cache.free(0)
    cache.end_step()
    check(cache)
    assert cache.held == (0, 0, 8, 0)


def test_steps_may_be_announced_ahead_and_cancelled() -> None:
    cache = paged()
    cache.slots([10, 5])
    cache.advance([10, 5])
    cache.reserve_step([True, True, False, False])
    cache.reserve_step([True, False, False, False])
    for positions in ([10, 5, -1, -1], [11, -1, -1, -1]):
        cache.begin_step()
        assert cache.step_positions.tolist() == positions
        cache.end_step()
    check(cache)
    cache.reserve_step()
    cache.begin_step()
    cache.cancel_step()
    check(cache)
    assert cache.held == (12, 6, 0, 0)
    cache.begin_step()
    cache.end_step()
    check(cache)


def test_what_has_no_room_is_named() -> None:
    cache = KVCache.paged(SPEC, 4, 64, 3)
    cache.slots([16, 3, 16])
    cache.advance([16, 3, 16])
    with pytest.raises(CapacityError, match=r"^pages: got 0 free, expected 2 .*requests \[0, 2\]"):
        cache.reserve_step()
    cache.reserve_step([False, True, False, False])
    assert cache.held == (16, 4, 16, 0)


def test_cg_06_rows_of_no_request_are_padding() -> None:
    cache = paged()
    cache.slots([20, 3], [2, 0])
    cache.advance([20, 3], [2, 0])
    cache.reserve_step()
    cache.begin_step()
    assert cache.step_positions.tolist() == [3, -1, 20, -1]
    assert cache.step_slots[[1, 3]].tolist() == [NO_SLOT, NO_SLOT]
    assert cache.step_lengths.tolist() == [4, 0, 21, 0]


def test_kv_18_a_chunk_starts_where_the_one_before_ended() -> None:
    whole, chunks = paged(max_length=144), paged(max_length=144)
    expected = whole.slots([130], [1])
    found = []
    for count in (37, 37, 37, 19):
        found.append(chunks.slots([count], [1]))
        chunks.advance([count], [1])
    assert torch.equal(torch.cat(found), expected)
    assert chunks.held == (0, 130, 0, 0)


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (lambda: CacheSpec(0, 1, 8), "^layers"),
        (lambda: CacheSpec(1, 1, 8, torch.float64), "^dtype"),
        (lambda: CacheSpec(1, 1, 8, page_size=24), "^page_size"),
        (lambda: CacheSpec(1, 1, 8, layout="nhd"), "^layout"),
        (lambda: paged(requests=0), "^requests"),
        (lambda: paged(max_length=0), "^max_length"),
        (lambda: KVCache.dense(SPEC, 1, 0), "^max_length"),
        (lambda: paged(pages=0), "^pages"),
        (lambda: KVCache.dense(SPEC, 1, 9, scales=(1, 1)), "^scales"),
        (lambda: KVCache.dense(CacheSpec(1, 1, 8, FP8), 1, 9), "^scales.*amax / 448"),
        (lambda: fp8(1.0, 0.0), "^v_scale"),
        (lambda: fp8(math.nan, 1.0), "^k_scale"),
        (lambda: fp8(math.inf, 1.0), "^k_scale"),
        (lambda: fp8(torch.ones(2), 1.0), "^k_scale"),
        (lambda: paged().slots([1, 1], [0, 0]), "^rows"),
        (lambda: paged().slots([1], [4]), "^rows"),
        (lambda: paged().slots([1, 2], [1]), "^rows"),
        (lambda: paged().slots([-1]), "^counts"),
        (lambda: paged().free(4), "^rows"),
        (lambda: paged().keys(2), "^layer"),
    ],
)
def test_mistakes_are_refused_by_name(make, named: str) -> None:
    with pytest.raises(ArgumentError, match=named):
        make()


def fp8(k: object, v: object) -> KVCache:
    return KVCache.dense(CacheSpec(1, 2, 8, FP8), 1, 9, scales=(k, v))
