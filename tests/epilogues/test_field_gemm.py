"""Field failures of GEMM epilogues that show without a GPU; the ids are those of ``test_field_failures``."""

from __future__ import annotations

import math

import pytest
import torch

from epicute import Weight, align_rows, linear
from epicute.epilogues import (
    Bias,
    Columns,
    Composition,
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
    compose,
)
from epicute.epilogues import reference as ref
from epicute.errors import ArgumentError
from epicute.weights import Packed, Quantized
from tests.epilogues.model import assert_same, noise, r32, wide

F32, BF16, FP8 = torch.float32, torch.bfloat16, torch.float8_e4m3fn
ONE = torch.ones(1)


def shards(scales: list[float], rows: int, depth: int, composition: Composition) -> Packed:
    """Merged projections of code 1 everywhere, each with a per-tensor scale of its own."""
    ones = torch.ones(rows, depth).to(FP8)
    parts = [Quantized("fp8", ones, torch.tensor([s])) for s in scales]
    merged = Quantized.concat(parts)
    return merged.pack(composition.row_order(rows * len(scales)))


def test_ge_05_shards_of_a_merged_projection_keep_their_scales() -> None:
    x = torch.ones(4, 512).to(FP8)
    store = Store(BF16)
    fused = Dequantize() >> Columns(q=(64, store), k=(64, store), v=(64, store))
    out = linear(x, shards([1.0, 0.01, 100.0], 64, 512, fused), fused, scale=ONE)
    for name, expected in (("q_out", 512.0), ("k_out", 5.12), ("v_out", 51200.0)):
        assert_same(out[name], torch.full((4, 64), expected).to(BF16), name)
    gated = Dequantize() >> SwiGLU() >> Store(F32)
    found = linear(x, shards([2.0**-9, 2.14], 32, 512, gated), gated, scale=ONE)
    gate, up = 1.0, 512 * 2.14
    expected = gate / (1 + math.exp(-gate)) * up
    assert found.double().sub(expected).abs().max() < 1e-6 * expected


@pytest.mark.parametrize("format", ["fp8", "bf16", "fp16"])
def test_ge_06_a_bias_enters_once_and_before_norm_and_rotation(format: str) -> None:
    """Weights of zero: what comes out is the bias, to the bit, or what is made of it."""
    weight = Weight(torch.zeros(192, 64)).quantize(format)
    bias = noise(192, seed=1).to(BF16)
    plain = (Dequantize() if format == "fp8" else compose()) >> Bias() >> Store(BF16)
    x = noise(5, 64).to(weight.codes.dtype)
    operands = {"scale": ONE} if format == "fp8" else {}
    out = linear(x, weight.pack(plain.row_order(192)), plain, bias=bias, **operands)
    assert_same(out, bias.expand(5, 192))

    before = (Dequantize() >> Bias()) if format == "fp8" else compose(Bias())
    fused = before >> Columns(
        q=(64, HeadNorm(64) >> RoPE(64) >> Store(BF16)),
        k=(64, RoPE(64) >> PlaceKV(64)),
        v=(64, PlaceKV(64)),
    )
    rows = {"positions": torch.arange(5) * 7, "inv_freq": torch.rand(32), "slots": torch.arange(5)}
    gain, cells = noise(64, seed=2), torch.zeros(1, 16, 1, 64).to(BF16)
    out = linear(
        x,
        weight.pack(fused.row_order(192)),
        fused,
        bias=bias,
        **operands,
        **rows,
        q_head_gain=gain,
        k_cells=cells.clone(),
        v_cells=cells.clone(),
    )
    q, k, v = bias.float().expand(5, 192).split(64, dim=1)
    rotary = (rows["positions"], rows["inv_freq"], 64)
    expected = {
        "q_out": ref.rope(ref.head_norm(q, gain, 64, 1e-6), *rotary),
        "k_cells": ref.rope(k, *rotary),
        "v_cells": wide(v),
    }
    for name, value in expected.items():
        found = out[name].double().reshape(-1, 64)[:5]
        assert (found - value).abs().max() <= 2.0**-8 * value.abs().max() + 1e-5, name


