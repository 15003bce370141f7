"""Strides, offsets past 32 bits, refusals before a launch, devices, processes, and a thousand equal launches."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

import epicute
from epicute.epilogues import EmitFP8, ResidualAdd, Store, SumSquares, compose
from epicute.errors import ArgumentError
from epicute.testing import assert_equal_bits
from tests.gemm import processes
from tests.gemm.compositions import BF16, FP8, FP32, SKELETONS, Case, Tile, projection
from tests.gemm.device import DEVICE, Output, bits, embed, integers, synchronize
from tests.gemm.jobs import Job, pack, plan_of, weight_of
from tests.gemm.processes import run_in_turn
from tests.jit.processes import finish, start

pytestmark = pytest.mark.gpu

ADD = ResidualAdd() >> Store(BF16)
STRIDED = Case("ge16", ADD, 192, 576, BF16, exact=True)
NARROW = Case("ge16-odd", ADD, 100, 576, BF16, exact=True)
LOOSE = Case(
    "ge16-loose", ADD, 192, 576, BF16, exact=True, alignments=(("out", 2), ("residual", 2))
)
RING = replace(STRIDED, name="ge16-ring", tile=Tile(128, 192, 2, 4))
LARGE = Case("ge18", ResidualAdd() >> SumSquares() >> Store(BF16), 8192, 64, BF16)
TURNS = replace(LARGE, name="ge18-pingpong", tile=Tile(64, 256, 2, 0, True))
SHARES = replace(LARGE, name="ge18-pingpong-n2", tile=Tile(128, 128, 1, 0, True, 2))
LARGER = Case("ge18-fp8", compose(EmitFP8()), 8192, 64, BF16)
LARGEST = replace(LARGER, name="ge18-ring", tile=Tile(128, 256, 2, 4))
TALL = Case("kv16", compose(Store(BF16)), 8, 8, BF16)
STABLE = [
    projection("qkv", "SmolLM2", "fp8"),
    projection("gate_up", "SmolLM2", "fp8"),
    projection("o", "1B", "fp8"),
    SKELETONS["qkv.128.half.norm.fp8"].case("bf16", 24, 576),
]
SHARED = [SKELETONS[name].case("fp8", 200, 576) for name in ("store.emit", "scales.bias")]
CASES = [
    STRIDED,
    RING,
    NARROW,
    LOOSE,
    LARGE,
    TURNS,
    SHARES,
    LARGER,
    LARGEST,
    TALL,
    *STABLE,
    *SHARED,
]
DEVICES = range(max(1, torch.cuda.device_count()))


# --- strides ---


def slices(big: torch.Tensor, rows: int, k: int) -> dict[str, torch.Tensor]:
    """Views of ``big`` that TMA can read."""
    return {
        "columns": big[:rows, 64 : 64 + k],
        "every other row": big[::2, :k][:rows],
        "rows from the middle": big[7 : 7 + rows, :k],
        "both": big[1::3, 8 : 8 + k][:rows],
    }


@pytest.mark.parametrize("view", ["columns", "every other row", "rows from the middle", "both"])
def test_ge_16_strided_x(view: str) -> None:
    big = torch.full((600, 720), torch.nan, device=DEVICE).to(BF16)
    job = Job(STRIDED, 129)
    x = slices(big, 129, 576)[view]
    x.copy_(integers(129, 576, dtype=BF16, seed=16, most=2))
    job.x = x
    job.check()


def test_ge_16_x_with_a_step_is_refused_and_aligned_rows_are_not() -> None:
    job = Job(STRIDED, 17)
    right = job.run()["out"].clone()
    job.x = job.x.repeat_interleave(2, dim=1)[:, ::2]
    job.outputs["out"] = Output((17, 192), BF16)
    with pytest.raises(ArgumentError, match=r"x: got .*strides \(1152, 2\).*align_rows"):
        job.run()
    synchronize()
    assert job.outputs["out"].unwritten().all()
    job.x = epicute.align_rows(job.x)
    assert_equal_bits(job.run()["out"], right)


@pytest.mark.parametrize(
    ("case", "first"), [(STRIDED, 8), (RING, 8), (NARROW, 8), (NARROW, 4), (LOOSE, 1)]
)
def test_ge_16_strided_outputs_and_residuals(case: Case, first: int) -> None:
    """out = big[:, 8 : 8 + N]: the columns on either side keep their bytes."""
    job = Job(case, 129)
    big = torch.full((129, case.n + 24), 7.0, device=DEVICE).to(BF16)
    residual = torch.full((129, case.n + 24), torch.nan, device=DEVICE).to(BF16)
    residual[:, first : first + case.n] = job.operands["residual"]
    job.operands["residual"] = residual[:, first : first + case.n]
    job.outputs["out"].tensor = big[:, first : first + case.n]
    job.check()
    assert (big[:, :first] == 7).all()
    assert (big[:, first + case.n :] == 7).all()


@pytest.mark.parametrize("case", [STRIDED, RING], ids=str)
def test_one_row_may_have_any_stride(case: Case) -> None:
    job = Job(case, 1)
    job.outputs["out"] = Output((1, 192), BF16, strides=(193, 1))
    job.operands["residual"] = embed(job.operands["residual"].cpu(), gap=1)
    job.check()


@pytest.mark.parametrize("case", [STRIDED, RING], ids=str)
def test_ge_16_an_output_may_replace_the_residual(case: Case) -> None:
    job = Job(case, 129)
    wanted = job.expected()["out"]
    x = job.operands["residual"]
    job.plan.run(job.x, job.packed, residual=x, out=x)
    assert_equal_bits(x.cpu().contiguous(), wanted)


def test_ge_16_a_transposed_weight() -> None:
    values = integers(576, 192, dtype=BF16, seed=1)
    weight = epicute.Weight(values.T).quantize("bf16").pack(STRIDED.composition.row_order(192))
    Job(STRIDED, 65, packed=weight).check()


def test_linear_pads_allocates_and_keeps_leading_axes() -> None:
    weight = weight_of(NARROW)
    x = integers(2, 3, 5, 576, dtype=BF16, seed=3)
    residual = torch.randn(30, 100, device=DEVICE).to(BF16)
    found = epicute.linear(x, weight, ADD, residual=residual)
    assert isinstance(found, torch.Tensor)
    assert found.shape == (2, 3, 5, 100)
    acc = x.float().reshape(30, 576) @ weight.unpack().codes.float().T
    assert_equal_bits(found.reshape(30, 100), (acc + residual.float()).to(BF16))
    assert epicute.linear(x[:0], weight, ADD, residual=residual[:0]).shape == (0, 3, 5, 100)


# --- offsets past 32 bits ---


@pytest.mark.parametrize("case", [LARGE, TURNS, SHARES], ids=str)
def test_ge_18_more_than_2_to_the_31_elements(case: Case) -> None:
    """x, residual and output of 262145 rows 8192 apart: 2^31 elements and 4 GiB each."""
    rows = 262145
    memory = torch.empty(rows, 8192, dtype=BF16, device=DEVICE)
    job = Job(case, 1)
    job.x = memory[:, 128:192].copy_(integers(rows, 64, dtype=BF16, seed=18, most=2))
    residual = memory.new_empty(rows, 8192)
    for some in residual.split(65536):
        some.copy_(torch.randint(-64, 65, some.shape, device=DEVICE))
    out = Output((rows, 8192), BF16)
    sums = Output((rows, 128), FP32)
    job.plan.run(job.x, job.packed, residual=residual, out=out.tensor, sumsq_out=sums.tensor)
    synchronize()
    for output in (out, sums):
        output.assert_intact()
    codes = job.packed.unpack().codes.float()
    for first in range(0, rows, 32768):
        some = slice(first, first + 32768)
        wanted = (job.x[some].float() @ codes.T + residual[some].float()).to(BF16)
        assert torch.equal(bits(out.tensor[some]), bits(wanted)), f"rows from {first}"
        squares = wanted.float().square().reshape(-1, 128, 64).sum(2)  # whole numbers: any order
        assert torch.equal(sums.tensor[some], squares), f"sums of rows from {first}"


@pytest.mark.parametrize("case", [LARGER, LARGEST], ids=str)
def test_ge_18_more_than_2_to_the_32_elements(case: Case) -> None:
    rows = 2**19 + 129
    job = Job(case, 1)
    x = integers(rows, 64, dtype=BF16, seed=19, most=2)
    out = Output((rows, 8192), FP8)
    given = {n: o.tensor for n, o in job.outputs.items()} | {"out_fp8": out.tensor}
    job.operands["out_scale"].fill_(2.0)
    job.plan.run(x, job.packed, **job.operands, **given)
    synchronize()
    out.assert_intact()
    codes = job.packed.unpack().codes.float()
    largest = torch.zeros((), device=DEVICE)
    for first in range(0, rows, 65536):
        acc = x[first : first + 65536].float() @ codes.T
        largest = torch.maximum(largest, acc.abs().max())
        wanted = (acc * 0.5).to(FP8)
        assert torch.equal(bits(out.tensor[first : first + 65536]), bits(wanted)), first
    assert float(given["amax"]) == float(largest)
    assert int(given["saturated"]) == int(given["nans"]) == 5


def test_kv_16_a_row_at_2_to_the_29() -> None:
    """More rows than 2^31 / 4, and a row stride of 16 bytes: only the rows' own memory is written."""
    rows = 2**29 + 1
    x = torch.zeros(rows, 8, dtype=BF16, device=DEVICE)
    x[-1] = torch.arange(8)
    packed = pack(TALL, torch.eye(8))
    out = Output((rows, 8), BF16)
    plan_of(TALL).run(x, packed, out=out.tensor)
    synchronize()
    out.assert_intact()
    assert torch.equal(out.tensor[-1].float().cpu(), torch.arange(8.0))
    assert all(not bool(some.any()) for some in bits(out.tensor[:-1]).split(2**26))


