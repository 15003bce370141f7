"""Checkpoints that were quantised by others: the same codes, served with the norms' gains as operands, or decoded."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig

from epicute.errors import ArgumentError, EpicuteError, UnsupportedError
from epicute.models.block_spec import PROJECTIONS
from epicute.models.config import ModelConfig
from epicute.models.folder import SINGLE
from epicute.models.gpu_backend import GpuBackend
from epicute.models.layer_weights import PARTS
from epicute.models.llama import Llama
from epicute.models.smollm2 import CheckpointError
from epicute.models.stored_model import StoredModel
from epicute.testing import Budget, assert_equal_bits, assert_within
from tests.models.cpu_kernels import Launches
from tests.models.folders import FAMILIES, SIZES, random_model, save
from tests.models.quantised_folders import CONFIGS, FP8S, INT4S, configure, fp8_config, quantised

FLOAT32 = Budget(norm=2e-5, worst_row=1e-4)
Q = "model.layers.1.self_attn.q_proj"


def prompt(length: int = 40, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(SIZES["vocab_size"], (length,), generator=generator).tolist()


def logits_of(model: Any, ids: list[int]) -> torch.Tensor:
    with torch.no_grad():
        return model(torch.tensor([ids])).logits[0]


def answers(model: Llama, ids: list[int]) -> torch.Tensor:
    return model.prefill(ids, model.new_cache(1, 64, page_size=16), logits="all")


def on_gpu(folder: Path, **options: Any) -> Llama:
    """The model as a GPU would run it, kernels evaluated."""
    config = ModelConfig.from_folder(folder)
    stored = StoredModel.open(folder, config)
    form = options.setdefault("weights", stored.form)
    if form == stored.form == "int4":
        options["int4"] = stored.int4
    backend = GpuBackend(
        config,
        stored.tensors(form),
        device="cpu",
        kernels=Launches().kernels,
        max_rows=64,
        page_size=16,
        **options,
    )
    return Llama(config, backend, "cpu")


def rewrite(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = {n: x.clone() for n, x in load_file(folder / SINGLE).items()}
    change(tensors)
    save_file(tensors, folder / SINGLE)


# --- numbers ---


@pytest.mark.parametrize(
    ("kind", "family"),
    [*((kind, "llama") for kind in CONFIGS), ("GPTQ", "qwen2"), ("AutoFP8", "gemma with SiLU")],
)
def test_its_values_are_those_of_transformers_with_the_decoded_weights(
    kind: str, family: str, tmp_path: Path
) -> None:
    decoded = quantised(random_model(FAMILIES[family]), tmp_path, kind)
    mine = Llama.from_folder(tmp_path, device="cpu", weights="exact")
    ids = prompt()
    assert_within(answers(mine, ids), logits_of(decoded, ids), FLOAT32)


@pytest.mark.parametrize("kind", ["fp8 channels", "transformers fp8"])
def test_fp8_codes_are_multiplied_as_they_are(kind: str, tmp_path: Path) -> None:
    """By default; every layer's packed codes are the checkpoint's, and logits those of the values to FP8's rounding."""
    decoded = quantised(random_model(FAMILIES["qwen3"]), tmp_path, kind)
    tensors = load_file(tmp_path / SINGLE)
    mine = on_gpu(tmp_path, scaling="row")
    assert mine.backend.spec.format == "fp8"
    for i, block in enumerate(mine.backend.blocks):
        for name in PROJECTIONS:
            found = getattr(block.weights, name).unpack()
            parts = [f"model.layers.{i}.{part}.weight" for part in PARTS[name]]
            assert_equal_bits(found.codes, torch.cat([tensors[part] for part in parts]))
    ids = prompt()
    exact = logits_of(decoded, ids)
    budget = Budget(0.35, 0.7)
    assert_within(answers(mine, ids), exact, budget)
    here = Llama.from_folder(tmp_path, device="cpu", scaling="row")
    assert_within(answers(here, ids), exact, budget)
    assert_within(answers(mine, ids), answers(here, ids), Budget(0.1, 0.2))


@pytest.mark.parametrize(
    ("scaling", "family"), [("delayed", "gemma with SiLU"), ("delayed", "qwen2"), ("row", "llama")]
)
def test_gains_that_no_weight_takes_in_go_into_the_codes(
    scaling: str, family: str, tmp_path: Path
) -> None:
    """Both backends against each other, layer by layer: gains lie between 0.1 and 2, so that one left out shows."""
    quantised(random_model(FAMILIES[family]), tmp_path, "fp8 channels")
    models = [
        on_gpu(tmp_path, scaling=scaling),
        Llama.from_folder(tmp_path, device="cpu", scaling=scaling),
    ]
    ids = prompt()
    caches = [model.new_cache(1, 64, page_size=16) for model in models]
    found = [m.prefill(ids, c, logits="all") for m, c in zip(models, caches, strict=True)]
    assert_within(found[0], found[1], Budget(0.15, 0.3))
    for layer in range(2):
        keys = [cache.dense_keys(layer)[0, : len(ids)].flatten(1) for cache in caches]
        assert_within(keys[0], keys[1], Budget(0.03 + 0.07 * layer, 0.15 + 0.15 * layer))
    gains = models[0].backend.blocks[0].weights
    assert gains.x_gain.std() > 0.1
    assert_equal_bits(gains.y_gain, models[0].backend.blocks[1].weights.x_gain)
    assert models[0].backend.blocks[-1].weights.y_gain is None


