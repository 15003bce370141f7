"""What a policy computes on: values whose arithmetic an interpreter supplies.

A ``Value`` wraps raw data and the interpreter's table of operations. The NumPy interpreter wraps float32 arrays, the
kernel wraps the registers of one thread. Both tables have exactly the keys of ``OPERATIONS``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from epicute.errors import CompositionError

__all__ = ["ANY_BODY", "OPERATIONS", "Table", "Value"]

ANY_BODY = "policy body"
"""Who complains where a value is misused; ``run_body``, which knows the policy, puts its name there."""

OPERATIONS: Mapping[str, int] = {
    **dict.fromkeys(("add", "sub", "mul", "div", "min", "max"), 2),
    **dict.fromkeys(("lt", "le", "gt", "ge", "eq", "ne", "logical_and", "logical_or"), 2),
    **dict.fromkeys(("neg", "abs", "logical_not", "isnan", "floor"), 1),
    **dict.fromkeys(("exp", "exp2", "log", "log2", "sqrt", "rsqrt", "reciprocal"), 1),
    **dict.fromkeys(("sin", "cos", "tanh", "sigmoid"), 1),
    **dict.fromkeys(("round_bfloat16", "round_float16", "round_float8"), 1),
    "where": 3,
}
"""Operation name to number of arguments. ``min`` and ``max`` pass NaN on. ``reciprocal`` is correctly rounded;
``round_*`` round once to the nearest value of the type, ties to even, and ``round_float8`` saturates at 448 and keeps
NaN."""

_OPERATORS = frozenset(
    (
        *("add", "sub", "mul", "div", "neg", "abs", "lt", "le", "gt", "ge", "eq", "ne"),
        *("logical_and", "logical_or", "logical_not"),
    )
)

NAMED = tuple(name for name in OPERATIONS if name not in _OPERATORS)
"""Operations that have no operator of Python's and are called as ``ctx.…``."""

_INSTEAD = {
    "**": "write x * x, or ctx.exp2(y * ctx.log2(x)) for a positive x",
    "%": "write x - y * ctx.floor(x / y)",
    "//": "write ctx.floor(x / y)",
    "^": "write (a & ~b) | (b & ~a)",
    "relu": "write ctx.max(x, 0.0)",
    "maximum": "write ctx.max(a, b)",
    "minimum": "write ctx.min(a, b)",
    "silu": "write x * ctx.sigmoid(x)",
    "square": "write x * x",
}
"""What to write where a body asks for what there is not."""

_ARRAY_OPERATORS = {
    "add": "add",
    "subtract": "sub",
    "multiply": "mul",
    "divide": "div",
    "true_divide": "div",
    "less": "lt",
    "less_equal": "le",
    "greater": "gt",
    "greater_equal": "ge",
    "equal": "eq",
    "not_equal": "ne",
}
"""NumPy's name of an operator to the operation's, for NumPy scalars to the left of a value."""


def _no_such(what: str, name: str) -> CompositionError:
    fix = f"write ctx.{name}(…)" if name in NAMED else "build it from those"
    return CompositionError(
        f"{ANY_BODY}: got {what}, expected + - * / abs, comparisons, & | ~, and of ctx "
        f"{', '.join(NAMED)}. Fix: {_INSTEAD.get(name, fix)}"
    )


def _refused(symbol: str) -> Callable[..., Any]:
    def refuse(self: Value, *_: Any) -> Any:
        raise _no_such(f"{symbol} on a value", symbol)

    return refuse


Table = Mapping[str, Callable[..., Any]]


def _raw(x: Any) -> Any:
    return x.raw if isinstance(x, Value) else x


