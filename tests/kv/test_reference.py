"""The oracle of KV writers and readers, checked on its own."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from epicute.errors import ArgumentError
from epicute.kv import NO_SLOT, KVPool
from epicute.kv.reference import gather, scatter
from epicute.quant.reference import encode_e4m3

PAGES, PAGE, HEADS, DIM = 6, 16, 2, 8
CAPACITY = PAGES * PAGE
LAYOUTS = ("nhd", "hnd", "joined", "packed")
CANARY = 0x5A


def storage(dtype: torch.dtype) -> torch.Tensor:
    """Memory for a pair of caches, every byte a canary."""
    count = 2 * CAPACITY * HEADS * DIM * dtype.itemsize
    return torch.full((count,), CANARY, dtype=torch.uint8).view(dtype)


def view(memory: torch.Tensor, layout: str) -> torch.Tensor:
    if layout == "nhd":
        return memory[: memory.numel() // 2].view(PAGES, PAGE, HEADS, DIM)
    if layout == "hnd":
        return memory[: memory.numel() // 2].view(PAGES, HEADS, PAGE, DIM).transpose(1, 2)
    if layout == "joined":
        return memory.view(PAGES, 2, PAGE, HEADS, DIM).unbind(1)[1]
    return memory.view(PAGES, HEADS, PAGE, 2 * DIM).transpose(1, 2)[..., DIM:]


def shuffled(count: int, seed: int = 0) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).permutation(CAPACITY)[:count])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_kv_12_every_layout_holds_the_same_and_nothing_else_changes(layout: str) -> None:
    memory = storage(torch.bfloat16)
    cache = view(memory, layout)
    values, slots = torch.randn(37, HEADS, DIM).bfloat16(), shuffled(37)
    assert scatter(cache, values, slots) == 0
    assert torch.equal(gather(cache, slots), values.double())
    pool = KVPool.paged(cache)
    offsets = pool.offset(slots[:, None, None], torch.arange(HEADS)[:, None], torch.arange(DIM))
    touched = torch.zeros(memory.numel(), dtype=torch.bool)
    touched[offsets.reshape(-1) + cache.storage_offset()] = True
    # One address of one cache: what the pool computes is where the view writes.
    assert torch.equal(memory[offsets + cache.storage_offset()], values)
    assert (memory[~touched].view(torch.uint8) == CANARY).all()
    assert touched.sum() == values.numel()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_kv_10_padding_rows_write_nowhere(layout: str) -> None:
    memory = storage(torch.bfloat16)
    cache = view(memory, layout)
    slots = torch.full((128,), NO_SLOT)
    slots[::2] = shuffled(64)
    slots[1], slots[3], slots[5] = CAPACITY, 2**40 + 17, -CAPACITY
    values = torch.randn(128, HEADS, DIM).bfloat16()
    before = gather(cache, torch.arange(CAPACITY))
    scatter(cache, values, slots)
    after = gather(cache, torch.arange(CAPACITY))
    real = slots[::2]
    assert torch.equal(after[real], values[::2].double())
    others = torch.ones(CAPACITY, dtype=torch.bool)
    others[real] = False
    assert torch.equal(after[others], before[others])
    assert gather(cache, slots)[1::2].isnan().all()


def test_kv_11_rows_beyond_the_slots_are_refused() -> None:
    memory = storage(torch.bfloat16)
    cache = view(memory, "nhd")
    values = torch.randn(64, HEADS, DIM).bfloat16()
    guarded = torch.full((80,), 77)
    guarded[:40] = torch.arange(40)
    slots = guarded[:40]
    with pytest.raises(ArgumentError, match="^slots"):
        scatter(cache, values, slots)
    assert (memory.view(torch.uint8) == CANARY).all()
    scatter(cache, values[:40], slots)
    untouched = memory[: memory.numel() // 2].view(-1, HEADS * DIM)[40:]
    assert (untouched.contiguous().view(torch.uint8) == CANARY).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float8_e4m3fn])
def test_kv_13_one_call_and_one_token_per_call_write_the_same_bytes(dtype: torch.dtype) -> None:
    values, slots = torch.randn(37, HEADS, DIM), shuffled(37, seed=3)
    slots[:2] = torch.tensor([2, 3])  # neighbours, from different tokens
    slots = slots[torch.tensor(sorted(np.unique(slots, return_index=True)[1].tolist()))]
    values = values[: slots.numel()]
    scale = torch.tensor([0.01, 0.02]) if dtype == torch.float8_e4m3fn else None
    together, apart = storage(dtype), storage(dtype)
    scatter(view(together, "hnd"), values, slots, scale)
    for m in range(slots.numel()):
        scatter(view(apart, "hnd"), values[m : m + 1], slots[m : m + 1], scale)
    assert torch.equal(together.view(torch.uint8), apart.view(torch.uint8))


def test_fp8_caches_take_a_scale_per_head_and_count_saturation() -> None:
    cache = view(storage(torch.float8_e4m3fn), "packed")
    scale = torch.tensor([0.5, 2.0])
    values = torch.randn(3, HEADS, DIM)
    values[0, 0, 0], values[1, 1, 2], values[2, 0, 0] = 225.0, math.inf, 1e9
    slots = torch.tensor([5, 90, NO_SLOT])
    assert scatter(cache, values, slots, scale) == 2  # the padding row counts nothing
    scaled = (values / scale[:, None])[:2].numpy()
    assert np.array_equal(
        torch.stack([cache[0, 5], cache[5, 10]]).view(torch.uint8).numpy(), encode_e4m3(scaled)
    )
    back = gather(cache, slots[:2], scale)
    assert back[0, 0, 0] == 448 * 0.5
    assert back[1, 1, 2] == 448 * 2.0
    assert back.isfinite().all()


def test_codes_pass_as_they_are() -> None:
    cache = view(storage(torch.float8_e4m3fn), "nhd")
    codes = torch.arange(HEADS * DIM, dtype=torch.uint8).view(1, HEADS, DIM)
    scatter(cache, codes.view(torch.float8_e4m3fn), torch.tensor([17]))
    assert torch.equal(cache[1, 1].view(torch.uint8), codes[0])


def test_mistakes_are_refused_by_name() -> None:
    fp8, bf16 = view(storage(torch.float8_e4m3fn), "nhd"), view(storage(torch.bfloat16), "nhd")
    values, slots = torch.randn(2, HEADS, DIM), torch.tensor([1, 2])
    scale = torch.ones(HEADS)
    for arguments, named in (
        ((fp8, values, slots), "^scale"),
        ((bf16, values, slots, scale), "^scale"),
        ((bf16, values, torch.tensor([4, 4])), "^slots: got 1 repeated"),
        ((bf16, values, slots.to(torch.int32)), r"^slots\.dtype"),
    ):
        with pytest.raises(ArgumentError, match=named):
            scatter(*arguments)
    scatter(bf16, values, torch.tensor([NO_SLOT, NO_SLOT]))
