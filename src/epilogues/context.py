"""What a policy body sees besides its value: operations, operands and, in a tap, places to write.

    ctx.exp(x), ctx.where(mask, a, b), …   the operations of ``values.OPERATIONS``
    ctx.bias                                an operand, by the name the policy declared
    ctx.total(x), ctx.largest(x)            sum and maximum over the policy's group of columns
    ctx.mean(x)                             the sum by the number of columns that the group has
    ctx.store("out", x)                     write a matrix; returns the value as stored
    ctx.partials("sumsq_out", total)        write one value per group
    ctx.record_max("amax", x)               atomic maximum over the finite values
    ctx.count("saturated", mask)            atomic count of true values
    ctx.place("cells", x)                   write cache cells where the rows' slots say; returns the value as stored
    ctx.placed("cells")                     whether the row has a slot
    ctx.as_kept(x)                          x as the chain's next Store keeps it

Interpreters subclass ``Context``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch

from epicute.epilogues.operands import Cells, Operand, Slots
from epicute.epilogues.policy import Pairwise, Policy, Tap
from epicute.epilogues.values import ANY_BODY, NAMED, OPERATIONS, Table, Value, operation
from epicute.errors import CompositionError, require

__all__ = ["ROUNDING", "Context", "run_body"]

ROUNDING = {
    torch.bfloat16: "round_bfloat16",
    torch.float16: "round_float16",
    torch.float8_e4m3fn: "round_float8",
}
"""Operation that rounds to a stored dtype; float32 needs none."""

WRITES = {
    "Output": "ctx.store({!r}, x)",
    "PartialsOutput": "ctx.partials({!r}, ctx.total(x))",
    "Maximum": "ctx.record_max({!r}, abs(x))",
    "Counter": "ctx.count({!r}, mask)",
    "Cells": "ctx.place({!r}, x)",
}
"""How a body writes an operand of each kind."""


class Context(ABC):
    """One policy's view; an interpreter makes one for each policy of a chain."""

    def __init__(self, policy: Policy, table: Table, kept: torch.dtype = torch.float32) -> None:
        self._policy = policy
        self._kept = kept
        self._table = table
        self._kinds = dict(policy.operands)
        self._used: set[str] = set()

    def __getattr__(self, name: str) -> Any:
        if name in OPERATIONS:
            return operation(self._table, name)
        if name.startswith("_") or name not in self._kinds:
            known = ", ".join(sorted(self.__dict__.get("_kinds", {}))) or "none"
            raise CompositionError(
                f"ctx.{name}: got an unknown name in {self._policy.title}, expected an operation "
                f"({', '.join(NAMED)}) or one of the declared operands ({known}). "
                f"Fix: use what is there, or declare an operand, e.g. @policy({name}=RowVector)"
            )
        kind = self._kinds[name]
        require(
            not kind.written,
            f"ctx.{name}",
            f"a read of {kind}",
            "a write",
            f"use ctx.store({name!r}, x) and its like",
            CompositionError,
        )
        self._used.add(name)
        return Value(self._read(name, kind), self._table)

    def _writes(self, name: str, kind: str) -> Operand:
        """The written operand ``name``, which is now written."""
        self._used.add(name)
        return self._written(name, kind)

    def _written(self, name: str, kind: str) -> Operand:
        found = self._kinds.get(name)
        require(
            type(found).__name__ == kind,
            f"{self._policy.title}: operand {name!r}",
            found,
            f"a declared {kind}",
            f"declare {name}={kind}",
            CompositionError,
        )
        return found  # type: ignore[return-value]

    def total(self, x: Value) -> Value:
        """Sum over the policy's group of columns, the same for each of them."""
        return self._reduced("total", x, "add")

    def largest(self, x: Value) -> Value:
        """Maximum over the policy's group of columns; NaN where one is."""
        return self._reduced("largest", x, "max")

    def mean(self, x: Value) -> Value:
        """Mean over the columns that the policy's group has, fewer in the last group of a ragged row.

        The sum is multiplied by the float32 reciprocal of their number, which has the same bits as dividing where that
        is a power of two.
        """
        total = self._reduced("mean", x, "add")
        if not getattr(self._policy, "ragged", False):
            return total * (1.0 / self._policy.over)  # type: ignore[attr-defined]
        one = Value(self._table["min"](1.0, 1.0), self._table)
        return total * self.reciprocal(self._reduced("mean", one, "add"))

    def _reduced(self, called: str, x: Value, operation: str) -> Value:
        require(
            getattr(self._policy, "over", 0) > 0,
            f"{self._policy.title}: ctx.{called}",
            "a policy without a group of columns",
            "a reducing policy or a tap with over=…",
            "declare it with @reducing(over=64) or @tap(over=64)",
            CompositionError,
        )
        return Value(self._reduce(x.raw, operation), self._table)

    def store(self, name: str, x: Value) -> Value:
        """Write ``x`` to an ``Output``; returns it as stored, before any scale."""
        return Value(self._store(name, self._writes(name, "Output"), x.raw), self._table)

    def partials(self, name: str, total: Value) -> None:
        """Write the groups' values to a ``PartialsOutput``."""
        self._partials(name, self._writes(name, "PartialsOutput"), total.raw)

    def record_max(self, name: str, x: Value) -> None:
        """Raise a ``Maximum`` to the largest finite ``x`` (not negative)."""
        self._writes(name, "Maximum")
        self._record_max(name, x.raw)

    def count(self, name: str, mask: Value) -> None:
        """Add the number of true elements to a ``Counter``."""
        self._writes(name, "Counter")
        self._count(name, mask.raw)

    def place(self, name: str, x: Value) -> Value:
        """Write ``x`` to ``Cells``; returns it as stored, before any scale."""
        return Value(self._place(name, self._writes(name, "Cells"), x.raw), self._table)

    def placed(self, name: str) -> Value:
        """Whether each row has a slot in ``Cells``."""
        return Value(self._placed(name, self._written(name, "Cells")), self._table)

    def as_kept(self, x: Value) -> Value:
        """``x`` as the chain's next ``Store`` will keep it; ``x`` itself where none follows."""
        name = ROUNDING.get(self._kept)
        return operation(self._table, name)(x) if name else x

    @abstractmethod
    def _read(self, name: str, kind: Operand) -> Any: ...

    @abstractmethod
    def _reduce(self, raw: Any, operation: str) -> Any: ...

    @abstractmethod
    def _store(self, name: str, kind: Operand, raw: Any) -> Any: ...

    @abstractmethod
    def _partials(self, name: str, kind: Operand, raw: Any) -> None: ...

    @abstractmethod
    def _record_max(self, name: str, raw: Any) -> None: ...

    @abstractmethod
    def _count(self, name: str, raw: Any) -> None: ...

    @abstractmethod
    def _place(self, name: str, kind: Operand, raw: Any) -> Any: ...

    @abstractmethod
    def _placed(self, name: str, kind: Operand) -> Any: ...


