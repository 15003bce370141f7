"""INT4 grids: every code, every group, against a text that walks group by group."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from epicute.errors import ArgumentError
from epicute.layouts import CHANNEL, GROUPS
from epicute.quant import ClipSearch, Int4Codes, Int4Grid, int4, quantize_int4, reference

shapes = st.tuples(st.integers(1, 6), st.integers(1, 300))
matrices = shapes.flatmap(
    lambda s: hnp.arrays(np.float32, s, elements=st.floats(-100, 100, width=32) | st.just(0.0))
)
groups = st.sampled_from([*GROUPS, CHANNEL])


def squared_error(found: Int4Codes, values: torch.Tensor, importance: torch.Tensor) -> torch.Tensor:
    """(N, G) weighted squared error of every group, in float64."""
    off = (found.dequantize(torch.float64) - values.double()).square() * importance.double()
    width = int4.group_width(values.shape[1], found.group)
    return torch.stack([part.sum(1) for part in off.split(width, dim=1)], dim=1)


@given(matrices, groups, st.booleans())
def test_rounding_to_nearest_agrees_with_the_reference(
    values: np.ndarray, group: int, symmetric: bool
) -> None:
    found = quantize_int4(torch.from_numpy(values), Int4Grid(group, symmetric))
    wide = values.shape[1] if group == CHANNEL else group
    codes, scale, zero = reference.quantize_int4(values, wide, symmetric)
    assert np.array_equal(found.codes.numpy(), codes)
    assert np.array_equal(found.scale.numpy(), scale)
    assert (found.zero is None) == symmetric
    if found.zero is not None:
        assert np.array_equal(found.zero.numpy(), zero)
    exact = reference.dequantize_int4(codes, scale, zero, wide)
    assert np.array_equal(found.dequantize(torch.float64).numpy(), exact)
    assert np.array_equal(found.dequantize().numpy(), exact.astype(np.float32))


@given(matrices, groups, st.booleans(), st.sampled_from(int4.SCALE_DTYPES))
def test_values_are_within_a_step_and_zero_stays_zero(
    values: np.ndarray, group: int, symmetric: bool, dtype: torch.dtype
) -> None:
    w = torch.from_numpy(values)
    found = quantize_int4(w, Int4Grid(group, symmetric, dtype))
    step = int4.per_column(found.scale.double(), group, w.shape[1])
    off = (found.dequantize(torch.float64) - w.double()).abs()
    # Half a step, half a step of the zero point, and what the scale's rounding takes from 15 steps.
    form = torch.finfo(dtype)
    rounding = (step * form.eps).clamp(min=form.smallest_normal * form.eps)
    assert (off <= step * (0.5 if symmetric else 1.0) + 15 * rounding).all()
    assert (found.dequantize()[w == 0] == 0).all()


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("code", range(16))
def test_all_codes_round_to_themselves(code: int, symmetric: bool) -> None:
    """A group that spans its grid; the code under test stands in it once."""
    zero = 8 if symmetric else 5
    ends = [1, 15] if symmetric else [0, 15]
    codes = torch.tensor([[*ends, code, zero] + [zero] * 28], dtype=torch.uint8)
    given_zero = None if symmetric else torch.tensor([[zero]], dtype=torch.uint8)
    known = Int4Codes(codes, torch.tensor([[0.25]], dtype=torch.float16), given_zero, 32)
    again = quantize_int4(known.dequantize(), Int4Grid(32, symmetric))
    if symmetric and code == 0:  # -8 is past max |w| / 7: the grid grows to hold it
        assert again.scale.item() == np.float16(2 / 7)
        return
    assert torch.equal(again.codes, codes)
    assert again.scale.item() == 0.25


def test_code_0_of_a_symmetric_grid_comes_from_clipping() -> None:
    w = torch.full((1, 32), -7.0)
    w[0, 0] = -8.0
    assert quantize_int4(w, Int4Grid(32)).codes.min() == 1
    found = quantize_int4(w, Int4Grid(32), ClipSearch(least=0.75, steps=2))
    assert found.scale.item() == 1.0
    assert found.codes.unique().tolist() == [0, 1]
    assert torch.equal(found.dequantize(), w)


def test_iw_06_every_group_is_right_and_others_are_refused() -> None:
    w = torch.randn(8, 1024, generator=torch.Generator().manual_seed(6))
    errors = []
    for group in (*GROUPS, CHANNEL):
        found = quantize_int4(w, Int4Grid(group))
        assert found.scale.shape == (8, 1 if group == CHANNEL else 1024 // group)
        errors.append(((found.dequantize() - w).norm() / w.norm()).item())
    assert errors == sorted(errors), "finer groups are no worse"
    assert errors[-1] < 0.15
    for group in (0, 16, 256, -2):
        with pytest.raises(
            ArgumentError, match=f"^group: got {group}, expected 32, 64, 128, or -1"
        ):
            Int4Grid(group)


def test_iw_08_scales_of_another_group_are_refused() -> None:
    codes = torch.zeros(4, 4096, dtype=torch.uint8)
    scale = torch.ones(4, 4096 // 128, dtype=torch.float16)
    with pytest.raises(ArgumentError, match=r"^w\.scale: got \(4, 32\).*K = 4096 in groups of 64"):
        Int4Codes(codes, scale, None, 64, "w")


def test_the_last_group_may_be_narrower() -> None:
    """SmolLM2's K = 576 in groups of 128: four and a half."""
    w = torch.randn(3, 576)
    found = quantize_int4(w, Int4Grid(128))
    assert found.scale.shape == (3, 5)
    tail = quantize_int4(w[:, 512:], Int4Grid(64))
    assert torch.equal(found.codes[:, 512:], tail.codes)
    assert torch.equal(found.scale[:, 4:], tail.scale)


