"""A whole model's prefill on the device: the logits of the CPU's references, from folders of every kind."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GemmaConfig, LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config

from epicute.models.llama import Llama
from epicute.models.requests import Requests
from epicute.testing import Budget, assert_equal_bits, assert_within
from tests.models.folders import SIZES, random_model, save
from tests.models.quantised_folders import quantised

pytestmark = pytest.mark.gpu

WIDE: dict[str, Any] = {
    **SIZES,
    "hidden_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "head_dim": 64,
}
FAMILIES = {
    "llama": LlamaConfig(**WIDE, tie_word_embeddings=True),
    "mistral, window 9": MistralConfig(**{**WIDE, "head_dim": 128}, sliding_window=9),
    "qwen2": Qwen2Config(**{**WIDE, "hidden_size": 256}),
    "qwen3": Qwen3Config(**WIDE),
    "gemma with SiLU": GemmaConfig(**WIDE, hidden_act="silu"),
}
WHOLE = {"bf16": Budget(0.012, 0.03), "fp8": Budget(0.1, 0.2)}
PAGE = 16


def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(160, (n,), generator=generator).tolist() for n in (30, 1, 25)]


def on(device: str, folder: Path, **options: Any) -> Llama:
    if device == "cuda":
        options = {"max_rows": 40, "page_size": PAGE, **options}
    return Llama.from_folder(folder, device=device, **options)


def answers(model: Llama, **options: Any) -> torch.Tensor:
    cache = model.new_cache(3, 64, page_size=PAGE)
    return model.prefill(prompts(), cache, logits="all", **options).cpu()


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("weights", "scaling"), [("bf16", "delayed"), ("fp8", "row")])
def test_logits_are_those_of_the_references(
    weights: str, scaling: str, family: str, tmp_path: Path
) -> None:
    """Three requests in two invocations: every token's logits."""
    folder = save(random_model(FAMILIES[family]), tmp_path)
    options = {"weights": weights, "scaling": scaling}
    found = answers(on("cuda", folder, **options))
    assert_within(found, answers(on("cpu", folder, **options), chunk=40), WHOLE[weights])


@pytest.mark.parametrize("kind", ["fp8 channels", "AutoFP8", "GPTQ"])
def test_quantised_folders(kind: str, tmp_path: Path) -> None:
    """Codes as they are, norms' gains as operands; and decoded, as a 16-bit model."""
    quantised(random_model(FAMILIES["llama"]), tmp_path, kind)
    budget = WHOLE["bf16" if kind == "GPTQ" else "fp8"]
    options = {} if kind == "GPTQ" else {"scaling": "row"}
    found = answers(on("cuda", tmp_path, **options))
    assert_within(found, answers(on("cpu", tmp_path, **options), chunk=40), budget)
    decoded = [answers(on(device, tmp_path, weights="bf16")) for device in ("cuda", "cpu")]
    assert_within(*decoded, WHOLE["bf16"])


def test_delayed_scales_settle_on_the_first_prefill(tmp_path: Path) -> None:
    """Nothing saturates in it, and the second sees what the first has seen."""
    folder = save(random_model(FAMILIES["llama"]), tmp_path)
    model = on("cuda", folder, weights="fp8", max_rows=64)  # all of it at once
    exact = answers(on("cpu", tmp_path, weights="exact"))
    first = answers(model)
    assert_within(first, exact, Budget(0.35, 0.7))
    group: Any = model.backend.group  # type: ignore[attr-defined]
    assert not group.saturated.any()
    assert not group.nans.any()
    group.roll()
    before = group.scale_used.clone()
    assert_within(answers(model), exact, Budget(0.35, 0.7))
    group.roll()
    assert_within(group.scale_used.cpu(), before.cpu(), Budget(0.2, 0.2))


def test_a_captured_prefill_serves_other_prompts(tmp_path: Path) -> None:
    """A whole invocation in a graph, from ids to the last stream; other ids, lengths and slack rows are replayed."""
    model = on("cuda", save(random_model(FAMILIES["llama"]), tmp_path), weights="fp8")
    backend, rows = model.backend, 24
    answers(model)  # calibrates
    cache, table = model.new_cache(2, 32, page_size=PAGE), torch.arange(4).view(2, 2)

    def described(lengths: tuple[int, int]) -> Requests:
        return Requests.packed(lengths, PAGE, table, rows=rows, device="cuda")

    def ids_of(given: list[list[int]]) -> torch.Tensor:
        flat = [i for part in given for i in part]
        return torch.tensor([*flat, *[-1] * (rows - len(flat))], device="cuda")

    requests, ids = described((1, 0)), ids_of([[3], []])
    last = torch.tensor([0, -1], device="cuda")

    def invocation() -> Any:
        x = backend.embed(ids)
        for layer in range(model.config.layers):
            x = backend.block(layer, x, requests, cache)
        return x

    with torch.no_grad():
        invocation()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            made = invocation()
        for lengths in ((5, 11), (0, 24), (7, 0)):
            given = [prompts()[0][: lengths[0]], prompts()[2][: lengths[1]]]
            requests.copy_(described(lengths))
            ids.copy_(ids_of(given))
            ends = torch.tensor([lengths[0] - 1, sum(lengths) - 1])
            ends[torch.tensor(lengths) == 0] = -1
            last.copy_(ends)
            group: Any = backend.group  # type: ignore[attr-defined]
            state = group.state_dict()
            graph.replay()
            found = backend.logits(made, last).cpu().clone()
            group.load_state_dict(state)
            assert_equal_bits(backend.logits(invocation(), last).cpu(), found, f"{lengths}")
            assert bool(found.isfinite().all())
            assert (made.values[sum(lengths) :] == 0).all()


def test_a_failed_prefill_gives_everything_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = on("cuda", save(random_model(FAMILIES["llama"]), tmp_path), weights="bf16")
    cache = model.new_cache(3, 64, pages=8, page_size=PAGE)
    wanted = model.prefill(prompts(), model.new_cache(3, 64, page_size=PAGE)).cpu()
    block, calls = model.backend.block, []

    def failing(*arguments: Any) -> Any:
        calls.append(arguments)
        if len(calls) == 4:
            raise RuntimeError("broken")
        return block(*arguments)

    monkeypatch.setattr(model.backend, "block", failing)
    with pytest.raises(RuntimeError, match="broken"):
        model.prefill(prompts(), cache)
    assert (cache.held, cache.free_pages, cache.lengths.tolist()) == ((0, 0, 0), 8, [0, 0, 0])
    monkeypatch.undo()
    assert_within(model.prefill(prompts(), cache).cpu(), wanted, Budget(1e-6, 1e-6))