def run_body(ctx: Context, *values: Value) -> Any:
    """What the body of the context's policy makes of ``values``; refuses another number of results than its role has,
    and an operand that is declared as written and was not.

    One value, two where a ``Pairwise`` keeps the pair; a ``Tap`` may return None.
    """
    policy = ctx._policy
    try:
        out = policy.apply(*values, ctx)  # type: ignore[attr-defined]
    except CompositionError as error:
        said = str(error)
        if said.startswith(ANY_BODY):
            error.args = (f"{policy.title}: body{said.removeprefix(ANY_BODY)}",)
        raise
    kept = isinstance(policy, Pairwise) and not policy.consumes
    found = out if isinstance(out, tuple) else (out,)
    silent = out is None and isinstance(policy, Tap)
    require(
        silent or (len(found) == 1 + kept and all(isinstance(x, Value) for x in found)),
        f"{policy.title}: body",
        f"a result of {', '.join(type(x).__name__ for x in found)}",
        "two values, as the pair is kept" if kept else "one value",
        _returned_fix(policy, len(found)),
        CompositionError,
    )
    _check_used(ctx)
    return out


def _returned_fix(policy: Policy, count: int) -> str:
    if isinstance(policy, Pairwise) and policy.consumes and count == 2:
        return "say @pairwise(keeps=True, head_dim=…) where two take the places of the pair, or return one"
    return "return what the body computed, with ctx operations rather than Python numbers"


def _check_used(ctx: Context) -> None:
    """Refuse an operand that the policy declares and whose body neither reads nor, where it is written, writes.

    Slots are read by the cells that name them.
    """
    through = {kind.slots for kind in ctx._kinds.values() if isinstance(kind, Cells)}
    for name, kind in ctx._kinds.items():
        if name in ctx._used or (isinstance(kind, Slots) and name in through):
            continue
        if not kind.written:
            raise CompositionError(
                f"{ctx._policy.title}: operand {name!r}: got {kind} that the body does not read, expected a read "
                f"of every operand that is declared. Fix: use ctx.{name} in the body, or declare no {name}; where "
                "a field decides, write a class, whose operands may depend on it"
            )
        how = WRITES.get(type(kind).__name__, "a write of {!r}").format(name)
        raise CompositionError(
            f"{ctx._policy.title}: operand {name!r}: got {kind} that the body does not write, "
            "expected a write of every operand that is declared as written. "
            f"Fix: call {how} in the body, or declare no {name}"
        )
