"""A norm's gain in FP8 codes, where the reader's weights could not absorb it: embedding, rows, epilogues."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from epicute.epilogues import EmitFP8, Gain, Store
from epicute.errors import ArgumentError, UnsupportedError
from epicute.jit import DEFAULT_TARGET, compile
from epicute.models.embedding import EmbeddingPlan, EmbeddingSpec, embedding_kernel, plan_embedding
from epicute.quant import quantize_rows
from epicute.quant.rowwise import LARGEST_GAINED, RowsPlan, RowsSpec, plan_rows, rows_kernel
from epicute.testing import assert_equal_bits
from epicute.testing.poison import assert_guards_intact, guarded
from tests.models.test_embedding import equal_numbers, same
from tests.models.tokens import Call, ids
from tests.quant.ptx import Emulated
from tests.quant.rows import DTYPES, FP8, codes_of, wild

COLUMNS = (8, 72, 576, 2048, 4096, 9000)


def gain_of(width: int, seed: int = 0, device: str = "cpu") -> torch.Tensor:
    """(width,) float32, of either sign, some of them 0."""
    found = torch.randn(width, generator=torch.Generator().manual_seed(seed))
    found[::7] = 0.0
    return found.to(device)


def rows_of(rows: int, columns: int, dtype: torch.dtype, device: str = "cpu") -> torch.Tensor:
    """Any bits, in rows that NaN follow."""
    found = torch.full((rows, columns + 8), torch.nan, dtype=dtype, device=device)[:, :columns]
    return found.copy_(wild(rows, columns, dtype, rows))


def written(rows: int, columns: int, device: str = "cpu") -> tuple[Any, Any]:
    codes = guarded((rows, columns), FP8, (columns + 8, 1), device, name="codes")
    return codes, guarded((rows,), torch.float32, device=device, name="scale")


def check_rows(codes: Any, scale: Any, x: torch.Tensor, gain: torch.Tensor) -> None:
    """By the formula: what is quantised is x * gain in float32."""
    wanted, wanted_scale = quantize_rows(x.cpu().float() * gain.cpu())
    assert_equal_bits(codes_of(codes.tensor).cpu(), codes_of(wanted))
    equal_numbers(scale.tensor.cpu(), wanted_scale, "scale")
    assert_guards_intact(codes, scale)


# --- on the CPU ---


@given(st.integers(0, 5), st.integers(1, 30), st.sampled_from(DTYPES), st.integers(0, 999))
def test_rows_are_quantised_with_their_gain(
    rows: int, vectors: int, dtype: torch.dtype, seed: int
) -> None:
    x, gain = wild(rows, 8 * vectors, dtype, seed), gain_of(8 * vectors, seed)
    codes, scale = written(rows, 8 * vectors)
    plan_rows(8 * vectors, dtype, gain=True, device="cpu").run(
        x, codes.tensor, scale.tensor, gain=gain
    )
    check_rows(codes, scale, x, gain)


@given(st.integers(0, 9), st.integers(1, 40), st.integers(0, 999))
def test_the_embedding_s_codes_have_it_and_its_values_do_not(
    rows: int, vectors: int, seed: int
) -> None:
    """Codes, maximum and counters are those of the epilogue that the layers between have."""
    hidden = 8 * vectors
    table, gain = wild(30, hidden, torch.bfloat16, seed), gain_of(hidden, seed)
    found, plain = (Call(ids(rows, 30, torch.int64, seed), table) for _ in range(2))
    embedding(hidden).run(**found.arguments, gain=gain)
    plan_embedding(hidden, device="cpu").run(**plain.arguments)
    for name in ("x", "sumsq"):
        equal_numbers(found.outputs[name].tensor, plain.outputs[name].tensor, name)
    live = found.ids >= 0
    if not live.any():
        return
    fused = Store(torch.bfloat16) >> Gain() >> EmitFP8()
    wanted = fused.evaluate(table[found.ids[live]].float(), gain=gain, out_scale=2.0**-4)
    codes = found.outputs["codes"].tensor
    equal_numbers(codes[live].float(), wanted["out_fp8"].float(), "codes")
    assert (codes[~live].float() == 0).all()
    assert max(float(found.site.amax_next), 0.0) == float(wanted["amax"])
    assert int(found.site.saturated) == int(wanted["saturated"])
    assert int(found.site.nans) == int(wanted["nans"])


@functools.cache
def embedding(
    hidden: int, dtype: torch.dtype = torch.bfloat16, device: str = "cpu"
) -> EmbeddingPlan:
    return plan_embedding(hidden, dtype, gain=True, device=device)


@functools.cache
def rows_plan(columns: int, dtype: torch.dtype, device: str) -> RowsPlan:
    return plan_rows(columns, dtype, gain=True, device=device)


# --- what is refused ---


def test_a_gain_is_bound_exactly_where_it_was_planned() -> None:
    call, gain = Call(torch.tensor([1]), wild(4, 16, torch.bfloat16)), gain_of(16)
    x, (codes, scale) = wild(2, 16, torch.bfloat16), written(2, 16)
    out = (x, codes.tensor, scale.tensor)
    with pytest.raises(ArgumentError, match="gain: got None"):
        embedding(16).run(**call.arguments)
    with pytest.raises(ArgumentError, match=r"gain: got .*plan with gain=True"):
        plan_embedding(16, device="cpu").run(**call.arguments, gain=gain)
    with pytest.raises(ArgumentError, match="gain: got None"):
        rows_plan(16, torch.bfloat16, "cpu").run(*out)
    with pytest.raises(ArgumentError, match=r"gain: got .*plan with gain=True"):
        plan_rows(16, device="cpu").run(*out, gain=gain)
    for wrong in (gain[:8], gain.double(), torch.zeros(17)[1:]):
        with pytest.raises(ArgumentError, match="gain: got"):
            embedding(16).run(**call.arguments, gain=wrong)
        with pytest.raises(ArgumentError, match="gain: got"):
            rows_plan(16, torch.bfloat16, "cpu").run(*out, gain=wrong)


def test_what_no_kernel_serves() -> None:
    with pytest.raises(ArgumentError, match="gain: got True, expected False without codes"):
        EmbeddingSpec(16, torch.bfloat16, torch.int64, False, True)
    for columns in (12, LARGEST_GAINED + 8):
        with pytest.raises(UnsupportedError, match=f"k: got {columns}.*with a gain"):
            RowsSpec(columns, torch.bfloat16, None, True)


# --- the compiled code ---


@pytest.mark.compile
class TestKernel:
    @pytest.mark.parametrize("columns", [8, 576, 2048, 16384, LARGEST_GAINED])
    def test_no_spills(self, columns: int) -> None:
        rows = compile(rows_kernel(columns, gain=True, target=DEFAULT_TARGET)).report
        assert rows.problems(64) == []
        report = compile(embedding_kernel(columns, gain=True, target=DEFAULT_TARGET)).report
        assert report.problems(0) == []

    @pytest.mark.parametrize("columns", COLUMNS)
    def test_rows_to_the_bit(self, columns: int) -> None:
        dtype, gain = DTYPES[columns % 9 == 0], gain_of(columns)
        kernel = Emulated(rows_kernel(columns, dtype, gain=True, target=DEFAULT_TARGET))
        for rows in (1, 6):
            x, (codes, scale) = rows_of(rows, columns, dtype), written(rows, columns)
            plan = rows_plan(columns, dtype, "cpu")
            arguments = plan.bind(x, codes.tensor, scale.tensor, gain=gain)
            kernel.launch(arguments, x, codes.tensor, scale.tensor, gain)
            check_rows(codes, scale, x, gain)

    @pytest.mark.parametrize("hidden", [8, 72, 576, 1000])
    def test_embedding_to_the_bit(self, hidden: int) -> None:
        dtype, gain = DTYPES[hidden % 9 == 0], gain_of(hidden)
        kernel = Emulated(embedding_kernel(hidden, dtype, gain=True, target=DEFAULT_TARGET))
        for rows in (1, 17):
            table = wild(50, hidden, dtype, rows)
            found, wanted = (Call(ids(rows, 50, torch.int64, rows), table) for _ in range(2))
            arguments = embedding(hidden, dtype).bind(**found.arguments, gain=gain)
            kernel.launch(arguments, *found.memory, gain)
            embedding(hidden, dtype).run(**wanted.arguments, gain=gain)
            same(found, wanted)


# --- the device ---


@pytest.mark.gpu
@pytest.mark.parametrize("columns", [*COLUMNS, 16384, LARGEST_GAINED])
@pytest.mark.parametrize("dtype", DTYPES, ids=["bf16", "fp16"])
def test_the_device_s_bits(columns: int, dtype: torch.dtype) -> None:
    gain = gain_of(columns, device="cuda")
    for rows in (0, 1, 2, 17, 300):
        x, (codes, scale) = rows_of(rows, columns, dtype, "cuda"), written(rows, columns, "cuda")
        rows_plan(columns, dtype, "cuda").run(x, codes.tensor, scale.tensor, gain=gain)
        check_rows(codes, scale, x, gain)
        table, tokens = wild(50, columns, dtype, rows), ids(rows, 50, torch.int64, rows)
        found, wanted = Call(tokens.cuda(), table.cuda()), Call(tokens, table)
        embedding(columns, dtype, "cuda").run(**found.arguments, gain=gain)
        embedding(columns, dtype).run(**wanted.arguments, gain=gain.cpu())
        for name in ("x", "sumsq", "codes"):
            one, other = found.outputs[name].tensor.cpu(), wanted.outputs[name].tensor
            equal_numbers(one.float(), other.float(), name)
            assert_guards_intact(found.outputs[name])
        for name, tensor in wanted.site.state_dict().items():
            assert_equal_bits(getattr(found.site, name).cpu(), tensor, name)
