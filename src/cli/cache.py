"""``epicute cache``: the compiled kernels on disk."""

from __future__ import annotations

import argparse
import json
import time
from typing import Any

from epicute.cli.text import table, time_span, volume
from epicute.jit import Entry, ObjectCache

__all__ = ["add_arguments", "run"]

WIDEST = 60
"""Characters of the summary of a key's fields."""

DAY = 86400.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """``list``, and ``clear`` with an age."""
    actions = parser.add_subparsers(dest="action", required=True, metavar="action")
    actions.add_parser("list", help="show every kernel, most recently used first")
    clear = actions.add_parser("clear", help="remove kernels; they are compiled anew when needed")
    clear.add_argument(
        "--unused-for", type=float, metavar="DAYS", help="only those not used for so many days"
    )


def run(args: argparse.Namespace) -> int:
    """List or clear; raises CacheError where the folder cannot be used."""
    cache = ObjectCache()
    if args.action == "clear":
        return _clear(cache, args.unused_for)
    entries = cache.entries()
    if (reason := cache.unusable()) is not None:
        print(f"not used: {reason}")
        return 1
    if entries:
        header = ("kernel", "arch", "fields", "size", "used", "registers", "spills")
        print(table(header, [_row(entry) for entry in entries]))
        print()
    total = volume(sum(entry.size for entry in entries))
    print(f"{len(entries)} kernels, {total} in {cache.folder}")
    return 0


def _clear(cache: ObjectCache, days: float | None) -> int:
    removed = cache.clear() if days is None else cache.prune(max_age=days * DAY)
    print(f"{removed} kernels removed from {cache.folder}")
    return 0


def _row(entry: Entry) -> tuple[str, ...]:
    key = json.loads(entry.canonical)
    report = entry.report
    return (
        key["kernel"],
        key["target"],
        _summary(key["fields"]),
        volume(entry.size),
        f"{time_span(time.time() - entry.used)} ago",
        "?" if report.registers is None else str(report.registers),
        f"{report.spill_stores + report.spill_loads} B",
    )


def _summary(fields: dict[str, Any]) -> str:
    """The fields that are plain values, as far as they fit; ``…`` for the rest."""
    shown = [(name, _plain(value)) for name, value in fields.items()]
    text = " ".join(f"{name}={value}" for name, value in shown if value)
    if len(text) > WIDEST:
        return f"{text[:WIDEST]}…"
    return text if all(value for _, value in shown) else f"{text} …".lstrip()


def _plain(value: list[Any]) -> str:
    """A typed value of a key as text; empty for what has parts of parts."""
    tag, *rest = value
    if tag == "tuple":
        parts = [_plain(part) for part in rest[0] if part[0] not in ("tuple", "data")]
        return "x".join(parts) if len(parts) == len(rest[0]) else ""
    if tag in ("data", "none"):
        return "" if tag == "data" else "none"
    if tag == "float" and rest[0] != "nan":
        return repr(float.fromhex(rest[0]))
    return str(rest[-1]).removeprefix("torch.")
