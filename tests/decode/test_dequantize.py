"""Expansion for the large GEMM: every value as its quantiser means it, padding zero, in the order the GEMM finds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from epicute.decode import pack_few_rows
from epicute.decode.dequantize import DequantizeKernel, DequantizePlan, plan_dequantize
from epicute.epilogues import Store, compose
from epicute.errors import ArgumentError
from epicute.jit import DEFAULT_TARGET, compile
from epicute.layouts import CHANNEL
from epicute.weights import FragmentPacked, Packed, Quantized, Weight
from tests.decode.cases import BF16, FP16, FP32, Few, chains
from tests.gemm.device import DEVICE
from tests.ptx import Emulated

CASES = [
    Few(compose(Store(BF16)), 72, 600, group=group, zeros=zeros, scale_dtype=scale)
    for group, zeros, scale in [
        (32, True, FP16),
        (64, False, BF16),
        (128, True, BF16),
        (CHANNEL, False, FP16),
    ]
] + [
    Few(chains(323)["swiglu"][0], 200, 323, zeros=True),
    Few(chains(700)["qkv.80"][0], 320, 700, group=32),
]
DTYPES = [BF16, FP16]


def packed_of(case: Few, seed: int = 1) -> FragmentPacked:
    """Random scales: products that round."""
    return pack_few_rows(case.quantized(seed, exact=False), case.composition)


def expected(packed: FragmentPacked, dtype: torch.dtype) -> Packed:
    """What packing the rounded values for the large GEMM gives."""
    values = packed.unpack().dequantize()  # type: ignore[attr-defined]
    return Quantized({BF16: "bf16", FP16: "fp16"}[dtype], values.to(dtype), None).pack(packed.order)


def kernel_of(plan: DequantizePlan) -> DequantizeKernel:
    return DequantizeKernel(plan.form, plan.order.rows, plan.dtype, DEFAULT_TARGET)


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=["bf16", "fp16"])
def test_on_the_cpu(case: Few, dtype: torch.dtype) -> None:
    packed = packed_of(case)
    plan = plan_dequantize(packed, dtype)
    scratch = plan.view(torch.full((plan.elements + 8,), torch.nan, dtype=dtype))
    plan.run(packed, scratch)
    wanted = expected(packed, dtype)
    assert torch.equal(scratch.codes, wanted.codes)
    assert scratch.shape == wanted.shape
    assert scratch.order_matches(wanted.order)


@pytest.mark.compile
@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=["bf16", "fp16"])
def test_the_kernel_on_the_cpu(case: Few, dtype: torch.dtype) -> None:
    packed = packed_of(case)
    plan = plan_dequantize(packed, dtype)
    scratch = plan.view(torch.full((plan.elements,), torch.nan, dtype=dtype))
    arguments = (packed.data.data_ptr(), scratch.codes.data_ptr(), plan._pieces, 3)
    Emulated(kernel_of(plan)).launch(arguments, packed.data, scratch.codes)
    assert torch.equal(scratch.codes, expected(packed, dtype).codes)


@pytest.mark.compile
@pytest.mark.parametrize("case", CASES, ids=str)
def test_it_compiles_without_spills(
    case: Few, record_property: Callable[[str, object], None]
) -> None:
    report = compile(kernel_of(plan_dequantize(packed_of(case))), strict=False).report
    record_property("registers", report.registers)
    report.check(str(case), DEFAULT_TARGET.smem_per_block)


def test_what_cannot_be_expanded_is_refused() -> None:
    case = CASES[0]
    packed = packed_of(case)
    plan = plan_dequantize(packed)
    with pytest.raises(ArgumentError, match="packed"):
        plan_dequantize(Weight(torch.ones(72, 64)).quantize("bf16").pack_fragments(packed.order))
    with pytest.raises(ArgumentError, match="dtype"):
        plan_dequantize(packed, FP32)
    for buffer in (
        torch.empty(plan.elements - 1, dtype=BF16),
        torch.empty(plan.elements, dtype=FP16),
        torch.empty(2 * plan.elements, dtype=BF16)[::2],
    ):
        with pytest.raises(ArgumentError, match="buffer"):
            plan.view(buffer)
    scratch = plan.view(torch.empty(plan.elements, dtype=BF16))
    other = packed_of(replace(case, k=664))
    with pytest.raises(ArgumentError, match="packed"):
        plan.run(other, scratch)
    with pytest.raises(ArgumentError, match="into"):
        plan.run(packed, replace(scratch, codes=scratch.codes.to(FP16), format="fp16"))


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=["bf16", "fp16"])
def test_on_the_gpu(case: Few, dtype: torch.dtype) -> None:
    packed = packed_of(case)
    plan = plan_dequantize(packed.to(DEVICE), dtype)
    buffer = torch.full((plan.elements + 8,), torch.nan, dtype=dtype, device=DEVICE)
    scratch = plan.view(buffer)
    plan.run(packed.to(DEVICE), scratch)
    assert torch.equal(scratch.codes.cpu(), expected(packed, dtype).codes)
    assert buffer[plan.elements :].isnan().all()
