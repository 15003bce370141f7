"""The roofline from the JSON alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.floors import BANDWIDTH, PEAK, peak_at
from benchmarks.points import points
from benchmarks.provenance import Provenance
from benchmarks.readme import Results
from benchmarks.roofline import ceilings, draw, main, places, title
from benchmarks.table import Row, Table

pytest.importorskip("matplotlib", reason="the figures' library, extra `bench`")


@pytest.fixture
def table(source: Provenance, tmp_path: Path) -> dict[str, Any]:
    """One product, measured in BF16 and failed in FP8."""
    path = Results.of(tmp_path).folder / "gemm.json"
    found = Table("gemm", "paper", "protocol", "floor", source, path)
    case = {"shape": "8B", "layer": "o", "M": 2048, "N": 4096, "K": 4096, "accumulate": "fast"}
    clocks = {"ours": 1400.0, "cublas-bf16": 1500.0}
    bf16 = {**case, "weights": "bf16"}
    found.add(Row(bf16, 103.0, 69.0, {"cublas-bf16": 105.0}, clocks_mhz=clocks))
    found.add(Row({**case, "weights": "fp8"}, None, 35.0, failed={"ours": "CompileError: no"}))
    return found.content


def test_ceilings_are_nominal_and_at_the_median_clock(table: dict[str, Any]) -> None:
    found = ceilings(points(table))
    assert [(roof.weights, roof.nominal) for roof in found] == [
        ("bf16", True),
        ("fp8", True),
        ("bf16", False),
        ("fp8", False),
    ]
    assert [roof.rate for roof in found[:2]] == list(PEAK.values())
    assert [roof.rate for roof in found[2:]] == [peak_at(kind, 1450.0) for kind in PEAK]
    assert found[0].ridge == PEAK["bf16"] / BANDWIDTH
    assert found[0].says == "BF16 peak at nominal boost, 1830 MHz: 989.5 TFLOP/s"
    assert found[2].says == "BF16 peak at median clock, 1450 MHz: 784 TFLOP/s"


def test_without_clocks_peaks_are_nominal(table: dict[str, Any]) -> None:
    del table["rows"][0]["clocks_mhz"]
    assert all(roof.nominal for roof in ceilings(points(table)))


@pytest.mark.parametrize("rows", [0, 1, 2])
def test_equal_tables_give_equal_figures(rows: int, table: dict[str, Any], tmp_path: Path) -> None:
    table["rows"] = table["rows"][:rows]
    for name in ("a.svg", "b.svg", "c.png"):
        draw(table, tmp_path / name)
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()
    assert (tmp_path / "c.png").read_bytes().startswith(b"\x89PNG")


def test_from_the_command_line(table: dict[str, Any], tmp_path: Path) -> None:
    assert main(["--root", str(tmp_path)]) == 0
    texts = {path.read_text(encoding="utf-8") for path in places(tmp_path)}
    assert len(texts) == 1
    assert f"<title>{title(table)}</title>" in texts.pop()
    (Results.of(tmp_path).folder / "gemm.json").unlink()
    assert main(["--root", str(tmp_path)]) == 1


def test_committed_figures_are_of_the_committed_table() -> None:
    """By name: the drawing itself differs between versions of matplotlib."""
    table = json.loads((Results.of().folder / "gemm.json").read_text(encoding="utf-8"))
    beside, in_docs = (path.read_text(encoding="utf-8") for path in places())
    assert beside == in_docs
    assert f"<title>{title(table)}</title>" in beside, "run python -m benchmarks.roofline"
