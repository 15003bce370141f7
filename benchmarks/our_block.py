"""epicute's layer as a candidate: ``PrefillBlock`` on the weights and inputs of a ``Block``.

Its scales are those of a model that has run before: calibrated on the data, and rolled. A layer of a
model leaves the roll to the invocation's one launch for all layers (``roll=False``); with it a call
is an invocation of its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from benchmarks.blocks import Block
from benchmarks.peers import EPS
from benchmarks.timing import Run
from epicute.attention import kernel_for
from epicute.models.block_spec import PROJECTIONS, BlockSpec
from epicute.models.block_state import BlockScales, LayerCache, Stream
from epicute.models.layer_weights import LayerWeights
from epicute.models.prefill import PrefillBlock
from epicute.models.requests import Requests
from epicute.quant import E4M3_MAX, DelayedScale

__all__ = ["PAGE", "OurBlock"]

PAGE = 128
"""Tokens of a page where the cache is paged."""


@dataclass
class Bound:
    """What one copy is run with."""

    block: PrefillBlock
    x: Stream
    out: Stream
    cache: LayerCache
    scales: BlockScales | None

    def run(self, requests: Requests, roll: bool) -> Tensor:
        """One call; (M, hidden)."""
        made = self.block.run(self.x, requests, self.cache, self.out, self.scales, roll=roll)
        return made.values


@dataclass
class OurBlock:
    """The layer planned once, and all its copies.

    Attributes:
        source: weights, inputs, lengths.
        weights: their format, ``fp8`` or ``bf16``.
        packed: rows of all requests one after another; else padded.
        page: tokens of a cache page, in random order; None for a dense cache, of padded requests.
        scaling: of FP8 activations, ``delayed`` or ``row``.
        accumulate: of FP8 products, ``fast`` or ``precise``; None for the library's choice.
    """

    source: Block
    weights: str
    packed: bool = False
    page: int | None = None
    scaling: str = "delayed"
    accumulate: str | None = None

    @property
    def spec(self) -> BlockSpec:
        """What decides the kernels."""
        return BlockSpec(
            self.source.shape,
            format=self.weights,
            scaling=self.scaling,
            eps=EPS,
            accumulate=self.accumulate,
        )

    @property
    def rows(self) -> int:
        """Of a call."""
        source = self.source
        return source.tokens if self.packed else source.batch * source.longest

    @property
    def device(self) -> str:
        """torch's name of it."""
        return self.source.options.device

    def kernels(self) -> Iterator[Any]:
        """The five kernels of a layer."""
        yield from self.spec.kernels(self.rows).values()
        yield kernel_for(self.spec.attention(self.packed, self.page))

    def runner(self, roll: bool = False) -> Run:
        """Launches any copy."""
        bound, requests = self.bound, self.requests

        def run(copy: int) -> dict[str, Tensor]:
            return {"out": bound[copy].run(requests, roll)}

        return run

    @property
    def nbytes(self) -> int:
        """Bytes that a call needs beside weights, input and cache: scratch memory, and its result."""
        first = self.bound[0]
        held = (first.out.values, first.out.sumsq, first.out.codes)
        return first.block.workspace.nbytes + sum(x.nbytes for x in held if x is not None)

    # --- what is planned and allocated ---

    @cached_property
    def bound(self) -> list[Bound]:
        """Every copy, calibrated, its result poisoned."""
        first = LayerWeights.build(
            {f"{name}.weight": x for name, x in self.source.weights.items()}, self.spec
        )
        block = PrefillBlock.plan(
            first,
            self.source.inv_freq,
            max_rows=self.rows,
            packed=self.packed,
            page=self.page,
        )
        inputs = self.source.x if self.packed else self.source.x_padded
        return [
            self._bound(block if copy == 0 else block.with_weights(apart(first)), x)
            for copy, x in enumerate(inputs)
        ]

    def _bound(self, block: PrefillBlock, x: Tensor) -> Bound:
        spec, device = self.spec, self.device
        entry = scales = None
        if spec.delayed:
            entry = DelayedScale.create(device, initial=x.abs().amax().item() / E4M3_MAX)
            scales = BlockScales.create(device)
        stream = Stream.of(spec, x.reshape(self.rows, -1), entry)
        out = Stream.allocate(spec, self.rows, device)
        found = Bound(block, stream, out, self._cache(), scales)
        if scales is not None:
            block.calibrate(stream, self.requests, found.cache, out, scales)
            found.run(self.requests, roll=True)
        out.values.fill_(float("nan"))
        return found

    @property
    def _pages(self) -> int:
        """Pages of a request."""
        assert self.page is not None
        return -(-self.source.longest // self.page)

    def _cache(self) -> LayerCache:
        """Of NaN, dense or paged."""
        source, shape = self.source, self.source.shape
        size = (source.batch, source.longest)
        if self.page is not None:
            size = (source.batch * self._pages, self.page)
        k, v = (
            torch.full(
                (*size, shape.kv_heads, shape.head_dim),
                float("nan"),
                dtype=torch.bfloat16,
                device=self.device,
            )
            for _ in "kv"
        )
        return LayerCache.of(k, v, dense=self.page is None)

    @cached_property
    def requests(self) -> Requests:
        """Whose the rows are; shared by all copies."""
        source, table = self.source, None
        if self.page is not None:
            order = torch.Generator().manual_seed(source.seed)
            table = torch.randperm(source.batch * self._pages, generator=order)
            table = table.view(source.batch, -1)
        page = self.page or source.longest
        if self.packed:
            return Requests.packed(source.lengths, page, table, device=self.device)
        width = source.longest
        return Requests.padded(source.lengths, page, table, width=width, device=self.device)


def apart(weights: LayerWeights) -> LayerWeights:
    """The same weights at other addresses."""
    packed = {name: getattr(weights, name) for name in PROJECTIONS}
    return replace(weights, **{n: replace(p, codes=p.codes.clone()) for n, p in packed.items()})
