"""Rows to quantise: usual ones and any bit pattern."""

from __future__ import annotations

import torch

FP8 = torch.float8_e4m3fn
DTYPES = (torch.bfloat16, torch.float16)


def wild(
    rows: int, columns: int, dtype: torch.dtype, seed: int = 0, device: str = "cpu"
) -> torch.Tensor:
    """(rows, columns): every second row any bits, NaN and infinities among them; one of zeros, one without a finite
    value.
    """
    generator = torch.Generator().manual_seed(seed)
    usual = (torch.randn(rows, columns, generator=generator) * 3).to(dtype)
    bits = torch.randint(-(2**15), 2**15, (rows, columns), generator=generator).short()
    usual[1::2] = bits.view(dtype)[1::2]
    if rows:
        usual[0, 0] = -0.0
    if rows > 2:
        usual[2] = 0.0
    if rows > 4:
        usual[4] = torch.inf
        usual[4, 0] = torch.nan
    return usual.to(device)


def codes_of(codes: torch.Tensor) -> torch.Tensor:
    """The codes' bytes."""
    return codes.contiguous().view(torch.uint8)


def outputs(rows: int, columns: int, device: str = "cpu") -> tuple[torch.Tensor, torch.Tensor]:
    """Codes in rows of whole 8 bytes, and scales, both of other values than any right ones."""
    pitch = -(-columns // 8) * 8
    codes = torch.full((rows, pitch), 0x55, dtype=torch.uint8, device=device).view(FP8)
    return codes[:, :columns], torch.full((rows,), -1.0, device=device)
