"""Compositions: policies in the order in which they run, and column ranges with chains of their own.

>>> print(Dequantize() >> SwiGLU() >> EmitFP8())
acc (M, N)
 ├─ Dequantize(activation=tensor, weight=column)    scale, weight_scale
 ├─ SwiGLU(alpha=1.0)    columns: n → n/2
 └─ EmitFP8()    out_scale → out_fp8, amax, saturated, nans
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from epicute.epilogues.fields import check_constant
from epicute.epilogues.form import Form
from epicute.epilogues.operands import Operand, Output
from epicute.epilogues.policy import Policy, Tap
from epicute.errors import ArgumentError, CompositionError, require
from epicute.jit.key import encode

if TYPE_CHECKING:
    import torch

    from epicute.layouts.row_order import RowOrder

__all__ = [
    "Columns",
    "Composition",
    "Form",
    "bound_name",
    "check_operands",
    "compose",
    "kept_dtype",
]


@dataclass(frozen=True, init=False)
class Columns:
    """Column ranges with chains of their own: ``Columns(q=(2048, chain), k=(512, chain), …)``.

    Ranges follow each other from column 0 and cover all N columns; widths are multiples of 16, and of the head
    dimension where a chain knows heads. Inside, operand names get the range's name as prefix (``q_out``), except those
    that all ranges share: positions, slots, inverse frequencies, row factors.
    """

    ranges: tuple[tuple[str, int, Composition], ...]

    def __init__(self, **ranges: tuple[int, Policy | Composition]) -> None:
        require(bool(ranges), "Columns", "no range", "at least one", "name the column ranges")
        found = []
        for name, given in ranges.items():
            require(
                isinstance(given, tuple) and len(given) == 2 and isinstance(given[0], int),
                f"Columns({name}=…)",
                repr(given),
                "(width, chain)",
                f"write {name}=(width, chain)",
                CompositionError,
            )
            width, chain = given[0], compose(given[1])
            require(
                chain.columns is None,
                f"Columns({name}=…)",
                "Columns inside Columns",
                "a flat list of ranges",
                "name all ranges in one Columns",
                CompositionError,
            )
            _check_width(name, width, chain.form)
            found.append((name, width, chain))
        object.__setattr__(self, "ranges", tuple(found))

    @property
    def width(self) -> int:
        """Columns of all ranges."""
        return sum(width for _, width, _ in self.ranges)

    def __rshift__(self, other: Any) -> Composition:
        """Refused by ``compose``, which says where ``other`` belongs."""
        return compose(self, other)

    def __rrshift__(self, other: Any) -> Composition:
        return compose(other, self)

    def __str__(self) -> str:
        return str(compose(self))


def _check_width(name: str, width: int, form: Form) -> None:
    require(
        width > 0 and width % 16 == 0,
        f"Columns({name}=…) width",
        width,
        "a positive multiple of 16",
        "pad the range",
        CompositionError,
    )
    if form.kind == "heads":
        require(
            width % form.head_dim == 0,
            f"Columns({name}=…): {form.decided_by}",
            f"half a head ({width} columns, heads of {form.head_dim})",
            "whole heads",
            "widen the range to whole heads",
            CompositionError,
        )


@dataclass(frozen=True)
class Composition:
    """Policies in order, then optionally column ranges. Immutable; ``>>`` makes a longer one and is associative."""

    policies: tuple[Policy, ...]
    columns: Columns | None = None

    def __post_init__(self) -> None:
        form = self.form
        if self.columns is not None:
            require(
                form.kind is None,
                f"{form.decided_by} >> Columns",
                "pairs or heads before the ranges are split",
                "elementwise policies and taps without heads",
                f"move {form.decided_by} into the ranges that need it",
                CompositionError,
            )
        operands_of(self)
        for policy in self.policies:
            _check_frozen(policy)

    def __eq__(self, other: object) -> bool:
        """Whether all fields have equal values of equal types, as in the key: 1, 1.0 and True differ, 0.0 and -0.0."""
        return (
            isinstance(other, Composition)
            and (self.policies, self.columns) == (other.policies, other.columns)
            and repr(self) == repr(other)
        )

    @cached_property
    def form(self) -> Form:
        """What the chain demands of its columns."""
        form = Form()
        for policy in self.policies:
            form = form.after(policy)
        return form

    @property
    def operands(self) -> Mapping[str, Operand]:
        """All operands by the name ``run`` binds, in order of appearance."""
        return operands_of(self)

    def __rshift__(self, other: Policy | Composition | Columns) -> Composition:
        return compose(self, other)

    def __rrshift__(self, other: Any) -> Composition:
        return compose(other, self)

    def branches(self) -> Iterator[tuple[str, int | None, tuple[Policy, ...]]]:
        """(range name, width, all policies that run on it) for each range; one range without ``Columns``."""
        if self.columns is None:
            yield "", None, self.policies
            return
        for name, width, chain in self.columns.ranges:
            yield name, width, (*self.policies, *chain.policies)

    def complete(self) -> None:
        """Refuse a composition that writes nothing, or computes what nothing reads."""
        for name, _, policies in self.branches():
            where = f" in range {name!r}" if name else ""
            title = policies[-1].title if policies else "nothing"
            require(
                bool(policies) and policies[-1].writes,
                f"composition{where}",
                f"a chain that ends in {title}, which no tap or sink reads",
                "a chain that ends in Store, EmitFP8, PlaceKV, SumSquares or a tap of yours",
                "add >> Store(torch.bfloat16)",
                CompositionError,
            )

    def key(self) -> tuple[Any, ...]:
        """Share of the compile key: every policy's fields and source, and the ranges."""
        return self._key

    @cached_property
    def _key(self) -> tuple[Any, ...]:
        for _, _, policies in self.branches():
            for policy in policies:
                for name, value in policy.settings():
                    encode(value, f"{policy.title}: field {name!r}")  # refuses, by that name
        ranges = (
            tuple((n, w, tuple(p.key() for p in c.policies)) for n, w, c in self.columns.ranges)
            if self.columns
            else ()
        )
        return (tuple(p.key() for p in self.policies), ranges)

    def row_order(self, columns: int) -> RowOrder:
        """The order in which a weight of ``columns`` output features must be packed for this composition."""
        from epicute.epilogues.resolve import resolve

        return resolve(self, columns).order

    def evaluate(self, acc: Any, **operands: Any) -> dict[str, torch.Tensor]:
        """Run the policies on the CPU with NumPy float32; see ``epicute.epilogues.evaluate``."""
        from epicute.epilogues.evaluate import evaluate

        return evaluate(self, acc, operands)

    @property
    def title(self) -> str:
        """One line: ``Dequantize >> SwiGLU >> EmitFP8``."""
        parts = [policy.title for policy in self.policies]
        if self.columns:
            ranges = (f"{n}: {chain.title}" for n, _, chain in self.columns.ranges)
            parts.append(f"Columns({', '.join(ranges)})")
        return " >> ".join(parts)

    def __str__(self) -> str:
        from epicute.epilogues.drawing import draw

        return draw(self)


