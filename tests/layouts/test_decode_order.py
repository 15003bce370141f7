"""Fragment order: a bijection at every level, that of the PTX ISA, and products lane by lane."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from epicute.errors import ArgumentError
from epicute.layouts import (
    BLOCK,
    CHANNEL,
    GROUPS,
    TILE_ROWS,
    Range,
    Record,
    Records,
    RowOrder,
    bf16_pair,
    code_place,
    fp16_pair,
    fragment_cell,
    fragment_place,
)

LANES = np.arange(32)


@st.composite
def records(draw: st.DrawFn) -> Record:
    """Records of all formats; INT4 with every group, with and without zero points."""
    tiles = draw(st.sampled_from([1, 2, 3, 4]))
    bits = draw(st.sampled_from([4, 8, 16]))
    if bits > 4:
        return Record(bits, BLOCK * draw(st.integers(1, 5)), tiles)
    group = draw(st.sampled_from([*GROUPS, CHANNEL]))
    depth = max(group, BLOCK) * draw(st.integers(1, 9))
    return Record(4, depth, tiles, depth if group == CHANNEL else group, draw(st.booleans()))


def block() -> tuple[np.ndarray, np.ndarray]:
    return np.meshgrid(np.arange(TILE_ROWS), np.arange(BLOCK), indexing="ij")


def test_fragment_place_is_a_bijection_and_cell_its_inverse() -> None:
    row, k = block()
    lane, step, register, half = fragment_place(row, k)
    flat = ((lane * 4 + step) * 4 + register) * 2 + half
    assert np.array_equal(np.sort(flat.ravel()), np.arange(TILE_ROWS * BLOCK))
    assert np.array_equal(fragment_cell(lane, step, register, half), (row, k))


@given(st.integers(0, 15), st.integers(0, 63))
def test_int_and_numpy_agree(row: int, k: int) -> None:
    place = fragment_place(row, k)
    assert all(type(value) is int for value in place)
    assert np.array_equal(fragment_place(np.array(row), np.array(k)), place)
    assert fragment_cell(*place) == (row, k)


def test_a_fragment_holds_the_cells_of_the_ptx_isa() -> None:
    """m16n8k16 A: lane 4g + t, register j, half h is row g + 8 (j & 1), MMA k 2t + h + 8 (j >> 1); k in its order."""
    row, k = block()
    lane, step, register, half = fragment_place(row, k)
    assert np.array_equal(lane // 4 + 8 * (register & 1), row)
    assert np.array_equal(16 * step + 2 * (lane % 4) + half + 8 * (register >> 1), k)


@pytest.mark.parametrize("bits", [4, 8, 16])
def test_codes_fill_the_loads_of_a_lane(bits: int) -> None:
    step, register, half = np.meshgrid(np.arange(4), np.arange(4), np.arange(2), indexing="ij")
    load, bit = code_place(step, register, half, bits)
    assert (bit % bits == 0).all()
    assert (0 <= bit).all()
    assert (bit < 128).all()
    flat = np.sort((np.broadcast_to(load, bit.shape) * 128 + bit).ravel())
    assert np.array_equal(flat, np.arange(32) * bits)


def test_halves_of_a_register_are_what_one_conversion_takes() -> None:
    """Sixteen bits hold two FP8 codes of one register; one word holds its two 16-bit values."""
    for register in range(4):
        for step in range(4):
            for bits in (8, 16):
                (load, low), (same, high) = (
                    code_place(step, register, half, bits) for half in (0, 1)
                )
                assert load == same
                assert high == low + bits
                assert low % (2 * bits) == 0


@given(records())
def test_codes_fill_a_record_once(record: Record) -> None:
    row, k = np.meshgrid(np.arange(record.rows), np.arange(record.depth), indexing="ij")
    bit = record.code_bit(row, k)
    assert (bit % record.bits == 0).all()
    codes = record.rows * record.depth
    assert np.array_equal(np.sort(bit.ravel()), np.arange(codes) * record.bits)
    assert record.scales_start * 8 == codes * record.bits
    assert np.array_equal(np.sort(record.code_sources), np.arange(codes))
    first = record.code_sources[record.code_bit(1, 3) // record.bits]
    assert first == record.depth + 3


@given(records())
def test_a_load_is_16_bytes_and_a_warp_reads_512_adjacent_ones(record: Record) -> None:
    offsets = [
        record.load_offset(b, tile, load, LANES)
        for b in range(record.blocks)
        for tile in range(record.tiles)
        for load in range(record.loads)
    ]
    assert np.array_equal(np.concatenate(offsets), np.arange(0, record.scales_start, 16))
    row, k = np.meshgrid(np.arange(record.rows), np.arange(record.depth), indexing="ij")
    lane, step, register, half = fragment_place(row % 16, k % BLOCK)
    load, bit = code_place(step, register, half, record.bits)
    start = record.load_offset(k // BLOCK, row // 16, load, lane)
    assert np.array_equal(record.code_bit(row, k), start * 8 + bit)


@given(records())
def test_scales_and_zeros_fill_their_parts_once(record: Record) -> None:
    assume(record.group)
    row, group = np.meshgrid(np.arange(record.rows), np.arange(record.slots), indexing="ij")
    slots = np.sort(record.scale_slot(row, group).ravel())
    assert np.array_equal(slots, np.arange(record.rows * record.slots))
    assert record.groups <= record.slots < record.groups + record.width
    scales = np.sort(record.scale_offset(row, group).ravel())
    assert np.array_equal(scales, np.arange(record.scales_start, record.zeros_start, 2))
    zeros = np.sort(record.zero_offset(row, group).ravel())
    assert np.array_equal(zeros[[0, -1]], [record.zeros_start, record.zeros_start + zeros.size - 1])
    assert record.size == (zeros[-1] + 1 if record.zeros else record.zeros_start)
    assert record.size % 16 == record.scales_start % 16 == record.zeros_start % 16 == 0
    assert np.array_equal(np.sort(record.slot_sources), slots)


@given(records())
def test_scales_lie_as_their_readers_load_them(record: Record) -> None:
    """A row's scales of a set side by side, and for M = 1 a warp's pairs in one stretch."""
    assume(record.group)
    row = np.arange(record.rows)[:, None]
    for first in range(0, record.slots, record.width):
        found = record.scale_offset(row, first + np.arange(record.width)[None, :])
        assert (np.diff(found, axis=1) == 2).all()
        assert (found[:, 0] % (2 * record.width) == 0).all(), "one aligned load"
        if record.width == 8:
            pairs = record.scale_offset(LANES // 4, first + LANES % 4 * 2)
            assert np.array_equal(pairs, pairs[0] + 4 * LANES)


shapes = st.tuples(st.integers(1, 400), st.integers(1, 5000))


@given(shapes, st.sampled_from([4, 8, 16]), st.sampled_from([*GROUPS, CHANNEL]), st.data())
def test_records_cover_the_weight_with_little_padding(
    shape: tuple[int, int], bits: int, group: int, data: st.DataObject
) -> None:
    group = group if bits == 4 else 0
    tiles = data.draw(st.sampled_from([1, 2, 4]))
    found = Records.of(*shape, bits, group, tiles=tiles)
    unit = max(BLOCK, group)
    assert 0 <= found.rows - shape[0] < found.record.rows
    assert 0 <= found.width - shape[1] < unit * found.along
    assert found.record.depth % unit == 0
    assert found.record.scales_start <= max(8192, tiles * 16 * unit * bits // 8)
    down, along = np.meshgrid(np.arange(found.down), np.arange(found.along), indexing="ij")
    offsets = found.record_offset(down, along)
    assert offsets.dtype == np.int64
    assert np.array_equal(offsets.ravel(), np.arange(0, found.nbytes, found.record.size))


@pytest.mark.parametrize(
    ("width", "bits", "group", "depth", "along"),
    [
        (4096, 4, 128, 1024, 4),
        (14336, 4, 128, 1024, 14),
        (53248, 4, 128, 1024, 52),
        (576, 4, 128, 640, 1),
        (1536, 4, 128, 768, 2),
        (576, 4, 64, 576, 1),
        (576, 4, CHANNEL, 576, 1),
        (4096, 8, 0, 512, 8),
        (576, 8, 0, 320, 2),
        (4096, 16, 0, 256, 16),
        (576, 16, 0, 192, 3),
    ],
)
def test_depths_of_known_shapes(width: int, bits: int, group: int, depth: int, along: int) -> None:
    found = Records.of(16, width, bits, group)
    assert (found.record.depth, found.along) == (depth, along)


def test_a_record_of_1024_k_is_8448_bytes() -> None:
    assert Record(4, 1024, group=128).size == 8192 + 256
    assert Record(4, 1024, group=128, zeros=True).size == 8192 + 256 + 128
    assert Record(4, 1024, group=32).size == 8192 + 1024
    assert Record(4, 1024, group=1024).size == 8192 + 32


def test_offsets_pass_32_bits() -> None:
    found = Records.of(106496, 16384, 16)
    assert found.record_offset(found.down - 1, found.along - 1) > 2**31
    last = found.record_offset(np.int32(found.down - 1), np.int32(found.along - 1))
    assert last == found.nbytes - found.record.size


@st.composite
def orders(draw: st.DrawFn) -> RowOrder:
    kind = draw(st.sampled_from(["halves", "heads"]))
    if kind == "halves":
        return RowOrder((Range("halves", 2 * draw(st.integers(1, 90))),), 64)
    head = draw(st.sampled_from([32, 64, 80, 96, 128]))
    heads = Range("heads", head * draw(st.integers(1, 3)), head, draw(st.sampled_from([16, head])))
    return RowOrder((heads,), head)


@given(orders(), st.integers(0, 63))
def test_both_members_of_a_pair_meet_in_one_lane(order: RowOrder, k: int) -> None:
    """Gate and up, or the halves of a RoPE head: rows g and g + 8 of one tile, registers j, j + 1."""
    (r,), physical = order.ranges, order.physical()
    half = r.columns // 2 if r.kind == "halves" else r.rotary_dim // 2
    heads = [0] if r.kind == "halves" else range(0, r.columns, r.head_dim)
    first = np.concatenate([h + np.arange(half) for h in heads])
    a, b = physical[first], physical[first + half]
    assert np.array_equal(a // TILE_ROWS, b // TILE_ROWS)
    one, other = fragment_place(a % TILE_ROWS, k), fragment_place(b % TILE_ROWS, k)
    assert np.array_equal(one[0], other[0]), "one lane"
    assert np.array_equal(one[2] + 1, np.broadcast_to(other[2], one[2].shape))


def _words(nibbles: np.ndarray) -> np.ndarray:
    """(…, 8) codes, lowest first, as uint32."""
    return (nibbles.astype(np.uint32) << (4 * np.arange(8, dtype=np.uint32))).sum(
        -1, dtype=np.uint32
    )


def _bf16(bits: np.ndarray) -> np.ndarray:
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


@pytest.mark.parametrize("code", range(16))
@pytest.mark.parametrize("other", [0, 15])
def test_all_codes_convert_in_every_place(code: int, other: int) -> None:
    for place in range(8):
        nibbles = np.full((1, 8), other)
        nibbles[0, place] = code
        word = _words(nibbles)
        register, half = place % 4, place // 4
        for dtype in (np.uint32, np.int32):
            pair = bf16_pair(word.view(dtype), register).view(np.uint32)
            halves = pair.view(np.uint16).reshape(-1, 2)
            wanted = [other, other]
            wanted[half] = code
            assert _bf16(halves)[0].tolist() == [128 + u for u in wanted]
            pair = fp16_pair(word.view(dtype), register).view(np.uint32)
            weight = 16 if register % 2 else 1
            values = pair.view(np.float16).reshape(-1, 2)[0].tolist()
            assert values == [1024 + weight * u for u in wanted]
        assert bf16_pair(int(word[0]), register) == int(bf16_pair(word, register)[0])
        assert fp16_pair(int(word[0]), register) == int(fp16_pair(word, register)[0])


def _mma(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """D (lane, 4) of m16n8k16 from registers A (lane, 4, 2) and B (lane, 2, 2): the ISA's tables."""
    g, t = LANES // 4, LANES % 4
    left, right = np.zeros((16, 16)), np.zeros((16, 8))
    for h in range(2):
        for j in range(4):
            left[g + 8 * (j % 2), 2 * t + 8 * (j // 2) + h] = a[:, j, h]
        for j in range(2):
            right[2 * t + 8 * j + h, g] = b[:, j, h]
    product = left @ right
    cells = [product[g + 8 * (i // 2), 2 * t + i % 2] for i in range(4)]
    return np.stack(cells, axis=1)


@pytest.mark.parametrize("group", [32, 64, 128])
@pytest.mark.parametrize("sixteen", ["bf16", "fp16"])
def test_products_lane_by_lane(group: int, sixteen: str) -> None:
    """A row tile of codes and zero points through registers, the zero point by sums of activations."""
    record = Record(4, 256, group=group, zeros=True)
    rng = np.random.default_rng(group)
    codes = rng.integers(0, 16, (16, record.depth))
    zero = rng.integers(0, 16, (16, record.groups))
    scale = rng.uniform(0.5, 1.5, (16, record.groups))
    x = rng.standard_normal((8, record.depth))
    nibbles = codes.ravel()[record.code_sources].reshape(record.blocks, 32, 4, 8)
    words = _words(nibbles)
    g, t = LANES // 4, LANES % 4
    total = np.zeros((32, 4))
    row = g[:, None] + 8 * np.array([0, 0, 1, 1])
    column = 2 * t[:, None] + np.array([0, 1, 0, 1])
    weight = np.array([1, 1, 16, 16]) if sixteen == "fp16" else 1
    base = 1024 if sixteen == "fp16" else 128
    for block_ in range(record.blocks):
        for step in range(4):
            k = block_ * BLOCK + step * 16 + 2 * t
            b = np.stack([np.stack([x[g, k + 8 * r + h] for h in (0, 1)], 1) for r in (0, 1)], 1)
            word = words[block_, :, step]
            if sixteen == "fp16":
                pairs = [fp16_pair(word, j).astype(np.uint32).view(np.float16) for j in range(4)]
                a = np.stack([p.reshape(32, 2) for p in pairs], 1).astype(float)
            else:
                pairs = [bf16_pair(word, j).astype(np.uint32).view(np.uint16) for j in range(4)]
                a = np.stack([_bf16(p.reshape(32, 2)) for p in pairs], 1).astype(float)
            at = (block_ * BLOCK + step * 16) // group
            sums = b.reshape(8, 4, 4).sum((1, 2))[column]
            total += scale[row, at] * ((_mma(a, b) - base * sums) / weight - zero[row, at] * sums)
    spread = np.repeat(np.arange(record.groups), group)
    wanted = x @ ((codes - zero[:, spread]) * scale[:, spread]).T
    assert np.allclose(total, wanted[column, row], atol=1e-9)


@pytest.mark.parametrize("group", [32, 64, 128])
def test_one_row_with_a_group_per_column(group: int) -> None:
    """M = 1: MMA column c gets the activations of group c of a set and no others, so that eight groups add up before
    any scale is applied; the scales then are a warp's pairs.
    """
    record = Record(4, 8 * group, group=group)
    rng = np.random.default_rng(group)
    codes = rng.integers(0, 16, (16, record.depth))
    scale = rng.uniform(0.5, 1.5, (16, 8))
    x = rng.standard_normal(record.depth)
    words = _words(codes.ravel()[record.code_sources].reshape(record.blocks, 32, 4, 8))
    stored = scale.ravel()[record.slot_sources]
    g, t = LANES // 4, LANES % 4
    acc = np.zeros((32, 4))
    for block_ in range(record.blocks):
        for step in range(4):
            k = block_ * BLOCK + step * 16 + 2 * t
            held = (k // group == g)[:, None, None]
            b = np.stack([np.stack([x[k + 8 * r + h] for h in (0, 1)], 1) for r in (0, 1)], 1)
            pairs = [
                bf16_pair(words[block_, :, step], j).astype(np.uint32).view(np.uint16)
                for j in range(4)
            ]
            a = np.stack([_bf16(p.reshape(32, 2)) for p in pairs], 1).astype(float)
            acc += _mma(a, np.where(held, b, 0.0))
    sums = x.reshape(8, group).sum(1)
    found = np.zeros(16)
    for i in range(4):
        row, column = g + 8 * (i // 2), 2 * t + i % 2
        place = (record.scale_offset(row, column) - record.scales_start) // 2
        np.add.at(found, row, stored[place] * (acc[:, i] - 136 * sums[column]))
    wanted = ((codes - 8) * np.repeat(scale, group, axis=1)) @ x
    assert np.allclose(found, wanted, atol=1e-9)


@pytest.mark.parametrize(
    ("argument", "make"),
    [
        ("bits", lambda: Record(3, 64)),
        ("tiles", lambda: Record(4, 64, tiles=0)),
        ("depth", lambda: Record(4, 96)),
        ("depth", lambda: Record(4, 0)),
        ("group", lambda: Record(4, 64, group=128)),
        ("group", lambda: Record(4, 512, group=256)),
        ("zeros", lambda: Record(4, 64, zeros=True)),
        ("group", lambda: Records.of(16, 256, 4, 256)),
        ("bits", lambda: Records.of(16, 256, 2, 128)),
        ("rows", lambda: Records.of(0, 256, 4, 128)),
        ("width", lambda: Records.of(16, 0, 4, 128)),
        ("tiles", lambda: Records.of(16, 64, 4, 64, tiles=0)),
        ("down", lambda: Records(Record(4, 64), 0, 1)),
        ("along", lambda: Records(Record(4, 64), 1, 0)),
    ],
)
def test_refused_by_name(argument: str, make: object) -> None:
    with pytest.raises(ArgumentError, match=f"^{argument}: got"):
        make()  # type: ignore[operator]