@pytest.mark.parametrize("kind", INT4S)
def test_int4_codes_are_read_as_they_are(kind: str, tmp_path: Path) -> None:
    """By default; the same step by step as in one piece, and near what float32 makes of the values."""
    decoded = quantised(random_model(FAMILIES["llama"]), tmp_path, kind)
    mine = Llama.from_folder(tmp_path, device="cpu")
    assert mine.backend.weights == "int4"
    stored = StoredModel.open(tmp_path, mine.config)
    layer = mine.backend._layers[1]
    parts = [f"model.layers.1.{part}.weight" for part in PARTS["qkv"]]
    wanted = torch.cat([stored.int4[part].dequantize() for part in parts]).double()
    assert_equal_bits(layer.matrix("qkv"), wanted)
    ids = prompt()
    exact = logits_of(decoded, ids)
    for model in (mine, on_gpu(tmp_path)):
        assert_within(answers(model, ids), exact, Budget(0.03, 0.08))


@pytest.mark.parametrize("kind", ["fp8 channels", "GPTQ"])
def test_any_other_form_decodes_first(kind: str, tmp_path: Path) -> None:
    decoded = quantised(random_model(FAMILIES["llama"]), tmp_path, kind)
    ids = prompt()
    exact = logits_of(decoded, ids)
    for model in (
        Llama.from_folder(tmp_path, device="cpu", weights="bf16"),
        on_gpu(tmp_path, weights="bf16"),
    ):
        assert_within(answers(model, ids), exact, Budget(0.03, 0.08))
    other = "int4" if kind in FP8S else "fp8"
    twice = Llama.from_folder(tmp_path, device="cpu", weights=other, scaling="row")
    assert_within(answers(twice, ids), exact, Budget(0.7, 1.0))


@pytest.mark.parametrize("kind", ["fp8 tensors", "AWQ"])
def test_a_quantised_head_is_decoded(kind: str, tmp_path: Path) -> None:
    config = LlamaConfig(**{**SIZES, "vocab_size": 192}, head_dim=16)
    decoded = quantised(random_model(config), tmp_path, kind, head=True)
    mine = Llama.from_folder(tmp_path, device="cpu", weights="exact")
    ids = prompt()
    assert_within(answers(mine, ids), logits_of(decoded, ids), FLOAT32)


def test_ge_05_each_shard_keeps_the_scale_of_its_tensor(tmp_path: Path) -> None:
    quantised(random_model(FAMILIES["llama"]), tmp_path, "fp8 tensors")
    rewrite(tmp_path, lambda t: t.update({f"{Q}.weight_scale": t[f"{Q}.weight_scale"] * 100}))
    scale = on_gpu(tmp_path).backend.blocks[1].weights.qkv.scale
    tensors = load_file(tmp_path / SINGLE)
    for part, at in zip(PARTS["qkv"], (slice(0, 96), slice(96, 128), slice(128, 160)), strict=True):
        assert (scale[at] == tensors[f"model.layers.1.{part}.weight_scale"]).all()


def test_nothing_is_read_before_it_is_asked_for(tmp_path: Path) -> None:
    quantised(random_model(FAMILIES["llama"]), tmp_path, "GPTQ")
    config = ModelConfig.from_folder(tmp_path)
    stored = StoredModel.open(tmp_path, config)
    assert set(stored.tensors("int4")) == set(stored.tensors("bf16"))
    assert stored.form == "int4"
    assert len(stored.int4) == 7 * config.layers
    plain = StoredModel.open(save(random_model(FAMILIES["llama"]), tmp_path / "plain"), config)
    assert (plain.form, len(plain.int4)) == ("bf16", 0)
    assert plain.tensors("bf16") is plain.folder
    with pytest.raises(KeyError):
        stored.tensors("bf16")[f"{Q}.qweight"]
    with pytest.raises(KeyError):
        stored.int4["lm_head.weight"]


# --- what is refused ---


