"""A block on the CPU: its compositions evaluated and chained through a float64 attention, against a float64 layer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from epicute.epilogues import RoPE
from epicute.errors import ArgumentError, UnsupportedError
from epicute.models.block_spec import BlockSpec
from epicute.models.block_state import BlockScales, LayerCache, Stream, Workspace
from epicute.models.kernels import GPU
from epicute.models.layer_weights import LayerWeights
from epicute.models.prefill import PrefillBlock
from epicute.models.requests import Requests
from epicute.testing import Budget, assert_equal_bits, assert_within, inputs_unchanged
from tests.models.blocks import Setting, pad, split, tokens, unpad
from tests.models.cpu_kernels import Launches
from tests.models.layers import FP8, PAGE, TINY, cache_of, draw, inv_freq, model_of, state_of

HALF = torch.bfloat16
BUDGETS = {"bf16": Budget(0.01, 0.02), "fp16": Budget(0.002, 0.004), "fp8": Budget(0.11, 0.15)}
"""Of what the layer adds to the stream, against float64 on unquantised weights."""

SPECS = {
    "bf16": BlockSpec(TINY, "bf16"),
    "bf16, all options": BlockSpec(
        TINY,
        "bf16",
        bias=True,
        qk_norm=True,
        gain_offset=1.0,
        rope=RoPE(32, 16),
        window=7,
        softcap=20.0,
    ),
    "bf16, interleaved": BlockSpec(TINY, "bf16", rope=RoPE(32, style="interleaved"), bias=True),
    "fp16": BlockSpec(TINY, "fp16", cache=torch.float16, qk_norm=True),
    "fp8": BlockSpec(TINY),
    "fp8, bias, norm": BlockSpec(TINY, bias=True, qk_norm=True),
    "fp8, rows": BlockSpec(TINY, scaling="row", bias=True),
    "fp8, fp8 cache": BlockSpec(TINY, cache=FP8, qk_norm=True),
    "bf16, fp8 cache": BlockSpec(TINY, "bf16", cache=FP8, qk_norm=True),
    "fp8, gains as operands": BlockSpec(TINY, gains="operand", gain_offset=1.0),
    "fp8, rows, gains as operands": BlockSpec(TINY, scaling="row", gains="operand"),
    "fp8, last": BlockSpec(TINY, last=True),
    "fp8, rows, last": BlockSpec(TINY, scaling="row", last=True, gains="operand"),
}
LENGTHS = (5, 0, 23, 1, 16)


def setting(spec: BlockSpec) -> Setting:
    return Setting(spec, Launches().kernels)


def assert_layer(at: Setting, out: torch.Tensor, values: torch.Tensor, lengths: Any) -> None:
    """What the layer adds to packed rows, against float64."""
    model = model_of(at.spec, at.state)
    budget = BUDGETS[at.spec.format]
    if at.spec.cache == FP8 and at.spec.format != "fp8":
        budget = BUDGETS["fp8"]
    for x, y in zip(split(values, lengths), split(out, lengths), strict=True):
        if len(x):
            exact = model.layer(x)
            assert_within(y.double() - x.double(), exact - x.double(), budget)


@pytest.mark.parametrize("name", SPECS)
def test_a_packed_batch_is_the_layer_of_each_request(name: str) -> None:
    at = setting(SPECS[name])
    values, table = draw(at.spec, sum(LENGTHS)), at.table(len(LENGTHS))
    requests, cache = Requests.packed(LENGTHS, PAGE, table), at.cache(len(LENGTHS))
    found = at.run(at.plan(), values, requests, cache)
    assert_layer(at, found.values, values, LENGTHS)
    sums = found.values.double().square()
    assert_within(found.sumsq.sum(1), sums.sum(1), Budget(1e-5, 1e-5))
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
                assert_within(placed, exact, loose, f"request {b}")


@given(
    st.sampled_from(sorted(SPECS)),
    st.lists(st.integers(0, 20), min_size=1, max_size=4),
    st.integers(0, 3),
    st.integers(0, 99),
)
@settings(max_examples=15)
def test_packed_padded_and_one_by_one_are_the_same_bits(
    name: str, lengths: Sequence[int], slack: int, seed: int
) -> None:
    at = setting(SPECS[name])
    values, table = draw(at.spec, sum(lengths), seed), at.table(len(lengths), seed)
    packed, padded = at.plan(), at.plan(packed=False)
    width = max(lengths) + slack
    caches = [at.cache(len(lengths)) for _ in range(3)]
    one = at.run(packed, values, Requests.packed(lengths, PAGE, table), caches[0])
    rows = pad(values, lengths, width)
    requests = Requests.padded(lengths, PAGE, table, width=width)
    two = at.run(padded, rows, requests, caches[1])
    three = [
        at.run(packed, x, Requests.packed([len(x)], PAGE, table[b : b + 1]), caches[2])
        for b, x in enumerate(split(values, lengths))
    ]
    wanted = one.values
    assert_equal_bits(unpad(two.values, lengths), wanted)
    assert_equal_bits(torch.cat([x.values for x in three]), wanted)
    for name in ("k", "v"):
        cells = [getattr(c, name) for c in caches]
        assert_equal_bits(cells[1], cells[0], name)
        assert_equal_bits(cells[2], cells[0], name)
    if width:
        empty = pad(torch.zeros(sum(lengths), 1), lengths, width).isnan()[:, 0]
        assert (two.values[empty] == 0).all()
        assert (two.sumsq[empty] == 0).all()


@pytest.mark.parametrize("name", ["bf16, all options", "fp8", "fp8, rows"])
def test_kv_18_chunks_change_nothing(name: str) -> None:
    """One call, chunks of 7, 29 + 1, 12 + 18: the same cells, and the same rows out."""
    at = setting(SPECS[name])
    values, table, block = draw(at.spec, 30), at.table(1), at.plan()
    whole = at.cache(1)
    wanted = at.run(block, values, Requests.packed([30], PAGE, table), whole).values
    for sizes in ([7, 7, 7, 7, 2], [29, 1], [12, 18]):
        cache, parts, done = at.cache(1), [], 0
        for part in values.split(sizes):
            requests = Requests.packed([len(part)], PAGE, table, cached=[done])
            parts.append(at.run(block, part, requests, cache).values)
            done += len(part)
        assert_equal_bits(cache.k, whole.k)
        assert_equal_bits(cache.v, whole.v)
        assert_equal_bits(torch.cat(parts), wanted)


def test_pp_09_a_shared_prefix_is_read_where_it_lies() -> None:
    """Two requests whose first page is the same, the second of them a prefix hit, pages in no order."""
    at = setting(SPECS["bf16"])
    block, cache = at.plan(), at.cache(2)
    values, other = draw(at.spec, 30, 1), draw(at.spec, 14, 2)
    table = torch.tensor([[7, 2], [7, 5]], dtype=torch.int32)
    one = at.run(block, values, Requests.packed([30], PAGE, table[:1]), cache)
    both = torch.cat([values[:PAGE], other])
    hit = Requests.packed([14], PAGE, table[1:], cached=[PAGE])
    two = at.run(block, other, hit, cache)
    assert_layer(at, one.values, values, [30])
    model = model_of(at.spec, at.state)
    exact = model.layer(both)[PAGE:]
    assert_within(two.values.double() - other.double(), exact - other.double(), BUDGETS["bf16"])


@pytest.mark.parametrize("lengths", [(31, 1), (1, 31), (0, 16, 1, 0), (15, 16, 17, 1)])
def test_pp_10_pp_12_tails_of_one_token_and_requests_shorter_than_a_page(
    lengths: tuple[int, ...],
) -> None:
    at = setting(SPECS["fp8"])
    values, table = draw(at.spec, sum(lengths)), at.table(len(lengths))
    requests = Requests.packed(lengths, PAGE, table)
    found = at.run(at.plan(), values, requests, at.cache(len(lengths)))
    assert_layer(at, found.values, values, lengths)


@pytest.mark.parametrize("name", ["bf16", "fp8", "fp8, rows", "fp8, fp8 cache"])
def test_kd_01_cg_06_rows_and_cells_of_nobody_reach_nothing(name: str) -> None:
    """Rows beyond the tokens, cells and scratch memory that hold NaN: the same rows, maxima and counters as without."""
    at = setting(SPECS[name])
    lengths = (5, 13)
    values, table = draw(at.spec, 18), at.table(2)
    clean_scales, scales = at.scales(), at.scales()
    clean_cache, cache = at.cache(2), at.cache(2)
    clean = at.run(
        at.plan(), values, Requests.packed(lengths, PAGE, table), clean_cache, clean_scales
    )
    block = at.plan()
    for memory in (block.workspace.q, block.workspace.attended_codes, block.workspace.z_codes):
        if memory is not None:
            torch.empty(0, dtype=torch.uint8).set_(memory.untyped_storage()).fill_(0xFF)
    rows = torch.cat([values, torch.full((7, TINY.hidden), torch.nan, dtype=at.spec.dtype)])
    found = at.run(block, rows, Requests.packed(lengths, PAGE, table, rows=25), cache, scales)
    assert_equal_bits(found.values[:18], clean.values)
    assert (found.values[18:] == 0).all()
    assert (found.sumsq[18:] == 0).all()
    assert_equal_bits(cache.k, clean_cache.k)
    assert_equal_bits(cache.v, clean_cache.v)
    for name_, counter in cache.counters.items():
        assert_equal_bits(counter, clean_cache.counters[name_], name_)
    if scales is None:
        return
    assert_equal_bits(found.codes[:18], clean.codes)
    for site, other in zip(scales.sites, clean_scales.sites, strict=True):
        assert_equal_bits(site.amax_next, other.amax_next)
        assert site.amax_next.isfinite().all()
        assert site.amax_next > 0
        assert_equal_bits(site.saturated, other.saturated)
        assert int(site.nans) == 0


@pytest.mark.parametrize("name", ["bf16", "fp8", "fp8, rows"])
def test_the_result_may_take_the_place_of_the_input(name: str) -> None:
    at = setting(SPECS[name])
    values, table = draw(at.spec, 18), at.table(1)
    requests = Requests.packed([18], PAGE, table)
    x = at.stream(values)
    out = Stream.allocate(at.spec, 18)
    given_ = {n: getattr(x, n) for n in ("values", "sumsq", "codes", "scale")}
    given_["codes"] = None if x.codes is None else x.codes.view(torch.uint8)
    with inputs_unchanged(**given_, **at.state):
        apart = at.plan().run(x, requests, at.cache(1), out, at.scales(), roll=False)
    inside = at.plan().run(x, requests, at.cache(1), x, at.scales(), roll=False)
    for name in ("values", "sumsq", "codes", "scale"):
        if getattr(apart, name) is not None:
            assert_equal_bits(getattr(inside, name), getattr(apart, name), name)
    assert inside.values.data_ptr() == x.values.data_ptr()


def test_a_layer_is_five_launches_and_a_roll() -> None:
    for name, extra in (
        ("fp8", ["roll"]),
        ("fp8, last", ["roll"]),
        ("fp8, gains as operands", ["roll"]),
        ("bf16", []),
        ("fp8, rows", ["quantize_rows"] * 4),
        ("fp8, rows, last", ["quantize_rows"] * 3),
    ):
        spec, launches = SPECS[name], Launches()
        at = Setting(spec, launches.kernels)
        values, requests = draw(spec, 3), Requests.packed([3], PAGE, at.table(1))
        at.run(at.plan(), values, requests, at.cache(1), roll=True)
        titles = [spec.compositions[n].title for n in ("qkv", "o", "gate_up", "down")]
        five = [titles[0], "attention", *titles[1:]]
        assert [x for x in launches.made if x not in ("roll", "quantize_rows")] == five
        assert [x for x in launches.made if x in ("roll", "quantize_rows")] == extra
        if name == "fp8":
            assert launches.made[0] == "roll"


# --- scales ---


def test_codes_travel_with_the_scale_they_were_written_with() -> None:
    """Two layers in a row, the second of which reads the first one's codes; each layer has scales of its own."""
    at, next_ = setting(SPECS["fp8"]), Setting(SPECS["fp8"], Launches().kernels, seed=5)
    values, requests = draw(at.spec, 20), Requests.packed([20], PAGE, at.table(1))
    first, second = at.scales(), at.scales()
    second.y.scale_used.fill_(1.0)
    middle = at.run(at.plan(), values, requests, at.cache(1), first)
    assert middle.scale is first.y.scale_used
    out = Stream.allocate(at.spec, 20)
    block = at.plan().with_weights(next_.weights)
    found = block.run(middle, requests, at.cache(1), out, second)
    assert found.scale is second.y.scale_used
    exact = model_of(at.spec, at.state).layer(values)
    exact = model_of(at.spec, next_.state).layer(exact) - values.double()
    assert_within(found.values.double() - values.double(), exact, Budget(0.12, 0.2))


