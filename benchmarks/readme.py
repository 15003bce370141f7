"""Tables of README and docs, written from the results and never by hand.

``python -m benchmarks.readme`` rewrites every block between ``<!-- generated: NAME -->`` and
``<!-- end -->``; with ``--check`` it only says which files are stale, and exits with 1.

| block | holds |
|---|---|
| status | what exists, and what of it GPU tests have covered |
| planned | what does not exist yet |
| summary | geometric mean, least and most of peer over ours, per table, format and accumulation, or in a line or two |
| gemm, epilogue, calls, accuracy, layer-accuracy | every row of the table of that name |
| attention, prefill-layer, packed-prefill, prefill-model | the same, with rates and footprints |
| decode-attention, decode-ablation, cache-write, qk4pv8-decode, qk4pv8-prefill | the same |
| projections, decode-layer | columns of their own, then every row |
| counters | what the card counted, a line for each launch |
| power | clock, power and share of the peak at that clock of every measurement of the table gemm |
| perplexity, outliers | every row of the tables that the CPU references compute |
| gpu-tests | passed, failed and skipped per test file |

A table whose JSON is not there yet reads "not measured yet".
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks import perplexity
from benchmarks.floors import FLOP_PER_CLOCK, PEAK, SMS, nominal_mhz
from benchmarks.mixes import padding
from benchmarks.parts import PARTS, PLANNED, Part
from benchmarks.points import Point, points
from benchmarks.provenance import ROOT
from benchmarks.shown import COLUMNS, LINES, counted, validate_counters
from benchmarks.table import KEYS, KEYS_OF, geometric_mean, label, ratios, validate
from benchmarks.work import UNITS, rate
from epicute.errors import ArgumentError, require

__all__ = ["BLOCKS", "DEVICE", "Results", "main", "pages", "rendered"]

DEVICE = "h200"
SUMMED = ("gemm", "epilogue")
"""Tables that the summary names whether or not they are measured."""

MODELS = ("attention", "prefill-layer", "packed-prefill", "prefill-model")
"""Tables that the summary has once they are measured."""

COUNTERS = "counters"
"""A table without times, of a schema of its own."""

SAID = tuple(name for name in LINES if name != COUNTERS)
"""Tables that the summary says a line or two of, once they are measured."""

TABLES = (*SUMMED, "calls", "accuracy", *MODELS, "layer-accuracy", *SAID)
REFERENCES = ("perplexity", "outliers")
"""Tables that no GPU computes; they have a folder of their own."""

GPU_TESTS = "gpu-tests"

BLOCK = re.compile(r"(<!-- generated: ([\w-]+) -->\n)(.*?)(<!-- end -->)", re.DOTALL)
OPENING = re.compile(r"<!-- generated:")


# --- what is published ---


@dataclass(frozen=True)
class Results:
    """The JSON files of one device's folder."""

    folder: Path

    @staticmethod
    def of(root: Path = ROOT) -> Results:
        """Those of ``DEVICE`` in a checkout."""
        return Results(root / "benchmarks" / "results" / DEVICE)

    def path(self, name: str) -> Path:
        """Of a file."""
        folder = self.folder.parent / "cpu" if name in REFERENCES else self.folder
        return folder / f"{name}.json"

    def read(self, name: str) -> dict[str, Any] | None:
        """A file's content, None where there is no file.

        ``gpu-tests`` holds device, commit, date and ``files``: test file to passed, failed, skipped.
        """
        path = self.path(name)
        if not path.is_file():
            return None
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        if name == COUNTERS:
            validate_counters(found)
        elif name != GPU_TESTS:
            validate(found)
        return found


WORKS = {
    "CPU": "works on any machine; tested on the CPU",
    "Linux": "works on Linux; tested without a GPU",
    "sm_90a": "compiles for sm_90a and is tested so",
}


def _covered(part: Part, tests: Mapping[str, Any] | None) -> str:
    """What the recorded GPU tests say of a part."""
    if not part.tests:
        return ""
    files = {} if tests is None else tests["files"]
    mine = [count for path, count in files.items() if path.startswith(part.tests)]
    passed, failed = (sum(count[word] for count in mine) for word in ("passed", "failed"))
    if tests is None or not passed:
        return "; no run of its GPU tests recorded yet"
    commits = sorted({count.get("commit", tests["commit"])[:10] for count in mine})
    where = ", ".join([tests["device"], *commits])
    return f"; {passed} GPU tests pass ({where})" + (f", {failed} fail" if failed else "")


def status(results: Results) -> str:
    """The status table."""
    tests = results.read(GPU_TESTS)
    rows = [
        (
            part.says,
            ", ".join(f"`{m}`" for m in part.modules),
            WORKS[part.needs] + _covered(part, tests),
        )
        for part in PARTS
    ]
    return markdown(("part", "module", "state"), rows)


