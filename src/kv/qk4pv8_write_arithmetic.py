"""NVFP4 and E4M3 rows in registers, to the bits of ``quant.nvfp4``. Imports the DSL.

A thread holds eight adjacent channels, which are one word of a page; two neighbouring lanes hold a block of sixteen.

E2M1 has no instruction on Hopper. Its magnitudes lie 1/2 apart below 2, 1 apart to 4 and 2 apart to 6, so that adding
p * 2^22, where p is the power of two at or below the magnitude and at least 1, rounds to the nearest one, ties to the
even code, and leaves the code, less 2 * log2(p), in the sum's last bits.

Of finite values (``encode_finite``) it is the sum of three such roundings of halves h of a magnitude, cut to [0, 1] for
nothing by the instructions that make them, which all run where products do and not where integers are:

    2^23 + 4 * [h] + 2 * [h - 1] + [h - 2]

Where a term is not zero those before it are even, so that ties stay where they are.
"""

from __future__ import annotations

from typing import Any

import cutlass
from cutlass import Float32, Int32, cute

from epicute.layouts.qk4pv8 import magnitude_bit, sign_bit
from epicute.quant.dsl import asm, divide, multiply, reciprocal, select
from epicute.quant.nvfp4 import SIXTH

__all__ = [
    "block_scale",
    "e4m3_byte",
    "encode_finite",
    "encode_word",
    "in_terms",
    "is_finite",
    "loudest",
    "pack_quad",
    "subtract",
]

CODE_OFFSET = (22 << 23) + (127 << 1)
"""Of the bits of a magnitude rounded as above to its code: the addend's exponent, and twice the bias of p's."""

# min comes first: it makes 6 of NaN, whatever sign the hardware gave it.
_CLAMP = (
    "{ .reg .f32 y; mul.rn.f32 y, $1, $2; min.f32 y, y, 0f40C00000; max.f32 $0, y, 0fC0C00000; }"
)
_MAGNITUDE = """{{ .reg .f32 a, r; .reg .b32 p, t, s;
abs.f32 a, $2; mov.b32 p, a; and.b32 p, p, 0x7F800000; max.s32 p, p, 0x3F800000;
add.s32 t, p, {addend}; mov.b32 r, t; add.rn.f32 r, a, r; mov.b32 t, r;
sub.s32 t, t, p; shr.u32 s, p, 22; add.s32 t, t, s; shl.b32 t, t, {place}; add.s32 $0, $1, t; }}"""
_SIGN = """{{ .reg .b32 s; mov.b32 s, $2; shr.u32 s, s, {down}; and.b32 s, s, {mask};
or.b32 $0, $1, s; }}"""


_HALVES = """{{ .reg .f32 a, h, u; .reg .b32 t;
abs.f32 a, $2; mul.rn.f32 h, a, $3; mul.rn.sat.f32 u, a, $3; fma.rn.f32 a, u, 0f40800000, 0f4B000000;
add.rn.sat.f32 u, h, 0fBF800000; fma.rn.f32 a, u, 0f40000000, a;
add.rn.sat.f32 u, h, 0fC0000000; add.rn.f32 a, a, u;
mov.b32 t, a; shl.b32 t, t, {place}; add.s32 $0, $1, t; }}"""


def subtract(a: Any, b: Any) -> Any:
    """a - b, rounded once."""
    return asm("sub.rn.f32 $0, $1, $2;", "=f,f,f", Float32, Float32(a), Float32(b))


def loudest(lanes: list[Any]) -> Any:
    """Largest magnitude; NaN where any is."""
    found = Float32(lanes[0])
    text = "{ .reg .f32 a, b; abs.f32 a, $1; abs.f32 b, $2; max.NaN.f32 $0, a, b; }"
    for x in lanes[1:]:
        found = asm(text, "=f,f,f", Float32, Float32(x), found)
    return found


def is_finite(x: Any) -> Any:
    """Whether ``x`` is neither NaN nor infinite."""
    text = "{ .reg .f32 a; abs.f32 a, $1; mov.b32 $0, a; }"
    return asm(text, "=r,f", Int32, Float32(x)) < Int32(0x7F800000)


def e4m3_byte(x: Any) -> Any:
    """The code of ``x``, saturating, in the low byte of an Int32."""
    text = "{ .reg .b16 c; cvt.rn.satfinite.e4m3x2.f32 c, $2, $1; cvt.u32.u16 $0, c; }"
    return asm(text, "=r,f,f", Int32, Float32(x), Float32(0.0))


