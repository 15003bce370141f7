"""Scales, gains, residuals and activations against their formulas, to the bit where arithmetic is exact."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from epicute.epilogues import (
    Bias,
    Dequantize,
    Gain,
    Policy,
    ResidualAdd,
    RowScale,
    Store,
    SwiGLU,
)
from epicute.epilogues import reference as ref
from epicute.testing.strategies import matrices, shapes
from tests.epilogues.model import assert_same, near, noise, r32, special_matrix, wide

F32 = torch.float32
SCALES = (0.25, 1.7, 3.0e-5, 2.0**100, 1e-38, 0.0, -1.0)
FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def out_of(policy: Policy, acc: torch.Tensor, **operands: torch.Tensor) -> torch.Tensor:
    return (policy >> Store(F32)).evaluate(acc, **operands)["out"]


class TestDequantize:
    """FP32 products in the documented order, whatever the values are."""

    @pytest.mark.parametrize("activation", ["tensor", "row", None])
    @pytest.mark.parametrize("weight", ["tensor", "column", None])
    def test_products(self, activation: str | None, weight: str | None) -> None:
        acc = special_matrix(40, 56)
        cycle = torch.tensor(SCALES * 8)
        operands = {}
        if activation:
            operands["scale"] = cycle[:1] if activation == "tensor" else cycle[:40]
        if weight:
            operands["weight_scale"] = cycle[1:2] if weight == "tensor" else cycle[:56]
        scale, weight_scale = operands.get("scale"), operands.get("weight_scale")
        if activation == "tensor" and weight:
            both = r32(wide(weight_scale) * wide(scale))
            expected = r32(ref.dequantize(acc, None, both))
        else:
            expected = r32(ref.dequantize(r32(ref.dequantize(acc, None, weight_scale)), scale))
        assert_same(out_of(Dequantize(activation, weight), acc, **operands), expected)

    def test_without_scales_nothing_changes(self) -> None:
        acc = special_matrix(3, 40)
        assert_same(out_of(Dequantize(None, None), acc), acc)
        assert not Dequantize(None, None).operands

    def test_a_scale_may_be_a_number_without_axes(self) -> None:
        acc = noise(2, 16)
        one = out_of(Dequantize("tensor", None), acc, scale=torch.tensor([0.3]))
        assert_same(one, out_of(Dequantize("tensor", None), acc, scale=torch.tensor(0.3)))

    @given(data=st.data(), shape=shapes(most_rows=9))
    def test_any_values(self, data: st.DataObject, shape: tuple[int, int]) -> None:
        acc = torch.from_numpy(data.draw(matrices(shape, non_finite=True)))
        scale = torch.from_numpy(data.draw(matrices(shape[:1])))
        weight_scale = torch.from_numpy(data.draw(matrices(shape[1:])))
        out = out_of(Dequantize("row"), acc, scale=scale, weight_scale=weight_scale)
        first = r32(ref.dequantize(acc, None, weight_scale))
        assert_same(out, r32(ref.dequantize(first, scale)))


@pytest.mark.parametrize("dtype", FLOATS)
class TestOperandsOfAnyFloat:
    """16-bit operands are read value for value, and the arithmetic is FP32."""

    def test_bias(self, dtype: torch.dtype) -> None:
        acc, bias = special_matrix(30, 40), special_matrix(1, 40)[0].to(dtype)
        assert_same(out_of(Bias(), acc, bias=bias), r32(ref.bias(acc, bias)))

    @pytest.mark.parametrize("offset", [0.0, 1.0, -0.5])
    def test_gain(self, dtype: torch.dtype, offset: float) -> None:
        acc, gain = special_matrix(30, 40), noise(40, seed=1).to(dtype)
        factor = r32(wide(gain) + offset)
        assert_same(out_of(Gain(offset), acc, gain=gain), r32(ref.gain(acc, factor)))

    def test_residual(self, dtype: torch.dtype) -> None:
        acc, residual = special_matrix(30, 40), special_matrix(30, 40).flip(1).to(dtype)
        out = out_of(ResidualAdd(), acc, residual=residual)
        assert_same(out, r32(ref.residual_add(acc, residual)))


class TestRowScale:
    @pytest.mark.parametrize("width", [64, 576, 200, 1])
    @pytest.mark.parametrize("eps", [1e-5, 0.0])
    def test_formula(self, width: int, eps: float) -> None:
        acc, sumsq = noise(17, 48), noise(17, -(-width // 64), seed=2).square() * width
        out = out_of(RowScale(width, eps), acc, sumsq=sumsq)
        expected = ref.row_scale(acc, sumsq, width, eps)
        near(out, expected, expected.abs() * 2**-20)

    def test_partials_are_added_left_to_right(self) -> None:
        """1 swallows each 2^-24 that comes after it, and none of their sum that comes before."""
        small = torch.full((1, 8), 2.0**-24)
        forward = torch.cat([torch.ones(1, 1), small], dim=1)
        acc, policy = torch.ones(1, 8), RowScale(576, 0.0)
        first = out_of(policy, acc, sumsq=forward)
        assert_same(first, out_of(policy, acc, sumsq=torch.eye(1, 9)))
        assert not torch.equal(first, out_of(policy, acc, sumsq=forward.flip(1)))

    def test_special_rows(self) -> None:
        """A zero row divides by sqrt(eps), an infinite one becomes zero, NaN stays."""
        sumsq = torch.tensor([[0.0], [float("inf")], [float("nan")], [64.0]])
        out = out_of(RowScale(64, 1e-6), torch.ones(4, 8), sumsq=sumsq)
        near(out[0], torch.full((8,), 1e3), 1e-3)
        assert_same(out[1], torch.zeros(8))
        assert out[2].isnan().all()
        near(out[3], torch.ones(8), 1e-6)


class TestSwiGLU:
    @pytest.mark.parametrize("alpha", [1.0, 1.702])
    @pytest.mark.parametrize("limit", [None, 7.0])
    def test_formula(self, alpha: float, limit: float | None) -> None:
        acc = noise(33, 144, scale=6.0)
        expected = ref.swiglu(acc, alpha, limit)
        exponent = (alpha * acc[:, :72]).abs().double()  # its rounding is a relative error of exp
        tolerance = expected.abs() * (2**-21 + exponent * 2**-23) + 1e-30
        near(out_of(SwiGLU(alpha, limit), acc), expected, tolerance)

    @pytest.mark.parametrize("limit", [None, 7.0])
    def test_special_values(self, limit: float | None) -> None:
        """Every special gate with every special up: the same NaN and infinities.

        Gates so negative that FP32 has no sigmoid for them give zero, or NaN beside an infinite up.
        """
        row = special_matrix(1, 27)[0]
        gate, up = torch.cartesian_prod(row, row).T
        acc = torch.cat([gate, up])[None, :]
        out, expected = out_of(SwiGLU(limit=limit), acc)[0], r32(ref.swiglu(acc, limit=limit))[0]
        lost = (gate < -80) & gate.isfinite()
        assert ((out[lost] == 0) | (out[lost].isnan() & ~up[lost].isfinite())).all()
        halved = gate.abs() == 2.0**-149  # half the least subnormal is zero
        same = ~(lost | halved)
        subnormal = up.abs().nan_to_num(0.0, 0.0).double() * 2.0**-149 + 2.0**-148
        near(out[same], expected[same], (expected.abs() * 2**-20 + subnormal)[same])

    def test_zero_gates_keep_their_sign(self) -> None:
        out = out_of(SwiGLU(), torch.tensor([[0.0, -0.0, 1.0, 1.0]]))
        assert_same(out, torch.tensor([[0.0, -0.0]]))

    def test_first_half_is_the_gate(self) -> None:
        acc = torch.cat([torch.full((1, 24), -30.0), torch.ones(1, 24)], dim=1)
        assert out_of(SwiGLU(), acc).abs().max() < 1e-11
        assert out_of(SwiGLU(), acc.flip(1)).abs().min() > 1


class TestStore:
    @pytest.mark.parametrize("dtype", [*FLOATS, torch.float8_e4m3fn])
    def test_rounds_once_and_passes_the_stored_value_on(self, dtype: torch.dtype) -> None:
        acc = special_matrix(30, 40)
        out = (Store(dtype, name="first") >> Store(F32)).evaluate(acc)
        assert out["first_out"].dtype == dtype
        assert_same(out["first_out"], ref.round_to(acc, dtype))
        assert_same(out["out"], ref.round_to(acc, dtype))

    @given(data=st.data(), dtype=st.sampled_from([*FLOATS, torch.float8_e4m3fn]))
    def test_any_values(self, data: st.DataObject, dtype: torch.dtype) -> None:
        acc = torch.from_numpy(data.draw(matrices((3, 24), non_finite=True, spread=12)))
        assert_same(out_of(Store(dtype, name="first"), acc), ref.store(acc, dtype))
