"""Every policy in the kernel, on accumulators that are exact: the bits of the NumPy interpreter, NaN and all."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import cycle

import numpy as np
import pytest
import torch

from epicute.epilogues import (
    Bias,
    Dequantize,
    EmitFP8,
    Gain,
    PlaceKV,
    ResidualAdd,
    RoPE,
    Store,
    SwiGLU,
    compose,
)
from epicute.epilogues import reference as ref
from epicute.testing import assert_equal_bits
from epicute.weights import Quantized
from tests.gemm.compositions import (
    BF16,
    DEPTHS,
    DTYPES,
    FP8,
    FP16,
    FP32,
    SCHEDULES,
    SKELETONS,
    WIDTHS,
    Case,
    operations,
)
from tests.gemm.covering import covering
from tests.gemm.device import DEVICE, bits, embed, embed_rows
from tests.gemm.jobs import ROWS, Job, assert_near, pack
from tests.gemm.policies import EXACT_OPERATIONS, suspected

pytestmark = pytest.mark.gpu

PLAIN = {
    dtype: Case(f"plain-{dtype}", compose(Store(FP32)), 128, 128, DTYPES[dtype])
    for dtype in ("bf16", "fp16")
}
BIAS = {
    dtype: Case(
        f"bias-{dtype}",
        (Dequantize() >> Bias() if dtype == "fp8" else compose(Bias())) >> Store(BF16),
        192,
        64,
        DTYPES[dtype],
        dtypes=(("bias", BF16),),
    )
    for dtype in DTYPES
}
BIAS_ROPE = Case("bias-rope", Bias() >> RoPE(64) >> PlaceKV(64), 128, 64, BF16)
GEMMA = Case("gemma", Gain(1.0) >> Store(FP32), 64, 64, BF16, dtypes=(("gain", BF16),))
LIMITED = Case("limited", SwiGLU(limit=7.0) >> Store(FP32), 64, 64, BF16)
SPECIAL = Case("special", ResidualAdd() >> Bias() >> Store(FP32), 100, 64, BF16)
SPECIAL = replace(SPECIAL, dtypes=(("residual", FP32),))
EMIT = Case("emit", compose(EmitFP8()), 192, 192, BF16, exact=True)
ROUNDED = {
    "emit": Case("ge12-emit", compose(EmitFP8()), 64, 64, BF16),
    "store": Case("ge12-store", compose(Store(FP8)), 64, 64, FP16),
    "cells": Case("ge12-cells", compose(PlaceKV(64, FP8)), 64, 64, BF16),
    "kept": Case("ge12-kept", Store(FP32) >> EmitFP8(), 64, 64, BF16),
    "scaled": Case("ge12-scaled", Dequantize(None, "tensor") >> EmitFP8(), 64, 64, FP8),
}
TURNED = [
    Case(f"{rope}-{len(dtypes)}", ResidualAdd() >> rope >> Store(BF16), n, 64, BF16, dtypes=dtypes)
    for n, rope in ((3072, RoPE(96)), (2048, RoPE(128, 80)), (2048, RoPE(128)))
    for dtypes in ((), (("residual", FP32),))
]
"""Residuals in the order of heads: some come through the pipeline, of some a quad would read across boxes."""

SUSPECTED = Case("suspected", suspected() >> Store(BF16), 64, 64, BF16)
SHARDS = Case("ge05", Dequantize() >> Store(BF16), 48, 512, FP8)
SHARDED_GLU = Case("ge05-glu", Dequantize() >> SwiGLU() >> Store(BF16), 64, 512, FP8)
ABSENT = Case("ge07", compose(Store(BF16)), 192, 64, BF16)


def turns() -> list[Case]:
    """Every skeleton without heads that the covering set does not hold in that dtype, sizes taking turns."""
    sizes, schedules = (
        zip(cycle(WIDTHS), cycle(DEPTHS * 2 + DEPTHS[:1]), strict=False),
        cycle(SCHEDULES),
    )
    found = []
    for skeleton in SKELETONS.values():
        if not skeleton.features:
            for dtype in ("bf16", "fp8"):
                width, k = next(sizes)
                schedule = next(s for s in schedules if skeleton.allows(s, dtype))
                found.append(skeleton.case(dtype, width, k, schedule))
    return found


POLICIES = list({case.name: case for case in (*covering(), *turns())}.values())
OPERATIONS = operations()
CASES = [
    *POLICIES,
    *OPERATIONS,
    *PLAIN.values(),
    *BIAS.values(),
    *ROUNDED.values(),
    *TURNED,
    *(SUSPECTED, BIAS_ROPE, GEMMA, LIMITED, SPECIAL, EMIT, SHARDS, SHARDED_GLU, ABSENT),
]
TWO_ROWS = dict(
    zip(POLICIES, cycle(zip(ROWS[1:], ROWS[5:] + ROWS[1:5], strict=True)), strict=False)
)
"""Two M of each case, taking turns."""


@pytest.mark.parametrize("case", POLICIES, ids=str)
def test_the_kernel_is_the_interpreter(case: Case) -> None:
    for rows in TWO_ROWS[case]:
        Job(case, min(rows, 129 if case.n > 2000 else rows)).check()


def identity(case: Case, x: torch.Tensor) -> Job:
    """A job whose accumulators are ``x`` (rows, N = K)."""
    job = Job(case, len(x), packed=pack(case, torch.eye(case.n, device=DEVICE)))
    job.x = embed_rows(x.to(DEVICE).to(case.dtype))
    return job


@pytest.mark.parametrize("case", OPERATIONS, ids=str)
def test_every_operation(case: Case) -> None:
    """Approximate ones to 1e-5 of the value and 2e-6 absolute, on operands that hold everything a float can be."""
    x = torch.randn(129, 192) * torch.logspace(-3, 1, 192)
    x[:, ::17] = 0
    job = identity(case, x.clamp(-30, 30))
    other = torch.randn(129, 192) * 4
    special = torch.tensor([0.0, -0.0, math.inf, -math.inf, math.nan, 1e-38, -3e38])
    other[:, ::5] = special.repeat(39 * 129 // 7 + 1)[: 39 * 129].reshape(129, 39)
    job.operands["other"] = embed(other)
    wanted = job.expected(job.x.float().cpu())
    found = job.run()
    for name, value in wanted.items():
        got, operation = found[name].cpu().numpy(), name.removesuffix("_out")
        near = (0.0, 0.0) if operation in EXACT_OPERATIONS else (1e-5, 2e-6)
        np.testing.assert_allclose(got, value.numpy(), *near, err_msg=operation)


@pytest.mark.parametrize("case", PLAIN.values(), ids=str)
def test_accumulators_keep_nan_infinities_and_signs(case: Case) -> None:
    """A row with one NaN is NaN, with one infinity infinite by the weight's sign; zeros stay zeros."""
    job = Job(case, 9)
    codes = torch.randint(0, 2, (case.n, case.k), device=DEVICE) * 2 - 1
    job.packed = pack(case, codes.float())
    x = torch.zeros(9, case.k)
    x[0, 3], x[1, 77], x[2, 5] = math.nan, math.inf, -math.inf
    x[3, 1], x[3, 2] = math.inf, -math.inf
    x[4] = -0.0
    x[5, 9] = 3.0
    x[6] = torch.randint(-2, 3, (case.k,))
    job.x = embed_rows(x.to(case.dtype))
    wanted = (x.double()[:, None] * codes.double().cpu()).sum(2)
    got = job.run()["out"].double().cpu()
    assert torch.equal(got.isnan(), wanted.isnan())
    assert torch.equal(got.nan_to_num(7.0, 8.0, 9.0), wanted.nan_to_num(7.0, 8.0, 9.0))


