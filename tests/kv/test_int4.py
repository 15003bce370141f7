"""INT4 rows and their cache: the quantiser bit for bit, rotation, pages, padding."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from epicute.errors import ArgumentError
from epicute.kv.int4 import Int4Cache, dequantize_row, pack_row, quantize_row, unpack_row
from epicute.kv.pages import slots_for
from epicute.layouts.kv_int4 import Int4Record, nibble_of_channel
from epicute.quant.hadamard import fold_value, rotate
from epicute.testing.strategies import page_tables

LEAST = 2.0**-117


@st.composite
def rows(draw: st.DrawFn, count: int = 4, width: int = 16) -> np.ndarray:
    """FP32 rows as bit patterns, as noise of any magnitude, and as halves of a scale."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    kind = draw(st.sampled_from(("bits", "noise", "ties")))
    if kind == "bits":
        return rng.integers(0, 2**32, (count, width), np.uint32).view(np.float32)
    if kind == "ties":
        found = rng.integers(-14, 15, (count, width)) / 2.0
        found[:, 0] = 7
        return (found * 2.0 ** draw(st.integers(-120, 120))).astype(np.float32)
    spread = draw(st.integers(-126, 120))
    return (rng.standard_normal((count, width)) * 2.0**spread).astype(np.float32)


def naive(row: np.ndarray) -> tuple[list[int], float]:
    """Nibbles and scale from the contract's sentences, a value at a time."""
    numbers = [float(v) for v in row]
    amax = max((abs(v) for v in numbers if math.isfinite(v)), default=0.0)
    scale = max(float(np.float32(amax / 7)), LEAST)
    inverse = float(np.float32(1 / scale))
    nibbles = []
    for v in numbers:
        with np.errstate(over="ignore"):
            scaled = float(np.float32(v * inverse))
        clipped = 7.0 if math.isnan(scaled) else min(max(scaled, -7.0), 7.0)
        nibbles.append(round(clipped) + 8)  # Python rounds half to even
    return nibbles, scale


@given(rows())
def test_nibbles_and_scales_are_those_of_the_contract(x: np.ndarray) -> None:
    nibbles, scale = quantize_row(torch.from_numpy(x))
    wanted = [naive(row) for row in x]
    assert nibbles.tolist() == [n for n, _ in wanted]
    assert scale.tolist() == [s for _, s in wanted]
    assert nibbles.min() >= 1
    assert nibbles.max() <= 15
    assert scale.isfinite().all()


@given(rows().filter(lambda x: bool(np.isfinite(x).all())))
def test_values_are_within_half_a_scale(x: np.ndarray) -> None:
    nibbles, scale = quantize_row(torch.from_numpy(x))
    error = np.abs(dequantize_row(nibbles, scale).numpy().astype(np.float64) - x)
    assert (error <= 0.5001 * scale.numpy()[:, None].astype(np.float64)).all()


@pytest.mark.parametrize("constant", [3.0, 0.0, 1e-4, 3e4, -3.0, 1e-40, 3e38])
def test_kd_13_constant_rows_come_back(constant: float) -> None:
    x = torch.full((2, 128), constant)
    nibbles, scale = quantize_row(x)
    assert scale.isfinite().all()
    assert (scale > 0).all()
    found = dequantize_row(nibbles, scale)
    assert ((found - x).abs() <= abs(constant) * 1e-6 + LEAST).all()
    if constant == 0:
        assert (nibbles == 8).all()


@pytest.mark.parametrize(("broken", "nibble"), [(math.nan, 15), (math.inf, 15), (-math.inf, 1)])
def test_a_broken_value_enters_no_scale(broken: float, nibble: int) -> None:
    x = torch.randn(3, 64)
    x[1, 5] = 0
    clean, scale = quantize_row(x)
    x[1, 5] = broken
    found, same = quantize_row(x)
    assert torch.equal(same, scale)
    assert found[1, 5] == nibble
    found[1, 5] = clean[1, 5]
    assert torch.equal(found, clean)


