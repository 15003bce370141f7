"""Everything that decides a few-row kernel's code, and the kernel as the compiler room sees it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch

from epicute.decode.geometry import RECORD_BYTES, TILES, tile_rows
from epicute.decode.model import choose
from epicute.decode.schedule import (
    BUCKETS,
    FEWEST,
    FewRowProblem,
    FewRowSchedule,
    Shared,
    bucket_of,
)
from epicute.epilogues.composition import Composition, compose
from epicute.epilogues.policy import Policy
from epicute.epilogues.resolve import Resolved, resolve
from epicute.errors import require
from epicute.gemm.arguments import ArgumentLayout
from epicute.gemm.stage_plan import StagePlan
from epicute.jit import CompileKey, Target, modules_digest
from epicute.layouts import Records
from epicute.weights import FragmentPacked, Quantized

__all__ = ["DTYPES", "FewRowKernel", "FewRowSpec", "buckets_of", "kernel_for", "pack_few_rows"]

DTYPES = (torch.bfloat16, torch.float16)
"""Of x."""

EXTRA = ("early", "gain")
"""What every launch passes last: whether weights may be read before the kernel before is done; the gain's address."""

MODULES = ("epicute.decode.sm90.kernel", "epicute.decode.spec")
"""Modules whose source, with all they import from this package, makes the machine code."""


def pack_few_rows(quantized: Quantized, composition: Composition | Policy) -> FragmentPacked:
    """A weight as the few-row kernels stream it, its rows in the order that ``composition`` asks for.

    Looks at the values once, so it waits for the device.

    Args:
        quantized: int4, fp8, bf16 or fp16.
        composition: a complete composition for its N output features.
    """
    order = compose(composition).row_order(int(quantized.codes.shape[0]))
    return FragmentPacked.of(quantized, order, TILES, RECORD_BYTES)


@dataclass(frozen=True)
class FewRowSpec:
    """A composition for N columns, its operands, the problem and the schedule.

    Arguments of a launch: those of ``layout``, then ``EXTRA``.
    """

    resolved: Resolved
    layout: ArgumentLayout
    problem: FewRowProblem
    schedule: FewRowSchedule
    format: str
    scale_dtype: torch.dtype | None = None

    def at(self, name: str) -> int:
        """Index of one of ``EXTRA`` in the arguments."""
        return self.layout.count + EXTRA.index(name)

    @property
    def count(self) -> int:
        """Length of the arguments."""
        return self.layout.count + len(EXTRA)

    @property
    def name(self) -> str:
        """What profilers show: ``epicute_few_int4_bf16_8_Dequantize_Store``."""
        short = {torch.bfloat16: "bf16", torch.float16: "fp16"}[self.problem.dtype]
        title = re.sub(r"\W+", "_", self.resolved.composition.title).strip("_")
        form = {"sync": "", "wgmma": "wgmma_"}[self.schedule.mma]
        return f"epicute_few_{self.format}_{short}_{self.schedule.rows}_{form}{title}"


@dataclass(frozen=True)
class FewRowKernel:
    """A kernel to compile: a key, and a way to trace it without tensors."""

    spec: FewRowSpec
    target: Target

    @cached_property
    def key(self) -> CompileKey:
        """Everything that decides the machine code."""
        spec, problem, schedule = self.spec, self.spec.problem, self.spec.schedule
        record = problem.record
        return CompileKey(
            kernel="decode.hopper",
            fields=(
                ("N", spec.resolved.columns),
                ("K", problem.depth),
                ("format", spec.format),
                ("dtype", problem.dtype),
                ("scale_dtype", spec.scale_dtype),
                ("record", (record.bits, record.depth, record.tiles, record.group, record.zeros)),
                ("records", (problem.records.down, problem.records.along)),
                ("epilogue", spec.resolved.composition.title),
                ("policies", spec.resolved.composition.key()),
                ("operands", spec.layout.key()),
                ("gain", problem.gain),
                ("rows", schedule.rows),
                ("cluster", schedule.cluster),
                ("slots", (schedule.slots, schedule.in_flight)),
                ("chunks", schedule.chunks),
                ("conversion", schedule.conversion),
                ("evict_first", schedule.evict_first),
                ("late", schedule.late),
                ("each_lane", schedule.each_lane),
                ("mma", schedule.mma),
                ("wide", (schedule.wide, schedule.sums)),
            ),
            sources=(modules_digest(*MODULES),),
            target=self.target,
        )

    @property
    def shared_memory(self) -> int:
        """Bytes of shared memory of a CTA."""
        return Shared(self.spec.problem, self.spec.schedule).size

    def scheduled(self, schedule: FewRowSchedule) -> FewRowKernel:
        """The same with another schedule, which is not checked."""
        return replace(self, spec=replace(self.spec, schedule=schedule))

    def trace(self) -> tuple[Any, tuple[Any, ...]]:
        """The DSL function and its fake arguments."""
        import cutlass
        from cutlass.cute.runtime import make_fake_stream, make_fake_tensor

        from epicute.decode.sm90.kernel import FewRowGemm

        records = self.spec.problem.records
        shape = (records.down, records.along, records.record.size)
        steps = (records.along * records.record.size, records.record.size, 1)
        weight = make_fake_tensor(cutlass.Uint8, shape, steps, assumed_align=16)
        arguments = tuple(cutlass.Int64(0) for _ in range(self.spec.count))
        stream = make_fake_stream(use_tvm_ffi_env_stream=True)
        return FewRowGemm(self.spec), (weight, arguments, stream)


