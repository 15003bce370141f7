"""Row-wise quantisation as a plan: ``quantize_rows``' bits, on the CPU and in the compiled code."""

from __future__ import annotations

import functools

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from epicute.epilogues import Dequantize, RowScale, Store
from epicute.errors import ArgumentError, UnsupportedError
from epicute.jit import DEFAULT_TARGET, compile
from epicute.quant import quantize_rows, reference
from epicute.quant.rowwise import (
    LARGEST_K,
    RowsSpec,
    plan_rows,
    row_factor,
    rows_kernel,
)
from epicute.testing import assert_equal_bits, guarded
from epicute.testing.poison import assert_fully_written, assert_guards_intact
from tests.quant.ptx import Emulated
from tests.quant.rows import DTYPES, FP8, codes_of, outputs, wild

SHAPES = [1, 7, 8, 64, 576, 577, 2048, 2056, 4096, 4100, 9000]
"""Rows of one warp and of blocks, whole and cut vectors."""


@given(st.integers(0, 5), st.integers(1, 70), st.sampled_from(DTYPES), st.integers(0, 2**16))
def test_a_plan_on_the_cpu_is_quantize_rows(
    rows: int, columns: int, dtype: torch.dtype, seed: int
) -> None:
    x = wild(rows, columns, dtype, seed)
    codes, scale = outputs(rows, columns)
    plan_rows(columns, dtype, device="cpu").run(x, codes, scale)
    wanted, wanted_scale = quantize_rows(x)
    assert_equal_bits(codes_of(codes), codes_of(wanted))
    assert_equal_bits(scale, wanted_scale)
    text, text_scale = reference.quantize_rows(x.float().numpy())
    assert np.array_equal(codes_of(codes).numpy(), text)
    assert np.array_equal(scale.numpy(), text_scale)


@given(st.integers(1, 5), st.integers(1, 200), st.integers(0, 2**16))
def test_the_row_factor_goes_into_the_scale(rows: int, columns: int, seed: int) -> None:
    x = torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)).bfloat16()
    wide = torch.zeros(rows, -(-columns // 64) * 64)
    wide[:, :columns] = x
    sumsq = wide.reshape(rows, -1, 64).square().sum(2)
    codes, scale = outputs(rows, columns)
    plan_rows(columns, eps=1e-5, device="cpu").run(x, codes, scale, sumsq)
    wanted, plain = quantize_rows(x)
    assert_equal_bits(codes_of(codes), codes_of(wanted))
    exact = x.double().square().mean(1).add(1e-5).rsqrt()
    assert torch.allclose(scale.double(), plain.double() * exact, rtol=1e-6, atol=0)


@given(st.integers(1, 5), st.integers(1, 200), st.integers(0, 2**16))
def test_the_row_factor_is_that_of_the_policy(rows: int, columns: int, seed: int) -> None:
    sumsq = torch.rand(rows, -(-columns // 64), generator=torch.Generator().manual_seed(seed)) * 64
    chain = Dequantize(activation=None, weight=None) >> RowScale(columns) >> Store(torch.float32)
    found = chain.evaluate(torch.ones(rows, 32), sumsq=sumsq)["out"]
    factor = row_factor(sumsq, columns, 1e-5)
    assert_equal_bits(found, factor[:, None].repeat(1, 32))


def test_df_02_rows_of_zeros_have_the_scale_one() -> None:
    x = torch.zeros(3, 8, dtype=torch.bfloat16)
    x[1] = 7.0
    x[2] = -0.0
    codes, scale = outputs(3, 8)
    plan_rows(8, device="cpu").run(x, codes, scale)
    assert scale.tolist() == [1.0, 0.015625, 1.0]
    assert codes_of(codes)[:, 0].tolist() == [0, 0x7E, 0x80]


def test_df_03_a_broken_value_stays_in_its_place() -> None:
    x = torch.ones(2, 16, dtype=torch.bfloat16)
    x[0, 3], x[0, 5] = torch.nan, -torch.inf
    codes, scale = outputs(2, 16)
    plan_rows(16, device="cpu").run(x, codes, scale)
    assert scale.tolist() == [float(np.float32(1 / 448))] * 2
    found = codes_of(codes)[0].tolist()
    assert (found.pop(5), found.pop(3)) == (0xFE, 0x7F)
    assert set(found) == {0x7E}


def test_ge_16_strided_rows_and_padding() -> None:
    big = wild(4, 96, torch.bfloat16)
    x = big[::2, 16:80]
    codes = guarded((2, 64), FP8, (80, 1))
    scale = guarded((2,), torch.float32)
    plan_rows(64, device="cpu").run(x, codes.tensor, scale.tensor)
    wanted, wanted_scale = quantize_rows(x)
    assert_equal_bits(codes_of(codes.tensor), codes_of(wanted))
    assert_equal_bits(scale.tensor, wanted_scale)
    assert_guards_intact(codes, scale)
    assert_fully_written(scale)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"x": torch.zeros(3, 9, dtype=torch.bfloat16)}, "x: got"),
        ({"x": torch.zeros(3, 8)}, "x: got"),
        ({"x": torch.zeros(3, 8, dtype=torch.bfloat16, device="meta")}, "x: got"),
        ({"x": None}, "x: got None"),
        ({"codes": torch.zeros(2, 8).to(FP8)}, "codes: got"),
        ({"codes": torch.zeros(3, 8)}, "codes: got"),
        ({"scale": torch.zeros(3, 1)}, "scale: got"),
        ({"scale": torch.zeros(6)[::2]}, "scale: got .*contiguous"),
        ({"sumsq": torch.zeros(3, 1)}, "sumsq: got .*eps"),
    ],
)
def test_wrong_arguments_are_refused_by_name(change: dict[str, object], named: str) -> None:
    codes, scale = outputs(3, 8)
    given = {"x": torch.zeros(3, 8, dtype=torch.bfloat16), "codes": codes, "scale": scale}
    with pytest.raises(ArgumentError, match=named):
        plan_rows(8, device="cpu").run(**{**given, **change})  # type: ignore[arg-type]
    codes, scale = outputs(3, 8)
    with pytest.raises(ArgumentError, match="sumsq: got None"):
        plan_rows(8, eps=0.0, device="cpu").run(given["x"], codes, scale)


