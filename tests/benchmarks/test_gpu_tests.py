"""The record of the GPU tests counts every test once, and neither skips nor errors pass for success."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import gpu_tests
from benchmarks.gpu_tests import Tally
from benchmarks.provenance import Provenance

SOURCE = Provenance("NVIDIA H200", "580.1", "2.11", "4.8.1", "abc123", "2026-01-02")
MIXED = """
import pytest

pytestmark = pytest.mark.filterwarnings("ignore")

@pytest.fixture
def broken():
    raise RuntimeError

@pytest.fixture
def leaking():
    yield
    raise RuntimeError

@pytest.mark.parametrize("i", range(3))
def test_right(i): ...

def test_wrong(): assert False

def test_absent(): pytest.skip("no")

def test_broken(broken): ...

def test_leaking(leaking): ...
"""


def tallied(folder: Path, **files: str) -> Tally:
    for name, text in files.items():
        (folder / f"test_{name}.py").write_text(text)
    tally = Tally()
    options = [
        "-q",
        "-p",
        "no:cacheprovider",
        "--rootdir",
        str(folder),
        "-c",
        str(folder / "pytest.ini"),
    ]
    (folder / "pytest.ini").write_text("[pytest]\naddopts = --import-mode=importlib\n")
    pytest.main([*options, str(folder)], plugins=[tally])
    return tally


def test_each_test_counts_once_by_its_worst_phase(tmp_path: Path) -> None:
    found = tallied(tmp_path, mixed=MIXED, fine="def test_it(): ...").files()
    assert found == {
        "test_fine.py": {"passed": 1, "failed": 0, "skipped": 0},
        "test_mixed.py": {"passed": 3, "failed": 3, "skipped": 1},
    }


def test_a_file_that_does_not_import_failed(tmp_path: Path) -> None:
    found = tallied(tmp_path, bad="import nowhere_to_be_found").files()
    assert found == {"test_bad.py": {"passed": 0, "failed": 1, "skipped": 0}}


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """Run ``main`` with a test run that says so; returns (status, record, arguments pytest got)."""

    def run(outcomes: dict[str, int], *arguments: str, status: int = 0):
        seen: list[list[str]] = []

        def fake(given: list[str], plugins: list[Tally]) -> int:
            seen.append(given)
            for outcome, count in outcomes.items():
                for i in range(count):
                    plugins[0]._note(f"tests/gemm/test_gpu.py::{outcome}{i}", outcome)
            return status

        monkeypatch.setattr(gpu_tests.pytest, "main", fake)
        monkeypatch.setattr(Provenance, "here", classmethod(lambda cls, allow_dirty: SOURCE))
        code = gpu_tests.main(["--out", str(tmp_path), *arguments])
        return code, json.loads((tmp_path / gpu_tests.NAME).read_text()), seen[0]

    return run


def test_the_record(recorded) -> None:
    code, record, arguments = recorded({"passed": 3}, "-x", "tests/gemm")
    assert code == 0
    assert arguments == ["-m", "gpu", "-x", "tests/gemm"]
    assert record == {
        "commit": "abc123",
        "device": "NVIDIA H200",
        "date": "2026-01-02",
        "files": {"tests/gemm/test_gpu.py": {"passed": 3, "failed": 0, "skipped": 0}},
    }


@pytest.mark.parametrize(
    ("outcomes", "status"), [({}, 0), ({"passed": 2, "skipped": 1}, 0), ({"failed": 1}, 1)]
)
def test_nothing_run_skips_and_failures_are_no_success(recorded, outcomes, status) -> None:
    code, record, _ = recorded(outcomes, status=status)
    assert code == 1
    assert sum(sum(counts.values()) for counts in record["files"].values()) == sum(
        outcomes.values()
    )


def test_files_that_passed_before_are_taken_over_with_their_commit(
    recorded, tmp_path: Path
) -> None:
    counts = {"passed": 2, "failed": 0, "skipped": 0}
    files = {
        "tests/a.py": counts,
        "tests/b.py": {**counts, "commit": "first"},
        "tests/c.py": {**counts, "failed": 1},
        "tests/gemm/test_gpu.py": {**counts, "passed": 9},
    }
    path = tmp_path / "before.json"
    path.write_text(json.dumps({"commit": "second", "device": SOURCE.device, "files": files}))
    code, record, _ = recorded({"passed": 3}, "--keep", str(path))
    assert code == 0
    assert record["files"] == {
        "tests/a.py": {**counts, "commit": "second"},
        "tests/b.py": {**counts, "commit": "first"},
        "tests/gemm/test_gpu.py": {**counts, "passed": 3},
    }
    assert recorded({}, "--keep", str(path))[0] == 1  # nothing ran


def test_without_a_gpu_nothing_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert gpu_tests.main(["--out", str(tmp_path)]) == 2
    assert "no CUDA device" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
