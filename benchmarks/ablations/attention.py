"""Ablated decode attention: kernels that differ from the library's in one thing, under its plan and operands."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from epicute.attention.decode import DecodePlan, DecodeWorkspace, plan_decode
from epicute.attention.decode_arguments import DECODE_ARGUMENTS
from epicute.attention.decode_build import MODULES, DecodeKernel
from epicute.attention.decode_schedule import DecodeSchedule, choose_decode
from epicute.attention.decode_spec import DecodeSpec, check_decode
from epicute.errors import UnsupportedError, require
from epicute.jit import CompileKey, Target, modules_digest
from epicute.kv.append import AppendPlan, plan_append
from epicute.kv.int4 import Int4Cache
from epicute.layouts.kv_int4 import Int4Record
from epicute.quant.launch import anchor_and_stream

__all__ = ["VARIANTS", "AblatedKernel", "SeparateRow", "ablated_kernel_for", "plan_ablated"]

VARIANTS = {
    "natural-k": ("staged_kernel", "HopperStaged", "table"),
    "natural-k-nibbles": ("staged_kernel", "HopperStaged", "arithmetic"),
    "fma-attention": ("fma_kernel", "HopperFma", "arithmetic"),
}
"""Variant → module of this package and class that trace it, and how its schedule unpacks nibbles."""

MOST_COLUMNS = 8
"""Query rows over a KV head of which a thread holds all, by FMA."""

FEW_COLUMNS = 4
"""Query rows whose queries and outputs leave registers for eight warps."""

STAGED_ROWS = 16
"""Tokens of a warp's staged tile."""


@dataclass(frozen=True)
class AblatedKernel(DecodeKernel):
    """A spec with its schedule and what is replaced. ``variant``: of ``VARIANTS``."""

    variant: str

    @property
    def name(self) -> str:
        """What profilers show."""
        return f"{super().name}_{self.variant.replace('-', '_')}"

    @cached_property
    def key(self) -> CompileKey:
        """Everything that decides the machine code."""
        parts = (self.spec, self.schedule)
        given = [(f.name, getattr(part, f.name)) for part in parts for f in fields(part)]
        module = f"benchmarks.ablations.{VARIANTS[self.variant][0]}"
        return CompileKey(
            kernel="benchmarks.decode",
            fields=(("variant", self.variant), *given),
            sources=(modules_digest(*MODULES), modules_digest(module)),
            target=self.target,
        )

    @property
    def shared_memory(self) -> int:
        """Bytes of shared memory of a CTA."""
        staged = STAGED_ROWS * 2 * self.spec.head_dim * self.schedule.warps
        return super().shared_memory + staged * self.variant.startswith("natural-k")

    def trace(self) -> tuple[Any, tuple[Any, ...]]:
        """The DSL function and its fake arguments."""
        from importlib import import_module

        from cutlass import Int64

        module, kind, _ = VARIANTS[self.variant]
        made = getattr(import_module(f"benchmarks.ablations.{module}"), kind)
        anchor, stream = anchor_and_stream()
        function = made(self.spec, self.schedule, self.name)
        return function, (anchor, tuple(Int64(0) for _ in DECODE_ARGUMENTS), stream)


def ablated_kernel_for(
    spec: DecodeSpec,
    variant: str,
    *,
    target: Target | None = None,
    schedule: DecodeSchedule | None = None,
) -> AblatedKernel:
    """The kernel of ``spec`` with something replaced; with the library's schedule but for ``unpack``.

    Raises UnsupportedError where the library has no kernel either, for staged keys of other caches than INT4, and for
    more query rows or other caches than the FMA kernel holds.
    """
    target = Target.detect() if target is None else target
    check_decode(spec, target)
    if variant == "fma-attention":
        right = spec.cache in ("int4", "bf16") and spec.head_dim in (64, 128)
        right = right and spec.columns <= MOST_COLUMNS
        expected = f"an INT4 or BF16 cache, heads of 64 or 128, up to {MOST_COLUMNS} query rows"
    else:
        right, expected = spec.packed, "an INT4 cache"
    require(
        right, "spec", str(spec), expected, "ablate a case of FuTransformer 4.6", UnsupportedError
    )
    schedule = choose_decode(spec) if schedule is None else schedule
    schedule = replace(schedule, unpack=VARIANTS[variant][2])
    if variant == "fma-attention" and spec.columns > FEW_COLUMNS:
        schedule = replace(schedule, warps=min(schedule.warps, 4))
    schedule.check(spec)
    found = AblatedKernel(spec, schedule, target, variant)
    limit = target.smem_per_block
    used = found.shared_memory
    require(used <= limit, "schedule", f"{used} B", f"at most {limit} B", "use fewer stages")
    return found


def plan_ablated(
    spec: DecodeSpec, variant: str, schedule: DecodeSchedule | None = None
) -> DecodePlan:
    """Compile (or load) what runs ``spec`` with something replaced, as ``plan_decode`` does."""
    return DecodePlan(ablated_kernel_for(spec, variant, schedule=schedule))


class SeparateRow:
    """Attention over an INT4 cache whose new row a kernel of its own stores first; run as a ``DecodePlan``.

    Attributes:
        spec: with ``append``, whose operands it takes.
        plan: what attends, without.
    """

    def __init__(self, spec: DecodeSpec, schedule: DecodeSchedule | None, slots: Tensor) -> None:
        """``slots``: (B,) int64, of the new rows of every run."""
        require(spec.append, "spec.append", False, "True", "ablate a spec that appends")
        self.spec, self.slots = spec, slots
        self.plan = plan_decode(replace(spec, append=False), schedule=schedule)
        self._writers: dict[Any, AppendPlan] = {}

    def workspace(self, batch: int, device: torch.device | None = None) -> DecodeWorkspace:
        """As ``DecodePlan.workspace``."""
        return self.plan.workspace(batch, device)

    def run(
        self, q: Tensor, cache: Tensor, *, new_k: Tensor, new_v: Tensor, **operands: Any
    ) -> None:
        """As ``DecodePlan.run``."""
        self._writer(cache).run(cache, new_k, new_v, self.slots[: q.shape[0]])
        self.plan.run(q, cache, **operands)

    def _writer(self, memory: Tensor) -> AppendPlan:
        """What stores rows in a cache of these many pages."""
        spec, found = self.spec, (memory.shape[0], memory.device)
        if found not in self._writers:
            assert spec.page is not None
            record = Int4Record(spec.page, spec.head_dim)
            kind = Int4Cache(
                memory.shape[0], spec.kv_heads, record, spec.rotation, spec.values_folded
            )
            self._writers[found] = plan_append(kind, spec.dtype, device=memory.device)
        return self._writers[found]
