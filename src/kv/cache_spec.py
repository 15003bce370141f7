"""What one token of a model takes in a cache."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from epicute.errors import require
from epicute.kv.int4 import Int4Cache
from epicute.kv.pages import PAGE_SIZES
from epicute.kv.qk4pv8 import QK4PV8Cache
from epicute.kv.qk4pv8_layers import QK4PV8Form

__all__ = ["FP8", "INT4_COPIES", "CacheSpec"]

FP8 = torch.float8_e4m3fn

DTYPES = (torch.bfloat16, torch.float16, FP8, torch.float32)
"""float32 is there for references; no kernel serves it."""

LAYOUTS = ("NHD", "HND")

INT4_COPIES = ("only", "mirror")
"""What INT4 records are to a cache: all there is, or a second form of the rows beside their main copy."""


@dataclass(frozen=True)
class CacheSpec:
    """What one token of a model takes.

    Attributes:
        layers: decoder layers.
        kv_heads: heads of keys and values.
        head_dim: channels of a head.
        dtype: bfloat16, float16, float8_e4m3fn, or float32 for references alone. Of the main copy, where there are two;
            where records are all there is, that of the rows they are made of, which nothing keeps.
        page_size: tokens per page, of ``PAGE_SIZES``.
        layout: order in memory of a page, "NHD" (token, head, channel) or "HND" (head, token, channel).
        int4: what INT4 records (``kv.int4``) there are, of ``INT4_COPIES``; None for none.
        rotated: whether those records are of rows that were rotated over their heads.
        fp8_mirror: whether E4M3 rows (``kv.fp8_layers``) stand beside the main copy; FP8 as all there is is a dtype.
        qk4pv8: that QK4PV8 records (``kv.qk4pv8``) are all there is, and of what form; None for none.
        heads: of queries, which QK4PV8 records depend on.
    """

    layers: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype = torch.bfloat16
    page_size: int = 64
    layout: str = "NHD"
    int4: str | None = field(default=None, repr=False)
    rotated: bool = field(default=True, repr=False)
    qk4pv8: QK4PV8Form | None = field(default=None, repr=False)
    heads: int | None = field(default=None, repr=False)
    fp8_mirror: bool = field(default=False, repr=False)

    def __post_init__(self) -> None:
        for name in ("layers", "kv_heads", "head_dim"):
            value = getattr(self, name)
            require(value >= 1, name, value, "a positive count", "check the model's configuration")
        require(
            self.dtype in DTYPES,
            "dtype",
            self.dtype,
            ", ".join(map(str, DTYPES)),
            "choose one of these",
        )
        require(
            self.page_size in PAGE_SIZES,
            "page_size",
            self.page_size,
            f"one of {PAGE_SIZES}",
            "choose one of these",
        )
        require(
            self.layout in LAYOUTS,
            "layout",
            repr(self.layout),
            f"one of {LAYOUTS}",
            "name the order of token, head and channel in a page",
        )
        if self.int4 is None and self.qk4pv8 is None and not self.fp8_mirror:
            return
        require(
            self.int4 in (*INT4_COPIES, None),
            "int4",
            repr(self.int4),
            f"one of {INT4_COPIES}, or None",
            "say what the INT4 records are to the cache",
        )
        require(
            self.int4 is None or self.qk4pv8 is None,
            "qk4pv8",
            f"{self.qk4pv8} beside INT4 records",
            "records of one kind",
            "leave one of the two out",
        )
        made = "INT4 records" if self.int4 else "QK4PV8 records" if self.qk4pv8 else "an FP8 mirror"
        require(
            not self.fp8_mirror or made == "an FP8 mirror",
            "fp8_mirror",
            f"True beside {made}",
            "one form of the rows for a step to read",
            "leave one of the two out",
        )
        require(
            self.dtype != FP8,
            "dtype",
            self.dtype,
            f"rows of 16 or 32 bits, to make {made} of",
            "choose the dtype of the model's activations",
        )
        # These refuse pages and heads that no record has.
        if self.int4 is not None:
            self.records(1)
        elif self.qk4pv8 is not None:
            self.qk4pv8_records(1)

    @property
    def recorded(self) -> bool:
        """Whether records are all there is: no main copy of keys and values."""
        return self.int4 == "only" or self.qk4pv8 is not None

    def records(self, pages: int) -> Int4Cache:
        """The format of ``pages`` pages of INT4 records of one layer."""
        return Int4Cache.create(
            pages, self.page_size, self.kv_heads, self.head_dim, rotated=self.rotated
        )

    def qk4pv8_records(self, pages: int) -> QK4PV8Cache:
        """The format of ``pages`` pages of QK4PV8 records of one layer."""
        require(
            self.qk4pv8 is not None and self.heads is not None,
            "heads" if self.qk4pv8 is not None else "qk4pv8",
            None,
            "a form of QK4PV8 records, and the count of query heads",
            "pass both to CacheSpec, or allocate the cache with model.new_cache(…)",
        )
        assert self.qk4pv8 is not None
        assert self.heads is not None
        heads = self.heads, self.kv_heads
        return self.qk4pv8.records(pages, self.page_size, heads, self.head_dim)

    @property
    def token_bytes(self) -> int:
        """Bytes that one token takes in all layers; tables, and scales of whole heads, apart."""
        heads = self.layers * self.kv_heads
        if self.qk4pv8 is not None:
            return self.layers * self.qk4pv8_records(1).bytes // self.page_size
        main = 0 if self.int4 == "only" else 2 * heads * self.head_dim * self.dtype.itemsize
        main += 2 * heads * self.head_dim if self.fp8_mirror else 0
        if self.int4 is None:
            return main
        return main + heads * self.records(1).record.bytes // self.page_size

    def pages_for(self, tokens: int) -> int:
        """Pages that ``tokens`` tokens of one request fill or begin."""
        return -(-tokens // self.page_size)
