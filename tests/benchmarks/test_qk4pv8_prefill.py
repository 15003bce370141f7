"""Table ``qk4pv8-prefill`` on the CPU at tiny sizes: caches hold what was quantised, rows are rows of a table."""

from __future__ import annotations

import pytest
import torch

from benchmarks import qk4pv8_prefill as module
from benchmarks.harness import Options
from benchmarks.qk4pv8_prefill import VARIANTS, Mixed, cases, kernels, said
from epicute.attention.mixed import mixed_unsupported
from epicute.kv.qk4pv8 import Memory, QK4PV8Cache

OPTIONS = Options((), device="cpu", check_rows=8)


@pytest.fixture
def found() -> Mixed:
    return Mixed((300, 300), 128, OPTIONS, heads=4, kv_heads=2, copies=2)


@pytest.mark.parametrize("variant", VARIANTS, ids=said)
def test_caches_hold_what_was_quantised(found: Mixed, variant: dict[str, str]) -> None:
    spec = found.spec(variant)
    assert mixed_unsupported(spec) is None
    first, second = found.memory(spec)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    if spec.recorded:
        cache = QK4PV8Cache(found.table.numel(), 2, 4, spec.record, spec.terms)
        memory = Memory(first[0], first[1] if spec.terms else None)
        means = found.means if spec.terms else None
        wanted = cache.quantize(found.k[0], found.v[0], means)
        got = cache.fetch(memory, found.slots)
        assert torch.equal(got.codes, wanted.codes)
        assert torch.equal(got.values.view(torch.uint8), wanted.values.view(torch.uint8))
    else:
        for pool, x in zip(first, (found.k[0], found.v[0]), strict=True):
            rows = pool.flatten(0, 1)[found.slots].float()
            assert ((rows - x.float()).abs() <= 0.0626 * x.float().abs() + 1e-2).all()
    assert found.floor_of(spec) > 0


def test_exact16_has_the_higher_floor(found: Mixed) -> None:
    found.lengths = (300, 300)
    exact, fast = (found.floor_of(found.spec(VARIANTS[i])) for i in (0, 3))
    assert exact >= fast


def test_cases_and_kernels() -> None:
    some = Options((), device="cpu", lengths=(4096,))
    assert [(c.heads, c.kv_heads, len(c.lengths)) for c in cases(some)] == [(32, 8, 4), (40, 8, 4)]
    assert len(list(kernels(some))) == 2 * (len(VARIANTS) + 1)
    assert len({said(v) for v in VARIANTS}) == len(VARIANTS)
    assert set(module.peers()) == {"ours-bf16", "fa4", "sdpa-cudnn", "sdpa-flash"}
