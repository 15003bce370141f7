"""Index algebra over integers alone: places in an MMA fragment, places in a packed weight.

A function here runs on int, NumPy arrays and DSL integers alike, so that host, tests and kernels
share one text.
"""

from epicute.layouts.decode_order import (
    BLOCK,
    CHANNEL,
    GROUPS,
    TILE_ROWS,
    Record,
    Records,
    bf16_pair,
    code_place,
    fp16_pair,
    fragment_cell,
    fragment_place,
)
from epicute.layouts.fragments import (
    WGMMA_ROWS,
    WGMMA_THREADS,
    accumulator_coord,
    accumulator_owner,
    accumulator_registers,
)
from epicute.layouts.quotients import split
from epicute.layouts.row_order import (
    CHUNKS,
    Piece,
    Range,
    RowOrder,
    chunk_feature,
    chunks_of,
)

__all__ = [
    "BLOCK",
    "CHANNEL",
    "CHUNKS",
    "GROUPS",
    "TILE_ROWS",
    "WGMMA_ROWS",
    "WGMMA_THREADS",
    "Piece",
    "Range",
    "Record",
    "Records",
    "RowOrder",
    "accumulator_coord",
    "accumulator_owner",
    "accumulator_registers",
    "bf16_pair",
    "chunk_feature",
    "chunks_of",
    "code_place",
    "fp16_pair",
    "fragment_cell",
    "fragment_place",
    "split",
]
