"""A block on the GPU: against float64 on fresh data, against the same block on the CPU, and under CUDA graphs."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.footprint import launches, peak_bytes
from epicute.attention import kernel_for
from epicute.epilogues import RoPE
from epicute.errors import EpicuteError
from epicute.jit import precompile
from epicute.models import SHAPES
from epicute.models.block_spec import BlockSpec
from epicute.models.block_state import BlockScales, LayerCache, Stream, model_sites
from epicute.models.prefill import PrefillBlock
from epicute.models.requests import Requests
from epicute.quant import DelayedGroup
from epicute.testing import Budget, assert_equal_bits, assert_within
from tests.models.blocks import Setting, pad, split, tokens, unpad
from tests.models.cpu_kernels import Launches
from tests.models.layers import FP8, WIDE, draw, model_of

pytestmark = pytest.mark.gpu

SMOL = SHAPES["SmolLM2"]
SPECS = {
    "bf16": BlockSpec(SMOL, "bf16"),
    "fp16": BlockSpec(WIDE, "fp16", cache=torch.float16, qk_norm=True),
    "bf16, all options": BlockSpec(
        WIDE,
        "bf16",
        bias=True,
        qk_norm=True,
        gain_offset=1.0,
        rope=RoPE(128, 64),
        window=70,
        softcap=20.0,
    ),
    "fp8": BlockSpec(SMOL),
    "fp8, bias, norm": BlockSpec(WIDE, bias=True, qk_norm=True),
    "fp8, rows": BlockSpec(WIDE, scaling="row", bias=True),
    "fp8, fp8 cache": BlockSpec(WIDE, cache=FP8, qk_norm=True),
    "fp8, gains as operands": BlockSpec(WIDE, gains="operand"),
    "fp8, rows, gains as operands": BlockSpec(WIDE, scaling="row", gains="operand"),
    "fp8, last": BlockSpec(SMOL, last=True),
}
PAGES = {name: (64, 16, 128, 64, 16, 32, 64, 64, 64, 64)[i] for i, name in enumerate(SPECS)}
MAX_ROWS = 640
LENGTHS = (5, 0, 200, 1, 129)
GRAPHED = ("bf16", "fp8", "fp8, rows", "fp8, fp8 cache")

BUDGETS = {"bf16": Budget(0.01, 0.025), "fp16": Budget(0.002, 0.005), "fp8": Budget(0.11, 0.15)}
"""Of what the layer adds to the stream, against float64 on unquantised weights."""

SAME = {"bf16": Budget(0.008, 0.02), "fp16": Budget(0.0015, 0.004), "fp8": Budget(0.045, 0.12)}
"""The same against the block on the CPU, whose rounding to 16 and 8 bits is at the same places."""


@pytest.fixture(scope="module", autouse=True)
def compiled() -> None:
    """All kernels of this module side by side; one that fails fails its own tests."""
    kernels: list[Any] = []
    for name, spec in SPECS.items():
        kernels += spec.kernels(MAX_ROWS).values()
        kernels.append(kernel_for(spec.attention(True, PAGES[name])))
        kernels.append(kernel_for(spec.attention(False, PAGES[name])))
    try:
        precompile(kernels)
    except EpicuteError as error:
        warnings.warn(f"precompile: {error}", stacklevel=1)


@lru_cache
def setting(name: str) -> Setting:
    """A layer on the GPU."""
    pages = -(-256 // PAGES[name])
    return Setting(
        SPECS[name], device="cuda", page=PAGES[name], pages=pages, max_rows=MAX_ROWS, seed=3
    )


@lru_cache
def planned(name: str, packed: bool = True) -> PrefillBlock:
    return setting(name).plan(packed=packed)


def described(name: str, lengths: Sequence[int], table: torch.Tensor, **options: Any) -> Requests:
    return Requests.packed(lengths, PAGES[name], table, device="cuda", **options)


def assert_layer(at: Setting, out: torch.Tensor, values: torch.Tensor, lengths: Any) -> None:
    """What the layer adds to packed rows, against float64."""
    model, out = model_of(at.spec, at.state), out.cpu()
    budget = BUDGETS["fp8" if FP8 in (at.spec.cache, at.spec.operand) else at.spec.format]
    for x, y in zip(split(values, lengths), split(out, lengths), strict=True):
        if len(x):
            exact = model.layer(x)
            assert_within(y.double() - x.double(), exact - x.double(), budget)


# --- numbers ---


@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("seed", [11, 12])
def test_a_packed_batch_is_the_layer_of_each_request(name: str, seed: int) -> None:
    at = setting(name)
    values, table = draw(at.spec, sum(LENGTHS), seed), at.table(len(LENGTHS), seed)
    cache = at.cache(len(LENGTHS))
    found = at.run(planned(name), values, described(name, LENGTHS, table), cache)
    assert_layer(at, found.values, values, LENGTHS)
    sums = found.values.double().square().sum(1)
    assert_within(found.sumsq.sum(1), sums, Budget(1e-5, 1e-5))
    assert (found.codes is None) == (at.spec.format != "fp8" or at.spec.last)
    if found.codes is not None:
        decoded = found.codes.double() * found.scale.double().reshape(-1, 1)
        assert_within(decoded, at.coded(found.values), Budget(0.04, 0.08))
    model = model_of(at.spec, at.state)
    loose = Budget(0.06, 0.1) if FP8 in (at.spec.cache, at.spec.operand) else Budget(0.01, 0.02)
    for b, x in enumerate(split(values, LENGTHS)):
        for cells, scale, exact in zip(
            (cache.k, cache.v), (cache.k_scale, cache.v_scale), model.keys(x), strict=True
        ):
            placed = tokens(cells, table, b, len(x)).double()
            placed = placed if scale is None else placed * scale.double()[:, None]
            if len(x):
                assert_within(placed.cpu(), exact, loose, f"request {b}")


@pytest.mark.parametrize("name", SPECS)
def test_it_is_the_block_of_the_cpu(name: str) -> None:
    """The same compositions evaluated: what is rounded to 16 and 8 bits is rounded at the same places."""
    at = setting(name)
    here = replace(at, kernels=Launches().kernels, device="cpu")
    values, table = draw(at.spec, sum(LENGTHS), 21), at.table(len(LENGTHS))
    scales, mine = at.scales(), here.scales()
    caches = at.cache(len(LENGTHS)), here.cache(len(LENGTHS))
    found = at.run(planned(name), values, described(name, LENGTHS, table), caches[0], scales)
    requests = Requests.packed(LENGTHS, PAGES[name], table)
    wanted = here.run(here.plan(), values, requests, caches[1], mine)
    x = values.double()
    budget = SAME["fp8" if FP8 in (at.spec.cache, at.spec.operand) else at.spec.format]
    assert_within(found.values.cpu().double() - x, wanted.values.double() - x, budget)
    for one, two in zip(caches[0].counters.items(), caches[1].counters.items(), strict=True):
        assert one[0] == two[0]
        assert abs(int(one[1]) - int(two[1])) <= 2, one[0]
    if scales is None:
        return
    for site, other in zip(scales.sites, mine.sites, strict=True):
        assert_within(site.amax_next.cpu(), other.amax_next, Budget(0.06, 0.06))
        assert int(site.nans) == int(other.nans) == 0


# --- packed, padded, one by one, in chunks ---


@given(
    st.sampled_from(sorted(SPECS)),
    st.lists(st.integers(0, 200), min_size=1, max_size=3),
    st.integers(0, 9),
    st.integers(0, 99),
)
@settings(max_examples=25)
def test_packed_padded_and_one_by_one_are_the_same(
    name: str, lengths: Sequence[int], slack: int, seed: int
) -> None:
    at = setting(name)
    values, table = draw(at.spec, sum(lengths), seed), at.table(len(lengths), seed)
    width = max(lengths) + slack
    caches = [at.cache(len(lengths)) for _ in range(3)]
    one = at.run(planned(name), values, described(name, lengths, table), caches[0])
    requests = Requests.padded(lengths, PAGES[name], table, width=width, device="cuda")
    two = at.run(planned(name, False), pad(values, lengths, width), requests, caches[1])
    three = [
        at.run(planned(name), x, described(name, [len(x)], table[b : b + 1]), caches[2]).values
        for b, x in enumerate(split(values, lengths))
    ]
    for which in ("k", "v"):
        cells = [getattr(c, which) for c in caches]
        assert_equal_bits(cells[1], cells[0], which)
        assert_equal_bits(cells[2], cells[0], which)
    assert_equal_bits(unpad(two.values, lengths), one.values, "padded")
    assert_equal_bits(torch.cat(three), one.values, "one by one")
    if width:
        empty = pad(torch.zeros(sum(lengths), 1), lengths, width).isnan()[:, 0]
        assert (two.values.cpu()[empty] == 0).all()
        assert (two.sumsq.cpu()[empty] == 0).all()


@pytest.mark.parametrize("name", ["bf16", "bf16, all options", "fp8", "fp8, rows"])
def test_permuted_requests_give_permuted_results(name: str) -> None:
    at, order = setting(name), [3, 0, 4, 2, 1]
    values, table = draw(at.spec, sum(LENGTHS), 31), at.table(len(LENGTHS))
    one = at.run(planned(name), values, described(name, LENGTHS, table), at.cache(len(LENGTHS)))
    turned = torch.cat([split(values, LENGTHS)[b] for b in order])
    lengths = [LENGTHS[b] for b in order]
    two = at.run(
        planned(name), turned, described(name, lengths, table[order]), at.cache(len(LENGTHS))
    )
    wanted = torch.cat([split(one.values, LENGTHS)[b] for b in order])
    assert_equal_bits(two.values, wanted)


@pytest.mark.parametrize("name", ["bf16", "bf16, all options", "fp8", "fp8, fp8 cache"])
def test_kv_18_chunks_change_nothing_beyond_rounding(name: str) -> None:
    """300 tokens as one call, in chunks of 37, as 299 + 1 and as 128 + 172: the same cells to the bit."""
    at = replace(setting(name), pages=-(-300 // PAGES[name]))
    values, table, block = draw(at.spec, 300, 41), at.table(1), planned(name)
    whole = at.cache(1)
    wanted = at.run(block, values, described(name, [300], table), whole).values.cpu()
    for sizes in ([37] * 8 + [4], [299, 1], [128, 172]):
        cache, parts, done = at.cache(1), [], 0
        for part in values.split(sizes):
            requests = described(name, [len(part)], table, cached=[done])
            parts.append(at.run(block, part, requests, cache).values.cpu())
            done += len(part)
        assert_equal_bits(cache.k, whole.k)
        assert_equal_bits(cache.v, whole.v)
        x = values.double()
        found = torch.cat(parts).double()
        assert_within(found - x, wanted.double() - x, SAME[at.spec.format])


@pytest.mark.parametrize("name", ["bf16", "fp8", "fp8, fp8 cache"])
@pytest.mark.parametrize(
    "lengths", [(0, 0, 1), (255, 1), (1, 255), (0, 127, 128, 129, 0), (15, 16, 17, 1), (0,)]
)
def test_pp_01_pp_10_pp_12_requests_of_no_and_of_one_token(
    name: str, lengths: tuple[int, ...]
) -> None:
    at = setting(name)
    values, table = draw(at.spec, sum(lengths), 51), at.table(len(lengths))
    found = at.run(planned(name), values, described(name, lengths, table), at.cache(len(lengths)))
    assert found.rows == sum(lengths)
    assert_layer(at, found.values, values, lengths)


@pytest.mark.parametrize("name", ["bf16", "fp8"])
def test_pp_09_a_prefix_hit_reads_shared_pages_in_any_order(name: str) -> None:
    at, page = setting(name), PAGES[name]
    values, other = draw(at.spec, page + 30, 61), draw(at.spec, 14, 62)
    table = torch.tensor([[5, 1], [5, 3]], dtype=torch.int32)
    cache = at.cache(2)
    at.run(planned(name), values, described(name, [page + 30], table[:1]), cache)
    hit = described(name, [0, 14], table, cached=[page + 30, page])
    found = at.run(planned(name), other, hit, cache).values.cpu().double()
    exact = model_of(at.spec, at.state).layer(torch.cat([values[:page], other]))[page:]
    assert_within(found - other.double(), exact - other.double(), BUDGETS[at.spec.format])


def test_a_dense_cache_serves_padded_requests() -> None:
    at, lengths = setting("bf16"), (5, 111)
    values = draw(at.spec, 116, 63)
    dense = replace(at, page=128, pages=1)
    shape = (2, 128, SMOL.kv_heads, SMOL.head_dim)
    k, v = (torch.full(shape, torch.nan, device="cuda").bfloat16() for _ in "kv")
    requests = Requests.padded(lengths, 128, device="cuda")
    block = dense.plan(packed=False, page=None)
    cache = LayerCache.of(k, v, dense=True)
    found = at.run(block, pad(values, lengths, 111), requests, cache)
    assert_layer(at, unpad(found.values, lengths), values, lengths)


@pytest.mark.parametrize("layout", ["HND", "joined", "packed"])
def test_kv_12_the_strides_of_a_cache_are_its_own(layout: str) -> None:
    at, page = setting("bf16"), PAGES["bf16"]
    heads, dim, count = SMOL.kv_heads, SMOL.head_dim, 2 * at.pages + 2

    def empty(*shape: int) -> torch.Tensor:
        return torch.full(shape, torch.nan, device="cuda").bfloat16()

    k, v = {
        "HND": lambda: [empty(count, heads, page, dim).transpose(1, 2) for _ in "kv"],
        "joined": lambda: empty(count, 2, page, heads, dim).unbind(1),
        "packed": lambda: empty(count, heads, page, 2 * dim).transpose(1, 2).chunk(2, dim=-1),
    }[layout]()
    values, table = draw(at.spec, 200, 64), at.table(2)
    requests, plain = described("bf16", [73, 127], table), at.cache(2)
    wanted = at.run(planned("bf16"), values, requests, plain)
    found = at.run(planned("bf16"), values, requests, LayerCache.of(k, v))
    assert_equal_bits(found.values, wanted.values)
    assert_equal_bits(k.contiguous(), plain.k)
    assert_equal_bits(v.contiguous(), plain.v)


# --- what belongs to nobody ---


@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("packed", [True, False])
def test_kd_01_cg_05_cg_06_rows_and_cells_of_nobody_reach_nothing(name: str, packed: bool) -> None:
    """Slack rows, unused cells and scratch memory of NaN: the same rows, maxima and counters as without slack."""
    at, lengths = setting(name), (5, 130)
    values, table = draw(at.spec, 135, 71), at.table(2)
    clean_scales, scales = at.scales(), at.scales()
    clean_cache, cache = at.cache(2), at.cache(2)
    requests = described(name, lengths, table)
    clean = at.run(planned(name), values, requests, clean_cache, clean_scales)
    block = planned(name, packed)
    for memory in (block.workspace.q, block.workspace.attended_codes, block.workspace.z_codes):
        if memory is not None:
            torch.empty(0, dtype=torch.uint8, device="cuda").set_(memory.untyped_storage()).fill_(
                255
            )
    if packed:
        rows = torch.cat([values, torch.full((121, at.spec.shape.hidden), torch.nan).to(values)])
        requests = described(name, lengths, table, rows=256)
    else:
        rows = pad(values, lengths, 140)
        requests = Requests.padded(lengths, PAGES[name], table, width=140, device="cuda")
    found = at.run(block, rows, requests, cache, scales)
    live = (requests.slots >= 0).cpu()
    assert_equal_bits(found.values.cpu()[live], clean.values.cpu())
    assert (found.values.cpu()[~live] == 0).all()
    assert (found.sumsq.cpu()[~live] == 0).all()
    assert_equal_bits(cache.k, clean_cache.k)
    assert_equal_bits(cache.v, clean_cache.v)
    for which, counter in cache.counters.items():
        assert_equal_bits(counter, clean_cache.counters[which], which)
    if scales is not None:
        for site, other in zip(scales.sites, clean_scales.sites, strict=True):
            assert_equal_bits(site.amax_next, other.amax_next)
            assert_equal_bits(site.saturated, other.saturated)
            assert int(site.nans) == 0


# --- scales ---


def test_df_06_groups_with_states_of_their_own_do_not_meet() -> None:
    at, name = setting("fp8"), "fp8"
    requests = described(name, [150], at.table(1))
    small = [draw(at.spec, 150, seed) * 0.25 for seed in range(4)]
    large = [draw(at.spec, 150, seed) * 1.9 for seed in range(4)]
    alone, mine, other = at.scales(), at.scales(), at.scales()
    for x, y in zip(small, large, strict=True):
        wanted = at.run(planned(name), x, requests, at.cache(1), alone, roll=True)
        at.run(planned(name), y, requests, at.cache(1), other, roll=True)
        found = at.run(planned(name), x, requests, at.cache(1), mine, roll=True)
        assert_equal_bits(found.values, wanted.values)
        assert_equal_bits(found.codes, wanted.codes)


@pytest.mark.parametrize("initial", [1e-3, 1.0, 1e3])
def test_after_calibration_the_first_scales_fit(initial: float) -> None:
    at, name = setting("fp8, bias, norm"), "fp8, bias, norm"
    requests, cache = described(name, [200], at.table(1)), at.cache(1)
    values = draw(at.spec, 200, 81)
    x, out = at.stream(values), Stream.allocate(at.spec, 200, "cuda")
    scales = BlockScales.create("cuda", history=1, initial=initial)
    planned(name).calibrate(x, requests, cache, out, scales)
    found = planned(name).run(x, requests, cache, out, scales)
    assert_layer(at, found.values, values, [200])
    for site in scales.sites:
        assert float(site.amax_next) <= float(site.scale_used) * 448 * (1 + 1e-6)
        assert int(site.saturated) == 0


# --- launches, memory, graphs ---


def test_a_batch_is_described_without_waiting() -> None:
    at, name = setting("fp8"), "fp8"
    described(name, [5, 3], at.table(2))
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        found = described(name, [5, 3], at.table(2))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert found.starts.tolist() == [0, 5, 8]
    here = Requests.packed([5, 3], PAGES[name], at.table(2))
    assert_equal_bits(found.slots.cpu(), here.slots)


@pytest.mark.parametrize("name", GRAPHED)
def test_the_launches_of_a_layer_are_its_five_kernels(name: str) -> None:
    at = setting(name)
    x, out = at.stream(draw(at.spec, 150)), Stream.allocate(at.spec, 150, "cuda")
    requests, cache, scales = described(name, [150], at.table(1)), at.cache(1), at.scales()
    block = planned(name)

    def call(_: int) -> dict[str, torch.Tensor]:
        return {"out": block.run(x, requests, cache, out, scales, roll=False).values}

    assert peak_bytes(call) == 0
    assert launches(call) == 5 + 4 * at.spec.rowwise
    if scales is not None:
        part = BlockScales.of(DelayedGroup.create(model_sites(3), "cuda"), 1)

        for states in (scales, part):

            def rolling(_: int, states: BlockScales = states) -> dict[str, torch.Tensor]:
                return {"out": block.run(x, requests, cache, out, states, roll=True).values}

            assert peak_bytes(rolling) == 0
            assert launches(rolling) == 6


@pytest.mark.parametrize("name", GRAPHED)
@pytest.mark.parametrize("packed", [True, False])
def test_cg_01_cg_04_a_captured_layer_serves_other_lengths(name: str, packed: bool) -> None:
    """Captured with one token of the first request, replayed on another stream with other lengths and data."""
    at, rows = setting(name), 300
    block, table = planned(name, packed), at.table(3)

    def batch(lengths: Sequence[int], cached: Sequence[int], device: str = "cuda") -> Requests:
        options = {"cached": cached, "device": device}
        if packed:
            return Requests.packed(lengths, PAGES[name], table, rows=rows, **options)
        return Requests.padded(lengths, PAGES[name], table, width=100, **options)

    def rows_of(values: torch.Tensor, lengths: Sequence[int]) -> torch.Tensor:
        if not packed:
            return pad(values, lengths, 100)
        blank = torch.full((rows - len(values), at.spec.shape.hidden), torch.nan)
        return torch.cat([values, blank.to(values)])

    cache, scales = at.cache(3), at.scales()
    requests = batch([1, 0, 0], [0, 0, 0])
    x = at.stream(rows_of(draw(at.spec, 1), [1, 0, 0]))
    out = Stream.allocate(at.spec, rows, "cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=torch.cuda.Stream()):
        made = block.run(x, requests, cache, out, scales, roll=False)
    plans = [((100, 3, 97), (0, 0, 0)), ((0, 50, 1), (100, 3, 97)), ((0, 0, 0), (100, 53, 98))]
    for seed, (lengths, cached) in enumerate(plans):
        values = draw(at.spec, sum(lengths), seed)
        fresh = at.stream(rows_of(values, lengths))
        for field in ("values", "sumsq", "codes"):
            if getattr(x, field) is not None:
                getattr(x, field).view(torch.uint8).copy_(getattr(fresh, field).view(torch.uint8))
        if at.spec.rowwise:
            x.scale.copy_(fresh.scale)
        requests.copy_(batch(lengths, cached))
        k, v = cache.k.clone(), cache.v.clone()
        out.values.fill_(torch.nan)
        torch.cuda.synchronize()
        with torch.cuda.stream(torch.cuda.Stream()):
            graph.replay()
        torch.cuda.synchronize()
        found = made.values.clone()
        again = replace(cache, k=k, v=v)
        eager = at.run(block, rows_of(values, lengths), requests, again, at.scales())
        assert_equal_bits(found, eager.values, f"{lengths}")
        assert_equal_bits(cache.k, again.k)
        assert_equal_bits(cache.v, again.v)


def test_a_captured_layer_rolls_its_scales_with_each_replay() -> None:
    at, name = setting("fp8"), "fp8"
    requests, cache = described(name, [150], at.table(1)), at.cache(1)
    x, out = at.stream(draw(at.spec, 150, 91)), Stream.allocate(at.spec, 150, "cuda")
    captured = BlockScales.create("cuda", history=2)
    eager = BlockScales.create("cuda", history=2)
    block = planned(name)
    block.run(x, requests, cache, out, BlockScales.create("cuda"))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        made = block.run(x, requests, cache, out, captured)
    for _ in range(4):
        graph.replay()
        found = made.values.clone()
        wanted = block.run(x, requests, cache, out, eager)
        assert_equal_bits(found, wanted.values)
        for site, other in zip(captured.sites, eager.sites, strict=True):
            assert_equal_bits(site.scale_used, other.scale_used)
            assert_equal_bits(site.history, other.history)


def test_two_layers_chain_in_place() -> None:
    """The second reads the first one's codes with their scale, in the memory of the first one's input."""
    at, name = setting("fp8"), "fp8"
    next_ = replace(at, seed=5)
    values, requests = draw(at.spec, 200, 92), described(name, [200], at.table(1))
    x = at.stream(values)
    middle = planned(name).run(x, requests, at.cache(1), x, at.scales(), roll=False)
    block = planned(name).with_weights(next_.weights)
    found = block.run(middle, requests, at.cache(1), middle, at.scales(), roll=False)
    exact = model_of(at.spec, at.state).layer(values)
    exact = model_of(at.spec, next_.state).layer(exact) - values.double()
    assert_within(found.values.cpu().double() - values.double(), exact, Budget(0.12, 0.2))


def test_a_block_prints_its_five_kernels_with_schedules() -> None:
    lines = str(planned("fp8")).splitlines()
    assert [line.split()[0] for line in lines[2:]] == ["qkv", "attention", "o", "gate_up", "down"]
    assert all("stages" in line for line in lines[2:])
    assert all("registers" in line for line in lines[2:])