def test_outputs_apart_from_what_is_read() -> None:
    memory = torch.zeros(3 * 16, dtype=torch.uint8)
    x = memory.view(torch.bfloat16).view(3, 8)
    codes = memory[16:40].view(FP8).view(3, 8)
    with pytest.raises(ArgumentError, match="codes: .*apart from x"):
        plan_rows(8, device="cpu").run(x, codes, torch.zeros(3))


@pytest.mark.parametrize(
    ("given", "error", "named"),
    [
        ((0, torch.bfloat16), UnsupportedError, "k: got 0"),
        ((LARGEST_K + 1, torch.bfloat16), UnsupportedError, "k: got 65537"),
        ((8, torch.float32), ArgumentError, "dtype"),
        ((8, torch.bfloat16, -1.0), ArgumentError, "eps"),
        ((8, torch.bfloat16, float("nan")), ArgumentError, "eps"),
    ],
)
def test_what_no_kernel_serves_is_refused(given: tuple, error: type, named: str) -> None:
    with pytest.raises(error, match=named):
        RowsSpec(*given)


@given(st.integers(1, LARGEST_K))
def test_a_block_holds_its_rows(columns: int) -> None:
    spec = RowsSpec(columns, torch.bfloat16)
    assert spec.threads * spec.vectors * 8 >= columns
    assert spec.threads * (spec.vectors - 1) * 8 < columns
    assert spec.vectors <= (16 if spec.threads == 512 else 8)
    assert spec.threads * spec.rows_of_a_block <= 512


@pytest.mark.compile
class TestKernel:
    @pytest.mark.parametrize("columns", [1, 577, 2048, 16384, 53248, LARGEST_K])
    @pytest.mark.parametrize("eps", [None, 1e-5])
    def test_no_spills(self, columns: int, eps: float | None) -> None:
        report = compile(rows_kernel(columns, eps=eps, target=DEFAULT_TARGET)).report
        assert report.problems(64) == []

    @pytest.mark.parametrize("columns", SHAPES)
    @pytest.mark.parametrize("dtype", DTYPES, ids=["bf16", "fp16"])
    def test_the_compiled_code_quantises_to_the_bit(self, columns: int, dtype: torch.dtype) -> None:
        pitch = -(-columns // 8) * 8 + 8
        plan = plan_rows(columns, dtype, device="cpu")
        for rows in (1, 6):
            x = torch.full((rows, pitch), torch.nan, dtype=dtype)[:, :columns]
            x.copy_(wild(rows, columns, dtype, rows))
            codes = guarded((rows, columns), FP8, (pitch, 1))
            scale = guarded((rows,), torch.float32)
            arguments = plan.bind(x, codes.tensor, scale.tensor)
            emulated(columns, dtype).launch(arguments, x, codes.tensor, scale.tensor)
            wanted, wanted_scale = quantize_rows(x)
            assert_equal_bits(codes_of(codes.tensor), codes_of(wanted))
            assert_equal_bits(scale.tensor, wanted_scale)
            assert_guards_intact(codes, scale)

    @pytest.mark.parametrize("columns", [8, 577, 4096])
    def test_and_the_row_factor(self, columns: int) -> None:
        plan = plan_rows(columns, eps=1e-5, device="cpu")
        x = wild(5, columns, torch.bfloat16, 3)
        x = torch.nn.functional.pad(x, (0, -columns % 8))[:, :columns]
        sumsq = torch.rand(5, -(-columns // 64)) * 64
        (codes, scale), (wanted, wanted_scale) = (outputs(5, columns) for _ in range(2))
        arguments = plan.bind(x, codes, scale, sumsq)
        emulated(columns, torch.bfloat16, 1e-5).launch(arguments, x, codes, scale, sumsq)
        plan.run(x, wanted, wanted_scale, sumsq)
        assert_equal_bits(codes_of(codes), codes_of(wanted))
        assert_equal_bits(scale, wanted_scale)


@functools.cache
def emulated(columns: int, dtype: torch.dtype, eps: float | None = None) -> Emulated:
    return Emulated(rows_kernel(columns, dtype, eps=eps, target=DEFAULT_TARGET))
