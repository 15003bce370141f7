"""Published layers, ragged and tiny M, ragged N and K, every schedule: exact, and close to float64 on random data."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from epicute.epilogues import Dequantize, EmitFP8, Store, SwiGLU, compose
from epicute.epilogues import reference as ref
from epicute.gemm import reference as gemm
from epicute.models.shapes import SHAPES
from epicute.quant import quantize_rows
from epicute.testing import Budget, assert_equal_bits, assert_within, storage_budget
from tests.gemm.compositions import (
    BF16,
    DTYPES,
    FP8,
    FP32,
    SCHEDULES,
    SKELETONS,
    Case,
    Tile,
    projection,
)
from tests.gemm.device import DEVICE, embed, embed_rows, normal
from tests.gemm.jobs import ROWS, Job, pack

pytestmark = pytest.mark.gpu

LAYERS = ("qkv", "o", "gate_up", "down")
PUBLISHED = {
    f"{shape}.{layer}-{dtype}": projection(layer, shape, dtype)
    for shape, dtypes in {
        "SmolLM2": ("bf16", "fp16", "fp8", "fp8fast"),
        "1B": ("bf16", "fp8"),
        "8B": ("bf16", "fp8", "fp8fast"),
        "70B": ("fp8",),
    }.items()
    for layer in LAYERS
    for dtype in dtypes
}
ROWS_OF = {"SmolLM2": (129, 2047), "1B": (63, 257), "8B": (17, 129), "70B": (2, 17)}

RAGGED = [
    SKELETONS[name].case(dtype, 1000, 584)
    for name in ("store.bf16", "residual.bf16", "swiglu.emit", "qkv.64.half.fp8", "user.watched")
    for dtype in ("bf16", "fp8")
]
RAGGED += [
    SKELETONS[name].case("fp8fast", 1000, 584, schedule)
    for name in ("store.all", "residual.bf16", "swiglu.residual")
    for schedule in ("128x192c2r4", "128x128c2r2")
]
RAGGED += [
    SKELETONS[name].case(mode, width, 584, schedule)
    for name, mode, width, schedule in (
        ("residual.bf16", "fp8fast", 1000, "128x320c2"),
        ("residual.bf16", "fp8fast", 4720, "128x256c2fk"),
        ("residual.bf16", "fp8fast", 1000, "256x128n2"),
        ("residual.bf16", "bf16", 4720, "128x256c2fk"),
        ("store.all", "bf16", 1000, "128x384c2k"),
        ("scales.bias", "fp8fast", 1000, "256x192n2"),
        ("store.bf16", "bf16", 4720, "128x320c2"),
        ("qkv.64.half.fp8", "bf16", 1000, "128x128c1"),
    )
]
"""The last ones by schedules that are never chosen."""

TINY = {
    out: Case(f"ge01-{out}", Dequantize() >> sink, 2048, 2048, FP8, exact=True)
    for out, sink in {"bf16": Store(BF16), "fp8": EmitFP8()}.items()
}
ODD = {d: Case(f"ge02-{d}", compose(Store(BF16)), 4720, 584, DTYPES[d], exact=True) for d in DTYPES}
ODD["fp8"] = replace(ODD["fp8"], composition=Dequantize("row") >> Store(BF16))
GLU_WIDTHS = (8, 24, 64, 200, 256)
GLU = {
    h: Case(f"ge08-{h}", Dequantize() >> SwiGLU() >> EmitFP8(), 2 * h, 512, FP8) for h in GLU_WIDTHS
}
SCALED = [
    Case(
        f"ge09-{n}-{schedule}",
        Dequantize("row", "tensor") >> Store(FP32),
        n,
        2048,
        FP8,
        tile,
        accumulate="fast" if tile and tile[0] > (64 if tile[4] else 128) else None,
    )
    for n in (16, 64, 256)
    for schedule, tile in SCHEDULES.items()
]
LONG = {
    k: Case(f"ge04-{k}", Dequantize("tensor", "tensor") >> Store(FP32), 64, k, FP8)
    for k in (4096, 16384, 32768)
}
TAILS = [
    Case(f"ge03-{n}", Dequantize("row") >> Store(BF16), n, k, FP8, exact=True)
    for n, k in ((2048, 2048), (1536, 4096), (1544, 4096))
]
ALONE = replace(PUBLISHED["1B.o-fp8"], name="1B.o-fp8-alone", tile=Tile(128, 256, 1, 0, False))
CASES = [
    ALONE,
    *PUBLISHED.values(),
    *RAGGED,
    *TINY.values(),
    *ODD.values(),
    *GLU.values(),
    *SCALED,
    *LONG.values(),
    *TAILS,
]


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_layers_on_exact_accumulators(name: str) -> None:
    for rows in ROWS_OF[name.split(".")[0]]:
        Job(PUBLISHED[name], rows).check()


@pytest.mark.parametrize("case", RAGGED, ids=str)
def test_any_number_of_rows(case: Case) -> None:
    for rows in ROWS:
        Job(case, rows).check()


@pytest.mark.parametrize("case", RAGGED, ids=str)
def test_a_row_does_not_depend_on_the_others(case: Case) -> None:
    """The first rows of M = 300, alone: every output of those rows has the same bits."""
    whole = Job(case, 300)
    per_row = {name for name, o in whole.outputs.items() if len(o.shape) == 2}
    found = {name: value.clone() for name, value in whole.run().items() if name in per_row}
    for rows in (1, 64, 129):
        part = Job(case, rows)
        part.x = whole.x[:rows]
        for name, x in whole.operands.items():
            by_row = x.dim() == 2 or len(x) == 300
            part.operands[name] = x[:rows] if by_row else x
        for name, value in part.run().items():
            if name in per_row:
                assert_equal_bits(value.contiguous(), found[name][:rows].contiguous(), name)


# --- float64 references on random data ---


class Drawn:
    """A projection of N(0, 1) activations and weights of norm 1 a row, in the case's format."""

    def __init__(self, name: str, rows: int) -> None:
        self.case = PUBLISHED[name]
        self.shape = SHAPES[name.split(".")[0]]
        n, k, dtype = self.case.n, self.case.k, self.case.dtype
        stream = normal(rows, k, dtype=FP32, seed=rows)
        weight = normal(n, k, dtype=FP32, seed=n + k, scale=k**-0.5)
        self.job = Job(self.case, rows, packed=self._packed(weight))
        self.scale = None
        if dtype == FP8:
            scale = (stream.abs().max() / 448).reshape(1)
            stream = stream / scale
            self.scale = self.job.operands["scale"] = embed(scale)
        self.job.x = embed_rows(stream.to(dtype))
        x = self.job.x.float() * (1.0 if self.scale is None else self.scale)
        if "sumsq" in self.job.operands:
            self.job.operands["sumsq"] = embed(ref.sum_squares(x).float())
        found = self.job.packed.unpack()
        self.linear = gemm.Linear(self.job.x, found.codes, self.scale, found.scale)

    def _packed(self, weight: torch.Tensor) -> Any:
        if self.case.dtype == FP8:
            codes, scale = quantize_rows(weight)
            return pack(self.case, codes, scale)
        return pack(self.case, weight)

    def given(self, name: str) -> torch.Tensor:
        """An operand on the CPU."""
        return self.job.operands[name].cpu()

    def expected(self, layer: str) -> dict[str, torch.Tensor]:
        """Float64 values by output, before rounding."""
        if layer == "qkv":
            widths = (self.shape.q_width, self.shape.kv_width, self.shape.kv_width)
            turn = gemm.Rotary(self.given("positions"), self.given("inv_freq"), self.shape.head_dim)
            found = gemm.qkv_projection(self.linear, widths, turn, self.given("sumsq"))
            return {"q_out": found["q"], "k_cells": found["k"], "v_cells": found["v"]}
        if layer == "gate_up":
            z = gemm.gate_up_projection(self.linear, self.given("sumsq"))["z"]
            return {"out_fp8": z, "out": z}
        h = gemm.output_projection(self.linear, self.given("residual"))
        return {"out": h["h"], "sumsq_out": h["sumsq"], "out_fp8": h["h"]}


