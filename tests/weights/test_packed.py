"""Packing moves bytes and changes none; files and readers that do not fit are refused by name."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from epicute.errors import ArgumentError
from epicute.layouts import Range, RowOrder
from epicute.weights import DTYPES, LAYOUT_VERSION, Packed, Quantized, Weight, reference


def raw(codes: torch.Tensor) -> torch.Tensor:
    return codes.contiguous().view(torch.uint8)


@st.composite
def orders(draw: st.DrawFn) -> RowOrder:
    """Orders of all kinds, a single feature among them."""
    kind = draw(st.sampled_from(["plain", "halves", "qkv"]))
    if kind == "plain":
        return RowOrder.plain(draw(st.integers(1, 100)))
    if kind == "halves":
        return RowOrder((Range("halves", 2 * draw(st.integers(1, 60))),), 64)
    head = draw(st.sampled_from([32, 64, 80]))
    heads, kv_heads = draw(st.integers(1, 3)), draw(st.integers(1, 2))
    rotary = draw(st.sampled_from([0, 16, 32]))
    q, k = (Range("heads", n * head, head, rotary) for n in (heads, kv_heads))
    return RowOrder((q, k, Range("heads", kv_heads * head, head)), head)


@st.composite
def sources(draw: st.DrawFn) -> tuple[Quantized, RowOrder]:
    """Codes drawn as bit patterns, NaNs among them: packing looks at none."""
    order, width = draw(orders()), draw(st.integers(1, 40))
    format = draw(st.sampled_from(list(DTYPES)))
    size = DTYPES[format].itemsize
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32 - 1)))
    shape = (order.columns, width * size)
    patterns = torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8)
    scale = None
    if format == "fp8":
        scale = torch.rand(draw(st.sampled_from([1, order.columns])), generator=generator) + 0.1
    return Quantized(format, patterns.view(DTYPES[format]), scale), order


def packed(columns: int = 64, width: int = 24, format: str = "fp8") -> Packed:
    order = RowOrder((Range("halves", columns),), 64)
    return Weight(torch.randn(columns, width), "gate_up").quantize(format).pack(order)


@given(sources())
def test_pack_and_unpack_are_bit_exact(case: tuple[Quantized, RowOrder]) -> None:
    source, order = case
    again = source.pack(order).unpack()
    assert again.format == source.format
    assert again.codes.dtype == source.codes.dtype
    assert torch.equal(raw(again.codes), raw(source.codes))
    if source.scale is not None:
        assert torch.equal(again.scale, source.scale)


@given(sources())
def test_packed_bytes_are_those_of_the_reference(case: tuple[Quantized, RowOrder]) -> None:
    source, order = case
    found = source.pack(order)
    assert found.shape == tuple(source.codes.shape)
    assert found.codes.is_contiguous()
    assert found.codes.shape == (order.rows, found.pitch)
    assert found.pitch * found.codes.element_size() % 16 == 0
    assert 0 <= found.pitch - found.shape[1] < 16 // found.codes.element_size()
    expected = reference.pack(source.codes, order.logical().tolist(), found.pitch)
    assert torch.equal(raw(found.codes), expected)


@given(sources())
def test_padding_is_zero_bytes(case: tuple[Quantized, RowOrder]) -> None:
    source, order = case
    found = source.pack(order)
    padding = torch.from_numpy(order.logical()) < 0
    assert padding.sum() == order.rows - order.columns
    assert (raw(found.codes)[padding] == 0).all()
    assert (raw(found.codes[:, found.shape[1] :]) == 0).all()


@given(sources())
def test_scales_stay_in_logical_order(case: tuple[Quantized, RowOrder]) -> None:
    source, order = case
    found = source.pack(order)
    if source.scale is None:
        assert found.scale is None
    else:
        assert torch.equal(found.scale, source.scale)


def test_ge_05_shard_scales_survive_packing() -> None:
    shards = [
        Quantized("fp8", torch.ones(64, 32).to(torch.float8_e4m3fn), torch.tensor([s]))
        for s in (1.0, 0.01, 100.0)
    ]
    heads = Range("heads", 64, 64, 64)
    order = RowOrder((heads, heads, Range("single", 64)), 64)
    found = Quantized.concat(shards).pack(order)
    assert found.scale is not None
    assert [found.scale[i].item() for i in (0, 63, 64, 127, 128)] == pytest.approx(
        [1, 1, 0.01, 0.01, 100]
    )
    assert torch.equal(found.unpack().dequantize(), Quantized.concat(shards).dequantize())


def test_ge_16_transposed_codes_pack_as_they_show() -> None:
    stored = Weight(torch.randn(40, 64)).quantize("fp8").codes  # (K, N)
    source = Quantized("fp8", stored.t(), torch.ones(64))
    found = source.pack(RowOrder.plain(64))
    copy = Quantized("fp8", stored.t().contiguous(), torch.ones(64)).pack(RowOrder.plain(64))
    assert torch.equal(raw(found.codes), raw(copy.codes))


def test_packing_leaves_the_source_alone() -> None:
    source = Weight(torch.randn(10, 8)).quantize("bf16")
    before = source.codes.clone()
    source.pack(RowOrder.plain(10)).codes.zero_()
    assert torch.equal(source.codes, before)


@pytest.mark.parametrize("bad", [math.nan, math.inf, 0.0, -1.0])
def test_scales_that_are_no_multipliers_are_refused(bad: float) -> None:
    source = Weight(torch.randn(64, 8), "o_proj").quantize("fp8")
    assert source.scale is not None
    source.scale[17] = bad
    with pytest.raises(ArgumentError, match=r"^o_proj\.scale: got 1 values"):
        source.pack(RowOrder.plain(64))


def test_an_order_of_another_width_is_refused() -> None:
    with pytest.raises(ArgumentError, match=r"^up\.order: got \[single 96;.*64 columns"):
        Weight(torch.randn(64, 8), "up").quantize("bf16").pack(RowOrder.plain(96))


def test_orders_match_by_where_rows_stand() -> None:
    found = packed()
    assert found.order_matches(RowOrder((Range("halves", 64),), 64))
    assert not found.order_matches(RowOrder.plain(64))
    assert not found.order_matches(RowOrder((Range("halves", 64),), 128))
    whole = Weight(torch.randn(128, 8)).quantize("bf16").pack(RowOrder.plain(128))
    assert whole.order_matches(RowOrder((Range("heads", 128, head_dim=64),), 64))
    assert whole.order_matches(RowOrder((Range("single", 64), Range("single", 64)), 32))
    assert not whole.order_matches(RowOrder((Range("heads", 128, 64, 64),), 64))


def test_a_reader_of_another_order_is_told_both() -> None:
    found = packed()
    found.require_order(found.order, "SwiGLU")
    with pytest.raises(ArgumentError) as caught:
        found.require_order(RowOrder.plain(64), "Dequantize >> Store")
    message = str(caught.value)
    for part in ("gate_up.order", str(found.order), str(RowOrder.plain(64)), "Dequantize >> Store"):
        assert part in message


def test_a_packed_weight_that_contradicts_itself_is_refused() -> None:
    good = packed()
    fields: dict[str, Any] = {
        "format": good.format,
        "codes": good.codes,
        "scale": good.scale,
        "order": good.order,
        "shape": good.shape,
        "name": good.name,
    }
    Packed(**fields)
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"format": "bf16"}, r"gate_up\.codes\.dtype"),
        ({"format": "int5"}, r"gate_up\.format"),
        ({"codes": good.codes.to(torch.float32)}, r"gate_up\.codes\.dtype"),
        ({"codes": good.codes[:32]}, r"gate_up\.codes"),
        ({"codes": good.codes.t().contiguous().t()}, r"gate_up\.codes"),
        ({"codes": good.codes[:, :24].contiguous()}, r"gate_up\.codes"),
        ({"scale": None}, r"gate_up\.scale"),
        ({"scale": torch.ones(63)}, r"gate_up\.scale"),
        ({"shape": (63, 24)}, r"gate_up\.order"),
        ({"shape": (64, 40)}, r"gate_up\.codes"),
        ({"order": RowOrder.plain(32)}, r"gate_up\.order"),
    ]
    for change, named in wrong:
        with pytest.raises(ArgumentError, match=named):
            Packed(**(fields | change))


@given(sources())
def test_saved_and_loaded_is_the_same(
    tmp_path_factory: pytest.TempPathFactory, case: tuple[Quantized, RowOrder]
) -> None:
    source, order = case
    found = source.pack(order)
    path = tmp_path_factory.mktemp("packed") / "w.safetensors"
    found.save(path)
    again = Packed.load(path)
    assert (again.format, again.order, again.shape, again.name) == (
        found.format,
        found.order,
        found.shape,
        found.name,
    )
    assert again.dtype == found.dtype
    assert torch.equal(raw(again.codes), raw(found.codes))
    assert (again.scale is None) == (found.scale is None)
    if found.scale is not None:
        assert torch.equal(again.scale, found.scale)
    assert [p.name for p in path.parent.iterdir()] == ["w.safetensors"]


def edit(path: Path, change: Callable[[dict[str, torch.Tensor], dict[str, str]], object]) -> None:
    from safetensors import safe_open

    with safe_open(path, "pt") as file:
        metadata = dict(file.metadata())
    tensors = load_file(path)
    change(tensors, metadata)
    save_file(tensors, path, metadata)


@pytest.mark.parametrize("version", [LAYOUT_VERSION + 1, LAYOUT_VERSION - 1, None])
def test_other_layout_versions_are_refused_by_name(tmp_path: Path, version: int | None) -> None:
    path = tmp_path / "w.safetensors"
    packed().save(path)
    if version is None:
        edit(path, lambda _, metadata: metadata.pop("layout_version"))
    else:
        edit(path, lambda _, metadata: metadata.update(layout_version=str(version)))
    with pytest.raises(ArgumentError, match=r"w\.safetensors: layout_version: got"):
        Packed.load(path)


def test_files_that_contradict_themselves_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "w.safetensors"

    def nan_scale(tensors: dict[str, torch.Tensor], _: dict[str, str]) -> None:
        tensors["scale"][3] = math.nan

    changes: list[tuple[Callable[..., object], str]] = [
        (nan_scale, r"gate_up\.scale"),
        (lambda tensors, _: tensors.pop("scale"), r"gate_up\.scale"),
        (lambda tensors, _: tensors.pop("codes"), "codes"),
        (lambda _, metadata: metadata.pop("order"), "order"),
        (lambda _, metadata: metadata.update(order="{"), "unreadable"),
        (lambda _, metadata: metadata.update(order='{"ranges": [{"a": 1}], "unit": 32}'), "unrea"),
        (lambda _, metadata: metadata.update(format="bf16"), r"codes\.dtype"),
        (lambda _, metadata: metadata.update(shape=json.dumps([64, 25, 1])), "unreadable"),
        (lambda _, metadata: metadata.update(shape=json.dumps([64, 33])), r"gate_up\.codes"),
    ]
    for change, named in changes:
        packed().save(path)
        edit(path, change)
        with pytest.raises(ArgumentError, match=named):
            Packed.load(path)


def test_a_failed_save_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import safetensors.torch

    path = tmp_path / "w.safetensors"
    first = packed()
    first.save(path)

    def half_written(tensors: object, file: Path, metadata: object) -> None:
        file.write_bytes(b"half")
        raise OSError("disk full")

    monkeypatch.setattr(safetensors.torch, "save_file", half_written)
    with pytest.raises(OSError, match="disk full"):
        packed().save(path)
    assert torch.equal(raw(Packed.load(path).codes), raw(first.codes))
    assert list(tmp_path.iterdir()) == [path]


def test_moving_keeps_everything_else() -> None:
    found = packed()
    moved = found.to("meta")
    assert moved.device.type == "meta"
    assert moved.scale is not None
    assert moved.scale.device.type == "meta"
    assert (moved.order, moved.shape, moved.name) == (found.order, found.shape, found.name)
    assert found.nbytes == 64 * 32 + 64 * 4


def test_weights_print_as_one_line_without_their_values() -> None:
    weight = Weight(torch.ones(64, 32), "w")
    codes = weight.quantize("fp8")
    order = RowOrder.plain(64)
    assert repr(weight) == "Weight('w', torch.float32, (64, 32) on cpu)"
    assert repr(Weight(weight.values, "w", tied=True)).endswith("on cpu, tied)")
    assert repr(codes) == "Quantized('w', fp8, (64, 32) on cpu)"
    assert repr(codes.pack(order)) == f"Packed('w', fp8, (64, 32) on cpu, order [{order}])"
    assert repr(codes.pack(order).to("meta")).startswith("Packed('w', fp8, (64, 32) on meta, ")
    for found in (weight, codes, codes.pack(order)):
        assert str(found) == repr(found)
        assert "\n" not in repr(found)


@pytest.mark.parametrize("content", [b"", b"not a file of tensors", b"\x08\0\0\0\0\0\0\0{]}"])
def test_what_is_no_safetensors_file_is_refused_by_its_path(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "garbage.safetensors"
    path.write_bytes(content)
    with pytest.raises(ArgumentError, match=r"garbage.safetensors: got a file that .*Fix: write"):
        Packed.load(path)


def test_what_is_no_order_is_refused_with_the_call() -> None:
    quantized = Weight(torch.randn(64, 32)).quantize("bf16")

    class Composition:
        def row_order(self, columns: int) -> RowOrder:
            return RowOrder.plain(columns)

    for order, came in ((64, "64"), (Composition(), "Composition"), (None, "NoneType")):
        said = rf"order: got {came}, expected a RowOrder.*pack\(epilogue.row_order\(64\)\)"
        with pytest.raises(ArgumentError, match=said):
            quantized.pack(order)  # type: ignore[arg-type]


def test_the_fix_for_another_order_is_python_whatever_the_weight_is_called() -> None:
    packed = Weight(torch.randn(64, 32), "gate+up").quantize("bf16").pack(RowOrder.plain(64))
    with pytest.raises(ArgumentError) as caught:
        packed.require_order(RowOrder((Range("halves", 64),), 64), "the composition")
    fix = str(caught.value).partition("pack again: ")[2]
    assert fix == "packed.unpack().pack(epilogue.row_order(64))"
