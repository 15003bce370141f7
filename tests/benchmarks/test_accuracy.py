"""FP8 accumulation error: operands, whose error a row holds, and what is an error no longer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import accuracy
from benchmarks.accuracy import ACCUMULATE, DEPTHS, FP8, MEANS, PEERS, Product
from benchmarks.harness import Options, Session
from benchmarks.plots import series
from benchmarks.provenance import Provenance
from benchmarks.readme import Results, whole
from benchmarks.table import Row, Table, validate
from benchmarks.timing import Timer

OPTIONS = Options(shapes=(), device="cpu", check_rows=9)


def coarse(product: torch.Tensor) -> torch.Tensor:
    """An accumulator that kept 7 fraction bits, as float32."""
    return product.to(torch.bfloat16).float()


@pytest.fixture
def coarse_where_fast(cpu_plan: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The CPU's plan and torch._scaled_mm, both coarse in fast mode; ours twice so."""
    right, right_mm = cpu_plan.run, torch._scaled_mm

    def run(self: Any, x: torch.Tensor, packed: Any, **operands: torch.Tensor) -> None:
        right(self, x, packed, **operands)
        if self.accumulate == "fast":
            operands["out"].copy_(1.01 * coarse(operands["out"]))

    def scaled_mm(*given: Any, use_fast_accum: bool, out: torch.Tensor, **more: Any) -> Any:
        right_mm(*given, use_fast_accum=use_fast_accum, out=out, **more)
        return out.copy_(coarse(out)) if use_fast_accum else out

    monkeypatch.setattr(cpu_plan, "run", run)
    monkeypatch.setattr(torch, "_scaled_mm", scaled_mm)
    return cpu_plan


def measured(timer: Timer, mean: float = 0.5) -> list[Row]:
    return accuracy.measure(Product(256, mean, OPTIONS), Session(timer, rounds=1))


@pytest.mark.parametrize("mean", MEANS)
def test_operands_are_what_the_protocol_says(mean: float) -> None:
    product = Product(1024, mean, OPTIONS)
    for codes, rows in zip(product.codes, (256, 512), strict=True):
        assert (codes.shape, codes.dtype) == ((rows, 1024), FP8)
        values = codes.float()
        assert values.mean().item() == pytest.approx(mean, abs=0.01)
        assert values.std().item() == pytest.approx(0.5, rel=0.02)
    assert product.rows.tolist()[0] == 0
    assert product.rows.tolist()[-1] == 255
    assert product.rows.unique().numel() == 9


def test_the_reference_is_the_product_of_the_codes() -> None:
    product = Product(64, 0.5, OPTIONS)
    x, w = (codes.to(torch.float64) for codes in product.codes)
    assert torch.equal(product.exact(), (x @ w.T)[product.rows])


@pytest.mark.usefixtures("coarse_where_fast")
@pytest.mark.parametrize("mean", MEANS)
def test_a_row_holds_ours_by_accumulation_and_the_same_peers(timer: Timer, mean: float) -> None:
    fast, precise = (row.json() for row in measured(timer, mean))
    assert (fast["case"]["accumulate"], precise["case"]["accumulate"]) == ACCUMULATE
    assert fast["case"]["variant"] == f"mean {mean:g}"
    assert fast["errors"] == precise["errors"]
    assert [*fast["errors"]] == [*PEERS]
    assert fast["error"]["norm"] == pytest.approx(0.01, rel=0.3)
    assert 1e-3 < fast["errors"]["scaled-mm-fast"]["norm"] < 3e-3
    assert precise["error"]["norm"] < 1e-6
    assert precise["errors"]["scaled-mm-precise"]["norm"] < 1e-6
    for row in (fast, precise):
        assert (row["ours_us"], row["peers_us"], row["floor_us"]) == (None, {}, 0.0)
        assert row["error"]["worst_row"] >= row["error"]["norm"]
        assert "failed" not in row


