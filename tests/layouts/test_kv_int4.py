"""INT4 records: a bijection of bytes, read as MMA operands without a table or a transposition."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from epicute.errors import ArgumentError
from epicute.layouts.kv_fragments import key_channel, value_channel
from epicute.layouts.kv_int4 import (
    ZERO_CODE,
    Int4Record,
    channel_of_nibble,
    nibble_of_channel,
)
from tests.layouts.fragments_naive import LANES, a_place, mma

HEAD_DIMS = (64, 128, 192, 256)
records = st.builds(
    Int4Record, st.sampled_from([16, 32, 64, 128, 48, 4112]), st.sampled_from(HEAD_DIMS)
)


@given(records)
def test_every_nibble_and_scale_of_a_record_has_a_place_of_its_own(record: Int4Record) -> None:
    token = np.arange(record.page_size)[:, None]
    nibble = nibble_of_channel(np.arange(record.head_dim))[None, :]
    halves = [2 * row(token) + nibble for row in (record.key_row, record.value_row)]
    bytes_of_scales = np.arange(4)[None, :]
    scales = [s(token) + bytes_of_scales for s in (record.key_scale, record.value_scale)]
    used = np.concatenate(
        [*(h.ravel() for h in halves), *(2 * s.ravel() + e for s in scales for e in (0, 1))]
    )
    assert np.array_equal(np.sort(used), np.arange(2 * record.bytes))
    assert record.bytes % 128 == 0
    assert all(place(0) % 16 == 0 for place in (record.key_row, record.value_row))
    assert record.key_scale(0) % 16 == record.value_scale(0) % 16 == 0


def test_the_record_of_the_notes() -> None:
    record = Int4Record(16, 128)
    assert record.bytes == 2176
    starts = record.key_row(0), record.value_row(0), record.key_scale(0), record.value_scale(0)
    assert starts == (0, 1024, 2048, 2112)
    assert str(record).startswith("INT4 record: 16 tokens of 128 channels, 2176 bytes")


@given(st.integers(0, 255))
def test_nibbles_and_channels_are_inverse_and_neighbours_are_halves(channel: int) -> None:
    nibble = nibble_of_channel(channel)
    assert channel_of_nibble(nibble) == channel
    assert nibble // 8 == channel // 8, "a word holds eight adjacent channels"
    if channel % 2 == 0:
        assert nibble_of_channel(channel + 1) == nibble + 4


def test_the_picture_in_the_module() -> None:
    assert [channel_of_nibble(n) for n in range(8)] == [0, 2, 4, 6, 1, 3, 5, 7]
    assert np.array_equal(channel_of_nibble(np.arange(16)[8:]), 8 + channel_of_nibble(np.arange(8)))


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_channels_of_operands_are_bijections(head_dim: int) -> None:
    steps, tiles, depth = head_dim // 16, head_dim // 16, np.arange(16)
    keys = np.stack([key_channel(s, depth, head_dim) for s in range(steps)])
    values = np.stack([value_channel(i, depth, head_dim) for i in range(tiles)])
    for found in (keys, values):
        assert np.array_equal(np.sort(found.ravel()), np.arange(head_dim))
    assert type(key_channel(1, 3, head_dim)) is int
    assert key_channel(1, 3, head_dim) == keys[1, 3]
    assert value_channel(1, 9, head_dim) == values[1, 9]


def words_of(codes: np.ndarray) -> np.ndarray:
    """(T, D) codes of -7 to 7 as (T, D/8) words, by the layout's definition."""
    tokens, dim = codes.shape
    words = np.zeros((tokens, dim // 8), np.uint32)
    for token, channel in product(range(tokens), range(dim)):
        nibble = int(nibble_of_channel(channel))
        words[token, nibble // 8] |= np.uint32(
            (codes[token, channel] + ZERO_CODE) << 4 * (nibble % 8)
        )
    return words


def halves(word: np.uint32, register: int) -> tuple[float, float]:
    """``word >> 4 * register``, low and high half under 000F000F, as codes."""
    pair = int(word) >> (4 * register) & 0x000F000F
    return (pair & 0xFFFF) - ZERO_CODE, (pair >> 16) - ZERO_CODE


@pytest.mark.parametrize("head_dim", [64, 128])
def test_natural_rows_are_the_key_operand(head_dim: int) -> None:
    """Lane (g, t) loads D/4 adjacent channels of tokens g and g + 8; the query is stored so."""
    rng = np.random.default_rng(0)
    keys, query = rng.integers(-7, 8, (16, head_dim)), rng.standard_normal((8, head_dim))
    words = words_of(keys)
    lane_words = head_dim // 32
    found = np.zeros((16, 8))
    for step in range(head_dim // 16):

        def a(lane: int, register: int, half: int, step: int = step) -> float:
            g, t = LANES[lane]
            word = words[g + 8 * (register % 2), lane_words * t + step // 2]
            return halves(word, 2 * (step % 2) + register // 2)[half]

        def b(lane: int, register: int, half: int, step: int = step) -> float:
            g, t = LANES[lane]
            return query[g, key_channel(step, 2 * t + half + 8 * register, head_dim)]

        found += mma(a, b)
        for lane, register, half in product(range(32), range(4), range(2)):
            row, k = a_place(lane, register, half)
            assert a(lane, register, half) == keys[row, key_channel(step, k, head_dim)]
    assert np.allclose(found, keys @ query.T)


@pytest.mark.parametrize("head_dim", [64, 128])
def test_natural_rows_are_the_transposed_value_operand(head_dim: int) -> None:
    """Two PRMT join the same half-words of neighbouring tokens: halves are then tokens."""
    rng = np.random.default_rng(1)
    values, weights = rng.integers(-7, 8, (16, head_dim)), rng.random((8, 16))
    words = words_of(values)
    run = head_dim // 64  # words of a lane's run of D/8 channels
    found = np.zeros((head_dim, 8))
    for tile in range(head_dim // 16):

        def a(lane: int, register: int, half: int, tile: int = tile) -> float:
            g, t = LANES[lane]
            token = 2 * t + 8 * (register // 2)
            word = run * g + tile * 2 // 8
            first, second = int(words[token, word]), int(words[token + 1, word])
            if register % 2 == 0:
                joined = first & 0xFFFF | (second & 0xFFFF) << 16  # PRMT 5410
            else:
                joined = first >> 16 | second & 0xFFFF0000  # PRMT 7632
            return halves(np.uint32(joined), tile * 2 % 8 // 2)[half]

        def b(lane: int, register: int, half: int) -> float:
            g, t = LANES[lane]
            return weights[g, 2 * t + half + 8 * register]

        rows = value_channel(tile, np.arange(16), head_dim)
        found[rows] += mma(a, b)
    assert np.allclose(found, (weights @ values).T)


@pytest.mark.parametrize("head_dim", [0, 32, 72, 80, 96, 112, 512])
def test_qk_10_heads_that_no_kernel_reads_are_refused(head_dim: int) -> None:
    with pytest.raises(ArgumentError, match="^head_dim: got"):
        Int4Record(16, head_dim)


@pytest.mark.parametrize("page_size", [0, 1, 8, 24, -16, 2**20 + 16])
def test_pages_that_no_kernel_reads_are_refused(page_size: int) -> None:
    with pytest.raises(ArgumentError, match="^page_size: got"):
        Int4Record(page_size, 128)
