"""BF16 projections of few rows from row-major weights (FuTransformer 4.6: "the earlier skinny BF16 projection kernel").

A CTA has sixteen output features, and each of its eight warps an eighth of k. Fragments come straight from global
memory: no packs, no ring, nothing read before the kernel in front has ended, and the result is stored as it is.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from epicute.errors import require
from epicute.jit import CompileKey, ObjectCache, Report, Target, modules_digest
from epicute.quant.launch import Launcher, anchor_and_stream, check_matrix, device_of

__all__ = ["ARGUMENTS", "BUCKETS", "SkinnyKernel", "SkinnyPlan", "plan_skinny"]

ARGUMENTS = ("x", "weight", "out", "rows", "blocks")
"""Addresses; rows of x; CTAs."""

BUCKETS = (8, 16, 32)
"""Rows of x that a kernel can be compiled for."""

FEATURES = 16
"""Of a CTA."""

WARPS = 8
CHUNK = 64
"""Elements along k of which a lane has sixteen."""

AT_ONCE = 2
"""Chunks that a warp loads at a time."""

MODULES = ("benchmarks.ablations.skinny_kernel", "benchmarks.ablations.skinny")
SHARED = ("epicute.quant.dsl", "epicute.decode.sm90.ptx")
"""Modules of this package and of the library whose source makes the machine code."""


@dataclass(frozen=True)
class SkinnyKernel:
    """What is compiled: (columns, depth) of the weight, and a bucket of rows of x."""

    columns: int
    depth: int
    rows: int
    target: Target

    def __post_init__(self) -> None:
        require(
            self.columns > 0 and self.columns % FEATURES == 0,
            "columns",
            self.columns,
            f"a multiple of {FEATURES}",
            "ablate a projection of FuTransformer's table 1",
        )
        each = WARPS * CHUNK * AT_ONCE
        require(
            self.depth > 0 and self.depth % each == 0,
            "depth",
            self.depth,
            f"a multiple of {each}",
            "ablate a projection of FuTransformer's table 1",
        )
        require(
            self.rows in BUCKETS,
            "rows",
            self.rows,
            f"one of {BUCKETS}",
            "the large GEMM serves more",
        )

    @cached_property
    def key(self) -> CompileKey:
        """Everything that decides the machine code."""
        sizes = (("columns", self.columns), ("depth", self.depth), ("rows", self.rows))
        sources = (modules_digest(*MODULES), modules_digest(*SHARED))
        return CompileKey("benchmarks.skinny", sizes, self.target, sources)

    def trace(self) -> tuple[Any, tuple[Any, ...]]:
        """The DSL function and its fake arguments."""
        from cutlass import Int64

        from benchmarks.ablations.skinny_kernel import Skinny

        anchor, stream = anchor_and_stream()
        return Skinny(self), (anchor, tuple(Int64(0) for _ in ARGUMENTS), stream)


def plan_skinny(
    columns: int,
    depth: int,
    rows: int,
    *,
    device: torch.device | str | None = None,
    cache: ObjectCache | None = None,
) -> SkinnyPlan:
    """Compile (or load) what multiplies up to ``rows`` (1 to 32) rows of x with a weight (columns, depth).

    Raises ArgumentError for sizes that it does not cover.
    """
    require(1 <= rows <= BUCKETS[-1], "rows", rows, f"1 to {BUCKETS[-1]}", "tile the rows")
    bucket = next(b for b in BUCKETS if rows <= b)
    idle = (0, 0, 0, 0, 1)  # one CTA without a row of x

    def describe(target: Target) -> SkinnyKernel:
        return SkinnyKernel(columns, depth, bucket, target)

    describe(Target.detect())  # refuses sizes without a GPU too
    return SkinnyPlan((columns, depth), bucket, Launcher(describe, idle, device, cache))


class SkinnyPlan:
    """A compiled projection. Make one with ``plan_skinny``."""

    def __init__(self, shape: tuple[int, int], bucket: int, launcher: Launcher) -> None:
        self.shape, self.bucket, self._launcher = shape, bucket, launcher

    @property
    def report(self) -> Report | None:
        """What the compiler said; None where no GPU asked for code."""
        return self._launcher.report

    def run(self, x: Tensor, weight: Tensor, *, out: Tensor) -> None:
        """``out = x @ weight.T``: x (M, K), weight (N, K) and out (M, N), contiguous BF16. On the CPU by PyTorch.

        Raises ArgumentError before the launch.
        """
        arguments = self.bind(x, weight, out)
        if x.device.type == "cpu":
            out.copy_(x.double() @ weight.double().T)
        elif x.shape[0]:
            self._launcher.launch(x.get_device(), arguments)

    def bind(self, x: Tensor, weight: Tensor, out: Tensor) -> tuple[int, ...]:
        """Check everything and return the kernel's arguments."""
        (columns, depth), device = self.shape, device_of("x", x)
        rows = x.shape[0] if x.ndim else 0
        require(
            rows <= self.bucket, "x", f"{rows} rows", f"at most {self.bucket}", "plan for more rows"
        )
        for name, given, shape in (
            ("x", x, (rows, depth)),
            ("weight", weight, (columns, depth)),
            ("out", out, (rows, columns)),
        ):
            check_matrix(name, given, shape, torch.bfloat16, device, 16)
            require(given.is_contiguous(), name, given.stride(), "contiguous rows", ".contiguous()")
        return (x.data_ptr(), weight.data_ptr(), out.data_ptr(), rows, columns // FEATURES)
