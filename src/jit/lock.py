"""One compiler per key among all processes of a user.

A lock is a file lock of the kernel: it falls with the process that holds it, however that process
dies.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Iterator
from pathlib import Path

__all__ = ["hold", "try_hold"]

log = logging.getLogger("epicute.jit")

POLL_SECONDS = 0.02
TELL_AFTER_SECONDS = 5.0


def _open(path: Path) -> int:
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)


def _take(handle: int) -> bool:
    import fcntl

    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _current(handle: int, path: Path) -> bool:
    """Whether the open file is still the one at ``path``; a pruner may have removed it."""
    try:
        return os.fstat(handle).st_ino == os.stat(path).st_ino
    except FileNotFoundError:
        return False


@contextlib.contextmanager
def try_hold(path: Path) -> Iterator[bool]:
    """Hold the lock at ``path`` if nobody does; gives whether it is held.

    Raises OSError where no file can be made.
    """
    handle = _open(path)
    try:
        yield _take(handle) and _current(handle, path)
    finally:
        os.close(handle)


@contextlib.contextmanager
def hold(path: Path, seconds: float) -> Iterator[bool]:
    """``try_hold``, again and again for up to ``seconds``."""
    start = time.monotonic()
    told = False
    while True:
        with try_hold(path) as held:
            waited = time.monotonic() - start
            if held or waited >= seconds:
                yield held
                return
        if waited > TELL_AFTER_SECONDS and not told:
            told = True
            log.info("waiting for another process that compiles the same kernel (%s)", path.name)
        time.sleep(POLL_SECONDS)
