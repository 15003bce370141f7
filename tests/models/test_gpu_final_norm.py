"""The final norm on the device: the CPU's bits, stray rows, graphs, far rows."""

from __future__ import annotations

import functools

import pytest
import torch

from epicute.models import reference
from epicute.models.final_norm import FinalNormPlan, plan_final_norm
from epicute.models.partials import partial_sums
from epicute.testing import assert_equal_bits, assert_within, storage_budget
from epicute.testing.poison import assert_guards_intact, guarded
from tests.models.test_final_norm import EPS, VARIANTS, equal_numbers
from tests.quant.rows import wild

pytestmark = pytest.mark.gpu

ROWS = (0, 1, 2, 17, 1000)


@functools.cache
def planned(hidden: int, variant: tuple, device: str = "cuda") -> FinalNormPlan:
    dtype, gain, offset, partials, rows_dtype = variant
    return plan_final_norm(
        hidden,
        dtype,
        gain_dtype=gain,
        eps=EPS,
        offset=offset,
        partials=partials,
        rows_dtype=rows_dtype,
        device=device,
    )


def on(device: str, *given: torch.Tensor | None) -> list[torch.Tensor | None]:
    return [None if x is None else x.to(device) for x in given]


@pytest.mark.parametrize("hidden", [8, 64, 576, 584, 4096, 16384, 65536])
@pytest.mark.parametrize("variant", VARIANTS, ids=["last", "gemma", "all", "all-given"])
def test_the_cpus_bits(hidden: int, variant: tuple) -> None:
    dtype, gain_dtype, _, partials, rows_dtype = variant
    gain = torch.randn(hidden, generator=torch.Generator().manual_seed(0)).to(gain_dtype)
    for rows in ROWS if hidden <= 4096 else ROWS[:-1]:
        x = wild(rows, hidden, dtype, rows)
        sumsq = partial_sums(x) if partials else None
        at = strays = None
        if rows_dtype is not None:
            at = (
                torch.randint(-1, max(rows, 1), (33,)).to(rows_dtype)
                if rows
                else torch.full((33,), -1).to(rows_dtype)
            )
            strays = torch.zeros(1, dtype=torch.int64)
        count = rows if at is None else 33
        out = guarded((count, hidden), dtype, (hidden + 8, 1), "cuda")
        wanted = torch.empty(count, hidden, dtype=dtype)
        planned(hidden, variant, "cpu").run(x, gain, wanted, sumsq=sumsq, rows=at, strays=strays)
        there = on("cuda", x, gain, sumsq, at, strays)
        planned(hidden, variant).run(
            there[0], there[1], out.tensor, sumsq=there[2], rows=there[3], strays=there[4]
        )
        equal_numbers(out.tensor.cpu(), wanted)
        assert_guards_intact(out)
        assert there[4] is None or there[4].item() == 0


def test_against_float64() -> None:
    x = (torch.randn(1000, 4096, generator=torch.Generator().manual_seed(0)) * 3).bfloat16()
    gain = torch.randn(4096, generator=torch.Generator().manual_seed(1))
    at = torch.tensor([999, 0, 512])
    out = torch.empty(3, 4096, dtype=torch.bfloat16, device="cuda")
    variant = (torch.bfloat16, torch.float32, 0.0, False, torch.int64)
    strays = torch.zeros(1, dtype=torch.int64, device="cuda")
    planned(4096, variant).run(x.cuda(), gain.cuda(), out, rows=at.cuda(), strays=strays)
    exact = reference.final_norm(x, gain, EPS, rows=at)
    assert_within(out, exact, storage_budget(torch.bfloat16))


@pytest.mark.parametrize("stray", [17, -2, 2**40])
def test_stray_rows_give_zeros_and_are_counted(stray: int) -> None:
    variant = VARIANTS[0]
    x, gain = wild(17, 576, torch.bfloat16, device="cuda"), torch.ones(576).bfloat16().cuda()
    at = torch.tensor([0, stray, -1, stray], device="cuda")
    strays = torch.zeros(1, dtype=torch.int64, device="cuda")
    out = torch.full((4, 576), 7.0, device="cuda").bfloat16()
    sumsq = partial_sums(x)
    planned(576, variant).run(x, gain, out, sumsq=sumsq, rows=at, strays=strays)
    assert not out[1:].any()
    assert bool(out[0].any())
    assert strays.item() == 2


