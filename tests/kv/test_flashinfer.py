"""FlashInfer's NVFP4 layout: keys cross bit for bit, values are rounded once more."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from epicute.errors import ArgumentError
from epicute.kv.flashinfer import FlashInferNVFP4, export_rows, import_rows, interleaved_scale
from epicute.kv.qk4pv8 import QK4PV8Cache
from epicute.layouts.qk4pv8 import ORDERS, QK4PV8Page
from epicute.quant.nvfp4 import (
    CastCounters,
    dequantize_nvfp4,
    dequantize_values,
    quantize_nvfp4,
    quantize_values,
)
from epicute.quant.smoothing import Means, centre, lse_shift

HEADS = 2


def theirs(
    dim: int,
    page: int = 16,
    layout: str = "NHD",
    interleaved: bool = False,
    scales: tuple[float, float] = (1.0, 1.0),
    pages: int = 4,
) -> FlashInferNVFP4:
    """Their cache, with bytes that nothing may read."""

    def tensor(width: int, fill: int) -> torch.Tensor:
        shape = (pages, page, HEADS, width) if layout == "NHD" else (pages, HEADS, page, width)
        return torch.full(shape, fill, dtype=torch.uint8)

    fp8 = torch.float8_e4m3fn
    return FlashInferNVFP4(
        tensor(dim // 2, 0xFF),
        tensor(dim // 2, 0xFF),
        tensor(dim // 16, 0x7F).view(fp8),
        tensor(dim // 16, 0x7F).view(fp8),
        *scales,
        layout=layout,
        interleaved=interleaved,
    )


def fill(cache: FlashInferNVFP4, k: torch.Tensor, v: torch.Tensor, slots: torch.Tensor) -> None:
    """Write rows as the format is described, a scale at a time."""
    k_codes, k_scales = quantize_nvfp4(k, cache.k_scale)
    v_codes, v_scales = quantize_nvfp4(v, cache.v_scale)
    blocks = k_scales.shape[-1]
    for row, slot in enumerate(slots.tolist()):
        page, token = divmod(slot, cache.page_size)
        for head in range(HEADS):
            at = (page, token, head) if cache.layout == "NHD" else (page, head, token)
            cache.k[at] = k_codes[row, head]
            cache.v[at] = v_codes[row, head]
            cache.k_scales.view(torch.uint8)[at] = k_scales.view(torch.uint8)[row, head]
            for block in range(blocks):
                line, column = token, block
                if cache.interleaved:
                    flat = token // 4 * 4 * blocks + block * 4 + token % 4
                    line, column = divmod(flat, blocks)
                at = (page, line, head) if cache.layout == "NHD" else (page, head, line)
                cache.v_scales.view(torch.uint8)[at][column] = v_scales.view(torch.uint8)[
                    row, head, block
                ]


@pytest.mark.parametrize("blocks", [4, 8])
@pytest.mark.parametrize("page", [4, 16, 64])
def test_interleaved_scales_are_a_bijection_and_the_permute_of_their_quantiser(
    page: int, blocks: int
) -> None:
    token, block = np.indices((page, blocks))
    row, column = interleaved_scale(token, block, blocks)
    assert np.array_equal(np.sort((row * blocks + column).ravel()), np.arange(page * blocks))
    # (tokens / 4, 4, 4, blocks / 4) with axes (0, 2, 3, 1), as they build it from natural order.
    natural = torch.arange(page * blocks).view(page // 4, 4, 4, blocks // 4)
    built = natural.permute(0, 2, 3, 1).reshape(page, blocks).numpy()
    assert np.array_equal(built[row, column], np.arange(page * blocks).reshape(page, blocks))


cases = st.fixed_dictionaries(
    {
        "dim": st.sampled_from([64, 128]),
        "page": st.sampled_from([16, 32, 64]),
        "layout": st.sampled_from(["NHD", "HND"]),
        "interleaved": st.booleans(),
        "scales": st.sampled_from([(1.0, 1.0), (0.3, 0.07), (2.0, 0.5)]),
    }
)


@given(cases, st.sampled_from(ORDERS), st.sampled_from([32, 128]), st.integers(0, 2**16 - 1))
def test_rows_are_imported_from_any_page_size(
    case: dict, order: str, page_size: int, seed: int
) -> None:
    torch.manual_seed(seed)
    source = theirs(**case)
    rows = 11
    k, v = torch.randn(2, rows, HEADS, case["dim"])
    slots = torch.randperm(source.capacity)[:rows]
    fill(source, k, v, slots)
    page = QK4PV8Page(page_size, case["dim"], order)
    cache = QK4PV8Cache(2, HEADS, 4, page, 0, source.k_scale, 8 * source.v_scale)
    memory, place = cache.allocate(), torch.randperm(cache.capacity)[:rows]
    counters = CastCounters.create()
    import_rows(source, slots, cache, memory, place, counters)
    found = cache.fetch(memory, place)
    codes, scales = quantize_nvfp4(k, source.k_scale)
    assert torch.equal(found.codes, codes)
    assert torch.equal(found.scales.view(torch.uint8), scales.view(torch.uint8))
    there = dequantize_nvfp4(*quantize_nvfp4(v, source.v_scale), source.v_scale)
    wanted = quantize_values(there, cache.v_scale)
    assert torch.equal(found.values.view(torch.uint8), wanted.view(torch.uint8))
    assert counters.saturated.item() == counters.nans.item() == 0


@given(cases, st.sampled_from(ORDERS), st.integers(0, 2**16 - 1))
def test_exported_keys_come_back_bit_for_bit(case: dict, order: str, seed: int) -> None:
    torch.manual_seed(seed)
    target = theirs(**case)
    cache = QK4PV8Cache(
        2, HEADS, 4, QK4PV8Page(32, case["dim"], order), 0, target.k_scale, target.v_scale
    )
    k, v = torch.randn(2, 9, HEADS, case["dim"])
    memory, slots = cache.allocate(), torch.randperm(64)[:9]
    rows = cache.quantize(k, v)
    cache.place(memory, rows, slots)
    place = torch.randperm(target.capacity)[:9]
    export_rows(cache, memory, slots, target, place)
    wanted = theirs(**case)
    fill(wanted, k, dequantize_values(rows.values, cache.v_scale), place)
    for name in ("k", "v", "k_scales", "v_scales"):
        found, expected = (getattr(x, name).view(torch.uint8) for x in (target, wanted))
        assert torch.equal(found, expected), name
    again = cache.allocate()
    import_rows(target, place, cache, again, slots)
    back = cache.fetch(again, slots)
    assert torch.equal(back.codes, rows.codes)
    assert torch.equal(back.scales.view(torch.uint8), rows.scales.view(torch.uint8))


def test_values_lose_one_rounding_each_way() -> None:
    torch.manual_seed(0)
    source = theirs(128, scales=(1.0, 0.01))
    v = torch.randn(40, HEADS, 128)
    fill(source, v, v, torch.arange(40))
    cache = QK4PV8Cache(1, HEADS, HEADS, QK4PV8Page(64, 128), 0, 1.0, 8 * 0.01)
    memory = cache.allocate()
    import_rows(source, torch.arange(40), cache, memory, torch.arange(40))
    _, values, _ = cache.dequantize(cache.fetch(memory, torch.arange(40)))
    there = dequantize_nvfp4(*quantize_nvfp4(v, source.v_scale), source.v_scale)
    assert ((values - there).abs() <= there.abs() / 16 + cache.v_scale * 2.0**-10).all()


def test_smoothed_keys_export_what_attention_cannot_tell_apart() -> None:
    torch.manual_seed(1)
    cache = QK4PV8Cache(1, HEADS, 4, QK4PV8Page(64, 64), 2)
    q, k, v = torch.randn(5, 4, 64), torch.randn(50, HEADS, 64) + 4, torch.randn(50, HEADS, 64)
    means = Means("static", torch.randn(1, 4, 64), k.mean(0)[None])
    memory = cache.allocate()
    cache.place(memory, cache.quantize(k, v, means), torch.arange(50))
    target = theirs(64)
    export_rows(cache, memory, torch.arange(50), target, torch.arange(50))
    codes, scales = target.k.view(-1, HEADS, 32)[:50], target.k_scales.view(torch.uint8)
    scales = scales.view(-1, HEADS, 4)[:50].view(torch.float8_e4m3fn)
    exported = dequantize_nvfp4(codes, scales)
    assert torch.equal(exported, dequantize_nvfp4(*quantize_nvfp4(centre(k, means.k))))

    def lse(keys: torch.Tensor) -> torch.Tensor:
        wide = keys.repeat_interleave(2, dim=1).double()
        return torch.logsumexp(torch.einsum("mhd,nhd->mhn", q.double(), wide) / 8, -1)

    shift = lse_shift(q, means.k, 1 / 8).double()
    assert ((lse(exported) + shift) - lse(exported + means.k)).abs().max() < 1e-4


def test_padding_is_skipped_on_the_way_in_and_out() -> None:
    source = theirs(64)
    k, v = torch.randn(2, 3, HEADS, 64)
    fill(source, k, v, torch.arange(3))
    cache = QK4PV8Cache(1, HEADS, HEADS, QK4PV8Page(32, 64))
    memory = cache.allocate()
    import_rows(source, torch.arange(3), cache, memory, torch.tensor([-1, 4, 32]))
    alone = cache.allocate()
    import_rows(source, torch.tensor([1]), cache, alone, torch.tensor([4]))
    assert torch.equal(memory.records, alone.records)
    target, untouched = theirs(64), theirs(64)
    export_rows(cache, memory, torch.tensor([4, 4, 4]), target, torch.tensor([-1, 9, 64]))
    changed = (target.k != untouched.k).any(-1).any(-1).reshape(-1)
    assert changed.nonzero()[:, 0].tolist() == [9]


def test_mistakes_are_refused_by_name() -> None:
    source, cache = theirs(64), QK4PV8Cache(1, HEADS, 4, QK4PV8Page(32, 64))
    memory, one = cache.allocate(), torch.tensor([0])
    smooth = QK4PV8Cache(1, HEADS, 4, QK4PV8Page(32, 64), 1)
    wide = QK4PV8Cache(1, HEADS, 4, QK4PV8Page(32, 128))
    scaled = QK4PV8Cache(1, HEADS, 4, QK4PV8Page(32, 64), k_scale=2.0)
    parts = source.k, source.v, source.k_scales, source.v_scales
    for call, named in (
        (lambda: import_rows(source, one, wide, wide.allocate(), one), "^theirs"),
        (lambda: import_rows(source, one, scaled, memory, one), r"^theirs\.k_scale"),
        (lambda: import_rows(source, one, smooth, smooth.allocate(), one), r"^cache\.terms"),
        (lambda: import_rows(source, -one - 1, cache, memory, one), "^their_slots"),
        (lambda: import_rows(source, one, cache, memory, one), r"^theirs\.k_scales"),
        (lambda: export_rows(cache, memory, one, theirs(128), one), "^theirs"),
        (lambda: export_rows(cache, memory, one - 1, source, one), "^slots"),
        (lambda: FlashInferNVFP4(*parts, layout="THD"), "^layout"),
        (lambda: FlashInferNVFP4(*parts, v_scale=0.0), "^v_scale"),
        (lambda: FlashInferNVFP4(*parts[:3], source.v_scales[..., :2]), "^v_scales"),
        (lambda: FlashInferNVFP4(source.k.float(), *parts[1:]), "^k: got"),
        (lambda: FlashInferNVFP4(source.k[0], *parts[1:]), r"^k\.shape"),
        (lambda: theirs(64, page=6, interleaved=True), "^interleaved"),
        (lambda: theirs(32, interleaved=True), "^interleaved"),
    ):
        with pytest.raises(ArgumentError, match=named):
            call()
    assert (memory.records == 0).all()
