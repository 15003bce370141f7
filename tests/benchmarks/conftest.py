"""A GPU's stand-ins: plans that run on the CPU interpreter, a timer that counts, tiny layers."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2]))  # benchmarks is no installed package

import epicute
from benchmarks.data import Layer
from benchmarks.harness import Options
from benchmarks.power import Reading
from benchmarks.provenance import Provenance
from benchmarks.timing import Run, Sample, Slice
from epicute.gemm import Schedule, accumulation
from epicute.models.shapes import LayerShape

TINY = LayerShape(128, 192, 4, 2, 64, "tiny")


class CpuPlan:
    """epicute's plan as the CPU interpreter runs it: same operands by name, outputs in place."""

    def __init__(
        self,
        composition: Any,
        packed: Any,
        x_dtype: torch.dtype,
        schedule: Schedule | None = None,
        expected_m: int | None = None,
        accumulate: str | None = None,
    ) -> None:
        packed.require_order(composition.row_order(packed.shape[0]), "the plan")
        assert packed.dtype == x_dtype
        self.composition = composition
        self.schedule, self.expected_m = schedule, expected_m
        self.accumulate = accumulation(x_dtype, packed.shape[1], accumulate)

    def run(self, x: torch.Tensor, packed: Any, **operands: torch.Tensor) -> None:
        assert self.expected_m in (None, x.shape[0])
        acc = x.float() @ packed.unpack().codes.float().T
        if packed.scale is not None:
            operands.setdefault("weight_scale", packed.scale)
        for name, value in self.composition.evaluate(acc, **operands).items():
            operands[name].copy_(value)


class CountingTimer:
    """Runs every copy once, then takes as many µs per call as candidates were prepared before.

    ``reading`` is what the sensors say of the first candidate; clocks fall by 1 MHz with each.
    """

    def __init__(self) -> None:
        self.prepared = 0
        self.reading = Reading()

    def prepare(self, run: Run, copies: int, least_us: float) -> Slice:
        assert least_us > 0
        for copy in range(copies):
            run(copy)
        self.prepared += 1
        time = float(self.prepared)
        reading, clock = self.reading, self.reading.clock_mhz
        if clock is not None:
            reading = replace(reading, clock_mhz=clock - self.prepared + 1)
        return lambda: Sample([time, 100 * time, time], reading)


@pytest.fixture
def timer() -> CountingTimer:
    return CountingTimer()


@pytest.fixture
def cpu_plan(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[CpuPlan]]:
    """``epicute.plan`` without a GPU, and torch.compile without its compile time."""
    monkeypatch.setattr(epicute, "plan", CpuPlan, raising=False)
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    return CpuPlan


@pytest.fixture
def planned(cpu_plan: type[CpuPlan], monkeypatch: pytest.MonkeyPatch) -> list[SimpleNamespace]:
    """Every plan made from here on, and what it was made of: plan, composition, packed, x_dtype."""
    made: list[SimpleNamespace] = []
    make = cpu_plan.__init__

    def seen(self: Any, composition: Any, packed: Any, x_dtype: torch.dtype, **how: Any) -> None:
        make(self, composition, packed, x_dtype, **how)
        made.append(
            SimpleNamespace(plan=self, composition=composition, packed=packed, x_dtype=x_dtype)
        )

    monkeypatch.setattr(cpu_plan, "__init__", seen)
    return made


@pytest.fixture
def layer() -> Callable[[str], Layer]:
    """A tiny layer by the projection's name, on the CPU, with two copies."""
    options = Options(shapes=("tiny",), device="cpu", rounds=2, check_rows=9)
    return lambda name: Layer(TINY, name, 80, options, copies=2)


@pytest.fixture
def source() -> Provenance:
    return Provenance("NVIDIA H200", "580.1", "2.11.0", "4.8.1", "0123456789abcdef", "2026-11-29")
