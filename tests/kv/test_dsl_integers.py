"""The slot functions, traced on DSL Int64 and run on the host: the same 64-bit integers.

Annotations are evaluated as they stand, since the DSL reads them: no postponed ones here.
"""

import numpy as np
import pytest
import torch

from epicute.errors import ArgumentError
from epicute.kv import Strides, cell_offset, slot_is_valid, split_slot

pytestmark = pytest.mark.compile

STRIDES = Strides(page=16384, token=1024, head=128)


def test_kv_14_offsets_beyond_32_bits() -> None:
    import cutlass
    from cutlass import cute
    from cutlass.cute.runtime import from_dlpack

    capacity = 16 * 262145
    slots = [-1, 0, 17, 16 * 131071 + 15, 16 * 131072, 16 * 262144 + 1, capacity, 2**40 + 17]
    found = torch.full((len(slots), 4), -7, dtype=torch.int64)

    @cute.jit
    def fill(out: cute.Tensor, slots: cute.Tensor, count: cutlass.Int32):
        for i in range(count):
            slot = slots[i]
            valid = slot_is_valid(slot, capacity)
            out[i, 0] = cutlass.Int64(valid)
            if valid:
                page, token = split_slot(slot, 16)
                head = cutlass.Int64(7)
                out[i, 1] = page
                out[i, 2] = token
                out[i, 3] = cell_offset(page, token, head, cutlass.Int32(100), STRIDES)

    fill(from_dlpack(found), from_dlpack(torch.tensor(slots)), cutlass.Int32(len(slots)))
    host = np.array(slots)
    valid = slot_is_valid(host, capacity)
    page, token = split_slot(host, 16)
    offset = cell_offset(page, token, 7, 100, STRIDES)
    expected = np.stack([valid, *(np.where(valid, v, -7) for v in (page, token, offset))], axis=1)
    assert np.array_equal(found.numpy(), expected)
    assert offset[valid].max() > 2**32


def test_kv_16_int32_is_refused_while_tracing() -> None:
    import cutlass
    from cutlass import cute

    @cute.jit
    def narrow(page: cutlass.Int32):
        cell_offset(page, 0, 0, 0, STRIDES)

    with pytest.raises(ArgumentError, match="page: got 32 bits"):
        narrow(cutlass.Int32(3))
