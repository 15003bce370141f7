"""The plan: what it refuses before any launch, what it gives on the CPU, which kernel it takes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from epicute.decode import (
    BUCKETS,
    MOST_ROWS,
    FewRowsPlan,
    kernel_for,
    pack_few_rows,
    plan_dequantize,
    plan_few_rows,
)
from epicute.decode.schedule import FEWEST
from epicute.epilogues import Dequantize, ResidualAdd, RowScale, Store, compose
from epicute.errors import ArgumentError, EpicuteError
from epicute.gemm import align_rows
from epicute.jit import DEFAULT_TARGET
from epicute.weights import FragmentPacked, QuantizedInt4, Weight
from tests.decode.cases import BF16, FP8, FP16, FP32, Few, FewJob, chains, packed_of, qkv

PLAIN = Few(compose(Store(FP32)), 72, 600)
RESIDUAL = Few(ResidualAdd() >> Store(BF16), 72, 600)


def planned(case: Few, **options: Any) -> FewRowsPlan:
    return plan_few_rows(
        case.composition, packed_of(case), x_dtype=case.x_dtype, norm_gain=case.gain, **options
    )


def run(case: Few, m: int, **changes: Any) -> FewJob:
    job = FewJob(case, m)
    given = {**job.operands, **{name: o.tensor for name, o in job.outputs.items()}}
    if job.gain is not None:
        given["norm_gain"] = job.gain
    given |= changes
    x, packed = given.pop("x", job.x), given.pop("packed", job.packed)
    planned(case).run(x, packed, **{name: t for name, t in given.items() if t is not None})
    return job


@pytest.mark.parametrize("name", chains(600))
@pytest.mark.parametrize("m", [0, 1, 17, 70])
def test_on_the_cpu_the_composition_is_evaluated(name: str, m: int) -> None:
    composition, n, exact = chains(600)[name]
    case = Few(composition, n, 600, zeros=True, exact=exact)
    job = FewJob(case, m)
    wanted = job.expected()
    given = {**job.operands, **{key: o.tensor for key, o in job.outputs.items()}}
    planned(case).run(job.x, job.packed, **given)
    if m:
        job.check(wanted)


@pytest.mark.parametrize("format", ["fp8", "bf16", "fp16"])
def test_other_formats_on_the_cpu(format: str) -> None:
    composition = compose(Store(FP32))
    if format == "fp8":
        composition = Dequantize(None, "column") >> composition
    case = Few(composition, 72, 600, format, x_dtype=FP16 if format == "fp16" else BF16)
    job = FewJob(case, 5)
    wanted = job.expected()
    planned(case).run(job.x, job.packed, out=job.outputs["out"].tensor)
    job.check(wanted)


def test_a_gain_multiplies_x() -> None:
    case = replace(PLAIN, gain=True)
    job = FewJob(case, 3)
    wanted = job.expected()
    planned(case).run(job.x, job.packed, out=job.outputs["out"].tensor, norm_gain=job.gain)
    job.check(wanted)


def test_the_kernel_that_is_expected_to_be_fastest_serves() -> None:
    plan = planned(PLAIN)
    assert set(plan.kernels) == {FEWEST, *BUCKETS}
    assert plan.rows_of(1) == FEWEST
    assert plan.rows_of(8) == 8
    assert plan.rows_of(16) == 16
    assert plan.rows_of(17) in (32, 64)
    assert all(plan.rows_of(m) in (32, 64) for m in range(129, MOST_ROWS + 1, 31))
    assert set(planned(PLAIN, max_rows=16).kernels) == {FEWEST, 8, 16}
    assert set(planned(PLAIN, max_rows=FEWEST).kernels) == {FEWEST}
    assert set(planned(PLAIN, max_rows=1, batch_invariant=True).kernels) == {8}
    assert set(planned(replace(PLAIN, format="bf16"), max_rows=1).kernels) == {8}
    only = kernel_for(PLAIN.composition, packed_of(PLAIN), 16, target=DEFAULT_TARGET).spec.schedule
    assert set(planned(PLAIN, schedule=only).kernels) == {16}


def test_rows_that_fit_no_kernel_are_served_in_smaller_tiles() -> None:
    case = Few(qkv(2, 1, 80, 600), 320, 600, exact=False)
    plan = planned(case)
    assert 64 not in plan.kernels
    assert plan.rows_of(64) == 32


def test_one_schedule_orders_sums_for_all_rows() -> None:
    plan = planned(replace(PLAIN, k=4096), batch_invariant=True)
    schedules = [k.spec.schedule for k in plan.kernels.values()]
    assert len({(s.mma, s.cluster, s.conversion) for s in schedules}) == 1


WRONG: list[tuple[Few, dict[str, Any], str]] = [
    (PLAIN, {"x": torch.zeros(3, 600, dtype=FP16)}, "x: "),
    (PLAIN, {"x": torch.zeros(3, 592, dtype=BF16)}, "x: "),
    (PLAIN, {"x": torch.zeros(2, 3, 600, dtype=BF16)}, "x: "),
    (PLAIN, {"x": torch.zeros(3, 1200, dtype=BF16)[:, ::2]}, "x: "),
    (PLAIN, {"x": torch.zeros(3, 601, dtype=BF16)[:, 1:]}, "x: "),
    (PLAIN, {"x": [1, 2]}, "x: "),
    (PLAIN, {"packed": torch.zeros(72, 600)}, "packed: "),
    (PLAIN, {"packed": packed_of(replace(PLAIN, k=664))}, "packed: "),
    (PLAIN, {"packed": packed_of(replace(PLAIN, zeros=True))}, "packed: "),
    (PLAIN, {"packed": packed_of(replace(PLAIN, scale_dtype=BF16))}, "packed: "),
    (PLAIN, {"out": None}, "out: "),
    (PLAIN, {"out": torch.zeros(3, 72, dtype=BF16)}, "out: "),
    (PLAIN, {"out": torch.zeros(4, 72)}, "out: "),
    (PLAIN, {"bias": torch.zeros(72)}, "unknown bias"),
    (PLAIN, {"norm_gain": torch.ones(600)}, "norm_gain: "),
    (replace(PLAIN, gain=True), {"norm_gain": None}, "norm_gain: "),
    (replace(PLAIN, gain=True), {"norm_gain": torch.ones(600, dtype=BF16)}, "norm_gain: "),
    (RESIDUAL, {"residual": None}, "missing residual"),
    (RESIDUAL, {"residual": torch.zeros(3, 72)}, "residual: "),
]


@pytest.mark.parametrize(
    ("case", "changes", "named"), WRONG, ids=[f"{i}" for i in range(len(WRONG))]
)
def test_iw_08_what_does_not_fit_is_named(case: Few, changes: dict[str, Any], named: str) -> None:
    with pytest.raises(ArgumentError, match=named):
        run(case, 3, **changes)


def test_outputs_may_not_lie_on_inputs() -> None:
    square = Few(ResidualAdd() >> Store(BF16), 600, 600)
    plan, packed = planned(square), packed_of(square)
    x = torch.zeros(3, 608, dtype=BF16)[:, :600]
    other = torch.zeros(6, 600, dtype=BF16)
    with pytest.raises(ArgumentError, match="apart from x"):
        plan.run(x, packed, residual=other[:3], out=x)
    with pytest.raises(ArgumentError, match="apart from"):
        plan.run(x, packed, residual=other[:3], out=other[1:4])
    plan.run(x, packed, residual=other[:3], out=other[:3])  # the very matrix that is read
    both = torch.zeros(3, 1200, dtype=BF16)
    plan.run(x, packed, residual=both[:, :600], out=both[:, 600:])


def test_what_was_checked_once_is_not_checked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors alike in place, shape, strides, dtype and device, of a weight that was seen; anything else is checked."""
    plan, packed = planned(PLAIN), packed_of(PLAIN)
    job = FewJob(PLAIN, 3)
    out = job.outputs["out"].tensor
    calls: list[int] = []
    bind = FewRowsPlan._bind
    monkeypatch.setattr(FewRowsPlan, "_bind", lambda *given: calls.append(1) or bind(*given))
    wanted = job.expected()
    for _ in range(3):
        plan.run(job.x, packed, out=out)
    assert len(calls) == 1
    job.check(wanted)
    out.zero_()
    plan.run(job.x.view(3, 600), packed, out=out)
    assert len(calls) == 1  # a view of the very same
    job.check(wanted)
    plan.run(job.x[:2], packed, out=out[:2])
    assert len(calls) == 2
    other = packed.to("cpu")
    other = replace(other, data=other.data.clone())
    plan.run(job.x, other, out=out)
    assert len(calls) == 3  # a weight that was not seen
    with pytest.raises(ArgumentError, match="unknown bias"):
        plan.run(job.x, packed, out=out, bias=torch.zeros(72))
    with pytest.raises(ArgumentError, match="out: "):
        plan.run(job.x, packed, out=out.to(BF16))
    with pytest.raises(ArgumentError, match="packed: "):
        plan.run(job.x, packed_of(replace(PLAIN, k=664)), out=out)
    for _ in range(2):
        with pytest.raises(ArgumentError, match="norm_gain"):
            plan.run(job.x, packed, out=out, norm_gain=torch.ones(600))


