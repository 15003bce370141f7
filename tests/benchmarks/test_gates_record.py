"""The record of the gates holds every variant in its group, and neither failures nor hazards pass for success."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks import gates
from benchmarks.gates import KNOWN, Variants, grouped, parse, summed

ONE = {
    "tile": "128x256",
    "dtype": "bfloat16",
    "accumulate": "fast",
    "registers": 168,
    "shared_memory": 200_000,
    "spilled": 0,
    "hazards": 0,
}
MIXED = """
import pytest

ALL = {all}

def say(record, **more):
    for name, value in (ALL | more).items():
        record(name, value)

def test_right(record_property):
    say(record_property, seconds=1.5)

def test_spills(record_property):
    say(record_property, spilled=8, hazards=1)
    assert False

def test_silent(record_property):
    say(record_property, registers=None)
    assert False

def test_before_any_report():
    raise RuntimeError

@pytest.fixture
def broken():
    raise RuntimeError

def test_broken(broken): ...
"""


def kept(folder: Path, text: str, *options: str) -> Variants:
    """What the plugin keeps of a file of tests, whose name no other has in this process."""
    (folder / f"{folder.name}_test.py").write_text(text)
    (folder / "pytest.ini").write_text("[pytest]\naddopts = --import-mode=importlib\n")
    plugin = Variants()
    common = ["-q", "-p", "no:cacheprovider", "--rootdir", str(folder)]
    pytest.main([*common, "-c", str(folder / "pytest.ini"), *options, str(folder)], [plugin])
    return plugin


@pytest.mark.parametrize("options", [("-n0",), ("-n1",)], ids=["alone", "in a worker"])
def test_what_is_recorded_is_kept(options: tuple[str, ...], tmp_path: Path) -> None:
    found = kept(tmp_path, MIXED.format(all=ONE), *options)
    assert found.variants() == [ONE, ONE | {"spilled": 8, "hazards": 1}]
    wrong = ("before_any_report", "broken", "silent", "spills")
    assert found.failed() == [f"{tmp_path.name}_test.py::test_{name}" for name in wrong]


def test_a_file_that_does_not_import_failed(tmp_path: Path) -> None:
    found = kept(tmp_path, "import nowhere_to_be_found")
    assert (found.variants(), found.failed()) == ([], [f"{tmp_path.name}_test.py"])


def test_the_worst_of_each_measure_and_the_count_of_each_fault() -> None:
    many = [ONE, ONE | {"registers": 160, "spilled": 8}, ONE | {"shared_memory": 9, "hazards": 2}]
    assert summed(many) == {
        "variants": 3,
        "registers": 168,
        "shared_memory": 200_000,
        "spilled": 8,
        "spilling": 1,
        "hazards": 2,
    }
    assert summed([])["variants"] == 0


def test_every_variant_is_in_one_group() -> None:
    narrow, precise = ONE | {"tile": "128x128"}, ONE | {"accumulate": "precise"}
    found = grouped([ONE, precise, narrow, ONE])
    keys = [(line["tile"], line["accumulate"], line["variants"]) for line in found]
    assert keys == [("128x128", "fast", 1), ("128x256", "fast", 2), ("128x256", "precise", 1)]


def test_the_gates_record_what_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a renamed property cannot empty the record unseen."""
    from epicute.jit import Report
    from tests.gemm import test_gates

    class Compiled:
        report = Report(168, 0, 0, 100_000, ("C7510: serialised",), 1.0, "")

    said: dict[str, Any] = {}
    monkeypatch.setattr(test_gates, "compile", lambda *_, **__: Compiled)
    monkeypatch.setattr(test_gates, "compile_fitting", lambda kernel: (kernel, Compiled))
    with pytest.raises(Exception, match="C7510"):
        test_gates.gate(test_gates.SERVED[1], said.__setitem__)
    assert set(KNOWN) <= set(said)
    assert (said["dtype"], said["accumulate"], said["hazards"]) == ("float8_e4m3fn", "precise", 1)
    assert said["tile"] in said["schedule"].replace(", ", " ")


# --- the command ---


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., Any]:
    """Run ``main`` with a test run that says so; (status, record, arguments pytest got)."""

    def run(*variants: dict[str, Any], failed: tuple[str, ...] = (), status: int = 0) -> Any:
        seen: list[list[str]] = []

        def fake(given: list[str], plugins: list[Variants]) -> int:
            seen.append(given)
            plugins[0]._found.update({str(i): one for i, one in enumerate(variants)})
            plugins[0]._failed.update(failed)
            return status

        monkeypatch.setattr(gates.pytest, "main", fake)
        monkeypatch.setattr(gates, "commit", lambda allow_dirty: "abc123")
        path = tmp_path / "deep" / "gates.json"
        code = gates.main(["--out", str(path), "-n", "2"])
        return code, json.loads(path.read_text()), seen[0]

    return run


def test_the_record(recorded: Callable[..., Any]) -> None:
    code, record, arguments = recorded(ONE, ONE)
    assert (code, arguments) == (0, ["-m", "gates", "-n", "2"])
    assert record["commit"] == "abc123"
    assert record["target"].startswith("sm_90a")
    assert (record["variants"], record["spilled"], record["hazards"]) == (2, 0, 0)
    assert (record["failed"], len(record["groups"])) == ([], 1)


def test_nothing_compiled_hazards_and_failures_are_no_success(
    recorded: Callable[..., Any],
) -> None:
    assert recorded()[0] == 1
    assert recorded(ONE | {"hazards": 1})[0] == 1
    assert recorded(ONE, failed=("test",))[:2][0] == 1
    assert recorded(ONE, status=3)[0] == 3


def test_a_dirty_checkout_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("EPICUTE_COMMIT", "abc123-dirty")
    path = tmp_path / "gates.json"
    assert gates.main(["--out", str(path)]) == 2
    assert "clean checkout" in capsys.readouterr().err
    assert not path.exists()


def test_by_default_it_lies_among_the_results() -> None:
    given, rest = parse(["-x"])
    assert (given.out.parent.name, given.out.name, rest) == ("results", "gates.json", ["-x"])