@pytest.mark.parametrize("name", [name for name in PUBLISHED if "70B" not in name])
def test_published_layers_on_random_data_against_float64(name: str) -> None:
    """A rounding and 2e-4; where FP8 is added fast, what its accumulator of 14 bits drops; in codes, their rounding."""
    layer, dtype = name.split(".")[1].split("-")
    drawn = Drawn(name, 65)
    job = drawn.job
    if "slots" in job.operands:
        job.operands["slots"].copy_(torch.arange(65))
    expected = drawn.expected(layer)
    if "out_scale" in job.operands:
        job.operands["out_scale"].fill_(float(expected["out_fp8"].abs().max()) * 1.25 / 448)
    found = job.run()
    arithmetic = {"fp8fast": 3e-3, "fp8": 5e-4}.get(dtype, 2e-4)
    budgets = {
        torch.bfloat16: storage_budget(BF16, arithmetic),
        FP8: Budget(norm=0.04, worst_row=0.0625),
        torch.float32: Budget(2 * arithmetic, 4 * arithmetic),
    }
    for output, value in found.items():
        if output in expected:
            got = value.float().cpu()
            if value.dtype == FP8:
                got = got * float(job.operands["out_scale"])
            if value.dim() == 4:
                got = got.reshape(-1, value.shape[2] * value.shape[3])[:65]
            assert_within(got, expected[output], budgets[value.dtype], f"{name}: {output}")
    if "amax" in found:
        largest = float(expected["out_fp8"].abs().max())
        assert float(found["amax"]) == pytest.approx(largest, rel=2 * arithmetic + 2**-8)
        assert int(found["saturated"]) == int(found["nans"]) == 5


