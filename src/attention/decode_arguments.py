"""How a decode attention kernel gets its operands: a flat tuple of 64-bit integers."""

from __future__ import annotations

__all__ = ["DECODE_ARGUMENTS", "at"]

DECODE_ARGUMENTS = (
    *("q", "q_batch", "q_row", "q_head"),
    *("k", "k_page", "k_token", "k_head"),
    *("v", "v_page", "v_token", "v_head"),
    *("out", "out_batch", "out_row", "out_head"),
    *("lse", "lse_batch", "lse_head"),
    *("new_k", "new_k_batch", "new_k_row", "new_k_head"),
    *("new_v", "new_v_batch", "new_v_row", "new_v_head"),
    *("kv_lengths", "page_table", "table_row", "sinks", "k_scale", "v_scale"),
    *("out_scale", "amax", "saturated", "nans"),
    *("counters", "stats", "partials"),
    *("batch", "tokens", "pages", "ctas"),
)
"""Addresses, 0 where there is none; strides in elements, of an INT4 cache in bytes.

``k`` of an INT4 cache is the records; a page of a contiguous cache is a request's stretch of memory, of ``tokens``
tokens. ``counters``: int32, one for each head of each request. ``stats``: (slots, columns, 2) float32, maximum and sum;
``partials``: (slots, columns, head_dim) float32. ``ctas``: CTAs launched.
"""

PLACES = {name: i for i, name in enumerate(DECODE_ARGUMENTS)}


def at(name: str) -> int:
    """Index of an argument in the tuple."""
    return PLACES[name]
