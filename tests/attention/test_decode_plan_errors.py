"""Operands that do not fit are refused by name before any launch."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from epicute.attention.decode import DecodeWorkspace, plan_decode
from epicute.attention.decode_build import decode_kernel_for
from epicute.attention.decode_operands import Binder
from epicute.attention.decode_schedule import choose_decode
from epicute.attention.decode_spec import DecodeSpec
from epicute.errors import ArgumentError, EpicuteError
from epicute.jit import DEFAULT_TARGET
from tests.attention.decode_cases import DEVICE, Decoded
from tests.attention.decode_emulated import workspace
from tests.attention.decode_specs import FP8, SPECS

SPEC = SPECS["fp8"]
RECORDS = SPECS["int4"]
CTAS = 4


def bound(spec: DecodeSpec, **changes: Any) -> tuple[int, ...] | None:
    """Bind a good batch with some operands changed; None takes one away."""
    batch = Decoded.draw(spec, [20, 3], 0)
    binder, schedule = Binder(spec, choose_decode(spec)), choose_decode(spec)
    given: dict[str, Any] = {"q": batch.q, "cache": batch.cache, **batch.given()}
    memory = workspace(spec, schedule, 2, CTAS)
    given["workspace"] = DecodeWorkspace(memory.counters.to(DEVICE), memory.data.to(DEVICE))
    for name, change in changes.items():
        if change is None:
            del given[name]
        else:
            given[name] = change(given.get(name))
    q, cache = given.pop("q"), given.pop("cache")
    return binder.bind(q, cache, CTAS, given)


def refused(spec: DecodeSpec, **changes: Any) -> str:
    with pytest.raises(EpicuteError) as caught:
        bound(spec, **changes)
    text = str(caught.value)
    for word in ("got", "expected", "Fix:"):
        assert word in text
    return text


def test_a_good_batch_binds() -> None:
    for name, spec in SPECS.items():
        assert bound(spec) is not None, name


def test_names() -> None:
    assert "no lse" in refused(SPEC, lse=None)
    assert "no k_scale" in refused(SPEC, k_scale=None)
    assert "no new_k" in refused(RECORDS, new_k=None)
    assert "sinks too many" in refused(SPEC, sinks=lambda _: torch.zeros(32))
    assert "new_v too many" in refused(SPEC, new_v=lambda _: torch.zeros(32))
    assert "kv_lengths" in refused(SPEC, kv_lengths=lambda _: 7)


def test_rows() -> None:
    assert refused(SPEC, q=lambda q: q.float()).startswith("q:")
    assert refused(SPEC, q=lambda q: q[:, :, :8]).startswith("q:")
    assert refused(SPEC, q=lambda _: None).startswith("q:")
    assert refused(SPEC, q=lambda q: q.transpose(2, 3)).startswith("q:")
    assert refused(SPEC, out=lambda x: x[:1]).startswith("out:")
    assert refused(SPEC, out=lambda x: x.half()).startswith("out:")
    assert refused(RECORDS, new_k=lambda x: x[..., 1:]).startswith("new_k:")
    shifted = lambda q: torch.zeros(q.numel() + 1, dtype=q.dtype, device=q.device)[1:].view(q.shape)  # noqa: E731
    assert "16 bytes" in refused(SPEC, q=shifted)


def test_one_row_needs_no_axis() -> None:
    one = bound(SPEC, q=lambda q: q[:, 0], out=lambda x: x[:, 0], lse=lambda x: x[:, :, 0])
    assert one is not None
    assert refused(replace(SPEC, rows=2), q=lambda q: q[:, 0]).startswith("q:")


def test_caches() -> None:
    assert refused(SPEC, cache=lambda c: c[0]).startswith("cache:")
    assert refused(SPEC, cache=lambda c: (c[0].float(), c[1])).startswith("k:")
    assert refused(SPEC, cache=lambda c: (c[0], c[1][:-1])).startswith("v:")
    assert refused(SPEC, cache=lambda c: (c[0][:, :8], c[1][:, :8])).startswith("k:")
    assert "transpose" in refused(SPEC, cache=lambda c: tuple(x.transpose(1, 2) for x in c))
    assert refused(SPEC, cache=lambda c: (c[0][:, :1].expand_as(c[0]), c[1])).startswith("k:")
    assert refused(RECORDS, cache=lambda c: c[:, :4]).startswith("cache.shape")
    assert refused(RECORDS, cache=lambda c: c[..., :-16]).startswith("memory")
    assert refused(RECORDS, cache=lambda c: (c, c)).startswith("cache:")
    dense = SPECS["int4, heads of 64, contiguous, 3 rows"]
    assert refused(dense, cache=lambda c: c[:1]).startswith("cache.shape")


def test_vectors() -> None:
    for name, change in (
        ("kv_lengths", lambda x: x.long()),
        ("kv_lengths", lambda x: x[:1]),
        ("page_table", lambda x: x.long()),
        ("page_table", lambda x: x[:1]),
        ("page_table", lambda x: x.T.contiguous().T),
        ("k_scale", lambda x: x[:4]),
        ("v_scale", lambda x: x.double()),
        ("lse", lambda x: x.double()),
        ("lse", lambda x: x[:, :4]),
    ):
        assert refused(SPEC, **{name: change}).startswith(f"{name}:"), name
    quantised = replace(SPEC, out_dtype=FP8)
    for name in ("out_scale", "amax", "saturated", "nans"):
        assert refused(quantised, **{name: lambda x: x.half()}).startswith(f"{name}:")


def test_kd_06_outputs_lie_apart_from_what_is_read() -> None:
    batch = Decoded.draw(SPEC, [20, 3], 0)
    q = batch.q
    inside = torch.empty(q.numel() + 64, dtype=q.dtype, device=q.device)
    first, second = inside[:-64].view(q.shape), inside[64:].view(q.shape)
    assert "memory apart from q" in refused(SPEC, q=lambda _: first, out=lambda _: second)
    assert bound(SPEC, q=lambda _: first, out=lambda _: first) is not None


def test_workspaces() -> None:
    assert refused(SPEC, workspace=None).startswith("operands: got no workspace")
    assert refused(SPEC, workspace=lambda _: torch.zeros(9)).startswith("workspace:")
    small = lambda w: DecodeWorkspace(w.counters[:1], w.data)  # noqa: E731
    assert refused(SPEC, workspace=small).startswith("workspace:")
    assert refused(SPEC, workspace=lambda w: DecodeWorkspace(w.counters, w.data[:9]))
    shifted = lambda w: DecodeWorkspace(w.counters, torch.cat([w.data, w.data[:9]])[1:])  # noqa: E731
    assert "multiples of 16 bytes" in refused(SPEC, workspace=shifted)
    binder = Binder(SPEC, choose_decode(SPEC))
    with pytest.raises(ArgumentError, match="batch"):
        binder.workspace(-1, 4)


def test_no_request_is_no_launch() -> None:
    empty = Decoded.draw(SPEC, [20, 3], 0)
    binder = Binder(SPEC, choose_decode(SPEC))
    given = {name: x for name, x in empty.given().items() if x is not None}
    given |= {"out": given["out"][:0], "lse": given["lse"][:0]}
    given |= {"kv_lengths": given["kv_lengths"][:0], "page_table": given["page_table"][:0]}
    given["workspace"] = workspace(SPEC, choose_decode(SPEC), 0, CTAS)
    if DEVICE == "cpu":
        assert binder.bind(empty.q[:0], empty.cache, CTAS, given) is None


@pytest.mark.compile
def test_a_plan_wants_a_spec_and_a_gpu() -> None:
    with pytest.raises(ArgumentError, match="DecodeSpec"):
        plan_decode("bf16")  # type: ignore[arg-type]
    plan = plan_decode(SPEC, target=DEFAULT_TARGET)
    assert "decode 32:8" in str(plan)
    assert plan.kernel.key.digest == decode_kernel_for(SPEC, target=DEFAULT_TARGET).key.digest
    batch = Decoded.draw(SPEC, [5], 0)
    memory = workspace(SPEC, choose_decode(SPEC), 1, 1)
    with pytest.raises(ArgumentError, match="CUDA tensor"):
        plan.run(batch.q.cpu(), batch.cache, workspace=memory, **batch.given())
