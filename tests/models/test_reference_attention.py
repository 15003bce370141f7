"""Attention in mixed precision on the CPU against the kernels' algorithm tile by tile, and against attention itself."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from epicute.attention.mixed import MixedSpec
from epicute.attention.reference import attend
from epicute.models.reference_attention import attend_mixed, multiplied_queries
from epicute.testing import Budget, assert_within
from tests.attention.mixed_cases import SPECS, MixedBatch, power_of
from tests.models.one_thread import single as single


def assert_same(found: Tensor, wanted: Tensor) -> None:
    """Powers of two are FP32 here and float64 there: an E4M3 code in a hundred thousand is its neighbour, which a row
    of its own may show; all other rows are the same.
    """
    error = (found - wanted).norm(dim=2) / wanted.norm(dim=2)
    assert float(error.max()) < 0.04
    assert int((error > 1e-5).sum()) <= 1 + error.numel() // 500
    assert float(error.median()) < 1e-6


CASES = {
    "exact16": SPECS["exact16"],
    "fast8": SPECS["fast8"],
    "exact16, window": MixedSpec(8, 2, 128, page=128, terms=1, window=150),
    "fp8, window, P 256": replace(SPECS["fp8, heads of 64, padded"], packed=True),
    "not smoothed": MixedSpec(9, 3, 64, page=64),
}


def run(batch: MixedBatch, i: int) -> Tensor:
    spec = batch.spec
    q, k, v, delta = batch.values(i)
    return attend_mixed(
        q, k, v, delta, scale=spec.scale, window=spec.window, p_scale=float(spec.p_scale)
    )


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize(
    "length", [(1, 1), (1, 128), (3, 129), (130, 130), (65, 300), (200, 515)], ids=str
)
def test_it_is_the_kernels_algorithm(name: str, length: tuple[int, int]) -> None:
    batch = MixedBatch.draw(CASES[name], [length], seed=3, outlier=4.0, mean=0.5, device="cpu")
    assert_same(run(batch, 0), batch.modelled(0)[0])


@settings(max_examples=15)
@given(st.integers(1, 140), st.integers(0, 400), st.sampled_from(sorted(CASES)), st.integers(0, 99))
def test_any_length(queries: int, more: int, name: str, seed: int) -> None:
    batch = MixedBatch.draw(CASES[name], [(queries, queries + more)], seed=seed, device="cpu")
    assert_same(run(batch, 0), batch.modelled(0)[0])


def test_probabilities_alone_cost_what_their_format_does() -> None:
    """Against exact attention on the same codes: E4M3's own rounding, averaged, and nothing beside it."""
    batch = MixedBatch.draw(CASES["exact16"], [(64, 1024)], seed=1, device="cpu")
    wanted, _ = batch.wanted(0)
    error = float((run(batch, 0) - wanted).norm() / wanted.norm())
    assert 0.005 < error < 0.04


@pytest.mark.parametrize("wide", [True, False])
def test_queries_are_multiplied_as_their_format_has_them(wide: bool) -> None:
    q = torch.randn(5, 3, 64) * torch.tensor([1e-3, 1.0, 30.0, 448.0, 1e4])[:, None, None]
    found = multiplied_queries(q, wide)
    if wide:
        assert torch.equal(found, q.half().double())
        return
    scale = power_of(q).double()
    codes = (q.double() / scale).float().to(torch.float8_e4m3fn)
    assert torch.equal(found, codes.double() * scale)
    assert float((q.double() / scale).abs().max()) <= 448


def test_qk_08_few_keys_and_a_query_of_zeros() -> None:
    assert torch.equal(
        multiplied_queries(torch.zeros(1, 1, 64), wide=False), torch.zeros(1, 1, 64).double()
    )
    q, k = torch.ones(3, 2, 64).double(), torch.ones(2, 1, 64).double()
    found = attend_mixed(q, k, k, scale=1.0)  # the first query stands in front of the first key
    assert torch.equal(found[0], torch.zeros(2, 64).double())
    nothing = torch.zeros(0, 1, 64).double()
    assert torch.equal(attend_mixed(q, nothing, nothing, scale=1.0), torch.zeros(3, 2, 64).double())
    assert_within(found[1:], torch.ones(2, 2, 64), Budget(1e-6, 1e-6))


def test_without_a_rounding_it_is_attention() -> None:
    """Logits that are far apart leave probabilities of 1 and 0, which E4M3 holds."""
    q = torch.eye(4, 64)[:, None].double() * 1e4
    k, v = torch.eye(4, 64)[:, None].double(), torch.randn(4, 1, 64).double()
    assert_within(
        attend_mixed(q, k, v, scale=1.0), attend(q, k, v, scale=1.0)[0], Budget(1e-6, 1e-6)
    )
    assert math.isfinite(float(attend_mixed(q * 1e4, k, v, scale=1.0).sum()))
