"""Field failures at compile time: compositions and sizes that other frameworks' compilers refused."""

from __future__ import annotations

import pytest
import torch

from epicute import Target, kernel_for
from epicute.epilogues import Dequantize, EmitFP8, ResidualAdd, Store, SwiGLU
from epicute.jit import compile

pytestmark = pytest.mark.compile

HOPPER = Target("sm_90a")
FP8 = torch.float8_e4m3fn


@pytest.mark.parametrize("width", [8, 24, 64, 200, 256])
def test_ge_08_swiglu_and_an_fp8_store_compile_at_any_width(width: int) -> None:
    """Half the columns, so half the bytes that a thread may store at once."""
    fused = Dequantize() >> SwiGLU() >> EmitFP8()
    kernel = kernel_for(fused, n=2 * width, k=512, dtype=FP8, target=HOPPER)
    assert compile(kernel).report.problems() == []


def test_jc_13_a_weight_beyond_32_bits_compiles() -> None:
    """4 GiB of weights, and an output whose elements pass 2^31 for any M beyond 8192."""
    fused = ResidualAdd() >> Store(torch.bfloat16)
    kernel = kernel_for(fused, n=262_144, k=16_384, dtype=FP8, target=HOPPER)
    assert kernel.spec.problem.rows * kernel.spec.pitch == 2**32
    assert compile(kernel).report.problems() == []
