"""Prefill where a cache keeps INT4 records: beside its main copy, or alone (FuTransformer 3.3.2).

A layer's prefill reads and writes rows of 16 bits. Beside a main copy its new rows are quantised behind it, whole heads
at a time. Where records are all there is, it runs in a scratch that holds what its requests have: new rows as they are,
earlier ones as the records have them, turned back and rounded to 16 bits.

    records ─► earlier rows ─┐                    ┌─► new rows ─► rotate, quantise ─► records
                             ├─► scratch ─► layer ┘
    x ───────► new rows ─────┘
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch

from epicute.errors import require
from epicute.kv import slots_for
from epicute.kv.cache import KVCache
from epicute.kv.transfer import to_device
from epicute.models.block_spec import BlockSpec
from epicute.models.block_state import LayerCache
from epicute.models.kernels import Kernels
from epicute.models.requests import Requests
from epicute.quant.hadamard import rotate

__all__ = ["Int4Prefill"]


@dataclass(frozen=True, eq=False)
class _Scratch:
    """Rows of one invocation's requests, in pages of their own.

    Attributes:
        requests: the invocation's, in these pages.
        cells: of any layer, one at a time.
        earlier: slots of the tokens that the cache holds, in its pages and in these; None where there are none.
    """

    requests: Requests
    cells: LayerCache
    earlier: tuple[torch.Tensor, torch.Tensor] | None


class Int4Prefill:
    """The prefills of one cache with INT4 records. Between ``begin`` and the next, one invocation's layers in turn."""

    def __init__(self, cache: KVCache, spec: BlockSpec, kernels: Kernels) -> None:
        """``spec``: of the layers, whose rows have 16 bits."""
        assert cache.int4 is not None
        self._append = kernels.append(cache.int4.format, spec.dtype, cache.device)
        self._alone = cache.spec.int4 == "only"
        self._memory: torch.Tensor | None = None
        self._shape = (cache.spec.page_size, spec.shape.kv_heads, spec.shape.head_dim)
        self._dtype = spec.dtype
        self._scratch: _Scratch | None = None
        self._of: Requests | None = None

    def begin(self, cache: KVCache, requests: Requests) -> None:
        """Take note of an invocation's requests; where records are all there is, waits for their lengths."""
        self._of = requests
        self._scratch = self._lay_out(cache, requests) if self._alone else None

    def layer(self, cache: KVCache, layer: int, requests: Requests) -> tuple[Requests, LayerCache]:
        """What a layer's prefill is to run with."""
        if layer == 0 or self._of is not requests:
            self.begin(cache, requests)
        scratch = self._scratch
        if scratch is None:
            return requests, LayerCache.of_model(cache, layer)
        if scratch.earlier is not None:
            self._restore(cache, layer, scratch)
        return scratch.requests, scratch.cells

    def store(self, cache: KVCache, layer: int) -> None:
        """Put the new rows of the layer that has run into the records."""
        assert cache.int4 is not None
        assert self._of is not None
        if self._scratch is None:
            cells, slots = LayerCache.of_model(cache, layer), self._of.slots
        else:
            cells, slots = self._scratch.cells, self._scratch.requests.slots
        size = self._shape[0]
        place = slots.clamp_min(0)  # rows without a slot are read and not stored
        page, token = place // size, place % size
        k, v = (x[page, token] for x in (cells.k, cells.v))
        self._append.run(cache.int4.layer(layer), k, v, self._of.slots)

    def _lay_out(self, cache: KVCache, requests: Requests) -> _Scratch:
        """Pages for all tokens of the requests, one request's behind the other's."""
        require(
            requests.starts is not None and requests.page_table is not None,
            "requests",
            "padded ones, or none with pages",
            "packed requests with the cache's page table",
            "describe them with Requests.packed",
        )
        assert requests.starts is not None
        assert requests.page_table is not None
        size, device = self._shape[0], cache.device
        totals, starts = requests.kv_lengths.tolist(), requests.starts.tolist()
        new = [b - a for a, b in pairwise(starts)]
        cached = [total - n for total, n in zip(totals, new, strict=True)]
        counts = [-(-total // size) for total in totals]
        table = torch.zeros(len(totals), max(*counts, 1), dtype=torch.int32)
        first = 0
        for row, count in enumerate(counts):
            table[row, :count] = torch.arange(first, first + count, dtype=torch.int32)
            first += count
        if self._memory is None or self._memory.shape[1] < first:
            shape = (2, max(first, 1), *self._shape)
            self._memory = torch.empty(shape, dtype=self._dtype, device=device)
        described = Requests.packed(
            new, size, table, cached=cached, rows=requests.rows, device=device
        )
        cells = LayerCache.of(self._memory[0], self._memory[1])
        return _Scratch(described, cells, self._earlier(requests.page_table, table, cached))

    def _earlier(
        self, there: torch.Tensor, here: torch.Tensor, cached: list[int]
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Slots of the tokens before the new ones, in the cache and in the scratch."""
        if not any(cached):
            return None
        owners = torch.tensor([row for row, n in enumerate(cached) for _ in range(n)])
        places = torch.tensor([place for n in cached for place in range(n)])
        mine = slots_for(here, places, owners, self._shape[0])
        owners, places, mine = (to_device(x, there.device) for x in (owners, places, mine))
        theirs = slots_for(there, places, owners, self._shape[0], check=False)
        return theirs, mine

    def _restore(self, cache: KVCache, layer: int, scratch: _Scratch) -> None:
        """Put earlier rows into the scratch."""
        assert cache.int4 is not None
        assert scratch.earlier is not None
        theirs, mine = scratch.earlier
        size, width = self._shape[0], cache.int4.format.width
        rows: tuple[Any, Any] = cache.int4.read(layer, theirs)
        for x, cells in zip(rows, (scratch.cells.k, scratch.cells.v), strict=True):
            turned = rotate(x, width) if width else x
            cells[mine // size, mine % size] = turned.to(self._dtype)