def planned(results: Results) -> str:
    """What does not exist yet."""
    return "\n".join(f"- {what}" for what in PLANNED)


# --- measured tables ---


def absent(name: str) -> str:
    """What stands where a file is missing."""
    folder = "cpu" if name in REFERENCES else DEVICE
    return f"Not measured yet: there is no `benchmarks/results/{folder}/{name}.json`."


def source(table: Mapping[str, Any]) -> str:
    """Where a table's numbers come from, in a line."""
    if table.get("backend") == "reference":
        return (
            f"Computed by the CPU references, no GPU kernel involved: torch {table['torch']}, commit "
            f"{table['commit'][:10]}, {table['date']}."
        )
    commits = sorted({row.get("commit", table["commit"])[:10] for row in table["rows"]})
    return (
        f"{table['device']}, driver {table['driver']}, torch {table['torch']}, CuTe DSL "
        f"{table['dsl']}, commit{'s' if commits[1:] else ''} {', '.join(commits)}, {table['date']}."
    )


def summary(results: Results) -> str:
    """Peer over ours, without single rows."""
    parts = []
    for name in (*SUMMED, *MODELS):
        table = results.read(name)
        if table is not None:
            parts.append(_ratios(table))
        elif name in SUMMED:
            parts.append(absent(name))
    return "\n\n".join([*parts, *_lines(results)])


def _lines(results: Results) -> list[str]:
    """Tables in a line or two, below where their numbers come from."""
    found: dict[str, list[str]] = {}
    for name, lines in LINES.items():
        if (table := results.read(name)) is not None:
            said = "; ".join(lines(table)) or "no case that has both times"
            found.setdefault(source(table), []).append(f"- **{name}**: {said}.{_lost(table)}")
    return [f"{where.removesuffix('.')}:\n\n" + "\n".join(said) for where, said in found.items()]


def _lost(table: Mapping[str, Any]) -> str:
    """How many cases of ours failed, behind what is said of the others."""
    failed = sum("ours" in row.get("failed", {}) for row in table["rows"])
    return f" Cases of ours that failed: {failed}." if failed else ""


def _ratios(table: Mapping[str, Any]) -> str:
    keys = KEYS_OF.get(table["table"], KEYS)
    rows = [
        (*key, *(f"{x:.2f}×" for x in (geometric_mean(r), min(r), max(r))), str(len(r)))
        for key, r in sorted(ratios(table["rows"], keys).items())
    ]
    heads = (*keys, "peer", "peer's time over ours", "least", "most", "cases")
    title = f"**{table['table']}**: {table['paper']}. {source(table)}{_lost(table)}"
    return f"{title}\n\n{markdown(heads, rows)}"


def whole(name: str) -> Callable[[Results], str]:
    """The renderer of every row of a table."""

    def render(results: Results) -> str:
        table = results.read(name)
        if table is None:
            return absent(name)
        rows = table["rows"]
        timed = any(row["ours_us"] or row["peers_us"] for row in rows)
        parts = [source(table)]
        if name in COLUMNS:
            parts.append(markdown(*COLUMNS[name](table)))
        if timed or not any("errors" in row for row in rows):
            parts += _times(name, rows)
        if any("errors" in row for row in rows):
            judged = [row for row in rows if "errors" in row] if timed else rows
            for part in _alike(judged) if name in REFERENCES else [judged]:
                parts += _errors(part)
        for kind, heading in BESIDE.items():
            if any(kind in row for row in rows):
                parts.append(_beside(kind, heading, rows))
        if name == "perplexity" and (said := perplexity.summary(table)):
            parts.append(said.replace("\n", "  \n"))
        parts += [f"Protocol: {table['protocol']}.", f"Floor: {table['floor']}."]
        return "\n\n".join(parts)

    return render


BESIDE = {
    "launches": "launches of a call",
    "peak_bytes": "MB that a call needs beside weights, input and cache",
    "perplexity": "perplexity",
    "rmse": "RMSE of the output of",
    "standard_error": "standard error of the difference of log-losses to that of",
}
"""What a row may have beside times and errors, and how it is headed."""


def _beside(kind: str, heading: str, rows: Sequence[Mapping[str, Any]]) -> str:
    """One table of everybody's numbers of this kind, ours first."""
    found = [row for row in rows if kind in row]
    names = list(dict.fromkeys(name for row in found for name in row[kind]))
    names.sort(key=lambda name: name != "ours")

    def cell(value: float | None) -> str:
        if value is None:
            return "-"
        if kind == "peak_bytes":
            return f"{value / 1e6:.1f}"
        digits = {"perplexity": 3, "standard_error": 4, "rmse": 5}.get(kind)
        return str(value) if digits is None else f"{value:.{digits}f}"

    body = [[label(row["case"]), *(cell(row[kind].get(name)) for name in names)] for row in found]
    return markdown([f"{heading}: case", *names], body)


