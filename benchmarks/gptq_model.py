"""INT4 codes of a model's projections by GPTQ, layer by layer, each on what the quantised layers before it give."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.transformers_model import transformers_model
from epicute.models.config import ModelConfig
from epicute.quant import GptqResult, GptqRun, Linear

__all__ = ["gptq_codes"]

PARTS = (
    *(f"self_attn.{name}_proj" for name in "qkvo"),
    *(f"mlp.{name}_proj" for name in ("gate", "up", "down")),
)


@torch.no_grad()
def gptq_codes(
    config: ModelConfig, tensors: Mapping[str, Tensor], texts: Sequence[Sequence[int]], folder: Path
) -> dict[str, GptqResult]:
    """By the checkpoint's names.

    Args:
        config, tensors: the model, a Llama.
        texts: token ids that its inputs come from, each by itself.
        folder: of the run, see ``GptqRun``.
    """
    model = transformers_model(config, tensors, torch.float32)
    found: dict[str, GptqResult] = {}
    with GptqRun(folder, calibration=f"{sum(map(len, texts))} tokens of {len(texts)} texts") as run:
        for name, result in run.stream(_linears(model, texts)):
            found[name] = result
            weight = model.get_parameter(name)
            weight.copy_(result.codes.dequantize())
    return found


def _linears(model: Any, texts: Sequence[Sequence[int]]) -> Iterator[Linear]:
    """Every projection, with the inputs that it has once those before its layer are quantised."""
    states = [model.model.embed_tokens(torch.tensor(ids)[None]) for ids in texts]
    turns = [model.model.rotary_emb(x, torch.arange(x.shape[1])[None]) for x in states]
    for index, layer in enumerate(model.model.layers):
        inputs: dict[str, list[Tensor]] = {part: [] for part in PARTS}
        hooks = [
            layer.get_submodule(part).register_forward_pre_hook(
                lambda _, given, batches=inputs[part]: batches.append(given[0][0])
            )
            for part in PARTS
        ]
        for x, turn in zip(states, turns, strict=True):
            layer(x, position_embeddings=turn)
        for hook in hooks:
            hook.remove()
        for part, batches in inputs.items():
            name = f"model.layers.{index}.{part}.weight"
            weight = model.get_parameter(name)
            yield Linear(name, lambda w=weight: w.data, lambda b=batches: b)
        states = [
            _first(layer(x, position_embeddings=turn))
            for x, turn in zip(states, turns, strict=True)
        ]


def _first(given: Any) -> Tensor:
    """A layer's stream, which some releases wrap."""
    return given[0] if isinstance(given, tuple) else given