def test_ge_07_without_a_bias_is_as_with_a_zero_one() -> None:
    """Nothing is made up for an operand that a composition does not have, nor may one be given."""
    x, packed = noise(5, 64).to(BF16), Weight(noise(48, 64)).quantize("bf16")
    without, with_bias = compose(Store(BF16)), Bias() >> Store(BF16)
    packed = packed.pack(without.row_order(48))
    plain = linear(x, packed, without)
    assert_same(linear(x, packed, with_bias, bias=torch.zeros(48)), plain)
    with pytest.raises(ArgumentError, match="missing bias"):
        linear(x, packed, with_bias)
    with pytest.raises(ArgumentError, match="unknown bias"):
        linear(x, packed, without, bias=torch.zeros(48))


@pytest.mark.parametrize("width", [8, 24, 64, 200, 256])
def test_ge_08_swiglu_with_fp8_codes_of_any_width(width: int) -> None:
    weight = Weight(noise(2 * width, 64, seed=3)).quantize("fp8")
    fused = Dequantize() >> SwiGLU() >> EmitFP8()
    packed = weight.pack(fused.row_order(2 * width))
    x = noise(200, 64).to(FP8)
    scale, out_scale = torch.tensor([0.5]), torch.tensor([0.25])
    out = linear(x, packed, fused, scale=scale, out_scale=out_scale)
    acc = wide(x) @ wide(weight.codes).T
    z = ref.swiglu(ref.dequantize(acc, scale, weight.scale))
    expected = ref.emit_fp8(z, out_scale)
    codes = out["out_fp8"].double()
    assert (codes - expected.codes).abs().max() <= (expected.codes.abs().max() / 8).clamp(min=2**-9)
    assert (codes == expected.codes).double().mean() > 0.99
    assert abs(float(out["amax"]) - expected.amax) <= 1e-4 * expected.amax
    assert int(out["saturated"]) == expected.saturated


@pytest.mark.parametrize("dtype", [BF16, F32])
def test_ge_10_one_plus_gain_is_added_in_float32(dtype: torch.dtype) -> None:
    gain = torch.tensor([0.00390625, 15.8125, 0.0, -1.0] * 16, dtype=dtype)
    expected = torch.tensor([1.00390625, 16.8125, 1.0, 0.0] * 16)
    ones = torch.ones(3, 64)
    out = (Gain(1.0) >> Store(F32)).evaluate(ones, gain=gain)["out"]
    assert_same(out, expected.expand(3, 64))
    normed = HeadNorm(64, eps=0.0, offset=1.0) >> Store(F32)
    assert_same(normed.evaluate(ones, head_gain=gain)["out"], expected.expand(3, 64))
    once = (Gain(1.0) >> Store(BF16)).evaluate(ones, gain=gain)["out"]
    assert_same(once, expected.to(BF16).expand(3, 64))


def test_ge_11_a_gain_of_another_dtype_is_read_as_what_it_is() -> None:
    """The same values in BF16 and FP32 give the same bits; a dtype no kernel takes is refused."""
    x, gain = noise(5, 384).to(BF16).float(), noise(128, seed=5).to(BF16)
    chain = HeadNorm(128) >> Store(BF16)
    assert_same(
        chain.evaluate(x, head_gain=gain.float())["out"], chain.evaluate(x, head_gain=gain)["out"]
    )
    for wrong in (torch.int32, torch.float64, FP8):
        with pytest.raises(ArgumentError, match="head_gain: got torch"):
            chain.evaluate(x, head_gain=gain.to(wrong))


def test_ge_11_inputs_of_any_rank_give_the_same_rows() -> None:
    x = noise(12, 64).to(BF16)
    fused = RowScale(64) >> Store(BF16)
    packed = Weight(noise(32, 64)).quantize("bf16").pack(fused.row_order(32))
    sumsq = x.float().square().sum(1, keepdim=True)
    rows = linear(x, packed, fused, sumsq=sumsq)
    for shape in ((12, 1, 64), (3, 4, 64), (2, 3, 2, 64)):
        out = linear(x.reshape(shape), packed, fused, sumsq=sumsq)
        assert out.shape == (*shape[:-1], 32)
        assert_same(out.reshape(12, 32), rows)
    one = linear(x[0], packed, fused, sumsq=sumsq[:1])
    assert_same(one.reshape(1, 32), rows[:1])


TIE = 4.25 + 2.0**-10
"""Nearest E4M3 is 4.5; by way of BF16 or FP16 it is a tie, and goes to 4.0."""


