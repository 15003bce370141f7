"""NVFP4 a second time, a value at a time, from the contract's sentences.

Every operation is exact in float64 (or correctly rounded in FP32 through it) and then rounded once.
"""

from __future__ import annotations

import math

import numpy as np

from epicute.quant.reference import decode_e4m3, encode_e4m3

GRID = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
SIXTH = np.array(0x3E2AAAAB, np.uint32).view(np.float32)


def single(x: float) -> float:
    """``x`` rounded to FP32."""
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        return float(np.float32(x))


def nearest(x: float) -> int:
    """E2M1 code of an FP32 number: by looking at all eight magnitudes."""
    if math.isnan(x):
        return 7
    magnitude = min(abs(x), 6.0)
    distance = [abs(magnitude - g) for g in GRID]
    best = [code for code in range(8) if distance[code] == min(distance)]
    code = best[0] if len(best) == 1 else next(c for c in best if c % 2 == 0)
    return code | (8 if math.copysign(1.0, x) < 0 else 0)


def value(code: int) -> float:
    return -GRID[code - 8] if code & 8 else GRID[code]


def block(x: np.ndarray, k_scale: float) -> tuple[list[int], int]:
    """16 codes and the scale's byte of 16 FP32 numbers."""
    numbers = [float(v) for v in x]
    amax = max((abs(v) for v in numbers if math.isfinite(v)), default=0.0)
    wanted = single(single(amax * float(SIXTH)) / k_scale)
    byte = int(encode_e4m3(np.array(wanted)))
    if byte == 0:
        inverse = 0.0
    else:
        scale = float(decode_e4m3(np.array(byte, np.uint8)))
        inverse = single(1.0 / single(scale * k_scale))
    scaled = [math.nan if math.isinf(v) and inverse == 0 else single(v * inverse) for v in numbers]
    return [nearest(v) for v in scaled], byte


def quantize(x: np.ndarray, k_scale: float = 1.0) -> tuple[np.ndarray, np.ndarray]:
    """uint8 nibbles (..., D) and scale bytes (..., D/16) of float32 ``x``."""
    blocks = x.reshape(-1, 16)
    done = [block(b, k_scale) for b in blocks]
    codes = np.array([c for c, _ in done], np.uint8).reshape(x.shape)
    scales = np.array([s for _, s in done], np.uint8)
    return codes, scales.reshape(*x.shape[:-1], x.shape[-1] // 16)
