"""Batches of rows for the QK4PV8 writer: what it is given, and what the contract makes of it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, fields

import torch

from epicute.kv.pages import slots_for
from epicute.kv.qk4pv8 import Memory, QK4PV8Cache
from epicute.kv.qk4pv8_write import CacheWritePlan
from epicute.layouts.qk4pv8 import QK4PV8Page
from epicute.quant import smoothing
from epicute.quant.nvfp4 import CastCounters
from epicute.quant.smoothing import Means
from epicute.testing import assert_equal_bits

BF16, FP16 = torch.bfloat16, torch.float16
GROUPS = 3
PAGES = 9
FILL = 0xA5
"""Bytes that nobody wrote."""


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
    grouped: bool = False
    table: bool = False
    k_scale: float = 1.0
    v_scale: float = 1.0
    counted: bool = True

    @property
    def cache(self) -> QK4PV8Cache:
        page = QK4PV8Page(self.page, self.head_dim, self.order)
        heads = self.kv_heads * self.group
        return QK4PV8Cache(
            PAGES, self.kv_heads, heads, page, self.terms, self.k_scale, self.v_scale
        )


CASES = {
    "plain": Case(),
    "40:8, hi and lo": Case(group=5, terms=2, page=64),
    "fast8, fp16": Case(order="fast8", dtype=FP16, page=64, group=2),
    "64 channels": Case(head_dim=64, page=32, group=1, terms=2, kv_heads=3),
    "64 channels, fast8, scaled": Case(
        head_dim=64, order="fast8", k_scale=0.37, v_scale=0.3, group=3
    ),
    "means of requests": Case(grouped=True, terms=2, page=64),
    "page table, 71:1": Case(table=True, grouped=True, group=12, kv_heads=1, head_dim=64),
    "page table, uncounted": Case(table=True, counted=False, page=32, terms=3),
    "unsmoothed": Case(terms=0, k_scale=0.25, v_scale=0.125),
}


@dataclass(eq=False)
class Batch:
    """Rows, places, means, counters and poisoned memory on one device."""

    case: Case
    keys: torch.Tensor
    values: torch.Tensor
    means: Means | None
    places: dict[str, torch.Tensor]
    memory: Memory
    counters: tuple[CastCounters, CastCounters] | None

    def tensors(self) -> list[torch.Tensor]:
        """All memory that a kernel may touch."""
        found = [self.keys, self.values, self.memory.records, *self.places.values()]
        if self.memory.delta is not None:
            found.append(self.memory.delta)
        if self.means is not None:
            found += [self.means.q, self.means.k]
        return found + [getattr(c, f.name) for c in self.counters or () for f in fields(c)]

    def run(self, plan: CacheWritePlan) -> None:
        plan.run(
            self.memory,
            self.keys,
            self.values,
            means=self.means,
            counters=self.counters,
            **self.places,
        )


def shifted(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Zeros at an address that is no multiple of 16."""
    return torch.zeros(math.prod(shape) + 1, dtype=dtype)[1:].view(shape)


def fresh(case: Case, device: str) -> tuple[Memory, tuple[CastCounters, CastCounters] | None]:
    memory = case.cache.allocate(device)
    memory.records.fill_(FILL)
    if memory.delta is not None:
        memory.delta.fill_(7.0)
    counters = (CastCounters.create(device), CastCounters.create(device)) if case.counted else None
    return memory, counters


def scattered(capacity: int, rows: int, draw: torch.Generator) -> torch.Tensor:
    """Rows anywhere."""
    return torch.randperm(capacity, generator=draw)[:rows]


def running(capacity: int, rows: int, draw: torch.Generator) -> torch.Tensor:
    """Three runs of adjacent slots, none of which begins at a chunk."""
    cuts = torch.sort(torch.randint(0, rows + 1, (2,), generator=draw)).values.tolist()
    lengths = [cuts[0], cuts[1] - cuts[0], rows - cuts[1]]
    starts, at = [], 5
    for n in lengths:
        starts.append(at)
        at += n + 3
    assert at <= capacity
    order = torch.randperm(3, generator=draw).tolist()
    return torch.cat([torch.arange(starts[i], starts[i] + lengths[i]) for i in order])


Placing = Callable[[int, int, torch.Generator], torch.Tensor]
PLACINGS: dict[str, Placing] = {
    "adjacent": lambda capacity, rows, draw: torch.arange(rows),
    "running": running,
    "scattered": scattered,
}


