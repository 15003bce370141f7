"""A block's own kernels, run as PTX on a device that is made up: what the GPU tests ask of it, at small sizes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest
import torch

from epicute.models.block_spec import BlockSpec
from epicute.models.block_state import Stream
from epicute.models.requests import Requests
from epicute.testing import Budget, assert_equal_bits, assert_within
from tests.models.blocks import Setting, pad, split, unpad
from tests.models.cpu_kernels import Launches
from tests.models.layers import FP8, PAGE, draw, model_of
from tests.models.small_blocks import LENGTHS, SPECS
from tests.ptx.device import Device, emulated_device

QUICK = ("fp8",)
BUDGETS = {"bf16": Budget(0.01, 0.025), "fp16": Budget(0.002, 0.005), "fp8": Budget(0.11, 0.15)}
SAME = {"bf16": Budget(0.008, 0.02), "fp16": Budget(0.0015, 0.004), "fp8": Budget(0.045, 0.12)}
"""As on the GPU: against float64, and against the compositions evaluated on the CPU."""

pytestmark = pytest.mark.compile


@pytest.fixture(scope="module")
def gpu() -> Iterator[Device]:
    with emulated_device(multiprocessors=2) as found:
        yield found


def setting(spec: BlockSpec) -> Setting:
    return Setting(spec, device="cuda", page=PAGE, pages=2, max_rows=80, seed=3)


def kind(spec: BlockSpec) -> str:
    return "fp8" if FP8 in (spec.cache, spec.operand) else spec.format


def packed(lengths: Sequence[int], table: torch.Tensor, **options: object) -> Requests:
    return Requests.packed(lengths, PAGE, table, device="cuda", **options)  # type: ignore[arg-type]


def cases() -> list[object]:
    """The first of them with every run of the tests, the others with the gates."""
    return [
        name if name in QUICK else pytest.param(name, marks=pytest.mark.gates) for name in SPECS
    ]


@pytest.mark.parametrize("name", cases())
def test_a_packed_batch_with_slack(name: str, gpu: Device) -> None:
    """The layer of each request by float64, and the block of the CPU; slack rows, cells of nobody and scratch memory of
    NaN reach nothing; five launches.
    """
    spec = SPECS[name]
    at, here = setting(spec), replace(setting(spec), device="cpu", kernels=Launches().kernels)
    count = sum(LENGTHS)
    values, table = draw(spec, count, 11), at.table(len(LENGTHS))
    block, scales, cache = at.plan(), at.scales(), at.cache(len(LENGTHS))
    rows = torch.cat([values, torch.full((6, spec.shape.hidden), torch.nan).to(values)])
    requests = packed(LENGTHS, table, rows=count + 6)
    gpu.launches.clear()
    found = at.run(block, rows, requests, cache, scales)
    made = [launch.name for launch in gpu.launches]
    assert [n for n in made if n != "quant.rows"] == ["gemm.hopper", "attention.hopper"] + [
        "gemm.hopper"
    ] * 3
    assert made.count("quant.rows") == spec.rowwise * (3 if spec.last else 4)
    out = found.values.cpu()
    assert (out[count:] == 0).all()
    assert (found.sumsq.cpu()[count:] == 0).all()
    model = model_of(spec, at.state)
    for x, y in zip(split(values, LENGTHS), split(out[:count], LENGTHS), strict=True):
        if len(x):
            exact = model.layer(x) - x.double()
            assert_within(y.double() - x.double(), exact, BUDGETS[kind(spec)])
    mine, cells = here.scales(), here.cache(len(LENGTHS))
    wanted = here.run(
        here.plan(), rows, Requests.packed(LENGTHS, PAGE, table, rows=count + 6), cells, mine
    )
    x = values.double()
    assert_within(out[:count].double() - x, wanted.values[:count].double() - x, SAME[kind(spec)])
    assert (found.codes is None) == (wanted.codes is None)
    if found.codes is not None:
        decoded = found.codes.cpu().double() * found.scale.cpu().double().reshape(-1, 1)
        assert_within(decoded[:count], at.coded(found.values).cpu()[:count], Budget(0.04, 0.08))
    for name_, counter in cache.counters.items():
        assert abs(int(counter) - int(cells.counters[name_])) <= 2, name_
    if scales is not None and mine is not None:
        for site, other in zip(scales.sites, mine.sites, strict=True):
            assert_within(site.amax_next.cpu(), other.amax_next, Budget(0.06, 0.06))
            assert int(site.nans) == 0


@pytest.mark.gates
@pytest.mark.parametrize("name", ["fp8", "bf16"])
def test_packed_padded_one_by_one_and_permuted_are_the_same_bits(name: str, gpu: Device) -> None:
    spec, count = SPECS[name], sum(LENGTHS)
    at = setting(spec)
    values, table = draw(spec, count, 12), at.table(len(LENGTHS))
    one, two = at.plan(), at.plan(packed=False)
    caches = [at.cache(len(LENGTHS)) for _ in range(4)]
    wanted = at.run(one, values, packed(LENGTHS, table), caches[0]).values.cpu()
    padded = Requests.padded(LENGTHS, PAGE, table, width=19, device="cuda")
    found = at.run(two, pad(values, LENGTHS, 19), padded, caches[1]).values.cpu()
    assert_equal_bits(unpad(found, LENGTHS), wanted, "padded")
    alone = [
        at.run(one, x, packed([len(x)], table[b : b + 1]), caches[2]).values.cpu()
        for b, x in enumerate(split(values, LENGTHS))
    ]
    assert_equal_bits(torch.cat(alone), wanted, "one by one")
    order = [2, 0, 3, 1]
    turned = torch.cat([split(values, LENGTHS)[b] for b in order])
    lengths = [LENGTHS[b] for b in order]
    found = at.run(one, turned, packed(lengths, table[order]), caches[3]).values.cpu()
    assert_equal_bits(found, torch.cat([split(wanted, LENGTHS)[b] for b in order]), "permuted")
    for cache in caches[1:]:
        assert_equal_bits(cache.k.cpu(), caches[0].k.cpu())
        assert_equal_bits(cache.v.cpu(), caches[0].v.cpu())


@pytest.mark.gates
def test_chunks_fill_the_same_cells(gpu: Device) -> None:
    """A prompt at once, and as 17 + 1 + 9 behind each other; the rows are the same beyond rounding."""
    spec = SPECS["bf16"]
    at = setting(spec)
    values, table, block = draw(spec, 27, 13), at.table(1), at.plan()
    whole, pieces = at.cache(1), at.cache(1)
    wanted = at.run(block, values, packed([27], table), whole).values.cpu().double()
    parts, done = [], 0
    for part in values.split([17, 1, 9]):
        parts.append(at.run(block, part, packed([len(part)], table, cached=[done]), pieces))
        done += len(part)
    assert_equal_bits(pieces.k.cpu(), whole.k.cpu())
    assert_equal_bits(pieces.v.cpu(), whole.v.cpu())
    x = values.double()
    found = torch.cat([part.values.cpu() for part in parts]).double()
    assert_within(found - x, wanted - x, SAME["bf16"])


@pytest.mark.gates
def test_cg_04_a_captured_layer_serves_other_lengths(gpu: Device) -> None:
    """Captured with one token, replayed with three requests, then behind their prefixes, then with none."""
    spec, rows = SPECS["fp8"], 24
    at = setting(spec)
    block, table, cache, scales = at.plan(), at.table(3), at.cache(3), at.scales()
    requests = packed([1, 0, 0], table, rows=rows)
    blank = torch.full((rows, spec.shape.hidden), torch.nan, dtype=spec.dtype)
    x, out = at.stream(blank), Stream.allocate(spec, rows, "cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        made = block.run(x, requests, cache, out, scales, roll=False)
    for seed, (lengths, cached) in enumerate(
        [((9, 3, 12), (0, 0, 0)), ((0, 2, 1), (9, 3, 12)), ((0, 0, 0), (9, 5, 13))]
    ):
        values = draw(spec, sum(lengths), seed)
        given = torch.cat([values, blank[len(values) :]])
        fresh = at.stream(given)
        for field in ("values", "sumsq", "codes"):
            getattr(x, field).view(torch.uint8).copy_(getattr(fresh, field).view(torch.uint8))
        requests.copy_(packed(lengths, table, cached=cached, rows=rows))
        again = replace(cache, k=cache.k.clone(), v=cache.v.clone())
        graph.replay()
        eager = at.run(block, given, requests, again, at.scales())
        assert_equal_bits(made.values.cpu(), eager.values.cpu(), f"{lengths}")
        assert_equal_bits(cache.k.cpu(), again.k.cpu())
        assert_equal_bits(cache.v.cpu(), again.v.cpu())
