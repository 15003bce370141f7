"""INT4 checkpoints of others: bit for bit what was written, and what does not fit refused by name."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from epicute.errors import ArgumentError, EpicuteError, UnsupportedError
from epicute.layouts import CHANNEL, GROUPS, RowOrder
from epicute.quant import Int4Codes
from epicute.weights import QuantizedInt4
from epicute.weights.importers import (
    Awq,
    Checkpoint,
    CompressedTensors,
    Format,
    Gptq,
    detect,
    open_checkpoint,
)
from tests.weights import exporters

P = "model.layers.0.mlp.up_proj"
WRITERS: dict[str, Callable[[Int4Codes], dict[str, torch.Tensor]]] = {
    "gptq": lambda q: exporters.gptq(q, P, 1),
    "gptq_v2": lambda q: exporters.gptq(q, P, 2),
    "awq": lambda q: exporters.awq(q, P),
    "compressed-tensors": lambda q: exporters.compressed_tensors(q, P),
}


def format_of(kind: str, group: int, symmetric: bool) -> Format:
    if kind == "awq":
        return Awq(group, symmetric)
    if kind == "compressed-tensors":
        return CompressedTensors(group, symmetric)
    return Gptq(2 if kind == "gptq_v2" else 1, group, symmetric)


def codes(
    columns: int = 16, width: int = 256, group: int = 128, symmetric: bool = True, seed: int = 0
) -> Int4Codes:
    generator = torch.Generator().manual_seed(seed)
    q = torch.randint(0, 16, (columns, width), generator=generator, dtype=torch.uint8)
    shape = (columns, 1 if group == CHANNEL else -(-width // group))
    scale = torch.rand(shape, generator=generator).half()
    zero = None
    if not symmetric:
        zero = torch.randint(0, 16, shape, generator=generator, dtype=torch.uint8)
    return Int4Codes(q, scale, zero, group, P)


@st.composite
def cases(draw: st.DrawFn) -> tuple[str, Int4Codes]:
    kind = draw(st.sampled_from(list(WRITERS)))
    columns, width = 8 * draw(st.integers(1, 6)), 8 * draw(st.integers(1, 50))
    if kind == "compressed-tensors":
        columns, width = columns - draw(st.integers(0, 7)), width - draw(st.integers(0, 7))
    group = draw(st.sampled_from([*GROUPS, CHANNEL]))
    seed = draw(st.integers(0, 2**32 - 1))
    return kind, codes(columns, width, group, draw(st.booleans()), seed)


@given(cases())
def test_round_trips_are_bit_exact(case: tuple[str, Int4Codes]) -> None:
    kind, source = case
    read = format_of(kind, source.group, source.zero is None)
    found = Checkpoint(WRITERS[kind](source), read).linear(P)
    assert torch.equal(found.codes, source.codes)
    assert torch.equal(found.scales, source.scale)
    assert found.scales.dtype == source.scale.dtype
    assert found.group == source.group
    if source.zero is None or (source.zero == 8).all():
        assert found.zero is None
    else:
        assert found.zero is not None
        assert torch.equal(found.zero, source.zero)
    assert found.name == P
    assert found.codes.is_contiguous()
    again = found.pack_fragments(RowOrder.plain(found.codes.shape[0])).unpack()
    assert torch.equal(again.codes, found.codes)
    assert torch.equal(again.dequantize(), source.dequantize())


def test_the_gain_of_imported_weights_is_an_operand() -> None:
    for kind, write in WRITERS.items():
        found = Checkpoint(write(codes()), format_of(kind, 128, True)).linear(P)
        assert found.gain_operand
        packed = found.pack_fragments(RowOrder.plain(16))
        assert packed.gain_operand
        unpacked = packed.unpack()
        assert isinstance(unpacked, QuantizedInt4)
        assert unpacked.gain_operand
        with pytest.raises(ArgumentError, match=f"^{P}: got a gain"):
            found.fold_gain(torch.ones(256))


def test_words_spelled_out() -> None:
    """One word of each format, as a number."""
    ramp = torch.arange(8, dtype=torch.uint8)
    source = Int4Codes(ramp.repeat(8, 1), torch.ones(8, 1).half(), None, CHANNEL, P)
    assert exporters.gptq(source, P)[f"{P}.qweight"][0, 0].item() == 0x76543210
    assert exporters.gptq(source, P, 1)[f"{P}.qzeros"].item() == 0x77777777
    assert exporters.gptq(source, P, 2)[f"{P}.qzeros"].item() == 0x88888888 - 2**32
    assert exporters.compressed_tensors(source, P)[f"{P}.weight_packed"][0, 0].item() == 0x76543210
    down = Int4Codes(ramp.repeat(8, 1).t(), torch.ones(8, 1).half(), None, CHANNEL, P)
    assert exporters.awq(down, P)[f"{P}.qweight"][0, 0].item() == 0x75316420


def test_iw_03_symmetric_zeros_as_both_versions_store_them() -> None:
    eights = Int4Codes(
        torch.full((8, 128), 8, dtype=torch.uint8), torch.ones(8, 1).half(), None, 128, P
    )
    for version, stored in ((1, 0x77777777), (2, 0x88888888 - 2**32)):
        tensors = exporters.gptq(eights, P, version)
        assert (tensors[f"{P}.qzeros"] == stored).all()
        found = Checkpoint(tensors, Gptq(version)).linear(P)
        assert (found.dequantize() == 0).all()
        assert found.zero is None
        with pytest.raises(ArgumentError, match=rf"{P}\.qzeros: got zero point .*v1 stores"):
            Checkpoint(tensors, Gptq(3 - version)).linear(P)


def test_iw_03_an_explicit_format_reads_a_wrong_label(tmp_path: Path) -> None:
    source = codes()
    save_file(exporters.gptq(source, P, 2), tmp_path / "model.safetensors")
    config = {"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": True}
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": config}))
    with pytest.raises(ArgumentError, match="qzeros"):
        open_checkpoint(tmp_path).linear(P)
    found = open_checkpoint(tmp_path, Gptq(2)).linear(P)
    assert torch.equal(found.dequantize(), source.dequantize())


@pytest.mark.parametrize("kind", list(WRITERS))
def test_iw_04_zero_points_0_and_15(kind: str) -> None:
    ramp = torch.arange(16, dtype=torch.uint8).repeat(16, 4)
    zero = torch.tensor([[0, 15]] * 8 + [[15, 0]] * 8, dtype=torch.uint8)
    source = Int4Codes(ramp, torch.ones(16, 2).half(), zero, 32, P)
    found = Checkpoint(WRITERS[kind](source), format_of(kind, 32, False)).linear(P)
    values = found.dequantize()
    assert values[0, :16].tolist() == list(range(16))
    assert values[0, 32:48].tolist() == list(range(-15, 1))
    assert values[8, :16].tolist() == list(range(-15, 1))


def test_iw_06_other_groups_are_refused() -> None:
    for make in (Gptq, Awq, CompressedTensors):
        with pytest.raises(UnsupportedError, match="^group.*got 256.*32, 64, 128 or -1"):
            make(group=256)


@pytest.mark.parametrize("kind", list(WRITERS))
def test_iw_07_a_last_group_that_k_leaves_unfinished(kind: str) -> None:
    source = codes(16, 576, 128)
    found = Checkpoint(WRITERS[kind](source), format_of(kind, 128, True)).linear(P)
    assert torch.equal(found.dequantize(), source.dequantize())


@pytest.mark.parametrize("kind", list(WRITERS))
def test_iw_08_scales_of_another_group_are_refused(kind: str) -> None:
    field = "weight_scale" if kind == "compressed-tensors" else "scales"
    tensors = WRITERS[kind](codes(16, 4096, 128))
    with pytest.raises(ArgumentError, match=rf"^{P}\.{field}: got .*groups of 64"):
        Checkpoint(tensors, format_of(kind, 64, True)).linear(P)


@pytest.mark.parametrize("field", ["g_idx", "weight_g_idx"])
def test_iw_09_activation_order_is_refused_and_trivial_order_is_not(field: str) -> None:
    kind = "gptq" if field == "g_idx" else "compressed-tensors"
    source = codes(16, 256, 128)
    tensors = WRITERS[kind](source)
    wanted = Checkpoint(tensors, format_of(kind, 128, True)).linear(P).dequantize()
    ordered = format_of(kind, 128, True)
    assert isinstance(ordered, Gptq | CompressedTensors)
    declared = type(ordered)(group=128, symmetric=True, act_order=True)
    trivial = (torch.arange(256) // 128).to(torch.int32)
    found = Checkpoint(tensors | {f"{P}.{field}": trivial}, declared).linear(P)
    assert torch.equal(found.dequantize(), wanted)
    shuffled = trivial.clone()
    shuffled[[3, 200]] = shuffled[[200, 3]]
    for format in (ordered, declared):
        with pytest.raises(UnsupportedError, match=rf"^{P}\.{field}\[3\]: got group 1, expected 0"):
            Checkpoint(tensors | {f"{P}.{field}": shuffled}, format).linear(P)
    uneven = trivial.clone()
    uneven[120:128] = 1
    with pytest.raises(UnsupportedError, match=rf"^{P}\.{field}\[120\]"):
        Checkpoint(tensors | {f"{P}.{field}": uneven}, ordered).linear(P)
    missing = {name: t for name, t in tensors.items() if not name.endswith("g_idx")}
    with pytest.raises(UnsupportedError, match=rf"^{P}\.{field}: got no such tensor"):
        Checkpoint(missing, declared).linear(P)
    with pytest.raises(ArgumentError, match=rf"^{P}\.{field}: got \(255,\)"):
        Checkpoint(tensors | {f"{P}.{field}": trivial[:255]}, ordered).linear(P)


def test_activation_order_with_one_group_is_no_order() -> None:
    source = codes(16, 256, CHANNEL)
    for tensors in (exporters.gptq(source, P), exporters.gptq(source, P, g_idx=False)):
        found = Checkpoint(tensors, Gptq(group=CHANNEL, act_order=True)).linear(P)
        assert torch.equal(found.dequantize(), source.dequantize())


def test_float32_scales_are_read_where_16_bits_hold_them() -> None:
    for dtype in (torch.float16, torch.bfloat16):
        source = codes()
        scale = torch.rand(16, 2).to(dtype)
        tensors = exporters.compressed_tensors(source, P)
        tensors[f"{P}.weight_scale"] = scale.float()
        found = Checkpoint(tensors, CompressedTensors()).linear(P)
        assert torch.equal(found.scales.float(), scale.float())
    tensors[f"{P}.weight_scale"] = torch.rand(16, 2)
    with pytest.raises(UnsupportedError, match=rf"^{P}\.weight_scale: got float32 values"):
        Checkpoint(tensors, CompressedTensors()).linear(P)


GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": True, "desc_act": False}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 64, "zero_point": True, "version": "gemm"}
WEIGHTS: dict[str, Any] = {
    "num_bits": 4,
    "type": "int",
    "symmetric": True,
    "strategy": "group",
    "group_size": 128,
}
CT: dict[str, Any] = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "config_groups": {"group_0": {"targets": ["Linear"], "weights": WEIGHTS}},
    "ignore": ["lm_head"],
}


def ct(**change: Any) -> dict[str, Any]:
    return CT | {"config_groups": {"group_0": {"weights": WEIGHTS | change}}}


@pytest.mark.parametrize(
    ("config", "wanted"),
    [
        (GPTQ, Gptq(1, 128, True)),
        (GPTQ | {"checkpoint_format": "gptq_v2", "sym": False}, Gptq(2, 128, False)),
        (GPTQ | {"desc_act": True, "group_size": -1}, Gptq(1, CHANNEL, True, True)),
        (GPTQ | {"dynamic": {"-:lm_head": {}, "+:.*k_proj": {"bits": 4}}}, Gptq(1, 128, True)),
        ({k: v for k, v in GPTQ.items() if k != "quant_method"}, Gptq(1, 128, True)),
        (AWQ, Awq(64, False)),
        (
            {"quant_method": "awq", "w_bit": 4, "q_group_size": 32, "zero_point": False},
            Awq(32, True),
        ),
        (CT, CompressedTensors(128, True)),
        (ct(symmetric=False, group_size=32), CompressedTensors(32, False)),
        (ct(strategy="channel", group_size=None), CompressedTensors(CHANNEL, True)),
        (ct(actorder="weight"), CompressedTensors(128, True)),
        (ct(actorder="group"), CompressedTensors(128, True, True)),
    ],
)
def test_configurations_that_are_read(config: dict[str, Any], wanted: Format) -> None:
    assert detect(config) == wanted


@pytest.mark.parametrize(
    ("config", "named"),
    [
        (
            {"quant_method": "bitsandbytes", "load_in_4bit": True},
            "quant_method: got 'bitsandbytes'",
        ),
        ({"quant_method": "hqq"}, "quant_method: got 'hqq'"),
        ({}, "quant_method: got None"),
        (GPTQ | {"bits": 3}, "bits: got 3"),
        (GPTQ | {"bits": 8}, "bits: got 8"),
        (GPTQ | {"group_size": 256}, "group_size: got 256"),
        (GPTQ | {"checkpoint_format": "marlin"}, "checkpoint_format: got 'marlin'"),
        (GPTQ | {"is_marlin_format": True}, "is_marlin_format: got True"),
        (GPTQ | {"pack_dtype": "int16"}, "pack_dtype: got 'int16'"),
        (GPTQ | {"dynamic": {"+:.*down_proj": {"bits": 8}}}, r"dynamic\['\+:.*'\]\.bits: got 8"),
        (GPTQ | {"dynamic": {".*q_proj": {"group_size": 32}}}, r"dynamic.*\.group_size: got 32"),
        (AWQ | {"version": "gemv"}, "version: got 'gemv'"),
        (AWQ | {"bits": 8}, "bits: got 8"),
        (CT | {"format": "marlin-24"}, "format: got 'marlin-24'"),
        (CT | {"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparsity_config.format"),
        (ct(num_bits=8), r"config_groups\.group_0\.weights\.num_bits: got 8"),
        (ct(type="float"), r"weights\.type: got 'float'"),
        (ct(strategy="tensor"), r"weights\.strategy: got 'tensor'"),
        (ct(group_size=16), r"weights\.group_size: got 16"),
        (ct(dynamic=True), r"weights\.dynamic: got True"),
        (ct(actorder="odd"), r"weights\.actorder: got 'odd'"),
        (CT | {"config_groups": {"g": {"weights": None}}}, r"config_groups\.g\.weights: got None"),
        (CT | {"config_groups": {"g": 4}}, r"config_groups\.g: got 4"),
        (
            CT
            | {"config_groups": {"g": {"weights": WEIGHTS, "input_activations": {"num_bits": 8}}}},
            r"config_groups\.g\.input_activations",
        ),
        (
            CT | {"config_groups": {"g": {"weights": WEIGHTS, "format": "int-quantized"}}},
            r"config_groups\.g\.format: got 'int-quantized'",
        ),
        (
            CT
            | {
                "config_groups": {
                    "a": {"weights": WEIGHTS},
                    "b": {"weights": WEIGHTS | {"group_size": 32}},
                }
            },
            "config_groups: got .*'a'.*'b'",
        ),
        (CT | {"config_groups": {}}, "config_groups: got {}"),
    ],
)
def test_configurations_that_are_refused(config: dict[str, Any], named: str) -> None:
    with pytest.raises(UnsupportedError, match=named):
        detect(config)


@pytest.mark.parametrize("field", ["group_size", "sym"])
def test_a_field_that_is_needed(field: str) -> None:
    with pytest.raises(ArgumentError, match=rf"quantization_config\.{field}: got nothing"):
        detect({k: v for k, v in GPTQ.items() if k != field})


def changed(kind: str, **change: torch.Tensor | None) -> dict[str, torch.Tensor]:
    tensors = WRITERS[kind](codes(16, 256, 128, kind == "compressed-tensors"))
    for field, tensor in change.items():
        if tensor is None:
            tensors.pop(f"{P}.{field}")
        else:
            tensors[f"{P}.{field}"] = tensor
    return tensors


INT32 = torch.zeros(16, 32, dtype=torch.int32)


@pytest.mark.parametrize(
    ("kind", "change", "named", "error"),
    [
        ("gptq", {"qweight": INT32.long()}, "qweight", ArgumentError),
        ("gptq", {"qweight": INT32[0]}, "qweight", ArgumentError),
        ("gptq", {"scales": None}, "scales: got no such tensor", ArgumentError),
        ("gptq", {"qzeros": None}, "qzeros: got no such tensor", ArgumentError),
        ("gptq", {"qzeros": INT32}, "qzeros", ArgumentError),
        ("gptq", {"scales": torch.full((2, 16), np.inf).half()}, "scales", ArgumentError),
        ("gptq", {"scales": torch.ones(2, 16, dtype=torch.float64)}, "scales", ArgumentError),
        ("gptq", {"B": INT32}, "B: got a tensor of Marlin", UnsupportedError),
        ("gptq", {"W_q": INT32}, "W_q: got a tensor of HQQ", UnsupportedError),
        ("awq", {"qweight": INT32[0]}, "qweight", ArgumentError),
        ("awq", {"qzeros": INT32}, "qzeros", ArgumentError),
        ("awq", {"scales": None}, "scales", ArgumentError),
        ("compressed-tensors", {"weight_shape": None}, "weight_shape", ArgumentError),
        ("compressed-tensors", {"weight_shape": torch.tensor([16])}, "weight_shape", ArgumentError),
        (
            "compressed-tensors",
            {"weight_shape": torch.tensor([16, 99])},
            "weight_packed",
            ArgumentError,
        ),
        ("compressed-tensors", {"weight_zero_point": INT32}, "weight_zero_point", ArgumentError),
        (
            "compressed-tensors",
            {"weight_scale": torch.ones(16, 2).int()},
            "weight_scale",
            ArgumentError,
        ),
    ],
)
def test_tensors_that_do_not_fit_are_refused(
    kind: str, change: dict[str, Any], named: str, error: type[EpicuteError]
) -> None:
    read = format_of(kind, 128, kind == "compressed-tensors")
    with pytest.raises(error, match=rf"^{P}\.{named}"):
        Checkpoint(changed(kind, **change), read).linear(P)


@pytest.mark.parametrize("kind", ["gptq", "awq"])
def test_a_linear_of_other_bits_is_refused(kind: str) -> None:
    """Eight bits take twice the words: seen from 4 bits, another K or N than the scales'."""
    tensors = WRITERS[kind](codes(16, 256, 128))
    axis = 0 if kind == "gptq" else 1
    words = tensors[f"{P}.qweight"]
    tensors[f"{P}.qweight"] = torch.cat([words, words], axis)
    with pytest.raises(ArgumentError, match=rf"^{P}\.scales"):
        Checkpoint(tensors, format_of(kind, 128, True)).linear(P)


