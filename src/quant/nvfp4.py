"""NVFP4: sixteen channels share one E4M3 scale, each is an E2M1 code (MpFA 2.1 and 4.1).

    value = e2m1(code) * scale * k_scale

``k_scale`` is the optional second level, one FP32 number for a layer's keys; the paper has none,
which is 1. Every step below is one IEEE FP32 operation rounded to nearest, so that host and
device, which may not approximate a reciprocal, find the same bits:

    amax  = max |x| over the finite x of the block
    scale = e4m3(amax * RN(1/6) / k_scale)          saturating at 448
    inv   = 0 where scale is 0, else RN(1 / (scale * k_scale)): one of 126 numbers, a table
    code  = e2m1(x * inv)                           to nearest, ties to the even code, within +-6

A block with amax / 6 <= 2^-10 * k_scale has scale 0 and is flushed; one with
amax > 2688 * k_scale is clipped; counters tell of both. NaN becomes +6 and an infinity +-6, as in
PTX for formats without NaN, and neither enters the scale (an infinity in a flushed block is 0 * inf
and so +6, which scale 0 makes 0). The sign of zero stays. The low nibble of a byte is the even
channel.

E2M1 times E4M3 has at most six significant bits and lies in 2^-10 to 2688: FP16, BF16 and FP16 at
2^-7 hold it exactly.

Values (V) have no blocks: e4m3(v / v_scale), saturating, NaN as 0x7f.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch

from epicute.errors import require
from epicute.quant.fp8 import E4M3_MAX, as_float32, cast_e4m3

__all__ = [
    "BLOCK",
    "E2M1_MAX",
    "SIXTH",
    "CastCounters",
    "decode_e2m1",
    "dequantize_nvfp4",
    "dequantize_values",
    "encode_e2m1",
    "fast8_keys",
    "inverse_table",
    "narrow_scale",
    "pack_nibbles",
    "quantize_nvfp4",
    "quantize_values",
    "unpack_nibbles",
]

BLOCK = 16
"""Channels that share a scale."""

E2M1_MAX = 6.0
"""Largest E2M1 magnitude."""

SIXTH = float(np.uint32(0x3E2AAAAB).view(np.float32))
"""1/6 rounded to FP32."""

SECOND_LEVEL = (2.0**-117, 2.0**117)
"""Range of k_scale and v_scale: products with any E4M3 scale, and their inverses, stay normal."""

_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def _below(x: float) -> float:
    return float(np.nextafter(np.float32(x), np.float32(0)))


# A magnitude above entry i has at least code i + 1. Midpoints that belong to the upper, even code
# are lowered by one FP32 step.
_THRESHOLDS = (0.25, _below(0.75), 1.25, _below(1.75), 2.5, _below(3.5), 5.0)


@dataclass(frozen=True, eq=False)
class CastCounters:
    """What a cast lost, counted on the device and never waited for.

    Attributes:
        nans: (1,) int64, elements that were NaN.
        infinities: (1,) int64, elements that were infinite.
        saturated: (1,) int64, NVFP4: blocks beyond the largest scale; values: finite elements
            beyond 448 * v_scale.
        flushed: (1,) int64, NVFP4: blocks that are not zero but whose scale is.
    """

    nans: torch.Tensor
    infinities: torch.Tensor
    saturated: torch.Tensor
    flushed: torch.Tensor

    @staticmethod
    def create(device: torch.device | str = "cpu") -> CastCounters:
        """Four zeros on ``device``."""
        return CastCounters(*(torch.zeros(1, dtype=torch.int64, device=device) for _ in range(4)))

    def reset(self) -> None:
        """Back to zero, in place."""
        for counter in (self.nans, self.infinities, self.saturated, self.flushed):
            counter.zero_()


def narrow_scale(value: float | torch.Tensor, argument: str) -> float:
    """``value`` as the FP32 number that kernels get.

    Args:
        value: a Python number, or a tensor of one element (read, so it waits for its device).
        argument: name for errors.

    Raises:
        ArgumentError: what is left after narrowing to FP32 is not within [2^-117, 2^117]: zero,
            negative, NaN, infinite, or a double too small or too large for FP32.
    """
    one = not isinstance(value, torch.Tensor) or value.numel() == 1
    require(one, argument, value, "one number", "pass a scale per tensor")
    with np.errstate(over="ignore", under="ignore"):
        narrow = float(np.float32(float(value)))
    low, high = SECOND_LEVEL
    require(
        low <= narrow <= high,
        argument,
        f"{value} ({narrow} in FP32)",
        f"a positive FP32 number from {low:.3g} to {high:.3g}",
        "pass amax / 2688 of typical keys or amax / 448 of typical values, or leave it at 1",
    )
    return narrow


def encode_e2m1(x: torch.Tensor) -> torch.Tensor:
    """uint8 codes 0 to 15, one an element, nearest to ``x`` (any shape; float32, bf16, fp16)."""
    x = as_float32(x)
    steps = torch.tensor(_THRESHOLDS, device=x.device)
    magnitude = torch.bucketize(x.abs().contiguous(), steps, out_int32=True)
    code = magnitude | torch.signbit(x).to(torch.int32) << 3
    return torch.where(x.isnan(), 7, code).to(torch.uint8)


def decode_e2m1(codes: torch.Tensor) -> torch.Tensor:
    """float32 values of uint8 ``codes`` 0 to 15, any shape; code 8 is -0."""
    values = torch.tensor((*_MAGNITUDES, *(-m for m in _MAGNITUDES)), device=codes.device)
    return values[codes.to(torch.int64)]


def pack_nibbles(codes: torch.Tensor) -> torch.Tensor:
    """(..., D) uint8 nibbles to (..., D/2) bytes: the low nibble is the even channel."""
    return codes[..., 0::2] | codes[..., 1::2] << 4


def unpack_nibbles(packed: torch.Tensor) -> torch.Tensor:
    """Inverse of ``pack_nibbles``."""
    return torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2)


def inverse_table(k_scale: float = 1.0) -> np.ndarray:
    """(127,) float32: RN(1 / (scale * k_scale)) by the scale's code; entry 0 is 0."""
    k_scale = narrow_scale(k_scale, "k_scale")
    codes = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn)
    product = codes.to(torch.float32).numpy() * np.float32(k_scale)
    found = np.zeros(127, np.float32)
    found[1:] = np.float32(1) / product[1:]
    return found