# --- refusals, devices, repetition ---


@pytest.mark.parametrize(
    ("name", "spoil", "said"),
    [
        ("x", lambda t: t.cpu(), "x: got a tensor on cpu"),
        ("x", lambda t: t.half(), r"x: got .*torch.float16"),
        ("residual", lambda t: t.cpu(), r"residual: got .*on cpu, expected"),
        ("residual", lambda t: t.float(), r"residual: got .*torch.float32"),
        ("residual", lambda t: t[:-1], r"residual: got \(16, 192\)"),
        ("residual", lambda t: None, r"residual: got None, expected a tensor"),
        ("residual", lambda t: 0.5, r"residual: got float"),
        ("out", lambda t: t.cpu(), r"out: got .*on cpu, expected"),
        ("out", lambda t: t.T, r"out: got \(192, 17\)"),
        ("packed", lambda t: t.to("cpu"), r"packed.codes: got .*on cpu"),
        ("bias", lambda t: t, "unknown bias"),
    ],
    ids=lambda value: value if isinstance(value, str) and value.isidentifier() else "",
)
def test_errors_come_before_any_launch(name: str, spoil: Any, said: str) -> None:
    job = Job(STRIDED, 17)
    given = {"x": job.x, "packed": job.packed, **job.operands, "out": job.outputs["out"].tensor}
    given[name] = spoil(given.get(name))
    with pytest.raises(ArgumentError, match=said):
        job.plan.run(**given)
    synchronize()
    assert job.outputs["out"].unwritten().all()
    job.check()


