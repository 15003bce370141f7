"""The decode step with one thing of it replaced: a block on other kernels, over the weights and caches of ``ours``.

table              byte codes by a table of 256 entries, keys and values alike
natural-k          keys by the table into a tile in shared memory, and back by ldmatrix
natural-k-nibbles  the same, nibble by nibble without a table, values too
row-kernel         the new row quantised and stored in front of attention
registers          codes made numbers in registers, where ours makes integers of activations
bias-mma           codes with their offset, which a second product for each takes back
fma-attention      attention without tensor cores
no-rotation        cached rows and queries as they are
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from benchmarks.ablations.attention import VARIANTS, SeparateRow, ablated_kernel_for, plan_ablated
from benchmarks.decode_layer_caches import Nibbles, Pages, form_of
from benchmarks.decode_layer_ours import SCALES, OurStep, block_spec
from benchmarks.few_rows import records_of
from epicute.attention.decode_build import decode_kernel_for
from epicute.attention.decode_schedule import DecodeSchedule
from epicute.attention.decode_spec import DecodeSpec
from epicute.decode import FewRowsPlan, kernel_for, plan_few_rows
from epicute.decode.model import choose
from epicute.decode.spec import FewRowKernel, WeightForm, buckets_of
from epicute.epilogues import Composition
from epicute.errors import UnsupportedError, require
from epicute.jit import DEFAULT_TARGET, Target
from epicute.kv.append import AppendKernel, AppendSpec
from epicute.kv.int4 import Int4Cache
from epicute.models.block_spec import PROJECTIONS
from epicute.models.decode_block import DecodeBlock
from epicute.models.decode_block_spec import DecodeBlockSpec, chain_schedule
from epicute.models.kernels import GPU, Kernels
from epicute.models.shapes import LayerShape, projections
from epicute.weights import FragmentPacked

__all__ = [
    "CONVERSIONS",
    "FORMAT",
    "STEPS",
    "AblatedStep",
    "described",
    "kernels_for",
    "kernels_of_variant",
    "spec_of",
    "variants_of",
]

CONVERSIONS = {"registers": "registers", "bias-mma": "bias"}
"""Variant → how weights are converted."""

STEPS = (
    "table",
    "natural-k",
    "natural-k-nibbles",
    "row-kernel",
    "registers",
    "bias-mma",
    "fma-attention",
    "no-rotation",
)
"""Variants of a step with INT4 weights over an INT4 cache, as FuTransformer's table 7 has them."""

FORMAT = "int4"
"""Of weights and cache."""


# --- projections ---


def chosen(
    composition: Composition,
    packed: FragmentPacked | WeightForm,
    batch: int,
    options: dict[str, Any],
    target: Target,
) -> FewRowKernel:
    """The kernel that a plan for ``batch`` requests runs. ``options``: of ``plan_few_rows``."""
    kernels: dict[int, FewRowKernel] = {}
    given = {name: options[name] for name in ("x_dtype", "dtypes") if name in options}
    given["gain"] = options.get("norm_gain", False)
    for rows in buckets_of(FORMAT, batch):
        try:
            kernels[rows] = kernel_for(composition, packed, rows, target=target, **given)
        except UnsupportedError:
            if not kernels:
                raise
    return kernels[FewRowsPlan(kernels).rows_of(batch)]


def converted(kernel: FewRowKernel, conversion: str) -> FewRowKernel:
    """The same with weights converted so, by mma.sync where WGMMA has no such form."""
    schedule = kernel.spec.schedule
    if schedule.mma == "wgmma":
        schedule = choose(kernel.spec.problem, schedule.rows, kernel.target, mma="sync")
    return kernel.scheduled(replace(schedule, conversion=conversion))


def described(shape: LayerShape, batch: int) -> Iterator[FewRowKernel]:
    """What the four projections of a step run, known without its data."""
    spec = spec_of(shape)
    for name in PROJECTIONS:
        composition, (n, k) = spec.compositions[name], projections(shape)[name]
        form = WeightForm(FORMAT, n, k, records_of(composition, FORMAT, n, k), SCALES)
        yield chosen(composition, form, batch, spec.options(name), DEFAULT_TARGET)


