"""The compiled GEMM on the CPU: main loop, pipelines and epilogue against the NumPy interpreter, bit for bit."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

from tests.epilogues.model import assert_same
from tests.gemm.compositions import SKELETONS, Case
from tests.gemm.emulated import EmulatedJob, code_of
from tests.gemm.jobs import compare
from tests.ptx import copies
from tests.ptx.access import lanes_of
from tests.ptx.program import PARAMS

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
    "fewer columns than a panel, output ring": (
        "user.clipped",
        "fp16",
        24,
        72,
        "128x128c2r2",
        127,
        1,
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
    "a tile of two WGMMAs along N, residual": (
        "residual.bf16",
        "fp8fast",
        1000,
        264,
        "128x320c2",
        140,
        1,
    ),
    "192 accumulators a thread": (
        "scales.bias",
        "fp8fast",
        700,
        136,
        "256x192n2",
        300,
        1,
    ),
    "tall tiles, stores of each block apart": (
        "residual.bf16",
        "fp8fast",
        256,
        264,
        "256x128n2",
        500,
        1,
    ),
    "a residual fetched into L2, A kept there": (
        "residual.bf16",
        "fp8fast",
        1000,
        392,
        "128x256c2fk",
        260,
        1,
    ),
    "what the last policy stored, as stored": (
        "user.rounded",
        "fp16",
        100,
        72,
        "128x64c1",
        70,
        1,
    ),
    "heads that turn alike, row by row": (
        "qkv.64.half.fp8",
        "bf16",
        1000,
        72,
        "128x128c1",
        130,
        1,
    ),
}
"""Skeleton, dtype, width, K, schedule; rows, and clusters of the GPU, few enough that some take several tiles."""


NAN, INFINITE = float("nan"), float("inf")
AWKWARD = {
    "all": ((3, 40, 6e3), (70, 199, -6e3), (0, 0, NAN), (5, 64, INFINITE), (129, 130, -INFINITE)),
    "NaN": ((64, 100, NAN),),
    "an infinity": ((12, 33, -INFINITE),),
}
"""(row, column, value) of a residual."""


@pytest.mark.parametrize(
    ("name", "schedule"),
    [
        ("all", "128x256c1"),
        ("all", "256x128n2"),
        ("NaN", "128x256c1"),
        ("an infinity", "128x256c1"),
    ],
)
def test_maxima_and_counters_of_awkward_values(name: str, schedule: str) -> None:
    """Two values a word have the maximum of single ones, and what is unusual is found by it and counted."""
    case = SKELETONS["residual.bf16"].case("bf16", 256, 72, schedule)
    job = EmulatedJob(case, 130, 1)
    for row, column, value in AWKWARD[name]:
        job.operands["residual"][row, column] = value
    wanted = job.expected()
    found = job.run(seed=2)
    assert int(wanted["nans"]) - 5 == sum(value != value for _, _, value in AWKWARD[name])
    for key, value in wanted.items():
        assert_same(found[key], value, key)


def test_a_residual_is_fetched_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every element of a matrix that ends within its tiles, both ways, is in one box that goes into L2."""
    fetched: list[np.ndarray[Any, Any]] = []
    make = copies.make

    def watched(handlers: Any, x: Any) -> Any:
        if not x.opcode.startswith("cp.async.bulk.prefetch.tensor"):
            return make(handlers, x)
        found = re.fullmatch(r"\[\s*([^,\s]+)\s*,\s*\{(.*)\}\s*\]", x.operands[0])
        assert found is not None
        table = handlers.operands.address(f"[{found[1]}]")
        start = [handlers.operands.value(c.strip(), "s32") for c in found[2].split(",")]

        def step(w: Any, m: Any) -> None:
            for lane in lanes_of(m):
                matrix = w.cta.cluster.maps[int(table(w)[lane]) - PARAMS]
                addresses, inside = matrix.elements(tuple(int(c(w)[lane]) for c in start))
                fetched.append(addresses[inside])

        return step

    monkeypatch.setattr(copies, "make", watched)
    code_of.cache_clear()
    case = SKELETONS["residual.bf16"].case("fp8fast", 1000, 392, "128x256c2fk")
    job = EmulatedJob(case, 130, 1)
    job.run(seed=1)
    code_of.cache_clear()
    residual = job.operands["residual"]
    rows, columns = residual.shape
    assert residual.stride(0) > columns
    places = np.arange(rows)[:, None] * residual.stride(0) + np.arange(columns)
    wanted = residual.data_ptr() + 2 * places.ravel()
    assert np.array_equal(np.sort(np.concatenate(fetched)), wanted)


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
