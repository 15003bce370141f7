"""One token after the other: greedy text of one request.

for token in greedy(model, ids, model.new_cache(1, 512), 100, stops):
    print(stream.add(token), end="")
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence

import torch

from epicute.errors import ArgumentError, require
from epicute.kv.cache import KVCache
from epicute.models.llama import Llama
from epicute.quant import SCALE_MAX

__all__ = ["GPU_CACHES", "GPU_WEIGHTS", "TextStream", "device_for", "fp8_scales", "greedy"]

GPU_WEIGHTS = ("bf16", "fp16", "fp8", "int4")
GPU_CACHES = ("bf16", "fp16", "fp8", "int4", "qk4pv8")
"""What a GPU runs of the weights and caches that ``Llama`` knows."""

MARGIN = 1.5
"""Later tokens may be that much larger than a prompt's before an FP8 cache clips them."""

LEAST = 2.0**-9
"""A magnitude below which no scale is chosen, so that a head of zeros has one."""

BROKEN = "\N{REPLACEMENT CHARACTER}"


def device_for(weights: str, cache: str) -> torch.device:
    """The GPU where there is one that runs these formats, else the CPU."""
    served = weights in GPU_WEIGHTS and cache in GPU_CACHES
    return torch.device("cuda" if served and torch.cuda.is_available() else "cpu")


def greedy(
    model: Llama,
    ids: Sequence[int],
    cache: KVCache,
    count: int,
    stops: Collection[int] = (),
) -> Iterator[int]:
    """The likeliest token, then the likeliest behind that, as they come.

    A backend that does not decode runs each as a prefill of one token.

    Args:
        model: which speaks.
        ids: the prompt, at least one token.
        cache: of one request, empty, with room for the prompt and all tokens but the last.
        count: tokens at most.
        stops: tokens behind which there are none; they are given too.

    Raises:
        ArgumentError: a count below 1, a cache of several requests, or one that is not empty; see ``Llama.prefill``.
        CapacityError: the cache has no room for the prompt, or for a token more.
    """
    require(count >= 1, "count", count, "at least 1", "say how many tokens are wanted")
    require(
        cache.held == (0,),
        "cache",
        f"{len(cache.held)} requests that hold {cache.held} tokens",
        "one request that holds none",
        "allocate it with model.new_cache(1, length), or reset it",
    )
    token = int(model.prefill(list(ids), cache)[0].argmax())
    for place in range(count):
        yield token
        if token in stops or place == count - 1:
            return
        if model.backend.decodes:
            token = int(model.likeliest(model.decode([token], cache), cache)[0])
        else:
            token = int(model.prefill([token], cache)[0].argmax())


def fp8_scales(model: Llama, ids: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Scales of an FP8 cache for what follows a prompt: K's and V's, (layers, kv_heads) float32.

    The prompt runs once, into a cache whose scales lose no large value. Of each layer and KV head the largest
    magnitude, and half as much again, becomes the largest code.

    Raises:
        ArgumentError: keys or values that are not finite; see ``Llama.prefill``.
    """
    scale = 1.0
    while True:
        probe = model.new_cache(1, len(ids), dtype="fp8", scales=(scale, scale))
        model.prefill(list(ids), probe)
        if int(probe.nans.sum()) or scale > SCALE_MAX / 16:
            raise ArgumentError(
                f"cache: got {int(probe.nans.sum())} keys and values that are not finite, expected none. "
                "Fix: check the checkpoint"
            )
        if not int(probe.saturated.sum()):
            break
        scale *= 16
    layers = range(model.config.layers)
    held = probe.held[0]

    def chosen(cells: Callable[[int], torch.Tensor]) -> torch.Tensor:
        codes = torch.stack([cells(i)[0, :held].float().abs().amax((0, 2)) for i in layers])
        return (codes * scale).clamp_min(LEAST) * MARGIN / 448

    return chosen(probe.dense_keys), chosen(probe.dense_values)


class TextStream:
    """Text of tokens that come one by one, none of it given twice or before it is certain.

    A token may end within a character; what decodes to no whole one waits for the next token.

    Attributes:
        text: all that was given so far.
    """

    def __init__(self, decode: Callable[[list[int]], str]) -> None:
        self.text = ""
        self._decode, self._ids = decode, list[int]()

    def add(self, token: int) -> str:
        """What ``token`` adds, maybe nothing yet."""
        self._ids.append(token)
        whole = self._decode(self._ids)
        return "" if whole.endswith(BROKEN) else self._grown(whole)

    def end(self) -> str:
        """What is left when no token follows, broken characters included."""
        return self._grown(self._decode(self._ids))

    def _grown(self, whole: str) -> str:
        new = whole[len(self.text) :]
        self.text = whole
        return new
