"""Every kernel compiles to code that may run: no spills, no serialised WGMMA, shared memory that fits.

``make test`` compiles a covering set, ``make gates`` every composition in every dtype, with widths, depths and
schedules that take turns.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import cycle

import pytest

from epicute.gemm.fitting import SPARED, compile_fitting
from epicute.jit import DEFAULT_TARGET, Report, compile
from epicute.jit.report import FATAL
from epicute.models.shapes import SHAPES
from tests.gemm.compositions import (
    DEPTHS,
    FORCED,
    MODES,
    SCHEDULES,
    SKELETONS,
    WIDTHS,
    Case,
    operations,
    projection,
)
from tests.gemm.covering import INTERACTIONS, choices, covering, required

LAYERS = ("qkv", "o", "gate_up", "down")

LAUNCH_REGISTERS = 168
"""Per thread when 384 threads share an SM; the warpgroups then trade among themselves."""

SERVED = [
    projection("qkv", "SmolLM2", "bf16"),
    projection("qkv", "8B", "fp8"),
    projection("gate_up", "8B", "fp8"),
    projection("o", "8B", "fp8"),
]
"""Projections of published layers."""


def forced(layer: str, mode: str, tile: str) -> Case:
    """8B's projection with a schedule that is legal and never chosen."""
    case = projection(layer, "8B", mode)
    return replace(case, name=f"{case.name}-{tile}", tile=FORCED[tile])


NAMED = [
    forced("o", "fp8fast", "256x128n2"),
    forced("o", "fp8fast", "128x256c2fk"),
    forced("gate_up", "fp8fast", "128x320c2"),
    forced("gate_up", "fp8fast", "256x192n2"),
    forced("gate_up", "bf16", "128x384c2k"),
    forced("gate_up", "bf16", "256x192n2"),
]
"""Whole epilogues beside more accumulators, or with what is asked of L2."""


def every_case() -> list[Case]:
    """Each skeleton in each dtype, then all projections of all shapes."""
    turns = zip(cycle(WIDTHS), cycle(DEPTHS * 2 + DEPTHS[:1]))
    schedules = cycle(SCHEDULES)
    found = []
    for skeleton in SKELETONS.values():
        for mode in MODES:
            width, k = next(turns)
            schedule = next(s for s in schedules if skeleton.allows(s, mode))
            found.append(skeleton.case(mode, width, k, schedule))
    for shape in SHAPES:
        found += [projection(layer, shape, mode) for layer in LAYERS for mode in MODES]
    return found + operations()


def gate(case: Case, record: Callable[[str, object], None]) -> Report:
    """Compile strictly and note what the compiler said."""
    kernel = case.kernel()
    if case.tile is None:
        kernel, compiled = compile_fitting(kernel)
    else:
        compiled = compile(kernel, strict=False)
    schedule, problem = kernel.spec.schedule, kernel.spec.problem
    record("schedule", str(schedule))
    pingpong = " ping-pong" if schedule.pingpong else ""
    record("tile", f"{schedule.tile_m}x{schedule.tile_n}{pingpong}")
    record("dtype", str(problem.dtype).removeprefix("torch."))
    record("accumulate", problem.accumulate)
    report = compiled.report
    record("hazards", sum(said.startswith(FATAL) for said in report.warnings))
    record("registers", report.registers)
    record("shared_memory", report.shared_memory)
    record("seconds", round(report.seconds, 2))
    widest = problem.unit == 256  # a head that fills the tile, which cannot be narrower
    spilled = max(report.spill_stores, report.spill_loads)
    record("spilled", spilled)
    assert spilled <= (SPARED if widest else 0)
    whole = replace(report, spill_stores=0, spill_loads=0)
    whole.check(case.name, DEFAULT_TARGET.smem_per_block)
    assert report.registers is not None
    assert report.registers <= LAUNCH_REGISTERS
    assert report.shared_memory is not None
    assert report.shared_memory <= kernel.shared_memory <= DEFAULT_TARGET.smem_per_block
    return report


@pytest.mark.compile
@pytest.mark.parametrize("case", [*covering(), *SERVED, *NAMED], ids=str)
def test_covering_set(case: Case, record_property: Callable[[str, object], None]) -> None:
    gate(case, record_property)


@pytest.mark.gates
@pytest.mark.parametrize("case", every_case(), ids=str)
def test_every_composition(case: Case, record_property: Callable[[str, object], None]) -> None:
    gate(case, record_property)


def test_the_covering_set_is_small_and_names_are_unique() -> None:
    cases = [*covering(), *SERVED, *NAMED]
    assert len(cases) <= 96
    assert len({case.name for case in cases}) == len(cases)
    assert len({case.name for case in every_case()}) == len(every_case())


def test_the_covering_set_covers() -> None:
    assert set().union(*(choice.covers() for choice in choices())) == required()
    assert all(c.skeleton.allows(c.schedule, c.mode) for c in choices())


def test_the_axes_hold_what_they_must() -> None:
    """So that a renamed axis cannot empty an interaction unseen."""
    wanted = required()
    for axes in INTERACTIONS:
        assert any(tuple(axis for axis, _ in some) == axes for some in wanted), axes
    tiles = [tile for tile in SCHEDULES.values() if tile is not None]
    assert {tile.tile_n for tile in tiles} == {256, 192, 160, 128, 64}
    assert {(t.tile_m, t.cluster_m, t.cluster_n, t.slots > 0, t.pingpong) for t in tiles} >= {
        (128, 1, 1, False, False),
        (128, 2, 1, True, False),
        (256, 2, 1, False, False),
        (64, 1, 1, True, True),
        (64, 2, 1, False, True),
        (128, 2, 1, False, True),
        (128, 1, 2, False, True),
    }
    assert {dict(some).get("head_dim") for some in wanted} >= {"64", "80", "96", "128", "256"}


def test_unsafe_code_is_refused() -> None:
    """What the gates rely on: a report with a spill does not pass."""
    spilled = Report(168, 4, 8, 1000, (), 1.0, "")
    with pytest.raises(Exception, match="4 B of spill stores"):
        spilled.check("case", DEFAULT_TARGET.smem_per_block)
