"""What a composition becomes for a projection: order, operands, schedule and the compiler's report."""

from __future__ import annotations

from typing import Any

from epicute.epilogues.composition import Composition, compose
from epicute.epilogues.policy import Policy
from epicute.gemm.fitting import compile_fitting
from epicute.gemm.spec import GemmKernel, kernel_for
from epicute.jit import Report, compile

__all__ = ["describe", "explain"]


def explain(composition: Composition | Policy, n: int, k: int, **options: Any) -> str:
    """Compile ``composition`` for N = ``n`` and K = ``k``, without a GPU, and tell what came of it.

    The text has the drawing, the row order of the packed weight, every operand with shape, dtype and alignment, the
    schedule, and registers, spills and shared memory as the compiler reports them.

    Args:
        composition: a complete composition.
        n: output features. k: reduction depth.
        **options: those of ``kernel_for``: dtype, target, schedule, dtypes, alignments, expected_m,
            accumulate.

    Raises what ``kernel_for`` and the compiler raise; code with spills is described, not refused.
    """
    kernel = kernel_for(compose(composition), n=n, k=k, **options)
    if options.get("schedule") is None:
        kernel, compiled = compile_fitting(kernel, strict=False)
    else:
        compiled = compile(kernel, strict=False)
    return describe(kernel, compiled.report)


def describe(kernel: GemmKernel, report: Report) -> str:
    """The text of ``explain`` for a kernel that is compiled already."""
    spec = kernel.spec
    problem = spec.problem
    lines = [
        str(spec.resolved.composition),
        "",
        f"problem        N = {problem.columns}, K = {problem.depth}, {_short(problem.dtype)}",
        f"row order      {spec.resolved.order}",
        f"schedule       {spec.schedule}; {kernel.target.arch}",
        f"accumulate     {problem.accumulate}",
        *str(report).splitlines(),
        "",
    ]
    rows = [("operand", "shape", "dtype", "bytes aligned", "")]
    for operand in spec.layout.operands:
        shape = f"({', '.join(map(str, operand.shape))})"
        use = "written" if operand.kind.written else "read"
        rows.append((operand.name, shape, _short(operand.dtype), str(operand.alignment), use))
    widths = [max(len(row[i]) for row in rows) for i in range(5)]
    for row in rows:
        lines.append("  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip())
    return "\n".join(lines)


def _short(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")
