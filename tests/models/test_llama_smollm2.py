"""A trained checkpoint as a Hugging Face folder: its logits against those of transformers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

from epicute.models.folder import EMBEDDING, NORM
from epicute.models.llama import Llama
from epicute.models.smollm2 import Checkpoint
from epicute.testing import Budget, assert_within

TEXT = (
    "The old lighthouse keeper climbed the stairs every evening to light the lamp. He had done so for "
    "thirty years, and in all that time no ship had been lost on the rocks below. When the storm of 1921 "
    "came, he stayed awake for three nights, and the town has told the story ever since, to whoever asks"
)


def write(checkpoint: Checkpoint, folder: Path) -> Path:
    """The packaged checkpoint in BF16, under Hugging Face's names, in two shards."""
    config, shape = checkpoint.config, checkpoint.config.shape
    tensors = {EMBEDDING: checkpoint.embedding(), NORM: checkpoint.final_norm()}
    for index in range(config.layers):
        for name, x in checkpoint.layer(index).items():
            tensors[f"model.layers.{index}.{name}.weight"] = x
    names, weights = sorted(tensors), {}
    for shard, part in (("a.safetensors", names[::2]), ("b.safetensors", names[1::2])):
        save_file({n: tensors[n].bfloat16() for n in part}, folder / shard, {"format": "pt"})
        weights |= dict.fromkeys(part, shard)
    index_file = {"metadata": {"total_size": 0}, "weight_map": weights}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index_file))
    values = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "num_hidden_layers": config.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "vocab_size": config.vocabulary,
        "rms_norm_eps": config.rms_eps,
        "rope_theta": config.rope_theta,
        "max_position_embeddings": config.context,
        "hidden_act": "silu",
        "tie_word_embeddings": True,
        "dtype": "bfloat16",
    }
    (folder / "config.json").write_text(json.dumps(values))
    return folder


@pytest.fixture(scope="module")
def smollm2(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[int], torch.Tensor]:
    """The folder, 64 token ids, and the logits of transformers in float32."""
    checkpoint = Checkpoint.open()
    folder = write(checkpoint, tmp_path_factory.mktemp("smollm2"))
    ids = checkpoint.tokenizer.encode(TEXT).ids[:64]
    assert len(ids) == 64
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        return folder, ids, theirs(torch.tensor([ids])).logits[0]


def test_logits_are_those_of_transformers(
    smollm2: tuple[Path, list[int], torch.Tensor],
) -> None:
    """30 layers, with a float32 cache and with a BF16 one; the most likely token is always the same."""
    folder, ids, expected = smollm2
    model = Llama.from_folder(folder, device="cpu", weights="exact")
    for dtype, budget in (
        (torch.float32, Budget(1e-5, 3e-5)),
        (torch.bfloat16, Budget(0.008, 0.03)),
    ):
        logits = model.prefill(ids, model.new_cache(1, 64, dtype=dtype), logits="all")
        assert_within(logits, expected, budget)
        assert torch.equal(logits.argmax(1), expected.argmax(1))
