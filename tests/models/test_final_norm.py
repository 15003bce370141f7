"""The final norm of selected rows, on the CPU and in the compiled code."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from epicute.errors import ArgumentError, UnsupportedError
from epicute.jit import DEFAULT_TARGET, compile
from epicute.models import reference
from epicute.models.final_norm import NormSpec, norm_kernel, plan_final_norm
from epicute.models.partials import partial_sums
from epicute.testing import assert_equal_bits, assert_within, guarded, storage_budget
from epicute.testing.poison import assert_fully_written, assert_guards_intact, inputs_unchanged
from tests.quant.ptx import Emulated
from tests.quant.rows import DTYPES, wild

EPS = 1e-5
GAINS = (*DTYPES, torch.float32)
HIDDEN = st.integers(1, 40).map(lambda n: 8 * n)


def planned(x: torch.Tensor, gain: torch.Tensor, **options: Any):
    options.setdefault("rows_dtype", None)
    options.setdefault("partials", False)
    return plan_final_norm(x.shape[1], x.dtype, gain_dtype=gain.dtype, device="cpu", **options)


def normed(x: torch.Tensor, gain: torch.Tensor, **options: Any) -> torch.Tensor:
    """All rows, on the CPU."""
    out = torch.full_like(x, 7.0)
    planned(x, gain, **options).run(x, gain, out)
    return out


def equal_numbers(found: torch.Tensor, wanted: torch.Tensor) -> None:
    """Bits, of NaN that it is one."""
    assert torch.equal(found.isnan(), wanted.isnan())
    clean = [x.masked_fill(wanted.isnan(), 0.0).contiguous() for x in (found, wanted)]
    assert_equal_bits(*clean)


@given(
    st.integers(1, 9),
    HIDDEN,
    st.sampled_from(DTYPES),
    st.sampled_from(GAINS),
    st.integers(0, 2**16),
)
def test_against_float64(
    rows: int, hidden: int, dtype: torch.dtype, gain_dtype: torch.dtype, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    x = (torch.randn(rows, hidden, generator=generator) * 8).to(dtype)
    gain = torch.randn(hidden, generator=generator).to(gain_dtype)
    for offset in (0.0, 1.0):
        exact = reference.final_norm(x, gain, EPS, offset)
        # A gain near -1 leaves little of the sum with the offset, and float16 has few bits below 2^-14.
        budget = storage_budget(
            dtype, arithmetic=1e-5 if dtype == torch.float16 else 2e-6, elements=1
        )
        assert_within(normed(x, gain, offset=offset), exact, budget)


@given(st.integers(1, 9), HIDDEN, st.integers(0, 2**16), st.data())
def test_selected_rows_are_those_of_all(
    rows: int, hidden: int, seed: int, data: st.DataObject
) -> None:
    x, gain = wild(rows, hidden, torch.bfloat16, seed), torch.randn(hidden).bfloat16()
    picked = data.draw(st.lists(st.integers(-1, rows - 1), max_size=6))
    at = torch.tensor(picked, dtype=torch.int32)
    out = guarded((len(picked), hidden), torch.bfloat16)
    strays = torch.zeros(1, dtype=torch.int64)
    with inputs_unchanged(x=x, gain=gain, rows=at):
        plan = planned(x, gain, rows_dtype=torch.int32)
        plan.run(x, gain, out.tensor, rows=at, strays=strays)
    everything = torch.cat([normed(x, gain), torch.zeros(1, hidden).bfloat16()])
    equal_numbers(out.tensor, everything[at.long()])
    assert_guards_intact(out)


@given(st.integers(1, 9), HIDDEN, st.integers(0, 2**16))
def test_given_partial_sums_and_own_ones_have_the_same_bits(
    rows: int, hidden: int, seed: int
) -> None:
    x, gain = wild(rows, hidden, torch.float16, seed), torch.randn(hidden)
    out = torch.empty_like(x)
    planned(x, gain, partials=True).run(x, gain, out, sumsq=partial_sums(x))
    equal_numbers(out, normed(x, gain))


def test_ge_10_the_offset_is_added_in_float32() -> None:
    x = torch.ones(1, 8).half()
    for gain, factor in ((0.00390625, 1.00390625), (15.8125, 16.8125)):
        found = normed(x, torch.full((8,), gain).bfloat16(), offset=1.0, eps=0.0)
        assert found.tolist() == [[factor] * 8]  # added in bfloat16, 1 and 16.75


def test_ge_11_a_gain_of_another_dtype_is_read_as_it_is_or_refused() -> None:
    x = torch.randn(3, 16).bfloat16()
    gain = torch.randn(16).bfloat16()
    assert_equal_bits(normed(x, gain.float()), normed(x, gain))
    with pytest.raises(ArgumentError, match="gain: got .*float32"):
        planned(x, gain).run(x, gain.float(), torch.empty_like(x))


def test_ge_16_strided_rows() -> None:
    big, gain = wild(6, 96, torch.bfloat16), torch.ones(64).bfloat16()
    x = big[::2, 16:80]
    out = guarded((3, 64), torch.bfloat16, (80, 1))
    planned(x, gain).run(x, gain, out.tensor)
    equal_numbers(out.tensor, normed(x.contiguous(), gain))
    assert_guards_intact(out)
    assert_fully_written(out, ~out.tensor.isnan())


def test_a_row_of_zeros() -> None:
    x, gain = torch.zeros(2, 8).bfloat16(), torch.ones(8).bfloat16()
    assert (normed(x, gain) == 0).all()
    assert normed(x, gain, eps=0.0).isnan().all()


@pytest.mark.parametrize("stray", [3, -2, 2**40])
def test_stray_rows_are_refused_before_anything_is_written(stray: int) -> None:
    x, gain, out = (
        torch.ones(3, 8).bfloat16(),
        torch.ones(8).bfloat16(),
        torch.full((2, 8), 7.0).bfloat16(),
    )
    plan = planned(x, gain, rows_dtype=torch.int64)
    with pytest.raises(ArgumentError, match=rf"rows: got {stray} at 1.*0 to 2"):
        plan.run(
            x, gain, out, rows=torch.tensor([0, stray]), strays=torch.zeros(1, dtype=torch.int64)
        )
    assert (out == 7).all()


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"x": torch.zeros(3, 16).bfloat16()}, "x: got"),
        ({"x": torch.zeros(3, 8)}, "x: got"),
        ({"x": None}, "x: got None"),
        ({"gain": torch.zeros(9).bfloat16()}, "gain: got"),
        ({"gain": torch.zeros(9).bfloat16()[1:]}, "gain: got .*16 bytes"),
        ({"out": torch.zeros(3, 8).bfloat16()}, "out: got"),
        ({"out": torch.zeros(2, 8)}, "out: got"),
        ({"sumsq": None}, "sumsq: got None"),
        ({"sumsq": torch.zeros(2, 1)}, "sumsq: got"),
        ({"rows": None}, "rows: got None"),
        ({"rows": torch.zeros(2)}, "rows: got"),
        ({"strays": None}, "strays: got None"),
    ],
)
def test_wrong_arguments_are_refused_by_name(change: dict[str, object], named: str) -> None:
    given = {
        "x": torch.ones(3, 8).bfloat16(),
        "gain": torch.ones(8).bfloat16(),
        "out": torch.ones(2, 8).bfloat16(),
        "sumsq": torch.ones(3, 1),
        "rows": torch.tensor([0, 1]),
        "strays": torch.zeros(1, dtype=torch.int64),
    }
    plan = plan_final_norm(8, device="cpu")
    plan.run(**given)  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match=named):
        plan.run(**{**given, **change})  # type: ignore[arg-type]


def test_what_was_not_planned_is_refused() -> None:
    x, gain = torch.ones(3, 8).bfloat16(), torch.ones(8).bfloat16()
    plan, out = planned(x, gain), torch.empty_like(x)
    with pytest.raises(ArgumentError, match="rows_dtype"):
        plan.run(x, gain, out, rows=torch.tensor([0]))
    with pytest.raises(ArgumentError, match="partials=True"):
        plan.run(x, gain, out, sumsq=torch.ones(3, 1))
    with pytest.raises(ArgumentError, match="out: .*apart from x"):
        plan.run(x, gain, x)


def test_no_rows() -> None:
    gain = torch.ones(8).bfloat16()
    assert normed(torch.empty(0, 8).bfloat16(), gain).shape == (0, 8)
    x, none = torch.ones(3, 8).bfloat16(), torch.zeros(0, dtype=torch.int64)
    plan = planned(x, gain, rows_dtype=torch.int64)
    plan.run(x, gain, x[:0].clone(), rows=none, strays=torch.zeros(1, dtype=torch.int64))


SPEC = NormSpec(8, torch.bfloat16, torch.bfloat16, EPS, 0.0, True, torch.int64)


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"hidden": 12}, ArgumentError),
        ({"hidden": 65544}, UnsupportedError),
        ({"dtype": torch.float32}, ArgumentError),
        ({"gain_dtype": torch.float64}, ArgumentError),
        ({"rows_dtype": torch.int16}, ArgumentError),
        ({"eps": -1.0}, ArgumentError),
        ({"offset": float("inf")}, ArgumentError),
    ],
)
def test_what_no_kernel_serves_is_refused(change: dict[str, object], error: type) -> None:
    with pytest.raises(error, match=next(iter(change))):
        NormSpec(**{**vars(SPEC), **change})  # type: ignore[arg-type]


@given(st.integers(1, 8192))
def test_a_block_holds_its_row(vectors: int) -> None:
    spec = NormSpec(8 * vectors, torch.bfloat16, torch.bfloat16, EPS, 0.0, True, None)
    assert spec.passes * spec.warps * 8 >= spec.groups
    assert spec.passes <= 8
    assert spec.reach >= vectors - 1


VARIANTS = [
    (torch.bfloat16, torch.bfloat16, 0.0, True, torch.int64),
    (torch.bfloat16, torch.float32, 1.0, False, torch.int32),
    (torch.float16, torch.float16, 0.0, False, None),
    (torch.float16, torch.float32, 0.5, True, None),
]
"""dtype, the gain's, offset, whether partial sums are given, the indices' dtype."""


@pytest.mark.compile
class TestKernel:
    @pytest.mark.parametrize("hidden", [8, 576, 8192, 16384, 65536])
    @pytest.mark.parametrize("variant", VARIANTS[:2], ids=["given", "own"])
    def test_no_spills(self, hidden: int, variant: tuple) -> None:
        dtype, gain, offset, *rest = variant
        spec = NormSpec(hidden, dtype, gain, EPS, offset, *rest)
        report = compile(norm_kernel(spec, DEFAULT_TARGET)).report
        assert report.problems(4 * spec.groups) == []

    @pytest.mark.parametrize("hidden", [8, 64, 584, 4096, 9000])
    @pytest.mark.parametrize("variant", VARIANTS, ids=["last", "gemma", "all", "all-given"])
    def test_the_compiled_code_normalises_to_the_bit(self, hidden: int, variant: tuple) -> None:
        dtype, gain_dtype, offset, partials, rows_dtype = variant
        x, gain = wild(9, hidden, dtype, hidden), torch.randn(hidden).to(gain_dtype)
        at = strays = None
        if rows_dtype:
            at = torch.tensor([8, -1, 0, 3, 3, 1], dtype=rows_dtype)
            strays = torch.zeros(1, dtype=torch.int64)
        shape = (9 if at is None else 6, hidden)
        found, wanted = (guarded(shape, dtype, (hidden + 8, 1)) for _ in range(2))
        sumsq = partial_sums(x) if partials else None
        given = {"sumsq": sumsq, "rows": at, "strays": strays}
        plan = planned(x, gain, offset=offset, partials=partials, rows_dtype=rows_dtype)
        plan.run(x, gain, wanted.tensor, **given)
        if at is not None:
            at[1] = 9  # no row of x: zeros too, and counted
        arguments = plan.bind(x, gain, found.tensor, **given)
        extra = [t for t in given.values() if t is not None]
        kernel(hidden, variant).launch(arguments, x, gain, found.tensor, *extra)
        equal_numbers(found.tensor, wanted.tensor)
        assert_guards_intact(found)
        if strays is not None:
            assert strays.item() == 1


@functools.cache
def kernel(hidden: int, variant: tuple) -> Emulated:
    dtype, gain, offset, *rest = variant
    return Emulated(norm_kernel(NormSpec(hidden, dtype, gain, EPS, offset, *rest), DEFAULT_TARGET))