class Value:
    """Float32 values (or truth values after a comparison); all arithmetic is elementwise with broadcasting."""

    __slots__ = ("raw", "table")

    def __init__(self, raw: Any, table: Table) -> None:
        self.raw = raw
        self.table = table

    def _do(self, name: str, *arguments: Any) -> Value:
        return Value(self.table[name](*map(_raw, arguments)), self.table)

    def __add__(self, other: Any) -> Value:
        return self._do("add", self, other)

    def __radd__(self, other: Any) -> Value:
        return self._do("add", other, self)

    def __sub__(self, other: Any) -> Value:
        return self._do("sub", self, other)

    def __rsub__(self, other: Any) -> Value:
        return self._do("sub", other, self)

    def __mul__(self, other: Any) -> Value:
        return self._do("mul", self, other)

    def __rmul__(self, other: Any) -> Value:
        return self._do("mul", other, self)

    def __truediv__(self, other: Any) -> Value:
        return self._do("div", self, other)

    def __rtruediv__(self, other: Any) -> Value:
        return self._do("div", other, self)

    def __neg__(self) -> Value:
        return self._do("neg", self)

    def __abs__(self) -> Value:
        return self._do("abs", self)

    def __lt__(self, other: Any) -> Value:
        return self._do("lt", self, other)

    def __le__(self, other: Any) -> Value:
        return self._do("le", self, other)

    def __gt__(self, other: Any) -> Value:
        return self._do("gt", self, other)

    def __ge__(self, other: Any) -> Value:
        return self._do("ge", self, other)

    def __eq__(self, other: Any) -> Value:  # type: ignore[override]
        return self._do("eq", self, other)

    def __ne__(self, other: Any) -> Value:  # type: ignore[override]
        return self._do("ne", self, other)

    def __and__(self, other: Any) -> Value:
        return self._do("logical_and", self, other)

    def __or__(self, other: Any) -> Value:
        return self._do("logical_or", self, other)

    def __invert__(self) -> Value:
        return self._do("logical_not", self)

    __hash__ = None  # type: ignore[assignment]

    __pow__ = __rpow__ = _refused("**")
    __mod__ = __rmod__ = _refused("%")
    __floordiv__ = __rfloordiv__ = _refused("//")
    __xor__ = __rxor__ = _refused("^")
    __matmul__ = __rmatmul__ = _refused("@")
    __lshift__ = __rlshift__ = _refused("<<")
    __rshift__ = __rrshift__ = _refused(">>")
    __pos__ = _refused("unary +")
    __round__ = _refused("round()")
    __int__ = __index__ = _refused("a conversion to int")
    __getitem__ = _refused("an index")
    __iter__ = _refused("iteration")
    __len__ = _refused("len()")

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **_: Any) -> Value:
        """NumPy scalars may stand to the left of an operator; NumPy's functions know no values."""
        name = _ARRAY_OPERATORS.get(ufunc.__name__)
        if name is None or method != "__call__" or any(getattr(x, "ndim", 0) for x in inputs):
            raise _no_such(f"np.{ufunc.__name__} of a value", ufunc.__name__)
        plain = (x if isinstance(x, Value) else getattr(x, "item", lambda x=x: x)() for x in inputs)
        return self._do(name, *plain)

    def __array_function__(self, function: Any, *_: Any) -> Any:
        raise _no_such(f"np.{function.__name__} of a value", function.__name__)

    def __array__(self, *_: Any, **__: Any) -> Any:
        raise _no_such("a conversion of a value to an array", "")

    @classmethod
    def __torch_function__(cls, function: Any, *_: Any) -> Any:
        raise _no_such(f"torch's {function.__name__} of a value", function.__name__)

    def __bool__(self) -> bool:
        raise CompositionError(
            f"{ANY_BODY}: got a branch on a value (if, and, or, not, max(), min()), expected straight-line "
            "arithmetic. Fix: choose with ctx.where(condition, a, b); max(a, b) is ctx.max(a, b), min(a, b) is "
            "ctx.min(a, b), and is &, or is |, not is ~"
        )

    def __float__(self) -> float:
        raise CompositionError(
            f"{ANY_BODY}: got a conversion of a value to a Python float, expected arithmetic on values. "
            "Fix: keep constants in the policy's fields and use ctx.exp, ctx.tanh, … instead of math"
        )


def operation(table: Table, name: str) -> Callable[..., Value]:
    """``name`` of ``table`` as a function on values."""

    def call(*arguments: Any) -> Value:
        if len(arguments) != OPERATIONS[name]:
            raise CompositionError(
                f"{ANY_BODY}: ctx.{name}: got {len(arguments)} arguments, expected {OPERATIONS[name]}. "
                "Fix: see epicute.epilogues.values.OPERATIONS"
            )
        return Value(table[name](*map(_raw, arguments)), table)

    return call