def test_df_06_groups_with_states_of_their_own_do_not_meet() -> None:
    """A small and a large request group take turns; the small one's results are those it has alone."""
    at = setting(SPECS["fp8"])
    block, requests = at.plan(), Requests.packed([9], PAGE, at.table(1))
    small = [draw(at.spec, 9, seed) * 0.25 for seed in range(4)]
    large = [draw(at.spec, 9, seed) * 1.9 for seed in range(4)]
    alone, mine, other = at.scales(), at.scales(), at.scales()
    for x, y in zip(small, large, strict=True):
        wanted = at.run(block, x, requests, at.cache(1), alone, roll=True)
        wanted = [wanted.values.clone(), wanted.codes.clone()]
        at.run(block, y, requests, at.cache(1), other, roll=True)
        found = at.run(block, x, requests, at.cache(1), mine, roll=True)
        assert_equal_bits(found.values, wanted[0])
        assert_equal_bits(found.codes, wanted[1])


def test_df_04_an_invocation_without_rows_changes_no_scale() -> None:
    at = setting(SPECS["fp8"])
    block, scales = at.plan(), at.scales()
    values, requests = draw(at.spec, 9), Requests.packed([9], PAGE, at.table(1))
    at.run(block, values, requests, at.cache(1), scales, roll=True)
    at.run(block, values, requests, at.cache(1), scales, roll=True)
    before = scales.state_dict()
    none = Requests.packed([0, 0], PAGE, at.table(2))
    found = at.run(block, values[:0], none, at.cache(2), scales, roll=True)
    assert found.rows == 0
    assert found.scale is scales.y.scale_used
    after = scales.state_dict()
    for name, value in before.items():
        assert_equal_bits(after[name], value, name)


