"""Poisoned outputs must show every missing, stray and forbidden write."""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from epicute.errors import ArgumentError
from epicute.testing.budgets import assert_equal_bits
from epicute.testing.poison import (
    assert_fully_written,
    assert_guards_intact,
    assert_untouched,
    guarded,
    inputs_unchanged,
    raw_bytes,
)

FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("strides", [None, (24, 1), (1, 5), (40, 2)])
def test_a_complete_write_passes(dtype: torch.dtype, strides) -> None:
    out = guarded((3, 17), dtype, strides)
    assert bool(out.tensor.float().isnan().all())
    assert out.tensor.data_ptr() % 16 == 0
    out.tensor.copy_(torch.ones(3, 17).to(dtype))
    assert_fully_written(out)
    assert_guards_intact(out)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("value", [0, -1])
def test_integers(dtype: torch.dtype, value: int) -> None:
    out = guarded((4,), dtype)
    with pytest.raises(AssertionError, match="not written: 4 elements"):
        assert_fully_written(out)
    out.tensor.fill_(value)
    assert_fully_written(out)


def test_one_missing_element_is_seen() -> None:
    out = guarded((4, 8), torch.bfloat16, name="k")
    out.tensor.fill_(1.0)
    out.tensor[2, 5] = guarded((1,), torch.bfloat16).tensor[0]
    with pytest.raises(AssertionError, match=r"k: not written: 1 elements, the first at \[2, 5\]"):
        assert_fully_written(out)
    assert_fully_written(out, where=torch.arange(4)[:, None] != 2)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 0.0, -0.0])
@pytest.mark.parametrize("dtype", FLOATS)
def test_arithmetic_non_numbers_count_as_written(dtype: torch.dtype, value: float) -> None:
    out = guarded((2, 2), dtype)
    out.tensor.copy_(torch.full((2, 2), value).to(dtype))
    assert_fully_written(out)


@given(st.data())
def test_every_stray_byte_is_seen(data: st.DataObject) -> None:
    out = guarded((3, 5), torch.bfloat16, (9, 1), guard=16, name="z")
    out.tensor.fill_(0.0)
    outside = (~out.inside).nonzero()[:, 0].tolist()
    index = data.draw(st.sampled_from(outside))
    out.buffer[index] = data.draw(st.integers(0, 255).filter(lambda b: b != 0xA5))
    with pytest.raises(AssertionError, match=re.escape(f"byte {index - 16:+d} ")):
        assert_guards_intact(out)


def test_a_row_too_many_is_seen() -> None:
    out = guarded((2, 8), torch.float32)
    torch.as_strided(out.tensor, (3, 8), (8, 1)).fill_(1.0)
    with pytest.raises(AssertionError, match="32 bytes outside"):
        assert_guards_intact(out)


def test_rows_that_must_be_left_alone() -> None:
    out = guarded((4, 2), torch.float32)
    skipped = torch.tensor([False, True, False, True])[:, None].expand(4, 2)
    out.tensor[::2] = 1.0
    assert_untouched(out, skipped)
    assert_fully_written(out, ~skipped)
    out.tensor[3, 1] = 0.0
    with pytest.raises(AssertionError, match=r"must not be: 1 elements, the first at \[3, 1\]"):
        assert_untouched(out, skipped)


def test_empty_output() -> None:
    out = guarded((0, 8), torch.bfloat16)
    assert_fully_written(out)
    assert_guards_intact(out)


@pytest.mark.parametrize("strides", [(1, 1), (-8, 1), (8,)])
def test_impossible_strides_are_refused(strides) -> None:
    with pytest.raises(ArgumentError, match="strides"):
        guarded((4, 8), torch.float32, strides)


class TestInputs:
    def test_unchanged(self) -> None:
        x, y = torch.tensor([float("nan"), -0.0]), np.ones(3)
        with inputs_unchanged(x=x, y=y, nothing=None):
            x * 2

    @pytest.mark.parametrize("value", [0.0, float("inf")])
    def test_changed(self, value: float) -> None:
        x, strided = torch.ones(4), torch.zeros(4, 4, dtype=torch.bfloat16)[:, 1:3]
        strided[0, 0] = -0.0
        with (
            pytest.raises(AssertionError, match="inputs changed by the call: strided$"),
            inputs_unchanged(x=x, strided=strided),
        ):
            strided[0, 0] = value

    def test_an_error_inside_is_not_hidden(self) -> None:
        x = torch.ones(1)
        with pytest.raises(ZeroDivisionError), inputs_unchanged(x=x):
            x += 1
            _ = 1 / 0


@pytest.mark.parametrize("dtype", [torch.int64, torch.float32, torch.float8_e4m3fn])
def test_empty_tensors_of_any_stride_have_no_bytes(dtype: torch.dtype) -> None:
    empty = torch.empty_strided((0,), (0,), dtype=dtype)
    assert raw_bytes(empty).shape == (0,)
    with inputs_unchanged(x=empty):
        pass
    assert_equal_bits(empty, torch.empty(0, dtype=dtype))
