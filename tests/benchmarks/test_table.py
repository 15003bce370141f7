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

from benchmarks.harness import SHARDS
from benchmarks.provenance import Provenance
from benchmarks.table import CASE, Row, Table, geometric_mean, ratios, render, validate
from epicute.errors import ArgumentError

ERROR = {"norm": 1e-3, "worst_row": 2e-3}
KEYS = (
    "shape layer M N K weights cache batch length context heads kv_heads head_dim causal page qk "
    "pv smoothing accumulate composition out mix variant group tried legal schedule best"
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
        "error": ERROR.copy(),
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
    "half a peer's error": lambda t: row_of(t).update(errors={"fa4": {"norm": 1e-3}}),
    "NaN peer's error": lambda t: row_of(t).update(errors={"fa4": ERROR | {"norm": math.nan}}),
    "failed and compared": lambda t: row_of(t).update(errors={"fa4": ERROR}, failed={"fa4": "why"}),
    "a clock of nothing": lambda t: row_of(t).update(clocks_mhz={"ours": 0.0}),
    "NaN power": lambda t: row_of(t).update(watts={"cublas-bf16": math.nan}),
    "a clock of no candidate": lambda t: row_of(t).update(clocks_mhz={"fa4": 1400.0}),
    "power of a failed kernel": lambda t: row_of(t).update(
        ours_us=None, failed={"ours": "why"}, watts={"ours": 690.0}
    ),
    "launches of no candidate": lambda t: row_of(t).update(launches={"fa4": 1}),
    "half a launch": lambda t: row_of(t).update(launches={"ours": 0.5}),
    "negative bytes": lambda t: row_of(t).update(peak_bytes={"ours": -1}),
    "infinite perplexity": lambda t: row_of(t).update(perplexity={"ours": math.inf}),
    "perplexity of a failed model": lambda t: row_of(t).update(
        failed={"p": "why"}, perplexity={"p": 9.0}
    ),
    "perplexity of others alone": lambda t: row_of(t).update(ours_us=None, perplexity={"p": 9.0}),
    "errors of no one": lambda t: row_of(t).update(ours_us=None, errors={}),
    "peers' errors alone": lambda t: row_of(t).update(
        ours_us=None, error=None, errors={"fa4": ERROR}
    ),
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


def test_a_row_of_errors_has_no_time() -> None:
    table = example()
    row_of(table).update(ours_us=None, peers_us={}, floor_us=0.0, errors={"scaled-mm-fast": ERROR})
    validate(table)
    text = render(table)
    assert "error 1.0e-03 / 2.0e-03  scaled-mm-fast 1.0e-03 / 2.0e-03" in text
    assert "failed" not in text
    assert "µs" not in text


def test_clocks_and_power_stand_by_candidate() -> None:
    table = example()
    clocks, watts = {"ours": 1395.0, "cublas-bf16": 1410.0}, {"cublas-bf16": 690.5}
    row = Row({}, 10.0, 5.0, {"cublas-bf16": 11.0}, clocks_mhz=clocks, watts=watts).json()
    assert (row["clocks_mhz"], row["watts"]) == (clocks, watts)
    validate({**table, "rows": [row]})


def test_what_a_call_takes_stands_by_candidate() -> None:
    table = example()
    launches, sizes = {"ours": 5, "cublas-bf16": 0}, {"ours": 123456789}
    row = Row({}, 10.0, 5.0, {"cublas-bf16": 11.0}, launches=launches, peak_bytes=sizes).json()
    assert (row["launches"], row["peak_bytes"]) == (launches, sizes)
    table["rows"] = [row]
    validate(table)
    assert "launches ours 5, cublas-bf16 0  peak_bytes ours 1.234568e+08" in render(table)


def test_a_model_may_be_judged_and_not_timed() -> None:
    table = example()
    row_of(table).update(ours_us=None, peers_us={}, perplexity={"ours": 17.25, "p": 17.5})
    validate(table)
    text = render(table)
    assert "perplexity ours 17.25, p 17.5" in text
    assert "µs" not in text
    assert "failed" not in text


def test_every_shard_is_a_word_of_the_schema() -> None:
    table = example()
    for name, (n, k) in SHARDS.items():
        row_of(table)["case"] = {"layer": name, "N": n, "K": k}
        validate(table)


def test_empty_fields_are_left_out() -> None:
    empty = {"errors", "failed", "clocks_mhz", "watts", "launches", "peak_bytes", "perplexity"}
    empty |= {"standard_error"}
    assert not empty & Row({}, 1.0, 1.0).json().keys()
    row = Row({}, None, 0.0, error=ERROR, errors={"p": ERROR}, failed={"q": "why"}).json()
    assert (row["errors"], row["failed"]) == ({"p": ERROR}, {"q": "why"})


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


def test_ratios_are_per_format_accumulation_and_peer() -> None:
    def row(ours: float | None, peer: float, **case: str) -> dict[str, Any]:
        return {"case": case, "ours_us": ours, "peers_us": {"p": peer}}

    fast = {"weights": "fp8", "accumulate": "fast"}
    rows = [row(1.0, 2.0, **fast), row(2.0, 1.0, weights="bf16"), row(None, 1.0, **fast)]
    rows += [row(1.0, 8.0, **fast), row(4.0, 2.0, weights="fp8", accumulate="precise"), row(1, 3)]
    assert ratios(rows) == {
        ("fp8", "fast", "p"): [2.0, 8.0],
        ("fp8", "precise", "p"): [0.5],
        ("bf16", "-", "p"): [0.5],
        ("-", "-", "p"): [3.0],
    }


def test_ratios_may_be_per_other_keys() -> None:
    def row(peer: float, **case: Any) -> dict[str, Any]:
        return {"case": case, "ours_us": 1.0, "peers_us": {"fa4": peer}}

    rows = [row(2.0, head_dim=128), row(3.0, head_dim=64), row(4.0, head_dim=128, mix="equal")]
    assert ratios(rows, ("head_dim", "mix")) == {
        ("128", "-", "fa4"): [2.0],
        ("64", "-", "fa4"): [3.0],
        ("128", "equal", "fa4"): [4.0],
    }
    table = {**example(), "table": "attention"}
    table["rows"] = [{**row_of(table), **found} for found in rows]
    assert "geometric mean, head_dim 128, mix -, fa4 over ours: 2.000 (1)" in render(table)


def test_means_keep_accumulations_apart() -> None:
    table = example()
    for ours, accumulate in ((10.0, "fast"), (40.0, "fast"), (20.0, "precise")):
        case = {"weights": "fp8", "accumulate": accumulate}
        table["rows"].append(row_of(table) | {"case": case, "ours_us": ours, "peers_us": {"p": 20}})
    text = render(table)
    assert "fp8 weights, accumulate fast, p over ours: 1.000 (2)" in text
    assert "fp8 weights, accumulate precise, p over ours: 1.000 (1)" in text
    assert "8B qkv" in text
    assert "accumulate precise" in text.splitlines()[4]


def test_text_shows_ratio_floor_and_mean() -> None:
    text = render(example())
    for part in ("8B qkv", "50% of floor", "cublas-bf16 11.0 (1.10x)", "over ours: 1.100 (1)"):
        assert part in text
