"""Row-wise dynamic quantisation as a kernel: ``quantize_rows`` to the bit, for the activations of a GEMM.

The other choice beside delayed scaling: every row gets the scale of its own largest magnitude, at the cost of one more
pass over the activations. Where the partial sums of squares of the row are at hand, RMSNorm's row factor goes into the
scale for nothing, since

    code * scale * rstd  =  (x * rstd)  quantised by its own largest magnitude

so that ``Dequantize(activation="row")`` undoes both, and no ``RowScale`` stands behind it. The norm's gain, where the
next projection's weights could not absorb it, is multiplied in first.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from epicute.errors import UnsupportedError, require
from epicute.jit import CompileKey, ObjectCache, Report, Target, modules_digest
from epicute.quant.fp8 import quantize_rows
from epicute.quant.launch import (
    Launcher,
    anchor_and_stream,
    check_apart,
    check_matrix,
    check_vector,
    device_of,
    wrong,
)

__all__ = ["RowsKernel", "RowsPlan", "RowsSpec", "plan_rows", "row_factor", "rows_kernel"]

ARGUMENTS = (
    *("x", "x_stride", "codes", "codes_stride", "scale", "sumsq", "sumsq_stride", "gain"),
    *("rows", "blocks"),
)
"""The kernel's integers: addresses, strides in bytes, M, blocks to launch."""

MODULES = ("epicute.quant.rowwise_kernel", "epicute.quant.rowwise")

DTYPES = (torch.bfloat16, torch.float16)

WARP_COLUMNS = 2048
"""Longest row of one warp: eight vectors a lane."""

LARGEST_K = 65536
"""Longest row that 512 threads keep in registers: sixteen vectors each."""

LARGEST_GAINED = 32768
"""The same with a gain, whose columns take registers too."""

LARGEST_M = 2**31 - 2**16
"""Rows that 32-bit block arithmetic can count."""

PARTIAL = 64
"""Columns of one partial sum of squares (``SumSquares``)."""


