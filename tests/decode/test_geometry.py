"""Places and shares: every one exactly once, and as the MMA reads them."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from epicute.decode.geometry import (
    BAND,
    FINISHERS,
    MMAS,
    OPERAND_ROW,
    WARPS,
    block_rows,
    epilogue_tasks,
    finisher,
    integer_place,
    lane_blocks,
    partial_place,
    pitch_of,
    segment_blocks,
    segments_of,
    share_of,
    shares_of,
    tile_rows,
    vector_place,
    warp_rows,
)
from epicute.epilogues.resolve import resolve
from epicute.layouts import CHANNEL, GROUPS, Records
from tests.decode.cases import chains
from tests.epilogues.compositions import compositions

BITS = (4, 8, 16)


def held_cells(rows: int, blocks: int) -> np.ndarray:
    """(16-bit places, 2): row and k of what stands there, vector by vector."""
    row, vector = np.meshgrid(np.arange(rows), np.arange(8 * blocks), indexing="ij")
    places = vector_place(row, vector, rows)
    assert sorted(places.ravel()) == list(range(0, rows * blocks * OPERAND_ROW, 16))
    held = np.empty((rows * blocks * 64, 2), np.int64)
    for i in range(8):
        held[places // 2 + i] = np.stack([row, vector * 8 + i], -1)
    return held


@pytest.mark.parametrize("rows", [8, 16, 32, 64])
def test_ldmatrix_finds_the_words_of_a_step(rows: int) -> None:
    """Lane 4g + t gets of matrix m word t of what lane 8m + g points at: registers of two steps."""
    blocks, lanes = 2, np.arange(32)
    held = held_cells(rows, blocks)
    base = vector_place(lanes % 8, lanes // 8, rows)
    for block in range(blocks):
        for column in range(rows // 8):
            for half in range(2):
                start = (base ^ (64 * half)) + (block * rows + column * 8) * OPERAND_ROW
                for m in range(4):
                    found = held[start[8 * m + lanes // 4] // 2 + 2 * (lanes % 4)]
                    assert (found[:, 0] == column * 8 + lanes // 4).all()
                    step, register = 2 * half + m // 2, m % 2
                    wanted = block * 64 + step * 16 + register * 8 + 2 * (lanes % 4)
                    assert (found[:, 1] == wanted).all()


@pytest.mark.parametrize("rows", [8, 16, 32, 64])
def test_wgmma_finds_k_in_its_order(rows: int) -> None:
    """By the hardware's rules: the 128-byte swizzle of addresses."""
    blocks = 2
    held = held_cells(rows, blocks)
    for block in range(blocks):
        for m in range(rows):
            offset = m * OPERAND_ROW + 2 * np.arange(64)
            offset ^= (offset >> 7 & 7) << 4
            found = held[(block * rows * OPERAND_ROW + offset) // 2]
            assert (found[:, 0] == m).all()
            assert np.array_equal(found[:, 1], block * 64 + np.arange(64))


def test_a_warp_meets_no_bank_twice() -> None:
    """Reading eight rows, or storing 64 k of four rows: each quarter of a warp meets all banks."""
    lanes = np.arange(32)
    for places in (vector_place(lanes % 8, lanes // 8, 8), vector_place(lanes // 8, lanes % 8, 8)):
        for quarter in np.split(places, 4):
            assert len(set(quarter // 16 % 8)) == 8


@pytest.mark.parametrize("rows", [8, 16, 32, 64])
def test_integers_stand_where_lanes_read_them(rows: int) -> None:
    """Two steps of eight rows are what a warp reads at once, in an order that begins anew every eight pairs."""
    steps, lanes = 64, np.arange(32)
    row, step, lane = np.meshgrid(np.arange(rows), np.arange(steps), np.arange(4), indexing="ij")
    places = integer_place(row, step, lane, rows)
    assert sorted(places.ravel()) == list(range(0, rows * steps * 32, 8))
    for pair in range(steps // 2):
        for eight in range(rows // 8):
            start = ((pair * (rows // 8) + eight) * 32 + (lanes ^ (pair % 8))) * 16
            for odd in range(2):
                found = integer_place(eight * 8 + lanes // 4, 2 * pair + odd, lanes % 4, rows)
                assert np.array_equal(found, start + 8 * odd)


@pytest.mark.parametrize("lane", range(4))
def test_a_warp_stores_integers_without_bank_conflicts(lane: int) -> None:
    """Sixteen adjacent steps of a row, eight bytes each, are all banks."""
    places = integer_place(3, 16 + np.arange(16), lane, 8)
    assert len(set(places // 8 % 16)) == 16


@given(st.sampled_from(BITS), st.sampled_from([0, CHANNEL, *GROUPS]), st.integers(1, 5000))
def test_shares_of_a_record_are_whole_groups_and_all_of_it(bits: int, group: int, k: int) -> None:
    group = group if bits == 4 else 0
    record = Records.of(64, k, bits, group, tiles=4, record_bytes=16384).record
    blocks = segment_blocks(record)
    assert blocks * segments_of(record) == record.blocks
    wide = record.group if record.group in GROUPS else 1
    assert blocks * 64 % min(wide, blocks * 64) == 0
    assert wide <= blocks * 64
    count = shares_of(bits)
    shares = [share_of(i, count, segments_of(record)) for i in range(count)]
    found = [s for first, end in shares for s in range(first, end)]
    assert found == list(range(segments_of(record)))


@pytest.mark.parametrize("mma", MMAS)
@pytest.mark.parametrize("bits", BITS)
def test_warps_cover_rows_and_shares(bits: int, mma: str) -> None:
    parts = WARPS // shares_of(bits, mma)
    found = {(w % parts, w // parts) for w in range(WARPS)}
    assert len(found) == WARPS
    assert parts * warp_rows(bits, mma) == BAND
    if mma == "wgmma":  # a share is a warpgroup's, its warps in the order of the MMA's rows
        assert [(w % parts, w // parts) for w in range(4)] == [(w, 0) for w in range(4)]
        assert shares_of(bits, mma, wide=True) == 1


@given(
    st.integers(1, 4),
    st.sampled_from([1, 2, 4, 8, 16, 64]),
    st.sampled_from([64, 128, 192, 320]),
)
def test_partial_sums_have_places_of_their_own(senders: int, rows: int, tile: int) -> None:
    s, m, f = np.meshgrid(np.arange(senders), np.arange(rows), np.arange(tile), indexing="ij")
    places = partial_place(s, m, f, rows, tile)
    assert len(np.unique(places)) == places.size
    assert places.max() < senders * rows * pitch_of(tile)


@pytest.mark.parametrize("tile", [64, 128, 192, 256, 320])
def test_the_epilogue_reads_sums_without_bank_conflicts(tile: int) -> None:
    """64-bit loads go half a warp at a time: 16 lanes, 32 banks."""
    lanes = np.arange(16)
    places = partial_place(0, lanes // 4, 2 * (lanes % 4), 8, tile)
    banks = np.concatenate([places, places + 1]) % 32
    assert len(set(banks)) == 32


@given(st.integers(0, 100), st.sampled_from([1, 2, 4, 8, 16, 32, 64]))
def test_each_part_of_an_epilogue_has_one_warp(turn: int, rows: int) -> None:
    tasks = epilogue_tasks(rows)
    firsts = [finisher(w, turn, rows) for w in range(FINISHERS)]
    done = [task for first in firsts for task in range(first, tasks, FINISHERS)]
    assert sorted(done) == list(range(tasks))
    following = [finisher(w, turn + 1, rows) for w in range(FINISHERS)].index(0)
    assert (following - firsts.index(0)) % FINISHERS == tasks % FINISHERS


@settings(max_examples=60)
@given(compositions())
def test_tiles_cut_nothing_that_belongs_together(drawn: tuple) -> None:
    composition, columns = drawn
    resolved = resolve(composition, columns)
    size, unit = tile_rows(resolved), resolved.order.unit
    assert size % BAND == 0
    assert size % unit == 0 or unit % size == 0
    for span in resolved.ranges:
        blocks = lane_blocks(span)
        assert sorted(set(blocks)) == list(range(unit // 8))
        whole = [block_rows(span, b) for b in span.blocks]
        for first, end in whole if not span.head else [(0, unit)]:
            for u in range(max(size // unit, 1)):
                start = u * unit + first
                assert start // size == (u * unit + end - 1) // size or size >= unit


def test_tiles_are_as_small_as_the_composition_allows() -> None:
    sizes = {
        name: tile_rows(resolve(composition, n))
        for name, (composition, n, _) in chains(600).items()
    }
    assert sizes["qkv.128"] == 64  # pairs of a head's halves are whole in half a head
    assert sizes["qkv.64.norm"] == 64
    assert sizes["qkv.128.partial"] == 128  # a norm over the head needs all of it
    assert sizes["qkv.80"] == 320
    assert sizes["residual"] == sizes["swiglu"] == sizes["store"] == 64
