"""What the tests of this room share: awkward values, a float32 model in float64, comparisons by bits.

Float64 holds the exact product of two FP32 numbers and rounds their sum harmlessly, so that rounding
after every operation models FP32 arithmetic bit for bit.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from epicute.epilogues import reference as ref
from epicute.testing.strategies import SPECIAL_FLOATS

__all__ = ["SPECIALS", "assert_same", "near", "noise", "r32", "special_matrix", "wide"]

SPECIALS = (*SPECIAL_FLOATS, float("nan"), float("inf"), float("-inf"), 3.0, -7.5, 0.1)
"""NaN, infinities, signed zeros, subnormals, the ends of FP32, FP16, E4M3, and plain values."""

wide = ref.wide


def r32(x: Any) -> torch.Tensor:
    """``x`` rounded to float32, as float64."""
    return ref.round_to(x, torch.float32)


def noise(*shape: int, seed: int = 0, scale: float = 1.0) -> torch.Tensor:
    """Normal float32 values."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator) * scale


def special_matrix(rows: int, columns: int) -> torch.Tensor:
    """(rows, columns) float32: ``SPECIALS`` over and over, shifted in every row."""
    at = np.arange(rows)[:, None] * 7 + np.arange(columns)[None, :]
    return torch.from_numpy(np.array(SPECIALS, np.float32)[at % len(SPECIALS)])


def assert_same(out: torch.Tensor, expected: Any, name: str = "out") -> None:
    """Equal bits, where any NaN is as good as another; ``expected`` may be float64 values."""
    want = torch.as_tensor(expected).to(out.dtype)
    assert out.shape == want.shape, f"{name}: {tuple(out.shape)}, expected {tuple(want.shape)}"
    a, b = wide(out), wide(want)
    same = (a == b) & (a.signbit() == b.signbit()) | (a.isnan() & b.isnan())
    if not bool(same.all()):
        at = tuple(int(i) for i in (~same).nonzero()[0])
        raise AssertionError(
            f"{name}: {int((~same).sum())} of {same.numel()} differ, the first at {at}: "
            f"got {float(a[at])!r}, expected {float(b[at])!r}"
        )


def near(out: torch.Tensor, expected: Any, tolerance: Any, name: str = "out") -> None:
    """|out - expected| <= tolerance elementwise; NaN and infinities where expected, and there only."""
    a, b = wide(out), wide(expected)
    bound = torch.as_tensor(tolerance, dtype=torch.float64).expand(a.shape)
    same = (a == b) | (a.isnan() & b.isnan())
    off = ~(same | ((a - b).abs() <= bound))
    if bool(off.any()):
        at = tuple(int(i) for i in off.nonzero()[0])
        raise AssertionError(
            f"{name}: {int(off.sum())} of {off.numel()} are off, the first at {at}: "
            f"got {float(a[at])!r}, expected {float(b[at])!r} within {float(bound[at])!r}"
        )
