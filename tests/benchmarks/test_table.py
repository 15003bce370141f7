"""A table: what the schema takes and refuses, and that its file is whole after each row."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.provenance import Provenance
from benchmarks.table import CASE, Row, Table, geometric_mean, means, render, validate
from epicute.errors import ArgumentError

KEYS = (
    "shape layer M N K weights cache batch length context heads kv_heads head_dim causal page qk "
    "pv smoothing accumulate composition out mix variant group"
)


def example() -> dict[str, Any]:
    head = [
        "table",
        "paper",
        "device",
        "driver",
        "torch",
        "dsl",
        "commit",
        "date",
        "protocol",
        "floor",
    ]
    row = {
        "case": {"shape": "8B", "layer": "qkv", "M": 2048, "causal": True},
        "ours_us": 10.0,
        "floor_us": 5,
        "peers_us": {"cublas-bf16": 11.0},
        "error": {"norm": 1e-3, "worst_row": 2e-3},
    }
    return {**dict.fromkeys(head, "said"), "rows": [row]}


def test_case_keys_are_the_designs() -> None:
    assert list(CASE) == KEYS.split()


def test_an_example_is_valid() -> None:
    validate(example())


def row_of(table: dict[str, Any]) -> dict[str, Any]:
    return table["rows"][0]


BREAKS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "no floor sentence": lambda t: t.update(floor=""),
    "missing head": lambda t: t.pop("dsl"),
    "unknown head": lambda t: t.update(note="x"),
    "missing row key": lambda t: row_of(t).pop("error"),
    "unknown row key": lambda t: row_of(t).update(spread=0.1),
    "unknown case key": lambda t: row_of(t)["case"].update(tile=128),
    "unknown word": lambda t: row_of(t)["case"].update(layer="gate"),
    "a truth for a count": lambda t: row_of(t)["case"].update(M=True),
    "a count for a truth": lambda t: row_of(t)["case"].update(causal=1),
    "a text for a count": lambda t: row_of(t)["case"].update(N="6144"),
    "NaN time": lambda t: row_of(t).update(ours_us=math.nan),
    "zero time": lambda t: row_of(t).update(ours_us=0.0),
    "no time and no reason": lambda t: row_of(t).update(ours_us=None),
    "negative floor": lambda t: row_of(t).update(floor_us=-1.0),
    "infinite peer": lambda t: row_of(t)["peers_us"].update({"fa4": math.inf}),
    "NaN error": lambda t: row_of(t)["error"].update(norm=math.nan),
    "half an error": lambda t: row_of(t)["error"].pop("worst_row"),
    "failed without a reason": lambda t: row_of(t).update(failed={"fa4": ""}),
    "failed and timed": lambda t: row_of(t).update(failed={"cublas-bf16": "why"}),
}


@pytest.mark.parametrize("broken", BREAKS)
def test_departures_are_refused(broken: str) -> None:
    table = copy.deepcopy(example())
    BREAKS[broken](table)
    with pytest.raises(ArgumentError):
        validate(table)


def test_a_failed_kernel_has_no_time_but_a_reason() -> None:
    table = example()
    row_of(table).update(ours_us=None, error=None, failed={"ours": "CompileError: spills"})
    validate(table)
    assert "FAILED ours: CompileError: spills" in render(table)


def test_the_file_is_whole_after_every_row(source: Provenance, tmp_path: Path) -> None:
    path = tmp_path / "new" / "gemm.json"
    table = Table("gemm", "paper", "protocol", "floor", source, path)
    for count in (1, 2):
        table.add(Row({"shape": "8B"}, 2.0, 1.0, {"peer": 3.0}))
        found = json.loads(path.read_text(encoding="utf-8"))
        validate(found)
        assert found == table.content
        assert len(found["rows"]) == count
    assert [p.name for p in path.parent.iterdir()] == ["gemm.json"]


def test_a_bad_row_does_not_reach_the_file(source: Provenance, tmp_path: Path) -> None:
    table = Table("gemm", "paper", "protocol", "floor", source, tmp_path / "gemm.json")
    with pytest.raises(ArgumentError):
        table.add(Row({"tile": 1}, 2.0, 1.0))
    assert not table.rows
    assert not table.path.exists()


@given(st.lists(st.floats(1e-3, 1e3), min_size=1), st.floats(0.5, 2))
def test_geometric_mean(ratios: list[float], factor: float) -> None:
    mean = geometric_mean(ratios)
    assert min(ratios) * (1 - 1e-9) <= mean <= max(ratios) * (1 + 1e-9)
    assert math.isclose(geometric_mean([factor * r for r in ratios]), factor * mean)
    assert math.isclose(geometric_mean([1 / r for r in ratios]), 1 / mean)


def test_means_are_per_format_and_peer() -> None:
    def row(weights: str, ours: float | None, peer: float) -> dict[str, Any]:
        return {"case": {"weights": weights}, "ours_us": ours, "peers_us": {"p": peer}}

    rows = [row("fp8", 1.0, 2.0), row("fp8", 1.0, 8.0), row("bf16", 2.0, 1.0), row("fp8", None, 1)]
    found = means(rows)
    assert found.keys() == {("fp8", "p"), ("bf16", "p")}
    assert found["fp8", "p"] == pytest.approx((4.0, 2))
    assert found["bf16", "p"] == pytest.approx((0.5, 1))


def test_text_shows_ratio_floor_and_mean() -> None:
    text = render(example())
    for part in ("8B qkv", "50% of floor", "cublas-bf16 11.0 (1.10x)", "over ours: 1.100 (1)"):
        assert part in text
