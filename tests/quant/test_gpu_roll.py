"""The roll of a group on the device: the CPU's bits, and graphs that go on rolling."""

from __future__ import annotations

import math

import pytest
import torch

from epicute.errors import ArgumentError
from epicute.quant import NOT_RUN
from epicute.quant.group import DelayedGroup
from epicute.testing import assert_equal_bits
from epicute.testing.poison import assert_guards_intact, guarded

pytestmark = pytest.mark.gpu

ODD = (NOT_RUN, math.nan, math.inf, -math.inf, -2.0, 0.0, -0.0, 1e-40, 3e38)
SLOW_CYCLES = 200_000_000


def names(count: int) -> tuple[str, ...]:
    return tuple(f"{i // 4}.{i % 4}" for i in range(count))


def maxima(steps: int, sites: int, seed: int = 0) -> torch.Tensor:
    """(steps, sites) float32 on the CPU over all magnitudes, every seventh one odd."""
    generator = torch.Generator().manual_seed(seed)
    found = torch.exp2(torch.randn(steps, sites, generator=generator) * 20)
    odd = torch.tensor(ODD)[torch.randint(len(ODD), (steps, sites), generator=generator)]
    return torch.where(torch.rand(steps, sites, generator=generator) < 1 / 7, odd, found)


def same(there: DelayedGroup, here: DelayedGroup) -> None:
    for name, tensor in here.state_dict().items():
        assert_equal_bits(there.state_dict()[name], tensor, name)


@pytest.mark.parametrize("sites", [1, 4, 5, 504])
@pytest.mark.parametrize("history", [1, 16, 33, 1024])
def test_the_cpus_bits(sites: int, history: int) -> None:
    here = DelayedGroup.create(names(sites), history=history, margin=sites % 3)
    there = DelayedGroup.create(names(sites), "cuda", history=history, margin=sites % 3)
    for amax in maxima(2 * min(history, 20) + 3, sites):
        here.amax_next.copy_(amax)
        there.amax_next.copy_(amax)
        here.roll()
        there.roll()
        same(there, here)


def test_nothing_beside_the_state_is_written() -> None:
    shapes = {
        "scale_used": (5,),
        "amax_next": (5,),
        "history": (5, 3),
        "cursor": (5,),
        "counters": (2, 5),
    }
    integers = ("cursor", "counters")
    made = {
        name: guarded(
            shape, torch.int64 if name in integers else torch.float32, device="cuda", name=name
        )
        for name, shape in shapes.items()
    }
    for name, value in (
        ("scale_used", 1.0),
        ("amax_next", 3.0),
        ("history", 0.0),
        ("cursor", 2),
        ("counters", 7),
    ):
        made[name].tensor.fill_(value)
    group = DelayedGroup(names(5), **{name: out.tensor for name, out in made.items()})
    group.roll()
    assert group.cursor.tolist() == [0] * 5
    assert group.counters.tolist() == [[7] * 5] * 2
    assert group.history.tolist() == [[0, 0, 3]] * 5
    assert_guards_intact(*made.values())


def test_cg_02_the_first_roll_may_be_captured_and_a_thousand_replays_roll_on() -> None:
    here = DelayedGroup.create(names(129), history=5, margin=1)
    there = DelayedGroup.create(names(129), "cuda", history=5, margin=1)
    fresh = torch.full((129,), NOT_RUN, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        there.roll()
        there.amax_next.copy_(fresh)
    for step, amax in enumerate(maxima(1000, 129)):
        fresh.copy_(amax)
        graph.replay()
        here.roll()
        here.amax_next.copy_(amax)
        if step % 100 == 99:
            same(there, here)
    same(there, here)
    there.roll()
    here.roll()
    same(there, here)


def test_df_06_two_groups_in_one_graph_do_not_mix() -> None:
    a, b, alone = (DelayedGroup.create(names(9), "cuda", history=4) for _ in range(3))
    graph = torch.cuda.CUDAGraph()
    low, high = torch.full((9,), 3.0, device="cuda"), torch.full((9,), 400.0, device="cuda")
    with torch.cuda.graph(graph):
        for group, amax in ((a, low), (b, high)):
            group.roll()
            group.amax_next.copy_(amax)
    for _ in range(6):
        graph.replay()
        alone.roll()
        alone.amax_next.copy_(low)
    same(a, alone)


def test_cg_01_the_current_stream_is_used() -> None:
    group = DelayedGroup.create(names(9), "cuda")
    fresh = torch.full((9,), 56.0, device="cuda")
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        torch.cuda._sleep(SLOW_CYCLES)
        group.amax_next.copy_(fresh)
        group.roll()
    side.synchronize()
    assert group.scale_used.tolist() == [0.125] * 9


def test_nothing_is_allocated_and_nobody_waits() -> None:
    group = DelayedGroup.create(names(9), "cuda")
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    torch.cuda.set_sync_debug_mode("error")
    try:
        group.roll()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before


def test_ge_14_rolls_and_what_they_depend_on_launched_back_to_back() -> None:
    """A roll may start before what is ahead of it has ended, and must not look before that."""
    here = DelayedGroup.create(names(504), history=3)
    there = DelayedGroup.create(names(504), "cuda", history=3)
    steps = maxima(300, 504, seed=1)
    given = steps.cuda()
    torch.cuda.synchronize()
    for amax in given:
        there.amax_next.copy_(amax)
        there.roll()
        there.roll()  # nobody ran
    for amax in steps:
        here.amax_next.copy_(amax)
        here.roll()
    same(there, here)


def test_jc_12_a_group_rolls_where_it_lives() -> None:
    devices = range(torch.cuda.device_count())
    groups = [DelayedGroup.create(names(9), f"cuda:{i}") for i in devices]
    for current in devices:
        with torch.cuda.device(current):
            for group in groups:
                group.amax_next.fill_(56.0 * (current + 1))
                group.roll()
                assert torch.cuda.current_device() == current
                assert group.scale_used.tolist() == [0.125 * (current + 1)] * 9


def test_a_reader_does_not_wait() -> None:
    group = DelayedGroup.create(("a", "b"), "cuda")
    reader = group.reader()
    group["b"].quantize(torch.tensor([1000.0, math.nan], device="cuda"))
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        torch.cuda._sleep(SLOW_CYCLES)
        assert reader.request()
        assert reader.newest() is None
        assert not reader.request()  # the first is still under way
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    found = reader.newest()
    assert found is not None
    assert (found.saturated, found.nans) == ({"a": 0, "b": 1}, {"a": 0, "b": 1})
    group.reset_counters()
    assert reader.request()
    torch.cuda.synchronize()
    newest = reader.newest()
    assert newest is not None
    assert newest.clean


def test_a_reader_refuses_to_be_captured() -> None:
    group = DelayedGroup.create(("a",), "cuda")
    reader = group.reader()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        group.roll()
        with pytest.raises(ArgumentError, match="capture"):
            reader.request()
        assert reader.newest() is None
    graph.replay()
    assert reader.request()


def test_saved_here_and_continued_there(tmp_path) -> None:
    there = DelayedGroup.create(names(9), "cuda", history=4)
    for amax in maxima(7, 9):
        there.amax_next.copy_(amax)
        there.roll()
    there.save(tmp_path / "x")
    here = DelayedGroup.load(tmp_path / "x")
    back = DelayedGroup.load(tmp_path / "x", "cuda")
    for amax in maxima(7, 9, seed=2):
        for group in (here, there, back):
            group.amax_next.copy_(amax)
            group.roll()
    assert_equal_bits(here.scale_used, there.scale_used)
    same(back, here)