def test_the_memory_of_calls_has_an_end() -> None:
    plan, packed = planned(PLAIN), packed_of(PLAIN)
    x = torch.zeros(300, 600, dtype=BF16)
    out = torch.empty(300, 72)
    for i in range(260):
        plan.run(x[i : i + 1], packed, out=out[i : i + 1])
    assert 0 < len(plan._bound) <= 256


def test_more_rows_than_it_is_for_are_refused() -> None:
    out = torch.zeros(MOST_ROWS + 1, 72)
    x = torch.zeros(MOST_ROWS + 1, 600, dtype=BF16)
    with pytest.raises(ArgumentError, match="at most 256"):
        planned(PLAIN).run(x, packed_of(PLAIN), out=out)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"max_rows": 0}, "max_rows"),
        ({"max_rows": 257}, "max_rows"),
        ({"x_dtype": FP32}, "x_dtype"),
        ({"x_dtype": FP8}, "x_dtype"),
        ({"dtypes": {"nothing": BF16}}, "dtypes"),
    ],
)
def test_plans_that_cannot_be_are_refused(options: dict[str, Any], named: str) -> None:
    with pytest.raises(EpicuteError, match=named):
        plan_few_rows(PLAIN.composition, packed_of(PLAIN), **options)


def test_weights_packed_otherwise_are_refused() -> None:
    quantized = PLAIN.quantized()
    order = PLAIN.composition.row_order(72)
    with pytest.raises(ArgumentError, match="pack_few_rows"):
        plan_few_rows(PLAIN.composition, FragmentPacked.of(quantized, order, 1))
    with pytest.raises(ArgumentError, match="packed"):
        plan_few_rows(PLAIN.composition, quantized)
    paired = qkv(1, 1, 16, 600)
    with pytest.raises(ArgumentError, match="order"):
        plan_few_rows(
            paired, pack_few_rows(Few(PLAIN.composition, 48, 600).quantized(), PLAIN.composition)
        )
    with pytest.raises(ArgumentError, match="width"):
        wide = RowScale(608) >> Store(BF16)
        plan_few_rows(wide, packed_of(PLAIN))
    fp8 = pack_few_rows(replace(PLAIN, format="fp8").quantized(), PLAIN.composition)
    with pytest.raises(ArgumentError, match="Dequantize"):
        plan_few_rows(PLAIN.composition, fp8)
    bf16 = pack_few_rows(replace(PLAIN, format="bf16").quantized(), PLAIN.composition)
    with pytest.raises(ArgumentError, match="x_dtype"):
        plan_few_rows(PLAIN.composition, bf16, x_dtype=FP16)


