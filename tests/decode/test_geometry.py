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
    lane_blocks,
    operand_place,
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
from epicute.layouts import CHANNEL, GROUPS, Records, fragment_cell, lane_k
from tests.decode.cases import chains
from tests.epilogues.compositions import compositions

BITS = (4, 8, 16)


@pytest.mark.parametrize("run", [8, 16])
@pytest.mark.parametrize("rows", [8, 16, 32, 64])
def test_vectors_of_activations_stand_where_fragments_read_them(run: int, rows: int) -> None:
    """Lane 4g + t of eight rows finds k, k + 1, k + 2, k + 3 of its step, in registers' order."""
    blocks = 3
    row, vector = np.meshgrid(np.arange(rows), np.arange(8 * blocks), indexing="ij")
    places = vector_place(row, vector, rows, run)
    assert sorted(places.ravel()) == list(range(rows * 8 * blocks))
    held = np.empty((rows * 8 * blocks, 8, 2), np.int64)
    held[places.ravel()] = np.stack(
        [np.broadcast_to(row[..., None], (*row.shape, 8)), vector[..., None] * 8 + np.arange(8)], -1
    ).reshape(-1, 8, 2)
    lanes = np.arange(32)
    for block in range(blocks):
        for column in range(rows // 8):
            for step in range(4):
                half, within = step // 2, step % 2 * 4
                found = held[((block * (rows // 8) + column) * 2 + half) * 32 + lanes]
                for i in range(4):
                    assert (found[:, within + i, 0] == column * 8 + lanes // 4).all()
                    wanted = block * 64 + lane_k(lanes, step, run) + i
                    assert (found[:, within + i, 1] == wanted).all()


@pytest.mark.parametrize("run", [8, 16])
def test_a_warp_reads_activations_without_bank_conflicts(run: int) -> None:
    """32 adjacent vectors: each quarter of a warp meets all banks."""
    lanes = np.arange(32)
    rows, vectors = lanes // 4, (lanes % 4) * (2 if run == 16 else 1)
    assert (vector_place(rows, vectors, 8, run) == lanes).all()


@pytest.mark.parametrize("run", [8, 16])
@pytest.mark.parametrize("rows", [8, 16, 32, 64])
def test_words_of_activations_stand_where_wgmma_reads_them(run: int, rows: int) -> None:
    """By the hardware's rules: the 128-byte swizzle of addresses, and k of the register that meets a position."""
    blocks = 2
    row, vector, word = np.meshgrid(
        np.arange(rows), np.arange(8 * blocks), np.arange(4), indexing="ij"
    )
    places = operand_place(row, vector, word, rows, run)
    assert sorted(places.ravel()) == list(range(0, rows * blocks * OPERAND_ROW, 4))
    held = np.full((rows * blocks * 64, 2), -1)
    for half in range(2):
        k = vector * 8 + 2 * word + half
        held[places // 2 + half] = np.stack([row, k], -1)
    for block in range(blocks):
        for step in range(4):
            for position in range(16):
                lane, register, half = position % 8 // 2, position // 8 * 2, position % 2
                _, k = fragment_cell(lane, step, register, half, run)
                for m in range(rows):
                    offset = m * OPERAND_ROW + step * 32 + position * 2
                    offset ^= (offset >> 7 & 7) << 4
                    found = held[(block * rows * OPERAND_ROW + offset) // 2]
                    assert tuple(found) == (m, block * 64 + k)


@pytest.mark.parametrize("run", [8, 16])
@pytest.mark.parametrize("first", [0, 4, 12])
def test_a_warp_stores_activations_for_wgmma_without_bank_conflicts(run: int, first: int) -> None:
    lanes = np.arange(32)
    for word in range(4):
        places = operand_place(first + lanes // 8, lanes % 8, word, 16, run)
        assert len(set(places // 4 % 32)) == 32


@given(st.sampled_from(BITS), st.sampled_from([0, CHANNEL, *GROUPS]), st.integers(1, 5000))
def test_shares_of_a_record_are_whole_groups_and_all_of_it(bits: int, group: int, k: int) -> None:
    group = group if bits == 4 else 0
    record = Records.of(64, k, bits, group, tiles=4, record_bytes=16384).record
    blocks = segment_blocks(record)
    assert blocks * segments_of(record) == record.blocks
    wide = record.group if record.group in GROUPS else 1
    assert blocks * 64 % min(wide, blocks * 64) == 0
    assert wide <= blocks * 64
    for mma in MMAS:
        count = shares_of(bits, mma)
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
