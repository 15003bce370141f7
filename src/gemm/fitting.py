"""Compiling with the schedule that ``choose`` gave, or a narrower one where the compiler spills.

How many registers an epilogue needs shows only in the compiled code. A tile that spills is compiled once, kept in the
object cache with its report, and passed over from then on.
"""

from __future__ import annotations

import logging
from dataclasses import replace

from epicute.gemm.choice import narrower
from epicute.gemm.spec import GemmKernel
from epicute.jit import Compiled, ObjectCache, Report, compile

__all__ = ["compile_fitting"]

log = logging.getLogger("epicute.gemm")

SPARED = 64
"""Bytes of spills that are let pass where no narrower tile is left, which is so for heads of 256: a few registers once
a tile, in the epilogue or in the staging warps. The loop over K has none to give."""


def compile_fitting(
    kernel: GemmKernel, *, cache: ObjectCache | None = None, strict: bool = True
) -> tuple[GemmKernel, Compiled]:
    """The first of ``kernel`` and its like with narrower tiles whose code may run, compiled.

    Raises CompileError, for the narrowest, where none may; without ``strict`` that one is returned. The narrowest may
    spill ``SPARED`` bytes, and a warning says so.
    """
    found = compile(kernel, cache=cache, strict=False)
    problems = found.report.problems()
    if not problems:
        return kernel, found
    schedule = narrower(kernel.spec.schedule, kernel.spec.problem, kernel.target)
    if schedule is None and _spared(found.report):
        log.warning("%s: %s, and no narrower tile", kernel.key, "; ".join(problems))
        return kernel, found
    if schedule is None:
        return kernel, compile(kernel, cache=cache, strict=strict)
    log.info("%s: %s; compiling %s instead", kernel.key, "; ".join(problems), schedule)
    return compile_fitting(kernel.scheduled(schedule), cache=cache, strict=strict)


def _spared(report: Report) -> bool:
    """Whether a few spilled bytes are all that is wrong."""
    few = max(report.spill_stores, report.spill_loads) <= SPARED
    return few and not replace(report, spill_stores=0, spill_loads=0).problems()
