"""Cached rows of four-bit channels as MMA operands, without a table and without a transposition.

A sum over k has no order. The A operand of an MMA of depth 16 wants of quad lane t the k-pairs
2t and 2t + 8; here the lane gets them from a run of D/4 adjacent channels of the row, which it
loads as 16 (D = 128) or 8 (D = 64) adjacent bytes, and the query, the B operand, is stored in the
same order once:

    lane t     words (8 channels) D/32 * t + w, w < D/32
    step 2w    pairs 0 and 1 of word w              step 2w + 1    pairs 2 and 3

In the product with values, V^T is the A operand: lane group g owns D/8 adjacent channels, tile i
takes two of them, in rows g and g + 8, so that a word of the row is used whole by one lane.

Integer algebra that runs on int, NumPy arrays and DSL integers alike.
"""

from __future__ import annotations

from typing import Any

__all__ = ["key_channel", "value_channel"]


def key_channel(step: Any, k: Any, head_dim: int) -> Any:
    """Channel at depth ``k`` (< 16) of MMA ``step`` (< head_dim/16) of a query-key product.

    Of keys: register r (< 4) and half h of lane (g, t) is row g + 8 * (r % 2) and depth
    k = 2t + 8 * (r // 2) + h. Of queries: the order in which they are stored for the B operand.
    ``head_dim`` is a multiple of 32.
    """
    run = head_dim // 4
    return k % 8 // 2 * run + step // 2 * 8 + step % 2 * 4 + k // 8 * 2 + k % 2


def value_channel(tile: Any, row: Any, head_dim: int) -> Any:
    """Channel in ``row`` (< 16) of m16 ``tile`` (< head_dim/16) of a value-probability product.

    ``head_dim`` is a multiple of 64, so that a lane's run is whole words.
    """
    return row % 8 * (head_dim // 8) + tile * 2 + row // 8
