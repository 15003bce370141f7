"""Mixed-precision kernels run from their PTX on the CPU: whole clusters, with TMA, barriers and matrix products.

Matrix products are exact here, so that what FP8 accumulators lose is not seen; all else of the contract is. One test
cuts as they do: what they lose of ΔS.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from epicute.attention.mixed import MixedSpec
from tests.attention.mixed_cases import MixedBatch
from tests.attention.mixed_emulated import emulate
from tests.gemm.device import Output
from tests.ptx.matrix import cutting

pytestmark = pytest.mark.compile

NORM, ROW, LSE = 2.5e-3, 5e-3, 1e-4
"""Budgets of a bfloat16 output against the algorithm in float64, of all rows and of the worst, and of the LSE."""


@dataclass(frozen=True)
class Case:
    """A spec and requests, small enough for some 10^5 instructions of warps."""

    spec: MixedSpec
    lengths: tuple[tuple[int, int], ...]
    seed: int = 1
    options: dict[str, Any] = field(default_factory=dict)


def spec(**fields: Any) -> MixedSpec:
    return MixedSpec(
        **{"heads": 4, "kv_heads": 2, "head_dim": 64, "page": 32, "lse": True} | fields
    )


RACES = {"races": True, "seed": 5}

CASES = {
    "exact16, static means": Case(spec(terms=2), ((130, 300),), 2, RACES),
    "exact16, means of each request": Case(spec(terms=1), ((3, 40), (0, 7), (20, 150)), 3),
    "exact16, mma": Case(spec(terms=3, placement="mma"), ((20, 257),)),
    "exact16, all keys, none of them": Case(
        spec(causal=False, softcap=5.0, sinks=True, p_scale=256, page=64, packed=False),
        ((65, 200), (7, 0)),
    ),
    "exact16, heads of 128": Case(spec(head_dim=128, page=128, terms=2), ((65, 300),), 1, RACES),
    "fast8": Case(spec(qk="fast8", terms=2), ((3, 5), (70, 200)), 1, RACES),
    "fast8, heads of 128, no pairs": Case(
        spec(heads=3, kv_heads=3, head_dim=128, page=64, qk="fast8"), ((33, 300),)
    ),
    "fast8, mma, direct": Case(
        spec(qk="fast8", pv="direct", page=64, terms=1, placement="mma"), ((20, 257),)
    ),
    "fast8, elementwise, window": Case(
        spec(
            qk="fast8",
            softcap=5.0,
            sinks=True,
            window=50,
            page=64,
            terms=2,
            placement="elementwise",
        ),
        ((65, 200), (7, 3)),
    ),
    "fp8, pages of 16": Case(
        spec(precision="fp8/fp8", page=16, heads=6), ((20, 257), (0, 4), (130, 131)), 1, RACES
    ),
    "fp8, padded, window, fp16": Case(
        spec(
            precision="fp8/fp8",
            page=None,
            packed=False,
            window=100,
            sinks=True,
            dtype=torch.float16,
        ),
        ((20, 257), (1, 1)),
    ),
    "fp8, heads of 128, direct": Case(
        spec(head_dim=128, page=None, precision="fp8/fp8", pv="direct"), ((65, 300),)
    ),
}


def compare(batch: MixedBatch, out: Output, lse: Output | None) -> None:
    """A result against the algorithm in float64, and its LSE against the reference too."""
    assert lse is not None
    out.assert_intact()
    lse.assert_intact()
    for i, (queries, keys) in enumerate(batch.lengths):
        if queries == 0:
            continue
        wanted, sums = batch.modelled(i)
        exact, _ = batch.wanted(i)
        found = batch.parts(out.tensor, 0)[i].double()
        got = batch.parts(lse.tensor, 1)[i].double()
        assert found.isfinite().all(), (queries, keys)
        error = (found - wanted).flatten(1).norm(dim=1)
        size = wanted.flatten(1).norm(dim=1)
        assert error.norm() <= NORM * size.norm(), (queries, keys)
        assert (error <= ROW * size + 1e-30).all(), (queries, keys)
        # E4M3 keeps probabilities to 1/16 of each: a row of few keys shows it.
        assert (wanted - exact).norm() <= 4e-2 * exact.norm() + 1e-30
        finite = sums.isfinite()
        assert (got[~finite] == sums[~finite]).all()
        assert ((got - sums)[finite].abs() <= LSE).all(), (queries, keys)


@pytest.mark.parametrize("name", CASES)
def test_qk_08_kd_08_kd_10_kernels_against_their_algorithm(name: str) -> None:
    case = CASES[name]
    batch = MixedBatch.draw(case.spec, list(case.lengths), case.seed, mean=0.5, device="cpu")
    compare(batch, *emulate(batch, **case.options))


def test_qk_11_inputs_stay_and_several_clusters_share_the_work() -> None:
    case = CASES["exact16, means of each request"]
    batch = MixedBatch.draw(case.spec, list(case.lengths), case.seed, device="cpu")
    before = [x.clone() for x in (*batch.memory, *batch.operands.values())]
    compare(batch, *emulate(batch, clusters=3, seed=9))
    for x, y in zip((*batch.memory, *batch.operands.values()), before, strict=True):
        assert torch.equal(x.view(torch.uint8), y.view(torch.uint8))


def test_a_shift_of_fast8_keys_cancels_but_for_their_rounding() -> None:
    batch = MixedBatch.draw(spec(qk="fast8", terms=2), [(20, 60)], 1, device="cpu")
    batch.shift = 3
    compare(batch, *emulate(batch))
    batch.shift = -2
    compare(batch, *emulate(batch))


@pytest.mark.parametrize("placement", ["acc_init", "mma", "elementwise"])
def test_fp8_accumulators_cut_a_loud_delta_unless_it_is_added_outside(placement: str) -> None:
    given = spec(qk="fast8", terms=2, placement=placement)
    batch = MixedBatch.draw(given, [(4, 40)], 2, outlier=30.0, device="cpu")
    with cutting():
        _, lse = emulate(batch)
    assert lse is not None
    _, sums = batch.modelled(0)
    error = (batch.parts(lse.tensor, 1)[0].double() - sums).abs()
    cut, products = batch.cut_lse(0, sums), 1e-3
    assert (error <= products + cut).all()
    if placement == "elementwise":
        assert (cut == 0).all()
    else:
        # ΔS's own share is seen: beyond exact products (LSE), and beyond those that are cut without it.
        assert error.max() > max(LSE, products)


def test_qk_02_qk_03_zero_keys_and_values_give_zeros() -> None:
    batch = MixedBatch.draw(spec(), [(9, 40)], 1, device="cpu")
    batch.k[0].zero_()
    batch.v[0][..., 7] = 0.0
    batch._place(torch.Generator().manual_seed(3))
    out, lse = emulate(batch)
    compare(batch, out, lse)
    assert (batch.parts(out.tensor, 0)[0][..., 7] == 0).all()
