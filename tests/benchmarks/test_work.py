"""Operations of attention and layers by hand, and the mixes they are counted over."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.floors import BANDWIDTH, BYTES, PEAK
from benchmarks.mixes import LONGEST, MIXES, padding, requests
from benchmarks.work import (
    COUNTED,
    UNITS,
    attention_floor,
    attention_flops,
    flops,
    layer_floor,
    layer_flops,
    rate,
)
from epicute.errors import ArgumentError
from epicute.models.shapes import SHAPES, LayerShape

PAPER = {
    "equal": (16384, 1.00),
    "uniform 0.7 to 1": (14097, 1.16),
    "uniform 0.2 to 1": (10448, 1.57),
    "lognormal": (8527, 1.92),
    "one long, seven short": (2944, 5.57),
}
"""Table 15: tokens, and the padding ratio."""


def test_the_mixes_are_those_of_table_15() -> None:
    assert [*MIXES] == [*PAPER]
    for name, (tokens, ratio) in PAPER.items():
        assert len(MIXES[name]) == 8
        assert sum(MIXES[name]) == tokens
        assert 0 < max(MIXES[name]) <= LONGEST
        assert padding(name) == pytest.approx(ratio, abs=5e-3)
    assert min(MIXES["uniform 0.7 to 1"]) >= 0.7 * LONGEST
    assert min(MIXES["uniform 0.2 to 1"]) >= 0.2 * LONGEST


def test_a_mix_may_be_longer_and_must_be_known() -> None:
    assert requests("one long, seven short", 4) == (8192, *(512,) * 7)
    with pytest.raises(ArgumentError, match="lognormal"):
        requests("log normal")


def test_half_of_the_scores_count() -> None:
    assert attention_flops((2048,), 32, 128) == 4 * 2048**2 * 128 * 32 // 2
    assert attention_flops((3, 5), 2, 4) == 2 * (9 + 25) * 8


def test_a_layer_is_the_papers_formula() -> None:
    """F ≈ 2·B·S·P + 2·B·S²·Hq·D, and its 1286 TFLOP/s of the 405B layer at S = 2048."""
    shape = SHAPES["8B"]
    assert layer_flops(shape, (2048, 2048)) == 2 * 4096 * shape.weights + 2 * 2 * 2048**2 * 4096
    case = {"shape": "8B", "batch": 1, "length": 2048}
    assert rate("prefill-layer", case, 804.2) == pytest.approx(1154, abs=1)


@given(
    st.lists(st.integers(1, 4096), min_size=1, max_size=6),
    st.sampled_from([*SHAPES.values()]),
    st.sampled_from(["bf16", "fp8"]),
)
def test_nothing_is_faster_than_its_floor_allows(
    lengths: list[int], shape: LayerShape, weights: str
) -> None:
    floor = layer_floor(shape, lengths, weights)
    assert layer_flops(shape, lengths) / floor * 1e6 <= PEAK[weights] * (1 + 1e-9)
    assert floor >= shape.weights * BYTES[weights] / BANDWIDTH * 1e6
    assert layer_floor(shape, [*lengths, 1], weights) > floor


def test_short_attention_is_bound_by_its_bytes() -> None:
    moved = 2 * (16 * 32 + 16 * 8) * 128 * 2
    assert attention_floor((16,), 32, 8, 128) == pytest.approx(moved / BANDWIDTH * 1e6)
    long = attention_floor((8192, 8192), 32, 8, 128)
    assert long == pytest.approx(2 * attention_flops((8192,), 32, 128) / PEAK["bf16"] * 1e6)


def test_a_mix_counts_its_tokens_alone() -> None:
    heads = {"heads": 32, "kv_heads": 8, "head_dim": 128}
    case = {"batch": 8, "length": 4 * LONGEST, "mix": "lognormal", **heads}
    assert flops("attention", case) == attention_flops(requests("lognormal", 4), 32, 128)
    layer = {"shape": "8B", "batch": 8, "length": LONGEST, "mix": "lognormal"}
    assert flops("packed-prefill", layer) == layer_flops(SHAPES["8B"], MIXES["lognormal"])
    assert {*COUNTED} == {name for name, unit in UNITS.items() if unit == "TFLOP/s"}


def test_a_model_is_shown_in_tokens() -> None:
    assert rate("prefill-model", {"batch": 1, "length": 2048}, 26600.0) == pytest.approx(
        76992, abs=1
    )
