"""The last norm of a forward pass, for the rows whose next token is wanted.

    y[r] = x[rows[r]] * rstd * (gain + offset)        rstd = 1 / sqrt(mean(x²) + eps)

The projection that follows, the head, has few rows then: the last token of each request. The gain could go into the
head's weights, but a tied head shares them with the embedding, so that it is applied here. The head itself is a plain
GEMM on the packed table.

What is rounded: sums of squares are those of ``SumSquares``, given or taken here to the same bits, added left to right;
the factor is ``row_factor``'s; x * rstd and then times (gain + offset), each in float32; the result once to x's dtype.
Gemma's gains have offset 1, added in float32.

A row index of -1 is padding and gives a row of zeros. Any other index outside of x gives zeros too and is counted in
``strays``; on the CPU it is refused.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from epicute.errors import UnsupportedError, require
from epicute.jit import CompileKey, ObjectCache, Report, Target, modules_digest
from epicute.models.embedding import DTYPES, IDS, PADDING
from epicute.models.partials import PARTIAL, partial_sums
from epicute.quant.launch import (
    Launcher,
    anchor_and_stream,
    check_apart,
    check_matrix,
    check_vector,
    device_of,
    wrong,
)
from epicute.quant.rowwise import row_factor

__all__ = ["FinalNormPlan", "NormKernel", "NormSpec", "norm_kernel", "plan_final_norm"]

ARGUMENTS = (
    *("x", "x_stride", "gain", "sumsq", "sumsq_stride", "rows", "strays", "out", "out_stride"),
    *("height", "count"),
)
"""The kernel's integers: addresses, strides in bytes, rows of x, rows of the result."""

MODULES = ("epicute.models.final_norm_kernel", "epicute.models.final_norm")

GAINS = (*DTYPES, torch.float32)

LARGEST_HIDDEN = 65536
"""Longest row that 512 threads keep in registers."""

LARGEST_ROWS = 2**31 - 1
"""Blocks of a launch."""


