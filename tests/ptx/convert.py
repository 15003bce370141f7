"""What instructions on registers compute, on arrays of lanes, where NumPy has no function of its own for it."""

from __future__ import annotations

from typing import Any

import numpy as np

from tests.ptx import floats
from tests.ptx.floats import flush

__all__ = ["pair", "single"]

F32 = np.float32


def fma(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """a · b + c in float64, which holds the product exactly, rounded to float32."""
    return (np.multiply(a, b, dtype=np.float64) + c).astype(F32)


def saturated(x: np.ndarray) -> np.ndarray:
    """Float32 within 0 and 1; NaN is 0."""
    return np.where(np.isnan(x), F32(0), np.clip(x, F32(0), F32(1)))


def high(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """The upper half of a product of integers."""
    bits = 8 * a.dtype.itemsize
    if bits < 64:
        wide = np.int64 if a.dtype.kind == "i" else np.uint64
        return ((a.astype(wide) * b.astype(wide)) >> wide(bits)).astype(a.dtype)
    product = a.astype(object) * b.astype(object)
    return np.array([int(p) >> 64 for p in product], dtype=object).astype(a.dtype)


def divided(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """A quotient of integers, towards zero; all bits set where the divisor is zero."""
    safe = np.where(b == 0, b.dtype.type(1), b)
    quotient = a // safe
    if a.dtype.kind == "i":
        quotient = quotient + ((quotient < 0) & (quotient * safe != a))
    return np.where(b == 0, a.dtype.type(-1) if a.dtype.kind == "i" else ~a.dtype.type(0), quotient)


def shifted(a: np.ndarray, n: np.ndarray, left: bool) -> np.ndarray:
    """A shift by any number of places."""
    bits = 8 * a.dtype.itemsize
    far, n = n >= bits, np.minimum(n, bits - 1).astype(a.dtype)
    if left:
        return np.where(far, a.dtype.type(0), a << n)
    return np.where(far & (a.dtype.kind == "u"), a.dtype.type(0), a >> n)


def funnel(a: np.ndarray, b: np.ndarray, n: np.ndarray, left: bool, wrap: bool) -> np.ndarray:
    """The upper word of (b, a) shifted left, or the lower one of it shifted right."""
    both = a.astype(np.uint64) | b.astype(np.uint64) << np.uint64(32)
    n = (n & 31 if wrap else np.minimum(n, 32)).astype(np.uint64)
    return ((both << n) >> np.uint64(32) if left else both >> n).astype(np.uint32)


def _tanh(x: np.ndarray) -> np.ndarray:
    return np.tanh(x)


FUNCTIONS: dict[str, Any] = {
    "ex2": np.exp2,
    "lg2": np.log2,
    "rcp": lambda x: 1.0 / x,
    "sqrt": np.sqrt,
    "rsqrt": lambda x: 1.0 / np.sqrt(x),
    "sin": np.sin,
    "cos": np.cos,
    "tanh": _tanh,
}
"""In float64; the hardware's approximations differ from it by some 2^-22, of tanh by 2^-11."""


def function(name: str, x: np.ndarray, ftz: bool) -> np.ndarray:
    """A function of float32."""
    found = FUNCTIONS[name]((flush(x) if ftz else x).astype(np.float64)).astype(F32)
    return flush(found) if ftz else found


def _parts(kind: str, x: np.ndarray) -> np.ndarray:
    """(1 or 2, 32) float32 values of halves in registers."""
    value = floats.f16_value if kind.startswith("f16") else floats.bf16_value
    if not kind.endswith("x2"):
        return value(x)[None]
    return value(np.stack((x & 0xFFFF, x >> 16)))


def halves(name: str, kind: str, flags: list[str], *given: np.ndarray) -> np.ndarray:
    """Arithmetic on float16 or bfloat16, one or two to a register, rounded once."""
    x = [_parts(kind, g).astype(np.float64) for g in given]
    if name in ("min", "max"):
        pick = {"min": (np.fmin, np.minimum), "max": (np.fmax, np.maximum)}[name]["NaN" in flags]
        found = pick(x[0], x[1])
    elif name in FUNCTIONS:
        found = FUNCTIONS[name](x[0])
    else:
        found = {
            "add": lambda: x[0] + x[1], "sub": lambda: x[0] - x[1], "mul": lambda: x[0] * x[1],
            "fma": lambda: x[0] * x[1] + x[2], "neg": lambda: -x[0], "abs": lambda: np.abs(x[0]),
        }[name]()  # fmt: skip
    if "relu" in flags:
        found = np.where(found > 0, found, np.where(np.isnan(found), found, 0.0))
    if "sat" in flags:
        found = np.where(np.isnan(found), 0.0, np.clip(found, 0.0, 1.0))
    bits = _rounded(found, "f16" if kind.startswith("f16") else "bf16")
    return bits[0] if len(bits) == 1 else bits[0] | bits[1] << 16


def _rounded(x: np.ndarray, kind: str) -> np.ndarray:
    """Patterns of float64 rounded to a half, once: by way of float32 rounded to odd."""
    if kind == "f16":
        return floats.f16_bits(x)
    near = x.astype(F32)
    back = near.astype(np.float64)
    u = near.view(np.uint32).copy()
    inexact = (back != x) & np.isfinite(x) & np.isfinite(near)
    toward = np.where(np.abs(back) > np.abs(x), u - 1, u) | 1
    return floats.bf16_bits(np.where(inexact, toward, u).astype(np.uint32).view(F32))


def popc(x: np.ndarray) -> np.ndarray:
    """Bits that are set."""
    return np.bitwise_count(x).astype(np.uint32)


def bfind(x: np.ndarray, *flags: str) -> np.ndarray:
    """Place of the highest bit that differs from the sign; -1 where there is none."""
    assert not flags, "bfind.shiftamt is not known"
    x = np.where(x < 0, ~x, x) if x.dtype.kind == "i" else x
    return np.array([int(v).bit_length() - 1 for v in x], np.int64).astype(np.uint32)


def clz(x: np.ndarray) -> np.ndarray:
    """Bits above the highest that is set."""
    bits = 8 * x.dtype.itemsize
    return np.array([bits - int(v).bit_length() for v in x], np.uint32)


def brev(x: np.ndarray) -> np.ndarray:
    """Bits in reverse order."""
    bits = 8 * x.dtype.itemsize
    return np.array([int(f"{int(v):0{bits}b}"[::-1], 2) for v in x], x.dtype)


def bfe(a: np.ndarray, start: np.ndarray, count: np.ndarray) -> np.ndarray:
    """``count`` bits from ``start`` on, the sign spread in signed types."""
    bits, found = 8 * a.dtype.itemsize, []
    for v, p, n in zip(a, start & 0xFF, count & 0xFF, strict=True):
        p, n = int(p), int(n)
        field = (int(v) % (1 << bits)) >> p & ((1 << n) - 1)
        if a.dtype.kind == "i" and n:
            top = min(p + n - 1, bits - 1)
            if int(v) % (1 << bits) >> top & 1:
                width = top - p + 1
                field |= -1 << max(width, 0)
        found.append(field % (1 << bits))
    return np.array(found, np.dtype(f"u{a.dtype.itemsize}")).view(a.dtype)


def bfi(a: np.ndarray, b: np.ndarray, start: np.ndarray, count: np.ndarray) -> np.ndarray:
    """``b`` with ``count`` of its bits from ``start`` on replaced by the low ones of ``a``."""
    bits, found = 8 * a.dtype.itemsize, []
    for v, w, p, n in zip(a, b, start & 0xFF, count & 0xFF, strict=True):
        mask = ((1 << int(n)) - 1) << int(p) & ((1 << bits) - 1)
        found.append((int(w) & ~mask) | (int(v) << int(p) & mask))
    return np.array(found, a.dtype)


def lop3(a: np.ndarray, b: np.ndarray, c: np.ndarray, table: int) -> np.ndarray:
    """Any function of three bits, by its table: bit 4a + 2b + c."""
    found = np.zeros_like(a)
    for i in range(8):
        if table >> i & 1:
            found |= (a if i & 4 else ~a) & (b if i & 2 else ~b) & (c if i & 1 else ~c)
    return found


def permuted_by(a: np.ndarray, b: np.ndarray, selector: int) -> np.ndarray:
    """Four bytes of ``a`` and, from number 4 on, ``b``; the sign of one is spread where bit 3 of its number is set."""
    numbers = [selector >> 4 * i & 0xF for i in range(4)]
    both = np.stack((a, b), axis=1).view(np.uint8)
    found = both[:, [n & 7 for n in numbers]]
    for i, n in enumerate(numbers):
        if n & 8:
            found[:, i] = (found[:, i].view(np.int8) >> 7).view(np.uint8)
    return np.ascontiguousarray(found).view(np.uint32)[:, 0]


def permuted(a: np.ndarray, b: np.ndarray, selector: np.ndarray) -> np.ndarray:
    """``permuted_by`` with a selector for each lane."""
    found = np.zeros_like(a)
    for value in np.unique(selector & 0xFFFF):
        found = np.where(selector & 0xFFFF == value, permuted_by(a, b, int(value)), found)
    return found


def pairs(pick: np.ufunc, a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """A function of each half of two words."""
    low, high = (pick(a >> s & 0xFFFF, b >> s & 0xFFFF).astype(np.uint32) for s in (0, 16))
    return low | high << np.uint32(16)


def dp4a(a: np.ndarray, b: np.ndarray, c: np.ndarray, kinds: list[str]) -> np.ndarray:
    """A sum of four products of bytes on top of ``c``."""
    x, y = (
        np.ascontiguousarray(v)
        .view(np.int8 if k == "s32" else np.uint8)
        .reshape(-1, 4)
        .astype(np.int64)
        for v, k in zip((a, b), kinds, strict=True)
    )
    return ((x * y).sum(axis=1) + c).astype(c.dtype)


TO: dict[str, Any] = {
    "bf16x2": floats.bf16_bits, "f16x2": floats.f16_bits, "e4m3x2": floats.e4m3_bits,
    "e5m2x2": floats.e5m2_bits, "e2m1x2": floats.e2m1_bits,
}  # fmt: skip
OF: dict[str, tuple[Any, int]] = {
    "e4m3x2": (floats.e4m3_value, 8), "e5m2x2": (floats.e5m2_value, 8), "e2m1x2": (floats.e2m1_value, 4),
    "f16x2": (floats.f16_value, 16), "bf16x2": (floats.bf16_value, 16),
}  # fmt: skip


def pair(to: str, of: str, flags: list[str], *given: np.ndarray) -> np.ndarray:
    """Two values to a packed format: from two float32, the upper one first, or from another packed format."""
    if of == "f32":
        upper, lower = given
    else:
        value, width = OF[of]
        lower, upper = (
            value(given[0] & ((1 << width) - 1)),
            value(given[0] >> width & ((1 << width) - 1)),
        )
    both = np.stack((lower, upper))
    if "relu" in flags:
        both = np.where(both < 0, F32(0), both)
    assert "rz" not in flags, f"cvt.rz to {to} is not known"
    if to in ("bf16x2", "f16x2") and "satfinite" in flags:
        largest = {"bf16x2": 3.3895313892515355e38, "f16x2": 65504.0}[to]
        both = np.clip(both, F32(-largest), F32(largest))
    bits = TO[to](both)
    width = {"e4m3x2": 8, "e5m2x2": 8, "e2m1x2": 4}.get(to, 16)
    return bits[0] | bits[1] << width


INTEGRAL = {"rni": np.rint, "rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil}


def _float_of(of: str, x: np.ndarray) -> np.ndarray:
    if of == "bf16":
        return floats.bf16_value(x)
    return x.astype(F32) if of == "f16" else x


def single(to: str, of: str, flags: list[str], x: np.ndarray) -> np.ndarray:
    """One value to another type, as an array that NumPy casts to the register without further rounding."""
    known = {"rn", "rna", "rz", "rni", "rzi", "rmi", "rpi", "ftz", "sat", "satfinite", "relu"}
    assert set(flags) <= known, f"cvt.{'.'.join(flags)}.{to}.{of} is not known"
    value = _float_of(of, x) if of in ("f16", "bf16", "f32", "f64") else x
    if "ftz" in flags and value.dtype == F32:
        value = flush(value)
    for flag in flags:
        if flag in INTEGRAL:
            value = INTEGRAL[flag](value)
    if to[0] in "us":
        return _integer(to, value)
    if "relu" in flags:
        value = np.where(value < 0, value.dtype.type(0), value)
    if to == "bf16":
        return floats.bf16_bits(value.astype(F32))
    if to == "f16":
        if value.dtype.kind == "f":
            return floats.f16_bits(value).astype(np.uint16).view(np.float16)
        return value.astype(np.float16)
    if to == "tf32":
        return floats.tf32(value, "rna" in flags)
    assert to in ("f32", "f64"), f"cvt to {to} is not known"
    assert "rz" not in flags or of in ("f16", "bf16"), "cvt.rz is not known"
    found = value.astype(np.float64 if to == "f64" else F32)
    return saturated(found) if "sat" in flags else found


def _integer(to: str, value: np.ndarray) -> np.ndarray:
    """Integers of a float that is whole, or of another integer: clamped to the type; NaN is 0."""
    low, high_ = (
        (0, 2 ** int(to[1:]) - 1)
        if to[0] == "u"
        else (-(2 ** (int(to[1:]) - 1)), 2 ** (int(to[1:]) - 1) - 1)
    )
    if value.dtype.kind != "f":
        return np.array(
            [min(max(int(v), low), high_) for v in value], np.dtype(f"{to[0].replace('s', 'i')}8")
        )
    numbers = [
        0 if np.isnan(v) else high_ if v > high_ else low if v < low else int(v)
        for v in value.astype(np.float64)
    ]
    return np.array(numbers, np.uint64 if to[0] == "u" else np.int64)
