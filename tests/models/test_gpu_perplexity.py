"""What a trained model's text is worth on the GPU: BF16 kernels against transformers, on 12 thousand tokens."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch

from benchmarks.harness import Options
from benchmarks.perplexity import PLAIN_TOKENS, WINDOW, Bench
from benchmarks.transformers_model import transformers_model
from epicute.models.llama import Llama

pytestmark = pytest.mark.gpu

NEAR = 0.01
"""Perplexity that BF16 may be off from float32 by."""


@pytest.fixture(scope="module")
def bench() -> Bench:
    """SmolLM2 in BF16 and a speech that is younger than it; fetched where they are not kept."""
    return Bench.create(Options(shapes=()))


@pytest.fixture(autouse=True)
def exact_products() -> Iterator[None]:
    """float32 means float32."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    yield
    torch.set_float32_matmul_precision(before)


def ours(bench: Bench, weights: str) -> torch.Tensor:
    """(tokens,) float64 log-losses of the kernels, window by window."""
    model = Llama.from_tensors(bench.config, bench.tensors, device="cuda", weights=weights)
    windows = bench.windows(WINDOW, PLAIN_TOKENS)
    if weights == "fp8":
        losses(
            lambda ids: model.prefill(ids, model.new_cache(1, len(ids)), logits="all"), windows[:1]
        )
    return losses(
        lambda ids: model.prefill(ids, model.new_cache(1, len(ids)), logits="all"), windows
    )


def theirs(bench: Bench, dtype: torch.dtype) -> torch.Tensor:
    """The same of transformers on the GPU."""
    model = transformers_model(bench.config, bench.tensors, dtype).cuda()
    return losses(
        lambda ids: model(input_ids=ids[None]).logits[0], bench.windows(WINDOW, PLAIN_TOKENS)
    )


@torch.no_grad()
def losses(answer, windows) -> torch.Tensor:  # type: ignore[no-untyped-def]
    found = []
    for window in windows:
        ids = torch.tensor(window, device="cuda")
        logits = answer(ids)[:-1].double()
        found.append(torch.nn.functional.cross_entropy(logits, ids[1:], reduction="none"))
    return torch.cat(found)


def test_bf16_perplexity_is_that_of_float32(bench: Bench) -> None:
    """Within 0.01; PyTorch's own BF16 is printed beside it. FP8 is reported, and loses a few per cent at most."""
    found = {
        "float32": theirs(bench, torch.float32),
        "PyTorch BF16": theirs(bench, torch.bfloat16),
        "BF16": ours(bench, "bf16"),
        "FP8": ours(bench, "fp8"),
    }
    said = {name: math.exp(float(x.mean())) for name, x in found.items()}
    right = said["float32"]
    print(f"perplexity on {len(found['BF16'])} tokens: float32 {right:.4f}, difference to it:")
    print(", ".join(f"{name} {x - right:+.4f}" for name, x in said.items() if name != "float32"))
    assert len(found["BF16"]) == PLAIN_TOKENS // WINDOW * (WINDOW - 1)
    assert abs(said["BF16"] - right) < NEAR
    assert 0.98 < said["FP8"] / right < 1.1