@pytest.mark.parametrize(("current", "used"), list(product(DEVICES, DEVICES)))
def test_jc_12_the_tensors_name_the_device(current: int, used: int) -> None:
    job = Job(STRIDED, 65)  # on the first device, as its weight, which other tests share
    wanted = job.expected()["out"]
    device = f"cuda:{used}"
    with torch.cuda.device(current):
        packed = job.packed.to(device)
        x, residual = job.x.to(device), job.operands["residual"].to(device)
        out = Output((65, 192), BF16, device=device)
        job.plan.run(x, packed, residual=residual, out=out.tensor)
        assert torch.cuda.current_device() == current
        torch.cuda.synchronize(used)
        out.assert_intact()
        assert_equal_bits(out.tensor.cpu(), wanted)
        if current != used:
            elsewhere = residual.to(f"cuda:{current}")
            with pytest.raises(ArgumentError, match="residual: got .*x's device"):
                job.plan.run(x, packed, residual=elsewhere, out=out.tensor)


@pytest.mark.parametrize("case", STABLE, ids=str)
def test_a_thousand_launches_are_alike(case: Case) -> None:
    job = Job(case, 257)
    first = {name: value.clone() for name, value in job.run().items()}
    running = {n for n, v in first.items() if v.numel() == 1}
    differing = torch.zeros((), dtype=torch.int64, device=DEVICE)
    given = {name: output.tensor for name, output in job.outputs.items()}
    for launch in range(1000):
        job.plan.run(job.x, job.packed, **job.operands, **given)
        if launch % 10 == 0:
            for name in first.keys() - running:
                differing += (bits(given[name]) != bits(first[name])).sum()
    assert int(differing) == 0
    for name in running - {"amax"}:
        assert int(given[name]) - 5 == 1001 * (int(first[name]) - 5), name
    if "amax" in first:
        assert_equal_bits(given["amax"], first["amax"])
    for output in job.outputs.values():
        output.assert_intact()


