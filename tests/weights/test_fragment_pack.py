"""Records: the bytes that a text of loops would write, back bit for bit, padding worth nothing."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from epicute.errors import ArgumentError
from epicute.layouts import CHANNEL, GROUPS, Range, Record, Records, RowOrder
from epicute.quant import Int4Codes, Int4Grid
from epicute.weights import (
    DTYPES,
    FRAGMENT_VERSION,
    FragmentPacked,
    Quantized,
    QuantizedInt4,
    Weight,
    reference,
)


def raw(codes: torch.Tensor) -> torch.Tensor:
    return codes.contiguous().view(torch.uint8)


@st.composite
def orders(draw: st.DrawFn) -> RowOrder:
    """Orders of all kinds, a single feature among them."""
    kind = draw(st.sampled_from(["plain", "halves", "qkv"]))
    if kind == "plain":
        return RowOrder.plain(draw(st.integers(1, 80)))
    if kind == "halves":
        return RowOrder((Range("halves", 2 * draw(st.integers(1, 50))),), 64)
    head = draw(st.sampled_from([32, 80]))
    q, k = (Range("heads", n * head, head, 32) for n in (draw(st.integers(1, 2)), 1))
    return RowOrder((q, k, Range("heads", head, head)), head)


@st.composite
def int4s(draw: st.DrawFn) -> tuple[QuantizedInt4, RowOrder]:
    """All 16 codes and zero points, scales of either dtype drawn as finite numbers."""
    order, width = draw(orders()), draw(st.integers(1, 700))
    group = draw(st.sampled_from([*GROUPS, CHANNEL]))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32 - 1)))
    codes = torch.randint(0, 16, (order.columns, width), generator=generator, dtype=torch.uint8)
    grouped = (order.columns, 1 if group == CHANNEL else -(-width // group))
    scale = torch.randn(grouped, generator=generator)
    scale = scale.to(draw(st.sampled_from([torch.float16, torch.bfloat16])))
    zero = None
    if draw(st.booleans()):
        zero = torch.randint(0, 16, grouped, generator=generator, dtype=torch.uint8)
    return QuantizedInt4("int4", codes, scale, "w", zero, group, draw(st.booleans())), order


@st.composite
def others(draw: st.DrawFn) -> tuple[Quantized, RowOrder]:
    """Bit patterns of FP8 and 16-bit formats, NaNs among them: packing looks at none."""
    order, width = draw(orders()), draw(st.integers(1, 700))
    format = draw(st.sampled_from(list(DTYPES)))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32 - 1)))
    shape = (order.columns, width * DTYPES[format].itemsize)
    patterns = torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8)
    scale = None
    if format == "fp8":
        scale = torch.rand(draw(st.sampled_from([1, order.columns])), generator=generator) + 0.1
    return Quantized(format, patterns.view(DTYPES[format]), scale, "w"), order


tile_counts = st.sampled_from([1, 2, 4])


def same(found: Quantized, wanted: Quantized) -> None:
    assert (found.format, found.name) == (wanted.format, wanted.name)
    assert torch.equal(raw(found.codes), raw(wanted.codes))
    assert (found.scale is None) == (wanted.scale is None)
    if found.scale is not None and wanted.scale is not None:
        assert found.scale.dtype == wanted.scale.dtype
        assert torch.equal(raw(found.scale), raw(wanted.scale))
    if isinstance(wanted, QuantizedInt4):
        assert isinstance(found, QuantizedInt4)
        assert (found.group, found.gain_operand) == (wanted.group, wanted.gain_operand)
        assert (found.zero is None) == (wanted.zero is None)
        if found.zero is not None and wanted.zero is not None:
            assert torch.equal(found.zero, wanted.zero)


@given(st.one_of(int4s(), others()), tile_counts)
def test_pack_and_unpack_are_bit_exact(case: tuple[Quantized, RowOrder], tiles: int) -> None:
    source, order = case
    found = source.pack_fragments(order, tiles)
    assert found.records.record.tiles == tiles
    assert found.data.shape[2] == found.records.record.size
    same(found.unpack(), source)


def physical(source: Quantized, packed: FragmentPacked) -> torch.Tensor:
    """(rows, width) codes as whole numbers in physical order, padding -1."""
    records = packed.records
    found = torch.full((records.rows, records.width), -1, dtype=torch.int64)
    whole = (
        raw(source.codes) if source.codes.element_size() == 1 else source.codes.view(torch.int16)
    )
    rows = torch.from_numpy(packed.order.physical())
    found[rows, : packed.shape[1]] = whole.to(torch.int64) & 0xFFFF
    return found


@given(st.one_of(int4s(), others()))
@settings(max_examples=25)
def test_bytes_are_those_of_the_reference(case: tuple[Quantized, RowOrder]) -> None:
    source, order = case
    found = source.pack_fragments(order)
    record = found.records.record
    cells = physical(source, found)
    if isinstance(source, QuantizedInt4):
        at = torch.arange(found.records.width) // record.group
        known = torch.full((found.records.rows, int(at[-1]) + 1), 8, dtype=torch.int64)
        if source.zero is not None:
            rows, count = torch.from_numpy(order.physical()), source.zero.shape[1]
            spread = known.shape[1] if source.group == CHANNEL else count
            known[rows, :spread] = source.zero.long().expand(-1, spread)
        cells = torch.where(cells < 0, known[:, at], cells)
    cells = cells.clamp(min=0)
    for down in range(found.records.down):
        for along in range(found.records.along):
            some = cells[16 * down : 16 * down + 16]
            some = some[:, along * record.depth : (along + 1) * record.depth]
            wanted = reference.record_codes(some, record.bits)
            assert bytes(found.data[down, along, : record.scales_start].tolist()) == wanted


@given(int4s(), tile_counts)
def test_scales_and_zeros_stand_where_the_layout_says(
    case: tuple[QuantizedInt4, RowOrder], tiles: int
) -> None:
    source, order = case
    found = source.pack_fragments(order, tiles)
    records, record = found.records, found.records.record
    flat = found.data.reshape(-1).numpy()
    rows = order.physical()
    group = np.arange(records.along * record.groups)
    column = np.minimum(group * record.group, source.codes.shape[1] - 1)
    real = group * record.group < source.codes.shape[1]
    held = 0 * group if source.group == CHANNEL else column // source.group
    start = records.record_offset(rows[:, None] // record.rows, group // record.groups)
    inside = rows[:, None] % record.rows, group % record.groups
    low = flat[start + record.scale_offset(*inside)].astype(np.uint16)
    high = flat[start + record.scale_offset(*inside) + 1].astype(np.uint16)
    bits = low | high << 8
    wanted = source.scales.view(torch.int16).numpy().view(np.uint16)[:, held]
    assert np.array_equal(bits, np.where(real[None, :], wanted, 0))
    if source.zero is not None:
        zeros = flat[start + record.zero_offset(*inside)]
        assert np.array_equal(zeros[:, real], source.zero.numpy()[:, held[real]])


def values_of(packed: FragmentPacked) -> torch.Tensor:
    """(rows, width) float64 of everything in the records, padding too, cell by cell of the layout."""
    records, record = packed.records, packed.records.record
    row, k = np.meshgrid(np.arange(records.rows), np.arange(records.width), indexing="ij")
    inside, along = k % record.depth, k // record.depth
    start = records.record_offset(row // record.rows, along)
    flat = packed.data.reshape(-1).numpy()
    bit = record.code_bit(row % record.rows, inside)
    code = flat[start + bit // 8] >> (bit % 8) & 15
    place = row % record.rows, inside // record.group
    at = start + record.scale_offset(*place)
    scale = flat[np.stack([at, at + 1], axis=-1)].copy().view(np.int16)[..., 0]
    held = torch.from_numpy(scale.copy()).view(packed.scale_dtype).double()
    zero = flat[start + record.zero_offset(*place)] if record.zeros else 8
    return torch.from_numpy(code.astype(np.float64) - zero) * held


@given(int4s(), tile_counts)
@settings(max_examples=25)
def test_padding_is_worth_nothing(case: tuple[QuantizedInt4, RowOrder], tiles: int) -> None:
    """Rows, groups and columns beyond the weight: (code - zero) * scale is 0 in each."""
    source, order = case
    packed = source.pack_fragments(order, tiles)
    found = values_of(packed)
    rows = torch.from_numpy(order.physical())
    assert torch.equal(found[rows, : source.codes.shape[1]], source.int4.dequantize(torch.float64))
    found[rows, : source.codes.shape[1]] = 0
    assert (found == 0).all()


def test_iw_07_smollm2_pads_the_last_group() -> None:
    """K = 576 in groups of 128: 640 in one record, the last 64 columns at the zero point."""
    w = Weight(torch.randn(96, 576), "q_proj").quantize("int4")
    packed = w.pack_fragments(RowOrder.plain(96))
    assert (packed.records.width, packed.records.along) == (640, 1)
    same(packed.unpack(), w)
    values = values_of(packed)
    assert (values[:, 576:] == 0).all()
    x = torch.randn(4, 640, dtype=torch.float64)
    rows = torch.from_numpy(packed.order.physical())
    y = x @ values[rows].t()
    exact = x[:, :576] @ w.dequantize().double().t()
    assert torch.allclose(y, exact, atol=1e-9)


@pytest.mark.parametrize("width", [320, 4304, 7392])
@pytest.mark.parametrize("columns", [24, 40, 1000])
def test_iw_07_ragged_shapes(width: int, columns: int) -> None:
    generator = torch.Generator().manual_seed(width + columns)
    codes = torch.randint(0, 16, (columns, width), generator=generator, dtype=torch.uint8)
    scale = torch.rand(columns, -(-width // 128), generator=generator).half()
    source = QuantizedInt4("int4", codes, scale)
    same(source.pack_fragments(RowOrder.plain(columns)).unpack(), source)


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("group", [*GROUPS, CHANNEL])
def test_all_codes_in_every_place(group: int, symmetric: bool) -> None:
    """Each of the 16 codes in each of a block's 1024 cells."""
    cells = torch.arange(16 * 128).reshape(16, 128)
    groups = 1 if group == CHANNEL else 128 // group
    scale = torch.ones(16, groups, dtype=torch.float16)
    zero = None if symmetric else torch.arange(16 * groups).reshape(16, groups).to(torch.uint8) % 16
    for shift in range(16):
        codes = ((cells + cells // 16 + shift) % 16).to(torch.uint8)
        source = QuantizedInt4("int4", codes, scale, "w", zero, group)
        packed = source.pack_fragments(RowOrder.plain(16))
        same(packed.unpack(), source)
        rows = torch.from_numpy(packed.order.physical())
        wanted = source.int4.dequantize(torch.float64)
        assert torch.equal(values_of(packed)[rows, :128], wanted)


def test_pairs_share_a_lane() -> None:
    """Gate and up of one feature: registers j and j + 1 of one lane, so neighbouring nibbles."""
    order = RowOrder((Range("halves", 64),), 64)
    gate, up = torch.full((32, 64), 3), torch.full((32, 64), 12)
    codes = torch.cat([gate, up]).to(torch.uint8)
    source = QuantizedInt4("int4", codes, torch.ones(64, 1).half(), group=64)
    packed = source.pack_fragments(order)
    bytes_ = packed.data[..., : packed.records.record.scales_start]
    assert (bytes_ == 3 + 16 * 12).all()


@pytest.mark.parametrize("format", ["int4", "fp8", "bf16", "fp16"])
def test_save_and_load(format: str, tmp_path: Path) -> None:
    path = tmp_path / "w.safetensors"
    grid = Int4Grid(64, False, torch.bfloat16) if format == "int4" else None
    source = Weight(torch.randn(96, 200), "gate_up").quantize(format, grid)
    if isinstance(source, QuantizedInt4):
        source = QuantizedInt4.of(source.int4, source.name, gain_operand=True)
    packed = source.pack_fragments(RowOrder((Range("halves", 96),), 64), 2)
    packed.save(path)
    again = FragmentPacked.load(path)
    assert torch.equal(again.data, packed.data)
    for field in (
        "format",
        "order",
        "records",
        "shape",
        "group",
        "scale_dtype",
        "gain_operand",
        "name",
    ):
        assert getattr(again, field) == getattr(packed, field), field
    same(again.unpack(), source)
    assert list(tmp_path.iterdir()) == [path]


def rewritten(path: Path, **metadata: str) -> Path:
    from safetensors import safe_open

    with safe_open(path, framework="pt") as file:
        found = dict(file.metadata())
    save_file(load_file(path), path, found | metadata)
    return path


@pytest.mark.parametrize(
    ("metadata", "named"),
    [
        ({"layout_version": "0"}, "layout_version: got 0, expected 2"),
        ({"kind": "rows"}, "kind: got rows, expected fragments"),
        ({"shape": "[96]"}, "unreadable contents"),
        ({"scale_dtype": "float64"}, "unreadable contents"),
        ({"shape": "[96, 700]"}, r"^gate_up\.records"),
        ({"group": "32"}, r"^gate_up\.records"),
        ({"group": "0"}, r"^gate_up\.records"),
        ({"format": "fp8"}, r"^gate_up\.records"),
        ({"format": "int3"}, r"^gate_up\.format"),
        ({"scale_dtype": "None"}, r"^gate_up\.scale_dtype"),
        ({"order": RowOrder.plain(64).to_json()}, r"^gate_up\.order"),
        ({"records": json.dumps({"record": {"bits": 4}})}, "unreadable contents"),
    ],
)
def test_files_that_do_not_fit_are_refused(metadata: dict, named: str, tmp_path: Path) -> None:
    path = tmp_path / "w.safetensors"
    source = Weight(torch.randn(96, 200), "gate_up").quantize("int4")
    source.pack_fragments(RowOrder.plain(96)).save(path)
    assert FRAGMENT_VERSION == 2
    with pytest.raises(ArgumentError, match=named):
        FragmentPacked.load(rewritten(path, **metadata))


def test_a_file_of_packed_rows_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "w.safetensors"
    Weight(torch.randn(32, 64)).quantize("fp8").pack(RowOrder.plain(32)).save(path)
    with pytest.raises(ArgumentError, match="kind: got none, expected fragments"):
        FragmentPacked.load(path)


def test_orders_are_compared_by_place() -> None:
    source = Weight(torch.randn(64, 64), "up").quantize("int4")
    packed = source.pack_fragments(RowOrder.plain(64))
    assert packed.order_matches(RowOrder((Range("single", 32), Range("single", 32)), 32))
    packed.require_order(RowOrder.plain(64), "test")
    with pytest.raises(ArgumentError, match=r"up\.order.*for the kernel.*pack_fragments"):
        packed.require_order(RowOrder((Range("halves", 64),), 64), "the kernel")
    assert "int4, groups of 128" in repr(packed)
    assert packed.nbytes == packed.data.nbytes


def test_moving_keeps_everything() -> None:
    packed = Weight(torch.randn(40, 100)).quantize("fp8").pack_fragments(RowOrder.plain(40))
    moved = packed.to("meta")
    assert moved.device.type == "meta"
    assert moved.scale is not None
    assert moved.scale.device.type == "meta"
    assert (moved.order, moved.records) == (packed.order, packed.records)


def test_record_bytes_bound_a_record() -> None:
    source = Weight(torch.randn(64, 4096)).quantize("int4")
    order = RowOrder.plain(64)
    whole = FragmentPacked.of(source, order, 4, 16384)
    assert whole.records.record == Record(4, 512, 4, 128)
    same(whole.unpack(), source)


INT4 = Weight(torch.randn(32, 64), "w").quantize("int4")
FP8 = Weight(torch.randn(32, 64), "w").quantize("fp8")
ORDER = RowOrder.plain(32)


def broken_int4(**change: torch.Tensor) -> Int4Codes:
    assert isinstance(INT4, QuantizedInt4)
    return replace(INT4.int4, **change)


@pytest.mark.parametrize(
    ("argument", "make"),
    [
        ("w.order", lambda: INT4.pack_fragments(RowOrder.plain(64))),
        ("tiles", lambda: INT4.pack_fragments(ORDER, 0)),
        (
            "weight.codes",
            lambda: QuantizedInt4.of(
                broken_int4(codes=torch.full((32, 64), 16, dtype=torch.uint8), name="weight")
            ).pack_fragments(ORDER),
        ),
        (
            "weight.zero",
            lambda: QuantizedInt4.of(
                broken_int4(zero=torch.full((32, 1), 16, dtype=torch.uint8))
            ).pack_fragments(ORDER),
        ),
        (
            "weight.scale",
            lambda: QuantizedInt4.of(
                broken_int4(scale=torch.full((32, 1), math.inf).half())
            ).pack_fragments(ORDER),
        ),
        ("w.scale", lambda: replace(FP8, scale=torch.zeros(32)).pack_fragments(ORDER)),
        ("w.scale", lambda: replace(FP8.pack_fragments(ORDER), scale=None)),
        ("w.data", lambda: replace(FP8.pack_fragments(ORDER), data=torch.zeros(2, 1, 512))),
        ("w.records", lambda: replace(INT4.pack_fragments(ORDER), format="fp8")),
        (
            "w.records",
            lambda: replace(INT4.pack_fragments(ORDER), records=Records(Record(4, 128), 2, 1)),
        ),
        ("w.scale_dtype", lambda: replace(INT4.pack_fragments(ORDER), scale_dtype=torch.float32)),
    ],
)
def test_refused_by_name(argument: str, make: object) -> None:
    with pytest.raises(ArgumentError, match=f"^{argument}: got"):
        make()  # type: ignore[operator]