def spec_of(shape: LayerShape) -> DecodeBlockSpec:
    """The step."""
    return DecodeBlockSpec.of(block_spec(shape, FORMAT), form_of(shape, FORMAT), FORMAT)


def variants_of(shape: LayerShape, batch: int) -> tuple[str, ...]:
    """Variants that differ from what a step of so many requests runs."""
    same = {kernel.spec.schedule.conversion for kernel in described(shape, batch)}
    return tuple(name for name in STEPS if {CONVERSIONS.get(name)} != same)


# --- attention ---


def kernels_of_variant(shape: LayerShape, batch: int, variant: str) -> Iterator[Any]:
    """What a variant compiles beside the kernels of ``ours``."""
    if variant in CONVERSIONS:
        for kernel in described(shape, batch):
            yield converted(kernel, CONVERSIONS[variant])
        return
    spec = spec_of(shape).attention(prefetch=True)
    schedule = chain_schedule(spec)
    if variant in VARIANTS:
        yield ablated_kernel_for(spec, variant, target=DEFAULT_TARGET, schedule=schedule)
        return
    if variant == "table":
        schedule = replace(schedule, unpack="table")
    if variant == "no-rotation":
        spec = replace(spec, rotation=0)
    if variant == "row-kernel":
        rows = AppendSpec(spec.kv_heads, spec.head_dim, spec.dtype, spec.rotation)
        yield AppendKernel(rows, DEFAULT_TARGET)
        spec = replace(spec, append=False)
    yield decode_kernel_for(spec, target=DEFAULT_TARGET, schedule=schedule)


def kernels_for(variant: str, slots: Tensor) -> Kernels:
    """Where a block of the variant gets its kernels. ``slots``: (batch,) int64 of the new rows."""

    def few_rows(composition: Composition, packed: FragmentPacked, options: dict[str, Any]) -> Any:
        target = Target.detect(packed.device.index)
        kernel = chosen(composition, packed, options["max_rows"], options, target)
        schedule = converted(kernel, CONVERSIONS[variant]).spec.schedule
        return plan_few_rows(composition, packed, **options, schedule=schedule)

    def decode(spec: DecodeSpec, schedule: DecodeSchedule) -> Any:
        if variant == "table":
            return GPU.decode(spec, replace(schedule, unpack="table"))
        if variant == "row-kernel":
            return SeparateRow(spec, schedule, slots)
        if variant in VARIANTS:
            return plan_ablated(spec, variant, schedule)
        return GPU.decode(spec, schedule)

    require(variant in STEPS, "variant", variant, f"one of {STEPS}", "name a variant")
    return replace(
        GPU, **({"few_rows": few_rows} if variant in CONVERSIONS else {"decode": decode})
    )


# --- the step ---


class Unrotated(Nibbles):
    """INT4 records of rows as they are."""

    @cached_property
    def kind(self) -> Int4Cache:
        """Shape, without a rotation."""
        shape = self.step.shape
        return Int4Cache.create(
            self.count, self.page, shape.kv_heads, shape.head_dim, rotated=False
        )

    @cached_property
    def turn(self) -> Tensor:
        """(head_dim, head_dim) float64: the identity."""
        return torch.eye(self.step.shape.head_dim, dtype=torch.float64, device=self.step.device)


@dataclass
class AblatedStep(OurStep):
    """One candidate. ``variant``: of ``STEPS``."""

    variant: str = "table"

    @cached_property
    def pages(self) -> Pages:
        """What is read and extended."""
        if self.variant == "no-rotation":
            return Unrotated(self.step)
        return self.layers.pages(self.cache, self.layout)

    @cached_property
    def blocks(self) -> list[DecodeBlock]:
        """The chain, planned."""
        return DecodeBlock.chain(
            [w.reading(self.pages.caches[0].form) for w in self.layers.weights(self.weights)],
            self.step.block.inv_freq,
            max_batch=self.step.batch,
            max_len=self.step.context,
            prefetch=True,
            kernels=kernels_for(self.variant, self.pages.decode_step.slots),
        )