def kernel_for(
    composition: Composition | Policy,
    packed: FragmentPacked | WeightForm,
    rows: int,
    *,
    x_dtype: torch.dtype = torch.bfloat16,
    target: Target | None = None,
    schedule: FewRowSchedule | None = None,
    dtypes: Mapping[str, torch.dtype] | None = None,
    alignments: Mapping[str, int] | None = None,
    gain: bool = False,
    batch_invariant: bool = False,
) -> FewRowKernel:
    """Describe the kernel of ``composition`` for ``rows`` (8, 16, 32 or 64) of x at a time, or up to ``FEWEST``.

    Args:
        composition: what to do with the sums.
        packed: the weight, or its form alone.
        rows: see above. x_dtype: bfloat16 or float16; for 16-bit weights theirs.
        target: by default the current GPU's, or sm_90a without one.
        schedule: by default ``choose``'s.
        dtypes, alignments: of operands; see ``ArgumentLayout.of``.
        gain: multiply x by a gain on its way in.
        batch_invariant: order and round sums as for all other ``rows``.

    Raises ArgumentError, CompositionError or UnsupportedError before anything is traced.
    """
    form = packed if isinstance(packed, WeightForm) else WeightForm.of(packed)
    composition = compose(composition)
    known = buckets_of(form.format, BUCKETS[-1], batch_invariant)
    require(rows in known, "rows", rows, f"one of {known}", "round up, see buckets_of")
    require(
        x_dtype in DTYPES and form.format in ("int4", "fp8", SHORT.get(x_dtype)),
        "x_dtype",
        x_dtype,
        "bfloat16 or float16, and the weight's where that has 16 bits",
        "convert x",
    )
    record = form.records.record
    require(
        record.tiles == TILES,
        "packed.records",
        f"{record.tiles} row tiles in a record",
        f"{TILES}",
        "pack with epicute.decode.pack_few_rows",
    )
    target = Target.detect() if target is None else target
    resolved = resolve(composition, form.columns)
    layout = ArgumentLayout.of(resolved, dtypes, alignments)
    plan = StagePlan(resolved)
    problem = FewRowProblem(
        form.records,
        form.depth,
        tile_rows(resolved),
        resolved.order.unit,
        x_dtype,
        (len(plan.rows), len(plan.cells), plan.region),
        _held(resolved),
        gain,
    )
    found = choose(problem, rows, target, batch_invariant) if schedule is None else schedule
    wanted = max(rows, BUCKETS[0])
    require(
        found.rows == wanted,
        "schedule.rows",
        found.rows,
        f"{wanted}, the rows to compile for",
        "write replace(schedule, rows=…)",
    )
    found.check(problem, target)
    return FewRowKernel(
        FewRowSpec(resolved, layout, problem, found, form.format, form.scale_dtype), target
    )


def buckets_of(format: str, most: int, batch_invariant: bool = False) -> tuple[int, ...]:
    """Rows of x that kernels serve at a time in a plan for up to ``most``."""
    found = tuple(b for b in BUCKETS if b <= bucket_of(most))
    if format != "int4" or batch_invariant:
        return found
    return (FEWEST, *found) if most > FEWEST else (FEWEST,)


SHORT = {torch.bfloat16: "bf16", torch.float16: "fp16"}


def _held(resolved: Resolved) -> int:
    """Values of a row that a thread of the epilogue holds at once: a unit's where something reduces, else a block's."""
    whole = [resolved.order.unit // 4 for span in resolved.ranges if span.head]
    return max([*whole, *(len(b.lanes) for span in resolved.ranges for b in span.blocks)])


@dataclass(frozen=True)
class WeightForm:
    """A packed weight as far as a kernel's code depends on it."""

    format: str
    columns: int
    depth: int
    records: Records
    scale_dtype: torch.dtype | None = None

    @staticmethod
    def of(packed: FragmentPacked) -> WeightForm:
        """The form of a weight."""
        columns, depth = packed.shape
        return WeightForm(packed.format, columns, depth, packed.records, packed.scale_dtype)
