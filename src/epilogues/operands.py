"""Kinds of operands a policy can declare.

A kind says where an operand's elements stand relative to a value of the composition. M is the number of rows, n the
number of columns of the value the policy sees (N of the whole projection before ``Columns``, the range's width inside).

| kind | shape | one element per |
|---|---|---|
| ``Scalar`` | (1,) | call |
| ``RowVector`` | (n,) | column |
| ``ColumnVector`` | (M,) | row |
| ``PerHead`` | (heads,) | head of ``head_dim`` columns |
| ``HeadVector`` | (length,) | channel of a head, or pair of a head; the same for all heads |
| ``Matrix`` | (M, n) | value |
| ``Partials`` | (M, ceil(width / 64)) | 64 columns of a row; arrives as the row's sum, added left to right |
| ``Slots`` | (M,) int64 | row: where its cells go, negative to skip |
| ``Output`` | (M, n) | value, written |
| ``PartialsOutput`` | (M, ceil(n / over)) | group of ``over`` columns, written |
| ``Maximum`` | (1,) float32 | call; atomic maximum, never reset by the kernel |
| ``Counter`` | (1,) int64 | call; atomic addition, never reset by the kernel |
| ``Cells`` | (pages, page_size, heads, head_dim) | cache cell, written where ``Slots`` says |
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from math import inf
from typing import Any

import torch

from epicute.epilogues.values import OPERATIONS
from epicute.errors import CompositionError, require

__all__ = [
    "Cells",
    "ColumnVector",
    "Counter",
    "HeadVector",
    "Matrix",
    "Maximum",
    "Operand",
    "Output",
    "Partials",
    "PartialsOutput",
    "PerHead",
    "RowVector",
    "Scalar",
    "Slots",
    "as_operand",
    "cells_fix",
    "check_declared",
    "check_name",
    "check_number",
    "heads_of",
    "per_row_fix",
]

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
STORED = (*FLOATS, torch.float8_e4m3fn)
CELLS = (torch.bfloat16, torch.float16, torch.float8_e4m3fn)


@dataclass(frozen=True)
class Operand:
    """Base of all kinds. ``written`` kinds are outputs; ``shared`` ones keep one name across ``Columns``."""

    written = False
    dtypes: tuple[torch.dtype, ...] = FLOATS
    dtype: torch.dtype = torch.float32
    shared: bool = False

    def __post_init__(self) -> None:
        require(
            self.dtype in self.dtypes,
            f"{type(self).__name__}.dtype",
            self.dtype,
            f"one of {', '.join(map(str, self.dtypes))}",
            "choose a dtype of that list",
        )

    def __str__(self) -> str:
        shown = [
            f"{f.name}={getattr(self, f.name)}"
            for f in fields(self)
            if f.name not in ("dtypes", "shared", "dtype", "positive")
        ]
        return f"{type(self).__name__}({', '.join([*shown, str(self.dtype).split('.')[-1]])})"


@dataclass(frozen=True)
class Scalar(Operand):
    """One float32 on the device.

    ``positive``: it divides or scales, so that a Python number given for it must be finite and above 0. A tensor's
    value is never looked at, as that would wait for the device.
    """

    dtypes: tuple[torch.dtype, ...] = (torch.float32,)
    positive: bool = False


@dataclass(frozen=True)
class RowVector(Operand):
    """One value per column."""


@dataclass(frozen=True)
class ColumnVector(Operand):
    """One value per row; integers arrive as float32, exact up to 2**24."""

    dtypes: tuple[torch.dtype, ...] = (*FLOATS, torch.int32, torch.int64)
    shared: bool = True


@dataclass(frozen=True)
class PerHead(Operand):
    """One float32 per head of ``head_dim`` columns."""

    dtypes: tuple[torch.dtype, ...] = (torch.float32,)
    head_dim: int = 0


@dataclass(frozen=True)
class HeadVector(Operand):
    """``length`` values, one per channel (or pair) of a head, the same for every head."""

    length: int = 0


@dataclass(frozen=True)
class Matrix(Operand):
    """One value per element, read."""

    dtype: torch.dtype = torch.bfloat16


@dataclass(frozen=True)
class Partials(Operand):
    """Partial sums over 64 columns each of a tensor with ``width`` columns; delivers each row's sum."""

    dtypes: tuple[torch.dtype, ...] = (torch.float32,)
    width: int = 0
    shared: bool = True


@dataclass(frozen=True)
class Slots(Operand):
    """Cache slot of each row: page * page_size + token; negative rows are skipped."""

    dtypes: tuple[torch.dtype, ...] = (torch.int64,)
    dtype: torch.dtype = torch.int64
    shared: bool = True


@dataclass(frozen=True)
class Output(Operand):
    """A matrix the policy writes."""

    written = True
    dtypes: tuple[torch.dtype, ...] = STORED
    dtype: torch.dtype = torch.bfloat16


@dataclass(frozen=True)
class PartialsOutput(Operand):
    """One float32 per row and group of ``over`` columns, written."""

    written = True
    dtypes: tuple[torch.dtype, ...] = (torch.float32,)
    over: int = 64


