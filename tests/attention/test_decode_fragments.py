"""Index functions of decode's fragments: bijections, what lanes of a product hold, and banks."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from epicute.attention.decode_fragments import (
    TABLE,
    TileLayout,
    key_channel,
    local_channel,
    natural_channel,
    row_token,
    value_channel,
)
from epicute.attention.spec import HEAD_DIMS

ORDERS = [(o, d) for o in ("bf16", "fp16", "fp8") for d in HEAD_DIMS]
ORDERS += [(o, d) for o in ("int4", TABLE) for d in (64, 128)]
ROWS = st.sampled_from([(rows, d * s) for rows in (64, 128) for d in HEAD_DIMS for s in (1, 2)])


@pytest.mark.parametrize(("order", "head_dim"), ORDERS)
def test_products_take_every_channel_once(order: str, head_dim: int) -> None:
    steps = range(head_dim // 16)
    for channel in (key_channel, value_channel):
        found = sorted(channel(order, s, k, head_dim) for s in steps for k in range(16))
        assert found == list(range(head_dim))


@pytest.mark.parametrize(("order", "head_dim"), ORDERS)
def test_numpy_gives_the_same(order: str, head_dim: int) -> None:
    steps, rows = np.arange(head_dim // 16)[:, None], np.arange(16)
    for channel in (key_channel, value_channel):
        wide = channel(order, steps, rows, head_dim)
        for s in range(head_dim // 16):
            assert wide[s].tolist() == [channel(order, s, k, head_dim) for k in range(16)]


@pytest.mark.parametrize(("order", "head_dim"), ORDERS)
@pytest.mark.parametrize("tiles", [2, 4, 8, 16])
def test_exchanged_channels_are_the_products(order: str, head_dim: int, tiles: int) -> None:
    """In any cut that the schedule makes, four adjacent places are four adjacent channels."""
    steps = head_dim // 16
    tiles = min(tiles, steps)
    if order == TABLE and tiles % 4:
        return
    for first in range(0, steps, tiles):
        count = min(tiles, steps - first)
        places = set()
        for tile in range(count):
            for row in range(16):
                local = local_channel(order, tile, row, count)
                places.add(local)
                found = natural_channel(order, local, first, count, head_dim)
                assert found == value_channel(order, first + tile, row, head_dim)
        assert places == set(range(16 * count))
        for local in range(0, 16 * count, 4):
            four = [natural_channel(order, local + i, first, count, head_dim) for i in range(4)]
            assert four == list(range(four[0], four[0] + 4))


@pytest.mark.parametrize("order", ["bf16", "fp8", "int4"])
def test_rows_are_all_tokens(order: str) -> None:
    assert sorted(row_token(order, row) for row in range(16)) == list(range(16))


@given(ROWS)
def test_a_tile_has_every_byte_once(shape: tuple[int, int]) -> None:
    layout = TileLayout(*shape)
    places = {
        layout.offset(row, unit) for row in range(layout.rows) for unit in range(shape[1] // 16)
    }
    assert places == set(range(0, shape[0] * shape[1], 16))


@given(ROWS, st.data())
def test_a_chunk_is_what_tma_writes(shape: tuple[int, int], data: st.DataObject) -> None:
    """Unit u of a swizzled chunk: bits 4 to 6 of the address xored with those three places above."""
    layout = TileLayout(*shape)
    row = data.draw(st.integers(0, layout.rows - 1))
    unit = data.draw(st.integers(0, shape[1] // 16 - 1))
    plain = layout.chunk_offset(unit) + row * layout.chunk + unit % layout.units * 16
    bits = {128: 0x70, 64: 0x30}.get(layout.chunk, 0) if layout.swizzled else 0
    assert layout.offset(row, unit) == plain ^ (plain >> 3 & bits)


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("size", [1, 2])
def test_ldmatrix_meets_in_no_bank(head_dim: int, size: int) -> None:
    """Eight rows of a unit take all banks; of heads of 80 and 96, whose rows lie whole, they take two turns."""
    layout = TileLayout(64, head_dim * size)
    for unit in range(head_dim * size // 16):
        groups = [layout.offset(row, unit) // 16 % 8 for row in range(8)]
        most = max(groups.count(g) for g in groups)
        assert most == 1 or (most == 2 and not layout.swizzled)


def test_int4_values_meet_half_as_often() -> None:
    """Lanes that read values of rows 2t at once: 32 bytes at four tokens of 64 bytes, in two turns instead of four."""
    banks = [(row_token("int4", 2 * t) * 64 + g * 8) // 8 % 16 for t in range(4) for g in range(4)]
    assert max(banks.count(b) for b in banks) == 2
    plain = [(2 * t * 64 + g * 8) // 8 % 16 for t in range(4) for g in range(4)]
    assert max(plain.count(b) for b in plain) == 4
