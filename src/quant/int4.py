"""INT4 weights: codes 0 to 15 on a grid that a group of adjacent input features shares.

    value = (code - zero) * scale            zero = 8 where the grid is symmetric

Groups are 32, 64 or 128 wide, or the whole output feature; the last one of a row may be narrower. A scale is stored in
16 bits, and codes are chosen under the scale as stored:

* symmetric: scale = max |w| / 7 of the group (FuTransformer 3.3.4), code = round(w / scale) + 8;
* asymmetric: scale = (max(w, 0) - min(w, 0)) / 15, zero = round(-min(w, 0) / scale), code = round(w / scale) + zero.

Rounding is to nearest, ties to even; what lies past the grid takes its end. ``ClipSearch`` tries smaller scales, which
clip a group's largest values and round all others finer, and keeps the best by squared error, weighted by the
activations' energy where it is known. GPTQ (``quant.gptq``) chooses codes on the same grids.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from epicute.errors import require
from epicute.layouts import CHANNEL, GROUPS
from epicute.quant.fp8 import as_float32

__all__ = [
    "MIDDLE",
    "SCALE_DTYPES",
    "ClipSearch",
    "Int4Codes",
    "Int4Grid",
    "choose_grid",
    "group_width",
    "groups_of",
    "nearest_codes",
    "per_column",
    "quantize_int4",
]

MIDDLE = 8
"""Zero point of a symmetric grid."""

LAST = 15
"""Largest code."""

SCALE_DTYPES = (torch.float16, torch.bfloat16)

_SLICE = 1 << 24


@dataclass(frozen=True)
class Int4Grid:
    """What a group's codes can stand for.

    Attributes:
        group: input features that share a scale: 32, 64, 128, or -1 (``CHANNEL``) for all of an output feature.
        symmetric: zero point 8 everywhere, or one of each group's own.
        scale_dtype: float16 (eleven bits, up to 65504, normal from 6e-5) or bfloat16 (eight bits, any range).
    """

    group: int = 128
    symmetric: bool = True
    scale_dtype: torch.dtype = torch.float16

    def __post_init__(self) -> None:
        _require_group("group", self.group)
        require(
            self.scale_dtype in SCALE_DTYPES,
            "scale_dtype",
            self.scale_dtype,
            f"one of {SCALE_DTYPES}",
            "store scales in 16 bits",
        )


@dataclass(frozen=True)
class ClipSearch:
    """Scales that are tried: ``steps`` fractions of the unclipped one below 1, evenly down to ``least``.

    1 itself is always tried, and kept where nothing is better.
    """

    least: float = 0.5
    steps: int = 20

    def __post_init__(self) -> None:
        require(0 < self.least < 1, "least", self.least, "above 0 and below 1", "try 0.5")
        require(self.steps >= 1, "steps", self.steps, "at least 1", "try 20")

    @property
    def ratios(self) -> tuple[float, ...]:
        """Fractions tried, from 1 down."""
        return tuple(1 - (1 - self.least) * i / self.steps for i in range(self.steps + 1))


@dataclass(frozen=True, eq=False)
class Int4Codes:
    """A matrix on INT4 grids: value (n, k) = (codes (n, k) - zero (n, g)) * scale (n, g), g = k // group.

    Attributes:
        codes: (N, K) uint8, 0 to 15.
        scale: (N, G) float16 or bfloat16, G = ceil(K / group), or 1 for ``CHANNEL``; finite.
        zero: (N, G) uint8, 0 to 15; None: 8 everywhere.
        group: 32, 64, 128 or -1.
        name: how errors call it.
    """

    codes: torch.Tensor
    scale: torch.Tensor
    zero: torch.Tensor | None
    group: int
    name: str = "weight"

    def __post_init__(self) -> None:
        require_int4(self.name, self.codes, self.scale, self.zero, self.group)

    def dequantize(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """(N, K) values in ``dtype``, float32 or float64; the product is rounded once."""
        width = self.codes.shape[1]
        zero = MIDDLE if self.zero is None else per_column(self.zero, self.group, width).to(dtype)
        return (self.codes.to(dtype) - zero) * per_column(self.scale, self.group, width).to(dtype)


def group_width(width: int, group: int) -> int:
    """Input features of a group: ``group``, or ``width`` for ``CHANNEL``."""
    return width if group == CHANNEL else group


def groups_of(width: int, group: int) -> int:
    """Groups of a row of ``width`` features; the last may be narrower."""
    return -(-width // group_width(width, group))


def per_column(grouped: torch.Tensor, group: int, width: int) -> torch.Tensor:
    """(N, G) spread over the columns of each group: (N, ``width``)."""
    return grouped.repeat_interleave(group_width(width, group), dim=1)[:, :width]


def nearest_codes(values: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor) -> torch.Tensor:
    """Codes nearest to ``values`` under scales and zero points of the same dtype that broadcast to them.

    Returns:
        the dtype of ``values``: whole numbers 0 to 15.
    """
    return (torch.round(values / scale) + zero).clamp(0, LAST)


def quantize_int4(
    values: torch.Tensor,
    grid: Int4Grid | None = None,
    clip: ClipSearch | None = None,
    importance: torch.Tensor | None = None,
) -> Int4Codes:
    """Round every value to the nearest code of its group's grid.

    Args:
        values: (N, K) float32, bfloat16 or float16, any strides, finite.
        grid: symmetric groups of 128 unless given.
        clip: search each group's scale; else the one that clips nothing.
        importance: (K,) weights of the squared error that a search minimises, such as the mean square of each input
            feature over calibration activations; equal ones unless given.

    Returns:
        contiguous codes, and scales in ``grid.scale_dtype``. A group of zeros has scale 1.

    Raises:
        ArgumentError: wrong rank or dtype, a value that is not finite, one too large for the scale's dtype, or an
            ``importance`` of another shape, negative, not finite or without a search.
    """
    grid = grid or Int4Grid()
    _require_values(values)
    _require_importance(importance, values.shape[1], clip)
    codes = torch.empty(values.shape, dtype=torch.uint8, device=values.device)
    scales, zeros = [], []
    for rows in _slices(*values.shape):
        some = as_float32(values[rows], "values")
        scale, zero = choose_grid(some, grid, clip, importance)
        width = values.shape[1]
        spread = per_column(scale.to(torch.float32), grid.group, width)
        codes[rows] = nearest_codes(
            some, spread, per_column(zero.to(torch.float32), grid.group, width)
        ).to(torch.uint8)
        scales.append(scale)
        zeros.append(zero)
    points = None if grid.symmetric else torch.cat(zeros)
    return Int4Codes(codes, torch.cat(scales), points, grid.group)


def choose_grid(
    values: torch.Tensor,
    grid: Int4Grid,
    clip: ClipSearch | None = None,
    importance: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Scale and zero point of every group.

    Args:
        values: (N, K) float32 or float64, finite.

    Returns:
        scale (N, G) in ``grid.scale_dtype`` and zero (N, G) uint8, 8 where the grid is symmetric.

    Raises:
        ArgumentError: a group's values are too large for the scale's dtype.
    """
    groups = _grouped(values, grid.group)
    low, high = _ends(groups, grid.symmetric)
    if clip is None:
        return _grid_of(low, high, grid)
    weight = torch.ones_like(values[:1]) if importance is None else importance[None].to(values)
    weight = _grouped(weight, grid.group)
    best: tuple[torch.Tensor, ...] = ()
    for ratio in clip.ratios:
        scale, zero = _grid_of(low * ratio, high * ratio, grid)
        wide, point = scale.to(values.dtype)[..., None], zero.to(values.dtype)[..., None]
        off = (nearest_codes(groups, wide, point) - point) * wide - groups
        error = (off.square() * weight).sum(dim=2, dtype=torch.float64)
        if not best:
            best = (error, scale, zero)
            continue
        better = error < best[0]
        best = tuple(
            torch.where(better, new, old)
            for new, old in zip((error, scale, zero), best, strict=True)
        )
    return best[1], best[2]


