"""A model's steps on the GPU: the reference backend's logits in every form, graphs that serve any length, known text.

``tests.ptx.plugin`` runs the smaller ones without a GPU.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from epicute.kv.cache import KVCache
from epicute.models.generation import greedy
from epicute.models.llama import Llama
from epicute.models.smollm2 import Checkpoint
from epicute.testing import Budget, assert_equal_bits, assert_within
from tests.models.folders import random_model, save
from tests.models.test_decode_model import FAMILIES, prompt
from tests.models.test_llama_smollm2 import NEAR, OTHER, TEXT, write

pytestmark = pytest.mark.gpu

FP8 = torch.float8_e4m3fn
CACHES = ("bf16", "fp8", "int4", "int4 mirror", "qk4pv8")
WEIGHTS = ("bf16", "fp8", "int4")

SAME = Budget(0.025, 0.05)
"""All layers, sums in another order: roundings to 16 bits fall the other way, and angles are float32."""

COARSE = Budget(0.12, 0.2)
"""The same where that moves a nibble or an 8-bit code of cache or activations."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(random_model(FAMILIES["llama"]), tmp_path_factory.mktemp("model"))


def on_gpu(folder: Path, weights: str, cache: str = "bf16", **options: Any) -> Llama:
    """The model, planned for that cache."""
    given = {"cache": FP8} if cache == "fp8" else {}
    options = {"max_rows": 64, "page_size": 32, "scaling": "row", **given, **options}
    return Llama.from_folder(folder, device="cuda", weights=weights, **options)


def new_cache(model: Llama, kind: str, requests: int = 3, length: int = 96) -> KVCache:
    """An empty cache of that kind, in pages of 32."""
    options: dict[str, Any] = {"dtype": kind.split()[0], "page_size": 32}
    if kind == "fp8":
        options["scales"] = (0.02, 0.02)
    if kind == "int4 mirror":
        options["mirror"] = True
    return model.new_cache(requests, length, **options)


def taken_over(mine: KVCache, theirs: KVCache) -> None:
    """Memory of one cache into the other, which was filled alike."""
    if mine._memory is not None and theirs._memory is not None:
        mine._memory.view(torch.uint8).copy_(theirs._memory.view(torch.uint8))
    if mine.int4 is not None and theirs.int4 is not None:
        mine.int4.memory.copy_(theirs.int4.memory)
    if mine.qk4pv8 is not None and theirs.qk4pv8 is not None:
        for name in ("records", "delta", "q_means", "k_means"):
            here = getattr(mine.qk4pv8, name)
            if here is not None:
                here.copy_(getattr(theirs.qk4pv8, name))


@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("weights", WEIGHTS)
def test_steps_are_those_of_the_reference_backend(weights: str, cache: str, folder: Path) -> None:
    gpu = on_gpu(folder, weights, cache)
    cpu = Llama.from_folder(folder, device="cpu", weights=weights, scaling="row")
    models, caches = (gpu, cpu), [new_cache(m, cache) for m in (gpu, cpu)]
    coarse = weights == "fp8" or cache != "bf16"

    def both(call: Any, budget: Budget, live: list[int]) -> None:
        mine, right = (call(m, c).cpu() for m, c in zip(models, caches, strict=True))
        assert_within(mine[live], right[live], budget)
        assert (mine[[r for r in range(len(mine)) if r not in live]] == 0).all()

    ids = [prompt(37), prompt(4, 1)]
    both(
        lambda m, c: m.prefill(ids, c, rows=[0, 2]),
        Budget(0.2, 0.3) if coarse else Budget(0.03, 0.05),
        [0, 1],
    )
    taken_over(*caches)
    step = COARSE if cache not in ("bf16", "fp8") else SAME
    both(lambda m, c: m.decode([7, -1, 9], c), step, [0, 2])
    both(lambda m, c: m.decode([-1, -1, 11], c), step, [2])
    both(lambda m, c: m.decode([5, -1, 6], c), step, [0, 2])
    assert caches[0].held == caches[1].held == (39, 0, 7)
    assert caches[0].lengths.tolist() == [39, 0, 7]


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family(family: str, tmp_path: Path) -> None:
    folder = save(random_model(FAMILIES[family], seed=len(family)), tmp_path)
    gpu = on_gpu(folder, "bf16")
    cpu = Llama.from_folder(folder, device="cpu", weights="bf16")
    caches = [new_cache(m, "bf16") for m in (gpu, cpu)]
    for m, c in zip((gpu, cpu), caches, strict=True):
        m.prefill([prompt(20), prompt(3, 1)], c)
    for seed in range(3):
        tokens = [*prompt(2, 5 + seed), -1]
        mine, right = (m.decode(tokens, c).cpu() for m, c in zip((gpu, cpu), caches, strict=True))
        assert_within(mine[:2], right[:2], SAME)


