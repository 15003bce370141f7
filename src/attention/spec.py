"""What an attention kernel is compiled for, and which combinations there are kernels for."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch

from epicute.errors import UnsupportedError, require
from epicute.jit import Target

__all__ = ["HEAD_DIMS", "LEGALITY", "PAGES", "AttentionSpec", "unsupported"]

HEAD_DIMS = (64, 80, 96, 128, 256)
"""Channels of a head that there are tiles for."""

PAGES = (16, 32, 64, 128)
"""Tokens per page of a paged cache."""

FP8 = torch.float8_e4m3fn
HALVES = (torch.bfloat16, torch.float16)


def check_fields(spec: Any, counts: Sequence[str], flags: Sequence[str]) -> None:
    """Refuse fields of an attention spec that no kernel could have; ``softcap`` and ``scale`` become floats.

    Args:
        spec: has heads, kv_heads, window, softcap and scale, no field being None that may not be.
        counts, flags: names of its positive integers and of its bools.
    """
    for name in counts:
        value = getattr(spec, name)
        fix = "read it from the model's configuration"
        require(type(value) is int and value > 0, name, value, "a positive integer", fix)
    require(
        spec.heads % spec.kv_heads == 0,
        "kv_heads",
        spec.kv_heads,
        f"a divisor of heads={spec.heads}",
        "check the configuration; under tensor parallelism repeat the KV heads",
    )
    for name in flags:
        value = getattr(spec, name)
        require(type(value) is bool, name, value, "True or False", f"write {name}=True")
    require(
        spec.window is None or (type(spec.window) is int and spec.window >= 1),
        "window",
        spec.window,
        "a count of keys, itself included, or None",
        "a window of 0 or -1 in other libraries is None here",
    )
    for name in ("softcap", "scale"):
        value = getattr(spec, name)
        require(
            value is None or (isinstance(value, (int, float)) and 0 < value < math.inf),
            name,
            value,
            "a positive finite number, or None",
            f"leave {name} out where there is none",
        )
        if value is not None:
            object.__setattr__(spec, name, float(value))


@dataclass(frozen=True)
class AttentionSpec:
    """Prefill attention, O = softmax(scale · Q·Kᵀ + mask) · V, of one layer (FuTransformer 2.1).

    Every field is part of the compile key; lengths, batch and strides are not.

    Attributes:
        heads, kv_heads: heads of q, and of k and v; ``kv_heads`` divides ``heads`` (any ratio).
        head_dim: channels of a head, of ``HEAD_DIMS``.
        dtype: of q, bfloat16 or float16.
        kv_dtype: of k and v: ``dtype``, or float8_e4m3fn with a scale per KV head.
        out_dtype: ``dtype``, or float8_e4m3fn with a delayed per-tensor scale (3.2.3).
        causal: query i of Sq sees the keys j <= i + Sk - Sq (aligned at the end: a cached prefix is seen by all).
        window: keys a query sees, itself included: j > i + Sk - Sq - window. None: all.
        softcap: logits become softcap · tanh(logit / softcap). None: as they are.
        sinks: one logit per head that takes part in the normalisation and has no value.
        lse: also write the natural logarithm of the sum of exponentials, float32.
        page: tokens per page of paged k and v, of ``PAGES``. None: dense.
        packed: requests follow each other row by row, told apart by prefix sums. False: (batch, rows, …).
        scale: of the logits. None: head_dim ** -0.5.
    """

    heads: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype = torch.bfloat16
    kv_dtype: torch.dtype = None  # type: ignore[assignment]  # becomes dtype
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
        usable = type(self.head_dim) is int and self.head_dim > 0
        scale = float(self.head_dim) ** -0.5 if usable else 1.0
        for name, value in (("kv_dtype", self.dtype), ("out_dtype", self.dtype), ("scale", scale)):
            if getattr(self, name) is None:
                object.__setattr__(self, name, value)
        check_fields(self, ("heads", "kv_heads", "head_dim"), ("causal", "sinks", "lse", "packed"))

    @property
    def group(self) -> int:
        """Query heads per KV head."""
        return self.heads // self.kv_heads

    @property
    def out_is_fp8(self) -> bool:
        """Whether the output is quantised."""
        return self.out_dtype == FP8

    def __str__(self) -> str:
        shown = [f"{self.heads}:{self.kv_heads} heads of {self.head_dim}"]
        shown += [str(self.dtype).removeprefix("torch.")]
        for name in ("kv_dtype", "out_dtype"):
            if getattr(self, name) != self.dtype:
                shown.append(f"{name} {str(getattr(self, name)).removeprefix('torch.')}")
        shown.append("causal" if self.causal else "all keys")
        for f in fields(self):
            value = getattr(self, f.name)
            if f.name in ("window", "softcap", "page") and value is not None:
                shown.append(f"{f.name} {value}")
            elif f.name in ("sinks", "lse") and value:
                shown.append(f.name)
        shown.append("packed" if self.packed else "padded")
        return ", ".join(shown)


@dataclass(frozen=True)
class Rule:
    """A line of the legality table: what is asked of a spec, and why it is refused otherwise."""

    argument: str
    expected: str
    holds: Callable[[Any], bool]
    reason: str


LEGALITY = (
    Rule(
        "head_dim",
        f"one of {HEAD_DIMS}",
        lambda s: s.head_dim in HEAD_DIMS,
        "there is a tile for these alone; pad the heads to the next one",
    ),
    Rule(
        "dtype",
        "bfloat16 or float16",
        lambda s: s.dtype in HALVES,
        "FP8 queries lose more than the tensor cores gain; convert q",
    ),
    Rule(
        "kv_dtype",
        "the dtype of q, or float8_e4m3fn",
        lambda s: s.kv_dtype in (s.dtype, FP8),
        "a cache in the other half precision has no conversion; an INT4 cache is read in decode alone, since "
        "prefill reads the main cache it mirrors",
    ),
    Rule(
        "kv_dtype",
        "the dtype of q where head_dim is 80, 96 or 256",
        lambda s: s.kv_dtype != FP8 or s.head_dim in (64, 128),
        "the conversion's buffers are laid out for heads of 64 and 128 channels",
    ),
    Rule(
        "out_dtype",
        "the dtype of q, or float8_e4m3fn",
        lambda s: s.out_dtype in (s.dtype, FP8),
        "convert the output",
    ),
    Rule(
        "page",
        f"one of {PAGES}, or None",
        lambda s: s.page is None or s.page in PAGES,
        "a bulk copy of fewer than 16 rows wastes the memory it moves; allocate larger pages",
    ),
    Rule(
        "window",
        "None where causal is False",
        lambda s: s.window is None or s.causal,
        "a window looks back from the query; without a causal mask it has no other end",
    ),
)
"""All that is asked of a spec for sm_90a, beside what makes no sense anywhere."""


def unsupported(spec: AttentionSpec, target: Target | None = None) -> str | None:
    """Why there is no kernel for ``spec``, or None where there is one."""
    return refusal(LEGALITY, spec, target)


def refusal(rules: tuple[Rule, ...], spec: Any, target: Target | None) -> str | None:
    """The first rule that ``spec`` breaks, or that the target is not Hopper; None where there is neither."""
    for rule in rules:
        if not rule.holds(spec):
            got = getattr(spec, rule.argument)
            return f"{rule.argument}: got {got}, expected {rule.expected}: {rule.reason}"
    if target is not None and target.capability != (9, 0):
        return f"target: got {target.arch}, expected sm_90a: the kernels are built for Hopper"
    return None


def check(spec: AttentionSpec, target: Target) -> None:
    """Raise UnsupportedError where there is no kernel for ``spec`` on ``target``."""
    reason = unsupported(spec, target)
    if reason is not None:
        raise UnsupportedError(f"spec: {reason}. Fix: see epicute.attention.LEGALITY")
