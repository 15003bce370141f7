"""Small random checkpoints in Hugging Face's format, made by transformers itself."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    GemmaConfig,
    LlamaConfig,
    MistralConfig,
    PretrainedConfig,
    Qwen2Config,
    Qwen3Config,
)

SIZES: dict[str, Any] = {
    "vocab_size": 160,
    "hidden_size": 96,
    "intermediate_size": 192,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.1,
}

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 1000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 1000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 128,
}

FAMILIES: dict[str, PretrainedConfig] = {
    "llama": LlamaConfig(**SIZES, head_dim=16),
    "llama tied, llama3 RoPE": LlamaConfig(
        **SIZES, head_dim=16, tie_word_embeddings=True, rope_parameters=LLAMA3
    ),
    "llama, yarn RoPE": LlamaConfig(**SIZES, head_dim=16, rope_parameters=YARN),
    "mistral, window 9": MistralConfig(**SIZES, head_dim=32, sliding_window=9),
    "qwen2": Qwen2Config(**SIZES, tie_word_embeddings=True),
    "qwen3": Qwen3Config(**SIZES, head_dim=32),
    "gemma with SiLU": GemmaConfig(**SIZES, head_dim=16, hidden_act="silu"),
}


def random_model(config: PretrainedConfig, seed: int = 0) -> Any:
    """A float32 model of this configuration; biases and gains are random too, so that each has an effect."""
    torch.manual_seed(seed)
    # A copy: resizing a model's embedding changes its configuration.
    model = AutoModelForCausalLM.from_config(deepcopy(config), dtype=torch.float32).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("norm.weight", "layernorm.weight", "bias")):
                parameter.add_(torch.randn_like(parameter), alpha=0.3)
    return model


def save(model: Any, folder: Path, shard: str = "50GB") -> Path:
    """Write it, in files of at most ``shard``."""
    model.save_pretrained(folder, max_shard_size=shard)
    return folder