@given(st.integers(0, 2**16 - 1), st.sampled_from([8, 64, 128, 256]))
def test_rows_pack_where_the_layout_says(seed: int, dim: int) -> None:
    nibbles = np.random.default_rng(seed).integers(0, 16, (3, dim)).astype(np.uint8)
    packed = pack_row(torch.from_numpy(nibbles))
    for channel in range(dim):
        place = int(nibble_of_channel(channel))
        found = packed[:, place // 2].numpy() >> 4 * (place % 2) & 15
        assert np.array_equal(found, nibbles[:, channel])
    assert np.array_equal(unpack_row(packed).numpy(), nibbles)


CASES = [(16, 64), (64, 128), (128, 128)]


@pytest.mark.parametrize("rotated", [True, False])
@pytest.mark.parametrize(("page_size", "head_dim"), CASES)
def test_what_is_written_is_read_and_nothing_else_changes(
    page_size: int, head_dim: int, rotated: bool
) -> None:
    cache = Int4Cache.create(5, page_size, 3, head_dim, rotated)
    memory = torch.full((5, 3, cache.record.bytes), 0x5A, dtype=torch.uint8)
    before = memory.clone()
    torch.manual_seed(0)
    slots = torch.randperm(cache.capacity)[:23]
    k, v = torch.randn(2, 23, 3, head_dim).bfloat16()
    k[:, 1, 7] *= 100
    cache.write(memory, k, v, slots)
    keys, values = cache.read(memory, slots)
    for x, found in ((k, keys), (v, values)):
        wanted = dequantize_row(*quantize_row(rotate(x) if rotated else x))
        assert torch.equal(found, wanted)
    # A row at a time, at the addresses that kernels compute, the bytes are the same.
    pool = cache.pool(memory)
    flat = memory.view(-1)
    touched = torch.zeros(flat.numel(), dtype=torch.bool)
    for row, slot in enumerate(slots.tolist()):
        for head in range(3):
            nibbles, scale = quantize_row(rotate(k[row, head]) if rotated else k[row, head])
            start = cache.key_offset(pool, slot, head)
            span = slice(start, start + head_dim // 2)
            assert torch.equal(flat[span], pack_row(nibbles))
            touched[span] = True
            start = cache.value_offset(pool, slot, head)
            touched[start : start + head_dim // 2] = True
            token, record = slot % page_size, pool.start(slot // page_size, head)
            for place in (cache.record.key_scale(token), cache.record.value_scale(token)):
                touched[record + place : record + place + 4] = True
            start = record + cache.record.key_scale(token)
            assert flat[start : start + 4].view(torch.float32).item() == scale.item()
    assert torch.equal(flat[~touched], before.view(-1)[~touched])


@given(st.integers(0, 2**16 - 1))
def test_appending_token_by_token_writes_the_bytes_of_a_prefill(seed: int) -> None:
    torch.manual_seed(seed)
    cache = Int4Cache.create(3, 16, 2, 64)
    together, apart = cache.allocate(), cache.allocate()
    k, v = torch.randn(2, 20, 2, 64).bfloat16()
    slots = torch.randperm(48)[:20]
    cache.write(together, k, v, slots)
    for m in torch.randperm(20).tolist():
        cache.write(apart, k[m : m + 1], v[m : m + 1], slots[m : m + 1])
    assert torch.equal(together, apart)


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """(D,), (N, D), (N, D)."""
    weights = torch.softmax(k.double() @ q.double() * q.numel() ** -0.5, dim=0)
    return weights @ v.double()


@given(page_tables(3, 90, (16, 32)), st.integers(0, 2**16 - 1))
def test_kd_15_paged_rows_attend_like_the_rows_they_came_from(table: object, seed: int) -> None:
    """Rotated queries, output turned back; the quantisation's own error is the only one."""
    torch.manual_seed(seed)
    cache = Int4Cache.create(table.pages, table.page_size, 2, 64)  # type: ignore[attr-defined]
    memory = cache.allocate()
    for request, length in enumerate(table.lengths.tolist()):  # type: ignore[attr-defined]
        k, v, q = torch.randn(length, 2, 64), torch.randn(length, 2, 64), torch.randn(2, 64)
        position = torch.arange(length)
        slots = slots_for(
            table.table if table.table.shape[1] else torch.zeros(3, 1, dtype=torch.int32),  # type: ignore[attr-defined]
            position,
            torch.full((length,), request),
            table.page_size,  # type: ignore[attr-defined]
        )
        cache.write(memory, k, v, slots)
        keys, values = cache.read(memory, slots)
        for head in range(2 if length else 0):
            found = attention(cache.rotated(q[head]), keys[:, head], values[:, head])
            exact = attention(q[head], rotate(keys[:, head]), rotate(values[:, head]))
            assert (rotate(found.float()) - exact).abs().max() <= 1e-4
            assert (rotate(keys[:, head]) - k[:, head]).abs().max() <= 0.5 * 8 * k.abs().max() / 7


def relative(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found - wanted).norm() / wanted.norm())


def test_rotation_recovers_what_outlier_channels_cost() -> None:
    torch.manual_seed(0)
    k, v, q = torch.randn(512, 1, 128), torch.randn(512, 1, 128), torch.randn(128)
    k[..., torch.tensor([3, 70])] *= 20
    exact = attention(q, k[:, 0], v[:, 0])
    errors = []
    for rotated in (False, True):
        cache = Int4Cache.create(4, 128, 1, 128, rotated)
        memory = cache.allocate()
        cache.write(memory, k, v, torch.arange(512))
        keys, values = cache.read(memory, torch.arange(512))
        found = attention(cache.rotated(q), keys[:, 0], values[:, 0])
        errors.append(relative(rotate(found.float()) if rotated else found, exact))
    assert errors[1] < errors[0] / 2


def test_folded_values_are_not_rotated_again() -> None:
    torch.manual_seed(1)
    record = Int4Record(16, 64)
    plain, folded = Int4Cache(1, 2, record, 64), Int4Cache(1, 2, record, 64, values_folded=True)
    x, w_v, k = torch.randn(9, 32), torch.randn(128, 32), torch.randn(9, 2, 64)
    here, there = plain.allocate(), folded.allocate()
    plain.write(here, k, (x @ w_v.T).view(9, 2, 64), torch.arange(9))
    folded.write(there, k, (x @ fold_value(w_v, 64).T).view(9, 2, 64), torch.arange(9))
    first, second = plain.read(here, torch.arange(9)), folded.read(there, torch.arange(9))
    assert torch.equal(first[0], second[0])
    assert relative(second[1], first[1]) < 0.05
    assert torch.equal(folded.rotated(k, values=True), k)
    assert torch.equal(folded.rotated(k), rotate(k))


def test_kv_10_kd_01_padding_and_garbage() -> None:
    cache = Int4Cache.create(2, 16, 2, 64)
    memory = torch.full_like(cache.allocate(), 0xFF)  # scales of NaN in every unused slot
    k, v = torch.randn(2, 6, 2, 64)
    slots = torch.tensor([4, -1, 32, 31, 2**40 + 17, 0])
    cache.write(memory, k, v, slots)
    keys, values = cache.read(memory, slots)
    placed = torch.tensor([0, 3, 5])
    assert torch.equal(keys[placed], dequantize_row(*quantize_row(rotate(k[placed]))))
    assert values[placed].isfinite().all()
    for row in (1, 2, 4):
        assert keys[row].isnan().all()
        assert values[row].isnan().all()
    assert cache.read(memory, torch.tensor([5]))[0].isnan().all()


def test_kv_12_strided_pools_hold_the_same() -> None:
    cache = Int4Cache.create(3, 32, 2, 64)
    layers = torch.zeros(3, 5, 2, cache.record.bytes, dtype=torch.uint8)
    k, v = torch.randn(2, 40, 2, 64)
    slots = torch.randperm(96)[:40]
    alone = cache.allocate()
    cache.write(alone, k, v, slots)
    cache.write(layers[:, 2], k, v, slots)
    assert torch.equal(layers[:, 2], alone)
    assert (layers[:, [0, 1, 3, 4]] == 0).all()


def test_a_dense_cache_is_a_page_per_sequence() -> None:
    cache = Int4Cache.create(2, 48, 2, 64)
    memory = cache.allocate()
    k, v = torch.randn(2, 96, 2, 64)
    cache.write(memory, k, v, torch.arange(96))
    assert memory.shape == (2, 2, 2 * 48 * 36)
    assert torch.equal(
        cache.read(memory, torch.arange(96))[0], dequantize_row(*quantize_row(rotate(k)))
    )


def test_qk_11_inputs_are_left_alone() -> None:
    cache = Int4Cache.create(1, 16, 2, 64)
    k, v, slots = torch.randn(3, 2, 64), torch.randn(3, 2, 64), torch.tensor([3, -1, 5])
    before = k.clone(), v.clone(), slots.clone()
    cache.write(cache.allocate(), k, v, slots)
    assert all(torch.equal(a, b) for a, b in zip((k, v, slots), before, strict=True))


def test_bytes_are_a_quarter_of_bf16_and_a_scale() -> None:
    cache = Int4Cache.create(7, 64, 8, 128)
    assert cache.allocate().numel() == 7 * 64 * 8 * (64 + 64 + 4 + 4)


def test_mistakes_are_refused_by_name() -> None:
    cache = Int4Cache.create(2, 16, 2, 64)
    memory, x, slots = cache.allocate(), torch.randn(3, 2, 64), torch.tensor([0, 1, 2])
    for call, named in (
        (lambda: Int4Cache.create(0, 16, 2, 64), "^pages"),
        (lambda: Int4Cache.create(2, 8, 2, 64), "^page_size"),
        (lambda: Int4Cache.create(2, 16, 2, 80), "^head_dim"),
        (lambda: Int4Cache(2, 2, Int4Record(16, 64), 128), "^width"),
        (lambda: Int4Cache(2, 2, Int4Record(16, 64), 0, True), "^values_folded"),
        (lambda: cache.write(memory[:1], x, x, slots), r"^memory\.shape"),
        (lambda: cache.write(memory, x[:, :1], x, slots), r"^keys\.shape"),
        (lambda: cache.write(memory, x, x[..., :32], slots), r"^values\.shape"),
        (lambda: cache.write(memory, x, x, slots[:2]), "^slots"),
        (lambda: cache.write(memory, x, x, torch.tensor([4, 4, 5])), "^slots: got 1 repeated"),
        (lambda: cache.write(memory, x.double(), x, slots), r"^x\.dtype"),
        (lambda: cache.read(memory[..., :64], slots), "^memory"),
        (lambda: quantize_row(torch.zeros(2, 0)), r"^x\.shape"),
        (lambda: dequantize_row(torch.zeros(2, 8, dtype=torch.uint8), torch.ones(3)), "^scale"),
    ):
        with pytest.raises(ArgumentError, match=named):
            call()
    assert (memory == 0).all()
