"""Tables of several runs: what is kept, what is measured again, and when a run stops."""

from __future__ import annotations

import gc
import json
import time
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks import attention, packed_prefill, prefill_layer
from benchmarks.__main__ import STARTED, options_of, parse, progress_of
from benchmarks.harness import Options, Session, fill
from benchmarks.provenance import Provenance
from benchmarks.resume import Progress, earlier_rows, of_case, place
from benchmarks.table import Row, Table, validate

PROTOCOL = Options(()).protocol
CASES = [
    {"shape": shape, "cache": "bf16", "batch": 1, "length": length}
    for shape in ("8B", "1B")
    for length in (512, 2048)
]


@dataclass
class Case:
    case: dict[str, Any]


def rows_of(case: dict[str, Any], us: float = 1.0) -> list[Row]:
    """One for each format of weights."""
    return [Row({**case, "weights": w, "variant": "sdpa"}, us, 0.5) for w in ("fp8", "bf16")]


def run(
    source: Provenance,
    folder: Path,
    cases: list[dict[str, Any]],
    *,
    progress: Progress | None = None,
    measure: Callable[[Case, Session], list[Row]] | None = None,
) -> Table:
    """One run of a table, of the cases that are not measured yet."""
    rows = earlier_rows([folder / "t.json"], source, PROTOCOL)
    progress = progress or Progress(rows)
    table = Table("prefill-layer", "p", PROTOCOL + "; more", "f", source, folder / "t.json")
    left = progress.left(map(Case, cases), 2)
    measured = measure or (lambda case, session: rows_of(case.case))
    return fill(table, left, measured, None, 1, progress)  # type: ignore[arg-type]


def test_runs_add_up_to_one_table(source: Provenance, tmp_path: Path) -> None:
    """In the table's own order, each row with the commit and the day of its run."""
    later = replace(source, commit="later", date="2026-12-01", driver="581.0")
    run(source, tmp_path, CASES[:1] + CASES[3:])
    table = run(later, tmp_path, CASES)
    validate(table.content)
    assert json.loads((tmp_path / "t.json").read_text()) == table.content
    told = [(row["case"]["shape"], row["case"]["length"], row["commit"]) for row in table.rows]
    assert told == [
        *[("1B", 512, "later")] * 2,
        *[("1B", 2048, source.commit)] * 2,
        *[("8B", 512, source.commit)] * 2,
        *[("8B", 2048, "later")] * 2,
    ]
    assert [row["case"]["weights"] for row in table.rows[:2]] == ["fp8", "bf16"]
    assert (table.content["commit"], table.rows[-1]["date"]) == ("later", "2026-12-01")
    again = run(later, tmp_path, CASES, measure=never)
    assert again.rows == table.rows


def never(case: Case, session: Session) -> list[Row]:
    raise AssertionError(f"measured again: {case.case}")


@pytest.mark.parametrize("failed", ["ours", "compile-fp8"])
def test_what_failed_is_measured_again(failed: str, source: Provenance, tmp_path: Path) -> None:
    def measure(case: Case, session: Session) -> list[Row]:
        if case.case["length"] == 512:
            return [
                replace(row, failed={"ours": "said"}, ours_us=None) for row in rows_of(case.case)
            ]
        return rows_of(case.case)

    run(source, tmp_path, CASES, measure=measure)
    table = run(source, tmp_path, CASES)
    assert len(table.rows) == 8
    assert not any("failed" in row for row in table.rows)


def test_a_case_that_cannot_be_made_is_replaced_whole(source: Provenance, tmp_path: Path) -> None:
    """Its one row has no format of weights."""
    first = run(source, tmp_path, CASES[:1], measure=never)
    assert "AssertionError" in first.rows[0]["failed"]["ours"]
    table = run(source, tmp_path, CASES[:1])
    assert [row["case"]["weights"] for row in table.rows] == ["fp8", "bf16"]


def test_a_run_ends_in_time(
    source: Provenance, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """Cases of 10 s and a budget of 25: two fit; the rest is for another run."""
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])

    def measure(case: Case, session: Session) -> list[Row]:
        now[0] += 10.0
        return rows_of(case.case)

    progress = Progress((), deadline=125.0)
    table = run(source, tmp_path, CASES, progress=progress, measure=measure)
    assert len(table.rows) == 4
    assert progress.passed == 2
    assert "no time for 2 cases" in capsys.readouterr().out
    assert len(run(source, tmp_path, CASES).rows) == 8


