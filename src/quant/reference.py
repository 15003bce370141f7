"""The contracts of FP8 and INT4 a second time, from the formats' definitions, in NumPy.

FP8 is exact in float64 and uses no casts.

E4M3 (OCP FP8, "fn"): sign, four exponent bits of bias 7, three fraction bits; exponent 0 is
subnormal in steps of 2^-9; no infinity; 0x7f and 0xff are NaN; 0x7e is 448.
"""

from __future__ import annotations

import numpy as np

__all__ = [
    "DelayedReference",
    "decode_e4m3",
    "dequantize_int4",
    "encode_e4m3",
    "quantize_int4",
    "quantize_rows",
    "quantize_tensor",
]

_CODE = np.arange(127)
_MAGNITUDES = np.where(_CODE < 8, _CODE * 2.0**-9, (1 + _CODE % 8 / 8) * 2.0 ** (_CODE // 8 - 7.0))
"""Values of codes 0x00 to 0x7e, rising."""

SCALE_RANGE = (2.0**-117, 2.0**119)


def decode_e4m3(codes: np.ndarray) -> np.ndarray:
    """Float64 values of uint8 ``codes``, any shape."""
    magnitude = np.append(_MAGNITUDES, np.nan)[codes & 0x7F]
    return np.where(codes & 0x80, -magnitude, magnitude)


def encode_e4m3(x: np.ndarray) -> np.ndarray:
    """uint8 codes nearest to float64 ``x``: ties to the even code, saturating, NaN to 0x7f."""
    x = _exact(x)
    middle = (_MAGNITUDES[1:] + _MAGNITUDES[:-1]) / 2
    magnitude = np.abs(x)
    # Middles below the value lift it by one code each; a middle it meets exactly lifts it to an
    # even code only.
    below = np.searchsorted(middle, magnitude, side="left")
    tie = (below < middle.size) & (middle[np.minimum(below, middle.size - 1)] == magnitude)
    code = below + (tie & (below % 2 == 1))
    code = np.where(np.isnan(x), 0x7F, code | np.where(np.signbit(x), 0x80, 0))
    return code.astype(np.uint8)


def _exact(x: np.ndarray) -> np.ndarray:
    """``x`` in float64; a signalling NaN is a NaN like any other."""
    with np.errstate(invalid="ignore"):
        return np.asarray(x).astype(np.float64)


def _scaled(x: np.ndarray, scale: float) -> np.ndarray:
    """``float32(x * float32(1 / scale))``: exact in float64, then rounded once."""
    inverse = np.float64(np.float32(1.0 / np.float64(scale)))
    with np.errstate(over="ignore", invalid="ignore"):
        return (_exact(x) * inverse).astype(np.float32)


def quantize_tensor(x: np.ndarray, scale: float) -> np.ndarray:
    """uint8 codes of float32 ``x`` under one float32 ``scale``."""
    return encode_e4m3(_scaled(x, scale))


def quantize_rows(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """uint8 codes and float32 scale (M,) of float32 ``x`` (M, K), by each row's finite maximum."""
    codes, scales = [], []
    for row in _exact(x):
        amax = np.abs(row[np.isfinite(row)]).max(initial=0.0)
        scale = np.float32(np.clip(np.float32(amax / 448), *SCALE_RANGE)) if amax else np.float32(1)
        codes.append(quantize_tensor(row, float(scale)))
        scales.append(scale)
    return np.array(codes, np.uint8).reshape(np.shape(x)), np.array(scales, np.float32)


def quantize_int4(
    x: np.ndarray, group: int, symmetric: bool = True
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Codes (N, K), float16 scales (N, G) and zero points (N, G) of float32 ``x``, group by group.

    ``group`` is a width; the last one of a row takes what is left.
    """
    codes = np.empty(x.shape, np.uint8)
    scales, zeros = [], []
    for n, row in enumerate(np.asarray(x, np.float32)):
        for start in range(0, row.size, group):
            part = row[start : start + group]
            low, high = min(part.min(), np.float32(0)), max(part.max(), np.float32(0))
            span, steps = (max(high, -low), 7) if symmetric else (high - low, 15)
            scale = np.float16(max(span / np.float32(steps), np.float32(2.0**-24)) if span else 1)
            zero = 8 if symmetric else int(np.clip(np.rint(-low / np.float32(scale)), 0, 15))
            whole = np.rint(part / np.float32(scale))
            codes[n, start : start + group] = np.clip(whole + zero, 0, 15)
            scales.append(scale)
            zeros.append(zero)
    shape = (len(x), -1)
    return codes, np.array(scales).reshape(shape), np.array(zeros, np.uint8).reshape(shape)


def dequantize_int4(
    codes: np.ndarray, scale: np.ndarray, zero: np.ndarray | None, group: int
) -> np.ndarray:
    """(N, K) float64: (code - zero) * scale, each of the column's group; zero 8 where None."""
    at = np.arange(codes.shape[1]) // group
    point = 8.0 if zero is None else zero.astype(np.float64)[:, at]
    return (codes.astype(np.float64) - point) * scale.astype(np.float64)[:, at]


class DelayedReference:
    """Delayed scaling of one site as plain Python: a list of past maxima and a scale."""

    def __init__(self, history: int = 16, initial: float = 1.0, margin: int = 0) -> None:
        self.length, self.margin = history, margin
        self.scale = np.float32(initial)
        self.past: list[float] = []
        self.seen: list[float] = []
        self.saturated = self.nans = 0

    def quantize(self, x: np.ndarray) -> np.ndarray:
        """uint8 codes of float32 ``x``; records what was seen."""
        x = _exact(x)
        self.seen += np.abs(x[np.isfinite(x)]).tolist()
        self.nans += int(np.isnan(x).sum())
        self.saturated += int((np.abs(_scaled(x, float(self.scale))) > 448).sum())
        return quantize_tensor(x, float(self.scale))

    def roll(self) -> None:
        """Start the next invocation."""
        peak, self.seen = max(self.seen, default=0.0), []
        if peak == 0:
            return
        self.past = [*self.past, peak][-self.length :]
        self.scale = _holding(max(self.past), self.margin)


def _holding(peak: float, margin: int) -> np.float32:
    """The first float32 from peak / 448 up by which ``peak`` comes out at 448 at most, times 2^margin, in range."""
    least, most = SCALE_RANGE
    scale = np.float32(peak / 448)
    while least < scale < most and _scaled(np.array(peak), float(scale)) > 448:
        scale = np.nextafter(scale, np.float32(np.inf))
    return np.float32(np.clip(np.float64(scale) * 2.0**margin, least, most))
