"""Folding gains against float64, and what is refused or copied."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from epicute.epilogues import RowScale, Store
from epicute.errors import ArgumentError
from epicute.models.gains import fold_gain, is_identity
from epicute.testing import Budget, assert_equal_bits, assert_within, inputs_unchanged
from epicute.weights import Packed, Quantized, Weight

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
ONCE = Budget(2.0**-23, 2.0**-22)
"""A sum and a product, each rounded once in float32."""


def drawn(seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@given(
    st.integers(0, 99),
    st.integers(1, 40),
    st.integers(1, 40),
    st.sampled_from(DTYPES),
    st.sampled_from(DTYPES),
    st.sampled_from((0.0, 1.0)),
)
def test_the_product_is_that_of_float64_rounded(
    seed: int, n: int, k: int, values: torch.dtype, gains: torch.dtype, offset: float
) -> None:
    w, gain = drawn(seed, n, k, dtype=values), drawn(seed + 1, k, dtype=gains)
    with inputs_unchanged(w=w, gain=gain):
        found = fold_gain(Weight(w), gain, offset=offset)
    if is_identity(gain, offset):
        assert found.values is w
        return
    assert found.values.dtype == torch.float32
    assert found.values.data_ptr() != w.data_ptr()
    assert_within(found.values, w.double() * (gain.double() + offset), ONCE)


@given(st.integers(0, 99), st.integers(1, 70), st.sampled_from((0.0, 1.0)))
def test_the_folded_weight_behind_the_row_factor_is_the_norm_before_it(
    seed: int, k: int, offset: float
) -> None:
    """RMSNorm(x; γ) Wᵀ = ρ · x W'ᵀ (FuTransformer 3.2.2)."""
    x, w, gain = drawn(seed, 5, k), drawn(seed + 1, 3, k), drawn(seed + 2, k) * 0.1 + 1.5
    folded = fold_gain(Weight(w), gain, offset=offset)
    wide = x.double()
    normed = wide / (wide.square().mean(1, keepdim=True) + 1e-5).sqrt() * (gain.double() + offset)
    padded = torch.nn.functional.pad(x, (0, -k % 64)).unflatten(1, (-1, 64))
    found = (RowScale(width=k, eps=1e-5) >> Store(torch.float32)).evaluate(
        x.double() @ folded.values.double().T, sumsq=padded.square().sum(2)
    )
    scale = (normed.norm(dim=1, keepdim=True) * w.double().norm(dim=1)).amax()
    error = (found["out"].double() - normed @ w.double().T).abs().max()
    assert error <= 2e-6 * scale


@pytest.mark.parametrize("gain", [0.00390625, 15.8125])
def test_ge_10_one_plus_gain_is_added_in_float32(gain: float) -> None:
    """In bfloat16 the sum would be 1.0 and 16.75."""
    found = fold_gain(
        Weight(torch.ones(2, 8)), torch.full((8,), gain, dtype=torch.bfloat16), offset=1.0
    )
    assert (found.values == 1.0 + gain).all()


def test_a_gain_of_ones_leaves_everything_as_it_is() -> None:
    ones = torch.ones(8, dtype=torch.bfloat16)
    weight = Weight(drawn(0, 4, 8), tied=True)
    quantised = Weight(drawn(0, 4, 8)).quantize("fp8")
    packed = quantised.pack(Store(torch.bfloat16).row_order(4))
    for given_ in (weight, quantised, packed):
        assert fold_gain(given_, ones) is given_
        assert fold_gain(given_, torch.zeros(8), offset=1.0) is given_


def test_a_tied_weight_is_refused_or_copied() -> None:
    w, gain = drawn(0, 4, 8), drawn(1, 8)
    with pytest.raises(ArgumentError, match="lm_head: got a tied weight"):
        fold_gain(Weight(w, "lm_head", tied=True), gain)
    with inputs_unchanged(w=w):
        found = fold_gain(Weight(w, "lm_head", tied=True), gain, copy=True)
    assert_equal_bits(found.values, w * gain)


@pytest.mark.parametrize("format", ["fp8", "bf16"])
@pytest.mark.parametrize("pack", [False, True])
def test_a_quantised_weight_is_refused_or_decoded(format: str, pack: bool) -> None:
    quantised = Weight(drawn(0, 4, 8), "q_proj").quantize(format)
    given_: Quantized | Packed = quantised
    if pack:
        given_ = quantised.pack(Store(torch.bfloat16).row_order(4))
    gain = drawn(1, 8)
    with pytest.raises(ArgumentError, match="q_proj: got .* codes, quantised before"):
        fold_gain(given_, gain)
    with inputs_unchanged(codes=given_.codes.view(torch.uint8), scale=given_.scale):
        found = fold_gain(given_, gain, copy=True)
    assert isinstance(found, Weight)
    assert_within(found.values, quantised.dequantize().double() * gain.double(), ONCE)


def test_what_is_no_gain_or_no_weight_is_refused() -> None:
    weight = Weight(drawn(0, 4, 8))
    with pytest.raises(ArgumentError, match="gain.shape"):
        fold_gain(weight, torch.ones(4))
    with pytest.raises(ArgumentError, match="gain.dtype"):
        fold_gain(weight, torch.ones(8, dtype=torch.float64))
    with pytest.raises(ArgumentError, match="non-finite"):
        fold_gain(weight, torch.full((8,), torch.inf))
    with pytest.raises(ArgumentError, match="weight: got Tensor"):
        fold_gain(drawn(0, 4, 8), torch.ones(8))  # type: ignore[arg-type]
