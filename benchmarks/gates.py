"""``python -m benchmarks.gates [--out FILE] [pytest arguments]``: compile every variant, keep what the compiler said.

Writes ``gates.json`` to ``--out``, else to ``benchmarks/results``; no GPU is needed:

    {commit, dsl, target, date, variants, failed: [test], registers, shared_memory, spilled, spilling, hazards,
     groups: [{tile, dtype, accumulate, variants, registers, shared_memory, spilled, spilling, hazards}]}

Of the variants of a group, and of all: their count, the most registers, bytes of shared memory and bytes of spills, how
many spill at all, and how many of ptxas' fatal advisories (see ``epicute.jit.report``) there were. A variant that did
not get as far as a report stands under ``failed`` alone. Exits with pytest's status, and with 1 where nothing compiled.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from benchmarks.provenance import RESULTS, ROOT, commit
from epicute.errors import EpicuteError
from epicute.jit import DEFAULT_TARGET

__all__ = ["GROUP", "Variants", "grouped", "main", "parse", "summed", "write"]

PATH = ROOT / RESULTS / "gates.json"
GROUP = ("tile", "dtype", "accumulate")
"""What variants are grouped by."""

LARGEST = ("registers", "shared_memory", "spilled")
KNOWN = (*GROUP, *LARGEST, "hazards")


class Variants:
    """A pytest plugin that keeps what the gates recorded of each variant, and which tests failed."""

    def __init__(self) -> None:
        self._found: dict[str, dict[str, Any]] = {}
        self._failed: set[str] = set()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Called for set-up, call and tear-down of every test."""
        if report.outcome != "passed":
            self._failed.add(report.nodeid)
        if report.when == "call":
            said = {name: value for name, value in report.user_properties if name in KNOWN}
            if set(said) == set(KNOWN) and None not in said.values():
                self._found[report.nodeid] = said

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """A file that does not import fails as one test."""
        if report.outcome != "passed":
            self._failed.add(report.nodeid)

    def variants(self) -> list[dict[str, Any]]:
        """What each variant's compiler said, in order of the tests' names."""
        return [said for _, said in sorted(self._found.items())]

    def failed(self) -> list[str]:
        """Tests that did not pass, in order."""
        return sorted(self._failed)


def summed(variants: Sequence[Mapping[str, Any]]) -> dict[str, int]:
    """Count, worst of each measure, and sums of what must not be."""
    found = {"variants": len(variants)}
    for name in LARGEST:
        found[name] = max((one[name] for one in variants), default=0)
    found["spilling"] = sum(one["spilled"] > 0 for one in variants)
    found["hazards"] = sum(one["hazards"] for one in variants)
    return found


def grouped(variants: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """A line for each tile, dtype and accumulation, in order."""
    groups: dict[tuple[str, ...], list[Mapping[str, Any]]] = {}
    for one in variants:
        groups.setdefault(tuple(one[name] for name in GROUP), []).append(one)
    return [
        {**dict(zip(GROUP, key, strict=True)), **summed(found)}
        for key, found in sorted(groups.items())
    ]


def write(path: Path, named: str, variants: Sequence[Mapping[str, Any]], failed: list[str]) -> None:
    """Write the record of the commit ``named``."""
    record: dict[str, Any] = {
        "commit": named,
        "dsl": importlib.metadata.version("nvidia-cutlass-dsl"),
        "target": str(DEFAULT_TARGET),
        "date": datetime.now(UTC).date().isoformat(),
        "failed": failed,
        **summed(variants),
        "groups": grouped(variants),
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


def parse(arguments: Sequence[str] | None = None) -> tuple[argparse.Namespace, list[str]]:
    """The command line; what is not ours is pytest's."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gates", description=__doc__)
    parser.add_argument("--out", type=Path, default=PATH, help="the JSON file")
    parser.add_argument("--allow-dirty", action="store_true", help="compile uncommitted changes")
    return parser.parse_known_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Compile and record."""
    given, rest = parse(arguments)
    try:
        named = commit(allow_dirty=given.allow_dirty)
    except EpicuteError as error:
        print(error, file=sys.stderr)
        return 2
    plugin = Variants()
    status = int(pytest.main(["-m", "gates", *rest], plugins=[plugin]))
    variants, failed = plugin.variants(), plugin.failed()
    write(given.out, named, variants, failed)
    total = summed(variants)
    print(f"{', '.join(f'{name} {count}' for name, count in total.items())}: {given.out}")
    return status or int(not variants or bool(failed) or total["hazards"] > 0)


if __name__ == "__main__":
    sys.exit(main())