def test_each_scale_is_rolled_once_from_the_invocation_before() -> None:
    at = setting(SPECS["fp8"])
    block, scales = at.plan(), BlockScales.create(history=1)
    values, requests = draw(at.spec, 9), Requests.packed([9], PAGE, at.table(1))
    at.run(block, values, requests, at.cache(1), scales, roll=True)
    assert [float(s.scale_used) for s in scales.sites] == [1.0] * 4
    seen = [float(s.amax_next) for s in scales.sites]
    at.run(block, values, requests, at.cache(1), scales, roll=True)
    assert [float(s.scale_used) * 448 for s in scales.sites] == pytest.approx(seen, rel=1e-6)
    used = [float(s.scale_used) for s in scales.sites]
    at.run(block, values, requests, at.cache(1), scales, roll=False)
    assert [float(s.scale_used) for s in scales.sites] == used


@pytest.mark.parametrize("initial", [1e-3, 1.0, 1e3])
def test_after_calibration_the_first_scales_fit(initial: float) -> None:
    """Whatever the states began with: 1e-3 clips everything, 1e3 rounds everything to zero."""
    at = setting(SPECS["fp8"])
    block, requests, cache = at.plan(), Requests.packed([40], PAGE, at.table(1)), at.cache(1)
    values = draw(at.spec, 40)
    x, out = at.stream(values), Stream.allocate(at.spec, 40)
    scales = BlockScales.create(history=1, initial=initial)
    assert block.calibrate(x, requests, cache, out, scales) <= 4
    found = block.run(x, requests, cache, out, scales)
    assert_layer(at, found.values, values, [40])
    for site in scales.sites:
        assert float(site.amax_next) <= float(site.scale_used) * 448 * (1 + 1e-6)
        assert int(site.saturated) == 0
    with pytest.raises(ArgumentError, match="out: got the memory of x"):
        block.calibrate(x, requests, cache, x, scales)


