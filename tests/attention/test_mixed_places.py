"""Places in the mixed-precision kernel's buffers: bijections, banks, and agreement with what is read and written."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from epicute.attention import mixed_places as places
from epicute.layouts.fragments import accumulator_coord
from epicute.layouts.qk4pv8 import PAGE_SIZES, QK4PV8Page, token_at

HEAD_DIMS = st.sampled_from((64, 128))
PAGES = st.sampled_from(PAGE_SIZES)


@given(st.sampled_from((32, 64, 128)), st.sampled_from((64, 128)), st.integers(1, 2))
def test_a_tile_is_a_permutation_as_the_hardware_swizzles(
    width: int, rows: int, chunks: int
) -> None:
    units = width // 16 * chunks
    row, unit = np.meshgrid(np.arange(rows), np.arange(units), indexing="ij")
    found = places.tile_byte(row, unit, width, rows)
    assert sorted(found.ravel()) == list(range(0, rows * units * 16, 16))
    per = width // 16
    plain = unit // per * rows * width + row * width + unit % per * 16
    assert (found == plain ^ (plain >> 3 & places.TURNS[width])).all()


@given(st.sampled_from((32, 64, 128)), st.integers(0, 15), st.integers(0, 7))
def test_eight_rows_of_a_unit_lie_in_different_banks(width: int, first: int, unit: int) -> None:
    rows = 8 * first + np.arange(8)
    found = places.tile_byte(rows, unit % (width // 16), width, 128)
    assert len(set(found // 16 % 8)) == 8


@given(HEAD_DIMS, PAGES, st.sampled_from(("exact16", "fast8")))
def test_qk_05_scales_of_a_tile_stand_where_records_have_them(
    head_dim: int, size: int, order: str
) -> None:
    page = QK4PV8Page(size, head_dim, order)
    for token in range(128):
        for block in range(page.blocks):
            first, word, byte = places.scale_place(head_dim, token, block)
            start = token // size * size * page.blocks
            wanted = start + page.scale_byte(token % size, block) - page.scales_start
            assert first + 4 * word + byte == wanted
            assert first % (head_dim // 8) == 0
            assert 4 * word + byte < head_dim // 8


@given(PAGES, st.integers(1, 3))
def test_raw_delta_is_a_page_after_the_other(size: int, terms: int) -> None:
    page = QK4PV8Page(size, 64)
    step = places.delta_bytes(size, terms)
    assert step % places.TMA_ALIGNMENT == 0
    assert step >= 2 * size * terms
    for token in range(128):
        for term in range(terms):
            wanted = token // size * step + 2 * page.delta_index(0, term, token % size, terms)
            assert places.delta_raw_byte(token, term, size, terms) == wanted


def test_delta_is_in_the_order_of_a_threads_accumulators() -> None:
    columns = np.arange(128)
    assert sorted(places.delta_index(columns)) == list(range(128))
    for lane in range(4):
        for j in range(8):
            for i in range(4):
                # The accumulators' c-th column of a row, as ``softmax.by_rows`` counts them.
                c = 4 * j + i
                _, column = accumulator_coord(lane, c // 2 * 4 + c % 2)
                assert places.delta_index(column) == places.delta_index(16 * j) + 4 * lane + i


@pytest.mark.parametrize("thread", [0, 1, 6, 31, 77, 127])
def test_packed_probabilities_meet_the_permuted_tokens(thread: int) -> None:
    """Word w of the A operand: row and k-positions as PTX has them for m64k32 of 8 bits."""
    for word in range(16):
        row = thread // 32 * 16 + thread % 32 // 4 + word % 2 * 8
        for byte, register in enumerate(places.probability_lane(word)):
            found, column = accumulator_coord(thread, register)
            position = word // 4 * 32 + word % 4 // 2 * 16 + thread % 4 * 4 + byte
            assert found == row
            assert column == position // 16 * 16 + token_at(position % 16)


@given(HEAD_DIMS)
def test_transposed_values_are_a_record_s(head_dim: int) -> None:
    """What the lanes load, select and store puts every value where V^T of a record has it."""
    page = QK4PV8Page(128, head_dim)
    raw = np.zeros(128 * head_dim, np.int64)
    for token in range(128):
        for channel in range(head_dim):
            place = places.tile_byte(token, channel // 16, head_dim, 128) + channel % 16
            raw[place] = token * head_dim + channel
    found = np.full(128 * head_dim, -1)
    lanes = np.arange(32)
    for group in range(8):
        for chunk in range(head_dim // 32):
            token, unit = places.value_source(lanes)
            rows = places.tile_byte(group * 16 + token, chunk * 2 + unit, head_dim, 128)
            matrices = raw[rows[:, None] + np.arange(16)].reshape(4, 8, 8, 2)
            for half in range(2):
                for odd in range(2):
                    channel = chunk * 32 + places.transposed_row(lanes, half, odd)
                    address = places.value_address(channel, group, lanes, head_dim)
                    for byte in range(4):
                        # Byte i of the selections 6420 and 7531: of matrix i / 2, token 2q + i % 2.
                        source = matrices[2 * half + byte // 2]
                        value = source[2 * (lanes % 4) + byte % 2, lanes // 4, odd]
                        found[address + byte] = value
    for token in range(128):
        for channel in range(head_dim):
            offset = page.value_byte(token, channel) - page.values_start
            unit, rest = offset % 128 // 16, offset % 16
            place = places.tile_byte(offset // 128, unit, 128, head_dim) + rest
            assert found[place] == token * head_dim + channel


@given(st.integers(0, 7), st.integers(0, 3), HEAD_DIMS)
def test_transposed_stores_meet_no_bank_twice(group: int, chunk: int, head_dim: int) -> None:
    lanes = np.arange(32)
    for half in range(2):
        for turn in range(2):
            odd = lanes // 16 ^ turn
            channel = chunk % (head_dim // 32) * 32 + places.transposed_row(lanes, half, odd)
            found = places.value_address(channel, group, lanes, head_dim)
            assert len(set(found // 4 % 32)) == 32


@given(PAGES)
def test_widths(size: int) -> None:
    assert places.value_width(size) == size
    assert places.value_width(None) == 128
    assert places.query_width(64) == places.query_width(128) == 128
