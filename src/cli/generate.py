"""``epicute generate``: a model goes on with a text, greedily, token by token.

    epicute generate FOLDER "Once upon a time" --weights int4 --cache int4
    epicute generate --demo "Once upon a time"

The text goes to standard output as it comes; what ran, and how fast, to standard error.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from epicute.errors import UnsupportedError, require
from epicute.kv.cache import KVCache
from epicute.models.config import ModelConfig
from epicute.models.generation import (
    TextStream,
    device_for,
    fp8_scales,
    greedy,
)
from epicute.models.llama import Llama
from epicute.models.smollm2 import Checkpoint
from epicute.models.stored_model import StoredModel
from epicute.models.tokenizer import TextTokens, packaged_tokens, tokens_of_folder

__all__ = ["Speaker", "Spoken", "add_arguments", "one_thread", "packaged", "run"]

WEIGHTS = ("bf16", "fp8", "int4")
CACHES = ("bf16", "fp8", "int4", "qk4pv8")

SMALL = 1 << 29
"""Parameters below which an operation of one row is over before threads have shared it out."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the verb's options to ``parser``."""
    parser.add_argument("folder", nargs="?", help="a Hugging Face folder; none with --demo")
    parser.add_argument("prompt", nargs="?", help="the text to go on with")
    parser.add_argument(
        "--demo",
        action="store_true",
        help="SmolLM2-135M, fetched once (98 MB), in place of a folder",
    )
    parser.add_argument("--tokens", type=int, default=64, help="tokens at most (default: 64)")
    parser.add_argument(
        "--weights",
        choices=WEIGHTS,
        help="form of the weights (default: as the folder stores them)",
    )
    parser.add_argument(
        "--cache", choices=CACHES, default="bf16", help="form of the KV cache (default: bf16)"
    )
    parser.add_argument(
        "--device", help="cpu, cuda or cuda:N (default: a GPU that runs these forms, else cpu)"
    )


@dataclass(frozen=True)
class Spoken:
    """What a prompt led to.

    Attributes:
        ids: new tokens.
        text: of them.
        prompt_seconds: until the first token.
        step_seconds: for all others together.
    """

    ids: list[int]
    text: str
    prompt_seconds: float
    step_seconds: float

    @property
    def rate(self) -> float | None:
        """Tokens per second behind the first; None where there are none."""
        return (len(self.ids) - 1) / self.step_seconds if len(self.ids) > 1 else None

    def __str__(self) -> str:
        first = f"the first after {self.prompt_seconds:.2f} s"
        if self.rate is None:
            return f"{len(self.ids)} token, {first}"
        return f"{len(self.ids)} tokens, {first}, then {self.rate:.1f} tokens/s"


@dataclass(frozen=True)
class Speaker:
    """A model with its tokenizer, and the form of the cache that it is to use."""

    model: Llama
    tokens: TextTokens
    weights: str
    cache: str

    def __str__(self) -> str:
        config, device = self.model.config, self.model.device
        where = "the float64 references on a CPU" if device.type == "cpu" else str(device)
        how = "" if self.model.backend.decodes else ", each token by a prefill of one"
        return (
            f"{config.shape.name}: {config.layers} layers of {config.shape.hidden}, "
            f"{self.weights} weights, {self.cache} cache, on {where}{how}"
        )

    def ids_of(self, prompt: str, count: int) -> list[int]:
        """Token ids of a prompt that the model can go on with for ``count`` tokens.

        Raises:
            ArgumentError: no token, or more than the model's context has room for.
        """
        ids, context = self.tokens.encode(prompt), self.model.config.context
        require(bool(ids), "prompt", repr(prompt), "at least one token", "give some text")
        require(
            len(ids) + count <= context,
            "--tokens",
            f"{count} behind a prompt of {len(ids)}",
            f"at most {context} together, which the model was made for",
            "ask for fewer, or shorten the prompt",
        )
        return ids

    def new_cache(self, ids: list[int], count: int) -> KVCache:
        """An empty cache for them; of FP8 with scales that the prompt is run once for."""
        room = len(ids) + count
        if self.cache != "fp8":
            return self.model.new_cache(1, room, dtype=self.cache)
        return self.model.new_cache(1, room, dtype="fp8", scales=fp8_scales(self.model, ids))

    def speak(self, prompt: str, count: int, say: Callable[[str], None]) -> Spoken:
        """Go on with ``prompt`` for at most ``count`` tokens; ``say`` gets the prompt, then the text as it comes."""
        ids = self.ids_of(prompt, count)
        cache, stream = self.new_cache(ids, count), TextStream(self.tokens.decode)
        found: list[int] = []
        if count > 1:
            self.model.prepare(cache)  # else the second token would pay for compiling and capturing
        say(prompt)
        start = first = time.perf_counter()
        for token in greedy(self.model, ids, cache, count, self.tokens.stops):
            if not found:
                first = time.perf_counter()
            found.append(token)
            say(stream.add(token))
        say(stream.end())
        return Spoken(found, stream.text, first - start, time.perf_counter() - first)


