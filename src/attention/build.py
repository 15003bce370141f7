"""An attention kernel as the compiler room sees it: a key, and a way to trace it without tensors."""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any

import torch

from epicute.attention.arguments import ARGUMENTS
from epicute.attention.schedule import AttentionSchedule, choose
from epicute.attention.spec import AttentionSpec, check
from epicute.jit import CompileKey, Target, modules_digest
from epicute.quant.launch import anchor_and_stream

__all__ = ["AttentionKernel", "kernel_for"]

MODULES = ("epicute.attention.sm90.kernel", "epicute.attention.build")
"""Modules whose source, with all they import from this package, makes the machine code."""

SHORT = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float8_e4m3fn: "fp8"}


@dataclass(frozen=True)
class AttentionKernel:
    """A spec with its schedule."""

    spec: AttentionSpec
    schedule: AttentionSchedule
    target: Target

    @property
    def name(self) -> str:
        """What profilers show: ``epicute_attention_bf16_128_128x128_causal``."""
        spec, schedule = self.spec, self.schedule
        tile = f"{schedule.tile_m}x{schedule.tile_n}"
        found = f"epicute_attention_{SHORT[spec.dtype]}_{spec.head_dim}_{tile}"
        return found + ("_causal" if spec.causal else "")

    @cached_property
    def key(self) -> CompileKey:
        """Everything that decides the machine code."""
        given = [(f.name, getattr(self.spec, f.name)) for f in fields(self.spec)]
        cut = [(f.name, getattr(self.schedule, f.name)) for f in fields(self.schedule)]
        return CompileKey(
            kernel="attention.hopper",
            fields=tuple(given + cut),
            sources=(modules_digest(*MODULES),),
            target=self.target,
        )

    @property
    def shared_memory(self) -> int:
        """Bytes of shared memory of a CTA."""
        return self.schedule.shared_memory(self.spec)

    def trace(self) -> tuple[Any, tuple[Any, ...]]:
        """The DSL function and its fake arguments."""
        import cutlass

        from epicute.attention.sm90.kernel import HopperAttention

        anchor, stream = anchor_and_stream()
        arguments = tuple(cutlass.Int64(0) for _ in ARGUMENTS)
        function = HopperAttention(self.spec, self.schedule, self.name)
        return function, (anchor, arguments, stream)


def kernel_for(
    spec: AttentionSpec,
    *,
    target: Target | None = None,
    schedule: AttentionSchedule | None = None,
) -> AttentionKernel:
    """The kernel of ``spec``: by default with ``choose``'s schedule, for the current GPU or sm_90a.

    Raises UnsupportedError for what ``LEGALITY`` refuses, ArgumentError for a schedule that does not fit.
    """
    target = Target.detect() if target is None else target
    check(spec, target)
    schedule = choose(spec) if schedule is None else schedule
    schedule.check(spec)
    return AttentionKernel(spec, schedule, target)
