"""Kernels against the float64 reference on fresh data, and the laws that no reference is needed for."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from epicute.attention import AttentionPlan, AttentionSpec, plan_attention
from tests.attention.cases import SPECS, Batch, ints, requests, starts
from tests.gemm.device import DEVICE

pytestmark = pytest.mark.gpu

NORM, ROW, LSE = 4e-3, 1e-2, 2e-4
"""Budgets of a bfloat16 output: of all rows together, of the worst row, and of the LSE, absolute."""

FP8_NORM, FP8_ROW = 4.5e-2, 8e-2
"""With a float8 output, whose half step is up to 6 % of a value, and 4 % of 25, where some of these outputs lie."""

SEEDS = st.integers(0, 2**31)


@cache
def planned(spec: AttentionSpec) -> AttentionPlan:
    return plan_attention(spec)


def compare(batch: Batch) -> None:
    """All of a batch against the reference, and nothing written beside it."""
    spec = batch.spec
    torch.cuda.synchronize()
    batch.out.assert_intact()
    scale = 0.02 if spec.out_is_fp8 else 1.0
    norm, row = (FP8_NORM, FP8_ROW) if spec.out_is_fp8 else (NORM, ROW)
    for i, (found, (queries, keys)) in enumerate(zip(batch.outputs(), batch.lengths, strict=True)):
        if queries == 0:
            continue
        wanted, lse = batch.wanted(i)
        found = found.double() * scale
        assert torch.isfinite(found).all(), (i, queries, keys)
        error = (found - wanted).flatten(1).norm(dim=1)
        size = wanted.flatten(1).norm(dim=1)
        typical = size.pow(2).mean().sqrt()
        assert error.norm() <= norm * size.norm() + 1e-30, (i, queries, keys)
        assert (error <= row * torch.maximum(size, 0.3 * typical)).all(), (i, queries, keys)
        if batch.lse is not None:
            got = batch.lses()[i].double()
            finite = torch.isfinite(lse)
            assert (got[~finite] == lse[~finite]).all()
            assert ((got - lse)[finite].abs() <= LSE).all(), (i, queries, keys)
    if not spec.packed:
        for i, (queries, _) in enumerate(batch.lengths):
            assert batch.out.tensor[i, queries:].float().isnan().all()
    if batch.lse is not None:
        batch.lse.assert_intact()


@pytest.mark.parametrize("name", SPECS)
def test_pp_02_pp_07_kd_08_kd_10_kd_11_attention_against_float64(name: str) -> None:
    spec = SPECS[name]

    @settings(max_examples=6)
    @given(requests(), SEEDS)
    def check(lengths: list[tuple[int, int]], seed: int) -> None:
        batch = Batch.draw(spec, lengths, seed)
        batch.run(planned(spec))
        compare(batch)

    check()


@pytest.mark.parametrize("name", ["plain", "40:8, page 16", "fp8 keys", "fp8 out", "window"])
@pytest.mark.parametrize("mean", [0.0, 0.5])
def test_long_requests(name: str, mean: float) -> None:
    batch = Batch.draw(SPECS[name], [(2047, 2047), (513, 4097)], 3, mean)
    batch.run(planned(SPECS[name]))
    compare(batch)


def test_pp_11_packed_padded_and_alone_give_the_same_bits() -> None:
    lengths = [(300, 300), (1, 500), (0, 40), (129, 200), (64, 64)]
    packed = Batch.draw(SPECS["plain"], lengths, 5)
    padded = Batch.of(SPECS["padded"], packed.q, packed.k, packed.v)
    paged = Batch.of(replace(SPECS["plain"], page=16), packed.q, packed.k, packed.v)
    for batch in (packed, padded, paged):
        batch.run(planned(batch.spec))
    torch.cuda.synchronize()
    for i in range(len(lengths)):
        alone = Batch.of(
            SPECS["plain"], packed.q[i : i + 1], packed.k[i : i + 1], packed.v[i : i + 1]
        )
        alone.run(planned(alone.spec))
        torch.cuda.synchronize()
        for other in (packed, padded, paged):
            assert torch.equal(other.outputs()[i], alone.outputs()[0])
            assert torch.equal(other.lses()[i], alone.lses()[0])


@settings(max_examples=5)
@given(requests(), SEEDS, st.randoms(use_true_random=False))
def test_permuting_requests_permutes_outputs(
    lengths: list[tuple[int, int]], seed: int, random: object
) -> None:
    spec = SPECS["40:8, page 16"]
    batch = Batch.draw(spec, lengths, seed)
    order = list(range(len(lengths)))
    random.shuffle(order)  # type: ignore[attr-defined]
    other = Batch.of(
        spec,
        [batch.q[i] for i in order],
        [batch.k[i] for i in order],
        [batch.v[i] for i in order],
        seed + 1,
    )
    batch.run(planned(spec))
    other.run(planned(spec))
    torch.cuda.synchronize()
    for place, i in enumerate(order):
        assert torch.equal(other.outputs()[place], batch.outputs()[i])


@pytest.mark.parametrize("cut", [1, 100, 128, 255])
def test_kv_18_chunking_a_prompt_changes_nothing_beyond_rounding(cut: int) -> None:
    spec = SPECS["plain"]
    whole = Batch.draw(spec, [(256, 256)], 11)
    q, k, v = whole.q[0], whole.k[0], whole.v[0]
    parts = Batch.of(spec, [q[:cut], q[cut:]], [k[:cut], k], [v[:cut], v])
    whole.run(planned(spec))
    parts.run(planned(spec))
    torch.cuda.synchronize()
    joined = torch.cat(parts.outputs()).double()
    wanted = whole.outputs()[0].double()
    assert (joined - wanted).norm() <= 4e-3 * wanted.norm()


def test_a_query_of_nan_stays_alone() -> None:
    spec = SPECS["plain"]
    batch = Batch.draw(spec, [(200, 300)], 2)
    clean = Batch.of(spec, batch.q, batch.k, batch.v)
    batch.tensors[0][77, 5] = float("nan")
    for some in (batch, clean):
        some.run(planned(spec))
    torch.cuda.synchronize()
    found, wanted = batch.outputs()[0].clone(), clean.outputs()[0]
    assert found[77, 5].isnan().all()
    found[77, 5] = wanted[77, 5]
    assert torch.equal(found, wanted)


def test_cg_04_a_graph_follows_lengths_and_pages() -> None:
    """Captured once; lengths, starts and page tables change between replays."""
    spec = SPECS["40:8, page 16"]
    first = Batch.draw(spec, [(40, 200), (100, 100)], 1)
    plan = planned(spec)
    first.run(plan)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        first.run(plan)
    graph.replay()
    torch.cuda.synchronize()
    compare(first)
    # The same rows as one request of 140 behind 60 cached tokens, in the same memory.
    first.operands["q_starts"].copy_(starts([140, 0]))
    first.operands["kv_lengths"].copy_(ints([200, 0]))
    graph.replay()
    torch.cuda.synchronize()
    q = torch.cat(first.q)
    other = Batch.of(spec, [q], [first.k[0]], [first.v[0]])
    other.run(plan)
    torch.cuda.synchronize()
    assert torch.equal(first.out.tensor, other.out.tensor)


def test_kv_14_pages_behind_two_to_the_31() -> None:
    spec = replace(SPECS["40:8, page 16"], page=128, heads=8, kv_heads=8)
    elements = 128 * 8 * 128
    pages = 2**31 // elements + 5
    pool = torch.empty(pages, 128, 8, 128, dtype=torch.bfloat16, device=DEVICE)
    pool[-3:].normal_()
    q = torch.randn(100, 8, 128, dtype=torch.bfloat16, device=DEVICE)
    k = torch.cat([pool[-2], pool[-3, :50]])
    wanted = Batch.of(replace(spec, page=None), [q], [k], [k])
    wanted.run(planned(wanted.spec))
    out, lse = torch.empty_like(q), torch.empty(8, 100, device=DEVICE)
    planned(spec).run(
        q,
        pool,
        pool,
        out=out,
        lse=lse,
        q_starts=starts([100]),
        kv_lengths=ints([178]),
        page_table=ints([pages - 2, pages - 3])[None],
    )
    torch.cuda.synchronize()
    assert torch.equal(out, wanted.outputs()[0])


def test_amax_and_counters_of_a_float8_output() -> None:
    spec = SPECS["fp8 out"]
    plain = replace(spec, out_dtype=torch.bfloat16)
    batch = Batch.draw(spec, [(200, 300), (0, 5), (70, 70)], 9)
    batch.operands["out_scale"].fill_(1e-3)
    precise = Batch.of(plain, batch.q, batch.k, batch.v)
    batch.run(planned(spec))
    precise.run(planned(plain))
    torch.cuda.synchronize()
    x = torch.cat(precise.outputs()).float().abs()
    amax = float(batch.operands["amax"])
    assert abs(amax - float(x.max())) <= 2**-8 * amax
    saturated = int(batch.operands["saturated"])
    assert int((x > 0.448 * 1.01).sum()) <= saturated <= int((x > 0.448 * 0.99).sum())
    assert saturated > 0
    assert int(batch.operands["nans"]) == 0
    codes = torch.cat(batch.outputs()).float()
    assert codes.abs().max() == 448


def test_pp_01_pp_03_many_requests_and_none() -> None:
    spec = SPECS["plain"]
    lengths = [(3, 3)] * 50 + [(0, 0)] * 40 + [(130, 300)] + [(1, 40)] * 30
    batch = Batch.draw(spec, lengths, 21)
    batch.run(planned(spec))
    compare(batch)
    empty = Batch.draw(spec, [(0, 10), (0, 0)], 1)
    empty.run(planned(spec))
    torch.cuda.synchronize()
    empty.out.assert_intact()


@pytest.mark.parametrize("name", ["plain", "padded"])
@pytest.mark.parametrize("size", [1, 2_000_000])
def test_the_order_of_work_changes_no_bit(
    name: str, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sections of one KV head, and of some, instead of all in one."""
    spec = SPECS[name]
    batch = Batch.draw(spec, [(300, 300), (0, 7), (129, 500), (1000, 1000)], 3)
    other = Batch.of(spec, batch.q, batch.k, batch.v)
    batch.run(planned(spec))
    compare(batch)
    monkeypatch.setattr("epicute.attention.plan.SECTION_BYTES", size)
    other.run(planned(spec))
    torch.cuda.synchronize()
    for found, wanted in zip(other.outputs(), batch.outputs(), strict=True):
        assert torch.equal(found, wanted)


def test_ten_thousand_launches_are_bit_identical() -> None:
    spec = SPECS["40:8, page 16"]
    batch = Batch.draw(spec, [(40, 200), (100, 100), (1, 700)], 1)
    plan = planned(spec)
    batch.run(plan)
    torch.cuda.synchronize()
    wanted = batch.out.tensor.clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(100):
            batch.run(plan)
    for _ in range(100):
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(batch.out.tensor, wanted)
