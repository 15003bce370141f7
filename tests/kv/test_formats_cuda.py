"""The same bytes on a CUDA device as on the host, from the rotation to the page."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from epicute.kv.int4 import Int4Cache, quantize_row
from epicute.kv.qk4pv8 import QK4PV8Cache
from epicute.layouts.qk4pv8 import ORDERS, QK4PV8Page
from epicute.quant.hadamard import rotate
from epicute.quant.nvfp4 import CastCounters, encode_e2m1, quantize_nvfp4, quantize_values
from epicute.quant.smoothing import Means, centre, delta, sequence_means

pytestmark = pytest.mark.gpu


def patterns(*shape: int) -> torch.Tensor:
    """Random FP32 bit patterns, NaNs, infinities and subnormals among them."""
    bits = np.random.default_rng(0).integers(0, 2**32, shape, np.uint32)
    return torch.from_numpy(bits.view(np.float32))


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.cpu().view(torch.uint8), b.cpu().view(torch.uint8))


@pytest.mark.parametrize("k_scale", [1.0, 0.3, 2.0**-20])
def test_nvfp4_has_the_same_bits(k_scale: float) -> None:
    noise = torch.randn(4096, 128) * torch.logspace(-6, 6, 4096)[:, None]
    for x in (patterns(8192, 128), noise, noise.bfloat16()):
        here, there = CastCounters.create(), CastCounters.create("cuda")
        found, wanted = quantize_nvfp4(x.cuda(), k_scale, there), quantize_nvfp4(x, k_scale, here)
        assert same(found[0], wanted[0])
        assert same(found[1], wanted[1])
        assert same(there.flushed, here.flushed)
        assert same(there.saturated, here.saturated)
        assert same(quantize_values(x.cuda(), k_scale), quantize_values(x, k_scale))
    assert same(encode_e2m1(patterns(1 << 20).cuda()), encode_e2m1(patterns(1 << 20)))


@pytest.mark.parametrize("width", [16, 64, 128])
def test_rotated_int4_rows_have_the_same_bits(width: int) -> None:
    x = (torch.randn(8192, 128) * torch.logspace(-5, 5, 8192)[:, None]).bfloat16()
    assert same(rotate(x.cuda(), width), rotate(x, width))
    for rows in (rotate(x, width), patterns(8192, 128)):
        found, wanted = quantize_row(rows.cuda()), quantize_row(rows)
        assert same(found[0], wanted[0])
        assert same(found[1], wanted[1])


def test_int4_pages_have_the_same_bytes() -> None:
    cache = Int4Cache.create(6, 64, 4, 128)
    k, v = torch.randn(2, 200, 4, 128).bfloat16()
    slots = torch.randperm(384)[:200]
    here, there = cache.allocate(), cache.allocate("cuda")
    cache.write(here, k, v, slots)
    cache.write(there, k.cuda(), v.cuda(), slots.cuda())
    assert same(there, here)
    for found, wanted in zip(cache.read(there, slots.cuda()), cache.read(here, slots), strict=True):
        assert same(found, wanted)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("page_size", [32, 128])
def test_qk4pv8_pages_have_the_same_bytes(order: str, page_size: int) -> None:
    cache = QK4PV8Cache(4, 2, 8, QK4PV8Page(page_size, 128, order), 2)
    q, k, v = torch.randn(100, 8, 128), torch.randn(100, 2, 128) + 5, torch.randn(100, 2, 128)
    means = sequence_means(q, k)
    there_means = Means("sequence", means.q.cuda(), means.k.cuda())
    slots = torch.randperm(4 * page_size)[:100]
    here, there = cache.allocate(), cache.allocate("cuda")
    cache.place(here, cache.quantize(k, v, means), slots)
    cache.place(there, cache.quantize(k.cuda(), v.cuda(), there_means), slots.cuda())
    assert same(there.records, here.records)
    # Sums may end in another order; the contract allows 1e-6 of their terms.
    k_c = centre(k, means.k)
    found = delta(there_means.q, k_c.cuda()).cpu()
    bound = 1e-6 * delta(means.q.abs(), k_c.abs())
    assert ((found - delta(means.q, k_c)).abs() <= bound).all()
