"""From checkpoint values to codes: gains, fused projections, strides, refusals."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from epicute.errors import ArgumentError
from epicute.quant.reference import quantize_rows
from epicute.weights import DTYPES, Quantized, Weight, reference

FLOATS = [torch.float32, torch.bfloat16, torch.float16]
shapes = hnp.array_shapes(min_dims=2, max_dims=2, min_side=1, max_side=40)
matrices = shapes.flatmap(
    lambda s: hnp.arrays(np.float32, s, elements=st.floats(-1e4, 1e4, width=32))
)


def raw(codes: torch.Tensor) -> torch.Tensor:
    return codes.contiguous().view(torch.uint8)


def relative_error(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return ((found.double() - wanted).norm() / wanted.norm()).item()


@given(matrices)
def test_fp8_codes_and_scales_are_those_of_the_reference(values: np.ndarray) -> None:
    found = Weight(torch.from_numpy(values)).quantize("fp8")
    codes, scale = quantize_rows(values)
    assert np.array_equal(raw(found.codes).numpy(), codes)
    assert found.scale is not None
    assert np.array_equal(found.scale.numpy(), scale)


@given(matrices, st.sampled_from(["bf16", "fp16"]))
def test_half_formats_round_once(values: np.ndarray, format: str) -> None:
    weight = Weight(torch.from_numpy(values))
    found = weight.quantize(format)
    assert found.scale is None
    assert torch.equal(raw(found.codes), raw(weight.values.to(DTYPES[format])))


@pytest.mark.parametrize("format", list(DTYPES))
def test_dequantize_agrees_with_the_reference(format: str) -> None:
    found = Weight(torch.randn(24, 40)).quantize(format)
    exact = reference.dequantize(found.codes, found.scale)
    assert torch.equal(found.dequantize(), exact.to(torch.float32))
    one = Quantized("fp8", found.codes.to(torch.float8_e4m3fn), torch.tensor([0.3]))
    assert torch.equal(one.dequantize(), reference.dequantize(one.codes, one.scale).float())


def test_a_row_of_zeros_has_scale_one() -> None:
    values = torch.randn(3, 8)
    values[1] = 0
    found = Weight(values).quantize("fp8")
    assert found.scale is not None
    assert found.scale[1] == 1
    assert (raw(found.codes)[1] == 0).all()


@given(matrices, st.sampled_from(FLOATS), st.sampled_from(FLOATS), st.sampled_from([0.0, 1.0]))
def test_ge_11_a_gain_of_any_dtype_folds_alike(
    values: np.ndarray, weight_dtype: torch.dtype, gain_dtype: torch.dtype, offset: float
) -> None:
    weight = Weight(torch.from_numpy(values).to(weight_dtype))
    gain = torch.linspace(-1, 2, values.shape[1]).to(gain_dtype)
    found = weight.fold_gain(gain, offset)
    assert found.values.dtype == torch.float32
    same = weight.fold_gain(gain.to(torch.float32), offset)
    assert torch.equal(found.values, same.values)
    wanted = reference.fold_gain(weight.values, gain, offset)
    tolerance = 2.0**-23 * (wanted.abs() + weight.values.double().abs() * 2) + 1e-40
    assert ((found.values.double() - wanted).abs() <= tolerance).all()


@pytest.mark.parametrize(("w", "factor"), [(0.00390625, 1.00390625), (15.8125, 16.8125)])
def test_ge_10_one_plus_w_is_added_in_float32(w: float, factor: float) -> None:
    """In BF16 the sums would be 1.0 and 16.75."""
    gain = torch.full((4,), w, dtype=torch.bfloat16)
    folded = Weight(torch.ones(3, 4, dtype=torch.bfloat16)).fold_gain(gain, offset=1.0)
    assert folded.values.unique().tolist() == [factor]
    assert gain.unique().tolist() == [w]


def test_folding_commutes_with_the_norm() -> None:
    x, weight = torch.randn(5, 64).double(), Weight(torch.randn(24, 64))
    gain = torch.randn(64)
    folded = weight.fold_gain(gain).values.double()
    wanted = (x * gain) @ weight.values.double().t()
    assert relative_error(x @ folded.t(), wanted) < 1e-6


def test_a_tied_weight_is_not_folded_by_accident() -> None:
    tied = Weight(torch.ones(4, 8), "lm_head", tied=True)
    gain = torch.full((8,), 3.0)
    with pytest.raises(ArgumentError, match="lm_head.*copy=True"):
        tied.fold_gain(gain)
    own = tied.fold_gain(gain, copy=True)
    assert not own.tied
    assert own.name == "lm_head"
    assert tied.values.unique().tolist() == [1.0]
    assert own.values.unique().tolist() == [3.0]
    with pytest.raises(ArgumentError, match="tied"):
        Weight.concat([Weight(torch.ones(4, 8)), tied]).fold_gain(gain)


def test_folding_leaves_weight_and_gain_alone() -> None:
    values, gain = torch.randn(4, 8), torch.randn(8)
    before = values.clone(), gain.clone()
    Weight(values).fold_gain(gain, 1.0).values.zero_()
    assert torch.equal(values, before[0])
    assert torch.equal(gain, before[1])


def test_ge_05_shards_keep_their_scales_before_swiglu_and_in_qkv() -> None:
    x = torch.ones(4, 512)
    shards = [
        Quantized("fp8", torch.ones(16, 512).to(torch.float8_e4m3fn), torch.tensor([s]), n)
        for n, s in (("q", 1.0), ("k", 0.01), ("v", 100.0))
    ]
    fused = Quantized.concat(shards)
    assert fused.name == "q+k+v"
    assert fused.scale is not None
    assert fused.scale.shape == (48,)
    y = (x @ fused.dequantize().t()).to(torch.bfloat16)
    for i, wanted in enumerate((512.0, 5.12, 51200.0)):
        assert y[:, 16 * i : 16 * i + 16].unique().tolist() == [
            torch.tensor(wanted).to(torch.bfloat16).item()
        ]
    gate, up = (
        Quantized("fp8", torch.ones(8, 512).to(torch.float8_e4m3fn), torch.tensor([s]))
        for s in (1.0, 2.14)
    )
    values = Quantized.concat([gate, up]).dequantize()
    assert values[:8].unique().tolist() == [1.0]
    assert values[8:].unique().tolist() == [np.float32(2.14)]


@given(st.lists(st.integers(1, 5), min_size=1, max_size=4), st.booleans())
def test_concat_equals_the_parts(heights: list[int], per_row: bool) -> None:
    parts = []
    for n in heights:
        q = Weight(torch.randn(n, 24)).quantize("fp8")
        parts.append(q if per_row else Quantized("fp8", q.codes, q.scale[:1]))
    fused = Quantized.concat(parts)
    assert torch.equal(fused.dequantize(), torch.cat([p.dequantize() for p in parts]))
    assert torch.equal(raw(fused.codes), torch.cat([raw(p.codes) for p in parts]))


def test_concat_of_weights_quantises_like_its_parts() -> None:
    parts = [Weight(torch.randn(n, 16) * n, f"w{n}") for n in (3, 1, 6)]
    fused = Weight.concat(parts)
    assert fused.name == "w3+w1+w6"
    found = fused.quantize("fp8")
    apart = Quantized.concat([p.quantize("fp8") for p in parts])
    assert torch.equal(raw(found.codes), raw(apart.codes))
    assert torch.equal(found.scale, apart.scale)


def test_concat_of_two_dtypes_loses_nothing() -> None:
    low, high = torch.randn(2, 8).to(torch.bfloat16), torch.randn(3, 8).to(torch.float16)
    fused = Weight.concat([Weight(low), Weight(high)])
    assert torch.equal(fused.values.double(), torch.cat([low.double(), high.double()]))


@pytest.mark.parametrize("format", list(DTYPES))
def test_ge_16_strided_and_transposed_weights_are_read_as_they_show(format: str) -> None:
    big = torch.randn(48, 160)
    gain = torch.randn(300)[::3]
    for view in (big[:, 60:160], big[::2, :100], big[:, :100].contiguous().t().clone().t()):
        weight = Weight(view)
        wanted = Weight(view.clone(memory_format=torch.contiguous_format))
        found = weight.fold_gain(gain).quantize(format)
        expected = wanted.fold_gain(gain.clone()).quantize(format)
        assert found.codes.is_contiguous()
        assert torch.equal(raw(found.codes), raw(expected.codes))
    stored = Weight(big.t()).quantize(format).codes.t()  # codes kept as (K, N)
    shown = Quantized(format, stored, torch.ones(48) if format == "fp8" else None)
    exact = reference.dequantize(stored.clone(), shown.scale)
    assert torch.equal(shown.dequantize().double(), exact)


def test_df_07_new_values_bring_their_own_scale() -> None:
    values = torch.linspace(-0.1, 0.1, 64).reshape(4, 16)
    weight = Weight(values)
    first = weight.quantize("fp8")
    values.copy_(torch.linspace(-6, 6, 64).reshape(4, 16))  # a checkpoint is loaded
    second = weight.quantize("fp8")
    fresh = Weight(values.clone()).quantize("fp8")
    assert torch.equal(second.scale, fresh.scale)
    assert torch.equal(raw(second.codes), raw(fresh.codes))
    assert relative_error(second.dequantize(), values.double()) < 0.04
    assert first.scale is not None
    assert first.scale.max() <= np.float32(0.1) / np.float32(448)


def test_what_is_no_tensor_is_refused_by_name() -> None:
    with pytest.raises(ArgumentError, match=r"^q_proj: got ndarray, expected a torch.Tensor"):
        Weight(np.zeros((2, 2), np.float32), "q_proj")  # type: ignore[arg-type]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("format", list(DTYPES))
def test_broken_values_are_refused_by_name(bad: float, format: str) -> None:
    values = torch.ones(4, 8)
    values[2, 3] = bad
    with pytest.raises(ArgumentError, match="^q_proj: got 1 non-finite"):
        Weight(values, "q_proj").quantize(format)
    with pytest.raises(ArgumentError, match="^gain: got 8 non-finite"):
        Weight(torch.ones(4, 8)).fold_gain(torch.full((8,), bad))


def test_values_beyond_fp16_are_refused() -> None:
    with pytest.raises(ArgumentError, match="^weight as fp16"):
        Weight(torch.full((2, 2), 1e5)).quantize("fp16")


def test_wrong_shapes_and_dtypes_are_refused_by_name() -> None:
    codes = torch.ones(4, 8).to(torch.float8_e4m3fn)
    cases = [
        (lambda: Weight(torch.ones(8), "w"), r"^w\.shape"),
        (lambda: Weight(torch.ones(0, 8), "w"), r"^w\.shape"),
        (lambda: Weight(torch.ones(2, 8).double(), "w"), r"^w\.dtype"),
        (lambda: Weight(codes, "w"), r"^w\.dtype"),
        (lambda: Weight(torch.ones(4, 8)).fold_gain(torch.ones(4)), r"^gain\.shape"),
        (lambda: Weight(torch.ones(4, 8)).fold_gain(torch.ones(8, 1)), r"^gain\.shape"),
        (lambda: Weight(torch.ones(4, 8)).fold_gain(torch.ones(8).double()), r"^gain\.dtype"),
        (lambda: Weight(torch.ones(4, 8)).quantize("int3"), "^format"),
        (lambda: Weight.concat([]), "^weights"),
        (lambda: Weight.concat([Weight(torch.ones(4, 8)), Weight(torch.ones(4, 9))]), "^weights"),
        (lambda: Quantized("fp4", codes, torch.ones(4), "w"), r"^w\.format"),
        (lambda: Quantized("bf16", codes, None, "w"), r"^w\.codes\.dtype"),
        (lambda: Quantized("fp8", codes, None, "w"), r"^w\.scale"),
        (lambda: Quantized("fp8", codes, torch.ones(8), "w"), r"^w\.scale"),
        (lambda: Quantized("fp8", codes, torch.ones(4, 1), "w"), r"^w\.scale"),
        (lambda: Quantized("fp8", codes, torch.ones(4).half(), "w"), r"^w\.scale"),
        (lambda: Quantized("fp8", codes[0], torch.ones(1), "w"), r"^w\.codes\.shape"),
        (lambda: Quantized("bf16", torch.ones(4, 8).bfloat16(), torch.ones(4)), r"\.scale"),
        (
            lambda: Quantized.concat(
                [Quantized("fp8", codes, torch.ones(1)), Quantized("bf16", codes.bfloat16())]
            ),
            "^parts",
        ),
    ]
    for make, named in cases:
        with pytest.raises(ArgumentError, match=named):
            make()
