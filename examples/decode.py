"""Several texts go on at once: INT4 weights, an INT4 cache, one token of each request a step.

    python examples/decode.py [folder] [--weights int4] [--cache int4] [--tokens 8]

The folder holds config.json, safetensors and a tokenizer. Without one it is SmolLM2-135M, fetched once (98 MB). Needs
`pip install -e '.[demo]'`. On a Hopper GPU a step is one CUDA graph, from the tokens to the likeliest next ones; on a
CPU the float64 references run, whose times say nothing about the kernels. Four bits, rounded to nearest, are few for so
small a model, and its facts suffer: `--weights bf16 --cache bf16` knows the capital of France.
"""

import argparse
import time
from pathlib import Path

import torch

from epicute.models import Llama
from epicute.models.packaged import PackagedTensors, packaged_config
from epicute.models.smollm2 import Checkpoint
from epicute.models.tokenizer import TextTokens, packaged_tokens, tokens_of_folder

PROMPTS = (
    "The capital of France is",
    "Once upon a time, there was a little",
    "Water boils at",
)


def read(folder: Path | None, weights: str) -> tuple[Llama, TextTokens]:
    """A model and its tokenizer."""
    if folder is not None:
        return Llama.from_folder(folder, weights=weights), tokens_of_folder(folder)
    checkpoint = Checkpoint.open()
    tensors = PackagedTensors(checkpoint)
    model = Llama.from_tensors(packaged_config(checkpoint), tensors, weights=weights)
    return model, packaged_tokens(checkpoint)


def main(folder: Path | None, weights: str, cache_format: str, count: int) -> None:
    model, tokens = read(folder, weights)
    if model.device.type == "cpu":
        torch.set_num_threads(1)  # a step's operations are too small to be shared out
    print(f"{model}, {weights} weights, {cache_format} cache")

    # Requests of unequal length; the fourth is empty for now, and takes part in nothing.
    prompts = [tokens.encode(text) for text in PROMPTS]
    cache = model.new_cache(requests=4, max_length=128, dtype=cache_format)
    chosen = model.prefill(prompts, cache).argmax(dim=1).tolist()
    model.prepare(cache)  # kernels are compiled, and the step captured, before the first of it
    texts = [[token] for token in chosen]

    start = time.perf_counter()
    for _ in range(count - 1):
        step = [text[-1] for text in texts] + [-1] * (cache.requests - len(texts))
        logits = model.decode(step, cache)
        for text, token in zip(texts, model.likeliest(logits, cache).tolist(), strict=False):
            text.append(token)
    seconds = time.perf_counter() - start

    for prompt, text in zip(PROMPTS, texts, strict=True):
        print(f"  {prompt!r} → {tokens.decode(text)!r}")
    print(f"  {cache.held} tokens held, {cache.spec.token_bytes} bytes a token")
    rate = (count - 1) * len(texts) / seconds
    print(f"{count - 1} steps of {len(texts)} requests, {rate:.1f} tokens/s")

    # A request leaves, another takes its place: no graph is captured anew.
    cache.free(0)
    late = tokens.encode("The opposite of hot is")
    first = int(model.prefill([late], cache, rows=[0])[0].argmax())
    model.decode([first, texts[1][-1], texts[2][-1], -1], cache)
    print(f"  another request in place 0: {cache.held} tokens held")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("folder", type=Path, nargs="?", help="config.json, weights and tokenizer")
    parser.add_argument("--weights", choices=("bf16", "fp8", "int4"), default="int4")
    parser.add_argument("--cache", choices=("bf16", "int4"), default="int4")
    parser.add_argument("--tokens", type=int, default=8)
    given = parser.parse_args()
    main(given.folder, given.weights, given.cache, given.tokens)
