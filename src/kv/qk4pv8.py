"""The QK4PV8 cache: NVFP4 keys, FP8 values, ΔS beside them (MpFA 4, 6).

    records (pages, kv_heads, record bytes) uint8        keys, their scales, values transposed
    delta   (pages, q_heads, terms, page_size) bfloat16  only where keys are smoothed

What a value becomes is ``quant.nvfp4`` and ``quant.smoothing``; where it lies is
``layouts.qk4pv8``. Here both meet, in torch, as the text that writer kernels must reproduce byte
for byte: ``quantize`` a batch of rows, ``place`` it in pages, ``fetch`` it back.

Per token and KV head at D = 128: 64 + 8 + 128 = 200 bytes, against 512 of BF16.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from epicute.errors import require
from epicute.kv.pages import slot_is_valid, split_slot
from epicute.kv.records import RecordPool, gather_bytes, scatter_bytes, writable_rows
from epicute.layouts.qk4pv8 import QK4PV8Page, magnitude_bit, sign_bit
from epicute.quant import nvfp4, smoothing

__all__ = [
    "Memory",
    "QK4PV8Cache",
    "Rows",
    "bytes_per_token",
    "pack_keys",
    "unpack_keys",
]


def bytes_per_token(head_dim: int, group: int = 0, terms: int = 0) -> float:
    """Bytes of one token of one KV head, with ΔS of ``group`` query heads in ``terms`` BF16 terms.

    BF16 keys and values take 4 * head_dim.
    """
    return head_dim / 2 + head_dim / nvfp4.BLOCK + head_dim + 2 * group * terms


class Rows(NamedTuple):
    """Quantised tokens in natural order, before or after their page.

    Attributes:
        codes: (T, kv_heads, D/2) uint8, NVFP4 keys, the low nibble the even channel.
        scales: (T, kv_heads, D/16) float8_e4m3fn.
        values: (T, kv_heads, D) float8_e4m3fn.
        delta: (T, q_heads, terms) bfloat16, None without smoothing.
    """

    codes: torch.Tensor
    scales: torch.Tensor
    values: torch.Tensor
    delta: torch.Tensor | None


class Memory(NamedTuple):
    """Memory of a cache: ``records`` and ``delta`` (None without smoothing)."""

    records: torch.Tensor
    delta: torch.Tensor | None


def pack_keys(codes: torch.Tensor, order: str) -> torch.Tensor:
    """(..., D/2) natural NVFP4 bytes to the bytes of a page's row, little-endian words of 8.

    Args:
        codes: uint8, the low nibble the even channel.
        order: one of ``layouts.qk4pv8.ORDERS``.
    """
    nibbles = nvfp4.unpack_nibbles(codes).to(torch.int64).unflatten(-1, (-1, 8))
    words = torch.zeros(nibbles.shape[:-1], dtype=torch.int64, device=codes.device)
    for channel in range(8):
        nibble = nibbles[..., channel]
        words |= (nibble & 7) << magnitude_bit(order, channel)
        words |= (nibble >> 3) << sign_bit(order, channel)
    parts = [words >> shift & 255 for shift in (0, 8, 16, 24)]
    return torch.stack(parts, dim=-1).flatten(-2).to(torch.uint8)


def unpack_keys(row: torch.Tensor, order: str) -> torch.Tensor:
    """Inverse of ``pack_keys``."""
    parts = row.to(torch.int64).unflatten(-1, (-1, 4))
    words = sum(parts[..., i] << 8 * i for i in range(4))
    nibbles = [
        (words >> magnitude_bit(order, c) & 7) | (words >> sign_bit(order, c) & 1) << 3
        for c in range(8)
    ]
    return nvfp4.pack_nibbles(torch.stack(nibbles, dim=-1).flatten(-2).to(torch.uint8))


@dataclass(frozen=True)
class QK4PV8Cache:
    """A QK4PV8 cache of one layer: shape and scales, no memory.

    Attributes:
        pages: pages of the pool.
        kv_heads: heads of keys and values.
        q_heads: query heads, a multiple of ``kv_heads``.
        page: layout of a page's head.
        terms: BF16 terms of ΔS; 0 without smoothing.
        k_scale: second-level scale of keys.
        v_scale: scale of values, value = code * v_scale.
    """

    pages: int
    kv_heads: int
    q_heads: int
    page: QK4PV8Page
    terms: int = 0
    k_scale: float = 1.0
    v_scale: float = 1.0

    def __post_init__(self) -> None:
        require(
            min(self.pages, self.kv_heads) >= 1
            and self.q_heads >= 1
            and self.q_heads % self.kv_heads == 0,
            "q_heads",
            (self.pages, self.kv_heads, self.q_heads),
            "at least one page and head, q_heads a multiple of kv_heads",
            "size the pool",
        )
        require(
            self.terms in (0, *smoothing.TERMS),
            "terms",
            self.terms,
            f"0 (no smoothing) or one of {smoothing.TERMS}",
            "store 1 (paper) or 2 (hi + lo)",
        )
        for name in ("k_scale", "v_scale"):
            object.__setattr__(self, name, nvfp4.narrow_scale(getattr(self, name), name))

    @property
    def capacity(self) -> int:
        """Slots of the pool."""
        return self.pages * self.page.page_size

    @property
    def bytes(self) -> int:
        """Bytes of the whole pool, ΔS included."""
        side = self.q_heads * self.terms * self.page.page_size * 2
        return self.pages * (self.kv_heads * self.page.bytes + side)

    def allocate(self, device: torch.device | str = "cpu") -> Memory:
        """Zeroed memory."""
        shape = (self.pages, self.kv_heads, self.page.bytes)
        records = torch.zeros(shape, dtype=torch.uint8, device=device)
        side = (self.pages, self.q_heads, self.terms, self.page.page_size)
        delta = torch.zeros(side, dtype=torch.bfloat16, device=device) if self.terms else None
        return Memory(records, delta)

    def pool(self, memory: Memory) -> RecordPool:
        """Addresses of the records, which may be any strided view of whole ones.

        Raises:
            ArgumentError: memory of another cache, or ΔS that is there and should not be, or the
                other way round.
        """
        found = RecordPool.describe(memory.records, self.page.page_size, self.page.bytes)
        require(
            (found.pages, found.kv_heads) == (self.pages, self.kv_heads),
            "memory.records.shape",
            tuple(memory.records.shape),
            f"({self.pages}, {self.kv_heads}, {self.page.bytes})",
            "allocate() this cache's memory",
        )
        side = (self.pages, self.q_heads, self.terms, self.page.page_size)
        fits = memory.delta is None
        if memory.delta is not None:
            fits = memory.delta.shape == side and memory.delta.dtype == torch.bfloat16
        require(
            fits and (memory.delta is not None) == (self.terms > 0),
            "memory.delta",
            None if memory.delta is None else f"{tuple(memory.delta.shape)} {memory.delta.dtype}",
            f"{side} bfloat16" if self.terms else "None",
            "allocate() this cache's memory",
        )
        return found

    @torch.no_grad()
    def quantize(
        self,
        keys: torch.Tensor,
        values: torch.Tensor,
        means: smoothing.Means | None = None,
        group: torch.Tensor | None = None,
        counters: tuple[nvfp4.CastCounters, nvfp4.CastCounters] | None = None,
    ) -> Rows:
        """Centre and quantise keys, quantise values, compute ΔS.

        Args:
            keys: (T, kv_heads, D) float32, bfloat16 or float16, after RoPE; left as they are.
            values: the same shape.
            means: of this layer, exactly where the cache has terms.
            group: (T,) integers, the group of the means of each row; may be left out where there
                is one.
            counters: of keys and of values; what is lost is added.

        Raises:
            ArgumentError: shapes or dtypes, or means without terms, or terms without means.
        """
        shape = (keys.shape[0] if keys.ndim else 0, self.kv_heads, self.page.head_dim)
        for name, x in (("keys", keys), ("values", values)):
            require(
                x.shape == shape, f"{name}.shape", tuple(x.shape), f"{shape}", "view it by heads"
            )
        require(
            (means is not None) == (self.terms > 0),
            "means",
            None if means is None else means.kind,
            "means" if self.terms else "None, for a cache without terms of ΔS",
            "create the cache with the terms its smoothing needs",
        )
        of_keys, of_values = counters if counters is not None else (None, None)
        delta = None
        if means is not None:
            require(
                means.q.shape[1:] == (self.q_heads, self.page.head_dim),
                "means",
                tuple(means.q.shape),
                f"(groups, {self.q_heads}, {self.page.head_dim})",
                "pass the means of this layer",
            )
            keys = smoothing.centre(keys, means.k, group)
            found = smoothing.delta(means.q, keys, group)
            delta = smoothing.split_terms(found, self.terms)
        codes, scales = nvfp4.quantize_nvfp4(keys, self.k_scale, of_keys)
        return Rows(codes, scales, nvfp4.quantize_values(values, self.v_scale, of_values), delta)

    def _places(self, token: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Places (T, n) of a token's key bytes, scales and values in its record."""
        page, device = self.page, token.device
        token = token[:, None]
        key = page.key_row(token) + torch.arange(page.row_bytes, device=device)
        scale = page.scale_byte(token, torch.arange(page.blocks, device=device))
        value = page.value_byte(token, torch.arange(page.head_dim, device=device))
        return key, scale, value

    @torch.no_grad()
    def place(self, memory: Memory, rows: Rows, slots: torch.Tensor) -> None:
        """Store one row per slot, in place.

        Args:
            memory: of this cache.
            rows: T quantised tokens.
            slots: (T,) int64 distinct; negative ones and those past the end are skipped.

        Raises:
            ArgumentError: rows or memory of another cache, or two rows for one slot.
        """
        self.pool(memory)
        count = rows.codes.shape[0]
        heads, page = (count, self.kv_heads), self.page
        expected = [(*heads, width) for width in (page.row_bytes, page.blocks, page.head_dim)]
        shapes = [tuple(x.shape) for x in rows if x is not None]
        if self.terms:
            expected.append((count, self.q_heads, self.terms))
        require(shapes == expected, "rows", shapes, f"{expected}", "quantize() for this cache")
        kept = writable_rows(slots, count, self.capacity)
        slots, size = slots[kept], page.page_size
        index, token = split_slot(slots, size)
        key, scale, value = self._places(token)
        codes = pack_keys(rows.codes[kept], page.order)
        scatter_bytes(memory.records, slots, size, key, codes)
        raw = rows.scales.view(torch.uint8)[kept], rows.values.view(torch.uint8)[kept]
        scatter_bytes(memory.records, slots, size, scale, raw[0])
        scatter_bytes(memory.records, slots, size, value, raw[1])
        if memory.delta is not None and rows.delta is not None:
            memory.delta[index, :, :, token] = rows.delta[kept]

    def fetch(self, memory: Memory, slots: torch.Tensor) -> Rows:
        """The rows at ``slots``, (T,) int64, every one of them valid.

        Raises:
            ArgumentError: memory of another cache, or a slot that is no place.
        """
        self.pool(memory)
        valid = slot_is_valid(slots, self.capacity)
        require(
            bool(valid.all()),
            "slots",
            f"{slots[~valid][:8].tolist()}",
            f"0 to {self.capacity - 1}",
            "leave out padding",
        )
        size = self.page.page_size
        page, token = split_slot(slots, size)
        found = [gather_bytes(memory.records, slots, size, p) for p in self._places(token)]
        delta = None if memory.delta is None else memory.delta[page, :, :, token]
        return Rows(
            unpack_keys(found[0], self.page.order),
            found[1].view(torch.float8_e4m3fn),
            found[2].view(torch.float8_e4m3fn),
            delta,
        )

    def dequantize(self, rows: Rows) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """What a kernel computes with: centred keys, values, and ΔS (None without smoothing).

        Returns:
            keys (T, kv_heads, D), values (T, kv_heads, D), ΔS (T, q_heads), all float32.
        """
        keys = nvfp4.dequantize_nvfp4(rows.codes, rows.scales, self.k_scale)
        values = nvfp4.dequantize_values(rows.values, self.v_scale)
        delta = None if rows.delta is None else smoothing.join_terms(rows.delta)
        return keys, values, delta
