"""Accumulators and operands for any composition, drawn by what kind each operand is.

Read operands arrive in their kind's dtype, so that the policy and its reference start from the same
values.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st

from epicute.epilogues import (
    Cells,
    ColumnVector,
    Composition,
    Counter,
    Matrix,
    Maximum,
    Operand,
    Output,
    Partials,
    PartialsOutput,
    PerHead,
    Scalar,
    Slots,
)
from epicute.epilogues.resolve import resolve
from epicute.errors import EpicuteError, require
from epicute.testing import strategies

__all__ = ["Case", "Ranges", "cases", "check_ranges", "legal_columns"]

PAGE_SIZE = 16
CANDIDATES = (8, 16, 24, 32, 64, 72, 96, 128, 160, 192, 200, 256, 320)
"""Column counts that are tried where the caller names none."""

COMPILED = (72, 96, 160, 192, 200, 256)
"""Column counts that are tried where each costs a compile; two of them are used."""

SMALLEST_FACTOR = 2.0**-60
"""Factors of rows and columns are at least that large, or 0: smaller ones leave float32's range when a policy
multiplies two of them first, which tells of the format and not of the policy.
"""

Draw = Callable[[tuple[int, ...]], st.SearchStrategy[Any]]


@dataclass(frozen=True)
class Ranges:
    """What values are drawn from.

    Attributes:
        limit: magnitude of accumulators and operands.
        non_finite: whether accumulators may hold NaN and infinities.
        exact: accumulators are BF16 values, which a product with the identity reproduces exactly.
        rows: most rows.
        operands: strategies of the caller's own, by bound operand name, as functions of the shape.
    """

    limit: float = 64.0
    non_finite: bool = False
    exact: bool = False
    rows: int = 33
    operands: Mapping[str, Draw] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class Case:
    """One drawn evaluation: ``acc`` (M, N) float32 and the operands by name, running outputs' start
    values included.
    """

    acc: torch.Tensor
    operands: dict[str, torch.Tensor]

    def __repr__(self) -> str:
        shapes = ", ".join(f"{n}={_short(x)}" for n, x in self.operands.items())
        return f"Case(acc={_short(self.acc)}{', ' if shapes else ''}{shapes})"

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        """hypothesis prints dataclasses field by field unless told otherwise."""
        printer.text(repr(self))


def _short(x: torch.Tensor) -> str:
    shape = "x".join(map(str, x.shape))
    flat = x.reshape(-1).to(torch.float64)
    if flat.numel() and bool((flat == flat[0]).all()):
        return f"<{shape} of {flat[0]:g}>"
    values = ", ".join(f"{v:.6g}" for v in flat[:6].tolist())
    return f"<{shape}: {values}{', ...' if flat.numel() > 6 else ''}>"


def check_ranges(composition: Composition, ranges: Ranges) -> None:
    """Refuse strategies for operands that are not drawn."""
    kinds = composition.operands.items()
    drawn = [name for name, kind in kinds if not isinstance(kind, Output | PartialsOutput)]
    unknown = [name for name in ranges.operands if name not in drawn]
    require(
        not unknown,
        "ranges.operands",
        ", ".join(unknown),
        f"operands that are drawn: {', '.join(drawn) or 'none here'}",
        "name the operands as the composition binds them",
    )


def legal_columns(
    composition: Composition,
    wanted: int | Sequence[int] | None,
    compiled: bool = False,
    most: int | None = None,
) -> list[int]:
    """Column counts the composition accepts, out of ``wanted`` or of a standard list.

    ``compiled``: each costs a compile, so that the standard list is short, and has none above ``most``.

    Raises:
        ArgumentError: none of them, with the composition's own reason.
    """
    require(
        wanted is None or (isinstance(wanted, int | Sequence) and not isinstance(wanted, str)),
        "columns",
        repr(wanted),
        "a number of columns, or a list of such",
        "pass columns=[64, 128]",
    )
    if isinstance(wanted, int):
        wanted = [wanted]
    if wanted is None and composition.columns is not None:
        wanted = [composition.columns.width]
    found, reason = [], ""
    standard = tuple(sorted({*CANDIDATES, *_of_groups(composition)}))
    if compiled:
        standard = tuple(n for n in COMPILED if most is None or n <= most) or (most or 0,)
    tried = list(standard if wanted is None else wanted)
    for count in tried:
        require(
            isinstance(count, int) and count > 0,
            "columns",
            repr(count),
            "positive whole numbers",
            "pass columns=[64, 128]",
        )
        try:
            resolve(composition, count)
            found.append(count)
        except EpicuteError as error:
            reason = str(error)
    require(
        bool(found),
        "columns",
        tried,
        f"a count the composition accepts ({reason})",
        "pass columns=[…]",
    )
    return found[:2] if compiled and wanted is None else found


def _of_groups(composition: Composition) -> set[int]:
    """Multiples of the groups that policies reduce over, which may be none of the standard list."""
    policies = [policy for _, _, chain in composition.branches() for policy in chain]
    return {n * over for policy in policies for n in (1, 3) if (over := getattr(policy, "over", 0))}


def _scales() -> st.SearchStrategy[float]:
    """Positive multipliers: mostly powers of two, so that a format's edge is met exactly."""
    powers = st.integers(-6, 6).map(lambda e: 2.0**e)
    return st.one_of(powers, st.sampled_from([0.3, 1.7, 0.011]))


