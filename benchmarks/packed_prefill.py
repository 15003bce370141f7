"""Table ``packed-prefill``: a batch of unequal requests, packed beside padded (FuTransformer 4.10).

Padded requests have their lengths with them, so that attention skips what only pads; both layouts
write a paged cache. The compiled layers of ``prefill-layer`` are padded too. FP8 products are added fast and precisely
by everybody, a row for each.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.blocks import Block, allowed
from benchmarks.check import checker
from benchmarks.footprint import Footprints
from benchmarks.harness import Options, Session, fill
from benchmarks.mixes import LONGEST, MIXES, requests
from benchmarks.our_block import PAGE, OurBlock
from benchmarks.ours import once
from benchmarks.prefill_layer import compiled, footed, said
from benchmarks.provenance import Provenance
from benchmarks.table import Row, Table
from benchmarks.timing import Timer
from benchmarks.torch_block import chosen, compiled_block, fastest
from benchmarks.work import LAYER_FLOOR, layer_floor
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
    torch._dynamo.reset()  # its cache is per function and full after eight shapes
    check = checker({"out": block.exact()}, block.view, lambda _: allowed(WEIGHTS))
    fast, own = fastest(block, session.timer), chosen(block)
    prints = Footprints()
    for accumulate in ACCUMULATE:
        for layout in LAYOUTS:
            mine, name = ours_of(block, layout, accumulate), f"ours-{layout}-{accumulate}"
            held = partial(getattr, mine, "nbytes")
            session.add(name, prints.watched(name, mine.runner, held), check)
        for name, backend in compiled(WEIGHTS, accumulate, fast, own).items():
            build = partial(compiled_block, block, WEIGHTS, backend, accumulate)
            session.add(name, prints.watched(name, build), check)
    session.measure(block.copies, block.least_us)
    variant = f"sdpa {said(fast)}, by default {said(own)}"
    return [row(block, a, fast == own, variant, session, prints) for a in ACCUMULATE]


def row(
    block: Block,
    accumulate: str,
    same: bool,
    variant: str,
    session: Session,
    prints: Footprints,
) -> Row:
    """The mix's row; ``same``: PyTorch's choice is the fastest back-end."""
    peers = {"ours-padded": f"ours-padded-{accumulate}", "compile-fp8": "compile-fp8"}
    if accumulate == "fast":
        peers["compile-fp8-default"] = "compile-fp8" if same else "compile-fp8-default"
    else:
        peers["compile-fp8-precise"] = "compile-fp8-precise"
    case = {**block.case, "weights": WEIGHTS, "accumulate": accumulate, "page": PAGE}
    ours = f"ours-packed-{accumulate}"
    floor = layer_floor(block.shape, block.lengths, WEIGHTS)
    found = session.row({**case, "variant": variant}, ours, peers, floor)
    return footed(found, {"ours": ours, **peers}, session, prints)


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
