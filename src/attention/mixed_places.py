"""Where the mixed-precision prefill kernel keeps what, as integer functions that its host-side model shares.

Tiles that WGMMA reads are K-major: rows of 128, 64 or 32 bytes, a wider row cut in chunks that follow each other, and
within them 16-byte unit u of row r at u ^ (some bits of r), as TMA and the matrix unit have it. Tiles are 1024-byte
aligned, so that a place in one is an offset.

    raw keys      (tokens, D/2 bytes), rows of D/2 bytes: what TMA brings of a record's nibbles
    raw scales    a record's order, [token / 2][quarter][token % 2][block of the quarter]; pages follow each other
    raw ΔS        a page after the other, each (terms, page) BF16, padded to 128 bytes, which TMA asks for
    keys          (tokens, D) FP16 or E4M3
    ΔS            FP32, in the order in which a consumer thread takes it: sixteen columns, four threads, four values
    queries       (rows, D) in place: as TMA brings them; FP16 unit over unit; E4M3 in the first half of their bytes
    values        (D, tokens) E4M3, tokens permuted in groups of 16 (``layouts.qk4pv8.token_at``)

Integer algebra that runs on int, NumPy arrays and DSL integers alike.
"""

from __future__ import annotations

from typing import Any

__all__ = [
    "delta_bytes",
    "delta_index",
    "delta_raw_byte",
    "probability_lane",
    "query_width",
    "scale_place",
    "tile_byte",
    "transposed_row",
    "value_address",
    "value_source",
    "value_width",
]

UNIT = 16
"""Bytes that swizzling moves together."""

TURNS = {128: 0x70, 64: 0x30, 32: 0x10}
"""Bits of an address that swizzling turns, by bytes of a row."""

TMA_ALIGNMENT = 128
"""Bytes to which a box in shared memory is aligned."""


def tile_byte(row: Any, unit: Any, width: int, rows: int) -> Any:
    """Byte of 16-byte ``unit`` of ``row`` in a tile of ``rows`` rows whose chunks are ``width`` bytes wide."""
    units = width // UNIT
    turned = (unit % units * UNIT) ^ (row * width // 8 & TURNS[width])
    return unit // units * (rows * width) + row * width + turned


def scale_place(head_dim: int, token: Any, block: int) -> tuple[Any, int, Any]:
    """Where the scale of a ``block`` (< D/16) of ``token`` lies in the raw scales.

    Returns:
        first byte of the pair of tokens, D/8 bytes that one thread loads whole; 32-bit word in them; byte in the word.
    """
    run = head_dim // 64
    quarter, within = block // run, block % run
    first = token // 2 * (2 * head_dim // 16)
    byte = quarter * 2 * run + within
    return first, byte // 4, byte % 4 + token % 2 * run


def delta_bytes(page: int, terms: int) -> int:
    """Bytes from a page's raw ΔS to the next one's."""
    return -(-2 * page * terms // TMA_ALIGNMENT) * TMA_ALIGNMENT


def delta_raw_byte(token: Any, term: int, page: int, terms: int) -> Any:
    """Byte of a ``term`` of ΔS of ``token`` of a tile, as TMA brings it."""
    return token // page * delta_bytes(page, terms) + (term * page + token % page) * 2


def delta_index(column: Any) -> Any:
    """Float of ΔS of tile ``column``: thread t of a quad reads four at 16j + 4t, of columns 16j + 8i + 2t + e."""
    return column // 16 * 16 + column % 8 // 2 * 4 + column % 16 // 8 * 2 + column % 2


def query_width(head_dim: int) -> int:
    """Bytes of a chunk of queries: a row of 64 values of 16 bits."""
    return min(2 * head_dim, 128)


def value_width(page: int | None) -> int:
    """Bytes of a chunk of transposed values: as many tokens as a page has."""
    return 128 if page is None else min(page, 128)


def probability_lane(word: int) -> tuple[int, int, int, int]:
    """Accumulators of a query-key product that make ``word`` of the A fragment of the product with values.

    Byte i of the word is k-position 4t + i of a group of 16, which is token ``token_at`` of that.
    """
    first = 2 * (word % 2) + 4 * (word - word % 2)
    return first, first + 1, first + 4, first + 5


def value_source(lane: Any) -> tuple[Any, Any]:
    """(token of 16, 16-byte unit of two) whose address ``lane`` (< 32) gives to a load of four matrices."""
    return lane // 8 % 2 * 8 + lane % 8, lane // 16


def transposed_row(lane: Any, half: int, odd: Any) -> Any:
    """Channel of 32 that a word of ``lane`` belongs to: of the ``half``-th unit, the even or the ``odd`` one."""
    return half * 16 + lane // 4 * 2 + odd


def value_address(channel: Any, group: Any, lane: Any, head_dim: int) -> Any:
    """Byte of the word of ``lane`` of a ``channel`` and a ``group`` of 16 tokens in transposed values."""
    return tile_byte(channel, group, 128, head_dim) + lane % 4 * 4
