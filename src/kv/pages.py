"""Addresses in a KV cache: slot -> (page, token) -> element.

A cache of keys (and, alike, one of values) is read logically as (pages, page_size, kv_heads,
head_dim), whatever its strides are:

    NHD      (pages, page_size, kv_heads, head_dim) as it is
    HND      (pages, kv_heads, page_size, head_dim).transpose(1, 2)
    joined   (pages, 2, page_size, kv_heads, head_dim).unbind(1)
    packed   (pages, kv_heads, page_size, 2 * head_dim).transpose(1, 2).chunk(2, dim=-1)
    dense    (batch, max_len, kv_heads, head_dim): one page of max_len tokens per sequence

A token's place is its slot, page * page_size + token, one int64 for all formats; -1 marks a row
that has none. Slots and offsets pass 2^31 on real pools, so all arithmetic on them is 64-bit.

The functions of slots are integer algebra that runs on int, NumPy arrays, torch tensors and DSL
integers alike.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from epicute.errors import require

__all__ = [
    "NO_SLOT",
    "PAGE_SIZES",
    "KVPool",
    "Strides",
    "cell_offset",
    "check_slots",
    "slot_is_valid",
    "slots_for",
    "split_slot",
]

NO_SLOT = -1
"""Slot of a row that is written nowhere."""

PAGE_SIZES = (16, 32, 64, 128)
"""Tokens per page of a paged cache; a dense cache has any number."""

DTYPES = (torch.bfloat16, torch.float16, torch.float8_e4m3fn)


@dataclass(frozen=True)
class Strides:
    """Elements from one page, token, head or channel to the next."""

    page: int
    token: int
    head: int
    channel: int = 1


def _wide(value: Any, argument: str) -> Any:
    """``value`` in 64 bits. A DSL integer must come so: only its caller can name the wider type."""
    if isinstance(value, np.ndarray | np.integer):
        return value.astype(np.int64)
    if isinstance(value, torch.Tensor):
        return value.to(torch.int64)
    width = getattr(value, "width", 64)
    require(width >= 64, argument, f"{width} bits", "64 bits", f"widen first: Int64({argument})")
    return value


def slot_is_valid(slot: Any, capacity: int) -> Any:
    """Whether ``slot`` is a token's place in a pool of ``capacity`` slots.

    Asked before ``split_slot``: negative slots and those past the end are skipped by every writer.
    """
    slot = _wide(slot, "slot")
    return (slot >= 0) & (slot < capacity)


def split_slot(slot: Any, page_size: int) -> tuple[Any, Any]:
    """(page, token) of a valid ``slot``, in 64 bits; DSL callers pass Int64.

    For a negative slot the result means nothing and differs between host and device (their
    remainders have different signs).
    """
    slot = _wide(slot, "slot")
    return slot // page_size, slot % page_size


def cell_offset(page: Any, token: Any, head: Any, channel: Any, strides: Strides) -> Any:
    """Elements from the start of the pool to one element, in 64 bits.

    NumPy and torch integers are widened here before anything is multiplied. DSL callers pass
    ``page``, ``token`` and ``head`` as Int64; ``channel`` may be narrow.

    Raises:
        ArgumentError: a DSL integer narrower than 64 bits.
    """
    page, token, head = _wide(page, "page"), _wide(token, "token"), _wide(head, "head")
    if isinstance(channel, np.ndarray | np.integer | torch.Tensor):
        channel = _wide(channel, "channel")
    return (
        page * strides.page
        + token * strides.token
        + head * strides.head
        + channel * strides.channel
    )


@dataclass(frozen=True)
class KVPool:
    """What a kernel must know of a cache of keys or of values: shape, strides and dtype, no memory.

    Attributes:
        pages: pages of the pool; the batch of a dense cache.
        page_size: tokens per page; max_len of a dense cache.
        kv_heads: heads of keys and values.
        head_dim: channels of a head.
        dtype: bfloat16, float16 or float8_e4m3fn.
        strides: in elements.
    """

    pages: int
    page_size: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype
    strides: Strides

    def __post_init__(self) -> None:
        require(
            min(self.sizes) >= 1,
            "cache.shape",
            self.sizes,
            "(pages, page_size, kv_heads, head_dim), each at least 1",
            "allocate the cache first",
        )
        require(
            self.dtype in DTYPES,
            "cache.dtype",
            self.dtype,
            f"one of {DTYPES}",
            "allocate the cache in one of these",
        )
        require(
            self.strides.channel == 1,
            "cache.stride(channel)",
            self.strides.channel,
            "1",
            "keep the channels of a head adjacent",
        )
        require(
            self._disjoint(),
            "cache.strides",
            self.strides,
            f"no two elements of {self.sizes} at one address",
            "pass a cache of its own memory, not an expanded or overlapping view",
        )

    @staticmethod
    def paged(cache: torch.Tensor) -> KVPool:
        """Describe a paged cache seen as (pages, page_size, kv_heads, head_dim).

        Raises:
            ArgumentError: rank, page size, dtype or strides that no kernel serves.
        """
        pool = _describe(cache, "(pages, page_size, kv_heads, head_dim)")
        require(
            pool.page_size in PAGE_SIZES,
            "cache.page_size",
            pool.page_size,
            f"one of {PAGE_SIZES}",
            "view the cache as (pages, page_size, kv_heads, head_dim), or use KVPool.dense",
        )
        return pool

    @staticmethod
    def dense(cache: torch.Tensor) -> KVPool:
        """Describe a cache (batch, max_len, kv_heads, head_dim): slot = row * max_len + position.

        Raises:
            ArgumentError: rank, dtype or strides that no kernel serves.
        """
        return _describe(cache, "(batch, max_len, kv_heads, head_dim)")

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        """(pages, page_size, kv_heads, head_dim)."""
        return self.pages, self.page_size, self.kv_heads, self.head_dim

    @property
    def capacity(self) -> int:
        """Slots of the pool; valid ones are 0 to capacity - 1."""
        return self.pages * self.page_size

    @property
    def span(self) -> int:
        """Elements from the first to the last, both counted: what offsets stay under."""
        return 1 + sum((size - 1) * stride for size, stride in self._axes())

    @property
    def vector_bytes(self) -> int:
        """Widest access, up to 16 bytes, aligned in all (slot, head) rows if the pool is."""
        steps = [stride for size, stride in self._axes()[:3] if size > 1]
        return math.gcd(16, *(step * self.dtype.itemsize for step in (*steps, self.head_dim)))

    def offset(self, slot: Any, head: Any, channel: Any) -> Any:
        """``cell_offset`` of a valid ``slot``; int, NumPy, torch or DSL Int64."""
        return cell_offset(*split_slot(slot, self.page_size), head, channel, self.strides)

    def check(self, cache: torch.Tensor, argument: str = "cache") -> None:
        """Raise unless ``cache`` is what this description was made of (its address apart).

        Raises:
            ArgumentError: another shape, dtype or other strides.
        """
        same = cache.shape == self.sizes and cache.dtype == self.dtype
        # An axis of one element has no step, and views give it any.
        axes = zip(cache.stride(), self._axes(), strict=False)
        require(
            same and all(found == stride or size == 1 for found, (size, stride) in axes),
            argument,
            f"{tuple(cache.shape)} {cache.dtype}, strides {cache.stride()}",
            f"{self.sizes} {self.dtype}, {self.strides}",
            "plan again for this cache",
        )

    def _axes(self) -> list[tuple[int, int]]:
        steps = (self.strides.page, self.strides.token, self.strides.head, self.strides.channel)
        return list(zip(self.sizes, steps, strict=True))

    def _disjoint(self) -> bool:
        """Each axis steps over all that the smaller ones span."""
        reach = 0
        for size, stride in sorted(self._axes(), key=lambda axis: axis[1]):
            if size == 1:
                continue
            if stride <= reach:
                return False
            reach += (size - 1) * stride
        return True


def _describe(cache: torch.Tensor, view: str) -> KVPool:
    require(
        cache.ndim == 4,
        "cache.shape",
        tuple(cache.shape),
        view,
        "pass a view with these four axes",
    )
    pages, page_size, kv_heads, head_dim = cache.shape
    strides = Strides(*cache.stride())
    return KVPool(pages, page_size, kv_heads, head_dim, cache.dtype, strides)


def check_slots(slots: torch.Tensor, rows: int) -> None:
    """Raise unless ``slots`` is a contiguous (rows,) int64 tensor.

    Raises:
        ArgumentError: another dtype, or not exactly one slot per row: a row beyond the slots has no
            place, and a slot beyond the rows has no value.
    """
    require(
        slots.dtype == torch.int64,
        "slots.dtype",
        slots.dtype,
        "int64, since slots and offsets pass 2^31",
        "slots.to(torch.int64)",
    )
    require(
        slots.shape == (rows,) and slots.is_contiguous(),
        "slots",
        f"{tuple(slots.shape)}, strides {slots.stride()}",
        f"contiguous ({rows},), one slot per row",
        f"slice the rows, or fill up with {NO_SLOT} for rows that are written nowhere",
    )


def slots_for(
    page_table: torch.Tensor,
    positions: torch.Tensor,
    requests: torch.Tensor,
    page_size: int,
    check: bool = True,
) -> torch.Tensor:
    """Slot of each row's token.

    Args:
        page_table: (requests, pages per request) int32 or int64: page of each stretch of page_size
            positions. For a dense cache of max_len tokens: ``torch.arange(batch)[:, None]`` with
            page_size=max_len.
        positions: (M,) int32 or int64, position of the token in its request.
        requests: (M,) int32 or int64, its row in the table.
        page_size: tokens per page.
        check: raise where a row points outside the table or to a negative page. That waits for the
            device; without it such rows get -1. The table is never read out of bounds.

    Returns:
        (M,) int64; -1 for padding, which is a row whose request or position is -1.

    Raises:
        ArgumentError: wrong shapes or dtypes; with ``check``, a row that is neither padding nor in
            the table.
    """
    _check_table(page_table, positions, requests, page_size)
    position, request = positions.to(torch.int64), requests.to(torch.int64)
    height, width = page_table.shape
    stretch = torch.div(position, page_size, rounding_mode="floor")
    inside = (request >= 0) & (request < height) & (stretch >= 0) & (stretch < width)
    page = page_table.reshape(-1)[torch.where(inside, request * width + stretch, 0)]
    found = inside & (page >= 0)
    if check:
        padding = (position == NO_SLOT) | (request == NO_SLOT)
        lost = (~(found | padding)).nonzero()[:, 0].tolist()
        require(
            not lost,
            "positions",
            f"rows {lost[:8]} outside the page table or on a negative page",
            f"requests below {height}, positions below {width * page_size}, pages given",
            "extend the page table, or mark padding with -1",
        )
    slot = page.to(torch.int64) * page_size + position % page_size
    return torch.where(found, slot, NO_SLOT)


def _check_table(
    page_table: torch.Tensor, positions: torch.Tensor, requests: torch.Tensor, page_size: int
) -> None:
    require(page_size >= 1, "page_size", page_size, "at least 1", "pass tokens per page")
    require(
        page_table.ndim == 2 and page_table.numel() > 0,
        "page_table.shape",
        tuple(page_table.shape),
        "(requests, pages per request), both at least 1",
        "pass one row per request",
    )
    require(
        positions.ndim == 1 and positions.shape == requests.shape,
        "positions.shape",
        f"{tuple(positions.shape)} with requests {tuple(requests.shape)}",
        "both (M,)",
        "pass one position and one request per row",
    )
    named = {"page_table": page_table, "positions": positions, "requests": requests}
    for argument, tensor in named.items():
        require(
            tensor.dtype in (torch.int32, torch.int64),
            f"{argument}.dtype",
            tensor.dtype,
            "int32 or int64",
            "cast it",
        )
