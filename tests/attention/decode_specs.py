"""Specs that cover what decode attention kernels differ in."""

from __future__ import annotations

import torch

from epicute.attention.decode_schedule import DecodeSchedule, choose_decode
from epicute.attention.decode_spec import DecodeSpec

FP8 = torch.float8_e4m3fn
F16 = torch.float16

SPECS = {
    "bf16": DecodeSpec(32, 8, 128, page=64, lse=True),
    "bf16, heads of 64, 3 rows, window, sinks": DecodeSpec(
        6, 2, 64, rows=3, window=100, sinks=True, lse=True
    ),
    "bf16, heads of 80, softcap, 2 rows": DecodeSpec(
        8, 1, 80, page=32, rows=2, softcap=20.0, lse=True
    ),
    "bf16, heads of 96, fp8 out": DecodeSpec(4, 2, 96, page=64, out_dtype=FP8),
    "bf16, heads of 256, page 128": DecodeSpec(3, 3, 256, page=128, lse=True),
    "fp16, 8 rows": DecodeSpec(4, 1, 128, "fp16", F16, page=16, rows=8, lse=True),
    "fp8": DecodeSpec(32, 8, 128, "fp8", page=16, lse=True),
    "fp8, 20:1 heads of 64, batch invariant": DecodeSpec(
        20, 1, 64, "fp8", page=128, batch_invariant=True, lse=True
    ),
    "fp8, heads of 80, window": DecodeSpec(3, 1, 80, "fp8", page=32, window=40, lse=True),
    "fp8, heads of 96, fp8 out, sinks": DecodeSpec(
        6, 3, 96, "fp8", page=64, out_dtype=FP8, sinks=True, lse=True
    ),
    "fp8, heads of 256, prefetch": DecodeSpec(4, 2, 256, "fp8", prefetch=True, lse=True),
    "int4": DecodeSpec(32, 8, 128, "int4", page=64, lse=True),
    "int4, heads of 64, contiguous, 3 rows": DecodeSpec(3, 3, 64, "int4", rows=3, lse=True),
    "int4, 17:1, folded, narrow blocks": DecodeSpec(
        17, 1, 128, "int4", page=128, rows=2, rotation=32, values_folded=True, lse=True
    ),
    "int4, batch invariant, window, fp8 out": DecodeSpec(
        2,
        1,
        128,
        "int4",
        page=32,
        rotation=0,
        batch_invariant=True,
        window=200,
        sinks=True,
        out_dtype=FP8,
        lse=True,
    ),
    "int4, 71:1 heads of 64, fp16": DecodeSpec(71, 1, 64, "int4", F16, page=16, lse=True),
    "int4, read alone, softcap": DecodeSpec(
        8, 2, 128, "int4", page=16, append=False, softcap=15.0, prefetch=True, lse=True
    ),
}
"""Every head dimension, cache, page, mask and dtype at least once, most beside several others."""

TABLED = DecodeSpec(4, 1, 128, "int4", page=16, lse=True)
"""A spec for the table of byte codes."""


def schedule(spec: DecodeSpec, **changes: object) -> DecodeSchedule:
    """The chosen schedule with changes."""
    from dataclasses import replace

    return replace(choose_decode(spec), **changes)  # type: ignore[arg-type]
