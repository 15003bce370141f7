"""Folding a norm's gain into the projection that reads the normalised activation (FuTransformer 3.2.2).

    RMSNorm(x; γ) Wᵀ  =  ρ · x W'ᵀ        W'_nk = (γ_k + offset) W_nk        ρ: one factor per row, in the epilogue

The sum and the product are each rounded once, in float32, before W' is quantised: norms that store γ - 1 lose nothing
to a gain in bfloat16. What is given is never written to.
"""

from __future__ import annotations

import torch

from epicute.errors import require
from epicute.weights import Packed, Quantized, Weight

__all__ = ["fold_gain", "is_identity"]

SOURCES = (torch.float32, torch.bfloat16, torch.float16)


def is_identity(gain: torch.Tensor, offset: float = 0.0) -> bool:
    """Whether ``gain + offset`` is 1 in every channel; waits for the device."""
    return gain.dtype in SOURCES and bool((gain.to(torch.float32) + offset == 1).all())


def fold_gain(
    weight: Weight | Quantized | Packed,
    gain: torch.Tensor,
    *,
    offset: float = 0.0,
    copy: bool = False,
) -> Weight | Quantized | Packed:
    """The weight that reads an activation without its norm gain.

    Args:
        weight: (N, K), as the checkpoint has it or quantised already.
        gain: (K,) float32, bfloat16 or float16, of the norm before the projection.
        offset: added to the gain first, in float32; 1 for models that store gain - 1.
        copy: fold into a copy where the weight also serves elsewhere (``Weight.tied``) or is quantised already. Codes
            are then decoded, multiplied, and must be quantised a second time, which rounds a second time.

    Returns:
        A new float32 ``Weight``; where every ``gain + offset`` is 1 there is nothing to fold and ``weight`` itself is
        returned, so that codes with the gain already in them stay as they are.

    Raises:
        ArgumentError: a gain of another shape or dtype or with non-finite values; a tied or quantised weight without
            ``copy``.
    """
    require(
        isinstance(weight, (Weight, Quantized, Packed)),
        "weight",
        type(weight).__name__,
        "a Weight, Quantized or Packed",
        "wrap the matrix: Weight(w)",
    )
    width = weight.shape[1] if isinstance(weight, Packed) else _matrix(weight).shape[1]
    if gain.shape == (width,) and is_identity(gain, offset):
        return weight
    if isinstance(weight, Weight):
        return weight.fold_gain(gain, offset, copy)
    require(
        copy,
        weight.name,
        f"{weight.format} codes, quantised before the gain was folded in",
        "unquantised values, whose scales then fit the folded weight",
        "fold before quantising, or pass copy=True to decode, fold and quantise again",
    )
    codes = weight.unpack() if isinstance(weight, Packed) else weight
    return Weight(codes.dequantize(), codes.name).fold_gain(gain, offset)


def _matrix(weight: Weight | Quantized) -> torch.Tensor:
    return weight.values if isinstance(weight, Weight) else weight.codes
