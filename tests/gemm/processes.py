"""Other processes that run cases, for tests of the cache they share."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from tests.gemm.compositions import Case

__all__ = ["product_of", "run_in_turn"]


def run_in_turn(
    cases: Sequence[Case], order: Sequence[str], origins: list[str] | None = None
) -> dict[str, str]:
    """Digest of all outputs of each case; notes where its kernel came from."""
    from tests.gemm.jobs import Job

    found = {}
    for name in order:
        job = Job(next(case for case in cases if case.name == name), 129)
        if origins is not None:
            origins.append(job.plan.origin)
        digest = hashlib.sha256()
        for output, value in sorted(job.run().items()):
            raw = value.cpu().contiguous().reshape(-1).view(torch.uint8)
            digest.update(output.encode() + raw.numpy().tobytes())
        found[name] = digest.hexdigest()
    return found


def product_of(cases: Sequence[Case], order: Sequence[str], folder: Path, results: Any) -> None:
    """In a process of its own, with the cache in ``folder``; puts digests and origins into ``results``."""
    os.environ["EPICUTE_CACHE_DIR"] = str(folder)
    origins: list[str] = []
    digests = run_in_turn(cases, order, origins)
    results.put({"digests": digests, "origins": origins})
