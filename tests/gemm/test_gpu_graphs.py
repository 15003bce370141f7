"""Streams and CUDA graphs: CG-01 to CG-08 of the field failures."""

from __future__ import annotations

import gc
import multiprocessing
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import epicute
from epicute.epilogues import Dequantize, EmitFP8, Gain, ResidualAdd, Store
from epicute.errors import CompileError
from epicute.gemm import autotune
from epicute.jit import ObjectCache, forget
from epicute.testing import assert_equal_bits
from tests.gemm.compositions import FP8, SKELETONS, Case, Tile, projection
from tests.gemm.device import DEVICE, POISON, Output, bits, integers
from tests.gemm.jobs import PAGE_SIZE, ROWS, Job, pack, plan_of

pytestmark = pytest.mark.gpu

SLOW_CYCLES = 200_000_000
"""About a tenth of a second."""

QKV = projection("qkv", "SmolLM2", "fp8")
GATE_UP = projection("gate_up", "SmolLM2", "fp8")
DOWN = projection("down", "SmolLM2", "bf16")
CELLS8 = SKELETONS["qkv.64.half.fp8"].case("bf16", 24, 576)
PLAIN = SKELETONS["store.bf16"].case("bf16", 200, 576)
LAYERS = [QKV, GATE_UP, DOWN, CELLS8]
SQUARE = [
    Case("chain-bf16", ResidualAdd() >> Gain() >> Store(torch.bfloat16), 576, 576, torch.bfloat16),
    Case("chain-pp", Store(torch.bfloat16), 576, 576, torch.bfloat16, Tile(64, 192, 1, 2, True)),
    Case("chain-fp8", Dequantize() >> EmitFP8(), 576, 576, FP8),
]
"""From K to K columns, so that one launch reads what the last has written."""

CASES = [*LAYERS, PLAIN, *SQUARE]
COLD = SKELETONS["store.fp16"].case("bf16", 24, 584)
"""Not among ``CASES``: nobody has compiled it when its test starts."""

RUNNING = ("amax", "saturated", "nans")


def launch(job: Job) -> None:
    """One launch on the current stream, unchecked."""
    outputs = {name: output.tensor for name, output in job.outputs.items()}
    job.plan.run(job.x, job.packed, **job.operands, **outputs)


def results(job: Job) -> dict[str, torch.Tensor]:
    """Copies of what is not counted from launch to launch."""
    torch.cuda.synchronize()
    return {
        name: output.tensor.clone()
        for name, output in job.outputs.items()
        if not name.endswith(RUNNING)
    }


def eager(job: Job) -> dict[str, torch.Tensor]:
    """What a launch outside any graph gives, into poison."""
    poison(job)
    launch(job)
    return results(job)


def poison(job: Job) -> None:
    """As if nothing had been written."""
    for name, output in job.outputs.items():
        if not name.endswith(RUNNING):
            bits(output.tensor).fill_(POISON[output.tensor.element_size()])


def refresh(job: Job, seed: int) -> None:
    """New activations at the same address."""
    job.x.copy_(integers(job.rows, job.case.k, dtype=job.case.dtype, seed=seed, most=2))


def same(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        assert_equal_bits(found[name], value, name)


@pytest.mark.parametrize("case", LAYERS, ids=str)
def test_cg_01_warm_up_capture_and_replay_on_three_streams(case: Case) -> None:
    job = Job(case, 129)
    warm, capturing, replaying = (torch.cuda.Stream() for _ in range(3))
    with torch.cuda.stream(warm):
        launch(job)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=capturing):
        launch(job)
    for seed in (5, 6):
        refresh(job, seed)
        wanted = eager(job)
        poison(job)
        torch.cuda.synchronize()
        with torch.cuda.stream(replaying):
            graph.replay()
        same(results(job), wanted)


def test_cg_01_the_current_stream_is_used() -> None:
    """A launch on any other stream would see x as it was before its slow producer."""
    job = Job(QKV, 129)
    refresh(job, 7)
    wanted = eager(job)
    fresh = job.x.clone()
    bits(job.x).zero_()
    poison(job)
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        torch.cuda._sleep(SLOW_CYCLES)
        job.x.copy_(fresh)
        launch(job)
    side.synchronize()
    same(results(job), wanted)


def test_two_streams_at_once() -> None:
    """Plans keep nothing per launch: the same plan and another, interleaved on two streams."""
    jobs = [Job(QKV, 129), Job(QKV, 257, seed=1), Job(GATE_UP, 129)]
    wanted = [eager(job) for job in jobs]
    for job in jobs:
        poison(job)
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in jobs]
    for _ in range(20):
        for job, stream in zip(jobs, streams, strict=True):
            with torch.cuda.stream(stream):
                launch(job)
    for job, some in zip(jobs, wanted, strict=True):
        same(results(job), some)