# --- field failures ---


@pytest.mark.parametrize("out", TINY)
def test_ge_01_tiny_m_runs_and_agrees_with_large(out: str) -> None:
    case = TINY[out]
    large = Job(case, 256)
    name = "out" if out == "bf16" else "out_fp8"
    wanted = large.run()[name].clone()
    for rows in (1, 2, 3, 5, 8, 15, 16, 17, 33, 63, 65, 129):
        job = Job(case, rows)
        job.x, job.operands = large.x[:rows], large.operands
        buffer = torch.full((rows + 8, case.n), 7.0, device=DEVICE).to(wanted.dtype)
        job.outputs[name].tensor = buffer[:rows]
        job.run()
        assert_equal_bits(buffer[:rows], wanted[:rows].contiguous(), f"M={rows}")
        assert (buffer[rows:].float() == 7).all()


@pytest.mark.parametrize("dtype", ODD)
def test_ge_02_no_dimension_is_a_multiple_of_sixteen(dtype: str) -> None:
    """M = 1752, N = 4720, K = 584; in FP8 rows of x are padded, as 584 bytes are no multiple of 16."""
    Job(ODD[dtype], 1752).check()
    case = ODD[dtype]
    job = Job(case, 1752, packed=pack(case, normal(4720, 584, dtype=FP32, seed=1)))
    job.x = embed_rows(normal(1752, 584, dtype=case.dtype, seed=2))
    codes = job.packed.unpack().codes
    wanted = job.x.double() @ codes.double().T
    if dtype == "fp8":
        wanted = wanted * job.packed.scale.double() * job.operands["scale"].double()[:, None]
    assert_within(job.run()["out"], wanted, Budget(2.0**-8, 2.0**-7), dtype)


@pytest.mark.parametrize("k", LONG)
def test_ge_04_small_products_do_not_vanish_beside_a_large_sum(k: int) -> None:
    """One product of 448 * 448 and K - 1 of a quarter: a truncating accumulator errs by up to 4 %."""
    case = LONG[k]
    codes = torch.full((64, k), 0.5)
    codes[:, 0] = 448
    job = Job(case, 129, packed=pack(case, codes, torch.ones(1)))
    job.x = codes[:1].expand(129, k).to(DEVICE).to(FP8)
    job.operands["scale"].fill_(1.0)
    wanted = 448.0 * 448 + (k - 1) / 4
    worst = (job.run()["out"].double() / wanted - 1).abs().max()
    assert float(worst) <= 5e-4


@pytest.mark.parametrize("case", TAILS, ids=str)
@pytest.mark.parametrize("rows", [1088, 8352])
def test_ge_03_scales_are_not_read_past_their_end(case: Case, rows: int) -> None:
    """Every vector ends where NaN begins."""
    job = Job(case, rows)
    found = job.run()["out"]
    assert torch.isfinite(found).all()
    acc = job.x.float() @ job.packed.unpack().codes.float().T
    wanted = acc * job.packed.scale * job.operands["scale"][:, None]
    assert_equal_bits(found.contiguous(), wanted.to(BF16))


@pytest.mark.parametrize("width", GLU_WIDTHS)
def test_ge_08_swiglu_stores_fp8_at_any_width(width: int) -> None:
    for rows in (17, 2000):
        Job(GLU[width], rows).check()


@pytest.mark.parametrize("case", SCALED, ids=str)
def test_ge_09_a_row_scale_is_that_rows(case: Case) -> None:
    packed = pack(case, torch.ones(case.n, case.k), torch.ones(1))
    for rows in (64, 512):
        job = Job(case, rows, packed=packed)
        job.x = torch.ones(rows, case.k, device=DEVICE).to(FP8)
        scale = 2.0 ** -(torch.arange(rows) % 8)
        job.operands["scale"] = embed(scale)
        wanted = (case.k * scale)[:, None].expand(rows, case.n)
        assert torch.equal(job.run()["out"].cpu(), wanted)


def test_a_cluster_changes_no_bit() -> None:
    """What few rows run without, ``expected_m``, and what many run with."""
    paired, alone = Job(PUBLISHED["1B.o-fp8"], 65), Job(ALONE, 65)
    one, two = paired.run(), alone.run()
    assert [job.plan.schedule.cluster_m for job in (paired, alone)] == [2, 1]
    for name, value in one.items():
        assert_equal_bits(value.contiguous(), two[name].contiguous(), name)
