"""What a model is, from the configuration in a Hugging Face folder.

Families: llama, mistral, qwen2 (bias on q, k, v), qwen3 (norms of q's and k's heads), gemma (norms that store gain - 1,
scaled embedding; only where its MLP uses SiLU). What a block does not carry is refused by name rather than left out.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from epicute.errors import EpicuteError, UnsupportedError, require
from epicute.models.rope import Rope
from epicute.models.shapes import LayerShape

if TYPE_CHECKING:
    from epicute.models.block_spec import BlockSpec

__all__ = ["FAMILIES", "ConfigError", "Family", "ModelConfig"]

FILE = "config.json"


class ConfigError(EpicuteError, OSError):
    """A configuration that cannot be found or read."""


@dataclass(frozen=True)
class Family:
    """What a ``model_type`` implies.

    Attributes:
        bias: q, k and v have a bias.
        qk_norm: each head of q and k is normalised before the rotation.
        gain_offset: what is added to every norm's gain.
        scaled: embedding rows are multiplied by sqrt(hidden), rounded to the embedding's dtype.
        head_dim: where the configuration has none; None: hidden / heads.
        tied: whether the head is the embedding where the configuration does not say.
        window: whether its layers heed ``sliding_window``; elsewhere the key is a leftover.
    """

    bias: bool = False
    qk_norm: bool = False
    gain_offset: float = 0.0
    scaled: bool = False
    head_dim: int | None = None
    tied: bool = False
    window: bool = False


FAMILIES = {
    "llama": Family(),
    "mistral": Family(window=True),
    "qwen2": Family(bias=True, window=True),
    "qwen3": Family(qk_norm=True, head_dim=128, window=True),
    "gemma": Family(gain_offset=1.0, scaled=True, head_dim=256, tied=True),
}

EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_intermediate_size")
"""Keys that a mixture of experts has under one name or another."""

REFUSED = {
    "attention_bias": "bias on the output projection",
    "mlp_bias": "bias in the MLP",
    "use_bidirectional_attention": "attention to later tokens",
    "attn_logit_softcapping": "capped attention scores",
    "final_logit_softcapping": "capped logits",
}
"""Keys that, where they are set, ask for what no block here does."""


@dataclass(frozen=True)
class ModelConfig:
    """A model as the forward pass needs it, weights apart.

    Attributes:
        family: its ``model_type``.
        shape: of every layer.
        layers: decoder layers.
        vocabulary: rows of embedding and head.
        rope: how heads rotate.
        eps: of all RMSNorms.
        context: positions it was made for.
        gain_offset: added to every norm's gain; 1 where gain - 1 is stored.
        tied: whether the head is the embedding.
        bias: whether q, k and v have a bias.
        qk_norm: whether each head of q and k is normalised before the rotation.
        window: keys that a query sees, itself included; None for all before it.
        scaled_embedding: whether embedding rows are multiplied by sqrt(hidden).
    """

    family: str
    shape: LayerShape
    layers: int
    vocabulary: int
    rope: Rope
    eps: float
    context: int
    gain_offset: float = 0.0
    tied: bool = False
    bias: bool = False
    qk_norm: bool = False
    window: int | None = None
    scaled_embedding: bool = False

    @property
    def inv_freq(self) -> torch.Tensor:
        """(rotary_dim / 2,) float32."""
        return self.rope.inv_freq

    @staticmethod
    def from_folder(folder: str | Path) -> ModelConfig:
        """Read ``config.json``, through transformers where it is installed: its classes know their families' defaults.

        Raises:
            ConfigError: no such file, or no JSON object in it.
            UnsupportedError, ArgumentError: see ``from_dict``.
        """
        folder = Path(folder)
        values = _read(folder / FILE)
        _refuse_family(values)
        try:
            from transformers import AutoConfig
        except ImportError:
            pass
        else:
            try:
                values = AutoConfig.from_pretrained(folder, local_files_only=True).to_dict()
            except (ValueError, KeyError, TypeError) as error:
                raise ConfigError(
                    f"{folder / FILE}: got {error}, expected what transformers can read. "
                    "Fix: check the file against its model's class"
                ) from error
        return ModelConfig.from_dict(values, folder.resolve().name)

    @staticmethod
    def from_dict(values: Mapping[str, Any], name: str = "model") -> ModelConfig:
        """From the keys of a Hugging Face configuration, with ``rope_parameters`` or ``rope_theta`` and
        ``rope_scaling``.

        Args:
            values: the configuration.
            name: what tables call the model's shape.

        Raises:
            UnsupportedError: a family, activation, bias, mask or RoPE scaling that is not carried, named by its key.
            ArgumentError: a size is missing or makes no sense.
        """
        family = _refuse_family(values)
        kind = str(values["model_type"])
        for key in ("hidden_act", "hidden_activation"):
            activation = values.get(key)
            require(
                activation in (None, "silu", "swish"),
                key,
                repr(activation),
                "'silu', the activation of a SwiGLU",
                "use a checkpoint whose MLP is SwiGLU",
                UnsupportedError,
            )
        sizes = {key: _size(values, key) for key in SIZES}
        heads = sizes["num_attention_heads"]
        kv_heads = _size(values, "num_key_value_heads", heads if kind == "llama" else None)
        plain = family.head_dim or sizes["hidden_size"] // heads
        head_dim = _size(values, "head_dim", plain)
        layers, context = sizes["num_hidden_layers"], sizes["max_position_embeddings"]
        eps = values.get("rms_norm_eps")
        require(
            isinstance(eps, float | int) and eps > 0,
            "rms_norm_eps",
            eps,
            "a positive number",
            "check the configuration",
        )
        tied = values.get("tie_word_embeddings")
        heeds = family.window or values.get("layer_types") is not None
        return ModelConfig(
            family=kind,
            shape=LayerShape(
                sizes["hidden_size"], sizes["intermediate_size"], heads, kv_heads, head_dim, name
            ),
            layers=layers,
            vocabulary=sizes["vocab_size"],
            rope=_rope(values, head_dim, context),
            eps=float(values["rms_norm_eps"]),
            context=context,
            gain_offset=family.gain_offset,
            tied=family.tied if tied is None else bool(tied),
            bias=family.bias,
            qk_norm=family.qk_norm,
            window=_window(values, layers) if heeds else None,
            scaled_embedding=family.scaled,
        )

    def block(
        self,
        format: str = "bf16",
        cache: torch.dtype = torch.bfloat16,
        scaling: str = "delayed",
        gains: str = "folded",
    ) -> BlockSpec:
        """The specification of the kernels of one of its layers; see ``BlockSpec`` for the arguments."""
        from epicute.models.block_spec import BlockSpec

        return BlockSpec(
            self.shape,
            format,
            scaling,
            cache,
            eps=self.eps,
            gain_offset=self.gain_offset,
            bias=self.bias,
            qk_norm=self.qk_norm,
            rope=self.rope.policy,
            window=self.window,
            gains=gains,
        )


SIZES = (
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_hidden_layers",
    "vocab_size",
    "max_position_embeddings",
)


def _read(path: Path) -> dict[str, Any]:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        got = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(
            f"{path}: got {got}, expected a Hugging Face configuration. "
            "Fix: give the folder that holds config.json and the safetensors"
        ) from error
    require(
        isinstance(values, dict), str(path), type(values).__name__, "an object", "check the file"
    )
    return values


def _refuse_family(values: Mapping[str, Any]) -> Family:
    """The family, unless it or something the configuration asks for is not carried."""
    experts = {key: values[key] for key in EXPERTS if values.get(key)}
    require(
        not experts,
        next(iter(experts), ""),
        experts,
        "one MLP per layer",
        "use a dense checkpoint: mixtures of experts (MoE) are not served",
        UnsupportedError,
    )
    kind = values.get("model_type")
    require(
        kind in FAMILIES,
        "model_type",
        repr(kind),
        f"one of {', '.join(FAMILIES)}",
        "use a checkpoint of one of these families",
        UnsupportedError,
    )
    for key, meaning in REFUSED.items():
        require(
            not values.get(key),
            key,
            values.get(key),
            f"none: {meaning} is not served",
            "use a checkpoint without it",
            UnsupportedError,
        )
    return FAMILIES[str(kind)]


def _size(values: Mapping[str, Any], key: str, default: int | None = None) -> int:
    value = values.get(key)
    found = default if value is None else value
    require(
        isinstance(found, int) and found > 0,
        key,
        value,
        "a positive count",
        "check the configuration, or install transformers, which knows its family's defaults",
    )
    assert found is not None
    return found


def _window(values: Mapping[str, Any], layers: int) -> int | None:
    """The one window of all layers, or None."""
    window = values.get("sliding_window")
    if values.get("use_sliding_window") is False:
        window = None
    kinds = values.get("layer_types")
    if kinds is None:
        full = min(int(values.get("max_window_layers") or 0), layers)
        slides = window is not None
        kinds = ["full_attention"] * full + ["sliding_attention" if slides else "full_attention"]
        kinds = kinds[:layers]
    require(
        len(set(kinds)) == 1 and kinds[0] in ("full_attention", "sliding_attention"),
        "layer_types",
        f"{sorted(set(kinds))}",
        "all layers 'full_attention', or all 'sliding_attention'",
        "use a checkpoint whose layers are alike",
        UnsupportedError,
    )
    if kinds[0] == "full_attention":
        return None
    require(
        isinstance(window, int) and window >= 1,
        "sliding_window",
        window,
        "a count of keys",
        "check the configuration",
    )
    return window


def _rope(values: Mapping[str, Any], head_dim: int, context: int) -> Rope:
    parameters = dict(values.get("rope_parameters") or values.get("rope_scaling") or {})
    nested = [key for key, value in parameters.items() if isinstance(value, Mapping)]
    require(
        not nested,
        "rope_parameters",
        f"one set for each of {nested}",
        "one for all layers",
        "use a checkpoint whose layers are alike",
        UnsupportedError,
    )
    for key in ("rope_theta", "partial_rotary_factor"):
        if values.get(key) is not None:
            parameters.setdefault(key, values[key])
    if values.get("original_max_position_embeddings") is not None:
        parameters["original_max_position_embeddings"] = values["original_max_position_embeddings"]
    return Rope.parse(parameters, head_dim, context)
