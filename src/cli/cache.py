"""``epicute cache``: the compiled kernels on disk."""

from __future__ import annotations

import argparse
import json
import sys
import time
from typing import Any

from epicute.cli.text import table, time_span, volume
from epicute.jit import Entry, ObjectCache

__all__ = ["add_arguments", "run"]

WIDEST = 60
"""Characters of an epilogue, and of the summary of a key's other fields, on a terminal; all of them elsewhere."""

DAY = 86400.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """``list``, and ``clear`` with an age."""
    actions = parser.add_subparsers(dest="action", required=True, metavar="action")
    listing = actions.add_parser("list", help="show every kernel, most recently used first")
    listing.add_argument("--json", action="store_true", help="print all that is known, as JSON")
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
        print(f"not used: {reason}", file=sys.stderr if args.json else sys.stdout)
        return 1
    if args.json:
        found = {"folder": str(cache.folder), "kernels": [_plain_entry(e) for e in entries]}
        print(json.dumps(found, indent=2))
        return 0
    if entries:
        widest = WIDEST if sys.stdout.isatty() else None
        header = ("epilogue", "kernel", "arch", "fields", "size", "used", "registers", "spills")
        print(table(header, [_row(entry, widest) for entry in entries]))
        print()
    total = volume(sum(entry.size for entry in entries))
    print(f"{len(entries)} kernels, {total} in {cache.folder}")
    return 0


def _clear(cache: ObjectCache, days: float | None) -> int:
    removed = cache.clear() if days is None else cache.prune(max_age=days * DAY)
    print(f"{removed} kernels removed from {cache.folder}")
    return 0


def _row(entry: Entry, widest: int | None) -> tuple[str, ...]:
    key = json.loads(entry.canonical)
    report = entry.report
    fields = key["fields"]
    epilogue = _plain(fields.pop("epilogue", ["str", "-"]))
    return (
        _cut(epilogue, widest),
        key["kernel"],
        key["target"],
        _cut(_summary(fields), widest),
        volume(entry.size),
        f"{time_span(time.time() - entry.used)} ago",
        "?" if report.registers is None else str(report.registers),
        f"{report.spill_stores + report.spill_loads} B",
    )


def _plain_entry(entry: Entry) -> dict[str, Any]:
    """An entry as JSON values."""
    key = json.loads(entry.canonical)
    return {
        "epilogue": _plain(key["fields"]["epilogue"]) if "epilogue" in key["fields"] else None,
        "kernel": key["kernel"],
        "target": key["target"],
        "fields": {name: _json(value) for name, value in key["fields"].items()},
        "digest": entry.digest,
        "object": str(entry.object),
        "size": entry.size,
        "used": entry.used,
        "report": entry.report.to_json(),
    }


def _json(value: list[Any]) -> Any:
    """A typed value of a key as JSON's own; what has parts of parts as the key has it."""
    match value:
        case ["int", text]:
            return int(text)
        case ["bool", text]:
            return text == "True"
        case ["none"]:
            return None
        case ["tuple", parts]:
            return [_json(part) for part in parts]
        case ["data", *_]:
            return value
    return float(_plain(value)) if value[0] == "float" else _plain(value)


def _cut(text: str, widest: int | None) -> str:
    return text if widest is None or len(text) <= widest else f"{text[:widest]}…"


def _summary(fields: dict[str, Any]) -> str:
    """The fields that are plain values; ``…`` for the rest."""
    shown = [(name, _plain(value)) for name, value in fields.items()]
    text = " ".join(f"{name}={value}" for name, value in shown if value)
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
