"""Where the cache of compiled objects lies, and whether it can be trusted.

Objects are machine code that will be run, so the folder must be one that only this user (or root)
can write to. It is created when first written to, never at import.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

__all__ = ["default_folder", "make_private", "why_untrusted"]

PRIVATE = 0o700


def default_folder() -> Path | None:
    """``$EPICUTE_CACHE_DIR``, else ``epicute/kernels`` among the user's caches; None if homeless.

    The user's caches lie in ``$XDG_CACHE_HOME`` or ``~/.cache``.
    """
    named = os.environ.get("EPICUTE_CACHE_DIR")
    if named:
        return Path(named).expanduser().absolute()
    caches = os.environ.get("XDG_CACHE_HOME", "")
    if os.path.isabs(caches):
        return Path(caches) / "epicute" / "kernels"
    try:
        return Path.home() / ".cache" / "epicute" / "kernels"
    except RuntimeError:
        return None


def why_untrusted(folder: Path) -> str | None:
    """Why objects in ``folder`` must not be loaded; None where they may, or it does not exist."""
    try:
        found = folder.stat()
    except FileNotFoundError:
        return None
    except OSError as error:
        said = f"{folder} cannot be read ({error.strerror})"
        return f"{said}. Fix: set EPICUTE_CACHE_DIR to a folder of yours"
    if not stat.S_ISDIR(found.st_mode):
        return f"{folder} is not a folder. Fix: move it away or set EPICUTE_CACHE_DIR"
    if found.st_uid not in (os.geteuid(), 0):
        return (
            f"{folder} belongs to user {found.st_uid}, who could plant code in it. "
            "Fix: set EPICUTE_CACHE_DIR to a folder of yours"
        )
    if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return (
            f"{folder} can be written to by others (mode {stat.S_IMODE(found.st_mode):03o}). "
            f"Fix: chmod go-w {folder}"
        )
    return None


def make_private(folder: Path) -> None:
    """Create ``folder`` for this user alone, its parents as usual; an existing one stays as is."""
    if not folder.is_dir():
        folder.parent.mkdir(parents=True, exist_ok=True)
        folder.mkdir(mode=PRIVATE, exist_ok=True)
