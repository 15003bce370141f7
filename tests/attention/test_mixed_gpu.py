"""Mixed-precision kernels on the GPU against their algorithm in float64, and laws that need no reference."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from epicute.attention.mixed import MixedSpec
from epicute.attention.mixed_plan import MixedPlan, plan_mixed
from epicute.quant.smoothing import Means, lse_shift
from tests.attention.cases import requests
from tests.attention.mixed_cases import SPECS, MixedBatch
from tests.gemm.device import DEVICE

pytestmark = pytest.mark.gpu

SEEDS = st.integers(0, 2**31)


@cache
def planned(spec: MixedSpec) -> MixedPlan:
    plan = plan_mixed(spec)
    assert isinstance(plan, MixedPlan)
    return plan


def budgets(spec: MixedSpec) -> tuple[float, float, float]:
    """(norm, worst row, LSE): the contract's for exact16; FP8 accumulators cut logits too, at 2^-13 of the largest.

    Of that ΔS may be a part, and a large one on loud channels: ``cut_lse`` is what it adds to the last there.
    """
    if spec.out_is_fp8:
        return 4.5e-2, 8e-2, 3e-3
    if spec.wide:
        return (4e-3, 1e-2, 2e-4) if spec.pv == "two_level" else (1e-2, 2e-2, 2e-4)
    return 1e-2, 3e-2, 3e-3


def compare(batch: MixedBatch, loud: bool = False) -> None:
    """Run a batch and compare all of it with the algorithm in float64. ``loud``: ΔS is large in it."""
    spec = batch.spec
    outputs, lses = batch.run(planned(spec))
    norm, row, lse = budgets(spec)
    scale = 0.02 if spec.out_is_fp8 else 1.0
    for i, (queries, keys) in enumerate(batch.lengths):
        if queries == 0:
            continue
        wanted, sums = batch.modelled(i)
        found = outputs[i].double() * scale
        assert found.isfinite().all(), (i, queries, keys)
        error = (found - wanted).flatten(1).norm(dim=1)
        size = wanted.flatten(1).norm(dim=1)
        typical = size.pow(2).mean().sqrt()
        assert error.norm() <= norm * size.norm() + 1e-30, (i, queries, keys)
        assert (error <= row * torch.maximum(size, 0.3 * typical) + 1e-30).all(), (queries, keys)
        if lses:
            finite = sums.isfinite()
            assert (lses[i].double()[~finite] == sums[~finite]).all()
            near = (lses[i].double() - sums).abs() <= lse + (
                batch.cut_lse(i, sums) if loud else 0.0
            )
            assert near[finite].all(), (i, queries, keys)


@pytest.mark.parametrize("name", SPECS)
def test_pp_02_kd_08_kd_10_kernels_against_their_algorithm(name: str) -> None:
    spec = SPECS[name]

    @settings(max_examples=3)
    @given(requests(), SEEDS)
    def check(lengths: list[tuple[int, int]], seed: int) -> None:
        compare(MixedBatch.draw(spec, lengths, seed, mean=0.5))

    check()


@pytest.mark.parametrize("keys", [1, 2, 15, 16, 17, 127, 128, 129])
@pytest.mark.parametrize("name", ["exact16", "fast8", "fp8"])
def test_qk_08_short_keys(name: str, keys: int) -> None:
    compare(MixedBatch.draw(SPECS[name], [(1, keys), (keys, keys)], keys))


def long(keys: int, **fields: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """(found, wanted) of 64 queries over many keys whose values have mean 0.5, stored as float16."""
    spec = MixedSpec(2, 1, 128, page=128, dtype=torch.float16, lse=True, **fields)
    batch = MixedBatch.draw(spec, [(64, keys)], 7, mean=0.5)
    outputs, _ = batch.run(planned(spec))
    return outputs[0].double(), batch.modelled(0)[0]


@pytest.mark.parametrize("keys", [32768, 131072])
def test_kd_16_qk_09_two_level_sums_hold_over_long_contexts(keys: int) -> None:
    found, wanted = long(keys)
    assert (found - wanted).norm() <= 1e-3 * wanted.norm()


@pytest.mark.parametrize(("keys", "least", "most"), [(32768, 0.05, 0.3), (131072, 0.15, 0.6)])
def test_kd_16_what_direct_sums_cost(keys: int, least: float, most: float) -> None:
    found, wanted = long(keys, pv="direct")
    lost = 1 - float((found * wanted).sum() / wanted.square().sum())
    assert least <= lost <= most


@pytest.mark.parametrize("name", ["exact16", "fast8"])
def test_qk_09_every_tile_of_196608_keys_counts_once(name: str) -> None:
    keys = 196608
    spec = replace(SPECS[name], heads=8, kv_heads=1, terms=0, lse=True)
    batch = MixedBatch.draw(spec, [(16, keys)], 1)
    batch.q[0].zero_()
    batch.v[0].zero_()
    batch.v[0][:, 0, 0] = torch.arange(keys) / keys
    batch._place(torch.Generator().manual_seed(1))
    outputs, lses = batch.run(planned(spec))
    wanted, _ = batch.modelled(0)
    assert ((outputs[0].double() - wanted).abs() <= 4e-3).all()
    seen = torch.arange(keys - 15, keys + 1, device=DEVICE).double().log()
    assert ((lses[0].double() - seen).abs() <= 2e-4).all()


def test_placements_agree_on_a_loud_channel() -> None:
    found = {}
    for qk in ("exact16", "fast8"):
        for placement in ("acc_init", "mma", "elementwise"):
            spec = replace(SPECS["exact16"], qk=qk, placement=placement)
            batch = MixedBatch.draw(spec, [(200, 700)], 2, outlier=30.0)
            compare(batch, loud=True)
            found[qk, placement] = batch.run(planned(spec))[0][0].double()
        for placement in ("mma", "elementwise"):
            one, other = found[qk, placement], found[qk, "acc_init"]
            assert (one - other).norm() <= (4e-3 if qk == "exact16" else 1e-2) * other.norm()


@pytest.mark.parametrize("name", ["exact16", "fast8"])
def test_smoothing_recovers_loud_channels(name: str) -> None:
    errors = {}
    for terms in (0, 2):
        spec = replace(SPECS[name], terms=terms)
        batch = MixedBatch.draw(spec, [(100, 1000)], 2, outlier=12.0)
        found = batch.run(planned(spec))[0][0].double()
        wanted, _ = batch.unquantised(0)
        errors[terms] = float((found - wanted).norm() / wanted.norm())
    assert errors[2] <= 0.2
    assert errors[0] >= 2.5 * errors[2]


@pytest.mark.parametrize("name", ["exact16", "exact16, direct", "fast8", "fp8"])
def test_qk_12_every_head_points_where_it_should(name: str) -> None:
    spec = SPECS[name]
    batch = MixedBatch.draw(spec, [(130, 400), (33, 33)], 2)
    outputs, _ = batch.run(planned(spec))
    for i, found in enumerate(outputs):
        wanted, _ = batch.unquantised(i)
        found = found.double()
        cosine = (found * wanted).sum(dim=(0, 2)) / found.norm(dim=(0, 2)) / wanted.norm(dim=(0, 2))
        assert (cosine > 0.98).all()


def test_qk_06_halves_under_means_of_their_own_merge_by_lse() -> None:
    spec = replace(SPECS["exact16"], heads=8, kv_heads=2, causal=False)
    whole = MixedBatch.draw(spec, [(50, 600)], 4, outlier=3.0)
    assert whole.means is not None
    parts = []
    for i, some in enumerate((slice(300), slice(300, 600))):
        part = MixedBatch.draw(spec, [(50, 300)], 4)
        part.q, part.k, part.v = [whole.q[0]], [whole.k[0][some]], [whole.v[0][some]]
        part.means = Means("static", whole.means.q + i, whole.means.k - i)
        part.operands.clear()
        part._place(torch.Generator().manual_seed(i))
        outputs, lses = part.run(planned(spec))
        shift = lse_shift(part.q[0], part.means.k[0], spec.scale).to(DEVICE)
        parts.append((outputs[0].double(), lses[0].T.double() + shift))
    (a, lse_a), (b, lse_b) = parts
    total = torch.logaddexp(lse_a, lse_b)
    merged = a * (lse_a - total).exp()[..., None] + b * (lse_b - total).exp()[..., None]
    outputs, _ = whole.run(planned(spec))
    size = outputs[0].double().norm()
    # The codes of the halves are others: both are within the format's error of the same result.
    exact, _ = whole.unquantised(0)
    assert (merged - outputs[0].double()).norm() <= 0.2 * size
    assert (merged - exact).norm() <= 0.2 * exact.norm()


def test_qk_07_packed_sequences_keep_their_own_means() -> None:
    spec = SPECS["exact16"]
    packed = MixedBatch.draw(spec, [(130, 200), (70, 300)], 3)
    assert packed.means is not None
    assert packed.means.kind == "sequence"
    together, lses = packed.run(planned(spec))
    for i in range(2):
        alone = MixedBatch.draw(spec, [packed.lengths[i]], 3)
        alone.q, alone.k, alone.v = packed.q[i : i + 1], packed.k[i : i + 1], packed.v[i : i + 1]
        alone.means = Means("sequence", packed.means.q[i : i + 1], packed.means.k[i : i + 1])
        alone.operands.clear()
        alone._place(torch.Generator().manual_seed(i))
        outputs, sums = alone.run(planned(spec))
        assert torch.equal(outputs[0], together[i])
        assert torch.equal(sums[0], lses[i])


@pytest.mark.parametrize("name", ["exact16", "fast8", "fp8, page 16, direct"])
def test_pages_shared_by_requests_serve_both(name: str) -> None:
    """A prefix in the same pages, as static means allow: the bits of a request that has it alone."""
    spec = SPECS[name]
    page = spec.page
    assert page is not None
    batch = MixedBatch.draw(spec, [(40, 4 * page), (40, 4 * page)], 2)
    batch.q[1] = batch.q[0].clone()
    table = batch.operands["page_table"]
    table[1, :4] = table[0, :4]
    outputs, _ = batch.run(planned(spec))
    assert torch.equal(outputs[0], outputs[1])


@pytest.mark.parametrize("name", ["exact16", "fast8"])
def test_kv_18_chunks_of_a_prompt_change_roundings_alone(name: str) -> None:
    spec = SPECS[name]
    whole = MixedBatch.draw(spec, [(256, 256)], 2)
    parts = MixedBatch.draw(spec, [(100, 100), (156, 256)], 2)
    q, k, v = whole.q[0], whole.k[0], whole.v[0]
    parts.q, parts.k, parts.v = [q[:100], q[100:]], [k[:100], k], [v[:100], v]
    parts.means = whole.means
    parts.operands.clear()
    parts._place(torch.Generator().manual_seed(1))
    joined = torch.cat(parts.run(planned(spec))[0]).double()
    wanted = whole.run(planned(spec))[0][0].double()
    # Tiles of keys begin at the same places, so that probabilities are rounded under the same maxima but for masks.
    assert (joined - wanted).norm() <= 1e-2 * wanted.norm()


def test_a_query_of_nan_stays_alone() -> None:
    for name in ("exact16", "fast8"):
        spec = SPECS[name]
        clean = MixedBatch.draw(spec, [(200, 300)], 2)
        wanted = clean.run(planned(spec))[0][0]
        clean.q[0][77, 5] = float("nan")
        found = clean.run(planned(spec))[0][0].clone()
        assert found[77, 5].isnan().all()
        found[77, 5] = wanted[77, 5]
        assert torch.equal(found, wanted)


@pytest.mark.parametrize("name", ["exact16", "fast8, direct", "fp8"])
def test_cg_04_thousand_replays_are_bit_identical(name: str) -> None:
    spec = SPECS[name]
    batch = MixedBatch.draw(spec, [(40, 200), (100, 100), (1, 700)], 2)
    plan = planned(spec)
    q = batch.queries()
    out, lse = batch.results()
    assert lse is not None
    given = {**batch.operands, "out": out.tensor, "lse": lse.tensor}
    plan.run(q, *batch.memory, **given)
    torch.cuda.synchronize()
    wanted = out.tensor.clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(50):
            plan.run(q, *batch.memory, **given)
    for _ in range(20):
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(out.tensor, wanted)


@pytest.mark.parametrize("name", ["exact16", "fast8", "fp8, page 16, direct"])
def test_order_of_requests_changes_no_bit(name: str) -> None:
    spec = replace(SPECS[name], terms=0)
    lengths = [(300, 300), (1, 500), (0, 40), (129, 200), (64, 64)]
    batch = MixedBatch.draw(spec, lengths, 2)
    outputs, _ = batch.run(planned(spec))
    order = [3, 0, 4, 2, 1]
    other = MixedBatch.draw(spec, [lengths[i] for i in order], 2)
    other.q, other.k, other.v = ([x[i] for i in order] for x in (batch.q, batch.k, batch.v))
    other.k_scale, other.v_scale = batch.k_scale, batch.v_scale
    other.operands.clear()
    other._place(torch.Generator().manual_seed(5))
    other.operands |= {k: v for k, v in batch.operands.items() if k == "sinks"}
    found, _ = other.run(planned(spec))
    for place, i in enumerate(order):
        assert torch.equal(found[place], outputs[i])
