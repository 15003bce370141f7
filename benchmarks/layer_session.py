"""A session over one layer, as ``prefill-layer`` and ``packed-prefill`` have it: ours beside what PyTorch compiles.

Everybody's footprint is noted on the way, and a row has its peers' errors.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch.nn.attention import SDPBackend

from benchmarks.blocks import Block
from benchmarks.footprint import Footprints
from benchmarks.harness import Session
from benchmarks.our_block import OurBlock
from benchmarks.table import Row
from benchmarks.torch_block import chosen, compiled_block, fastest
from benchmarks.work import layer_floor

__all__ = ["LayerSession", "named"]


def named(who: str, weights: str, accumulate: str) -> str:
    """A candidate's name: ``compile-fp8``, ``ours-fp8-precise``."""
    return f"{who}-{weights}" + "-precise" * (accumulate == "precise")


class LayerSession:
    """Candidates of one block.

    Attributes:
        fast, own: back-end of attention that is fastest for this block, and the one that PyTorch chooses.
    """

    def __init__(self, block: Block, session: Session) -> None:
        torch._dynamo.reset()  # its cache is per function and full after eight shapes
        self.block, self.session = block, session
        self.fast, self.own = fastest(block, session.timer), chosen(block)
        self._prints = Footprints()

    def add_ours(self, name: str, mine: OurBlock, check: Any) -> None:
        """Epicute's layer."""
        held = partial(getattr, mine, "nbytes")
        self.session.add(name, self._prints.watched(name, mine.runner, held), check)

    def add_compiled(self, weights: str, accumulate: str, check: Any) -> None:
        """PyTorch's, with the fastest back-end; of fast FP8 with its own choice too, where that is another."""
        found: dict[str, SDPBackend | None] = {named("compile", weights, accumulate): self.fast}
        if (weights, accumulate) == ("fp8", "fast") and self.own != self.fast:
            found["compile-fp8-default"] = None
        for name, backend in found.items():
            build = partial(compiled_block, self.block, weights, backend, accumulate)
            self.session.add(name, self._prints.watched(name, build), check)

    @property
    def default(self) -> str:
        """The candidate that is PyTorch's own choice."""
        return "compile-fp8" if self.own == self.fast else "compile-fp8-default"

    def measure(self) -> None:
        """Time everybody."""
        self.session.measure(self.block.copies, self.block.least_us)

    def row(self, fields: Mapping[str, Any], ours: str, peers: Mapping[str, str]) -> Row:
        """A row; those that were not timed are left out of errors and footprints.

        Args:
            fields: of the case, beside the block's; ``weights`` among them.
            ours: our candidate. peers: name in the table → candidate.
        """
        block, session, prints = self.block, self.session, self._prints
        variant = f"sdpa {_said(self.fast)}, by default {_said(self.own)}"
        floor = layer_floor(block.shape, block.lengths, fields["weights"])
        found = session.row({**block.case, **fields, "variant": variant}, ours, peers, floor)
        timed = {n: c for n, c in {"ours": ours, **peers}.items() if c in session.times}
        errors = {n: session.errors[c].json() for n, c in timed.items() if n != "ours"}
        counts = {
            kind: {n: noted[c] for n, c in timed.items() if c in noted}
            for kind, noted in (("launches", prints.launches), ("peak_bytes", prints.peak_bytes))
        }
        return replace(found, errors=errors, **counts)


def _said(backend: SDPBackend) -> str:
    """A back-end's name: ``cudnn``, ``flash``."""
    return backend.name.lower().removesuffix("_attention")