def test_cg_02_a_cold_compile_inside_a_capture_is_refused_and_leaves_it_clean() -> None:
    job = Job(PLAIN, 65)
    wanted = eager(job)
    packed = pack(COLD, integers(COLD.n, COLD.k, dtype=COLD.dtype, seed=1))
    x = integers(65, COLD.k, dtype=COLD.dtype, seed=2)
    graph = torch.cuda.CUDAGraph()
    poison(job)
    with torch.cuda.graph(graph):
        with pytest.raises(CompileError, match="compile before capture"):
            epicute.plan(COLD.composition, packed)
        with pytest.raises(CompileError, match="compile before capture"):
            epicute.linear(x, packed, COLD.composition)
        launch(job)
    graph.replay()
    same(results(job), wanted)
    found = epicute.linear(x, packed, COLD.composition)
    acc = x.float() @ packed.unpack().codes.float().T
    assert_equal_bits(found, acc.to(torch.float16))


@pytest.fixture
def forgetful() -> Iterator[None]:
    """Plans as a new process makes them: loaded from disk, never launched."""
    plan_of.cache_clear()
    forget()
    yield
    plan_of.cache_clear()


@pytest.mark.usefixtures("forgetful")
@pytest.mark.parametrize("case", LAYERS, ids=str)
def test_cg_02_a_plan_is_all_the_warm_up_there_is(case: Case) -> None:
    """The first launch ever is captured; then every other M is, without another compile or load."""
    jobs = [Job(case, rows) for rows in ROWS if rows]
    assert jobs[0].plan.origin == "disk"
    graphs = []
    for job in jobs:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            launch(job)
        graphs.append(graph)
    for job, graph in zip(jobs, graphs, strict=True):
        wanted = eager(job)
        poison(job)
        graph.replay()
        same(results(job), wanted)


def test_no_rows_capture_nothing() -> None:
    job, other = Job(GATE_UP, 0), Job(PLAIN, 3)
    wanted = eager(other)
    poison(other)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch(job)
        launch(other)
    graph.replay()
    same(results(other), wanted)


@pytest.mark.parametrize("case", [QKV, CELLS8], ids=str)
def test_cg_06_padding_rows_touch_no_cell_and_no_count(case: Case) -> None:
    """112 rows captured, 100 live: the others hold NaN, wild positions and slot -1."""
    padded, live = Job(case, 112), Job(case, 100)
    capacity = padded.outputs["k_cells"].shape[0] * PAGE_SIZE
    slots = torch.randperm(capacity)[:112].to(DEVICE)
    slots[100:] = -1
    padded.operands["slots"].copy_(slots)
    padded.operands["positions"][100:] = 2**40
    graph = torch.cuda.CUDAGraph()
    launch(padded)
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        launch(padded)
    nan = torch.full((12, case.k), torch.nan, device=DEVICE)
    padded.x[100:].copy_(nan.to(case.dtype))
    counters = [name for name in padded.outputs if name.endswith(("saturated", "nans"))]
    for name in counters:
        padded.outputs[name].tensor.fill_(5)
    poison(padded)
    graph.replay()
    found = results(padded)
    live.x = padded.x[:100]
    for name, x in padded.operands.items():
        live.operands[name] = x[:100] if x.dim() == 2 or len(x) == 112 else x
    for name in ("k_cells", "v_cells"):
        live.outputs[name] = Output(padded.outputs[name].shape, found[name].dtype, name=name)
    wanted = eager(live)
    assert_equal_bits(found["q_out"][:100].contiguous(), wanted["q_out"].contiguous(), "q")
    for name in ("k_cells", "v_cells"):
        assert_equal_bits(found[name], wanted[name], name)
    for name in counters:
        assert_equal_bits(padded.outputs[name].tensor, live.outputs[name].tensor, name)


def test_cg_06_rows_of_zeros_leave_amax_alone() -> None:
    padded = Job(GATE_UP, 112)
    bits(padded.x)[100:] = 0
    for name, output in padded.outputs.items():
        if name.endswith(RUNNING):
            output.tensor.zero_()
    launch(padded)
    live = Job(GATE_UP, 100)
    live.x = padded.x[:100]
    live.operands = {**padded.operands, "sumsq": padded.operands["sumsq"][:100]}
    for name, output in live.outputs.items():
        if name.endswith(RUNNING):
            output.tensor.zero_()
    launch(live)
    torch.cuda.synchronize()
    for name in RUNNING:
        assert_equal_bits(padded.outputs[name].tensor, live.outputs[name].tensor, name)


@pytest.mark.parametrize("case", LAYERS, ids=str)
def test_cg_07_any_capture_stream_will_do(case: Case) -> None:
    job = Job(case, 65)
    wanted = eager(job)
    poison(job)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch(job)
    graph.replay()
    same(results(job), wanted)


