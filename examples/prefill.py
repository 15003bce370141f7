"""From prompts to next-token guesses: a model from a Hugging Face folder, unequal requests, a prompt in pieces.

    python examples/prefill.py [folder] [--weights fp8]

The folder holds config.json, safetensors and tokenizer.json. Without one, SmolLM2-135M is fetched (98 MB, once) and
written as such a folder for the time of the run. Needs `pip install -e '.[demo]'`. On a Hopper GPU the fused kernels
run, on a CPU the float64 references, whose answers are the model's and whose times say nothing about the kernels.
"""

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer

from epicute.models import Llama
from epicute.models.smollm2 import Checkpoint

PROMPTS = (
    "The capital of France is",
    "Water boils at a temperature of 100 degrees",
    "Once upon a time, there was a little girl named",
)
MORE = " Alice. She lived near a forest, and every morning she walked down to the"

MOST = {"bf16": 0.05, "fp16": 0.05, "fp8": 0.5}
"""What the logits of a prompt in pieces may differ from those of the whole, relative to their norm."""


def write_smollm2(folder: Path) -> None:
    """The packaged checkpoint as a Hugging Face folder, in BF16."""
    checkpoint = Checkpoint.open()
    config, shape = checkpoint.config, checkpoint.config.shape
    tensors = {
        "model.embed_tokens.weight": checkpoint.embedding(),
        "model.norm.weight": checkpoint.final_norm(),
    }
    for index in range(config.layers):
        for name, values in checkpoint.layer(index).items():
            tensors[f"model.layers.{index}.{name}.weight"] = values
    save_file({n: x.bfloat16() for n, x in tensors.items()}, folder / "model.safetensors")
    values = {
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "num_hidden_layers": config.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "vocab_size": config.vocabulary,
        "max_position_embeddings": config.context,
        "rms_norm_eps": config.rms_eps,
        "rope_theta": config.rope_theta,
        "tie_word_embeddings": True,
    }
    (folder / "config.json").write_text(json.dumps(values))
    checkpoint.tokenizer.save(str(folder / "tokenizer.json"))


def timed(call: Callable[[], torch.Tensor]) -> tuple[torch.Tensor, float]:
    """What ``call`` gives, and its seconds."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    start = time.perf_counter()
    found = call().cpu()  # waits for the GPU
    return found, time.perf_counter() - start


def main(folder: Path, weights: str) -> None:
    start = time.perf_counter()
    model = Llama.from_folder(folder, weights=weights)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    print(f"{model}, {weights} weights, read and planned in {time.perf_counter() - start:.1f} s")

    def guess(logits: torch.Tensor) -> str:
        return ", ".join(repr(tokenizer.decode([i])) for i in logits.topk(3).indices.tolist())

    # Requests of unequal length follow each other row by row: none is padded.
    prompts = [tokenizer.encode(text).ids for text in PROMPTS]
    cache = model.new_cache(requests=len(prompts), max_length=128)
    if model.device.type == "cuda":
        model.prefill(prompts, cache)  # FP8: the first invocation calibrates its scales
        cache.reset()
    logits, seconds = timed(lambda: model.prefill(prompts, cache))
    print(f"\n{sum(map(len, prompts))} tokens of {len(prompts)} requests in {seconds * 1e3:.1f} ms")
    for text, row in zip(PROMPTS, logits, strict=True):
        print(f"  {text!r}: {guess(row)}")

    # More tokens of the last request, at most eight at a time, behind those that the cache holds.
    row, more = len(prompts) - 1, tokenizer.encode(MORE, add_special_tokens=False).ids
    logits, seconds = timed(lambda: model.prefill([more], cache, rows=[row], chunk=8))
    print(f"\n{len(more)} tokens more of request {row} in chunks of 8, {seconds * 1e3:.1f} ms")
    print(f"  {MORE!r}: {guess(logits[0])}")
    print(f"  {cache}")

    whole = model.prefill([prompts[row] + more], model.new_cache(1, 128)).cpu()
    error = float((logits - whole).norm() / whole.norm())
    print(f"  the same prompt at once: {guess(whole[0])}; logits differ by {error:.1e}")
    assert error < MOST[weights]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("folder", type=Path, nargs="?", help="config.json, weights and tokenizer")
    parser.add_argument("--weights", choices=MOST, default="bf16")
    given = parser.parse_args()
    if given.folder is not None:
        main(given.folder, given.weights)
    else:
        with tempfile.TemporaryDirectory() as scratch:
            folder = Path(scratch) / "SmolLM2-135M-Instruct"
            folder.mkdir()
            write_smollm2(folder)
            main(folder, given.weights)