@given(matrices, groups, st.booleans(), st.integers(0, 2**32 - 1))
def test_a_search_is_never_worse_than_no_search(
    values: np.ndarray, group: int, symmetric: bool, seed: int
) -> None:
    w, grid = torch.from_numpy(values), Int4Grid(group, symmetric)
    weight = torch.rand(w.shape[1], generator=torch.Generator().manual_seed(seed))
    plain = quantize_int4(w, grid)
    for importance in (torch.ones(w.shape[1]), weight):
        searched = quantize_int4(w, grid, ClipSearch(steps=8), importance)
        before = squared_error(plain, w, importance)
        after = squared_error(searched, w, importance)
        assert (after <= before * (1 + 1e-5)).all()


def test_a_search_pays_on_heavy_tails_and_follows_the_importance() -> None:
    generator = torch.Generator().manual_seed(3)
    w = torch.randn(64, 512, generator=generator)
    w[:, ::64] *= 4
    plain = quantize_int4(w)
    searched = quantize_int4(w, clip=ClipSearch())
    one = torch.ones(512)
    assert squared_error(searched, w, one).sum() < 0.9 * squared_error(plain, w, one).sum()
    weight = torch.where(torch.arange(512) % 64 == 0, 100.0, 0.01)
    led = quantize_int4(w, clip=ClipSearch(), importance=weight)
    assert squared_error(led, w, weight).sum() < squared_error(searched, w, weight).sum()


def test_ratio_1_wins_a_tie() -> None:
    w = torch.tensor([[7.0, -7.0] * 16])
    assert quantize_int4(w, Int4Grid(32), ClipSearch()).scale.item() == 1.0


