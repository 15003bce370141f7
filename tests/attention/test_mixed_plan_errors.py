"""Operands of mixed-precision plans that do not fit are refused by name before any launch."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from epicute import Target
from epicute.attention import AttentionPlan
from epicute.attention.mixed import MixedKernel, MixedSpec, mixed_kernel_for
from epicute.attention.mixed_plan import MixedPlan, plan_mixed
from epicute.errors import ArgumentError, EpicuteError
from tests.attention.mixed_cases import SPECS, MixedBatch

NAMES = ("exact16", "fast8", "fp8")


def plan_of(name: str) -> MixedPlan:
    kernel = mixed_kernel_for(SPECS[name], target=Target("sm_90a"))
    assert isinstance(kernel, MixedKernel)
    return MixedPlan(kernel)


def operands(name: str) -> tuple[torch.Tensor, tuple[torch.Tensor, ...], dict[str, Any]]:
    batch = MixedBatch.draw(SPECS[name], [(5, 20), (3, 3)], 0)
    out, lse = batch.results()
    given = {**batch.operands, "out": out.tensor}
    return batch.queries(), batch.memory, given | ({} if lse is None else {"lse": lse.tensor})


def refused(name: str, *memory: Any, q: Any = None, **changes: Any) -> str:
    queries, own, given = operands(name)
    plan = plan_of(name)
    for key, change in changes.items():
        given[key] = change
    with pytest.raises(EpicuteError) as caught:
        plan.run(queries if q is None else q, *(memory or own), **given)
    text = str(caught.value)
    assert "got" in text
    assert "expected" in text
    assert "Fix:" in text
    return text


@pytest.mark.compile
def test_names_and_q_are_checked_anywhere() -> None:
    _, (records, delta), _ = operands("exact16")
    assert "memory" in refused("exact16", records)
    assert "memory" in refused("exact16", records, delta, delta)
    assert "memory" in refused("fp8", records)
    assert "q_mean" in refused("exact16", q_mean=None)
    assert "q_mean" in refused("fp8", q_mean=torch.zeros(1))
    assert "no k_scale" in refused("fast8", k_scale=None)
    assert "no v_scale" in refused("fp8", v_scale=None)
    assert "sinks too many" in refused("exact16", sinks=torch.zeros(32))
    assert "shift" in refused("exact16", shift=1)
    assert "shift" in refused("fast8", shift=65)
    assert "shift" in refused("fast8", shift=1.0)
    assert refused("exact16", q=operands("exact16")[0].float()).startswith("q:")


@pytest.mark.compile
@pytest.mark.parametrize("name", NAMES)
def test_without_a_gpu_the_error_says_so(name: str) -> None:
    queries, memory, given = operands(name)
    with pytest.raises(ArgumentError, match="a CUDA tensor"):
        plan_of(name).run(
            queries.cpu(), *(x.cpu() for x in memory), **{k: x.cpu() for k, x in given.items()}
        )


@pytest.mark.compile
def test_plans() -> None:
    with pytest.raises(ArgumentError, match="MixedSpec"):
        plan_mixed("nvfp4")  # type: ignore[arg-type]
    plan = plan_mixed(MixedSpec(32, 8, 128, precision="bf16/bf16"), target=Target("sm_90a"))
    assert type(plan) is AttentionPlan


WRONG = [
    ("exact16", "memory", lambda m: (m[0][:, :, :-16], m[1])),
    ("exact16", "memory", lambda m: (m[0].view(torch.int8), m[1])),
    ("exact16", "memory", lambda m: (m[0], m[1][:, :, :1])),
    ("exact16", "memory", lambda m: (m[0], m[1].float())),
    ("fp8", "memory", lambda m: (m[0].view(torch.uint8), m[1])),
    ("fp8", "memory", lambda m: (m[0], m[1][1:])),
    ("exact16", "q_mean", lambda x: x[..., :64]),
    ("exact16", "q_mean", lambda x: x.double()),
    ("exact16", "q_mean", lambda x: x.repeat(3, 1, 1)),
    ("exact16", "k_scale", lambda x: x[:1]),
    ("exact16", "page_table", lambda x: x.long()),
    ("fp8", "kv_starts", lambda x: x.long()),
]


@pytest.mark.gpu
@pytest.mark.parametrize(("name", "argument", "change"), WRONG)
def test_pp_11_what_does_not_fit_is_refused(name: str, argument: str, change: Any) -> None:
    _, memory, given = operands(name)
    if argument == "memory":
        refused(name, *change(memory))
    else:
        assert argument in refused(name, **{argument: change(given[argument])})
