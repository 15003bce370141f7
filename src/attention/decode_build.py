"""A decode attention kernel as the compiler room sees it: a key, and a way to trace it without tensors."""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any

from epicute.attention.decode_arguments import DECODE_ARGUMENTS
from epicute.attention.decode_schedule import DecodeSchedule, choose_decode
from epicute.attention.decode_spec import DecodeSpec, check_decode
from epicute.jit import CompileKey, Target, modules_digest
from epicute.quant.launch import anchor_and_stream

__all__ = ["DecodeKernel", "decode_kernel_for"]

MODULES = ("epicute.attention.sm90.decode_kernel", "epicute.attention.decode_build")
"""Modules whose source, with all they import from this package, makes the machine code."""


@dataclass(frozen=True)
class DecodeKernel:
    """A spec with its schedule."""

    spec: DecodeSpec
    schedule: DecodeSchedule
    target: Target

    @property
    def name(self) -> str:
        """What profilers show: ``epicute_decode_int4_128_4x1``."""
        spec = self.spec
        return f"epicute_decode_{spec.cache}_{spec.head_dim}_{spec.group}x{spec.rows}"

    @cached_property
    def key(self) -> CompileKey:
        """Everything that decides the machine code."""
        given = [(f.name, getattr(self.spec, f.name)) for f in fields(self.spec)]
        cut = [(f.name, getattr(self.schedule, f.name)) for f in fields(self.schedule)]
        return CompileKey(
            kernel="attention.decode",
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
        from cutlass import Int64

        from epicute.attention.sm90.decode_kernel import HopperDecode

        anchor, stream = anchor_and_stream()
        function = HopperDecode(self.spec, self.schedule, self.name)
        return function, (anchor, tuple(Int64(0) for _ in DECODE_ARGUMENTS), stream)


def decode_kernel_for(
    spec: DecodeSpec,
    *,
    target: Target | None = None,
    schedule: DecodeSchedule | None = None,
) -> DecodeKernel:
    """The kernel of ``spec``: by default with ``choose_decode``'s schedule, for the current GPU or sm_90a.

    Raises UnsupportedError for what ``DECODE_LEGALITY`` refuses, ArgumentError for a schedule that does not fit.
    """
    target = Target.detect() if target is None else target
    check_decode(spec, target)
    schedule = choose_decode(spec) if schedule is None else schedule
    schedule.check(spec)
    return DecodeKernel(spec, schedule, target)