@pytest.mark.parametrize("cache", CACHES)
def test_cg_04_a_graph_gives_what_its_kernels_give_one_by_one(cache: str, folder: Path) -> None:
    """Requests of all lengths, which come and go: the same bits with the graphs taken away."""
    found = []
    for graphs in (True, False):
        model = on_gpu(folder, "int4", cache)
        held = new_cache(model, cache, requests=4)
        if not graphs:
            model.backend._steps._captured = lambda *_: None
        order, logits = random.Random(3), []
        for _ in range(12):
            for row, count in enumerate(held.held):
                if count == 0 and order.random() < 0.5:
                    ids = prompt(order.randrange(1, 60), order.randrange(1000))
                    logits.append(model.prefill([ids], held, rows=[row]).clone())
                elif count > 80 or (count and order.random() < 0.1):
                    held.free(row)
            live = [count > 0 and order.random() < 0.8 for count in held.held]
            tokens = [order.randrange(160) if part else -1 for part in live]
            logits.append(model.decode(tokens, held))
        found.append(logits)
        graph_count = len(model.backend._steps._of(held).graphs)
        assert graph_count >= 1
    for mine, right in zip(*found, strict=True):
        assert_equal_bits(mine, right)


def test_a_step_waits_for_nothing(folder: Path) -> None:
    model = on_gpu(folder, "int4", "int4")
    cache = new_cache(model, "int4")
    model.prefill([prompt(5), prompt(9, 1)], cache)
    model.decode([1, 2, -1], cache)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        logits = model.decode([3, 4, -1], cache)
        chosen = model.likeliest(logits, cache)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(chosen[:2], logits[:2].argmax(1))


def test_iw_11_requests_do_not_see_each_other(folder: Path) -> None:
    """Where it is asked for, a request's logits have the same bits alone, and in any place of any batch."""
    model = on_gpu(folder, "int4", "int4")
    alone = new_cache(model, "int4", requests=1)
    model.prepare(alone, batch_invariant=True)
    model.prefill([prompt(40)], alone)
    wanted = [model.decode([token], alone)[0] for token in prompt(4, 9)]
    for requests, place in ((3, 1), (9, 8), (20, 0)):
        cache = new_cache(model, "int4", requests)
        model.prepare(cache, batch_invariant=True)
        model.prefill([prompt(40)], cache, rows=[place])
        for row in range(0, requests, 2):
            if row != place:
                model.prefill([prompt(1 + 11 * row % 50, row)], cache, rows=[row])
        for right, token in zip(wanted, prompt(4, 9), strict=True):
            tokens = [token if r == place else 5 if n else -1 for r, n in enumerate(cache.held)]
            assert_equal_bits(model.decode(tokens, cache)[place], right)


# --- a trained checkpoint ---


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[list[int]]]:
    """SmolLM2-135M as a folder, and ten prompts of 64 tokens."""
    checkpoint = Checkpoint.open()
    folder = write(checkpoint, tmp_path_factory.mktemp("smollm2"))
    ids = checkpoint.tokenizer.encode(f"{TEXT}. {OTHER}.").ids
    starts = [n * (len(ids) - 64) // 9 for n in range(10)]
    return folder, [ids[start : start + 64] for start in starts]


NEW = 64
"""Tokens behind a prompt."""


def test_greedy_text_is_that_of_transformers(trained: tuple[Path, list[list[int]]]) -> None:
    """BF16 against float32: token for token along transformers' text, but where its two likeliest are nearly tied."""
    folder, prompts = trained
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).cuda().eval()
    mine = Llama.from_folder(folder, device="cuda", weights="bf16", max_rows=640)
    cache = mine.new_cache(len(prompts), 64 + NEW)
    with torch.no_grad():
        made = theirs.generate(
            torch.tensor(prompts, device="cuda"),
            attention_mask=torch.ones(len(prompts), 64, dtype=torch.int64, device="cuda"),
            max_new_tokens=NEW,
            min_new_tokens=NEW,
            do_sample=False,
            pad_token_id=0,
        )
        right = theirs(made[:, :-1]).logits[:, 63:]
    found = [mine.prefill(prompts, cache)]
    for place in range(64, 64 + NEW - 1):
        found.append(mine.decode(made[:, place], cache))
    chosen = torch.stack(found, dim=1).argmax(-1)
    lost = right.amax(-1) - right.gather(-1, chosen[..., None])[..., 0]
    assert float(lost.max()) <= NEAR
    assert float((lost > 0).float().mean()) <= 0.08


@pytest.mark.parametrize(
    ("weights", "cache"), [("int4", "int4"), ("int4", "qk4pv8"), ("fp8", "fp8")]
)
def test_low_bit_text_is_that_of_the_reference_backend(
    weights: str, cache: str, trained: tuple[Path, list[list[int]]]
) -> None:
    """The same quantised numbers on the CPU: the likeliest token, but for near ties, along the GPU's text."""
    folder, prompts = trained
    given = {"cache": FP8} if cache == "fp8" else {}
    scales = {"scales": (0.05, 0.02)} if cache == "fp8" else {}
    gpu = Llama.from_folder(
        folder, device="cuda", weights=weights, scaling="row", max_rows=640, **given
    )
    cpu = Llama.from_folder(folder, device="cpu", weights=weights, scaling="row")
    ids = prompts[0]
    text = list(greedy(gpu, ids, gpu.new_cache(1, 96, dtype=cache, **scales), 16))
    held = cpu.new_cache(1, 96, dtype=cache, page_size=64, **scales)
    rows = [cpu.prefill(ids, held)]
    rows += [cpu.decode([token], held) for token in text[:-1]]
    right = torch.cat(rows)
    lost = right.amax(1) - right[torch.arange(len(text)), torch.tensor(text)]
    assert float(lost.median()) == 0
    assert float(lost.max()) <= 1.5
