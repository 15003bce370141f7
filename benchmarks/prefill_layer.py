"""Table ``prefill-layer``: one whole layer at batch one, beside what PyTorch users compile.

FP8 and BF16 candidates share a session. PyTorch's FP8 layer stands twice: with the back-end of
attention that is fastest for this case (``compile-fp8``), and with the one that PyTorch chooses
(``compile-fp8-default``); where that is the same one, it is timed once. FP8 products are added fast and
precisely, in ours and in PyTorch's (``compile-fp8-precise``): a row for each, as neither replaces the other. Keys and
values go to a dense cache. ``ours-rolled`` also rolls its scales, as an invocation of a single layer would.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.blocks import Block, allowed
from benchmarks.check import checker
from benchmarks.harness import Options, Session, fill
from benchmarks.layer_session import LayerSession, named
from benchmarks.our_block import OurBlock
from benchmarks.ours import once
from benchmarks.provenance import Provenance
from benchmarks.table import Row, Table
from benchmarks.timing import Timer
from benchmarks.work import LAYER_FLOOR
from epicute.models.shapes import SHAPES

__all__ = ["PAPER", "PROTOCOL", "cases", "kernels", "measure", "table"]

PAPER = (
    "FuTransformer (arXiv 2610.23796), sections 4.1, 4.2 and 4.7, figure 1 and table 8: one layer at "
    "batch one"
)

PROTOCOL = (
    ". A call is the layer of a model: from the residual stream to the residual stream, which ours "
    "also leaves in FP8 with its sums of squares for the next layer, with keys and values in their "
    "cache; delayed scales are calibrated on the data, and their roll, one launch for all layers of "
    "a model, is in ours-rolled alone. Errors are of the layer's output against float64 of the same "
    "BF16 weights. peak_bytes: the most that a call holds beside weights, input and cache, its "
    "result included"
)

FORMATS = ("fp8", "bf16")

ROWS = (("fp8", "fast"), ("fp8", "precise"), ("bf16", "fast"))
"""Format of weights, and how products are added, of a case's rows."""


def measure(block: Block, session: Session) -> list[Row]:
    """The rows of one shape and length: see ``ROWS``."""
    layers, exact = LayerSession(block, session), {"out": block.exact()}
    for weights, accumulate in ROWS:
        check = checker(exact, block.view, partial(_allowed, weights))
        mine = ours_of(block, weights, accumulate)
        layers.add_ours(named("ours", weights, accumulate), mine, check)
        if mine.spec.delayed and accumulate == "fast":
            session.add("ours-rolled", partial(mine.runner, roll=True), check)
        layers.add_compiled(weights, accumulate, check)
    layers.measure()
    return [row(layers, *which) for which in ROWS]


def ours_of(block: Block, weights: str, accumulate: str) -> OurBlock:
    """Our candidate of a row."""
    return OurBlock(block, weights, accumulate=accumulate if weights == "fp8" else None)


def _allowed(weights: str, output: str) -> Any:
    return allowed(weights)


def row(layers: LayerSession, weights: str, accumulate: str) -> Row:
    """The row of ``ROWS``."""
    peers = {"compile-bf16": "compile-bf16"}
    if weights == "fp8":
        peers = {"compile-fp8": "compile-fp8", "compile-fp8-default": layers.default, **peers}
        peers |= {"ours-rolled": "ours-rolled", "ours-bf16": "ours-bf16"}
    if accumulate == "precise":
        peers = {name: name for name in ("compile-fp8-precise", "compile-fp8", "compile-bf16")}
    fields = {"weights": weights, "accumulate": accumulate}
    return layers.row(fields, named("ours", weights, accumulate), peers)


def cases(options: Options) -> Iterator[Block]:
    """Every shape at every length."""
    for shape in options.shapes:
        for length in options.lengths:
            yield Block(SHAPES[shape], (length,), options)


def kernels(options: Options) -> Iterator[Any]:
    """Every kernel the table runs, each once."""
    return once(
        kernel
        for block in options.progress.left(cases(options), len(ROWS))
        for which in ROWS
        for kernel in ours_of(block, *which).kernels()
    )


def table(options: Options, timer: Timer, source: Provenance, folder: Path) -> Table:
    """Measure every case and write ``prefill-layer.json`` into ``folder``."""
    path = folder / "prefill-layer.json"
    protocol = options.protocol + PROTOCOL
    found = Table("prefill-layer", PAPER, protocol, LAYER_FLOOR, source, path)
    left = options.progress.left(cases(options), len(ROWS))
    return fill(found, left, measure, timer, options.rounds, options.progress)
