"""How an attention kernel gets its operands: a flat tuple of 64-bit integers."""

from __future__ import annotations

__all__ = ["ARGUMENTS", "at"]

ARGUMENTS = (
    *("q", "q_row", "q_head", "q_batch"),
    *("k", "k_row", "k_head", "k_batch"),
    *("v", "v_row", "v_head", "v_batch"),
    *("out", "out_row", "out_head", "out_batch"),
    *("lse", "lse_head", "lse_batch"),
    *("q_starts", "kv_starts", "q_lengths", "kv_lengths", "page_table", "table_row"),
    *("sinks", "k_scale", "v_scale", "out_scale", "amax", "saturated", "nans"),
    *("batch", "q_rows", "kv_rows", "kv_batches", "clusters", "section"),
)
"""Addresses, 0 where there is none; strides and sizes in elements.

``q_rows``: rows of q in a batch (packed: in all). ``kv_rows``, ``kv_batches``: rows of k and v in a batch, and batches
(packed: rows in all, and 1; paged: tokens of a page, and pages). ``clusters``: clusters launched. ``section``: KV heads
that are walked through together.
"""

PLACES = {name: i for i, name in enumerate(ARGUMENTS)}


def at(name: str) -> int:
    """Index of an argument in the tuple."""
    return PLACES[name]
