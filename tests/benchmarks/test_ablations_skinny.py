"""The skinny BF16 projection: its PTX on the CPU against float64, and what it refuses."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.ablations.skinny import BUCKETS, SkinnyKernel, plan_skinny
from epicute.errors import ArgumentError
from epicute.jit import DEFAULT_TARGET, compile
from epicute.models.shapes import SHAPES, projections
from tests.gemm.device import Output
from tests.ptx import Emulated

BF16 = torch.bfloat16
N, K = 48, 1024


@cache
def emulated(rows: int) -> Emulated:
    return Emulated(SkinnyKernel(N, K, rows, DEFAULT_TARGET))


def operands(m: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, Output]:
    torch.manual_seed(seed)
    x, weight = torch.randn(m, K).to(BF16), torch.randn(N, K).to(BF16)
    return x, weight, Output((m, N), BF16)


@pytest.mark.compile
@pytest.mark.parametrize(("rows", "m"), [(8, 1), (8, 8), (16, 11), (32, 32)])
def test_a_product_in_float64(rows: int, m: int) -> None:
    """Each row within a rounding to BF16; nothing beside the result is written."""
    x, weight, out = operands(m)
    given = plan_skinny(N, K, m, device="cpu").bind(x, weight, out.tensor)
    emulated(rows).launch(given, x, weight, out.tensor, races=True, seed=m)
    out.assert_intact()
    exact = x.double() @ weight.double().T
    assert ((out.tensor.double() - exact).abs() <= exact.abs() * 2**-8 + 1e-3).all()


@pytest.mark.compile
def test_small_integers_are_exact_to_the_bit() -> None:
    torch.manual_seed(1)
    x = torch.randint(-1, 2, (5, K)).to(BF16)
    weight = torch.zeros(N, K, dtype=BF16)
    for row in range(N):
        weight[row, torch.randperm(K)[:100]] = 1.0
    out = Output((5, N), BF16)
    given = plan_skinny(N, K, 5, device="cpu").bind(x, weight, out.tensor)
    emulated(8).launch(given, x, weight, out.tensor)
    assert torch.equal(out.tensor.double(), x.double() @ weight.double().T)


@pytest.mark.compile
def test_a_launch_for_no_row_touches_nothing() -> None:
    emulated(8).launch((0, 0, 0, 0, 1))


@given(st.integers(0, 8), st.integers(0, 2**16))
def test_on_the_cpu_it_is_the_product(m: int, seed: int) -> None:
    x, weight, out = operands(m, seed)
    plan_skinny(N, K, 8, device="cpu").run(x, weight, out=out.tensor)
    assert torch.equal(out.tensor, (x.double() @ weight.double().T).to(BF16))


@pytest.mark.parametrize("shape", ["8B", "70B"])
def test_the_table_s_projections_have_kernels(shape: str) -> None:
    found = [
        SkinnyKernel(n, k, rows, DEFAULT_TARGET)
        for n, k in projections(SHAPES[shape]).values()
        for rows in BUCKETS
    ]
    assert len({kernel.key.digest for kernel in found}) == len(found)


@pytest.mark.compile
@pytest.mark.parametrize("rows", BUCKETS)
def test_it_compiles_to_code_that_may_run(rows: int) -> None:
    thing = SkinnyKernel(4096, 4096, rows, DEFAULT_TARGET)
    compile(thing).report.check("skinny", DEFAULT_TARGET.smem_per_block)


@pytest.mark.parametrize(
    ("sizes", "name"),
    [((40, K, 8), "columns"), ((48, 512, 8), "depth"), ((48, K, 33), "rows"), ((48, K, 0), "rows")],
)
def test_sizes_that_it_does_not_cover_are_refused(sizes: tuple[int, int, int], name: str) -> None:
    with pytest.raises(ArgumentError, match=name):
        plan_skinny(*sizes, device="cpu")


def test_operands_that_do_not_fit_are_refused() -> None:
    plan = plan_skinny(N, K, 8, device="cpu")
    x, weight, out = operands(8)
    wide = torch.zeros(9, K, dtype=BF16)
    for bad, name in (
        ((wide, weight, out.tensor), "x"),
        ((x, weight[:, : K // 2], out.tensor), "weight"),
        ((x, weight.float(), out.tensor), "weight"),
        ((x, weight.T.contiguous().T, out.tensor), "weight"),
        ((x, weight, out.tensor[:7]), "out"),
    ):
        with pytest.raises(ArgumentError, match=name):
            plan.bind(*bad)
