"""D = epilogue(A · Bᵀ): Hopper GEMM with composed epilogues."""

from epicute.gemm.choice import choose, schedules
from epicute.gemm.explain import explain
from epicute.gemm.linear import linear
from epicute.gemm.plan import Plan, align_rows, plan
from epicute.gemm.schedule import Problem, Schedule, accumulation, shared_memory
from epicute.gemm.spec import GemmKernel, GemmSpec, kernel_for
from epicute.gemm.tune import autotune

__all__ = [
    "GemmKernel",
    "GemmSpec",
    "Plan",
    "Problem",
    "Schedule",
    "accumulation",
    "align_rows",
    "autotune",
    "choose",
    "explain",
    "kernel_for",
    "linear",
    "plan",
    "schedules",
    "shared_memory",
]
