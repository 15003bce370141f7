"""Policies: frozen values with one body that two interpreters run.

``Elementwise`` sees a value at a time, ``Pairwise`` two that belong together, ``Reducing`` sees all columns of a group
at once and may ask for their sum, and a ``Tap`` writes. The decorators ``policy``, ``pairwise``, ``reducing`` and
``tap`` make one from a plain function; a class does when operands depend on fields.

    @policy(bias=RowVector)
    def add_bias(x, ctx):
        return x + ctx.bias

    @policy
    def soft_cap(x, ctx, *, cap: float):
        return cap * ctx.tanh(x / cap)

    fused = Dequantize() >> add_bias() >> soft_cap(cap=30.0) >> Store(torch.bfloat16)
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from functools import cached_property
from pickle import PicklingError
from typing import TYPE_CHECKING, Any

from epicute.epilogues.fields import annotations_of, check_field
from epicute.epilogues.operands import Operand, as_operand, check_name
from epicute.epilogues.values import Value
from epicute.errors import ArgumentError, CompositionError, require
from epicute.jit.source import source_digest

if TYPE_CHECKING:
    import torch

    from epicute.epilogues.composition import Composition
    from epicute.epilogues.context import Context
    from epicute.layouts.row_order import RowOrder

__all__ = [
    "Elementwise",
    "Pairwise",
    "Policy",
    "Reducing",
    "Tap",
    "pairwise",
    "policy",
    "reducing",
    "tap",
]

Result = Value | tuple[Value, Value] | None

NARROWEST = 16
"""Columns of the narrowest head, and so of the narrowest group; others are multiples of it."""


@dataclass(frozen=True, kw_only=True)
class Policy:
    """Base of all policies. ``name`` prefixes the operand names, so that a policy can stand twice in a composition."""

    head_dim = 0
    """Width of the heads the policy works on; 0 where it does not know heads. A subclass may make it a field."""

    rotary_dim = 0
    """Channels of a head that a ``Pairwise`` pairs, from the first."""

    name: str = ""

    @property
    def operands(self) -> Mapping[str, Operand]:
        """Operand names, as the body spells them, and their kinds."""
        return {}

    @property
    def title(self) -> str:
        """How the policy is called in drawings and errors."""
        return type(self).__name__

    @property
    def writes(self) -> bool:
        """Whether any operand is written."""
        return any(kind.written for kind in self.operands.values())

    def operand_name(self, local: str) -> str:
        """The name under which ``run`` and ``evaluate`` bind the operand."""
        return f"{self.name}_{local}" if self.name else local

    def settings(self) -> tuple[tuple[str, Any], ...]:
        """The fields and their values, which the compile key holds."""
        return tuple((f.name, getattr(self, f.name)) for f in fields(self))

    def shown(self) -> tuple[tuple[str, Any], ...]:
        """The settings that a drawing shows."""
        return self.settings()

    def key(self) -> tuple[Any, ...]:
        """Share of the compile key: class, fields and source of the body."""
        declared = {f.name for f in fields(self)}
        bodies = {
            name: _member(member)
            for owner in reversed(type(self).__mro__)
            if owner is not object and owner not in BASES
            for name, member in vars(owner).items()
            if name not in declared and not name.startswith("__")
        }
        operands = tuple((n, type(k).__name__, str(k)) for n, k in sorted(self.operands.items()))
        return (self.title, self.settings(), operands, tuple(sorted(bodies.items())))

    def __rshift__(self, other: Policy | Composition) -> Composition:
        """``self`` first, then ``other``."""
        from epicute.epilogues.composition import compose

        return compose(self, other)

    def __rrshift__(self, other: Any) -> Composition:
        """What stands to the left and is no policy: refused by ``compose``, which says what to write."""
        from epicute.epilogues.composition import compose

        return compose(other, self)

    def row_order(self, columns: int) -> RowOrder:
        """The order of a weight's rows for a composition of this policy alone."""
        from epicute.epilogues.composition import compose

        return compose(self).row_order(columns)

    def evaluate(self, acc: Any, **operands: Any) -> dict[str, torch.Tensor]:
        """Run the policy alone on the CPU; see ``Composition.evaluate``."""
        from epicute.epilogues.composition import compose

        return compose(self).evaluate(acc, **operands)

    def __str__(self) -> str:
        shown = ", ".join(f"{n}={_show(v)}" for n, v in self.shown() if v not in ("", None))
        return f"{self.title}({shown})"