@pytest.mark.usefixtures("coarse_where_fast")
def test_the_file_is_one_of_errors(
    timer: Timer, source: Provenance, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(accuracy, "DEPTHS", (128, 256))
    table = accuracy.table(OPTIONS, timer, source, tmp_path)
    content = json.loads((tmp_path / "accuracy.json").read_text(encoding="utf-8"))
    assert content == table.content
    validate(content)
    assert "9 rows" in content["protocol"]
    said = [(row["case"]["K"], row["case"]["variant"], row["error"]) for row in content["rows"]]
    assert len(said) == len({str(words) for words in said}) == 2 * len(MEANS) * len(ACCUMULATE)
    assert series(content)[0] == "relative error by norm"
    assert "scaled-mm-precise: norm" in whole("accuracy")(Results(tmp_path))


@pytest.mark.parametrize("fault", ["unwritten", "row", "imprecise", "raises"])
def test_a_wrong_product_is_no_error_but_a_failure(
    fault: str,
    cpu_plan: Any,
    monkeypatch: pytest.MonkeyPatch,
    timer: Timer,
    source: Provenance,
    tmp_path: Path,
) -> None:
    """What precise may be off by, fast may: its error is the table's subject."""
    right = cpu_plan.run

    def run(self: Any, x: torch.Tensor, packed: Any, **operands: torch.Tensor) -> None:
        if fault == "raises":
            raise RuntimeError("launch failed")
        if fault != "unwritten":
            right(self, x, packed, **operands)
        if fault == "row":
            operands["out"][-1] *= 2
        if fault == "imprecise":
            operands["out"] *= 1.005

    monkeypatch.setattr(cpu_plan, "run", run)
    table = Table("accuracy", "paper", "protocol", "floor", source, tmp_path / "accuracy.json")
    for row in measured(timer):
        table.add(row)
    fast, precise = table.rows
    why = "RuntimeError" if fault == "raises" else "WrongResult"
    assert precise["failed"]["ours"].startswith(why)
    assert precise["error"] is None
    assert ("failed" in fast) == (fault != "imprecise")
    assert [*fast["errors"]] == [*precise["errors"]] == [*PEERS]


@pytest.mark.usefixtures("cpu_plan")
def test_a_peer_that_fails_is_named(timer: Timer, monkeypatch: pytest.MonkeyPatch) -> None:
    def scaled_mm(*given: Any, **more: Any) -> None:
        raise RuntimeError("no float32 output")

    monkeypatch.setattr(torch, "_scaled_mm", scaled_mm)
    for row in measured(timer):
        assert row.failed == dict.fromkeys(PEERS, "RuntimeError: no float32 output")
        assert row.error is not None


def test_exactly_these_kernels_are_run(
    cpu_plan: Any, timer: Timer, monkeypatch: pytest.MonkeyPatch
) -> None:
    planned = []
    make = cpu_plan.__init__

    def seen(self: Any, composition: Any, packed: Any, x_dtype: torch.dtype, **how: Any) -> None:
        make(self, composition, packed, x_dtype, **how)
        planned.append((composition.key(), packed.shape, x_dtype, self.accumulate))

    monkeypatch.setattr(cpu_plan, "__init__", seen)
    monkeypatch.setattr(accuracy, "DEPTHS", (256, 512))
    for depth in accuracy.DEPTHS:
        accuracy.measure(Product(depth, 0.0, OPTIONS), Session(timer, rounds=1))
    expected = []
    for kernel in accuracy.kernels(OPTIONS):
        key, asked = kernel.spec.resolved.composition.key(), kernel.spec.problem
        expected.append((key, (asked.columns, asked.depth), asked.dtype, asked.accumulate))
    assert planned == expected


def test_kernels_of_the_published_depths() -> None:
    found = [kernel.spec.problem for kernel in accuracy.kernels(Options(shapes=()))]
    assert [(p.depth, p.accumulate) for p in found] == [(k, a) for k in DEPTHS for a in ACCUMULATE]
    assert {p.columns for p in found} == {512}
