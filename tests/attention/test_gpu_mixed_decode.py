"""The QK4PV8 decode kernel on the device, against float64 on the same codes, and the laws that need no reference."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from epicute.attention.mixed_decode import MixedDecodePlan, plan_mixed_decode
from epicute.kv.qk4pv8 import Memory
from epicute.kv.qk4pv8_write import plan_cache_write
from epicute.quant.smoothing import Means, lse_shift
from epicute.testing import inputs_unchanged
from tests.attention.mixed_decode_cases import CASES, Batch, Case, check

pytestmark = pytest.mark.gpu

SEEDS = st.integers(0, 2**31)


@cache
def planned(case: Case) -> MixedDecodePlan:
    """One plan for every pool of the case's shape: its pages are looked at by ``run`` alone."""
    return plan_mixed_decode(
        case.cache(), case.dtype, append=case.append, lse=True, p_scale=case.p_scale
    )


def run(batch: Batch) -> None:
    plan = planned(batch.case)
    own = MixedDecodePlan(batch.cache, plan.kernel)
    batch.run(own)
    torch.cuda.synchronize()


@pytest.mark.parametrize("name", CASES)
def test_kd_01_kd_04_kd_08_kd_11_qk_08_attention_of_the_codes(name: str) -> None:
    case = CASES[name]

    @settings(max_examples=5)
    @given(st.lists(st.integers(0, 3000), min_size=1, max_size=9), SEEDS)
    def once(lengths: list[int], seed: int) -> None:
        batch = Batch.draw(case, lengths, seed, "cuda")
        run(batch)
        check(batch, planned(case).kernel)

    once()


def test_new_values_are_entered_where_others_are_cleared() -> None:
    """Lengths that end in an odd sixteen of a tile's tokens, where other warps clear what is behind the end."""
    case = CASES["12:1 of 64 channels"]
    batch = Batch.draw(case, [255, 31, 60, 700, 2999], 3, "cuda")
    for _ in range(100):
        run(batch)
        assert batch.out.isfinite().all()
    check(batch, planned(case).kernel)


@pytest.mark.parametrize("group", [1, 3, 5, 7, 12, 16, 24])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_kd_08_any_ratio(group: int, head_dim: int) -> None:
    case = Case(group=group, head_dim=head_dim, page=64)
    batch = Batch.draw(case, [517, 128, 33], group, "cuda")
    run(batch)
    check(batch, planned(case).kernel)


def test_kd_03_token_by_token() -> None:
    case = CASES["plain"]
    whole = Batch.draw(case, [400], 1, "cuda")
    for n in (1, 2, 15, 16, 17, 63, 64, 65, 127, 128, 129, 255, 256, 257, 399, 400):
        batch = Batch.of(case, whole.q, [whole.keys[0][:n]], [whole.values[0][:n]], whole.means, n)
        run(batch)
        check(batch, planned(case).kernel)


def test_kd_05_each_request_has_its_own_values() -> None:
    case = replace(CASES["plain"], terms=0)
    batch = Batch.draw(case, [300, 40, 1000, 129], 2, "cuda")
    values = [torch.full_like(v, i + 1) for i, v in enumerate(batch.values)]
    batch = Batch.of(case, batch.q, batch.keys, values, None)
    run(batch)
    for i in range(4):
        # Sums of rounded probabilities, over sums of those before rounding.
        assert ((batch.out[i].float() - (i + 1)).abs() <= 0.03 * (i + 1)).all()


@pytest.mark.parametrize("n", [1, 15, 16, 17, 255, 256, 257, 1000])
def test_kd_02_without_queries_the_mean_of_values(n: int) -> None:
    case = replace(CASES["plain"], terms=0)
    batch = Batch.draw(case, [n], n, "cuda")
    batch.q.zero_()
    run(batch)
    mean = batch.scores(0)[1].mean(dim=1)
    assert ((batch.out[0].double() - mean).abs() <= 2.0**-8 * mean.abs() + 1e-3).all()


@pytest.mark.parametrize(
    ("n", "copies", "replays"), [(700, 2, 1), (16384, 16, 300), (32768, 8, 300), (131072, 3, 200)]
)
def test_cold_pages_come_in_any_order(n: int, copies: int, replays: int) -> None:
    """Copies of a cache in turn, whose pages neither L2 nor a TLB holds, each behind a kernel that is still at work."""
    case = Case(kv_heads=8, terms=0)
    batch = Batch.draw(case, [n], 5, "cuda")
    plan = MixedDecodePlan(batch.cache, planned(case).kernel)
    memories = [Memory(batch.memory.records.clone(), None) for _ in range(copies)]
    outs = [torch.full_like(batch.out, math.nan) for _ in memories]
    workspace = plan.workspace(1, batch.q.device)

    def every() -> None:
        for memory, out in zip(memories, outs, strict=True):
            plan.run(
                batch.q,
                memory,
                out=out,
                workspace=workspace,
                kv_lengths=batch.lengths,
                page_table=batch.table,
                **batch.operands(),
            )

    batch.run(plan)
    every()
    torch.cuda.synchronize()
    check(batch, plan.kernel)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        every()
    for _ in range(replays):
        for out in outs:
            out.fill_(math.nan)
        graph.replay()
        wrong = [i for i, out in enumerate(outs) if not torch.equal(out, batch.out)]
        assert wrong == []


