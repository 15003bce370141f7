"""The roofline of table ``gemm``, from its JSON alone: ``python -m benchmarks.roofline``.

x is FLOP per byte that must move, y the rate reached. Solid: the bandwidth, and the dense peaks at
nominal boost. Dashed: the same peaks at the median clock at which the candidates ran. It is written
beside the JSON and, the same, among the images of the docs.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.floors import BANDWIDTH, PEAK, nominal_mhz, peak_at
from benchmarks.points import Point, median_mhz, points
from benchmarks.provenance import ROOT
from benchmarks.readme import Results
from benchmarks.table import validate

__all__ = ["Ceiling", "ceilings", "draw", "main", "places", "title"]

COLORS = {("bf16", "fast"): "C0", ("fp8", "fast"): "C1", ("fp8", "precise"): "C2"}
"""By type of the operands and accumulation."""

MARKERS = "osD^vP*X"
"""By candidate of a color, ours first."""


@dataclass(frozen=True)
class Ceiling:
    """A tensor peak at a clock, FLOP/s; ``nominal`` where the clock is the datasheet's."""

    weights: str
    mhz: float
    rate: float
    nominal: bool

    @property
    def ridge(self) -> float:
        """FLOP per byte from which arithmetic, and no longer bandwidth, is the limit."""
        return self.rate / BANDWIDTH

    @property
    def says(self) -> str:
        """Its label."""
        clock = "nominal boost" if self.nominal else "median clock"
        rate = f"{self.rate / 1e12:.4g} TFLOP/s"
        return f"{self.weights.upper()} peak at {clock}, {self.mhz:.0f} MHz: {rate}"


def ceilings(found: list[Point]) -> list[Ceiling]:
    """The peaks of every type: nominal, and at the median clock where clocks were read."""
    peaks = [Ceiling(kind, nominal_mhz(kind), rate, True) for kind, rate in PEAK.items()]
    mhz = median_mhz(found)
    if mhz is None:
        return peaks
    return peaks + [Ceiling(kind, mhz, peak_at(kind, mhz), False) for kind in PEAK]


def title(table: Mapping[str, Any]) -> str:
    """What the figure shows; names the commit and the date of its numbers."""
    head = f"{table['table']}, {table['device']}, torch {table['torch']}, dsl {table['dsl']}"
    return f"{head}, {table['commit'][:12]}, {table['date']}"


def draw(table: Mapping[str, Any], path: Path) -> None:
    """Write the figure to ``path`` (.svg or .png); equal tables give equal SVGs."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    validate(table)
    found = points(table)
    roofs = ceilings(found)
    left = min([roof.ridge for roof in roofs] + [p.intensity for p in found]) / 1.5
    right = max([roof.ridge for roof in roofs] + [p.intensity for p in found]) * 1.5
    low = min([BANDWIDTH * left] + [p.rate for p in found]) / 1e12 / 1.5
    with plt.rc_context({"svg.hashsalt": f"{table['table']}-roofline", "font.size": 8}):
        figure, axes = plt.subplots(figsize=(9, 6.5), layout="constrained")
        axes.set(xscale="log", yscale="log", xlim=(left, right))
        highest = max(roof.rate for roof in roofs)
        axes.set_ylim(low, highest * 1.3 / 1e12)
        edge = highest / BANDWIDTH
        slope = [BANDWIDTH * x / 1e12 for x in (left, edge)]
        axes.plot([left, edge], slope, color="black", label=f"{BANDWIDTH / 1e12:g} TB/s")
        for roof in roofs:
            line = "-" if roof.nominal else "--"
            axes.plot([roof.ridge, right], [roof.rate / 1e12] * 2, line, color="black", lw=1)
            at = (roof.ridge, roof.rate / 1e12)
            axes.annotate(roof.says, at, (6, 3), textcoords="offset points")
        for (weights, accumulate), color in COLORS.items():
            mine = [p for p in found if (p.weights, p.accumulate) == (weights, accumulate)]
            names = sorted({p.candidate for p in mine}, key=lambda name: (name != "ours", name))
            for name, marker in zip(names, MARKERS, strict=False):
                shown = [p for p in mine if p.candidate == name]
                axes.plot(
                    [p.intensity for p in shown],
                    [p.rate / 1e12 for p in shown],
                    marker,
                    color=color,
                    fillstyle="full" if name == "ours" else "none",
                    label=f"{name}: {weights}, accumulate {accumulate}",
                )
        _ticks(axes)
        axes.grid(True, which="both", lw=0.3)
        axes.set_xlabel("FLOP per byte that must move")
        axes.set_ylabel("TFLOP/s")
        axes.set_title(title(table))
        axes.legend(loc="lower right")
        metadata = {"Date": None, "Title": title(table)} if path.suffix == ".svg" else None
        figure.savefig(path, metadata=metadata, dpi=150)
        plt.close(figure)


def _ticks(axes: Any) -> None:
    """Round numbers at 1, 2 and 5 on both axes."""
    from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        axis.set_major_formatter(StrMethodFormatter("{x:g}"))
        axis.set_minor_formatter(NullFormatter())


def places(root: Path = ROOT) -> tuple[Path, Path]:
    """Where a checkout has the figure: beside the JSON, and in the docs."""
    return Results.of(root).folder / "roofline.svg", root / "docs" / "images" / "roofline.svg"


def main(arguments: Sequence[str] | None = None) -> int:
    """Draw it in all its places; 1 where the table is not there."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.roofline", description=__doc__)
    parser.add_argument("--root", type=Path, default=ROOT, help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    results = Results.of(given.root)
    table = results.read("gemm")
    if table is None:
        print(f"there is no {results.folder / 'gemm.json'}")
        return 1
    for path in places(given.root):
        path.parent.mkdir(parents=True, exist_ok=True)
        draw(table, path)
        print(path)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
