"""The embedding: rows as stored, their partial sums, their first FP8 copy; on the CPU and in the compiled code."""

from __future__ import annotations

import functools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from epicute.epilogues import EmitFP8, Store, SumSquares
from epicute.errors import ArgumentError
from epicute.jit import DEFAULT_TARGET, compile
from epicute.models import reference
from epicute.models.embedding import (
    PADDING,
    WAVES,
    EmbeddingSpec,
    embedding_kernel,
    plan_embedding,
)
from epicute.models.partials import partial_sums
from epicute.quant import NOT_RUN, DelayedScale
from epicute.testing import Budget, assert_equal_bits, assert_within
from epicute.testing.poison import (
    assert_fully_written,
    assert_guards_intact,
    inputs_unchanged,
)
from tests.models.tokens import INITIAL, Call, ids
from tests.quant.ptx import Emulated
from tests.quant.rows import DTYPES, codes_of, wild

IDS = (torch.int32, torch.int64)
HIDDEN = st.integers(1, 40).map(lambda n: 8 * n)


def run(call: Call) -> None:
    """On the CPU."""
    plan_for(call).run(**call.arguments)  # type: ignore[arg-type]


def plan_for(call: Call):
    return plan_embedding(
        call.table.shape[1],
        call.table.dtype,
        ids_dtype=call.ids.dtype,
        fp8=call.fp8,
        device="cpu",
    )


def equal_numbers(found: torch.Tensor, wanted: torch.Tensor, name: str) -> None:
    """Bits, of NaN that it is one."""
    assert torch.equal(found.isnan(), wanted.isnan()), name
    clean = [x.masked_fill(wanted.isnan(), 0.0).contiguous() for x in (found, wanted)]
    assert_equal_bits(clean[0].reshape(-1), clean[1].reshape(-1), name)


def same(found: Call, wanted: Call) -> None:
    for name, out in wanted.outputs.items():
        assert_guards_intact(found.outputs[name])
        one, other = found.outputs[name].tensor, out.tensor
        if name == "sumsq":
            equal_numbers(one, other, name)
        else:
            assert_equal_bits(one.contiguous(), other.contiguous(), name)
    for name, tensor in wanted.site.state_dict().items():
        assert_equal_bits(getattr(found.site, name), tensor, name)


@given(st.integers(0, 9), HIDDEN, st.integers(1, 9), st.integers(0, 2**16))
def test_against_float64(rows: int, hidden: int, vocabulary: int, seed: int) -> None:
    table = torch.randn(
        vocabulary, hidden, generator=torch.Generator().manual_seed(seed)
    ).bfloat16()
    call = Call(ids(rows, vocabulary, torch.int64, seed), table)
    run(call)
    exact = reference.embedding(call.ids, table)
    assert torch.equal(call.outputs["x"].tensor.double(), exact)
    budget = Budget(norm=1e-6, worst_row=1e-6)
    assert_within(call.outputs["sumsq"].tensor, reference.sum_squares(exact), budget)
    values = call.outputs["codes"].tensor.double() * INITIAL
    assert ((values - exact.clamp(-28, 28)).abs() <= exact.abs() / 16 + INITIAL * 2.0**-10).all()


@given(st.integers(1, 6), HIDDEN, st.sampled_from(DTYPES), st.integers(0, 2**16))
def test_what_an_epilogue_would_have_written(
    rows: int, hidden: int, dtype: torch.dtype, seed: int
) -> None:
    """The first block reads what any other block would have read."""
    table = wild(7, hidden, dtype, seed)
    tokens = torch.arange(rows) % 7
    call = Call(tokens, table)
    run(call)
    chain = SumSquares() >> Store(dtype) >> EmitFP8()
    scale = torch.tensor([INITIAL])
    found = chain.evaluate(table[tokens].float(), out_scale=scale, amax=torch.tensor([NOT_RUN]))
    equal_numbers(call.outputs["sumsq"].tensor, found["sumsq_out"], "sumsq")
    codes = codes_of(found["out_fp8"])
    codes[codes & 0x7F == 0x7F] = 0x7F  # a NaN loses its sign
    assert_equal_bits(codes_of(call.outputs["codes"].tensor), codes)
    assert_equal_bits(call.site.amax_next, found["amax"])
    assert_equal_bits(call.site.saturated, found["saturated"])
    assert_equal_bits(call.site.nans, found["nans"])
    assert_equal_bits(call.outputs["x"].tensor.contiguous(), table[tokens])


