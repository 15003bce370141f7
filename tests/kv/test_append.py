"""Rows appended by a kernel are the CPU quantiser's, bit for bit; operands that do not fit are refused."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from epicute.errors import ArgumentError, UnsupportedError
from epicute.jit import DEFAULT_TARGET, compile
from epicute.kv.append import AppendKernel, AppendPlan, AppendSpec, plan_append
from epicute.kv.int4 import Int4Cache
from epicute.layouts.kv_int4 import Int4Record
from tests.ptx import Emulated

KINDS = {
    "heads of 128": Int4Cache(5, 3, Int4Record(32, 128), 128),
    "heads of 64, narrow blocks, folded": Int4Cache(5, 2, Int4Record(16, 64), 16, True),
    "not rotated": Int4Cache(3, 1, Int4Record(64, 128), 0),
}
EXTREMES = (0.0, 3.0, 3e4, 1e-4, 1e-38, 3e38, float("inf"), -float("inf"), float("nan"))


@cache
def emulated(kind: Int4Cache, dtype: torch.dtype) -> Emulated:
    spec = AppendSpec(kind.kv_heads, kind.record.head_dim, dtype, kind.width, kind.values_folded)
    return Emulated(AppendKernel(spec, DEFAULT_TARGET))


def rows_of(kind: Int4Cache, dtype: torch.dtype, count: int, seed: int) -> list[torch.Tensor]:
    """Keys and values of any size, some of them extreme, as slices of one fused row."""
    torch.manual_seed(seed)
    size = (count, 2 * kind.kv_heads, kind.record.head_dim)
    both = (torch.randn(size) * 10.0 ** torch.randint(-6, 5, (count, 1, 1))).to(dtype)
    for i in range(min(count, len(EXTREMES))):
        both[i, i % size[1], i :: 1 + i] = EXTREMES[i]
    return list(both.split(kind.kv_heads, dim=1))


@pytest.mark.compile
@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_kd_13_the_kernel_writes_what_the_cpu_writes(name: str, dtype: torch.dtype) -> None:
    kind = KINDS[name]
    plan = plan_append(kind, dtype, device="cpu")
    for seed, count in ((0, 12), (1, 1), (2, 17)):
        keys, values = rows_of(kind, dtype, count, seed)
        slots = torch.randperm(kind.capacity + 9)[:count] - 3
        found = kind.allocate().fill_(0xFF)
        wanted = found.clone()
        arguments = plan.bind(found, keys, values, slots)
        assert arguments is not None
        emulated(kind, dtype).launch(arguments, found, keys, values, slots)
        kind.write(wanted, keys, values, slots)
        assert torch.equal(found, wanted)


@pytest.mark.compile
@pytest.mark.parametrize("name", KINDS)
def test_it_compiles_to_code_that_may_run(name: str) -> None:
    kind = KINDS[name]
    spec = AppendSpec(kind.kv_heads, kind.record.head_dim, torch.bfloat16, kind.width)
    compile(AppendKernel(spec, DEFAULT_TARGET)).report.check(name, DEFAULT_TARGET.smem_per_block)


@given(st.integers(0, 20), st.integers(0, 2**16))
def test_a_plan_on_the_cpu_is_the_cache(count: int, seed: int) -> None:
    kind = KINDS["heads of 128"]
    keys, values = rows_of(kind, torch.bfloat16, count, seed)
    slots = torch.randperm(kind.capacity)[:count]
    found, wanted = kind.allocate(), kind.allocate()
    plan_append(kind, device="cpu").run(found, keys, values, slots)
    kind.write(wanted, keys, values, slots)
    assert torch.equal(found, wanted)


def refused(plan: AppendPlan, **changes: Any) -> str:
    kind = plan.kind
    keys, values = rows_of(kind, torch.bfloat16, 4, 0)
    given: dict[str, Any] = {"memory": kind.allocate(), "keys": keys, "values": values}
    given["slots"] = torch.arange(4)
    for name, change in changes.items():
        given[name] = change(given[name])
    with pytest.raises(ArgumentError) as caught:
        plan.run(**given)
    return str(caught.value)


def test_what_does_not_fit_is_refused_by_name() -> None:
    plan = plan_append(KINDS["heads of 128"], device="cpu")
    assert refused(plan, keys=lambda x: x.float()).startswith("keys:")
    assert refused(plan, values=lambda x: x[:, :2]).startswith("values:")
    assert refused(plan, keys=lambda x: x[..., 1:]).startswith("keys:")
    assert refused(plan, slots=lambda x: x[:3]).startswith("slots")
    assert refused(plan, slots=lambda x: x.int()).startswith("slots")
    assert refused(plan, memory=lambda x: x[:, :2]).startswith("memory")
    assert refused(plan, memory=lambda x: x[..., :-16]).startswith("memory")
    with pytest.raises(UnsupportedError, match="head_dim"):
        AppendSpec(1, 192)
    with pytest.raises(UnsupportedError, match="dtype"):
        AppendSpec(1, 128, torch.float32)


@pytest.mark.gpu
@pytest.mark.parametrize("name", KINDS)
def test_on_a_gpu(name: str) -> None:
    kind = KINDS[name]
    plan = plan_append(kind)
    for seed, count in ((0, 12), (1, 1), (2, kind.capacity), (3, 0)):
        keys, values = rows_of(kind, torch.bfloat16, count, seed)
        slots = torch.randperm(kind.capacity)[:count]
        wanted = kind.allocate()
        kind.write(wanted, keys, values, slots)
        found = kind.allocate("cuda")
        plan.run(found, keys.cuda(), values.cuda(), slots.cuda())
        torch.cuda.synchronize()
        assert torch.equal(found.cpu(), wanted)
