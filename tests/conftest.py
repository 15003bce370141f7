"""What every test has: a cache of its own, hypothesis settings, and markers for what it needs; of a GPU test, an end.

Nothing here imports the DSL, so that collecting the tests costs no second and works without it.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest

NEEDS = ("compile", "gpu", "gates")

KEPT_BYTES = 2**35
"""Of GPU memory, that the allocator may keep from one test to the next."""

# The same draws in every run of the same code, so that a failure is the change's; `thorough` draws anew.
hypothesis.settings.register_profile(
    "ci", deadline=None, max_examples=50, derandomize=True, print_blob=True
)
hypothesis.settings.register_profile(
    "thorough", deadline=None, max_examples=1000, derandomize=False, print_blob=True
)
hypothesis.settings.load_profile("ci")  # pytest --hypothesis-profile=thorough overrides it


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark what needs nothing as ``cpu``; drop what this machine cannot run.

    Deselected rather than skipped: a skipped test is one that should have run.
    """
    kept, dropped = [], []
    for item in items:
        if not any(item.get_closest_marker(name) for name in NEEDS):
            item.add_marker("cpu")
        (kept if _runs_here(item) else dropped).append(item)
    if dropped:
        config.hook.pytest_deselected(items=dropped)
        items[:] = kept


def _runs_here(item: pytest.Item) -> bool:
    if item.get_closest_marker("gpu"):
        import torch

        return torch.cuda.is_available()
    if item.get_closest_marker("compile") or item.get_closest_marker("gates"):
        return sys.platform == "linux"  # the DSL exists for Linux alone
    return True


@pytest.fixture(scope="session", autouse=True)
def compiled_objects(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The folder of compiled objects: new in every run, shared by its processes, never the user's.

    ``EPICUTE_TEST_CACHE`` names a folder to use instead, which then outlives the run.
    """
    chosen = os.environ.get("EPICUTE_TEST_CACHE")
    if chosen:
        folder = Path(chosen).resolve()
    else:
        base = tmp_path_factory.getbasetemp()
        run = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
        folder = run / "compiled-objects"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("EPICUTE_CACHE_DIR", str(folder))
        yield folder


@pytest.fixture(autouse=True)
def finished(request: pytest.FixtureRequest) -> Iterator[None]:
    """A GPU test ends when its kernels do, and leaves no large buffer with the allocator.

    A kernel that faulted takes the process's context with it: later tests would fail for no fault of their own.
    """
    yield
    if not request.node.get_closest_marker("gpu"):
        return
    import torch

    try:
        torch.cuda.synchronize()
    except RuntimeError as error:
        pytest.exit(f"{request.node.nodeid}: {error}", returncode=3)
    if torch.cuda.memory_reserved() > KEPT_BYTES:
        torch.cuda.empty_cache()
