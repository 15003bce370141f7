"""From a kernel to a function that runs: memory, then disk, then the compiler.

A kernel is a key and a way to trace it. Nothing here sees a tensor: what is compiled depends on the
key alone.
"""

from __future__ import annotations

import io
import logging
import os
import re
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, Protocol, runtime_checkable

from epicute.errors import CompileError, EpicuteError, KeyingError, UnsupportedError
from epicute.jit.cache import ObjectCache
from epicute.jit.environment import environment
from epicute.jit.key import CompileKey
from epicute.jit.report import Report

__all__ = ["Compiled", "Kernel", "compile", "forget"]

log = logging.getLogger("epicute.jit")

Origin = Literal["memory", "disk", "compiled"]

_SMEM_FIELD = re.compile(
    r"(%\w+) = llvm\.getelementptr %\w+\[0, 2\] : \(!llvm\.ptr\) -> !llvm\.ptr, "
    r"!llvm\.struct<\(array<3 x i32>, array<3 x i32>, i64, ptr, ptr, i32\)>"
)
"""In the lowered host code: address of the dynamic shared memory in a ``cudaLaunchConfig_t``."""


@runtime_checkable
class Kernel(Protocol):
    """What can be compiled."""

    @property
    def key(self) -> CompileKey:
        """Everything that decides the machine code."""
        ...

    def trace(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        """The ``@cute.jit`` function and its fake arguments, symbolic where sizes vary at run time.

        A kernel may also have ``shared_memory``, the dynamic bytes its launch asks for, where that
        is no constant.
        """
        ...


@dataclass(frozen=True)
class Compiled:
    """A kernel ready to launch.

    Attributes:
        key: what it was compiled for.
        function: takes tensors as ``trace``'s fake arguments promise; launches on torch's current
            stream.
        report: what the compiler said.
        origin: where this call found it: ``"memory"``, ``"disk"`` or ``"compiled"``.
    """

    key: CompileKey
    function: Callable[..., Any]
    report: Report
    origin: Origin

    def __call__(self, *arguments: Any) -> Any:
        """Launch."""
        return self.function(*arguments)


_loaded: dict[str, Compiled] = {}
# MLIR is not thread-safe, nor is the exchange of stderr below.
_compiling = threading.RLock()


def _forget_lock() -> None:
    global _compiling
    _compiling = threading.RLock()


os.register_at_fork(after_in_child=_forget_lock)


def forget() -> None:
    """Drop this process's compiled kernels; those on disk stay."""
    _loaded.clear()


def compile(kernel: Kernel, *, cache: ObjectCache | None = None, strict: bool = True) -> Compiled:
    """The kernel's function, from memory, from disk or newly compiled.

    Args:
        kernel: what to compile.
        cache: where objects lie on disk; by default the user's cache.
        strict: refuse spills, serialised WGMMA and too much shared memory (``Report.check``).

    Raises CompileError where the kernel does not compile, where ``strict`` refuses the code, and
    inside a CUDA graph capture, in which neither compiling nor loading is possible; KeyingError for
    a key of another environment.
    """
    key = kernel.key
    found = _loaded.get(key.digest)
    if found is None:
        _refuse_in_capture(key)
        _refuse_foreign(key)
        with _compiling:
            found = _loaded.get(key.digest)
            if found is None:
                found = _from_disk_or_compiler(kernel, _user_cache() if cache is None else cache)
                _loaded[key.digest] = replace(found, origin="memory")
    if strict and found.report.problems(key.target.smem_per_block):
        found.report.check(str(key), key.target.smem_per_block)
    return found


_caches: dict[str | None, ObjectCache] = {}


def _user_cache() -> ObjectCache:
    """One cache per folder, so that each warns once."""
    fresh = ObjectCache()
    return _caches.setdefault(None if fresh.folder is None else str(fresh.folder), fresh)


def _refuse_in_capture(key: CompileKey) -> None:
    torch = sys.modules.get("torch")
    if (
        torch is not None
        and torch.cuda.is_initialized()
        and torch.cuda.is_current_stream_capturing()
    ):
        raise CompileError(
            f"{key}: not compiled yet, and neither compiling nor loading is possible while a "
            "CUDA graph is captured. Fix: compile before capture (make the plan, or run once, "
            "outside the graph)"
        )


def _refuse_foreign(key: CompileKey) -> None:
    here = environment()
    if key.environment != here:
        raise KeyingError(
            f"{key}: the key is of another environment ({dict(key.environment)}), expected "
            f"{dict(here)}. Fix: make the kernel again in this process"
        )


def _from_disk_or_compiler(kernel: Kernel, cache: ObjectCache) -> Compiled:
    found = _from_disk(kernel.key, cache)
    if found is not None:
        return found
    with cache.lock(kernel.key.digest) as held:
        # Whoever held the lock before may have compiled just this.
        found = _from_disk(kernel.key, cache) if held else None
        return _compile(kernel, cache, held) if found is None else found


def _from_disk(key: CompileKey, cache: ObjectCache) -> Compiled | None:
    entry = cache.read(key.digest)
    if entry is None:
        return None
    start = time.perf_counter()
    try:
        function = _load(entry.object, key)
    except Exception as error:
        log.warning("%s: %s does not load (%s); compiling anew", key, entry.object, error)
        return None
    log.info("%s: loaded from disk in %.0f ms", key, 1e3 * (time.perf_counter() - start))
    return Compiled(key, function, entry.report, "disk")


def _compile(kernel: Kernel, cache: ObjectCache, keep: bool) -> Compiled:
    key = kernel.key
    log.info("%s: compiling; %s", key, _why(key, cache))
    start = time.perf_counter()
    module, text = _run_compiler(kernel)
    report = Report.parse(
        text,
        seconds=time.perf_counter() - start,
        dynamic=_dynamic_shared_memory(module, kernel),
        ptxas=_ptxas(key),
    )
    try:
        with tempfile.TemporaryDirectory(prefix="epicute-") as folder:
            path = Path(folder) / "kernel.o"
            module.export_to_c(object_file_path=str(path), function_name=_symbol(key))
            if keep:
                cache.write(key, report, path.read_bytes())
            function = _load(path, key)
    except OSError as error:
        # No disk at all to export to: the compiler's own function does the same, in this process.
        log.warning("%s: not exported (%s)", key, error.strerror)
        function = module
    log.info("%s: compiled in %.2f s", key, report.seconds)
    return Compiled(key, function, report, "compiled")


def _run_compiler(kernel: Kernel) -> tuple[Any, str]:
    cute = _dsl()
    with _compiler_output() as output:
        try:
            function, arguments = kernel.trace()
            module = cute.compile(function, *arguments, options=kernel.key.compiler_options)
        except EpicuteError:
            raise
        except (Exception, SystemExit) as error:
            said = output.text.strip()
            raise CompileError(
                f"{kernel.key}: does not compile: {type(error).__name__}: {error}"
                + (f"\n{said}" if said else "")
            ) from error
    return module, output.text


def _load(path: Path, key: CompileKey) -> Callable[..., Any]:
    module = _dsl().runtime.load_module(str(path), enable_tvm_ffi=True)
    function: Callable[..., Any] = getattr(module, _symbol(key))
    return function


def _dsl() -> Any:
    try:
        import cutlass.cute as cute
        import tvm_ffi  # noqa: F401  (the DSL asks for it late, and less clearly)
    except ImportError as error:
        raise UnsupportedError(
            f"kernels: need the CuTe DSL, which does not import here ({error}). Fix: on Linux, "
            "pip install 'nvidia-cutlass-dsl>=4.8,<4.9' apache-tvm-ffi; `epicute doctor` checks it"
        ) from error
    return cute


def _ptxas(key: CompileKey) -> str:
    """The DSL carries its own ptxas, so that the DSL's version names it."""
    found = dict(key.environment)
    return f"of nvidia-cutlass-dsl {found['nvidia-cutlass-dsl']} ({found['flavour']})"


def _symbol(key: CompileKey) -> str:
    return f"epicute_{key.digest[:16]}"


def _dynamic_shared_memory(module: Any, kernel: Kernel) -> int | None:
    """Bytes of the largest launch: read from the lowered host code, else the kernel's word."""
    code = str(module.ir_module)
    sizes = []
    for field in _SMEM_FIELD.finditer(code):
        stored = re.compile(rf"llvm\.store (%\w+), {field[1]} : i64").search(code, field.end())
        # Value names are local to a function: the nearest definition above is the one meant.
        values = stored and re.findall(
            rf"{stored[1]} = llvm\.mlir\.constant\((\d+) : i64\)", code[: stored.start()]
        )
        if values:
            sizes.append(int(values[-1]))
    return max(sizes) if sizes else getattr(kernel, "shared_memory", None)


def _why(key: CompileKey, cache: ObjectCache) -> str:
    """What is new about a key, against the nearest key of the same kernel."""
    known = [c.key.canonical() for c in _loaded.values() if c.key.kernel == key.kernel]
    known += [e.canonical for e in cache.entries() if e.kernel == key.kernel]
    if not known:
        return "no object of this kernel yet"
    nearest = min(known, key=lambda other: (len(key.differences(other)), other))
    return key.difference(nearest) or "its object is gone"


class _Output(io.TextIOBase):
    """Keeps what the compiling thread writes; all but ptxas' report goes on to the real stream."""

    def __init__(self, onward: Any) -> None:
        self._onward = onward
        self._thread = threading.get_ident()
        self._parts: list[str] = []

    @property
    def text(self) -> str:
        return "".join(self._parts)

    def write(self, text: str) -> int:
        mine = threading.get_ident() == self._thread
        if mine:
            self._parts.append(text)
        if self._onward is not None and not (mine and ("ptxas" in text or not text.strip())):
            self._onward.write(text)
        return len(text)

    def flush(self) -> None:
        if self._onward is not None:
            self._onward.flush()

    def fileno(self) -> int:
        return int(self._onward.fileno())


@contextmanager
def _compiler_output() -> Iterator[_Output]:
    """Collect the compiler's report, which the DSL prints to ``sys.stderr``."""
    before = sys.stderr
    sys.stderr = output = _Output(before)
    try:
        yield output
    finally:
        sys.stderr = before
