"""Few-row kernels on the device: exact where sums are, near float64 elsewhere, the same bits every time."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch

import epicute
from epicute.decode import FewRowsPlan, pack_few_rows, plan_dequantize, plan_few_rows
from epicute.decode.geometry import MMAS
from epicute.decode.schedule import BUCKETS, CONVERSIONS
from epicute.epilogues import ResidualAdd, Store, compose
from epicute.layouts import CHANNEL
from epicute.quant.int4 import MIDDLE
from epicute.testing import Budget, assert_within
from epicute.weights import FragmentPacked, QuantizedInt4
from tests.decode.cases import (
    BF16,
    FP16,
    FP32,
    Few,
    FewJob,
    chains,
    dequantized,
    in_place,
    packed_of,
    planned,
)
from tests.decode.test_gates import layer
from tests.gemm.device import DEVICE

pytestmark = pytest.mark.gpu

PLAIN = compose(Store(FP32))
LAYERS = ("qkv", "o", "gate_up", "down")


FORMS = [(rows, mma) for rows in BUCKETS for mma in MMAS]
"""Rows of x at a time, and what multiplies them."""

WGMMA = (("mma", "wgmma"), ("conversion", "registers"))


def check(case: Few, m: int, seed: int = 0) -> None:
    FewJob(case, m, seed, DEVICE).run(planned(case, DEVICE))


@pytest.mark.parametrize("name", chains(600))
@pytest.mark.parametrize(("rows", "mma"), FORMS[:6])
def test_compositions(name: str, rows: int, mma: str) -> None:
    composition, n, exact = chains(600)[name]
    rows = 8 if name == "qkv.80" else rows
    for m in (1, rows - 3, rows):
        check(Few(composition, n, 600, rows=rows, exact=exact, mma=mma), m)


@pytest.mark.parametrize("conversion", CONVERSIONS)
@pytest.mark.parametrize("group", [32, 64, 128, CHANNEL])
def test_iw_04_iw_06_int4_in_every_way(conversion: str, group: int) -> None:
    for zeros, x_dtype in ((False, BF16), (True, BF16), (True, FP16)):
        changes = (("conversion", conversion),)
        case = Few(PLAIN, 72, 600, group=group, zeros=zeros, x_dtype=x_dtype, changes=changes)
        check(case, 5)


@pytest.mark.parametrize("rows", [16, 64])
@pytest.mark.parametrize("group", [32, 64, 128, CHANNEL])
def test_iw_04_iw_06_int4_by_wgmma(rows: int, group: int) -> None:
    for zeros, x_dtype in ((False, BF16), (True, BF16), (True, FP16)):
        case = Few(
            PLAIN, 72, 600, rows=rows, group=group, zeros=zeros, x_dtype=x_dtype, mma="wgmma"
        )
        for m in (1, rows - 1):
            check(case, m)


@pytest.mark.parametrize("rows", [8, 16])
@pytest.mark.parametrize("group", [32, 64, 128, CHANNEL])
@pytest.mark.parametrize("cluster", [1, 2])
def test_iw_04_iw_06_int4_times_integers_made_in_place(rows: int, group: int, cluster: int) -> None:
    """More rows than a tile has too: integers are made again of what TMA writes over them."""
    for zeros, x_dtype, k in ((False, BF16, 1000), (True, BF16, 1500), (True, FP16, 1000)):
        case = Few(PLAIN, 200, k, rows=rows, group=group, zeros=zeros, x_dtype=x_dtype)
        for m in (1, rows - 1, 2 * rows + 1):
            check(in_place(case, cluster), m)


@pytest.mark.parametrize("format", ["fp8", "bf16", "fp16"])
@pytest.mark.parametrize(("rows", "mma"), FORMS)
def test_eight_and_sixteen_bits(format: str, rows: int, mma: str) -> None:
    composition = dequantized(PLAIN) if format == "fp8" else PLAIN
    for x_dtype in (BF16, FP16):
        if format in ("fp8", {BF16: "bf16", FP16: "fp16"}[x_dtype]):
            check(Few(composition, 200, 1000, format, rows, x_dtype, mma=mma), rows - 1)


@pytest.mark.parametrize(("rows", "mma"), FORMS)
@pytest.mark.parametrize("cluster", [1, 2, 4, 8])
def test_clusters(rows: int, mma: str, cluster: int) -> None:
    changes = (("cluster", cluster), ("chunks", 1), ("slots", 3), ("in_flight", 2))
    check(Few(PLAIN, 640, 4200, rows=rows, mma=mma, changes=changes), rows - 2)


@pytest.mark.parametrize("mma", MMAS)
@pytest.mark.parametrize(
    ("rows", "cluster", "wide", "sums"),
    [(16, 1, 3, 1), (16, 2, 3, 3), (32, 4, 2, 2), (32, 8, 2, 1), (64, 8, 1, 1), (64, 1, 2, 1)],
)
def test_tiles_that_are_held_while_x_is_read(
    mma: str, rows: int, cluster: int, wide: int, sums: int
) -> None:
    """More tiles than the clusters have at once, groups that are not whole, several copies of x."""
    if mma == "sync" and rows == 64:
        wide = 1
    changes = (
        ("cluster", cluster),
        ("chunks", 1),
        ("slots", 3),
        ("in_flight", 2),
        ("wide", wide),
        ("sums", sums),
        ("conversion", "registers"),
    )
    composition = ResidualAdd() >> Store(BF16)
    case = Few(composition, 64 * 300 - 5, 512 * 2 * cluster, rows=rows, mma=mma, changes=changes)
    for m in (rows - 3, 2 * rows + 1):
        check(case, m)


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("format", ["int4", "fp8", "bf16"])
@pytest.mark.parametrize("mma", MMAS)
def test_published_layers(name: str, format: str, mma: str) -> None:
    for shape, rows in (("SmolLM2", 8), ("1B", 16), ("8B", 32), ("8B", 64))[: 3 + (mma == "wgmma")]:
        case = layer(shape, name, format, rows, mma=mma)
        FewJob(case, rows - 1, device=DEVICE).run(planned(case, DEVICE))


ROWS = (0, 1, 2, 3, 7, 8, 9, 16, 17, 31, 32, 33, 63, 64, 65, 70, 128, 255, 256)


@cache
def whole(invariant: bool = False, n: int = 200, k: int = 1100) -> tuple[FewRowsPlan, Few]:
    """A plan for all rows."""
    case = Few(PLAIN, n, k, zeros=True, invariant=invariant)
    plan = plan_few_rows(PLAIN, packed_of(case).to(DEVICE), batch_invariant=invariant)
    return plan, case


@pytest.mark.parametrize("m", ROWS)
def test_every_number_of_rows(m: int) -> None:
    plan, case = whole()
    FewJob(case, m, device=DEVICE).run(plan)


def random(case: Few, m: int, positive: bool, seed: int = 3) -> tuple[Any, torch.Tensor, Any]:
    """(packed, x, float64 product) of data whose sums round."""
    quantized = case.quantized(seed, exact=False, device=DEVICE)
    generator = torch.Generator(DEVICE).manual_seed(seed)
    x = torch.randn(m, case.k, generator=generator, device=DEVICE)
    x = epicute.align_rows((x.abs() if positive else x).to(case.x_dtype))
    if isinstance(quantized, QuantizedInt4):
        weight = quantized.int4.dequantize(torch.float64)
    else:
        weight = quantized.codes.double()
    return pack_few_rows(quantized, case.composition), x, x.double() @ weight.T


@pytest.mark.parametrize("positive", [False, True], ids=["mixed", "positive"])
@pytest.mark.parametrize("conversion", [*CONVERSIONS, "wgmma", "in place"])
@pytest.mark.parametrize("x_dtype", [BF16, FP16], ids=["bf16", "fp16"])
def test_int4_against_float64(positive: bool, conversion: str, x_dtype: torch.dtype) -> None:
    """Where the offset's share is taken back after the sum, its rounding is left over."""
    for group, zeros in ((128, False), (32, True)):
        changes = WGMMA if conversion == "wgmma" else (("conversion", conversion),)
        changes = () if conversion == "in place" else changes
        case = Few(
            PLAIN, 1000, 4304, rows=16, x_dtype=x_dtype, group=group, zeros=zeros, changes=changes
        )
        if conversion == "in place":
            case = in_place(case, 2)
        packed, x, wanted = random(case, 13, positive)
        out = torch.full((13, 1000), torch.nan, device=DEVICE)
        planned(case, DEVICE).run(x, packed, out=out)
        allowed = (
            2e-6 if conversion in ("registers", "wgmma") else 2e-4 * (4 if x_dtype == FP16 else 1)
        )
        assert_within(out.cpu(), wanted.cpu(), Budget(allowed, 10 * allowed))


