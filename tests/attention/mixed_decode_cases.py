"""Batches of one-token requests over QK4PV8 pages, and two references: of the same codes, and of what kernels round."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch

from epicute.attention.decode_work import part_tiles
from epicute.attention.mixed_decode import Binder, MixedDecodePlan, workspace_of
from epicute.attention.mixed_decode_build import MixedDecodeKernel
from epicute.attention.mixed_decode_spec import TILE, MixedDecodeSpec
from epicute.kv.qk4pv8 import Memory, QK4PV8Cache, Rows
from epicute.layouts.qk4pv8 import QK4PV8Page
from epicute.quant.fp8 import cast_e4m3
from epicute.quant.smoothing import Means

BF16, FP16 = torch.bfloat16, torch.float16
LOG2_E = math.log2(math.e)


@dataclass(frozen=True)
class Case:
    """A kernel's key, as few words."""

    page: int = 128
    head_dim: int = 128
    order: str = "exact16"
    kv_heads: int = 2
    group: int = 4
    terms: int = 1
    dtype: torch.dtype = BF16
    append: bool = True
    k_scale: float = 1.0
    v_scale: float = 1.0
    p_scale: int = 448

    def cache(self, pages: int = 1) -> QK4PV8Cache:
        page = QK4PV8Page(self.page, self.head_dim, self.order)
        heads = self.kv_heads * self.group
        return QK4PV8Cache(
            pages, self.kv_heads, heads, page, self.terms, self.k_scale, self.v_scale
        )

    @property
    def spec(self) -> MixedDecodeSpec:
        cache = self.cache()
        return MixedDecodeSpec(
            cache.q_heads,
            self.kv_heads,
            cache.page,
            self.terms,
            self.dtype,
            self.p_scale,
            True,
            self.append,
            self.append and self.k_scale != 1.0,
            self.append and self.v_scale != 1.0,
        )


CASES = {
    "plain": Case(),
    "40:8, hi and lo, page 64": Case(group=5, terms=2, page=64, kv_heads=1),
    "unsmoothed, in pages": Case(terms=0, append=False, page=64),
    "fast8, page 32, fp16": Case(order="fast8", page=32, dtype=FP16, group=2, terms=3),
    "64 channels, scaled": Case(head_dim=64, k_scale=0.37, v_scale=0.3, group=1, terms=2),
    "64 channels, page 32, fast8": Case(
        head_dim=64, page=32, order="fast8", group=8, append=False, p_scale=256
    ),
    "20:1, two blocks of columns": Case(group=20, kv_heads=1, terms=2, page=64),
    "12:1 of 64 channels": Case(group=12, kv_heads=1, terms=1, page=128, head_dim=64),
}


