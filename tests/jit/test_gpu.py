"""On the device: right values, the caller's stream and device, and CUDA graphs."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from epicute.errors import CompileError
from epicute.jit import Compiled, ObjectCache, Target, compile
from tests.jit.tiny import Tiny

pytestmark = [pytest.mark.gpu, pytest.mark.compile]

COUNT = 100_003
SLOW_CYCLES = 200_000_000


def tensors(device: str = "cuda", count: int = COUNT) -> tuple[torch.Tensor, ...]:
    """x, y and an output of NaN."""
    x, y = torch.randn(2, count, device=device).unbind()
    return x, y, torch.full_like(x, torch.nan)


@pytest.fixture
def add(cache: ObjectCache, forgetful: Callable[[], None]) -> Compiled:
    """out = x + 2 y, never launched before."""
    return compile(Tiny(target=Target.detect()), cache=cache)


@pytest.mark.parametrize("origin", ["compiled", "disk", "memory"])
def test_the_same_values_from_everywhere(
    origin: str, cache: ObjectCache, forgetful: Callable[[], None]
) -> None:
    kernel = Tiny(scale=0.5, target=Target.detect())
    found = compile(kernel, cache=cache)
    if origin == "disk":
        forgetful()
    if origin != "compiled":
        found = compile(kernel, cache=cache)
    assert found.origin == origin
    x, y, out = tensors()
    found(x, y, out)
    assert torch.equal(out, x + 0.5 * y)


def test_jc_03_a_then_b_then_a(cache: ObjectCache, forgetful: Callable[[], None]) -> None:
    for scale in (2.0, 4.0, 2.0):
        x, y, out = tensors()
        compile(Tiny(scale=scale, target=Target.detect()), cache=cache)(x, y, out)
        assert torch.equal(out, x + scale * y)


def test_jc_12_tensors_decide_the_device_and_the_current_one_stays(add: Compiled) -> None:
    devices = range(torch.cuda.device_count())
    for current in devices:
        with torch.cuda.device(current):
            for used in devices:
                x, y, out = tensors(f"cuda:{used}")
                add(x, y, out)
                assert torch.cuda.current_device() == current
                assert torch.equal(out, x + 2 * y)


def test_cg_01_the_current_stream_is_used(add: Compiled) -> None:
    x, y, out = tensors()
    fresh = torch.randn_like(x)
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        torch.cuda._sleep(SLOW_CYCLES)  # a launch on any other stream would see the old x
        x.copy_(fresh)
        add(x, y, out)
    side.synchronize()
    assert torch.equal(out, fresh + 2 * y)


def test_cg_01_a_graph_replays_on_new_inputs(add: Compiled) -> None:
    x, y, out = tensors()
    with torch.cuda.stream(torch.cuda.Stream()):
        add(x, y, out)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=torch.cuda.Stream()):
        add(x, y, out)
    for _ in range(2):
        x.normal_()
        out.fill_(torch.nan)
        with torch.cuda.stream(torch.cuda.Stream()):
            torch.cuda.current_stream().wait_stream(torch.cuda.default_stream())
            graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(out, x + 2 * y)


def test_cg_02_compiling_during_a_capture_is_refused_and_leaves_it_clean(
    cache: ObjectCache, forgetful: Callable[[], None], add: Compiled
) -> None:
    x, y, out = tensors()
    add(x, y, out)
    absent = Tiny(scale=8.0, target=Target.detect())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        with pytest.raises(CompileError, match="compile before capture"):
            compile(absent, cache=cache)
        add(x, y, out)
    out.fill_(torch.nan)
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(out, x + 2 * y)
    compile(absent, cache=cache)(x, y, out)
    assert torch.equal(out, x + 8 * y)
