"""Pools of records: 64-bit addresses that are torch's own, for any strides of whole records."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from epicute.errors import ArgumentError
from epicute.kv.records import RecordPool, gather_bytes, scatter_bytes, writable_rows

SIZE = 160


def views(pages: int, heads: int) -> list[torch.Tensor]:
    """The same pool as it may come: alone, heads outermost, one layer of several, guarded."""
    shape = pages, heads, SIZE
    return [
        torch.zeros(shape, dtype=torch.uint8),
        torch.zeros(heads, pages, SIZE, dtype=torch.uint8).transpose(0, 1),
        torch.zeros(3, *shape, dtype=torch.uint8)[1],
        torch.zeros(pages, 3, heads, SIZE, dtype=torch.uint8)[:, 1],
        torch.zeros(pages, heads, SIZE + 96, dtype=torch.uint8)[..., 32 : 32 + SIZE],
    ]


@given(st.integers(1, 5), st.integers(1, 4), st.integers(0, 4))
def test_starts_are_addresses_of_the_view(pages: int, heads: int, which: int) -> None:
    memory = views(pages, heads)[which]
    pool = RecordPool.describe(memory, 16, SIZE)
    pool.check(memory)
    places = torch.arange(memory.untyped_storage().nbytes())
    wanted = places.as_strided(memory.shape, memory.stride(), memory.storage_offset())
    starts = pool.start(*np.indices((pages, heads)))
    assert np.array_equal(starts, (wanted[..., 0] - memory.storage_offset()).numpy())
    assert pool.capacity == 16 * pages


def test_kv_14_kv_16_starts_pass_2_31() -> None:
    pool = RecordPool(400000, 128, 8, 25600, 8 * 25600, 25600)
    for kind in (int, np.int32, np.int64):
        assert pool.start(kind(399999), kind(7)) == 399999 * 204800 + 7 * 25600
    narrow = torch.tensor([399999], dtype=torch.int32)
    assert pool.start(narrow, torch.tensor([7], dtype=torch.int32)).item() > 2**36


@given(st.integers(0, 4), st.integers(0, 2**16 - 1))
def test_bytes_are_written_where_they_are_read_and_nowhere_else(which: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    memory = views(3, 2)[which]
    slots = torch.from_numpy(rng.permutation(48)[:7])
    places = torch.from_numpy(np.sort(rng.permutation(SIZE)[:70]).reshape(7, 10))
    data = torch.from_numpy(rng.integers(1, 256, (7, 2, 10)).astype(np.uint8))
    scatter_bytes(memory, slots, 16, places, data)
    for row in range(7):
        for head in range(2):
            cells = memory[int(slots[row]) // 16, head, places[row]]
            assert torch.equal(cells, data[row, head])
    assert torch.equal(gather_bytes(memory, slots, 16, places), data)
    assert int((memory != 0).sum()) == data.numel()


def test_kv_10_rows_without_a_place_are_skipped() -> None:
    slots = torch.tensor([-1, 3, 48, 2**40 + 17, 0, -(2**40)])
    assert writable_rows(slots, 6, 48).tolist() == [1, 4]
    assert writable_rows(slots[:0], 0, 48).numel() == 0
    assert writable_rows(torch.tensor([-1, -1, 60, 60]), 4, 48).numel() == 0


def test_mistakes_are_refused_by_name() -> None:
    memory = torch.zeros(4, 2, SIZE, dtype=torch.uint8)
    pool = RecordPool.describe(memory, 16, SIZE)
    odd = torch.zeros(4 * 2 * SIZE + 16, dtype=torch.uint8)[8:]
    for call, named in (
        (lambda: RecordPool.describe(memory[0], 16, SIZE), "^memory: got"),
        (lambda: RecordPool.describe(memory.to(torch.int8), 16, SIZE), "^memory: got"),
        (lambda: RecordPool.describe(memory, 16, SIZE + 16), "^memory: got"),
        (lambda: RecordPool.describe(memory[:0], 16, SIZE), r"^memory\.shape"),
        (lambda: RecordPool.describe(memory[:1].expand(4, 2, SIZE), 16, SIZE), r"^memory\.strides"),
        (lambda: RecordPool.describe(memory[..., ::2], 16, SIZE // 2), r"^memory\.stride\(2\)"),
        (
            lambda: RecordPool.describe(
                torch.zeros(4, 2, SIZE + 8, dtype=torch.uint8)[..., :SIZE], 16, SIZE
            ),
            r"^memory\.strides",
        ),
        (
            lambda: RecordPool.describe(odd[: 4 * 2 * SIZE].view(4, 2, SIZE), 16, SIZE),
            r"^memory\.data_ptr",
        ),
        (lambda: pool.check(memory[:3]), "^memory: got"),
        (lambda: writable_rows(torch.tensor([1, 1]), 2, 48), "^slots: got 1 repeated"),
        (lambda: writable_rows(torch.tensor([1, 2]), 3, 48), "^slots"),
        (lambda: writable_rows(torch.tensor([1.0]), 1, 48), r"^slots\.dtype"),
    ):
        with pytest.raises(ArgumentError, match=named):
            call()
