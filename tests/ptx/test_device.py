"""A GPU that is made up: what its host code encodes, its memory, its graphs, and a kernel from plan to result."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch

from epicute.decode import pack_few_rows, plan_few_rows
from epicute.epilogues import Store, compose
from epicute.errors import ArgumentError
from epicute.quant.rowwise import plan_rows
from epicute.testing import Budget, assert_equal_bits, assert_within
from epicute.weights import Weight
from tests.ptx.arena import SIZE
from tests.ptx.device import Device, emulated, emulated_device
from tests.ptx.encoder import encoded
from tests.ptx.maps import TensorMap

__all__ = ["emulated"]

FP8 = torch.float8_e4m3fn


@pytest.mark.compile
@pytest.mark.parametrize(
    ("kind", "size", "swizzle", "rank"),
    [
        ("BFloat16", 2, 128, 2),
        ("BFloat16", 2, 64, 3),
        ("Float16", 2, 32, 4),
        ("Float32", 4, 128, 2),
        ("Float8E4M3FN", 1, 0, 3),
        ("Uint8", 1, 128, 2),
        ("Int32", 4, 64, 2),
    ],
)
def test_a_tensor_map_is_decoded_as_it_was_asked_for(
    kind: str, size: int, swizzle: int, rank: int
) -> None:
    inner = (swizzle or 32) // size
    extents = (1001, 1002, 1003, 1004)[:rank]
    strides = (0x11 * 64, 0x2222 * 64, 0x7333331 * 64)[: rank - 1]
    found = encoded(kind, swizzle, (8, inner), 0x123450, extents, strides)
    box = (inner, 8, 1, 1)[:rank]
    assert found == TensorMap(
        0x123450, size, extents, tuple(s * size for s in strides), box, swizzle
    )


# --- memory ---


def test_tensors_say_where_they_are(emulated: Device) -> None:
    here = torch.device("cuda", 0)
    made = torch.zeros(3, 4, device="cuda")
    moved = torch.arange(12.0).view(3, 4).t().to("cuda")
    for x in (made, moved, moved[1:].view(torch.int32), made + 1, torch.cat([made, made]), *moved):
        assert (x.device, x.is_cuda, x.get_device()) == (here, True, 0)
    assert moved.stride() == (1, 4)
    assert moved.to("cuda") is moved
    for x in (moved.cpu(), moved.to("cpu"), torch.empty_like(made, device="cpu"), torch.zeros(1)):
        assert (x.device.type, x.is_cuda, type(x)) == ("cpu", False, torch.Tensor)
    assert torch.equal(moved.cpu(), torch.arange(12.0).view(3, 4).t())
    assert moved.cpu().data_ptr() != moved.data_ptr()
    copied = deepcopy([moved, torch.zeros(1)])
    assert [x.device.type for x in copied] == ["cuda", "cpu"]
    assert copied[0].data_ptr() != moved.data_ptr()
    halves = moved.to("cuda", torch.float16, True)
    assert (halves.dtype, halves.device, f"{halves[0, 1]:.1f}") == (torch.float16, here, "4.0")
    with torch.device("cuda"):
        assert torch.zeros(2).device == here
    with pytest.raises(NotImplementedError, match="modules"):
        torch.nn.Linear(2, 2).to("cuda")


def test_memory_is_poisoned_aligned_and_given_back(emulated: Device) -> None:
    arena = emulated.arena
    before = dict(arena.live)
    x = torch.empty(5, device="cuda")
    assert x.isnan().all()
    assert x.data_ptr() % 512 == 0
    view, bytes_ = x[1:], torch.empty(0, dtype=torch.uint8, device="cuda")
    bytes_.set_(view.untyped_storage())
    assert (bytes_ == 255).all()
    assert sorted(arena.live.values()) == sorted([*before.values(), 20])
    del x, view, bytes_
    assert arena.live == before
    with pytest.raises(torch.OutOfMemoryError, match="made up"):
        arena.allocate(SIZE)


@pytest.mark.parametrize(
    "call",
    [
        lambda x, y: x + y,
        lambda x, y: torch.cat([x, y]),
        lambda x, y: torch.equal(x, y),
        lambda x, y: y[x.long()],
        lambda x, y: torch.where(x > 0, y, y),
    ],
)
def test_two_devices_in_one_operation_are_refused(
    call: Callable[..., Any], emulated: Device
) -> None:
    with pytest.raises(RuntimeError, match="on the same device"):
        call(torch.zeros(3, device="cuda"), torch.zeros(3))


def test_what_crosses_devices_on_a_gpu_crosses_here(emulated: Device) -> None:
    x, y = torch.zeros(3, device="cuda"), torch.arange(3.0)
    assert x.copy_(y) is x
    y[0] = x[2]
    assert (x * torch.tensor(2.0)).tolist() == [0.0, 2.0, 4.0]
    assert x[torch.tensor([2, 1])].tolist() == [2.0, 1.0]
    assert (y.tolist(), type(y)) == ([2.0, 1.0, 2.0], torch.Tensor)
    with pytest.raises(TypeError, match="to numpy"):
        x.numpy()
    with pytest.raises(RuntimeError, match="invalid device ordinal"):
        torch.zeros(1, device="cuda:1")


def test_waiting_for_the_device_can_be_refused(emulated: Device) -> None:
    x = torch.ones(3, device="cuda")
    torch.cuda.set_sync_debug_mode("error")
    x.add_(1).copy_(torch.ones(3), non_blocking=True)
    for wait in (x.tolist, x.cpu, lambda: x[x > 0], lambda: bool(x[0]), x.nonzero):
        with pytest.raises(RuntimeError, match="synchronizing"):
            wait()


# --- launches ---


def rows(count: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(count, 128, generator=torch.Generator().manual_seed(seed)).bfloat16()


def results(count: int, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty(count, 128, dtype=FP8, device=device), torch.empty(count, device=device)


@pytest.mark.compile
def test_a_plan_runs_and_is_noted(emulated: Device) -> None:
    plan = plan_rows(128, torch.bfloat16, device="cuda")
    assert [launch.arguments[-2:] for launch in emulated.launches] == [(0, 1)]
    x, (codes, scale) = rows(7), results(7, "cuda")
    plan.run(x.cuda(), codes, scale)
    right = results(7, "cpu")
    plan_rows(128, torch.bfloat16, device="cpu").run(x, *right)
    assert_equal_bits(codes.cpu(), right[0])
    assert_equal_bits(scale.cpu(), right[1])
    launch = emulated.launches[-1]
    assert (launch.name, launch.programmatic, launch.arguments[-2]) == ("quant.rows", True, 7)
    with pytest.raises(ArgumentError, match="^codes"):
        plan.run(x, codes, scale)


@pytest.mark.compile
def test_memory_that_ends_too_early_is_found(emulated: Device) -> None:
    plan = plan_rows(128, torch.bfloat16, device="cuda")
    plan.run(rows(2).cuda(), *results(2, "cuda"))
    function = plan._launcher.on(0).function  # type: ignore[attr-defined]
    arguments = list(emulated.launches[-1].arguments)
    x, (codes, scale) = rows(2).cuda(), results(2, "cuda")
    for place, y in ((0, x), (2, codes), (4, scale)):
        arguments[place] = y.data_ptr()
    arguments[-2] = 3
    with pytest.raises(AssertionError, match="memory that was not given"):
        function(plan._launcher.on(0).anchor, tuple(arguments))  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match="device_type=cuda"):
        function(torch.zeros(16, dtype=torch.uint8), tuple(arguments))


@pytest.mark.compile
def test_what_launches_in_front_have_written_is_known(emulated: Device) -> None:
    def early() -> set[int]:
        return {x.data_ptr() for x in emulated._written.elsewhere(programmatic=True)}

    plan, x = plan_rows(128, torch.bfloat16, device="cuda"), rows(3).cuda()
    (codes, scale), other = results(3, "cuda"), torch.zeros(3, device="cuda")
    held = {y.data_ptr() for y in (x, codes, scale, other)}
    assert held <= early()
    plan.run(x, codes, scale)
    plan.run(x, codes, scale)
    assert held & early() == {x.data_ptr(), other.data_ptr()}
    other.add_(1)  # which begins when the launches have ended
    assert held <= early()
    plan.run(x, codes, scale)
    assert held <= early(), "nothing changed"
    x.neg_()
    plan.run(x, codes, scale)
    assert held & early() == {x.data_ptr(), other.data_ptr(), scale.data_ptr()}
    torch.cuda.synchronize()
    assert held <= early()


@pytest.mark.compile
def test_a_graph_does_nothing_until_it_is_replayed() -> None:
    with emulated_device(1) as gpu:
        plan = plan_rows(128, torch.bfloat16, device="cuda")
        x, (codes, scale) = rows(3).cuda(), results(3, "cuda")
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            assert torch.cuda.is_current_stream_capturing()
            x.mul_(2)
            plan.run(x, codes, scale)
            twice = scale * 2
        assert scale.isnan().all()
        for seed in (1, 2):
            x.copy_(rows(3, seed))
            graph.replay()
            right = results(3, "cpu")
            plan_rows(128, torch.bfloat16, device="cpu").run(rows(3, seed) * 2, *right)
            assert_equal_bits(codes.cpu(), right[0])
            assert_equal_bits(twice.cpu(), right[1] * 2)
        assert len(gpu.launches) == 3


@pytest.mark.compile
def test_a_weight_that_the_kernel_in_front_writes_is_not_to_be_read_early() -> None:
    """What ``FewRowsPlan.run`` forbids, and nothing but the order of launches shows."""
    with emulated_device(1) as gpu:
        store = compose(Store(torch.float32))
        weight = torch.randn(64, 256, generator=torch.Generator().manual_seed(5)).bfloat16()
        packed = pack_few_rows(Weight(weight, "w").quantize("bf16"), store).to("cuda")
        plan = plan_few_rows(store, packed, max_rows=8)
        x, out = rows(2).repeat(1, 2).cuda(), torch.empty(2, 64, device="cuda")
        plan.run(x, packed, out=out)
        exact = x.cpu().double() @ weight.double().T
        assert_within(out.cpu(), exact, Budget(1e-4, 1e-4))
        writer = plan_rows(128, torch.bfloat16, device="cuda")
        codes = packed.data.flatten()[:256].view(FP8).view(2, 128)
        writer.run(rows(2).cuda(), codes, torch.empty(2, device="cuda"))
        with pytest.raises(AssertionError, match=r"before griddepcontrol\.wait"):
            plan.run(x, packed, out=out)
        gpu.ordered = False
        plan.run(x, packed, out=out)
