"""The order of work: every item once, longest first, even sums."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from epicute.attention.work import item_at, items, tiles_of

LENGTHS = st.lists(st.integers(0, 2000), max_size=12)


@given(LENGTHS, st.sampled_from((64, 128, 192)), st.sampled_from((1, 2, 4)), st.integers(1, 5))
def test_every_tile_of_every_head_once(
    lengths: list[int], tile_m: int, sections: int, per: int
) -> None:
    kv_heads = 4
    found = items(lengths, tile_m, kv_heads, kv_heads // sections, per)
    wanted = [
        (request, tile, head)
        for request, n in enumerate(lengths)
        for tile in range(-(-n // tile_m))
        for head in range(kv_heads * per)
    ]
    assert sorted(found) == wanted


@given(LENGTHS)
def test_longest_first_in_the_last_section(lengths: list[int]) -> None:
    found = items(lengths, 128, 2, 1, 1)
    tiles = [tile for _, tile, _ in found[len(found) // 2 :]]
    assert tiles == sorted(tiles, reverse=True)
    assert [tile for _, tile, _ in found[: len(found) // 2]] == sorted(tiles)


@given(st.integers(1, 200), st.integers(0, 3000))
def test_clusters_share_the_list_without_gap_or_overlap(clusters: int, count: int) -> None:
    seen = []
    for cluster in range(clusters):
        turn, last = 0, -1
        while (position := item_at(turn, cluster, clusters)) < count:
            assert position > last  # the kernel's scheduler walks forward alone
            seen.append(position)
            turn, last = turn + 1, position
    assert sorted(seen) == list(range(count))


@pytest.mark.parametrize(
    ("batch", "rows"), [(8, 2048), (4, 4096), (2, 8192), (1, 16384), (1, 32768)]
)
@pytest.mark.parametrize(("per", "clusters"), [(2, 66), (4, 132)])
@pytest.mark.parametrize("section", [1, 2, 4, 8])
def test_sums_are_even(batch: int, rows: int, per: int, clusters: int, section: int) -> None:
    """Causal prefill with 32 heads of queries, 8 of keys, on an H200."""
    work = [tile + 2 for _, tile, _ in items([rows] * batch, 128, 8, section, per)]
    sums = []
    for cluster in range(clusters):
        positions, turn = [], 0
        while (position := item_at(turn, cluster, clusters)) < len(work):
            positions.append(position)
            turn += 1
        sums.append(sum(work[p] for p in positions))
    assert max(sums) <= 1.035 * sum(work) / clusters


@given(st.integers(0, 10**6), st.sampled_from((64, 128)))
def test_tiles(rows: int, tile_m: int) -> None:
    assert (
        tiles_of(rows, tile_m) * tile_m >= rows > (tiles_of(rows, tile_m) - 1) * tile_m or not rows
    )
