"""Attention in mixed precision: what a kernel is compiled for, which combinations there are, and how it is cut.

    bf16/bf16   the kernel of ``AttentionSpec``
    fp8/fp8     queries and keys multiplied as E4M3, probabilities and values as E4M3; an FP8 cache as it is
    nvfp4/fp8   keys NVFP4, values E4M3 in QK4PV8 records (``kv.qk4pv8``); qk="exact16" multiplies FP16, to which the
                codes convert exactly, qk="fast8" E4M3, to which they are rounded once

Rules of the numbers (MpFA 4, 5; ``docs/attention.md``): probabilities are 2^x with x = fma(S, λ, log2 P - m·λ), rounded
to E4M3 and saturated at 448, P = 448 or 256; a row's sum is of those before rounding; keys are walked from the last
tile back; the product with values is promoted to FP32 every 128 tokens (``two_level``), as FP8 accumulators keep 13
fraction bits, or left in the accumulator (``direct``), which costs 0.5 % at 1 K tokens and 37 % at 128 K where values
have a mean of half their spread. Queries arrive in 16 bits: as E4M3 each row has a power of two of its own as scale.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any

import torch

from epicute.attention.arguments import ARGUMENTS
from epicute.attention.build import SHORT, AttentionKernel
from epicute.attention.build import kernel_for as plain_kernel_for
from epicute.attention.mixed_places import delta_bytes
from epicute.attention.schedule import SMEM
from epicute.attention.spec import FP8, HALVES, PAGES, AttentionSpec, Rule, refusal
from epicute.errors import UnsupportedError, require
from epicute.jit import CompileKey, Target, modules_digest
from epicute.layouts.qk4pv8 import HEAD_DIMS, PAGE_SIZES, QK4PV8Page
from epicute.quant.launch import anchor_and_stream

__all__ = [
    "MIXED_ARGUMENTS",
    "MIXED_LEGALITY",
    "PRECISIONS",
    "MixedKernel",
    "MixedSchedule",
    "MixedSpec",
    "choose_mixed",
    "mixed_at",
    "mixed_kernel_for",
    "mixed_unsupported",
]

PRECISIONS = ("bf16/bf16", "fp8/fp8", "nvfp4/fp8")
"""Keys / probabilities and values."""

QKS = ("exact16", "fast8")
PVS = ("two_level", "direct")
P_SCALES = (448, 256)
PLACEMENTS = ("acc_init", "mma", "elementwise")

MIXED_ARGUMENTS = (
    *ARGUMENTS,
    *("records", "record_page", "record_head", "record_pages"),
    *("delta", "delta_page", "delta_head", "delta_term"),
    *("q_mean", "mean_groups", "shift"),
)
"""Beside those of every attention kernel: steps of records in bytes, of ΔS in elements; ``mean_groups`` of the queries'
means; ``shift``: the power of two that ``fast8`` takes out of keys."""

MIXED_PLACES = {name: i for i, name in enumerate(MIXED_ARGUMENTS)}


def mixed_at(name: str) -> int:
    """Index of an argument in the tuple."""
    return MIXED_PLACES[name]


@dataclass(frozen=True)
class MixedSpec:
    """Prefill attention of one layer in a given precision; every field is part of the compile key.

    Attributes:
        heads, kv_heads, head_dim, dtype, out_dtype, causal, window, softcap, sinks, lse, page, packed, scale: as of
            ``AttentionSpec``; ``dtype`` is that of q as it arrives.
        precision: one of ``PRECISIONS``.
        qk: what keys of NVFP4 become: ``exact16``, bit for bit, or ``fast8``.
        pv: ``two_level`` promotes the sums of 128 tokens to FP32, ``direct`` does not.
        p_scale: 448, or 256, of the probabilities.
        terms: BF16 terms of ΔS beside the records (1 to 3); 0 where keys are not smoothed.
        placement: where ΔS is added. ``acc_init``: accumulators begin with it. ``mma``: a product of depth 16 with its
            terms begins them. Both are exact in exact16; in fast8 they keep ΔS at 13 fraction bits, as FP8 accumulators
            cut all they add, and themselves, at 2^-13 of the largest term: on a loud channel that is ΔS, and with it
            every product loses up to 2^-13 |ΔS|, a logit some 2^-13 |ΔS| (1/√3 + 2/√head_dim) at the default scale
            (``docs/attention.md``). ``elementwise``: to the finished logits, in float32; the registers that takes leave
            no room for overlapped products of 128 channels.
    """

    heads: int
    kv_heads: int
    head_dim: int
    precision: str = "nvfp4/fp8"
    qk: str = "exact16"
    pv: str = "two_level"
    p_scale: int = 448
    terms: int = 0
    placement: str = "acc_init"
    dtype: torch.dtype = torch.bfloat16
    out_dtype: torch.dtype = None  # type: ignore[assignment]  # becomes dtype
    causal: bool = True
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False
    lse: bool = False
    page: int | None = None
    packed: bool = True
    scale: float = None  # type: ignore[assignment]  # becomes head_dim ** -0.5

    def __post_init__(self) -> None:
        plain = self.plain()
        object.__setattr__(self, "out_dtype", plain.out_dtype)
        object.__setattr__(self, "scale", plain.scale)
        if self.precision == "fp8/fp8":
            object.__setattr__(self, "qk", "fast8")
        for name, allowed in (
            ("precision", PRECISIONS),
            ("qk", QKS),
            ("pv", PVS),
            ("p_scale", P_SCALES),
            ("terms", (0, 1, 2, 3)),
            ("placement", PLACEMENTS),
        ):
            value = getattr(self, name)
            require(value in allowed, name, value, f"one of {allowed}", "choose another")

    def plain(self) -> AttentionSpec:
        """The same attention of unquantised keys and values."""
        shared = {
            f.name: getattr(self, f.name) for f in fields(AttentionSpec) if f.name != "kv_dtype"
        }
        return AttentionSpec(**shared)

    @property
    def group(self) -> int:
        """Query heads per KV head."""
        return self.heads // self.kv_heads

    @property
    def out_is_fp8(self) -> bool:
        """Whether the output is quantised."""
        return self.out_dtype == FP8

    @property
    def kv_dtype(self) -> torch.dtype:
        """Of values: what the rooms of the plain kernel that are shared ask for."""
        return FP8

    @property
    def recorded(self) -> bool:
        """Whether keys and values lie in QK4PV8 records."""
        return self.precision == "nvfp4/fp8"

    @property
    def wide(self) -> bool:
        """Whether queries and keys are multiplied in 16 bits."""
        return self.recorded and self.qk == "exact16"

    @property
    def record(self) -> QK4PV8Page:
        """Layout of a record."""
        require(
            self.recorded and self.page is not None, "precision", self.precision, "nvfp4/fp8", ""
        )
        return QK4PV8Page(self.page or 0, self.head_dim, self.qk)

    def __str__(self) -> str:
        shown = [self.precision]
        if self.recorded:
            shown.append(self.qk)
        shown += [self.pv, f"P {self.p_scale}"]
        if self.terms:
            shown.append(f"{self.terms} terms of ΔS, {self.placement}")
        return f"{self.plain()}, {', '.join(shown)}"


MIXED_LEGALITY = (
    Rule(
        "precision",
        "fp8/fp8 or nvfp4/fp8",
        lambda s: s.precision != "bf16/bf16",
        "that is the kernel of AttentionSpec; plan_attention(spec.plain())",
    ),
    Rule(
        "head_dim",
        f"one of {HEAD_DIMS}",
        lambda s: s.head_dim in HEAD_DIMS,
        "records and tiles are laid out for these; keep other heads in a BF16 or FP8 cache",
    ),
    Rule(
        "dtype",
        "bfloat16 or float16",
        lambda s: s.dtype in HALVES,
        "the kernel quantises queries itself, each row with a scale of its own",
    ),
    Rule(
        "out_dtype",
        "the dtype of q, or float8_e4m3fn",
        lambda s: s.out_dtype in (s.dtype, FP8),
        "convert the output",
    ),
    Rule(
        "page",
        f"one of {PAGE_SIZES} where keys are NVFP4",
        lambda s: not s.recorded or s.page in PAGE_SIZES,
        "records exist in pages alone, and transposed values of fewer than 32 tokens waste the memory they move",
    ),
    Rule(
        "page",
        f"one of {PAGES}, or None",
        lambda s: s.recorded or s.page is None or s.page in PAGES,
        "a bulk copy of fewer than 16 rows wastes the memory it moves; allocate larger pages",
    ),
    Rule(
        "terms",
        "0 where keys are FP8",
        lambda s: s.recorded or s.terms == 0,
        "rows of an FP8 cache have no ΔS beside them, and keys of 8 bits hardly need it",
    ),
    Rule(
        "window",
        "None where causal is False",
        lambda s: s.window is None or s.causal,
        "a window looks back from the query; without a causal mask it has no other end",
    ),
)
"""All that is asked of a mixed spec for sm_90a, beside what makes no sense anywhere."""


def mixed_unsupported(spec: MixedSpec, target: Target | None = None) -> str | None:
    """Why there is no kernel for ``spec``, or None where there is one."""
    return refusal(MIXED_LEGALITY, spec, target)


@dataclass(frozen=True)
class MixedSchedule:
    """How the kernel is cut: tiles of 128 query rows, 64 for each of two consumer warpgroups, and 128 keys.

    Attributes:
        stages: buffers of keys as they are multiplied.
        v_stages: of values as they are multiplied.
        raw_stages: of what arrives to be converted: keys, scales and ΔS, or values to be transposed.
        cluster: 1, or 2 CTAs with heads of one KV head, which load each half of keys and values for both.
        turns: the consumer warpgroups issue their matrix products in turn.
        overlap: two-level products run beside the softmax: all of one of 64 channels, the second half of one of 128.
        registers: per thread, of the loading, the converting and the two consuming warpgroups.
    """

    stages: int = 2
    v_stages: int = 2
    raw_stages: int = 2
    cluster: int = 1
    turns: bool = True
    overlap: bool = True
    registers: tuple[int, int, int] = (32, 48, 216)

    tile_m = 128
    tile_n = 128
    q_stages = 2
    groups = 2
    threads = 512

    def __post_init__(self) -> None:
        for name, allowed in (
            ("stages", (2, 3, 4)),
            ("v_stages", (2, 3, 4)),
            ("raw_stages", (2, 3, 4)),
            ("cluster", (1, 2)),
        ):
            value = getattr(self, name)
            require(value in allowed, name, value, f"one of {allowed}", "choose another")
        few, some, many = self.registers
        require(
            few + some + 2 * many <= 512 and all(n % 8 == 0 and n >= 24 for n in self.registers),
            "registers",
            self.registers,
            "multiples of 8 from 24, the last one counted twice, at most 512 together",
            "take from one what another needs",
        )

    def halves(self, spec: MixedSpec) -> int:
        """Parts of the channels in which the product with values is issued."""
        return 2 if spec.pv == "two_level" and self.overlap and spec.head_dim == 128 else 1

    def shared_memory(self, spec: MixedSpec) -> int:
        """Bytes of shared memory of a CTA, the allocator's alignment included."""
        n, d = self.tile_n, spec.head_dim
        queries = self.q_stages * self.tile_m * (2 * d + 4) + self.q_stages * 4 * d
        keys = self.stages * n * d * (2 if spec.wide else 1)
        values = self.v_stages * n * d
        raw = self.raw_stages * n * d
        if spec.recorded:
            assert spec.page is not None
            raw = self.raw_stages * n * (d // 2 + d // 16)
            raw += self.raw_stages * n // spec.page * delta_bytes(spec.page, spec.terms)
        side = self.stages * 4 * n
        if spec.terms and spec.placement == "mma":
            side = self.stages * 32 * n + self.q_stages * 32 * self.tile_m
        return queries + keys + values + raw + side + (1024 if spec.qk == "fast8" else 0) + 4096

    def check(self, spec: MixedSpec) -> None:
        """Refuse what does not fit."""
        used = self.shared_memory(spec)
        require(
            used <= SMEM,
            "schedule",
            f"{self}, {used} bytes of shared memory",
            f"at most {SMEM}",
            "use fewer stages",
        )
        require(
            self.cluster == 1 or spec.group % 2 == 0,
            "cluster",
            self.cluster,
            f"1, as {spec.group} query heads share a KV head",
            "pair CTAs only where the group is even",
        )

    def __str__(self) -> str:
        shown = f"{self.tile_m}x{self.tile_n}, {self.stages} stages of K, {self.v_stages} of V"
        return shown + f", {self.raw_stages} raw" + (", pairs of CTAs" if self.cluster == 2 else "")


def choose_mixed(spec: MixedSpec) -> MixedSchedule:
    """The schedule for ``spec`` on Hopper."""
    cluster = 2 if spec.group % 2 == 0 else 1
    # What these keep in registers leaves none for the overlapped halves of a product.
    added = spec.terms > 0 and spec.placement == "elementwise"
    counted = spec.out_is_fp8 and (spec.terms > 0 or spec.softcap is not None)
    crowded = spec.head_dim == 128 and (added or counted)
    if not spec.recorded:
        return MixedSchedule(stages=3, cluster=cluster, overlap=not crowded)
    factors = spec.terms > 0 and spec.placement == "mma"
    return MixedSchedule(
        v_stages=3 if spec.wide else 4,
        raw_stages=2 if spec.wide and factors else 3,
        cluster=cluster,
        overlap=not crowded,
    )


MODULES = ("epicute.attention.sm90.mixed", "epicute.attention.mixed")
"""Modules whose source, with all they import from this package, makes the machine code."""


@dataclass(frozen=True)
class MixedKernel:
    """A spec with its schedule, as the compiler room sees it."""

    spec: MixedSpec
    schedule: MixedSchedule
    target: Target

    @property
    def name(self) -> str:
        """What profilers show: ``epicute_attention_nvfp4_fp8_exact16_128_two_level_causal``."""
        spec = self.spec
        parts = ["epicute_attention", spec.precision.replace("/", "_")]
        parts += [spec.qk] if spec.recorded else []
        parts += [SHORT[spec.dtype], str(spec.head_dim), spec.pv]
        return "_".join(parts) + ("_causal" if spec.causal else "")

    @cached_property
    def key(self) -> CompileKey:
        """Everything that decides the machine code."""
        given = [(f.name, getattr(self.spec, f.name)) for f in fields(self.spec)]
        cut = [(f.name, getattr(self.schedule, f.name)) for f in fields(self.schedule)]
        return CompileKey(
            kernel="attention.mixed",
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

        from epicute.attention.sm90.mixed import MixedAttention

        anchor, stream = anchor_and_stream()
        arguments = tuple(cutlass.Int64(0) for _ in MIXED_ARGUMENTS)
        function = MixedAttention(self.spec, self.schedule, self.name)
        return function, (anchor, arguments, stream)


def mixed_kernel_for(
    spec: MixedSpec,
    *,
    target: Target | None = None,
    schedule: MixedSchedule | None = None,
) -> MixedKernel | AttentionKernel:
    """The kernel of ``spec``: by default with ``choose_mixed``'s schedule, for the current GPU or sm_90a.

    ``bf16/bf16`` is the kernel of ``spec.plain()``.

    Raises UnsupportedError for what ``MIXED_LEGALITY`` refuses, ArgumentError for a schedule that does not fit.
    """
    if spec.precision == "bf16/bf16":
        require(schedule is None, "schedule", schedule, "None", "plan_attention(spec.plain(), …)")
        return plain_kernel_for(spec.plain(), target=target)
    target = Target.detect() if target is None else target
    reason = mixed_unsupported(spec, target)
    if reason is not None:
        raise UnsupportedError(f"spec: {reason}. Fix: see epicute.attention.mixed.MIXED_LEGALITY")
    schedule = choose_mixed(spec) if schedule is None else schedule
    schedule.check(spec)
    return MixedKernel(spec, schedule, target)
