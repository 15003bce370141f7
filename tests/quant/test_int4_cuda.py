"""INT4 on a device: the codes, grids and bytes that the CPU makes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from epicute.layouts import CHANNEL, Range, RowOrder
from epicute.quant import (
    ClipSearch,
    GptqConfig,
    GptqRun,
    Hessian,
    Int4Codes,
    Int4Grid,
    Linear,
    quantize_gptq,
    quantize_int4,
)
from epicute.weights import FORMATS, FragmentPacked, Weight

pytestmark = pytest.mark.gpu

GRIDS = [Int4Grid(), Int4Grid(32, False), Int4Grid(CHANNEL, scale_dtype=torch.bfloat16)]


def same(found: Int4Codes, wanted: Int4Codes) -> None:
    assert found.codes.device.type == "cuda"
    assert torch.equal(found.codes.cpu(), wanted.codes)
    assert torch.equal(found.scale.cpu(), wanted.scale)
    assert (found.zero is None) == (wanted.zero is None)
    if found.zero is not None and wanted.zero is not None:
        assert torch.equal(found.zero.cpu(), wanted.zero)


@pytest.mark.parametrize("grid", GRIDS)
@pytest.mark.parametrize("clip", [None, ClipSearch(steps=5)])
def test_rounding_is_that_of_the_cpu(grid: Int4Grid, clip: ClipSearch | None) -> None:
    w = torch.randn(200, 576, generator=torch.Generator().manual_seed(2))
    same(quantize_int4(w.cuda(), grid, clip), quantize_int4(w, grid, clip))


@pytest.mark.parametrize("grid", GRIDS)
def test_gptq_is_that_of_the_cpu(grid: Int4Grid, tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(3)
    w = torch.randn(96, 300, generator=generator)
    x = torch.randn(800, 60, generator=generator) @ torch.randn(60, 300, generator=generator)
    hessians = {}
    for device in ("cpu", "cuda"):
        hessians[device] = Hessian(300, device)
        hessians[device].add(x)
    config = GptqConfig(grid)
    found = quantize_gptq(w.cuda(), hessians["cuda"].matrix, config)
    wanted = quantize_gptq(w, hessians["cpu"].matrix, config)
    same(found.codes, wanted.codes)
    assert found.error == pytest.approx(wanted.error, rel=1e-6)
    assert found.error < found.nearest
    run = GptqRun(tmp_path, config, calibration="noise", device="cuda")
    streamed = run.linear(Linear("w", lambda: w, lambda: [x]))
    assert streamed.codes.codes.device.type == "cpu"
    assert torch.equal(streamed.codes.codes, wanted.codes.codes)


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("tiles", [1, 4])
def test_packs_are_those_of_the_cpu(format: str, tiles: int) -> None:
    order = RowOrder((Range("halves", 192),), 64)
    grid = Int4Grid(64, False) if format == "int4" else None
    source = Weight(torch.randn(192, 1100)).quantize(format, grid)
    on_device = Weight(source.dequantize().cuda()) if format == "bf16" else None
    packed = source.pack_fragments(order, tiles)
    moved = packed.to("cuda")
    assert torch.equal(moved.unpack().codes.cpu().view(torch.uint8), source.codes.view(torch.uint8))
    if on_device is not None:
        found = on_device.quantize(format).pack_fragments(order, tiles)
        assert torch.equal(found.data.cpu(), packed.data)


def test_files_load_on_the_device(tmp_path: Path) -> None:
    packed = Weight(torch.randn(64, 256)).quantize("int4").pack_fragments(RowOrder.plain(64))
    packed.save(tmp_path / "w.safetensors")
    loaded = FragmentPacked.load(tmp_path / "w.safetensors", "cuda")
    assert loaded.device.type == "cuda"
    assert torch.equal(loaded.data.cpu(), packed.data)
