"""The QK4PV8 cache: what the contract makes of a row, in the bytes that the layout names."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from epicute.errors import ArgumentError
from epicute.kv.qk4pv8 import (
    Memory,
    QK4PV8Cache,
    Rows,
    bytes_per_token,
    pack_keys,
    unpack_keys,
)
from epicute.layouts.qk4pv8 import ORDERS, QK4PV8Page, magnitude_bit, sign_bit
from epicute.quant.nvfp4 import (
    CastCounters,
    decode_e2m1,
    dequantize_nvfp4,
    quantize_nvfp4,
    quantize_values,
    unpack_nibbles,
)
from epicute.quant.smoothing import Means, centre, delta, sequence_means, split_terms
from epicute.testing.strategies import nvfp4

caches = st.builds(
    lambda page, heads, group, terms: QK4PV8Cache(3, heads, heads * group, page, terms),
    st.builds(
        QK4PV8Page,
        st.sampled_from([32, 64, 128]),
        st.sampled_from([64, 128]),
        st.sampled_from(ORDERS),
    ),
    st.integers(1, 3),
    st.sampled_from([1, 4, 5]),
    st.integers(0, 3),
)


def made(
    cache: QK4PV8Cache, rows: int, seed: int
) -> tuple[torch.Tensor, torch.Tensor, Means | None]:
    """Keys, values, and means where the cache has terms."""
    torch.manual_seed(seed)
    k = torch.randn(rows, cache.kv_heads, cache.page.head_dim) + 2
    v = torch.randn(rows, cache.kv_heads, cache.page.head_dim)
    q = torch.randn(rows, cache.q_heads, cache.page.head_dim) - 1
    means = Means("static", q.mean(0)[None], k.mean(0)[None]) if cache.terms else None
    return k.bfloat16(), v.bfloat16(), means


def same(a: Rows, b: Rows) -> bool:
    pairs = zip(a, b, strict=True)
    return all(
        (x is None and y is None)
        or (
            x is not None
            and y is not None
            and torch.equal(x.view(torch.uint8), y.view(torch.uint8))
        )
        for x, y in pairs
    )


def poisoned(cache: QK4PV8Cache) -> Memory:
    """Memory of NaN everywhere: scales, values and ΔS."""
    memory = cache.allocate()
    memory.records.fill_(0x7F)
    if memory.delta is not None:
        memory.delta.fill_(math.nan)
    return memory


@given(caches, st.integers(0, 2**16 - 1))
def test_what_is_placed_is_fetched(cache: QK4PV8Cache, seed: int) -> None:
    k, v, means = made(cache, 19, seed)
    memory = poisoned(cache)
    slots = torch.randperm(cache.capacity)[:19]
    rows = cache.quantize(k, v, means)
    cache.place(memory, rows, slots)
    assert same(cache.fetch(memory, slots), rows)
    order = torch.randperm(19)
    back = cache.fetch(memory, slots[order])
    assert same(back, Rows(*(None if x is None else x[order] for x in rows)))


@given(caches, st.integers(0, 2**16 - 1))
def test_bytes_lie_where_the_layout_says_and_nothing_else_changes(
    cache: QK4PV8Cache, seed: int
) -> None:
    k, v, means = made(cache, 5, seed)
    memory = cache.allocate()
    memory.records.fill_(0xA5)
    slots = torch.randperm(cache.capacity)[:5]
    rows = cache.quantize(k, v, means)
    cache.place(memory, rows, slots)
    page, wanted = cache.page, torch.full_like(memory.records, 0xA5).numpy()
    codes = unpack_nibbles(rows.codes).numpy().astype(np.int64)
    scales, values = rows.scales.view(torch.uint8).numpy(), rows.values.view(torch.uint8).numpy()
    for row, slot in enumerate(slots.tolist()):
        index, token = divmod(slot, page.page_size)
        for head in range(cache.kv_heads):
            record = wanted[index, head]
            for word in range(page.head_dim // 8):
                bits = 0
                for c in range(8):
                    code = int(codes[row, head, 8 * word + c])
                    bits |= (code & 7) << magnitude_bit(page.order, c)
                    bits |= (code >> 3) << sign_bit(page.order, c)
                start = page.key_row(token) + 4 * word
                record[start : start + 4] = list(bits.to_bytes(4, "little"))
            for block in range(page.blocks):
                record[page.scale_byte(token, block)] = scales[row, head, block]
            for channel in range(page.head_dim):
                record[page.value_byte(token, channel)] = values[row, head, channel]
        if memory.delta is not None:
            flat = memory.delta[index].reshape(-1)
            for head in range(cache.q_heads):
                for term in range(cache.terms):
                    found = flat[page.delta_index(head, term, token, cache.terms)]
                    assert found == rows.delta[row, head, term]  # type: ignore[index]
    assert np.array_equal(memory.records.numpy(), wanted)


@given(st.sampled_from(ORDERS), nvfp4(4, 64))
def test_keys_pack_and_unpack(order: str, drawn: object) -> None:
    codes = torch.from_numpy(drawn.codes)  # type: ignore[attr-defined]
    packed = pack_keys(codes, order)
    assert packed.shape == codes.shape
    assert torch.equal(unpack_keys(packed, order), codes)
    if order == "tcgen05":
        assert torch.equal(packed, codes), "what Blackwell and FlashInfer read"


@given(st.integers(0, 2**16 - 1), st.sampled_from([1, 2]))
def test_rows_are_the_contract_s(seed: int, terms: int) -> None:
    cache = QK4PV8Cache(1, 2, 8, QK4PV8Page(32, 64), terms, k_scale=0.5, v_scale=0.25)
    k, v, means = made(cache, 9, seed)
    assert means is not None
    rows = cache.quantize(k, v, means)
    k_c = centre(k, means.k)
    codes, scales = quantize_nvfp4(k_c, 0.5)
    wanted = Rows(codes, scales, quantize_values(v, 0.25), split_terms(delta(means.q, k_c), terms))
    assert same(rows, wanted)
    keys, values, delta_s = cache.dequantize(rows)
    assert torch.equal(keys, dequantize_nvfp4(codes, scales, 0.5))
    assert (keys - k_c).abs().max() <= k_c.abs().max() / 4
    assert ((values - v.float()).abs() <= v.float().abs() / 16 + 2.0**-12).all()
    assert delta_s is not None
    assert ((delta_s - delta(means.q, k_c)).abs() <= 2.0**-8 * delta_s.abs()).all()


@given(st.integers(0, 2**16 - 1), st.sampled_from([0, 1, 2]))
def test_appending_token_by_token_writes_the_bytes_of_a_prefill(seed: int, terms: int) -> None:
    cache = QK4PV8Cache(2, 2, 4, QK4PV8Page(32, 64), terms)
    k, v, means = made(cache, 12, seed)
    together, apart = cache.allocate(), cache.allocate()
    slots = torch.randperm(64)[:12]
    cache.place(together, cache.quantize(k, v, means), slots)
    for m in torch.randperm(12).tolist():
        one = cache.quantize(k[m : m + 1], v[m : m + 1], means)
        cache.place(apart, one, slots[m : m + 1])
    assert torch.equal(together.records, apart.records)
    assert terms == 0 or torch.equal(together.delta, apart.delta)


def test_frozen_means_of_each_request_serve_its_own_rows() -> None:
    cache = QK4PV8Cache(2, 2, 4, QK4PV8Page(32, 64), 2)
    torch.manual_seed(2)
    q, k, v = torch.randn(20, 4, 64), torch.randn(20, 2, 64), torch.randn(20, 2, 64)
    k[:12] += 10
    k[12:] -= 10
    starts, group = torch.tensor([0, 12, 20]), torch.tensor([0] * 12 + [1] * 8)
    means = sequence_means(q, k, starts)
    whole = cache.quantize(k, v, means, group)
    for request, part in ((0, slice(0, 12)), (1, slice(12, 20))):
        own = Means("sequence", means.q[request : request + 1], means.k[request : request + 1])
        alone = cache.quantize(k[part], v[part], own)
        assert same(Rows(*(x[part] for x in whole if x is not None)), alone)


def test_prefix_pages_under_static_means_are_the_same_bytes() -> None:
    """Two requests with one prefix, prefilled in different chunks, write equal pages."""
    cache = QK4PV8Cache(2, 2, 4, QK4PV8Page(32, 64), 1)
    k, v, means = made(cache, 32, 3)
    memory = cache.allocate()
    cache.place(memory, cache.quantize(k, v, means), torch.arange(32))
    for a, b in ((0, 9), (9, 32)):
        cache.place(memory, cache.quantize(k[a:b], v[a:b], means), torch.arange(32 + a, 32 + b))
    assert torch.equal(memory.records[0], memory.records[1])
    assert torch.equal(memory.delta[0], memory.delta[1])  # type: ignore[index]


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("rows", [1, 31, 32, 33, 127, 128, 129, 300])
def test_qk_05_scales_have_one_pitch_for_writer_and_reader(
    order: str, head_dim: int, rows: int
) -> None:
    cache = QK4PV8Cache(3, 1, 1, QK4PV8Page(128, head_dim, order))
    memory = poisoned(cache)
    k, v, _ = made(cache, rows, rows)
    cache.place(memory, cache.quantize(k, v), torch.arange(rows))
    for slot in range(rows):
        index, token = divmod(slot, 128)
        record = memory.records[index, 0]
        _, scales = quantize_nvfp4(k[slot, 0])
        found = torch.stack(
            [record[cache.page.scale_byte(token, b)] for b in range(head_dim // 16)]
        )
        assert torch.equal(found, scales.view(torch.uint8))


def test_kd_01_unused_slots_keep_their_garbage_to_themselves() -> None:
    cache = QK4PV8Cache(2, 2, 4, QK4PV8Page(32, 64), 2)
    memory = poisoned(cache)
    k, v, means = made(cache, 13, 4)
    rows = cache.quantize(k, v, means)
    slots = torch.tensor([*range(12), -1])
    cache.place(memory, rows, slots)
    for x in cache.dequantize(cache.fetch(memory, slots[:12])):
        assert x is not None
        assert x.isfinite().all()
    assert cache.dequantize(cache.fetch(memory, torch.tensor([13])))[0].isnan().all()


def test_kv_10_padding_rows_write_nowhere() -> None:
    cache = QK4PV8Cache(2, 1, 1, QK4PV8Page(32, 64), 1)
    k, v, means = made(cache, 5, 5)
    rows = cache.quantize(k, v, means)
    memory, alone = cache.allocate(), cache.allocate()
    cache.place(memory, rows, torch.tensor([-1, 7, 64, 2**40 + 17, 40]))
    kept = torch.tensor([1, 4])
    cache.place(alone, Rows(*(x[kept] for x in rows if x is not None)), torch.tensor([7, 40]))
    assert torch.equal(memory.records, alone.records)
    assert torch.equal(memory.delta, alone.delta)  # type: ignore[arg-type]


def test_kv_12_strided_pools_hold_the_same() -> None:
    cache = QK4PV8Cache(3, 2, 2, QK4PV8Page(64, 64), 1)
    k, v, means = made(cache, 30, 6)
    rows, slots = cache.quantize(k, v, means), torch.randperm(192)[:30]
    alone = cache.allocate()
    cache.place(alone, rows, slots)
    layers = Memory(
        torch.zeros(3, 4, 2, cache.page.bytes, dtype=torch.uint8)[:, 1],
        torch.zeros(3, 4, 2, 1, 64, dtype=torch.bfloat16)[:, 1],
    )
    cache.place(layers, rows, slots)
    assert torch.equal(layers.records, alone.records)
    assert torch.equal(layers.delta, alone.delta)  # type: ignore[arg-type]
    assert same(cache.fetch(layers, slots), rows)


def test_a_pool_takes_2_56_times_fewer_bytes_than_bf16_and_2_46_times_with_delta() -> None:
    tokens, bf16 = 5 * 128 * 8, 4 * 128
    plain = QK4PV8Cache(5, 8, 32, QK4PV8Page(128, 128))
    paper = QK4PV8Cache(5, 8, 32, QK4PV8Page(128, 128), terms=1)
    split = QK4PV8Cache(5, 8, 32, QK4PV8Page(128, 128), terms=2)
    for cache, per_token, factor in ((plain, 200, 2.56), (paper, 208, 2.46), (split, 216, 2.37)):
        memory = cache.allocate()
        used = memory.records.nbytes + (0 if memory.delta is None else memory.delta.nbytes)
        assert used == cache.bytes == tokens * per_token
        assert round(tokens * bf16 / used, 2) == factor
        assert bytes_per_token(128, 4, cache.terms) == per_token
    for page_size in (64, 32):
        small = QK4PV8Cache(5, 8, 32, QK4PV8Page(page_size, 128))
        assert small.bytes == 5 * page_size * 8 * 200
    assert bytes_per_token(64) == 100


def test_counters_tell_keys_from_values() -> None:
    cache = QK4PV8Cache(1, 1, 1, QK4PV8Page(32, 64))
    k, v = torch.ones(2, 1, 64), torch.ones(2, 1, 64)
    k[0, 0, 3], k[1, 0, 40], v[0, 0, 0], v[1, 0, 1] = math.nan, 1e4, math.inf, 500.0
    counters = CastCounters.create(), CastCounters.create()
    cache.quantize(k, v, counters=counters)
    found = [[c.nans, c.infinities, c.saturated, c.flushed] for c in counters]
    assert [[x.item() for x in row] for row in found] == [[1, 0, 1, 0], [0, 1, 1, 0]]


def test_qk_11_inputs_are_left_alone() -> None:
    cache = QK4PV8Cache(1, 2, 4, QK4PV8Page(32, 64), 2)
    k, v, means = made(cache, 6, 7)
    assert means is not None
    kept = k.clone(), v.clone(), means.q.clone(), means.k.clone()
    rows = cache.quantize(k, v, means)
    before = Rows(*(x.clone() for x in rows if x is not None))
    slots = torch.arange(6)
    cache.place(cache.allocate(), rows, slots)
    assert all(torch.equal(a, b) for a, b in zip((k, v, means.q, means.k), kept, strict=True))
    assert same(rows, before)
    assert torch.equal(slots, torch.arange(6))


def test_qk_02_qk_03_zeros_stay_zeros() -> None:
    cache = QK4PV8Cache(1, 1, 1, QK4PV8Page(32, 64))
    zero = torch.zeros(3, 1, 64)
    memory = poisoned(cache)
    cache.place(memory, cache.quantize(zero, zero), torch.arange(3))
    keys, values, _ = cache.dequantize(cache.fetch(memory, torch.arange(3)))
    assert (keys == 0).all()
    assert (values == 0).all()


def test_every_code_survives_a_page() -> None:
    codes = torch.arange(256, dtype=torch.uint8).view(8, 1, 32)
    scales = torch.full((8, 1, 4), 0x38, dtype=torch.uint8).view(torch.float8_e4m3fn)
    values = torch.arange(256, dtype=torch.uint8).repeat(2).view(8, 1, 64).view(torch.float8_e4m3fn)
    for order in ORDERS:
        cache = QK4PV8Cache(1, 1, 1, QK4PV8Page(32, 64, order))
        memory = cache.allocate()
        rows = Rows(codes, scales, values, None)
        cache.place(memory, rows, torch.arange(8) * 3)
        assert same(cache.fetch(memory, torch.arange(8) * 3), rows)
        keys, _, _ = cache.dequantize(rows)
        assert torch.equal(keys, decode_e2m1(unpack_nibbles(codes)))


@pytest.mark.parametrize("scale", [0, -1, math.nan, math.inf, 1e-50, 1e300])
def test_kd_18_scales_are_checked_when_the_cache_is_made(scale: float) -> None:
    page = QK4PV8Page(32, 64)
    for value in (scale, torch.tensor(scale, dtype=torch.float64)):
        with pytest.raises(ArgumentError, match="^k_scale"):
            QK4PV8Cache(1, 1, 1, page, k_scale=value)  # type: ignore[arg-type]
        with pytest.raises(ArgumentError, match="^v_scale"):
            QK4PV8Cache(1, 1, 1, page, v_scale=value)  # type: ignore[arg-type]


def test_mistakes_are_refused_by_name() -> None:
    page = QK4PV8Page(32, 64)
    plain, smooth = QK4PV8Cache(2, 2, 4, page), QK4PV8Cache(2, 2, 4, page, 1)
    k, v, means = made(smooth, 3, 8)
    assert means is not None
    other = Means("static", means.q[:, :2], means.k)
    rows, memory = plain.quantize(k, v), plain.allocate()
    slots = torch.arange(3)
    for call, named in (
        (lambda: QK4PV8Cache(0, 2, 4, page), "^q_heads"),
        (lambda: QK4PV8Cache(1, 2, 5, page), "^q_heads"),
        (lambda: QK4PV8Cache(1, 2, 4, page, 4), "^terms"),
        (lambda: plain.quantize(k, v, means), "^means"),
        (lambda: smooth.quantize(k, v), "^means"),
        (lambda: smooth.quantize(k, v, other), "^means"),
        (lambda: plain.quantize(k[:, :1], v), r"^keys\.shape"),
        (lambda: plain.quantize(k, v[:2]), r"^values\.shape"),
        (lambda: plain.place(memory, rows, slots[:2]), "^slots"),
        (lambda: plain.place(memory, rows, torch.zeros(3, dtype=torch.int64)), "^slots: got 2"),
        (lambda: smooth.place(smooth.allocate(), rows, slots), "^rows"),
        (lambda: smooth.place(memory, smooth.quantize(k, v, means), slots), r"^memory\.delta"),
        (lambda: plain.place(smooth.allocate(), rows, slots), r"^memory\.delta"),
        (lambda: plain.fetch(memory, torch.tensor([0, -1])), "^slots"),
        (lambda: plain.fetch(memory, torch.tensor([64])), "^slots"),
        (lambda: plain.pool(Memory(memory.records[:1], None)), r"^memory\.records\.shape"),
    ):
        with pytest.raises(ArgumentError, match=named):
            call()
    assert (memory.records == 0).all()
