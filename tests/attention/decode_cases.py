"""Requests in a cache of any format, for decode attention: memory that shows what was read and written."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from epicute.attention.decode import DecodePlan, DecodeWorkspace
from epicute.attention.decode_spec import CACHES, DecodeSpec
from epicute.attention.reference import attend
from epicute.kv.int4 import Int4Cache
from epicute.layouts.kv_int4 import Int4Record
from epicute.quant.hadamard import hadamard
from tests.gemm.device import DEVICE, Output

FP8 = torch.float8_e4m3fn


@dataclass
class Decoded:
    """A batch laid out for a spec; whatever must not be read is NaN, in scales too.

    Attributes:
        lengths: keys of each request, new ones included.
        q: (B, rows, heads, D). k, v: of each request (keys, kv_heads, D), as they are read from the cache, codes apart
            from their scale. raw: keys and values as they were before they were cached.
        cache: what ``run`` takes. wanted_cache: INT4: the records as they must be afterwards.
        operands: all others by name, but ``workspace``.
    """

    spec: DecodeSpec
    lengths: list[int]
    q: Tensor
    k: list[Tensor]
    v: list[Tensor]
    cache: Any
    operands: dict[str, Any]
    out: Output
    lse: Output | None
    wanted_cache: Tensor | None = None
    tables: list[list[int]] = field(default_factory=list)
    raw: tuple[list[Tensor], list[Tensor]] = ([], [])

    @staticmethod
    def draw(spec: DecodeSpec, lengths: list[int], seed: int, mean: float = 0.0) -> Decoded:
        """Random normal queries, keys and values."""
        torch.manual_seed(seed)

        def some(*shape: int) -> Tensor:
            return (torch.randn(*shape, device=DEVICE) + mean).to(spec.dtype)

        q = some(len(lengths), spec.rows, spec.heads, spec.head_dim)
        k, v = ([some(n, spec.kv_heads, spec.head_dim) for n in lengths] for _ in range(2))
        return Decoded.of(spec, q, k, v, seed)

    @staticmethod
    def of(spec: DecodeSpec, q: Tensor, k: list[Tensor], v: list[Tensor], seed: int = 0) -> Decoded:
        """Lay out requests."""
        torch.manual_seed(seed + 1)
        lengths = [len(x) for x in k]
        shape = tuple(q.shape)
        out = Output(shape, spec.out_dtype)
        lse = None
        if spec.lse:
            lse = Output((shape[0], spec.heads, spec.rows), torch.float32, name="lse")
        found = Decoded(spec, lengths, q, k, v, None, {}, out, lse)
        found.raw = (k, v)
        found._vectors()
        found._place()
        return found

    # --- layout

    def _vectors(self) -> None:
        spec, operands = self.spec, self.operands
        operands["kv_lengths"] = torch.tensor(self.lengths, dtype=torch.int32, device=DEVICE)
        if spec.sinks:
            operands["sinks"] = torch.randn(spec.heads, device=DEVICE)
        if spec.cache == "fp8":
            for name in ("k_scale", "v_scale"):
                operands[name] = torch.rand(spec.kv_heads, device=DEVICE) + 0.5
        if spec.out_is_fp8:
            operands |= {
                "out_scale": torch.tensor([0.02], device=DEVICE),
                "amax": torch.tensor([-1.0], device=DEVICE),
                "saturated": torch.zeros(1, dtype=torch.int64, device=DEVICE),
                "nans": torch.zeros(1, dtype=torch.int64, device=DEVICE),
            }

    def _place(self) -> None:
        """Pages at random places of a pool, or a stretch for each request."""
        spec = self.spec
        page = spec.page or -(-(max([*self.lengths, 1]) + 5) // 16) * 16
        needed = [-(-n // page) for n in self.lengths]
        if spec.page is None:
            self.tables = [[b] for b in range(len(self.lengths))]
            total = len(self.lengths)
        else:
            total = sum(needed) + 3
            pages = iter(torch.randperm(total).tolist())
            self.tables = [[next(pages) for _ in range(n)] for n in needed]
            table = torch.full((len(needed), max(needed) + 2), 2**30, dtype=torch.int32)
            for b, row in enumerate(self.tables):
                table[b, : len(row)] = torch.tensor(row, dtype=torch.int32)
            self.operands["page_table"] = table.to(DEVICE)
        if spec.packed:
            self._place_records(total, page)
        else:
            self._place_rows(total, page)

    def slots(self, request: int, page: int, first: int, end: int) -> Tensor:
        """Slots of tokens of a request."""
        row = torch.tensor(self.tables[request], dtype=torch.int64, device=DEVICE)
        tokens = torch.arange(first, end, device=DEVICE)
        return row[tokens // page] * page + tokens % page

    def _place_rows(self, total: int, page: int) -> None:
        spec = self.spec
        dtype = CACHES[spec.cache]
        shape = (total, spec.kv_heads, page, spec.head_dim)
        hole = torch.full(shape, float("nan"), device=DEVICE).to(dtype)
        # HND in memory, read through a transposed view.
        pools = [hole.clone().transpose(1, 2), hole.clone().transpose(1, 2)]
        self.k, self.v = ([x.to(dtype) for x in some] for some in (self.k, self.v))
        for b, n in enumerate(self.lengths):
            slots = self.slots(b, page, 0, n)
            for pool, rows in zip(pools, (self.k, self.v), strict=True):
                pool[slots // page, slots % page] = rows[b]
        self.cache = tuple(pools)

    def _place_records(self, total: int, page: int) -> None:
        spec = self.spec
        kind = Int4Cache(
            total,
            spec.kv_heads,
            Int4Record(page, spec.head_dim),
            spec.rotation,
            spec.values_folded,
        )
        memory = kind.allocate(DEVICE).fill_(0xFF)
        written = memory.clone()
        for b, n in enumerate(self.lengths):
            old = max(n - spec.rows, 0) if spec.append else n
            for target, first, end in ((memory, 0, old), (written, 0, n)):
                slots = self.slots(b, page, first, end)
                kind.write(target, self.k[b][first:end], self.v[b][first:end], slots)
        if spec.append:
            for name, rows in (("new_k", self.k), ("new_v", self.v)):
                new = torch.full(
                    (len(rows), spec.rows, spec.kv_heads, spec.head_dim),
                    float("nan"),
                    device=DEVICE,
                    dtype=spec.dtype,
                )
                for b, x in enumerate(rows):
                    some = x[max(len(x) - spec.rows, 0) :]
                    new[b, spec.rows - len(some) :] = some
                self.operands[name] = new
        read = [kind.read(written, self.slots(b, page, 0, n)) for b, n in enumerate(self.lengths)]
        self.k, self.v = ([x[i] for x in read] for i in range(2))
        self.cache, self.wanted_cache = memory, written

    def some(self, rows: slice, seed: int) -> Decoded:
        """Some of the requests in a cache of their own, with the same scales and sinks."""
        k, v = (x[rows] for x in self.raw)
        found = Decoded.of(self.spec, self.q[rows], k, v, seed)
        for name in ("k_scale", "v_scale", "sinks"):
            if name in self.operands:
                found.operands[name] = self.operands[name]
        return found

    # --- runs

    def given(self) -> dict[str, Any]:
        """Operands of a run, but ``workspace``."""
        extra = {} if self.lse is None else {"lse": self.lse.tensor}
        return {"out": self.out.tensor, **self.operands, **extra}

    def run(self, plan: DecodePlan, workspace: DecodeWorkspace | None = None) -> None:
        """Launch."""
        if workspace is None:
            workspace = plan.workspace(len(self.lengths))
        plan.run(self.q, self.cache, workspace=workspace, **self.given())

    # --- reference

    def wanted(self, i: int) -> tuple[Tensor, Tensor]:
        """(out (rows, heads, D), lse (heads, rows)) of a request, float64."""
        spec = self.spec
        k, v = self.k[i].double(), self.v[i].double()
        q = self.q[i].double()
        if spec.cache == "fp8":
            k = k * self.operands["k_scale"].double()[:, None]
            v = v * self.operands["v_scale"].double()[:, None]
        turn = None
        if spec.rotation:
            turn = hadamard(spec.head_dim, spec.rotation).to(q.device)
            q = q @ turn
        out, lse = attend(
            q,
            k,
            v,
            window=spec.window,
            softcap=spec.softcap,
            sinks=self.operands["sinks"].double() if spec.sinks else None,
            scale=spec.scale,
        )
        if turn is not None and not spec.values_folded:
            out = out @ turn
        return out, lse


def compare(batch: Decoded, norm: float = 4e-3, row: float = 1e-2, lse_error: float = 2e-4) -> None:
    """All of a batch against the reference, and nothing written beside it."""
    spec = batch.spec
    batch.out.assert_intact()
    scale = 0.02 if spec.out_is_fp8 else 1.0
    if spec.out_is_fp8:
        norm, row = 4.5e-2, 8e-2
    if spec.packed:
        lse_error = max(
            lse_error, 1e-3
        )  # a query is rounded once more, to float16, after its rotation
    for i, n in enumerate(batch.lengths):
        wanted, lse = batch.wanted(i)
        found = batch.out.tensor[i].double() * scale
        assert torch.isfinite(found).all(), (i, n)
        error = (found - wanted).flatten(1).norm(dim=1)
        size = wanted.flatten(1).norm(dim=1)
        typical = size.pow(2).mean().sqrt()
        assert error.norm() <= norm * size.norm() + 1e-30, (i, n, float(error.norm() / size.norm()))
        assert (error <= row * torch.maximum(size, 0.3 * typical)).all(), (i, n)
        if batch.lse is not None:
            got = batch.lse.tensor[i].double()
            finite = torch.isfinite(lse)
            assert (got[~finite] == lse[~finite]).all(), (i, n)
            assert ((got - lse)[finite].abs() <= lse_error).all(), (i, n, (got - lse).abs().max())
    if batch.lse is not None:
        batch.lse.assert_intact()
    if batch.wanted_cache is not None:
        assert torch.equal(batch.cache, batch.wanted_cache)
