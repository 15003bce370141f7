"""``python -m benchmarks [TABLE …] [--shapes 1B,8B] [--M 64,2048] [--lengths 512,2048] [--quick]``.

Writes ``<table>.json`` to ``--out``, else to ``$OUT``, else to ``benchmarks/results/<device>``,
prints every row as it is measured and the whole table last. Exits with 1 where a kernel of epicute
failed or was wrong. ``--budget SECONDS`` ends in time and keeps the rows of runs before (``benchmarks.resume``).
Without names, all tables are measured but ``search``, which is long,
``prefill-model``, which needs ``--checkpoint``, and ``perplexity`` and ``outliers``, which the CPU references
compute, without a GPU: these are measured where they are named.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks import (
    accuracy,
    attention,
    cache_write,
    calls,
    counters,
    decode_ablation,
    decode_attention,
    decode_layer,
    epilogue,
    few_rows,
    gemm,
    layer_accuracy,
    outliers,
    packed_prefill,
    perplexity,
    power,
    prefill_layer,
    prefill_model,
    qk4pv8_decode,
    qk4pv8_prefill,
    search,
)
from benchmarks.harness import LAYERS, Options
from benchmarks.ours import compile_all
from benchmarks.provenance import ROOT, Provenance, slug
from benchmarks.resume import Progress, earlier_rows
from benchmarks.table import Table, render
from benchmarks.timing import CudaTimer
from epicute.errors import EpicuteError
from epicute.models.shapes import SHAPES

STARTED = time.monotonic()

TABLES: dict[str, Any] = {
    "gemm": gemm,
    "epilogue": epilogue,
    "calls": calls,
    "accuracy": accuracy,
    "attention": attention,
    "prefill-layer": prefill_layer,
    "packed-prefill": packed_prefill,
    "layer-accuracy": layer_accuracy,
    "projections": few_rows,
    "decode-attention": decode_attention,
    "decode-layer": decode_layer,
    "decode-ablation": decode_ablation,
    "cache-write": cache_write,
    "qk4pv8-decode": qk4pv8_decode,
    "qk4pv8-prefill": qk4pv8_prefill,
}
"""Measured where none is named."""

REFERENCE: dict[str, Any] = {"perplexity": perplexity, "outliers": outliers}
"""Computed by the CPU references; no GPU is asked for."""

KNOWN = {**TABLES, "search": search, "prefill-model": prefill_model, **REFERENCE}
SHAPES_OF = {
    "gemm": ("1B", "8B", "70B", "405B"),
    "epilogue": ("8B", "1B", "70B", "405B"),
    "search": ("8B", "1B", "70B", "405B"),
    "prefill-layer": ("8B", "405B", "70B", "1B"),
    "packed-prefill": ("8B",),
    "layer-accuracy": ("1B", "8B"),
    "projections": ("8B", "70B", "1B", "SmolLM2"),
    "decode-layer": ("8B", "70B", "1B", "405B"),
    "decode-ablation": ("8B", "70B"),
}
"""Shapes of each table where none are named; the others have sizes of their own."""

M_OF = {
    "search": (64, 256, 1024, 2048, 8192),
    "projections": (1, 2, 4, 8, 16, 32, 64),
}
"""M of each table where none is named; 2048 of the others."""

LENGTHS_OF = {
    "attention": (2048, 4096, 8192, 16384, 32768),
    "prefill-layer": (512, 1024, 2048, 4096, 8192, 16384),
    "prefill-model": (512, 2048, 8192),
    "perplexity": perplexity.LENGTHS,
}
"""Tokens of a request of each table where none are named; the others have lengths of their own."""

RESUMED = (
    *("attention", "prefill-layer", "packed-prefill", "prefill-model", "search"),
    *("projections", "decode-layer", "decode-ablation"),
)
"""Tables that may take several runs; the shapes that matter most come first."""

SHARDED = ("gemm", "search")
READING = ("projections", "decode-attention", "decode-layer", "decode-ablation", "qk4pv8-decode")
BRIEF: dict[str, dict[str, Any]] = {
    "search": {"rounds": 3},
    **{name: {"lead_us": 10000.0, "slice_us": 10000.0} for name in READING},
}
"""Fewer rounds of tables with many candidates, whose slices stay: short ones rank ping-pong too high. Shorter slices
of what reads and hardly multiplies, which does not reach the power limit."""

SUMMARIES = {
    "search": search.summary,
    "decode-layer": decode_layer.summary,
    "decode-ablation": decode_ablation.summary,
    "prefill-model": prefill_model.summary,
    "perplexity": perplexity.summary,
}
"""What is printed behind a table."""


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument(
        "tables", nargs="*", metavar="table", help=f"of {', '.join(KNOWN)}; all but the last four"
    )
    parser.add_argument("--out", type=Path, help="folder of the JSON files")
    parser.add_argument("--quick", action="store_true", help="short slices, three rounds")
    parser.add_argument("--shapes", type=_list, default=(), help="for example 8B,70B")
    parser.add_argument("--layers", type=_list, default=LAYERS, help=f"of {','.join(LAYERS)}")
    parser.add_argument("--M", type=_counts, default=(), help="for example 64,2048")
    parser.add_argument("--lengths", type=_counts, default=(), help="for example 512,2048")
    parser.add_argument(
        "--checkpoint", type=Path, help="prefill-model, perplexity: a model's Hugging Face folder"
    )
    parser.add_argument(
        "--text", type=Path, help="prefill-model, perplexity: a text to measure perplexity on"
    )
    parser.add_argument(
        "--shards", action="store_true", help="gemm, search: tensor-parallel shards too"
    )
    parser.add_argument(
        "--tries", type=_count, default=12, help="search: schedules beside the chosen one"
    )
    parser.add_argument(
        "--accumulate",
        choices=("fast", "precise"),
        default="fast",
        help="search: of FP8; precise leaves BF16 out, which has no other than fast",
    )
    parser.add_argument(
        "--resume", action="store_true", help=f"{', '.join(RESUMED)}: keep rows measured before"
    )
    parser.add_argument(
        "--budget",
        type=_count,
        metavar="SECONDS",
        help="the same tables: begin no case that would end later; implies --resume",
    )
    parser.add_argument("--quack", action="store_true", help="also time quack's GEMM (see peers)")
    parser.add_argument("--allow-dirty", action="store_true", help="measure uncommitted changes")
    given = parser.parse_args(arguments)
    for name, got, known in (
        ("table", given.tables, KNOWN),
        ("--shapes", given.shapes, SHAPES),
        ("--layers", given.layers, LAYERS),
    ):
        unknown = [word for word in got if word not in known]
        if unknown:
            parser.error(f"{name}: unknown {', '.join(unknown)}; known are {', '.join(known)}")
    given.tables = given.tables or list(TABLES)
    if "prefill-model" in given.tables and given.checkpoint is None:
        parser.error("prefill-model: needs --checkpoint FOLDER")
    return given


def _list(text: str) -> tuple[str, ...]:
    return tuple(word for word in text.split(",") if word)


def _counts(text: str) -> tuple[int, ...]:
    words = _list(text)
    if not words or not all(word.isdecimal() and int(word) > 0 for word in words):
        raise argparse.ArgumentTypeError(f"{text!r}: not counts from 1, such as 64,2048")
    return tuple(map(int, words))


def _count(text: str) -> int:
    (found, *more) = _counts(text)
    if more:
        raise argparse.ArgumentTypeError(f"{text!r}: not a count from 1, such as 12")
    return found


def options_of(given: argparse.Namespace, table: str) -> Options:
    """What the command line asks of one table."""
    shapes = given.shapes or SHAPES_OF.get(table, ())
    chosen = Options(
        shapes=shapes,
        layers=given.layers,
        M=given.M or M_OF.get(table, (2048,)),
        shards=given.shards and table in SHARDED,
        lengths=given.lengths or LENGTHS_OF.get(table, ()),
        checkpoint=given.checkpoint,
        text=given.text,
        quack=given.quack,
        tries=given.tries,
        accumulate=given.accumulate,
        **BRIEF.get(table, {}),
    )
    return chosen.shortened() if given.quick else chosen


def folder_of(given: argparse.Namespace, source: Provenance) -> Path:
    """Where the JSON goes."""
    if given.out:
        return Path(given.out)
    out = os.environ.get("OUT")
    return Path(out) if out else ROOT / "benchmarks" / "results" / slug(source.device)


def source_of(given: argparse.Namespace, table: str) -> Provenance:
    """What measures a table: this machine's GPU, or the references."""
    make = Provenance.of_references if table in REFERENCE else Provenance.here
    return make(allow_dirty=given.allow_dirty)


