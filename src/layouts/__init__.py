"""Index algebra over integers alone: places in an MMA fragment, places in a packed weight.

A function here runs on int, NumPy arrays and DSL integers alike, so that host, tests and kernels
share one text.
"""

from epicute.layouts.fragments import (
    WGMMA_ROWS,
    WGMMA_THREADS,
    accumulator_coord,
    accumulator_owner,
    accumulator_registers,
)
from epicute.layouts.row_order import (
    CHUNKS,
    Piece,
    Range,
    RowOrder,
    chunk_feature,
    chunks_of,
)

__all__ = [
    "CHUNKS",
    "WGMMA_ROWS",
    "WGMMA_THREADS",
    "Piece",
    "Range",
    "RowOrder",
    "accumulator_coord",
    "accumulator_owner",
    "accumulator_registers",
    "chunk_feature",
    "chunks_of",
]