@lru_cache(maxsize=256)
def _table_on(device: torch.device, k_scale: float) -> torch.Tensor:
    return torch.from_numpy(inverse_table(k_scale)).to(device)


@torch.no_grad()
def quantize_nvfp4(
    x: torch.Tensor, k_scale: float = 1.0, counters: CastCounters | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and block scales of ``x``.

    Args:
        x: (..., D) float32, bfloat16 or float16, D a multiple of 16; any strides.
        k_scale: second-level scale.
        counters: what is lost is added here.

    Returns:
        codes (..., D/2) uint8, the low nibble the even channel; scales (..., D/16) float8_e4m3fn,
        never negative nor NaN.

    Raises:
        ArgumentError: D, a dtype or ``k_scale``.
    """
    k_scale = narrow_scale(k_scale, "k_scale")
    require(
        x.ndim >= 1 and x.shape[-1] > 0 and x.shape[-1] % BLOCK == 0,
        "x.shape",
        tuple(x.shape),
        f"(..., D) with D a positive multiple of {BLOCK}",
        "pad the head with zeros",
    )
    x = as_float32(x)
    blocks = x.unflatten(-1, (-1, BLOCK))
    amax = torch.where(blocks.isfinite(), blocks.abs(), 0.0).amax(dim=-1)
    wanted = amax * SIXTH
    if k_scale != 1.0:
        # A tensor divisor: a Python number CUDA would turn into a multiplication, a bit off.
        wanted = wanted / torch.full_like(wanted, k_scale)
    scales = cast_e4m3(wanted)
    inverse = _table_on(x.device, k_scale)[scales.view(torch.uint8).to(torch.int64)]
    codes = encode_e2m1(blocks * inverse[..., None]).flatten(-2)
    if counters is not None:
        counters.nans.add_(x.isnan().sum())
        counters.infinities.add_(x.isinf().sum())
        counters.saturated.add_((wanted > E4M3_MAX).sum())
        counters.flushed.add_(((amax > 0) & (inverse == 0)).sum())
    return pack_nibbles(codes), scales


def _check_codes(codes: torch.Tensor, scales: torch.Tensor) -> None:
    require(
        codes.dtype == torch.uint8 and scales.dtype == torch.float8_e4m3fn,
        "codes.dtype",
        (codes.dtype, scales.dtype),
        "uint8 codes and float8_e4m3fn scales",
        "view the bytes as these",
    )
    require(
        codes.shape[:-1] == scales.shape[:-1] and codes.shape[-1] == 8 * scales.shape[-1],
        "scales.shape",
        tuple(scales.shape),
        f"one scale per 8 bytes of codes {tuple(codes.shape)}",
        "pass the scales that the codes were written with",
    )


def dequantize_nvfp4(
    codes: torch.Tensor, scales: torch.Tensor, k_scale: float = 1.0
) -> torch.Tensor:
    """``e2m1(code) * scale * k_scale``.

    Args:
        codes: (..., D/2) uint8.
        scales: (..., D/16) float8_e4m3fn; a NaN scale makes its block NaN.
        k_scale: second-level scale.

    Returns:
        (..., D) float32; exact where ``k_scale`` is a power of two (and then exact in FP16 and BF16
        too where it is 1), otherwise rounded once.

    Raises:
        ArgumentError: shapes or dtypes that do not belong together, or ``k_scale``.
    """
    k_scale = narrow_scale(k_scale, "k_scale")
    _check_codes(codes, scales)
    units = decode_e2m1(unpack_nibbles(codes)).unflatten(-1, (-1, BLOCK))
    return (units * scales.to(torch.float32)[..., None]).flatten(-2) * k_scale


def fast8_keys(codes: torch.Tensor, scales: torch.Tensor, shift: int = 0) -> torch.Tensor:
    """Keys as E4M3 operands: ``e4m3(e2m1(code) * scale * 2^-shift)``, rounded once, saturating.

    Args:
        codes: (..., D/2) uint8.
        scales: (..., D/16) float8_e4m3fn.
        shift: a power of two taken out of all keys of a layer and head, given back to the
            softmax's factor.

    Returns:
        (..., D) float8_e4m3fn.

    Raises:
        ArgumentError: shapes or dtypes that do not belong together, or ``shift``.
    """
    require(-64 <= shift <= 64, "shift", shift, "-64 to 64 powers of two", "use a small shift")
    return cast_e4m3(dequantize_nvfp4(codes, scales, 2.0**-shift))


def _per_head(scale: float | torch.Tensor, x: torch.Tensor, argument: str) -> torch.Tensor:
    """``scale`` as a float32 tensor that divides (..., heads, D)."""
    if not isinstance(scale, torch.Tensor) or scale.numel() == 1:
        return torch.full((), narrow_scale(scale, argument), device=x.device)
    require(
        scale.dtype == torch.float32 and x.ndim >= 2 and scale.shape == x.shape[-2:-1],
        argument,
        f"{tuple(scale.shape)} {scale.dtype}",
        f"a number, or float32 ({x.shape[-2] if x.ndim >= 2 else '?'},), one a KV head",
        "pass one scale per head",
    )
    return scale[:, None]


@torch.no_grad()
def quantize_values(
    v: torch.Tensor, v_scale: float | torch.Tensor = 1.0, counters: CastCounters | None = None
) -> torch.Tensor:
    """``e4m3(v / v_scale)``, saturating; every NaN becomes 0x7f.

    Args:
        v: (..., kv_heads, D) float32, bfloat16 or float16 (any shape under a single scale).
        v_scale: a number, or (kv_heads,) float32 whose values are not looked at.
        counters: what is lost is added here.

    Returns:
        float8_e4m3fn, shaped like ``v``.

    Raises:
        ArgumentError: a dtype, or a scale that is neither one number nor one per head.
    """
    v = as_float32(v, "v")
    scaled = v / _per_head(v_scale, v, "v_scale")
    if counters is not None:
        counters.nans.add_(v.isnan().sum())
        counters.infinities.add_(v.isinf().sum())
        counters.saturated.add_((v.isfinite() & (scaled.abs() > E4M3_MAX)).sum())
    return cast_e4m3(scaled)


def dequantize_values(codes: torch.Tensor, v_scale: float | torch.Tensor = 1.0) -> torch.Tensor:
    """``float32(code) * v_scale``; ``codes`` (..., kv_heads, D) float8_e4m3fn.

    Raises:
        ArgumentError: a scale that is neither one number nor one per head.
    """
    values = codes.to(torch.float32)
    return values * _per_head(v_scale, values, "v_scale")
