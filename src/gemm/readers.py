"""Checking one operand of a launch and collecting what the kernel is told of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from epicute.epilogues.operands import Cells, cells_fix, per_row_fix
from epicute.errors import ArgumentError
from epicute.gemm.arguments import OperandSpec

__all__ = ["Reader", "reader", "wrong"]

Reader = Callable[[torch.Tensor, int, list[int]], None]
"""Takes the tensor, M, and the arguments so far, which it appends to."""


def wrong(name: str, given: Any, expected: str, fix: str) -> ArgumentError:
    got = "None" if given is None else type(given).__name__
    if isinstance(given, torch.Tensor):
        got = f"{tuple(given.shape)} {given.dtype}, strides {given.stride()}, on {given.device}"
    return ArgumentError(f"{name}: got {got}, expected {expected}. Fix: {fix}")


def reader(spec: OperandSpec) -> Reader:
    """A function that checks one operand and appends its fields."""
    if isinstance(spec.kind, Cells):
        return _cells_reader(spec)
    if "row_stride" in spec.fields:
        return _matrix_reader(spec)
    return _vector_reader(spec)


def _vector_reader(spec: OperandSpec) -> Reader:
    name, dtype = spec.name, spec.dtype
    length = None if spec.shape[0] == "M" else int(spec.shape[0])

    def read(given: torch.Tensor, rows: int, found: list[int]) -> None:
        wanted = rows if length is None else length
        if given.dtype is not dtype or given.shape != (wanted,):
            if given.dtype is not dtype or wanted != 1 or given.dim() != 0:
                one_for_all = length is None and given.shape in ((), (1,)) and given.dtype is dtype
                fix = per_row_fix(name) if one_for_all else _dtype_fix(name, given, dtype)
                raise wrong(name, given, f"({wanted},) {dtype}", fix)
        elif wanted > 1 and not given.is_contiguous():
            raise wrong(name, given, "adjacent elements", f"{name}.contiguous()")
        found.append(given.data_ptr())

    return read


def _dtype_fix(name: str, given: Any, dtype: torch.dtype) -> str:
    if isinstance(given, torch.Tensor) and given.dtype != dtype:
        return f"plan with dtypes={{{name!r}: {given.dtype}}}, or convert it"
    return "pass it with that shape"


def _matrix_reader(spec: OperandSpec) -> Reader:
    name, dtype, width = spec.name, spec.dtype, int(spec.shape[1])
    size, alignment = dtype.itemsize, spec.alignment

    def read(given: torch.Tensor, rows: int, found: list[int]) -> None:
        if given.dtype is not dtype or given.shape != (rows, width):
            raise wrong(name, given, f"({rows}, {width}) {dtype}", _dtype_fix(name, given, dtype))
        pitch, step = given.stride()
        if (step != 1 and width != 1 and rows) or (rows > 1 and pitch < width):
            raise wrong(name, given, "adjacent elements in rows apart", f"{name}.contiguous()")
        address, stride = given.data_ptr(), pitch * size
        if rows and (address % alignment or (rows > 1 and stride % alignment)):
            fix = f"plan with alignments={{{name!r}: {size}}}"
            raise wrong(name, given, f"rows at multiples of {alignment} bytes", fix)
        if rows == 1:  # its stride says nothing, and tensor maps want multiples of 16
            stride = -(-width * size // 16) * 16
        found += (address, stride)

    return read


def _cells_reader(spec: OperandSpec) -> Reader:
    name, dtype, (_, _, heads, dim) = spec.name, spec.dtype, spec.shape
    size, mask = dtype.itemsize, spec.alignment - 1

    def read(given: torch.Tensor, rows: int, found: list[int]) -> None:
        shape = given.shape
        if given.dtype is not dtype or len(shape) != 4 or shape[2] != heads or shape[3] != dim:
            wanted = f"(pages, page_size, {heads}, {dim}) {dtype}"
            raise wrong(name, given, wanted, cells_fix(name, tuple(shape), heads, dim))
        page, token, head, channel = given.stride()
        if channel != 1:
            raise wrong(name, given, "adjacent channels", "keep head_dim innermost")
        if (
            (page == 0 and shape[0] > 1)
            or (token == 0 and shape[1] > 1)
            or (head == 0 and heads > 1)
        ):
            raise wrong(name, given, "cells apart from each other", f"{name}.contiguous()")
        address, page, token, head = given.data_ptr(), page * size, token * size, head * size
        if (address | page | token | head) & mask:
            fix = f"plan with alignments={{{name!r}: {size}}}"
            raise wrong(name, given, f"cells at multiples of {mask + 1} bytes", fix)
        page_size = shape[1]
        if shape[0] * page_size >= 2**31:
            raise wrong(name, given, "fewer than 2**31 slots", "split the pool")
        found += (address, page, token, head, page_size, shape[0] * page_size)

    return read
