"""On a GPU: all kernels of the selected modules compiled before the first test, side by side on all cores."""

from __future__ import annotations

import os
import warnings
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path

import pytest

from epicute.errors import EpicuteError


@pytest.fixture(scope="session", autouse=True)
def precompiled(request: pytest.FixtureRequest, compiled_objects: Path) -> None:
    """Compile every ``CASES`` of a module with GPU tests; a kernel that fails fails its own tests."""
    items = [item for item in request.session.items if item.get_closest_marker("gpu")]
    modules = {
        m.__name__: m for m in (i.module for i in items) if "tests.gemm." in f"{m.__name__}."
    }
    cases = [case for module in modules.values() for case in getattr(module, "CASES", ())]
    if not cases:
        return
    from epicute.jit import precompile

    beside = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    workers = max(1, len(os.sched_getaffinity(0)) // beside)
    try:
        precompile([case.kernel() for case in cases], workers)
    except (EpicuteError, BrokenProcessPool, OSError) as error:
        warnings.warn(f"precompile: {error}", stacklevel=1)
