"""Operands that do not fit are refused by name before any launch."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from epicute import Target
from epicute.attention import AttentionPlan, AttentionSpec, kernel_for
from epicute.attention.plan import _overlap
from epicute.errors import ArgumentError, EpicuteError
from tests.attention.cases import SPECS, Batch

SPEC = SPECS["40:8, page 16"]


@pytest.fixture(scope="module")
def plan() -> AttentionPlan:
    return AttentionPlan(kernel_for(SPEC, target=Target("sm_90a")))


def operands(batch: Batch) -> dict[str, Any]:
    q, k, v = batch.tensors
    assert batch.lse is not None
    given = {"q": q, "k": k, "v": v, "out": batch.out.tensor, "lse": batch.lse.tensor}
    return given | batch.operands


def changed(**changes: Any) -> dict[str, Any]:
    given = operands(Batch.draw(SPEC, [(5, 20), (3, 3)], 0))
    for name, change in changes.items():
        if change is None:
            del given[name]
        else:
            given[name] = change(given.get(name))
    return given


def refused(plan: AttentionPlan, given: dict[str, Any]) -> str:
    with pytest.raises(EpicuteError) as caught:
        plan.run(**given)
    text = str(caught.value)
    assert "got" in text
    assert "expected" in text
    assert "Fix:" in text
    return text


@pytest.mark.compile
def test_names_and_q_are_checked_anywhere(plan: AttentionPlan) -> None:
    assert "no lse" in refused(plan, changed(lse=None))
    assert "sinks too many" in refused(plan, changed(sinks=lambda _: torch.zeros(40)))
    assert "kv_lengths" in refused(plan, changed(kv_lengths=lambda _: 7))
    assert refused(plan, changed(q=lambda q: q.float())).startswith("q: got (8, 40, 128)")
    assert refused(plan, changed(q=lambda q: q[:, :8])).startswith("q:")
    assert refused(plan, changed(q=lambda q: q.transpose(0, 1))).startswith("q:")


@pytest.mark.compile
def test_without_a_gpu_the_error_says_so(plan: AttentionPlan) -> None:
    given = {name: x.cpu() for name, x in changed().items()}
    assert "a CUDA tensor" in refused(plan, given)


WRONG = [
    ("out", lambda x: x.half()),
    ("out", lambda x: x[:4]),
    ("k", lambda x: x.half()),
    ("k", lambda x: x.transpose(1, 2)),
    ("v", lambda x: x[:, :8]),
    ("v", lambda x: x[1:]),
    ("q_starts", lambda x: x.long()),
    ("q_starts", lambda x: x.repeat(2)[::2]),
    ("kv_lengths", lambda x: x[:1]),
    ("page_table", lambda x: x[:1]),
    ("page_table", lambda x: x.long()),
    ("page_table", lambda x: x.T.contiguous().T),
    ("lse", lambda x: x[:, :3]),
    ("lse", lambda x: x.double()),
    ("lse", lambda x: x.T.contiguous().T),
    ("q", lambda x: torch.nn.functional.pad(x, (1, 0))[..., 1:]),
    ("kv_lengths", lambda x: x.cpu()),
]


@pytest.mark.gpu
@pytest.mark.parametrize(("name", "change"), WRONG)
def test_pp_11_what_does_not_fit_is_refused(plan: AttentionPlan, name: str, change: Any) -> None:
    text = refused(plan, changed(**{name: change}))
    assert name in text or text.startswith("operands")


@pytest.mark.gpu
def test_strided_views_are_served(plan: AttentionPlan) -> None:
    """Heads cut out of a fused projection, and an output with gaps."""
    batch = Batch.draw(SPEC, [(5, 20), (3, 3)], 0)
    given = operands(batch)
    plan.run(**given)
    wide = torch.full((8, 60, 128), float("nan"), dtype=torch.bfloat16, device="cuda")
    wide[:, 10:50] = given["q"]
    spread = torch.zeros(8, 40, 136, dtype=torch.bfloat16, device="cuda")
    plan.run(**given | {"q": wide[:, 10:50], "out": spread[..., :128]})
    torch.cuda.synchronize()
    assert torch.equal(spread[..., :128], batch.out.tensor)
    assert not spread[..., 128:].any()


def test_what_shares_memory() -> None:
    fused = torch.zeros(9, 12, 16)
    q, k, v = fused[:, :8], fused[:, 8:10], fused[:, 10:]
    for one, two in ((q, k), (k, v), (q, v)):
        assert not _overlap(one, two)
        assert not _overlap(two, one)
        assert _overlap(one, one)
    assert _overlap(fused[:, :9], k)
    assert _overlap(fused[:5], fused[4:])
    assert not _overlap(fused[:4], fused[4:])
    assert not _overlap(fused[:0], fused)
    assert _overlap(fused.view(-1)[: 9 * 80].view(9, 5, 16), k)
    batched = torch.zeros(3, 9, 12, 16)
    assert not _overlap(batched[:, :, :8], batched[:, :, 8:])
    assert _overlap(batched[:, :, :9], batched[:, :, 8:])


@pytest.mark.gpu
def test_out_over_keys_is_refused_and_over_q_is_served(plan: AttentionPlan) -> None:
    given = changed()
    pool = given["k"].transpose(1, 2)  # pages are heads first in memory
    assert pool.is_contiguous()
    within = pool.view(-1)[:40960].view(8, 40, 128)
    assert "apart from k" in refused(plan, given | {"out": within})
    plan.run(**given)
    wanted = given["out"].clone()
    plan.run(**given | {"out": given["q"]})
    torch.cuda.synchronize()
    assert torch.equal(given["q"], wanted)


@pytest.mark.compile
def test_a_spec_is_asked_for() -> None:
    from epicute.attention import plan_attention

    with pytest.raises(ArgumentError, match="AttentionSpec"):
        plan_attention("causal")  # type: ignore[arg-type]
    with pytest.raises(EpicuteError, match="head_dim"):
        plan_attention(replace(AttentionSpec(8, 8, 128), head_dim=40))