def test_tiles_of_a_neighbour_are_left_alone() -> None:
    """Two halves of one output, written by two launches in either order."""
    job = Job(STRIDED, 130)
    wanted = job.expected()["out"]
    whole = Output((130, 192), BF16)
    for some in (slice(65, 130), slice(0, 65)):
        residual = job.operands["residual"][some]
        job.plan.run(job.x[some], job.packed, residual=residual, out=whole.tensor[some])
    synchronize()
    whole.assert_intact()
    assert_equal_bits(whole.tensor.cpu(), wanted)


@pytest.mark.parametrize("case", [STRIDED, RING, projection("o", "1B", "bf16")], ids=str)
def test_the_residual_may_be_the_output(case: Case) -> None:
    """Each tile has read all of it that it overwrites."""
    job = Job(case, 2047)
    outputs = {name: output.tensor for name, output in job.outputs.items()}
    wanted = {name: value.clone() for name, value in job.run().items()}
    both = job.operands["residual"].clone()
    job.plan.run(job.x, job.packed, **{**job.operands, **outputs, "residual": both, "out": both})
    synchronize()
    assert_equal_bits(both.cpu(), wanted["out"].contiguous().cpu())


def test_jc_05_two_processes_share_a_cold_cache(tmp_path: Path) -> None:
    """Both start with nothing, compile or wait, load, and give the same bits."""
    folder = tmp_path / "cache"
    names = [case.name for case in SHARED]
    script = Path(processes.__file__)
    workers = [
        start(script, *order, folder=tmp_path, EPICUTE_CACHE_DIR=str(folder))
        for order in (names, names[::-1])
    ]
    found = [json.loads(finish(worker, 240.0).splitlines()[-1]) for worker in workers]
    assert found[0]["digests"] == found[1]["digests"]
    here = run_in_turn(SHARED, names)
    assert found[0]["digests"] == here
    origins = sorted(origin for some in found for origin in some["origins"])
    assert origins.count("compiled") == len(SHARED)
    assert len(list(folder.rglob("*.o"))) == len(SHARED)
