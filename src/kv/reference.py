"""Scatter to and gather from a KV cache row by row: the oracle of every writer and reader."""

from __future__ import annotations

import torch

from epicute.errors import require
from epicute.kv.pages import check_slots
from epicute.quant import E4M3_MAX, cast_e4m3, inverse

__all__ = ["gather", "scatter"]


def scatter(
    cache: torch.Tensor,
    values: torch.Tensor,
    slots: torch.Tensor,
    scale: torch.Tensor | None = None,
) -> int:
    """Write row m of ``values`` at ``slots[m]``, in place.

    Args:
        cache: (pages, page_size, kv_heads, head_dim), any strides.
        values: (M, kv_heads, head_dim) float32, or the cache's own dtype.
        slots: (M,) int64. Negative ones and those past the end are skipped. No two rows may share a
            slot.
        scale: (kv_heads,) float32, value = code * scale, for an FP8 cache and float32 values;
            otherwise None.

    Returns:
        how many values saturated.

    Raises:
        ArgumentError: not exactly one slot per row, two rows for one slot, or an FP8 cache without
            a scale.
    """
    check_slots(slots, values.shape[0])
    pages, page_size = cache.shape[:2]
    placed = [(m, s) for m, s in enumerate(slots.tolist()) if 0 <= s < pages * page_size]
    twice = len(placed) - len({s for _, s in placed})
    require(twice == 0, "slots", f"{twice} repeated", "distinct slots", "one row per slot")
    coded = values.dtype == cache.dtype
    require(
        (scale is not None) == (cache.dtype == torch.float8_e4m3fn and not coded),
        "scale",
        scale,
        "a scale exactly where float32 values become FP8 codes",
        "pass (kv_heads,) float32 for an FP8 cache",
    )
    saturated = 0
    if scale is not None:
        scaled = values * inverse(scale)[:, None]
        saturated = sum(int((scaled[m].abs() > E4M3_MAX).sum()) for m, _ in placed)
        values = cast_e4m3(scaled)
    for m, slot in placed:
        cache[slot // page_size, slot % page_size] = values[m].to(cache.dtype)
    return saturated


def gather(
    cache: torch.Tensor, slots: torch.Tensor, scale: torch.Tensor | None = None
) -> torch.Tensor:
    """(M, kv_heads, head_dim) float64 values at ``slots``; NaN for a row that has none.

    The NaN lets no use of such a row go unseen.
    """
    pages, page_size, kv_heads, head_dim = cache.shape
    found = torch.full((slots.numel(), kv_heads, head_dim), torch.nan, dtype=torch.float64)
    for m, slot in enumerate(slots.tolist()):
        if 0 <= slot < pages * page_size:
            found[m] = cache[slot // page_size, slot % page_size].to(torch.float64)
    return found if scale is None else found * scale.to(torch.float64)[:, None]
