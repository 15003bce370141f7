"""How operands reach the kernel: a flat tuple of 64-bit integers, addresses and strides in bytes.

The device code knows every operand's place in the tuple, its dtype and the alignment it may assume; the host code
checks that the tensors keep those promises before it launches.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import gcd

import torch

from epicute.epilogues.operands import Cells, Matrix, Operand, Output, Partials, PartialsOutput
from epicute.epilogues.resolve import Resolved
from epicute.errors import require

__all__ = ["HEAD", "ArgumentLayout", "OperandSpec"]

HEAD = ("a", "a_stride", "rows", "clusters")
"""What every launch passes first: address and row stride of A in bytes, M, clusters to launch."""

VECTOR = 16
"""Bytes of the widest load or store of one thread."""


@dataclass(frozen=True)
class OperandSpec:
    """One operand as compiled for: its fields start at ``first`` in the tuple.

    ``alignment``: bytes that the address and every stride but the last are multiples of.
    """

    name: str
    kind: Operand
    dtype: torch.dtype
    shape: tuple[int | str, ...]
    alignment: int
    first: int

    @property
    def fields(self) -> tuple[str, ...]:
        """What the tuple holds of the operand."""
        if isinstance(self.kind, Cells):
            return (
                "address",
                "page_stride",
                "token_stride",
                "head_stride",
                "page_size",
                "capacity",
            )
        if isinstance(self.kind, (Matrix, Output, Partials, PartialsOutput)):
            return ("address", "row_stride")
        return ("address",)

    def at(self, field: str) -> int:
        """Index of ``field`` in the tuple."""
        return self.first + self.fields.index(field)


@dataclass(frozen=True)
class ArgumentLayout:
    """All operands of a composition, sorted by name."""

    operands: tuple[OperandSpec, ...]

    @staticmethod
    def of(
        resolved: Resolved,
        dtypes: Mapping[str, torch.dtype] | None = None,
        alignments: Mapping[str, int] | None = None,
    ) -> ArgumentLayout:
        """Lay out the operands of ``resolved``.

        Args:
            resolved: the composition for its N.
            dtypes: dtypes other than the kinds' own, by operand name.
            alignments: bytes (a power of two up to 16) to assume of matrices and cells whose rows are not
                contiguous multiples of 16 bytes.
        """
        given = {**(dtypes or {})}
        stated = {**(alignments or {})}
        for name in (*given, *stated):
            require(
                name in resolved.kinds,
                "dtypes" if name in given else "alignments",
                f"operand {name!r}",
                f"one of {', '.join(resolved.kinds)}",
                "check the spelling",
            )
        found, first = [], len(HEAD)
        for name in sorted(resolved.kinds):
            kind = resolved.kinds[name]
            dtype = given.get(name, kind.dtype)
            require(
                dtype in kind.dtypes and (not kind.written or dtype == kind.dtype),
                f"dtypes[{name!r}]",
                dtype,
                f"{kind.dtype}" if kind.written else ", ".join(map(str, kind.dtypes)),
                "convert the operand" if not kind.written else "set the dtype in the policy",
            )
            shape = resolved.shapes[name]
            alignment = stated.get(name, _natural(kind, dtype, shape))
            require(
                alignment in (1, 2, 4, 8, 16) and alignment >= dtype.itemsize,
                f"alignments[{name!r}]",
                alignment,
                f"a power of two from {dtype.itemsize} to 16",
                "give bytes",
            )
            spec = OperandSpec(name, kind, dtype, shape, alignment, first)
            first += len(spec.fields)
            found.append(spec)
        return ArgumentLayout(tuple(found))

    @property
    def count(self) -> int:
        """Length of the tuple."""
        return len(HEAD) + sum(len(spec.fields) for spec in self.operands)

    def __getitem__(self, name: str) -> OperandSpec:
        return next(spec for spec in self.operands if spec.name == name)

    def key(self) -> tuple[tuple[str, str, str, int], ...]:
        """Share of the compile key."""
        return tuple((s.name, str(s.kind), str(s.dtype), s.alignment) for s in self.operands)


def _natural(kind: Operand, dtype: torch.dtype, shape: tuple[int | str, ...]) -> int:
    """Alignment of a contiguous tensor of that shape from torch's allocator."""
    if isinstance(kind, (Matrix, Output, Cells)):
        width = shape[-1]
        assert isinstance(width, int)
        return gcd(VECTOR, width * dtype.itemsize)
    return dtype.itemsize