def _member(member: Any) -> Any:
    """What a class's attribute adds to the key: the source of a method or property, the value of a constant."""
    if isinstance(member, property):
        member = member.fget
    elif isinstance(member, (staticmethod, classmethod)):
        member = member.__func__
    elif isinstance(member, cached_property):
        member = member.func
    return source_digest(member) if callable(member) else member


def _show(value: Any) -> str:
    return str(value).removeprefix("torch.")


@dataclass(frozen=True, kw_only=True)
class Elementwise(Policy):
    """Maps each value on its own."""

    def apply(self, x: Value, ctx: Context) -> Value:
        """The body: ``x`` and the operands in ``ctx`` to the new value."""
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class Pairwise(Policy):
    """Maps two values that belong together.

    ``pairs`` is ``"halves"`` (column j with j + n/2, or inside each head where ``head_dim`` is set) or
    ``"interleaved"`` (columns 2j and 2j + 1, inside heads). A body that returns one value consumes the pair and halves
    the columns (``consumes``); one that returns two keeps both.
    """

    @property
    def pairs(self) -> str:
        """``"halves"`` or ``"interleaved"``."""
        return "halves"

    @property
    def consumes(self) -> bool:
        """Whether the two columns become one."""
        return True

    def apply(self, first: Value, second: Value, ctx: Context) -> Value | tuple[Value, Value]:
        """The body."""
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class Reducing(Policy):
    """Sees ``over`` adjacent columns of a row together: ``ctx.total(v)``, ``mean`` and ``largest`` reduce over them.

    Every quad lane adds its own columns in ascending order, then lanes combine as (0 + 1) + (2 + 3).
    """

    ragged = False
    """Whether the last group of a row may have fewer columns than ``over``; else such an N is refused."""

    @property
    def over(self) -> int:
        """Columns of a group."""
        raise NotImplementedError

    def apply(self, x: Value, ctx: Context) -> Value:
        """The body."""
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class Tap(Reducing):
    """Writes with ``ctx.store``, ``ctx.partials``, ``ctx.record_max``, ``ctx.count``, ``ctx.place`` and passes on."""

    @property
    def over(self) -> int:
        """Columns of a group; 0 where the body reduces nothing."""
        return 0

    @property
    def keeps(self) -> torch.dtype | None:
        """The dtype in which the tap stores the value, without a scale; None where it does not."""
        return None


BASES = (Policy, Elementwise, Pairwise, Reducing, Tap)


class _FromFunction:
    """A policy whose body is a user's function; mixed into one of the classes above."""

    function: Callable[..., Any]
    parameters: tuple[tuple[str, Any], ...]
    kinds: tuple[tuple[str, Operand], ...]

    @property
    def operands(self) -> Mapping[str, Operand]:
        return dict(self.kinds)

    @property
    def title(self) -> str:
        return self.function.__name__

    def settings(self) -> tuple[tuple[str, Any], ...]:
        name: str = self.name  # type: ignore[attr-defined]
        return (*self.parameters, *((("name", name),) if name else ()))

    def key(self) -> tuple[Any, ...]:
        operands = tuple((n, type(k).__name__, str(k)) for n, k in sorted(self.kinds))
        role = type(self).__name__
        return (role, self.title, self.settings(), operands, source_digest(self.function))

    def apply(self, *arguments: Any) -> Any:
        return self.function(*arguments, **dict(self.parameters))

    def __reduce__(self) -> Any:
        """Pickled by the factory that the decorator left where the body's name was."""
        place = (self.function.__module__, self.function.__qualname__)
        if getattr(_factory_at(*place), "__wrapped__", None) is not self.function:
            raise PicklingError(
                f"{self.title} is not at {'.'.join(place)}, as its decorator left it"
            )
        return _remade, (*place, self.parameters, self.name)  # type: ignore[attr-defined]


