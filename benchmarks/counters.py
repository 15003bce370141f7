"""``python -m benchmarks.counters``: what the card's counters say of epilogues, by Nsight Compute's ``ncu``.

Each projection is launched once with its whole epilogue and once with a plain store, behind a launch
that warms up and is not counted. Written to ``counters.json``:

    {table, paper, device, driver, torch, dsl, commit, date, protocol,
     rows: [{case, candidate, kernel, counters: {name: number}}]}

``candidate`` is ``whole`` or ``plain``; ``counters`` are those of ``METRICS`` under the names there.
Times under a profiler are no times: none are written. Needs ``ncu`` (it comes with CUDA) and the
right to read counters; says so and writes nothing where either is missing.

    ncu  ──starts──▶  python -m benchmarks.counters --launch   one process, every kernel in turn
     └─▶ CSV ──parse──▶ rows, in the order of the launches
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks import epilogue
from benchmarks.data import Layer, layers
from benchmarks.harness import LAYERS, Options
from benchmarks.ours import compile_all
from benchmarks.projections import projection
from benchmarks.provenance import ROOT, Provenance, slug
from benchmarks.timing import Run
from epicute.errors import EpicuteError, require
from epicute.models.shapes import SHAPES

__all__ = ["METRICS", "Counted", "command", "launches", "main", "parse", "rows_of"]

PAPER = "FuTransformer (arXiv 2610.23796), section 4.3: what an epilogue costs beside its product"

PROTOCOL = (
    "one launch of each kernel under ncu, clocks not locked, caches flushed before each of its "
    "passes, behind a launch that is not counted; random normal data, M = {rows}"
)

METRICS = {
    "memory_l1_wavefronts_shared": "shared_wavefronts",
    "memory_l1_wavefronts_shared_ideal": "shared_wavefronts_ideal",
    "l1tex__data_bank_conflicts_pipe_lsu_mem_shared_op_ld.sum": "shared_load_conflicts",
    "l1tex__data_bank_conflicts_pipe_lsu_mem_shared_op_st.sum": "shared_store_conflicts",
    "smsp__inst_executed.sum": "instructions",
    "smsp__cycles_active.sum": "active_cycles",
    "dram__bytes_read.sum": "dram_bytes_read",
    "dram__bytes_write.sum": "dram_bytes_written",
    "lts__t_sectors_op_read.sum": "l2_sectors_read",
    "lts__t_sectors_op_write.sum": "l2_sectors_written",
}
"""ncu's name → ours. The first two are sums over instructions; the conflicts also count what waits for
another access in the same clock, TMA's and WGMMA's among them."""

MISSING = re.compile(r"(?:Failed to find metric|metric[s]? not found:?)\s+'?([\w.]+)'?", re.I)
"""How ncu says that a card or a version has no such metric."""


@dataclass(frozen=True)
class Counted:
    """What ncu says of one launch."""

    kernel: str
    counters: Mapping[str, float] = field(default_factory=dict)


# --- in the process that ncu starts ---


def launches(options: Options) -> Iterator[tuple[Layer, str, str, Callable[[], Run]]]:
    """(layer, format, ``whole`` or ``plain``, builder) of everything that is launched, in order."""
    for layer in layers(options):
        found = projection(layer)
        for weights in found.formats:
            yield layer, weights, "whole", partial(epilogue.fused, found, weights)
            yield layer, weights, "plain", partial(epilogue.plain, layer, weights)


def launch(options: Options) -> None:
    """Run every kernel once, between the marks that ncu counts from and to."""
    for _, _, _, build in launches(options):
        run = build()
        run(0)
        torch.cuda.synchronize()
        torch.cuda.cudart().cudaProfilerStart()
        run(1)
        torch.cuda.synchronize()
        torch.cuda.cudart().cudaProfilerStop()


# --- in the process that was asked ---


def command(
    ncu: str, metrics: Iterable[str], log: Path, launcher: Sequence[str], options: Options
) -> list[str]:
    """The command line of ncu."""
    return [
        ncu,
        "--clock-control",
        "none",
        "--cache-control",
        "all",
        "--profile-from-start",
        "off",
        "--kernel-name",
        "regex:epicute_gemm",
        "--metrics",
        ",".join(metrics),
        "--csv",
        "--print-units",
        "base",
        "--log-file",
        str(log),
        *launcher,
        "--launch",
        "--shapes",
        ",".join(options.shapes),
        "--layers",
        ",".join(options.layers),
        "--M",
        ",".join(map(str, options.M)),
    ]


def parse(text: str) -> list[Counted]:
    """The launches of ncu's CSV, in their order.

    ncu prints a line for each launch and metric, behind lines of its own that begin with ``==``. Numbers
    may be grouped by commas; a metric that could not be measured has ``n/a`` or nothing.

    Raises EpicuteError where there is no table, or one without the columns.
    """
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith("==")]
    start = next((i for i, line in enumerate(lines) if line.startswith('"ID"')), None)
    said = " ".join(line for line in text.splitlines() if line.startswith("=="))
    require(
        start is not None,
        "ncu",
        said or "nothing",
        "a CSV table that begins with the column ID",
        "run the command by hand, and see what it says",
        error=EpicuteError,
    )
    reader = csv.DictReader(lines[start:])
    wanted = ("ID", "Kernel Name", "Metric Name", "Metric Value")
    columns = reader.fieldnames or ()
    require(
        all(name in columns for name in wanted),
        "ncu",
        f"the columns {', '.join(columns)}",
        f"{', '.join(wanted)} among them",
        "use a version of ncu that prints them with --csv",
        error=EpicuteError,
    )
    found: dict[str, tuple[str, dict[str, float]]] = {}
    for row in reader:
        _, counters = found.setdefault(row["ID"], (row["Kernel Name"], {}))
        value = _number(row["Metric Value"])
        if value is not None and row["Metric Name"] in METRICS:
            counters[METRICS[row["Metric Name"]]] = value
    return [Counted(*found[number]) for number in sorted(found, key=int)]


def _number(text: str | None) -> float | None:
    try:
        value = float((text or "").replace(",", ""))
    except ValueError:
        return None
    return int(value) if value.is_integer() else value


def rows_of(options: Options, counted: Sequence[Counted]) -> list[dict[str, Any]]:
    """The table's rows: ``counted`` are the launches of ``launches``, in order.

    Raises EpicuteError where their number differs.
    """
    wanted = list(launches(options))
    require(
        len(counted) == len(wanted),
        "ncu",
        f"{len(counted)} launches",
        f"{len(wanted)}, of each kernel one",
        "see what the launching process printed",
        error=EpicuteError,
    )
    rows = []
    for (layer, weights, candidate, _), one in zip(wanted, counted, strict=True):
        case = {**layer.case, "weights": weights, "accumulate": "fast"}
        counters = dict(one.counters)
        if {"shared_wavefronts", "shared_wavefronts_ideal"} <= counters.keys():
            counters["shared_wavefronts_excess"] = (
                counters["shared_wavefronts"] - counters["shared_wavefronts_ideal"]
            )
        rows.append(
            {"case": case, "candidate": candidate, "kernel": one.kernel, "counters": counters}
        )
    return rows


def measured(ncu: str, options: Options) -> list[Counted]:
    """Counters of every launch; metrics that this card or version has not are left out.

    Raises EpicuteError, with what ncu said, where it fails.
    """
    metrics = list(METRICS)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
    while True:
        with tempfile.TemporaryDirectory() as folder:
            log = Path(folder) / "ncu.csv"
            launcher = (sys.executable, "-m", "benchmarks.counters")
            line = command(ncu, metrics, log, launcher, options)
            done = subprocess.run(line, cwd=ROOT, env=environment, capture_output=True, text=True)
            text = log.read_text(encoding="utf-8") if log.exists() else ""
        said = f"{text}\n{done.stdout}\n{done.stderr}"
        unknown = [name for name in MISSING.findall(said) if name in metrics]
        if done.returncode and unknown and len(unknown) < len(metrics):
            print(f"ncu has no {', '.join(unknown)}", flush=True)
            metrics = [name for name in metrics if name not in unknown]
            continue
        require(
            done.returncode == 0,
            "ncu",
            f"exit {done.returncode}: {' '.join(said.split())[-600:]}",
            "counters",
            "allow them to all users (ERR_NVGPUCTRPERM), or run as root",
            error=EpicuteError,
        )
        return parse(text)


def render(rows: Iterable[Mapping[str, Any]]) -> str:
    """A line for each launch."""
    lines = []
    for row in rows:
        case = row["case"]
        who = f"{case.get('shape', '')} {case['layer']} {case['weights']} {row['candidate']}"
        told = ", ".join(f"{name} {value:,}" for name, value in row["counters"].items())
        lines.append(f"{who:<28} {told}")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Count, print and write; 2 where there is no ncu, no card, no commit or no right to count."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.counters", description=__doc__)
    parser.add_argument("--out", type=Path, help="folder of counters.json")
    parser.add_argument("--shapes", default="8B", help=f"of {','.join(SHAPES)}")
    parser.add_argument("--layers", default=",".join(LAYERS))
    parser.add_argument("--M", default="2048")
    parser.add_argument("--allow-dirty", action="store_true", help="count uncommitted changes")
    parser.add_argument("--launch", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    options = Options(
        shapes=tuple(given.shapes.split(",")),
        layers=tuple(given.layers.split(",")),
        M=tuple(int(word) for word in given.M.split(",")),
    )
    if given.launch:
        launch(options)
        return 0
    ncu = shutil.which("ncu")
    if ncu is None:
        print(
            "counters: no ncu on PATH, so nothing is counted. It is Nsight Compute's command line: "
            "install CUDA's package nsight-compute, or add its folder to PATH",
            file=sys.stderr,
        )
        return 2
    try:
        source = Provenance.here(allow_dirty=given.allow_dirty)
        compile_all(epilogue.kernels(options))
        rows = rows_of(options, measured(ncu, options))
    except EpicuteError as error:
        print(error, file=sys.stderr)
        return 2
    print(render(rows), flush=True)
    folder = given.out or Path(
        os.environ.get("OUT", ROOT / "benchmarks" / "results" / slug(source.device))
    )
    protocol = PROTOCOL.format(rows=", ".join(map(str, options.M)))
    head = {"table": "counters", "paper": PAPER, **asdict(source), "protocol": protocol}
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "counters.json"
    path.write_text(json.dumps({**head, "rows": rows}, indent=1, ensure_ascii=False) + "\n")
    print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
