"""Table ``decode-attention``, end to end on the CPU at tiny sizes: PyTorch stands in for every kernel."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend

import epicute.attention.decode
from benchmarks import decode_attention
from benchmarks.decode_attention import Decode, attended
from benchmarks.harness import Options, Session
from benchmarks.provenance import Provenance
from benchmarks.table import validate
from benchmarks.timing import Timer
from epicute.attention.decode_spec import DecodeSpec
from epicute.kv.int4 import Int4Cache
from epicute.layouts.kv_int4 import Int4Record
from epicute.quant.hadamard import rotate


class CpuPlan:
    """``DecodePlan`` as PyTorch computes it."""

    def __init__(self, spec: DecodeSpec) -> None:
        self.spec = spec

    def workspace(self, batch: int) -> int:
        return batch

    def run(self, q: torch.Tensor, cache: Any, *, out: torch.Tensor, **given: Any) -> None:
        spec, page = self.spec, self.spec.page
        assert page is not None
        wanted = {"workspace", "kv_lengths", "page_table"}
        wanted |= {"new_k", "new_v"} if spec.append else set()
        wanted |= {"k_scale", "v_scale"} if spec.cache == "fp8" else set()
        assert set(given) == wanted
        for b, n in enumerate(given["kv_lengths"].tolist()):
            tokens = torch.arange(n)
            slots = given["page_table"][b].long()[tokens // page] * page + tokens % page
            if spec.packed:
                record = Int4Record(page, spec.head_dim)
                kind = Int4Cache(cache.shape[0], spec.kv_heads, record, spec.rotation)
                rows = [given[name][b : b + 1] for name in ("new_k", "new_v")]
                kind.write(cache, *rows, slots[-1:])
                k, v = kind.read(cache, slots)
                turned = attended(rotate(q[b]).double(), k.double(), v.double())
                out[b] = rotate(turned.float()).to(out.dtype)
            else:
                k, v = (x[slots // page, slots % page].double() for x in cache)
                out[b] = attended(q[b].double(), k, v).to(out.dtype)


@pytest.fixture
def planned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ours, FlashAttention-4 and all back-ends, as far as a CPU has them."""
    monkeypatch.setattr(epicute.attention.decode, "plan_decode", CpuPlan)
    fake = ModuleType("flash_attn.cute")

    def dense(q: Any, k: Any, v: Any, causal: bool) -> tuple[torch.Tensor, None]:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v, enable_gqa=True), None

    fake.flash_attn_func = dense  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "flash_attn", ModuleType("flash_attn"))
    monkeypatch.setitem(sys.modules, "flash_attn.cute", fake)
    backends = {"sdpa-cudnn": SDPBackend.MATH, "sdpa-flash": SDPBackend.FLASH_ATTENTION}
    monkeypatch.setattr(decode_attention, "BACKENDS", backends)


@pytest.fixture
def options() -> Options:
    return Options((), device="cpu", rounds=2, check_rows=3)


@pytest.mark.usefixtures("planned")
@pytest.mark.parametrize("cache", ["bf16", "fp8", "int4"])
def test_a_row(cache: str, options: Options, timer: Timer, source: Provenance) -> None:
    found = Decode(cache, 3, 130, 4, 2, options, copies=2)
    (row,) = (row.json() for row in decode_attention.measure(found, Session(timer, rounds=2)))
    head = dict.fromkeys(["paper", "protocol", "floor"], "said")
    validate({"table": "decode-attention", **head, **vars(source), "rows": [row]})
    assert row["ours_us"]
    assert set(row["peers_us"]) == (
        {"fa4", "sdpa-cudnn", "sdpa-flash"} if cache == "bf16" else {"ours-bf16"}
    )
    assert row["error"]["norm"] < 0.01
    assert row["case"]["cache"] == cache


@pytest.mark.usefixtures("planned")
def test_a_wrong_row_is_never_timed(
    options: Options, timer: Timer, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = CpuPlan.run

    def wrong(self: CpuPlan, q: torch.Tensor, cache: Any, **given: Any) -> None:
        right(self, q, cache, **given)
        given["out"][-1, 0] *= 1.2

    monkeypatch.setattr(CpuPlan, "run", wrong)
    found = Decode("fp8", 3, 70, 4, 2, options, copies=2)
    (row,) = (row.json() for row in decode_attention.measure(found, Session(timer, rounds=2)))
    assert row["ours_us"] is None
    assert "WrongResult" in row["failed"]["ours"]


def test_bytes_and_floors(options: Options) -> None:
    sizes = {"bf16": 512, "fp8": 256, "int4": 136}
    for cache, each in sizes.items():
        found = Decode(cache, 32, 4096, 32, 8, options)
        assert found.bytes == 32 * (4096 * 8 * each + 4 * 32 * 128)
        assert found.floor_us == pytest.approx(found.bytes / 4.8e6)
        assert found.copies >= 4


def test_cases_are_those_of_the_targets(options: Options) -> None:
    found = [(c.cache, c.batch, c.context) for c in decode_attention.cases(options)]
    for cache in ("bf16", "fp8", "int4"):
        for batch, context in ((32, 4096), (32, 16384), (1, 131072), (1, 1024), (8, 1024)):
            assert (cache, batch, context) in found
    assert {c.heads for c in decode_attention.cases(options)} == {32, 64, 128}


def test_kernels_are_known_without_data(options: Options) -> None:
    found = list(decode_attention.kernels(options))
    assert len(found) == 9
    assert len({kernel.key.digest for kernel in found}) == 9


@pytest.mark.usefixtures("planned")
def test_a_table_file(
    options: Options,
    timer: Timer,
    source: Provenance,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(decode_attention, "CONTEXTS", {(4, 2): {2: (65,)}})
    monkeypatch.setattr(decode_attention, "copies_for", lambda _: 1)
    table = decode_attention.table(options, timer, source, tmp_path)
    assert (tmp_path / "decode-attention.json").exists()
    assert len(table.rows) == 3
