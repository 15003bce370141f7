"""Other processes that run cases, for tests of the cache they share."""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Sequence

import torch

from tests.gemm.compositions import Case

__all__ = ["main", "run_in_turn"]


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


def main() -> None:
    """In a process of its own: run the shared cases in the order of the arguments; print digests and origins."""
    from tests.gemm.test_gpu_safety import SHARED

    origins: list[str] = []
    digests = run_in_turn(SHARED, sys.argv[1:], origins)
    print(json.dumps({"digests": digests, "origins": origins}))


if __name__ == "__main__":
    main()
