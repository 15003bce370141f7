"""What all importers ask of a tensor; every refusal names tensor, field and value."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from epicute.errors import UnsupportedError, require
from epicute.layouts import CHANNEL, GROUPS
from epicute.quant.int4 import MIDDLE, SCALE_DTYPES, groups_of

__all__ = [
    "SUPPORTED",
    "plain_order",
    "refuse_foreign",
    "require_bits",
    "require_group",
    "require_words",
    "scales_16",
    "zero_points",
]

SUPPORTED = (
    "GPTQ (v1, v2), AWQ (GEMM) and compressed-tensors (pack-quantized) with 4 bits, groups of "
    "32, 64, 128 or one per output feature; E4M3 with a scale per output feature or tensor"
)

FOREIGN = {
    "B": "Marlin",
    "B_24": "Marlin 2:4",
    "W_q": "HQQ",
    "q_weight": "EXL2",
    "weight.absmax": "bitsandbytes",
}
"""Tensors that only other formats have beside a linear."""


def refuse_foreign(tensors: Mapping[str, torch.Tensor], prefix: str) -> None:
    """Raise where a tensor of ``prefix`` belongs to a format that is not read here.

    Raises:
        UnsupportedError: naming the tensor and the format.
    """
    for field, format in FOREIGN.items():
        name = f"{prefix}.{field}"
        require(
            name not in tensors,
            name,
            f"a tensor of {format}",
            SUPPORTED,
            "convert the checkpoint, or quantise the original",
            UnsupportedError,
        )


def require_bits(where: str, bits: object) -> None:
    """Raise unless ``bits`` is 4.

    Raises:
        UnsupportedError: naming the field.
    """
    require(bits == 4, where, repr(bits), f"4: {SUPPORTED}", "quantise to 4 bits", UnsupportedError)


def require_group(where: str, group: object) -> int:
    """``group`` as a number this package has kernels for.

    Raises:
        UnsupportedError: naming the field.
    """
    require(
        isinstance(group, int) and group in (*GROUPS, CHANNEL),
        where,
        repr(group),
        f"{', '.join(map(str, GROUPS))} or {CHANNEL}: {SUPPORTED}",
        "quantise with a supported group",
        UnsupportedError,
    )
    assert isinstance(group, int)
    return group


def require_words(name: str, words: torch.Tensor, shape: tuple[int, int]) -> None:
    """Raise unless ``words`` is int32 of ``shape``."""
    require(
        words.dtype == torch.int32 and tuple(words.shape) == shape,
        name,
        f"{tuple(words.shape)} {words.dtype}",
        f"{shape} int32",
        "check that the configuration belongs to this checkpoint",
    )


def scales_16(name: str, scale: torch.Tensor, shape: tuple[int, int], group: int) -> torch.Tensor:
    """``scale`` in the 16 bits it was stored in, or in those that hold its float32 values exactly.

    Raises:
        ArgumentError: another shape, dtype or a value that is not finite.
        UnsupportedError: float32 values that no 16 bits hold.
    """
    require(
        tuple(scale.shape) == shape and scale.dtype in (*SCALE_DTYPES, torch.float32),
        name,
        f"{tuple(scale.shape)} {scale.dtype}",
        f"{shape} float16, bfloat16 or float32, for groups of {group}",
        "check that the configured group is the checkpoint's",
    )
    broken = int((~scale.isfinite()).sum())
    require(broken == 0, name, f"{broken} non-finite values", "finite ones", "check the checkpoint")
    if scale.dtype in SCALE_DTYPES:
        return scale
    for dtype in SCALE_DTYPES:
        narrow = scale.to(dtype)
        if torch.equal(narrow.to(torch.float32), scale):
            return narrow
    raise UnsupportedError(
        f"{name}: got float32 values that neither float16 nor bfloat16 holds, expected 16-bit scales. "
        "Fix: store the scales in 16 bits when quantising"
    )


def zero_points(name: str, zero: torch.Tensor, symmetric: bool | None) -> torch.Tensor | None:
    """None where every zero point is 8, else ``zero``.

    Args:
        symmetric: what the configuration says; None: nothing.

    Raises:
        ArgumentError: the configuration says symmetric and a zero point is another.
    """
    odd = (zero != MIDDLE).nonzero()
    if not len(odd):
        return None
    at = tuple(odd[0].tolist())
    require(
        not symmetric,
        name,
        f"zero point {int(zero[at])} at (feature, group) {at}",
        "8 everywhere, since sym is True",
        "check the format: v1 stores the zero point less 1, v2 as it is",
    )
    return zero


def plain_order(name: str, g_idx: torch.Tensor | None, width: int, group: int) -> None:
    """Raise unless input feature k belongs to group k // ``group``: activation order of groups is refused.

    Raises:
        ArgumentError: ``g_idx`` has another shape.
        UnsupportedError: a feature belongs to another group.
    """
    if g_idx is None or g_idx.numel() == 0:
        return
    require(
        tuple(g_idx.shape) == (width,),
        name,
        tuple(g_idx.shape),
        f"({width},), one group per input feature",
        "check the checkpoint",
    )
    wide = width if group == CHANNEL else group
    wanted = torch.arange(width, device=g_idx.device) // wide
    other = (g_idx.to(torch.int64) != wanted).nonzero()
    if not len(other):
        return
    k = int(other[0])
    raise UnsupportedError(
        f"{name}[{k}]: got group {int(g_idx[k])}, expected {k // wide} (adjacent groups of {wide}, "
        f"{groups_of(width, group)} in all): groups in activation order (desc_act) are not read. Fix: "
        "quantise with desc_act=False or static groups"
    )
