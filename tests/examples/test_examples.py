"""Every example runs as a reader runs it: in a process of its own, from an empty folder, on the CPU."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
COMPILES = re.compile(r"\b(explain|plan|compile)\(")


def examples() -> list[object]:
    """The scripts, marked where they compile kernels."""
    found = []
    for path in EXAMPLES:
        compiles = COMPILES.search(path.read_text(encoding="utf-8"))
        found.append(
            pytest.param(path, id=path.stem, marks=[pytest.mark.compile] if compiles else [])
        )
    return found


def run(path: Path, folder: Path, *arguments: str) -> str:
    """What an example prints; ``folder`` is where it runs."""
    hidden = {"CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, str(path), *arguments],
        cwd=folder,
        env={**os.environ, **hidden},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.mark.parametrize("path", examples())
def test_runs_and_leaves_nothing_behind(path: Path, tmp_path: Path) -> None:
    assert run(path, tmp_path)
    left = {path.name for path in tmp_path.iterdir()}
    assert left <= {".hypothesis"}  # what hypothesis keeps between runs


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_says_what_it_is_and_how_to_run_it(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert f"python examples/{path.name}" in text.split('"""')[1]
    assert f"examples/{path.name}" in (ROOT / "README.md").read_text(encoding="utf-8")


@pytest.mark.compile
def test_fused_qkv_of_another_shape(tmp_path: Path) -> None:
    printed = run(ROOT / "examples" / "fused_qkv.py", tmp_path, "SmolLM2")
    assert printed.startswith("SmolLM2: N = 960, K = 576\n")


def test_save_load_writes_where_it_is_told(tmp_path: Path) -> None:
    run(ROOT / "examples" / "save_load.py", tmp_path, str(tmp_path))
    assert [path.name for path in tmp_path.iterdir()] == ["gate_up.safetensors"]
