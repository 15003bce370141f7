"""Rows of a model's cache on the CPU, read as kernels do; QK4PV8 records written as their writer does (MpFA 4, 6)."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import torch
from torch import Tensor

from epicute.errors import require
from epicute.kv import slots_for, split_slot
from epicute.kv.cache import KVCache
from epicute.kv.qk4pv8 import Rows
from epicute.models.reference_attention import multiplied_queries
from epicute.models.requests import Requests
from epicute.quant.nvfp4 import fast8_keys
from epicute.quant.smoothing import centre, sequence_means

__all__ = [
    "read_cells",
    "read_int4",
    "read_mirror",
    "read_qk4pv8",
    "slots_of",
    "spans",
    "table_of",
    "write_qk4pv8",
]


def spans(requests: Requests) -> Iterator[tuple[slice, int]]:
    """Each request's rows, and the keys that it has with them."""
    totals = requests.kv_lengths.tolist()
    if requests.starts is not None:
        ends = requests.starts.tolist()
        found = [slice(a, b) for a, b in itertools.pairwise(ends)]
    else:
        assert requests.lengths is not None
        width = requests.rows // requests.count
        found = [slice(b * width, b * width + n) for b, n in enumerate(requests.lengths.tolist())]
    yield from zip(found, totals, strict=True)


def table_of(requests: Requests) -> Tensor:
    """(B, pages) int32, the pages of each request."""
    require(
        requests.page_table is not None,
        "requests.page_table",
        None,
        "the pages of each request",
        "describe requests with the cache's page table",
    )
    assert requests.page_table is not None
    return requests.page_table


def slots_of(cache: KVCache, requests: Requests, request: int, count: int) -> Tensor:
    """(count,) int64, where the cache has a request's first tokens."""
    return slots_for(
        table_of(requests)[request : request + 1],
        torch.arange(count),
        torch.zeros(count, dtype=torch.int64),
        cache.spec.page_size,
    )


def read_cells(cache: KVCache, layer: int, slots: Tensor) -> tuple[Tensor, Tensor]:
    """(Sk, kv_heads, head_dim) float64 keys and values at slots (Sk,) of the main copy."""
    page, token = split_slot(slots, cache.spec.page_size)
    found = []
    for pool, scale in (
        (cache.keys(layer), cache.k_scale),
        (cache.values(layer), cache.v_scale),
    ):
        values = pool[page, token].to(torch.float64)
        found.append(values if scale is None else values * scale[layer].to(torch.float64)[:, None])
    return found[0], found[1]


def read_int4(cache: KVCache, layer: int, slots: Tensor) -> tuple[Tensor, Tensor]:
    """The same of INT4 records, still rotated."""
    assert cache.int4 is not None
    k, v = cache.int4.read(layer, slots)
    return k.to(torch.float64), v.to(torch.float64)


def read_mirror(cache: KVCache, layer: int, slots: Tensor) -> tuple[Tensor, Tensor]:
    """The same of the FP8 mirror."""
    assert cache.fp8 is not None
    k, v = cache.fp8.read(layer, slots)
    return k.to(torch.float64), v.to(torch.float64)


def write_qk4pv8(
    cache: KVCache, layer: int, q: Tensor, k: Tensor, v: Tensor, requests: Requests
) -> None:
    """Centre, quantise and place the rows that have a slot; a request's first ones give it its means before, where
    smoothing is of kind ``sequence``.

    Args:
        q: (M, heads, head_dim) as stored, after RoPE; k and v (M, kv_heads, head_dim) likewise.
    """
    layers = cache.qk4pv8
    assert layers is not None
    kept = (requests.slots >= 0) & (requests.slots < layers.format.capacity)
    q, k, v = (x.to(torch.float32) for x in (q, k, v))
    means, group = layers.means(layer), None
    if means is not None and means.kind == "sequence":
        group = torch.zeros(len(k), dtype=torch.int64)
        owners = cache.owners(table_of(requests)).tolist()
        for (mine, total), owner in zip(spans(requests), owners, strict=True):
            group[mine] = owner
            valid = kept[mine]
            if total > 0 and int(valid.sum()) == total:  # nothing of it is in the cache yet
                found = sequence_means(q[mine], k[mine], valid=valid)
                means.q[owner], means.k[owner] = found.q[0], found.k[0]
        group = group[kept]
    rows = layers.format.quantize(k[kept], v[kept], means, group, layers.counters)
    layers.format.place(layers.layer(layer), rows, requests.slots[kept])


def read_qk4pv8(
    cache: KVCache, layer: int, q: Tensor, slots: Tensor, owner: int, *, exact: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Queries, keys, values and ΔS of one request as they are multiplied.

    Args:
        q: (Sq, heads, head_dim) as stored, after RoPE.
        slots: (Sk,) int64 of the request's keys.
        owner: the cache's request that it is.
        exact: keys as FP16, to which they convert exactly, whatever the cache's form says.

    Returns:
        float64: (Sq, heads, D), twice (Sk, kv_heads, D), and (Sk, heads) or None without smoothing.
    """
    layers = cache.qk4pv8
    assert layers is not None
    format, means = layers.format, layers.means(layer)
    rows = format.fetch(layers.layer(layer), slots)
    k, v, delta = format.dequantize(rows)
    wide = exact or layers.form.qk != "fast8"
    if not wide:
        k = _rounded(rows, format.k_scale)
    q = q.to(torch.float32)
    if means is not None:
        q = centre(q, means.q[owner : owner + 1] if means.kind == "sequence" else means.q)
    q, k, v = multiplied_queries(q, wide), k.to(torch.float64), v.to(torch.float64)
    return q, k, v, None if delta is None else delta.to(torch.float64)


def _rounded(rows: Rows, k_scale: float) -> Tensor:
    """Keys as ``fast8`` has them: E4M3 of code times block scale."""
    return fast8_keys(rows.codes, rows.scales).to(torch.float32) * k_scale