def _factory_at(module: str, qualname: str) -> Any:
    found: Any = importlib.import_module(module)
    for part in qualname.split("."):
        found = getattr(found, part, None)
    return found


def _remade(module: str, qualname: str, parameters: tuple[tuple[str, Any], ...], name: str) -> Any:
    """The policy again, in another process."""
    return _factory_at(module, qualname)(name=name, **dict(parameters))


@dataclass(frozen=True, kw_only=True)
class FunctionElementwise(_FromFunction, Elementwise):
    """``@policy``."""

    function: Callable[..., Any]
    parameters: tuple[tuple[str, Any], ...] = ()
    kinds: tuple[tuple[str, Operand], ...] = ()


@dataclass(frozen=True, kw_only=True)
class FunctionPairwise(_FromFunction, Pairwise):
    """``@pairwise``."""

    function: Callable[..., Any]
    parameters: tuple[tuple[str, Any], ...] = ()
    kinds: tuple[tuple[str, Operand], ...] = ()
    pairing: str = "halves"
    keeps: bool = False
    head_dim: int = 0

    @property
    def pairs(self) -> str:
        return self.pairing

    @property
    def consumes(self) -> bool:
        return not self.keeps

    @property
    def rotary_dim(self) -> int:  # type: ignore[override]
        return self.head_dim

    def settings(self) -> tuple[tuple[str, Any], ...]:
        extra = (("pairs", self.pairing), ("keeps", self.keeps), ("head_dim", self.head_dim))
        return (*super().settings(), *extra)

    def shown(self) -> tuple[tuple[str, Any], ...]:
        extra = (("pairs", self.pairing, "halves"), ("keeps", self.keeps, False))
        extra += (("head_dim", self.head_dim, 0),)  # type: ignore[assignment]
        differing = ((name, value) for name, value, default in extra if value != default)
        return (*super().settings(), *differing)


@dataclass(frozen=True, kw_only=True)
class FunctionReducing(_FromFunction, Reducing):
    """``@reducing``."""

    function: Callable[..., Any]
    parameters: tuple[tuple[str, Any], ...] = ()
    kinds: tuple[tuple[str, Operand], ...] = ()
    group: int = 64
    ragged: bool = False

    @property
    def over(self) -> int:
        return self.group

    def settings(self) -> tuple[tuple[str, Any], ...]:
        return (*super().settings(), *_grouping(self.group, self.ragged))


@dataclass(frozen=True, kw_only=True)
class FunctionTap(_FromFunction, Tap):
    """``@tap``."""

    function: Callable[..., Any]
    parameters: tuple[tuple[str, Any], ...] = ()
    kinds: tuple[tuple[str, Operand], ...] = ()
    group: int = 0
    ragged: bool = False

    @property
    def over(self) -> int:
        return self.group

    def settings(self) -> tuple[tuple[str, Any], ...]:
        return (*super().settings(), *_grouping(self.group, self.ragged))

    def shown(self) -> tuple[tuple[str, Any], ...]:
        return self.settings() if self.group else super().settings()


def _grouping(over: int, ragged: bool) -> tuple[tuple[str, Any], ...]:
    """Settings of a policy that reduces over columns."""
    return (("over", over), *((("ragged", True),) if ragged else ()))


def _parameters(function: Callable[..., Any], leading: int) -> dict[str, inspect.Parameter]:
    """The keyword-only parameters of a body; refuses any other signature."""
    found = list(inspect.signature(function).parameters.values())
    shape = "(first, second, ctx" if leading == 3 else "(x, ctx"
    require(
        len(found) >= leading
        and all(p.kind is p.POSITIONAL_OR_KEYWORD for p in found[:leading])
        and all(p.kind is p.KEYWORD_ONLY and p.name != "name" for p in found[leading:]),
        f"{function.__name__}",
        f"signature {inspect.signature(function)}",
        f"{shape}, *, field=…)",
        "make every field keyword-only, and call none of them name",
        CompositionError,
    )
    return {p.name: p for p in found[leading:]}