@pytest.mark.parametrize(
    ("config", "named"),
    [
        (
            {"quant_method": "fp8", "weight_block_size": [128, 128]},
            r"weight_block_size: got \[128, 128\].*block of 128 x 128",
        ),
        (fp8_config("block"), r"weights\.strategy: got 'block'"),
        (fp8_config("group"), r"weights\.strategy: got 'group'"),
        (fp8_config(kv_cache_scheme={"num_bits": 8}), "kv_cache_scheme"),
        ({"quant_method": "fp8", "fmt": "e5m2"}, "fmt: got 'e5m2'"),
        ({"quant_method": "modelopt", "quant_algo": "FP8"}, "quant_method: got 'modelopt'"),
        ({"quant_method": "bitsandbytes"}, "quant_method: got 'bitsandbytes'"),
        (fp8_config(format="nvfp4-pack-quantized"), "format: got 'nvfp4-pack-quantized'"),
    ],
)
def test_other_formats_by_the_name_of_the_field(
    config: dict[str, Any], named: str, tmp_path: Path
) -> None:
    quantised(random_model(FAMILIES["llama"]), tmp_path, "fp8 channels")
    configure(tmp_path, config)
    with pytest.raises(UnsupportedError, match=named):
        Llama.from_folder(tmp_path, device="cpu")


@pytest.mark.parametrize(
    ("change", "error", "named"),
    [
        (
            lambda t: t.update({f"{Q}.weight_scale": torch.ones(1, 2)}),
            UnsupportedError,
            f"{Q}.weight_scale: got .1, 2.*blocks",
        ),
        (
            lambda t: t.update({f"{Q}.weight_scale": torch.full((96, 1), math.nan)}),
            ArgumentError,
            f"{Q}.weight_scale: got 96 values",
        ),
        (
            lambda t: t.update({f"{Q}.weight_scale": -torch.ones(1)}),
            ArgumentError,
            f"{Q}.weight_scale: got 1 values that are negative",
        ),
        (
            lambda t: t[f"{Q}.weight"].view(torch.uint8)[3].fill_(0xFF),
            ArgumentError,
            f"{Q}.weight: got 96 codes of NaN",
        ),
        (
            lambda t: t.update({f"{Q}.weight": t[f"{Q}.weight"].float()}),
            CheckpointError,
            f"{Q}.weight: got .*F32",
        ),
        (
            lambda t: [t.pop(f"{Q}.weight_scale"), t.update({f"{Q}.weight": torch.ones(96, 96)})],
            UnsupportedError,
            f"{Q}.weight: got no weight_scale, and 20 of 21",
        ),
        (lambda t: t.pop(f"{Q}.weight"), CheckpointError, f"{Q}.weight: got no such tensor"),
        (
            lambda t: t.update({"model.layers.0.self_attn.k_scale": torch.ones(1)}),
            CheckpointError,
            "k_scale: got unexpected",
        ),
        (
            lambda t: t.update(
                {"model.norm.weight": t["model.norm.weight"].to(torch.float8_e4m3fn)}
            ),
            CheckpointError,
            "model.norm.weight.dtype",
        ),
    ],
)
def test_tensors_that_do_not_fit(
    change: Callable[[dict[str, torch.Tensor]], object],
    error: type[EpicuteError],
    named: str,
    tmp_path: Path,
) -> None:
    quantised(random_model(FAMILIES["llama"]), tmp_path, "fp8 channels")
    rewrite(tmp_path, change)
    with pytest.raises(error, match=named):
        Llama.from_folder(tmp_path, device="cpu")


def test_a_bias_that_is_not_zero_is_no_left_over(tmp_path: Path) -> None:
    quantised(random_model(FAMILIES["llama"]), tmp_path, "GPTQ")
    rewrite(tmp_path, lambda t: t[f"{Q}.bias"].fill_(1.0))
    with pytest.raises(CheckpointError, match=f"{Q}.bias: got unexpected"):
        Llama.from_folder(tmp_path, device="cpu")


def test_codes_without_the_configuration_that_explains_them(tmp_path: Path) -> None:
    quantised(random_model(FAMILIES["llama"]), tmp_path, "fp8 channels")
    configure(tmp_path, None)
    with pytest.raises(CheckpointError, match="weight_scale: got unexpected"):
        Llama.from_folder(tmp_path, device="cpu")


def test_operand_gains_are_of_fp8_alone_and_name_the_next_layer() -> None:
    config = ModelConfig.from_dict(LlamaConfig(**SIZES, head_dim=16).to_dict())
    with pytest.raises(ArgumentError, match="BlockSpec.gains: got 'operand'"):
        config.block("bf16", gains="operand")
    spec = config.block("fp8", gains="operand")
    assert spec.compositions["o"].title.endswith("Store >> Gain >> EmitFP8")
    assert spec.compositions["down"].title.endswith("Store >> Gain >> EmitFP8")
    last = replace(spec, last=True)
    assert last.compositions["down"].title.endswith("SumSquares >> Store")
    assert "Gain" not in replace(spec, scaling="row").compositions["o"].title
