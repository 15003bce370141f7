"""Floors from the datasheet's rates."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.floors import BANDWIDTH, PEAK, SENTENCE, Gemm, nominal_mhz, peak_at

SIZES = st.integers(1, 2**17)


def test_a_large_product_is_bound_by_arithmetic() -> None:
    floor = Gemm(2048, 6144, 4096, "fp8").floor(2 * 2048 * 6144)
    assert floor.us == floor.flop_us == pytest.approx(52.09, abs=0.01)
    assert Gemm(2048, 6144, 4096, "bf16").floor(0).us == pytest.approx(104.17, abs=0.01)


def test_a_single_row_is_bound_by_its_weights() -> None:
    floor = Gemm(1, 28672, 4096, "bf16").floor(2 * 28672)
    assert floor.us == floor.byte_us == pytest.approx(48.95, abs=0.05)


@given(SIZES, SIZES, SIZES, st.sampled_from(["bf16", "fp8"]), st.integers(0, 2**40))
def test_a_floor_is_the_larger_and_grows(m: int, n: int, k: int, weights: str, more: int) -> None:
    size = Gemm(m, n, k, weights)
    floor = size.floor(more)
    assert floor.us >= size.floor(0).us
    assert floor.us == max(floor.flop_us, floor.byte_us)
    assert floor.flop_us == pytest.approx(2e6 * m * n * k / PEAK[weights])
    assert Gemm(m, n, k, "bf16").floor(more).us >= Gemm(m, n, k, "fp8").floor(more).us


def test_the_sentence_states_the_rates() -> None:
    for rate in (PEAK["bf16"] / 1e12, PEAK["fp8"] / 1e12, BANDWIDTH / 1e12):
        assert f"{rate:g} T" in SENTENCE


@pytest.mark.parametrize("weights", PEAK)
def test_a_peak_scales_with_the_clock(weights: str) -> None:
    assert nominal_mhz(weights) == pytest.approx(1830, abs=1)
    assert peak_at(weights, nominal_mhz(weights)) == pytest.approx(PEAK[weights])
    assert peak_at(weights, 915) == pytest.approx(PEAK[weights] / 2, rel=1e-3)
