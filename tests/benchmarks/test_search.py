"""Table ``search``: who is timed, what a row says, and whom the summary names."""

from __future__ import annotations

import pickle
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import search
from benchmarks.__main__ import finish
from benchmarks.data import Layer, layers
from benchmarks.harness import LAYERS, SHARDS, Options, Session
from benchmarks.power import Reading
from benchmarks.provenance import Provenance
from benchmarks.resume import Progress
from benchmarks.search import Search, cases, kernels, measure, summary
from benchmarks.table import Row, Table, validate
from benchmarks.timing import Run, Sample, Slice, Timer
from epicute.gemm.choice import SMS, WIDTHS, schedules
from epicute.gemm.model import clocks
from epicute.gemm.schedule import ACCUMULATORS

MakeLayer = Callable[[str], Layer]
FORMATS = (("bf16", "fast"), ("fp8", "fast"), ("fp8", "precise"))
format_of = pytest.mark.parametrize(("weights", "accumulate"), FORMATS)


def tried(layer: Layer, tries: int) -> Layer:
    return replace(layer, options=replace(layer.options, tries=tries))


def row_of(found: Search, timer: Timer, source: Provenance) -> dict[str, Any]:
    (row,) = (row.json() for row in measure(found, Session(timer, rounds=2)))
    head = dict.fromkeys(["table", "paper", "protocol", "floor"], "said")
    validate({**head, **vars(source), "rows": [row]})
    return row


class Scripted:
    """Gives each candidate, in the order they are prepared, its µs per call."""

    def __init__(self, *times: float) -> None:
        self.left = iter(times)

    def prepare(self, run: Run, copies: int, least_us: float) -> Slice:
        for copy in range(copies):
            run(copy)
        time = next(self.left)
        return lambda: Sample([time], Reading())


# --- what is timed ---


@format_of
@pytest.mark.parametrize("m", [64, 256, 1024, 2048, 8192])
@pytest.mark.parametrize("name", LAYERS)
def test_the_chosen_and_the_cheapest_are_candidates(
    name: str, m: int, weights: str, accumulate: str
) -> None:
    (layer,) = layers(Options(("8B",), (name,), M=(m,), device="cpu", tries=4))
    found = Search(layer, weights, accumulate)
    names = [*found.candidates]
    assert names[0] == str(found.chosen)
    assert 4 <= len(names) <= 5
    problem, target = found.kernel.spec.problem, found.kernel.target
    assert (problem.expected_m, problem.accumulate) == (m, accumulate)
    every = schedules(problem, target, ACCUMULATORS)
    legal = {str(s): clocks(s, problem, m, SMS) for s in every}
    assert len(legal) == len(found.legal)
    assert names[0] in legal
    worst = max(legal[name] for name in names[1:])
    assert all(cost >= worst for other, cost in legal.items() if other not in names)


def test_the_chosen_schedule_comes_on_top_of_the_tries(layer: MakeLayer) -> None:
    found = Search(tried(layer("o"), 3), "fp8", "fast")
    last = replace(found.kernel, spec=replace(found.kernel.spec, schedule=found.legal[-1]))
    vars(found)["kernel"] = last
    names = [str(schedule) for schedule in (found.legal[-1], *found.legal[:3])]
    assert [*found.candidates] == names


@pytest.mark.parametrize("tries", [1, 5, 1000])
def test_tries_limit_what_is_timed(
    tries: int, cpu_plan: Any, layer: MakeLayer, timer: Any, source: Provenance
) -> None:
    found = Search(tried(layer("o"), tries), "fp8", "fast")
    case = row_of(found, timer, source)["case"]
    assert case["tried"] == timer.prepared == len(found.candidates)
    assert case["tried"] - tries in (0, 1) or case["tried"] < case["legal"] < tries
    families = Counter(replace(s, tile_n=8, stages=2) for s in found.candidates.values())
    assert max(families.values()) <= WIDTHS + 1


