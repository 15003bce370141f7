"""Runs tests that are marked ``gpu`` where there is no GPU: ``pytest -p tests.ptx.plugin -m gpu tests/…``.

The GPU is made up (see ``device.py``). Shapes are the tests' own, so that large ones take minutes or more: choose some
with ``-k``. ``EPICUTE_EMULATED_SECONDS`` ends a test that has taken so many seconds of the processor.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest

SECONDS = float(os.environ.get("EPICUTE_EMULATED_SECONDS", "0"))


class TooSlow(Exception):
    """A test that has taken its time."""


@pytest.hookimpl(hookwrapper=True)
def pytest_cmdline_main(config: pytest.Config) -> Iterator[None]:
    """Make up the GPU before tests are collected, as they are chosen by whether there is one."""
    import epicute.jit
    from tests.ptx.device import emulated_device

    with pytest.MonkeyPatch.context() as patch, emulated_device() as device:
        config.stash[DEVICE] = device
        # Other processes compile to no purpose: objects of this one carry their PTX.
        patch.setattr(epicute.jit, "precompile", lambda kernels, *_, **__: [])
        yield


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """Give each test its time, and the next one a GPU that captures nothing."""

    def late(*_: Any) -> None:
        raise TooSlow(f"{SECONDS:g} s")

    before = signal.signal(signal.SIGPROF, late)
    signal.setitimer(signal.ITIMER_PROF, SECONDS)
    yield
    signal.setitimer(signal.ITIMER_PROF, 0)
    signal.signal(signal.SIGPROF, before)
    arena = item.config.stash[DEVICE].arena
    arena.captured, arena.waiting = None, "default"


DEVICE = pytest.StashKey[Any]()
