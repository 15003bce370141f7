"""E4M3 rows beside a main copy, under a model's page table: layer by layer, scale by scale, page by page."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from epicute.errors import ArgumentError
from epicute.kv import CacheSpec, Fp8Layers, KVCache
from epicute.kv.reference import gather, scatter
from epicute.testing import assert_equal_bits

FP8 = torch.float8_e4m3fn
SPEC = CacheSpec(layers=2, kv_heads=3, head_dim=32, page_size=16, fp8_mirror=True)
PLAIN = replace(SPEC, fp8_mirror=False)
SCALES = (0.02 * (1 + torch.arange(6.0)).reshape(2, 3), 0.3 / (1 + torch.arange(6.0)).reshape(2, 3))


def mirrored(spec: CacheSpec = SPEC, pages: int = 9) -> tuple[KVCache, Fp8Layers]:
    cache = KVCache.paged(spec, 3, 64, pages, scales=SCALES)
    assert cache.fp8 is not None
    return cache, cache.fp8


def rows(count: int, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    k, v = torch.randn(2, count, 3, 32, generator=generator)
    return k.to(dtype), v.to(dtype)


@given(
    st.data(),
    st.sampled_from(["NHD", "HND"]),
    st.sampled_from([torch.bfloat16, torch.float16, torch.float32]),
)
def test_kv_10_rows_are_those_of_the_oracle_that_goes_row_by_row(
    data: st.DataObject, layout: str, dtype: torch.dtype
) -> None:
    """Codes, what was clipped and what was NaN, in any slots, some of which are no place; nothing else changes."""
    spec = replace(SPEC, layout=layout, dtype=dtype)
    _, fp8 = mirrored(spec)
    slots = data.draw(st.lists(st.integers(-2, 9 * 16 + 2), max_size=12, unique=True))
    given_rows = list(rows(len(slots), len(slots), dtype))
    for x in given_rows:
        for kind, value in (("nan", math.nan), ("large", 1e4), ("none", 0.0)):
            if x.numel() and data.draw(st.booleans(), label=kind):
                x.view(-1)[data.draw(st.integers(0, x.numel() - 1))] = value
    fp8.memory.view(torch.uint8).fill_(0x7F)
    wanted = [fp8.memory.clone(), fp8.memory.clone()]
    at = torch.tensor(slots, dtype=torch.int64)
    fp8.write(1, *given_rows, at)
    live = (at >= 0) & (at < 9 * 16)
    for which, (x, scale) in enumerate(zip(given_rows, SCALES, strict=True)):
        pool = wanted[which][1, which]
        pool = pool if layout == "NHD" else pool.transpose(1, 2)
        saturated = scatter(pool, x.float(), at, scale[1])
        mine = (fp8.keys, fp8.values)[which](1)
        assert_equal_bits(mine.contiguous().view(torch.uint8), pool.contiguous().view(torch.uint8))
        assert int(fp8.saturated[1, which]) == saturated
        assert int(fp8.nans[1, which]) == int(x[live].isnan().sum())
        found = fp8.read(1, at)[which]
        assert torch.equal(found.isnan(), gather(pool, at, scale[1]).isnan())
    assert (fp8.memory[0].view(torch.uint8) == 0x7F).all()
    assert not fp8.saturated[0].any()


def test_each_layer_has_its_own_in_the_pages_of_the_table() -> None:
    cache, fp8 = mirrored()
    cache.slots([5], [1])  # so that the next request's pages are not the first
    cache.advance([5], [1])
    slots = cache.slots([20], [2])
    written = [rows(20, layer) for layer in (0, 1)]
    for layer, (k, v) in enumerate(written):
        fp8.write(layer, k, v, slots)
    for layer, pair in enumerate(written):
        for found, x, scale in zip(fp8.read(layer, slots), pair, SCALES, strict=True):
            off = (found - x.float()).abs()
            assert (off <= (x.float().abs() / 16).clamp_min(float(scale[layer].max()) / 512)).all()
            assert off.any()


def test_a_mirror_can_be_made_again_from_its_main_copy() -> None:
    cache, fp8 = mirrored()
    slots = cache.slots([40])
    k, v = rows(40)
    page, token = slots // 16, slots % 16
    cache.keys(0)[page, token], cache.values(0)[page, token] = k, v
    fp8.write(0, k, v, slots)
    before = fp8.memory.clone()
    fp8.memory.view(torch.uint8).zero_()
    fp8.write(0, cache.keys(0)[page, token], cache.values(0)[page, token], slots)
    assert_equal_bits(fp8.memory.view(torch.uint8), before.view(torch.uint8))


def test_the_main_copy_is_as_without() -> None:
    """Sixteen bits, without scales; the counters of the cache are those of the mirror, and go to zero with it."""
    cache, fp8 = mirrored()
    assert cache.keys(1).dtype == torch.bfloat16
    assert cache.k_scale is None
    assert cache.v_scale is None
    assert set(cache.cells(0)) == {"k_cells", "v_cells"}
    assert cache.attention(0)["k_scale"] is None
    k, v = rows(1)
    fp8.write(1, k + 1e4, v, torch.tensor([3]))
    assert cache.saturated.tolist() == [[0, 0], [96, 0]]
    assert fp8.counters(1)["k_cells_saturated"].tolist() == [96]
    cache.reset()
    assert not fp8.saturated.any()


def test_bytes_of_a_token() -> None:
    assert SPEC.token_bytes == PLAIN.token_bytes * 3 // 2
    cache = KVCache.paged(SPEC, 2, 64, 7, scales=SCALES)
    assert cache.nbytes == 7 * 16 * SPEC.token_bytes


def test_pages_come_and_go_for_both_copies() -> None:
    """One table: what is rolled back or freed is so in both, and what others hold stays in both."""
    cache, fp8 = mirrored(pages=4)
    slots = cache.slots([20], [0])
    cache.advance([20], [0])
    k, v = rows(20)
    cache.keys(0)[slots // 16, slots % 16] = k
    fp8.write(0, k, v, slots)
    before = [x.clone() for x in (cache.keys(0)[slots // 16, slots % 16], fp8.read(0, slots)[0])]
    mark = cache.mark()
    more = cache.slots([30], [1])
    fp8.write(0, *rows(30, 1), more)
    cache.roll_back(mark)
    assert (cache.held, cache.free_pages) == ((20, 0, 0), 2)
    again = cache.slots([30], [2])
    assert not set(again.tolist()) & set(slots.tolist())
    fp8.write(0, *rows(30, 2), again)
    for mine, right in zip(
        (cache.keys(0)[slots // 16, slots % 16], fp8.read(0, slots)[0]), before, strict=True
    ):
        assert torch.equal(mine, right)


def test_they_say_what_they_are() -> None:
    cache, fp8 = mirrored()
    assert ", FP8 mirror," in repr(cache)
    assert "FP8" not in repr(KVCache.paged(PLAIN, 3, 64, 9))
    assert repr(fp8) == "Fp8Layers(2 layers, 9 pages of 16 tokens)"
    assert repr(mirrored(replace(SPEC, layout="HND"))[1]) == repr(fp8)


def _written(**changes: Any) -> Any:
    k, v = rows(2)
    found = {"layer": 0, "keys": k, "values": v, "slots": torch.tensor([0, 1]), **changes}
    return lambda: mirrored()[1].write(**found)


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (lambda: replace(SPEC, dtype=FP8), "^dtype: got torch.float8_e4m3fn.*an FP8 mirror"),
        (lambda: replace(SPEC, head_dim=64, int4="mirror"), "^fp8_mirror: got True beside INT4"),
        (lambda: KVCache.paged(SPEC, 3, 64, 9), "^scales: got None, expected K's and V's"),
        (
            lambda: KVCache.paged(PLAIN, 3, 64, 9, scales=(1.0, 1.0)),
            "^scales.*None for torch.bfloat16",
        ),
        (lambda: mirrored()[1].keys(2), "^layer: got 2, expected 0 to 1"),
        (lambda: mirrored()[1].values(-1), "^layer"),
        (_written(keys=rows(3)[0]), "^values.shape"),
        (_written(values=rows(2)[1][..., :16]), r"^values.shape: got \(2, 3, 16\)"),
        (_written(slots=torch.tensor([1, 1])), "^slots: got 1 repeated"),
        (_written(slots=torch.tensor([1])), "^slots"),
        (_written(keys=rows(2)[0].double()), "^keys.dtype"),
    ],
)
def test_mistakes_are_refused_by_name(make: Any, named: str) -> None:
    with pytest.raises(ArgumentError, match=named):
        make()


@pytest.mark.parametrize("bad", [0.0, -1.0, math.nan, math.inf])
def test_kd_18_scales_are_finite_and_positive(bad: float) -> None:
    for scales, named in (((bad, 1.0), "^k_scale"), ((1.0, bad), "^v_scale")):
        with pytest.raises(ArgumentError, match=named):
            KVCache.paged(SPEC, 3, 64, 9, scales=scales)


@pytest.mark.parametrize("layer", [2, -1])
def test_nothing_is_written_where_something_is_wrong(layer: int) -> None:
    _, fp8 = mirrored()
    with pytest.raises(ArgumentError):
        fp8.write(layer, *rows(1), torch.tensor([0]))
    with pytest.raises(ArgumentError):
        fp8.write(0, rows(1)[0], rows(1)[1].double(), torch.tensor([0]))
    assert not fp8.memory.view(torch.uint8).any()