@pytest.mark.parametrize("accumulate", ["fast", "precise"])
def test_cases(accumulate: str) -> None:
    options = Options(
        ("1B",), ("o",), M=(64, 256), shards=True, device="cpu", accumulate=accumulate
    )
    found = list(cases(options))
    formats = ("bf16", "fp8") if accumulate == "fast" else ("fp8",)
    told = [(case.layer.name, case.layer.M, case.weights) for case in found]
    assert told == [(n, m, w) for n in ("o", *SHARDS) for m in (64, 256) for w in formats]
    assert {case.case["accumulate"] for case in found} == {accumulate}


def test_every_kernel_is_known_and_none_twice() -> None:
    options = Options(("1B",), M=(64, 2048, 4096), device="cpu", tries=3)
    digests = [kernel.key.digest for kernel in kernels(options)]
    assert len(digests) == len(set(digests))
    made = [kernel for found in cases(options) for kernel in found.kernels()]
    assert {kernel.key.digest for kernel in made} == set(digests)
    assert len(made) > len(digests)
    for kernel in made[:4]:  # as it reaches another process
        assert pickle.loads(pickle.dumps(kernel)).key.digest == kernel.key.digest


@format_of
def test_exactly_these_kernels_are_run(
    weights: str,
    accumulate: str,
    planned: list[Any],
    layer: MakeLayer,
    timer: Timer,
) -> None:
    found = Search(tried(layer("o"), 6), weights, accumulate)
    measure(found, Session(timer, rounds=1))
    specs = [kernel.spec for kernel in found.kernels()]
    asked = [(s.schedule, s.problem.expected_m, s.problem.accumulate) for s in specs]
    made = [(p.plan.schedule, p.plan.expected_m, p.plan.accumulate) for p in planned]
    assert made == asked
    assert made[0][1:] == (80, accumulate)


def test_the_largest_case_fits_the_card() -> None:
    """Weights of both formats, packed and not, x and the shared outputs, in bytes."""
    (layer,) = layers(Options(("405B",), ("gate_up",), M=(8192,), device="cpu"))
    weights = layer.copies * layer.N * layer.K * (2 + 2)  # BF16, and packed; FP8 takes less
    x = layer.copies * layer.M * layer.K * (2 + 1)
    outputs = layer.copies * layer.M * layer.N * 2
    quantising = layer.N * layer.K * 4 * 4  # four float32 matrices at a time
    assert weights + x + outputs + quantising < 120e9


# --- rows ---


@pytest.mark.usefixtures("cpu_plan")
@format_of
@pytest.mark.parametrize("name", LAYERS)
def test_a_row(
    name: str, weights: str, accumulate: str, layer: MakeLayer, source: Provenance
) -> None:
    found = Search(tried(layer(name), 2), weights, accumulate)
    names = [*found.candidates]
    times = [5.0, 4.0, 6.0][: len(names)]
    row = row_of(found, Scripted(*times), source)
    assert row["case"] == {
        **found.layer.case,
        "weights": weights,
        "accumulate": accumulate,
        "tried": len(names),
        "legal": len(found.legal),
        "schedule": names[0],
        "best": names[1],
    }
    assert (row["ours_us"], row["peers_us"]) == (5.0, {"best": 4.0})
    assert "failed" not in row
    assert 1e-4 < row["error"]["norm"] < row["error"]["worst_row"] < 5e-3  # BF16's rounding
    assert row["floor_us"] > 0


@pytest.mark.usefixtures("cpu_plan")
def test_the_chosen_one_may_be_the_best(layer: MakeLayer, timer: Any, source: Provenance) -> None:
    timer.reading = Reading(1400.0, 690.0)
    row = row_of(Search(tried(layer("o"), 4), "fp8", "fast"), timer, source)
    assert row["case"]["best"] == row["case"]["schedule"]
    assert row["peers_us"] == {"best": row["ours_us"]}
    assert row["clocks_mhz"] == {"ours": 1400.0, "best": 1400.0}


