"""The same bits on a CUDA device, and the roll inside a CUDA graph."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from epicute.quant import DelayedScale, cast_e4m3, inverse, quantize_rows, scale_for

pytestmark = pytest.mark.gpu


def patterns(count: int = 1 << 20) -> torch.Tensor:
    """Random FP32 bit patterns, NaNs and subnormals among them."""
    bits = np.random.default_rng(0).integers(0, 2**32, count, np.uint32)
    return torch.from_numpy(bits.view(np.float32))


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.cpu().view(torch.uint8), b.cpu().view(torch.uint8))


def test_casts_have_the_same_bits() -> None:
    x = patterns()
    assert same(cast_e4m3(x), cast_e4m3(x.cuda()))
    near = (x.view(torch.int32) % 2**20).float() / 1024
    assert same(cast_e4m3(near), cast_e4m3(near.cuda()))


def test_scales_and_inverses_have_the_same_bits() -> None:
    amax = patterns().abs().nan_to_num(1.0, 1.0)
    scale = scale_for(amax)
    assert same(scale, scale_for(amax.cuda()))
    assert same(inverse(scale), inverse(scale.cuda()))


def test_rows_have_the_same_bits() -> None:
    x = patterns().view(1024, 1024)
    for here, there in zip(quantize_rows(x), quantize_rows(x.cuda()), strict=True):
        assert same(here, there)


@pytest.mark.parametrize("margin", [0, 2])
def test_a_captured_invocation_replays_like_the_eager_one(margin: int) -> None:
    state = DelayedScale.create("cuda", history=4, margin=margin)
    eager = DelayedScale.create("cpu", history=4, margin=margin)
    x = torch.zeros(1024, device="cuda")
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):  # warm-up: a site that does not run leaves the state alone
        state.roll()
        state.quantize(x[:0])
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        state.roll()
        codes, scale = state.quantize(x)
    values = torch.randn(12, 1024) * torch.logspace(-3, 3, 12)[:, None]
    values[5] = 0
    values[7, 3] = torch.nan
    values[8, 4] = torch.inf
    for row in values:
        x.copy_(row)
        graph.replay()
        eager.roll()
        wanted, wanted_scale = eager.quantize(row)
        assert same(codes, wanted)
        assert same(scale, wanted_scale)
    for name, tensor in eager.state_dict().items():
        assert torch.equal(getattr(state, name).cpu(), tensor), name


def test_roll_does_not_wait_for_the_device() -> None:
    state = DelayedScale.create("cuda")
    state.quantize(torch.randn(64, device="cuda"))
    torch.cuda.set_sync_debug_mode("error")
    try:
        state.roll()
    finally:
        torch.cuda.set_sync_debug_mode("default")
