"""What a weight is worth, in float64 and from the formulas: the oracle of this folder."""

from __future__ import annotations

import torch

__all__ = ["dequantize", "fold_gain", "pack", "record_codes"]


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


def record_codes(codes: torch.Tensor, bits: int) -> bytes:
    """Bytes of the codes of one record of one row tile: (16, depth) whole numbers below 2^bits.

    Cell by cell from the picture in ``layouts.decode_order``, as one long number.
    """
    total = 0
    for n, row in enumerate(codes.tolist()):
        for k, code in enumerate(row):
            block, inside = divmod(k, 64)
            step, inside = divmod(inside, 16)
            high, inside = divmod(inside, 8)
            t, half = divmod(inside, 2)
            lane, register = 4 * (n % 8) + t, n // 8 + 2 * high
            if bits == 4:
                load, bit = 0, 32 * step + 4 * (register + 4 * half)
            elif bits == 8:
                load, word = step // 2, 2 * (step % 2) + high
                bit = 32 * word + 8 * (2 * (n // 8) + half)
            else:
                load, bit = step, 32 * register + 16 * half
            start = ((block * (bits // 4) + load) * 32 + lane) * 128
            total |= code << (start + bit)
    return total.to_bytes(codes.numel() * bits // 8, "little")
