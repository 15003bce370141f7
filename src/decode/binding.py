"""Checking x and the operands of a launch, and collecting what the kernel is told of them."""

from __future__ import annotations

from typing import Any

import torch

from epicute.gemm.arguments import ArgumentLayout
from epicute.gemm.plan import x_fix
from epicute.gemm.readers import reader, wrong

__all__ = ["Operands"]

Span = tuple[int, int, int]
"""Address, bytes from row to row, bytes of a row."""


class Operands:
    """What a launch takes beside the weight."""

    def __init__(self, layout: ArgumentLayout, dtype: torch.dtype, depth: int, gain: bool) -> None:
        self._dtype, self._depth, self._gain = dtype, depth, gain
        self._readers = [(s, reader(s)) for s in layout.operands]
        self._widths = {
            s.name: int(s.shape[1]) * s.dtype.itemsize
            for s in layout.operands
            if s.fields == ("address", "row_stride")
        }

    def bind(self, x: torch.Tensor, gain: Any, operands: dict[str, Any]) -> list[int]:
        """The arguments of a launch, that of the clusters still open.

        Raises ArgumentError, naming the operand.
        """
        rows, stride = self._check_x(x)
        self._check_gain(x, gain)
        found = [x.data_ptr(), stride, rows, 0]
        for spec, read in self._readers:
            given = operands.get(spec.name)
            if not isinstance(given, torch.Tensor) or given.device != x.device:
                fix = "allocate it" if spec.kind.written else f"make it a tensor on {x.device}"
                raise wrong(spec.name, given, f"a tensor on {x.device}", fix)
            read(given, rows, found)
        if rows:
            self._check_apart(found, operands, (found[0], stride, self._depth * 2))
        return found

    def _check_x(self, x: torch.Tensor) -> tuple[int, int]:
        """(M, bytes from row to row)."""
        depth = self._depth
        if x.dtype != self._dtype or x.dim() != 2 or x.shape[1] != depth:
            expected = f"(M, {depth}) {self._dtype}"
            raise wrong("x", x, expected, x_fix(x, self._dtype, depth))
        rows, (pitch, step) = x.shape[0], x.stride()
        stride = pitch * 2 if rows > 1 else -(-depth * 2 // 16) * 16
        adjacent = step == 1 or depth == 1 or rows == 0
        if not adjacent or stride % 16 or x.data_ptr() % 16 or (rows > 1 and pitch < depth):
            expected = "rows of adjacent elements that start at multiples of 16 bytes"
            raise wrong("x", x, expected, "x = epicute.align_rows(x)")
        return rows, stride

    def _check_gain(self, x: torch.Tensor, gain: Any) -> None:
        if not self._gain:
            if gain is not None:
                fix = "plan with norm_gain=True, or fold the gain into the weight"
                raise wrong("norm_gain", gain, "nothing, as planned", fix)
            return
        fits = (
            isinstance(gain, torch.Tensor)
            and gain.dtype == torch.float32
            and tuple(gain.shape) == (self._depth,)
            and gain.is_contiguous()
            and gain.device == x.device
            and gain.data_ptr() % 16 == 0
        )
        if not fits:
            expected = (
                f"({self._depth},) float32 on {x.device}, adjacent, at a multiple of 16 bytes"
            )
            raise wrong("norm_gain", gain, expected, "gain.float().contiguous(), the offset added")

    def _check_apart(self, found: list[int], operands: dict[str, Any], x: Span) -> None:
        """Refuse an output that shares memory with x or with another matrix, but for the very matrix that is read."""
        rows = found[2]
        matrices: list[tuple[str, bool, Span]] = [("x", False, x)]
        for spec, _ in self._readers:
            first = found[spec.first]
            if spec.name in self._widths:
                span = (first, found[spec.first + 1], self._widths[spec.name])
                matrices.append((spec.name, spec.kind.written, span))
            elif spec.kind.written and x[0] <= first < x[0] + (rows - 1) * x[1] + x[2]:
                raise _overlapping(spec.name, operands[spec.name], "x")
        for i, (name, written, one) in enumerate(matrices):
            for other, also, two in matrices[:i]:
                if not (written or also) or not _share(one, two, rows):
                    continue
                if one == two and other != "x" and written != also:
                    continue
                raise _overlapping(name, operands[name], other)


def _share(one: Span, two: Span, rows: int) -> bool:
    """Whether two matrices share any byte; columns of one buffer need not."""
    (a, a_step, a_width), (b, b_step, b_width) = one, two
    if a >= b + (rows - 1) * b_step + b_width or b >= a + (rows - 1) * a_step + a_width:
        return False
    return a_step != b_step or not b_width <= (a - b) % b_step <= b_step - a_width


def _overlapping(name: str, given: torch.Tensor, other: str) -> Any:
    return wrong(name, given, f"memory apart from {other}", f"allocate it apart from {other}")
