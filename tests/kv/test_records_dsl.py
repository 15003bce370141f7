"""Addresses of records, traced on DSL Int64 and run on the host: the same 64-bit integers.

Annotations are evaluated as they stand, since the DSL reads them: no postponed ones here.
"""

import numpy as np
import pytest
import torch

from epicute.errors import ArgumentError
from epicute.kv.int4 import Int4Cache
from epicute.kv.pages import split_slot
from epicute.kv.records import RecordPool
from epicute.layouts.kv_int4 import Int4Record
from epicute.layouts.qk4pv8 import QK4PV8Page

pytestmark = pytest.mark.compile

CACHE = Int4Cache(2**20, 8, Int4Record(64, 128))
INT4 = RecordPool(2**20, 64, 8, CACHE.record.bytes, 9 * CACHE.record.bytes, CACHE.record.bytes)
PAGE = QK4PV8Page(128, 128)
QK4PV8 = RecordPool(2**20, 128, 8, PAGE.bytes, 8 * PAGE.bytes, PAGE.bytes)


def addresses(slot: object, head: object, channel: object) -> list:
    """Every address an appending kernel computes; the same text for NumPy and the DSL."""
    page, token = split_slot(slot, PAGE.page_size)
    start = QK4PV8.start(page, head)
    return [
        CACHE.key_offset(INT4, slot, head),
        CACHE.value_offset(INT4, slot, head),
        start + PAGE.key_row(token),
        start + PAGE.scale_byte(token, channel // 16),
        start + PAGE.value_byte(token, channel),
    ]


def test_kv_14_kv_16_addresses_beyond_32_bits() -> None:
    import cutlass
    from cutlass import cute
    from cutlass.cute.runtime import from_dlpack

    slots = np.array([0, 17, 64 * 2**16 + 5, 64 * 2**20 - 1, 100 * 2**18 + 77])
    wanted = np.stack(addresses(slots, np.int64(7), np.int64(100)), axis=1)
    assert wanted.max() > 2**33
    found = torch.full(wanted.shape, -1, dtype=torch.int64)

    @cute.jit
    def fill(out: cute.Tensor, slots: cute.Tensor, count: cutlass.Int32):
        for i in range(count):
            values = addresses(slots[i], cutlass.Int64(7), cutlass.Int32(100))
            for column in cutlass.range_constexpr(len(values)):
                out[i, column] = values[column]

    fill(from_dlpack(found), from_dlpack(torch.from_numpy(slots)), cutlass.Int32(len(slots)))
    assert np.array_equal(found.numpy(), wanted)


def test_kv_16_int32_slots_are_refused_while_tracing() -> None:
    import cutlass
    from cutlass import cute

    @cute.jit
    def narrow(slot: cutlass.Int32):
        CACHE.key_offset(INT4, slot, cutlass.Int64(0))

    with pytest.raises(ArgumentError, match="slot: got 32 bits"):
        narrow(cutlass.Int32(3))