@given(st.integers(1, 4), st.integers(1, 200), st.integers(0, 2**16))
def test_partial_sums_are_those_of_the_policy(rows: int, columns: int, seed: int) -> None:
    x = wild(rows, columns, torch.bfloat16, seed)
    chain = SumSquares() >> Store(torch.bfloat16)
    equal_numbers(partial_sums(x), chain.evaluate(x.float())["sumsq_out"], "sumsq")


def test_cg_06_padding_leaves_no_trace() -> None:
    table = torch.randn(9, 72, generator=torch.Generator().manual_seed(0)).half()
    padded = Call(torch.tensor([3, PADDING, 8, PADDING, PADDING]), table)
    live = Call(torch.tensor([3, 8]), table)
    run(padded)
    run(live)
    for name, out in live.outputs.items():
        found = padded.outputs[name].tensor
        assert_equal_bits(found[[0, 2]].contiguous(), out.tensor.contiguous(), name)
        assert (found[[1, 3, 4]].float() == 0).all()
    for name, tensor in live.site.state_dict().items():
        assert_equal_bits(getattr(padded.site, name), tensor, name)
    nobody = Call(torch.tensor([PADDING, PADDING]), table)
    run(nobody)
    assert nobody.site.amax_next.item() == NOT_RUN


@pytest.mark.parametrize("stray", [9, -2, 2**40])
def test_stray_ids_are_refused_before_anything_is_written(stray: int) -> None:
    call = Call(torch.tensor([0, PADDING, stray]), torch.ones(9, 8).bfloat16())
    with pytest.raises(ArgumentError, match=rf"ids: got {stray} in row 2.*0 to 8"):
        run(call)
    assert (call.site.amax_next.item(), call.strays.item()) == (NOT_RUN, 0)


def test_no_rows() -> None:
    call = Call(torch.zeros(0, dtype=torch.int64), torch.ones(2, 8).bfloat16())
    run(call)
    assert call.site.amax_next.item() == NOT_RUN


def test_inputs_stay_and_outputs_are_whole() -> None:
    call = Call(ids(17, 50, torch.int32), wild(50, 136, torch.bfloat16)[:, :128])
    with inputs_unchanged(ids=call.ids, table=call.table, scale=call.site.scale_used):
        run(call)
    assert_guards_intact(*call.outputs.values())
    assert_fully_written(
        call.outputs["x"], (call.ids != PADDING)[:, None] & ~call.outputs["x"].tensor.isnan()
    )


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"ids": torch.zeros(3)}, "ids: got"),
        ({"ids": torch.zeros(3, dtype=torch.int32)}, "ids: got"),
        ({"ids": torch.zeros(1, 3, dtype=torch.int64)}, "ids: got"),
        ({"ids": [1, 2, 3]}, "ids: got list"),
        ({"table": torch.zeros(9, 16).bfloat16()}, "table: got"),
        ({"table": torch.zeros(0, 8).bfloat16()}, "table: got .*at least one row"),
        ({"table": torch.zeros(9, 8)}, "table: got"),
        ({"table": None}, "table: got None"),
        ({"x": torch.zeros(2, 8).bfloat16()}, "x: got"),
        ({"x": torch.zeros(3, 8).half()}, "x: got"),
        ({"sumsq": torch.zeros(3, 2)}, "sumsq: got"),
        ({"strays": torch.zeros(1)}, "strays: got"),
        ({"codes": None}, "codes: got None"),
        ({"codes": torch.zeros(3, 8)}, "codes: got"),
        ({"site": None}, "site: got None"),
        ({"site": torch.ones(1)}, "site: got"),
    ],
)
def test_wrong_arguments_are_refused_by_name(change: dict[str, object], named: str) -> None:
    call = Call(torch.tensor([0, 1, 2]), torch.ones(9, 8).bfloat16())
    with pytest.raises(ArgumentError, match=named):
        plan_for(call).run(**{**call.arguments, **change})  # type: ignore[arg-type]


