"""Residual stream, scales, cache and scratch memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from epicute.errors import ArgumentError
from epicute.kv.cache import CacheSpec, KVCache
from epicute.models import SHAPES, LayerShape
from epicute.models.block_spec import BlockSpec
from epicute.models.block_state import (
    BlockScales,
    LayerCache,
    Stream,
    Workspace,
    model_sites,
)
from epicute.quant import DelayedScale
from epicute.quant.group import DelayedGroup
from epicute.testing import assert_equal_bits, inputs_unchanged
from tests.models.layers import FP8, TINY, cache_of, draw

DELAYED, ROWWISE, BF16 = BlockSpec(TINY), BlockSpec(TINY, scaling="row"), BlockSpec(TINY, "bf16")


# --- stream ---


def test_the_entering_stream_holds_values_sums_and_codes() -> None:
    values = draw(DELAYED, 7)
    entry = DelayedScale.create(initial=0.01)
    with inputs_unchanged(values=values):
        found = Stream.of(DELAYED, values, entry)
    assert_equal_bits(found.values, values)
    wide = values.double()
    sums = torch.stack([wide[:, :64].square().sum(1), wide[:, 64:].square().sum(1)], dim=1)
    assert (found.sumsq - sums).abs().max() <= 1e-5 * sums.max()
    assert (found.codes.float() * 0.01 - values.float()).abs().max() <= 4 / 16
    assert float(found.scale) == pytest.approx(0.01)
    assert float(entry.amax_next) == values.abs().max()
    rows = Stream.of(ROWWISE, values)
    assert_equal_bits(rows.scale, values.float().abs().amax(1) / 448)
    assert Stream.of(BF16, values).codes is None


@pytest.mark.parametrize("spec", [DELAYED, ROWWISE, BF16], ids=str)
def test_kd_01_rows_of_nobody_enter_as_zeros(spec: BlockSpec) -> None:
    """As the embedding makes them: no value of theirs reaches a maximum or a counter."""
    values, slots = draw(spec, 5), torch.tensor([4, -1, 0, -1, 9])
    values[1], values[3] = torch.nan, 1e30
    entry, alone = DelayedScale.create(), DelayedScale.create()
    some = slots >= 0
    with inputs_unchanged(values=values):
        found = Stream.of(spec, values, entry if spec.delayed else None, slots)
    kept = Stream.of(spec, values[some], alone if spec.delayed else None)
    for name in ("values", "sumsq", "codes"):
        whole, part = getattr(found, name), getattr(kept, name)
        if whole is not None:
            assert_equal_bits(whole[some].float(), part.float(), name)
            assert (whole[~some].float() == 0).all()
    for name, tensor in alone.state_dict().items():
        assert_equal_bits(entry.state_dict()[name], tensor, name)
    with pytest.raises(ArgumentError, match=r"slots: got \(4,\)"):
        Stream.of(BF16, values, slots=slots[:4])


def test_the_first_rows_are_the_same_memory() -> None:
    for spec in (DELAYED, ROWWISE, BF16):
        found = Stream.allocate(spec, 9)
        part = found.first(4)
        assert part.rows == 4
        for name in ("values", "sumsq", "codes", "scale"):
            whole, some = getattr(found, name), getattr(part, name)
            assert (whole is None) == (some is None)
            if some is not None:
                assert some.shape[0] == 4
                assert some.data_ptr() == whole.data_ptr()


def test_a_delayed_scale_is_no_row_of_a_stream() -> None:
    found = Stream.of(DELAYED, draw(DELAYED, 9), DelayedScale.create())
    assert found.first(4).scale is found.scale


@pytest.mark.parametrize("columns", [TINY.hidden, 100])
def test_rows_start_at_multiples_of_sixteen_bytes(columns: int) -> None:
    shape = LayerShape(columns, 160, 4, 2, 32, "odd")
    found = Stream.allocate(BlockSpec(shape), 5)
    for x in (found.values, found.codes):
        assert x.shape == (5, columns)
        assert x.stride(0) * x.element_size() % 16 == 0
        assert x.data_ptr() % 16 == 0


def test_an_entering_stream_needs_its_state_exactly_with_delayed_scales() -> None:
    with pytest.raises(ArgumentError, match="entry: got None"):
        Stream.of(DELAYED, draw(DELAYED, 1))
    for spec in (ROWWISE, BF16):
        with pytest.raises(ArgumentError, match="entry: got a DelayedScale"):
            Stream.of(spec, draw(spec, 1), DelayedScale.create())


# --- scales ---


def test_df_08_states_are_saved_and_continue() -> None:
    scales, other = BlockScales.create(history=4), BlockScales.create(history=4)
    for i, site in enumerate(scales.sites):
        site.quantize(torch.full((3,), 10.0 ** (i + 1)))
        site.roll()
    other.load_state_dict(scales.state_dict())
    for mine, its in zip(scales.sites, other.sites, strict=True):
        assert_equal_bits(its.scale_used, mine.scale_used)
        mine.roll()
        its.roll()
        assert_equal_bits(its.scale_used, mine.scale_used)
    with pytest.raises(ArgumentError, match="state: got x2.cursor"):
        other.load_state_dict({"x2.cursor": torch.zeros(1)})
    state = scales.state_dict()
    del state["z.cursor"]
    with pytest.raises(ArgumentError, match="state"):
        other.load_state_dict(state)


def test_a_layer_s_states_are_part_of_its_model_s() -> None:
    """A layer writes the next one's x; one roll of the group rolls all, a layer's own only its four."""
    names = model_sites(2)
    assert names[:5] == ("0.x", "0.attention", "0.x1", "0.z", "1.x")
    assert names[-1] == "1.z"
    group = DelayedGroup.create(names, history=1)
    layers = [BlockScales.of(group, layer) for layer in range(2)]
    assert layers[0].y is group["1.x"]
    assert [s.scale_used.data_ptr() for s in layers[1].sites] == [
        group[n].scale_used.data_ptr() for n in ("1.attention", "1.x1", "1.z")
    ]
    assert layers[1].y is None  # behind the last layer the final norm reads 16 bits
    assert layers[0].group is not None  # which rolls the four in one launch
    assert layers[0].group.names == ("0.attention", "0.x1", "0.z", "1.x")
    group.amax_next.fill_(4.48)
    layers[0].roll()
    rolled = group.scale_used == 4.48 / 448
    assert [n for n, done in zip(names, rolled, strict=True) if done] == list(names[1:5])
    group.roll()
    assert (group.scale_used == group.scale_used[1]).all()
    own = BlockScales.create(history=1)
    for site in own.sites:
        site.amax_next.fill_(4.48)
    own.roll()
    assert [float(s.scale_used) for s in own.sites] == [float(group.scale_used[0])] * 4


# --- cache ---


def test_a_cache_tells_what_place_kv_needs() -> None:
    fp8 = BlockSpec(TINY, cache=FP8)
    plain, quantised = cache_of(DELAYED, 3), cache_of(fp8, 3)
    assert set(plain.cells()) == {"k_cells", "v_cells"}
    written = {n for n in fp8.compositions["qkv"].operands if n.startswith(("k_", "v_"))}
    assert set(quantised.cells()) == written
    assert plain.page == 16


@pytest.mark.parametrize("bad", [0.0, -1.0, torch.nan, torch.inf, 1e-50])
def test_kd_18_scales_of_the_cache_are_validated(bad: float) -> None:
    cells = torch.zeros(2, 16, 2, 32).to(FP8)
    right, wrong = torch.ones(2), torch.tensor([1.0, bad])
    with pytest.raises(ArgumentError, match="k_scale"):
        LayerCache.of(cells, cells.clone(), wrong, right)
    with pytest.raises(ArgumentError, match="v_scale"):
        LayerCache.of(cells, cells.clone(), right, wrong)


@pytest.mark.parametrize(
    ("change", "argument"),
    [
        ({"k_scale": None}, "k_scale"),
        ({"v_scale": torch.ones(1)}, "v_scale"),
        ({"v_scale": torch.ones(2, dtype=torch.float64)}, "v_scale"),
        ({"v": torch.zeros(2, 16, 2, 16).to(FP8)}, "v: got"),
        ({"v": torch.zeros(2, 16, 2, 32)}, "cache.dtype"),
        ({"v": torch.zeros(2, 16, 2, 32, dtype=torch.bfloat16)}, "v: got"),
        ({"k": torch.zeros(2, 17, 2, 32).to(FP8)}, "cache.page_size"),
    ],
)
def test_caches_that_no_kernel_serves_are_refused(change: dict[str, Any], argument: str) -> None:
    cells = torch.zeros(2, 16, 2, 32).to(FP8)
    given_ = {"k": cells, "v": cells.clone(), "k_scale": torch.ones(2), "v_scale": torch.ones(2)}
    with pytest.raises(ArgumentError, match=argument):
        LayerCache.of(**(given_ | change))


def test_a_sixteen_bit_cache_has_no_scale() -> None:
    cells = torch.zeros(2, 16, 2, 32, dtype=torch.bfloat16)
    with pytest.raises(ArgumentError, match="k_scale"):
        LayerCache.of(cells, cells.clone(), torch.ones(2))


@pytest.mark.parametrize("dtype", [torch.bfloat16, FP8])
def test_a_layer_of_a_model_s_cache_is_a_view_of_it(dtype: torch.dtype) -> None:
    spec = CacheSpec(3, 2, 32, dtype, 16)
    scales = (torch.full((3, 2), 0.5), torch.full((3, 2), 0.25)) if dtype == FP8 else None
    whole = KVCache.paged(spec, 2, 64, 9, scales=scales)
    found = LayerCache.of_model(whole, 1)
    cells = whole.cells(1)
    assert {n: x.data_ptr() for n, x in found.cells().items()} == {
        n: x.data_ptr() for n, x in cells.items()
    }
    assert found.page == 16
    assert (found.k_scale is None) == (dtype != FP8)


@given(st.integers(1, 4), st.sampled_from((16, 32, 64, 128)), st.integers(1, 3))
def test_a_dense_cache_in_pages_is_the_same_memory(batch: int, page: int, count: int) -> None:
    length = page * count
    k = torch.arange(batch * length * 2 * 8).reshape(batch, length, 2, 8).to(torch.bfloat16)
    found, table = LayerCache.of(k, k.clone(), dense=True).in_pages(page)
    assert found.page == page
    for b in range(batch):
        for position in range(0, length, 5):
            cell = found.k[table[b, position // page], position % page]
            assert cell.data_ptr() == k[b, position].data_ptr()


def test_what_is_not_whole_pages_is_refused() -> None:
    k = torch.zeros(2, 40, 2, 8, dtype=torch.bfloat16)
    dense = LayerCache.of(k, k.clone(), dense=True)
    with pytest.raises(ArgumentError, match="page: got 16"):
        dense.in_pages(16)
    apart = torch.zeros(2, 64, 2, 8, dtype=torch.bfloat16)[:, :32]
    with pytest.raises(ArgumentError, match="k.strides"):
        LayerCache.of(apart, apart.clone(), dense=True).in_pages(16)
    with pytest.raises(ArgumentError, match="page"):
        cache_of(DELAYED, 2).in_pages(16)


# --- scratch memory ---

SPECS = [
    BlockSpec(shape, format, scaling)
    for shape in (TINY, SHAPES["SmolLM2"], LayerShape(64, 64, 8, 8, 32, "narrow MLP"))
    for format, scaling in (("fp8", "delayed"), ("fp8", "row"), ("bf16", "delayed"))
]


@given(st.sampled_from(SPECS), st.integers(1, 300))
def test_what_is_needed_at_once_does_not_overlap(spec: BlockSpec, rows: int) -> None:
    work = Workspace.plan(spec, rows)
    q, attended, z = (
        (x.data_ptr(), x.data_ptr() + _span(x)) for x in (work.q, work.attended, work.z)
    )
    assert q[1] <= attended[0] or attended[1] <= q[0]
    start = work.q.untyped_storage().data_ptr()
    end = start + work.q.untyped_storage().nbytes()
    for first, last in (q, attended, z):
        assert start <= first
        assert last <= end
        assert first % 16 == 0
    assert work.rows == rows
    written = spec.attention().out_dtype
    assert work.attended.dtype == work.z.dtype == written
    assert work.attended.is_contiguous()


def _span(x: torch.Tensor) -> int:
    return ((x.shape[0] - 1) * x.stride(0) + x.shape[1]) * x.element_size()


def test_z_takes_the_place_of_q_and_attention() -> None:
    """8B, FP8: 14 336 bytes a row hold 8 192 of q and 4 096 of attention's output."""
    rows = 4
    assert Workspace.plan(BlockSpec(SHAPES["8B"]), rows).nbytes == rows * 14336


def test_a_workspace_for_another_layer_is_refused() -> None:
    work = Workspace.plan(DELAYED, 8)
    device = torch.device("cpu")
    work.check(DELAYED, 8, device)
    for spec, rows in ((DELAYED, 9), (ROWWISE, 8), (BF16, 8), (BlockSpec(SHAPES["1B"]), 8)):
        with pytest.raises(ArgumentError, match="workspace"):
            work.check(spec, rows, device)
    with pytest.raises(ArgumentError, match="workspace"):
        work.check(DELAYED, 8, torch.device("meta"))
    with pytest.raises(ArgumentError, match="max_rows"):
        Workspace.plan(DELAYED, 0)
