"""INT4 records under a model's page table: as all there is, and beside the main copy."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from epicute.errors import ArgumentError
from epicute.kv import CacheSpec, Int4Layers, KVCache
from epicute.kv.int4 import quantize_row
from epicute.quant.hadamard import rotate

SPEC = CacheSpec(layers=2, kv_heads=3, head_dim=64, page_size=16, int4="only")
MIRROR = replace(SPEC, int4="mirror")


def rows(count: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    k, v = torch.randn(2, count, 3, 64, generator=generator)
    return k.bfloat16(), v.bfloat16()


def expected(x: torch.Tensor) -> torch.Tensor:
    nibbles, scale = quantize_row(rotate(x))
    return (nibbles.float() - 8) * scale[..., None]


def test_each_layer_has_its_own_records_in_the_pages_of_the_table() -> None:
    cache = KVCache.paged(SPEC, 3, 64, 9)
    assert cache.int4 is not None
    cache.slots([5], [1])  # so that the next request's pages are not the first
    cache.advance([5], [1])
    slots = cache.slots([20], [2])
    written = [rows(20, layer) for layer in (0, 1)]
    for layer, (k, v) in enumerate(written):
        cache.int4.write(layer, k, v, slots)
    for layer, (k, v) in enumerate(written):
        found = cache.int4.read(layer, slots)
        assert torch.equal(found[0], expected(k))
        assert torch.equal(found[1], expected(v))
    assert cache.int4.layer(1).shape == (9, 3, SPEC.records(1).record.bytes)
    assert cache.int4.layer(1).data_ptr() == cache.int4.memory[1].data_ptr()


def test_rows_without_rotation() -> None:
    cache = KVCache.dense(replace(SPEC, rotated=False), 1, 32)
    assert cache.int4 is not None
    k, v = rows(8)
    slots = cache.slots([8])
    cache.int4.write(0, k, v, slots)
    nibbles, scale = quantize_row(k)
    assert torch.equal(cache.int4.read(0, slots)[0], (nibbles.float() - 8) * scale[..., None])


def test_bytes_of_a_token() -> None:
    """64 channels: 32 bytes of nibbles and 4 of scale, of keys and of values; BF16 takes 256."""
    heads = 2 * 3
    assert SPEC.token_bytes == heads * 2 * (32 + 4)
    assert MIRROR.token_bytes == SPEC.token_bytes + heads * 2 * 64 * 2
    assert replace(SPEC, int4=None).token_bytes == heads * 2 * 64 * 2
    for spec in (SPEC, MIRROR):
        cache = KVCache.paged(spec, 2, 64, 7)
        assert cache.nbytes == 7 * 16 * spec.token_bytes


def test_a_mirror_has_a_main_copy_and_records_alone_have_none() -> None:
    main = KVCache.dense(MIRROR, 2, 32)
    assert main.keys(1).shape == (4, 16, 3, 64)
    assert main.dense_values(0).shape == (2, 32, 3, 64)
    only = KVCache.dense(SPEC, 2, 32)
    for read in (only.keys, only.values, only.dense_keys, only.cells, only.attention):
        with pytest.raises(ArgumentError, match=r"^cache: got INT4 records alone.*mirror"):
            read(0)


def test_they_say_what_they_are() -> None:
    assert ", INT4 only," in repr(KVCache.dense(SPEC, 1, 16))
    assert ", INT4 mirror," in repr(KVCache.dense(MIRROR, 1, 16))
    assert "INT4" not in repr(KVCache.dense(replace(SPEC, int4=None), 1, 16))
    assert repr(Int4Layers(SPEC.records(4), 2)).endswith("rotated in blocks of 64)")
    assert "not rotated" in repr(Int4Layers(replace(SPEC, rotated=False).records(4), 2))


def test_kd_01_a_slot_that_is_no_place_reads_as_nan() -> None:
    cache = KVCache.dense(SPEC, 1, 16)
    assert cache.int4 is not None
    k, v = cache.int4.read(0, torch.tensor([-1, 16]))
    assert k.isnan().all()
    assert v.isnan().all()
    assert math.isnan(float(k[0, 0, 0]))


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (lambda: replace(SPEC, int4="both"), "^int4"),
        (lambda: replace(SPEC, dtype=torch.float8_e4m3fn), "^dtype.*INT4"),
        (lambda: replace(SPEC, head_dim=80), "^head_dim"),
        (lambda: replace(SPEC, page_size=8), "^page_size"),
        (lambda: Int4Layers(SPEC.records(1), 2).layer(2), "^layer: got 2, expected 0 to 1"),
        (lambda: Int4Layers(SPEC.records(1), 2).layer(-1), "^layer"),
    ],
)
def test_mistakes_are_refused_by_name(make, named: str) -> None:
    with pytest.raises(ArgumentError, match=named):
        make()