def _times(name: str, rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """One table for each set of peers, measured or failed, and each accumulation."""
    groups: dict[tuple[str, tuple[str, ...]], list[Mapping[str, Any]]] = {}
    for row in rows:
        if "perplexity" in row and not row["peers_us"] and not row["ours_us"]:
            continue  # a model's quality has no time
        peers = tuple(sorted({*row["peers_us"], *row.get("failed", {})} - {"ours"}))
        groups.setdefault((row["case"].get("accumulate", "-"), peers), []).append(row)
    return [_rows(name, peers, found) for (_, peers), found in groups.items()]


def _alike(rows: Sequence[Mapping[str, Any]]) -> list[list[Mapping[str, Any]]]:
    """Rows with the same peers, in the order of the first of each."""
    groups: dict[tuple[str, ...], list[Mapping[str, Any]]] = {}
    for row in rows:
        groups.setdefault(tuple(row.get("errors", {})), []).append(row)
    return list(groups.values())


def _errors(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """One table of everybody's errors, ours first."""
    peers = list(dict.fromkeys(name for row in rows for name in row.get("errors", {})))

    def cells(row: Mapping[str, Any], name: str) -> list[str]:
        error = row["error"] if name == "ours" else row.get("errors", {}).get(name)
        if error:
            return [f"{error[word]:.1e}" for word in ("norm", "worst_row")]
        return ["failed" if name in row.get("failed", {}) else "-"] * 2

    names = ["ours", *peers]
    heads = ["case", *(head for name in names for head in (f"{name}: norm", "worst row"))]
    body = [
        [label(row["case"]), *(cell for name in names for cell in cells(row, name))] for row in rows
    ]
    return [markdown(heads, body)]


def _rows(name: str, peers: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> str:
    rates = (UNITS[name],) if name in UNITS else ()
    heads = ["case", "ours, µs", *rates, "of the floor"]
    for peer in peers:
        heads += [peer, *rates]
    heads += ["of the padding ratio"] if name == PACKED else []
    return markdown([*heads, "error: norm", "worst row"], [_row(name, peers, row) for row in rows])


PACKED = "packed-prefill"
CHAIN = "chain"
"""Projections one after the other, whose numbers are looked at and not compared: the rows of each have errors."""


def _row(name: str, peers: Sequence[str], row: Mapping[str, Any]) -> tuple[str, ...]:
    ours, floor = row["ours_us"], row["floor_us"]
    error = None if row["case"].get("variant") == CHAIN else row["error"]

    def speed(time: float | None) -> list[str]:
        if name not in UNITS:
            return []
        return [f"{rate(name, row['case'], time):.0f}" if time else "-"]

    def peer(called: str) -> list[str]:
        if called in row.get("failed", {}):
            return ["failed", *speed(None)]
        time = row["peers_us"].get(called)
        if time is None:
            return ["-", *speed(None)]
        return [f"{time:.1f} ({time / ours:.2f}×)" if ours else f"{time:.1f}", *speed(time)]

    cells = [f"{ours:.1f}" if ours else "failed", *speed(ours)]
    cells.append(f"{floor / ours:.0%}" if ours and floor else "-")
    for called in peers:
        cells += peer(called)
    if name == PACKED:
        padded = row["peers_us"].get("ours-padded")
        share = padded / ours / padding(row["case"]["mix"]) if ours and padded else None
        cells.append("-" if share is None else f"{share:.0%}")
    cells += [f"{error[word]:.1e}" if error else "-" for word in ("norm", "worst_row")]
    return (label(row["case"]), *cells)


def power(results: Results) -> str:
    """Clock and power of every measurement of the GEMM, and what the clock allowed."""
    table = results.read("gemm")
    if table is None:
        return absent("gemm")
    found = [point for point in points(table) if point.mhz or point.watts]
    if not found:
        return f"{source(table)} The card's sensors could not be read."
    groups: dict[tuple[str, str], list[Point]] = {}
    for point in found:
        groups.setdefault((point.weights, point.accumulate), []).append(point)
    tables = [_powers(*key, group) for key, group in groups.items()]
    return "\n\n".join([source(table), _ranges(found), *tables])


def _ranges(found: list[Point]) -> str:
    """Least, most and median of both sensors, and what the peaks are."""
    peaks = "; ".join(
        f"{kind.upper()} {FLOP_PER_CLOCK[kind]}, nominal {rate / 1e12:g} TFLOP/s at "
        f"{nominal_mhz(kind):.0f} MHz"
        for kind, rate in PEAK.items()
    )
    said = [f"{len(found)} measurements."]
    sensors = {
        "Clock, MHz": [point.mhz for point in found if point.mhz is not None],
        "Power, W": [point.watts for point in found if point.watts is not None],
    }
    for name, values in sensors.items():
        if values:
            least, most, middle = min(values), max(values), median(values)
            said.append(f"{name}: {least:.0f} to {most:.0f}, median {middle:.0f}.")
    return " ".join([*said, f"Peak, FLOP a clock on each of {SMS} SMs: {peaks}."])


def _powers(weights: str, accumulate: str, found: list[Point]) -> str:
    """One table: a line per product, four columns per candidate."""
    names = sorted({point.candidate for point in found}, key=lambda name: (name != "ours", name))
    at = {(point.product, point.candidate): point for point in found}
    heads = [f"{weights}, accumulate {accumulate}"]
    for name in names:
        heads += [f"{name}: MHz", "W", "TFLOP/s", "of the peak at that clock"]

    def cells(point: Point | None) -> list[str]:
        if point is None:
            return ["-"] * 4
        sensed = ["-" if x is None else f"{x:.0f}" for x in (point.mhz, point.watts)]
        share = "-" if point.share is None else f"{point.share:.0%}"
        return [*sensed, f"{point.rate / 1e12:.0f}", share]

    body = [
        [product, *(cell for name in names for cell in cells(at.get((product, name))))]
        for product in dict.fromkeys(point.product for point in found)
    ]
    return markdown(heads, body)


def counters(results: Results) -> str:
    """What the card counted of each launch."""
    table = results.read(COUNTERS)
    if table is None:
        return absent(COUNTERS)
    return "\n\n".join(
        [source(table), markdown(*counted(table)), f"Protocol: {table['protocol']}."]
    )


def gpu_tests(results: Results) -> str:
    """Passed, failed and skipped per test file."""
    tests = results.read(GPU_TESTS)
    if tests is None:
        return f"Not run yet: there is no `benchmarks/results/{DEVICE}/{GPU_TESTS}.json`."
    words = ("passed", "failed", "skipped")
    rows = [
        (f"`{p}`", *(str(n[w]) for w in words), n.get("commit", tests["commit"])[:10])
        for p, n in sorted(tests["files"].items())
    ]
    head = f"{tests['device']}, {tests['date']}."
    return f"{head}\n\n{markdown(('file', *words, 'commit'), rows)}"


def markdown(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table; a bar in a cell is escaped."""

    def line(cells: Sequence[str]) -> str:
        return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"

    return "\n".join([line(heads), f"|{'---|' * len(heads)}", *map(line, rows)])


BLOCKS: dict[str, Callable[[Results], str]] = {
    "status": status,
    "planned": planned,
    "summary": summary,
    GPU_TESTS: gpu_tests,
    "power": power,
    COUNTERS: counters,
    **{name: whole(name) for name in (*TABLES, *REFERENCES)},
}


# --- pages ---


def pages(root: Path = ROOT) -> list[Path]:
    """README and the pages of the docs."""
    return [root / "README.md", *sorted((root / "docs").rglob("*.md"))]


def rendered(text: str, results: Results, name: str = "text") -> str:
    """``text`` with every block written anew; raises ArgumentError for one that is not known or does not end."""

    def block(found: re.Match[str]) -> str:
        opening, called, _, ending = found.groups()
        require(
            called in BLOCKS,
            name,
            f"a block {called!r}",
            f"one of {', '.join(BLOCKS)}",
            "rename it",
        )
        return f"{opening}\n{BLOCKS[called](results)}\n\n{ending}"

    whole_blocks = len(BLOCK.findall(text))
    if whole_blocks != len(OPENING.findall(text)):
        raise ArgumentError(
            f"{name}: got a block that does not end, expected <!-- end --> after each. Fix: close it"
        )
    return BLOCK.sub(block, text)


def main(arguments: Sequence[str] | None = None) -> int:
    """Rewrite the pages, or name the stale ones."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.readme", description=__doc__)
    parser.add_argument("--check", action="store_true", help="change nothing; fail where stale")
    parser.add_argument("--root", type=Path, default=ROOT, help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    results = Results.of(given.root)
    stale = []
    for page in pages(given.root):
        text = page.read_text(encoding="utf-8")
        new = rendered(text, results, page.name)
        if new != text:
            stale.append(str(page.relative_to(given.root)))
            if not given.check:
                page.write_text(new, encoding="utf-8")
    for path in stale:
        print(f"{path}: {'stale' if given.check else 'rewritten'}")
    return 1 if given.check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
