"""From a checkpoint's ``quantization_config`` to the format it is read in, or to the reason why it is not."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NoReturn

from epicute.errors import ArgumentError, UnsupportedError, require
from epicute.layouts import CHANNEL
from epicute.weights.importers.awq import Awq
from epicute.weights.importers.checks import SUPPORTED, require_bits, require_group
from epicute.weights.importers.compressed_tensors import CompressedTensors
from epicute.weights.importers.fp8 import Fp8
from epicute.weights.importers.gptq import Gptq

__all__ = ["Format", "detect"]

Format = Gptq | Awq | CompressedTensors | Fp8

_VERSIONS = {"gptq": 1, "gptq_v2": 2}


def detect(config: Mapping[str, Any]) -> Format:
    """The format that ``config`` (a ``quantization_config``) describes.

    Raises:
        ArgumentError: a field that is needed is missing.
        UnsupportedError: another method, format, number of bits, group or order; it names the field and its value.
    """
    method = config.get("quant_method")
    if method is None and "bits" in config:
        method = "gptq"  # quantize_config.json of AutoGPTQ names no method
    if method == "gptq":
        return _gptq(config)
    if method == "awq":
        return _awq(config)
    if method == "compressed-tensors":
        return _compressed(config)
    if method == "fp8":
        return _fp8(config)
    return _refuse("quant_method", method)


def _gptq(config: Mapping[str, Any]) -> Gptq:
    require_bits("bits", config.get("bits"))
    if config.get("is_marlin_format"):
        _refuse("is_marlin_format", True)
    written = config.get("checkpoint_format", "gptq")
    if written not in _VERSIONS:
        _refuse("checkpoint_format", written)
    if config.get("pack_dtype", "int32") != "int32":
        _refuse("pack_dtype", config["pack_dtype"])
    group = require_group("group_size", _needed(config, "group_size"))
    _refuse_modules(config.get("dynamic") or {}, group)
    symmetric = bool(_needed(config, "sym"))
    return Gptq(_VERSIONS[written], group, symmetric, bool(config.get("desc_act", False)))


def _refuse_modules(dynamic: Mapping[str, Any], group: int) -> None:
    """Rules that leave modules out ("-:" patterns) are no matter; others must not change bits or group."""
    for pattern, rule in dynamic.items():
        if pattern.startswith("-:") or not rule:
            continue
        for field, wanted in (("bits", 4), ("group_size", group)):
            if rule.get(field, wanted) != wanted:
                _refuse(f"dynamic[{pattern!r}].{field}", rule[field])


def _awq(config: Mapping[str, Any]) -> Awq:
    bits = "w_bit" if "w_bit" in config else "bits"
    require_bits(bits, config.get(bits))
    version = str(config.get("version", "gemm")).lower()
    if version != "gemm":
        _refuse("version", config["version"])
    name = "q_group_size" if "q_group_size" in config else "group_size"
    group = require_group(name, _needed(config, name))
    return Awq(group, not config.get("zero_point", True))


def _fp8(config: Mapping[str, Any]) -> Fp8:
    """AutoFP8's, and transformers' without blocks, which has names of its own for the dtype and the scale."""
    blocks = config.get("weight_block_size")
    if blocks is not None:
        raise UnsupportedError(
            f"quantization_config.weight_block_size: got {blocks}, expected null: weights with a scale for each block "
            f"of {' x '.join(map(str, blocks))} are not read. Fix: take a checkpoint with a scale for each output "
            "feature or for each tensor, or decode it"
        )
    if config.get("fmt", config.get("dtype", "e4m3")) not in ("e4m3", "float8_e4m3fn"):
        _refuse("fmt" if "fmt" in config else "dtype", config.get("fmt", config.get("dtype")))
    return Fp8("weight_scale_inv" if "weight_block_size" in config else "weight_scale")


def _compressed(config: Mapping[str, Any]) -> CompressedTensors | Fp8:
    sparsity = (config.get("sparsity_config") or {}).get("format", "dense")
    if sparsity != "dense":
        _refuse("sparsity_config.format", sparsity)
    groups = _needed(config, "config_groups")
    found = {name: _scheme(config, name, scheme) for name, scheme in groups.items()}
    if len(set(found.values())) != 1:
        _refuse("config_groups", {name: str(read) for name, read in found.items()})
    return next(iter(found.values()))


def _scheme(config: Mapping[str, Any], name: str, scheme: Any) -> CompressedTensors | Fp8:
    where = f"config_groups.{name}"
    if not isinstance(scheme, Mapping):
        _refuse(where, scheme)
    written = scheme.get("format") or config.get("format")
    if written in ("float-quantized", "naive-quantized"):
        return _float_scheme(config, where, scheme)
    if written != "pack-quantized":
        _refuse(f"{where}.format" if scheme.get("format") else "format", written)
    for field in ("input_activations", "output_activations"):
        if scheme.get(field) is not None:
            _refuse(f"{where}.{field}", scheme[field])
    weights = scheme.get("weights")
    if not isinstance(weights, Mapping):
        _refuse(f"{where}.weights", weights)
    require_bits(f"{where}.weights.num_bits", weights.get("num_bits"))
    if weights.get("type", "int") != "int":
        _refuse(f"{where}.weights.type", weights["type"])
    if weights.get("dynamic"):
        _refuse(f"{where}.weights.dynamic", weights["dynamic"])
    strategy = weights.get("strategy") or ("group" if weights.get("group_size") else "channel")
    if strategy not in ("group", "channel"):
        _refuse(f"{where}.weights.strategy", strategy)
    group = CHANNEL
    if strategy == "group":
        group = require_group(f"{where}.weights.group_size", weights.get("group_size"))
    act = weights.get("actorder")
    if act not in (None, False, True, "group", "weight", "static", "dynamic"):
        _refuse(f"{where}.weights.actorder", act)
    symmetric = bool(weights.get("symmetric", True))
    return CompressedTensors(group, symmetric, act in (True, "group", "dynamic"))


def _float_scheme(config: Mapping[str, Any], where: str, scheme: Mapping[str, Any]) -> Fp8:
    """E4M3 weights with static scales; activations of 8 bits, whose scales are not read."""
    if config.get("kv_cache_scheme") is not None:
        _refuse("kv_cache_scheme", config["kv_cache_scheme"])
    if scheme.get("output_activations") is not None:
        _refuse(f"{where}.output_activations", scheme["output_activations"])
    for field in ("weights", "input_activations"):
        found = scheme.get(field)
        if field == "input_activations" and found is None:
            continue
        if not isinstance(found, Mapping):
            _refuse(f"{where}.{field}", found)
        for key, wanted in (("type", "float"), ("num_bits", 8)):
            if found.get(key) != wanted:
                _refuse(f"{where}.{field}.{key}", found.get(key))
    weights = scheme["weights"]
    if weights.get("dynamic"):
        _refuse(f"{where}.weights.dynamic", weights["dynamic"])
    if not weights.get("symmetric", True):
        _refuse(f"{where}.weights.symmetric", False)
    strategy = weights.get("strategy") or "tensor"
    if strategy not in ("channel", "tensor"):
        blocks = weights.get("block_structure")
        _refuse(f"{where}.weights.strategy", f"{strategy} {blocks}" if blocks else strategy)
    return Fp8()


def _needed(config: Mapping[str, Any], field: str) -> Any:
    require(
        field in config,
        f"quantization_config.{field}",
        "nothing",
        "a value",
        "pass the format yourself, such as Gptq(version=1, group=128, symmetric=True)",
        ArgumentError,
    )
    return config[field]


def _refuse(field: str, value: object) -> NoReturn:
    raise UnsupportedError(
        f"quantization_config.{field}: got {value!r}, expected {SUPPORTED}. Fix: quantise the original "
        "checkpoint in one of these"
    )