@dataclass(frozen=True)
class NormSpec:
    """What decides the kernel's code.

    Attributes:
        hidden: columns, a multiple of 8.
        dtype: of x and the result, bfloat16 or float16.
        gain_dtype: bfloat16, float16 or float32.
        eps: added to the mean square.
        offset: added to the gain.
        partials: whether the partial sums of squares are given.
        rows_dtype: of the row indices, int32 or int64; None for all rows.
    """

    hidden: int
    dtype: torch.dtype
    gain_dtype: torch.dtype
    eps: float
    offset: float
    partials: bool
    rows_dtype: torch.dtype | None

    def __post_init__(self) -> None:
        require(
            type(self.hidden) is int and self.hidden >= 1 and self.hidden % 8 == 0,
            "hidden",
            self.hidden,
            "a positive multiple of 8: rows of whole 16-byte vectors",
            "pad the columns with zeros, and the gain",
        )
        require(
            self.hidden <= LARGEST_HIDDEN,
            "hidden",
            self.hidden,
            f"at most {LARGEST_HIDDEN} columns, which a block keeps in registers",
            "normalise wider rows with PyTorch",
            UnsupportedError,
        )
        for name, allowed in (
            ("dtype", DTYPES),
            ("gain_dtype", GAINS),
            ("rows_dtype", (*IDS, None)),
        ):
            require(
                getattr(self, name) in allowed,
                name,
                getattr(self, name),
                " or ".join(map(str, allowed)),
                "convert the tensor",
            )
        require(
            math.isfinite(self.eps) and self.eps >= 0,
            "eps",
            self.eps,
            "a number that is not negative",
            "give the norm's epsilon",
        )
        require(math.isfinite(self.offset), "offset", self.offset, "a number", "0, or 1 for Gemma")

    @property
    def groups(self) -> int:
        """Partial sums of a row."""
        return -(-self.hidden // PARTIAL)

    @property
    def warps(self) -> int:
        """Of a block: all groups at once where 16 warps can."""
        return next((n for n in (1, 2, 4, 8) if self.groups <= 8 * n), 16)

    @property
    def passes(self) -> int:
        """Groups of a quad."""
        return -(-self.groups // (8 * self.warps))

    @property
    def reach(self) -> int:
        """Largest vector that any thread can ask for."""
        return 64 * self.warps * self.passes - 1


@dataclass(frozen=True)
class NormKernel:
    """The kernel as the compiler room sees it."""

    spec: NormSpec
    target: Target

    @cached_property
    def key(self) -> CompileKey:
        """Everything that decides the machine code."""
        sources = (modules_digest(*MODULES),)
        return CompileKey("models.final_norm", tuple(vars(self.spec).items()), self.target, sources)

    def trace(self) -> tuple[Any, tuple[Any, ...]]:
        """The DSL function and its fake arguments."""
        from cutlass import Int64

        from epicute.models.final_norm_kernel import FinalNorm

        anchor, stream = anchor_and_stream()
        return FinalNorm(self.spec), (anchor, tuple(Int64(0) for _ in ARGUMENTS), stream)


def norm_kernel(spec: NormSpec, target: Target | None = None) -> NormKernel:
    """Describe the kernel of ``spec``; compiles nothing."""
    return NormKernel(spec, target or Target.detect())


def plan_final_norm(
    hidden: int,
    dtype: torch.dtype = torch.bfloat16,
    *,
    gain_dtype: torch.dtype = torch.bfloat16,
    eps: float = 1e-5,
    offset: float = 0.0,
    partials: bool = True,
    rows_dtype: torch.dtype | None = torch.int64,
    device: torch.device | str | None = None,
    cache: ObjectCache | None = None,
) -> FinalNormPlan:
    """Compile (or load) a final norm. One plan serves every M and every number of selected rows, including 0.

    Args:
        hidden: columns, a multiple of 8 up to 65536.
        dtype: of x and the result, bfloat16 or float16.
        gain_dtype: bfloat16, float16 or float32.
        eps: added to the mean square. offset: added to the gain; Gemma's norms have 1.
        partials: whether ``run`` gets the partial sums of squares that the last residual epilogue wrote.
        rows_dtype: of the indices of selected rows, int32 or int64; None where all rows are wanted.
        device: where it will run; None is the current GPU, or the CPU where there is none. Others are prepared at
            their first run.
        cache: object cache; by default the user's.

    Raises ArgumentError or UnsupportedError, naming the argument, before anything is compiled.
    """
    spec = NormSpec(hidden, dtype, gain_dtype, eps, offset, partials, rows_dtype)
    idle = (0,) * len(ARGUMENTS)
    return FinalNormPlan(
        spec, Launcher(lambda target: NormKernel(spec, target), idle, device, cache)
    )


class FinalNormPlan:
    """A compiled norm. Make one with ``plan_final_norm``."""

    def __init__(self, spec: NormSpec, launcher: Launcher) -> None:
        self.spec = spec
        self._launcher = launcher

    @property
    def report(self) -> Report | None:
        """What the compiler said; None where no GPU asked for code."""
        return self._launcher.report

    def run(
        self,
        x: torch.Tensor,
        gain: torch.Tensor,
        out: torch.Tensor,
        *,
        sumsq: torch.Tensor | None = None,
        rows: torch.Tensor | None = None,
        strays: torch.Tensor | None = None,
    ) -> None:
        """Normalise the selected rows of ``x``, on the current stream of its device.

        On a GPU one launch, without waiting or allocating. On the CPU the same in PyTorch, to the bit.

        Args:
            x: (M, hidden) of the plan's dtype, rows of adjacent elements at multiples of 16 bytes.
            gain: (hidden,) of the plan's gain dtype, at a multiple of 16 bytes.
            out: (R, hidden) of x's dtype, written, rows as x's; R is M where there are no ``rows``.
            sumsq: (M, ⌈hidden/64⌉) float32 partial sums of squares of x, with ``partials`` alone.
            rows: (R,) indices of rows of x, -1 for none; with ``rows_dtype`` alone.
            strays: (1,) int64, raised by the number of indices that are neither; with ``rows_dtype`` alone.

        Raises:
            ArgumentError: naming the argument, before the launch; on the CPU for stray indices too.
        """
        arguments = self.bind(x, gain, out, sumsq=sumsq, rows=rows, strays=strays)
        if arguments is None:
            return
        if x.device.type == "cpu":
            self._run_here(x, gain, out, sumsq, rows)
        else:
            self._launcher.launch(x.get_device(), arguments)

    def bind(
        self,
        x: torch.Tensor,
        gain: torch.Tensor,
        out: torch.Tensor,
        *,
        sumsq: torch.Tensor | None = None,
        rows: torch.Tensor | None = None,
        strays: torch.Tensor | None = None,
    ) -> tuple[int, ...] | None:
        """Check everything and return the kernel's arguments; None where no row is selected."""
        spec, device = self.spec, device_of("x", x)
        x_stride = check_matrix("x", x, (None, spec.hidden), spec.dtype, device, 16)
        check_vector("gain", gain, spec.hidden, (spec.gain_dtype,), device)
        if gain.data_ptr() % 16:
            raise wrong("gain", gain, "a start at a multiple of 16 bytes", "gain.clone()")
        height = x.shape[0]
        sums_stride = self._check_sumsq(sumsq, height, device)
        count = self._check_rows(rows, strays, height, device)
        if count > LARGEST_ROWS:
            raise wrong("out", out, f"at most {LARGEST_ROWS} rows", "split the batch")
        out_stride = check_matrix("out", out, (count, spec.hidden), spec.dtype, device, 16)
        check_apart(x=x, gain=gain, out=out, sumsq=sumsq, rows=rows, strays=strays)
        sums, at, counter = (0 if t is None else t.data_ptr() for t in (sumsq, rows, strays))
        found = (
            *(x.data_ptr(), x_stride, gain.data_ptr(), sums, sums_stride, at, counter),
            *(out.data_ptr(), out_stride, height, count),
        )
        return found if count else None

    def _check_sumsq(self, sumsq: torch.Tensor | None, height: int, device: torch.device) -> int:
        if not self.spec.partials:
            if sumsq is not None:
                raise wrong("sumsq", sumsq, "nothing", "plan with partials=True, or leave it out")
            return 0
        shape = (height, self.spec.groups)
        return check_matrix("sumsq", sumsq, shape, torch.float32, device, 4)

    def _check_rows(
        self,
        rows: torch.Tensor | None,
        strays: torch.Tensor | None,
        height: int,
        device: torch.device,
    ) -> int:
        """Rows of the result."""
        dtype = self.spec.rows_dtype
        if dtype is None:
            for name, given in (("rows", rows), ("strays", strays)):
                if given is not None:
                    raise wrong(name, given, "nothing", "plan with rows_dtype=…, or leave it out")
            return height
        count = rows.numel() if isinstance(rows, torch.Tensor) else 0
        check_vector("rows", rows, count, (dtype,), device)
        check_vector("strays", strays, 1, (torch.int64,), device)
        return count

    def _run_here(
        self,
        x: torch.Tensor,
        gain: torch.Tensor,
        out: torch.Tensor,
        sumsq: torch.Tensor | None,
        rows: torch.Tensor | None,
    ) -> None:
        at = torch.arange(x.shape[0]) if rows is None else rows.long()
        live = at != PADDING
        outside = live & ((at < 0) | (at >= x.shape[0]))
        if bool(outside.any()):
            first = int(outside.nonzero()[0])
            require(
                False,
                "rows",
                f"{int(at[first])} at {first}",
                f"-1 or a row of x, 0 to {x.shape[0] - 1}",
                "give the index of each request's last token",
            )
        at = at[live]
        picked = x[at]
        sums = partial_sums(picked) if sumsq is None else sumsq[at]
        rstd = row_factor(sums, self.spec.hidden, self.spec.eps)
        factor = gain.float() + self.spec.offset if self.spec.offset else gain.float()
        out.zero_()
        out[live] = (picked.float() * rstd[:, None] * factor).to(out.dtype)