@pytest.mark.parametrize("gain_value", [torch.nan, torch.inf])
def test_padding_is_zero_whatever_the_gain(gain_value: float) -> None:
    x, gain = torch.ones(2, 64).bfloat16().cuda(), torch.full((64,), gain_value).bfloat16().cuda()
    out, strays = torch.ones(2, 64).bfloat16().cuda(), torch.zeros(1, dtype=torch.int64).cuda()
    at = torch.tensor([-1, 0]).cuda()
    planned(64, VARIANTS[0]).run(x, gain, out, sumsq=partial_sums(x), rows=at, strays=strays)
    assert not out[0].any()
    assert not out[1].isfinite().any()


def test_ge_18_rows_beyond_two_to_the_31_elements() -> None:
    hidden, rows = 8192, 2**18 + 5
    x = torch.zeros(rows, hidden, dtype=torch.float16, device="cuda")
    last = wild(6, hidden, torch.float16)
    x[-6:] = last.cuda()
    gain, out = torch.randn(hidden).half(), torch.empty_like(x)
    planned(hidden, VARIANTS[2]).run(x, gain.cuda(), out)
    wanted = torch.empty_like(last)
    planned(hidden, VARIANTS[2], "cpu").run(last, gain, wanted)
    equal_numbers(out[-6:].cpu(), wanted)
    assert not out[:-6].any()


def test_a_graph_takes_new_rows() -> None:
    plan = plan_final_norm(576)
    x, gain = torch.randn(64, 576).bfloat16(), torch.randn(576).bfloat16()
    at = torch.zeros(4, dtype=torch.int64, device="cuda")
    strays = torch.zeros(1, dtype=torch.int64, device="cuda")
    out = torch.empty(4, 576, dtype=torch.bfloat16, device="cuda")
    given = (x.cuda(), gain.cuda(), out)
    sumsq = partial_sums(x).cuda()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):  # the plan's first launch
        plan.run(*given, sumsq=sumsq, rows=at, strays=strays)
    everything = torch.empty_like(x)
    planned(576, (*VARIANTS[0][:4], None), "cpu").run(x, gain, everything, sumsq=sumsq.cpu())
    for rows in ([0, 63, 5, 5], [1, 2, 3, 4]):
        at.copy_(torch.tensor(rows))
        graph.replay()
        assert_equal_bits(out, everything[rows])
    assert strays.item() == 0


def test_ge_14_launches_that_depend_on_each_other() -> None:
    """Each normalises what the last has written, with a gain of its own; nothing between them."""
    variant = (torch.bfloat16, torch.bfloat16, 0.0, False, None)
    plan = planned(4096, variant)
    generator = torch.Generator().manual_seed(0)
    gains = (torch.rand(7, 4096, generator=generator) + 0.5).bfloat16().cuda()
    first = torch.randn(300, 4096, generator=generator).bfloat16().cuda()
    found = []
    for apart in (True, False):
        buffers = [first.clone(), torch.empty_like(first), torch.empty_like(first)]
        torch.cuda.synchronize()
        for link in range(200):
            plan.run(buffers[link % 3], gains[link % 7], buffers[(link + 1) % 3])
            if apart:
                torch.cuda.synchronize()
        found.append(buffers[200 % 3].clone())
    assert_equal_bits(*found)


def test_nothing_is_allocated_and_nobody_waits() -> None:
    variant = VARIANTS[2]
    x, gain = wild(17, 576, torch.float16, device="cuda"), torch.ones(576).half().cuda()
    out = torch.empty_like(x)
    plan = planned(576, variant)
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    torch.cuda.set_sync_debug_mode("error")
    try:
        plan.run(x, gain, out)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before
