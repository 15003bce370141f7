"""A trained checkpoint as a Hugging Face folder: its logits and its text against those of transformers."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

from epicute.models.config import ModelConfig
from epicute.models.folder import EMBEDDING, NORM, Folder
from epicute.models.llama import Llama
from epicute.models.packaged import PackagedTensors, packaged_config
from epicute.models.smollm2 import Checkpoint
from epicute.testing import Budget, assert_within
from tests.models.one_thread import single as single

TEXT = (
    "The old lighthouse keeper climbed the stairs every evening to light the lamp. He had done so for "
    "thirty years, and in all that time no ship had been lost on the rocks below. When the storm of 1921 "
    "came, he stayed awake for three nights, and the town has told the story ever since, to whoever asks"
)

OTHER = (
    "Bread is one of the oldest foods that people prepare. Flour, water and salt are mixed into a dough, which is "
    "kneaded until it is smooth and left to rise in a warm place. The baker then shapes the loaves, lets them rest "
    "once more, and puts them into a hot oven. After about forty minutes the crust is brown, and the smell of it"
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
def checkpoint() -> Checkpoint:
    return Checkpoint.open()


@pytest.fixture(scope="module")
def folder(checkpoint: Checkpoint, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(checkpoint, tmp_path_factory.mktemp("smollm2"))


@pytest.fixture(scope="module")
def theirs(folder: Path) -> Any:
    """transformers in float32."""
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def ids_of(text: str, checkpoint: Checkpoint) -> list[int]:
    """The first 64."""
    ids = checkpoint.tokenizer.encode(text).ids[:64]
    assert len(ids) == 64
    return ids


@torch.no_grad()
def logits_of(theirs: Any, ids: list[int]) -> torch.Tensor:
    return theirs(torch.tensor([ids])).logits[0]


def test_logits_are_those_of_transformers(
    folder: Path, checkpoint: Checkpoint, theirs: Any
) -> None:
    """30 layers, with a float32 cache and with a BF16 one; the most likely token is always the same."""
    ids = ids_of(TEXT, checkpoint)
    expected = logits_of(theirs, ids)
    model = Llama.from_folder(folder, device="cpu", weights="exact")
    for dtype, budget in (
        (torch.float32, Budget(1e-5, 3e-5)),
        (torch.bfloat16, Budget(0.008, 0.03)),
    ):
        logits = model.prefill(ids, model.new_cache(1, 64, dtype=dtype), logits="all")
        assert_within(logits, expected, budget)
        assert torch.equal(logits.argmax(1), expected.argmax(1))


NEAR = 0.25
"""What BF16 weights, activations and cells change of a logit: tokens whose logits are nearer may trade places."""


def test_greedy_tokens_are_those_of_transformers(
    folder: Path, checkpoint: Checkpoint, theirs: Any
) -> None:
    """BF16 against float32, two prompts of 64 tokens and 12 behind: token for token, but for near ties."""
    model = Llama.from_folder(folder, device="cpu", weights="bf16")
    for text in (TEXT, OTHER):
        ids = ids_of(text, checkpoint)
        whole, rows = list(ids), []
        for _ in range(12):
            rows.append(logits_of(theirs, whole)[-1:])
            whole.append(int(rows[-1].argmax()))
        right, cache = torch.cat(rows), model.new_cache(1, 80)
        found = [model.prefill(ids, cache)]
        found += [model.decode([token], cache) for token in whole[64:-1]]
        chosen = torch.cat(found).argmax(1)
        lost = right.amax(1) - right.gather(1, chosen[:, None])[:, 0]
        assert float(lost.max()) <= NEAR, (whole[64:], chosen.tolist(), lost.tolist())
        assert int((lost > 0).sum()) <= 1


def test_the_package_is_the_folder(folder: Path, checkpoint: Checkpoint) -> None:
    """Names, and values, which the folder has in BF16; one layer of either gives the same."""
    tensors, stored = PackagedTensors(checkpoint), Folder(folder)
    assert set(tensors) == set(stored)
    assert len(tensors) == len(stored)
    last = "model.layers.29.self_attn.q_proj.weight"
    for name in (EMBEDDING, NORM, "model.layers.0.mlp.up_proj.weight", last):
        assert torch.equal(tensors[name].bfloat16(), stored[name])
    with pytest.raises(KeyError):
        tensors["lm_head.weight"]
    config = replace(packaged_config(checkpoint), layers=1)
    assert replace(ModelConfig.from_folder(folder), layers=1, shape=config.shape) == config
    models = [
        Llama.from_tensors(config, t, device="cpu", weights="exact") for t in (tensors, stored)
    ]
    ids = ids_of(TEXT, checkpoint)[:8]
    found, right = (model.prefill(ids, model.new_cache(1, 16), logits="all") for model in models)
    assert_within(found, right, Budget(0.01, 0.02))
