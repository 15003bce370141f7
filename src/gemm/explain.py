"""What a composition becomes for a projection: order, operands, schedule and the compiler's report."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from epicute.epilogues.composition import Composition, compose
from epicute.epilogues.policy import Policy
from epicute.errors import require
from epicute.gemm.fitting import compile_fitting
from epicute.gemm.spec import GemmKernel, kernel_for
from epicute.jit import Report, compile

__all__ = ["describe", "explain", "report_text"]

TRADED = (24, 240)
"""Registers per thread of a producer and a consumer warpgroup, once they have traded; a test holds it to the kernel."""

CACHES = {"memory": "this process's memory", "disk": "the cache on disk"}
"""Where code comes from that is not compiled now."""


def explain(composition: Composition | Policy, n: int, k: int, **options: Any) -> str:
    """Compile ``composition`` for N = ``n`` and K = ``k``, without a GPU, and tell what came of it.

    The text has the drawing, the row order of the packed weight, every operand with shape, dtype and alignment, the
    schedule, and registers, spills and shared memory as the compiler reports them.

    Args:
        composition: a complete composition.
        n: output features. k: reduction depth.
        **options: those of ``kernel_for``: dtype (by default float8_e4m3fn where the composition begins with a
            ``Dequantize`` of weight scales, else bfloat16), target, schedule, dtypes, alignments, expected_m,
            accumulate.

    Raises what ``kernel_for`` and the compiler raise; code with spills is described, not refused.
    """
    _check_options(options)
    kernel = kernel_for(compose(composition), n=n, k=k, **options)
    if options.get("schedule") is None:
        kernel, compiled = compile_fitting(kernel, strict=False)
    else:
        compiled = compile(kernel, strict=False)
    return describe(kernel, compiled.report, compiled.origin)


def _check_options(options: Mapping[str, Any]) -> None:
    parameters = inspect.signature(kernel_for).parameters
    known = [name for name in parameters if name not in ("composition", "n", "k")]
    unknown = [name for name in options if name not in known]
    require(
        not unknown,
        "explain",
        f"the option {', '.join(map(repr, unknown))}",
        f"one of {', '.join(known)}",
        "tile, cluster, stages and slots are fields of schedule=epicute.Schedule(…)",
    )


def report_text(report: Report, origin: str = "compiled") -> str:
    """A GEMM's report: that registers are traded after the launch and, by ``origin``, whether it comes from a cache."""
    text = str(report)
    if report.registers is not None:
        producer, consumer = TRADED
        launch = f"{'registers':<14} {report.registers:,}"
        traded = f"({producer} and {consumer} once the warpgroups have traded)"
        text = text.replace(launch, f"{launch} at launch {traded}", 1)
    if origin in CACHES:
        lines = text.splitlines()
        row = next(i for i, line in enumerate(lines) if line.startswith("compiled in"))
        lines[row] += f", before; this code came from {CACHES[origin]}"
        text = "\n".join(lines)
    return text


def describe(kernel: GemmKernel, report: Report, origin: str = "compiled") -> str:
    """The text of ``explain`` for a kernel that is compiled already; ``origin`` as in ``Compiled``."""
    spec = kernel.spec
    problem = spec.problem
    lines = [
        str(spec.resolved.composition),
        "",
        f"problem        N = {problem.columns}, K = {problem.depth}, {_short(problem.dtype)}",
        f"row order      {spec.resolved.order}",
        f"schedule       {spec.schedule}; {kernel.target.arch}",
        f"accumulate     {problem.accumulate}",
        *report_text(report, origin).splitlines(),
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