def test_operands_keep_nan_infinities_and_signs() -> None:
    """Whatever a matrix or a vector holds arrives in its own place, and nowhere else."""
    special = torch.tensor([0.0, -0.0, math.inf, -math.inf, math.nan, 1e-30, -3e38, 1.0])
    job = Job(SPECIAL, 129, packed=pack(SPECIAL, torch.zeros(100, 64)))
    residual = special.repeat(129 * 13)[:12900].reshape(129, 100)
    bias = special.repeat(13)[:100].flip(0)
    job.operands["residual"], job.operands["bias"] = embed(residual), embed(bias)
    got, wanted = job.run()["out"].cpu(), residual + bias
    assert torch.equal(got.isnan(), wanted.isnan())
    assert torch.equal(got.nan_to_num(7.0, 8.0, 9.0), wanted.nan_to_num(7.0, 8.0, 9.0))
    job.operands["bias"].fill_(
        -0.0
    )  # the accumulator's 0 - 0 is 0: a sum keeps a sign where both have it
    assert torch.equal(job.run()["out"].signbit().cpu(), (residual + 0.0).signbit())


def test_df_03_nan_and_infinity_are_counted_and_leave_amax_finite() -> None:
    x = torch.randn(65, 192).to(BF16)
    x[3, 5] = math.nan  # row 3 becomes NaN: 0 * NaN is
    job = identity(EMIT, x)
    found = job.run()
    alone = identity(EMIT, x.clone().index_fill_(0, torch.tensor([3]), 0.0))
    clean = alone.check()
    assert int(found["nans"]) == 5 + 192
    assert torch.isfinite(found["amax"]).all()
    assert_equal_bits(found["amax"], clean["amax"])
    others = [i for i in range(65) if i != 3]
    assert_equal_bits(bits(found["out_fp8"])[others], bits(clean["out_fp8"])[others])
    assert found["out_fp8"][3].float().isnan().all()


