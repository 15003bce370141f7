"""FP8 E4M3: the cast, and scales that belong to a row or a tensor.

A scale is always the multiplier that turns a code into a value:

    value = code * scale            code = cast(x * float32(1 / scale))

The cast is that of `cvt.rn.satfinite.e4m3x2.f32`: one rounding from FP32, to nearest, ties to even;
what is larger than 448 saturates, infinities too; every NaN becomes code 0x7f; the sign of zero
stays. PyTorch's own cast is asked only inside [-448, 448], since what it does outside changed
between releases.
"""

from __future__ import annotations

import torch

from epicute.errors import require

__all__ = [
    "E4M3_MAX",
    "NAN_CODE",
    "SCALE_MAX",
    "SCALE_MIN",
    "as_float32",
    "cast_e4m3",
    "delayed_scale",
    "dequantize",
    "inverse",
    "quantize_rows",
    "quantize_tensor",
    "scale_for",
]

E4M3_MAX = 448.0
"""Largest finite E4M3 value."""

NAN_CODE = 0x7F
"""The code that every NaN becomes."""

SCALE_MIN = 2.0**-117
"""Smallest scale chosen: code 2^-9, the smallest, still decodes to a normal FP32 number."""

SCALE_MAX = 2.0**119
"""Largest scale chosen: code 448 still decodes to a finite FP32 number. Inverses are normal too."""

_SOURCES = (torch.float32, torch.bfloat16, torch.float16)


def as_float32(x: torch.Tensor, argument: str = "x") -> torch.Tensor:
    """``x`` in float32, without loss.

    Raises:
        ArgumentError: ``x`` is neither float32, bfloat16 nor float16 (float64 would be rounded
            twice on its way to FP8).
    """
    require(
        x.dtype in _SOURCES,
        f"{argument}.dtype",
        x.dtype,
        "float32, bfloat16 or float16",
        f"cast {argument} to float32 first",
    )
    return x.to(torch.float32)


def cast_e4m3(x: torch.Tensor) -> torch.Tensor:
    """Saturating cast of ``x`` (any shape; float32, bfloat16, float16) to float8_e4m3fn."""
    x = as_float32(x)
    codes = x.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)
    codes.view(torch.uint8).masked_fill_(x.isnan(), NAN_CODE)
    return codes


def inverse(scale: torch.Tensor) -> torch.Tensor:
    """``float32(1 / scale)``, correctly rounded: what every quantiser multiplies by."""
    return scale.reciprocal()


def scale_for(amax: torch.Tensor) -> torch.Tensor:
    """``amax / 448`` in float32 within [SCALE_MIN, SCALE_MAX]; 1 where ``amax`` is 0."""
    # A tensor divisor: a Python number CUDA would turn into a multiplication, a bit off.
    scale = (amax / torch.full_like(amax, E4M3_MAX)).clamp(SCALE_MIN, SCALE_MAX)
    return torch.where(amax == 0, torch.ones_like(scale), scale)


def delayed_scale(peak: torch.Tensor, margin: int = 0) -> torch.Tensor:
    """The scale that delayed scaling chooses for a largest magnitude: ``peak / 448 * 2^margin``, float32.

    Two roundings lie between a value and what is cast, so that peak * float32(1 / (peak / 448)) may come out a bit
    above 448 and would count as saturated though nothing is lost. There the quotient is taken one float32 higher, which
    is enough: no magnitude up to ``peak`` counts. Only one beyond 448 * SCALE_MAX does, and is clipped.

    Args:
        peak: float32 of any shape, positive and finite.
        margin: headroom in powers of two.

    Returns:
        shaped like ``peak``, within [SCALE_MIN, SCALE_MAX].
    """
    # A tensor divisor: a Python number CUDA would turn into a multiplication, a bit off.
    scale = peak / torch.full_like(peak, E4M3_MAX)
    over = peak * inverse(scale) > E4M3_MAX
    higher = (scale.view(torch.int32) + over).view(torch.float32)
    return (higher * 2.0**margin).clamp_(SCALE_MIN, SCALE_MAX)


def quantize_rows(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise every row with the scale of its own largest magnitude.

    Args:
        x: (M, K) float32, bfloat16 or float16, any strides, K > 0.

    Returns:
        codes (M, K) float8_e4m3fn, contiguous, and scale (M,) float32. A row of zeros has scale 1.
        The magnitude is that of finite elements: an infinity saturates and a NaN stays NaN without
        touching its neighbours.

    Raises:
        ArgumentError: wrong rank, dtype or an empty row.
    """
    require(
        x.ndim == 2 and x.shape[1] > 0, "x.shape", tuple(x.shape), "(M, K) with K > 0", "reshape x"
    )
    x = as_float32(x).contiguous()
    amax = torch.where(x.isfinite(), x.abs(), 0.0).amax(dim=1)
    scale = scale_for(amax)
    return cast_e4m3(x * inverse(scale)[:, None]), scale


def quantize_tensor(x: torch.Tensor, scale: torch.Tensor | float) -> torch.Tensor:
    """Codes of ``x`` (any shape and strides) under one given scale.

    Args:
        x: float32, bfloat16 or float16.
        scale: a number, or (1,) float32 on the device of ``x``; finite and positive. A tensor's
            value is not looked at, so that nothing waits for the device.

    Raises:
        ArgumentError: wrong dtype of ``x``, or ``scale`` is neither a finite positive number nor a
            (1,) float32 tensor.
    """
    if not isinstance(scale, torch.Tensor):
        scale = _number(scale, x.device)
    require(
        scale.dtype == torch.float32 and scale.shape == (1,),
        "scale",
        f"{tuple(scale.shape)} {scale.dtype}",
        "(1,) float32",
        "pass one FP32 scale for the tensor, or use quantize_rows",
    )
    return cast_e4m3(as_float32(x) * inverse(scale))


def _number(scale: object, device: torch.device) -> torch.Tensor:
    """(1,) float32 of a number on ``device``."""
    require(
        isinstance(scale, (int, float)) and 0 < scale <= torch.finfo(torch.float32).max,
        "scale",
        repr(scale),
        "a finite number above 0, or a (1,) float32 tensor",
        "pass the largest magnitude / 448, or use quantize_rows",
    )
    return torch.tensor([scale], dtype=torch.float32, device=device)


def dequantize(codes: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """``float32(code) * scale``.

    Args:
        codes: (M, K) float8_e4m3fn; any shape where the scale is one number.
        scale: (1,) or (M,) float32.

    Returns:
        float32, shaped like ``codes``.

    Raises:
        ArgumentError: wrong dtype, or a scale that is neither one number nor one per row.
    """
    require(
        codes.dtype == torch.float8_e4m3fn,
        "codes.dtype",
        codes.dtype,
        "float8_e4m3fn",
        "pass FP8 codes",
    )
    per_row = codes.ndim == 2 and scale.shape == (codes.shape[0],)
    require(
        scale.dtype == torch.float32 and (per_row or scale.shape == (1,)),
        "scale",
        f"{tuple(scale.shape)} {scale.dtype}",
        f"float32, (1,) or one per row of codes {tuple(codes.shape)}",
        "pass the scale that the codes were written with",
    )
    values = codes.to(torch.float32)
    return values * (scale[:, None] if per_row else scale)
