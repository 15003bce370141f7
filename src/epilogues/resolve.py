"""What a composition means for a projection of N columns: row order, and for each range the steps of its chain.

Both interpreters walk the same ``Step``s. A ``Domain`` says which columns a value holds: before a pair is consumed all
of the range's, afterwards half of them. ``groups`` say which of a unit's columns one quad lane holds.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from math import lcm
from typing import Any

import torch

from epicute.epilogues.arithmetic import Dequantize
from epicute.epilogues.composition import Composition, bound_name, kept_dtype
from epicute.epilogues.operands import (
    Cells,
    HeadVector,
    Matrix,
    Operand,
    Output,
    Partials,
    PartialsOutput,
    PerHead,
    RowVector,
)
from epicute.epilogues.operands import ColumnVector as _ColumnVector
from epicute.epilogues.operands import Slots as _Slots
from epicute.epilogues.policy import Pairwise, Policy, Reducing
from epicute.errors import CompositionError, UnsupportedError, require
from epicute.layouts.row_order import Piece, Range, RowOrder

__all__ = ["Domain", "Resolved", "ResolvedRange", "Split", "Step", "resolve"]

LARGEST_UNIT = 256


@dataclass(frozen=True)
class Domain:
    """Columns of a value.

    Attributes:
        columns: logical columns in the range.
        unit: columns per unit, "slots".
        halves: the unit's slots are first members, then second ones.
        groups: (first slot, lanes): quad lane t holds slots ``first + lanes * t`` … for each group.
    """

    columns: int
    unit: int
    halves: bool
    groups: tuple[tuple[int, int], ...]

    def column(self, index: Any, slot: Any) -> Any:
        """Logical column at ``slot`` of unit ``index``; where ``remaining`` is not positive it is padding."""
        return self.origin(index) + self.offset(slot)

    def origin(self, index: Any) -> Any:
        """Column of the first slot of unit ``index``."""
        return index * (self.unit // 2 if self.halves else self.unit)

    def offset(self, slot: Any) -> Any:
        """Columns from a unit's first slot to ``slot``, the same in every unit."""
        if not self.halves:
            return slot
        half = self.unit // 2
        return slot % half + slot // half * (self.columns // 2)

    def remaining(self, index: Any, slot: Any) -> Any:
        """Columns of the slot's stream from that slot on, none or negative where it is padding.

        None where no slot of any unit is padding.
        """
        half = self.unit // 2 if self.halves else self.unit
        columns = self.columns // 2 if self.halves else self.columns
        if columns % half == 0:
            return None
        return columns - (index * half + slot % half)


@dataclass(frozen=True)
class Split:
    """How a value's lanes fall into pairs: lane numbers of first and second members, and of the rest."""

    first: tuple[int, ...]
    second: tuple[int, ...]
    rest: tuple[int, ...]
    domain: Domain


@dataclass(frozen=True)
class Step:
    """One policy at its place in a chain.

    Attributes:
        names: operand names as the body spells them to the names they are bound by.
        domain: the columns of the value that enters; ``after`` of the one that leaves.
        split: pairs of a ``Pairwise``.
        first_column: where the range starts in the policy's column operands.
        kept: the dtype ``ctx.as_kept`` rounds to.
    """

    policy: Policy
    names: Mapping[str, str]
    domain: Domain
    after: Domain
    split: Split | None
    first_column: int
    kept: torch.dtype


@dataclass(frozen=True)
class Block:
    """Lanes that the rest of a chain needs together, and that rest on them: a piece alone, or two that pair."""

    lanes: tuple[int, ...]
    steps: tuple[Step, ...]


@dataclass(frozen=True)
class ResolvedRange:
    """A column range with its order and steps.

    Attributes:
        first_unit: units of the packed weight before the range; units: its own. first_column: logical.
        pieces: what a quad lane holds of a unit.
        steps: the whole chain on a unit.
        head: the chain up to its last policy that reduces over columns; runs on a unit at once.
        blocks: the rest of the chain, on parts of the unit. The kernel finishes one block before it starts the next,
            which keeps few registers alive.
    """

    name: str
    range: Range
    first_unit: int
    units: int
    first_column: int
    pieces: tuple[Piece, ...]
    steps: tuple[Step, ...]
    head: tuple[Step, ...]
    blocks: tuple[Block, ...]


