"""Candidates beside each other: order, medians, sensors, and failures that stay their own."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import pairwise, permutations
from pathlib import Path
from random import Random
from typing import ClassVar

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.check import Error, WrongResult, budget, checker, compare
from benchmarks.harness import Options, Session, fill, shuffled
from benchmarks.power import Reading
from benchmarks.provenance import ROOT, Provenance
from benchmarks.table import Row, Table
from benchmarks.timing import COLD_BYTES, CudaTimer, Run, Sample, Slice, copies_for


class ScriptedTimer:
    """Slices return what each candidate's name is scripted to return, in turn.

    ``sensors`` are its readings, slice by slice; silent where not given.
    """

    def __init__(
        self,
        script: dict[str, list[list[float] | Exception]],
        sensors: dict[str, list[Reading]] | None = None,
    ) -> None:
        self.script, self.sensors = script, sensors or {}
        self.order: list[str] = []

    def prepare(self, run: Run, copies: int, least_us: float) -> Slice:
        (name,) = run(0)
        script = iter(self.script[name])
        sensors = iter(self.sensors.get(name, []))

        def sample() -> Sample:
            self.order.append(name)
            found = next(script)
            if isinstance(found, Exception):
                raise found
            return Sample(found, next(sensors, Reading()))

        return sample


def named(name: str) -> Callable[[], Run]:
    return lambda: lambda copy: {name: torch.zeros(1)}


def test_rounds_interleave_and_the_first_is_dropped() -> None:
    steady: list[list[float] | Exception] = [[999.0], [1.0], [2.0, 2.0, 50.0], [3.0]]
    timer = ScriptedTimer({name: list(steady) for name in "abc"})
    session = Session(timer, rounds=3, text="8B qkv")
    for name in "abc":
        session.add(name, named(name))
    session.measure(copies=4, least_us=1.0)
    rounds = [timer.order[start : start + 3] for start in range(0, 12, 3)]
    assert rounds == [shuffled("abc", "8B qkv", turn) for turn in range(4)]
    assert session.times == {name: [1.0, 2.0, 3.0] for name in "abc"}
    row = session.row({}, "a", {"peer": "b", "never added": "x"}, 0.5)
    assert (row.ours_us, row.peers_us, row.failed) == (2.0, {"peer": 2.0}, {})


def test_sensors_are_medians_of_the_rounds_that_count() -> None:
    script: dict[str, list[list[float] | Exception]] = {
        **{name: [[1.0]] * 4 for name in ("mine", "half", "mute")},
        "lost": [[1.0], [1.0], MemoryError("gone")],
    }
    clocks = [Reading(clock) for clock in (1980.0, 1400.0, 1380.0, 1390.0)]
    sensors = {
        "mine": [Reading(clock.clock_mhz, 690.0) for clock in clocks],
        "half": [Reading(), Reading(1500.0), Reading(), Reading(1600.0)],
        "lost": clocks,
    }
    session = Session(ScriptedTimer(script, sensors), rounds=3)
    for name in script:
        session.add(name, named(name))
    session.measure(copies=4, least_us=1.0)
    row = session.row({}, "mine", {name: name for name in ("half", "mute", "lost")}, 0.0).json()
    assert row["clocks_mhz"] == {"ours": 1390.0, "half": 1550.0}
    assert row["watts"] == {"ours": 690.0}
    assert {*row["peers_us"]} == {"half", "mute"}
    mute = session.row({}, "mute", {}, 0.0).json()
    assert not {"clocks_mhz", "watts"} & mute.keys()


def test_a_failure_is_recorded_wherever_it_happens() -> None:
    def broken() -> Run:
        raise RuntimeError("does not build")

    def wrong(run: Run) -> Error:
        raise WrongResult("out: off")

    fine: list[list[float] | Exception] = [[1.0]] * 3
    timer = ScriptedTimer({"ok": fine, "late": [[1.0], [1.0], MemoryError("gone")]})
    session = Session(timer, rounds=2)
    session.add("build", broken)
    session.add("check", named("check"), wrong)
    session.add("capture", named("unscripted"))
    session.add("ok", named("ok"))
    session.add("late", named("late"))
    session.measure(copies=4, least_us=1.0)
    assert session.failed == {
        "build": "RuntimeError: does not build",
        "check": "WrongResult: out: off",
        "capture": "KeyError: 'unscripted'",
        "late": "MemoryError: gone",
    }
    assert session.times == {"ok": [1.0, 1.0]}
    row = session.row({}, "build", {name: name for name in ("ok", "late")}, 0.0)
    assert row.ours_us is None
    assert row.peers_us == {"ok": 1.0}
    assert set(row.failed) == {"ours", "late"}


def test_a_case_that_cannot_be_made_becomes_a_row(source: Provenance, tmp_path: Path) -> None:
    class Case:
        def __init__(self, shape: str) -> None:
            self.case = {"shape": shape}

    def measure(case: Case, session: Session) -> list[Row]:
        if case.case["shape"] == "8B":
            raise MemoryError("too large")
        return [Row(case.case, 1.0, 0.0)]

    table = Table("gemm", "paper", "protocol", "floor", source, tmp_path / "gemm.json")
    fill(table, [Case("8B"), Case("1B")], measure, ScriptedTimer({}), rounds=1)
    first, second = json.loads(table.path.read_text(encoding="utf-8"))["rows"]
    assert first["failed"] == {"ours": "MemoryError: too large"}
    assert second["ours_us"] == 1.0


@given(st.integers(1, 10**10))
def test_copies_keep_the_cache_cold(call_bytes: int) -> None:
    copies = copies_for(call_bytes)
    assert copies >= 4
    assert (copies - 1) * call_bytes >= COLD_BYTES  # read by the others between two reads
    assert copies == 4 or (copies - 2) * call_bytes < COLD_BYTES


NAMES = st.lists(st.text(), unique=True, max_size=9)


@given(NAMES, st.text(), st.integers(0, 50), st.randoms())
def test_a_round_has_everyone_once_in_the_order_of_any_run(
    names: list[str], text: str, turn: int, random: Random
) -> None:
    found = shuffled(names, text, turn)
    assert sorted(found) == sorted(names)
    random.shuffle(names)
    assert shuffled(names, text, turn) == found
    if names:
        left = names[1:]
        assert shuffled(left, text, turn) == [name for name in found if name in left]


def test_an_order_is_the_same_in_another_process() -> None:
    assert shuffled("abcdef", "8B qkv 2048×6144×4096", 3) == list("edcbfa")


@given(st.lists(st.text(), unique=True, min_size=4, max_size=7), st.text())
def test_rounds_differ_and_everyone_follows_everyone(names: list[str], text: str) -> None:
    rounds = [tuple(shuffled(names, text, turn)) for turn in range(200)]
    assert len(set(rounds)) > 20
    assert {pair for found in rounds for pair in pairwise(found)} == {*permutations(names, 2)}
    assert {found[0] for found in rounds} == {*names}
    assert rounds != [tuple(shuffled(names, f"{text} other", turn)) for turn in range(200)]


def test_a_case_has_orders_of_its_own(source: Provenance, tmp_path: Path) -> None:
    texts = []

    class Case:
        case: ClassVar = {"shape": "8B", "layer": "qkv", "M": 2048, "N": 6144, "K": 4096}

    def measure(case: Case, session: Session) -> list[Row]:
        texts.append(session.text)
        return [Row(case.case, 1.0, 0.0)]

    table = Table("gemm", "paper", "protocol", "floor", source, tmp_path / "gemm.json")
    fill(table, [Case()], measure, ScriptedTimer({}), rounds=1)
    assert texts == ["8B qkv 2048×6144×4096"]


def test_the_protocol_says_what_was_done() -> None:
    options = Options(shapes=("8B",))
    said = "{} rounds of the median over a slice of {} ms, which begins after {} ms of"
    assert said.format(5, 30, 60) in options.protocol
    assert said.format(3, 6, 10) in options.shortened().protocol
    page = (ROOT / "docs" / "protocol.md").read_text(encoding="utf-8")
    assert "A slice is 60 ms" in page
    assert "then 30 ms that are" in page
    assert "over five rounds" in page


def test_errors_by_norm_and_by_row() -> None:
    reference = torch.ones(4, 100, dtype=torch.float64)
    out = reference.clone()
    out[2] *= 1.5
    found = compare(out, reference)
    assert found.norm == pytest.approx(0.25)
    assert found.worst_row == pytest.approx(0.5)
    assert compare(reference, reference) == Error(0.0, 0.0)


@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_one_poisoned_element_never_passes(poison: float) -> None:
    reference = torch.ones(4, 100, dtype=torch.float64)
    out = reference.to(torch.bfloat16)
    out[3, 99] = poison
    found = compare(out, reference)
    assert found == Error(float("inf"), float("inf"))
    assert not found.within(budget("out_fp8"))


def test_a_checker_names_the_wrong_output() -> None:
    reference = {"out": torch.ones(2, 8, dtype=torch.float64)}
    check = checker(reference, lambda _, tensor: tensor[:2])
    good = check(lambda copy: {"out": torch.full((4, 8), 1.005)})
    assert good.norm == pytest.approx(0.005, rel=1e-4)
    with pytest.raises(WrongResult, match="out: "):
        check(lambda copy: {"out": torch.full((4, 8), 1.05)})
    with pytest.raises(WrongResult, match="shape"):
        check(lambda copy: {"out": torch.ones(4, 7)})


@pytest.mark.gpu
def test_graphs_time_what_events_time() -> None:
    copies = 4
    a = [torch.randn(2048, 2048, device="cuda", dtype=torch.bfloat16) for _ in range(copies)]
    out = [torch.empty_like(x) for x in a]

    def run(copy: int) -> dict[str, torch.Tensor]:
        return {"out": torch.mm(a[copy], a[copy], out=out[copy])}

    times = CudaTimer(slice_us=5000.0, lead_us=5000.0).prepare(run, copies, least_us=10.0)().times
    assert len(times) >= 2
    assert all(10.0 < time < 1000.0 for time in times)  # 17 GFLOP at 17 to 1700 TFLOP/s
