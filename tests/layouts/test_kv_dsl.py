"""The KV layouts, traced on DSL Int32 and run on the host: the same integers.

Annotations are evaluated as they stand, since the DSL reads them: no postponed ones here.
"""

import numpy as np
import pytest
import torch

from epicute.layouts.kv_fragments import key_channel, value_channel
from epicute.layouts.kv_int4 import Int4Record, channel_of_nibble, nibble_of_channel
from epicute.layouts.qk4pv8 import (
    ORDERS,
    QK4PV8Page,
    exact16_pairs,
    exact16_scale,
    magnitude_bit,
    position_of,
    sign_bit,
    token_at,
)

pytestmark = pytest.mark.compile

RECORD = Int4Record(32, 128)


def columns(index: object, page: QK4PV8Page) -> list:
    """All functions at an index below 32; the same text for NumPy and the DSL."""
    return [
        nibble_of_channel(index),
        channel_of_nibble(index),
        key_channel(index // 16, index % 16, 128),
        value_channel(index // 16, index % 16, 128),
        RECORD.key_row(index),
        RECORD.value_row(index),
        RECORD.key_scale(index),
        RECORD.value_scale(index),
        token_at(index % 16),
        position_of(index % 16),
        magnitude_bit(page.order, index % 8),
        sign_bit(page.order, index % 8),
        page.key_row(index),
        page.scale_byte(index + 32, index % 8),
        page.value_byte(index + 32, index),
        page.delta_index(index, 1, index, 2),
        exact16_scale(index),
    ]


@pytest.mark.parametrize("order", ORDERS)
def test_places(order: str) -> None:
    import cutlass
    from cutlass import cute
    from cutlass.cute.runtime import from_dlpack

    page = QK4PV8Page(64, 128, order)
    wanted = np.stack(np.broadcast_arrays(*columns(np.arange(32), page)), axis=1)
    found = torch.full(wanted.shape, -1, dtype=torch.int32)

    @cute.jit
    def fill(out: cute.Tensor, count: cutlass.Int32):
        for index in range(count):
            values = columns(index, page)
            for column in cutlass.range_constexpr(len(values)):
                out[index, column] = values[column]

    fill(from_dlpack(found), cutlass.Int32(32))
    assert np.array_equal(found.numpy(), wanted)


def test_words() -> None:
    import cutlass
    from cutlass import cute
    from cutlass.cute.runtime import from_dlpack

    bits = np.random.default_rng(0).integers(-(2**31), 2**31, 64, dtype=np.int64)
    words = torch.from_numpy(bits.astype(np.int32))
    found = torch.zeros(64, 4, dtype=torch.int32)

    @cute.jit
    def split(words: cute.Tensor, out: cute.Tensor, count: cutlass.Int32):
        for index in range(count):
            registers = exact16_pairs(words[index])
            for pair in cutlass.range_constexpr(4):
                out[index, pair] = registers[pair]

    split(from_dlpack(words), from_dlpack(found), cutlass.Int32(64))
    assert np.array_equal(found.numpy(), np.stack(exact16_pairs(words.numpy()), axis=1))
