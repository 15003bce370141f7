"""The helpers of the GPU tests, with a plan that runs on the CPU: they pass what is right and catch what is not."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from tests.gemm import jobs
from tests.gemm.compositions import DTYPES, SKELETONS, Case, operations, projection
from tests.gemm.covering import covering
from tests.gemm.device import DEVICE, Output, embed, unchanged, whole
from tests.gemm.jobs import ROWS, Job, compare
from tests.gemm.planned import EvaluatedPlan

pytestmark = pytest.mark.skipif(DEVICE != "cpu", reason="stands in for the GPU")

BF16, FP8 = torch.bfloat16, torch.float8_e4m3fn
Mistake = Callable[[torch.Tensor, dict[str, Any]], None]


@pytest.fixture(autouse=True)
def evaluated(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(jobs.epicute, "plan", EvaluatedPlan.of)
    jobs.plan_of.cache_clear()
    yield
    jobs.plan_of.cache_clear()


@pytest.mark.parametrize("case", [*covering()[::3], *operations()], ids=str)
def test_what_is_right_passes(case: Case) -> None:
    for rows in (0, 1, 17):
        Job(case, rows).check()


def test_a_projection_passes() -> None:
    for dtype in DTYPES:
        Job(projection("qkv", "SmolLM2", dtype), 5).check()


def test_accumulators_are_whole_numbers_that_every_format_holds() -> None:
    for dtype in DTYPES:
        job = Job(SKELETONS["store.fp32"].case(dtype, 100, 584), 17)
        acc = job.accumulators()
        assert torch.equal(acc, acc.round())
        assert 10 < float(acc.abs().max()) < 2048
        assert torch.equal(
            acc.double(), (job.x.double() @ job.packed.unpack().codes.double().T).cpu()
        )


OUT = SKELETONS["residual.bf16"].case("bf16", 100, 576)
ROPE = SKELETONS["rope.64.half"].case("bf16", 100, 576)
QKV = SKELETONS["qkv.64.half.fp8"].case("bf16", 8, 576)


def one_ulp(x: torch.Tensor, given: dict[str, Any]) -> None:
    given["out"].view(torch.int16)[3, 5] += 1


def a_row_short(x: torch.Tensor, given: dict[str, Any]) -> None:
    given["out"][-1] = torch.nan


def past_the_row(x: torch.Tensor, given: dict[str, Any]) -> None:
    out = given["out"]
    out.as_strided((out.shape[0], out.shape[1] + 1), out.stride())[2, -1] = 1.0


def past_the_end(x: torch.Tensor, given: dict[str, Any]) -> None:
    given["amax"].as_strided((2,), (1,))[1] = 1.0


def into_x(x: torch.Tensor, given: dict[str, Any]) -> None:
    x[0, 0] += 1


def beside_x(x: torch.Tensor, given: dict[str, Any]) -> None:
    x.as_strided((1,), (1,), x.shape[1])[0] = 1.0


def a_count(x: torch.Tensor, given: dict[str, Any]) -> None:
    given["saturated"] += 1


@pytest.mark.parametrize(
    "mistake", [one_ulp, a_row_short, past_the_row, past_the_end, into_x, beside_x, a_count]
)
def test_mistakes_are_caught(mistake: Mistake, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(EvaluatedPlan, "mistake", staticmethod(mistake))
    with pytest.raises(AssertionError):
        Job(OUT, 17).check()


def a_bit_off(x: torch.Tensor, given: dict[str, Any]) -> None:
    given["out"][4] *= 1.02


def a_wrong_pair(x: torch.Tensor, given: dict[str, Any]) -> None:
    given["out"][:, :2] = given["out"][:, :2].flip(1)


@pytest.mark.parametrize("mistake", [a_bit_off, a_wrong_pair, a_row_short])
def test_mistakes_of_approximate_cases_are_caught(
    mistake: Mistake, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(EvaluatedPlan, "mistake", staticmethod(mistake))
    with pytest.raises(AssertionError):
        Job(ROPE, 17).check()


def a_stray_cell(x: torch.Tensor, given: dict[str, Any]) -> None:
    cells = given["k_cells"]
    free = torch.ones(cells.shape[0] * cells.shape[1], dtype=torch.bool)
    free[given["slots"][(given["slots"] >= 0) & (given["slots"] < len(free))]] = False
    slot = int(free.nonzero()[0])
    cells[slot // 16, slot % 16, 0, 0] = 1.0


def test_a_stray_cell_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(EvaluatedPlan, "mistake", staticmethod(a_stray_cell))
    with pytest.raises(AssertionError, match="k_cells"):
        Job(QKV, 17).check()


def test_embedded_values_stand_in_nan() -> None:
    values = torch.arange(6.0).reshape(2, 3)
    view = embed(values, gap=2)
    assert torch.equal(view.cpu(), values)
    around = view.as_strided((5, 5), (5, 1)).clone()
    around[:2, :3] = 0
    assert int(around.isnan().sum()) == 25 - 6
    assert len(whole(view)) == 4 * 25
    with pytest.raises(AssertionError, match="inputs written: x"), unchanged(x=view):
        view.as_strided((1,), (1,), 24)[0] = 0


def test_an_output_knows_its_guards() -> None:
    for strides in (None, (7, 1), (1, 9)):
        output = Output((4, 5), BF16, strides, device="cpu")
        assert output.unwritten().all()
        output.tensor.fill_(1.0)
        output.assert_intact()
        assert not output.unwritten().any()
        output.buffer[1023] = 0
        with pytest.raises(AssertionError, match="1 bytes beside it"):
            output.assert_intact()


def test_rows_stand_on_either_side_of_every_edge() -> None:
    assert ROWS == (0, 1, 2, 15, 17, 63, 65, 127, 129, 2047)


def test_nan_never_passes_for_a_number() -> None:
    wanted = torch.ones(3, 8)
    got = wanted.clone()
    got[1, 1] = torch.nan
    with pytest.raises(AssertionError, match="NaN elsewhere"):
        compare("out", jobs.Matrix(), got, wanted, exact=False)
    compare("out", jobs.Matrix(), got, got.clone(), exact=False)
