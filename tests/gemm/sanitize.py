"""A few small launches that touch every policy, dtype, cell type and schedule, for compute-sanitizer.

    python -m tests.gemm.sanitize --prepare                     # compile, side by side
    compute-sanitizer --tool memcheck  --error-exitcode 9 python -m tests.gemm.sanitize
    compute-sanitizer --tool racecheck --error-exitcode 9 python -m tests.gemm.sanitize

Every tensor is an allocation of its own that ends with its last element, so that memcheck sees what lies beyond.
Results are compared with the NumPy interpreter all the same. ``--all`` runs the whole covering set.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

os.environ.setdefault("PYTORCH_NO_CUDA_MEMORY_CACHING", "1")  # read when torch first allocates

from tests.gemm.compositions import FORCED, SKELETONS, Case, operations, projection
from tests.gemm.covering import covering

if TYPE_CHECKING:
    from tests.gemm.jobs import Job

ROWS = (1, 130)
"""A tile with one row, and a full one beside a ragged one."""


def traits(case: Case) -> set[object]:
    """What a case exercises."""
    chains = [policies for _, _, policies in case.composition.branches()]
    policies = {(p.title, getattr(p, "dtype", None)) for chain in chains for p in chain}
    ragged = case.n % 8 != 0, case.n % 32 != 0
    # A residual comes another way where warpgroups take turns.
    turns = case.tile is not None and case.tile.pingpong
    read = {(turns, p.title) for chain in chains for p in chain if "residual" in p.operands}
    return {*policies, *read, case.dtype, case.tile, ragged, len(chains)}


def chosen(cases: Iterable[Case]) -> list[Case]:
    """The smallest first, each that shows something new."""
    seen: set[object] = set()
    found = []
    for case in sorted(cases, key=lambda case: (case.n, case.name)):
        if not traits(case) <= seen:
            seen |= traits(case)
            found.append(case)
    return found


def everything() -> list[Case]:
    """The covering set, every operation, and a published layer."""
    published = [projection(layer, "SmolLM2", "fp8") for layer in ("qkv", "gate_up", "o")]
    residual = SKELETONS["residual.bf16"]
    forced = [residual.case("fp8fast", 1000, 584, schedule) for schedule in FORCED]
    return [*covering(), *operations(), *published, *forced]


def tighten(job: Job) -> Job:
    """The same job in allocations without a byte to spare."""
    import torch

    for name, operand in job.operands.items():
        job.operands[name] = operand.contiguous().clone()
    for output in job.outputs.values():
        output.tensor = output.tensor.contiguous().clone()
    rows, width = job.x.shape
    pitch = -(-width * job.x.element_size() // 16) * 16 // job.x.element_size()
    memory = torch.empty(max(rows - 1, 0) * pitch + width, dtype=job.x.dtype, device=job.x.device)
    job.x = memory.as_strided((rows, width), (pitch, 1)).copy_(job.x)
    return job


def main(arguments: Sequence[str] | None = None) -> int:
    """Compile, or launch and compare."""
    parser = argparse.ArgumentParser(prog="python -m tests.gemm.sanitize", description=__doc__)
    parser.add_argument(
        "--prepare", action="store_true", help="compile into the cache, run nothing"
    )
    parser.add_argument("--all", action="store_true", help="every case of the covering set")
    given = parser.parse_args(arguments)
    cases = everything() if given.all else chosen(everything())
    if given.prepare:
        from epicute.jit import precompile

        precompile([case.kernel() for case in cases])
        print(f"{len(cases)} kernels ready")
        return 0
    from tests.gemm.jobs import Job

    wrong = 0
    for case in cases:
        for rows in ROWS:
            try:
                tighten(Job(case, rows)).check()
            except AssertionError as error:
                wrong += 1
                print(f"{case} M={rows}: {error}", flush=True)
        print(f"{case}: {len(ROWS)} launches", flush=True)
    print(f"{len(cases)} kernels, {wrong} wrong results")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
