"""INT4 checkpoints as others write them, from codes in logical order: loops over the words of each format."""

from __future__ import annotations

import torch

from epicute.quant import Int4Codes
from epicute.quant.int4 import MIDDLE

__all__ = ["AWQ_ORDER", "awq", "compressed_tensors", "gptq", "words"]

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""Output feature of a word that each nibble holds, the lowest first."""


def words(codes: torch.Tensor, order: tuple[int, ...] = tuple(range(8))) -> torch.Tensor:
    """(A, 8 B) codes as (A, B) int32; nibble i holds code ``order[i]`` of its word."""
    rows, width = codes.shape
    found = torch.zeros(rows, -(-width // 8), dtype=torch.int64)
    for column in range(width):
        word, place = divmod(column, 8)
        found[:, word] |= codes[:, column].long() << (4 * order.index(place))
    return torch.where(found >= 2**31, found - 2**32, found).to(torch.int32)


def points(source: Int4Codes) -> torch.Tensor:
    """(N, G) zero points, spelled out."""
    if source.zero is not None:
        return source.zero
    return torch.full(source.scale.shape, MIDDLE, dtype=torch.uint8)


def gptq(
    source: Int4Codes, prefix: str, version: int = 1, g_idx: bool = True
) -> dict[str, torch.Tensor]:
    width = source.codes.shape[1]
    zero = points(source)
    stored = zero if version == 2 else torch.where(zero == 0, 15, zero.int() - 1)
    found = {
        f"{prefix}.qweight": words(source.codes).t().contiguous(),
        f"{prefix}.scales": source.scale.t().contiguous(),
        f"{prefix}.qzeros": words(stored.t()),
    }
    if g_idx:
        wide = width if source.group < 0 else source.group
        found[f"{prefix}.g_idx"] = (torch.arange(width) // wide).to(torch.int32)
    return found


def awq(source: Int4Codes, prefix: str) -> dict[str, torch.Tensor]:
    return {
        f"{prefix}.qweight": words(source.codes.t(), AWQ_ORDER),
        f"{prefix}.scales": source.scale.t().contiguous(),
        f"{prefix}.qzeros": words(points(source).t(), AWQ_ORDER),
    }


def compressed_tensors(source: Int4Codes, prefix: str) -> dict[str, torch.Tensor]:
    found = {
        f"{prefix}.weight_packed": words(source.codes),
        f"{prefix}.weight_scale": source.scale,
        f"{prefix}.weight_shape": torch.tensor(source.codes.shape),
    }
    if source.zero is not None:
        found[f"{prefix}.weight_zero_point"] = words(source.zero.t()).t().contiguous()
    return found
