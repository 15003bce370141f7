"""The embedding on the device: the CPU's bits, stray ids, graphs, far rows."""

from __future__ import annotations

import functools

import pytest
import torch

from epicute.errors import ArgumentError
from epicute.models.embedding import PADDING, EmbeddingPlan, plan_embedding
from epicute.quant import NOT_RUN
from epicute.quant.group import DelayedGroup
from epicute.testing import assert_equal_bits
from epicute.testing.poison import assert_guards_intact
from tests.models.test_embedding import plan_for, run, same
from tests.models.tokens import Call, ids
from tests.quant.rows import DTYPES, wild

pytestmark = pytest.mark.gpu

ROWS = (0, 1, 2, 17, 1000)


@functools.cache
def planned(hidden: int, dtype: torch.dtype, ids_dtype: torch.dtype, fp8: bool) -> EmbeddingPlan:
    return plan_embedding(hidden, dtype, ids_dtype=ids_dtype, fp8=fp8)


def launch(call: Call) -> None:
    plan = planned(call.table.shape[1], call.table.dtype, call.ids.dtype, call.fp8)
    plan.run(**call.arguments)  # type: ignore[arg-type]


@pytest.mark.parametrize("hidden", [8, 64, 72, 576, 4096, 16384])
@pytest.mark.parametrize("dtype", DTYPES, ids=["bf16", "fp16"])
@pytest.mark.parametrize("ids_dtype", [torch.int32, torch.int64], ids=["int32", "int64"])
@pytest.mark.parametrize("fp8", [False, True], ids=["plain", "fp8"])
def test_the_cpus_bits(hidden: int, dtype: torch.dtype, ids_dtype: torch.dtype, fp8: bool) -> None:
    for rows in ROWS:
        table, tokens = wild(300, hidden, dtype, rows), ids(rows, 300, ids_dtype, rows)
        found, wanted = Call(tokens.cuda(), table.cuda(), fp8), Call(tokens, table, fp8)
        launch(found)
        run(wanted)
        on_the_cpu(found)
        same(found, wanted)
        assert_guards_intact(*found.outputs.values())
        assert found.strays.item() == 0


def on_the_cpu(call: Call) -> None:
    """Whatever it wrote, brought here for comparison."""
    call.site = type(call.site)(
        **{k: v.cpu() for k, v in vars(call.site).items() if isinstance(v, torch.Tensor)}
    )
    for name, out in call.outputs.items():
        call.outputs[name] = type(out)(out.tensor.cpu(), out.buffer.cpu(), out.inside, out.name)


@pytest.mark.parametrize("stray", [300, -2, 2**40, -(2**63)])
def test_stray_ids_give_zeros_and_are_counted(stray: int) -> None:
    table, tokens = wild(300, 4096, torch.bfloat16), ids(1000, 300, torch.int64)
    found, wanted = Call(tokens.cuda(), table.cuda()), Call(tokens.clone(), table)
    for row in (0, 7, 999):
        found.ids[row], wanted.ids[row] = stray, PADDING
    launch(found)
    run(wanted)
    on_the_cpu(found)
    same(found, wanted)
    assert found.strays.item() == 3


def test_cg_06_padding_alone_leaves_the_state_alone() -> None:
    call = Call(
        torch.full((40,), PADDING, device="cuda"), wild(9, 576, torch.bfloat16, device="cuda")
    )
    launch(call)
    assert call.site.amax_next.item() == NOT_RUN
    assert (call.site.saturated.item(), call.site.nans.item(), call.strays.item()) == (0, 0, 0)
    assert not call.outputs["x"].tensor.any()


def test_ge_18_rows_beyond_two_to_the_31_elements() -> None:
    hidden, rows = 8192, 2**18 + 5
    table = torch.zeros(rows, hidden, dtype=torch.bfloat16, device="cuda")
    last = wild(6, hidden, torch.bfloat16)
    table[-6:] = last.cuda()
    tokens = torch.zeros(rows, dtype=torch.int64, device="cuda")
    tokens[-6:] = torch.arange(rows - 6, rows)
    x = torch.empty_like(table)
    sumsq = torch.empty(rows, hidden // 64, device="cuda")
    plan = planned(hidden, torch.bfloat16, torch.int64, False)
    plan.run(tokens, table, x, sumsq, torch.zeros(1, dtype=torch.int64, device="cuda"))
    assert_equal_bits(x[-6:], last)
    assert bool((x[:-6] == 0).all())
    assert bool((sumsq[:-6] == 0).all())
    wanted = Call(torch.arange(6), last, fp8=False)
    run(wanted)
    same_sums = sumsq[-6:].cpu(), wanted.outputs["sumsq"].tensor
    assert torch.equal(*(x.nan_to_num() for x in same_sums))


def test_graphs_replay_with_the_scales_they_have_rolled() -> None:
    """Roll, gather, and again: the paper's invocation, captured before anything has run."""
    table = torch.randn(300, 576, generator=torch.Generator().manual_seed(0)).bfloat16()
    there, here = (DelayedGroup.create(("entry",), d, history=2) for d in ("cuda", "cpu"))
    found, wanted = Call(torch.zeros(64, dtype=torch.int64, device="cuda"), table.cuda()), None
    found.site = there["entry"]
    plan = plan_embedding(576)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        there.roll()
        plan.run(**found.arguments)  # type: ignore[arg-type]
    for seed in range(6):
        tokens = ids(64, 300, torch.int64, seed)
        found.ids.copy_(tokens)
        graph.replay()
        wanted = Call(tokens, table)
        wanted.site = here["entry"]
        here.roll()
        run(wanted)
        for name, out in wanted.outputs.items():
            assert_equal_bits(
                found.outputs[name].tensor.contiguous(), out.tensor.contiguous(), name
            )
    for name, tensor in here.state_dict().items():
        assert_equal_bits(there.state_dict()[name], tensor, name)


def test_nothing_is_allocated_and_nobody_waits() -> None:
    call = Call(ids(17, 50, torch.int64).cuda(), wild(50, 576, torch.bfloat16, device="cuda"))
    launch(call)
    arguments = call.arguments
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    torch.cuda.set_sync_debug_mode("error")
    try:
        planned(576, torch.bfloat16, torch.int64, True).run(**arguments)  # type: ignore[arg-type]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before


def test_tensors_of_two_devices_are_refused() -> None:
    table = wild(50, 576, torch.bfloat16, device="cuda")
    call = Call(ids(17, 50, torch.int64).cuda(), table)
    plan = planned(576, torch.bfloat16, torch.int64, True)
    elsewhere = Call(ids(17, 50, torch.int64), table.cpu())
    for name in ("ids", "x", "sumsq", "strays", "codes", "site"):
        given = {**call.arguments, name: elsewhere.arguments[name]}
        with pytest.raises(ArgumentError, match=f"{name}: "):
            plan.run(**given)  # type: ignore[arg-type]


def test_a_plan_of_the_cpu_runs_on_a_gpu_too() -> None:
    table = wild(50, 576, torch.bfloat16)
    found, wanted = (
        Call(ids(17, 50, torch.int64).cuda(), table.cuda()),
        Call(ids(17, 50, torch.int64), table),
    )
    plan_for(wanted).run(**found.arguments)  # type: ignore[arg-type]
    run(wanted)
    on_the_cpu(found)
    same(found, wanted)
