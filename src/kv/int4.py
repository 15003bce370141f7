"""The INT4 cache: four-bit keys and values, an FP32 scale per token and head (FuTransformer 3.3.2).

    value = (nibble - 8) * scale

The contract of a row, all IEEE FP32 rounded to nearest, which kernels that append share:

    amax   = max |x| over the finite x of the row
    scale  = max(amax / 7, 2^-117)
    nibble = rint(clamp(x * RN(1 / scale), -7, 7)) + 8      ties to even

A row of zeros has nibbles 8 and the least scale, and reads as zeros. An infinity is clipped and NaN
becomes +7, as max(min(x, 7), -7) makes it on the device; neither enters the scale.

Rows are rotated first (``quant.hadamard``), keys after RoPE, from the BF16 row without a rounding
between. Values need no rotation here where it was folded into the projections. What a reader gets
are rotated rows: it rotates its query, and its output back.

A product's scale is that of the token: kernels multiply scores by K's and probabilities by V's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from epicute.errors import require
from epicute.kv.pages import slot_is_valid, split_slot
from epicute.kv.records import RecordPool, gather_bytes, scatter_bytes, writable_rows
from epicute.layouts.kv_int4 import SCALE_BYTES, ZERO_CODE, Int4Record, channel_of_nibble
from epicute.quant.fp8 import SCALE_MIN, as_float32, inverse
from epicute.quant.hadamard import block_width, rotate

__all__ = [
    "INT4_MAX",
    "Int4Cache",
    "dequantize_row",
    "pack_row",
    "quantize_row",
    "unpack_row",
]

INT4_MAX = 7.0
"""Largest magnitude of a code; -8 is not used."""


@torch.no_grad()
def quantize_row(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Nibbles and scale of every row.

    Args:
        x: (..., D) float32, bfloat16 or float16, any strides, D > 0.

    Returns:
        nibbles (..., D) uint8, 1 to 15; scale (...) float32, positive and finite.

    Raises:
        ArgumentError: a dtype, or rows without channels.
    """
    require(
        x.ndim >= 1 and x.shape[-1] > 0, "x.shape", tuple(x.shape), "(..., D), D > 0", "pass rows"
    )
    x = as_float32(x)
    amax = torch.where(x.isfinite(), x.abs(), 0.0).amax(dim=-1)
    # A tensor divisor: a Python number CUDA would turn into a multiplication, a bit off.
    scale = (amax / torch.full_like(amax, INT4_MAX)).clamp(min=SCALE_MIN)
    scaled = (x * inverse(scale)[..., None]).nan_to_num(INT4_MAX, INT4_MAX, -INT4_MAX)
    codes = scaled.clamp(-INT4_MAX, INT4_MAX).round()
    return (codes + ZERO_CODE).to(torch.uint8), scale


