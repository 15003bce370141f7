"""Costs around a kernel: the rows made of two processes' reports, and the clock of a call."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks import calls
from benchmarks.data import Layer
from benchmarks.harness import Options
from benchmarks.provenance import Provenance
from benchmarks.table import validate
from benchmarks.timing import Timer


def report(**changed: Any) -> dict[str, Any]:
    times = {"plan": 4e6, "run": 900.0, "call": 12.0, "bare": 7.0, "peer": 9.0}
    return {"composition": "Store", "weights": "bf16", **times, **changed}


def test_rows_of_two_processes() -> None:
    warm = [report(plan=3e5), report(plan=2e4)]
    rows = list(calls.rows([report(plan=9e6), report()], warm))
    found = [(row.case["variant"], row.ours_us) for row in rows]
    assert found == [
        ("first-compile", 9e6),
        ("compile", 4e6),
        ("first-load", 3e5),
        ("load", 2e4),
        ("first-run", 900.0),
        ("first-run", 900.0),
        ("call", 12.0),
        ("call", 12.0),
    ]
    assert (rows[-1].floor_us, rows[-1].peers_us) == (7.0, {"cublas-bf16": 9.0})


def test_a_failed_kind_says_so_in_each_of_its_rows(source: Provenance, tmp_path: Path) -> None:
    broken = {"composition": "qkv", "weights": "fp8", "failed": "CompileError: spills"}
    rows = list(calls.rows([report(), broken], [report(), broken]))
    failed = [row for row in rows if row.failed]
    assert [row.case["variant"] for row in failed] == ["compile", "load", "first-run", "call"]
    assert all(row.failed == {"ours": "CompileError: spills"} for row in failed)


def test_a_table_of_reports(
    source: Provenance, tmp_path: Path, timer: Timer, monkeypatch: pytest.MonkeyPatch
) -> None:
    caches = []

    def fresh(cache: str) -> list[dict[str, Any]]:
        caches.append(cache)
        return [report(), report()]

    monkeypatch.setattr(calls, "_fresh", fresh)
    table = calls.table(Options(shapes=()), timer, source, tmp_path)
    validate(table.content)
    assert len(table.rows) == 8
    assert caches[0] == caches[1]
    assert not Path(caches[0]).exists()


def test_a_process_that_dies_is_a_row(
    source: Provenance, tmp_path: Path, timer: Timer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calls.sys, "executable", "/bin/false")
    (row,) = calls.table(Options(shapes=()), timer, source, tmp_path).rows
    assert row["ours_us"] is None
    assert "ended with 1" in row["failed"]["ours"]


def test_the_clock_of_a_call() -> None:
    counts = {"a": 0, "b": 0, "wait": 0}

    def counted(name: str) -> Any:
        return lambda: counts.update({name: counts[name] + 1})

    found = calls.per_call(counted("a"), counted("b"), wait=counted("wait"), calls=10, batches=4)
    assert counts == {"a": 50, "b": 50, "wait": 11}
    assert all(0 < time < 1000 for time in found)


@pytest.mark.usefixtures("cpu_plan")
@pytest.mark.parametrize(("name", "weights"), [("plain", "bf16"), *calls.KINDS])
def test_every_kind_has_its_operands(name: str, weights: str, cpu_plan: Any) -> None:
    plain = name == "plain"
    options = Options(shapes=(), device="cpu", check_rows=1)
    layer = Layer(calls.TINY, "o" if plain else name, 16, options, copies=1)
    text, composition, operands = calls._epilogue(layer, weights, plain)
    (packed,) = layer.packed(composition, weights)
    x = calls.activations(layer, weights)[0][0]
    cpu_plan(composition, packed, x_dtype=x.dtype).run(x, packed, **operands)
    assert text.count(">>") or plain
    for output in ("out", "out_fp8", "q_out"):
        if output in operands:
            assert operands[output].float().isfinite().all()


def test_the_bare_call_binds_what_run_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    launched: list[tuple[Any, ...]] = []
    compiled = SimpleNamespace(function=lambda *arguments: launched.append(arguments))
    monkeypatch.setattr(calls.jit, "compile", {"the kernel": compiled}.__getitem__)
    x, packed = torch.zeros(2), SimpleNamespace(raw="bytes")
    plan = SimpleNamespace(kernel="the kernel", bind=lambda *given: (*given, "bound"))
    bare = calls._bare(plan, x, packed, {"out": x})
    bare()
    bare()
    assert len(launched) == 2
    assert launched[0] == ("bytes", (x, packed, {"out": x}, "bound"))