@dataclass(frozen=True)
class Maximum(Operand):
    """A running maximum of non-negative float32 values."""

    written = True
    dtypes: tuple[torch.dtype, ...] = (torch.float32,)


@dataclass(frozen=True)
class Counter(Operand):
    """A running int64 count."""

    written = True
    dtypes: tuple[torch.dtype, ...] = (torch.int64,)
    dtype: torch.dtype = torch.int64


@dataclass(frozen=True)
class Cells(Operand):
    """A KV cache seen as (pages, page_size, heads, head_dim), channels adjacent; ``slots`` names the rows' slots."""

    written = True
    dtypes: tuple[torch.dtype, ...] = CELLS
    dtype: torch.dtype = torch.bfloat16
    head_dim: int = 0
    slots: str = "slots"


def check_number(name: str, kind: Operand, given: Any) -> None:
    """Refuse a Python number that ``kind`` cannot be; anything else passes."""
    if isinstance(kind, Scalar) and kind.positive and isinstance(given, (int, float)):
        require(
            0 < given < inf,
            name,
            given,
            "a finite number above 0, as codes are multiplied by it or values by its reciprocal",
            "give the largest magnitude to expect / 448",
        )


def per_row_fix(name: str) -> str:
    """What to write where one number came for an operand with one per row."""
    instead = "; for one scale of all rows write Dequantize('tensor')" if name == "scale" else ""
    return f"pass one per row, torch.full((M,), …){instead}"


def cells_fix(name: str, shape: tuple[int, ...], heads: Any, dim: Any) -> str:
    """How to view a cache of another layout."""
    if len(shape) == 4 and (shape[1], shape[3]) == (heads, dim):
        return f"heads stand before tokens (HND): pass {name}=cache.transpose(1, 2)"
    return "view the cache so (HND: cache.transpose(1, 2)), or give PlaceKV and the range the cache's heads"


def as_operand(kind: Operand | type[Operand]) -> Operand:
    """An instance of ``kind``, which may be the bare class."""
    found = kind() if isinstance(kind, type) and issubclass(kind, Operand) else kind
    require(
        isinstance(found, Operand),
        "operand kind",
        repr(kind),
        "Scalar, RowVector, ColumnVector, Matrix, Output, … or an instance of one",
        "import a kind from epicute.epilogues",
    )
    return found


RESERVED = frozenset(
    (
        *("total", "largest", "mean", "as_kept"),
        *("store", "partials", "record_max", "count", "place", "placed"),
    )
)
"""Names of ``ctx`` beside the operations."""

ARGUMENTS = frozenset(("self", "acc", "x", "packed", "epilogue", "composition", "accumulate"))
"""Arguments of ``linear``, ``Plan.run``, ``evaluate`` and their like, next to which operands are bound by name."""


def check_name(title: str, name: str) -> None:
    """Refuse an operand of the policy ``title`` whose name means something else in a body or a call."""
    require(
        name not in OPERATIONS and name not in RESERVED and not name.startswith("_"),
        f"{title}: operand",
        name,
        "a name that is no operation of ctx and has no leading underscore",
        f"rename it, e.g. {name.strip('_')}_values",
        CompositionError,
    )
    require(
        name not in ARGUMENTS,
        f"{title}: operand",
        name,
        "a name that is no argument of linear, run or evaluate, which bind operands by name",
        f"rename it, e.g. {name}_values",
        CompositionError,
    )


SIZES = ("head_dim", "length", "width", "over")
"""Fields of kinds that say how wide something is; none may be left at 0."""


def check_declared(title: str, kinds: Mapping[str, Operand], over: int) -> None:
    """Refuse operands that the policy ``title``, which reduces over ``over`` columns, cannot have."""
    for name, kind in kinds.items():
        check_name(title, name)
        for size in SIZES:
            require(
                getattr(kind, size, 1) > 0,
                f"{title}: operand {name!r}",
                f"{kind}",
                f"a positive {size}",
                f"declare {name}={type(kind).__name__}({size}=…)",
                CompositionError,
            )
        require(
            not isinstance(kind, PartialsOutput) or kind.over == over,
            f"{title}: operand {name!r}",
            f"{kind} in a policy that reduces over {over} columns",
            "one value per group of the policy",
            "give the policy and the operand the same over",
            CompositionError,
        )
        require(
            not isinstance(kind, Cells) or isinstance(kinds.get(kind.slots), Slots),
            f"{title}: operand {name!r}",
            f"{kind} without an operand {getattr(kind, 'slots', '')!r}",
            "the slots of its rows",
            f"declare {getattr(kind, 'slots', '')}=Slots",
            CompositionError,
        )


def heads_of(kinds: Mapping[str, Operand]) -> int:
    """Width of the heads that operands speak of, 0 where none does."""
    found = {k.head_dim for k in kinds.values() if isinstance(k, (PerHead, Cells))}
    require(
        len(found) <= 1,
        "operands",
        f"heads of {' and of '.join(map(str, sorted(found)))}",
        "one head dimension in a policy",
        "give all of them the same head_dim",
        CompositionError,
    )
    return found.pop() if found else 0