def progress_of(
    given: argparse.Namespace, table: str, folder: Path, options: Options, source: Provenance
) -> Progress:
    """What was measured before, in ``folder`` or else in the checkout, and until when to go on."""
    if table not in RESUMED or not (given.resume or given.budget):
        return Progress()
    results = ROOT / "benchmarks" / "results" / slug(source.device)
    paths = [place / f"{table}.json" for place in (folder, results)]
    rows = earlier_rows(paths, source, options.protocol)
    return Progress(rows, given.budget and STARTED + given.budget)


def finish(table: Table) -> bool:
    """Print the table and draw it; whether every kernel of epicute was measured."""
    print(render(table.content), flush=True)
    if summary := SUMMARIES.get(table.content["table"]):
        print(summary(table.content), flush=True)
    if table.content.get("backend"):
        return complete(table)  # nothing that a figure shows better
    try:
        from benchmarks.plots import draw

        draw(table.content, table.path.with_suffix(".svg"))
    except ImportError as error:
        print(f"no figure: {error}")
    return complete(table)


def complete(table: Table) -> bool:
    """Whether nothing of epicute failed."""
    return not any("ours" in row.get("failed", {}) for row in table.rows)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure the tables named; ``counters`` alone, which has options of its own, by ``benchmarks.counters``."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    if words[:1] == ["counters"]:
        return counters.main(words[1:])
    given = parse(words)
    whole = True
    for name in given.tables:
        start = time.perf_counter()
        options = options_of(given, name)
        try:
            source = source_of(given, name)
        except EpicuteError as error:
            print(error, file=sys.stderr)
            return 2
        folder = folder_of(given, source)
        options = replace(options, progress=progress_of(given, name, folder, options, source))
        timer = None
        if name not in REFERENCE:
            compile_all(KNOWN[name].kernels(options))
            timer = CudaTimer(options.slice_us, options.lead_us, power.reader())
        table = KNOWN[name].table(options, timer, source, folder)
        whole &= finish(table)
        print(f"{name}: {time.perf_counter() - start:.0f} s, {table.path}\n", flush=True)
    return 0 if whole else 1


if __name__ == "__main__":
    sys.exit(main())
