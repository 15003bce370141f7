"""Every built-in policy as float64 PyTorch, written from its formula.

An independent text: nothing here is shared with the policies, and no kernel, planner or policy may
import it. Functions take any real tensor or array and return float64 tensors in logical order: M
rows, N columns. Values are exact up to float64 except where a rounding is part of the definition,
which each docstring says: the FP32 angle of ``rope``, the FP32 reciprocal in front of an FP8 code,
and what ``store`` and ``sum_squares`` keep.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from epicute.errors import require

__all__ = [
    "E4M3_MAX",
    "PARTIAL_COLUMNS",
    "FP8Store",
    "Placement",
    "bias",
    "dequantize",
    "emit_fp8",
    "gain",
    "head_norm",
    "place_kv",
    "residual_add",
    "rope",
    "round_to",
    "row_scale",
    "store",
    "sum_squares",
    "swiglu",
    "wide",
]

E4M3_MAX = 448.0
PARTIAL_COLUMNS = 64
"""Logical columns behind one partial sum of squares."""

_FORMATS = {
    torch.float32: (24, -126, (2.0 - 2.0**-23) * 2.0**127),
    torch.bfloat16: (8, -126, (2.0 - 2.0**-7) * 2.0**127),
    torch.float16: (11, -14, 65504.0),
    torch.float8_e4m3fn: (4, -6, E4M3_MAX),
}
"""dtype -> (significand bits with the hidden one, smallest normal exponent, largest finite value).
"""


def wide(x: Any) -> Tensor:
    """``x`` (tensor, array or nested numbers) as a float64 tensor on the CPU, value for value."""
    return torch.as_tensor(x, dtype=torch.float64, device="cpu").detach()


def round_to(x: Any, dtype: torch.dtype) -> Tensor:
    """Round once, to nearest with ties to even, to what ``dtype`` can hold; the result stays
    float64.

    One rounding from float64, where a cast would go through float32 and round twice. Past the range
    float16, bfloat16 and float32 give infinity; float8_e4m3fn, which has none, saturates at 448,
    infinities included. NaN stays NaN and
    -0 stays -0. float64 is returned as it is.
    """
    x = wide(x)
    if dtype == torch.float64:
        return x
    require(dtype in _FORMATS, "dtype", dtype, f"one of {list(_FORMATS)}", "pick a stored dtype")
    bits, smallest, largest = _FORMATS[dtype]
    finite = torch.where(torch.isfinite(x), x, torch.zeros_like(x))
    exponent = torch.frexp(finite)[1].to(torch.float64) - 1.0
    step = torch.pow(2.0, exponent.clamp(min=smallest) - (bits - 1))
    rounded = torch.where(torch.isfinite(x), torch.round(finite / step) * step, x)
    if dtype == torch.float8_e4m3fn:
        return rounded.clamp(-largest, largest)
    infinite = torch.full_like(x, float("inf")).copysign(rounded)
    return torch.where(rounded.abs() > largest, infinite, rounded)


def _per_row(x: Any, rows: int) -> Tensor:
    """(rows, 1) of a (rows,) or one-element operand."""
    x = wide(x).reshape(-1, 1)
    return x.expand(rows, 1)


def dequantize(acc: Any, scale: Any = None, weight_scale: Any = None) -> Tensor:
    """acc (M, N) * ``weight_scale`` ((N,), (1,) or None) * ``scale`` ((M,), (1,) or None)."""
    x = wide(acc)
    if weight_scale is not None:
        x = x * wide(weight_scale).reshape(1, -1)
    if scale is not None:
        x = x * _per_row(scale, x.shape[0])
    return x


def bias(x: Any, bias: Any) -> Tensor:
    """x (M, n) + bias (n,)."""
    return wide(x) + wide(bias).reshape(1, -1)


def gain(x: Any, gain: Any, offset: float = 0.0) -> Tensor:
    """x (M, n) * (gain (n,) + offset); Gemma-style gains have offset 1."""
    return wide(x) * (wide(gain).reshape(1, -1) + offset)


def row_scale(x: Any, sumsq: Any, width: int, eps: float) -> Tensor:
    """RMSNorm's row factor: x (M, n) / sqrt(sum of squares / width + eps).

    ``sumsq`` (M, ceil(width / 64)): the partial sums of the row that was multiplied, whose length
    is ``width``.
    """
    total = wide(sumsq).sum(dim=1, keepdim=True)
    return wide(x) / torch.sqrt(total / width + eps)


def residual_add(x: Any, residual: Any) -> Tensor:
    """x (M, n) + residual (M, n)."""
    return wide(x) + wide(residual)


def sum_squares(x: Any, stored_as: torch.dtype = torch.float32) -> Tensor:
    """(M, ceil(n / 64)): sums of squares over 64 logical columns of x (M, n) as ``stored_as`` keeps
    it.
    """
    kept = round_to(x, stored_as)
    rows, columns = kept.shape
    groups = -(-columns // PARTIAL_COLUMNS)
    padded = torch.zeros(rows, groups * PARTIAL_COLUMNS, dtype=torch.float64)
    padded[:, :columns] = kept
    return (padded * padded).reshape(rows, groups, PARTIAL_COLUMNS).sum(dim=2)


def swiglu(x: Any, alpha: float = 1.0, limit: float | None = None) -> Tensor:
    """(M, N / 2) from x (M, N), whose first half is the gate and second half up: gate *
    sigmoid(alpha gate) * up.

    With a ``limit`` L the gate is first cut to at most L, and up to [-L, L].
    """
    x = wide(x)
    half = x.shape[1] // 2
    gate, up = x[:, :half], x[:, half:]
    if limit is not None:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return gate * torch.sigmoid(alpha * gate) * up


def rope(
    x: Any,
    positions: Any,
    inv_freq: Any,
    head_dim: int,
    rotary_dim: int | None = None,
    style: str = "half",
    magnitude: float = 1.0,
) -> Tensor:
    """Rotate the pairs of every head of x (M, heads * head_dim) by position * inv_freq.

    ``half`` pairs channel j with j + rotary_dim / 2, ``interleaved`` pairs 2j with 2j + 1. The
    first ``rotary_dim`` channels of a head rotate and are multiplied by ``magnitude`` (YaRN); the
    others pass. The angle is by definition the FP32 product of the FP32 position and the FP32
    inverse frequency; its sine and cosine are taken in float64.
    """
    require(style in ("half", "interleaved"), "style", style, "half or interleaved", "name a style")
    rotary = head_dim if rotary_dim is None else rotary_dim
    x = wide(x)
    heads = x.reshape(x.shape[0], x.shape[1] // head_dim, head_dim)
    angle = (
        torch.as_tensor(positions).cpu().to(torch.float32).reshape(-1, 1)
        * torch.as_tensor(inv_freq).cpu().to(torch.float32).reshape(1, rotary // 2)
    ).to(torch.float64)
    cos, sin = torch.cos(angle)[:, None, :], torch.sin(angle)[:, None, :]
    if style == "half":
        first, second = slice(0, rotary // 2), slice(rotary // 2, rotary)
    else:
        first, second = slice(0, rotary, 2), slice(1, rotary, 2)
    a, b = heads[..., first], heads[..., second]
    rotated = heads.clone()
    rotated[..., first] = (a * cos - b * sin) * magnitude
    rotated[..., second] = (b * cos + a * sin) * magnitude
    return rotated.reshape(x.shape)


def head_norm(x: Any, head_gain: Any, head_dim: int, eps: float, offset: float = 0.0) -> Tensor:
    """RMSNorm of every head of x (M, heads * head_dim): x / sqrt(mean(x²) + eps) * (head_gain
    (head_dim,) + offset).
    """
    x = wide(x)
    heads = x.reshape(x.shape[0], x.shape[1] // head_dim, head_dim)
    mean = (heads * heads).mean(dim=2, keepdim=True)
    normed = heads / torch.sqrt(mean + eps) * (wide(head_gain).reshape(1, 1, -1) + offset)
    return normed.reshape(x.shape)


def store(x: Any, dtype: torch.dtype) -> Tensor:
    """x as ``dtype`` keeps it: rounded once, FP8 saturating and unscaled."""
    return round_to(x, dtype)


def _reciprocal(scale: Any) -> Tensor:
    """FP32 reciprocal, the multiplier in front of an FP8 code."""
    return round_to(1.0 / wide(scale), torch.float32)


@dataclass(frozen=True)
class FP8Store:
    """What one FP8 store leaves behind.

    Attributes:
        codes: (M, n) the values of the E4M3 codes, before the scale.
        value: (M, n) codes * scale, which the chain carries on.
        amax: largest finite magnitude that entered, at least the amax that was there before.
        saturated: elements beyond 448 after division by the scale, infinities included, NaN not.
        nans: elements that are NaN.
    """

    codes: Tensor
    value: Tensor
    amax: float
    saturated: int
    nans: int


def emit_fp8(x: Any, out_scale: Any, amax: float = 0.0) -> FP8Store:
    """Quantise x (M, n) with one scale (1,): code = e4m3(x * FP32(1 / out_scale)), value = code *
    out_scale.
    """
    x = wide(x)
    scaled = x * _reciprocal(out_scale).reshape(())
    codes = round_to(scaled, torch.float8_e4m3fn)
    finite = x[torch.isfinite(x)].abs()
    return FP8Store(
        codes=codes,
        value=codes * wide(out_scale).reshape(()),
        amax=max(float(amax), float(finite.max()) if finite.numel() else 0.0),
        saturated=int((scaled.abs() > E4M3_MAX).sum()),
        nans=int(torch.isnan(x).sum()),
    )


@dataclass(frozen=True)
class Placement:
    """What one KV placement leaves behind.

    Attributes:
        cells: (pages, page_size, kv_heads, head_dim) values of the cells afterwards (of the codes
            for FP8 cells).
        written: the same shape, True where a row was placed.
        saturated: placed elements beyond 448 after division by the scale; 0 unless FP8.
        nans: placed NaN elements; 0 unless FP8.
    """

    cells: Tensor
    written: Tensor
    saturated: int = 0
    nans: int = 0


def place_kv(
    x: Any,
    slots: Any,
    cells: Any,
    dtype: torch.dtype = torch.bfloat16,
    cell_scale: Any = None,
) -> Placement:
    """Row m, head h of x (M, kv_heads * head_dim) goes to cells[page, token, h], (page, token) =
    divmod(slot, page_size).

    A slot below 0 or past the last page is skipped. Two rows with one slot have no defined winner
    and are refused. FP8 cells hold e4m3(x * FP32(1 / cell_scale[h])) with one scale per KV head.
    """
    cells = wide(cells).clone()
    pages, page_size, kv_heads, head_dim = cells.shape
    slots = torch.as_tensor(slots).cpu().to(torch.int64)
    kept = (slots >= 0) & (slots < pages * page_size)
    target = slots[kept]
    require(
        target.unique().numel() == target.numel(),
        "slots",
        slots.tolist(),
        "every kept slot once",
        "give each row a slot of its own",
    )
    rows = wide(x)[: len(slots)].reshape(len(slots), kv_heads, head_dim)[kept]
    scaled = rows
    if cell_scale is not None:
        scaled = rows * _reciprocal(cell_scale).reshape(1, kv_heads, 1)
    page, token = target // page_size, target % page_size
    cells[page, token] = round_to(scaled, dtype)
    written = torch.zeros(cells.shape, dtype=torch.bool)
    written[page, token] = True
    if dtype != torch.float8_e4m3fn:
        return Placement(cells, written)
    saturated = int((scaled.abs() > E4M3_MAX).sum())
    return Placement(cells, written, saturated, int(torch.isnan(scaled).sum()))