@dataclass(frozen=True)
class RowsSpec:
    """What decides the kernel's code.

    Attributes:
        columns: K.
        dtype: of x, bfloat16 or float16.
        eps: of the RMSNorm whose row factor goes into the scale; None for the scale alone.
        gain: whether x is multiplied by a gain first.
    """

    columns: int
    dtype: torch.dtype
    eps: float | None = None
    gain: bool = False

    def __post_init__(self) -> None:
        require(
            type(self.columns) is int and 1 <= self.columns <= LARGEST_K,
            "k",
            self.columns,
            f"1 to {LARGEST_K} columns, which a block keeps in registers",
            "quantise longer rows with epicute.quant.quantize_rows",
            UnsupportedError,
        )
        require(
            self.dtype in DTYPES,
            "dtype",
            self.dtype,
            " or ".join(map(str, DTYPES)),
            "convert x, or quantise it with epicute.quant.quantize_rows",
        )
        require(
            self.eps is None or (math.isfinite(self.eps) and self.eps >= 0),
            "eps",
            self.eps,
            "a number that is not negative, or None",
            "give the norm's epsilon",
        )
        require(
            not self.gain or (self.columns % 8 == 0 and self.columns <= LARGEST_GAINED),
            "k",
            self.columns,
            f"a multiple of 8 up to {LARGEST_GAINED} with a gain",
            "multiply x by the gain before, or fold the gain into the weights",
            UnsupportedError,
        )

    @property
    def threads(self) -> int:
        """That share a row."""
        if self.columns <= WARP_COLUMNS:
            return 32
        return next((n for n in (128, 256) if self.columns <= 64 * n), 512)

    @property
    def rows_of_a_block(self) -> int:
        """Rows of a block."""
        return 4 if self.threads == 32 else 1

    @property
    def vectors(self) -> int:
        """Vectors of a thread."""
        return -(-self.columns // (8 * self.threads))

    @property
    def reach(self) -> int:
        """Largest vector that any thread can ask for."""
        return self.vectors * self.threads - 1

    @property
    def groups(self) -> int:
        """Partial sums of a row."""
        return -(-self.columns // PARTIAL)


@dataclass(frozen=True)
class RowsKernel:
    """The kernel as the compiler room sees it."""

    spec: RowsSpec
    target: Target

    @cached_property
    def key(self) -> CompileKey:
        """Everything that decides the machine code."""
        return CompileKey(
            "quant.rows", tuple(vars(self.spec).items()), self.target, (modules_digest(*MODULES),)
        )

    def trace(self) -> tuple[Any, tuple[Any, ...]]:
        """The DSL function and its fake arguments."""
        from cutlass import Int64

        from epicute.quant.rowwise_kernel import Rowwise

        anchor, stream = anchor_and_stream()
        return Rowwise(self.spec), (anchor, tuple(Int64(0) for _ in ARGUMENTS), stream)


def rows_kernel(
    k: int,
    dtype: torch.dtype = torch.bfloat16,
    *,
    eps: float | None = None,
    gain: bool = False,
    target: Target | None = None,
) -> RowsKernel:
    """Describe the kernel for rows of K = ``k``; see ``plan_rows``. Raises as there, and compiles nothing."""
    return RowsKernel(RowsSpec(k, dtype, eps, gain), target or Target.detect())


def plan_rows(
    k: int,
    dtype: torch.dtype = torch.bfloat16,
    *,
    eps: float | None = None,
    gain: bool = False,
    device: torch.device | str | None = None,
    cache: ObjectCache | None = None,
) -> RowsPlan:
    """Compile (or load) what quantises rows of K = ``k``. One plan serves every M, including 0.

    Args:
        k: columns, at most 65536.
        dtype: of x, bfloat16 or float16.
        eps: of the RMSNorm whose row factor goes into the scale (its gain in the next projection's weights); None for
            the plain scale.
        gain: whether ``run`` takes a gain, by which x is multiplied first; K is a multiple of 8 up to 32768 then.
        device: where it will run; None is the current GPU, or the CPU where there is none. Others are prepared at
            their first run.
        cache: object cache; by default the user's.

    Raises ArgumentError or UnsupportedError, naming the argument, before anything is compiled.
    """
    spec = RowsSpec(k, dtype, eps, gain)
    return RowsPlan(
        spec,
        Launcher(
            lambda target: RowsKernel(spec, target),
            (0,) * (len(ARGUMENTS) - 1) + (1,),
            device,
            cache,
        ),
    )


class RowsPlan:
    """A compiled quantiser of rows. Make one with ``plan_rows``."""

    def __init__(self, spec: RowsSpec, launcher: Launcher) -> None:
        self.spec = spec
        self._launcher = launcher

    @property
    def report(self) -> Report | None:
        """What the compiler said; None where no GPU asked for code."""
        return self._launcher.report

    def run(
        self,
        x: torch.Tensor,
        codes: torch.Tensor,
        scale: torch.Tensor,
        sumsq: torch.Tensor | None = None,
        gain: torch.Tensor | None = None,
    ) -> None:
        """Quantise every row of ``x`` as ``quantize_rows`` does, to the bit.

        On a GPU one launch on the current stream of x's device, without waiting or allocating. On the CPU the same in
        PyTorch, for any strides.

        Args:
            x: (M, K) of the plan's dtype, rows of adjacent elements at multiples of 16 bytes; any row stride.
            codes: (M, K) float8_e4m3fn, written; rows at multiples of 8 bytes. A GEMM wants multiples of 16.
            scale: (M,) float32, written. With ``eps`` the row's scale times ``row_factor``, not limited again.
            sumsq: (M, ⌈K/64⌉) float32, with ``eps`` alone: the row's partial sums of squares, as ``SumSquares`` writes
                them; those of x without the gain.
            gain: (K,) float32 at a multiple of 16 bytes, with ``gain`` alone: what is quantised is x * gain, rounded
                once to float32.

        Raises:
            ArgumentError: naming the argument, before the launch.
        """
        arguments = self.bind(x, codes, scale, sumsq, gain)
        if arguments is None:
            return
        if x.device.type == "cpu":
            self._run_here(x if gain is None else x.float() * gain, codes, scale, sumsq)
        else:
            self._launcher.launch(x.get_device(), arguments)

    def bind(
        self,
        x: torch.Tensor,
        codes: torch.Tensor,
        scale: torch.Tensor,
        sumsq: torch.Tensor | None = None,
        gain: torch.Tensor | None = None,
    ) -> tuple[int, ...] | None:
        """Check everything and return the kernel's arguments; None where M is 0."""
        columns, device = self.spec.columns, device_of("x", x)
        x_stride = check_matrix("x", x, (None, columns), self.spec.dtype, device, 16)
        rows = x.shape[0]
        if rows > LARGEST_M:
            raise wrong("x", x, f"at most {LARGEST_M} rows", "split the batch")
        dtype = torch.float8_e4m3fn
        codes_stride = check_matrix("codes", codes, (rows, columns), dtype, device, 8)
        check_vector("scale", scale, rows, (torch.float32,), device)
        sumsq_stride = self._check_sumsq(sumsq, rows, device)
        factors = self._check_gain(gain, device)
        check_apart(x=x, codes=codes, scale=scale, sumsq=sumsq, gain=gain)
        partials = 0 if sumsq is None else sumsq.data_ptr()
        found = (
            *(x.data_ptr(), x_stride, codes.data_ptr(), codes_stride, scale.data_ptr()),
            *(partials, sumsq_stride, factors, rows, -(-rows // self.spec.rows_of_a_block)),
        )
        return found if rows else None

    def _check_sumsq(self, sumsq: torch.Tensor | None, rows: int, device: torch.device) -> int:
        if self.spec.eps is None:
            if sumsq is not None:
                raise wrong("sumsq", sumsq, "nothing", "plan with eps=…, or leave it out")
            return 0
        shape = (rows, self.spec.groups)
        return check_matrix("sumsq", sumsq, shape, torch.float32, device, 4)

    def _check_gain(self, gain: torch.Tensor | None, device: torch.device) -> int:
        """Its address, 0 for none."""
        if not self.spec.gain:
            if gain is not None:
                raise wrong("gain", gain, "nothing", "plan with gain=True, or leave it out")
            return 0
        check_vector("gain", gain, self.spec.columns, (torch.float32,), device)
        assert gain is not None
        if gain.data_ptr() % 16:
            raise wrong("gain", gain, "a start at a multiple of 16 bytes", "gain.clone()")
        return gain.data_ptr()

    def _run_here(
        self,
        x: torch.Tensor,
        codes: torch.Tensor,
        scale: torch.Tensor,
        sumsq: torch.Tensor | None,
    ) -> None:
        found, scales = quantize_rows(x)
        codes.copy_(found)
        if sumsq is not None and self.spec.eps is not None:
            scales = scales * row_factor(sumsq, self.spec.columns, self.spec.eps)
        scale.copy_(scales)


def row_factor(sumsq: torch.Tensor, width: int, eps: float) -> torch.Tensor:
    """RMSNorm's row factor 1 / sqrt(sum / width + eps), each step rounded to float32.

    The kernels' bits: partial sums left to right, times float32(1 / width), plus eps, the correctly rounded root, its
    correctly rounded inverse. ``RowScale`` inside a GEMM takes the hardware's approximate inverse root of the same sum,
    which may differ in the last bits.

    Args:
        sumsq: (M, ⌈width/64⌉) float32 partial sums of squares.

    Returns:
        (M,) float32.
    """
    total = torch.zeros_like(sumsq[:, 0])
    for column in sumsq.unbind(1):
        total = total + column
    # PyTorch's float32 root is a bit off at times; one from float64, rounded to float32, never is.
    root = (total * (1.0 / width) + eps).double().sqrt().float()
    return root.reciprocal()
