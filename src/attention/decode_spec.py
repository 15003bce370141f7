"""What a decode attention kernel is compiled for, and which combinations there are kernels for."""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch

from epicute.attention.spec import FP8, HALVES, HEAD_DIMS, PAGES, Rule, check_fields, refusal
from epicute.errors import UnsupportedError, require
from epicute.jit import Target

__all__ = ["CACHES", "DECODE_LEGALITY", "DecodeSpec", "decode_unsupported"]

CACHES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp8": FP8, "int4": torch.uint8}
"""Formats of a cache, and the dtype of the tensors that hold it."""

MOST_ROWS = 8
"""New tokens of a request at once."""


@dataclass(frozen=True)
class DecodeSpec:
    """Attention of a request's last ``rows`` tokens over its cache (FuTransformer 3.3.2, 3.3.3), of one layer.

    Query r of R stands at position length - R + r and sees keys up to its own. Every field is part of the compile key;
    lengths, batch, page tables and strides are not.

    Attributes:
        heads, kv_heads: heads of q, and of the cache; ``kv_heads`` divides ``heads`` (any ratio).
        head_dim: channels of a head: of ``HEAD_DIMS`` for 16- and 8-bit caches, 64 or 128 for INT4.
        cache: of ``CACHES``: ``bf16``, ``fp16``; ``fp8`` with a scale per KV head; ``int4``, records of nibbles with a
            scale per token (``epicute.kv.int4``).
        dtype: of q, bfloat16 or float16.
        out_dtype: ``dtype``, or float8_e4m3fn with a delayed per-tensor scale.
        rows: queries of a request: 1, or up to 8 that are decoded speculatively.
        window, softcap, sinks, lse, scale: as of ``AttentionSpec``.
        page: tokens per page, of ``PAGES``. None: contiguous, a stretch of memory for each request.
        batch_invariant: keys are cut by the request's own length alone, so that a row's bits do not depend on what else
            is in the batch. False: cut so that all SMs have the same work.
        rotation: width of the Hadamard blocks by which INT4 rows were rotated; 0 for none, None for the widest.
            Queries, and the new rows that are appended, are rotated alike, and outputs back.
        values_folded: values come rotated, and outputs are left so (``quant.hadamard.fold_value``).
        append: INT4: quantise the new rows from a 16-bit buffer, use them and store them. Others lie in the cache.
        prefetch: keys of earlier steps are read before the kernel in front has ended. The caller vouches that it writes
            neither those, nor lengths, nor the page table, and that nobody in front of it is still at it.
    """

    heads: int
    kv_heads: int
    head_dim: int
    cache: str = "bf16"
    dtype: torch.dtype = torch.bfloat16
    out_dtype: torch.dtype = None  # type: ignore[assignment]  # becomes dtype
    rows: int = 1
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False
    lse: bool = False
    page: int | None = None
    scale: float = None  # type: ignore[assignment]  # becomes head_dim ** -0.5
    batch_invariant: bool = False
    rotation: int = None  # type: ignore[assignment]  # becomes a width, or 0
    values_folded: bool = False
    append: bool = None  # type: ignore[assignment]  # becomes True for INT4
    prefetch: bool = False

    def __post_init__(self) -> None:
        usable = type(self.head_dim) is int and self.head_dim > 0
        packed = self.cache == "int4"
        widest = self.head_dim & -self.head_dim if usable and packed else 0
        for name, value in (
            ("out_dtype", self.dtype),
            ("scale", float(self.head_dim) ** -0.5 if usable else 1.0),
            ("rotation", widest),
            ("append", packed),
        ):
            if getattr(self, name) is None:
                object.__setattr__(self, name, value)
        flags = ("sinks", "lse", "batch_invariant", "values_folded", "append", "prefetch")
        check_fields(self, ("heads", "kv_heads", "head_dim", "rows"), flags)
        require(
            type(self.rotation) is int and self.rotation >= 0,
            "rotation",
            self.rotation,
            "a width, 0 for none, or None for the widest",
            "pass the width that the cache was written with",
        )

    @property
    def group(self) -> int:
        """Query heads per KV head."""
        return self.heads // self.kv_heads

    @property
    def columns(self) -> int:
        """Query rows over one KV head: of all its heads and new tokens."""
        return self.group * self.rows

    @property
    def out_is_fp8(self) -> bool:
        """Whether the output is quantised."""
        return self.out_dtype == FP8

    @property
    def packed(self) -> bool:
        """Whether the cache has records of nibbles."""
        return self.cache == "int4"

    @property
    def row_bytes(self) -> int:
        """Bytes of a token's keys, or values, of one head."""
        if self.packed:
            return self.head_dim // 2
        return self.head_dim * CACHES[self.cache].itemsize

    @property
    def token_bytes(self) -> int:
        """Bytes read for a token of one KV head, scales included."""
        return 2 * self.row_bytes + 8 * self.packed

    def __str__(self) -> str:
        shown = [f"decode {self.heads}:{self.kv_heads} heads of {self.head_dim}"]
        shown += [f"{self.cache} cache", str(self.dtype).removeprefix("torch.")]
        if self.out_dtype != self.dtype:
            shown.append(f"out_dtype {str(self.out_dtype).removeprefix('torch.')}")
        if self.rows > 1:
            shown.append(f"{self.rows} rows")
        for f in fields(self):
            value = getattr(self, f.name)
            if f.name in ("window", "softcap", "page") and value is not None:
                shown.append(f"{f.name} {value}")
            elif (
                f.name in ("sinks", "lse", "batch_invariant", "values_folded", "prefetch") and value
            ):
                shown.append(f.name.replace("_", " "))
        if self.page is None:
            shown.append("contiguous")
        if self.packed:
            shown.append(f"rotation {self.rotation}" if self.rotation else "not rotated")
            shown.append("appends" if self.append else "reads alone")
        return ", ".join(shown)


