"""Specs that cover what mixed-precision kernels differ in, and requests in memory as these want them."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import torch

from epicute.attention.mixed import MixedSpec
from epicute.attention.mixed_plan import MixedPlan
from epicute.attention.reference import attend
from epicute.kv.qk4pv8 import Memory, QK4PV8Cache, Rows
from epicute.quant.fp8 import cast_e4m3
from epicute.quant.nvfp4 import fast8_keys
from epicute.quant.smoothing import Means, lse_shift
from tests.gemm.device import DEVICE, Output

FP8 = torch.float8_e4m3fn

SPECS = {
    "exact16": MixedSpec(32, 8, 128, page=128, terms=2, lse=True),
    "exact16, direct": MixedSpec(40, 8, 128, page=64, pv="direct", lse=True),
    "exact16, mma": MixedSpec(8, 4, 128, page=32, terms=2, placement="mma", lse=True),
    "exact16, elementwise": MixedSpec(
        9, 3, 128, page=128, terms=1, placement="elementwise", lse=True
    ),
    "exact16, heads of 64": MixedSpec(9, 3, 64, page=32, terms=3, lse=True, packed=False),
    "exact16, all keys": MixedSpec(4, 4, 64, page=64, causal=False, p_scale=256, lse=True),
    "exact16, window, sinks": MixedSpec(
        8, 2, 128, page=128, terms=2, window=200, sinks=True, softcap=20.0, lse=True
    ),
    "fast8": MixedSpec(32, 8, 128, qk="fast8", page=128, terms=2, lse=True),
    "fast8, direct": MixedSpec(71, 1, 128, qk="fast8", page=64, pv="direct", lse=True),
    "fast8, elementwise": MixedSpec(
        8, 2, 128, qk="fast8", page=128, terms=2, placement="elementwise", lse=True
    ),
    "fast8, mma, fp16": MixedSpec(
        8, 2, 128, qk="fast8", page=32, terms=1, placement="mma", lse=True, dtype=torch.float16
    ),
    "fast8, heads of 64": MixedSpec(
        8, 2, 64, qk="fast8", page=64, softcap=30.0, lse=True, pv="direct", terms=2
    ),
    "fast8, fp8 out": MixedSpec(32, 8, 128, qk="fast8", page=128, out_dtype=FP8),
    "fp8": MixedSpec(32, 8, 128, precision="fp8/fp8", lse=True),
    "fp8, page 16, direct": MixedSpec(
        40, 8, 128, precision="fp8/fp8", page=16, pv="direct", lse=True, sinks=True
    ),
    "fp8, heads of 64, padded": MixedSpec(
        9, 3, 64, precision="fp8/fp8", lse=True, packed=False, window=150, p_scale=256
    ),
}
"""Every precision, placement, page, head dimension and layout at least once, most beside several others."""


@dataclass
class MixedBatch:
    """Requests in memory as a spec wants them; what must not be read is NaN or of NaN codes."""

    spec: MixedSpec
    lengths: list[tuple[int, int]]
    q: list[torch.Tensor]
    k: list[torch.Tensor]
    v: list[torch.Tensor]
    means: Means | None
    k_scale: torch.Tensor
    v_scale: torch.Tensor
    operands: dict[str, Any] = field(default_factory=dict)
    memory: tuple[torch.Tensor, ...] = ()
    device: str = DEVICE
    shift: int = 0
    """Power of two that fast8 takes out of keys."""
    quantised: dict[int, Rows] = field(default_factory=dict)

    @staticmethod
    def draw(
        spec: MixedSpec,
        lengths: list[tuple[int, int]],
        seed: int,
        mean: float = 0.0,
        outlier: float = 0.0,
        device: str = DEVICE,
    ) -> MixedBatch:
        """Random normal q, k and v; ``mean``: of v; ``outlier``: of one channel of keys and queries in eight."""
        random = torch.Generator("cpu").manual_seed(seed)

        def some(rows: int, heads: int, dtype: torch.dtype) -> torch.Tensor:
            return torch.randn(rows, heads, spec.head_dim, generator=random).to(dtype)

        loud = torch.zeros(spec.head_dim)
        loud[3::8] = outlier
        q = [(some(n, spec.heads, torch.float32) + loud / 4).to(spec.dtype) for n, _ in lengths]
        k = [(some(n, spec.kv_heads, torch.float32) + loud).to(spec.dtype) for _, n in lengths]
        v = [(some(n, spec.kv_heads, torch.float32) + mean).to(spec.dtype) for _, n in lengths]
        means = None
        if spec.terms:
            kind = "sequence" if seed % 2 else "static"
            groups = len(lengths) if kind == "sequence" else 1
            shape = (groups, 1, spec.head_dim)
            noise = 0.1 * torch.randn(shape, generator=random)
            means = Means(
                kind,
                (loud / 4 + noise).expand(-1, spec.heads, -1).contiguous(),
                (loud - noise).expand(-1, spec.kv_heads, -1).contiguous(),
            )
        sizes = torch.rand(2, spec.kv_heads, generator=random) + 0.5
        batch = MixedBatch(spec, lengths, q, k, v, means, sizes[0], sizes[1], device=device)
        if spec.recorded:
            batch.k_scale = torch.full_like(sizes[0], 0.75)
            batch.v_scale = torch.full_like(sizes[1], 1.25)
        batch._place(random)
        return batch

    # --- memory ---

    @property
    def cache(self) -> QK4PV8Cache:
        """Shape of the records."""
        spec = self.spec
        return QK4PV8Cache(
            self.pages, spec.kv_heads, spec.heads, spec.record, spec.terms, 0.75, 1.25
        )

    @property
    def pages(self) -> int:
        """Of the pool: what is needed and some more."""
        assert self.spec.page is not None
        return sum(-(-n // self.spec.page) for _, n in self.lengths) + 3

    def rows(self, i: int) -> Rows:
        """Keys and values of a request, quantised: once for each time that they are placed."""
        if i not in self.quantised:
            group = None
            if self.means is not None and self.means.kind == "sequence":
                group = torch.full((len(self.k[i]),), i)
            self.quantised[i] = self.cache.quantize(self.k[i], self.v[i], self.means, group)
        return self.quantised[i]

    def _place(self, random: torch.Generator) -> None:
        spec, device = self.spec, self.device
        self.quantised.clear()
        counts = [n for n, _ in self.lengths]
        keys = [n for _, n in self.lengths]
        if spec.packed:
            self.operands["q_starts"] = self._ints([0, *accumulate(counts)])
        else:
            self.operands["q_lengths"] = self._ints(counts)
        if spec.page is not None:
            table = self._table(random)
            self.operands |= {"page_table": self._ints(table), "kv_lengths": self._ints(keys)}
        elif spec.packed:
            self.operands["kv_starts"] = self._ints([0, *accumulate(keys)])
        else:
            self.operands["kv_lengths"] = self._ints(keys)
        if spec.recorded:
            self._place_records(table)
        else:
            self._place_rows(table if spec.page is not None else [])
        if spec.sinks:
            self.operands["sinks"] = torch.randn(spec.heads, generator=random).to(device)
        if self.means is not None:
            self.operands["q_mean"] = self.means.q.to(device)
        self.operands |= {"k_scale": self.k_scale.to(device), "v_scale": self.v_scale.to(device)}
        if spec.out_is_fp8:
            self.operands |= {
                "out_scale": torch.tensor([0.02], device=device),
                "amax": torch.tensor([-1.0], device=device),
                "saturated": torch.zeros(1, dtype=torch.int64, device=device),
                "nans": torch.zeros(1, dtype=torch.int64, device=device),
            }

    def _ints(self, values: Any) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=self.device)

    def _table(self, random: torch.Generator) -> list[list[int]]:
        """Page of each stretch of tokens; behind a request's end a number that is no page."""
        page = self.spec.page
        assert page is not None
        needed = [-(-n // page) for _, n in self.lengths]
        places = iter(torch.randperm(self.pages, generator=random).tolist())
        width = max(needed) + 1
        return [[next(places) for _ in range(n)] + [2**30] * (width - n) for n in needed]

    def _place_records(self, table: list[list[int]]) -> None:
        cache, page = self.cache, self.spec.page
        assert page is not None
        shape = (cache.pages, cache.kv_heads, cache.page.bytes)
        records = torch.full(shape, 0x7F, dtype=torch.uint8)
        memory = cache.allocate()
        delta = memory.delta if memory.delta is None else torch.full_like(memory.delta, torch.nan)
        memory = Memory(records, delta)
        for i, (_, keys) in enumerate(self.lengths):
            token = torch.arange(keys)
            slots = torch.tensor(table[i])[token // page].to(torch.int64) * page + token % page
            cache.place(memory, self.rows(i), slots)
        self.memory = tuple(x.to(self.device) for x in memory if x is not None)

    def _codes(self, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        return cast_e4m3(x.float() / scale[:, None])

    def _place_rows(self, table: list[list[int]]) -> None:
        spec = self.spec
        found = []
        for parts, scale in ((self.k, self.k_scale), (self.v, self.v_scale)):
            codes = [self._codes(x, scale) for x in parts]
            if spec.page is not None:
                shape = (self.pages, spec.kv_heads, spec.page, spec.head_dim)
                pool = poisoned(shape, FP8).transpose(1, 2)
                for i, part in enumerate(codes):
                    # split() gives one part of nothing where there is nothing to split.
                    for p, some in enumerate(part.split(spec.page) if len(part) else ()):
                        pool[table[i][p], : len(some)] = some
            elif spec.packed:
                pool = torch.cat([*codes, poisoned((150, spec.kv_heads, spec.head_dim), FP8)])
            else:
                pool = padded(codes, max(n for _, n in self.lengths) + 5, FP8)
            found.append(pool.to(self.device) if spec.page is None else on(pool, self.device))
        self.memory = tuple(found)

    def queries(self) -> torch.Tensor:
        """q as the spec wants it."""
        spec = self.spec
        if spec.packed:
            return torch.cat(self.q).to(self.device)
        return padded(self.q, self.longest, spec.dtype).to(self.device)

    @property
    def longest(self) -> int:
        """Rows of a padded q."""
        return max(n for n, _ in self.lengths) + 3

    def run(self, plan: MixedPlan) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Launch; outputs and LSEs of the requests, nothing written beside them."""
        out, lse = self.results()
        extra = {} if lse is None else {"lse": lse.tensor}
        shift = {"shift": self.shift} if self.shift else {}
        plan.run(self.queries(), *self.memory, out=out.tensor, **self.operands, **extra, **shift)
        torch.cuda.synchronize()
        out.assert_intact()
        if lse is not None:
            lse.assert_intact()
        return self.parts(out.tensor, 0), [] if lse is None else self.parts(lse.tensor, 1)

    def results(self) -> tuple[Output, Output | None]:
        """Poisoned out and lse."""
        spec = self.spec
        rows = sum(n for n, _ in self.lengths)
        lead = (rows,) if spec.packed else (len(self.lengths), self.longest)
        out = Output((*lead, spec.heads, spec.head_dim), spec.out_dtype, device=self.device)
        shape = (spec.heads, rows) if spec.packed else (lead[0], spec.heads, lead[1])
        lse = Output(shape, torch.float32, name="lse", device=self.device) if spec.lse else None
        return out, lse

    def parts(self, x: torch.Tensor, axis: int) -> list[torch.Tensor]:
        """A result by requests."""
        counts = [n for n, _ in self.lengths]
        if self.spec.packed:
            return list(x.split(counts, dim=axis))
        return [x[i].narrow(axis, 0, n) for i, n in enumerate(counts)]

    # --- reference ---

    def values(
        self, i: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """(queries, keys, values, ΔS of each key and query head) in float64, as they are multiplied."""
        spec = self.spec
        q = self.q[i].float()
        if self.means is not None:
            group = i if self.means.kind == "sequence" else 0
            q = q - self.means.q[group]
        if spec.wide:
            q = q.to(torch.float16).double()
        else:
            scale = power_of(q)
            q = cast_e4m3(q / scale).double() * scale.double()
        delta = None
        if spec.recorded:
            rows = self.rows(i)
            k, v, delta = self.cache.dequantize(rows)
            if not spec.wide:
                scaled = fast8_keys(rows.codes, rows.scales, self.shift).double()
                k = scaled * 2.0**self.shift * 0.75
        else:
            k = self._codes(self.k[i], self.k_scale).double() * self.k_scale.double()[:, None]
            v = self._codes(self.v[i], self.v_scale).double() * self.v_scale.double()[:, None]
        q, k, v = (x.to(self.device).double() for x in (q, k, v))
        return q, k, v, None if delta is None else delta.to(self.device).double()

    def wanted(self, i: int) -> tuple[torch.Tensor, torch.Tensor]:
        """(out, lse) of a request by the reference on the codes, float64; lse (heads, queries)."""
        spec = self.spec
        q, k, v, delta = self.values(i)
        settings = {
            "causal": spec.causal,
            "window": spec.window,
            "softcap": spec.softcap,
            "sinks": self.operands["sinks"].double() if spec.sinks else None,
            "scale": spec.scale,
        }
        if delta is None:
            return attend(q, k, v, **settings)
        # ΔS as one channel more of each query head's own keys; of values, one that is zero.
        k = k.repeat_interleave(spec.group, dim=1)
        v = v.repeat_interleave(spec.group, dim=1)
        k = torch.cat([k, delta[..., None]], dim=2)
        q = torch.cat([q, torch.ones_like(q[..., :1])], dim=2)
        v = torch.cat([v, torch.zeros_like(v[..., :1])], dim=2)
        out, lse = attend(q, k, v, **settings)
        return out[..., :-1], lse

    def logits(self, i: int) -> tuple[torch.Tensor, torch.Tensor]:
        """(heads, queries, keys) logits of a request, scaled and capped, -inf where a key is hidden; and its values."""
        spec = self.spec
        q, k, v, delta = self.values(i)
        group = spec.group
        k, v = (x.repeat_interleave(group, dim=1).transpose(0, 1) for x in (k, v))
        found = q.transpose(0, 1) @ k.transpose(1, 2)
        if delta is not None:
            found = found + delta.T[:, None, :]
        found = found * spec.scale
        if spec.softcap is not None:
            found = spec.softcap * torch.tanh(found / spec.softcap)
        queries, keys = self.lengths[i]
        own = torch.arange(queries, device=self.device)[:, None] + keys - queries
        key = torch.arange(keys, device=self.device)[None]
        hidden = torch.zeros(queries, keys, dtype=torch.bool, device=self.device)
        if spec.causal:
            hidden |= key > own
        if spec.window is not None:
            hidden |= key <= own - spec.window
        return found.masked_fill(hidden, -math.inf), v

    def modelled(self, i: int) -> tuple[torch.Tensor, torch.Tensor]:
        """(out, lse) by the kernel's algorithm in float64: tiles of 128 keys from the last one back, probabilities in
        E4M3 under the maximum so far, sums of those before rounding.
        """
        spec, shift = self.spec, math.log(self.spec.p_scale)
        logits, v = self.logits(i)
        heads, queries, keys = logits.shape
        best = logits.new_full((heads, queries), -math.inf)
        total, out = torch.zeros_like(best), logits.new_zeros(heads, queries, spec.head_dim)
        for first in reversed(range(0, keys, 128)):
            some = logits[:, :, first : first + 128]
            new = torch.maximum(best, some.amax(dim=2))
            zero = new.masked_fill(new == -math.inf, 0.0)
            factor = torch.exp(best - zero)
            p = torch.exp(some - zero[..., None] + shift)
            codes = cast_e4m3(p.float()).double()
            total = total * factor + p.sum(dim=2)
            out = out * factor[..., None] + codes @ v[:, first : first + 128]
            best = new
        nothing = best == -math.inf
        if spec.sinks:
            sink = self.operands["sinks"].double()[:, None]
            total = total + torch.exp(sink - best.masked_fill(nothing, 0.0) + shift)
        lse = (best + torch.log(total) - shift).masked_fill(nothing, -math.inf)
        out = out / total.masked_fill(nothing, 1.0)[..., None]
        return out.transpose(0, 1), lse

    def cut_lse(self, i: int, lse: torch.Tensor) -> torch.Tensor:
        """(heads, queries) by how much FP8 accumulators that take in ΔS may be off in ``lse``, the request's, beside
        what they cut of products alone; 0 where none does.

        An instruction cuts all terms of its sums, the accumulator among them, toward zero at 2^-13 of the power of two
        of the largest. Where ΔS is that, the cut is at u = 2^-13 |ΔS| or below. ΔS loses less than u when it comes in,
        and the sum as much again when it passes a power of two: 2 u to one side. The D products lose less than u each,
        to either side as their signs are: a root mean square of √(D / 3) u at most, as if each were cut anywhere. The
        LSE moves by its keys' losses, each times its probability p (a cap makes that less): by 2 Σ p u, and, at three
        standard deviations, 3 √(D / 3 · Σ (p u)²). u is the logit's, so that the scale of the softmax is in it.
        """
        spec = self.spec
        if spec.wide or not spec.terms or spec.placement == "elementwise":
            return torch.zeros_like(lse)
        delta = self.values(i)[3]
        assert delta is not None
        unit = spec.scale * 2.0**-13 * delta.abs().T[:, None]
        lost = torch.exp(self.logits(i)[0] - lse[..., None]) * unit
        noise = math.sqrt(spec.head_dim / 3) * lost.square().sum(dim=2).sqrt()
        return 2 * lost.sum(dim=2) + 3 * noise

    def unquantised(self, i: int) -> tuple[torch.Tensor, torch.Tensor]:
        """(out, lse) of a request by the reference on q, k and v as drawn; lse less what smoothing takes from it."""
        spec = self.spec
        out, lse = attend(
            self.q[i].double(), self.k[i].double(), self.v[i].double(),
            causal=spec.causal, window=spec.window, softcap=spec.softcap, scale=spec.scale,
        )  # fmt: skip
        if self.means is not None:
            group = i if self.means.kind == "sequence" else 0
            shift = lse_shift(self.q[i], self.means.k[group], spec.scale)
            lse = lse - shift.T.double().to(lse.device)
        return out.to(self.device), lse.to(self.device)


def power_of(q: torch.Tensor) -> torch.Tensor:
    """(..., 1) least power of two, at least 2^-32, by which a row divided is within 448."""
    peak = q.abs().amax(dim=-1, keepdim=True).double()
    exponent = torch.ceil(torch.log2(peak / 448)).clamp(-32, 100)
    return torch.exp2(exponent).float()


def poisoned(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return torch.full(shape, float("nan")).to(dtype)


def padded(parts: list[torch.Tensor], longest: int, dtype: torch.dtype) -> torch.Tensor:
    found = poisoned((len(parts), longest, *parts[0].shape[1:]), dtype)
    for i, part in enumerate(parts):
        found[i, : len(part)] = part
    return found


def on(pool: torch.Tensor, device: str) -> torch.Tensor:
    """A pool on a device, its strides kept."""
    return pool.transpose(1, 2).contiguous().to(device).transpose(1, 2)
