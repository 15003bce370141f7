"""What a weight is worth, in float64 and from the formulas: the oracle of this folder."""

from __future__ import annotations

import torch

__all__ = ["dequantize", "fold_gain", "pack"]


def fold_gain(values: torch.Tensor, gain: torch.Tensor, offset: float = 0.0) -> torch.Tensor:
    """(N, K) float64: W'_nk = (gain_k + offset) W_nk."""
    return values.to(torch.float64) * (gain.to(torch.float64) + offset)


def dequantize(codes: torch.Tensor, scale: torch.Tensor | None) -> torch.Tensor:
    """(N, K) float64: code times the scale of its row, or of all rows."""
    values = codes.to(torch.float64)
    if scale is None:
        return values
    return values * scale.to(torch.float64).expand(codes.shape[0])[:, None]


def pack(codes: torch.Tensor, logical: list[int], pitch: int) -> torch.Tensor:
    """Bytes of every packed row: those of feature ``logical[r]``, zeros where that is -1.

    Returns:
        (rows, pitch * element size) uint8; ``pitch`` is in elements.
    """
    size = codes.element_size()
    rows = []
    for feature in logical:
        row = torch.zeros(pitch * size, dtype=torch.uint8)
        if feature >= 0:
            raw = codes[feature].contiguous().view(torch.uint8)
            row[: raw.numel()] = raw
        rows.append(row)
    return torch.stack(rows)
