"""epicute's decode step as candidates: ``DecodeBlock`` with any weights over any cache, and other schedules of it.

Copies are the layers of a chain: their kernels and their scratch memory are the same, each has its own weights, cache,
input and result. Candidates that read the same weights, or the same cache, share them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch

from benchmarks.check import Error
from benchmarks.data import clones
from benchmarks.decode_layer_caches import Pages, form_of, pages_of
from benchmarks.decode_layer_step import ATTENDED, NEWEST, RESULT, Step, expect, products
from benchmarks.few_rows import records_of
from benchmarks.peers import EPS
from benchmarks.timing import Run
from epicute.attention.decode_build import decode_kernel_for
from epicute.attention.decode_schedule import DecodeSchedule
from epicute.attention.mixed_decode_build import mixed_decode_kernel_for
from epicute.attention.mixed_decode_spec import MixedDecodeSpec
from epicute.decode import kernel_for
from epicute.decode.spec import WeightForm, buckets_of
from epicute.errors import EpicuteError, UnsupportedError
from epicute.jit import DEFAULT_TARGET
from epicute.models.block_spec import PROJECTIONS, BlockSpec
from epicute.models.block_state import Stream
from epicute.models.decode_block import DecodeBlock
from epicute.models.decode_block_spec import DecodeBlockSpec, chain_schedule
from epicute.models.decode_weights import DecodeWeights
from epicute.models.layer_weights import LayerWeights
from epicute.models.shapes import LayerShape, projections

__all__ = ["Layers", "OurStep", "block_spec", "kernels_of", "narrow_schedule"]

SCALES = torch.float16
"""Of INT4 weights that are rounded to nearest."""


def block_spec(shape: LayerShape, weights: str) -> BlockSpec:
    """The layer as its weights are made; of INT4 ones the dtype of activations counts."""
    format = "bf16" if weights == "int4" else weights
    return BlockSpec(shape, format=format, scaling="row", eps=EPS)


def narrow_schedule(spec: DecodeBlockSpec) -> DecodeSchedule | None:
    """Attention with four warps, two CTAs an SM, where that is not the chosen schedule and fits."""
    if spec.cache.records is not None:
        return None
    attention = spec.attention(prefetch=True)
    chosen = chain_schedule(attention)
    found = replace(chosen, warps=4, resident=2)
    try:
        found.check(attention)
    except EpicuteError:
        return None
    return None if found == chosen else found


# --- what is compiled ---


def kernels_of(
    shape: LayerShape, batch: int, weights: str, cache: str, narrow: bool = False
) -> Iterator[Any]:
    """The kernels that a step of so many requests is planned with, known without its data.

    ``narrow``: attention by ``narrow_schedule`` too, where there is one.
    """
    spec = DecodeBlockSpec.of(block_spec(shape, weights), form_of(shape, cache), weights)
    for name in PROJECTIONS:
        yield from _projection(spec, name, batch)
    kind = spec.cache.records
    if kind is not None:
        mixed = MixedDecodeSpec(shape.heads, shape.kv_heads, kind.page, kind.terms, prefetch=True)
        yield mixed_decode_kernel_for(mixed, target=DEFAULT_TARGET)
        return
    attention = spec.attention(prefetch=True)
    schedules = [chain_schedule(attention), narrow_schedule(spec) if narrow else None]
    for schedule in filter(None, schedules):
        yield decode_kernel_for(attention, target=DEFAULT_TARGET, schedule=schedule)


def _projection(spec: DecodeBlockSpec, name: str, batch: int) -> Iterator[Any]:
    """Of all numbers of rows up to the batch that there are kernels for."""
    composition, (n, k) = spec.compositions[name], projections(spec.block.shape)[name]
    records = records_of(composition, spec.weights, n, k)
    form = WeightForm(spec.weights, n, k, records, SCALES if spec.weights == "int4" else None)
    options = spec.options(name)
    gain = options.pop("norm_gain", False)
    for rows in buckets_of(spec.weights, batch):
        try:
            yield kernel_for(composition, form, rows, target=DEFAULT_TARGET, gain=gain, **options)
        except UnsupportedError:
            continue


# --- what is run ---


@dataclass
class Layers:
    """A step's weights and caches in every format, made when they are first asked for, and shared."""

    step: Step

    def __post_init__(self) -> None:
        self._weights: dict[str, list[DecodeWeights]] = {}
        self._pages: dict[tuple[str, str], Pages] = {}

    def weights(self, format: str) -> list[DecodeWeights]:
        """One per copy."""
        if format not in self._weights:
            first = self._packed(format)
            rest = [apart(first) for _ in range(self.step.copies - 1)]
            self._weights[format] = [first, *rest]
        return self._weights[format]

    def _packed(self, format: str) -> DecodeWeights:
        state, spec = self.step.state(), block_spec(self.step.shape, format)
        if format == "int4":
            return DecodeWeights.int4(state, spec)
        return DecodeWeights.of(LayerWeights.build(state, spec))

    def pages(self, cache: str, layout: str = "HND") -> Pages:
        """The cache in that format."""
        key = (cache, layout)
        if key not in self._pages:
            self._pages[key] = pages_of(self.step, *key)
        return self._pages[key]

    @cached_property
    def streams(self) -> list[Stream]:
        """The entering stream, one per copy."""
        spec = block_spec(self.step.shape, "bf16")
        return [Stream.of(spec, x) for x in self.step.x]


