"""One figure per table, from its JSON alone: ``python -m benchmarks.plots FILE... [--out DIR]``.

Bars show the rate of attention and of layers, and else the share of the floor each candidate reaches
(higher is better), so that shapes of all sizes fit one axis; where a table has no floors, they show
time, and where it is about errors, those by norm. A failed candidate has a cross in place of its bar.
"""

from __future__ import annotations

import argparse
import json
import textwrap
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.table import label, validate
from benchmarks.work import UNITS, rate

__all__ = ["draw", "main", "series"]

BAR = 0.18
"""Height of a bar and of the space between rows, inches."""

LINEAR = ("share of the floor, %", *UNITS.values())
"""What is shown on an axis from 0; the others' are logarithmic."""

LABEL = 48
"""Characters in a line of a row's label."""


def series(table: Mapping[str, Any]) -> tuple[str, dict[str, list[float | None]]]:
    """(what is shown, candidate → one value per row, None where it has none), ours first."""
    rows = [row for row in table["rows"] if not _untimed(row)]
    shown, values = _values(table["table"], rows)
    found = [values(row) | dict.fromkeys(row.get("failed", {})) for row in rows]
    names = list(dict.fromkeys(name for row in found for name in row))
    return shown, {name: [row.get(name) for row in found] for name in names}


def _untimed(row: Mapping[str, Any]) -> bool:
    """Whether a row is of a model's quality, which has no bar."""
    return "perplexity" in row and row["ours_us"] is None and not row["peers_us"]


def _values(
    name: str,
    rows: Sequence[Mapping[str, Any]],
) -> tuple[str, Callable[[Mapping[str, Any]], dict[str, float | None]]]:
    """What these rows show, and a row's values of it by candidate."""
    timed = any(row["ours_us"] or row["peers_us"] for row in rows)
    if any("errors" in row for row in rows) and not timed:
        return "relative error by norm", _errors
    if name in UNITS:
        return UNITS[name], partial(_rates, name)
    if rows and all(row["floor_us"] > 0 for row in rows):
        return "share of the floor, %", _shares
    return "µs", _times


def _times(row: Mapping[str, Any]) -> dict[str, float | None]:
    return {"ours": row["ours_us"], **row["peers_us"]}


def _shares(row: Mapping[str, Any]) -> dict[str, float | None]:
    return {name: time and 100 * row["floor_us"] / time for name, time in _times(row).items()}


def _rates(name: str, row: Mapping[str, Any]) -> dict[str, float | None]:
    return {n: time and rate(name, row["case"], time) for n, time in _times(row).items()}


def _errors(row: Mapping[str, Any]) -> dict[str, float | None]:
    found = {"ours": row["error"], **row.get("errors", {})}
    return {name: error and error["norm"] for name, error in found.items()}


def draw(table: Mapping[str, Any], path: Path) -> None:
    """Write the table's figure to ``path`` (.svg or .png); equal tables give equal SVGs."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    validate(table)
    shown, found = series(table)
    rows = [row for row in table["rows"] if not _untimed(row)]
    bars = max(1, len(found))
    height = 1.5 + BAR * len(rows) * (bars + 1)
    with plt.rc_context({"svg.hashsalt": table["table"], "font.size": 8}):
        figure, axes = plt.subplots(figsize=(10, height), layout="constrained")
        for index, (name, values) in enumerate(found.items()):
            at = [row * (bars + 1) + index for row in range(len(rows))]
            there = [(y, value) for y, value in zip(at, values, strict=True) if value is not None]
            widths = [value for _, value in there]
            drawn = axes.barh([y for y, _ in there], widths, height=0.9, label=name)
            axes.bar_label(drawn, [f"{value:.3g}" for value in widths], padding=2, fontsize=6)
            lost = [y for y, row in zip(at, rows, strict=True) if name in row.get("failed", {})]
            edge = axes.get_yaxis_transform()
            axes.plot([0.01] * len(lost), lost, "x", color="black", transform=edge)
        middle = [row * (bars + 1) + (bars - 1) / 2 for row in range(len(rows))]
        labels = [textwrap.fill(label(row["case"]), LABEL) for row in rows]
        axes.set_yticks(middle, labels, fontsize=6)
        axes.margins(y=0.01)
        axes.invert_yaxis()
        measured = any(value is not None for values in found.values() for value in values)
        if shown not in LINEAR and measured:
            axes.set_xscale("log")
        axes.set_xlabel(shown)
        head = f"{table['table']}, {table['device']}, torch {table['torch']}, dsl {table['dsl']}"
        axes.set_title(f"{head}, {table['commit'][:12]}, {table['date']}")
        if found:
            axes.legend(loc="upper left", bbox_to_anchor=(1, 1))
        metadata = {"Date": None} if path.suffix == ".svg" else None
        figure.savefig(path, metadata=metadata, dpi=150)
        plt.close(figure)


def main(arguments: Sequence[str] | None = None) -> None:
    """Draw every file given, beside it or into ``--out``."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.plots", description=__doc__)
    parser.add_argument("files", nargs="+", type=Path, help="tables, as JSON")
    parser.add_argument("--out", type=Path, help="folder of the figures; by default the table's")
    parser.add_argument("--format", choices=("svg", "png"), default="svg")
    given = parser.parse_args(arguments)
    for file in given.files:
        folder = given.out or file.parent
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{file.stem}.{given.format}"
        draw(json.loads(file.read_text(encoding="utf-8")), path)
        print(path)


if __name__ == "__main__":
    main()