@pytest.mark.parametrize("fault", ["does not compile", "wrong", "unwritten"])
@pytest.mark.parametrize("lost", [0, 1])
def test_a_failing_schedule_does_not_lose_the_row(
    fault: str,
    lost: int,
    cpu_plan: Any,
    monkeypatch: pytest.MonkeyPatch,
    layer: MakeLayer,
    source: Provenance,
) -> None:
    """All write the same outputs: what one leaves there is no result of the next."""
    found = Search(tried(layer("o"), 4), "fp8", "fast")
    names = [*found.candidates]
    make, right = cpu_plan.__init__, cpu_plan.run

    def init(self: Any, *arguments: Any, **how: Any) -> None:
        make(self, *arguments, **how)
        if fault == "does not compile" and str(self.schedule) == names[lost]:
            raise RuntimeError("spills")

    def run(self: Any, x: torch.Tensor, packed: Any, **operands: torch.Tensor) -> None:
        mine = str(self.schedule) == names[lost]
        if not (mine and fault == "unwritten"):
            right(self, x, packed, **operands)
        if mine and fault == "wrong":
            operands["out"][0] *= 1.5

    monkeypatch.setattr(cpu_plan, "__init__", init)
    monkeypatch.setattr(cpu_plan, "run", run)
    row = row_of(found, Scripted(*(float(9 - n) for n in range(len(names) - 1))), source)
    case, failed = row["case"], row["failed"]
    assert case["tried"] == len(names) - 1
    assert case["schedule"] == names[0]
    assert case["best"] == names[-1]
    assert row["peers_us"] == {"best": 9.0 - len(names) + 2}
    assert [*failed] == ["ours" if lost == 0 else names[1]]
    (why,) = failed.values()
    assert why.startswith("RuntimeError: spills" if fault == "does not compile" else "WrongResult")
    assert row["ours_us"] == (None if lost == 0 else 9.0)


def test_a_row_without_any_time(
    cpu_plan: Any,
    monkeypatch: pytest.MonkeyPatch,
    layer: MakeLayer,
    timer: Timer,
    source: Provenance,
) -> None:
    monkeypatch.setattr(cpu_plan, "run", lambda *_, **__: None)
    found = Search(tried(layer("o"), 2), "bf16", "fast")
    row = row_of(found, timer, source)
    assert (row["ours_us"], row["peers_us"], row["case"]["tried"]) == (None, {}, 0)
    assert "best" not in row["case"]
    assert [*row["failed"]] == [*[*found.candidates][1:], "ours"]


@pytest.mark.usefixtures("cpu_plan")
def test_a_table_file(
    monkeypatch: pytest.MonkeyPatch,
    layer: MakeLayer,
    timer: Timer,
    source: Provenance,
    tmp_path: Path,
) -> None:
    made = [tried(layer(name), 2) for name in ("o", "gate_up")]
    monkeypatch.setattr(search, "layers", lambda options: made)
    options = Options(shapes=(), rounds=1, tries=2)
    table = search.table(options, timer, source, tmp_path)
    validate(table.content)
    assert table.content["table"] == "search"
    assert "the 2 legal ones of least clocks" in table.content["protocol"]
    found = [(row["case"]["layer"], row["case"]["weights"]) for row in table.rows]
    assert found == [(n, w) for n in ("o", "gate_up") for w in ("bf16", "fp8")]
    assert (tmp_path / "search.json").exists()


# --- the summary ---


def rows(*times: tuple[float | None, float | None], **case: Any) -> list[Row]:
    """A row for each (chosen, best) µs."""
    case = {"shape": "8B", "layer": "qkv", "N": 8, "K": 16, "accumulate": "fast"} | case
    case |= {"schedule": "128x256, mine", "best": "128x192, best"}
    found = []
    for chosen, best in times:
        failed = {} if chosen else {"ours": "CompileError: spills"}
        peers = {"best": best} if best else {}
        found.append(Row(case, chosen, 1.0, peers, failed=failed))
    return found


