"""The KV cache of a model: memory of every layer, one page table for all, and who owns which page.

    keys(layer), values(layer)   (pages, page_size, kv_heads, head_dim), what PlaceKV and attention take
    fp8.keys(layer), …           the same in E4M3, a mirror of these, if any
    int4.layer(layer)            (pages, kv_heads, record bytes) uint8, INT4 records of the same slots, if any
    qk4pv8.layer(layer)          QK4PV8 records, and ΔS, of the same slots, if these are all there is
    page_table                   (requests, pages per request) int32, -1 where a request has no page
    lengths                      (requests,) int32, tokens that each request holds

The host knows every length and page, so that capacity is checked before anything is launched. What kernels read lies in
tensors that are allocated once and changed in place: a captured graph stays valid while requests come and go. Slots
that no request owns, and those of a request beyond its length, may hold anything, NaN included.

A step of one token has a host's half, ``reserve_step``, and a device's, ``begin_step`` to ``end_step``, which a graph
may hold. Between the two the host is a token ahead: so it sends no lengths, but what is added to which, and which
requests a step is waiting for.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from epicute.errors import EpicuteError, require
from epicute.kv.cache_scales import cache_scales
from epicute.kv.cache_spec import CacheSpec
from epicute.kv.fp8_layers import Fp8Layers
from epicute.kv.int4_layers import Int4Layers
from epicute.kv.pages import NO_SLOT, slots_for
from epicute.kv.qk4pv8_layers import QK4PV8Layers
from epicute.kv.transfer import to_device

__all__ = ["CacheSpec", "CapacityError", "KVCache"]


class CapacityError(EpicuteError, RuntimeError):
    """The cache has no room for what is to be added. Nothing was changed."""


class KVCache:
    """Keys and values of all layers for a fixed number of requests. Make it with ``dense`` or ``paged``.

    A request is a row of the page table, 0 to ``requests`` - 1. Where a method takes ``counts`` and ``rows``,
    ``counts[i]`` new tokens belong to request ``rows[i]``; without ``rows`` to request i.

    Attributes:
        spec: what a token takes.
        requests: rows of the page table.
        max_length: tokens that a request can hold at most.
        pages: pages of each pool.
        page_table: (requests, pages per request) int32 on the device, -1 where there is no page.
        lengths: (requests,) int32 on the device.
        k_scale, v_scale: (layers, kv_heads) float32, value = code * scale, where the main copy is FP8; else None.
        saturated, nans: (layers, 2) int64, K and V: what was clipped and what was NaN when it was placed; FP8 only,
            the main copy or its mirror.
        fp8: E4M3 rows of all layers, a mirror of the main copy; None without.
        int4: INT4 records of all layers, a mirror of the main copy or all there is; None without.
        qk4pv8: QK4PV8 records of all layers, and the means of their requests; None without.
        step_positions, step_slots: (requests,) int64 of a one-token step, see ``begin_step``.
        step_lengths: (requests,) int32, keys of each request in that step.
        step_waiting: (requests,) int32, steps that ``reserve_step`` has announced and ``end_step`` has not counted yet.
    """

    def __init__(
        self,
        spec: CacheSpec,
        requests: int,
        max_length: int,
        pages: int,
        scales: tuple[object, object] | None,
        device: torch.device | str,
    ) -> None:
        for name, value in (("requests", requests), ("max_length", max_length), ("pages", pages)):
            require(
                value >= 1, name, value, "a positive count", "say how much the cache is to hold"
            )
        self.spec, self.requests, self.max_length, self.pages = spec, requests, max_length, pages
        inner = (spec.page_size, spec.kv_heads)
        shape = (pages, *(inner if spec.layout == "NHD" else inner[::-1]), spec.head_dim)
        self._memory: torch.Tensor | None = None
        if not spec.recorded:
            self._memory = torch.empty((spec.layers, 2, *shape), dtype=spec.dtype, device=device)
        self.int4: Int4Layers | None = None
        if spec.int4 is not None:
            self.int4 = Int4Layers(spec.records(pages), spec.layers, device)
        self.qk4pv8: QK4PV8Layers | None = None
        if spec.qk4pv8 is not None:
            format = spec.qk4pv8_records(pages)
            self.qk4pv8 = QK4PV8Layers(spec.qk4pv8, format, spec.layers, requests, device)
        k_scale, v_scale = cache_scales(spec, scales, device)
        self.fp8: Fp8Layers | None = None
        if spec.fp8_mirror:
            assert k_scale is not None
            assert v_scale is not None
            size = (spec.layers, 2, *shape)
            self.fp8 = Fp8Layers(size, spec.layout, (k_scale, v_scale), device)
            k_scale = v_scale = None
        self.k_scale, self.v_scale = k_scale, v_scale

        def zeros(*shape: int, dtype: torch.dtype) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        self.page_table = zeros(requests, spec.pages_for(max_length), dtype=torch.int32).fill_(-1)
        self.lengths = zeros(requests, dtype=torch.int32)
        if self.fp8 is not None:
            self.saturated, self.nans = self.fp8.saturated, self.fp8.nans
        else:
            self.saturated = zeros(spec.layers, 2, dtype=torch.int64)
            self.nans = zeros(spec.layers, 2, dtype=torch.int64)
        self.step_positions = zeros(requests, dtype=torch.int64).fill_(NO_SLOT)
        self.step_slots = zeros(requests, dtype=torch.int64).fill_(NO_SLOT)
        self.step_lengths = zeros(requests, dtype=torch.int32)
        self.step_waiting = zeros(requests, dtype=torch.int32)
        self._rows = torch.arange(requests, device=device)
        self._held = [0] * requests
        self._owned: list[list[int]] = [[] for _ in range(requests)]
        self._free = list(range(pages))[::-1]
        self._fixed = False

    @staticmethod
    def paged(
        spec: CacheSpec,
        requests: int,
        max_length: int,
        pages: int,
        *,
        scales: tuple[object, object] | None = None,
        device: torch.device | str = "cpu",
    ) -> KVCache:
        """A pool of ``pages`` pages that requests take as they grow and give back when freed.

        Args:
            spec: what a token takes.
            requests: requests at one time.
            max_length: tokens of the longest request.
            pages: pages shared by all; less than requests * max_length where not all are long.
            scales: FP8, the main copy or a mirror: K's and V's, each one number or (layers, kv_heads); value = code *
                scale. Else None.
            device: where everything lives.

        Raises:
            ArgumentError: sizes that are not positive; scales missing, superfluous or out of range.
        """
        return KVCache(spec, requests, max_length, pages, scales, device)

    @staticmethod
    def dense(
        spec: CacheSpec,
        requests: int,
        max_length: int,
        *,
        scales: tuple[object, object] | None = None,
        device: torch.device | str = "cpu",
    ) -> KVCache:
        """Room for ``max_length`` tokens of every request, each request's pages one after the other, for good.

        ``max_length`` is rounded up to whole pages. ``dense_keys`` shows the same memory as (requests, max_length,
        kv_heads, head_dim). Arguments as of ``paged``.
        """
        require(max_length >= 1, "max_length", max_length, "a positive count", "give the longest")
        width = spec.pages_for(max_length)
        cache = KVCache(spec, requests, width * spec.page_size, requests * width, scales, device)
        table = torch.arange(requests * width, dtype=torch.int32).reshape(requests, width)
        cache.page_table.copy_(table)
        cache._owned, cache._free, cache._fixed = table.tolist(), [], True
        return cache

    def __repr__(self) -> str:
        kind = "dense" if self._fixed else f"{self.pages} pages"
        if self.spec.int4 is not None:
            kind += ", INT4 only" if self.spec.int4 == "only" else ", INT4 mirror"
        if self.spec.qk4pv8 is not None:
            kind += f", QK4PV8 only, smoothing {self.spec.qk4pv8.smoothing}"
        if self.spec.fp8_mirror:
            kind += ", FP8 mirror"
        held = f"{sum(self._held)} tokens of {self.requests} requests"
        return f"KVCache({self.spec}, {kind}, max_length={self.max_length}, {held}, {self.device})"

    @property
    def device(self) -> torch.device:
        """Where everything lives."""
        return self.lengths.device

    @property
    def nbytes(self) -> int:
        """Bytes of keys and values, in all their copies."""
        main = 0 if self._memory is None else self._memory.nbytes
        main += 0 if self.int4 is None else self.int4.memory.nbytes
        main += 0 if self.fp8 is None else self.fp8.memory.nbytes
        return main + (0 if self.qk4pv8 is None else self.qk4pv8.nbytes)

    @property
    def free_pages(self) -> int:
        """Pages that no request owns."""
        return len(self._free)

    @property
    def held(self) -> tuple[int, ...]:
        """Tokens of each request, as the host knows them."""
        return tuple(self._held)

    # --- views ---

    def _pool(self, layer: int, which: int) -> torch.Tensor:
        require(
            0 <= layer < self.spec.layers,
            "layer",
            layer,
            f"0 to {self.spec.layers - 1}",
            "count layers from 0",
        )
        require(
            self._memory is not None,
            "cache",
            "INT4 records alone" if self.int4 is not None else "QK4PV8 records alone",
            "a main copy of keys and values",
            "read cache.int4 or cache.qk4pv8, or allocate INT4 records as a mirror",
        )
        assert self._memory is not None
        pool = self._memory[layer, which]
        return pool if self.spec.layout == "NHD" else pool.transpose(1, 2)

    def keys(self, layer: int) -> torch.Tensor:
        """(pages, page_size, kv_heads, head_dim) of one layer's keys, a view."""
        return self._pool(layer, 0)

    def values(self, layer: int) -> torch.Tensor:
        """(pages, page_size, kv_heads, head_dim) of one layer's values, a view."""
        return self._pool(layer, 1)

    def _dense(self, pool: torch.Tensor) -> torch.Tensor:
        require(
            self._fixed and self.spec.layout == "NHD",
            "cache",
            repr(self),
            "a dense cache with layout NHD",
            "allocate it with KVCache.dense, or read it through the page table",
        )
        return pool.reshape(self.requests, -1, *pool.shape[2:])

    def dense_keys(self, layer: int) -> torch.Tensor:
        """(requests, max_length, kv_heads, head_dim) of a dense cache, a view; layout NHD only."""
        return self._dense(self.keys(layer))

    def dense_values(self, layer: int) -> torch.Tensor:
        """(requests, max_length, kv_heads, head_dim) of a dense cache, a view; layout NHD only."""
        return self._dense(self.values(layer))

    def cells(self, layer: int) -> dict[str, torch.Tensor]:
        """What ``PlaceKV`` takes in the ranges k and v: ``k_cells``, and for FP8 ``k_cell_scale``,
        ``k_cells_saturated``, ``k_cells_nans``; v's likewise.
        """
        found = {"k_cells": self.keys(layer), "v_cells": self.values(layer)}
        if self.k_scale is None or self.v_scale is None:
            return found
        for at, (name, scale) in enumerate((("k", self.k_scale), ("v", self.v_scale))):
            found[f"{name}_cell_scale"] = scale[layer]
            found[f"{name}_cells_saturated"] = self.saturated[layer, at : at + 1]
            found[f"{name}_cells_nans"] = self.nans[layer, at : at + 1]
        return found

    def attention(self, layer: int) -> dict[str, torch.Tensor | None]:
        """What attention takes of a layer by name: ``k``, ``v``, ``k_scale``, ``v_scale``."""
        return {
            "k": self.keys(layer),
            "v": self.values(layer),
            "k_scale": None if self.k_scale is None else self.k_scale[layer],
            "v_scale": None if self.v_scale is None else self.v_scale[layer],
        }

    # --- growing and shrinking, on the host ---

    def _rows_of(self, counts: Sequence[int], rows: Sequence[int] | None) -> list[int]:
        found = list(range(len(counts))) if rows is None else list(rows)
        require(
            len(found) == len(counts) and len(set(found)) == len(found),
            "rows",
            found,
            f"{len(counts)} different requests, one for each of counts",
            "name each request once",
        )
        require(
            all(0 <= row < self.requests for row in found),
            "rows",
            found,
            f"requests from 0 to {self.requests - 1}",
            "allocate the cache for more requests, or free one",
        )
        require(min(counts, default=0) >= 0, "counts", list(counts), "none negative", "check them")
        return found

    def reserve(self, counts: Sequence[int], rows: Sequence[int] | None = None) -> None:
        """Give pages to requests so that ``counts`` more tokens of each fit. All or nothing; lengths stay.

        Raises:
            CapacityError: a request would be longer than ``max_length``, or there are not enough free pages.
            ArgumentError: requests that do not exist or are named twice, or a negative count.
        """
        wanted = {}
        for row, count in zip(self._rows_of(counts, rows), counts, strict=True):
            length = self._held[row] + count
            require(
                length <= self.max_length,
                f"request {row}",
                f"{self._held[row]} tokens and {count} more",
                f"at most {self.max_length}",
                "allocate the cache with a larger max_length, or free the request",
                CapacityError,
            )
            wanted[row] = max(0, self.spec.pages_for(length) - len(self._owned[row]))
        require(
            sum(wanted.values()) <= len(self._free),
            "pages",
            f"{len(self._free)} free",
            f"{sum(wanted.values())} for {sum(counts)} more tokens, of requests "
            f"{[row for row, count in wanted.items() if count]}",
            "free a request, or allocate the cache with more pages",
            CapacityError,
        )
        for row, count in wanted.items():
            if count:
                taken = [self._free.pop() for _ in range(count)]
                start = len(self._owned[row])
                self._owned[row] += taken
                self.page_table[row, start : start + count] = self._sent(taken, torch.int32)

    def positions(self, counts: Sequence[int], rows: Sequence[int] | None = None) -> torch.Tensor:
        """(sum of counts,) int64 positions of new tokens, request after request, on the device."""
        found = self._rows_of(counts, rows)
        starts = [self._held[row] for row in found]
        places = [s + i for s, n in zip(starts, counts, strict=True) for i in range(n)]
        return self._sent(places, torch.int64)

    def host_table(self, rows: Sequence[int] | None = None) -> torch.Tensor:
        """(len(rows), pages per request) int32, those rows of ``page_table`` on the CPU, without asking the device."""
        found = list(range(self.requests)) if rows is None else list(rows)
        self._rows_of([0] * len(found), found)
        width = self.page_table.shape[1]
        table = [self._owned[row] + [-1] * (width - len(self._owned[row])) for row in found]
        return torch.tensor(table, dtype=torch.int32).reshape(len(found), width)

    def slots(self, counts: Sequence[int], rows: Sequence[int] | None = None) -> torch.Tensor:
        """(sum of counts,) int64 slots of new tokens, request after request; reserves what they need.

        Raises as ``reserve`` does. Lengths stay until ``advance``.
        """
        self.reserve(counts, rows)
        owners = [
            r for r, n in zip(self._rows_of(counts, rows), counts, strict=True) for _ in range(n)
        ]
        requests = self._sent(owners, torch.int64)
        positions = self.positions(counts, rows)
        # All rows are in the table: reserve has seen to that, so nothing waits for the device.
        return slots_for(self.page_table, positions, requests, self.spec.page_size, check=False)

    def advance(self, counts: Sequence[int], rows: Sequence[int] | None = None) -> None:
        """Count new tokens as held, once all layers have placed them.

        Whether a step is waiting does not matter, except to the request itself: its tokens go behind the step's.

        Raises:
            CapacityError: tokens that no pages were reserved for.
        """
        found = dict(zip(self._rows_of(counts, rows), counts, strict=True))
        for row, count in found.items():
            room = min(len(self._owned[row]) * self.spec.page_size, self.max_length)
            require(
                self._held[row] + count <= room,
                f"request {row}",
                f"{self._held[row]} tokens and {count} more",
                f"at most {room}, which its pages hold",
                "call reserve or slots before the model runs",
                CapacityError,
            )
        added = [found.get(row, 0) for row in range(self.requests)]
        self._held = [held + count for held, count in zip(self._held, added, strict=True)]
        self.lengths.add_(self._sent(added, torch.int32))

    def mark(self) -> list[tuple[int, int]]:
        """Tokens and pages of each request, for ``roll_back``."""
        return [(held, len(owned)) for held, owned in zip(self._held, self._owned, strict=True)]

    def roll_back(self, mark: Sequence[tuple[int, int]]) -> None:
        """Take back what requests were given since ``mark``, as what was to fill it failed; none was freed since."""
        added = [held - then for held, (then, _) in zip(self._held, mark, strict=True)]
        self._held = [held for held, _ in mark]
        for row, (_, pages) in enumerate(mark):
            taken, self._owned[row] = self._owned[row][pages:], self._owned[row][:pages]
            self._free += reversed(taken)
            self.page_table[row, pages : pages + len(taken)].fill_(-1)
        self.lengths.sub_(self._sent(added, torch.int32))

    def owners(self, page_table: torch.Tensor) -> torch.Tensor:
        """(B,) int64, the request of this cache whose first page each row of (B, pages) int32 begins with.

        Of requests that share no pages. On the device, without waiting for it; a row that begins with no page here gets
        any number.
        """
        first = page_table[:, :1].to(self.page_table.device)
        return (first == self.page_table[:, 0]).to(torch.int8).argmax(dim=1)

    def free(self, row: int) -> None:
        """Forget request ``row``. Its pages go back to the pool; a dense cache keeps them in place.

        A step that is waiting goes on without it.
        """
        self._rows_of([0], [row])
        self._held[row] = 0
        # A number that is assigned to an element is copied from the host, which waits; filling a view does not.
        self.lengths[row].fill_(0)
        self.step_waiting[row].fill_(0)
        if not self._fixed:
            self._free += reversed(self._owned[row])
            self._owned[row] = []
            self.page_table[row].fill_(-1)

    def reset(self) -> None:
        """Forget all requests, and set the counters to zero."""
        for row in range(self.requests):
            self.free(row)
        self.saturated.zero_()
        self.nans.zero_()
        for counters in () if self.qk4pv8 is None else self.qk4pv8.counters:
            counters.reset()

    def _sent(self, values: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Numbers on the device, without waiting for it."""
        return to_device(torch.tensor(values, dtype=dtype), self.device)

    # --- one token for every live request, on the device ---

    def reserve_step(self, live: Sequence[bool] | None = None) -> None:
        """The host's part of a one-token step, before ``begin_step`` or the replay of a graph that holds it.

        Every request that holds tokens gets room for one more, and counts as one longer on the host; where ``live`` is
        given (one for each request), those alone that are. Requests may be freed and others prefilled before the step
        runs: it is of those that were chosen here and not freed since.

        Raises:
            CapacityError: as ``reserve``; nothing was changed.
        """
        chosen = [True] * self.requests if live is None else list(live)
        require(
            len(chosen) == self.requests,
            "live",
            f"{len(chosen)} requests",
            f"{self.requests}",
            "say of each request whether it takes part",
        )
        counts = [int(held > 0 and part) for held, part in zip(self._held, chosen, strict=True)]
        self.reserve(counts)
        self._held = [held + count for held, count in zip(self._held, counts, strict=True)]
        self.step_waiting.add_(self._sent(counts, torch.int32))

    def cancel_step(self) -> None:
        """Forget ``reserve_step``, where the step has failed before ``end_step``. Waits for the device."""
        self._held = self.lengths.tolist()
        self.step_waiting.zero_()

    def begin_step(self, live: torch.Tensor | None = None) -> None:
        """Write ``step_positions``, ``step_slots`` and ``step_lengths`` of the next token of each request.

        Device work alone, in place, capturable. Of the requests that ``reserve_step`` has chosen: any other has
        position and slot -1 and keeps its length, and so has one that is not ``live``, (requests,) bool.
        """
        part = (self.lengths > 0) & (self.step_waiting > 0)
        live = part if live is None else part & live
        self.step_positions.copy_(torch.where(live, self.lengths, NO_SLOT))
        self.step_lengths.copy_(self.lengths + live)
        self.step_slots.copy_(
            slots_for(
                self.page_table, self.step_positions, self._rows, self.spec.page_size, check=False
            )
        )

    def end_step(self) -> None:
        """Count the step's tokens as held on the device; in place, capturable."""
        done = (self.step_positions >= 0) & (self.step_waiting > 0)
        self.lengths.add_(done)
        self.step_waiting.sub_(done.to(torch.int32))
