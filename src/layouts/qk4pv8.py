"""The QK4PV8 page of one KV head: NVFP4 keys, their scales, FP8 values transposed (MpFA 6).

    K nibbles     page_size rows of D/2 bytes
    K scales      page_size * D/16 E4M3 bytes
    V^T           D rows of page_size bytes, tokens permuted within groups of 16

beside it ΔS, BF16, as (q_heads, terms, page_size) a page, in an array of its own.

**Bits of K.** A 32-bit word holds eight adjacent channels. Where a channel's magnitude (three bits)
and sign stand is chosen for the reader:

    exact16   dequantisation to FP16 in 15 instructions a word: register j is the pair (2j, 2j + 1),
              low and high half; in each 16-bit half
                pair 0: sign 15, magnitude 11-9      one AND with 8E008E00
                pair 1: sign 7,  magnitude 3-1       the same after << 8
                pair 2: sign 8,  magnitude 14-12     two shifts, two LOP3
                pair 3: sign 0,  magnitude 6-4       two shifts, two LOP3
    fast8     magnitudes in natural nibbles, which PRMT takes as indices into a table of E4M3 (or
              FP16) bytes; signs where the result wants them: channel p < 4 at bit 8p + 7, the
              others at 8(p - 4) + 3
    tcgen05   natural: nibble p is channel p, its sign on top, what Blackwell's MMA reads

**Order of the scales.** A decode lane takes two neighbouring tokens and a quarter of their
channels, so for exact16 and fast8 its scales are adjacent: [token / 2][quarter][token % 2][block of
the quarter]. For tcgen05 they lie as `tcgen05.cp` wants them: [64 channels][token % 32][token /
32][block % 4]; pages below 128 tokens hold a part of each 16-byte column.

**Tokens of V.** Physical position u of 16 holds token ``token_at(u)``. Four accumulators of a
query-key product, packed without a shuffle, are then the register of an FP8 A operand.

Integer algebra that runs on int, NumPy arrays and DSL integers alike.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from epicute.errors import require

__all__ = [
    "HEAD_DIMS",
    "NATIVE_PAGE",
    "ORDERS",
    "PAGE_SIZES",
    "QK4PV8Page",
    "exact16_pairs",
    "exact16_scale",
    "magnitude_bit",
    "position_of",
    "sign_bit",
    "token_at",
]

ORDERS = ("exact16", "fast8", "tcgen05")
"""For whom the bits and scales of K are ordered."""

NATIVE_PAGE = 128
"""Tokens of a page that one TMA box each of K and of V fills."""

PAGE_SIZES = (128, 64, 32)
"""Tokens per page. Below 32 a row of V^T would be less than a memory sector."""

HEAD_DIMS = (64, 128)

BLOCK = 16
"""Channels of one scale."""


def token_at(position: Any) -> Any:
    """Token (< 16) at physical ``position`` (< 16) of a group of V^T."""
    return position % 2 + position // 2 % 2 * 8 + position // 4 * 2


def position_of(token: Any) -> Any:
    """Physical position of ``token`` (< 16): the inverse of ``token_at``."""
    return token % 2 + token // 8 * 2 + token % 8 // 2 * 4


def magnitude_bit(order: str, channel: Any) -> Any:
    """Lowest of the three bits of a word that hold the magnitude of ``channel`` (< 8)."""
    if order != "exact16":
        return channel * 4
    pair = channel // 2
    return channel % 2 * 16 + 9 - pair % 2 * 8 + pair // 2 * 3


def sign_bit(order: str, channel: Any) -> Any:
    """Bit of a word that holds the sign of ``channel`` (< 8)."""
    if order == "tcgen05":
        return channel * 4 + 3
    if order == "fast8":
        return channel % 4 * 8 + 7 - channel // 4 * 4
    pair = channel // 2
    return channel % 2 * 16 + 15 - pair % 2 * 8 - pair // 2 * 7


SIGNS = 0x80008000 - 2**32  # signed, as DSL and NumPy 32-bit integers take their constants
MAGNITUDES = 0x0E000E00
BOTH = 0x8E008E00 - 2**32


def exact16_pairs(word: Any) -> tuple[Any, Any, Any, Any]:
    """Four registers of FP16 pairs, e2m1 * 2^-14, of an ``exact16`` word.

    ``word`` is a signed 32-bit integer, of NumPy or of the DSL. Times ``exact16_scale`` twice over,
    as FP16, they are e2m1 * scale * 2^-7, exactly.
    """
    return (
        word & BOTH,
        (word << 8) & BOTH,
        ((word << 7) & SIGNS) | ((word >> 3) & MAGNITUDES),
        ((word << 15) & SIGNS) | ((word << 5) & MAGNITUDES),
    )


def exact16_scale(byte: Any) -> Any:
    """FP16 bits of scale * 2^-8 of a non-negative E4M3 ``byte``; FP16 2^15 makes it scale * 2^7."""
    return byte << 7


@dataclass(frozen=True)
class QK4PV8Page:
    """Byte offsets within the record of one (page, KV head).

    Attributes:
        page_size: tokens: 128, 64 or 32.
        head_dim: 64 or 128.
        order: for whom K is ordered, one of ``ORDERS``.
    """

    page_size: int
    head_dim: int
    order: str = "exact16"

    def __post_init__(self) -> None:
        require(
            self.page_size in PAGE_SIZES,
            "page_size",
            self.page_size,
            f"one of {PAGE_SIZES} tokens",
            f"use {NATIVE_PAGE}; rows of transposed values below 32 bytes waste memory sectors",
        )
        require(
            self.head_dim in HEAD_DIMS,
            "head_dim",
            self.head_dim,
            f"one of {HEAD_DIMS}",
            "keep such heads in a BF16 or FP8 cache",
        )
        require(
            self.order in ORDERS,
            "order",
            self.order,
            f"one of {ORDERS}",
            "name the reader",
        )

    @property
    def row_bytes(self) -> int:
        """Bytes of one token's K nibbles."""
        return self.head_dim // 2

    @property
    def blocks(self) -> int:
        """Scales of one token."""
        return self.head_dim // BLOCK

    @property
    def scales_start(self) -> int:
        """First byte of the scales."""
        return self.page_size * self.row_bytes

    @property
    def values_start(self) -> int:
        """First byte of V^T."""
        return self.scales_start + self.page_size * self.blocks

    @property
    def bytes(self) -> int:
        """Bytes of the record: a multiple of 128, as its three parts are."""
        return self.values_start + self.page_size * self.head_dim

    def key_row(self, token: Any) -> Any:
        """First byte of the token's K nibbles."""
        return token * self.row_bytes

    def scale_byte(self, token: Any, block: Any) -> Any:
        """Byte of the scale of channels 16 * ``block`` and on of ``token``."""
        if self.order == "tcgen05":
            columns = self.page_size // 32
            column = token % 32 * columns + token // 32
            return self.scales_start + (block // 4 * 32 * columns + column) * 4 + block % 4
        run = self.head_dim // 64
        pair = (token // 2 * 4 + block // run) * 2 + token % 2
        return self.scales_start + pair * run + block % run

    def value_byte(self, token: Any, channel: Any) -> Any:
        """Byte of the value of ``channel`` of ``token``."""
        position = token // 16 * 16 + position_of(token % 16)
        return self.values_start + channel * self.page_size + position

    def delta_index(self, head: Any, term: Any, token: Any, terms: int) -> Any:
        """Element of a page's ΔS, an array (q_heads, terms, page_size)."""
        return (head * terms + term) * self.page_size + token

    def __str__(self) -> str:
        return (
            f"QK4PV8 page: {self.page_size} tokens of {self.head_dim} channels, order "
            f"{self.order}, {self.bytes} bytes (K at 0, scales at {self.scales_start}, V^T at "
            f"{self.values_start})"
        )