def _check_frozen(policy: Policy) -> None:
    for name, value in policy.settings():
        check_constant(policy.title, name, value)
    try:
        hash(policy)
    except TypeError as error:
        raise CompositionError(
            f"{policy.title}: got a field that can change ({error}), expected numbers, strings and "
            "tuples of them. Fix: pass a tuple for a list, an operand for a tensor"
        ) from None


def compose(*parts: Policy | Composition | Columns) -> Composition:
    """``a >> b >> …`` as a function; the same composition however it is grouped."""
    policies: tuple[Policy, ...] = ()
    columns: Columns | None = None
    for part in parts:
        title = getattr(part, "title", type(part).__name__)
        require(
            columns is None,
            f"Columns >> {title}",
            "a policy after the ranges were split",
            "Columns at the end",
            f"put {title} inside each range",
            CompositionError,
        )
        if isinstance(part, Columns):
            columns = part
        elif isinstance(part, Composition):
            policies, columns = policies + part.policies, part.columns
        elif isinstance(part, Policy):
            policies += (part,)
        else:
            raise CompositionError(
                f">>: got {_shown(part)}, expected a policy, a composition or Columns. "
                f"Fix: {_called(part)}"
            )
    return Composition(policies, columns)


def _shown(part: Any) -> str:
    name = getattr(part, "__name__", "")
    return f"{name}, which is not called" if callable(part) and name else f"{part!r:.80}"


