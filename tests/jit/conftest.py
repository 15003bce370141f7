"""Fixtures of the jit room: a cache of the test's own, and a process that forgets."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from epicute.jit import ObjectCache, forget


@pytest.fixture
def cache(tmp_path: Path) -> ObjectCache:
    """An empty cache that no other test uses."""
    return ObjectCache(tmp_path / "cache")


@pytest.fixture
def forgetful() -> Iterator[Callable[[], None]]:
    """No kernel in memory at the start; call it to forget again, as a new process would have."""
    forget()
    yield forget
    forget()