def test_the_expected_shape_is_compared() -> None:
    tensors = exporters.gptq(codes(16, 256, CHANNEL), P, g_idx=False)
    checkpoint = Checkpoint(tensors, Gptq(group=CHANNEL))
    assert checkpoint.linear(P, (16, 256)).codes.shape == (16, 256)
    with pytest.raises(ArgumentError, match=rf"^{P}\.qweight: got .*\(16, 256\) in 4 bits"):
        checkpoint.linear(P, (16, 128))


def test_an_asymmetric_checkpoint_needs_its_zero_points() -> None:
    tensors = exporters.compressed_tensors(codes(), P)
    with pytest.raises(ArgumentError, match=rf"^{P}\.weight_zero_point: got no such tensor"):
        Checkpoint(tensors, CompressedTensors(symmetric=False)).linear(P)


def test_zero_points_of_a_symmetric_checkpoint_are_looked_at() -> None:
    tensors = exporters.compressed_tensors(codes(symmetric=False), P)
    with pytest.raises(ArgumentError, match=rf"^{P}\.weight_zero_point: got zero point"):
        Checkpoint(tensors, CompressedTensors()).linear(P)


class TestFolder:
    @pytest.fixture
    def folder(self, tmp_path: Path) -> Path:
        """Two files, one quantised linear in each, and a plain one."""
        for i, seed in enumerate((1, 2)):
            name = f"model.layers.{i}.self_attn.q_proj"
            tensors = exporters.gptq(codes(seed=seed), name)
            tensors[f"model.layers.{i}.input_layernorm.weight"] = torch.ones(256)
            save_file(tensors, tmp_path / f"model-{i}.safetensors")
        save_file({"lm_head.weight": torch.ones(8, 256)}, tmp_path / "other.safetensors")
        (tmp_path / "config.json").write_text(json.dumps({"quantization_config": GPTQ}))
        return tmp_path

    def test_linears_are_listed_and_read(self, folder: Path) -> None:
        checkpoint = open_checkpoint(folder)
        names = [f"model.layers.{i}.self_attn.q_proj" for i in (0, 1)]
        assert checkpoint.linears() == names
        assert checkpoint.format == Gptq()
        for name, seed in zip(names, (1, 2), strict=True):
            found = checkpoint.linear(name)
            assert torch.equal(found.dequantize(), codes(seed=seed).dequantize())
        fused = QuantizedInt4.concat([checkpoint.linear(name) for name in names])
        assert fused.gain_operand
        assert len(checkpoint.tensors) == len(list(checkpoint.tensors)) == 11

    def test_a_plain_linear_is_refused(self, folder: Path) -> None:
        with pytest.raises(
            ArgumentError, match=r"lm_head\.qweight: got lm_head\.weight, which is not"
        ):
            open_checkpoint(folder).linear("lm_head")
        with pytest.raises(ArgumentError, match=r"mlp\.qweight: got no such tensor"):
            open_checkpoint(folder).linear("mlp")

    def test_other_files_of_configuration(self, folder: Path) -> None:
        (folder / "config.json").write_text(json.dumps({"model_type": "llama"}))
        with pytest.raises(ArgumentError, match="got no quantization_config"):
            open_checkpoint(folder)
        (folder / "quantize_config.json").write_text(json.dumps(GPTQ))
        assert open_checkpoint(folder).format == Gptq()
        (folder / "quantize_config.json").write_text("{")
        with pytest.raises(ArgumentError, match=r"quantize_config\.json: got .*expected JSON"):
            open_checkpoint(folder)

    def test_a_tensor_in_two_files_is_refused(self, folder: Path) -> None:
        save_file({"lm_head.weight": torch.ones(8, 256)}, folder / "copy.safetensors")
        with pytest.raises(ArgumentError, match=r"^lm_head\.weight: got in .*copy"):
            open_checkpoint(folder)

    def test_an_empty_folder_is_refused(self, tmp_path: Path) -> None:
        with pytest.raises(ArgumentError, match=r"no \*\.safetensors file"):
            open_checkpoint(tmp_path, Gptq())

    def test_a_state_dict_needs_its_format(self) -> None:
        tensors = exporters.gptq(codes(), P)
        with pytest.raises(ArgumentError, match="^format: got None"):
            open_checkpoint(tensors)
        assert open_checkpoint(tensors, Gptq()).linears() == [P]


def test_an_unknown_version_is_refused() -> None:
    with pytest.raises(ArgumentError, match="^version: got 3"):
        Gptq(version=3)
