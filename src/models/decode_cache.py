"""One layer's keys and values as the decode step reads and extends them, in every format.

Rows of 16 and 8 bits are placed in their cells by the QKV projection, and attention reads them there. Of INT4 and
QK4PV8 caches the projection leaves the new row in 16 bits; the CTA of attention that owns the request's end quantises
it, uses it and stores it. With a main copy of 16 bits beside such records, for prefill, it is placed there too.
An FP8 cache may be the mirror of such a copy as well; the projection then writes both.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from epicute.attention.decode_spec import CACHES
from epicute.errors import require
from epicute.kv import Int4Cache, QK4PV8Cache
from epicute.kv.cache import KVCache
from epicute.kv.qk4pv8 import Memory
from epicute.models.block_state import LayerCache
from epicute.models.mirrored import MirroredCache
from epicute.quant.smoothing import Means

__all__ = ["FORMATS", "CacheForm", "DecodeCache"]

FORMATS = (*CACHES, "qk4pv8")
"""Of keys and values that a step reads."""

RECORDS = ("int4", "qk4pv8")
"""Those that attention writes itself."""

NAMES = {dtype: name for name, dtype in CACHES.items() if name not in RECORDS}


@dataclass(frozen=True)
class CacheForm:
    """A layer's cache as far as kernels depend on it: one plan serves all caches of one form.

    Attributes:
        format: of ``FORMATS``.
        page: tokens of a page; None where each request has one stretch of memory.
        main: whether a 16-bit copy is kept beside what a step reads: of FP8 rows, and of INT4 and QK4PV8 records.
        rotation: INT4: width of the Hadamard blocks that rows are rotated in, 0 for none; None for the widest.
        values_folded: INT4: see ``Int4Cache``.
        records: QK4PV8: shape and scales, with one page.
    """

    format: str = "bf16"
    page: int | None = 64
    main: bool = False
    rotation: int | None = None
    values_folded: bool = False
    records: QK4PV8Cache | None = None

    def __post_init__(self) -> None:
        require(
            self.format in FORMATS,
            "cache.format",
            repr(self.format),
            f"one of {FORMATS}",
            "name what a step reads",
        )
        require(
            not self.main or self.writes_records or self.format == "fp8",
            "cache.main",
            True,
            f"False for {self.format}, which is the main copy itself",
            "leave it out",
        )
        packed = self.format == "int4"
        require(
            packed or (self.rotation is None and not self.values_folded),
            "cache.rotation",
            (self.rotation, self.values_folded),
            f"nothing for {self.format}: INT4 rows alone are rotated",
            "leave it out",
        )
        require(
            (self.records is not None) == (self.format == "qk4pv8"),
            "cache.records",
            self.records,
            "a QK4PV8Cache for qk4pv8, else None",
            "describe the cache with DecodeCache.qk4pv8",
        )
        if self.records is not None:
            require(
                self.page == self.records.page.page_size,
                "cache.page",
                self.page,
                f"{self.records.page.page_size}, the page of the records",
                "QK4PV8 caches are paged",
            )
            object.__setattr__(self, "records", replace(self.records, pages=1))

    @property
    def writes_records(self) -> bool:
        """Whether attention stores the new row."""
        return self.format in RECORDS

    def __str__(self) -> str:
        where = "contiguous" if self.page is None else f"pages of {self.page}"
        return f"{self.format} cache{' beside a main copy' if self.main else ''}, {where}"


@dataclass(frozen=True, eq=False)
class DecodeCache:
    """Memory of one layer. Make it with ``of``, ``fp8``, ``int4``, ``qk4pv8`` or ``of_model``.

    Attributes:
        form: what it is.
        tokens: of a request's stretch of memory; None in pages.
        main: keys and values as a step reads them, or their 16-bit copy beside records; None where records are all
            there is. An FP8 mirror has its main copy with it.
        records: INT4: (pages, kv_heads, record bytes) uint8; contiguous: one record for each request.
        memory: QK4PV8's.
        means: of this layer, where QK4PV8 keys are smoothed: one group, or one for each request.
    """

    form: CacheForm
    tokens: int | None = None
    main: LayerCache | None = None
    records: torch.Tensor | None = None
    memory: Memory | None = None
    means: Means | None = None

    @staticmethod
    def of(main: LayerCache) -> DecodeCache:
        """A cache of 16 or 8 bits, in pages or contiguous."""
        tokens = main.k.shape[1] if main.page is None else None
        return DecodeCache(CacheForm(NAMES[main.k.dtype], main.page), tokens, main)

    @staticmethod
    def fp8(mirror: LayerCache, main: LayerCache) -> DecodeCache:
        """FP8 rows, in pages or contiguous, beside a main copy of the same slots.

        Args:
            mirror: float8_e4m3fn with its scales: what is read.
            main: 16-bit copy with the same pages, or of the same stretches of memory.

        Raises:
            ArgumentError: copies of other dtypes, or with different pages.
        """
        both = MirroredCache.both(main, mirror, step=True)
        tokens = main.k.shape[1] if main.page is None else None
        return DecodeCache(CacheForm("fp8", main.page, True), tokens, both)

    @staticmethod
    def int4(
        kind: Int4Cache,
        records: torch.Tensor,
        main: LayerCache | None = None,
        *,
        dense: bool = False,
    ) -> DecodeCache:
        """INT4 records, alone or beside a main copy of the same slots.

        Args:
            kind: what they are.
            records: (pages, kv_heads, record bytes) uint8.
            main: 16-bit copy with the same pages, or of the same stretches of memory.
            dense: each request has one record of max_len tokens.

        Raises:
            ArgumentError: memory of another cache; a main copy in FP8, or with other pages.
        """
        kind.pool(records)
        size = kind.record.page_size
        _check_main(main, size, dense)
        page, tokens = (None, size) if dense else (size, None)
        form = CacheForm("int4", page, main is not None, kind.width, kind.values_folded)
        return DecodeCache(form, tokens, main, records)

    @staticmethod
    def qk4pv8(
        kind: QK4PV8Cache,
        memory: Memory,
        means: Means | None = None,
        main: LayerCache | None = None,
    ) -> DecodeCache:
        """QK4PV8 pages, alone or beside a main copy of the same slots.

        Args:
            kind: shape and scales.
            memory: of ``kind``.
            means: exactly where ``kind`` has terms of ΔS.
            main: 16-bit copy with the same pages.

        Raises:
            ArgumentError: memory of another cache; means without terms, or terms without means; a main copy in FP8, or
                with other pages.
        """
        kind.pool(memory)
        require(
            (means is not None) == (kind.terms > 0),
            "means",
            None if means is None else means.kind,
            "means" if kind.terms else "None, for a cache without terms of ΔS",
            "pass the means that this layer's keys are centred by",
        )
        size = kind.page.page_size
        _check_main(main, size, False)
        form = CacheForm("qk4pv8", size, main is not None, records=kind)
        return DecodeCache(form, None, main, memory=memory, means=means)

    @staticmethod
    def of_model(cache: KVCache, layer: int) -> DecodeCache:
        """One layer of a model's cache, in pages; where there are records, or an FP8 mirror, those, with the main copy
        beside them.
        """
        if cache.qk4pv8 is not None:
            layers = cache.qk4pv8
            return DecodeCache.qk4pv8(layers.format, layers.layer(layer), layers.means(layer))
        if cache.fp8 is not None:
            both = MirroredCache.both_of_model(cache, layer, step=True)
            return DecodeCache.fp8(both.mirror, both.main)
        if cache.int4 is None:
            return DecodeCache.of(LayerCache.of_model(cache, layer))
        main = LayerCache.of_model(cache, layer) if cache.spec.int4 == "mirror" else None
        return DecodeCache.int4(cache.int4.format, cache.int4.layer(layer), main)

    def first(self, requests: int) -> DecodeCache:
        """The same for the first ``requests`` of those that have memory or means of their own."""
        main, records, means = self.main, self.records, self.means
        if self.tokens is not None:
            if isinstance(main, MirroredCache):
                main = main.first(requests)
            elif main is not None:
                main = replace(main, k=main.k[:requests], v=main.v[:requests])
            records = None if records is None else records[:requests]
        if means is not None and len(means.q) > 1:
            means = Means(means.kind, means.q[:requests], means.k[:requests])
        return replace(self, main=main, records=records, means=means)


def _check_main(main: LayerCache | None, page: int, dense: bool) -> None:
    if main is None:
        return
    fits = main.page == (None if dense else page) and main.k.shape[1] == page
    require(
        main.k.dtype in (torch.bfloat16, torch.float16) and fits,
        "main",
        f"{main.k.dtype} in pages of {main.page}, {main.k.shape[1]} tokens",
        f"16 bits, {page} tokens{'' if dense else ' a page'}, as the records",
        "allocate both for the same slots",
    )