def test_df_06_calibration_forgets_and_counts_nothing() -> None:
    """History holds what the next run sees itself, to the bit; states' counters are zero, the cache's as before."""
    at = setting(SPECS["fp8, fp8 cache"])
    block, requests, cache = at.plan(), Requests.packed([40], PAGE, at.table(1)), at.cache(1)
    cache.k_scale.fill_(1e-3)
    for i, counter in enumerate(cache.counters.values()):
        counter.fill_(i)
    x, out = at.stream(draw(at.spec, 40)), Stream.allocate(at.spec, 40)
    scales = BlockScales.create(history=3, initial=1e-3)
    for site in scales.sites:
        site.amax_next.fill_(1e9)
        site.roll()
    block.calibrate(x, requests, cache, out, scales)
    assert [int(c) for c in cache.counters.values()] == [0, 1, 2, 3]
    block.run(x, requests, cache, out, scales)
    for site in scales.sites:
        assert site.history.tolist() == [float(site.amax_next), 0, 0]
        assert (int(site.saturated), int(site.nans)) == (0, 0)
    assert int(cache.counters["k_cells_saturated"]) > 0


def test_codes_whose_scale_would_be_rolled_away_are_refused() -> None:
    """A layer's result goes to the next layer; to itself it would come with a scale that has moved on."""
    at = setting(SPECS["fp8"])
    block, scales = at.plan(), at.scales()
    requests, cache = Requests.packed([9], PAGE, at.table(1)), at.cache(1)
    y = at.run(block, draw(at.spec, 9), requests, cache, scales)
    with pytest.raises(ArgumentError, match=r"^x.scale: got that of a state which this call rolls"):
        block.run(y, requests, cache, Stream.allocate(at.spec, 9), scales)
    block.run(y, requests, cache, Stream.allocate(at.spec, 9), scales, roll=False)