@pytest.mark.parametrize("k", [320, 4304, 7392])
def test_iw_07_k_that_is_no_multiple_of_the_group(k: int) -> None:
    """Padded inside of the pack, with scales that make the padding worth nothing."""
    for n in (24, 40):
        case = Few(compose(Store(FP32)), n, k)
        job = FewJob(case, 2)
        wanted = job.expected()
        planned(case).run(job.x, job.packed, out=job.outputs["out"].tensor)
        job.check(wanted)


def test_int4_alone_serves_many_rows_too() -> None:
    """Expanded into a scratch, the large GEMM's evaluation reads the very same values, rounded to bfloat16."""
    import epicute

    generator = torch.Generator().manual_seed(3)
    weight = Weight(torch.randn(72, 600, generator=generator)).quantize("int4")
    assert isinstance(weight, QuantizedInt4)
    packed = pack_few_rows(weight, PLAIN.composition)
    plan = plan_dequantize(packed)
    scratch = plan.view(torch.empty(plan.elements, dtype=BF16))
    plan.run(packed, scratch)
    x = align_rows(torch.randn(300, 600, generator=generator).to(BF16))
    found = epicute.linear(x, scratch, PLAIN.composition)
    assert isinstance(found, torch.Tensor)
    wanted = x.float() @ weight.dequantize().to(BF16).float().T
    assert torch.equal(found, wanted)


def test_it_prints_its_schedules() -> None:
    text = str(planned(PLAIN))
    for rows in BUCKETS:
        assert f"up to {rows} rows" in text
