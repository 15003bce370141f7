"""Codes to fragments of the MMA's A operand, in registers. Imports the DSL.

INT4 becomes BF16 as the low bits of a number whose exponent is zero: 2^-133 of the code, or 2^-129 of it at the next
nibble, as the smallest numbers are evenly spaced up to 2^-125. A packed multiply-add by 2^127, or by 2^123, makes
2^-6 (code - zero) of it, exactly: one shift for eight codes, one mask and one of these for two. What else there is
inserts a code into the mantissa of 128.0 (BF16: three shifts for eight), or of 1024.0 (FP16, where the rows g + 8 hold
1024 + 16 code), and takes what is too much back, on the same layout:

    registers   FP16 alone: a packed subtraction of 1024 + zero for two codes
    sums        once a group: sum of (offset + zero) x, from a product with ones that all row tiles of a warp share
    bias        a second MMA for each: - (128 + zero) · x, FuTransformer 4.6's "bias MMA"

or no numbers are made of them at all, and activations become integers instead (``integers``).

FP8 is E4M3; with BF16 activations its seven bits are moved into a BF16 number and multiplied by 2^120, which is exact
for all codes but NaN, which weights do not hold.
"""

from __future__ import annotations

from typing import Any

import torch
from cutlass import Float32, Int32

from epicute.decode.sm90.ptx import signed
from epicute.epilogues.dsl import pure_asm

__all__ = ["Convert"]

ONES = {torch.bfloat16: 0x3F803F80, torch.float16: 0x3C003C00}
ODD_FACTOR = {torch.bfloat16: 1.0, torch.float16: 1.0 / 16}
"""What a sum of rows g + 8 is multiplied by."""

OFFSETS = {torch.bfloat16: (128.0, 128.0), torch.float16: (1024.0, 1024.0)}
NEGATIVE = {torch.bfloat16: 0xC300C300, torch.float16: 0xE400E400}
"""Minus the offset, twice, as bits; a zero point is added to the mantissa."""

TINY = 6
"""Codes that come from the smallest numbers are 2^-6 of what they stand for: 2^127 is the largest power of two."""

GROWTH = (0x7F007F00, 0x7D007D00)
"""2^127 and 2^123 in BF16, twice: of a nibble at bit 0 and at bit 4."""

NEGATIVE_GROWTH = 0xFF00FF00
"""-2^127."""

LARGE = 0x7B807B80
"""2^120 in BF16, twice."""


