"""Folders of quantised checkpoints as other tools write them, from small random models."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from epicute.models.folder import SINGLE
from epicute.quant import Int4Codes, Int4Grid, quantize_int4, quantize_rows
from tests.models.folders import save
from tests.weights import exporters

Tensors = dict[str, torch.Tensor]
FP8 = torch.float8_e4m3fn
GROUP = 32


def fp8_config(strategy: str = "channel", **changes: Any) -> dict[str, Any]:
    """llm-compressor's FP8_DYNAMIC."""
    weights = {"num_bits": 8, "type": "float", "strategy": strategy, "dynamic": False}
    inputs = {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
    found = {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
    }
    return {**found, **changes}


W4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": GROUP, "symmetric": True}

CONFIGS: dict[str, dict[str, Any]] = {
    "fp8 channels": fp8_config(),
    "fp8 tensors": fp8_config("tensor"),
    "AutoFP8": {"quant_method": "fp8", "activation_scheme": "static"},
    "transformers fp8": {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "weight_block_size": None,
    },
    "GPTQ": {
        "quant_method": "gptq",
        "bits": 4,
        "group_size": GROUP,
        "sym": True,
        "desc_act": False,
    },
    "AWQ": {
        "quant_method": "awq",
        "bits": 4,
        "group_size": GROUP,
        "zero_point": True,
        "version": "gemm",
    },
    "W4A16": {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": W4}},
    },
}
FP8S = [name for name in CONFIGS if "fp8" in name.lower()]
INT4S = [name for name in CONFIGS if name not in FP8S]


def _fp8(kind: str, weight: torch.Tensor, linear: str) -> tuple[Tensors, torch.Tensor]:
    """Tensors of one linear, and the float32 values that they stand for."""
    if kind == "fp8 channels":
        codes, scale = quantize_rows(weight)
        scale = scale.bfloat16()[:, None]
    else:
        scale = weight.abs().amax() / 448
        codes = (weight / scale).to(FP8)
    name = "weight_scale_inv" if kind == "transformers fp8" else "weight_scale"
    found = {f"{linear}.weight": codes, f"{linear}.{name}": scale.contiguous()}
    if kind == "AutoFP8":
        found[f"{linear}.input_scale"] = torch.tensor(0.02)
    return found, codes.float() * scale.float()


def _int4(kind: str, weight: torch.Tensor, linear: str) -> tuple[Tensors, torch.Tensor]:
    source: Int4Codes = quantize_int4(weight, Int4Grid(group=GROUP, symmetric=kind != "AWQ"))
    write: Mapping[str, Callable[..., Tensors]] = {
        "GPTQ": exporters.gptq,
        "AWQ": exporters.awq,
        "W4A16": exporters.compressed_tensors,
    }
    found = write[kind](source, linear)
    if kind == "GPTQ":
        found[f"{linear}.bias"] = torch.zeros(len(weight))  # as AutoGPTQ does
    return found, source.dequantize()


def quantised(model: Any, folder: Path, kind: str, head: bool = False) -> Any:
    """Write ``model`` into ``folder`` in one of ``CONFIGS``; the same model with what is left of its weights' values.

    ``head``: quantise the head too.
    """
    save(model, folder)
    tensors = load_file(folder / SINGLE)
    make = _fp8 if kind in FP8S else _int4
    state = model.state_dict()
    for name in list(tensors):
        linear = name.removesuffix(".weight")
        if not (linear.endswith("_proj") or (head and linear == "lm_head")):
            continue
        bias = tensors.get(f"{linear}.bias")
        written, state[name] = make(kind, tensors.pop(name).float(), linear)
        tensors |= written
        if bias is not None:
            tensors[f"{linear}.bias"] = bias
    save_file({n: x.contiguous() for n, x in tensors.items()}, folder / SINGLE)
    configure(folder, CONFIGS[kind])
    model.load_state_dict(state)
    return model


def configure(folder: Path, config: dict[str, Any] | None) -> None:
    """Give a folder another ``quantization_config``."""
    file = folder / "config.json"
    values = json.loads(file.read_text())
    values.pop("quantization_config", None)
    file.write_text(
        json.dumps(values | ({} if config is None else {"quantization_config": config}))
    )