def test_codes_without_a_plan_for_them_are_refused() -> None:
    call = Call(torch.tensor([0, 1, 2]), torch.ones(9, 8).bfloat16(), fp8=False)
    with pytest.raises(ArgumentError, match="site: .*fp8=True"):
        plan_for(call).run(**call.arguments, site=DelayedScale.create())  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="x: .*apart from table"):
        plan_for(call).run(**{**call.arguments, "x": call.table[:3]})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"hidden": 12}, "hidden: got 12"),
        ({"hidden": 0}, "hidden"),
        ({"dtype": torch.float32}, "dtype"),
        ({"ids_dtype": torch.int16}, "ids_dtype"),
    ],
)
def test_what_no_kernel_serves_is_refused(change: dict[str, object], named: str) -> None:
    spec = {"hidden": 8, "dtype": torch.bfloat16, "ids_dtype": torch.int64, "fp8": True}
    with pytest.raises(ArgumentError, match=named):
        EmbeddingSpec(**{**spec, **change})  # type: ignore[arg-type]


@given(st.integers(1, 2**14))
def test_pieces_cover_a_row(vectors: int) -> None:
    spec = EmbeddingSpec(8 * vectors, torch.bfloat16, torch.int64, True)
    assert spec.octets * 512 >= spec.hidden > (spec.octets - 1) * 512
    assert spec.reach >= vectors - 1


@pytest.mark.compile
class TestKernel:
    @pytest.mark.parametrize("hidden", [8, 576, 4096, 16384])
    @pytest.mark.parametrize("fp8", [False, True])
    def test_no_spills(self, hidden: int, fp8: bool) -> None:
        report = compile(embedding_kernel(hidden, fp8=fp8, target=DEFAULT_TARGET)).report
        assert report.problems(0) == []

    @pytest.mark.parametrize("hidden", [8, 64, 72, 512, 576, 1000])
    @pytest.mark.parametrize("fp8", [False, True], ids=["plain", "fp8"])
    def test_the_compiled_code_gathers_to_the_bit(self, hidden: int, fp8: bool) -> None:
        index, dtype = IDS[hidden % 16 == 0], DTYPES[hidden % 9 == 0]
        for rows in (1, 17):
            table = wild(50, hidden, dtype, rows)
            found, wanted = (Call(ids(rows, 50, index, rows), table, fp8) for _ in range(2))
            emulate(found)
            run(wanted)
            same(found, wanted)
            assert found.strays.item() == 0

    def test_few_blocks_take_many_rows(self) -> None:
        table = wild(50, 520, torch.bfloat16)
        found, wanted = (Call(ids(100, 50, torch.int64), table) for _ in range(2))
        assert emulate(found) == WAVES  # of 25
        run(wanted)
        same(found, wanted)

    @pytest.mark.parametrize("stray", [50, -2, 2**40])
    def test_stray_ids_give_zeros_and_are_counted(self, stray: int) -> None:
        table = wild(50, 520, torch.bfloat16)
        tokens = ids(20, 50, torch.int64)
        found, wanted = Call(tokens.clone(), table), Call(tokens.clone(), table)
        for row in (0, 7, 19):
            found.ids[row], wanted.ids[row] = stray, PADDING
        emulate(found)
        run(wanted)
        same(found, wanted)
        assert found.strays.item() == 3

    def test_a_row_without_a_finite_value_has_no_magnitude(self) -> None:
        table = torch.full((2, 72), torch.nan).bfloat16()
        found = Call(torch.tensor([0, 1]), table)
        emulate(found)
        assert found.site.amax_next.item() == NOT_RUN
        assert found.site.nans.item() == 144


def emulate(call: Call) -> int:
    """Run the compiled code; returns the number of blocks."""
    hidden = call.table.shape[1]
    arguments = plan_for(call).bind(**call.arguments)
    kernel(hidden, call.table.dtype, call.ids.dtype, call.fp8).launch(arguments, *call.memory)
    return arguments[-1]


@functools.cache
def kernel(hidden: int, dtype: torch.dtype, ids_dtype: torch.dtype, fp8: bool) -> Emulated:
    return Emulated(
        embedding_kernel(hidden, dtype, ids_dtype=ids_dtype, fp8=fp8, target=DEFAULT_TARGET)
    )
