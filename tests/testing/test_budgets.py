"""The budgets must see a row, a NaN, an infinity and a lost sign."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from epicute.errors import ArgumentError
from epicute.testing.budgets import (
    EXACT,
    Budget,
    assert_equal_bits,
    assert_within,
    measure,
    storage_budget,
    ulp,
    ulp_distance,
)
from epicute.testing.strategies import matrices

NAN, INF = float("nan"), float("inf")


def noise(*shape: int) -> np.ndarray:
    return np.random.default_rng(7).standard_normal(shape)


def test_works_without_hypothesis_and_the_dsl() -> None:
    code = (
        "import sys\n"
        "for name in ('hypothesis', 'cutlass', 'tvm_ffi'): sys.modules[name] = None\n"
        "import epicute.testing.budgets, epicute.testing.poison\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_one_wrong_row_of_4096_is_seen() -> None:
    ref = noise(4096, 64)
    out = ref.copy()
    out[1234] = -out[1234]
    errors = measure(out, ref)
    assert errors.norm < 0.05
    assert errors.row == (1234,)
    assert errors.worst_row == pytest.approx(2.0)
    with pytest.raises(AssertionError, match=r"worst row\s+\[1234\]"):
        assert_within(out, ref, Budget(0.05, 0.05))


def test_message_shows_both_values() -> None:
    ref = np.ones((3, 4))
    out = ref.copy()
    out[2, 1] = 5.0
    with pytest.raises(AssertionError) as caught:
        assert_within(out, ref, EXACT, "q_out")
    text = str(caught.value)
    assert text.startswith("q_out:")
    assert "at [2, 1]: got 5, reference 1" in text
    assert "1, 5, 1, 1" in text


@pytest.mark.parametrize("bad", [NAN, INF, -INF])
def test_a_non_number_never_passes(bad: float) -> None:
    ref, out = noise(8, 16), noise(8, 16)
    out[5, 3] = bad
    errors = measure(out, ref)
    assert (errors.row, errors.column, errors.unexplained) == ((5,), 3, 1)
    with pytest.raises(AssertionError, match="1 NaN or infinite"):
        assert_within(out, ref, Budget(1e30, 1e30))
    with pytest.raises(AssertionError):
        assert_within(ref, out, Budget(1e30, 1e30))


def test_the_same_non_number_passes() -> None:
    ref = noise(4, 4)
    ref[0, 0], ref[1, 1], ref[2, 2] = NAN, INF, -INF
    assert measure(ref.copy(), ref).norm == 0.0
    other = ref.copy()
    other[1, 1] = -INF
    assert measure(other, ref).worst_row == INF


def test_zero_reference() -> None:
    zero = np.zeros((2, 4))
    assert measure(zero, zero).within(EXACT)
    assert measure(np.full((2, 4), 1e-30), zero).worst_row == INF
    assert measure(np.full((2, 4), 1e-3), zero, floor=1.0).worst_row == pytest.approx(2e-3)


def test_shapes_of_every_rank() -> None:
    assert measure(1.0, 1.0).row == ()
    assert measure(np.zeros((0, 8)), np.zeros((0, 8))).within(EXACT)
    errors = measure(noise(2, 3, 4) * (1 + np.eye(2, 3)[..., None]), noise(2, 3, 4))
    assert errors.row in {(0, 0), (1, 1)}
    with pytest.raises(ArgumentError, match="shape"):
        measure(np.zeros(3), np.zeros(4))


def test_extreme_magnitudes_do_not_overflow_the_norm() -> None:
    huge, tiny = np.full((2, 8), 1e300), np.full((2, 8), 1e-300)
    assert measure(huge * 1.01, huge).worst_row == pytest.approx(0.01)
    assert measure(tiny * 1.01, tiny).worst_row == pytest.approx(0.01)


@given(matrices((5, 16), non_finite=True))
def test_everything_equals_itself(x: np.ndarray) -> None:
    assert measure(x, x.copy()).within(EXACT)


@given(matrices((40, 16), limit=1e4), st.sampled_from([torch.bfloat16, torch.float16]))
def test_storage_budget_holds_for_one_rounding(x: np.ndarray, dtype: torch.dtype) -> None:
    ref = np.where(np.abs(x) < 1e-3, 0.0, x)
    out = torch.from_numpy(ref.astype(np.float32)).to(dtype)
    assert_within(out, ref.astype(np.float32), storage_budget(dtype, elements=1))


def test_storage_budget_sees_truncation() -> None:
    ref = noise(64, 256).astype(np.float32)
    cut = (ref.view(np.int32) & np.int32(-65536)).view(np.float32)
    rounded = torch.from_numpy(ref).to(torch.bfloat16)
    assert_within(rounded, ref, storage_budget(torch.bfloat16))
    with pytest.raises(AssertionError):
        assert_within(cut, ref, storage_budget(torch.bfloat16))


class TestUlp:
    def test_known(self) -> None:
        assert ulp(1.0, torch.bfloat16) == 2.0**-7
        assert ulp(448.0, torch.float8_e4m3fn) == 32.0
        assert ulp(0.0, torch.float8_e4m3fn) == 2.0**-9
        assert ulp(-1e-45, torch.float32) == 2.0**-149
        assert np.isnan(ulp(INF, torch.float32))

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float8_e4m3fn])
    def test_neighbours_are_one_apart(self, dtype: torch.dtype) -> None:
        raw = torch.uint8 if dtype == torch.float8_e4m3fn else torch.int16
        last = int(torch.tensor(torch.finfo(dtype).max, dtype=dtype).view(raw))
        codes = torch.arange(last + 1).to(raw).view(dtype)
        assert bool((ulp_distance(codes[1:], codes[:-1]) == 1).all())
        step = codes[1:].double() - codes[:-1].double()
        assert np.array_equal(ulp(codes[:-1], dtype), step.numpy())

    def test_across_zero_and_nan(self) -> None:
        a = torch.tensor([0.0, 1e-45, NAN, NAN, 1.0])
        b = torch.tensor([-0.0, -1e-45, NAN, 1.0, NAN])
        assert ulp_distance(a, b).tolist() == [0, 2, 0, 2**62, 2**62]

    def test_mixed_dtypes_are_refused(self) -> None:
        with pytest.raises(ArgumentError, match="dtype"):
            ulp_distance(torch.ones(1), torch.ones(1, dtype=torch.bfloat16))


def test_bits_see_the_sign_of_zero() -> None:
    a = torch.tensor([[1.0, 0.0]])
    assert_equal_bits(a, a.clone())
    assert measure(a, -a * torch.tensor([-1.0, 1.0])).within(EXACT)
    with pytest.raises(AssertionError, match=r"1 of 2 elements .* \[0, 1\]"):
        assert_equal_bits(a, torch.tensor([[1.0, -0.0]]))
