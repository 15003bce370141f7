"""What kernels that quantise do with registers and addresses. Imports the DSL.

Arithmetic is spelt in PTX, so that no multiplication and addition become one: each operation rounds as PyTorch's does,
and a value has the same bits on either. Addresses are 64-bit integers. A row is read and written in vectors of eight
16-bit elements; the last one may be cut.
"""

from __future__ import annotations

from typing import Any

import cutlass
import torch
from cutlass import Boolean, Float32, Int16, Int32, Int64, cute
from cutlass._mlir.dialects import llvm

from epicute.quant.fp8 import SCALE_MAX, SCALE_MIN

__all__ = [
    "WIDTH",
    "Launched",
    "Peak",
    "Tally",
    "Vector",
    "add",
    "add_count",
    "again",
    "begin",
    "divide",
    "is_nan",
    "is_saturated",
    "load_float",
    "load_integer",
    "load_vectors",
    "magnitude",
    "maximum",
    "multiply",
    "pack",
    "pack_e4m3",
    "raise_maximum",
    "reciprocal",
    "root",
    "select",
    "store_float",
    "store_integer",
    "sum_partials",
    "sum_squares",
    "unpack",
    "warp_maximum",
    "within_range",
]

WIDTH = 8
"""Elements of a vector: 16 bytes read, 8 bytes of codes."""

NOTHING = -1.0
"""``DelayedScale``'s maximum of no values: as bits below those of every magnitude."""


def asm(text: str, constraints: str, result: Any, *arguments: Any, effects: bool = False) -> Any:
    """One PTX instruction or block; without ``effects`` it may be dropped, moved and merged with its like."""
    found = llvm.inline_asm(
        result.mlir_type,
        [a.ir_value() for a in arguments],
        text,
        constraints,
        has_side_effects=effects,
        is_align_stack=False,
        asm_dialect=llvm.AsmDialect.AD_ATT,
    )
    return result(found)


def _unary(instruction: str, x: Any) -> Any:
    return asm(f"{instruction} $0, $1;", "=f,f", Float32, Float32(x))


def _binary(instruction: str, a: Any, b: Any) -> Any:
    return asm(f"{instruction} $0, $1, $2;", "=f,f,f", Float32, Float32(a), Float32(b))


def add(a: Any, b: Any) -> Any:
    """a + b, rounded once."""
    return _binary("add.rn.f32", a, b)


def multiply(a: Any, b: Any) -> Any:
    """a * b, rounded once and never fused with an addition."""
    return _binary("mul.rn.f32", a, b)


def divide(a: Any, b: Any) -> Any:
    """a / b, rounded once."""
    return _binary("div.rn.f32", a, b)


def reciprocal(x: Any) -> Any:
    """1 / x, rounded once."""
    return _unary("rcp.rn.f32", x)


def root(x: Any) -> Any:
    """Square root, rounded once."""
    return _unary("sqrt.rn.f32", x)


def maximum(a: Any, b: Any) -> Any:
    """The larger one; NaN where either is."""
    return _binary("max.NaN.f32", a, b)


def select(condition: Any, a: Any, b: Any) -> Any:
    """Float32 ``a`` where ``condition``, else ``b``."""
    return Float32(cutlass.select_(condition, Float32(a), Float32(b)))


def magnitude(x: Any, otherwise: float) -> Any:
    """|x| where it is finite, else ``otherwise``."""
    text = """{ .reg .pred p; .reg .f32 a; abs.f32 a, $1; setp.lt.f32 p, a, 0f7F800000;
selp.f32 $0, a, $2, p; }"""
    return asm(text, "=f,f,f", Float32, Float32(x), Float32(otherwise))


def is_saturated(x: Any) -> Any:
    """1 where |x| > 448, infinities included, else 0."""
    text = """{ .reg .pred p; .reg .f32 a; abs.f32 a, $1; setp.gt.f32 p, a, 0f43E00000;
selp.s32 $0, 1, 0, p; }"""
    return asm(text, "=r,f", Int32, Float32(x))


def is_nan(x: Any) -> Any:
    """1 where x is NaN, else 0."""
    text = "{ .reg .pred p; setp.nan.f32 p, $1, $1; selp.s32 $0, 1, 0, p; }"
    return asm(text, "=r,f", Int32, Float32(x))


def within_range(scale: Any) -> Any:
    """The scale within [SCALE_MIN, SCALE_MAX]; not for NaN."""
    return _binary("min.f32", _binary("max.f32", scale, SCALE_MIN), SCALE_MAX)


_UNPACK = {
    torch.bfloat16: (
        "{ .reg .b32 t; shl.b32 t, $1, 16; mov.b32 $0, t; }",
        "{ .reg .b32 t; and.b32 t, $1, 0xFFFF0000; mov.b32 $0, t; }",
    ),
    torch.float16: (
        "{ .reg .b16 l, h; mov.b32 {l, h}, $1; cvt.f32.f16 $0, l; }",
        "{ .reg .b16 l, h; mov.b32 {l, h}, $1; cvt.f32.f16 $0, h; }",
    ),
}


