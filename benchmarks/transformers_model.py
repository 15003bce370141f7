"""``transformers``' Llama with the weights of a checkpoint in memory, and its configuration from ours."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from epicute.errors import require
from epicute.models.config import ModelConfig

__all__ = ["transformers_model"]


def transformers_model(
    config: ModelConfig, tensors: Mapping[str, Tensor], dtype: torch.dtype
) -> Any:
    """A ``LlamaForCausalLM`` on the CPU with SDPA.

    Raises:
        ArgumentError: another family, or a RoPE that is scaled.
    """
    from transformers import LlamaConfig, LlamaForCausalLM

    shape, rope = config.shape, config.rope
    plain = (
        rope.rotary_dim == rope.head_dim and rope.magnitude == 1.0 and not config.scaled_embedding
    )
    require(
        config.family == "llama" and plain,
        "config",
        config.family,
        "a Llama with plain RoPE",
        "read the folder with AutoModelForCausalLM",
    )
    theirs = LlamaConfig(
        vocab_size=config.vocabulary,
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_hidden_layers=config.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        rms_norm_eps=config.eps,
        rope_parameters={"rope_type": "default", "rope_theta": rope.theta},
        max_position_embeddings=config.context,
        tie_word_embeddings=config.tied,
        attn_implementation="sdpa",
    )
    model = LlamaForCausalLM(theirs)
    missing, unknown = model.load_state_dict(dict(tensors), strict=False)
    require(
        not unknown and set(missing) <= {"lm_head.weight"},
        "tensors",
        f"{sorted(missing)} missing, {sorted(unknown)} unknown",
        "those of the model, the head apart where it is tied",
        "pass the checkpoint's tensors",
    )
    for parameter in model.parameters():
        parameter.data = parameter.data.to(
            dtype
        )  # frequencies stay float32, as from_pretrained has them
    return model.eval()
