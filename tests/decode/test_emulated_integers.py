"""What activations lose as 16-bit integers, and what they do not: few-row kernels from their PTX."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from epicute.decode.geometry import span_of
from epicute.epilogues import Store, compose
from epicute.layouts import CHANNEL
from tests.decode.cases import BF16, FP16, FP32, Few, FewJob, in_place

pytestmark = pytest.mark.compile

INTEGERS = (("conversion", "integers"),)
DIGITS = {BF16: 8, FP16: 11}
"""Of a number's significand."""


def job(x: torch.Tensor, **options: object) -> FewJob:
    """The product of ``x`` with a weight whose sums are exact."""
    case = Few(compose(Store(FP32)), 64, x.shape[1], x_dtype=x.dtype, changes=INTEGERS, **options)  # type: ignore[arg-type]
    found = FewJob(case, len(x))
    found.x.copy_(x)
    return found


def spans(case: Few) -> int:
    """k that share a power of two."""
    return span_of(case.kernel().spec.problem.record)


@pytest.mark.parametrize("x_dtype", [BF16, FP16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("group", [32, 64, 128, CHANNEL])
def test_what_is_near_the_largest_is_exact(x_dtype: torch.dtype, group: int) -> None:
    """Whole numbers of all significant digits beside the largest that leaves them whole."""
    digits = DIGITS[x_dtype]
    generator = torch.Generator().manual_seed(group)
    x = torch.randint(-(2**digits), 2**digits + 1, (3, 640), generator=generator).to(x_dtype)
    x[:, ::32] = 2.0**14
    made = job(x / 2**14, group=group)
    sums = made.sums()
    assert (sums == sums.float().double()).all()
    made.emulate()


def test_what_is_far_below_the_largest_is_lost_alone() -> None:
    """Errors are at most half of 2^-14 of the largest one's power of two, for each activation, in its span alone."""
    x = torch.full((2, 256), 2.0**-16)
    x[0, 3], x[1, 200] = 1.75, -1.0
    made = job(x.to(BF16))
    span = spans(made.case)
    assert span == 128
    kept = made.x.double()
    kept[0, :span] = torch.where(kept[0, :span].abs() < 1, 0.0, kept[0, :span])
    kept[1, span:] = torch.where(kept[1, span:].abs() < 1, 0.0, kept[1, span:])
    weight = made.packed.unpack().int4.dequantize(torch.float64)  # type: ignore[union-attr]
    wanted = (kept @ weight.T).float()
    assert (wanted.double() - made.sums()).abs().max() > 0
    made.sums = lambda: wanted.double()  # type: ignore[method-assign]
    made.emulate()


@pytest.mark.parametrize("spoiled", [float("inf"), -float("inf"), float("nan")])
def test_a_spoiled_row_is_nan_and_alone(spoiled: float) -> None:
    generator = torch.Generator().manual_seed(1)
    x = torch.randint(-2, 3, (5, 256), generator=generator).to(BF16)
    x[3, 130] = spoiled
    made = job(x)
    wanted = made.sums()
    wanted[3] = torch.nan
    made.sums = lambda: wanted  # type: ignore[method-assign]
    made.emulate()


@pytest.mark.parametrize("power", [-126, -100, 60, 100])
def test_every_size_of_activations(power: int) -> None:
    """Nothing overflows on the way; what is below the smallest power of two that a span can have is zero."""
    generator = torch.Generator().manual_seed(2)
    x = torch.randint(-2, 3, (2, 128), generator=generator).float() * 2.0**power
    made = job(x.to(BF16))
    made.emulate()


@pytest.mark.parametrize("rows", [8, 16])
@pytest.mark.parametrize("group", [32, 64, 128, CHANNEL])
def test_where_tma_has_brought_them(rows: int, group: int) -> None:
    """All rows, and fewer than all; k that ends inside of a block; shares of k of different lengths."""
    for k, cluster, m in ((1500, 2, rows - 3), (1000, 1, rows)):
        case = Few(compose(Store(FP32)), 72, k, rows=rows, group=group, zeros=k == 1000)
        FewJob(in_place(case, cluster), m).emulate(clusters=2, seed=group, races=True)


def test_rows_of_several_tiles_are_made_in_turn() -> None:
    """TMA writes the next rows over the integers of those before them."""
    case = in_place(Few(compose(Store(FP32)), 200, 2000), 2)
    FewJob(case, 21).emulate(clusters=2, races=True)


def test_every_lane_may_arrive() -> None:
    """As racecheck wants it."""
    case = in_place(Few(compose(Store(FP32)), 200, 1000, rows=16), 2)
    case = replace(case, changes=(*case.changes, ("each_lane", True), ("sums", 2)))
    FewJob(case, 20).emulate(clusters=2, races=True)


def test_fp16_where_tma_has_brought_them() -> None:
    case = in_place(Few(compose(Store(FP32)), 72, 1000, rows=16, x_dtype=FP16))
    FewJob(case, 16).emulate(races=True)


@pytest.mark.parametrize("spoiled", [float("inf"), float("nan")])
def test_a_spoiled_row_is_nan_and_alone_where_tma_has_brought_it(spoiled: float) -> None:
    made = FewJob(in_place(Few(compose(Store(FP32)), 72, 1000, rows=16)), 12)
    made.x.copy_(torch.randint(-2, 3, made.x.shape, generator=torch.Generator().manual_seed(1)))
    wanted = made.sums()
    made.x[3, 130] = spoiled
    wanted[3] = torch.nan
    made.sums = lambda: wanted  # type: ignore[method-assign]
    made.emulate()


def test_both_bytes_hold_the_largest() -> None:
    """All that two signed bytes are at their ends: ±255 · 32, and low bytes of -128 and 127."""
    made = FewJob(in_place(Few(compose(Store(FP32)), 72, 1000, rows=16)), 16)
    some = torch.tensor([255.0, -255.0, 2.0, 127 / 64]) / 128 * 2.0**-3
    made.x.copy_(some.repeat(16, 250))
    made.emulate()


@pytest.mark.parametrize("power", [-133, -126, -100, 100, 118])
def test_every_size_of_activations_in_place(power: int) -> None:
    made = FewJob(in_place(Few(compose(Store(FP32)), 72, 1000, rows=16)), 9)
    generator = torch.Generator().manual_seed(2)
    made.x.copy_(torch.randint(-2, 3, made.x.shape, generator=generator).float() * 2.0**power)
    if power == -133:  # below what a span's power of two can hold
        made.sums = lambda: torch.zeros(9, 72, dtype=torch.float64)  # type: ignore[method-assign]
        assert made.x.abs().max() > 0
    made.emulate()


@pytest.mark.parametrize("mma", ["sync", "wgmma"])
def test_sums_of_odd_rows_do_not_overflow_before_their_scale(mma: str) -> None:
    """They are 16 times as large, as integers."""
    case = Few(compose(Store(FP32)), 72, 1000, rows=8)
    case = in_place(case) if mma == "wgmma" else replace(case, changes=INTEGERS)
    made = FewJob(case, 3)
    made.x.zero_()
    made.x[:, 7] = 2.0**120
    assert made.sums().abs().max() > 2.0**122
    made.emulate()


def test_zeros_are_zeros() -> None:
    made = job(torch.zeros(4, 384, dtype=BF16), zeros=True)
    made.emulate()
    assert not made.outputs["out"].tensor.any()