@contextmanager
def one_thread(parameters: int) -> Iterator[None]:
    """Run a small model's operations in one thread; a large one's in as many as PyTorch takes."""
    threads = torch.get_num_threads()
    if parameters <= SMALL:
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def packaged(checkpoint: Checkpoint, weights: str, cache: str, device: torch.device) -> Speaker:
    """The packaged checkpoint in these forms."""
    from epicute.models.packaged import PackagedTensors, packaged_config

    model = Llama.from_tensors(
        packaged_config(checkpoint),
        PackagedTensors(checkpoint),
        device=device,
        weights=weights,
        **_options(device, cache),
    )
    return Speaker(model, packaged_tokens(checkpoint), weights, cache)


def run(args: argparse.Namespace) -> int:
    """Go on with the prompt.

    Raises:
        ArgumentError: no folder or prompt, both a folder and --demo, a count below 1, or too long a text.
        ConfigError, CheckpointError: files that are missing, broken or of no tokenizer.
        UnsupportedError: forms that the device does not run.
    """
    folder, prompt = _given(args)
    require(args.tokens >= 1, "--tokens", args.tokens, "at least 1", "ask for some")
    weights = args.weights or _stored(folder)
    device = device_for(weights, args.cache)
    if args.device is not None:
        device = _device(args.device)
    with one_thread(_size(folder)):
        if folder is None:
            speaker = packaged(Checkpoint.open(), weights, args.cache, device)
        else:
            tokens = tokens_of_folder(folder)
            model = Llama.from_folder(
                folder, device=device, weights=weights, **_options(device, args.cache)
            )
            speaker = Speaker(model, tokens, weights, args.cache)
        print(speaker, file=sys.stderr, flush=True)
        spoken = speaker.speak(prompt, args.tokens, _say)
    print(flush=True)
    print(spoken, file=sys.stderr)
    return 0


def _stored(folder: Path | None) -> str:
    """The form that a folder's weights have; the packaged checkpoint, whose are another one's, runs in 16 bits."""
    return (
        "bf16" if folder is None else StoredModel.open(folder, ModelConfig.from_folder(folder)).form
    )


def _say(text: str) -> None:
    print(text, end="", flush=True)


def _given(args: argparse.Namespace) -> tuple[Path | None, str]:
    """The folder, None with --demo, and the prompt."""
    words = [word for word in (args.folder, args.prompt) if word is not None]
    wanted = 1 if args.demo else 2
    require(
        len(words) == wanted,
        "arguments",
        f"{words}{' with --demo' if args.demo else ''}",
        "a prompt alone" if args.demo else "a folder and a prompt",
        'write epicute generate --demo "Once upon a time", or epicute generate FOLDER "Once upon a time"',
    )
    return None if args.demo else Path(words[0]), words[-1]


def _device(name: str) -> torch.device:
    try:
        device = torch.device(name)
    except RuntimeError:
        device = torch.device("meta")
    require(
        device.type == "cpu" or (device.type == "cuda" and torch.cuda.is_available()),
        "--device",
        name,
        "cpu, or cuda where there is a GPU",
        "leave it out",
        UnsupportedError,
    )
    return device


def _options(device: torch.device, cache: str) -> dict[str, Any]:
    """What a GPU's backend has to be told of the cache when its kernels are planned."""
    return {"cache": torch.float8_e4m3fn} if device.type == "cuda" and cache == "fp8" else {}


def _size(folder: Path | None) -> int:
    """Parameters of the model, roughly; a folder that is none is refused later."""
    from epicute.models.config import ModelConfig

    if folder is None:
        return 0
    config = ModelConfig.from_folder(folder)
    return config.layers * config.shape.weights + 2 * config.vocabulary * config.shape.hidden
