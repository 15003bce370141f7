"""``epicute cache``: the compiled kernels on disk."""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import time
from typing import Any

from epicute.cli.text import table, time_span, volume
from epicute.jit import Entry, ObjectCache

__all__ = ["add_arguments", "run"]

LEAST = 20
"""Characters of an epilogue, and of the summary of a key's other fields, that a terminal must have room for; where it
has not, the summary is left out. What is no terminal gets all of both."""

HEADER = ("epilogue", "kernel", "arch", "fields", "size", "used", "registers", "spills")
LONG = (HEADER.index("epilogue"), HEADER.index("fields"))

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
        rows = [HEADER, *map(_row, entries)]
        if sys.stdout.isatty():
            rows = _fitted(rows, shutil.get_terminal_size().columns)
        print(table(rows[0], rows[1:]))
        print()
    total = volume(sum(entry.size for entry in entries))
    print(f"{_kernels(len(entries))}, {total} in {cache.folder}")
    return 0


def _kernels(count: int) -> str:
    return f"{count} kernel{'' if count == 1 else 's'}"


def _fitted(rows: list[tuple[str, ...]], columns: int) -> list[tuple[str, ...]]:
    """The table cut to a terminal's ``columns``: the two long entries of a row share what the others leave."""
    widths = [max(map(len, entries)) for entries in zip(*rows, strict=True)]
    others = sum(width for i, width in enumerate(widths) if i not in LONG)
    room = columns - others - 2 * (len(widths) - 1)
    first, second = LONG
    if room < 2 * LEAST:
        limits = {first: max(room + 2, LEAST // 2)}
        rows = [row[:second] + row[second + 1 :] for row in rows]
    else:
        epilogue = min(widths[first], max(room // 2, room - widths[second]))
        limits = {first: epilogue, second: room - epilogue}
    return [tuple(_cut(x, limits.get(i, len(x))) for i, x in enumerate(row)) for row in rows]


def _clear(cache: ObjectCache, days: float | None) -> int:
    removed = cache.clear() if days is None else cache.prune(max_age=days * DAY)
    print(f"{_kernels(removed)} removed from {cache.folder}")
    return 0


def _row(entry: Entry) -> tuple[str, ...]:
    key = json.loads(entry.canonical)
    report = entry.report
    fields = key["fields"]
    epilogue = _plain(fields.pop("epilogue", ["str", "-"]))
    return (
        epilogue,
        key["kernel"],
        key["target"],
        _summary(fields),
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


def _cut(text: str, widest: int) -> str:
    """At most ``widest`` characters."""
    return text if len(text) <= widest else f"{text[: widest - 1]}…"


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
