"""A number is traced to a clean commit, or says that it is not."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from benchmarks.provenance import Provenance, commit, slug
from epicute.errors import EpicuteError


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.delenv("EPICUTE_COMMIT", raising=False)
    (tmp_path / "kernel.py").write_text("1\n")
    who = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false"]
    for command in (["init", "-q"], ["add", "."], [*who, "commit", "-q", "-m", "first"]):
        subprocess.run(["git", *command], cwd=tmp_path, check=True)
    return tmp_path


def test_a_clean_checkout_names_its_commit(repository: Path) -> None:
    assert len(commit(repository)) == 40


@pytest.mark.parametrize("changed", ["kernel.py", "new.py"])
def test_changes_are_refused_or_recorded(repository: Path, changed: str) -> None:
    (repository / changed).write_text("2\n")
    with pytest.raises(EpicuteError, match="clean checkout"):
        commit(repository)
    assert commit(repository, allow_dirty=True) == f"{commit(repository, True)[:40]}-dirty"


def test_results_written_before_are_no_change(repository: Path) -> None:
    folder = repository / "benchmarks" / "results" / "h200"
    folder.mkdir(parents=True)
    (folder / "gemm.json").write_text("{}")
    assert not commit(repository).endswith("-dirty")


def test_a_copy_without_history_needs_the_variable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    monkeypatch.delenv("EPICUTE_COMMIT", raising=False)
    with pytest.raises(EpicuteError, match="EPICUTE_COMMIT"):
        commit(tmp_path)
    monkeypatch.setenv("EPICUTE_COMMIT", "abc123")
    assert commit(tmp_path) == "abc123"
    monkeypatch.setenv("EPICUTE_COMMIT", "abc123-dirty")
    with pytest.raises(EpicuteError, match="clean checkout"):
        commit(tmp_path)
    assert commit(tmp_path, allow_dirty=True) == "abc123-dirty"


@pytest.mark.parametrize(
    ("device", "folder"),
    [("NVIDIA H200", "h200"), ("NVIDIA H100 80GB HBM3", "h100-80gb-hbm3"), ("NVIDIA H20", "h20")],
)
def test_a_device_names_its_folder(device: str, folder: str) -> None:
    assert slug(device) == folder


def test_without_a_gpu_nothing_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(EpicuteError, match="no CUDA device"):
        Provenance.here()
