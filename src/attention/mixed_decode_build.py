"""A QK4PV8 decode kernel as the compiler room sees it: a key, and a way to trace it without tensors."""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any

from epicute.attention.mixed_decode_spec import (
    MIXED_DECODE_ARGUMENTS,
    MixedDecodeSchedule,
    MixedDecodeSpec,
    choose_mixed_decode,
)
from epicute.errors import UnsupportedError, require
from epicute.jit import CompileKey, Target, modules_digest

__all__ = ["MixedDecodeKernel", "mixed_decode_kernel_for"]

MODULES = ("epicute.attention.sm90.mixed_decode", "epicute.attention.mixed_decode_build")


@dataclass(frozen=True)
class MixedDecodeKernel:
    """A spec with its schedule."""

    spec: MixedDecodeSpec
    schedule: MixedDecodeSchedule
    target: Target

    @property
    def name(self) -> str:
        """What profilers show: ``epicute_decode_qk4pv8_128_128``."""
        page = self.spec.page
        return f"epicute_decode_qk4pv8_{page.head_dim}_{page.page_size}"

    @cached_property
    def key(self) -> CompileKey:
        """Everything that decides the machine code."""
        cut = tuple((f.name, getattr(self.schedule, f.name)) for f in fields(self.schedule))
        return CompileKey(
            kernel="attention.mixed_decode",
            fields=(*self.spec.fields, *cut),
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

        from epicute.attention.sm90.mixed_decode import HopperMixedDecode
        from epicute.quant.launch import anchor_and_stream

        anchor, stream = anchor_and_stream()
        arguments = tuple(Int64(0) for _ in MIXED_DECODE_ARGUMENTS)
        return HopperMixedDecode(self.spec, self.schedule, self.name), (anchor, arguments, stream)


def mixed_decode_kernel_for(
    spec: MixedDecodeSpec,
    *,
    target: Target | None = None,
    schedule: MixedDecodeSchedule | None = None,
) -> MixedDecodeKernel:
    """The kernel of ``spec``: by default with ``choose_mixed_decode``'s schedule, for the current GPU or sm_90a.

    Raises UnsupportedError for another GPU, or where two tiles do not fit in shared memory.
    """
    target = Target.detect() if target is None else target
    require(
        target.capability == (9, 0),
        "target",
        target.arch,
        "sm_90a: the kernel is built on Hopper's WGMMA",
        "run it on a Hopper GPU",
        UnsupportedError,
    )
    schedule = choose_mixed_decode(spec) if schedule is None else schedule
    return MixedDecodeKernel(spec, schedule, target)