@st.composite
def _uniform_scales(draw: st.DrawFn, count: int) -> torch.Tensor:
    values = draw(st.lists(_scales(), min_size=count, max_size=count))
    return torch.tensor(values, dtype=torch.float32)


@st.composite
def _operand(
    draw: st.DrawFn, kind: Operand, shape: tuple[int, ...], capacity: int, ranges: Ranges
) -> torch.Tensor:
    if isinstance(kind, Scalar | PerHead):
        return draw(_uniform_scales(shape[0]))
    if isinstance(kind, Slots):
        return draw(strategies.slots(shape[0], capacity, beyond=True))
    if isinstance(kind, ColumnVector) and not kind.dtype.is_floating_point:
        return draw(strategies.positions(shape[0], dtype=kind.dtype))
    if isinstance(kind, Maximum):
        return torch.tensor([draw(st.sampled_from([0.0, 3.0]))])
    if isinstance(kind, Counter):
        return torch.tensor([draw(st.sampled_from([0, 5]))], dtype=torch.int64)
    if isinstance(kind, Cells):
        before = draw(st.sampled_from([0.0, 7.0]))
        return torch.full(shape, before).to(kind.dtype)
    limit = 1.0 if kind.shared and not isinstance(kind, ColumnVector | Partials) else ranges.limit
    values = draw(strategies.matrices(shape, limit=limit, spread=2))
    if isinstance(kind, Partials):
        values = values * values
    if not isinstance(kind, Matrix):
        values = np.where(np.abs(values) < SMALLEST_FACTOR, 0.0, values).astype(values.dtype)
    return torch.from_numpy(values).to(kind.dtype)


@st.composite
def cases(
    draw: st.DrawFn, composition: Composition, columns: Sequence[int], ranges: Ranges
) -> Case:
    """A ``Case`` with ragged M and N out of ``columns`` (see ``legal_columns``)."""
    count, width = draw(strategies.rows(ranges.rows)), draw(st.sampled_from(list(columns)))
    values = draw(
        strategies.matrices((count, width), limit=ranges.limit, non_finite=ranges.non_finite)
    )
    acc = torch.from_numpy(np.array(values))
    if ranges.exact:
        acc = acc.to(torch.bfloat16).to(torch.float32)
    pages = draw(st.integers(1, 3))
    sizes: dict[str, int] = {"M": count, "pages": pages, "page_size": PAGE_SIZE}
    resolved = resolve(composition, width)
    found = {}
    for name, kind in resolved.kinds.items():
        if isinstance(kind, Output | PartialsOutput):
            continue
        shape = tuple(sizes[d] if isinstance(d, str) else d for d in resolved.shapes[name])
        if name in ranges.operands:
            found[name] = torch.as_tensor(draw(ranges.operands[name](shape)))
        else:
            found[name] = draw(_operand(kind, shape, pages * PAGE_SIZE, ranges))
    return Case(acc, found)
