"""``python -m benchmarks.packaged_folder FOLDER``: SmolLM2-135M and a speech as the files that tables of models read.

The packaged checkpoint in BF16 under Hugging Face's names, its tokenizer, and the held-out text:

    python -m benchmarks.packaged_folder smollm2
    python -m benchmarks prefill-model --checkpoint smollm2 --text smollm2/2026-Trump-1.txt

The first of its rows are perplexities: epicute's BF16 and FP8 kernels, ``transformers`` in float32 and in BF16.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.texts import HELD_OUT, speech
from epicute.models.packaged import PackagedTensors, packaged_config
from epicute.models.smollm2 import Checkpoint

__all__ = ["main", "write"]


def write(checkpoint: Checkpoint, folder: Path) -> Path:
    """``config.json``, ``model.safetensors`` (269 MB) and ``tokenizer.json`` in ``folder``, which it returns."""
    from safetensors.torch import save_file

    config = packaged_config(checkpoint)
    shape = config.shape
    values: dict[str, Any] = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "num_hidden_layers": config.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "vocab_size": config.vocabulary,
        "rms_norm_eps": config.eps,
        "rope_theta": config.rope.theta,
        "max_position_embeddings": config.context,
        "hidden_act": "silu",
        "tie_word_embeddings": config.tied,
        "dtype": "bfloat16",
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(values, indent=1))
    stored = PackagedTensors(checkpoint)
    tensors = {name: stored[name].bfloat16() for name in stored}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    checkpoint.tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the files."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.packaged_folder", description=__doc__.split("\n\n")[0]
    )
    parser.add_argument("folder", type=Path)
    folder = write(Checkpoint.open(), parser.parse_args(arguments).folder)
    text = folder / f"{HELD_OUT}.txt"
    text.write_text(speech(HELD_OUT), encoding="utf-8")
    print(f"{folder}\n{text}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
