"""Every kernel variant compiles to code that may run: no spills, no serialised WGMMA, shared memory that fits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import product

import pytest
import torch

from epicute.attention import AttentionSpec, kernel_for, unsupported
from epicute.attention.spec import HEAD_DIMS, PAGES
from epicute.jit import DEFAULT_TARGET, compile
from epicute.jit.report import FATAL
from tests.attention.cases import FP8, SPECS


def gate(spec: AttentionSpec, record: Callable[[str, object], None]) -> None:
    """Compile strictly and note what the compiler said."""
    kernel = kernel_for(spec, target=DEFAULT_TARGET)
    report = compile(kernel, strict=False).report
    schedule = kernel.schedule
    record("tile", f"attention {schedule.tile_m}x{schedule.tile_n}")
    record("dtype", str(spec.dtype).removeprefix("torch."))
    record("accumulate", "fast")
    record("hazards", sum(said.startswith(FATAL) for said in report.warnings))
    record("registers", report.registers)
    record("shared_memory", report.shared_memory)
    record("spilled", max(report.spill_stores, report.spill_loads))
    record("seconds", round(report.seconds, 2))
    report.check(str(spec), DEFAULT_TARGET.smem_per_block)
    assert report.registers is not None
    assert report.registers <= 168
    assert report.shared_memory is not None
    assert report.shared_memory <= kernel.shared_memory <= DEFAULT_TARGET.smem_per_block


def every_spec() -> list[AttentionSpec]:
    """Head dimensions, layouts, dtypes and masks in full; window, cap and sinks beside them in turn."""
    found = []
    plain = AttentionSpec(8, 4, 128)
    masks = [
        {"causal": False},
        {"causal": True},
        {"causal": True, "window": 300, "sinks": True},
        {"causal": True, "softcap": 30.0, "lse": True},
    ]
    turns = 0
    for head_dim, page, packed in product(HEAD_DIMS, (None, *PAGES), (True, False)):
        for dtype, kv, out in (
            (torch.bfloat16, None, None),
            (torch.float16, None, None),
            (torch.bfloat16, FP8, None),
            (torch.bfloat16, None, FP8),
        ):
            for group in (1, 2):
                turns += 1
                spec = replace(
                    plain,
                    heads=4 * group,
                    head_dim=head_dim,
                    scale=None,
                    page=page,
                    packed=packed,
                    dtype=dtype,
                    kv_dtype=kv,
                    out_dtype=out,
                    **masks[turns % len(masks)],
                )
                if unsupported(spec) is None:
                    found.append(spec)
    return found


@pytest.mark.compile
@pytest.mark.parametrize("name", SPECS)
def test_covering_set(name: str, record_property: Callable[[str, object], None]) -> None:
    gate(SPECS[name], record_property)


@pytest.mark.gates
@pytest.mark.parametrize("spec", every_spec(), ids=str)
def test_every_variant(spec: AttentionSpec, record_property: Callable[[str, object], None]) -> None:
    gate(spec, record_property)


def test_the_covering_set_covers() -> None:
    specs = SPECS.values()
    assert {s.head_dim for s in specs} == set(HEAD_DIMS)
    assert {s.page for s in specs} == {None, *PAGES}
    assert {s.packed for s in specs} == {s.causal for s in specs} == {True, False}
    for name in ("window", "softcap"):
        assert {getattr(s, name) is None for s in specs} == {True, False}
    assert len(SPECS) <= 24
    assert len(set(every_spec())) == len(every_spec())
