"""Row-wise quantisation on the device: ``quantize_rows``' bits, graphs, far rows."""

from __future__ import annotations

import functools

import pytest
import torch

from epicute.errors import ArgumentError
from epicute.quant import quantize_rows
from epicute.quant.rowwise import RowsPlan, plan_rows
from epicute.testing import assert_equal_bits
from epicute.testing.poison import assert_fully_written, assert_guards_intact, guarded
from tests.quant.rows import DTYPES, FP8, codes_of, outputs, wild

pytestmark = pytest.mark.gpu

ROWS = (0, 1, 2, 17, 1000)
COLUMNS = (1, 7, 8, 64, 576, 577, 2048, 2056, 4096, 4100, 14336, 16384, 53248, 65536)
SLOW_CYCLES = 200_000_000


@functools.cache
def planned(
    columns: int, dtype: torch.dtype = torch.bfloat16, eps: float | None = None
) -> RowsPlan:
    return plan_rows(columns, dtype, eps=eps)


def aligned(x: torch.Tensor) -> torch.Tensor:
    """On the device, in rows of whole 16 bytes that NaN follow."""
    rows, columns = x.shape
    pitch = -(-columns // 8) * 8 + 8
    found = torch.full((rows, pitch), torch.nan, dtype=x.dtype, device="cuda")[:, :columns]
    return found.copy_(x)


@pytest.mark.parametrize("columns", COLUMNS)
@pytest.mark.parametrize("dtype", DTYPES, ids=["bf16", "fp16"])
def test_the_contracts_bits(columns: int, dtype: torch.dtype) -> None:
    for rows in ROWS if columns <= 4100 else ROWS[:-1]:
        x = wild(rows, columns, dtype, rows)
        codes = guarded((rows, columns), FP8, (-(-columns // 8) * 8 + 8, 1), "cuda", name="codes")
        scale = guarded((rows,), torch.float32, device="cuda", name="scale")
        planned(columns, dtype).run(aligned(x), codes.tensor, scale.tensor)
        wanted, wanted_scale = quantize_rows(x)
        assert_equal_bits(codes_of(codes.tensor), codes_of(wanted))
        assert_equal_bits(scale.tensor, wanted_scale)
        assert_guards_intact(codes, scale)
        assert_fully_written(scale)


@pytest.mark.parametrize("columns", [8, 577, 4096, 16384])
def test_the_row_factors_bits(columns: int) -> None:
    for rows in ROWS:
        x = wild(rows, columns, torch.bfloat16, rows)
        sumsq = torch.rand(rows, -(-columns // 64)) * 64
        (codes, scale), (wanted, wanted_scale) = (
            outputs(rows, columns, "cuda"),
            outputs(rows, columns),
        )
        planned(columns, eps=1e-5).run(aligned(x), codes, scale, sumsq.cuda())
        plan_rows(columns, eps=1e-5, device="cpu").run(x, wanted, wanted_scale, sumsq)
        assert_equal_bits(codes_of(codes), codes_of(wanted))
        assert_equal_bits(scale, wanted_scale)


@pytest.mark.parametrize("columns", [576, 8192])
def test_ge_18_rows_beyond_two_to_the_31_elements(columns: int) -> None:
    rows = 2**31 // columns + 3
    x = torch.zeros(rows, columns, dtype=torch.bfloat16, device="cuda")
    last = wild(6, columns, torch.bfloat16)
    x[-6:] = last.cuda()
    codes, scale = outputs(rows, columns, "cuda")
    planned(columns).run(x, codes, scale)
    wanted, wanted_scale = quantize_rows(last)
    assert_equal_bits(codes_of(codes[-6:]), codes_of(wanted))
    assert_equal_bits(scale[-6:], wanted_scale)
    assert bool((scale[:-6] == 1).all())


@pytest.mark.parametrize("columns", [576, 4096])
def test_graphs_and_streams(columns: int) -> None:
    plan = plan_rows(columns)
    x, (codes, scale) = aligned(wild(17, columns, torch.bfloat16)), outputs(17, columns, "cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):  # the plan's first launch
        plan.run(x, codes, scale)
    for seed in (1, 2):
        fresh = wild(17, columns, torch.bfloat16, seed)
        x.copy_(fresh)
        graph.replay()
        wanted, wanted_scale = quantize_rows(fresh)
        assert_equal_bits(codes_of(codes), codes_of(wanted))
        assert_equal_bits(scale, wanted_scale)
    fresh = wild(17, columns, torch.bfloat16, 3).cuda()
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        torch.cuda._sleep(SLOW_CYCLES)
        x.copy_(fresh)
        plan.run(x, codes, scale)
    side.synchronize()
    assert_equal_bits(codes_of(codes), codes_of(quantize_rows(fresh)[0]))


def test_nothing_is_allocated_and_nobody_waits() -> None:
    x, (codes, scale) = aligned(wild(17, 576, torch.bfloat16)), outputs(17, 576, "cuda")
    plan = planned(576)
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    torch.cuda.set_sync_debug_mode("error")
    try:
        plan.run(x, codes, scale)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before


def test_memory_that_no_vector_can_read_is_refused() -> None:
    x = torch.zeros(4, 584, dtype=torch.bfloat16, device="cuda")
    codes, scale = outputs(4, 577, "cuda")
    plan = planned(577)
    plan.run(x[:, :577], codes, scale)
    for bad in (x.view(-1)[1:].as_strided((3, 577), (584, 1)), x.as_strided((4, 577), (577, 1))):
        out, scales = outputs(len(bad), 577, "cuda")
        with pytest.raises(ArgumentError, match="x: .*16 bytes"):
            plan.run(bad, out, scales)
    with pytest.raises(ArgumentError, match="codes: .*8 bytes"):
        plan.run(x[:, :577], torch.zeros(4, 577, dtype=torch.uint8, device="cuda").view(FP8), scale)
    with pytest.raises(ArgumentError, match="x: .*adjacent"):
        plan_rows(4).run(x[:, :8:2], *outputs(4, 4, "cuda"))
    with pytest.raises(ArgumentError, match="codes: .*on cpu"):
        plan.run(x[:, :577], outputs(4, 577)[0], scale)


def test_ge_14_launches_that_depend_on_each_other() -> None:
    """Each reads what the last has written; nothing between them."""
    plan = planned(4096)
    x = torch.zeros(64, 4096, dtype=torch.bfloat16, device="cuda")
    kept = []
    source = wild(64, 4096, torch.bfloat16)
    variants = [(source * 2.0**i).bfloat16() for i in range(8)]
    given = [v.cuda() for v in variants]
    torch.cuda.synchronize()
    for i in range(200):
        x.copy_(given[i % 8])
        codes, scale = outputs(64, 4096, "cuda")
        plan.run(x, codes, scale)
        kept.append((codes, scale))
    for i, (codes, scale) in enumerate(kept):
        wanted, wanted_scale = quantize_rows(variants[i % 8])
        assert_equal_bits(scale, wanted_scale)
        assert_equal_bits(codes_of(codes), codes_of(wanted))