def block_scale(amax: Any, k_scale: Any) -> tuple[Any, Any, Any]:
    """(code of the scale, inverse of scale times ``k_scale``, the scale before its cast) of a block.

    ``amax``: largest finite magnitude of the block. ``k_scale``: None for 1.
    """
    wanted = multiply(amax, SIXTH)
    if k_scale is not None:
        wanted = divide(wanted, k_scale)
    code = e4m3_byte(wanted)
    # The code's bits as those of a float32, whose exponent is 120 too small.
    scale = multiply((code << 20).bitcast(Float32), 2.0**120)
    if k_scale is not None:
        scale = multiply(scale, k_scale)
    inverse = reciprocal(scale) if k_scale is not None else _inverse_of_code(scale)
    inverse = select(code == Int32(0), Float32(0.0), inverse)
    return code, inverse, wanted


def encode_word(lanes: list[Any], inverse: Any, order: str) -> Any:
    """The page's word of eight channels."""
    magnitudes, signs, offsets = Int32(0), Int32(0), 0
    for channel, x in enumerate(lanes):
        y = asm(_CLAMP, "=f,f,f", Float32, Float32(x), inverse)
        place, sign = magnitude_bit(order, channel), sign_bit(order, channel)
        text = _MAGNITUDE.format(addend=22 << 23, place=place)
        magnitudes = asm(text, "=r,r,f", Int32, magnitudes, y)
        text = _SIGN.format(down=31 - sign, mask=f"0x{1 << sign:X}")
        signs = asm(text, "=r,r,f", Int32, signs, y)
        offsets += CODE_OFFSET << place
    # All offsets at once, in 32 bits.
    offsets %= 1 << 32
    return (magnitudes - Int32(offsets - (offsets >> 31 << 32))) | signs


def _inverse_of_code(scale: Any) -> Any:
    """``reciprocal`` of an E4M3 code's value: one step of Newton's, without the branch for denormal numbers."""
    text = """{ .reg .f32 r, e; rcp.approx.ftz.f32 r, $1; neg.f32 e, $1; fma.rn.f32 e, e, r, 0f3F800000;
fma.rn.f32 $0, r, e, r; }"""
    return asm(text, "=f,f", Float32, scale)


def encode_finite(lanes: list[Any], inverse: Any, order: str) -> Any:
    """``encode_word`` of finite channels and of an inverse without ``k_scale``."""
    half = multiply(inverse, 0.5)
    word, offset = Int32(0), 0
    for channel, x in enumerate(lanes):
        place = magnitude_bit(order, channel)
        text = _HALVES.format(place=place)
        word = asm(text, "=r,r,f,f", Int32, word, Float32(x), half)
        offset += 0x4B000000 << place
    offset %= 1 << 32
    word = word - Int32(offset - (offset >> 31 << 32))
    # Sign bits of two channels are sixteen apart in the word: each is spread over a half, of which one bit is taken.
    channels = {sign_bit(order, channel): channel for channel in range(8)}
    for place in sorted(bit for bit in channels if bit < 16):
        text = f"""{{ .reg .b32 s; prmt.b32 s, $2, $3, 0xFFBB; and.b32 s, s, 0x{0x10001 << place:X};
or.b32 $0, $1, s; }}"""
        pair = (Float32(lanes[channels[place + i]]) for i in (0, 16))
        word = asm(text, "=r,r,f,f", Int32, word, *pair)
    return word


def pack_quad(lanes: list[Any]) -> Any:
    """Four Float32 as E4M3 codes, saturating, the first in the low byte."""
    text = """{ .reg .b16 l, h; cvt.rn.satfinite.e4m3x2.f32 l, $2, $1;
cvt.rn.satfinite.e4m3x2.f32 h, $4, $3; mov.b32 $0, {l, h}; }"""
    return asm(text, "=r,f,f,f,f", Int32, *(Float32(x) for x in lanes))


def in_terms(pair: tuple[Any, Any], terms: int) -> list[Any]:
    """Words of two values in BF16 each, a word a term: ``quant.smoothing.split_terms``."""
    rest, words = [Float32(x) for x in pair], []
    for _ in range(terms):
        word = asm("cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,f,f", Int32, *rest)
        words.append(word)
        high = asm("and.b32 $0, $1, 0xFFFF0000;", "=r,r", Int32, word)
        rounded = ((word << 16).bitcast(Float32), high.bitcast(Float32))
        rest = [
            select(is_finite(r), subtract(x, r), Float32(0.0))
            for x, r in zip(rest, rounded, strict=True)
        ]
    return words


@cute.jit
def finite_maximum(lanes: cute.Tensor, found: cute.Tensor, at: cutlass.Constexpr) -> None:
    """Put the largest finite magnitude of eight ``lanes`` from ``at * 8`` on in ``found[at]``."""
    best = Float32(0.0)
    text = """{ .reg .pred p; .reg .f32 a; abs.f32 a, $1; setp.lt.f32 p, a, 0f7F800000;
selp.f32 a, a, 0f00000000, p; max.f32 $0, a, $2; }"""
    for i in cutlass.range_constexpr(8):
        best = asm(text, "=f,f,f", Float32, Float32(lanes[8 * at + i]), best)
    found[at] = best
