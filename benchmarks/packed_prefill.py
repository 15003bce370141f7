"""Table ``packed-prefill``: a batch of unequal requests, packed beside padded (FuTransformer 4.10).

Padded requests have their lengths with them, so that attention skips what only pads; both layouts
write a paged cache. The compiled layers of ``prefill-layer`` are padded too. FP8 products are added fast and precisely
by everybody, a row for each.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.blocks import Block, allowed
from benchmarks.check import checker
from benchmarks.harness import Options, Session, fill
from benchmarks.layer_session import LayerSession, named
from benchmarks.mixes import LONGEST, MIXES, requests
from benchmarks.our_block import PAGE, OurBlock
from benchmarks.ours import once
from benchmarks.provenance import Provenance
from benchmarks.table import Row, Table
from benchmarks.timing import Timer
from benchmarks.work import LAYER_FLOOR
from epicute.models.shapes import SHAPES

__all__ = ["PAPER", "PROTOCOL", "cases", "kernels", "measure", "table"]

PAPER = "FuTransformer (arXiv 2610.23796), sections 3.2.4 and 4.10, table 15: packed prefill"

PROTOCOL = (
    f". A call is the FP8 layer of a model over eight requests of up to {LONGEST} tokens, as in "
    f"prefill-layer, with a cache in pages of {PAGE} tokens in random order; M: tokens of all "
    "requests. ours is packed; ours-padded and the compiled peers run every request at full length, "
    "ours-padded with attention over its tokens alone"
)

WEIGHTS = "fp8"
ACCUMULATE = ("fast", "precise")
LAYOUTS = ("packed", "padded")


def measure(block: Block, session: Session) -> list[Row]:
    """The rows of one mix, one for each way to add FP8 products."""
    layers = LayerSession(block, session)
    check = checker({"out": block.exact()}, block.view, lambda _: allowed(WEIGHTS))
    for accumulate in ACCUMULATE:
        for layout in LAYOUTS:
            mine = ours_of(block, layout, accumulate)
            layers.add_ours(named(f"ours-{layout}", WEIGHTS, accumulate), mine, check)
        layers.add_compiled(WEIGHTS, accumulate, check)
    layers.measure()
    return [row(layers, accumulate) for accumulate in ACCUMULATE]


def row(layers: LayerSession, accumulate: str) -> Row:
    """The mix's row."""
    peers = {"ours-padded": named("ours-padded", WEIGHTS, accumulate), "compile-fp8": "compile-fp8"}
    if accumulate == "fast":
        peers["compile-fp8-default"] = layers.default
    else:
        peers["compile-fp8-precise"] = "compile-fp8-precise"
    fields = {"weights": WEIGHTS, "accumulate": accumulate, "page": PAGE}
    return layers.row(fields, named("ours-packed", WEIGHTS, accumulate), peers)


def ours_of(block: Block, layout: str, accumulate: str) -> OurBlock:
    """Our candidate of a row, of ``LAYOUTS``."""
    packed = layout == "packed"
    return OurBlock(block, WEIGHTS, packed=packed, page=PAGE, accumulate=accumulate)


def cases(options: Options) -> Iterator[Block]:
    """Every mix, in every shape that is named."""
    for shape in options.shapes:
        for mix in MIXES:
            yield Block(SHAPES[shape], requests(mix), options, mix=mix)


def kernels(options: Options) -> Iterator[Any]:
    """Every kernel the table runs, each once."""
    return once(
        kernel
        for block in options.progress.left(cases(options), len(ACCUMULATE))
        for accumulate in ACCUMULATE
        for layout in LAYOUTS
        for kernel in ours_of(block, layout, accumulate).kernels()
    )


def table(options: Options, timer: Timer, source: Provenance, folder: Path) -> Table:
    """Measure every mix and write ``packed-prefill.json`` into ``folder``."""
    path = folder / "packed-prefill.json"
    protocol = options.protocol + PROTOCOL
    found = Table("packed-prefill", PAPER, protocol, LAYER_FLOOR, source, path)
    left = options.progress.left(cases(options), len(ACCUMULATE))
    return fill(found, left, measure, timer, options.rounds, options.progress)