def test_a_block_on_the_cpu_names_what_runs_there() -> None:
    at = setting(SPECS["fp8"])
    block = replace(at.plan(), kernels=GPU)
    with pytest.raises(UnsupportedError, match=r"^weights: got a layer on the CPU.*Llama"):
        at.run(block, draw(at.spec, 3), Requests.packed([3], PAGE, at.table(1)), at.cache(1))


def test_ge_07_no_bias_is_a_bias_of_zeros() -> None:
    bare = setting(SPECS["bf16"])
    spec = replace(bare.spec, bias=True)
    zeros = {
        f"self_attn.{n}_proj.bias": torch.zeros(w)
        for n, w in zip("qkv", (128, 64, 64), strict=True)
    }
    with_zeros = setting(spec)
    with_zeros.weights = LayerWeights.build(bare.state | zeros, spec)
    values, requests = draw(spec, 9), Requests.packed([9], PAGE, bare.table(1))
    found = [at.run(at.plan(), values, requests, at.cache(1)).values for at in (bare, with_zeros)]
    assert_equal_bits(found[0], found[1])


def test_ge_06_the_bias_comes_once_before_norm_and_rotation() -> None:
    """Weights of zero: what is placed is the bias itself, in k rotated."""
    spec = replace(SPECS["bf16"], bias=True)
    at = setting(spec)
    state = {n: x * 0 if n.endswith("proj.weight") else x for n, x in at.state.items()}
    at.weights = LayerWeights.build(state, spec)
    cache, table = at.cache(1), at.table(1)
    at.run(at.plan(), draw(spec, 3), Requests.packed([3], PAGE, table), cache)
    k, v = model_of(spec, state).keys(draw(spec, 3))
    assert_equal_bits(tokens(cache.v, table, 0, 3), v.to(HALF))
    assert_within(tokens(cache.k, table, 0, 3), k, Budget(2.0**-8, 2.0**-8))


