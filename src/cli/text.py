"""Small ways to print numbers and tables."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["table", "time_span", "volume"]


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns as wide as their widest entry; the last one is not padded."""
    lines = [list(header), *(list(row) for row in rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(entry.ljust(width) for entry, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    )


def volume(count: int) -> str:
    """Bytes: ``17 kB``, ``1.2 MB``, ``80.0 GB``."""
    if count < 1_000_000:
        return f"{-(-count // 1000)} kB"
    return f"{count / 1e6:.1f} MB" if count < 1_000_000_000 else f"{count / 1e9:.1f} GB"


def time_span(seconds: float) -> str:
    """``12 s``, ``3 min``, ``5 h``, ``2 d``."""
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{seconds // length:.0f} {unit}"
    return f"{max(seconds, 0):.0f} s"
