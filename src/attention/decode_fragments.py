"""Cached rows as operands of m16n8k16 products in decode, in natural channel order: which lane reads what.

Scores are K · Qᵀ: sixteen tokens are the rows of A, columns of B are query rows. Outputs are Vᵀ · Pᵀ: sixteen channels
are the rows of A. A sum over the depth has no order, and no more have the rows of an output that is stored by channel,
so that each format takes its channels as its bytes lie:

    16-bit   ldmatrix; V by ldmatrix.trans                            channels in their order
    FP8      ldmatrix takes four channels for a lane, two pairs       key_channel: 16s + 4t + {0, 1}, {2, 3}
             V: words of four channels, of two tokens interleaved     value_channel: 32b + 4g + …
    INT4     ``layouts.kv_fragments``; by the table of byte codes (the paper's), pairs are the two nibbles of a byte

A tile of 16- or 8-bit rows lies in shared memory as TMA leaves it: in chunks of 128 or 64 bytes of every row, 16-byte
units of a chunk moved by a function of the row, so that eight rows' units meet in no bank. Rows of other sizes lie
whole.

Integer algebra that runs on int, NumPy arrays and DSL integers alike.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from epicute.layouts import kv_fragments
from epicute.layouts.kv_int4 import channel_of_nibble

__all__ = [
    "TABLE",
    "TileLayout",
    "key_channel",
    "local_channel",
    "natural_channel",
    "row_token",
    "value_channel",
]

TABLE = "int4 by table"
"""Order of INT4 channels whose pairs are nibbles of a byte; the other orders have their caches' names."""

PACKED = ("int4", TABLE)


@dataclass(frozen=True)
class TileLayout:
    """Bytes of a tile of keys, or of values, of 16- or 8-bit rows.

    Attributes:
        rows: tokens.
        row_bytes: of a token.
    """

    rows: int
    row_bytes: int

    @property
    def chunk(self) -> int:
        """Bytes of a row that lie together: 128 or 64, which are swizzled, or all."""
        return next((n for n in (128, 64) if self.row_bytes % n == 0), self.row_bytes)

    @property
    def swizzled(self) -> bool:
        """Whether units are moved."""
        return self.chunk in (64, 128) and self.row_bytes % self.chunk == 0

    @property
    def units(self) -> int:
        """Units of 16 bytes of a chunk."""
        return self.chunk // 16

    def turn(self, row: Any) -> Any:
        """What a unit's number is xored with."""
        if not self.swizzled:
            return row * 0
        return row % 8 if self.chunk == 128 else row // 2 % 4

    def chunk_offset(self, unit: int) -> int:
        """First byte of the chunk that has ``unit`` of each row."""
        return unit // self.units * self.rows * self.chunk

    def offset(self, row: Any, unit: int) -> Any:
        """First byte of a unit."""
        place = (unit % self.units) ^ self.turn(row)
        return self.chunk_offset(unit) + row * self.chunk + place * 16


def row_token(order: str, row: Any) -> Any:
    """The token (< 16) in ``row`` of the A operand of a product with keys; also its depth in one with values.

    INT4: two of each four are exchanged, so that lanes that read values of even rows meet half as often in a bank.
    """
    return row ^ (row // 2 % 2) if order in PACKED else row


def key_channel(order: str, step: Any, k: Any, head_dim: int) -> Any:
    """Channel at depth ``k`` (< 16) of product ``step`` (< head_dim / 16) with keys, and of the query in B."""
    if order == "int4":
        return kv_fragments.key_channel(step, k, head_dim)
    if order == TABLE:
        nibble = step % 2 * 4 + k // 8 * 2 + k % 2
        return k % 8 // 2 * (head_dim // 4) + step // 2 * 8 + channel_of_nibble(nibble)
    if order == "fp8":
        return 16 * step + k % 8 // 2 * 4 + k // 8 * 2 + k % 2
    return 16 * step + k


def value_channel(order: str, tile: Any, row: Any, head_dim: int) -> Any:
    """Channel in ``row`` (< 16) of ``tile`` (< head_dim / 16) of a product with values."""
    if order == "int4":
        return kv_fragments.value_channel(tile, row, head_dim)
    if order == TABLE:
        nibble = tile % 4 * 2 + row // 8
        return row % 8 * (head_dim // 8) + tile // 4 * 8 + channel_of_nibble(nibble)
    if order == "fp8":
        pairs = head_dim // 32
        paired = tile // 2 * 32 + row % 8 * 4 + tile % 2 * 2 + row // 8
        alone = 32 * pairs + row % 8 * 2 + row // 8
        if isinstance(tile, int):
            return paired if tile < 2 * pairs else alone
        return paired + (alone - paired) * (tile >= 2 * pairs)
    return 16 * tile + row


def local_channel(order: str, tile: int, row: Any, tiles: int) -> Any:
    """Place of ``row`` of ``tile`` among the channels of ``tiles`` tiles that are exchanged together, from 0 on."""
    if order in PACKED or order == "fp8":
        return value_channel(order, tile, row, 16 * tiles)
    return 16 * tile + row


def natural_channel(order: str, local: Any, first: int, tiles: int, head_dim: int) -> Any:
    """The channel at place ``local`` of the ``tiles`` tiles from ``first`` on; four adjacent places are adjacent.

    ``tiles`` is a multiple of 2, of 4 for ``TABLE``, or reaches the last tile.
    """
    if order in PACKED:
        return local // (2 * tiles) * (head_dim // 8) + 2 * first + local % (2 * tiles)
    return 16 * first + local
