"""Prefill where QK4PV8 records are all that a cache keeps (MpFA 4, 5, 6).

Between a layer's QKV projection and its output projection stand two to four kernels instead of one:

    q, new rows ─► means of requests that begin ─► records of the new rows ─► attention over all records

New rows lie in a buffer of 16 bits, one for each row of the invocation, which all layers share. A request is centred by
the means of its first prefill, also in later ones.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch

from epicute.attention.mixed import MixedSpec
from epicute.errors import require
from epicute.kv.cache import KVCache
from epicute.kv.qk4pv8 import Memory
from epicute.kv.transfer import to_device
from epicute.models.block_spec import BlockSpec
from epicute.models.block_state import LayerCache
from epicute.models.kernels import Kernels
from epicute.models.requests import Requests
from epicute.quant.smoothing import Means

__all__ = ["MixedPrefill"]

FP8 = torch.float8_e4m3fn


@dataclass(eq=False)
class _Invocation:
    """Whose rows an invocation has.

    Attributes:
        requests: in the cache's pages. rows: the same with the number of each row as its slot, or -1.
        owners: (B,) int64, requests of the cache. group: (M,) int64, the owner of each row.
        fresh: (F,) int64, those of the B that the cache holds nothing of.
    """

    requests: Requests
    rows: Requests
    owners: torch.Tensor
    group: torch.Tensor
    fresh: torch.Tensor


class MixedPrefill:
    """The prefills of one cache of QK4PV8 records, and what runs attention in their layers, one after the other."""

    def __init__(self, cache: KVCache, spec: BlockSpec, kernels: Kernels, max_rows: int) -> None:
        """``spec``: of the layers. ``max_rows``: of an invocation."""
        assert cache.qk4pv8 is not None
        layers, shape, device = cache.qk4pv8, spec.shape, cache.device
        format = layers.format
        self._sequence = layers.form.smoothing == "sequence"
        self._write = kernels.write(format, spec.dtype, self._sequence, device)
        self._take_means = None
        if self._sequence:
            self._take_means = kernels.means(shape.head_dim, spec.dtype, device)
        self._plan = kernels.mixed(
            MixedSpec(
                shape.heads,
                shape.kv_heads,
                shape.head_dim,
                qk=layers.form.qk,
                terms=format.terms,
                dtype=spec.dtype,
                out_dtype=FP8 if spec.delayed else spec.dtype,
                window=spec.window,
                softcap=spec.softcap,
                page=cache.spec.page_size,
                scale=shape.head_dim**-0.5 if spec.softmax_scale is None else spec.softmax_scale,
            )
        )
        size = (2, 1, max_rows, shape.kv_heads, shape.head_dim)
        k, v = torch.empty(size, dtype=spec.dtype, device=device)
        # As long as they are placed by the numbers of rows, pages have no part in where rows are.
        self._cells = LayerCache(k, v, cache.spec.page_size, None, None, {})
        self._scales = [
            torch.full((shape.kv_heads,), scale, device=device)
            for scale in (format.k_scale, format.v_scale)
        ]
        self._now: _Invocation | None = None
        self._at: tuple[Memory, Means | None] | None = None
        self._counters = layers.counters

    def layer(self, cache: KVCache, layer: int, requests: Requests) -> tuple[Requests, LayerCache]:
        """What a layer's prefill is to run with; its first layer waits for the requests' lengths."""
        assert cache.qk4pv8 is not None
        if layer == 0 or self._now is None or self._now.requests is not requests:
            self._now = self._described(cache, requests)
        self._at = cache.qk4pv8.layer(layer), cache.qk4pv8.means(layer)
        return self._now.rows, self._cells

    def _described(self, cache: KVCache, requests: Requests) -> _Invocation:
        require(
            requests.starts is not None and requests.page_table is not None,
            "requests",
            "padded ones, or none with pages",
            "packed requests with the cache's page table",
            "describe them with Requests.packed",
        )
        assert requests.starts is not None
        assert requests.page_table is not None
        totals, starts = requests.kv_lengths.tolist(), requests.starts.tolist()
        new = [b - a for a, b in pairwise(starts)]
        mine = torch.tensor([row for row, n in enumerate(new) for _ in range(n)], dtype=torch.int64)
        slack = torch.zeros(requests.rows - len(mine), dtype=torch.int64)
        begin = [row for row, (n, t) in enumerate(zip(new, totals, strict=True)) if n == t > 0]
        device = cache.device
        owners = cache.owners(requests.page_table)
        group = owners[to_device(torch.cat([mine, slack]), device)]
        number = torch.arange(requests.rows, device=device)
        rows = Requests(
            requests.positions,
            torch.where(requests.slots >= 0, number, -1),
            requests.kv_lengths,
            requests.starts,
            page_table=requests.page_table,
        )
        fresh = to_device(torch.tensor(begin, dtype=torch.int64), device)
        return _Invocation(requests, rows, owners, group, fresh)

    def run(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, out: torch.Tensor, **given: Any
    ) -> None:
        """In the place of ``AttentionPlan.run``: quantise and store the new rows, then attend to all."""
        assert self._now is not None
        assert self._at is not None
        now, (memory, means) = self._now, self._at
        k, v = k[0, : q.shape[0]], v[0, : q.shape[0]]
        places = {"slots": now.requests.slots}
        if means is not None and self._sequence:
            self._begin(q, k, means, now)
            places["group"] = now.group
        self._write.run(memory, k, v, means=means, counters=self._counters, **places)
        if means is not None:
            given["q_mean"] = means.q[now.owners] if self._sequence else means.q
        scales = dict(zip(("k_scale", "v_scale"), self._scales, strict=True))
        self._plan.run(q, *memory, out=out, **scales, **given)

    def _begin(self, q: torch.Tensor, k: torch.Tensor, means: Means, now: _Invocation) -> None:
        """Means of the requests that begin, from the rows of this invocation."""
        if not now.fresh.numel():
            return
        assert self._take_means is not None
        count, device = len(now.owners), q.device
        found = Means(
            "sequence",
            *(
                torch.empty(count, *x.shape[1:], dtype=torch.float32, device=device)
                for x in (means.q, means.k)
            ),
        )
        heads = q.shape[1] + k.shape[1]
        space = self._take_means.workspace(q.shape[0], count, heads, device)
        self._take_means.run(q, k, now.requests.starts, means=found, workspace=space)
        owners = now.owners[now.fresh]
        means.q[owners] = found.q[now.fresh]
        means.k[owners] = found.k[now.fresh]
