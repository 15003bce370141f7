"""``python -m benchmarks.gpu_tests [--out DIR] [pytest arguments]``: run the GPU tests and keep their count.

Writes ``gpu-tests.json`` to ``--out``, else to ``$OUT``, else to ``benchmarks/results/<device>``:
``{commit, device, date, files: {path: {passed, failed, skipped}}}``. A test that stops in its fixtures, or a file that
cannot be collected, counts as failed. Exits with pytest's status, and with 1 where nothing ran or a test was skipped.
``--keep RECORD`` takes over files of an earlier record of the same device that passed there and do not run now; each
keeps the ``commit`` that it ran at.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from benchmarks.provenance import ROOT, Provenance, slug
from epicute.errors import EpicuteError, require

NAME = "gpu-tests.json"
OUTCOMES = ("passed", "failed", "skipped")


class Tally:
    """A pytest plugin that counts tests by file and outcome; each counts once, by its worst phase."""

    def __init__(self) -> None:
        self._worst: dict[str, str] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Called for set-up, call and tear-down of every test."""
        if report.when == "call" or report.outcome != "passed":
            self._note(report.nodeid, report.outcome)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """A file that does not import fails as one test."""
        if report.outcome != "passed":
            self._note(report.nodeid, report.outcome)

    def _note(self, test: str, outcome: str) -> None:
        ranks = ("passed", "skipped", "failed")
        known = self._worst.get(test, "passed")
        self._worst[test] = max(known, outcome, key=ranks.index)

    def files(self) -> dict[str, dict[str, int]]:
        """Counts by file, in order of the paths."""
        found: dict[str, dict[str, int]] = {}
        for test, outcome in sorted(self._worst.items()):
            file = test.split("::")[0]
            found.setdefault(file, dict.fromkeys(OUTCOMES, 0))[outcome] += 1
        return found


def parse(arguments: Sequence[str] | None = None) -> tuple[argparse.Namespace, list[str]]:
    """The command line; what is not ours is pytest's."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu_tests", description=__doc__)
    parser.add_argument("--out", type=Path, help="folder of the JSON file")
    parser.add_argument(
        "--keep", type=Path, help="an earlier gpu-tests.json, of which files are taken over"
    )
    parser.add_argument("--allow-dirty", action="store_true", help="test uncommitted changes")
    return parser.parse_known_args(arguments)


def write(folder: Path, source: Provenance, files: dict[str, dict[str, Any]]) -> Path:
    """Write the record; returns its path."""
    record: dict[str, Any] = {
        "commit": source.commit,
        "device": source.device,
        "date": source.date,
        "files": files,
    }
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / NAME
    path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    return path


def kept(path: Path, source: Provenance, files: dict[str, Any]) -> dict[str, Any]:
    """Files of an earlier record that passed whole and are not among ``files``, each with its commit.

    Raises EpicuteError for a record of another device.
    """
    record = json.loads(path.read_text(encoding="utf-8"))
    require(
        record["device"] == source.device,
        "--keep",
        f"a record of {record['device']}",
        f"one of {source.device}",
        "run all tests on this device",
        EpicuteError,
    )
    return {
        name: {"commit": record["commit"], **counts}
        for name, counts in record["files"].items()
        if name not in files and counts["passed"] and not counts["failed"] + counts["skipped"]
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Run and record."""
    given, rest = parse(arguments)
    try:
        source = Provenance.here(allow_dirty=given.allow_dirty)
    except EpicuteError as error:
        print(error, file=sys.stderr)
        return 2
    tally = Tally()
    status = int(pytest.main(["-m", "gpu", *rest], plugins=[tally]))
    files: dict[str, dict[str, Any]] = dict(tally.files())
    ran = int(sum(counts["passed"] for counts in files.values()))
    if given.keep:
        files = dict(sorted({**kept(given.keep, source, files), **files}.items()))
    out = given.out or os.environ.get("OUT")
    folder = Path(out) if out else ROOT / "benchmarks" / "results" / slug(source.device)
    path = write(folder, source, files)
    total = {name: sum(counts[name] for counts in files.values()) for name in OUTCOMES}
    print(f"{', '.join(f'{count} {name}' for name, count in total.items())}: {path}")
    return status or int(ran == 0 or total["skipped"] > 0)


if __name__ == "__main__":
    sys.exit(main())
