"""Specs that cover what attention kernels differ in, and requests with memory that shows what was read and written."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from hypothesis import strategies as st

from epicute.attention import AttentionPlan, AttentionSpec
from epicute.attention.reference import attend
from tests.gemm.device import DEVICE, Output

FP8 = torch.float8_e4m3fn
F16 = torch.float16

SPECS = {
    "plain": AttentionSpec(32, 8, 128, lse=True),
    "padded": AttentionSpec(32, 8, 128, lse=True, packed=False),
    "all keys": AttentionSpec(4, 4, 128, lse=True, causal=False),
    "9:3 heads of 64": AttentionSpec(9, 3, 64, lse=True),
    "40:8, page 16": AttentionSpec(40, 8, 128, lse=True, page=16),
    "28:4, page 32, padded": AttentionSpec(28, 4, 128, lse=True, page=32, packed=False),
    "71:1 heads of 64, page 64": AttentionSpec(71, 1, 64, lse=True, page=64),
    "page 128, fp16": AttentionSpec(8, 2, 128, dtype=F16, lse=True, page=128),
    "heads of 80": AttentionSpec(6, 3, 80, lse=True, page=16),
    "heads of 96, padded": AttentionSpec(4, 4, 96, lse=True, packed=False, causal=False),
    "heads of 256": AttentionSpec(8, 4, 256, lse=True, softcap=30.0),
    "heads of 256, page 128": AttentionSpec(3, 3, 256, lse=True, page=128),
    "window": AttentionSpec(8, 2, 128, lse=True, window=100),
    "window, page 64, sinks": AttentionSpec(8, 1, 64, lse=True, window=257, page=64, sinks=True),
    "softcap, sinks": AttentionSpec(8, 4, 128, lse=True, softcap=20.0, sinks=True),
    "sinks, all keys": AttentionSpec(8, 8, 64, lse=True, sinks=True, causal=False, scale=0.3),
    "fp8 out": AttentionSpec(32, 8, 128, out_dtype=FP8),
    "fp8 out, heads of 80, padded": AttentionSpec(8, 4, 80, out_dtype=FP8, packed=False),
    "fp8 keys": AttentionSpec(32, 8, 128, kv_dtype=FP8, lse=True),
    "fp8 keys, page 32": AttentionSpec(9, 3, 64, kv_dtype=FP8, lse=True, page=32),
    "fp8 keys, fp16, softcap": AttentionSpec(
        8, 2, 128, dtype=F16, kv_dtype=FP8, lse=True, softcap=15.0, packed=False
    ),
}
"""Every head dimension, layout, page, mask and dtype at least once, most beside several others."""


@st.composite
def requests(draw: st.DrawFn, causal: bool = True) -> list[tuple[int, int]]:
    """(queries, keys) of some requests: empty ones, tails of one token, cached prefixes, more queries than keys."""
    edges = st.sampled_from((0, 1, 2, 63, 64, 65, 127, 128, 129, 256, 257))
    found = []
    for _ in range(draw(st.integers(1, 6))):
        queries = draw(st.one_of(edges, st.integers(0, 400)))
        prefix = draw(st.one_of(st.just(0), edges, st.integers(0, 700)))
        keys = queries + prefix
        if draw(st.integers(0, 5)) == 0:
            keys = draw(edges)
        found.append((queries, keys))
    return found


@dataclass
class Batch:
    """Requests in memory as a spec wants them; everything that must not be read is NaN."""

    spec: AttentionSpec
    lengths: list[tuple[int, int]]
    q: list[torch.Tensor]
    k: list[torch.Tensor]
    v: list[torch.Tensor]
    operands: dict[str, Any]
    tensors: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
    out: Output
    lse: Output | None

    @staticmethod
    def draw(
        spec: AttentionSpec, lengths: list[tuple[int, int]], seed: int, mean: float = 0.0
    ) -> Batch:
        """Random normal q, k and v of each request."""
        torch.manual_seed(seed)

        def some(rows: int, heads: int, dtype: torch.dtype) -> torch.Tensor:
            x = torch.randn(rows, heads, spec.head_dim, device=DEVICE) + mean
            return x.to(dtype)

        q = [some(n, spec.heads, spec.dtype) for n, _ in lengths]
        k = [some(n, spec.kv_heads, spec.kv_dtype) for _, n in lengths]
        v = [some(n, spec.kv_heads, spec.kv_dtype) for _, n in lengths]
        return Batch.of(spec, q, k, v, seed)

    @staticmethod
    def of(
        spec: AttentionSpec,
        q: list[torch.Tensor],
        k: list[torch.Tensor],
        v: list[torch.Tensor],
        seed: int = 0,
    ) -> Batch:
        """Lay out requests."""
        torch.manual_seed(seed + 1)
        operands: dict[str, Any] = {}
        batch = len(q)
        lengths = [(len(a), len(b)) for a, b in zip(q, k, strict=True)]
        rows = sum(n for n, _ in lengths)
        shape: tuple[int, ...] = (rows, spec.heads, spec.head_dim)
        lse_shape: tuple[int, ...] = (spec.heads, rows)
        if spec.packed:
            operands["q_starts"] = starts([n for n, _ in lengths])
            queries = torch.cat([*q, poisoned((7, *shape[1:]), spec.dtype)])[:rows]
        else:
            longest = max(n for n, _ in lengths) + 3
            operands["q_lengths"] = ints([n for n, _ in lengths])
            queries = padded(q, longest, spec.dtype)
            shape, lse_shape = tuple(queries.shape), (batch, spec.heads, longest)
        keys, values = _keys(spec, k, v, operands)
        if spec.sinks:
            operands["sinks"] = torch.randn(spec.heads, device=DEVICE)
        if spec.kv_dtype == FP8:
            operands["k_scale"] = torch.rand(spec.kv_heads, device=DEVICE) + 0.5
            operands["v_scale"] = torch.rand(spec.kv_heads, device=DEVICE) + 0.5
        if spec.out_is_fp8:
            operands |= {
                "out_scale": torch.tensor([0.02], device=DEVICE),
                "amax": torch.tensor([-1.0], device=DEVICE),
                "saturated": torch.zeros(1, dtype=torch.int64, device=DEVICE),
                "nans": torch.zeros(1, dtype=torch.int64, device=DEVICE),
            }
        out = Output(shape, spec.out_dtype)
        lse = Output(lse_shape, torch.float32, name="lse") if spec.lse else None
        tensors = (queries, keys, values)
        return Batch(spec, lengths, q, k, v, operands, tensors, out, lse)

    def run(self, plan: AttentionPlan) -> None:
        """Launch."""
        extra = {} if self.lse is None else {"lse": self.lse.tensor}
        plan.run(*self.tensors, out=self.out.tensor, **self.operands, **extra)

    def outputs(self) -> list[torch.Tensor]:
        """What was written for each request."""
        return self._parts(self.out.tensor, 0)

    def lses(self) -> list[torch.Tensor]:
        """LSE of each request, (heads, queries)."""
        assert self.lse is not None
        return self._parts(self.lse.tensor, 1)

    def _parts(self, x: torch.Tensor, axis: int) -> list[torch.Tensor]:
        counts = [n for n, _ in self.lengths]
        if self.spec.packed:
            return list(x.split(counts, dim=axis))
        return [x[i].narrow(axis, 0, n) for i, n in enumerate(counts)]

    def wanted(self, i: int) -> tuple[torch.Tensor, torch.Tensor]:
        """(out, lse) of a request by the reference, float64; lse (heads, queries)."""
        spec = self.spec
        k, v = self.k[i].double(), self.v[i].double()
        if spec.kv_dtype == FP8:
            k = k * self.operands["k_scale"].double()[:, None]
            v = v * self.operands["v_scale"].double()[:, None]
        out, lse = attend(
            self.q[i].double(),
            k,
            v,
            causal=spec.causal,
            window=spec.window,
            softcap=spec.softcap,
            sinks=self.operands["sinks"].double() if spec.sinks else None,
            scale=spec.scale,
        )
        lse = lse if lse.shape[0] == spec.heads else lse.T
        return out.to(DEVICE), lse.to(DEVICE)


def ints(values: list[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


def starts(counts: list[int]) -> torch.Tensor:
    return ints([0, *accumulate(counts)])


def poisoned(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return torch.full(shape, float("nan"), device=DEVICE).to(dtype)


def padded(parts: list[torch.Tensor], longest: int, dtype: torch.dtype) -> torch.Tensor:
    found = poisoned((len(parts), longest, *parts[0].shape[1:]), dtype)
    for i, part in enumerate(parts):
        found[i, : len(part)] = part
    return found


def _keys(
    spec: AttentionSpec, k: list[torch.Tensor], v: list[torch.Tensor], operands: dict[str, Any]
) -> tuple[torch.Tensor, torch.Tensor]:
    counts = [len(part) for part in k]
    if spec.page is None and spec.packed:
        operands["kv_starts"] = starts(counts)
        tail = poisoned((200, spec.kv_heads, spec.head_dim), spec.kv_dtype)
        return torch.cat([*k, tail]), torch.cat([*v, tail])
    operands["kv_lengths"] = ints(counts)
    if spec.page is None:
        longest = max(counts) + 5
        return padded(k, longest, spec.kv_dtype), padded(v, longest, spec.kv_dtype)
    page = spec.page
    needed = [-(-n // page) for n in counts]
    total = sum(needed) + 3
    shape = (total, spec.kv_heads, page, spec.head_dim)
    # HND in memory, read through a transposed view.
    pools = [poisoned(shape, spec.kv_dtype).transpose(1, 2) for _ in range(2)]
    table = torch.full((len(k), max(needed) + 2), 2**30, dtype=torch.int32)
    pages = iter(torch.randperm(total).tolist())
    for i, n in enumerate(counts):
        for p in range(needed[i]):
            place = next(pages)
            table[i, p] = place
            some = slice(p * page, min((p + 1) * page, n))
            for pool, parts in zip(pools, (k, v), strict=True):
                pool[place, : some.stop - some.start] = parts[i][some]
    operands["page_table"] = table.to(DEVICE)
    return pools[0], pools[1]