def dequantize_row(nibbles: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """(..., D) float32 ``(nibble - 8) * scale``; ``scale`` (...) float32.

    Raises:
        ArgumentError: not one scale per row.
    """
    require(
        scale.shape == nibbles.shape[:-1] and scale.dtype == torch.float32,
        "scale",
        f"{tuple(scale.shape)} {scale.dtype}",
        f"float32 {tuple(nibbles.shape[:-1])}, one per row",
        "pass the scale that the row was written with",
    )
    return (nibbles.to(torch.float32) - ZERO_CODE) * scale[..., None]


def pack_row(nibbles: torch.Tensor) -> torch.Tensor:
    """(..., D) uint8 nibbles to the (..., D/2) bytes of a record's row; D a multiple of 8."""
    order = channel_of_nibble(torch.arange(nibbles.shape[-1], device=nibbles.device))
    placed = nibbles[..., order]
    return placed[..., 0::2] | placed[..., 1::2] << 4


def unpack_row(row: torch.Tensor) -> torch.Tensor:
    """Inverse of ``pack_row``."""
    placed = torch.stack((row & 15, row >> 4), dim=-1).flatten(-2)
    order = channel_of_nibble(torch.arange(placed.shape[-1], device=row.device))
    found = torch.empty_like(placed)
    found[..., order] = placed
    return found


def _span(start: torch.Tensor, count: int) -> torch.Tensor:
    """(T, count) places from each of (T,) starts on."""
    return start[:, None] + torch.arange(count, device=start.device)


@dataclass(frozen=True)
class Int4Cache:
    """An INT4 cache of keys and values: shape and rotation, no memory.

    Attributes:
        pages: pages of the pool; the batch of a dense cache.
        kv_heads: heads of keys and values.
        record: layout of a page's head; a dense cache has one page of max_len tokens a sequence.
        width: of a rotation block; 0 turns the rotation off.
        values_folded: values arrive rotated, by ``quant.hadamard.fold_value``.
    """

    pages: int
    kv_heads: int
    record: Int4Record
    width: int = 0
    values_folded: bool = False

    def __post_init__(self) -> None:
        require(
            min(self.pages, self.kv_heads) >= 1,
            "pages",
            (self.pages, self.kv_heads),
            "at least one page and head",
            "size the pool",
        )
        if self.width:
            block_width(self.record.head_dim, self.width)
        require(
            not self.values_folded or self.width > 0,
            "values_folded",
            self.values_folded,
            "False where nothing is rotated",
            "give the width that was folded",
        )

    @staticmethod
    def create(
        pages: int, page_size: int, kv_heads: int, head_dim: int, rotated: bool = True
    ) -> Int4Cache:
        """A cache rotated over whole heads (or not at all).

        Raises:
            ArgumentError: a size that no kernel serves.
        """
        width = block_width(head_dim) if rotated else 0
        return Int4Cache(pages, kv_heads, Int4Record(page_size, head_dim), width)

    @property
    def capacity(self) -> int:
        """Slots of the pool."""
        return self.pages * self.record.page_size

    def allocate(self, device: torch.device | str = "cpu") -> torch.Tensor:
        """Zeroed memory (pages, kv_heads, record bytes) uint8."""
        shape = (self.pages, self.kv_heads, self.record.bytes)
        return torch.zeros(shape, dtype=torch.uint8, device=device)

    def pool(self, memory: torch.Tensor) -> RecordPool:
        """Addresses of ``memory``, which may be any strided view of whole records.

        Raises:
            ArgumentError: memory of another cache.
        """
        found = RecordPool.describe(memory, self.record.page_size, self.record.bytes)
        require(
            (found.pages, found.kv_heads) == (self.pages, self.kv_heads),
            "memory.shape",
            tuple(memory.shape),
            f"({self.pages}, {self.kv_heads}, {self.record.bytes})",
            "allocate() this cache's memory",
        )
        return found

    def key_offset(self, pool: RecordPool, slot: Any, head: Any) -> Any:
        """Bytes from the pool to the K nibbles of a valid ``slot``; int, NumPy, torch, DSL Int64."""
        page, token = split_slot(slot, self.record.page_size)
        return pool.start(page, head) + self.record.key_row(token)

    def value_offset(self, pool: RecordPool, slot: Any, head: Any) -> Any:
        """Bytes from the pool to the V nibbles of a valid ``slot``."""
        page, token = split_slot(slot, self.record.page_size)
        return pool.start(page, head) + self.record.value_row(token)

    def rotated(self, x: torch.Tensor, values: bool = False) -> torch.Tensor:
        """Rows as they are quantised, float32: queries and keys, or ``values``."""
        if not self.width or (values and self.values_folded):
            return as_float32(x)
        return rotate(x, self.width)

    def _check_rows(self, x: torch.Tensor, argument: str, rows: int) -> None:
        shape = (rows, self.kv_heads, self.record.head_dim)
        require(
            x.shape == shape, f"{argument}.shape", tuple(x.shape), f"{shape}", "view it by heads"
        )

    @torch.no_grad()
    def write(
        self, memory: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, slots: torch.Tensor
    ) -> None:
        """Rotate, quantise and store one row per slot, in place: prefill and append alike.

        Args:
            memory: (pages, kv_heads, record bytes) uint8.
            keys: (T, kv_heads, D) float32, bfloat16 or float16, after RoPE.
            values: the same shape.
            slots: (T,) int64 distinct; negative ones and those past the end are skipped.

        Raises:
            ArgumentError: shapes or dtypes, or two rows for one slot.
        """
        self.pool(memory)
        kept = writable_rows(slots, keys.shape[0], self.capacity)
        self._check_rows(keys, "keys", keys.shape[0])
        self._check_rows(values, "values", keys.shape[0])
        slots = slots[kept]
        _, token = split_slot(slots, self.record.page_size)
        sides = (
            (keys, False, self.record.key_row(token), self.record.key_scale(token)),
            (values, True, self.record.value_row(token), self.record.value_scale(token)),
        )
        for x, is_value, row, place in sides:
            nibbles, scale = quantize_row(self.rotated(x[kept], values=is_value))
            page_size = self.record.page_size
            spans = _span(row, self.record.row_bytes), _span(place, SCALE_BYTES)
            scatter_bytes(memory, slots, page_size, spans[0], pack_row(nibbles))
            raw = scale.contiguous().view(torch.uint8).unflatten(-1, (self.kv_heads, SCALE_BYTES))
            scatter_bytes(memory, slots, page_size, spans[1], raw)

    def read(self, memory: torch.Tensor, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Rows at ``slots`` as a kernel sees them: dequantised, still rotated.

        Args:
            memory: (pages, kv_heads, record bytes) uint8.
            slots: (T,) int64.

        Returns:
            keys and values, (T, kv_heads, D) float32; NaN in rows whose slot is no place, so that
            no use of them goes unseen.

        Raises:
            ArgumentError: memory of another cache.
        """
        self.pool(memory)
        valid = slot_is_valid(slots, self.capacity)
        safe = torch.where(valid, slots, 0)
        page_size = self.record.page_size
        _, token = split_slot(safe, page_size)
        found = []
        for row, place in (
            (self.record.key_row(token), self.record.key_scale(token)),
            (self.record.value_row(token), self.record.value_scale(token)),
        ):
            nibbles = gather_bytes(memory, safe, page_size, _span(row, self.record.row_bytes))
            raw = gather_bytes(memory, safe, page_size, _span(place, SCALE_BYTES))
            scale = raw.contiguous().view(torch.float32)[..., 0]
            values = dequantize_row(unpack_row(nibbles), scale)
            found.append(torch.where(valid[:, None, None], values, torch.nan))
        return found[0], found[1]
