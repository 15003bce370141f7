"""GPTQ (Frantar et al., arXiv 2210.17323): INT4 codes that keep a layer's outputs, not its weights.

With H = 2 X^T X / n of the layer's calibration inputs, columns are rounded from the first to the last, and the error of
each is made up for by those not yet rounded. With the upper Cholesky factor U of H^-1 (H^-1 = U^T U):

    code_i = nearest(w_i)        e = (w_i - value(code_i)) / U_ii        w_j -= e U_ij for all j > i

* Static groups: scales and zero points are those of the weight as given, before any error is made up for, so that the
  result is on the very grid that rounding to nearest uses. Columns keep their order.
* Damping adds a fraction of H's mean diagonal to all of it.
* All of this is float64. Updates within a block of columns are made at once, those behind it block by block.
* A column that no calibration input excites (a dead one) is rounded to nearest: nothing tells more about it, and it
  takes and gives no error.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from epicute.errors import ArgumentError, require
from epicute.quant.int4 import (
    ClipSearch,
    Int4Codes,
    Int4Grid,
    choose_grid,
    group_width,
    nearest_codes,
    per_column,
)

__all__ = ["GptqConfig", "GptqResult", "Hessian", "output_error", "quantize_gptq"]

_SOURCES = (torch.float32, torch.bfloat16, torch.float16)
_ROWS = 8192


@dataclass(frozen=True)
class GptqConfig:
    """How codes are chosen.

    Attributes:
        grid: groups, zero points, dtype of the scales.
        damping: added to H's diagonal, as a fraction of its mean over columns that are not dead.
        clip: search each group's scale, errors weighted by H's diagonal; None: the scale that clips nothing.
        block: columns between two updates of all columns behind them. Another block changes rounding errors of
            float64 and nothing else.
    """

    grid: Int4Grid = field(default_factory=Int4Grid)
    damping: float = 0.01
    clip: ClipSearch | None = None
    block: int = 128

    def __post_init__(self) -> None:
        require(
            0 < self.damping < 10,
            "damping",
            self.damping,
            "above 0, as a fraction of the mean diagonal",
            "use 0.01",
        )
        require(self.block >= 1, "block", self.block, "at least 1", "use 128")


class GptqResult(NamedTuple):
    """Codes and what they cost: ||(W - W') X^T||^2 / ||W X^T||^2 over the calibration inputs.

    ``nearest`` is the same of rounding to nearest on the same grid.
    """

    codes: Int4Codes
    error: float
    nearest: float


class Hessian:
    """H = 2 X^T X / n of a layer's inputs, summed batch by batch in float64.

    Args:
        width: input features K.
        device: where the sum (K, K) lives and batches are multiplied.
        precision: float64, or float32 for the product of one chunk of rows (the sum stays float64).
        chunk: rows that are multiplied at once.

    Raises:
        ArgumentError: no features, another precision, or float32 while PyTorch multiplies in less.
    """

    def __init__(
        self,
        width: int,
        device: torch.device | str = "cpu",
        precision: torch.dtype = torch.float64,
        chunk: int = 4096,
    ) -> None:
        require(width >= 1, "width", width, "at least 1", "pass K")
        require(chunk >= 1, "chunk", chunk, "at least 1", "use 4096")
        require(
            precision in (torch.float64, torch.float32),
            "precision",
            precision,
            "float64 or float32",
            "use float64",
        )
        require(
            precision == torch.float64 or torch.get_float32_matmul_precision() == "highest",
            "precision",
            f"float32 products at {torch.get_float32_matmul_precision()!r}",
            "'highest'",
            "use float64, or torch.set_float32_matmul_precision('highest')",
        )
        self.rows = 0
        self._precision, self._chunk = precision, chunk
        self._sum = torch.zeros(width, width, dtype=torch.float64, device=device)

    @property
    def width(self) -> int:
        """Input features K."""
        return self._sum.shape[0]

    @torch.no_grad()
    def add(self, x: torch.Tensor) -> None:
        """Take in the inputs of a batch.

        Args:
            x: (..., K) float32, bfloat16 or float16, on any device; no rows change nothing.

        Raises:
            ArgumentError: another width or dtype, or a value that is not finite: one NaN would spoil every code.
        """
        require(
            x.ndim >= 1 and x.shape[-1] == self.width,
            "x.shape",
            tuple(x.shape),
            f"(..., {self.width})",
            "pass this layer's inputs, features last",
        )
        require(
            x.dtype in _SOURCES,
            "x.dtype",
            x.dtype,
            "float32, bfloat16 or float16",
            "pass activations as the model computes them",
        )
        rows = x.reshape(-1, self.width)
        for start in range(0, len(rows), self._chunk):
            some = rows[start : start + self._chunk].to(self._sum.device, self._precision)
            broken = int((~some.isfinite()).any(dim=1).sum())
            require(
                broken == 0,
                "x",
                f"{broken} rows with a NaN or an infinity",
                "finite activations",
                "check the model's forward in this dtype, or leave these rows out",
            )
            self._sum += some.t() @ some
        self.rows += len(rows)

    @property
    def matrix(self) -> torch.Tensor:
        """(K, K) float64.

        Raises:
            ArgumentError: no row was added.
        """
        require(
            self.rows > 0, "activations", "no rows", "at least one", "pass calibration activations"
        )
        return self._sum * (2 / self.rows)


@torch.no_grad()
def quantize_gptq(
    values: torch.Tensor, hessian: torch.Tensor, config: GptqConfig | None = None
) -> GptqResult:
    """Codes of ``values`` that keep the layer's outputs on its calibration inputs.

    Args:
        values: (N, K) float32, bfloat16 or float16, finite. Features that read the same input may stand one above
            the other (q, k and v; gate and up): each row is on its own.
        hessian: (K, K) float64 on the device of ``values``: ``Hessian.matrix``.
        config: symmetric groups of 128, damping 0.01 unless given.

    Returns:
        codes on the device of ``values``, and the errors of these codes and of rounding to nearest.

    Raises:
        ArgumentError: wrong shapes, dtypes or devices, a value that is not finite, or a Hessian that is none.
    """
    config = config or GptqConfig()
    _require_inputs(values, hessian)
    dead = hessian.diagonal() == 0
    upper = _inverse_factor(hessian, dead, config.damping)
    importance = hessian.diagonal() if config.clip else None
    codes = torch.empty(values.shape, dtype=torch.uint8, device=values.device)
    scales, zeros = [], []
    totals = torch.zeros(3, dtype=torch.float64, device=values.device)
    for start in range(0, len(values), _ROWS):
        rows = slice(start, start + _ROWS)
        some = values[rows].to(torch.float32)
        scale, zero = choose_grid(some, config.grid, config.clip, importance)
        codes[rows] = _rounded(some.double(), scale.double(), zero.double(), upper, config)
        part = Int4Codes(codes[rows], scale, zero, config.grid.group)
        totals += _energies(some.double(), part, hessian)
        scales.append(scale)
        zeros.append(zero)
    point = None if config.grid.symmetric else torch.cat(zeros)
    found = Int4Codes(codes, torch.cat(scales), point, config.grid.group)
    whole, error, nearest = totals.tolist()
    return GptqResult(found, error / whole if whole else 0.0, nearest / whole if whole else 0.0)


def output_error(values: torch.Tensor, codes: Int4Codes, hessian: torch.Tensor) -> float:
    """||(W - W') X^T||^2 / ||W X^T||^2 of ``codes`` over the inputs that ``hessian`` has summed."""
    exact = values.double()
    off = exact - codes.dequantize(torch.float64)
    return float(_energy(off, hessian) / _energy(exact, hessian))


def _energies(values: torch.Tensor, found: Int4Codes, hessian: torch.Tensor) -> torch.Tensor:
    """(3,) float64: tr(D H D^T) of the values, of their error, and of the error of rounding to nearest."""
    width = values.shape[1]
    scale = per_column(found.scale.double(), found.group, width)
    assert found.zero is not None
    zero = per_column(found.zero.double(), found.group, width)
    nearest = (nearest_codes(values, scale, zero) - zero) * scale
    off = values - found.dequantize(torch.float64)
    return torch.stack([_energy(d, hessian) for d in (values, off, values - nearest)])


def _energy(matrix: torch.Tensor, hessian: torch.Tensor) -> torch.Tensor:
    return ((matrix @ hessian) * matrix).sum()


def _inverse_factor(hessian: torch.Tensor, dead: torch.Tensor, damping: float) -> torch.Tensor:
    """Upper U with U^T U = (H + damping)^-1."""
    live = hessian.diagonal()[~dead]
    mean = live.mean() if len(live) else torch.ones_like(hessian[0, 0])
    damped = hessian.clone()
    damped.diagonal().add_(torch.where(dead, mean, damping * mean))
    lower, failed = torch.linalg.cholesky_ex(damped)
    if not int(failed):
        inverse = torch.cholesky_inverse(lower)
        upper, failed = torch.linalg.cholesky_ex(inverse, upper=True)
    if int(failed):
        raise ArgumentError(
            f"hessian: got a matrix that is not positive definite with damping {damping}, expected the sum "
            "of x x^T. Fix: use more damping, or Hessian.matrix of this layer's inputs"
        )
    return upper


def _rounded(
    values: torch.Tensor,
    scale: torch.Tensor,
    zero: torch.Tensor,
    upper: torch.Tensor,
    config: GptqConfig,
) -> torch.Tensor:
    """(N, K) uint8 codes of float64 ``values`` under (N, G) float64 grids."""
    width = values.shape[1]
    wide = group_width(width, config.grid.group)
    # Column by column, so that a column's N values stand side by side.
    left, steps, points = (x.t().contiguous() for x in (values, scale, zero))
    codes = torch.empty(left.shape, dtype=torch.uint8, device=values.device)
    for start in range(0, width, config.block):
        stop = min(start + config.block, width)
        errors = torch.empty_like(left[start:stop])
        for i in range(start, stop):
            step, point = steps[i // wide], points[i // wide]
            code = nearest_codes(left[i], step, point)
            codes[i] = code
            error = (left[i] - (code - point) * step) / upper[i, i]
            left[i + 1 : stop].addr_(upper[i, i + 1 : stop], error, alpha=-1)
            errors[i - start] = error
        left[stop:].addmm_(upper[start:stop, stop:].t(), errors, alpha=-1)
    return codes.t()


def _require_inputs(values: torch.Tensor, hessian: torch.Tensor) -> None:
    require(
        values.ndim == 2 and values.numel() > 0,
        "values.shape",
        tuple(values.shape),
        "(N, K), both at least 1",
        "pass the matrix with output features first",
    )
    require(
        values.dtype in _SOURCES,
        "values.dtype",
        values.dtype,
        "float32, bfloat16 or float16",
        "cast values to float32 first",
    )
    width = values.shape[1]
    require(
        tuple(hessian.shape) == (width, width)
        and hessian.dtype == torch.float64
        and hessian.device == values.device,
        "hessian",
        f"{tuple(hessian.shape)} {hessian.dtype} on {hessian.device}",
        f"({width}, {width}) float64 on {values.device}",
        "sum this layer's inputs with Hessian(K, device)",
    )
    for name, tensor in (("values", values), ("hessian", hessian)):
        broken = int((~tensor.isfinite()).sum())
        require(
            broken == 0, name, f"{broken} non-finite values", "finite values", "check its source"
        )
