"""Quotients that cost what they should on a device."""

from __future__ import annotations

from typing import Any

__all__ = ["split"]


def split(x: Any, n: int) -> tuple[Any, Any]:
    """(x // n, x % n) of an x that is not negative, which a compiler does not know of an integer with a sign: where n
    is a power of two a shift and a mask, else several instructions each. For int, NumPy and DSL integers.
    """
    if n & (n - 1):
        return x // n, x % n
    return x >> (n.bit_length() - 1), x & (n - 1)
