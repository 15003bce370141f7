"""A row of keys or values to nibbles in registers, to the bit as ``kv.int4`` does it. Imports the DSL.

A row lies in adjacent lanes, ``count`` adjacent channels in each. Every operation rounds as PyTorch's does; see
``kv.int4`` for the contract, and ``quant.hadamard`` for the order of the rotation's.
"""

from __future__ import annotations

from typing import Any

import cutlass
import numpy as np
import torch
from cutlass import Float32, Int32, cute

from epicute.kv.int4 import INT4_MAX
from epicute.layouts.kv_int4 import ZERO_CODE
from epicute.quant.dsl import Peak, add, asm, divide, magnitude, multiply, reciprocal
from epicute.quant.fp8 import SCALE_MIN

__all__ = ["butterfly", "pack_nibbles", "quantize_lanes", "unpack_halves"]

UNPACK = {
    torch.bfloat16: (
        "{ .reg .b32 t; shl.b32 t, $1, 16; mov.b32 $0, t; }",
        "{ .reg .b32 t; and.b32 t, $1, 0xFFFF0000; mov.b32 $0, t; }",
    ),
    torch.float16: (
        "{ .reg .b16 l, h; mov.b32 {l, h}, $1; cvt.f32.f16 $0, l; }",
        "{ .reg .b16 l, h; mov.b32 {l, h}, $1; cvt.f32.f16 $0, h; }",
    ),
}


def unpack_halves(words: list[Any], dtype: torch.dtype) -> list[Any]:
    """Float32 of words of two 16-bit floats."""
    return [asm(text, "=f,r", Float32, w) for w in words for text in UNPACK[dtype]]


def _subtract(a: Any, b: Any) -> Any:
    return asm("sub.rn.f32 $0, $1, $2;", "=f,f,f", Float32, Float32(a), Float32(b))


def butterfly(lanes: list[Any], width: int, position: Any, count: int) -> list[Any]:
    """``quant.hadamard.rotate`` of a row whose channels ``position · count + i`` are ``lanes``; 0 leaves it as it is.

    ``position``: of this lane among those of the row, the low bits of its number.
    """
    if not width:
        return lanes
    stride = 1
    while stride < width:
        if stride < count:
            lanes = _within(lanes, stride)
        else:
            distance = stride // count
            second = (position & distance) != 0
            other = [cute.arch.shuffle_sync_bfly(x, distance) for x in lanes]
            lanes = [_turned(x, y, second) for x, y in zip(lanes, other, strict=True)]
        stride *= 2
    return [multiply(x, float(np.float32(width**-0.5))) for x in lanes]


def _within(lanes: list[Any], stride: int) -> list[Any]:
    found = list(lanes)
    for i in range(len(lanes)):
        if not i & stride:
            a, b = lanes[i], lanes[i + stride]
            found[i], found[i + stride] = add(a, b), _subtract(a, b)
    return found


def _turned(mine: Any, other: Any, second: Any) -> Any:
    """other + mine, or, in the second of two lanes, other - mine: the sign of a number is exact."""
    signed = Float32(cutlass.select_(second, -mine, mine))
    return add(other, signed)


def quantize_lanes(lanes: list[Any]) -> tuple[list[Any], Any]:
    """(nibbles, scale) of a row that a whole warp holds."""
    peak = Peak(0.0)
    for x in lanes:
        peak.see(magnitude(x, 0.0))
    amax = peak.of_warp().bitcast(Float32)
    scale = divide(amax, INT4_MAX)
    scale = asm("max.f32 $0, $1, $2;", "=f,f,f", Float32, scale, Float32(SCALE_MIN))
    inverse = reciprocal(scale)
    text = """{ .reg .f32 a; min.f32 a, $1, 0f40E00000; max.f32 a, a, 0fC0E00000;
cvt.rni.s32.f32 $0, a; }"""
    codes = [asm(text, "=r,f", Int32, multiply(x, inverse)) for x in lanes]
    return [code + ZERO_CODE for code in codes], scale


def pack_nibbles(nibbles: list[Any], lane: Any) -> Any:
    """The word of eight channels that this lane's two, four or eight belong to (``layouts.kv_int4``)."""
    count = len(nibbles)
    word = Int32(0)
    for i, nibble in enumerate(nibbles):
        word = word | nibble << (4 * (i % 2 * 4 + i // 2))
    if count < 8:
        word = word << (lane % (8 // count) * (2 * count))
    distance = 1
    while distance * count < 8:
        word = word | cute.arch.shuffle_sync_bfly(word, distance)
        distance *= 2
    return word
