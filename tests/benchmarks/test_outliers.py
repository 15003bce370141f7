"""The table of outliers: the tensor core's accumulator, and the figures that the numerics contract states."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks import outliers
from benchmarks.fp8_accumulator import accumulate
from benchmarks.harness import Options
from benchmarks.outliers import LOUD, Cached, Smoothed, cached_rows, long_context, placements
from benchmarks.provenance import Provenance
from benchmarks.readme import whole
from benchmarks.table import Row, Table, render, validate
from epicute.models.shapes import LayerShape
from epicute.quant import cast_e4m3
from tests.benchmarks.test_perplexity import results_of
from tests.models.one_thread import single as single

SMALL = LayerShape(256, 512, 8, 2, 128, "tiny")


# --- the accumulator ---


def one(*terms: float) -> float:
    """Products of 1 and these, in as many instructions as they fill."""
    v = torch.tensor(terms)[:, None]
    return float(accumulate(torch.ones(1, len(terms)), v))


def test_terms_are_cut_at_the_largest_ones_thirteenth_bit() -> None:
    """Probes of an H200, single instructions."""
    assert one(1, 2.0**-13) == 1 + 2.0**-13
    assert one(1, -(2.0**-13)) == 1 - 2.0**-13
    assert one(1, 2.0**-14) == 1
    assert one(-1, -(2.0**-14)) == -1
    assert one(1, 1.75 * 2.0**-12) == 1 + 1.5 * 2.0**-12
    assert one(1, *[2.0**-14] * 31) == 1  # each on its own, not their sum
    assert one(1, -1, 2.0**-14) == 0  # aligned to the largest, not to the sum
    assert one(1, 1 + 2.0**-13) == 2  # and once more after the carry


def test_the_sum_of_ones_stops() -> None:
    ones = torch.ones(1, 51200)
    assert float(accumulate(ones, ones.T)) == 16384
    assert float(accumulate(ones, ones.T, promote=128)) == 51200


MEASURED = {1024: (5.2e-3, 2.9e-4), 2048: (1.2e-2, 2.8e-4), 8192: (4.8e-2, 2.8e-4)}
LONG = {32768: (0.149, 2.8e-4), 131072: (0.374, 2.8e-4)}
"""Tokens: relative error on an H200 of sums that stay in the accumulator, and of ones promoted every 128 tokens."""


def drawn(tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Probabilities and values as the probes had them, values of mean 0.5."""
    random = torch.Generator().manual_seed(tokens)
    p = cast_e4m3(448 * torch.exp(-6 * torch.rand(2, tokens, generator=random)))
    return p.double(), cast_e4m3(torch.randn(tokens, 32, generator=random) + 0.5).double()


@pytest.mark.parametrize(
    "tokens", [*MEASURED, *(pytest.param(n, marks=pytest.mark.gates) for n in LONG)]
)
def test_kd_16_direct_sums_lose_what_was_measured(tokens: int) -> None:
    """And sums promoted every 128 tokens do not."""
    p, v = drawn(tokens)
    exact = p @ v
    direct, promoted = (MEASURED | LONG)[tokens]
    for every, wanted in ((None, direct), (128, promoted)):
        error = float((accumulate(p, v, every) - exact).norm() / exact.norm())
        assert error == pytest.approx(wanted, rel=0.15)


@pytest.mark.parametrize(
    ("context", "direct"),
    [(8192, 0.03), pytest.param(32768, 0.1, marks=pytest.mark.gates)],
)
def test_kd_16_long_contexts_need_two_levels(context: int, direct: float) -> None:
    """Attention's own probabilities: an error under 1e-3 promoted, of per cents and more direct."""
    found = long_context(context)
    assert found["two_level"].worst_row < 1e-3
    assert found["direct"].norm > direct


# --- INT4 ---


def test_rotation_gives_most_of_outliers_cost_back() -> None:
    """FuTransformer table 9, 8B: 22.2 % to 7.4 %, a third; without outliers it changes little."""
    attention, layer = cached_rows(Cached(SMALL, outliers=True))
    for row in (attention, layer):
        assert row.error is not None
        turned, plain = row.error["norm"], row.errors["int4, not rotated"]["norm"]
        assert turned < 0.5 * plain
        assert row.errors["bf16"]["norm"] < 0.1 * row.errors["fp8"]["norm"] < 0.1 * turned
    attention, layer = cached_rows(Cached(SMALL, outliers=False))
    for row in (attention, layer):
        assert row.error is not None
        assert row.error["norm"] == pytest.approx(row.errors["int4, not rotated"]["norm"], rel=0.1)
    assert 0.13 < attention.error["norm"] < 0.19  # type: ignore[index]
    assert 0.03 < attention.errors["fp8"]["norm"] < 0.045


