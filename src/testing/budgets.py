"""How far a result may stand from its reference, over the whole and in the worst row.

The norm of the difference alone hides a row: one wholly wrong row in 4 096 moves ‖out - ref‖/‖ref‖
to 0.023 only. A budget therefore bounds both. NaN passes only where the reference is NaN too, an
infinity only where the reference has the same one. Needs NumPy and PyTorch alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from epicute.errors import require
from epicute.testing.poison import raw_bytes

__all__ = [
    "EXACT",
    "Budget",
    "Errors",
    "assert_equal_bits",
    "assert_within",
    "float64",
    "measure",
    "storage_budget",
    "ulp",
    "ulp_distance",
]

_SIGNIFICAND = {
    torch.float64: (53, -1022),
    torch.float32: (24, -126),
    torch.bfloat16: (8, -126),
    torch.float16: (11, -14),
    torch.float8_e4m3fn: (4, -6),
}
_BITS = {
    torch.float32: torch.int32,
    torch.bfloat16: torch.int16,
    torch.float16: torch.int16,
    torch.float8_e4m3fn: torch.int8,
}


def float64(x: Any) -> np.ndarray:
    """Tensor (any float or integer dtype, any device), array or number as a float64 array."""
    if isinstance(x, torch.Tensor):
        return x.detach().cpu().to(torch.float64).numpy()
    return np.asarray(x, dtype=np.float64)


@dataclass(frozen=True)
class Budget:
    """Relative errors allowed.

    Attributes:
        norm: bound on ‖out - ref‖ / ‖ref‖ over everything.
        worst_row: bound on ‖out_m - ref_m‖ / max(‖ref_m‖, floor) over rows m (all but the last
            axis).
        floor: row norm below which a row is measured against ``floor`` instead: for rows that
            cancel to almost nothing.
    """

    norm: float
    worst_row: float
    floor: float = 0.0

    def __str__(self) -> str:
        floor = f", floor {self.floor:.3g}" if self.floor else ""
        return f"norm {self.norm:.3g}, worst row {self.worst_row:.3g}{floor}"


EXACT = Budget(norm=0.0, worst_row=0.0)
"""Equal values everywhere (0 equals -0; use ``assert_equal_bits`` for signs and payloads)."""


@dataclass(frozen=True)
class Errors:
    """What was measured.

    Attributes:
        norm: ‖out - ref‖ / ‖ref‖, infinity where NaN or an infinity stands in one of the two only.
        worst_row: the largest row error.
        row: index of that row over all but the last axis; () for vectors and scalars.
        column: where in that row the difference is largest.
        out: value there.
        ref: reference there.
        unexplained: elements that are NaN or infinite in one of the two only.
    """

    norm: float
    worst_row: float
    row: tuple[int, ...] = ()
    column: int = 0
    out: float = 0.0
    ref: float = 0.0
    unexplained: int = 0

    def within(self, budget: Budget) -> bool:
        """Whether both errors are inside the budget."""
        return self.norm <= budget.norm and self.worst_row <= budget.worst_row

    def __str__(self) -> str:
        place = ", ".join(map(str, (*self.row, self.column)))
        text = (
            f"norm {self.norm:.3g}, worst row {self.worst_row:.3g} "
            f"(at [{place}]: got {self.out:.9g}, reference {self.ref:.9g})"
        )
        return text + (
            f", {self.unexplained} NaN or infinite without reference" if self.unexplained else ""
        )


def _differences(out: np.ndarray, ref: np.ndarray) -> np.ndarray:
    """|out - ref|, 0 where both are the same non-number, infinity where only one is."""
    finite = np.isfinite(out) & np.isfinite(ref)
    same = (out == ref) | (np.isnan(out) & np.isnan(ref))
    with np.errstate(invalid="ignore", over="ignore"):
        return np.where(finite, np.abs(out - ref), np.where(same, 0.0, np.inf))


def _norms(x: np.ndarray, axis: int | None) -> np.ndarray:
    """Euclidean norm that neither overflows nor underflows; infinity passes through."""
    largest = np.max(np.abs(x), axis=axis, initial=0.0, keepdims=True)
    safe = np.where((largest > 0) & np.isfinite(largest), largest, 1.0)
    scaled = np.where(np.isfinite(x), x, 0.0) / safe
    norm = np.sqrt(np.sum(scaled * scaled, axis=axis, keepdims=True)) * safe
    return np.squeeze(np.where(np.isfinite(largest), norm, np.inf), axis=axis)


def _ratio(difference: np.ndarray, size: np.ndarray) -> np.ndarray:
    """difference / size, where 0 / 0 is 0 and anything else over 0 is infinite."""
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(difference == 0.0, 0.0, difference / size)


def measure(out: Any, ref: Any, floor: float = 0.0) -> Errors:
    """Compare ``out`` with ``ref`` (same shape) in float64. Rows are all axes but the last; a
    vector is one row.
    """
    out, ref = float64(out), float64(ref)
    require(
        out.shape == ref.shape,
        "out",
        f"shape {out.shape}",
        f"the reference's {ref.shape}",
        "compare like with like",
    )
    if out.size == 0:
        return Errors(0.0, 0.0)
    leading = out.shape[:-1]
    width = out.shape[-1] if out.ndim else 1
    difference = _differences(out, ref).reshape(-1, width)
    known = np.where(np.isfinite(ref), ref, 0.0).reshape(-1, width)
    rows = _ratio(_norms(difference, 1), np.maximum(_norms(known, 1), floor))
    row = int(np.argmax(rows))
    column = int(np.argmax(difference[row]))
    return Errors(
        norm=float(_ratio(_norms(difference, None), np.maximum(_norms(known, None), floor))),
        worst_row=float(rows[row]),
        row=tuple(int(i) for i in np.unravel_index(row, leading)) if leading else (),
        column=column,
        out=float(out.reshape(-1, width)[row, column]),
        ref=float(ref.reshape(-1, width)[row, column]),
        unexplained=int(np.isinf(difference).sum()),
    )


def _excerpt(values: np.ndarray, column: int) -> str:
    start = max(0, min(column - 3, len(values) - 8))
    shown = ", ".join(f"{v:.6g}" for v in values[start : start + 8])
    return f"[{start}:{start + min(8, len(values))}] {shown}"


def assert_within(out: Any, ref: Any, budget: Budget, name: str = "out") -> Errors:
    """Raise AssertionError with the worst row's index and values unless ``out`` is within
    ``budget`` of ``ref``.

    Returns the errors, so that a caller can print them.
    """
    errors = measure(out, ref, budget.floor)
    if errors.within(budget):
        return errors
    width = float64(ref).shape[-1] if float64(ref).ndim else 1
    got, expected = float64(out).reshape(-1, width), float64(ref).reshape(-1, width)
    leading = float64(ref).shape[:-1]
    row = int(np.ravel_multi_index(errors.row, leading)) if leading else 0
    raise AssertionError(
        f"{name}: {errors}\n"
        f"  allowed    {budget}\n"
        f"  worst row  {list(errors.row)}\n"
        f"  got        {_excerpt(got[row], errors.column)}\n"
        f"  reference  {_excerpt(expected[row], errors.column)}"
    )


def ulp(x: Any, dtype: torch.dtype) -> np.ndarray:
    """Distance between neighbours of ``dtype`` at |x|, subnormals included; NaN where x is not
    finite.
    """
    require(dtype in _SIGNIFICAND, "dtype", dtype, f"one of {list(_SIGNIFICAND)}", "pick a float")
    bits, smallest = _SIGNIFICAND[dtype]
    x = float64(x)
    exponent = np.frexp(np.where(np.isfinite(x), x, np.nan))[1].astype(np.float64) - 1.0
    step = np.ldexp(1.0, np.maximum(exponent, smallest).astype(np.int64) - (bits - 1))
    step = np.where(x == 0.0, np.ldexp(1.0, smallest - (bits - 1)), step)
    return np.where(np.isfinite(x), step, np.nan)


def ulp_distance(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """How many representable values lie between a and b, elementwise int64; -0 and 0 are the same
    value.

    Both of one dtype (float32, bfloat16, float16 or float8_e4m3fn). NaN against NaN is 0, against a
    number 2**62.
    """
    require(
        a.dtype == b.dtype and a.dtype in _BITS,
        "dtype",
        (a.dtype, b.dtype),
        f"one dtype of {list(_BITS)}",
        "round both to the stored dtype first",
    )

    def ordered(x: torch.Tensor) -> torch.Tensor:
        bits = x.detach().cpu().contiguous().view(_BITS[x.dtype]).to(torch.int64)
        sign_bit = -(1 << (8 * x.element_size() - 1))
        return torch.where(bits < 0, sign_bit - bits, bits)

    nan_a, nan_b = torch.isnan(a.detach().cpu()), torch.isnan(b.detach().cpu())
    distance = (ordered(a) - ordered(b)).abs()
    distance = torch.where(nan_a ^ nan_b, torch.full_like(distance, 2**62), distance)
    return torch.where(nan_a & nan_b, torch.zeros_like(distance), distance)


def assert_equal_bits(out: torch.Tensor, ref: torch.Tensor, name: str = "out") -> None:
    """Raise AssertionError unless both tensors have one dtype, one shape and the same bytes: -0,
    NaN payloads and all.
    """
    require(
        out.dtype == ref.dtype and out.shape == ref.shape,
        name,
        f"{out.dtype} {tuple(out.shape)}",
        f"{ref.dtype} {tuple(ref.shape)}",
        "compare like with like",
    )

    def raw(x: torch.Tensor) -> torch.Tensor:
        return raw_bytes(x.detach().cpu().contiguous()).reshape(-1, x.element_size())

    differs = (raw(out) != raw(ref)).any(dim=1)
    if bool(differs.any()):
        first = int(differs.nonzero()[0])
        place = [int(i) for i in np.unravel_index(first, tuple(out.shape) or (1,))]
        raise AssertionError(
            f"{name}: {int(differs.sum())} of {differs.numel()} elements differ in their bits, "
            f"the first at {place}: got {out.reshape(-1)[first].item()!r}, "
            f"expected {ref.reshape(-1)[first].item()!r}"
        )


def storage_budget(dtype: torch.dtype, arithmetic: float = 2e-6, elements: int = 4096) -> Budget:
    """Budget of a result computed in FP32 and rounded once to ``dtype``, against an unrounded
    reference.

    A rounding moves an element by at most half a unit in the last place, 2**-p relative: the bound
    of a row. From a few hundred elements on the whole moves by 0.58 of that at most, and 0.77 would
    be truncation: the norm bound is 0.7.

    Args:
        dtype: what is stored.
        arithmetic: FP32 error of the epilogue itself, relative.
        elements: how many are compared; below 256 the norm gets the row's bound.
    """
    require(dtype in _SIGNIFICAND, "dtype", dtype, f"one of {list(_SIGNIFICAND)}", "pick a float")
    half = 2.0 ** -_SIGNIFICAND[dtype][0]
    whole = 0.7 * half if elements >= 256 else half
    return Budget(norm=whole + arithmetic, worst_row=half + arithmetic)