@pytest.mark.parametrize("case", LAYERS, ids=str)
def test_cg_08_a_graph_outlives_its_plan(case: Case) -> None:
    """Plan dropped, 4 GiB of NaN where temporaries were, ten replays."""
    job = Job(case, 129)
    wanted = eager(job)
    graph = captured(job)
    del job.plan
    plan_of.cache_clear()
    replay_in_poison(job, graph, wanted)


def captured(job: Job) -> torch.cuda.CUDAGraph:
    """One launch as a graph."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch(job)
    return graph


def replay_in_poison(
    job: Job, graph: torch.cuda.CUDAGraph, wanted: dict[str, torch.Tensor]
) -> None:
    gc.collect()
    torch.cuda.empty_cache()
    poisoned = torch.full((2**30,), torch.nan, device=DEVICE)
    for _ in range(10):
        poison(job)
        graph.replay()
        same(results(job), wanted)
    del poisoned


def replay_without_kernel(case: Case) -> None:
    """As above, and the loaded kernel dropped too."""
    job = Job(case, 129)
    wanted = eager(job)
    graph = captured(job)
    del job.plan
    plan_of.cache_clear()
    forget()
    replay_in_poison(job, graph, wanted)


def test_cg_08_a_graph_outlives_its_loaded_kernel() -> None:
    """In a process of its own, which unloaded code would take down."""
    context = multiprocessing.get_context("spawn")
    process = context.Process(target=replay_without_kernel, args=(GATE_UP,))
    process.start()
    process.join(240)
    assert process.exitcode == 0


def chained(case: Case, links: int, apart: bool) -> list[torch.Tensor]:
    """Every tenth output of ``links`` launches, nothing between them.

    Each reads the last one's output, as x and, where there is one, as the residual; and overwrites what the last but
    one read. ``apart``: each waits for the last.
    """
    job = Job(case, 700)
    plan, residual = plan_of(case), "residual" in job.operands
    out = next(name for name in job.outputs if name.startswith("out"))
    given = {n: o.tensor for n, o in job.outputs.items() if n != out}
    # Quarter turns of pairs of columns, eighth turns where the residual is added: numbers neither grow nor vanish, and
    # no link gives what the last gave.
    order = torch.randperm(case.k, generator=torch.Generator().manual_seed(3)).to(DEVICE)
    codes = torch.zeros(case.n, case.k, device=DEVICE)
    codes[order[0::2], order[1::2]] = 1.0
    codes[order[1::2], order[0::2]] = -1.0
    packed = pack(case, codes, torch.ones(case.n) if case.dtype == FP8 else None)
    operands = {n: torch.ones_like(x) for n, x in job.operands.items()}
    if residual:
        operands["gain"].fill_(0.5**0.5)
    buffers = [job.x.clone(), torch.zeros_like(job.x), torch.zeros_like(job.x)]
    kept = [torch.zeros_like(job.x) for _ in range(links // 10)]
    torch.cuda.synchronize()
    for link in range(links):
        x, target = buffers[link % 3], buffers[(link + 1) % 3]
        if residual:
            operands["residual"] = x
        if link % 10 == 9:
            target = buffers[(link + 1) % 3] = kept[link // 10]
        plan.run(x, packed, **operands, **given, **{out: target})
        if apart:
            torch.cuda.synchronize()
    torch.cuda.synchronize()
    return kept


@pytest.mark.parametrize("case", SQUARE, ids=str)
def test_ge_14_dependent_launches_are_what_they_are_one_by_one(case: Case) -> None:
    """A launch may start before the last has ended, and must not read or write before that."""
    wanted, found = chained(case, 200, apart=True), chained(case, 200, apart=False)
    assert all(bool((x.to(torch.float32) != 0).any()) for x in wanted)
    for one, other in zip(wanted, found, strict=True):
        assert_equal_bits(other.cpu(), one.cpu())


@pytest.mark.parametrize("case", [GATE_UP, *SQUARE], ids=str)
def test_ten_thousand_launches_give_the_same_bits(case: Case) -> None:
    job = Job(case, 300)
    wanted = eager(job)
    differ = torch.zeros((), dtype=torch.int64, device=DEVICE)
    for turn in range(10_000):
        launch(job)
        if turn % 10 == 9:  # comparing each would leave a gap between all launches
            for name, value in wanted.items():
                differ += (bits(job.outputs[name].tensor) != bits(value)).sum()
    assert int(differ) == 0


def test_the_tuned_plan_has_the_same_results(tmp_path: Path) -> None:
    job = Job(DOWN, 300)
    cache = ObjectCache(tmp_path / "cache")
    before = {name: output.tensor.clone() for name, output in job.outputs.items()}
    given = {**job.operands, **{name: output.tensor for name, output in job.outputs.items()}}
    found = autotune(job.plan, job.x, job.packed, given, tries=4, cache=cache)
    for name, output in job.outputs.items():
        assert torch.equal(bits(output.tensor), bits(before[name])), name
    again = autotune(job.plan, job.x, job.packed, given, tries=4, cache=cache)
    assert again.schedule == found.schedule
    job.plan = found
    job.check()
