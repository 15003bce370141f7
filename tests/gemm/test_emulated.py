"""The compiled GEMM on the CPU: main loop, pipelines and epilogue against the NumPy interpreter, bit for bit."""

from __future__ import annotations

import pytest

from tests.gemm.compositions import SKELETONS, Case
from tests.gemm.emulated import EmulatedJob
from tests.gemm.jobs import compare

pytestmark = pytest.mark.compile

CASES = {
    "pairs along M, residual, output ring": (
        "residual.bf16",
        "fp8",
        200,
        200,
        "128x192c2r4",
        130,
        1,
    ),
    "pairs along M, heads with norm, RoPE and cells": (
        "qkv.64.half.norm.bf16",
        "bf16",
        8,
        136,
        "chosen",
        70,
        2,
    ),
    "alone, all outputs": ("store.all", "fp8fast", 100, 264, "128x64c1", 129, 1),
    "pairs along N, ping-pong, residual": (
        "residual.bf16",
        "bf16",
        200,
        136,
        "128x128n2pp",
        257,
        1,
    ),
    "ping-pong, SwiGLU to FP8, output ring": (
        "swiglu.emit",
        "fp16",
        200,
        72,
        "64x192c1r2pp",
        130,
        1,
    ),
}
"""Skeleton, dtype, width, K, schedule; rows, and clusters of the GPU, few enough that some take several tiles."""


def check(case: Case, rows: int, clusters: int, **options: object) -> None:
    job = EmulatedJob(case, rows, clusters)
    wanted = job.expected()
    found = job.run(**options)
    kinds = case.composition.operands
    for name, value in wanted.items():
        compare(f"{case} M={rows}: {name}", kinds[name], found[name], value, case.exact)


@pytest.mark.parametrize("name", CASES)
def test_against_the_interpreter(name: str) -> None:
    skeleton, mode, width, depth, schedule, rows, clusters = CASES[name]
    case = SKELETONS[skeleton].case(mode, width, depth, schedule)
    check(case, rows, clusters, seed=1, races=True)
