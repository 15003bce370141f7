"""Table ``layer-accuracy``: what a layer's output is off by, ours and PyTorch's (FuTransformer, table 8).

Nothing is timed. Inputs are normal, or normal with outlier channels; the reference is the layer in
float64 of the same BF16 weights, so that an error has the rounding of weights and of activations in
it. ``rmse`` is the same, absolute, as the paper has it. ``ours-rows`` has one scale per row, as
PyTorch's layer has it, in place of delayed scales.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.blocks import Block, allowed
from benchmarks.check import Error, checker
from benchmarks.harness import Options, Session, fill
from benchmarks.our_block import OurBlock
from benchmarks.ours import once
from benchmarks.prefill_layer import FORMATS
from benchmarks.provenance import Provenance
from benchmarks.table import Row, Table
from benchmarks.timing import Timer
from benchmarks.torch_block import compiled_block
from epicute.models.shapes import SHAPES

__all__ = ["FLOOR", "PAPER", "PROTOCOL", "cases", "kernels", "measure", "table"]

PAPER = "FuTransformer (arXiv 2610.23796), section 4.7, table 8: a layer's output against float64"

PROTOCOL = (
    "one layer over a request of {length} tokens, residual stream N(0, 1), or the same with every "
    "256th channel 16 times as large (outliers), weights N(0, 1/K), gains 1 + 0.1·N(0, 1); error: the "
    "residual stream that leaves, against float64 of the same BF16 weights on {rows} rows; rmse: the "
    "same, absolute; delayed scales are calibrated on the data"
)

FLOOR = "none (0): nothing is timed"

LENGTH = 512
SCALINGS = {"fp8": ("delayed", "row"), "bf16": ("delayed",)}
"""Format of weights to the scales of activations that are tried; BF16 has none."""


def measure(block: Block, session: Session) -> list[Row]:
    """The rows of one shape and kind of input, one per format of weights."""
    torch._dynamo.reset()  # its cache is per function and full after eight shapes
    exact = {"out": block.exact()}
    for weights in FORMATS:
        most = allowed(weights)
        budget = Error(2 * most.norm, 2 * most.worst_row)  # outliers are no fault
        check = checker(exact, block.view, lambda _, budget=budget: budget)
        for scaling in SCALINGS[weights]:
            mine = OurBlock(block, weights, scaling=scaling)
            session.add(f"ours-{weights}-{scaling}", mine.runner, check)
        session.add(f"compile-{weights}", partial(compiled_block, block, weights, None), check)
    size = exact["out"].square().mean().sqrt().item()
    return [row(block, weights, session, size) for weights in FORMATS]


def row(block: Block, weights: str, session: Session, size: float) -> Row:
    """The block's row for one format; ``size``: root mean square of the reference."""
    names = {"ours": f"ours-{weights}-delayed", f"compile-{weights}": f"compile-{weights}"}
    if "row" in SCALINGS[weights]:
        names["ours-rows"] = f"ours-{weights}-row"
    errors = {n: session.errors[c].json() for n, c in names.items() if c in session.errors}
    failed = {n: session.failed[c] for n, c in names.items() if c in session.failed}
    case = {**block.case, "weights": weights, "variant": "outliers" if block.outliers else "normal"}
    rmse = {name: error["norm"] * size for name, error in errors.items()}
    return Row(
        case, None, 0.0, error=errors.pop("ours", None), failed=failed, errors=errors, rmse=rmse
    )


def cases(options: Options) -> Iterator[Block]:
    """Every shape with either kind of input."""
    for shape in options.shapes:
        for outliers in (False, True):
            yield Block(SHAPES[shape], (LENGTH,), options, outliers=outliers, copies=1)


def kernels(options: Options) -> Iterator[Any]:
    """Every kernel the table runs, each once."""
    return once(
        kernel
        for block in cases(options)
        for weights in FORMATS
        for scaling in SCALINGS[weights]
        for kernel in OurBlock(block, weights, scaling=scaling).kernels()
    )


def table(options: Options, timer: Timer, source: Provenance, folder: Path) -> Table:
    """Measure every case and write ``layer-accuracy.json`` into ``folder``."""
    protocol = PROTOCOL.format(length=LENGTH, rows=options.check_rows)
    path = folder / "layer-accuracy.json"
    found = Table("layer-accuracy", PAPER, protocol, FLOOR, source, path)
    return fill(found, cases(options), measure, timer, options.rounds)
