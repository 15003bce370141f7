"""The kernel's table: the registers of one thread. Imports the DSL.

Raw values are lists of lanes (DSL scalars or Python constants); a list of one lane is broadcast. An operation runs once
for each distinct combination of registers, so a row's factor is computed once and not once per column.
"""

from __future__ import annotations

from collections.abc import Callable
from math import log2, pi
from typing import Any

import cutlass
from cutlass import Boolean, Float32, Int32, Int64, cute
from cutlass._mlir.dialects import llvm

from epicute.epilogues.values import Table

__all__ = [
    "DSL_OPERATIONS",
    "Lazy",
    "Rounded",
    "Shared",
    "add_square",
    "again",
    "anchor",
    "force",
    "keep",
    "lanes_of",
    "largest_of_words",
    "opaque",
    "pack_words",
    "pure_asm",
    "select",
    "unpack_bfloat16",
]

LOG2_E = log2(2.718281828459045)

NEAREST = 1.5 * 2.0**23
"""Added and taken away again, it leaves the nearest integer of what is at most 2**22: two additions, where a conversion
would take its turn in the unit that sine and cosine need."""

TWO_PI = (6.28125, 0.0019353071693331003, 1.0253376273028358e-11)
"""2π in three parts, subtracted one after the other: the first difference is exact for angles below 2**22."""


def pure_asm(text: str, constraints: str, result: Any, *arguments: Any) -> Any:
    """One PTX instruction (or block) without side effects, which the compiler may drop, move and merge."""
    values = [a.ir_value() for a in arguments]
    return result(
        llvm.inline_asm(
            result.mlir_type,
            values,
            text,
            constraints,
            has_side_effects=False,
            is_align_stack=False,
            asm_dialect=llvm.AsmDialect.AD_ATT,
        )
    )


def _unary(instruction: str) -> Callable[[Any], Any]:
    return lambda x: pure_asm(f"{instruction} $0, $1;", "=f,f", Float32, Float32(x))


def _binary(instruction: str) -> Callable[[Any, Any], Any]:
    return lambda a, b: pure_asm(
        f"{instruction} $0, $1, $2;", "=f,f,f", Float32, Float32(a), Float32(b)
    )


_add = _binary("add.rn.f32")
_sub = _binary("sub.rn.f32")
_mul = _binary("mul.rn.f32")
_exp2 = _unary("ex2.approx.ftz.f32")
_reciprocal_approx = _unary("rcp.approx.ftz.f32")


def _fma(a: Any, b: Any, c: Any) -> Any:
    arguments = (Float32(a), Float32(b), Float32(c))
    return pure_asm("fma.rn.f32 $0, $1, $2, $3;", "=f,f,f,f", Float32, *arguments)


def select(condition: Any, a: Any, b: Any) -> Any:
    """``a`` where ``condition``, else ``b``."""
    if isinstance(condition, bool):
        return a if condition else b
    return Float32(cutlass.select_(condition, Float32(a), Float32(b)))


def keep(remaining: Any, lane: int, x: Any, otherwise: float) -> Any:
    """``x`` where ``remaining > lane``, else ``otherwise``. The predicate lives inside, as there are only seven."""
    text = "{ .reg .pred p; setp.gt.s32 p, $3, $4; selp.f32 $0, $1, $2, p; }"
    arguments = (Float32(x), Float32(otherwise), Int32(remaining), Int32(lane))
    return pure_asm(text, "=f,f,f,r,n", Float32, *arguments)


def opaque(x: Any) -> Any:
    """The same integer, which the compiler no longer knows to be equal to any other."""
    found = llvm.inline_asm(
        Int32.mlir_type,
        [x.ir_value()],
        "mov.b32 $0, $1;",
        "=r,r",
        has_side_effects=True,
        is_align_stack=False,
        asm_dialect=llvm.AsmDialect.AD_ATT,
    )
    return Int32(found)


def _exp(x: Any) -> Any:
    return _exp2(_mul(x, LOG2_E))


def _sigmoid(x: Any) -> Any:
    return _reciprocal_approx(_add(_exp2(_mul(x, -LOG2_E)), 1.0))