@pytest.mark.parametrize("n", [32768, 131072])
def test_kd_16_long_contexts_stay_within_a_thousandth(n: int) -> None:
    """Two-level sums of values with a mean of half their spread; direct ones are off by 15 and 37 %."""
    case = Case(kv_heads=1, group=4, terms=0, append=False)
    batch = Batch.draw(case, [n], 3, "cuda", mean=0.5)
    batch.q.mul_(0.2)
    run(batch)
    modelled = batch.modelled(0, planned(case).kernel)
    out = batch.out[0].double()
    # A bfloat16 output is off by 1.7e-3 by itself: the bias shows in projections onto what was expected.
    bias = (out * modelled).sum() / modelled.square().sum() - 1
    assert bias.abs() <= 1e-3
    assert (out - modelled).norm() <= 4e-3 * modelled.norm()


def test_kd_16_one_large_value_among_many() -> None:
    case = Case(kv_heads=1, group=1, terms=0, append=False)
    n = 131072
    batch = Batch.draw(case, [n], 4, "cuda")
    values = [torch.full_like(batch.values[0], 0.5)]
    values[0][7] = 448.0
    batch = Batch.of(case, torch.zeros_like(batch.q), batch.keys, values, None)
    run(batch)
    wanted = 0.5 + 447.5 / n
    assert ((batch.out[0].float() - wanted).abs() <= 2e-3 * wanted).all()


def test_qk_09_beyond_160k_tokens() -> None:
    case = Case(kv_heads=1, group=8, terms=0, append=False)
    n = 196608
    batch = Batch.draw(case, [n], 5, "cuda", mean=0.0)
    values = batch.values[0].clone()
    values[:, 0, 0] = torch.arange(n, device="cuda") / n
    batch = Batch.of(case, torch.zeros_like(batch.q), batch.keys, [values], None)
    run(batch)
    mean = batch.scores(0)[1].mean(dim=1)
    assert ((batch.out[0].double() - mean).abs() <= 2.0**-8 * mean.abs() + 1e-3).all()


@settings(max_examples=5)
@given(st.lists(st.integers(1, 4000), min_size=2, max_size=33), SEEDS)
def test_kd_17_bits_do_not_depend_on_batch_mates(lengths: list[int], seed: int) -> None:
    case = CASES["plain"]
    batch = Batch.draw(case, lengths, seed, "cuda")
    run(batch)
    for i in (0, len(lengths) - 1):
        own = slice(i, i + 1)
        alone = Batch.of(case, batch.q[own], batch.keys[own], batch.values[own], batch.means, 7)
        run(alone)
        assert torch.equal(alone.out, batch.out[own])
        assert torch.equal(alone.lse, batch.lse[own])


def test_100_runs_have_the_same_bits() -> None:
    batch = Batch.draw(CASES["plain"], [5000, 3, 129, 2048], 6, "cuda")
    plan = MixedDecodePlan(batch.cache, planned(batch.case).kernel)
    batch.run(plan)
    first = batch.out.clone()
    for _ in range(100):
        batch.out.fill_(math.nan)
        batch.run(plan)
        assert torch.equal(batch.out, first)


def test_a_captured_step_serves_other_lengths() -> None:
    case = CASES["plain"]
    batch = Batch.draw(case, [3000, 700], 8, "cuda")
    plan = MixedDecodePlan(batch.cache, planned(case).kernel)
    workspace = plan.workspace(2)
    lengths = batch.lengths.clone()

    def step() -> None:
        plan.run(
            batch.q,
            batch.memory,
            out=batch.out,
            workspace=workspace,
            kv_lengths=batch.lengths,
            page_table=batch.table,
            **batch.operands(),
        )

    batch.lengths.copy_(torch.tensor([1, 2]))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    batch.lengths.copy_(lengths)
    graph.replay()
    torch.cuda.synchronize()
    check(batch, plan.kernel)