# --- caches ---


def test_a_dense_cache_serves_padded_requests_and_its_pages_packed_ones() -> None:
    at = setting(SPECS["bf16"])
    lengths, cached = (5, 11), (3, 0)
    values = draw(at.spec, 16)
    dense, paged = (cache_of(at.spec, 2, 32, dense=True) for _ in range(2))
    prefix = draw(at.spec, 3, 9)
    rows, first = pad(values, lengths, 11), pad(prefix, (3, 0), 3)
    block = at.plan(packed=False, page=None)
    at.run(block, first, Requests.padded([3, 0], 32), dense)
    one = at.run(block, rows, Requests.padded(lengths, 32, cached=cached), dense)
    pages, table = paged.in_pages(16)
    block = at.plan()
    at.run(block, prefix, Requests.packed([3, 0], 16, table), pages)
    two = at.run(block, values, Requests.packed(lengths, 16, table, cached=cached), pages)
    assert_equal_bits(unpad(one.values, lengths), two.values)
    assert_equal_bits(dense.k, paged.k)
    assert_equal_bits(dense.v, paged.v)


def layouts(pages: int) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """K and V of one logical shape, in the strides that engines have."""
    heads, dim = TINY.kv_heads, TINY.head_dim

    def empty(*shape: int) -> torch.Tensor:
        return torch.full(shape, torch.nan, dtype=HALF)

    joined = empty(pages, 2, PAGE, heads, dim).unbind(1)
    packed = empty(pages, heads, PAGE, 2 * dim).transpose(1, 2).chunk(2, dim=-1)
    hnd = [empty(pages, heads, PAGE, dim).transpose(1, 2) for _ in "kv"]
    return {
        "NHD": (empty(pages, PAGE, heads, dim), empty(pages, PAGE, heads, dim)),
        "HND": (hnd[0], hnd[1]),
        "joined": (joined[0], joined[1]),
        "packed": (packed[0], packed[1]),
    }


def test_kv_12_the_strides_of_a_cache_are_its_own() -> None:
    at = setting(SPECS["bf16"])
    values, table = draw(at.spec, 20), at.table(2)
    requests = Requests.packed([7, 13], PAGE, table)
    found = {}
    for name, (k, v) in layouts(at.pages * 2 + 2).items():
        cache = LayerCache.of(k, v)
        found[name] = [at.run(at.plan(), values, requests, cache).values, k, v]
    for name, tensors in found.items():
        for one, two in zip(tensors, found["NHD"], strict=True):
            assert_equal_bits(one, two, name)


# --- planning and refusing ---