def test_formats_that_are_cases_of_their_own_keep_their_rows(
    source: Provenance, tmp_path: Path
) -> None:
    """As in projections and search: measuring one does not take the other's row away."""
    cases = [{**CASES[0], "weights": w} for w in ("bf16", "fp8")]

    def measure(case: Case, session: Session) -> list[Row]:
        return [Row(case.case, 1.0, 0.5)]

    table = run(source, tmp_path, cases, progress=Progress(identity=dict), measure=measure)
    assert len(table.rows) == 2
    progress = Progress(table.rows, identity=dict)
    assert not list(progress.left(map(Case, cases), 1))


def test_no_time_at_all_keeps_what_is_there(source: Provenance, tmp_path: Path) -> None:
    run(source, tmp_path, CASES[:1])
    rows = earlier_rows([tmp_path / "t.json"], source, PROTOCOL)
    table = run(
        source, tmp_path, CASES, progress=Progress(rows, time.monotonic() - 1), measure=never
    )
    assert [of_case(row["case"]) for row in table.rows] == [of_case(CASES[0])] * 2


@pytest.mark.parametrize(
    "change",
    [{"device": "NVIDIA H100"}, {"torch": "2.12.0"}, {"dsl": "4.9"}, {"protocol": "short"}],
)
def test_rows_of_others_are_left_out(
    change: dict[str, str], source: Provenance, tmp_path: Path, capsys: Any
) -> None:
    run(source, tmp_path, CASES[:1])
    protocol = change.get("protocol", PROTOCOL)
    other = replace(source, **{n: x for n, x in change.items() if n != "protocol"})
    assert earlier_rows([tmp_path / "t.json"], other, protocol) == []
    assert next(iter(change)) in capsys.readouterr().out
    assert len(earlier_rows([tmp_path / "none.json", tmp_path / "t.json"], source, PROTOCOL)) == 2


@given(st.permutations(CASES), st.integers(0, 4))
def test_any_order_of_runs_measures_every_case_once(order: list[Any], first: int) -> None:
    rows = [row.json() for case in order[:first] for row in rows_of(case)]
    left = list(Progress(rows).left(map(Case, CASES), 2))
    assert sorted(str(c.case) for c in left) == sorted(map(str, order[first:]))
    assert sorted(map(place, CASES)) == [place(c) for c in (CASES[2], CASES[3], *CASES[:2])]


def test_a_case_that_was_measured_is_let_go(source: Provenance, tmp_path: Path) -> None:
    """With its weights, before the next one is made."""
    alive: list[weakref.ref[Case]] = []

    def made() -> Iterator[Case]:
        for case in CASES:
            gc.collect()
            assert all(ref() is None for ref in alive)
            yield Case(case)

    def measure(case: Case, session: Session) -> list[Row]:
        alive.append(weakref.ref(case))
        return rows_of(case.case)

    table = Table("prefill-layer", "p", PROTOCOL, "f", source, tmp_path / "t.json")
    progress = Progress()
    fill(table, progress.left(made(), 2), measure, None, 1, progress)  # type: ignore[arg-type]
    assert len(alive) == len(CASES)


def test_the_command_line(source: Provenance, tmp_path: Path) -> None:
    run(source, tmp_path, CASES[:1])
    (tmp_path / "t.json").rename(tmp_path / "prefill-layer.json")

    def progress(*words: str, table: str = "prefill-layer") -> Progress:
        given_ = parse([table, *words])
        return progress_of(given_, table, tmp_path, options_of(given_, table), source)

    assert progress() == Progress()
    assert (len(progress("--resume").rows), progress("--resume").deadline) == (2, None)
    budget = progress("--budget", "600")
    assert len(budget.rows) == 2
    assert budget.deadline == STARTED + 600
    assert progress("--budget", "600", table="gemm") == Progress()


@pytest.mark.parametrize(
    ("module", "count"), [(prefill_layer, 3), (packed_prefill, 2), (attention, 1)]
)
def test_only_what_is_left_is_compiled(module: Any, count: int) -> None:
    options = Options(("1B",), device="cpu", lengths=(512, 1024))
    cases = list(module.cases(options))
    rows = [
        Row(
            {**case.case, "weights": weights, "accumulate": accumulate, "page": 128}, 1.0, 1.0
        ).json()
        for case in cases
        for weights, accumulate in prefill_layer.ROWS[:count]
    ]
    assert list(module.kernels(replace(options, progress=Progress(rows)))) == []
    rest = replace(options, progress=Progress(rows[count:]))
    assert 0 < len(list(module.kernels(rest))) <= len(list(module.kernels(options)))