class Convert:
    """How the words of a lane's loads become the four A registers of a step."""

    def __init__(self, bits: int, dtype: torch.dtype, conversion: str) -> None:
        self.bits, self.dtype = bits, dtype
        self.integer = bits == 4
        self.exact = not self.integer or conversion == "registers"
        self.summed = self.integer and conversion == "sums"
        self.biased = self.integer and conversion == "bias"
        self.bytes = self.integer and conversion == "integers"
        self.tiny = self.integer and conversion == "registers" and dtype == torch.bfloat16

    def ones(self) -> list[Any]:
        """An A fragment of ones."""
        return [signed(ONES[self.dtype])] * 4

    def odd_factor(self) -> float:
        """What a group's sums of rows g + 8 are multiplied by, beside its scale."""
        return ODD_FACTOR[self.dtype] if self.integer and not self.bytes else 1.0

    def last_factor(self) -> float:
        """What complete sums are multiplied by: no scale may overflow for it."""
        return 2.0**TINY if self.tiny else 1.0

    def offset(self, row: int, zero: Any) -> Any:
        """What is too much in a sum, per unit of the activations' sum. ``row``: 0 for g, 1 for g + 8."""
        factor = 16.0 if self.dtype == torch.float16 and row else 1.0
        if isinstance(zero, int):
            return Float32(OFFSETS[self.dtype][row] + zero * factor)
        return Float32(zero) * Float32(factor) + Float32(OFFSETS[self.dtype][row])

    def negative(self, row: int, zero: Any) -> Any:
        """Minus what is too much in a code, twice in a word."""
        if self.tiny:
            if isinstance(zero, int):
                bits = int(torch.tensor(-zero * 2.0**-TINY).bfloat16().view(torch.int16)) & 0xFFFF
                return signed(bits | bits << 16)
            return self._grown(zero * Int32(0x00010001), NEGATIVE_GROWTH, signed(0))
        shift = 4 if self.dtype == torch.float16 and row else 0
        start = NEGATIVE[self.dtype]
        if isinstance(zero, int):
            return signed(start | zero << shift | zero << (16 + shift))
        return (zero * Int32(0x00010001 << shift)) | signed(start)

    def bias(self, negatives: list[Any]) -> list[Any]:
        """An A fragment of minus what is too much in rows g and g + 8."""
        return [negatives[0], negatives[1], negatives[0], negatives[1]]

    def fragment(self, loads: list[list[Any]], step: int, negatives: list[Any] | None) -> list[Any]:
        """The A registers of ``step`` from a block's loads of four words. ``negatives``: of rows g and g + 8."""
        if self.bits == 16:
            return loads[step]
        if self.bits == 8:
            pair = loads[step // 2][2 * (step % 2) : 2 * (step % 2) + 2]
            return [*self._fp8(pair[0]), *self._fp8(pair[1])]
        if self.tiny:
            assert negatives is not None
            return [self._tiny(loads[0][step], j, negatives[j % 2]) for j in range(4)]
        found = [self._int4(loads[0][step], j) for j in range(4)]
        if self.exact:
            assert negatives is not None
            found = [self._minus(x, negatives[j % 2]) for j, x in enumerate(found)]
        return found

    def _int4(self, word: Any, register: int) -> Any:
        """``layouts.bf16_pair`` and ``fp16_pair``, with a LOP3 that the compiler would make two of."""
        if self.dtype == torch.bfloat16:
            shift, mask, magic = 4 * register, 0x000F000F, 0x43004300
        else:
            shift, magic = register // 2 * 8, 0x64006400
            mask = 0x00F000F0 if register % 2 else 0x000F000F
        text = f"lop3.b32 $0, $1, {mask:#x}, {magic:#x}, 0xEA;"
        return pure_asm(text, "=r,r", Int32, word >> shift if shift else word)

    def _tiny(self, word: Any, register: int, negative: Any) -> Any:
        """Two codes, less their zero points, 2^-6 of each."""
        shift, odd = register // 2 * 8, register % 2
        found = (word >> shift if shift else word) & Int32(0x00F000F0 if odd else 0x000F000F)
        return self._grown(found, GROWTH[odd], negative)

    def _grown(self, x: Any, factor: int, offset: Any) -> Any:
        """x · factor + offset, of two BF16."""
        text = "fma.rn.bf16x2 $0, $1, $2, $3;"
        return pure_asm(text, "=r,r,r,r", Int32, x, signed(factor), offset)

    def _minus(self, x: Any, negative: Any) -> Any:
        kind = {torch.bfloat16: "bf16", torch.float16: "f16"}[self.dtype]
        text = f"fma.rn.{kind}x2 $0, $1, $2, $3;"
        return pure_asm(text, "=r,r,r,r", Int32, x, signed(ONES[self.dtype]), negative)

    def _fp8(self, word: Any) -> list[Any]:
        """Four numbers from a word, in two."""
        if self.dtype == torch.float16:
            text = "{ .reg .b16 l, h; mov.b32 {l, h}, $1; cvt.rn.f16x2.e4m3x2 $0, %s; }"
            return [pure_asm(text % half, "=r,r", Int32, word) for half in "lh"]
        # Of each number the low byte, then the high byte: what is shared by all four is done to all at once.
        low = (word & Int32(0x0F0F0F0F)) << 4
        high = ((word >> 4) & Int32(0x07070707)) | (word & signed(0x80808080))
        found = []
        for selection in (0x5140, 0x7362):
            text = f"prmt.b32 $0, $1, $2, {selection:#x};"
            spread = pure_asm(text, "=r,r,r", Int32, low, high)
            text = "mul.rn.bf16x2 $0, $1, $2;"
            found.append(pure_asm(text, "=r,r,r", Int32, spread, signed(LARGE)))
        return found
