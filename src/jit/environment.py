"""What, beside a kernel's own description, decides which machine code comes out.

Everything is read from package metadata and the driver; nothing here imports the DSL.
"""

from __future__ import annotations

import ctypes
import functools
import os
import sys
from importlib import metadata

__all__ = ["driver_version", "dsl_flavour", "environment", "version_of"]

Pairs = tuple[tuple[str, str], ...]

DSL_SWITCHES = (
    "AUTO_M2S",
    "COMPILER_BACKEND",
    "COMPILER_OPT",
    "DEBUG",
    "DRYRUN",
    "ENABLE_ASSERTIONS",
    "ENABLE_PYIR",
    "LINEINFO",
    "LOC_TRACEBACKS",
    "TOLERATE_M2M",
)
"""``CUTE_DSL_*`` variables that change the code the DSL emits. ``ARCH`` is missing as the target is
always stated."""


def version_of(distribution: str) -> str:
    """Installed version of a distribution, or ``absent``."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return "absent"


@functools.cache
def driver_version() -> tuple[int, int] | None:
    """CUDA version the installed driver supports, e.g. (13, 0); None without a driver. Starts no
    CUDA context."""
    found = ctypes.c_int(0)
    try:
        if ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(found)) != 0:
            return None
    except (OSError, AttributeError):
        return None
    return found.value // 1000, found.value % 1000 // 10


def dsl_flavour() -> str:
    """The DSL's library flavour that will load: the newest installed one the driver supports
    (``cu12``, ``cu13``).

    ``absent`` where none is installed, ``unsupported`` where the driver is older than all of them.
    """
    installed = [n for n in (12, 13) if version_of(f"nvidia-cutlass-dsl-libs-cu{n}") != "absent"]
    if not installed:
        return "absent"
    driver = driver_version()
    usable = [n for n in installed if driver is None or driver[0] >= n]
    return f"cu{max(usable)}" if usable else "unsupported"


@functools.cache
def _installed() -> Pairs:
    return (
        ("python", f"{sys.version_info.major}.{sys.version_info.minor}"),
        ("nvidia-cutlass-dsl", version_of("nvidia-cutlass-dsl")),
        ("flavour", dsl_flavour()),
        ("apache-tvm-ffi", version_of("apache-tvm-ffi")),
        ("epicute", version_of("epicute")),
    )


def environment() -> Pairs:
    """(name, value) of everything installed or switched on that shapes a compiled kernel."""
    names = [f"CUTE_DSL_{name}" for name in DSL_SWITCHES]
    switches = ((name, os.environ[name]) for name in names if os.environ.get(name))
    return _installed() + tuple(switches)
