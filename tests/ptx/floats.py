"""Casts between float32 and the narrow formats, as the hardware makes them, on arrays of lanes."""

from __future__ import annotations

import numpy as np

__all__ = [
    "bf16_bits",
    "bf16_value",
    "e2m1_bits",
    "e2m1_value",
    "e4m3_bits",
    "e4m3_value",
    "e5m2_bits",
    "e5m2_value",
    "f16_bits",
    "f16_value",
    "flush",
    "tf32",
]


def flush(x: np.ndarray) -> np.ndarray:
    """Float32 with subnormal numbers made zero, their sign kept."""
    return np.where(np.abs(x) < np.float32(2.0**-126), np.copysign(np.float32(0), x), x)


def bf16_bits(x: np.ndarray) -> np.ndarray:
    """uint32 patterns of float32 rounded to bfloat16, ties to even; NaN is 0x7fff."""
    u = x.view(np.uint32)
    return np.where(
        np.isnan(x), np.uint32(0x7FFF), (u + (np.uint32(0x7FFF) + ((u >> 16) & 1))) >> 16
    )


def bf16_value(bits: np.ndarray) -> np.ndarray:
    """Float32 of bfloat16 patterns, given as unsigned integers."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def f16_bits(x: np.ndarray) -> np.ndarray:
    """uint32 patterns of float32 (or float64) rounded to float16, ties to even; NaN is 0x7fff."""
    return np.where(np.isnan(x), 0x7FFF, x.astype(np.float16).view(np.uint16)).astype(np.uint32)


def f16_value(bits: np.ndarray) -> np.ndarray:
    """Float32 of float16 patterns, given as unsigned integers."""
    return bits.astype(np.uint16).view(np.float16).astype(np.float32)


class Minifloat:
    """A format of ``exponent`` and ``fraction`` bits, by a table of its values; codes below ``codes`` are finite."""

    def __init__(self, exponent: int, fraction: int, codes: int, nan: int) -> None:
        code = np.arange(codes)
        bias, steps = 2 ** (exponent - 1) - 1, 2**fraction
        e, f = code >> fraction, code & (steps - 1)
        self.values = np.where(
            e == 0, f * 2.0 ** (1 - bias - fraction), (1 + f / steps) * 2.0 ** (e - bias)
        )
        self.middles = (self.values[1:] + self.values[:-1]) / 2
        self.nan, self.sign = nan, 1 << (exponent + fraction)

    def encode(self, x: np.ndarray) -> np.ndarray:
        """uint32 codes nearest to ``x``, ties to even, saturating."""
        size = np.abs(x.astype(np.float64))
        code = np.searchsorted(self.middles, size, side="left")
        tie = (code < len(self.middles)) & (
            self.middles[np.minimum(code, len(self.middles) - 1)] == size
        )
        code = code + (tie & (code % 2 == 1))
        code = code | np.where(np.signbit(x), self.sign, 0)
        return np.where(np.isnan(x), self.nan, code).astype(np.uint32)

    def decode(self, codes: np.ndarray) -> np.ndarray:
        """Float32 values; what is not finite is NaN."""
        table = np.full(self.sign, np.nan)
        table[: len(self.values)] = self.values
        found = table[codes.astype(np.int64) & (self.sign - 1)]
        return np.where(codes & self.sign, -found, found).astype(np.float32)


_E4M3, _E2M1 = Minifloat(4, 3, 127, 0x7F), Minifloat(2, 1, 8, 7)
e4m3_bits, e4m3_value = _E4M3.encode, _E4M3.decode
e2m1_bits, e2m1_value = _E2M1.encode, _E2M1.decode


def e5m2_bits(x: np.ndarray) -> np.ndarray:
    """uint32 codes, saturating at 57344, NaN to 0x7f."""
    return Minifloat(5, 2, 0x7C, 0x7F).encode(x)


def e5m2_value(codes: np.ndarray) -> np.ndarray:
    """Float32 values: e5m2 is the upper half of float16."""
    return f16_value(codes.astype(np.uint16) << 8)


def tf32(x: np.ndarray, away: bool = True) -> np.ndarray:
    """Float32 rounded to ten fraction bits, ties away from zero or to even."""
    u = x.view(np.uint32)
    half = np.uint32(0x1000) if away else np.uint32(0xFFF) + ((u >> 13) & 1)
    return np.where(np.isfinite(x), (u + half) & np.uint32(0xFFFFE000), u).view(np.float32)
