"""One figure per table, from its JSON alone: ``python -m benchmarks.plots FILE... [--out DIR]``.

Bars show the share of the floor each candidate reaches (higher is better), so that shapes of all
sizes fit one axis; where a table has no floors, they show time. A failed candidate has a cross in
place of its bar.
"""

from __future__ import annotations

import argparse
import json
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.table import label, validate

__all__ = ["draw", "main", "series"]

BAR = 0.18
"""Height of a bar and of the space between rows, inches."""

LABEL = 48
"""Characters in a line of a row's label."""


def series(table: Mapping[str, Any]) -> tuple[str, dict[str, list[float | None]]]:
    """(what is shown, candidate → one value per row, None where it has none), ours first."""
    rows = table["rows"]
    share = bool(rows) and all(row["floor_us"] > 0 for row in rows)
    names = list(dict.fromkeys(name for row in rows for name in _times(row)))

    def value(row: Mapping[str, Any], name: str) -> float | None:
        time = _times(row).get(name)
        if time is None:
            return None
        return 100 * row["floor_us"] / time if share else time

    shown = "share of the floor, %" if share else "µs"
    return shown, {name: [value(row, name) for row in rows] for name in names}


def _times(row: Mapping[str, Any]) -> dict[str, float | None]:
    failed = {name: None for name in row.get("failed", {}) if name != "ours"}
    return {"ours": row["ours_us"], **row["peers_us"], **failed}


def draw(table: Mapping[str, Any], path: Path) -> None:
    """Write the table's figure to ``path`` (.svg or .png); equal tables give equal SVGs."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    validate(table)
    shown, found = series(table)
    rows, bars = table["rows"], max(1, len(found))
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
        if not shown.endswith("%") and rows:
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
