"""A figure from the JSON alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.plots import draw, main, series
from benchmarks.provenance import Provenance
from benchmarks.table import Row, Table

pytest.importorskip("matplotlib", reason="the figures' library, extra `bench`")


@pytest.fixture
def table(source: Provenance, tmp_path: Path) -> dict[str, Any]:
    found = Table("gemm", "paper", "protocol", "floor", source, tmp_path / "gemm.json")
    case = {"shape": "8B", "layer": "o", "M": 2048, "N": 4096, "K": 4096}
    found.add(Row(case, 80.0, 40.0, {"cublas-bf16": 100.0, "quack-gemm": 160.0}))
    failed = {"ours": "CompileError: no", "quack-gemm": "TypeError: no"}
    found.add(Row(case, None, 40.0, {"cublas-bf16": 80.0}, failed=failed))
    return found.content


def test_shares_of_the_floor(table: dict[str, Any]) -> None:
    shown, found = series(table)
    assert shown == "share of the floor, %"
    assert found == {
        "ours": [50.0, None],
        "cublas-bf16": [40.0, 50.0],
        "quack-gemm": [25.0, None],
    }


def test_times_where_there_is_no_floor(table: dict[str, Any]) -> None:
    table["rows"][0]["floor_us"] = 0.0
    assert series(table)[0] == "µs"
    assert series(table)[1]["ours"] == [80.0, None]


def test_rates_of_layers_and_of_attention(table: dict[str, Any], tmp_path: Path) -> None:
    case = {"shape": "8B", "weights": "fp8", "batch": 1, "length": 2048}
    errors = {"cublas-bf16": {"norm": 0.01, "worst_row": 0.02}}
    rows = [{**row, "case": case, "errors": errors} for row in table["rows"]]
    layers = {**table, "table": "prefill-layer", "rows": rows}
    shown, found = series(layers)
    assert shown == "TFLOP/s"
    flops = 2 * 2048 * 218.10e6 + 2 * 2048**2 * 4096
    assert found["ours"] == [pytest.approx(flops / 80e6, rel=1e-4), None]
    draw(layers, tmp_path / "layers.svg")


def test_a_models_quality_has_no_bar(table: dict[str, Any], tmp_path: Path) -> None:
    timed = {**table["rows"][0], "case": {"batch": 1, "length": 160}}
    judged = {**timed, "ours_us": None, "peers_us": {}, "perplexity": {"ours": 17.0}}
    model = {**table, "table": "prefill-model", "rows": [judged, timed]}
    shown, found = series(model)
    assert shown == "tokens/s"
    assert found["ours"] == [pytest.approx(2e6)]
    draw(model, tmp_path / "model.svg")


def of_errors(table: dict[str, Any]) -> dict[str, Any]:
    """The same table about errors: of the first row's peers one failed, of the second ours."""
    error = {"norm": 0.01, "worst_row": 0.02}
    first, second = ({**row, "ours_us": None, "peers_us": {}} for row in table["rows"])
    first |= {"error": error, "errors": {"p": error | {"norm": 0.04}}, "failed": {"q": "no"}}
    second |= {"errors": {"p": error}, "failed": {"ours": "no"}}
    return {**table, "rows": [first, second]}


def test_errors_where_the_table_is_about_them(table: dict[str, Any], tmp_path: Path) -> None:
    shown, found = series(of_errors(table))
    assert shown == "relative error by norm"
    assert found == {"ours": [0.01, None], "p": [0.04, 0.01], "q": [None, None]}
    draw(of_errors(table), tmp_path / "accuracy.svg")
    assert (tmp_path / "accuracy.svg").stat().st_size > 1000


@pytest.mark.parametrize("floors", [True, False])
def test_equal_tables_give_equal_figures(
    floors: bool, table: dict[str, Any], tmp_path: Path
) -> None:
    for row in table["rows"]:
        row["floor_us"] *= floors
    for name in ("a.svg", "b.svg", "c.png"):
        draw(table, tmp_path / name)
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()
    assert (tmp_path / "c.png").read_bytes().startswith(b"\x89PNG")


def test_from_the_command_line(table: dict[str, Any], tmp_path: Path) -> None:
    main([str(tmp_path / "gemm.json"), "--out", str(tmp_path / "figures"), "--format", "png"])
    assert (tmp_path / "figures" / "gemm.png").stat().st_size > 1000


def test_an_empty_table_draws(table: dict[str, Any], tmp_path: Path) -> None:
    draw({**table, "rows": []}, tmp_path / "empty.svg")
    assert json.loads((tmp_path / "gemm.json").read_text())["rows"]