def drawn(
    case: Case, rows: int, placing: str, seed: int = 0, wild: bool = False, device: str = "cpu"
) -> Batch:
    """Some rows are skipped. ``wild``: every second row any bits."""
    draw = torch.Generator().manual_seed(seed)
    cache = case.cache
    shape = (rows, case.kv_heads, case.head_dim)

    def one(offset: float) -> torch.Tensor:
        x = (torch.randn(shape, generator=draw) * 2 + offset).to(case.dtype)
        if wild:
            bits = torch.randint(-(2**15), 2**15, shape, generator=draw).short()
            x[1::2] = bits.view(case.dtype)[1::2]
            if rows > 6:
                x[4], x[6] = 0.0, -torch.inf
        # Wider rows than needed, and what lies between them is NaN.
        wide = torch.full((rows, case.kv_heads, case.head_dim + 8), torch.nan, dtype=case.dtype)
        return wide.to(device)[..., : case.head_dim].copy_(x)

    keys, values = one(1.0), one(0.0)
    groups = GROUPS if case.grouped else 1
    means = None
    if case.terms:
        heads = case.kv_heads * case.group
        q = torch.randn(groups, heads, case.head_dim, generator=draw).to(device)
        k = torch.randn(groups, case.kv_heads, case.head_dim, generator=draw).to(device)
        means = Means("sequence" if case.grouped else "static", q, k)
    owner = torch.sort(torch.randint(0, groups, (rows,), generator=draw)).values
    slots = PLACINGS[placing](cache.capacity, rows, draw)
    if rows > 3:
        slots[torch.randint(0, rows, (rows // 8,), generator=draw)] = -1
        slots[2] = cache.capacity + 3
    places = {"slots": slots}
    if case.table:
        places = tabled(case, slots, owner, draw)
    if case.grouped and not case.table:
        places["group"] = owner.to(torch.int32)
    places = {name: x.to(device) for name, x in places.items()}
    return Batch(case, keys, values, means, places, *fresh(case, device))


def tabled(
    case: Case, slots: torch.Tensor, owner: torch.Tensor, draw: torch.Generator
) -> dict[str, torch.Tensor]:
    """The same places by a page table in which every request owns all pages, in an order of its own."""
    table = torch.stack([torch.randperm(PAGES, generator=draw) for _ in range(GROUPS)])
    where = torch.argsort(table, dim=1)
    page, token = slots.clamp(0, PAGES * case.page - 1) // case.page, slots % case.page
    position = where[owner, page] * case.page + token
    skipped = (slots < 0) | (slots >= PAGES * case.page)
    requests = torch.where(skipped & (slots < 0), -1, owner)
    position = torch.where(skipped & (slots >= 0), PAGES * case.page + 5, position)
    wide = torch.full((GROUPS, PAGES + 3), -7, dtype=torch.int32)
    wide[:, :PAGES] = table
    return {
        "page_table": wide[:, :PAGES],
        "positions": position.to(torch.int32),
        "requests": requests.to(torch.int64),
    }


def check(batch: Batch, plan: CacheWritePlan, wild: bool) -> None:
    """What a kernel left in ``batch`` against ``QK4PV8Cache.quantize`` and ``place``."""
    case = batch.case
    memory, counters = fresh(case, "cpu")
    here = Batch(
        case,
        batch.keys.cpu(),
        batch.values.cpu(),
        None
        if batch.means is None
        else Means(batch.means.kind, batch.means.q.cpu(), batch.means.k.cpu()),
        {name: x.cpu() for name, x in batch.places.items()},
        memory,
        counters,
    )
    here.run(plan)
    assert_equal_bits(batch.memory.records.cpu(), memory.records)
    for found, wanted in zip(batch.counters or (), counters or (), strict=True):
        for f in fields(found):
            assert_equal_bits(getattr(found, f.name).cpu(), getattr(wanted, f.name))
    if memory.delta is None or batch.memory.delta is None:
        return
    check_delta(batch, memory, wild)


def magnitudes(batch: Batch) -> torch.Tensor:
    """Sums of magnitudes behind every ΔS, where it lies: (pages, q_heads, page_size)."""
    case, means = batch.case, batch.means
    assert means is not None
    places = {name: x.cpu() for name, x in batch.places.items()}
    slots = places.get("slots")
    if slots is None:
        named = (places["page_table"], places["positions"], places["requests"])
        slots = slots_for(*named, case.page, check=False)
    group = places.get("group", places.get("requests")) if case.grouped else None
    kept = ((slots >= 0) & (slots < case.cache.capacity)).nonzero()[:, 0]
    group = None if group is None else group[kept]
    centred = smoothing.centre(batch.keys.cpu()[kept], means.k.cpu(), group)
    found = torch.zeros(PAGES, case.page, case.cache.q_heads)
    sums = smoothing.delta(means.q.cpu().abs(), centred.abs(), group)
    found.view(-1, case.cache.q_heads)[slots[kept]] = sums
    return found.transpose(1, 2)


def check_delta(batch: Batch, memory: Memory, wild: bool) -> None:
    """ΔS within the contract's tolerance, and nothing beside it changed."""
    assert batch.memory.delta is not None
    assert memory.delta is not None
    found, wanted = (x.cpu().transpose(2, 3) for x in (batch.memory.delta, memory.delta))
    untouched = (wanted == 7.0).all(dim=-1)
    assert (found[untouched] == 7.0).all()
    a, b = smoothing.join_terms(found), smoothing.join_terms(wanted)
    size = magnitudes(batch)
    # Keys of any bits overflow a sum in FP32 that float64 holds; their bits are no one's.
    tame = ~untouched & (size < 1e30)
    assert a[tame].isfinite().all()
    # Two numbers that differ by little may be rounded to neighbours.
    steps = {1: 2.0**-7, 2: 2.0**-15, 3: 0.0}[batch.case.terms]
    bound = 1e-6 * size + steps * b.abs()
    assert ((a - b).abs() <= bound)[tame].all()
    assert wild or tame.equal(~untouched)
