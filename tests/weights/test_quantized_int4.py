"""INT4 weights in logical order: made, joined, cut and refused."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from epicute.errors import ArgumentError, UnsupportedError
from epicute.layouts import CHANNEL, GROUPS, RowOrder
from epicute.quant import ClipSearch, Int4Grid, quantize_int4
from epicute.weights import FORMATS, Quantized, QuantizedInt4, Weight


def made(
    columns: int = 6, width: int = 256, grid: Int4Grid | None = None, name: str = "w"
) -> QuantizedInt4:
    found = Weight(torch.randn(columns, width), name).quantize("int4", grid)
    assert isinstance(found, QuantizedInt4)
    return found


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("group", [*GROUPS, CHANNEL])
def test_a_weight_becomes_what_the_quantiser_makes(group: int, symmetric: bool) -> None:
    values, grid = torch.randn(5, 300), Int4Grid(group, symmetric)
    found = Weight(values, "q").quantize("int4", grid, ClipSearch(steps=3), torch.ones(300))
    wanted = quantize_int4(values, grid, ClipSearch(steps=3), torch.ones(300))
    assert isinstance(found, QuantizedInt4)
    assert (found.name, found.format, found.group) == ("q", "int4", group)
    assert torch.equal(found.codes, wanted.codes)
    assert torch.equal(found.dequantize(), wanted.dequantize())
    assert (found.zero is None) == symmetric
    assert not found.gain_operand


def test_the_gain_is_folded_before_and_never_after() -> None:
    weight, gain = Weight(torch.randn(4, 128), "up"), torch.rand(128) + 0.5
    folded = weight.fold_gain(gain).quantize("int4")
    assert isinstance(folded, QuantizedInt4)
    wanted = quantize_int4(weight.values * gain)
    assert torch.equal(folded.codes, wanted.codes)
    with pytest.raises(ArgumentError, match="^up: got a gain.*operand of the projection"):
        folded.fold_gain(gain)


def test_rows_of_int4_are_not_packed_for_the_large_gemm() -> None:
    with pytest.raises(UnsupportedError, match=r"^w: got int4.*pack_fragments"):
        made().pack(RowOrder.plain(6))


@given(st.lists(st.integers(1, 5), min_size=1, max_size=4), st.booleans())
def test_concat_equals_the_parts(heights: list[int], through_base: bool) -> None:
    parts = [made(n, 200, Int4Grid(64), f"w{n}") for n in heights]
    concat = Quantized.concat if through_base else QuantizedInt4.concat
    fused = concat(parts)
    assert isinstance(fused, QuantizedInt4)
    assert fused.name == "+".join(p.name for p in parts)
    assert torch.equal(fused.codes, torch.cat([p.codes for p in parts]))
    assert torch.equal(fused.dequantize(), torch.cat([p.dequantize() for p in parts]))


def test_concat_of_both_kinds_of_grid() -> None:
    parts = [made(3, 256), made(2, 256, Int4Grid(symmetric=False))]
    fused = QuantizedInt4.concat(parts, "qk")
    assert fused.name == "qk"
    assert fused.zero is not None
    assert (fused.zero[:3] == 8).all()
    assert torch.equal(fused.dequantize(), torch.cat([p.dequantize() for p in parts]))


@pytest.mark.parametrize(
    "other",
    [
        made(3, 128),
        made(3, 256, Int4Grid(64)),
        made(3, 256, Int4Grid(scale_dtype=torch.bfloat16)),
        QuantizedInt4.of(made(3, 256).int4, gain_operand=True),
        Weight(torch.randn(3, 256)).quantize("bf16"),
    ],
)
def test_parts_that_differ_are_refused(other: Quantized) -> None:
    for concat in (Quantized.concat, QuantizedInt4.concat):
        with pytest.raises(ArgumentError, match="^parts"):
            concat([made(2, 256), other])


def test_concat_of_nothing_is_refused() -> None:
    with pytest.raises(ArgumentError, match="^parts"):
        QuantizedInt4.concat([])


@pytest.mark.parametrize("grid", [Int4Grid(), Int4Grid(symmetric=False), Int4Grid(CHANNEL)])
def test_shards_along_k_add_up(grid: Int4Grid) -> None:
    whole = made(4, 640, grid)
    cuts = [0, 640] if grid.group == CHANNEL else [0, 256, 512, 640]
    shards = [whole.columns(a, b) for a, b in pairwise(cuts)]
    assert torch.equal(torch.cat([s.dequantize() for s in shards], 1), whole.dequantize())


def test_a_shard_keeps_what_is_left_of_the_last_group() -> None:
    whole = made(4, 576)
    shard = whole.columns(512, 576)
    assert shard.scales.shape == (4, 1)
    assert torch.equal(shard.dequantize(), whole.dequantize()[:, 512:])


@pytest.mark.parametrize(("start", "stop"), [(0, 320), (320, 640), (64, 640), (128, 128), (0, 768)])
def test_iw_07_a_shard_edge_inside_a_group_is_refused(start: int, stop: int) -> None:
    with pytest.raises(ArgumentError, match=r"^w\.columns: got .*K = 640.*the group, 128"):
        made(4, 640).columns(start, stop)


def test_shards_of_one_group_per_feature_are_refused() -> None:
    with pytest.raises(ArgumentError, match=r"^w\.columns"):
        made(4, 640, Int4Grid(CHANNEL)).columns(0, 320)


CODES = torch.zeros(2, 64, dtype=torch.uint8)
ONES = torch.ones(2, 1, dtype=torch.float16)


@pytest.mark.parametrize(
    ("argument", "make"),
    [
        (r"w\.format", lambda: QuantizedInt4("fp8", CODES, ONES, "w", None, 64)),
        (r"w\.scale", lambda: QuantizedInt4("int4", CODES, None, "w", None, 64)),
        (r"w\.scale", lambda: QuantizedInt4("int4", CODES, ONES, "w", None, 32)),
        (r"w\.zero", lambda: QuantizedInt4("int4", CODES, ONES, "w", ONES, 64)),
        (r"w\.group", lambda: QuantizedInt4("int4", CODES, ONES, "w", None, 256)),
        ("grid", lambda: Weight(torch.ones(2, 64)).quantize("fp8", Int4Grid())),
        ("clip", lambda: Weight(torch.ones(2, 64)).quantize("bf16", clip=ClipSearch())),
        ("importance", lambda: Weight(torch.ones(2, 64)).quantize("fp8", importance=ONES)),
        (r"w\.format", lambda: Quantized("int4", CODES, ONES, "w")),
    ],
)
def test_refused_by_name(argument: str, make: object) -> None:
    with pytest.raises(ArgumentError, match=f"^{argument}: got"):
        make()  # type: ignore[operator]


def test_every_format_packs_into_fragments() -> None:
    for format in FORMATS:
        source = Weight(torch.randn(40, 100)).quantize(format)
        again = source.pack_fragments(RowOrder.plain(40)).unpack()
        assert torch.equal(again.dequantize(), source.dequantize())
    assert "asymmetric, groups of 64" in repr(made(grid=Int4Grid(64, False)))
    assert "gain as operand" in repr(QuantizedInt4.of(made().int4, gain_operand=True))
