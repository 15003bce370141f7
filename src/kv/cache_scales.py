"""Scales of an FP8 cache, as a caller gives them and as kernels read them."""

from __future__ import annotations

import math

import torch

from epicute.errors import require
from epicute.kv.cache_spec import FP8, CacheSpec
from epicute.quant import SCALE_MAX, SCALE_MIN

__all__ = ["cache_scales"]


def cache_scales(
    spec: CacheSpec, scales: tuple[object, object] | None, device: torch.device | str
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """K's and V's scales, (layers, kv_heads) float32 each, for FP8, mirrors too; else None twice."""
    scaled = spec.dtype == FP8 or spec.fp8_mirror
    require(
        (scales is not None) == scaled,
        "scales",
        scales,
        "K's and V's scales" if scaled else f"None for {spec.dtype}",
        "pass amax / 448 of typical keys and values, as one number or (layers, kv_heads) each"
        if scaled
        else "leave scales out",
    )
    if scales is None:
        return None, None
    require(len(scales) == 2, "scales", scales, "(K's, V's)", "pass both")
    k, v = (_scale(spec, name, given) for name, given in zip("kv", scales, strict=True))
    return k.to(device), v.to(device)


def _scale(spec: CacheSpec, name: str, given: object) -> torch.Tensor:
    shape = (spec.layers, spec.kv_heads)
    found = torch.as_tensor(given, dtype=torch.float32, device="cpu")
    require(
        found.shape in ((), shape),
        f"{name}_scale",
        tuple(found.shape),
        f"one number or {shape}, (layers, kv_heads)",
        "give a scale for each layer and KV head",
    )
    least, most = float(found.min()), float(found.max())
    require(
        math.isfinite(least) and SCALE_MIN <= least and most <= SCALE_MAX,
        f"{name}_scale",
        f"{least} to {most}",
        f"from {SCALE_MIN:.3g} to {SCALE_MAX:.3g}",
        "pass amax / 448 of typical keys and values",
    )
    return found.expand(shape).contiguous()
