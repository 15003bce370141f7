"""Partial sums of squares outside a GEMM: the bits that ``SumSquares`` writes, in PyTorch."""

from __future__ import annotations

import torch

__all__ = ["PARTIAL", "partial_sums"]

PARTIAL = 64
"""Columns of one partial sum."""


def partial_sums(x: torch.Tensor) -> torch.Tensor:
    """Sums of squares over 64 columns, in float32 and in the order that ``SumSquares`` documents.

    A quad lane t adds columns 8t … 8t + 7 of the group's first 32 and then of its second, left to right; the lanes are
    added as (0 + 1) + (2 + 3). Columns beyond the last count as zeros.

    Args:
        x: (M, n) of any float dtype up to float32, any strides.

    Returns:
        (M, ⌈n/64⌉) float32.
    """
    rows, columns = x.shape
    groups = -(-columns // PARTIAL)
    wide = torch.zeros(rows, groups * PARTIAL, dtype=torch.float32, device=x.device)
    wide[:, :columns] = x
    squares = (
        (wide * wide).reshape(rows, groups, 2, 4, 8).transpose(2, 3).reshape(rows, groups, 4, 16)
    )
    total = squares[..., 0]
    for i in range(1, 16):
        total = total + squares[..., i]
    return (total[..., 0] + total[..., 1]) + (total[..., 2] + total[..., 3])
