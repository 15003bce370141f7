"""Everything that decides a kernel's code, and the kernel as the compiler room sees it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch

from epicute.epilogues.arithmetic import Dequantize
from epicute.epilogues.composition import Composition, compose
from epicute.epilogues.policy import Policy
from epicute.epilogues.resolve import Resolved, resolve
from epicute.errors import require
from epicute.gemm.arguments import ArgumentLayout
from epicute.gemm.choice import choose
from epicute.gemm.schedule import (
    DTYPES,
    Problem,
    Schedule,
    accumulation,
    shared_memory,
    typed,
)
from epicute.gemm.stream_plan import streamed_bytes
from epicute.jit import CompileKey, Target, modules_digest

__all__ = ["GemmKernel", "GemmSpec", "default_dtype", "kernel_for"]

LARGEST = 2**31 - 512
"""Most columns and deepest K: padded to whole tiles and vectors they stay in 32 bits."""

SPELT = {
    "bf16": torch.bfloat16,
    "bfloat16": torch.bfloat16,
    "fp16": torch.float16,
    "float16": torch.float16,
    "half": torch.float16,
    "fp8": torch.float8_e4m3fn,
    "float8_e4m3fn": torch.float8_e4m3fn,
}
"""Dtypes by the names that may come in their place."""

MODULES = ("epicute.gemm.kernel", "epicute.gemm.spec")
"""Modules whose source, with all they import from this package, makes the machine code."""

CHOOSING = ("epicute.gemm.choice", "epicute.gemm.model")
"""Modules that decide on a schedule, which is in the key itself."""


@dataclass(frozen=True)
class GemmSpec:
    """A composition for N columns, its operands, the problem and the schedule."""

    resolved: Resolved
    layout: ArgumentLayout
    problem: Problem
    schedule: Schedule

    @property
    def name(self) -> str:
        """What profilers show: ``epicute_gemm_fp8_128x256_Dequantize_SwiGLU_EmitFP8``."""
        short = {torch.bfloat16: "bf16", torch.float16: "fp16"}.get(self.problem.dtype, "fp8")
        title = re.sub(r"\W+", "_", self.resolved.composition.title).strip("_")
        tile = f"{self.schedule.tile_m}x{self.schedule.tile_n}"
        return f"epicute_gemm_{short}_{tile}_{title}"

    @property
    def pitch(self) -> int:
        """Elements between packed rows of B: K padded to 16 bytes."""
        per_vector = 16 // self.problem.dtype.itemsize
        return -(-self.problem.depth // per_vector) * per_vector


@dataclass(frozen=True)
class GemmKernel:
    """A kernel to compile: a key, and a way to trace it without tensors."""

    spec: GemmSpec
    target: Target

    @cached_property
    def key(self) -> CompileKey:
        """Everything that decides the machine code."""
        problem, schedule = self.spec.problem, self.spec.schedule
        return CompileKey(
            kernel="gemm.hopper",
            fields=(
                ("N", problem.columns),
                ("K", problem.depth),
                ("dtype", problem.dtype),
                ("epilogue", self.spec.resolved.composition.title),
                ("policies", self.spec.resolved.composition.key()),
                ("operands", self.spec.layout.key()),
                ("tile", (schedule.tile_m, schedule.tile_n)),
                ("cluster", (schedule.cluster_m, schedule.cluster_n)),
                ("pingpong", schedule.pingpong),
                ("stages", schedule.stages),
                ("slots", schedule.slots),
                ("prefetch", schedule.prefetch),
                ("keep", schedule.keep),
                ("accumulate", problem.accumulate),
            ),
            sources=(modules_digest(*MODULES, aside=CHOOSING),),
            target=self.target,
        )

    @property
    def shared_memory(self) -> int:
        """Bytes of shared memory of a CTA."""
        return shared_memory(self.spec.schedule, self.spec.problem)

    def scheduled(self, schedule: Schedule) -> GemmKernel:
        """The same with another schedule, which is not checked."""
        return replace(self, spec=replace(self.spec, schedule=schedule))

    def trace(self) -> tuple[Any, tuple[Any, ...]]:
        """The DSL function and its fake arguments."""
        import cutlass
        from cutlass.cute.runtime import make_fake_stream, make_fake_tensor

        from epicute.gemm.kernel import HopperGemm

        spec = self.spec
        pitch = spec.pitch * spec.problem.dtype.itemsize
        b = make_fake_tensor(
            cutlass.Uint8, (spec.problem.rows, pitch), (pitch, 1), assumed_align=16
        )
        arguments = tuple(cutlass.Int64(0) for _ in range(spec.layout.count))
        return HopperGemm(spec), (b, arguments, make_fake_stream(use_tvm_ffi_env_stream=True))


def kernel_for(
    composition: Composition | Policy,
    *,
    n: int,
    k: int,
    dtype: torch.dtype | None = None,
    target: Target | str | None = None,
    schedule: Schedule | None = None,
    dtypes: Mapping[str, torch.dtype] | None = None,
    alignments: Mapping[str, int] | None = None,
    expected_m: int | None = None,
    accumulate: str | None = None,
) -> GemmKernel:
    """Describe the kernel of ``composition`` for a projection of N = ``n`` features over K = ``k``.

    Args:
        composition: what to do with the accumulator.
        n: logical output features. k: reduction depth.
        dtype: of A and B: bfloat16, float16 or float8_e4m3fn; by default ``default_dtype``'s.
        target: a Target, or text for ``Target.parse``; by default the current GPU's, or sm_90a without one.
        schedule: by default ``choose``'s.
        dtypes: operand dtypes other than the policies' own. alignments: bytes to assume of an operand's rows
            (see ``ArgumentLayout.of``). expected_m: rows to choose the schedule for.
        accumulate: ``"fast"`` or ``"precise"`` for float8; by default ``accumulation``'s rule.

    Raises ArgumentError, CompositionError or UnsupportedError before anything is traced.
    """
    composition = compose(composition)
    for name, size in (("n", n), ("k", k)):
        require(
            type(size) is int and 1 <= size <= LARGEST,
            name,
            size if type(size) is int else typed(size),
            f"an integer from 1 to {LARGEST}",
            "give the weight's shape",
        )
    dtype = default_dtype(composition) if dtype is None else dtype
    require(
        dtype in DTYPES,
        "dtype",
        dtype if isinstance(dtype, torch.dtype) else typed(dtype),
        ", ".join(map(str, DTYPES)),
        _dtype_fix(dtype),
    )
    require(
        expected_m is None or (type(expected_m) is int and expected_m >= 0),
        "expected_m",
        expected_m if type(expected_m) is int else typed(expected_m),
        "a number of rows",
        "leave it out where the rows are not known",
    )
    require(
        schedule is None or isinstance(schedule, Schedule),
        "schedule",
        typed(schedule),
        "a Schedule, or None to have one chosen",
        "write schedule=epicute.Schedule(tile_m=128, tile_n=256)",
    )
    target = _target(target)
    resolved = resolve(composition, n)
    layout = ArgumentLayout.of(resolved, dtypes, alignments)
    order = resolved.order
    problem = Problem(
        columns=n,
        rows=order.rows,
        depth=k,
        dtype=dtype,
        unit=order.unit,
        staged=staged_operands(resolved),
        expected_m=expected_m,
        accumulate=accumulation(dtype, k, accumulate),
        streamed=streamed_bytes(resolved, layout),
        policies=max(len(span.steps) for span in resolved.ranges),
    )
    found = choose(problem, target)
    if schedule is not None:
        schedule.check(problem, target)
        found = schedule
    return GemmKernel(GemmSpec(resolved, layout, problem, found), target)


def default_dtype(composition: Composition) -> torch.dtype:
    """Of A and B where nobody says: float8_e4m3fn where all begin with a ``Dequantize`` that takes weight scales, which
    no other format has; else bfloat16.
    """
    heads = [policies[0] if policies else None for _, _, policies in composition.branches()]
    scaled = all(isinstance(first, Dequantize) and first.weight is not None for first in heads)
    return torch.float8_e4m3fn if scaled else torch.bfloat16


def _target(given: Target | str | None) -> Target:
    require(
        given is None or isinstance(given, (Target, str)),
        "target",
        typed(given),
        "a Target, its name or None",
        "write target=epicute.Target('sm_90a')",
    )
    if given is None:
        return Target.detect()
    return Target.parse(given) if isinstance(given, str) else given


def _dtype_fix(given: Any) -> str:
    """What to write instead of a dtype that is not served."""
    if not isinstance(given, str):
        return "convert x and the weight"
    found = SPELT.get(given.removeprefix("torch."), torch.bfloat16)
    return f"write dtype={found}, torch's own object"


def staged_operands(resolved: Resolved) -> tuple[int, int]:
    """Bytes of staged operands, per tile row and per unit."""
    from epicute.gemm.stage_plan import StagePlan

    return StagePlan(resolved).bytes