def _factory(cls: Any, function: Callable[..., Any], kinds: Mapping[str, Any], extra: Any) -> Any:
    require(
        inspect.isfunction(function),
        "policy body",
        f"{function!r:.60}",
        "a function, whose operands the decorator's keyword arguments declare",
        "put the decorator above a def, with operands as in @policy(bias=RowVector)",
        CompositionError,
    )
    known = _parameters(function, 3 if cls is FunctionPairwise else 2)
    operands = tuple((n, as_operand(k)) for n, k in kinds.items())
    for n, _ in operands:
        check_name(function.__name__, n)
    annotated = annotations_of(function)

    def make(*, name: str = "", **given: Any) -> Policy:
        for field in given:
            if field not in known:
                raise ArgumentError(
                    f"{function.__name__}: got field {field!r}, expected "
                    f"{', '.join(known) or 'none'}. Fix: check the spelling"
                )
            check_field(function.__name__, field, given[field], annotated)
        values = {n: given.get(n, p.default) for n, p in known.items()}
        for n, value in values.items():
            require(
                value is not inspect.Parameter.empty,
                f"{function.__name__}: {n}",
                "nothing",
                "a value",
                f"call {function.__name__}({n}=…)",
            )
        return cls(
            function=function,
            parameters=tuple(sorted(values.items())),
            kinds=operands,
            name=name,
            **extra,
        )

    make.__name__ = make.__qualname__ = function.__name__
    make.__doc__ = function.__doc__
    make.__wrapped__ = function  # type: ignore[attr-defined]
    return make


def policy(function: Any = None, /, **kinds: Any) -> Any:
    """Make an elementwise policy of ``body(x, ctx, *, field=…)``; keyword arguments declare operands."""
    return _decorator(FunctionElementwise, function, kinds, {})


def pairwise(
    function: Any = None,
    /,
    *,
    pairs: str = "halves",
    keeps: bool = False,
    head_dim: int = 0,
    **kinds: Any,
) -> Any:
    """Make a pairwise policy of ``body(first, second, ctx, *, field=…)``; see ``Pairwise``."""
    require(
        pairs in ("halves", "interleaved"), "pairs", pairs, "'halves' or 'interleaved'", "name one"
    )
    extra = {"pairing": pairs, "keeps": keeps, "head_dim": head_dim}
    return _decorator(FunctionPairwise, function, kinds, extra)


def reducing(
    function: Any = None, /, *, over: int | None = None, ragged: bool = False, **kinds: Any
) -> Any:
    """Make a reducing policy of ``body(x, ctx, *, field=…)`` over groups of ``over`` columns; see ``Reducing``.

    ``ragged`` lets the last group of a row have fewer columns than that.
    """
    _check_over("reducing", over)
    return _decorator(FunctionReducing, function, kinds, {"group": over, "ragged": ragged})


def tap(function: Any = None, /, *, over: int = 0, ragged: bool = False, **kinds: Any) -> Any:
    """Make a tap of ``body(x, ctx, *, field=…)``; what it returns is passed on, None passes ``x``.

    ``over`` and ``ragged`` as of ``reducing``; 0 for a body that reduces nothing.
    """
    if over != 0:
        _check_over("tap", over)
    return _decorator(FunctionTap, function, kinds, {"group": over, "ragged": ragged})


def _check_over(decorator: str, over: Any) -> None:
    """Refuse widths that no chain has groups of; which of the others fit shows once heads are known."""
    require(
        type(over) is int and over > 0 and over % NARROWEST == 0,
        f"{decorator}: over",
        "nothing" if over is None else repr(over),
        f"the number of columns of a group: 32, 64, 128, 256, or a head's, a multiple of {NARROWEST}",
        f"write @{decorator}(over=64) above the body",
        CompositionError,
    )


def _decorator(cls: Any, function: Any, kinds: Mapping[str, Any], extra: Any) -> Any:
    """What a decorator gives: the policy's factory where it stands bare, else what takes the body."""
    if function is not None:
        return _factory(cls, function, kinds, extra)
    return lambda body: _factory(cls, body, kinds, extra)
