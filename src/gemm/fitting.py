"""Compiling with the schedule that ``choose`` gave, or a narrower one where the compiler spills.

How many registers an epilogue needs shows only in the compiled code. A tile that spills is compiled once, kept in the
object cache with its report, and passed over from then on.
"""

from __future__ import annotations

import logging
from dataclasses import replace

from epicute.gemm.choice import narrower
from epicute.gemm.spec import GemmKernel
from epicute.jit import Compiled, ObjectCache, compile

__all__ = ["compile_fitting"]

log = logging.getLogger("epicute.gemm")


def compile_fitting(
    kernel: GemmKernel, *, cache: ObjectCache | None = None, strict: bool = True
) -> tuple[GemmKernel, Compiled]:
    """The first of ``kernel`` and its like with narrower tiles whose code may run, compiled.

    Raises CompileError, for the narrowest, where none may; without ``strict`` that one is returned.
    """
    found = compile(kernel, cache=cache, strict=False)
    problems = found.report.problems()
    if not problems:
        return kernel, found
    schedule = narrower(kernel.spec.schedule, kernel.spec.problem, kernel.target)
    if schedule is None:
        return kernel, compile(kernel, cache=cache, strict=strict)
    log.info("%s: %s; compiling %s instead", kernel.key, "; ".join(problems), schedule)
    spec = replace(kernel.spec, schedule=schedule)
    return compile_fitting(replace(kernel, spec=spec), cache=cache, strict=strict)
