"""One exception family.

Every error says who complains, what came, what was expected and how to mend it, and is raised from Python before
anything is traced, compiled or launched.
"""

from __future__ import annotations

__all__ = [
    "ArgumentError",
    "CacheError",
    "CompileError",
    "CompositionError",
    "EpicuteError",
    "KeyingError",
    "UnsupportedError",
    "require",
]


class EpicuteError(Exception):
    """Base of every error this package raises on purpose."""


class ArgumentError(EpicuteError, ValueError):
    """An argument has the wrong type, shape, dtype, stride, device or value."""


class CompositionError(EpicuteError, TypeError):
    """Two policies that cannot stand next to each other."""


class UnsupportedError(EpicuteError, NotImplementedError):
    """A combination that is legal to ask for but that no kernel here serves."""


class CompileError(EpicuteError, RuntimeError):
    """A kernel did not compile, or compiled to code that must not run (spills, serialised WGMMA)."""


class KeyingError(EpicuteError, TypeError):
    """A value or function that cannot be made part of a compile key."""


class CacheError(EpicuteError, OSError):
    """The object cache cannot be used as asked."""


def require(
    ok: bool,
    argument: str,
    got: object,
    expected: str,
    fix: str,
    error: type[EpicuteError] = ArgumentError,
) -> None:
    """Raise ``error`` unless ``ok``: ``argument: got …, expected …. Fix: …``."""
    if not ok:
        raise error(f"{argument}: got {got}, expected {expected}. Fix: {fix}")