def _tanh(x: Any) -> Any:
    """Quotient of exponentials; a polynomial near zero, where that one cancels."""
    size = _unary("abs.f32")(x)
    e = _exp2(_mul(size, -2 * LOG2_E))
    far = _binary("div.full.f32")(_sub(1.0, e), _add(1.0, e))
    sign = _binary("copysign.f32")(x, far)
    square = _mul(x, x)
    poly = Float32(62.0 / 2835.0)
    for coefficient in (-17.0 / 315.0, 2.0 / 15.0, -1.0 / 3.0, 1.0):
        poly = _fma(poly, square, coefficient)
    return select(size < Float32(0.25), _mul(x, poly), sign)


def _reduced(x: Any) -> Any:
    """``x`` minus the nearest multiple of 2π, so that the hardware's sine is good to 1e-6."""
    turns = _sub(_fma(x, 1.0 / (2.0 * pi), NEAREST), NEAREST)
    for part in TWO_PI:
        x = _fma(turns, -part, x)
    return x


class Lazy:
    """A lane that is computed when it is first needed.

    Instructions then come lane by lane in the order of the stores and sums, not operation by operation over all lanes,
    and few values are alive at a time. A lane must first be needed outside of any branch.

    operation, arguments: the table's operation and the lanes it is applied to; none for what is loaded. shared: where
    results of operations on it are kept, for a lane that several rows have alike.
    """

    __slots__ = ("_make", "_value", "arguments", "operation", "shared")

    def __init__(
        self,
        make: Callable[..., Any],
        operation: str = "",
        arguments: tuple[Any, ...] = (),
        shared: Shared | None = None,
    ) -> None:
        self._make: Callable[..., Any] | None = make
        self._value: Any = None
        self.operation, self.arguments, self.shared = operation, arguments, shared

    def get(self) -> Any:
        """The register."""
        if self._make is not None:
            self._value, self._make = self._make(*map(force, self.arguments)), None
        return self._value

    @property
    def pending(self) -> bool:
        """Whether it has not been computed."""
        return self._make is not None

    def again(self) -> Any:
        """The register, computed for this place alone if it was not yet; for use in a branch."""
        if self._make is None or not self.operation:
            return self.get()
        return self._make(*map(again, self.arguments))


class Shared:
    """Operations on lanes that do not depend on the row, each done once for all rows of a scope.

    A lane lives from the first row that needs it to the last, in a register. Scopes nest, and what mixes lanes of two
    belongs to the inner one; what mixes lanes of two that do not nest belongs to neither.
    """

    def __init__(self, outer: Shared | None = None) -> None:
        self._chain: tuple[Shared, ...] = (self, *(outer._chain if outer else ()))
        self._found: dict[Any, Lazy] = {}

    def lane(self, name: Any, make: Callable[[], Any]) -> Lazy:
        """The lane ``name``, loaded when it is first needed."""
        return self._once(("", name), lambda: Lazy(make, shared=self))

    def apply(self, function: Callable[..., Any], operation: str, lane: tuple[Any, ...]) -> Lazy:
        """An operation's result; its arguments are kept with it, so that their identities stay theirs."""
        key = (operation, *((type(a), a if _is_number(a) else id(a)) for a in lane))
        return self._once(key, lambda: Lazy(function, operation, lane, self))

    def _once(self, key: Any, make: Callable[[], Lazy]) -> Lazy:
        if key not in self._found:
            self._found[key] = make()
        return self._found[key]

    @staticmethod
    def of(lane: tuple[Any, ...]) -> Shared | None:
        """The innermost scope among an operation's arguments; None where one of them is a row's own."""
        scopes = {getattr(a, "shared", None) for a in lane if not _is_number(a)}
        return next((s for s in scopes if s is not None and scopes <= {*s._chain}), None)


def _is_number(x: Any) -> bool:
    return isinstance(x, (bool, int, float))


class Rounded(Lazy):
    """One lane of two that were rounded together.

    kind: ``bf16``, ``f16`` or ``e4m3``. pair: the lane that computes both. half: which of them this is.
    """

    __slots__ = ("half", "kind", "pair")

    def __init__(self, pair: Lazy, half: int, kind: str) -> None:
        super().__init__(lambda: pair.get()[half])
        self.pair, self.half, self.kind = pair, half, kind


def force(lane: Any) -> Any:
    """The register of a lane, computed now if it was not yet."""
    return lane.get() if isinstance(lane, Lazy) else lane


