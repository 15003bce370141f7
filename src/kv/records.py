"""Pools whose tokens live in packed records, one of bytes for each (page, KV head).

    memory (pages, kv_heads, record bytes) uint8

A record's inside is a layout's affair (``layouts.kv_int4``, ``layouts.qk4pv8``); where it starts is
the slot arithmetic that all formats share, in 64 bits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from epicute.errors import require
from epicute.kv.pages import Strides, cell_offset, check_slots, slot_is_valid, split_slot

__all__ = ["RecordPool", "gather_bytes", "scatter_bytes", "writable_rows"]

ALIGNMENT = 16
"""Bytes to which every record is aligned: the widest access, and what TMA asks of strides."""


@dataclass(frozen=True)
class RecordPool:
    """What a kernel must know of a pool of records: no memory.

    Attributes:
        pages: pages of the pool.
        page_size: tokens per page.
        kv_heads: records per page.
        record_bytes: bytes of a record.
        page_stride: bytes from one page to the next.
        head_stride: bytes from one KV head of a page to the next.
    """

    pages: int
    page_size: int
    kv_heads: int
    record_bytes: int
    page_stride: int
    head_stride: int

    def __post_init__(self) -> None:
        require(
            min(self.pages, self.page_size, self.kv_heads, self.record_bytes) >= 1,
            "memory.shape",
            (self.pages, self.kv_heads, self.record_bytes),
            "(pages, kv_heads, record bytes), each at least 1",
            "allocate the pool first",
        )
        aligned = self.page_stride % ALIGNMENT == 0 and self.head_stride % ALIGNMENT == 0
        sizes = ((self.kv_heads, self.head_stride), (self.pages, self.page_stride))
        reach = self.record_bytes
        disjoint = True
        for size, stride in sorted(sizes, key=lambda axis: axis[1]):
            if size > 1:
                disjoint = disjoint and stride >= reach
                reach += (size - 1) * stride
        require(
            aligned and disjoint,
            "memory.strides",
            (self.page_stride, self.head_stride),
            f"multiples of {ALIGNMENT} bytes, no two records of {self.record_bytes} overlapping",
            "pass a view of whole records",
        )

    @staticmethod
    def describe(memory: torch.Tensor, page_size: int, record_bytes: int) -> RecordPool:
        """Describe ``memory`` (pages, kv_heads, record_bytes) uint8, any strides between records.

        Raises:
            ArgumentError: dtype, shape, strides or alignment that no kernel serves.
        """
        require(
            memory.dtype == torch.uint8 and memory.ndim == 3 and memory.shape[2] == record_bytes,
            "memory",
            f"{tuple(memory.shape)} {memory.dtype}",
            f"(pages, kv_heads, {record_bytes}) uint8",
            "allocate it with the format's own allocate()",
        )
        require(
            memory.stride(2) == 1,
            "memory.stride(2)",
            memory.stride(2),
            "1",
            "keep the bytes of a record adjacent",
        )
        require(
            memory.data_ptr() % ALIGNMENT == 0,
            "memory.data_ptr()",
            memory.data_ptr(),
            f"a multiple of {ALIGNMENT}",
            "start the pool at an aligned address",
        )
        # An axis of one element has no step, and views give it any.
        pages, kv_heads, _ = memory.shape
        steps = [
            stride if size > 1 else record_bytes * kv_heads
            for size, stride in zip(memory.shape[:2], memory.stride()[:2], strict=True)
        ]
        return RecordPool(pages, page_size, kv_heads, record_bytes, *steps)

    @property
    def capacity(self) -> int:
        """Slots of the pool; valid ones are 0 to capacity - 1."""
        return self.pages * self.page_size

    @property
    def strides(self) -> Strides:
        """Bytes from one page, token (0: a layout's affair), head and byte to the next."""
        return Strides(self.page_stride, 0, self.head_stride)

    def start(self, page: Any, head: Any) -> Any:
        """Bytes from the pool to a record, in 64 bits; int, NumPy, torch or DSL Int64."""
        return cell_offset(page, 0, head, 0, self.strides)

    def check(self, memory: torch.Tensor) -> None:
        """Raise unless ``memory`` is what this description was made of (its address apart).

        Raises:
            ArgumentError: another shape, dtype or other strides.
        """
        found = RecordPool.describe(memory, self.page_size, self.record_bytes)
        require(
            found == self,
            "memory",
            found,
            f"{self}",
            "plan again for this pool",
        )


def writable_rows(slots: torch.Tensor, rows: int, capacity: int) -> torch.Tensor:
    """(R,) indices of the rows that have a place: padding and slots past the end are skipped.

    Reads the slots, so it waits for their device.

    Raises:
        ArgumentError: not exactly one int64 slot per row, or two rows for one slot.
    """
    check_slots(slots, rows)
    kept = slot_is_valid(slots, capacity).nonzero()[:, 0]
    twice = kept.numel() - slots[kept].unique().numel()
    require(twice == 0, "slots", f"{twice} repeated", "distinct slots", "one row per slot")
    return kept


def _cells(
    memory: torch.Tensor, slots: torch.Tensor, page_size: int, places: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    page, _ = split_slot(slots, page_size)
    heads = torch.arange(memory.shape[1], device=memory.device)
    return page[:, None, None], heads[None, :, None], places[:, None, :]


def scatter_bytes(
    memory: torch.Tensor,
    slots: torch.Tensor,
    page_size: int,
    places: torch.Tensor,
    data: torch.Tensor,
) -> None:
    """Write ``data`` (T, kv_heads, n) at ``places`` (T, n) of the records of valid ``slots``."""
    memory[_cells(memory, slots, page_size, places)] = data


def gather_bytes(
    memory: torch.Tensor, slots: torch.Tensor, page_size: int, places: torch.Tensor
) -> torch.Tensor:
    """(T, kv_heads, n) bytes at ``places`` (T, n) of the records of valid ``slots``."""
    return memory[_cells(memory, slots, page_size, places)]