def test_blocks_of_a_model_share_kernels_and_memory() -> None:
    at = setting(SPECS["fp8"])
    block = at.plan()
    other = LayerWeights.build(state_of(at.spec, 7), at.spec)
    next_ = block.with_weights(other)
    assert next_.projections is block.projections
    assert next_.workspace is block.workspace
    with pytest.raises(ArgumentError, match="weights"):
        block.with_weights(setting(SPECS["bf16"]).weights)
    shared = at.plan(workspace=block.workspace)
    assert shared.workspace is block.workspace
    with pytest.raises(ArgumentError, match="workspace"):
        at.plan(workspace=Workspace.plan(at.spec, 3))


def test_a_block_prints_its_five_kernels() -> None:
    at = setting(SPECS["fp8"])
    lines = str(at.plan(packed=False, page=None)).splitlines()
    assert (
        lines[0]
        == "tiny: hidden 96, 4:2 heads of 32, MLP 160; fp8 weights, delayed scales, bf16 cache"
    )
    assert "padded requests of up to 128 rows, a dense cache" in lines[1]
    assert [line.split()[0] for line in lines[2:]] == ["qkv", "attention", "o", "gate_up", "down"]
    assert "256 x 96" in lines[2]
    assert "Dequantize >> RowScale >> SwiGLU >> EmitFP8" in lines[5]


@pytest.mark.parametrize(
    ("change", "argument"),
    [
        ({"page": None}, "page: got None"),
        ({"max_rows": 0}, "max_rows"),
    ],
)
def test_what_cannot_be_planned_is_refused(change: dict[str, Any], argument: str) -> None:
    with pytest.raises(ArgumentError, match=argument):
        setting(SPECS["fp8"]).plan(**change)


def test_frequencies_of_another_head_are_refused() -> None:
    at = setting(SPECS["fp8"])
    for wrong in (inv_freq(at.spec)[:8], inv_freq(at.spec).double(), inv_freq(at.spec).to("meta")):
        with pytest.raises(ArgumentError, match="inv_freq"):
            PrefillBlock.plan(at.weights, wrong, max_rows=8, kernels=at.kernels)


def right(at: Setting, rows: int = 9) -> dict[str, Any]:
    """Arguments that ``run`` takes."""
    return {
        "x": at.stream(draw(at.spec, rows)),
        "requests": Requests.packed([rows], PAGE, at.table(1)),
        "cache": at.cache(1),
        "out": Stream.allocate(at.spec, rows),
        "scales": at.scales(),
    }


@pytest.mark.parametrize("name", ["bf16", "fp8", "fp8, rows"])
def test_what_was_not_planned_is_refused_before_any_launch(name: str) -> None:
    launches = Launches()
    at = Setting(SPECS[name], launches.kernels, max_rows=20)
    other = setting(SPECS["fp8" if name == "bf16" else "bf16"])
    block, given_ = at.plan(), right(at)
    table = at.table(1)
    wrong = [
        ("x.values", {"x": replace(given_["x"], values=given_["x"].values[:, :64])}),
        ("x.codes", {"x": right(other)["x"]}),
        ("out.values", {"out": Stream.allocate(at.spec, 8)}),
        ("out.codes", {"out": right(other)["out"]}),
        ("requests", {"requests": Requests.packed([8], PAGE, table)}),
        ("requests", {"requests": Requests.padded([9], PAGE, table)}),
        ("requests", {"requests": Requests.packed([9], 64)}),
        ("cache", {"cache": cache_of(at.spec, 4, 32)}),
        ("cache", {"cache": cache_of(replace(at.spec, cache=FP8), 4)}),
        ("scales", {"scales": None if at.spec.delayed else BlockScales.create()}),
        ("x: got 21 rows", right(at, 21)),
    ]
    for argument, change in wrong:
        with pytest.raises(ArgumentError, match=argument):
            block.run(**(given_ | change))
    if name == "fp8":
        with pytest.raises(ArgumentError, match="x.codes"):
            block.run(**(given_ | {"x": Stream.allocate(at.spec, 9)}))
    assert launches.made == []