@pytest.mark.parametrize("format", ["fp8", "bf16", "fp16"])
@pytest.mark.parametrize("mma", MMAS)
def test_other_formats_against_float64(format: str, mma: str) -> None:
    x_dtype = FP16 if format == "fp16" else BF16
    composition = dequantized(PLAIN) if format == "fp8" else PLAIN
    case = Few(composition, 1000, 4304, format, 16, x_dtype, mma=mma)
    packed, x, wanted = random(case, 13, True)
    out = torch.full((13, 1000), torch.nan, device=DEVICE)
    planned(case, DEVICE).run(x, packed, out=out)
    if packed.scale is not None:
        wanted = wanted * packed.scale.double()
    assert_within(out.cpu(), wanted.cpu(), Budget(2e-6, 2e-5))


def test_iw_03_codes_at_their_zero_point_are_worth_nothing() -> None:
    case = Few(PLAIN, 72, 600, zeros=True)
    quantized = case.quantized()
    assert isinstance(quantized, QuantizedInt4)
    assert quantized.zero is not None
    middle = quantized.codes * 0 + MIDDLE
    flat = replace(quantized, codes=middle, zero=torch.full_like(quantized.zero, MIDDLE))
    job = FewJob(case, 3, device=DEVICE)
    job.packed = pack_few_rows(flat, PLAIN).to(DEVICE)
    job.launch(planned(case, DEVICE))
    assert not job.outputs["out"].tensor.any()


