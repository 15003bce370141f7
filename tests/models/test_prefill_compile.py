"""The projections of a block compile to code that may run, without a GPU."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from epicute.gemm.fitting import compile_fitting
from epicute.jit import DEFAULT_TARGET
from epicute.models import SHAPES
from epicute.models.block_spec import PROJECTIONS, BlockSpec
from tests.models.blocks import Setting
from tests.models.layers import FP8, WIDE

SPECS = {
    "SmolLM2, fp8": BlockSpec(SHAPES["SmolLM2"]),
    "8:2 of 128, fp8, all options": BlockSpec(WIDE, bias=True, qk_norm=True, cache=FP8),
}
CASES = [(spec, name) for spec in SPECS for name in PROJECTIONS]


@pytest.mark.compile
@pytest.mark.parametrize(("spec", "name"), CASES)
def test_projections_have_no_spills(
    spec: str, name: str, record_property: Callable[[str, object], None]
) -> None:
    kernel, compiled = compile_fitting(SPECS[spec].kernels(target=DEFAULT_TARGET)[name])
    record_property("schedule", str(kernel.spec.schedule))
    record_property("registers", compiled.report.registers)
    compiled.report.check(kernel.spec.name, DEFAULT_TARGET.smem_per_block)


@pytest.mark.compile
@pytest.mark.parametrize(
    "spec",
    [
        BlockSpec(SHAPES["SmolLM2"], "bf16"),
        BlockSpec(WIDE, scaling="row"),
        BlockSpec(SHAPES["8B"], gains="operand"),
    ],
    ids=["bf16", "rows", "gains as operands"],
)
def test_the_mask_costs_no_spill_in_any_form(spec: BlockSpec) -> None:
    kernel, compiled = compile_fitting(spec.kernels(target=DEFAULT_TARGET)["o"])
    compiled.report.check(kernel.spec.name, DEFAULT_TARGET.smem_per_block)


@pytest.mark.compile
def test_a_block_is_planned_and_printed_without_a_gpu() -> None:
    at = Setting(SPECS["8:2 of 128, fp8, all options"], page=64, max_rows=2048)
    lines = str(at.plan()).splitlines()
    assert lines[0].startswith("8:2 of 128: hidden 256")
    assert [line.split()[0] for line in lines[2:]] == ["qkv", "attention", "o", "gate_up", "down"]
    assert all("stages" in line and "registers" in line for line in lines[2:])
