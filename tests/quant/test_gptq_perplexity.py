"""A whole model through a run: GPTQ beats rounding to nearest by perplexity on text it has not seen.

SmolLM2-135M in groups of 128, on the CPU: minutes, so that it runs with the gates.
"""

from __future__ import annotations

import pydoc_data.topics
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from epicute.models.smollm2 import Checkpoint, decoder_layer
from epicute.quant import GptqRun, Linear, quantize_int4
from tests.quant.smollm2_inputs import linear_inputs

pytestmark = pytest.mark.gates

LENGTH = 256
CALIBRATION = ("calls", "comparisons", "execmodel", "import", "objects", "string-methods")
HELD_OUT = ("assignment", "debugger", "function", "naming", "strings", "try")


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Matrices this small are slower with more, most of all beside other tests."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def sequences(checkpoint: Checkpoint, topics: tuple[str, ...]) -> torch.Tensor:
    """(count, LENGTH) token ids of the language's own documentation, one stretch a topic."""
    rows = []
    for topic in topics:
        text = pydoc_data.topics.topics[topic]
        ids = checkpoint.tokenizer.encode(text).ids
        rows += [ids[i : i + LENGTH] for i in range(0, len(ids) - LENGTH + 1, LENGTH)][:2]
    return torch.tensor(rows)


class Model:
    """All layers in memory, weights replaced one by one."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.config, self.embedding = checkpoint.config, checkpoint.embedding()
        self.layers = [checkpoint.layer(i) for i in range(self.config.layers)]
        self.norm = checkpoint.final_norm()

    def linears(self, ids: torch.Tensor) -> Iterator[Linear]:
        """Layer by layer, the inputs of each through the layers before it as they then are."""
        states = [self.embedding[row] for row in ids]
        for index, weights in enumerate(self.layers):
            inputs = [linear_inputs(x, weights, self.config)[0] for x in states]
            for name in inputs[0]:
                batches = [found[name] for found in inputs]
                weight = weights[name]
                yield Linear(f"{index}.{name}", lambda w=weight: w, lambda b=batches: b)
            states = [decoder_layer(x, weights, self.config) for x in states]

    def replace(self, name: str, weight: torch.Tensor) -> None:
        index, _, short = name.partition(".")
        self.layers[int(index)][short] = weight

    def loss(self, ids: torch.Tensor) -> float:
        """Mean negative log-likelihood of each next token."""
        total = 0.0
        for row in ids:
            x = self.embedding[row]
            for weights in self.layers:
                x = decoder_layer(x, weights, self.config)
            x = torch.nn.functional.rms_norm(x, x.shape[-1:], self.norm, self.config.rms_eps)
            logits = x[:-1] @ self.embedding.T
            total += torch.nn.functional.cross_entropy(logits, row[1:]).item()
        return total / len(ids)


def test_gptq_beats_rounding_to_nearest_by_perplexity(tmp_path: Path) -> None:
    checkpoint = Checkpoint.open()
    calibration, held_out = (sequences(checkpoint, t) for t in (CALIBRATION, HELD_OUT))
    exact = Model(checkpoint).loss(held_out)

    nearest = Model(checkpoint)
    for index, weights in enumerate(nearest.layers):
        for name, weight in list(weights.items()):
            if weight.ndim == 2:
                nearest.replace(f"{index}.{name}", quantize_int4(weight).dequantize())
    rounded = nearest.loss(held_out)

    model = Model(checkpoint)
    with GptqRun(tmp_path, calibration="topics of the language") as run:
        for name, result in run.stream(model.linears(calibration)):
            model.replace(name, result.codes.dequantize())
    chosen = model.loss(held_out)
    print(f"mean loss: exact {exact:.4f}, GPTQ {chosen:.4f}, nearest {rounded:.4f}")
    assert exact < chosen < rounded
    assert chosen - exact < 0.7 * (rounded - exact)