DECODE_LEGALITY = (
    Rule(
        "cache",
        f"one of {tuple(CACHES)}",
        lambda s: s.cache in CACHES,
        "there is a kernel for these alone",
    ),
    Rule(
        "dtype",
        "bfloat16 or float16",
        lambda s: s.dtype in HALVES,
        "queries are operands of 16-bit matrix products; convert q",
    ),
    Rule(
        "cache",
        "the dtype of q where it is no narrower one",
        lambda s: s.cache not in ("bf16", "fp16") or CACHES[s.cache] == s.dtype,
        "a cache in the other half precision has no conversion",
    ),
    Rule(
        "head_dim",
        f"one of {HEAD_DIMS}",
        lambda s: s.head_dim in HEAD_DIMS,
        "fragments are laid out for these alone; pad the heads to the next one",
    ),
    Rule(
        "head_dim",
        "64 or 128 for an INT4 cache",
        lambda s: s.cache != "int4" or s.head_dim in (64, 128),
        "a lane takes whole words of eight channels; keep such heads in a BF16 or FP8 cache",
    ),
    Rule(
        "out_dtype",
        "the dtype of q, or float8_e4m3fn",
        lambda s: s.out_dtype in (s.dtype, FP8),
        "convert the output",
    ),
    Rule(
        "rows",
        f"1 to {MOST_ROWS}",
        lambda s: s.rows <= MOST_ROWS,
        "more new tokens at once are a prefill: plan_attention reads the same pages",
    ),
    Rule(
        "page",
        f"one of {PAGES}, or None",
        lambda s: s.page is None or s.page in PAGES,
        "a copy of fewer than 16 rows wastes the memory it moves; allocate larger pages",
    ),
    Rule(
        "rotation",
        "0 for a cache that is not INT4",
        lambda s: s.cache == "int4" or s.rotation == 0,
        "16- and 8-bit rows are cached as they are",
    ),
    Rule(
        "rotation",
        "0, or a power of two from 2 to head_dim",
        lambda s: (
            s.rotation == 0
            or (s.rotation & (s.rotation - 1) == 0 and 2 <= s.rotation <= s.head_dim)
        ),
        "Hadamard blocks are powers of two that divide the head",
    ),
    Rule(
        "values_folded",
        "False where nothing is rotated",
        lambda s: not s.values_folded or s.rotation > 0,
        "there is no rotation to fold",
    ),
    Rule(
        "append",
        "False for a cache that is not INT4",
        lambda s: s.cache == "int4" or not s.append,
        "PlaceKV writes such rows in the projection's epilogue",
    ),
)
"""All that is asked of a spec for sm_90a, beside what makes no sense anywhere."""


def decode_unsupported(spec: DecodeSpec, target: Target | None = None) -> str | None:
    """Why there is no kernel for ``spec``, or None where there is one."""
    return refusal(DECODE_LEGALITY, spec, target)


def check_decode(spec: DecodeSpec, target: Target) -> None:
    """Raise UnsupportedError where there is no kernel for ``spec`` on ``target``."""
    reason = decode_unsupported(spec, target)
    if reason is not None:
        raise UnsupportedError(f"spec: {reason}. Fix: see epicute.attention.DECODE_LEGALITY")