def test_df_02_zeros_are_zeros() -> None:
    job = identity(EMIT, torch.zeros(17, 192))
    found = job.check()
    assert not found["out_fp8"].float().any()
    assert float(found["amax"]) == 0
    assert int(found["saturated"]) == int(found["nans"]) == 5


def test_negative_zero_is_kept() -> None:
    """-2 * 0 is -0 in every output."""
    case = ROUNDED["scaled"]
    job = Job(case, 5, packed=pack(case, torch.zeros(64, 64), torch.tensor([0.5])))
    job.packed.scale.neg_()
    assert (job.run()["out_fp8"].view(torch.uint8) == 0x80).all()


@pytest.mark.parametrize("case", TURNED, ids=str)
def test_a_residual_meets_its_columns_before_they_are_turned(case: Case) -> None:
    for rows in (1, 130):
        Job(case, rows).check()


def test_df_03_a_zero_divided_by_zero_is_counted() -> None:
    """The largest value divided is infinite, which hides no NaN beside it."""
    x = torch.zeros(3, 64)
    x[1, 5] = 5.0
    job = identity(SUSPECTED, x)
    job.operands["divisor"].fill_(0.0)
    before = int(job.outputs["bad"].tensor)
    found = job.run()
    assert float(found["top"]) == 5.0
    assert int(found["bad"]) == before + 3 * 64 - 1


def test_amax_and_counters_run_on_from_where_they_are() -> None:
    x = torch.randn(129, 192).to(BF16)
    x[77, 100], x[5, 6] = 1000.0, -700.0
    job = identity(EMIT, x)
    job.operands["out_scale"].fill_(1.0)
    for launch in (1, 2, 3):
        found = job.run()
        assert float(found["amax"]) == 1000.0
        assert int(found["saturated"]) == 5 + 2 * launch
        assert int(found["nans"]) == 5
    job.outputs["amax"].tensor.fill_(2000.0)
    assert float(job.run()["amax"]) == 2000.0


# --- field failures ---


@pytest.mark.parametrize("dtype", list(BIAS))
def test_ge_06_the_bias_is_added_once(dtype: str) -> None:
    case = BIAS[dtype]
    job = Job(case, 65, packed=pack(case, torch.zeros(case.n, case.k)))
    bias = torch.randn(case.n).to(BF16)
    job.operands["bias"] = embed(bias)
    assert_equal_bits(job.run()["out"].cpu(), bias.expand(65, -1).contiguous())


def test_ge_06_the_bias_is_rotated() -> None:
    case = BIAS_ROPE
    job = Job(case, 65, packed=pack(case, torch.zeros(case.n, case.k)))
    job.operands["slots"].copy_(torch.arange(65))
    cells = job.check()["cells"].cpu()
    given = {name: x.cpu() for name, x in job.operands.items()}
    wanted = ref.rope(given["bias"].expand(65, -1), given["positions"], given["inv_freq"], 64)
    assert_near("cells", cells.reshape(-1, 128)[:65], wanted.to(BF16))


