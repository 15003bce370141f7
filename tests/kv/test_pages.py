"""Slots, pages and offsets: 64-bit, alike for all views of one cache, padding never an address."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from epicute.errors import ArgumentError
from epicute.kv import (
    NO_SLOT,
    PAGE_SIZES,
    KVPool,
    Strides,
    cell_offset,
    check_slots,
    slot_is_valid,
    slots_for,
    split_slot,
)

PAGES, PAGE, HEADS, DIM = 5, 16, 3, 8
LAYOUTS = ("nhd", "hnd", "joined", "packed")


def view(layout: str, dtype: torch.dtype = torch.bfloat16, page: int = PAGE) -> torch.Tensor:
    """The second of a pair of caches, seen as (pages, page_size, kv_heads, head_dim)."""
    made = {
        "nhd": lambda: torch.zeros(PAGES, page, HEADS, DIM, dtype=dtype),
        "hnd": lambda: torch.zeros(PAGES, HEADS, page, DIM, dtype=dtype).transpose(1, 2),
        "joined": lambda: torch.zeros(PAGES, 2, page, HEADS, DIM, dtype=dtype).unbind(1)[1],
        "packed": lambda: (
            torch.zeros(PAGES, HEADS, page, 2 * DIM, dtype=dtype)
            .transpose(1, 2)
            .chunk(2, dim=-1)[1]
        ),
    }
    return made[layout]()


@given(st.integers(0, 2**62), st.sampled_from([*PAGE_SIZES, 1, 7, 4097]))
def test_split_slot_is_division_with_remainder(slot: int, page_size: int) -> None:
    page, token = split_slot(slot, page_size)
    assert page * page_size + token == slot
    assert 0 <= token < page_size
    for made in (np.int64(slot), np.array([slot]), torch.tensor([slot])):
        found_page, found_token = split_slot(made, page_size)
        assert (found_page.item(), found_token.item()) == (page, token)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_kv_12_offsets_are_addresses_in_every_layout(layout: str, page_size: int) -> None:
    cache = view(layout, page=page_size)
    pool = KVPool.paged(cache)
    grid = np.indices((pool.capacity, HEADS, DIM))
    offsets = pool.offset(*grid)
    # The reference is torch's own idea of the view: an element's storage place less the view's.
    storage = torch.arange(cache.untyped_storage().nbytes() // 2)
    places = storage.as_strided(cache.shape, cache.stride(), cache.storage_offset())
    expected = places - cache.storage_offset()
    assert np.array_equal(offsets, expected.reshape(-1, HEADS, DIM).numpy())
    assert len(np.unique(offsets)) == offsets.size
    assert offsets.max() == pool.span - 1


@pytest.mark.parametrize("layout", LAYOUTS)
def test_all_kinds_of_integers_give_the_same_offset(layout: str) -> None:
    pool = KVPool.paged(view(layout))
    rng = np.random.default_rng(1)
    for slot, head, channel in rng.integers(0, (pool.capacity, HEADS, DIM), (50, 3)).tolist():
        wanted = pool.offset(slot, head, channel)
        assert type(wanted) is int
        assert pool.offset(np.int32(slot), np.int32(head), np.int32(channel)) == wanted
        tensors = (torch.tensor(v, dtype=torch.int32) for v in (slot, head, channel))
        assert pool.offset(*tensors) == wanted


@given(st.integers(1, 9), st.integers(1, 300), st.integers(1, 4), st.integers(1, 16))
def test_a_dense_cache_is_a_page_per_sequence(
    batch: int, length: int, heads: int, dim: int
) -> None:
    cache = torch.empty(batch, length, heads, dim, dtype=torch.float16)
    pool = KVPool.dense(cache)
    row, position = batch - 1, length - 1
    assert pool.capacity == batch * length
    assert split_slot(row * length + position, length) == (row, position)
    assert pool.offset(row * length + position, heads - 1, dim - 1) == cache.numel() - 1


# Dense cache of field report KV-14: page 16, 8 KV heads, D 128, so 16384 elements a page.
LARGE = Strides(page=16384, token=1024, head=128)


@pytest.mark.parametrize("page", [131071, 131072, 262144, 2**27 + 1])
def test_kv_14_offsets_pass_2_31_and_2_32(page: int) -> None:
    wanted = page * 16384 + 15 * 1024 + 7 * 128 + 127
    assert cell_offset(page, 15, 7, 127, LARGE) == wanted
    for narrow in (np.int32, np.int64):
        one = cell_offset(narrow(page), narrow(15), narrow(7), narrow(127), LARGE)
        many = cell_offset(np.full(3, page, narrow), narrow(15), narrow(7), narrow(127), LARGE)
        assert one == wanted
        assert one.dtype == many.dtype == np.int64
        assert (many == wanted).all()
    tensor = cell_offset(torch.tensor([page], dtype=torch.int32), 15, 7, 127, LARGE)
    assert tensor.dtype == torch.int64
    assert tensor.item() == wanted


@given(st.integers(0, 2**31 - 1), st.integers(0, 127), st.integers(0, 127), st.data())
def test_kv_16_every_axis_is_widened_before_it_is_multiplied(
    page: int, token: int, head: int, data: st.DataObject
) -> None:
    """Any one stride may be large: HND dense caches have large head strides."""
    steps = [data.draw(st.integers(1, 2**31 - 1)) for _ in range(3)]
    strides = Strides(*steps)
    wanted = page * steps[0] + token * steps[1] + head * steps[2] + 5
    narrow = [np.array([v], np.int32) for v in (page, token, head, 5)]
    if wanted < 2**63:
        assert cell_offset(*narrow, strides).item() == wanted
    assert cell_offset(page, token, head, 5, strides) == wanted


def test_kv_16_narrow_device_integers_are_refused() -> None:
    class Int32:
        """Looks like a DSL integer of 32 bits."""

        width = 32

    for place in range(3):
        arguments = [0, 0, 0, 0]
        arguments[place] = Int32()  # type: ignore[call-overload]
        with pytest.raises(ArgumentError, match=("page", "token", "head")[place]):
            cell_offset(*arguments, LARGE)
    with pytest.raises(ArgumentError, match="slot"):
        split_slot(Int32(), 16)
    with pytest.raises(ArgumentError, match="slot"):
        slot_is_valid(Int32(), 16)


def test_kv_10_padding_and_far_slots_are_no_places() -> None:
    capacity = 80
    slots = [NO_SLOT, 0, 79, 80, 2**40 + 17, 2**32, -(2**40), 2**32 + 5]
    wanted = [False, True, True, False, False, False, False, False]
    assert [bool(slot_is_valid(s, capacity)) for s in slots] == wanted
    assert slot_is_valid(np.array(slots), capacity).tolist() == wanted
    assert slot_is_valid(torch.tensor(slots), capacity).tolist() == wanted


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float8_e4m3fn])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_descriptions_are_values(layout: str, dtype: torch.dtype) -> None:
    cache = view(layout, dtype)
    pool = KVPool.paged(cache)
    assert pool == KVPool.paged(view(layout, dtype))
    assert hash(pool) == hash(KVPool.paged(view(layout, dtype)))
    assert pool.sizes == tuple(cache.shape)
    assert pool.capacity == PAGES * PAGE
    pool.check(cache)
    for other in LAYOUTS:
        if other != layout:
            with pytest.raises(ArgumentError, match="^v_cache: got"):
                pool.check(view(other, dtype), "v_cache")
    with pytest.raises(ArgumentError, match="^cache: got"):
        pool.check(cache[:-1])


def test_check_looks_past_the_step_of_an_axis_of_one() -> None:
    one = torch.zeros(1, 16, 1, 64, dtype=torch.bfloat16)
    pool = KVPool.paged(one)
    pool.check(one.as_strided(one.shape, (2**60, 64, 12345, 1)))
    huge = KVPool.paged(one.as_strided(one.shape, (2**60, 64, 7, 1)))
    assert huge.span == 16 * 64
    assert huge.vector_bytes == 16


@pytest.mark.parametrize(
    ("shape", "dtype", "width"),
    [
        ((4, 16, 2, 64), torch.bfloat16, 16),
        ((4, 16, 2, 8), torch.bfloat16, 16),
        ((4, 16, 2, 8), torch.float8_e4m3fn, 8),
        ((4, 16, 2, 20), torch.bfloat16, 8),
        ((4, 16, 2, 5), torch.bfloat16, 2),
        ((4, 16, 2, 5), torch.float8_e4m3fn, 1),
    ],
)
def test_vector_bytes(shape: tuple[int, ...], dtype: torch.dtype, width: int) -> None:
    pool = KVPool.paged(torch.empty(shape, dtype=dtype))
    assert pool.vector_bytes == width
    offsets = pool.offset(np.arange(pool.capacity)[:, None], np.arange(2)[None, :], 0)
    assert (offsets * dtype.itemsize % width == 0).all()


@pytest.mark.parametrize(
    ("cache", "named"),
    [
        (torch.zeros(4, 16, 2, 64), r"cache\.dtype"),
        (torch.zeros(4, 16, 2, 64, dtype=torch.int8), r"cache\.dtype"),
        (torch.zeros(4, 16, 2, 64).to(torch.float8_e5m2), r"cache\.dtype"),
        (torch.zeros(4, 16, 2, 64).half()[..., ::2], r"cache\.stride\(channel\)"),
        (torch.zeros(4, 16, 64, 2).half().transpose(2, 3), r"cache\.stride\(channel\)"),
        (torch.zeros(1, 16, 2, 64).half().expand(4, 16, 2, 64), r"cache\.strides"),
        (torch.zeros(4, 16, 1, 64).half().expand(4, 16, 2, 64), r"cache\.strides"),
        (torch.zeros(9999).half().as_strided((4, 16, 2, 64), (2000, 128, 64, 1)), "strides"),
        (torch.zeros(9999).half().as_strided((4, 16, 2, 64), (2048, 128, 63, 1)), "strides"),
        (torch.zeros(16, 2, 64).half(), r"cache\.shape"),
        (torch.zeros(0, 16, 2, 64).half(), r"cache\.shape"),
        (torch.zeros(4, 24, 2, 64).half(), r"cache\.page_size"),
        (torch.zeros(4, 8, 2, 64).half(), r"cache\.page_size"),
    ],
)
def test_caches_that_no_kernel_serves_are_refused_by_name(cache: torch.Tensor, named: str) -> None:
    with pytest.raises(ArgumentError, match=named):
        KVPool.paged(cache)


@given(st.data())
def test_disjoint_strides_are_told_from_overlapping_ones(data: st.DataObject) -> None:
    """No false acceptance ever; and every permuted, gapped dense layout is accepted."""
    sizes = [data.draw(st.integers(1, 4)) for _ in range(3)]
    dim = data.draw(st.integers(1, 4))
    strides = Strides(*(data.draw(st.integers(0, 80)) for _ in range(3)))
    grid = np.indices((*sizes, dim))
    places = cell_offset(*grid, strides)
    unique = len(np.unique(places)) == places.size
    try:
        KVPool(*sizes, dim, torch.float16, strides)
    except ArgumentError:
        pass
    else:
        assert unique
    step, steps = dim + data.draw(st.integers(0, 3)), [0, 0, 0]
    for axis in data.draw(st.permutations(range(3))):
        steps[axis] = step
        step = step * sizes[axis] + data.draw(st.integers(0, 3))
    KVPool(*sizes, dim, torch.float16, Strides(*steps))


def test_slots_are_refused_by_name() -> None:
    check_slots(torch.zeros(7, dtype=torch.int64), 7)
    for slots, named in (
        (torch.zeros(7, dtype=torch.int32), r"^slots\.dtype"),
        (torch.zeros(7), r"^slots\.dtype"),
        (torch.zeros(6, dtype=torch.int64), "^slots: got"),
        (torch.zeros(8, dtype=torch.int64), "^slots: got"),
        (torch.zeros(7, 1, dtype=torch.int64), "^slots: got"),
        (torch.zeros(14, dtype=torch.int64)[::2], "^slots: got"),
    ):
        with pytest.raises(ArgumentError, match=named):
            check_slots(slots, 7)


@given(
    st.sampled_from([*PAGE_SIZES, 1, 5]),
    st.lists(st.integers(0, 70), min_size=1, max_size=5),
    st.sampled_from([torch.int32, torch.int64]),
    st.integers(0, 2**32 - 1),
)
def test_slots_follow_the_page_table(
    page_size: int, lengths: list[int], dtype: torch.dtype, seed: int
) -> None:
    """Ragged requests over shuffled pages, with padding rows in between."""
    rng = np.random.default_rng(seed)
    width = max(-(-n // page_size) for n in lengths) or 1
    table = rng.permutation(len(lengths) * width).reshape(len(lengths), width)
    rows = [(r, p) for r, n in enumerate(lengths) for p in range(n)]
    rows += [(-1, 3), (0, -1), (-1, -1)]
    rng.shuffle(rows)
    requests, positions = (torch.tensor(c, dtype=dtype) for c in zip(*rows, strict=True))
    slots = slots_for(torch.tensor(table, dtype=dtype), positions, requests, page_size)
    assert slots.dtype == torch.int64
    check_slots(slots, len(rows))
    for slot, (request, position) in zip(slots.tolist(), rows, strict=True):
        if request < 0 or position < 0:
            assert slot == NO_SLOT
        else:
            page = table[request, position // page_size]
            assert slot == page * page_size + position % page_size
    real = slots[slots >= 0].tolist()
    assert len(set(real)) == len(real) == sum(lengths)


def test_slots_of_a_dense_cache() -> None:
    table = torch.arange(4)[:, None]
    slots = slots_for(table, torch.tensor([0, 99, 5]), torch.tensor([0, 1, 3]), 100)
    assert slots.tolist() == [0, 199, 305]


def test_kv_14_slots_of_far_pages_are_not_narrowed() -> None:
    table = torch.tensor([[2**28, 2**31 - 1]], dtype=torch.int32)
    one = torch.tensor([0, 0], dtype=torch.int32)
    slots = slots_for(table, torch.tensor([3, 130], dtype=torch.int32), one, 128)
    assert slots.tolist() == [2**28 * 128 + 3, (2**31 - 1) * 128 + 2]


OUTSIDE = [  # request, position, in a table of 2 requests with 3 pages of 16
    (0, 48),
    (1, 4096),
    (2, 0),
    (-2, 0),
    (0, -2),
    (1, 32),  # a page that is not given
]


@pytest.mark.parametrize(("request_", "position"), OUTSIDE)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_kv_08_rows_outside_the_table(request_: int, position: int, dtype: torch.dtype) -> None:
    table = torch.tensor([[4, 9, 2], [0, 1, -1]], dtype=dtype)
    requests = torch.tensor([0, request_, 1], dtype=dtype)
    positions = torch.tensor([17, position, 0], dtype=dtype)
    with pytest.raises(ArgumentError, match=r"^positions: got rows \[1\]"):
        slots_for(table, positions, requests, 16)
    slots = slots_for(table, positions, requests, 16, check=False)
    assert slots.tolist() == [9 * 16 + 1, NO_SLOT, 0]


def test_kv_08_the_table_is_read_only_inside() -> None:
    """Guard values beside a table that is a view: none turns up in a slot."""
    big = torch.full((6, 5), 10**6)
    big[2:4, 1:4] = torch.arange(6).reshape(2, 3)
    table = big[2:4, 1:4]
    requests, positions = torch.meshgrid(torch.arange(-2, 5), torch.arange(-20, 80), indexing="ij")
    slots = slots_for(table, positions.ravel(), requests.ravel(), 16, check=False)
    assert slots.max() < 6 * 16
    assert (slots >= 0).sum() == 2 * 48


def test_slots_for_refuses_by_name() -> None:
    table, ones = torch.zeros(2, 3, dtype=torch.int32), torch.zeros(4, dtype=torch.int64)
    for arguments, named in (
        ((table.float(), ones, ones, 16), r"^page_table\.dtype"),
        ((table[0], ones, ones, 16), r"^page_table\.shape"),
        ((table, ones.float(), ones, 16), r"^positions\.dtype"),
        ((table, ones, ones.to(torch.int16), 16), r"^requests\.dtype"),
        ((table, ones[:3], ones, 16), r"^positions\.shape"),
        ((table, ones[None], ones[None], 16), r"^positions\.shape"),
        ((table, ones, ones, 0), "^page_size"),
    ):
        with pytest.raises(ArgumentError, match=named):
            slots_for(*arguments)
    assert slots_for(table, ones[:0], ones[:0], 16).shape == (0,)