def _ends(groups: torch.Tensor, symmetric: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """(N, G) ends of each group's range, which holds 0."""
    if symmetric:
        amax = groups.abs().amax(dim=2)
        return -amax, amax
    return groups.amin(dim=2).clamp(max=0), groups.amax(dim=2).clamp(min=0)


def _grid_of(
    low: torch.Tensor, high: torch.Tensor, grid: Int4Grid
) -> tuple[torch.Tensor, torch.Tensor]:
    """Scale and zero point that reach from ``low`` to ``high``."""
    span, steps = (high, MIDDLE - 1) if grid.symmetric else (high - low, LAST)
    # A tensor divisor: a Python number CUDA would turn into a multiplication, a bit off.
    wanted = span / torch.full_like(span, steps)
    least = torch.finfo(grid.scale_dtype).smallest_normal * torch.finfo(grid.scale_dtype).eps
    scale = torch.where(span == 0, 1.0, wanted.clamp(min=least)).to(grid.scale_dtype)
    broken = int((~scale.isfinite()).sum())
    require(
        broken == 0,
        "values",
        f"{broken} groups whose scale passes {torch.finfo(grid.scale_dtype).max:.3g}",
        f"scales within {grid.scale_dtype}",
        "use scale_dtype=torch.bfloat16, or check the checkpoint",
    )
    if grid.symmetric:
        return scale, torch.full_like(scale, MIDDLE, dtype=torch.uint8)
    zero = torch.round(-low / scale.to(low.dtype)).clamp(0, LAST)
    return scale, zero.to(torch.uint8)


def _grouped(values: torch.Tensor, group: int) -> torch.Tensor:
    """(N, G, group) view of ``values``, the last group filled up with zeros."""
    rows, width = values.shape
    wide = group_width(width, group)
    count = groups_of(width, group)
    return torch.nn.functional.pad(values, (0, count * wide - width)).reshape(rows, count, wide)


def _slices(rows: int, width: int) -> Iterator[slice]:
    """Rows in slices of about 16 million values, so that what is computed beside them stays small."""
    step = max(_SLICE // width, 1)
    for start in range(0, rows, step):
        yield slice(start, start + step)


def _require_group(argument: str, group: int) -> None:
    require(
        group in (*GROUPS, CHANNEL),
        argument,
        group,
        f"{', '.join(map(str, GROUPS))}, or {CHANNEL} for one scale per output feature",
        "quantise with a supported group",
    )


def _require_values(values: torch.Tensor) -> None:
    require(
        values.ndim == 2 and values.numel() > 0,
        "values.shape",
        tuple(values.shape),
        "(N, K), both at least 1",
        "pass the matrix with output features first",
    )
    broken = int((~values.isfinite()).sum())
    require(
        broken == 0,
        "values",
        f"{broken} non-finite values",
        "finite values",
        "check the checkpoint",
    )


def _require_importance(
    importance: torch.Tensor | None, width: int, clip: ClipSearch | None
) -> None:
    if importance is None:
        return
    require(
        clip is not None,
        "importance",
        "weights of an error that nothing minimises",
        "None without clip",
        "pass clip=ClipSearch()",
    )
    require(
        importance.shape == (width,),
        "importance.shape",
        tuple(importance.shape),
        f"({width},), one per input feature",
        "pass the mean square of each input feature",
    )
    good = bool((importance.isfinite() & (importance >= 0)).all())
    require(
        good,
        "importance",
        "negative or non-finite weights",
        "finite weights from 0 up",
        "check the calibration activations",
    )


def require_int4(
    name: str,
    codes: torch.Tensor,
    scale: torch.Tensor,
    zero: torch.Tensor | None,
    group: int,
) -> None:
    """Raise unless codes, scales and zero points have the dtypes and shapes of ``Int4Codes``.

    Values are not looked at, so that nothing waits for the device: see ``require_int4_values``.
    """
    _require_group(f"{name}.group", group)
    require(
        codes.dtype == torch.uint8 and codes.ndim == 2 and codes.numel() > 0,
        f"{name}.codes",
        f"{tuple(codes.shape)} {codes.dtype}",
        "(N, K) uint8, both at least 1, one code a byte",
        "unpack nibbles first, output features first",
    )
    rows, width = codes.shape
    expected = (rows, groups_of(width, group))
    require(
        tuple(scale.shape) == expected and scale.dtype in SCALE_DTYPES,
        f"{name}.scale",
        f"{tuple(scale.shape)} {scale.dtype}",
        f"{expected} float16 or bfloat16: K = {width} in groups of {group}",
        "name the group that the scales were made for",
    )
    require(
        zero is None or (zero.dtype == torch.uint8 and tuple(zero.shape) == expected),
        f"{name}.zero",
        None if zero is None else f"{tuple(zero.shape)} {zero.dtype}",
        f"{expected} uint8 like the scales, or None",
        "pass one zero point per scale",
    )
    places = {t.device for t in (codes, scale, zero) if t is not None}
    require(len(places) == 1, f"{name}.device", places, "one device", "move all of it")


def require_int4_values(
    name: str, codes: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor | None
) -> None:
    """Raise unless all codes and zero points are 0 to 15 and all scales finite. Waits for the device."""
    for part, found in (("codes", codes), ("zero", zero)):
        most = 0 if found is None else int(found.max())
        require(most <= LAST, f"{name}.{part}", most, "0 to 15", "unpack nibbles first")
    broken = int((~scale.isfinite()).sum())
    require(
        broken == 0,
        f"{name}.scale",
        f"{broken} values that are NaN or infinite",
        "finite multipliers",
        "check the checkpoint",
    )