def test_a_cache_that_keeps_everything_has_no_error() -> None:
    case = Cached(SMALL, outliers=True)
    right = case.attention(None)
    assert torch.equal(case.attention(lambda x: x), right)
    first, second = case.layer([right, right])
    assert torch.equal(first, second)


# --- QK4PV8: attention.md's contract, error floors against exact attention ---


def error_of(found: torch.Tensor, right: torch.Tensor) -> float:
    return float((found - right).norm() / right.norm())


def test_qk_error_floors_without_outliers() -> None:
    """0.147 with queries in NVFP4 too; these are FP16 or E4M3, and lose less: 0.115. Values alone: 0.037."""
    case = Smoothed(0.0, context=512, queries=16)
    right = case.exact
    assert error_of(case.values_alone(), right) == pytest.approx(0.037, rel=0.1)
    for qk in ("exact16", "fast8"):
        for smoothing in (False, True):
            assert error_of(case.attention(smoothing, qk), right) == pytest.approx(0.115, rel=0.1)


def test_qk_smoothing_recovers_keys_with_a_loud_channel() -> None:
    """1.0 unsmoothed, 0.142 smoothed: to what there is without the channel, by either product."""
    case = Smoothed(LOUD, context=512, queries=16)
    right = case.exact
    for qk in ("exact16", "fast8"):
        assert error_of(case.attention(False, qk), right) > 0.4
        assert error_of(case.attention(True, qk), right) < 0.142


def test_qk_placements_agree_where_a_channel_is_loud() -> None:
    """Within 2^-20 of the products' magnitudes where ΔS is whole; BF16 terms of it cost their own rounding."""
    case = Smoothed(LOUD, context=256, queries=8)
    q, k, found = case.keys(smoothing=True)
    assert found is not None
    group = q.shape[1] // k.shape[1]
    wide = k.repeat_interleave(group, 1)
    right = torch.einsum("qhd,khd->hqk", q, wide) + found.double().T[:, None]
    size = torch.einsum("qhd,khd->hqk", q.abs(), wide.abs()) + found.double().abs().T[:, None]
    shift = found.double().abs().T[:, None]
    for name, logits in placements(case).items():
        terms = int(name.split()[1]) if name.startswith("mma") else 3
        allowed = 2.0**-20 * size + (shift * 2.0 ** (-8 * terms) if terms < 3 else 0.0)
        assert bool(((logits.double() - right).abs() <= allowed).all()), name


# --- the table ---


def test_the_table(tmp_path: Path, source: Provenance, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every kind of row, on small shapes: a valid file that says that no GPU was there, and its rendering."""
    monkeypatch.setattr(outliers, "LONG", (256,))
    small = {"8B": SMALL, "1B": replace(SMALL, name="tinier")}
    monkeypatch.setattr(outliers, "SHAPES", small)
    monkeypatch.setattr(outliers, "CONTEXT", 128)
    found = outliers.table(Options(shapes=()), None, source, tmp_path / "cpu")
    assert isinstance(found, Table)
    content = json.loads((tmp_path / "cpu" / "outliers.json").read_text())
    validate(content)
    assert content["backend"] == "reference"
    assert len(content["rows"]) == 8 + 4 + 1 + 1
    assert all(row["ours_us"] is None and row["errors"] for row in content["rows"])
    assert "FAILED" not in render(content)
    said = whole("outliers")(results_of(tmp_path))
    assert "Computed by the CPU references, no GPU kernel involved" in said
    assert "int4, not rotated: norm" in said
    assert len({json.dumps(row["case"]) for row in content["rows"]}) == len(content["rows"])


def test_rows_are_errors(source: Provenance) -> None:
    row = outliers.untimed({"cache": "int4"}, {"ours": {"norm": 0.1, "worst_row": 0.2}, "p": {}})
    assert isinstance(row, Row)
    assert row.error == {"norm": 0.1, "worst_row": 0.2}
    assert [*row.errors] == ["p"]