def again(lane: Any) -> Any:
    """The register of a lane in a branch; what it rests on must have been needed outside (see ``anchor``)."""
    return lane.again() if isinstance(lane, Lazy) else lane


def anchor(lane: Any) -> None:
    """Compute what the lane rests on and cannot be computed again."""
    if isinstance(lane, Lazy) and lane.pending:
        if lane.operation:
            for argument in lane.arguments:
                anchor(argument)
        else:
            lane.get()


def _later(function: Callable[..., Any], lanes: list[Any], operation: str = "") -> Lazy:
    return Lazy(function, operation, tuple(lanes))


def add_square(total: Any, lane: Any) -> Any:
    """``total + lane``, in one instruction where the lane is the square of a rounded value; None where it is not.

    A value of at most eleven bits has a square of at most 22: float32 holds it, and one rounding is as good as two.
    Only squares below 2**-126, of bfloat16 below 2**-63, are rounded twice otherwise and once here.
    """
    if not (isinstance(lane, Lazy) and lane.operation == "mul" and lane.pending):
        return None
    x, y = lane.arguments
    return _fma(force(x), force(x), total) if x is y and isinstance(x, Rounded) else None


def largest_of_words(lanes: list[Any]) -> Any:
    """Largest magnitude of whole pairs of values rounded to bfloat16, NaN where any is, two at a time; else None.

    A magnitude's word comes from an FMA unit, and three words have one maximum: the ALU, where single maxima and
    conversions queue, does a quarter of the work.
    """
    pairs = list(zip(lanes[0::2], lanes[1::2], strict=False))
    whole = len(lanes) % 2 == 0 and all(
        isinstance(a, Rounded)
        and isinstance(b, Rounded)
        and a.pair is b.pair
        and (a.half, b.half, a.kind) == (0, 1, "bf16")
        for a, b in pairs
    )
    if not whole:
        return None
    found: Any = None
    for a, _ in pairs:
        (word,) = pack_words(list(a.pair.arguments), "bf16")
        size = pure_asm("abs.bf16x2 $0, $1;", "=r,r", Int32, word)
        text = "max.NaN.bf16x2 $0, $1, $2;"
        found = size if found is None else pure_asm(text, "=r,r,r", Int32, found, size)
    return _binary("max.NaN.f32")(*unpack_bfloat16(found))


_LOW = "{ .reg .b32 t; shl.b32 t, $1, 16; mov.b32 $0, t; }"
_HIGH = "{ .reg .b32 t; and.b32 t, $1, 0xFFFF0000; mov.b32 $0, t; }"


def unpack_bfloat16(word: Any) -> list[Any]:
    """The two values of a word."""
    return [pure_asm(text, "=f,r", Float32, word) for text in (_LOW, _HIGH)]


def _rounded(text: str, kind: str) -> Callable[[Any], list[Any]]:
    """Round lanes two at a time: the packed conversions are far faster than the single ones."""

    def both(a: Any, b: Any) -> list[Any]:
        packed = pure_asm(text, "=l,f,f", Int64, Float32(a), Float32(b))
        halves = (Int32(packed), Int32(packed >> 32))
        return [Float32(llvm.bitcast(Float32.mlir_type, h.ir_value())) for h in halves]

    def call(x: Any) -> list[Any]:
        lanes = x if isinstance(x, list) else [x]
        found: list[Any] = []
        for a, b in zip(lanes[0::2], [*lanes[1::2], lanes[-1]], strict=False):
            pair = _later(both, [a, b])
            found += [Rounded(pair, half, kind) for half in (0, 1)]
        return found[: len(lanes)]

    return call


_ROUND_BFLOAT16 = """{ .reg .b32 p, a, b; cvt.rn.bf16x2.f32 p, $2, $1;
shl.b32 a, p, 16; and.b32 b, p, 0xFFFF0000; mov.b64 $0, {a, b}; }"""
_ROUND_FLOAT16 = """{ .reg .b32 p; .reg .b16 l, h; .reg .f32 a, b; cvt.rn.f16x2.f32 p, $2, $1;
mov.b32 {l, h}, p; cvt.f32.f16 a, l; cvt.f32.f16 b, h; mov.b64 $0, {a, b}; }"""
_ROUND_FLOAT8 = """{ .reg .b32 p; .reg .b16 q, l, h; .reg .f32 a, b; cvt.rn.satfinite.e4m3x2.f32 q, $2, $1;
cvt.rn.f16x2.e4m3x2 p, q; mov.b32 {l, h}, p; cvt.f32.f16 a, l; cvt.f32.f16 b, h; mov.b64 $0, {a, b}; }"""


