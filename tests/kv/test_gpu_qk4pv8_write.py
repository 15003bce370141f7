"""The QK4PV8 writer and sequence means on the device: the contract's bytes, graphs, far pools."""

from __future__ import annotations

import functools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from epicute.kv.qk4pv8 import Memory, QK4PV8Cache
from epicute.kv.qk4pv8_write import CacheWritePlan, plan_cache_write
from epicute.kv.qk4pv8_write_means import MeansPlan, plan_sequence_means
from epicute.layouts.qk4pv8 import QK4PV8Page
from epicute.quant.smoothing import Means, sequence_means
from epicute.testing import assert_equal_bits
from tests.kv.writes import BF16, CASES, PLACINGS, Case, check, drawn

pytestmark = pytest.mark.gpu

SEEDS = st.integers(0, 2**31)


@functools.cache
def planned(case: Case) -> CacheWritePlan:
    return plan_cache_write(
        case.cache, case.dtype, grouped=case.grouped, table=case.table, counted=case.counted
    )


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("placing", PLACINGS)
def test_the_contracts_bytes(name: str, placing: str) -> None:
    case = CASES[name]

    @settings(max_examples=4)
    @given(st.integers(1, 250), SEEDS)
    def run(rows: int, seed: int) -> None:
        batch = drawn(case, rows, placing, seed, device="cuda")
        batch.run(planned(case))
        check(batch, planned(case), False)

    run()


@pytest.mark.parametrize("name", CASES)
def test_kd_01_qk_03_qk_04_rows_of_any_bits(name: str) -> None:
    for seed in range(3):
        batch = drawn(CASES[name], 200, "running", seed, wild=True, device="cuda")
        batch.run(planned(CASES[name]))
        check(batch, planned(CASES[name]), True)


def test_a_captured_writer_follows_its_slots() -> None:
    case = CASES["plain"]
    batch = drawn(case, 200, "adjacent", 1, device="cuda")
    plan = planned(case)
    batch.run(plan)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        batch.run(plan)
    batch.places["slots"].copy_(torch.randperm(case.cache.capacity)[:200])
    batch.memory.records.fill_(0xA5)
    batch.memory.delta.fill_(7.0)  # type: ignore[union-attr]
    for one in batch.counters or ():
        one.reset()
    graph.replay()
    torch.cuda.synchronize()
    check(batch, plan, False)


def test_qk_09_a_pool_beyond_4_gib() -> None:
    page = QK4PV8Page(128, 128)
    pages = 2**32 // page.bytes + 10
    cache = QK4PV8Cache(pages, 1, 4, page, 1)
    memory = Memory(
        torch.empty(pages, 1, page.bytes, dtype=torch.uint8, device="cuda"),
        torch.empty(pages, 4, 1, 128, dtype=torch.bfloat16, device="cuda"),
    )
    draw = torch.Generator("cuda").manual_seed(0)
    k, v, q = (torch.randn(64, n, 128, generator=draw, device="cuda").bfloat16() for n in (1, 1, 4))
    means = Means("static", q.float().mean(0)[None], k.float().mean(0)[None])
    slots = torch.arange(64, device="cuda") + cache.capacity - 64
    plan_cache_write(cache, counted=False).run(memory, k, v, means=means, slots=slots)
    small = QK4PV8Cache(1, 1, 4, page, 1)
    near = small.allocate("cuda")
    own = torch.arange(64, device="cuda") + 64
    plan_cache_write(small, counted=False).run(near, k, v, means=means, slots=own)
    for a, b in zip(cache.fetch(memory, slots), small.fetch(near, own), strict=True):
        assert_equal_bits(a.cpu(), b.cpu())


@functools.cache
def means_plan(head_dim: int, masked: bool) -> MeansPlan:
    return plan_sequence_means(head_dim, BF16, masked=masked)


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("masked", [False, True])
@settings(max_examples=5)
@given(lengths=st.lists(st.integers(0, 3000), min_size=1, max_size=20), seed=SEEDS)
def test_sequence_means(head_dim: int, masked: bool, lengths: list[int], seed: int) -> None:
    draw = torch.Generator("cuda").manual_seed(seed)
    rows = sum(lengths)

    def normal(heads: int) -> torch.Tensor:
        x = torch.randn(rows, heads, head_dim, generator=draw, device="cuda") + 2
        return x.bfloat16()

    q, k = normal(8), normal(2)
    starts = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32).cuda()
    valid = torch.rand(rows, generator=draw, device="cuda") < 0.8 if masked else None
    means = Means(
        "sequence",
        torch.full((len(lengths), 8, head_dim), torch.nan, device="cuda"),
        torch.full((len(lengths), 2, head_dim), torch.nan, device="cuda"),
    )
    plan = means_plan(head_dim, masked)
    workspace = plan.workspace(rows, len(lengths), 10, "cuda")
    plan.run(q, k, starts, means=means, workspace=workspace, valid=valid)
    wanted = sequence_means(q, k, starts.cpu(), valid)
    for a, b in ((means.q, wanted.q), (means.k, wanted.k)):
        assert ((a - b).abs() <= 1e-6 * 8).all()
