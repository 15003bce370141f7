"""Two copies of keys and values on the GPU: both are written by prefill and step, and each has its reader.

``tests.ptx.plugin`` runs the smaller ones without a GPU.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from epicute.kv import KVCache
from epicute.models.llama import Llama
from epicute.testing import Budget, assert_equal_bits, assert_within
from tests.models.folders import random_model, save
from tests.models.mirrored_scenes import MirroredScene, others_unchanged
from tests.models.replays import Replays
from tests.models.test_decode_model import FAMILIES, prompt
from tests.models.test_fp8_mirror import SCALES, assert_mirrored
from tests.models.test_gpu_decode import RAGGED, SPECS, WALKS
from tests.models.test_gpu_decode_model import SAME, on_gpu, taken_over

pytestmark = pytest.mark.gpu

FORMS = (("bf16", "row"), ("fp8", "row"), ("fp8", "delayed"), ("int4", "row"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(random_model(FAMILIES["llama"]), tmp_path_factory.mktemp("model"))


def both(model: Llama, requests: int = 3, length: int = 96, **options: Any) -> KVCache:
    """An empty cache with a main copy and an FP8 mirror, in pages of 32."""
    given: dict[str, Any] = {"dtype": "fp8", "mirror": True, "scales": SCALES, "page_size": 32}
    return model.new_cache(requests, length, **{**given, **options})


@pytest.mark.parametrize("page", [64, None], ids=["paged", "contiguous"])
@pytest.mark.parametrize("cache", ["fp8", "int4"])
@pytest.mark.parametrize("weights", ["bf16", "fp8", "int4"])
@pytest.mark.parametrize("name", SPECS)
def test_both_copies_hold_what_the_quantisers_give(
    name: str, weights: str, cache: str, page: int | None
) -> None:
    """The layer in float64 over the copy that is read; each new row in both, to the bit; other cells as before."""
    lengths = RAGGED[:3] if name == "tiny" else RAGGED
    at = MirroredScene(
        SPECS[name], weights, cache, lengths, page=page, pages=24, device="cuda", seed=len(weights)
    )
    block, before = at.plan(max_len=2**20, prefetch=True), at.snapshot()
    at.check(block, at.run(block))
    others_unchanged(at, before)


@pytest.mark.parametrize("cache", ["fp8", "int4"])
def test_cg_04_replays_with_changing_lengths(cache: str) -> None:
    """See ``test_gpu_decode``: what repeats gives the same bits, and leaves them in both copies."""
    at = MirroredScene(
        SPECS["SmolLM2"], "int4", cache, Replays.lengths(WALKS), page=64, pages=68, device="cuda"
    )
    Replays(at, at.plan(max_len=2**20, prefetch=True), WALKS).run(3000)


@pytest.mark.parametrize(("weights", "scaling"), FORMS)
def test_steps_are_those_of_the_reference_backend(weights: str, scaling: str, folder: Path) -> None:
    """Mirrors of all that prefills and steps have written, and the steps' logits over the same rows."""
    gpu = on_gpu(folder, weights, scaling=scaling)
    cpu = Llama.from_folder(folder, device="cpu", weights=weights, scaling=scaling)
    models, caches = (gpu, cpu), [both(m) for m in (gpu, cpu)]
    ids = [prompt(37), prompt(4, 1)]
    mine, right = (m.prefill(ids, c, rows=[0, 2]) for m, c in zip(models, caches, strict=True))
    coarse = weights in ("fp8", "int4")
    assert_within(mine.cpu(), right, Budget(0.2, 0.3) if coarse else Budget(0.03, 0.05))
    for cache in caches:
        assert_mirrored(cache)
    taken_over(*caches)
    assert caches[0].fp8 is not None
    assert caches[1].fp8 is not None
    caches[0].fp8.memory.view(torch.uint8).copy_(caches[1].fp8.memory.view(torch.uint8))
    for tokens in ([7, -1, 9], [-1, -1, 11], [5, -1, 6]):
        mine, right = (m.decode(tokens, c).cpu() for m, c in zip(models, caches, strict=True))
        live = [row for row, token in enumerate(tokens) if token >= 0]
        assert_within(mine[live], right[live], SAME)
        assert (mine[1] == 0).all()
    for cache in caches:
        assert_mirrored(cache)


def test_a_prefill_is_as_without_a_mirror(folder: Path) -> None:
    """It reads the main copy: the same bits, chunk after chunk."""
    model = on_gpu(folder, "bf16")
    plain, two = model.new_cache(1, 96, page_size=32), both(model, 1)
    right, found = (
        model.prefill(prompt(70), cache, chunk=32, logits="all") for cache in (plain, two)
    )
    assert_equal_bits(found.cpu(), right.cpu())
    for layer in range(model.config.layers):
        assert_equal_bits(
            two.dense_keys(layer)[:, :70].cpu(), plain.dense_keys(layer)[:, :70].cpu()
        )
    assert_mirrored(two)


def test_cg_04_a_graph_gives_what_its_kernels_give_one_by_one(folder: Path) -> None:
    found = []
    for graphs in (True, False):
        model = on_gpu(folder, "int4")
        held = both(model, requests=4)
        if not graphs:
            model.backend._steps._captured = lambda *_: None
        model.prefill([prompt(50), prompt(1, 1), prompt(33, 2)], held)
        logits = []
        for step in range(8):
            if step == 4:
                held.free(0)
                model.prefill([prompt(64, 7)], held, rows=[3])
            tokens = [
                step if count and (row + step) % 3 else -1 for row, count in enumerate(held.held)
            ]
            logits.append(model.decode(tokens, held))
        found.append(torch.stack(logits))
        assert held.fp8 is not None
        found.append(held.fp8.memory.view(torch.uint8).clone())
    assert_equal_bits(found[0], found[2])
    assert_equal_bits(found[1], found[3])


def test_a_step_waits_for_nothing(folder: Path) -> None:
    model = on_gpu(folder, "int4")
    cache = both(model)
    model.prefill([prompt(5), prompt(9, 1)], cache)
    model.decode([1, 2, -1], cache)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        model.decode([3, 4, -1], cache)
    finally:
        torch.cuda.set_sync_debug_mode("default")