@dataclass(eq=False)
class Batch:
    """Requests, their pages and what the kernel is to write.

    Attributes:
        keys, values: (n, kv_heads, D) of each request. rows: what the contract makes of them.
        means: one group, or one for each request.
    """

    case: Case
    cache: QK4PV8Cache
    q: torch.Tensor
    keys: list[torch.Tensor]
    values: list[torch.Tensor]
    means: Means | None
    memory: Memory
    lengths: torch.Tensor
    table: torch.Tensor
    rows: list[Rows] = field(default_factory=list)
    out: torch.Tensor = None  # type: ignore[assignment]
    lse: torch.Tensor = None  # type: ignore[assignment]

    @staticmethod
    def draw(
        case: Case,
        lengths: list[int],
        seed: int = 0,
        device: str = "cpu",
        groups: int = 1,
        mean: float = 0.5,
    ) -> Batch:
        """``mean``: of values. ``groups``: of means, 1 or as many as requests."""
        draw = torch.Generator(device).manual_seed(seed)
        width, heads = case.head_dim, case.kv_heads * case.group

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=draw, device=device)

        means = None
        if case.terms:
            offsets = 3 * normal(groups, case.kv_heads, width)
            means = Means(
                "sequence" if groups > 1 else "static", normal(groups, heads, width), offsets
            )
        keys, values = [], []
        for i, n in enumerate(lengths):
            offset = 0.0 if means is None else means.k[min(i, groups - 1)]
            keys.append((normal(n, case.kv_heads, width) + offset).to(case.dtype))
            values.append((normal(n, case.kv_heads, width) + mean).to(case.dtype))
        q = normal(len(lengths), heads, width)
        if means is not None:
            q = q + means.q
        return Batch.of(case, q.to(case.dtype), keys, values, means, seed)

    @staticmethod
    def of(
        case: Case,
        q: torch.Tensor,
        keys: list[torch.Tensor],
        values: list[torch.Tensor],
        means: Means | None,
        seed: int = 0,
    ) -> Batch:
        """Pages at random, poisoned where no token is: scales and ΔS of NaN, values of NaN."""
        device = q.device
        counts = [max(1, -(-len(k) // case.page)) for k in keys]
        pages = sum(counts) + 2
        cache = case.cache(pages)
        memory = cache.allocate(device)
        memory.records.fill_(0x7F)
        if memory.delta is not None:
            memory.delta.fill_(math.nan)
        order = torch.randperm(pages, generator=torch.Generator().manual_seed(seed)).tolist()
        table = torch.full((len(keys), max(counts, default=0) + 1), -5, dtype=torch.int32)
        batch = Batch(
            case,
            cache,
            q,
            keys,
            values,
            means,
            memory,
            torch.tensor([len(k) for k in keys], dtype=torch.int32, device=device),
            table,
        )
        for i, count in enumerate(counts):
            table[i, :count] = torch.tensor([order.pop() for _ in range(count)])
        batch.table = table.to(device)
        for i in range(len(keys)):
            batch._place(i)
        batch.out = torch.full_like(q, math.nan)
        batch.lse = torch.full(q.shape[:2], math.nan, device=device)
        return batch

    def means_of(self, i: int) -> Means | None:
        """Of a request, as one group."""
        if self.means is None:
            return None
        own = min(i, len(self.means.q) - 1)
        return Means("static", self.means.q[own : own + 1], self.means.k[own : own + 1])

    def slots(self, i: int) -> torch.Tensor:
        """Of a request's tokens."""
        token = torch.arange(len(self.keys[i]), device=self.q.device)
        page = self.table[i].long()[token // self.case.page]
        return page * self.case.page + token % self.case.page

    def _place(self, i: int) -> None:
        rows = self.cache.quantize(self.keys[i], self.values[i], self.means_of(i))
        self.rows.append(rows)
        kept = max(0, len(self.keys[i]) - int(self.case.append))
        some = Rows(*(None if x is None else x[:kept] for x in rows))
        self.cache.place(self.memory, some, self.slots(i)[:kept])

    def newest(self) -> dict[str, torch.Tensor]:
        """The rows that are in no page yet."""
        if not self.case.append:
            return {}
        found = {}
        for name, lists in (("new_k", self.keys), ("new_v", self.values)):
            zero = torch.zeros(
                self.case.kv_heads, self.case.head_dim, dtype=self.case.dtype, device=self.q.device
            )
            found[name] = torch.stack([x[-1] if len(x) else zero for x in lists])
        return found

    def operands(self) -> dict[str, object]:
        """By name, as ``run`` takes them."""
        return {"lse": self.lse, "means": self.means, **self.newest()}

    def run(self, plan: MixedDecodePlan) -> None:
        """On the device."""
        plan.run(
            self.q,
            self.memory,
            out=self.out,
            workspace=plan.workspace(len(self.keys), self.q.device),
            kv_lengths=self.lengths,
            page_table=self.table,
            **self.operands(),
        )

    # --- references ---

    def scores(self, i: int) -> tuple[torch.Tensor, torch.Tensor]:
        """(heads, n) logits and (heads, n, D) values, float64, of the codes, and of queries as float16."""
        means, group = self.means_of(i), self.case.group
        q = self.q[i].float()
        keys, values, delta = self.cache.dequantize(self.rows[i])
        if means is not None:
            q = q - means.q[0]
        wide = (x.double().repeat_interleave(group, dim=1).transpose(0, 1) for x in (keys, values))
        k, v = wide
        found = (k @ q.half().double()[:, :, None])[..., 0]
        if delta is not None:
            found = found + delta.double().T
        return found * self.case.spec.scale, v

    def exact(self, i: int) -> tuple[torch.Tensor, torch.Tensor]:
        """(heads, D) attention and (heads,) LSE of a request."""
        scores, values = self.scores(i)
        weights = torch.softmax(scores, dim=-1)
        return (weights[:, None] @ values)[:, 0], scores.logsumexp(dim=-1)

    def modelled(self, i: int, kernel: MixedDecodeKernel) -> torch.Tensor:
        """(heads, D), where probabilities are rounded as the kernel rounds them: against its running maxima."""
        scores, values = self.scores(i)
        scores, lift = scores * LOG2_E, math.log2(self.case.p_scale)
        cut, n = kernel.schedule.cut(kernel.spec), scores.shape[1]
        tiles = -(-n // TILE)
        each = part_tiles(tiles, cut.parts or 1, cut.least)
        total = torch.zeros_like(scores[:, 0])
        out = torch.zeros_like(values[:, 0])
        most = scores.amax(dim=-1)
        for first in range(0, tiles, each):
            last = min(first + each, tiles) - 1
            for group in range(2):
                best = torch.full_like(most, -math.inf)
                mine, sums = torch.zeros_like(out), torch.zeros_like(total)
                for tile in range(last - group, first - 1, -2):
                    part = slice(tile * TILE, min((tile + 1) * TILE, n))
                    higher = torch.maximum(best, scores[:, part].amax(dim=-1))
                    p = torch.exp2(scores[:, part] - higher[:, None] + lift)
                    factor = torch.exp2(best - higher)
                    rounded = cast_e4m3(p.float()).double()
                    mine = mine * factor[:, None] + (rounded[:, None] @ values[:, part])[:, 0]
                    sums, best = sums * factor + p.sum(dim=-1), higher
                weight = torch.exp2(best - most)
                out, total = out + mine * weight[:, None], total + sums * weight
        return out / total[:, None]


def check(batch: Batch, kernel: MixedDecodeKernel, rows: bool = True) -> None:
    """Outputs against both references, and the new rows' bytes."""
    assert not rows or batch.out.isfinite().all()
    for i, keys in enumerate(batch.keys):
        out, lse = batch.out[i].double(), batch.lse[i].double()
        if len(keys) == 0:
            assert (out == 0).all()
            assert (lse == -math.inf).all()
            continue
        wanted, wanted_lse = batch.exact(i)
        assert ((lse - wanted_lse).abs() <= 1e-4).all(), (i, len(keys))
        assert (out - wanted).norm() <= 4e-2 * wanted.norm(), (i, len(keys))
        modelled = batch.modelled(i, kernel)
        error = (out - modelled).norm(dim=-1) / modelled.norm(dim=-1)
        assert (error <= 4e-3).all(), (i, len(keys), error.max())
        if rows and batch.case.append:
            check_rows(batch, i)


def check_rows(batch: Batch, i: int) -> None:
    """All of a request's tokens lie in its pages, the newest one with the writer's bytes."""
    found, wanted = batch.cache.fetch(batch.memory, batch.slots(i)), batch.rows[i]
    for name, a, b in zip(Rows._fields, found, wanted, strict=True):
        if a is None or b is None:
            assert a is b
        elif name == "delta":
            # FP32 sums of another order, rounded to BF16 terms.
            x, y = a.float().sum(dim=-1), b.float().sum(dim=-1)
            step = {1: 2.0**-7, 2: 2.0**-15, 3: 2.0**-22}[a.shape[-1]]
            assert ((x - y).abs() <= step * y.abs() + 1e-3 * 2.0**-6).all()
        else:
            assert torch.equal(a.view(torch.uint8), b.view(torch.uint8)), name


def bound(batch: Batch, kernel: MixedDecodeKernel, ctas: int) -> tuple[tuple[int, ...], list]:
    """A kernel's arguments for a batch on the CPU, and all memory that it may touch."""
    workspace = workspace_of(kernel, len(batch.keys), "cpu")
    workspace.partials.fill_(math.nan)
    operands = {name: x for name, x in batch.operands().items() if x is not None}
    places = (batch.lengths, batch.table)
    arguments = Binder(batch.cache, kernel).bind(
        batch.q, batch.memory, batch.out, workspace, places, operands, ctas
    )
    tensors = [batch.q, batch.out, batch.lse, batch.memory.records, *places]
    tensors += [workspace.counters, workspace.stats, workspace.partials]
    tensors += [x for name, x in operands.items() if name.startswith("new")]
    if batch.means is not None:
        tensors += [batch.means.q, batch.means.k]
    if batch.memory.delta is not None:
        tensors.append(batch.memory.delta)
    return arguments, tensors
