"""Compile many kernels in several processes: the compiler is not thread-safe, but its results are
files.

Workers see no GPU, so that compiling a set neither takes device memory nor depends on what is
plugged in.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import traceback
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool

from epicute.errors import ArgumentError, CacheError, CompileError, EpicuteError
from epicute.jit.cache import ObjectCache
from epicute.jit.compile import Kernel, compile
from epicute.jit.report import Report

__all__ = ["precompile"]

Progress = Callable[[int, int, Kernel, Report], None]


def precompile(
    kernels: Sequence[Kernel],
    workers: int | None = None,
    progress: Progress | None = None,
    *,
    cache: ObjectCache | None = None,
    strict: bool = True,
) -> list[Report]:
    """Compile the kernels that the object cache lacks; reports in the order of ``kernels``.

    Args:
        kernels: picklable kernels.
        workers: processes; by default one per usable core, and no more than kernels.
        progress: called as (done, total, kernel, report) after each.
        cache: where objects go, by default the user's cache; it must be on disk.
        strict: as in ``compile``.

    Raises CompileError, naming the kernel, for the first that fails, after the others have ended;
    ArgumentError for a kernel that cannot be pickled; CacheError where there is no folder for the
    results.
    """
    cache = ObjectCache() if cache is None else cache
    if (reason := cache.unusable()) is not None:
        raise CacheError(f"precompile: needs a cache on disk, but {reason}")
    reports: dict[str, Report] = {}
    first: dict[str, Kernel] = {}
    for kernel in kernels:
        first.setdefault(kernel.key.digest, kernel)
    for digest, report in _finished(first, cache, workers, strict):
        reports[digest] = report
        if progress is not None:
            progress(len(reports), len(first), first[digest], report)
    return [reports[kernel.key.digest] for kernel in kernels]


def _finished(
    kernels: dict[str, Kernel], cache: ObjectCache, workers: int | None, strict: bool
) -> Iterator[tuple[str, Report]]:
    """(digest, report) of each kernel as it becomes ready."""
    missing = dict(kernels)
    failures: list[EpicuteError] = []
    for digest, kernel in kernels.items():
        if (entry := cache.read(digest)) is not None:
            del missing[digest]
            try:
                if strict:
                    entry.report.check(str(kernel.key), kernel.key.target.smem_per_block)
            except EpicuteError as error:
                failures.append(error)
            else:
                yield digest, entry.report
    if missing:
        packed = {digest: _pack(kernel) for digest, kernel in missing.items()}
        count = min(len(missing), workers or os.cpu_count() or 1)
        with ProcessPoolExecutor(count, _context(), _blind) as pool:
            jobs = {pool.submit(_work, t, cache, strict): digest for digest, t in packed.items()}
            yield from _collect(jobs, missing, failures)
    if failures:
        raise failures[0]


def _context() -> multiprocessing.context.BaseContext:
    """Workers fork from one process that has imported the DSL, and nothing else has happened in."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["epicute.jit.compile", "cutlass.cute", "tvm_ffi", "torch"])
    return context


def _collect(
    jobs: dict[Future[Report], str], kernels: dict[str, Kernel], failures: list[EpicuteError]
) -> Iterator[tuple[str, Report]]:
    """(digest, report) of each job that ends well; what the others raise goes to ``failures``."""
    waiting = set(jobs)
    while waiting:
        done, waiting = wait(waiting, return_when=FIRST_COMPLETED)
        for job in done:
            kernel = kernels[jobs[job]]
            try:
                yield jobs[job], job.result()
            except EpicuteError as error:
                failures.append(error)
            except BrokenProcessPool as error:
                raise CompileError(
                    f"{kernel.key}: a compiling process died ({error}). Fix: if this is a script, "
                    "call it under `if __name__ == '__main__':`; else use fewer workers"
                ) from error


def _pack(kernel: Kernel) -> bytes:
    try:
        return pickle.dumps(kernel)
    except Exception as error:
        raise ArgumentError(
            f"kernels: {kernel.key} cannot be sent to another process ({error}). "
            "Fix: define its class and functions at module level, and keep no tensors in it"
        ) from error


def _blind() -> None:
    os.environ["CUDA_VISIBLE_DEVICES"] = ""


def _work(packed: bytes, cache: ObjectCache, strict: bool) -> Report:
    """In a worker: compile one kernel. Errors that may not survive pickling become CompileError."""
    kernel: Kernel = pickle.loads(packed)
    try:
        report = compile(kernel, cache=cache, strict=strict).report
    except EpicuteError as error:
        raise CompileError(str(error)) from None
    except Exception as error:
        raise CompileError(f"{kernel.key}: {error}\n{traceback.format_exc()}") from None
    if cache.read(kernel.key.digest) is None:
        raise CacheError(f"{kernel.key}: compiled, but not stored in {cache.folder}")
    return report
