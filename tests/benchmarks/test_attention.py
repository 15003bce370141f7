"""Table ``attention``, end to end on the CPU at tiny sizes: PyTorch stands in for every kernel."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend

import epicute.attention
from benchmarks import attention, mixes
from benchmarks.attention import Attention, attended
from benchmarks.harness import Options, Session
from benchmarks.provenance import Provenance
from benchmarks.table import render, validate
from benchmarks.timing import Timer

LENGTHS = (16, 70, 1, 33)


def sdpa(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """(B, S, H, D) of the same."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    return out.transpose(1, 2)


def packed(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, starts: torch.Tensor) -> torch.Tensor:
    bounds = list(zip(starts.tolist(), starts.tolist()[1:], strict=False))
    return torch.cat([sdpa(*(x[None, a:b] for x in (q, k, v)))[0] for a, b in bounds])


class CpuPlan:
    """``AttentionPlan`` as PyTorch computes it."""

    def __init__(self, spec: epicute.attention.AttentionSpec) -> None:
        assert spec.causal
        assert spec.page is None
        self.spec = spec

    def run(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, out: torch.Tensor, **given: Any
    ) -> None:
        assert set(given) == ({"q_starts", "kv_starts"} if self.spec.packed else set())
        assert q.shape == out.shape
        assert q.dim() == (3 if self.spec.packed else 4)
        out.copy_(packed(q, k, v, given["q_starts"]) if given else sdpa(q, k, v))