def test_iw_10_large_sums_that_cancel() -> None:
    """FP16 activations of 512: partial sums of ± 229376 inside of a share of k, and on either side of one."""
    for k in (128, 1024):
        case = Few(PLAIN, 64, k, x_dtype=FP16)
        quantized = case.quantized()
        assert isinstance(quantized, QuantizedInt4)
        codes = torch.where(torch.arange(k) < k // 2, 15, 1).to(torch.uint8).expand(64, -1)
        level = replace(
            quantized, codes=codes.contiguous(), scale=torch.ones_like(quantized.scales)
        )
        job = FewJob(case, 1, device=DEVICE)
        job.packed = pack_few_rows(level, PLAIN).to(DEVICE)
        job.x.fill_(512.0)
        job.launch(planned(case, DEVICE))
        assert not job.outputs["out"].tensor.any()


@pytest.mark.parametrize("mma", MMAS)
def test_iw_11_a_row_has_the_same_bits_in_any_batch(mma: str) -> None:
    plan, case = whole(True, 1000, 4304)
    if mma == "wgmma":
        changes = (*WGMMA, ("cluster", 2), ("chunks", 1))
        some = [replace(case, rows=rows, changes=changes).kernel() for rows in BUCKETS]
        plan = FewRowsPlan({k.spec.schedule.rows: k for k in some}, batch_invariant=True)
        plan.compile()
    packed, x, _ = random(case, 256, False)
    rows = {}
    for m in (1, 2, 3, 9, 17, 31, 32, 33, 63, 64, 65, 70, 76, 128, 256):
        out = torch.full((m, 1000), torch.nan, device=DEVICE)
        plan.run(x[:m], packed, out=out)
        rows[m] = out
    for m, out in rows.items():
        assert torch.equal(out, rows[256][:m]), m
    alone = torch.empty(1, 1000, device=DEVICE)
    plan.run(x[37:38], packed, out=alone)
    assert torch.equal(alone[0], rows[256][37])


@pytest.mark.parametrize("k", [256, 7168])
def test_iw_02_nothing_is_added_to_what_was_there(k: int) -> None:
    case = Few(PLAIN, 512, k)
    job = FewJob(case, 8, device=DEVICE)
    wanted = job.expected()["out"].to(DEVICE)
    out = job.outputs["out"].tensor
    for _ in range(500):
        out.fill_(torch.nan)
        job.launch(planned(case, DEVICE))
        assert torch.equal(out, wanted)


@pytest.mark.parametrize("m", [1, 16, 17, 64, 128])
def test_iw_01_two_hundred_times_the_same(m: int) -> None:
    for n, k in ((256, 512), (4096, 4096), (256, 11008), (14336, 512)):
        case = Few(PLAIN, n, k)
        plan = plan_few_rows(PLAIN, packed_of(case).to(DEVICE), max_rows=min(m, 64))
        job = FewJob(case, m, device=DEVICE)
        wanted = job.expected()["out"].to(DEVICE)
        wrong = torch.zeros((), dtype=torch.int64, device=DEVICE)
        for _ in range(200):
            job.outputs["out"].tensor.fill_(torch.nan)
            job.launch(plan)
            wrong += (job.outputs["out"].tensor != wanted).sum()
        assert int(wrong) == 0


def square(n: int = 1024, mma: str | None = None) -> tuple[FewRowsPlan, FragmentPacked, Few]:
    """A projection whose output is the next one's input."""
    case = Few(ResidualAdd() >> Store(BF16), n, n, exact=False)
    packed = pack_few_rows(case.quantized(exact=False, device=DEVICE), case.composition)
    if mma == "wgmma":
        some = [replace(case, rows=rows, mma=mma).kernel() for rows in BUCKETS[1:]]
        return FewRowsPlan({k.spec.schedule.rows: k for k in some}), packed, case
    return plan_few_rows(case.composition, packed, max_rows=16), packed, case


@pytest.mark.parametrize(("m", "mma"), [(1, None), (16, None), (16, "wgmma"), (64, "wgmma")])
def test_a_chain_replayed_a_thousand_times_has_the_same_bits(m: int, mma: str | None) -> None:
    """Each kernel reads weights while the one before still computes what it multiplies."""
    plan, packed, case = square(mma=mma)
    plan.admit(packed)
    generator = torch.Generator(DEVICE).manual_seed(1)
    x = torch.randn(m, case.n, generator=generator, device=DEVICE).to(BF16)
    steps = [torch.empty_like(x) for _ in range(12)]

    def chain(wait: bool) -> None:
        before = x
        for step in steps:
            plan.run(before, packed, residual=before, out=step)
            before = step
            if wait:
                torch.cuda.synchronize()

    chain(True)
    wanted = [step.clone() for step in steps]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        chain(False)
    wrong = torch.zeros((), dtype=torch.int64, device=DEVICE)
    for _ in range(1000):
        for step in steps:
            step.fill_(torch.nan)
        graph.replay()
        for step, right in zip(steps, wanted, strict=True):
            wrong += (step != right).sum()
    assert int(wrong) == 0


@pytest.mark.parametrize("late", [False, True], ids=["first", "late"])
@pytest.mark.parametrize("crowd", [1, 2])
@pytest.mark.parametrize("mma", MMAS)
def test_the_rings_hand_over_a_hundred_thousand_times(late: bool, crowd: int, mma: str) -> None:
    """``crowd`` CTAs of a kernel for each SM, the next kernel's start late or at once, a ring as small as it may be."""
    from epicute.decode import kernel_for

    plan, packed, case = square()
    schedule = plan.kernels[8].spec.schedule
    schedule = replace(schedule, cluster=1, chunks=2, slots=3, in_flight=2, late=late)
    if mma == "wgmma":
        schedule = replace(schedule, **dict(WGMMA))
    kernel = kernel_for(case.composition, packed, 8, schedule=schedule)
    plan = FewRowsPlan({8: kernel})
    plan.admit(packed)
    x = torch.randn(4, case.n, device=DEVICE).to(BF16)
    # Each is some six times the one before: forty stay finite.
    steps = [torch.empty_like(x) for _ in range(40)]
    processors = torch.cuda.get_device_properties(0).multi_processor_count
    plan._devices[torch.cuda.current_device()] = {1: crowd * processors}

    def chain() -> None:
        before = x
        for step in steps:
            plan.run(before, packed, residual=before, out=step)
            before = step

    for step in steps:
        step.fill_(torch.nan)
    before = x
    for step in steps:
        plan.run(before, packed, residual=before, out=step)
        torch.cuda.synchronize()
        before = step
    wanted = torch.stack(steps)
    assert torch.isfinite(wanted).all()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        chain()
    wrong = torch.zeros((), dtype=torch.int64, device=DEVICE)
    for _ in range(2500):
        graph.replay()
        wrong += (torch.stack(steps) != wanted).sum()
    assert int(wrong) == 0


@pytest.mark.parametrize("cluster", [2, 4, 8])
@pytest.mark.parametrize("format", ["int4", "bf16"])
@pytest.mark.parametrize("mma", MMAS)
def test_sums_of_many_tiles_cross_a_cluster(mma: str, format: str, cluster: int) -> None:
    """28 rounds of an exchange whose buffers are used again and again; whole numbers, so bit for bit, twenty times."""
    changes = (("cluster", cluster), ("mma", mma), ("conversion", "registers"))
    changes = (*changes, ("chunks", 1), ("wide", 1), ("sums", 1), ("slots", 3), ("in_flight", 2))
    case = Few(compose(Store(BF16)), 28672, 4096, format, 64, changes=changes)
    plan = planned(case, DEVICE)
    for seed in range(20):
        FewJob(case, 64, seed, DEVICE).run(plan)


@pytest.mark.parametrize("m", [16, 32, 64])
def test_both_forms_give_the_same(m: int) -> None:
    """Of the same packed bytes, on random data: apart by no more than the order of a sum."""
    found = []
    case = Few(PLAIN, 1000, 4304, rows=m, zeros=True, changes=(("conversion", "registers"),))
    packed, x, _ = random(case, m, False)
    for mma in MMAS:
        out = torch.full((m, 1000), torch.nan, device=DEVICE)
        planned(replace(case, mma=mma), DEVICE).run(x, packed, out=out)
        found.append(out.cpu())
    assert_within(found[0], found[1].double(), Budget(2e-6, 2e-5))


def test_a_weight_that_was_just_written_is_waited_for() -> None:
    case = Few(PLAIN, 4096, 4096)
    plan = plan_few_rows(PLAIN, packed_of(case).to(DEVICE), max_rows=8)
    job = FewJob(case, 4, device=DEVICE)
    wanted = job.expected()["out"].to(DEVICE)
    for _ in range(20):
        fresh = replace(job.packed, data=torch.zeros_like(job.packed.data))
        torch.cuda._sleep(2_000_000)
        fresh.data.copy_(job.packed.data)
        out = job.outputs["out"].tensor
        given = {"out": out}
        plan.run(job.x, fresh, **given)
        assert torch.equal(out, wanted)
        plan.run(job.x, fresh, **given)
        assert torch.equal(out, wanted)


def test_a_run_allocates_nothing_and_may_be_captured_at_once() -> None:
    case = Few(PLAIN, 264, 1100, zeros=True)
    packed = packed_of(case).to(DEVICE)
    plan = plan_few_rows(PLAIN, packed, max_rows=8)
    job = FewJob(case, 3, device=DEVICE)
    wanted = job.expected()["out"].to(DEVICE)
    job.packed = packed
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        job.launch(plan)
    graph.replay()
    assert torch.equal(job.outputs["out"].tensor, wanted)
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    for _ in range(10):
        job.launch(plan)
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before


def test_int4_alone_serves_many_rows() -> None:
    """The large GEMM on what was expanded, and few-row kernels on the codes, agree as far as bfloat16 weights do."""
    composition = compose(Store(BF16))
    case = Few(composition, 1024, 2048, exact=False)
    packed = pack_few_rows(case.quantized(exact=False, device=DEVICE), composition)
    expansion = plan_dequantize(packed)
    scratch = expansion.view(torch.empty(expansion.elements, dtype=BF16, device=DEVICE))
    expansion.run(packed, scratch)
    x = torch.randn(256, 2048, device=DEVICE).to(BF16)
    large, few = (torch.empty(256, 1024, dtype=BF16, device=DEVICE) for _ in range(2))
    epicute.plan(composition, scratch).run(x, scratch, out=large)
    plan_few_rows(composition, packed).run(x, packed, out=few)
    assert_within(few.float().cpu(), large.double().cpu(), Budget(6e-3, 2e-2))


def test_two_streams_share_a_plan() -> None:
    plan, case = whole()
    jobs = [FewJob(case, m, m, DEVICE) for m in (3, 40)]
    wanted = [job.expected()["out"].to(DEVICE) for job in jobs]
    streams = [torch.cuda.Stream() for _ in jobs]
    torch.cuda.synchronize()
    for _ in range(50):
        for job, stream in zip(jobs, streams, strict=True):
            with torch.cuda.stream(stream):
                job.launch(plan)
    torch.cuda.synchronize()
    for job, right in zip(jobs, wanted, strict=True):
        assert torch.equal(job.outputs["out"].tensor, right)
