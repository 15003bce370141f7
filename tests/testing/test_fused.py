"""The kernel side of ``check``, with a plan that runs on the CPU: right, forgetful, stray and
greedy.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import epicute.gemm
from epicute.epilogues import (
    Composition,
    EmitFP8,
    PlaceKV,
    ResidualAdd,
    Store,
    SumSquares,
    SwiGLU,
    compose,
)
from epicute.testing.draws import Case
from epicute.testing.fused import FusedRunner
from epicute.weights import Packed

CHAIN = ResidualAdd() >> SumSquares() >> Store(torch.bfloat16)
Mistake = Callable[[torch.Tensor, dict[str, Any]], None]


class EvaluatedPlan:
    """Multiplies and evaluates on the CPU, then makes a mistake."""

    def __init__(self, composition: Composition, mistake: Mistake) -> None:
        self._composition, self._mistake = composition, mistake

    def run(self, x: torch.Tensor, packed: Packed, **operands: torch.Tensor) -> None:
        acc = x.float() @ packed.unpack().dequantize().T
        found = self._composition.evaluate(acc, **operands)
        for name, value in found.items():
            operands[name].copy_(value)
        self._mistake(x, operands)


def nothing(x: torch.Tensor, operands: dict[str, Any]) -> None:
    pass


@pytest.fixture
def runner_of(monkeypatch: pytest.MonkeyPatch):
    def make(composition: Composition, mistake: Mistake = nothing) -> FusedRunner:
        def plan(given: Composition, packed: Packed, **options: Any) -> EvaluatedPlan:
            assert packed.order_matches(composition.row_order(packed.shape[0]))
            return EvaluatedPlan(given, mistake)

        monkeypatch.setattr(epicute.gemm, "plan", plan, raising=False)
        return FusedRunner(composition, torch.device("cpu"))

    return make


def case(rows: int = 5, columns: int = 72) -> Case:
    generator = torch.Generator().manual_seed(0)
    acc = torch.randint(-8, 9, (rows, columns), generator=generator).float()
    return Case(acc, {"residual": torch.ones(rows, columns, dtype=torch.bfloat16)})


@pytest.mark.parametrize("rows", [0, 1, 5])
def test_outputs_of_an_exact_product(runner_of, rows: int) -> None:
    out = runner_of(CHAIN).run(case(rows))
    assert torch.equal(out["out"].float(), case(rows).acc + 1)
    assert out["sumsq_out"].shape == (rows, 2)


def test_pairs_and_start_values(runner_of) -> None:
    composition = SwiGLU() >> EmitFP8()
    one, start = torch.ones(1), torch.tensor([5])
    operands = {"out_scale": one, "amax": one * 1e6, "saturated": start, "nans": start}
    out = runner_of(composition).run(Case(case().acc, operands))
    assert out["amax"].item() == 1e6
    assert out["nans"].item() == 5
    assert out["out_fp8"].shape == (5, 36)
    assert start.item() == 5


def test_cells_start_from_the_given_cache(runner_of) -> None:
    cells = torch.full((1, 16, 4, 16), 7.0, dtype=torch.bfloat16)
    operands = {"slots": torch.tensor([3, -1, 0, 99, 15]), "cells": cells}
    out = runner_of(compose(PlaceKV(16))).run(Case(case(columns=64).acc, operands))
    assert torch.equal(out["cells"][0, 15].flatten().float(), case(columns=64).acc[4])
    assert bool((out["cells"][0, 1] == 7).all())


def forget_a_row(x: torch.Tensor, operands: dict[str, Any]) -> None:
    out = operands["out"]
    out[-1] = torch.tensor([-75], dtype=torch.int16).view(torch.bfloat16)  # 0xFFB5, the poison


def write_past_the_end(x: torch.Tensor, operands: dict[str, Any]) -> None:
    out = operands["out"]
    out.as_strided((1, 1), (72, 1), out.storage_offset() + out.numel()).fill_(0.0)


def overwrite_the_input(x: torch.Tensor, operands: dict[str, Any]) -> None:
    operands["residual"].zero_()


@pytest.mark.parametrize(
    ("mistake", "message"),
    [
        (forget_a_row, "out: not written: 72 elements"),
        (write_past_the_end, "out: 2 bytes outside the output were overwritten"),
        (overwrite_the_input, "inputs changed by the call: residual"),
    ],
)
def test_mistakes_are_caught(runner_of, mistake: Mistake, message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        runner_of(CHAIN, mistake).run(case())
