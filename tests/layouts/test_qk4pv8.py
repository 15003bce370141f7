"""The QK4PV8 page: bijections, bits that dequantise exactly, tokens where an FP8 operand has them."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from epicute.errors import ArgumentError
from epicute.layouts import accumulator_coord
from epicute.layouts.kv_fragments import key_channel
from epicute.layouts.qk4pv8 import (
    HEAD_DIMS,
    ORDERS,
    PAGE_SIZES,
    QK4PV8Page,
    exact16_pairs,
    exact16_scale,
    magnitude_bit,
    position_of,
    sign_bit,
    token_at,
)
from epicute.quant.reference import decode_e4m3, encode_e4m3
from tests.layouts.fragments_naive import LANES, a8_place, a_place

pages = st.builds(
    QK4PV8Page, st.sampled_from(PAGE_SIZES), st.sampled_from(HEAD_DIMS), st.sampled_from(ORDERS)
)
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


@given(pages)
def test_every_byte_of_a_record_has_one_meaning(page: QK4PV8Page) -> None:
    token = np.arange(page.page_size)[:, None]
    parts = [
        page.key_row(token) + np.arange(page.row_bytes),
        page.scale_byte(token, np.arange(page.blocks)),
        page.value_byte(token, np.arange(page.head_dim)),
    ]
    used = np.concatenate([part.ravel() for part in parts])
    assert np.array_equal(np.sort(used), np.arange(page.bytes))
    starts = page.scales_start, page.values_start, page.bytes
    assert all(start % 128 == 0 for start in starts)
    assert parts[1].min() == page.scales_start
    assert parts[2].min() == page.values_start


@given(pages, st.integers(0, 127), st.integers(0, 127))
def test_int_and_numpy_agree(page: QK4PV8Page, token: int, channel: int) -> None:
    token, channel, block = token % page.page_size, channel % page.head_dim, channel % page.blocks
    for place, index in (
        (page.value_byte, channel),
        (page.scale_byte, block),
    ):
        one = place(token, index)
        assert type(one) is int
        assert place(np.array([token]), np.array([index])).tolist() == [one]
    assert page.key_row(token) == token * page.head_dim // 2


@pytest.mark.parametrize("page_size", PAGE_SIZES)
@pytest.mark.parametrize("terms", [1, 2, 3])
def test_delta_indices_are_a_bijection(page_size: int, terms: int) -> None:
    page, heads = QK4PV8Page(page_size, 128), 5
    grid = np.indices((heads, terms, page_size))
    found = page.delta_index(*grid, terms)
    assert np.array_equal(found.ravel(), np.arange(heads * terms * page_size))


def test_bytes_of_the_notes() -> None:
    page = QK4PV8Page(128, 128)
    assert (page.scales_start, page.values_start, page.bytes) == (8192, 9216, 25600)
    assert QK4PV8Page(64, 128).bytes * 2 == QK4PV8Page(32, 128).bytes * 4 == page.bytes
    assert "25600 bytes" in str(page)


def test_tokens_and_positions_are_those_of_the_notes() -> None:
    wanted = [0, 1, 8, 9, 2, 3, 10, 11, 4, 5, 12, 13, 6, 7, 14, 15]
    assert [token_at(u) for u in range(16)] == wanted
    assert [position_of(token_at(u)) for u in range(16)] == list(range(16))
    assert position_of(np.array(wanted)).tolist() == list(range(16))


@pytest.mark.parametrize("columns", [64, 128])
def test_accumulators_packed_by_four_are_the_fp8_operand(columns: int) -> None:
    """Register 4s + 2h + r of P is four accumulators; no lane gives another anything."""
    for step, half, row_bit, thread in product(range(columns // 32), (0, 1), (0, 1), range(128)):
        base = 2 * row_bit + 4 * (4 * step + 2 * half)
        for byte, register in enumerate((base, base + 1, base + 4, base + 5)):
            row, token = accumulator_coord(thread, register)
            wanted_row, k = a8_place(thread % 32, 2 * half + row_bit, byte)
            assert row == thread // 32 * 16 + wanted_row
            position = 32 * step + k
            assert position // 16 * 16 + token_at(position % 16) == token


@given(st.sampled_from(ORDERS))
def test_bits_of_a_word_have_one_meaning(order: str) -> None:
    channel = np.arange(8)
    used = [sign_bit(order, channel)]
    used += [magnitude_bit(order, channel) + e for e in range(3)]
    assert np.array_equal(np.sort(np.concatenate(used)), np.arange(32))
    assert [magnitude_bit(order, int(c)) for c in channel] == used[1].tolist()
    assert [sign_bit(order, int(c)) for c in channel] == used[0].tolist()


def word_of(codes: np.ndarray, order: str) -> np.ndarray:
    """(..., 8) nibbles as signed 32-bit words, from the two bit functions."""
    word = np.zeros(codes.shape[:-1], np.uint64)
    for c in range(8):
        code = codes[..., c].astype(np.uint64)
        word |= (code & np.uint64(7)) << np.uint64(magnitude_bit(order, c))
        word |= (code >> np.uint64(3)) << np.uint64(sign_bit(order, c))
    return word.astype(np.uint32).view(np.int32)


def all_words() -> np.ndarray:
    """Nibbles (256 * 16, 8) in which every channel takes every code beside other codes."""
    rng = np.random.default_rng(0)
    found = rng.integers(0, 16, (16 * 8 * 16, 8))
    for row, (code, channel) in enumerate(product(range(16), range(8))):
        found[row * 16 : row * 16 + 16, channel] = code
    return found.astype(np.uint8)


def fp16(bits: np.ndarray) -> np.ndarray:
    return bits.astype(np.uint16).view(np.float16)


def test_exact16_words_dequantise_exactly_for_all_codes_and_all_scales() -> None:
    codes = all_words()
    registers = exact16_pairs(word_of(codes, "exact16"))
    byte = np.arange(0x7F, dtype=np.int32)
    factor = fp16(exact16_scale(byte)) * np.float16(2.0**15)
    scale = decode_e4m3(byte.astype(np.uint8))
    assert np.array_equal(factor.astype(np.float64), scale * 2.0**7)
    for pair, register in enumerate(registers):
        assert register.dtype == np.int32
        raw = register.view(np.uint32)
        for half, bits in enumerate((raw & 0xFFFF, raw >> 16)):
            units = fp16(bits)
            wanted = E2M1[codes[:, 2 * pair + half]]
            assert np.array_equal(units.astype(np.float64), wanted * 2.0**-14)
            product_ = units[:, None] * factor[None, :]  # one FP16 multiplication, HMUL2
            exact = wanted[:, None] * scale[None, :] * 2.0**-7
            assert np.array_equal(product_.astype(np.float64), exact)
            assert np.array_equal(np.signbit(product_), np.signbit(exact))


def prmt(low: np.ndarray, high: np.ndarray, selector: np.ndarray) -> np.ndarray:
    """PTX prmt.b32 on uint32 arrays: four nibbles pick bytes; the top bit replicates a sign."""
    pool = np.stack(
        [(x >> np.uint32(8 * i)) & np.uint32(255) for x in (low, high) for i in range(4)]
    )
    found = np.zeros(np.broadcast(low, selector).shape, np.uint32)
    for i in range(4):
        nibble = (selector >> np.uint32(4 * i)) & np.uint32(15)
        byte = np.take_along_axis(
            np.broadcast_to(pool, (8, *found.shape)), (nibble & 7)[None].astype(int), axis=0
        )[0]
        sign = np.where(byte & 0x80, np.uint32(255), np.uint32(0))
        found |= np.where(nibble & 8, sign, byte).astype(np.uint32) << np.uint32(8 * i)
    return found


@pytest.mark.parametrize("byte", [0, 1, 7, 8, 0x38, 0x51, 0x7E])
def test_fast8_words_are_a_table_look_up_in_natural_order(byte: int) -> None:
    codes = all_words()
    word = word_of(codes, "fast8").view(np.uint32)
    scale = decode_e4m3(np.array(byte, np.uint8))
    entries = encode_e4m3(E2M1[:8] * scale).astype(np.uint32)
    table = [np.uint32(sum(int(entries[4 * t + i]) << 8 * i for i in range(4))) for t in range(2)]
    low, high = (np.full(word.shape, entry, np.uint32) for entry in table)
    index = word & np.uint32(0x77777777)
    signs = np.uint32(0x80808080)
    registers = (
        word & signs | prmt(low, high, index),
        word << np.uint32(4) & signs | prmt(low, high, index >> np.uint32(16)),
    )
    wanted = encode_e4m3(E2M1[codes] * scale)
    found = np.concatenate([r[:, None].view(np.uint8).reshape(-1, 4) for r in registers], axis=1)
    assert np.array_equal(found, wanted)


def test_tcgen05_words_are_natural_nibbles() -> None:
    codes = all_words()
    word = word_of(codes, "tcgen05").view(np.uint32)
    natural = sum(codes[:, c].astype(np.uint64) << np.uint64(4 * c) for c in range(8))
    assert np.array_equal(word, natural)


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_a_decode_lane_finds_its_scales_in_one_load(page_size: int, head_dim: int) -> None:
    """Rows g and g + 8 are positions 2g and 2g + 1; scales of both and of its run are adjacent."""
    for order in ("exact16", "fast8"):
        page = QK4PV8Page(page_size, head_dim, order)
        words = set()
        width = head_dim // 32  # bytes: two tokens of a quarter of the channels
        for base in range(0, page_size, 16):
            for lane in range(32):
                g, t = LANES[lane]
                tokens = [base + token_at(2 * g + e) for e in range(2)]
                assert tokens[1] == tokens[0] + 1
                run = [
                    key_channel(s, k, head_dim)
                    for s in range(head_dim // 16)
                    for k in (2 * t, 2 * t + 1, 2 * t + 8, 2 * t + 9)
                ]
                blocks = sorted({c // 16 for c in run})
                found = [page.scale_byte(token, b) for token in tokens for b in blocks]
                assert found == list(range(found[0], found[0] + width))
                assert found[0] % width == 0
                words.add(found[0] // 4)
        assert len(words) == page_size * page.blocks // 4
        # One warp reads adjacent words: no bank twice.
        group = {
            (
                page.scale_byte(token_at(2 * (lane // 4)), (lane % 4) * page.blocks // 4)
                - page.scales_start
            )
            // 4
            for lane in range(32)
        }
        assert group == set(range(len(group)))


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_a_decode_lane_reads_adjacent_words_of_a_row(head_dim: int) -> None:
    for lane, step, register, half in product(range(32), range(head_dim // 16), range(4), range(2)):
        _, t = LANES[lane]
        row, k = a_place(lane, register, half)
        channel = key_channel(step, k, head_dim)
        word = head_dim // 32 * t + step // 2
        pair = 2 * (step % 2) + register // 2
        assert channel == 8 * word + 2 * pair + half
        assert row == lane // 4 + 8 * (register % 2)


def test_tcgen05_scales_are_the_atom_of_the_copy() -> None:
    page = QK4PV8Page(128, 128, "tcgen05")
    for token, block in product(range(128), range(8)):
        wanted = block // 4 * 512 + token % 32 * 16 + token // 32 * 4 + block % 4
        assert page.scale_byte(token, block) == page.scales_start + wanted


@pytest.mark.parametrize("page_size", [64, 32])
def test_tcgen05_scales_of_a_smaller_page_are_columns_of_the_atom(page_size: int) -> None:
    """128 / page_size pages side by side, column by column, make the atom."""
    page, whole = QK4PV8Page(page_size, 128, "tcgen05"), QK4PV8Page(128, 128, "tcgen05")
    columns = page_size // 32
    atom = np.full(1024, -1)
    for part, token, block in product(range(128 // page_size), range(page_size), range(8)):
        offset = page.scale_byte(token, block) - page.scales_start
        row, rest = divmod(offset, 4 * columns)
        atom[row * 16 + part * 4 * columns + rest] = (part * page_size + token) * 8 + block
    for token, block in product(range(128), range(8)):
        assert atom[whole.scale_byte(token, block) - whole.scales_start] == token * 8 + block


@pytest.mark.parametrize("head_dim", [40, 72, 80, 96, 112, 192, 256, 512, 0])
def test_qk_10_heads_that_no_kernel_reads_are_refused(head_dim: int) -> None:
    with pytest.raises(ArgumentError, match="^head_dim: got"):
        QK4PV8Page(128, head_dim)


@pytest.mark.parametrize("page_size", [1, 8, 16, 24, 48, 256, 0, -32])
def test_smaller_and_other_pages_are_refused(page_size: int) -> None:
    with pytest.raises(ArgumentError, match="^page_size: got"):
        QK4PV8Page(page_size, 128)


def test_unknown_orders_are_refused() -> None:
    with pytest.raises(ArgumentError, match="^order: got"):
        QK4PV8Page(128, 128, "natural")