def test_ge_07_no_bias_is_a_bias_of_zeros() -> None:
    poison = torch.full((2**28,), math.nan, device=DEVICE)
    del poison
    without = Job(ABSENT, 65)
    zeros = Job(BIAS["bf16"], 65, packed=without.packed)
    zeros.x = without.x
    zeros.operands["bias"] = torch.zeros(192, dtype=BF16, device=DEVICE)
    assert_equal_bits(without.run()["out"], zeros.run()["out"])


def test_ge_05_every_shard_has_its_scale() -> None:
    ones = torch.ones(16, 512, device=DEVICE).to(FP8)
    scales = (1.0, 0.01, 100.0)
    shards = [Quantized("fp8", ones, torch.tensor([s], device=DEVICE)) for s in scales]
    packed = Quantized.concat(shards).pack(SHARDS.composition.row_order(48))
    job = Job(SHARDS, 4, packed=packed)
    job.x, job.operands["scale"] = torch.ones(4, 512, device=DEVICE).to(FP8), embed(torch.ones(1))
    wanted = torch.tensor([512.0, 5.12, 51200.0]).to(BF16).repeat_interleave(16)
    assert_equal_bits(job.run()["out"].cpu(), wanted.expand(4, -1).contiguous())


def test_ge_05_gate_and_up_have_theirs() -> None:
    ones = torch.ones(32, 512, device=DEVICE).to(FP8)
    shards = [Quantized("fp8", ones, torch.tensor([s], device=DEVICE)) for s in (1.0, 2.14)]
    packed = Quantized.concat(shards).pack(SHARDED_GLU.composition.row_order(64))
    job = Job(SHARDED_GLU, 4, packed=packed)
    job.x = torch.ones(4, 512, device=DEVICE).to(FP8)
    job.operands["scale"] = embed(torch.tensor([1 / 128]))  # gate 4, up 8.56
    gate, up = 4.0, 512 * float(np.float32(2.14)) / 128
    wanted = torch.tensor(gate / (1 + math.exp(-gate)) * up).to(BF16).expand(4, 32)
    assert_near("out", job.run()["out"].cpu(), wanted)


def test_ge_10_one_is_added_to_the_gain_in_float32() -> None:
    """BF16 would make 1 + 0.00390625 one, and 1 + 15.8125 16.75."""
    job = identity(GEMMA, torch.ones(3, 64))
    gain = torch.tensor([0.00390625, 15.8125]).repeat(32).to(BF16)
    job.operands["gain"] = embed(gain)
    wanted = torch.tensor([1.00390625, 16.8125]).repeat(32).expand(3, -1)
    assert torch.equal(job.run()["out"].cpu(), wanted)


def test_ge_12_fp8_is_rounded_once() -> None:
    """4.25 + 2^-10 is 4.5 in E4M3; by way of BF16 or FP16 it would be 4."""
    for name, case in ROUNDED.items():
        codes, x = torch.zeros(64, 64), torch.zeros(17, 64)
        codes[:, :3] = torch.tensor([1.0, 1.0, 0.5])
        x[:, :3] = torch.tensor([4.0, 0.25, 2.0**-9])
        scale = torch.ones(1) if case.dtype == FP8 else None
        job = Job(case, 17, packed=pack(case, codes.to(DEVICE), scale))
        job.x = embed_rows(x.to(case.dtype))
        for operand in ("out_scale", "cell_scale"):
            if operand in job.operands:
                job.operands[operand].fill_(1.0)
        if "slots" in job.operands:
            job.operands["slots"].copy_(torch.arange(17))
        found = job.run()
        got = next(
            found[o] for o in ("out_fp8", "cells", "out") if o in found and found[o].dtype == FP8
        )
        assert (got.reshape(-1, 64)[:17].float() == 4.5).all(), name


def test_ge_17_swiglu_clamps_as_asked() -> None:
    """gate 20, up -20, limit 7: silu(7) * -7 = -48.955."""
    x = torch.cat([torch.full((3, 32), 20.0), torch.full((3, 32), -20.0)], dim=1)
    got = identity(LIMITED, x).run()["out"].cpu()
    wanted = -49 / (1 + math.exp(-7))
    assert torch.allclose(got, torch.full_like(got, wanted), rtol=1e-6, atol=0)