def lanes_of(function: Callable[..., Any], operation: str) -> Callable[..., list[Any]]:
    """Lift a function on scalars to lists of lanes with broadcasting, computing equal inputs once."""

    def call(*arguments: Any) -> list[Any]:
        lists = [a if isinstance(a, list) else [a] for a in arguments]
        count = max(map(len, lists))
        done: dict[tuple[int, ...], Any] = {}
        out = []
        for i in range(count):
            lane = tuple(x[i] if len(x) > 1 else x[0] for x in lists)
            scope = Shared.of(lane)
            if scope is not None:
                out.append(scope.apply(function, operation, lane))
                continue
            key = tuple(map(id, lane))
            if key not in done:
                done[key] = Lazy(function, operation, lane)
            out.append(done[key])
        return out

    return call


def _compare(function: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    return lambda a, b: Boolean(function(Float32(a), Float32(b)))


def _logical_not(a: Any) -> Any:
    return Boolean(Int32(Boolean(a)) == Int32(0))


_SCALARS: dict[str, Callable[..., Any]] = {
    "add": _add,
    "sub": _sub,
    "mul": _mul,
    "div": _binary("div.full.f32"),
    "min": _binary("min.NaN.f32"),
    "max": _binary("max.NaN.f32"),
    "lt": _compare(lambda a, b: a < b),
    "le": _compare(lambda a, b: a <= b),
    "gt": _compare(lambda a, b: a > b),
    "ge": _compare(lambda a, b: a >= b),
    "eq": _compare(lambda a, b: a == b),
    "ne": _compare(lambda a, b: a != b),
    "logical_and": lambda a, b: Boolean(a) & Boolean(b),
    "logical_or": lambda a, b: Boolean(a) | Boolean(b),
    "logical_not": _logical_not,
    "isnan": lambda x: Boolean(Float32(x) != Float32(x)),
    "neg": _unary("neg.f32"),
    "abs": _unary("abs.f32"),
    "floor": _unary("cvt.rmi.f32.f32"),
    "exp": _exp,
    "exp2": _exp2,
    "log": lambda x: cute.math.log(Float32(x)),
    "log2": lambda x: cute.math.log2(Float32(x)),
    "sqrt": _unary("sqrt.rn.f32"),
    "rsqrt": _unary("rsqrt.approx.f32"),
    "reciprocal": _unary("rcp.rn.f32"),
    "sin": lambda x: _unary("sin.approx.ftz.f32")(_reduced(x)),
    "cos": lambda x: _unary("cos.approx.ftz.f32")(_reduced(x)),
    "tanh": _tanh,
    "sigmoid": _sigmoid,
    "where": select,
}

DSL_OPERATIONS: Table = {
    **{name: lanes_of(function, name) for name, function in _SCALARS.items()},
    "round_bfloat16": _rounded(_ROUND_BFLOAT16, "bf16"),
    "round_float16": _rounded(_ROUND_FLOAT16, "f16"),
    "round_float8": _rounded(_ROUND_FLOAT8, "e4m3"),
}


def pack_words(lanes: list[Any], kind: str) -> list[Any]:
    """Pack lanes into 32-bit words: two to a word for ``bf16`` and ``f16``, four for ``e4m3``."""
    per_word = 4 if kind == "e4m3" else 2
    values = [Float32(force(x)) for x in lanes]
    values += [values[-1]] * (-len(values) % per_word)
    if kind != "e4m3":
        text = f"cvt.rn.{kind}x2.f32 $0, $2, $1;"
        pairs = zip(values[0::2], values[1::2], strict=True)
        return [pure_asm(text, "=r,f,f", Int32, a, b) for a, b in pairs]
    text = """{ .reg .b16 l, h; cvt.rn.satfinite.e4m3x2.f32 l, $2, $1;
cvt.rn.satfinite.e4m3x2.f32 h, $4, $3; mov.b32 $0, {l, h}; }"""
    quads = zip(values[0::4], values[1::4], values[2::4], values[3::4], strict=True)
    return [pure_asm(text, "=r,f,f,f,f", Int32, *quad) for quad in quads]