def test_the_summary_names_what_is_behind(
    source: Provenance, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table = Table("search", "paper", "protocol", "floor", source, tmp_path / "search.json")
    given = rows((100.0, 80.0), (102.9, 100.0), (100.0, 100.0), (None, 50.0), weights="fp8", M=64)
    given += rows((103.1, 100.0), weights="fp8", M=2048)
    given += rows((50.0, 50.0), weights="bf16", M=64)
    given += rows((None, None), weights="bf16", M=2048)
    for row in given:
        table.add(row)
    text = summary(table.content)
    both = "chosen 128x256, mine: {:.1f} µs  best 128x192, best: {:.1f} µs"
    assert text.splitlines() == [
        "bf16 weights, accumulate fast, M = 64: 1 case, best over chosen 1.000, worst 1.000",
        "bf16 weights, accumulate fast, M = 2048: 0 cases; 1 without a time of the chosen schedule",
        "fp8 weights, accumulate fast, M = 64: 3 cases, best over chosen 0.920, worst 0.800; "
        "1 without a time of the chosen schedule",
        f"  8B qkv 64×8×16  25.0% behind  {both.format(100, 80)}",
        "fp8 weights, accumulate fast, M = 2048: 1 case, best over chosen 0.970, worst 0.970",
        f"  8B qkv 2048×8×16  3.1% behind  {both.format(103.1, 100)}",
    ]
    capsys.readouterr()
    assert not finish(table)
    assert capsys.readouterr().out.count(text) == 1


def test_a_case_without_data_is_counted(source: Provenance, tmp_path: Path) -> None:
    case = {"layer": "o", "M": 64, "weights": "bf16", "accumulate": "fast"}
    table = Table("search", "paper", "protocol", "floor", source, tmp_path / "search.json")
    table.add(Row(case, None, 0.0, failed={"ours": "MemoryError: no"}))
    assert "M = 64: 0 cases; 1 without a time" in summary(table.content)


# --- several runs ---


def measured_before(found: Search, **more: Any) -> dict[str, Any]:
    case = {**found.case, "tried": 3, "legal": 70, "schedule": "one", "best": "other"}
    row = Row(case, 2.0, 1.0, {"best": 1.5}, {"norm": 0.0, "worst_row": 0.0}, **more)
    return {**row.json(), "commit": "before", "date": "2026-11-29"}


def resumed(options: Options, rows: list[dict[str, Any]], **more: Any) -> Options:
    return replace(options, progress=Progress(rows, **more))


def test_what_was_measured_is_passed_over_and_what_failed_is_not() -> None:
    options = Options(("1B",), ("o", "down"), M=(64, 256), device="cpu", tries=2)
    every = list(cases(options))
    done = [
        measured_before(every[0]),
        measured_before(every[3], failed={"other": "RuntimeError: no"}),
    ]
    told = [search.identity(found.case) for found in search.left(resumed(options, done))]
    assert told == [search.identity(found.case) for found in every[1:]]


def test_only_what_there_is_time_for_is_compiled() -> None:
    options = Options(("1B",), ("o",), M=(64, 256, 1024), device="cpu", tries=2)
    one = search.seconds(next(cases(options)))
    assert one == pytest.approx(6 * 0.09 * 3 + search.BUILDING)
    for room, count in ((None, 6), (1.5 * one, 2), (3.5 * one, 4)):
        deadline = None if room is None else time.monotonic() + room
        limited = resumed(options, [], deadline=deadline)
        assert len(list(search.fitting(limited))) == count
    made = {k.key.digest for k in kernels(resumed(options, [], deadline=time.monotonic() + 0.1))}
    assert made == {k.key.digest for k in next(cases(options)).kernels()}


@pytest.mark.usefixtures("cpu_plan")
def test_rows_of_several_runs_stand_in_one_table(
    monkeypatch: pytest.MonkeyPatch,
    layer: MakeLayer,
    timer: Timer,
    source: Provenance,
    tmp_path: Path,
) -> None:
    made = [tried(layer(name), 2) for name in ("o", "gate_up")]
    monkeypatch.setattr(search, "layers", lambda options: made)
    options = Options(shapes=(), rounds=1, tries=2)
    first, _, third, _ = cases(options)
    before = [measured_before(first), measured_before(third, failed={"other": "RuntimeError: no"})]
    table = search.table(resumed(options, before), timer, source, tmp_path)
    validate(table.content)
    told = [(r["case"]["layer"], r["case"]["weights"], r["commit"]) for r in table.rows]
    assert sorted(told) == [
        ("gate_up", "bf16", source.commit),
        ("gate_up", "fp8", source.commit),
        ("o", "bf16", "before"),
        ("o", "fp8", source.commit),
    ]
    again = search.table(resumed(options, table.rows), timer, source, tmp_path)
    assert sorted(map(str, again.rows)) == sorted(map(str, table.rows))