def apart(weights: DecodeWeights) -> DecodeWeights:
    """The same weights at other addresses."""
    found: Mapping[str, Any] = {name: getattr(weights, name) for name in PROJECTIONS}
    return replace(weights, **{n: replace(p, data=p.data.clone()) for n, p in found.items()})


@dataclass
class OurStep:
    """One candidate.

    Attributes:
        layers: weights and caches.
        weights, cache: their formats.
        layout: of a page of 16- or 8-bit rows. narrow: attention by ``narrow_schedule``.
    """

    layers: Layers
    weights: str
    cache: str
    layout: str = "HND"
    narrow: bool = False

    @property
    def step(self) -> Step:
        """What is computed."""
        return self.layers.step

    @property
    def narrowed(self) -> bool:
        """Whether there is a narrow schedule for it."""
        spec = block_spec(self.step.shape, self.weights)
        form = form_of(self.step.shape, self.cache)
        return narrow_schedule(DecodeBlockSpec.of(spec, form, self.weights)) is not None

    @cached_property
    def pages(self) -> Pages:
        """What is read and extended."""
        return self.layers.pages(self.cache, self.layout)

    @cached_property
    def blocks(self) -> list[DecodeBlock]:
        """The chain, planned. Keys may be read early: what a copy stores it has stored, alike, passes before."""
        layers = [w.reading(self.pages.caches[0].form) for w in self.layers.weights(self.weights)]
        schedule = narrow_schedule(layers[0].spec) if self.narrow else None
        return DecodeBlock.chain(
            layers,
            self.step.block.inv_freq,
            max_batch=self.step.batch,
            max_len=self.step.context,
            prefetch=True,
            schedule=schedule,
        )

    def runner(self) -> Run:
        """Launches any copy."""
        step, where = self.step, self.pages.decode_step
        blocks, caches, streams = self.blocks, self.pages.caches, self.layers.streams
        first = Stream.allocate(blocks[0].spec.block, step.batch, step.device)
        for x in (first.values, first.sumsq):
            x.fill_(float("nan"))
        sides = zip(
            clones(first.values, step.copies), clones(first.sumsq, step.copies), strict=True
        )
        out = [Stream(*pair) for pair in sides]

        def run(copy: int) -> dict[str, torch.Tensor]:
            made = blocks[copy].run(streams[copy], where, caches[copy], out[copy])
            return {"out": made.values}

        return run

    def check(self, run: Run) -> Error:
        """The largest error of all copies' results against float64 on the candidate's own codes.

        Raises WrongResult where one is beyond the budget, or attention's output or the stored row of copy 0 is.
        """
        step = self.step
        weights, memory = self.blocks[0].weights, self.blocks[0].memory
        product = products(lambda name: getattr(weights, name).unpack())
        gained = weights.spec.norm_gain
        self.pages.forget()  # candidates share it
        found = [run(0)["out"].clone()]
        q, k, v = step.heads(product, gained)
        for name, row, wanted in zip("kv", self.pages.newest(), (k, v), strict=True):
            expect(f"the new row of {name}", row, wanted, NEWEST[self.cache])
        attended = self.pages.attended(q)
        expect("attention", memory.attended[: step.batch], attended, ATTENDED[self.cache])
        exact = step.result(product, gained, attended)
        found += [run(copy)["out"].clone() for copy in range(1, step.copies)]
        errors = [expect("out", out, exact, RESULT[self.cache]) for out in found]
        return Error(max(e.norm for e in errors), max(e.worst_row for e in errors))