def test_slices_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    w = torch.randn(37, 192)
    whole = quantize_int4(w, Int4Grid(64, False), ClipSearch(steps=4))
    monkeypatch.setattr(int4, "_SLICE", 192 * 5)
    apart = quantize_int4(w, Int4Grid(64, False), ClipSearch(steps=4))
    for name in ("codes", "scale", "zero"):
        assert torch.equal(getattr(whole, name), getattr(apart, name))


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("group", [32, CHANNEL])
def test_a_group_of_zeros_has_scale_1(symmetric: bool, group: int) -> None:
    found = quantize_int4(torch.zeros(2, 64), Int4Grid(group, symmetric))
    assert (found.scale == 1).all()
    assert (found.dequantize() == 0).all()


def test_tiny_values_keep_a_scale_above_zero() -> None:
    w = torch.full((1, 32), 1e-9)
    for dtype in int4.SCALE_DTYPES:
        found = quantize_int4(w, Int4Grid(32, scale_dtype=dtype))
        assert 0 < found.scale.item() < 1e-6
        assert found.dequantize().isfinite().all()


def test_values_beyond_the_scales_range_are_refused() -> None:
    w = torch.full((1, 32), 1e6)
    with pytest.raises(ArgumentError, match=r"^values: got 1 groups.*bfloat16"):
        quantize_int4(w)
    found = quantize_int4(w, Int4Grid(scale_dtype=torch.bfloat16))
    assert found.dequantize()[0, 0].item() == pytest.approx(1e6, rel=2**-7)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_other_dtypes_and_strides_are_read_as_they_show(dtype: torch.dtype) -> None:
    big = torch.randn(160, 48).to(dtype)
    found = quantize_int4(big.t())
    wanted = quantize_int4(big.t().contiguous().float())
    assert found.codes.is_contiguous()
    assert torch.equal(found.codes, wanted.codes)
    assert torch.equal(found.scale, wanted.scale)


W = torch.ones(2, 64)
ONES = torch.ones(2, 1, dtype=torch.float16)
CODES = torch.zeros(2, 64, dtype=torch.uint8)


@pytest.mark.parametrize(
    ("argument", "make"),
    [
        ("values.shape", lambda: quantize_int4(torch.ones(8))),
        ("values.shape", lambda: quantize_int4(torch.ones(0, 8))),
        ("values.dtype", lambda: quantize_int4(W.double())),
        ("values", lambda: quantize_int4(torch.full((2, 64), math.nan))),
        ("values", lambda: quantize_int4(torch.full((2, 64), math.inf))),
        ("importance", lambda: quantize_int4(W, importance=torch.ones(64))),
        ("importance.shape", lambda: quantize_int4(W, None, ClipSearch(), torch.ones(2))),
        ("importance", lambda: quantize_int4(W, None, ClipSearch(), -torch.ones(64))),
        ("importance", lambda: quantize_int4(W, None, ClipSearch(), torch.full((64,), math.nan))),
        ("scale_dtype", lambda: Int4Grid(scale_dtype=torch.float32)),
        ("least", lambda: ClipSearch(least=0.0)),
        ("least", lambda: ClipSearch(least=1.0)),
        ("steps", lambda: ClipSearch(steps=0)),
        ("weight.codes", lambda: Int4Codes(CODES.int(), ONES, None, 64)),
        ("weight.codes", lambda: Int4Codes(CODES[0], ONES, None, 64)),
        ("weight.scale", lambda: Int4Codes(CODES, ONES.float(), None, 64)),
        ("weight.scale", lambda: Int4Codes(CODES, ONES, None, 32)),
        ("weight.zero", lambda: Int4Codes(CODES, ONES, ONES, 64)),
        ("weight.zero", lambda: Int4Codes(CODES, ONES, CODES, 64)),
        ("weight.group", lambda: Int4Codes(CODES, ONES, None, 16)),
        ("weight.device", lambda: Int4Codes(CODES, ONES.to("meta"), None, 64)),
    ],
)
def test_refused_by_name(argument: str, make: object) -> None:
    with pytest.raises(ArgumentError, match=f"^{argument}: got"):
        make()  # type: ignore[operator]
