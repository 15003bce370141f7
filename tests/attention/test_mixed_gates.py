"""Every mixed-precision variant compiles to code that may run: no spills, no serialised WGMMA."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import cycle, product

import pytest
import torch

from epicute.attention.mixed import (
    PLACEMENTS,
    PVS,
    MixedKernel,
    MixedSpec,
    choose_mixed,
    mixed_kernel_for,
    mixed_unsupported,
)
from epicute.attention.spec import PAGES
from epicute.jit import DEFAULT_TARGET, compile
from epicute.layouts.qk4pv8 import HEAD_DIMS, PAGE_SIZES
from tests.attention.mixed_cases import FP8, SPECS


def gate(spec: MixedSpec, record: Callable[[str, object], None]) -> None:
    """Compile strictly and note what the compiler said."""
    kernel = mixed_kernel_for(spec, target=DEFAULT_TARGET)
    assert isinstance(kernel, MixedKernel)
    report = compile(kernel, strict=False).report
    record("schedule", str(kernel.schedule))
    record("seconds", round(report.seconds, 2))
    report.check(str(spec), DEFAULT_TARGET.smem_per_block)
    assert report.registers is not None
    assert report.registers <= 128
    assert report.shared_memory is not None
    assert report.shared_memory <= kernel.shared_memory <= DEFAULT_TARGET.smem_per_block


def every_spec() -> list[MixedSpec]:
    """Precisions, placements, terms, pages and head dimensions in full; masks, outputs and ratios of heads in turn."""
    masks = cycle(
        [
            {"causal": False},
            {"causal": True},
            {"causal": True, "window": 300, "sinks": True, "lse": True},
            {"causal": True, "softcap": 30.0, "lse": True, "packed": False},
            {"causal": True, "out_dtype": FP8},
        ]
    )
    heads = cycle([(32, 8), (9, 3), (8, 8)])
    dtypes = cycle([torch.bfloat16, torch.bfloat16, torch.float16])
    scales = cycle([448, 256])
    found = []
    ways = [("acc_init", 0), *product(PLACEMENTS, (1, 2))]
    for qk, pv, way, d, page in product(("exact16", "fast8"), PVS, ways, HEAD_DIMS, PAGE_SIZES):
        placement, terms = way
        q_heads, kv_heads = next(heads)
        spec = MixedSpec(q_heads, kv_heads, d, qk=qk, pv=pv, terms=terms, placement=placement)
        found.append(
            replace(spec, page=page, dtype=next(dtypes), p_scale=next(scales), out_dtype=None)
        )
    for pv, d, page in product(PVS, HEAD_DIMS, (None, *PAGES)):
        q_heads, kv_heads = next(heads)
        spec = MixedSpec(q_heads, kv_heads, d, precision="fp8/fp8", pv=pv, page=page)
        found.append(replace(spec, dtype=next(dtypes), out_dtype=None))
    return [replace(spec, **next(masks)) for spec in found]


@pytest.mark.compile
@pytest.mark.parametrize("name", SPECS)
def test_covering_set(name: str, record_property: Callable[[str, object], None]) -> None:
    gate(SPECS[name], record_property)


@pytest.mark.gates
@pytest.mark.parametrize("spec", every_spec(), ids=str)
def test_every_variant(spec: MixedSpec, record_property: Callable[[str, object], None]) -> None:
    gate(spec, record_property)


def test_the_covering_set_covers() -> None:
    specs = SPECS.values()
    recorded = [s for s in specs if s.recorded]
    assert {s.head_dim for s in specs} == set(HEAD_DIMS)
    assert {s.page for s in recorded} == set(PAGE_SIZES)
    assert {(s.qk, s.pv) for s in recorded} == set(product(("exact16", "fast8"), PVS))
    assert {(s.qk, s.placement) for s in recorded if s.terms} == set(
        product(("exact16", "fast8"), PLACEMENTS)
    )
    assert {s.terms for s in recorded} == {0, 1, 2, 3}
    assert {s.p_scale for s in specs} == {448, 256}
    assert {s.packed for s in specs} == {s.causal for s in specs} == {True, False}
    assert {choose_mixed(s).cluster for s in specs} == {1, 2}
    assert {choose_mixed(s).overlap for s in specs} == {True, False}
    for name in ("window", "softcap"):
        assert {getattr(s, name) is None for s in specs} == {True, False}
    assert len(SPECS) <= 16
    assert all(mixed_unsupported(spec) is None for spec in every_spec())