def _called(part: Any) -> str:
    """What to write instead of something that is no policy: the call, where that makes one."""
    name = getattr(part, "__name__", "")
    if isinstance(part, type) and issubclass(part, Policy):
        return f"call the policy, as {name}()"
    if hasattr(part, "__wrapped__"):
        parameters = inspect.signature(inspect.unwrap(part)).parameters.values()
        fields = [p.name for p in parameters if p.kind is p.KEYWORD_ONLY and p.default is p.empty]
        return f"call the policy, as {name}({', '.join(f'{field}=…' for field in fields)})"
    if callable(part) and name:
        return f"call the policy, or make one of the function with @policy above def {name}"
    return "join policies alone"


def operands_of(composition: Composition) -> dict[str, Operand]:
    """Operands by bound name; refuses a name used twice."""
    found: dict[str, Operand] = {}
    owner: dict[str, str] = {}
    for policy in composition.policies:
        for local, kind in policy.operands.items():
            _bind(found, owner, policy, policy.operand_name(local), kind, shared=False)
    outside = set(found)
    for prefix, _, chain in composition.columns.ranges if composition.columns else ():
        seen = set(outside)
        for policy in chain.policies:
            for local, kind in policy.operands.items():
                name = bound_name(policy, local, kind, prefix)
                _bind(found, owner, policy, name, kind, shared=kind.shared and name not in seen)
                seen.add(name)
    return found


def bound_name(policy: Policy, local: str, kind: Operand, prefix: str) -> str:
    """The name an operand is bound by, inside the range ``prefix`` or outside ("")."""
    name = policy.operand_name(local)
    return f"{prefix}_{name}" if prefix and not kind.shared else name


def _bind(
    found: dict[str, Operand],
    owner: dict[str, str],
    policy: Policy,
    name: str,
    kind: Operand,
    shared: bool,
) -> None:
    if name in found:
        require(
            shared and found[name] == kind,
            f"operand {name!r}",
            f"used by {owner[name]} as {found[name]} and by {policy.title} as {kind}",
            "the same operand in all ranges" if shared else "a name for each",
            f"name one of them: {policy.title}(…, name='second'), whose operands then begin with second_",
            CompositionError,
        )
    found[name] = kind
    owner.setdefault(name, policy.title)


def check_operands(composition: Composition, given: Mapping[str, Any]) -> None:
    """Refuse missing and unknown operand names, with the full list."""
    known = composition.operands
    missing = [n for n, kind in known.items() if n not in given and not kind.written]
    unknown = [n for n in given if n not in known]
    if missing or unknown:
        parts = [f"missing {', '.join(missing)}"] if missing else []
        parts += [f"unknown {', '.join(unknown)}"] if unknown else []
        listing = ", ".join(f"{n}: {k}" for n, k in known.items())
        raise ArgumentError(
            f"operands: got {' and '.join(parts)}, expected {listing}. Fix: bind each by name"
        )


def kept_dtype(policies: tuple[Policy, ...], index: int) -> torch.dtype | None:
    """The dtype in which the next ``Store`` after ``index`` keeps the value; None where the value changes first."""
    for policy in policies[index + 1 :]:
        if not isinstance(policy, Tap):
            return None
        if policy.keeps is not None:
            return policy.keeps
        if any(isinstance(kind, Output) for kind in policy.operands.values()):
            return None
    return None
