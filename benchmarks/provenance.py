"""Where and from what a table was measured: card, driver, versions, commit, date."""

from __future__ import annotations

import importlib.metadata
import os
import re
import subprocess
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import torch

from epicute.errors import EpicuteError, require

__all__ = ["ROOT", "Provenance", "commit", "slug"]

ROOT = Path(__file__).resolve().parents[1]
RESULTS = "benchmarks/results"


@dataclass(frozen=True)
class Provenance:
    """The fields of a table that say where its numbers come from."""

    device: str
    driver: str
    torch: str
    dsl: str
    commit: str
    date: str

    @classmethod
    def here(cls, allow_dirty: bool = False) -> Provenance:
        """Of this machine, checkout and day (UTC).

        Raises: EpicuteError: no CUDA device, no commit to name, or uncommitted changes without
            ``allow_dirty``.
        """
        require(
            torch.cuda.is_available(),
            "device",
            "no CUDA device",
            "a GPU",
            "run the benchmarks on the card they are about",
            error=EpicuteError,
        )
        return cls(
            device=torch.cuda.get_device_name(),
            driver=_driver(),
            torch=torch.__version__,
            dsl=_version("nvidia-cutlass-dsl"),
            commit=commit(allow_dirty=allow_dirty),
            date=datetime.now(UTC).date().isoformat(),
        )

    @classmethod
    def of_references(cls, allow_dirty: bool = False) -> Provenance:
        """Of tables that the CPU references compute: no card, no driver, no DSL.

        Raises: EpicuteError: as ``here``, but for the device.
        """
        return cls(
            device="CPU",
            driver="none",
            torch=torch.__version__,
            dsl="none",
            commit=commit(allow_dirty=allow_dirty),
            date=datetime.now(UTC).date().isoformat(),
        )


def slug(device: str) -> str:
    """Folder name of a device: ``NVIDIA H200`` → ``h200``, ``NVIDIA H100 PCIe`` → ``h100-pcie``."""
    words = [w for w in re.findall(r"[a-z0-9]+", device.lower()) if w not in ("nvidia", "geforce")]
    return "-".join(words)


def commit(root: Path = ROOT, allow_dirty: bool = False) -> str:
    """Commit under measurement; ``EPICUTE_COMMIT`` names it where the checkout has no history.

    Results already written do not count as changes. With ``allow_dirty`` a changed tree is recorded
    as ``<commit>-dirty``.
    """
    named = os.environ.get("EPICUTE_COMMIT", "").strip()
    found = named or _git(root, "rev-parse", "HEAD")
    require(
        bool(found),
        "commit",
        "no git history here and no EPICUTE_COMMIT",
        "a commit the numbers can be traced to",
        "set EPICUTE_COMMIT=$(git rev-parse HEAD) of the copied tree",
        error=EpicuteError,
    )
    if not named and _git(root, "status", "--porcelain", "--", ".", f":(exclude){RESULTS}"):
        found += "-dirty"
    require(
        allow_dirty or not found.endswith("-dirty"),
        "commit",
        found,
        "a clean checkout",
        "commit first, or pass --allow-dirty for numbers that will not be published",
        error=EpicuteError,
    )
    return found


def _git(root: Path, *arguments: str) -> str:
    """Output of git, stripped; empty where git or the history is missing."""
    try:
        done = subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True)
    except OSError:
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def _version(distribution: str) -> str:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return "unknown"


def _driver() -> str:
    """Driver version, from nvidia-smi or else from the kernel module."""
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=30)
        if done.returncode == 0 and done.stdout.strip():
            return done.stdout.split()[0]
    except (OSError, subprocess.TimeoutExpired):
        pass
    module = Path("/proc/driver/nvidia/version")
    text = module.read_text() if module.exists() else ""
    found = re.search(r"\b\d{3}\.\d+(\.\d+)?\b", text)
    return found.group() if found else "unknown"
