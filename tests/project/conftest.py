"""The tree under test: its tracked files, and the modules that ``src`` makes."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="session")
def root() -> Path:
    """The repository's root."""
    return ROOT


@pytest.fixture(scope="session")
def tree() -> list[Path]:
    """Every file that is tracked, or would be once added, relative to the root."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    paths = [Path(name) for name in sorted(set(listed.split("\0"))) if name]
    return [path for path in paths if (ROOT / path).is_symlink() or (ROOT / path).is_file()]


@pytest.fixture(scope="session")
def sources() -> list[Path]:
    """Every Python file of the package, relative to ``src``."""
    folder = ROOT / "src"
    return sorted(path.relative_to(folder) for path in folder.rglob("*.py"))


@pytest.fixture(scope="session")
def modules(sources: list[Path]) -> list[str]:
    """Every module of the package by its dotted name, packages first."""
    names = []
    for path in sources:
        parts = path.with_suffix("").parts
        names.append(".".join(("epicute", *(p for p in parts if p != "__init__"))))
    return sorted(names)
