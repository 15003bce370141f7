"""Who does what in a few-row kernel: row tiles, shares of k, places in shared memory.

The weight is cut in **bands** of 64 physical rows, and a band along k in records (``layouts.decode_order``) of four row
tiles. A **tile** is what a composition's epilogue needs together: one band, or several where a unit is wider. A
cluster of CTAs works on one tile at a time, each CTA on its share of the records along k; in a CTA eight warps share a
record:

    MMA      bits     rows of a warp   shares                        warp w
    sync     4, 8     32               4, of a record's k            rows 32 (w % 2), share w // 2
    sync     16       16               2, of a record's k            rows 16 (w % 4), share w // 4
    wgmma    any      16               2, every other record         rows 16 (w % 4), share w // 4

A share of a record's k is a range of whole segments: 64 k, or the 128 of a group. Neither depends on the number of rows
of x, so that the order in which a sum is added does not. With ``wgmma`` four warps are a warpgroup, and their rows its
64; where a CTA holds several tiles at once, each warpgroup has tiles of its own, and there are no shares.

The functions are integer algebra alone and run on int, on NumPy arrays and on DSL integers alike.
"""

from __future__ import annotations

from math import gcd
from typing import Any

from epicute.epilogues.resolve import Block, Resolved, ResolvedRange
from epicute.layouts import BLOCK, Record, split

__all__ = [
    "BAND",
    "FINISHERS",
    "MMAS",
    "RECORD_BYTES",
    "TILES",
    "WARPS",
    "block_rows",
    "epilogue_tasks",
    "finisher",
    "integer_place",
    "lane_blocks",
    "partial_place",
    "pitch_of",
    "segment_blocks",
    "segments_of",
    "share_of",
    "shares_of",
    "span_of",
    "tile_rows",
    "vector_place",
    "warp_rows",
]

TILES = 4
"""Row tiles of a record."""

BAND = 16 * TILES
"""Physical rows of a record."""

RECORD_BYTES = 16384
"""Bytes of a record's codes, at most."""

WARPS = 8
"""Warps that multiply."""

VECTOR = 8
"""16-bit elements of a 16-byte vector of activations."""

FINISHERS = 3
"""Warps that run epilogues."""

MMAS = ("sync", "wgmma")
"""Instructions that multiply: ``mma.sync`` of a warp, and the warpgroup's with A in registers, B in shared memory."""

OPERAND_ROW = 2 * BLOCK
"""Bytes of a row of a block of x: of the 128-byte swizzle."""


def warp_rows(bits: int, mma: str = "sync") -> int:
    """Rows of a record that one warp multiplies: with more of them, fewer reads of the same activations."""
    return 16 if bits == 16 or mma == "wgmma" else 32


def shares_of(bits: int, mma: str = "sync", wide: bool = False) -> int:
    """Partial sums of each sum: shares of a record's k, or with ``wgmma`` of records. ``wide``: several tiles at once,
    of which each warpgroup has its own.
    """
    if mma == "wgmma":
        return 1 if wide else 2
    return WARPS * warp_rows(bits, mma) // BAND


def segment_blocks(record: Record) -> int:
    """Blocks of 64 k of a segment."""
    return 2 if record.group == 2 * BLOCK else 1


def span_of(record: Record) -> int:
    """k whose products a warp adds up before it scales them: a group, at most a segment."""
    segment = segment_blocks(record) * BLOCK
    return min(record.group, segment) if record.group else segment


def segments_of(record: Record) -> int:
    """Segments of a record."""
    return record.blocks // segment_blocks(record)


def share_of(index: Any, count: int, total: int) -> tuple[Any, Any]:
    """(first, end) of share ``index`` of ``count`` shares of ``total`` things, as even as can be."""
    return index * total // count, (index + 1) * total // count


def vector_place(row: Any, vector: Any, rows: int) -> Any:
    """Where vector ``vector`` (8 adjacent k) of row ``row`` (< ``rows``) of x stands, in bytes.

    Blocks of 64 k, in them the rows, 128 bytes each, whose 16-byte chunks the 128-byte swizzle exchanges: what TMA
    writes, `ldmatrix` reads without a bank conflict, and `wgmma` reads by descriptor.
    """
    block, within = split(vector, 8)
    return (block * rows + row) * OPERAND_ROW + (within ^ split(row, 8)[1]) * 16


def integer_place(row: Any, step: Any, lane: Any, rows: int) -> Any:
    """Where the integers of MMA step ``step`` (16 k) of row ``row`` (< ``rows``) of x stand that quad lane ``lane``
    multiplies, in bytes: four high bytes, and behind them four low bytes.

    Two steps by two, in them groups of eight rows, each as many vectors as a warp has lanes. Those of one row and quad
    lane in eight adjacent pairs of steps are in different banks, as they are stored.
    """
    pair, odd = split(step, 2)
    eight, inside = split(row, 8)
    slot = (inside * 4 + lane) ^ split(pair, 8)[1]
    return ((pair * (rows // 8) + eight) * 32 + slot) * 16 + odd * 8


def pitch_of(tile: int) -> int:
    """Float32 from one row of x to the next in the buffer of partial sums: the reading lanes then meet every bank."""
    return tile + 8


def partial_place(sender: Any, row: Any, feature: Any, rows: int, tile: int) -> Any:
    """Where a partial sum stands, counted in float32.

    Args:
        sender: share of k, over all CTAs of the cluster. row: of x, among the ``rows`` whose sums this CTA finishes.
        feature: physical row of the tile. tile: rows of the tile.
    """
    return (sender * rows + row) * pitch_of(tile) + feature


def epilogue_tasks(rows: int) -> int:
    """Warps that one tile's epilogue takes, eight rows of x each."""
    return max(rows // 8, 1)


def finisher(warp: Any, turn: Any, rows: int) -> Any:
    """The first part of the epilogue of a CTA's ``turn``-th tile that a warp of ``FINISHERS`` does; every
    ``FINISHERS``-th behind it is its too, and none where that is not below the tasks.

    Warps take turns, so that epilogues of a few rows run beside each other.
    """
    return (warp + FINISHERS - turn * epilogue_tasks(rows) % FINISHERS) % FINISHERS


def lane_blocks(span: ResolvedRange) -> list[int]:
    """The n8 block of each of a quad lane's values of a unit, in the order in which the chain gets them."""
    return [b for piece in span.pieces for b in piece.blocks for _ in range(2)]


def block_rows(span: ResolvedRange, block: Block) -> tuple[int, int]:
    """(first, end) of the physical rows of a unit that a block of the chain needs, where nothing reduces before."""
    blocks = lane_blocks(span)
    found = [blocks[i] for i in block.lanes]
    return min(found) * 8, max(found) * 8 + 8


def tile_rows(resolved: Resolved) -> int:
    """Physical rows of a tile: the fewest bands whose edges cut nothing that the epilogue needs together."""
    unit = resolved.order.unit
    size = BAND
    while not _fits(resolved, size, unit):
        size += BAND
    return size


def _fits(resolved: Resolved, size: int, unit: int) -> bool:
    """Whether no edge of tiles of ``size`` rows lies inside of what belongs together."""
    if size % unit and unit % size:
        return False
    edges = range(0, unit, gcd(size, unit))
    for span in resolved.ranges:
        together = [(0, unit)] if span.head else [block_rows(span, b) for b in span.blocks]
        if any(first < edge < end for first, end in together for edge in edges):
            return False
    return True
