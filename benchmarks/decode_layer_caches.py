"""The caches of a decode step in every format, filled with the same history, and attention over them in float64.

Requests have pages of their own, all pages of a pool in a random order; heads of a page lie apart from each other (HND)
unless told. Copies of a cache differ in their addresses alone. Where the newest row belongs there is NaN, or a scale of
NaN, until a step has stored it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from functools import cached_property

import torch
from torch import Tensor

from benchmarks.data import clones, exactly
from benchmarks.decode_attention import attended
from benchmarks.decode_layer_step import TERMS, Step
from epicute.kv import Int4Cache, QK4PV8Cache
from epicute.kv.qk4pv8 import Memory, Rows
from epicute.layouts.kv_int4 import SCALE_BYTES
from epicute.layouts.qk4pv8 import QK4PV8Page
from epicute.models.block_state import LayerCache
from epicute.models.decode_cache import CacheForm, DecodeCache
from epicute.models.decode_step import DecodeStep
from epicute.models.shapes import LayerShape
from epicute.quant.hadamard import hadamard
from epicute.quant.smoothing import Means

__all__ = ["PAGES", "Pages", "form_of", "pages_of"]

PAGES = {"bf16": 64, "fp8": 64, "int4": 64, "qk4pv8": 128}
"""Tokens of a page by the cache's format."""

WRITTEN = 16384
"""Tokens that are quantised at a time."""

DTYPES = {"bf16": torch.bfloat16, "fp8": torch.float8_e4m3fn}


def form_of(shape: LayerShape, cache: str) -> CacheForm:
    """What kernels depend on."""
    page = PAGES[cache]
    if cache != "qk4pv8":
        return CacheForm(cache, page)
    return CacheForm(cache, page, records=_mixed(shape, 1))


def _mixed(shape: LayerShape, pages: int) -> QK4PV8Cache:
    page = QK4PV8Page(PAGES["qk4pv8"], shape.head_dim)
    return QK4PV8Cache(pages, shape.kv_heads, shape.heads, page, TERMS)


