"""The INT4 KV record of one (page, KV head) (FuTransformer 3.3.2).

    K nibbles        page_size rows of D/2 bytes
    V nibbles        page_size rows of D/2 bytes
    K scales         page_size FP32
    V scales         page_size FP32

A row holds its channels in natural order; the product's order is left to the query
(``kv_fragments``). Within a 32-bit word nibble p holds channel 2 * (p % 4) + p // 4, so that the
neighbours 2j and 2j + 1 are the low and the high half of ``word >> 4j``:

    bits       31-28  27-24  23-20  19-16  15-12  11-8   7-4    3-0
    channel      7      5      3      1      6      4     2      0

A nibble is the code plus 8, from 1 to 15.

Integer algebra that runs on int, NumPy arrays and DSL integers alike. Offsets within a record are
below 2^31; where a record starts is 64-bit arithmetic (``kv.records``).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from epicute.errors import require

__all__ = ["ZERO_CODE", "Int4Record", "channel_of_nibble", "nibble_of_channel"]

ZERO_CODE = 8
"""Nibble of the value 0."""

SCALE_BYTES = 4


def nibble_of_channel(channel: Any) -> Any:
    """Nibble (< D) of a row that holds ``channel``: nibble n is bits 4n to 4n + 3 of the row."""
    return channel // 8 * 8 + channel % 2 * 4 + channel % 8 // 2


def channel_of_nibble(nibble: Any) -> Any:
    """Inverse of ``nibble_of_channel``."""
    return nibble // 8 * 8 + nibble % 4 * 2 + nibble % 8 // 4


@dataclass(frozen=True)
class Int4Record:
    """Byte offsets within the record of one (page, KV head).

    Attributes:
        page_size: tokens, a multiple of 16 (a dense cache has one page a sequence).
        head_dim: a multiple of 64 up to 256.
    """

    page_size: int
    head_dim: int

    def __post_init__(self) -> None:
        require(
            self.head_dim in (64, 128, 192, 256),
            "head_dim",
            self.head_dim,
            "a multiple of 64 up to 256",
            "keep such heads in a BF16 or FP8 cache",
        )
        require(
            0 < self.page_size <= 2**20 and self.page_size % 16 == 0,
            "page_size",
            self.page_size,
            "a multiple of 16, up to 2^20 tokens",
            "use pages of 16, 32, 64 or 128, or round max_len up",
        )

    @property
    def row_bytes(self) -> int:
        """Bytes of one token's nibbles of K, and of V."""
        return self.head_dim // 2

    @property
    def bytes(self) -> int:
        """Bytes of the record: a multiple of 128."""
        return 2 * self.page_size * (self.row_bytes + SCALE_BYTES)

    def key_row(self, token: Any) -> Any:
        """First byte of the token's K nibbles."""
        return token * self.row_bytes

    def value_row(self, token: Any) -> Any:
        """First byte of the token's V nibbles."""
        return (token + self.page_size) * self.row_bytes

    def key_scale(self, token: Any) -> Any:
        """First byte of the token's FP32 scale of K."""
        return 2 * self.page_size * self.row_bytes + token * SCALE_BYTES

    def value_scale(self, token: Any) -> Any:
        """First byte of the token's FP32 scale of V."""
        return 2 * self.page_size * self.row_bytes + (token + self.page_size) * SCALE_BYTES

    def __str__(self) -> str:
        return (
            f"INT4 record: {self.page_size} tokens of {self.head_dim} channels, {self.bytes} bytes "
            f"(K at 0, V at {self.value_row(0)}, scales of K at {self.key_scale(0)}, of V at "
            f"{self.value_scale(0)})"
        )