def test_the_new_rows_bytes_are_the_writers() -> None:
    """But ΔS, whose terms the writer adds in another order: within the contract's 1e-6 of the sum of magnitudes."""
    for name in ("plain", "40:8, hi and lo, page 64", "64 channels, scaled"):
        case = CASES[name]
        batch = Batch.draw(case, [200, 1, 128], 9, "cuda")
        run(batch)
        other = batch.cache.allocate("cuda")
        slots = torch.stack([batch.slots(i)[-1] for i in range(3)])
        writer = plan_cache_write(batch.cache, case.dtype, counted=False)
        rows = batch.newest()
        writer.run(other, rows["new_k"], rows["new_v"], means=batch.means, slots=slots)
        mine, theirs = batch.cache.fetch(batch.memory, slots), batch.cache.fetch(other, slots)
        for a, b in zip(mine[:3], theirs[:3], strict=True):
            assert torch.equal(a.view(torch.uint8), b.view(torch.uint8))
        if mine.delta is None:
            assert theirs.delta is None
            continue
        assert theirs.delta is not None
        assert batch.means is not None
        q, k = batch.means.q.double(), batch.means.k.double()
        centred = (rows["new_k"].double() - k).abs().repeat_interleave(case.group, 1)
        limit = 1e-6 * (centred * q.abs()).sum(-1)
        one, two = (x.delta.double().sum(-1) for x in (mine, theirs))  # type: ignore[union-attr]
        found = (one - two).abs()
        limit = limit + 2.0 ** (-8 * mine.delta.shape[-1]) * two.abs()  # the last bit of the terms
        assert (found <= limit).all()


def test_qk_02_channels_of_zeros_are_zeros() -> None:
    case = CASES["plain"]
    batch = Batch.draw(case, [300], 10, "cuda")
    values = [batch.values[0].clone()]
    values[0][:, 0, 7] = 0
    other = Batch.of(case, batch.q, batch.keys, values, batch.means)
    run(batch)
    run(other)
    assert (other.out[0, : case.group, 7] == 0).all()
    kept = [c for c in range(case.head_dim) if c != 7]
    assert torch.equal(other.out[..., kept], batch.out[..., kept])


def test_qk_06_halves_of_keys_under_their_own_means_merge_by_lse() -> None:
    case = replace(CASES["plain"], terms=2, append=False)
    batch = Batch.draw(case, [512], 11, "cuda")
    keys, values, q = batch.keys[0].float() + 3, batch.values[0], batch.q
    outs, lses, logits, codes = [], [], [], []
    for part in (slice(0, 256), slice(256, 512)):
        some = keys[part].bfloat16()
        assert batch.means is not None
        means = Means("static", batch.means.q, some.float().mean(0)[None])
        half = Batch.of(case, q, [some], [values[part]], means)
        run(half)
        shift = lse_shift(q, means.k, case.spec.scale)[0].double()
        scores, weighed = half.scores(0)
        outs.append(half.out[0].double())
        lses.append(half.lse[0].double() + shift)
        logits.append(scores + shift[:, None])
        codes.append(weighed)
    weights = torch.softmax(torch.stack(lses), dim=0)
    merged = weights[0, :, None] * outs[0] + weights[1, :, None] * outs[1]
    wanted = (torch.softmax(torch.cat(logits, 1), -1)[:, None] @ torch.cat(codes, 1))[:, 0]
    assert (merged - wanted).norm() <= 4e-2 * wanted.norm()


def test_qk_11_inputs_are_left_as_they_are() -> None:
    batch = Batch.draw(CASES["plain"], [300, 4], 12, "cuda")
    means = batch.means
    assert means is not None
    rows = batch.newest()
    given = {"q": batch.q, "table": batch.table, "lengths": batch.lengths, **rows}
    with inputs_unchanged(q_mean=means.q, k_mean=means.k, **given):
        run(batch)


def test_smoothed_keys_with_an_outlier_channel() -> None:
    """A channel 30 times the others: unsmoothed keys lose it all, smoothed ones are as usual."""
    errors = {}
    for terms in (0, 2):
        case = Case(terms=terms, append=False, kv_heads=1)
        draw = torch.Generator("cuda").manual_seed(1)
        keys = torch.randn(2000, 1, 128, generator=draw, device="cuda")
        keys[..., 5] += 30
        keys = keys.bfloat16()
        values = torch.randn(2000, 1, 128, generator=draw, device="cuda").bfloat16()
        q = torch.randn(1, 4, 128, generator=draw, device="cuda").bfloat16()
        means = None
        if terms:
            means = Means("static", q.float(), keys.float().mean(0)[None])
        batch = Batch.of(case, q, [keys], [values], means)
        run(batch)
        check(batch, planned(case).kernel)
        scores = (q[0].double() @ keys[:, 0].double().T) * case.spec.scale
        wanted = torch.softmax(scores, -1) @ values[:, 0].double()
        errors[terms] = ((batch.out[0].double() - wanted).norm() / wanted.norm()).item()
    assert errors[2] <= 0.2
    assert errors[2] <= 0.5 * errors[0]
