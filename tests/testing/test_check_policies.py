"""Every built-in policy's NumPy evaluation against its float64 reference, through the public
``check``.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import strategies as st

from epicute.epilogues import (
    Bias,
    Columns,
    Dequantize,
    EmitFP8,
    Gain,
    HeadNorm,
    PlaceKV,
    ResidualAdd,
    RoPE,
    RowScale,
    Store,
    SumSquares,
    SwiGLU,
)
from epicute.epilogues import reference as ref
from epicute.testing import Budget, Ranges, check

NON_FINITE = Ranges(non_finite=True)


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    """On a GPU every test runs the fused kernel too."""
    return request.param


@pytest.mark.parametrize("activation", ["tensor", "row", None])
@pytest.mark.parametrize("weight", ["tensor", "column", None])
def test_dequantize(activation: str | None, weight: str | None, device: str) -> None:
    def reference(x, **scales):
        return ref.dequantize(x, scales.get("scale"), scales.get("weight_scale"))

    check(Dequantize(activation, weight), reference, examples=30, ranges=NON_FINITE, device=device)


def test_bias(device: str) -> None:
    check(Bias(), lambda x, bias: ref.bias(x, bias), ranges=NON_FINITE, device=device)


@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_gain(offset: float, device: str) -> None:
    check(Gain(offset), lambda x, gain: ref.gain(x, gain, offset), device=device)


@pytest.mark.parametrize("width", [64, 576, 200])
def test_row_scale(width: int, device: str) -> None:
    check(
        RowScale(width, 1e-5), lambda x, sumsq: ref.row_scale(x, sumsq, width, 1e-5), device=device
    )


def test_residual_add(device: str) -> None:
    check(
        ResidualAdd(),
        lambda x, residual: ref.residual_add(x, residual),
        ranges=NON_FINITE,
        device=device,
    )


def test_sum_squares_alone(device: str) -> None:
    check(
        SumSquares() >> Store(torch.float32),
        lambda x: {"out": x, "sumsq_out": ref.sum_squares(x)},
        device=device,
    )


def test_sum_squares_of_the_stored_value(device: str) -> None:
    """The reference rounds from float64 what the policy rounds from float32: the same here, where
    nothing comes before.
    """
    check(
        SumSquares() >> Store(torch.bfloat16),
        lambda x: {"out": x, "sumsq_out": ref.sum_squares(x, torch.bfloat16)},
        device=device,
    )


@pytest.mark.parametrize(("alpha", "limit"), [(1.0, None), (1.702, 7.0)])
def test_swiglu(alpha: float, limit: float | None, device: str) -> None:
    check(SwiGLU(alpha, limit), lambda x: ref.swiglu(x, alpha, limit), device=device)


@pytest.mark.parametrize("style", ["half", "interleaved"])
@pytest.mark.parametrize(("head_dim", "rotary"), [(64, 64), (128, 64), (80, 80), (96, 32)])
def test_rope(style: str, head_dim: int, rotary: int, device: str) -> None:
    check(
        RoPE(head_dim, rotary, style, 1.25),
        lambda x, positions, inv_freq: ref.rope(
            x, positions, inv_freq, head_dim, rotary, style, 1.25
        ),
        columns=[head_dim, 3 * head_dim],
        examples=50,
        device=device,
    )


@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_head_norm(offset: float, device: str) -> None:
    check(
        HeadNorm(64, 1e-6, offset),
        lambda x, head_gain: ref.head_norm(x, head_gain, 64, 1e-6, offset),
        device=device,
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_store(dtype: torch.dtype, device: str) -> None:
    check(Store(dtype), lambda x: x, ranges=NON_FINITE, device=device)


def test_store_fp8(device: str) -> None:
    check(
        Store(torch.float8_e4m3fn),
        lambda x: x,
        ranges=Ranges(limit=1000.0, non_finite=True),
        device=device,
    )


def test_emit_fp8(device: str) -> None:
    def reference(x, out_scale, amax, saturated, nans):
        out = ref.emit_fp8(x, out_scale, float(amax))
        return {
            "out_fp8": x * ref.round_to(1 / out_scale, torch.float32),
            "amax": out.amax,
            "saturated": saturated + out.saturated,
            "nans": nans + out.nans,
        }

    check(EmitFP8(), reference, ranges=Ranges(limit=1000.0, non_finite=True), device=device)


def test_emit_fp8_passes_the_stored_value_on(device: str) -> None:
    """Under a power of two both texts see the same quotient, so that no code can flip."""

    def reference(x, out_scale):
        out = ref.emit_fp8(x, out_scale)
        counters = {"amax": out.amax, "saturated": out.saturated, "nans": out.nans}
        return {"out_fp8": out.codes, "out": out.value, **counters}

    powers = st.sampled_from([2.0**-3, 1.0, 2.0**4]).map(lambda s: torch.tensor([s]))
    start = {"amax": torch.zeros(1)} | {
        name: torch.zeros(1, dtype=torch.int64) for name in ("saturated", "nans")
    }
    operands = {name: lambda shape, zero=zero: st.just(zero) for name, zero in start.items()}
    ranges = Ranges(limit=1000.0, operands={"out_scale": lambda shape: powers, **operands})
    check(EmitFP8() >> Store(torch.bfloat16), reference, ranges=ranges, device=device)


def test_place_kv(device: str) -> None:
    check(
        PlaceKV(64),
        lambda x, slots, cells: ref.place_kv(x, slots, cells, torch.float64).cells,
        device=device,
    )


def test_place_kv_fp8(device: str) -> None:
    def reference(x, slots, cells, cell_scale, cells_saturated, cells_nans):
        placed = ref.place_kv(x, slots, cells, torch.float8_e4m3fn, cell_scale)
        return {
            "cells": ref.place_kv(x, slots, cells, torch.float64, cell_scale).cells,
            "cells_saturated": cells_saturated + placed.saturated,
            "cells_nans": cells_nans + placed.nans,
        }

    ranges = Ranges(limit=1000.0, non_finite=True)
    check(PlaceKV(64, torch.float8_e4m3fn), reference, ranges=ranges, device=device)


def test_residual_chain(device: str) -> None:
    """One epilogue writes h, its sums of squares and the first FP8 copy."""
    chain = ResidualAdd() >> SumSquares() >> Store(torch.float32) >> EmitFP8()

    def reference(x, residual, out_scale, amax, saturated, nans):
        h = ref.residual_add(x, residual)
        out = ref.emit_fp8(h, out_scale, float(amax))
        return {
            "out": h,
            "sumsq_out": ref.sum_squares(h),
            "out_fp8": h * ref.round_to(1 / out_scale, torch.float32),
            "amax": out.amax,
            "saturated": saturated + out.saturated,
            "nans": nans + out.nans,
        }

    check(chain, reference, device=device)


def test_fused_qkv(device: str) -> None:
    chain = Dequantize("row") >> Columns(
        q=(192, RoPE(64) >> Store(torch.bfloat16)),
        k=(64, HeadNorm(64) >> RoPE(64) >> PlaceKV(64)),
        v=(64, PlaceKV(64)),
    )

    def reference(
        x, scale, weight_scale, positions, inv_freq, slots, k_head_gain, k_cells, v_cells
    ):
        q, k, v = ref.dequantize(x, scale, weight_scale).split([192, 64, 64], dim=1)
        k = ref.rope(ref.head_norm(k, k_head_gain, 64, 1e-6), positions, inv_freq, 64)
        return {
            "q_out": ref.rope(q, positions, inv_freq, 64),
            "k_cells": ref.place_kv(k, slots, k_cells, torch.float64).cells,
            "v_cells": ref.place_kv(v, slots, v_cells, torch.float64).cells,
        }

    # Scales, each up to 64, multiply: angles turn values of up to 2.6e5.
    check(
        chain,
        reference,
        ranges=Ranges(limit=8.0),
        budget=Budget(0.02, 0.02, floor=1.0),
        device=device,
    )