def unpack(words: Any, dtype: torch.dtype) -> list[Any]:
    """The eight Float32 of a fragment of four words."""
    return [
        asm(text, "=f,r", Float32, Int32(words[i]))
        for i in range(WIDTH // 2)
        for text in _UNPACK[dtype]
    ]


def again(words: Any) -> Any:
    """The same fragment, of which the compiler no longer knows what it held.

    Else it keeps what was unpacked from it for the next time, twice as many registers as the words take.
    """
    found = cute.make_rmem_tensor(cute.size(words), Int32)
    for i in range(cute.size(words)):
        found[i] = asm("mov.b32 $0, $1;", "=r,r", Int32, Int32(words[i]), effects=True)
    return found


def pack(lanes: list[Any], dtype: torch.dtype) -> Any:
    """Eight Float32 rounded to ``dtype``, as a fragment of four words."""
    kind = {torch.bfloat16: "bf16", torch.float16: "f16"}[dtype]
    words = cute.make_rmem_tensor(WIDTH // 2, Int32)
    for i in range(WIDTH // 2):
        pair = (Float32(lanes[2 * i]), Float32(lanes[2 * i + 1]))
        words[i] = asm(f"cvt.rn.{kind}x2.f32 $0, $2, $1;", "=r,f,f", Int32, *pair)
    return words


def pack_e4m3(lanes: list[Any]) -> Any:
    """Eight Float32 cast to E4M3 (see ``epicute.quant.fp8``), as a fragment of two words."""
    text = """{ .reg .b16 l, h; cvt.rn.satfinite.e4m3x2.f32 l, $2, $1;
cvt.rn.satfinite.e4m3x2.f32 h, $4, $3; mov.b32 $0, {l, h}; }"""
    words = cute.make_rmem_tensor(WIDTH // 4, Int32)
    for i in range(WIDTH // 4):
        four = [Float32(x) for x in lanes[4 * i : 4 * i + 4]]
        words[i] = asm(text, "=r,f,f,f,f", Int32, *four)
    return words


def _view(dtype: Any, address: Any, count: int, alignment: int) -> Any:
    pointer = cute.make_ptr(dtype, address, cute.AddressSpace.gmem, assumed_align=alignment)
    return cute.make_tensor(pointer, cute.make_layout(count))


class Vector:
    """Vector ``index`` of rows of ``columns`` elements; most of its questions are answered while tracing.

    ``beyond``: the largest index that a thread can ask for, known while tracing. ``live``: whether the thread has a
    row at all.
    """

    def __init__(self, index: Any, columns: int, beyond: int, live: Any = True) -> None:
        self.index, self.live = index, live
        self.whole, self.tail = divmod(columns, WIDTH)
        self.certain = beyond < self.whole

    def _full(self) -> Any:
        inside = True if self.certain else self.index < self.whole
        if self.live is True:
            return inside
        return self.live if inside is True else Boolean(self.live) & inside

    def _cut(self) -> Any:
        """Whether this is the vector that the last column cuts; False where none can be."""
        if self.certain or not self.tail:
            return False
        found = self.index == self.whole
        return found if self.live is True else Boolean(self.live) & found

    @property
    def inside(self) -> Any:
        """Whether the row has any column of the vector."""
        if self.certain:
            return True
        return self.index < self.whole + (self.tail > 0)

    def load(self, row: Any) -> Any:
        """Four words from the row at ``row``, which starts at a multiple of 16 bytes; zero beyond its columns."""
        words = cute.make_rmem_tensor(WIDTH // 2, Int32)
        address, full, cut = row + Int64(self.index) * 16, self._full(), self._cut()
        source = _view(Int32, address, WIDTH // 2, 16)
        if full is True:
            cute.autovec_copy(source, words)
        else:
            words.fill(0)
            _copy_if(source, words, full)
        if cut is not False:
            halves = cute.recast_tensor(words, Int16)
            _copy_some_if(_view(Int16, address, self.tail, 2), halves, cut, self.tail)
        return words

    def store(self, row: Any, words: Any, alignment: int) -> None:
        """Store a fragment's words, 4 of ``pack`` or 2 of ``pack_e4m3``, within the row's columns."""
        count = cute.size(words)
        address = row + Int64(self.index) * (4 * count)
        full, cut = self._full(), self._cut()
        target = _view(Int32, address, count, alignment)
        if full is True:
            cute.autovec_copy(words, target)
        else:
            _copy_if(words, target, full)
        if cut is not False:
            unit = {4: Int16, 2: cutlass.Int8}[count]
            single = cute.recast_tensor(words, unit)
            rest = _view(unit, address, self.tail, unit.width // 8)
            _copy_some_if(single, rest, cut, self.tail)


@cute.jit
def _copy_if(source: cute.Tensor, target: cute.Tensor, condition: Boolean) -> None:
    if condition:
        cute.autovec_copy(source, target)


@cute.jit
def _copy_some_if(
    source: cute.Tensor, target: cute.Tensor, condition: Boolean, count: cutlass.Constexpr
) -> None:
    if condition:
        for i in cutlass.range_constexpr(count):
            target[i] = source[i]


def load_float(address: Any) -> Any:
    """One float32."""
    return _view(Float32, address, 1, 4)[0]


def load_integer(address: Any, dtype: torch.dtype = torch.int64) -> Any:
    """One int32 or int64, as Int64."""
    native = {torch.int32: Int32, torch.int64: Int64}[dtype]
    return Int64(_view(native, address, 1, dtype.itemsize)[0])


def load_vectors(
    base: Any, vector: Vector, columns: int, reach: int, dtype: torch.dtype
) -> list[Any]:
    """The eight Float32 of the columns of ``vector``, of a row of ``columns`` bfloat16, float16 or float32 at ``base``.

    ``reach``: as the vector's. ``columns`` is a multiple of 8.
    """
    if dtype != torch.float32:
        return unpack(Vector(vector.index, columns, reach).load(base), dtype)
    found = []
    for i in (0, 1):
        words = Vector(2 * vector.index + i, 2 * columns, 2 * reach + 1).load(base)
        found += [Int32(words[k]).bitcast(Float32) for k in range(WIDTH // 2)]
    return found


@cute.jit
def store_float(address: Int64, value: Float32, condition: Boolean) -> None:
    """Store one float32 where ``condition``."""
    if condition:
        _view(Float32, address, 1, 4)[0] = value


@cute.jit
def store_integer(address: Int64, value: Int64, condition: Boolean) -> None:
    """Store one int64 where ``condition``."""
    if condition:
        _view(Int64, address, 1, 8)[0] = value


@cute.jit
def raise_maximum(address: Int64, bits: Int32, condition: Boolean) -> None:
    """Atomic maximum of the bits of a non-negative float32."""
    if condition:
        pointer = cute.make_ptr(Int32, address, cute.AddressSpace.gmem, assumed_align=4)
        cute.arch.atomic_max(pointer, bits)


@cute.jit
def add_count(address: Int64, count: Int64, condition: Boolean) -> None:
    """Atomic addition to an int64 counter."""
    if condition:
        pointer = cute.make_ptr(Int64, address, cute.AddressSpace.gmem, assumed_align=8)
        cute.arch.atomic_add(pointer, count)


@cute.jit
def sum_partials(address: Int64, count: Int32) -> Float32:
    """Sum of ``count`` float32 from ``address``, added left to right."""
    total = Float32(0.0)
    for i in cutlass.range(count, unroll=8):
        total = add(total, load_float(address + Int64(i) * 4))
    return total


def sum_squares(lanes: list[Any]) -> Any:
    """Sum of squares over the lanes of a quad, in all four of them: ``SumSquares``' order of addition.

    Each thread adds its own left to right, then the threads are added as (0 + 1) + (2 + 3).
    """
    total = multiply(lanes[0], lanes[0])
    for x in lanes[1:]:
        total = add(total, multiply(x, x))
    for distance in (1, 2):
        total = add(total, cute.arch.shuffle_sync_bfly(total, offset=distance))
    return total


def warp_maximum(x: Any) -> Any:
    """Largest over the warp, NaN where any is."""
    for distance in (16, 8, 4, 2, 1):
        x = maximum(x, cute.arch.shuffle_sync_bfly(x, offset=distance))
    return x


class Launched:
    """A kernel whose integers have ``names``."""

    names: tuple[str, ...] = ()

    def given(self, arguments: Any, name: str) -> Any:
        """An argument, as Int64."""
        return arguments[self.names.index(name)]

    def row(self, arguments: Any, name: str, row: Any) -> Any:
        """Address of a row of the matrix ``name``."""
        stride = self.given(arguments, f"{name}_stride")
        return self.given(arguments, name) + Int64(row) * stride


class Peak:
    """A thread's largest value so far; it starts from one that is no larger."""

    def __init__(self, start: float = NOTHING) -> None:
        self.register = cute.make_rmem_tensor(1, Float32)
        self.register[0] = Float32(start)

    def see(self, value: Any) -> None:
        """Raise to ``value``."""
        self.register[0] = _binary("max.f32", self.register[0], value)

    def of_warp(self) -> Any:
        """Bits of the warp's largest, which order like integers; negative for nothing."""
        return cute.arch.warp_redux_sync(self.register[0].bitcast(Int32), "max")


class Tally:
    """A thread's count."""

    def __init__(self) -> None:
        self.register = cute.make_rmem_tensor(1, Int32)
        self.register[0] = Int32(0)

    def add(self, count: Any) -> None:
        """Add an Int32."""
        self.register[0] = self.register[0] + Int32(count)

    def of_warp(self) -> Any:
        """The warp's count."""
        return cute.arch.warp_redux_sync(self.register[0], "add")


def begin() -> None:
    """The next kernel may set itself up; this one waits for what the last one wrote."""
    cute.arch.griddepcontrol_launch_dependents()
    cute.arch.griddepcontrol_wait()