@pytest.fixture
def planned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ours, FlashAttention-4 and all back-ends, as far as a CPU has them."""
    monkeypatch.setattr(epicute.attention, "plan_attention", CpuPlan, raising=False)
    fake = ModuleType("flash_attn.cute")

    def dense(q: Any, k: Any, v: Any, causal: bool) -> tuple[torch.Tensor, None]:
        return sdpa(q, k, v), None

    def ragged(
        q: Any, k: Any, v: Any, *, max_seqlen_q: int, max_seqlen_k: int, **given: Any
    ) -> tuple[torch.Tensor, None]:
        assert given["causal"]
        assert max_seqlen_q == max_seqlen_k == max(LENGTHS)
        return packed(q, k, v, given["cu_seqlens_q"]), None

    fake.flash_attn_func, fake.flash_attn_varlen_func = dense, ragged  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "flash_attn", ModuleType("flash_attn"))
    monkeypatch.setitem(sys.modules, "flash_attn.cute", fake)
    backends = {"sdpa-cudnn": SDPBackend.MATH, "sdpa-flash": SDPBackend.FLASH_ATTENTION}
    monkeypatch.setattr(attention, "BACKENDS", backends)


@pytest.fixture
def options() -> Options:
    return Options((), device="cpu", rounds=2, check_rows=9, lengths=(64,))


@pytest.fixture
def mix(options: Options, monkeypatch: pytest.MonkeyPatch) -> Attention:
    monkeypatch.setitem(mixes.MIXES, "tiny", LENGTHS)
    return Attention(LENGTHS, 64, options, mix="tiny", heads=4, kv_heads=2, copies=2)


def measured(found: Attention, timer: Timer, source: Provenance) -> dict[str, Any]:
    (row,) = (row.json() for row in attention.measure(found, Session(timer, rounds=2)))
    head = dict.fromkeys(["paper", "protocol", "floor"], "said")
    table = {"table": "attention", **head, **vars(source), "rows": [row]}
    validate(table)
    if row["ours_us"] and row["peers_us"]:
        assert f"head_dim 64, mix {found.mix or '-'}, fa4 over ours" in render(table)
    return row


@pytest.mark.usefixtures("planned")
def test_equal_requests(options: Options, timer: Timer, source: Provenance) -> None:
    found = Attention((80, 80), 64, options, heads=4, kv_heads=2, copies=2)
    row = measured(found, timer, source)
    assert "failed" not in row, row["failed"]
    assert [*row["peers_us"]] == ["fa4", "sdpa-cudnn", "sdpa-flash"]
    assert 1e-4 < row["error"]["norm"] < row["error"]["worst_row"] < 1e-2
    sizes = {"batch": 2, "length": 80, "heads": 4, "kv_heads": 2, "head_dim": 64, "causal": True}
    assert row["case"] == {"cache": "bf16", **sizes}


@pytest.mark.usefixtures("planned")
def test_a_mix(mix: Attention, timer: Timer, source: Provenance) -> None:
    row = measured(mix, timer, source)
    assert "failed" not in row, row["failed"]
    assert [*row["peers_us"]] == ["fa4"]
    assert (row["case"]["M"], row["case"]["mix"]) == (120, "tiny")
    assert 1e-4 < row["error"]["norm"] < 1e-2


@pytest.mark.usefixtures("planned")
def test_the_reference_sees_no_later_key_and_no_other_request(mix: Attention) -> None:
    mix.rows = torch.arange(mix.tokens)
    exact = mix.exact()
    assert exact.shape == (120, 256)
    again = packed(*(x[0].double() for x in (mix.q, mix.k, mix.v)), mix.starts)
    torch.testing.assert_close(exact, again.reshape(120, -1))


def test_one_key_gives_its_value() -> None:
    q, k, v = (torch.randn(1, h, 8, dtype=torch.float64) for h in (4, 2, 2))
    out = attended(q, k, v, torch.tensor([0])).view(4, 8)
    torch.testing.assert_close(out, v[0].repeat_interleave(2, dim=0))


@pytest.mark.usefixtures("planned")
def test_a_wrong_row_is_never_timed(
    mix: Attention, monkeypatch: pytest.MonkeyPatch, timer: Timer, source: Provenance
) -> None:
    right = CpuPlan.run

    def run(self: Any, q: Any, k: Any, v: Any, *, out: torch.Tensor, **given: Any) -> None:
        right(self, q, k, v, out=out, **given)
        out[-1] = float("nan")

    monkeypatch.setattr(CpuPlan, "run", run)
    row = measured(mix, timer, source)
    assert row["ours_us"] is None
    assert row["failed"]["ours"].startswith("WrongResult")
    assert row["peers_us"]


def test_a_missing_peer_is_named(
    mix: Attention, monkeypatch: pytest.MonkeyPatch, timer: Timer, source: Provenance
) -> None:
    monkeypatch.setattr(epicute.attention, "plan_attention", CpuPlan, raising=False)
    monkeypatch.setitem(sys.modules, "flash_attn.cute", None)
    row = measured(mix, timer, source)
    assert row["ours_us"]
    assert "flash_attn" in row["failed"]["fa4"]


def test_cases_have_tokens_enough() -> None:
    lengths = (2048, 4096, 8192, 16384, 32768)
    found = list(attention.cases(Options((), device="cpu", lengths=lengths)))
    equal = [case for case in found if case.mix is None]
    assert [(len(c.lengths), c.lengths[0], c.head_dim) for c in equal] == [
        (batch, length, dim)
        for dim in (128, 64)
        for batch, length in zip((8, 4, 2, 1, 1), lengths, strict=True)
    ]
    assert all(case.tokens >= 16384 for case in equal)
    assert {case.mix for case in found} - {None} == set(mixes.MIXES) - {"equal"}
    assert {(c.case["length"], c.head_dim) for c in found if c.mix} == {(8192, 128)}


def test_kernels_are_known_without_data(options: Options) -> None:
    found = list(attention.kernels(options))
    specs = [(kernel.spec.head_dim, kernel.spec.packed) for kernel in found]
    assert specs == [(128, False), (64, False), (128, True)]
    assert len({kernel.key.digest for kernel in found}) == 3
    assert all((k.spec.heads, k.spec.kv_heads, k.spec.causal) == (32, 8, True) for k in found)


@pytest.mark.usefixtures("planned")
def test_a_table_file(
    options: Options,
    monkeypatch: pytest.MonkeyPatch,
    timer: Timer,
    source: Provenance,
    tmp_path: Path,
) -> None:
    tiny = Attention((64,), 64, options, heads=4, kv_heads=2, copies=2)
    monkeypatch.setattr(attention, "cases", lambda options: [tiny])
    table = attention.table(options, timer, source, tmp_path)
    validate(table.content)
    assert (tmp_path / "attention.json").exists()
    assert [row["case"]["length"] for row in table.rows] == [64]