def test_ge_12_one_rounding_to_fp8_in_every_sink() -> None:
    acc = torch.full((2, 64), TIE)
    cells = torch.zeros(1, 16, 1, 64).to(FP8)
    placed = {"cells": cells, "cell_scale": ONE, "slots": torch.tensor([0, 1])}
    found = {
        "Store": compose(Store(FP8)).evaluate(acc)["out"],
        "EmitFP8": compose(EmitFP8()).evaluate(acc, out_scale=ONE)["out_fp8"],
        "after FP32": (Store(F32) >> EmitFP8()).evaluate(acc, out_scale=ONE)["out_fp8"],
        "PlaceKV": compose(PlaceKV(64, FP8)).evaluate(acc, **placed)["cells"][0, :2],
    }
    for name, codes in found.items():
        assert (codes.double() == 4.5).all(), name
    product = torch.tensor([[4.0, 0.25, 2.0**-9]]) @ torch.tensor([[1.0], [1.0], [0.5]])
    assert float(product) == TIE


def test_ge_12_a_stored_copy_is_what_goes_on_where_one_is_asked_for() -> None:
    """``Store(bf16) >> EmitFP8`` quantises what was stored: two roundings, as it is written."""
    out = (Store(BF16) >> EmitFP8()).evaluate(torch.full((1, 8), TIE), out_scale=ONE)
    assert (out["out"].double() == 4.25).all()
    assert (out["out_fp8"].double() == 4.0).all()
    assert float(out["amax"]) == 4.25


def test_ge_13_the_rounding_contract() -> None:
    """docs/compose.md: FP32 after every operation, one rounding per store, amax of the FP32 value.

    gate = 32 has sigmoid 1, so that 32 * (1 + 2^-8) = 32.125 is halfway between BF16's 32 and 32.25.
    """
    acc = torch.tensor([[32.0] * 8 + [1 + 2.0**-8] * 8])
    fused = SwiGLU() >> EmitFP8()
    scale = torch.tensor([1.0])
    direct = fused.evaluate(acc, out_scale=scale)
    assert float(direct["amax"]) == 32.125
    stored = (SwiGLU() >> Store(BF16) >> EmitFP8()).evaluate(acc, out_scale=scale)
    assert (stored["out"].double() == 32.0).all()
    assert float(stored["amax"]) == 32.0
    sums = (SwiGLU() >> SumSquares() >> Store(BF16)).evaluate(acc)["sumsq_out"]
    assert float(sums) == 8 * 32.0**2
    unrounded = (SwiGLU() >> Store(F32) >> SumSquares()).evaluate(acc)["sumsq_out"]
    assert float(unrounded) == 8 * 32.125**2


def test_ge_13_every_operation_rounds_to_float32() -> None:
    """No fused multiply-add: (1 + 2^-12)² rounds before the sum, which then cancels to 2^-11."""
    x = torch.full((1, 8), 1 + 2.0**-12)
    chain = Gain() >> ResidualAdd() >> Store(F32)
    out = chain.evaluate(x, gain=torch.full((8,), 1 + 2.0**-12), residual=-torch.ones(1, 8))
    assert_same(out["out"], torch.full((1, 8), 2.0**-11))
    assert_same(out["out"], r32(r32(wide(x) * wide(x)) - 1.0))


def test_ge_16_strided_operands_and_inputs_are_read_as_they_show() -> None:
    big = noise(20, 256).to(BF16)
    fused = ResidualAdd() >> Store(BF16)
    weight = noise(64, 32).to(BF16)
    packed = Weight(weight.T).quantize("bf16").pack(fused.row_order(32))
    residual = noise(10, 96).to(BF16)
    for x in (big[:10, 64:128], big[::2, 64:128], big[:10, ::4], align_rows(big[:10, 3:67])):
        for strided in (residual[:, 32:64], residual.T.contiguous().T[:, 32:64]):
            expected = linear(x.contiguous(), packed, fused, residual=strided.contiguous())
            assert_same(linear(x, packed, fused, residual=strided), expected)


def test_ge_17_swiglu_with_limit_and_alpha() -> None:
    acc = torch.tensor([[20.0, -20.0]])
    out = (SwiGLU(limit=7.0) >> Store(F32)).evaluate(acc)["out"]
    assert float(out) == pytest.approx(-48.9553, abs=1e-4)
    other = (SwiGLU(alpha=1.702, limit=7.0) >> Store(F32)).evaluate(acc)["out"]
    assert float(other) == pytest.approx(-7 * 7 / (1 + math.exp(-7 * 1.702)), abs=1e-4)
    free = (SwiGLU() >> Store(F32)).evaluate(acc)["out"]
    assert float(free) == pytest.approx(-400.0, abs=1e-4)