@dataclass(frozen=True)
class Resolved:
    """A composition for N columns."""

    composition: Composition
    order: RowOrder
    ranges: tuple[ResolvedRange, ...]
    shapes: Mapping[str, tuple[int | str, ...]]

    @property
    def columns(self) -> int:
        """N."""
        return self.order.columns

    @property
    def kinds(self) -> Mapping[str, Operand]:
        """Operand kinds by bound name."""
        return self.composition.operands


@lru_cache(maxsize=256)
def resolve(composition: Composition, columns: int) -> Resolved:
    """Resolve ``composition`` for a projection of ``columns`` output features."""
    composition.complete()
    branches = list(composition.branches())
    widths = [columns if width is None else width for _, width, _ in branches]
    require(
        sum(widths) == columns,
        "Columns widths",
        f"{' + '.join(map(str, widths))} = {sum(widths)}",
        f"N = {columns}",
        "make the ranges cover the projection",
    )
    forms = [_form(policies) for _, _, policies in branches]
    unit = _unit([(form, policies) for form, (_, _, policies) in zip(forms, branches, strict=True)])
    ranges = tuple(_range(width, form) for width, form in zip(widths, forms, strict=True))
    order = RowOrder(ranges, unit)
    shared = len(composition.policies)
    found = []
    for (name, _, policies), span, (row, column) in zip(
        branches, ranges, order.starts(), strict=True
    ):
        split_at = shared if composition.columns else 0
        chain = _Chain(policies, span, unit, name, column, split_at)
        pieces, units = span.pieces(unit), span.rows(unit) // unit
        steps = chain.steps(pieces)
        first = _reduced(policies)
        blocks = tuple(
            Block(lanes, chain.steps(some)[first:]) for some, lanes in _parts(pieces, steps[first:])
        )
        resolved = (row // unit, units, column, pieces, steps, steps[:first], blocks)
        found.append(ResolvedRange(name, span, *resolved))
    return Resolved(composition, order, tuple(found), _shapes(found, columns, shared, composition))


def _form(policies: tuple[Policy, ...]) -> Any:
    return Composition(policies).form


def _range(width: int, form: Any) -> Range:
    if form.kind == "heads":
        require(
            width % form.head_dim == 0,
            f"{form.decided_by}",
            f"{width} columns, heads of {form.head_dim}",
            "whole heads",
            "give a width that is a multiple of head_dim",
            CompositionError,
        )
        return Range("heads", width, form.head_dim, form.rotary_dim)
    return Range(form.kind or "single", width)


def _unit(branches: list[tuple[Any, tuple[Policy, ...]]]) -> int:
    """Physical rows that must meet in one tile: pairs, heads and reduction groups of every range."""
    unit = 1
    reasons = []
    for form, policies in branches:
        smallest = {"halves": 64, "heads": form.head_dim, None: 32}[form.kind]
        unit = lcm(unit, smallest)
        reasons.append(f"{form.decided_by or 'chunks'} {smallest}")
        for policy in policies:
            if isinstance(policy, Reducing) and policy.over:
                demand = policy.over * (2 if form.kind == "halves" else 1)
                unit = lcm(unit, demand)
                reasons.append(f"{policy.title} {demand}")
    require(
        unit <= LARGEST_UNIT,
        "composition",
        f"a unit of {unit} columns ({', '.join(reasons)})",
        f"at most {LARGEST_UNIT}, a tile's width",
        "put the policies into projections of their own, or use a narrower group",
        UnsupportedError,
    )
    return unit


def _reduced(policies: tuple[Policy, ...]) -> int:
    """How many policies stand up to and with the last one that reduces over columns."""
    reduces = [isinstance(p, Reducing) and p.over > 0 for p in policies]
    return len(policies) - reduces[::-1].index(True) if any(reduces) else 0


def _parts(
    pieces: tuple[Piece, ...], rest: tuple[Step, ...]
) -> Iterator[tuple[tuple[Piece, ...], tuple[int, ...]]]:
    """Pieces that the rest of a chain needs together, and their lanes in the value it starts from."""
    if not rest:
        return
    left = [p for p in pieces if len(rest[0].domain.groups) == len(pieces) or p.member != 1]
    lanes: dict[Piece, range] = {}
    count = 0
    for piece in left:
        lanes[piece] = range(count, count + piece.lanes)
        count += piece.lanes
    seconds = {piece.pair: piece for piece in pieces if piece.member == 1}
    for piece in pieces:
        if piece.member != 1:
            some = (piece, seconds[piece.pair]) if piece.member == 0 else (piece,)
            yield some, tuple(i for p in some for i in lanes.get(p, ()))


@dataclass(frozen=True)
class _Chain:
    """The policies of a range and where it stands."""

    policies: tuple[Policy, ...]
    span: Range
    unit: int
    name: str
    column: int
    shared: int

    def steps(self, pieces: tuple[Piece, ...]) -> tuple[Step, ...]:
        """The chain on the lanes of ``pieces``."""
        span, unit = self.span, self.unit
        groups = tuple((p.column, p.lanes) for p in pieces)
        domain = Domain(span.columns, unit, span.kind == "halves", groups)
        found = []
        for i, policy in enumerate(self.policies):
            inside = i >= self.shared
            prefix = self.name if inside else ""
            names = {n: bound_name(policy, n, k, prefix) for n, k in policy.operands.items()}
            if isinstance(policy, Dequantize):
                self._check_whole(policy, domain)
            if isinstance(policy, Reducing) and policy.over:
                self._check_starts(policy, domain, 0 if inside else self.column)
                _check_last(policy, domain.columns)
            split = self._split(policy, pieces, domain) if isinstance(policy, Pairwise) else None
            after = split.domain if split and policy.consumes else domain  # type: ignore[attr-defined]
            if isinstance(policy, Reducing) and policy.over:
                _check_groups(policy, domain)
            kept = kept_dtype(self.policies, i) or torch.float32
            first = 0 if inside else self.column
            found.append(Step(policy, names, domain, after, split, first, kept))
            domain = after
        return tuple(found)

    def _check_starts(self, policy: Reducing, domain: Domain, column: int) -> None:
        """Groups are counted from column 0 of what the policy sees: none may reach into the next range or stream."""
        half = domain.columns // 2 if domain.halves else 0
        range_starts = (column, f"range {self.name!r} from column {column}")
        for start, what in (range_starts, (half, f"halves of {half} columns")):
            require(
                start % policy.over == 0,
                f"{policy.title}",
                f"{what}, groups of {policy.over}",
                "whole groups in each",
                f"move {policy.title} behind the pair or into the range, or pad",
                CompositionError,
            )

    def _check_whole(self, policy: Dequantize, domain: Domain) -> None:
        """A weight's scales belong to its output features, before any two of them became one."""
        halving = next((p.title for p in self.policies if getattr(p, "consumes", False)), "")
        require(
            domain.columns == self.span.columns or policy.weight != "column",
            f"{halving} >> {policy.title}",
            f"a scale per weight column on {domain.columns} values, after {halving} made one of two",
            f"the scales of all {self.span.columns} columns",
            f"put {policy.title} first: {policy.title}(…) >> {halving}(…)",
            CompositionError,
        )

    def _split(self, policy: Pairwise, pieces: tuple[Piece, ...], domain: Domain) -> Split:
        if policy.pairs == "interleaved":
            return _interleaved(policy, domain)
        lanes: dict[int | None, list[int]] = {0: [], 1: [], None: []}
        count = 0
        for piece in pieces:
            lanes[piece.member] += range(count, count + piece.lanes)
            count += piece.lanes
        groups = tuple((p.pair, p.lanes) for p in pieces if p.member == 0 and p.pair is not None)
        paired = policy.rotary_dim / policy.head_dim if policy.head_dim else 1
        inside = _pair_domain(domain, paired, groups)
        return Split(tuple(lanes[0]), tuple(lanes[1]), tuple(lanes[None]), inside)


def _pair_domain(domain: Domain, paired: float, groups: tuple[tuple[int, int], ...]) -> Domain:
    """The domain of the pairs, where the share ``paired`` of the columns is paired."""
    columns, unit = (round(n * paired) // 2 for n in (domain.columns, domain.unit))
    return Domain(columns, unit, False, groups)


def _interleaved(policy: Pairwise, domain: Domain) -> Split:
    head, rotary = policy.head_dim, policy.rotary_dim
    first: list[int] = []
    second: list[int] = []
    rest: list[int] = []
    groups: list[tuple[int, int]] = []
    count = 0
    for slot, lanes in domain.groups:
        start, end = slot % head, slot % head + 4 * lanes
        require(
            end <= rotary or start >= rotary,
            f"{policy.title}.rotary_dim",
            rotary,
            f"a multiple of 32, or head_dim={head}, where pairs are interleaved",
            "round the rotary dimension up with zero frequencies",
            UnsupportedError,
        )
        span = range(count, count + lanes)
        if end <= rotary:
            first += span[0::2]
            second += span[1::2]
            groups.append((slot // head * (rotary // 2) + start // 2, lanes // 2))
        else:
            rest += span
        count += lanes
    inside = _pair_domain(domain, rotary / head, tuple(groups))
    return Split(tuple(first), tuple(second), tuple(rest), inside)


def _check_groups(policy: Reducing, domain: Domain) -> None:
    """A group's columns must be whole pieces, as lanes reduce their own columns first.

    Sums that are written keep one order whatever the chain: that of chunks of 32, eight columns a lane.
    """
    writes = any(isinstance(kind, PartialsOutput) for kind in policy.operands.values())
    for slot, lanes in domain.groups:
        require(
            not writes or lanes == 8,
            f"{policy.title}",
            f"chunks of {4 * lanes} columns",
            "chunks of 32, whose order of addition is part of what is written",
            "put it before the rotation, or rotate a multiple of 64 channels",
            UnsupportedError,
        )
        require(
            slot // policy.over == (slot + 4 * lanes - 1) // policy.over,
            f"{policy.title}.over",
            policy.over,
            "a width that holds whole chunks of 32 columns (or a whole head)",
            "reduce over 32, 64, 128 or head_dim columns",
            UnsupportedError,
        )


def _check_last(policy: Reducing, columns: int) -> None:
    """A last group that is not whole is refused unless the policy says that it knows."""
    left = columns % policy.over
    require(
        policy.ragged or not left,
        f"{policy.title}",
        f"{columns} columns in groups of {policy.over}, the last of which has {left}",
        "whole groups, as a body may count on",
        f"use a multiple of {policy.over}, or say ragged=True beside over={policy.over} and write ctx.mean(x) for "
        "a mean: total, mean and largest are of the columns that there are",
        CompositionError,
    )


def _shapes(
    ranges: list[ResolvedRange], columns: int, shared: int, composition: Composition
) -> dict[str, tuple[int | str, ...]]:
    """Shape of every operand by bound name; "M" stands for the rows."""
    found: dict[str, tuple[int | str, ...]] = {}
    for span in ranges:
        for i, step in enumerate(span.steps):
            before = composition.columns is not None and i < shared
            inside = step.split.domain if step.split else step.domain
            width = columns if before else inside.columns
            for local, kind in step.policy.operands.items():
                found[step.names[local]] = _shape(kind, width)
    return found


def _shape(kind: Operand, width: int) -> tuple[int | str, ...]:
    if isinstance(kind, RowVector):
        return (width,)
    if isinstance(kind, (_ColumnVector, _Slots)):
        return ("M",)
    if isinstance(kind, PerHead):
        return (width // kind.head_dim,)
    if isinstance(kind, HeadVector):
        return (kind.length,)
    if isinstance(kind, (Matrix, Output)):
        return ("M", width)
    if isinstance(kind, Partials):
        return ("M", -(-kind.width // 64))
    if isinstance(kind, PartialsOutput):
        return ("M", -(-width // kind.over))
    if isinstance(kind, Cells):
        return ("pages", "page_size", width // kind.head_dim, kind.head_dim)
    return (1,)