class Pages(ABC):
    """A step's cache in one format, one per copy of the layer.

    Attributes:
        step: whose history it holds.
        page: tokens of a page.
    """

    def __init__(self, step: Step, page: int) -> None:
        self.step, self.page = step, page

    @cached_property
    def table(self) -> Tensor:
        """(batch, pages of a request) int32, all pages of the pool in a random order."""
        step, each = self.step, -(-self.step.context // self.page)
        random = torch.Generator().manual_seed(step.seed)
        order = torch.randperm(step.batch * each, generator=random)
        return order.view(step.batch, each).to(torch.int32)

    @property
    def count(self) -> int:
        """Pages of the pool."""
        return self.table.numel()

    @cached_property
    def decode_step(self) -> DecodeStep:
        """Where the new tokens stand."""
        step = self.step
        lengths = [step.context] * step.batch
        return DecodeStep.of(lengths, self.page, self.table, device=step.device)

    @cached_property
    def slots(self) -> Tensor:
        """(batch, context) int64 of all tokens."""
        token = torch.arange(self.step.context)
        found = self.table.long()[:, token // self.page] * self.page + token % self.page
        return found.to(self.step.device)

    @cached_property
    def caches(self) -> list[DecodeCache]:
        """One per copy."""
        return self._made()

    @abstractmethod
    def forget(self) -> None:
        """Put NaN where the newest rows of copy 0 belong, as if no step had stored them."""

    def newest(self) -> tuple[Tensor, Tensor]:
        """(batch, kv_heads, head_dim) float64 of the new tokens in copy 0, as the cache holds them, turned back."""
        return self._natural(*self._rows(self.slots[:, -1]))

    def attended(self, q: Tensor) -> Tensor:
        """(batch, q_width) float64 of queries (batch, heads, head_dim) over copy 0."""
        found = [self._attend(q[b], slots) for b, slots in enumerate(self.slots)]
        return torch.stack(found).flatten(1)

    def _attend(self, q: Tensor, slots: Tensor) -> Tensor:
        """(heads, head_dim) of one request."""
        return attended(q, *self._rows(slots))

    def _old(self) -> list[tuple[Tensor, Tensor, Tensor]]:
        """Keys, values and slots of all tokens but the newest, some at a time."""
        shape, k, v = self.step.shape, *self.step.history
        sizes = (-1, shape.kv_heads, shape.head_dim)
        rows = (
            k[:, :-1].reshape(sizes),
            v[:, :-1].reshape(sizes),
            self.slots[:, :-1].flatten().contiguous(),
        )
        return list(zip(*(x.split(WRITTEN) for x in rows), strict=True))

    @abstractmethod
    def _made(self) -> list[DecodeCache]:
        """Allocate, fill and copy."""

    @abstractmethod
    def _rows(self, slots: Tensor) -> tuple[Tensor, Tensor]:
        """(n, kv_heads, head_dim) float64 keys and values of copy 0 as a kernel multiplies them."""

    def _natural(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """The same as the projection made them."""
        return k, v


class Cells(Pages):
    """Rows of 16 or 8 bits; the scales of FP8 ones are 1."""

    def __init__(self, step: Step, cache: str, layout: str = "HND") -> None:
        super().__init__(step, PAGES[cache])
        self.dtype, self.layout = DTYPES[cache], layout

    def _made(self) -> list[DecodeCache]:
        shape, device = self.step.shape, self.step.device
        inner = (self.page, shape.kv_heads)
        size = (self.count, *(inner if self.layout == "NHD" else inner[::-1]), shape.head_dim)
        sides = []
        for x in self.step.history:
            first = torch.full(size, float("nan"), dtype=torch.bfloat16, device=device)
            cells = first if self.layout == "NHD" else first.transpose(1, 2)
            cells[self.slots // self.page, self.slots % self.page] = x
            copies = clones(first.to(self.dtype), self.step.copies)
            sides.append([x if self.layout == "NHD" else x.transpose(1, 2) for x in copies])
        scales: list[Tensor | None] = [None, None]
        if self.dtype == DTYPES["fp8"]:
            scales = [torch.ones(shape.kv_heads, device=device) for _ in "kv"]
        return [DecodeCache.of(LayerCache.of(k, v, *scales)) for k, v in zip(*sides, strict=True)]

    def forget(self) -> None:
        """All bits: NaN in either format."""
        main, slots = self.caches[0].main, self.slots[:, -1]
        assert main is not None
        for cells in (main.k, main.v):
            cells.view(torch.uint8)[slots // self.page, slots % self.page] = 0xFF

    def _rows(self, slots: Tensor) -> tuple[Tensor, Tensor]:
        main = self.caches[0].main
        assert main is not None
        at = (slots // self.page, slots % self.page)
        raw = [x.view(torch.uint8)[at].view(x.dtype) for x in (main.k, main.v)]
        return exactly(raw[0]), exactly(raw[1])


class Nibbles(Pages):
    """INT4 records, rotated."""

    def __init__(self, step: Step) -> None:
        super().__init__(step, PAGES["int4"])

    @cached_property
    def kind(self) -> Int4Cache:
        """Shape and rotation."""
        shape = self.step.shape
        return Int4Cache.create(self.count, self.page, shape.kv_heads, shape.head_dim)

    @cached_property
    def turn(self) -> Tensor:
        """(head_dim, head_dim) float64, symmetric."""
        return hadamard(self.step.shape.head_dim, self.kind.width).to(self.step.device)

    def _made(self) -> list[DecodeCache]:
        records = self.kind.allocate(self.step.device).fill_(0xFF)  # scales of NaN
        for k, v, slots in self._old():
            self.kind.write(records, k, v, slots)
        return [DecodeCache.int4(self.kind, x) for x in clones(records, self.step.copies)]

    def forget(self) -> None:
        """Scales of NaN."""
        records, record = self.caches[0].records, self.kind.record
        assert records is not None
        for slot in self.slots[:, -1].tolist():
            page, token = divmod(slot, self.page)
            for place in (record.key_scale(token), record.value_scale(token)):
                records[page, :, place : place + SCALE_BYTES] = 0xFF

    def _rows(self, slots: Tensor) -> tuple[Tensor, Tensor]:
        records = self.caches[0].records
        assert records is not None
        k, v = self.kind.read(records, slots)
        return k.double(), v.double()

    def _natural(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        return k @ self.turn, v @ self.turn

    def _attend(self, q: Tensor, slots: Tensor) -> Tensor:
        return super()._attend(q @ self.turn, slots) @ self.turn


class Mixed(Pages):
    """QK4PV8 pages with static means."""

    def __init__(self, step: Step) -> None:
        super().__init__(step, PAGES["qk4pv8"])

    @cached_property
    def kind(self) -> QK4PV8Cache:
        """Shape and terms."""
        return _mixed(self.step.shape, self.count)

    @cached_property
    def means(self) -> Means:
        """Of queries at random, of keys those of the first request's."""
        step, shape = self.step, self.step.shape
        random = torch.Generator().manual_seed(step.seed)
        q = torch.randn(1, shape.heads, shape.head_dim, generator=random).mul_(0.25)
        k = step.history[0][:1, :-1].float().mean(1)
        return Means("static", q.to(step.device), k)

    def _made(self) -> list[DecodeCache]:
        kind, copies = self.kind, self.step.copies
        first = kind.allocate(self.step.device)
        first.records.fill_(0x7F)  # scales of NaN
        assert first.delta is not None
        first.delta.fill_(float("nan"))
        for k, v, slots in self._old():
            kind.place(first, kind.quantize(k, v, self.means), slots)
        pairs = zip(clones(first.records, copies), clones(first.delta, copies), strict=True)
        return [DecodeCache.qk4pv8(kind, Memory(*pair), self.means) for pair in pairs]

    def forget(self) -> None:
        """Scales, values and ΔS of NaN."""
        memory, slots = self.caches[0].memory, self.slots[:, -1].contiguous()
        assert memory is not None
        codes, scales, values, delta = self.kind.fetch(memory, slots)
        assert delta is not None
        for x in (scales, values):
            x.view(torch.uint8).fill_(0x7F)
        self.kind.place(memory, Rows(codes, scales, values, delta.fill_(float("nan"))), slots)

    def _rows(self, slots: Tensor) -> tuple[Tensor, Tensor]:
        k, v, _ = self._fetched(slots)
        return k, v

    def _fetched(self, slots: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        memory = self.caches[0].memory
        assert memory is not None
        k, v, delta = self.kind.dequantize(self.kind.fetch(memory, slots))
        assert delta is not None
        return k.double(), v.double(), delta.double()

    def _natural(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        return k + self.means.k.double(), v

    def _attend(self, q: Tensor, slots: Tensor) -> Tensor:
        k, v, delta = self._fetched(slots)
        heads, dim = q.shape
        groups = (q - self.means.q[0].double()).view(k.shape[1], -1, dim)
        scores = torch.einsum("hgd,shd->hgs", groups, k)
        scores += delta.T.reshape(scores.shape)
        weights = (scores * dim**-0.5).softmax(-1)
        return torch.einsum("hgs,shd->hgd", weights, v).reshape(heads, dim)


def pages_of(step: Step, cache: str, layout: str = "HND") -> Pages:
    """The step's cache in that format, not allocated yet. ``layout``: of a page of 16- or 8-bit rows."""
    if cache in DTYPES:
        return Cells(step, cache, layout)
    return Nibbles(step) if cache == "int4" else Mixed(step)
