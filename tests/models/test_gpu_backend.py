"""The GPU's backend with its kernels evaluated on the CPU: the same bits as the reference backend."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from epicute.errors import ArgumentError, UnsupportedError
from epicute.models.config import ModelConfig
from epicute.models.folder import Folder
from epicute.models.gpu_backend import GpuBackend
from epicute.models.llama import Llama
from epicute.models.requests import Requests
from epicute.testing import Budget, assert_equal_bits, assert_within
from tests.models.cpu_kernels import Launches
from tests.models.folders import FAMILIES, random_model, save

FP8 = torch.float8_e4m3fn
TIGHT = Budget(norm=1e-3, worst_row=4e-3)
"""One layer: sums in another order, and here and there a rounding to 16 bits that falls the other way."""

WHOLE = {"bf16": Budget(0.008, 0.02), "fp8": Budget(0.1, 0.2)}
"""All layers: what those few roundings become. Rounding as such costs up to ten times as much."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(random_model(FAMILIES["llama"]), tmp_path_factory.mktemp("model"))


def planned(folder: Path, **options: Any) -> Llama:
    """The model as a GPU would run it."""
    config = ModelConfig.from_folder(folder)
    options = {"max_rows": 40, "page_size": 16, **options}
    kernels = Launches().kernels
    backend = GpuBackend(config, Folder(folder), device="cpu", kernels=kernels, **options)
    return Llama(config, backend, "cpu")


def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(160, (n,), generator=generator).tolist() for n in (30, 1, 25)]


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "gemma with SiLU"])
@pytest.mark.parametrize(("weights", "scaling"), [("bf16", "delayed"), ("fp8", "row")])
def test_logits_are_those_of_the_reference_backend(
    weights: str, scaling: str, family: str, tmp_path: Path
) -> None:
    """Three requests in two invocations: every token's logits, and what the first layer has put into the cache."""
    folder = save(random_model(FAMILIES[family]), tmp_path)
    gpu = planned(folder, weights=weights, scaling=scaling)
    cpu = Llama.from_folder(folder, device="cpu", weights=weights, scaling=scaling)
    caches = [gpu.new_cache(3, 64), cpu.new_cache(3, 64, page_size=16)]
    found = gpu.prefill(prompts(), caches[0], logits="all")
    expected = cpu.prefill(prompts(), caches[1], chunk=40, logits="all")
    assert_within(found, expected, WHOLE[weights])
    tokens = [slice(0, 30), slice(64, 65), slice(128, 153)]
    for mine, right in (
        (caches[0].dense_keys(0), caches[1].dense_keys(0)),
        (caches[0].dense_values(0), caches[1].dense_values(0)),
    ):
        for at in tokens:
            assert_within(mine.flatten(0, 1)[at], right.flatten(0, 1)[at], TIGHT)


def test_delayed_scales_serve_both_alike(folder: Path) -> None:
    """After the first invocation, which each calibrates in its own way, equal states give equal logits."""
    gpu = planned(folder, weights="fp8")
    cpu = Llama.from_folder(folder, device="cpu", weights="fp8")
    caches = [gpu.new_cache(6, 64), cpu.new_cache(6, 64, page_size=16)]
    first = [
        model.prefill(prompts(), cache, logits="all", chunk=60)
        for model, cache in zip((gpu, cpu), caches, strict=True)
    ]
    assert_within(first[0], first[1], Budget(0.3, 0.8))
    for mine, theirs in zip(cpu.backend.scales, gpu.backend.scales, strict=True):
        mine.load_state_dict(theirs.state_dict())
    cpu.backend.entry.load_state_dict(gpu.backend.group["0.x"].state_dict())
    second = [
        model.prefill(prompts()[0], cache, rows=[4], logits="all")
        for model, cache in zip((gpu, cpu), caches, strict=True)
    ]
    assert_within(second[0], second[1], WHOLE["fp8"])
    for mine, theirs in zip(cpu.backend.scales, gpu.backend.scales, strict=True):
        for ours, right in zip(mine.sites, theirs.sites, strict=True):
            assert_within(ours.amax_next, right.amax_next, Budget(0.1, 0.1))
            assert torch.equal(ours.scale_used, right.scale_used)


@pytest.fixture(scope="module")
def loud(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose streams are far from a first scale of 1."""
    model = random_model(FAMILIES["llama"])
    with torch.no_grad():
        for layer in model.model.layers:
            layer.mlp.down_proj.weight.mul_(3000.0)
    return save(model, tmp_path_factory.mktemp("loud"))


def test_df_06_calibration_leaves_no_counts_and_no_history_of_its_own(loud: Path) -> None:
    gpu = planned(loud, weights="fp8", cache=FP8)
    group = gpu.backend.group
    caches = [gpu.new_cache(1, 64, scales=(0.001, 0.001)) for _ in range(2)]
    ids = prompts()[0]
    gpu.prefill(ids, caches[0])
    assert group.saturated.tolist() == [0] * len(group)
    assert group.nans.tolist() == [0] * len(group)
    assert (group.history[:, 0] > 0).all()
    assert (group.history[:, 1:] == 0).all()
    gpu.prefill(ids, caches[1])
    # What the last call of the calibration saw is what the invocation itself has seen.
    assert_equal_bits(group.history[:, 1], group.history[:, 0])
    assert group.saturated.tolist() == [0] * len(group)
    assert (caches[0].saturated > 0).all()
    assert_equal_bits(caches[0].saturated, caches[1].saturated)
    assert int(gpu.backend.strays) == int(gpu.backend.stray_rows) == 0


def test_df_04_idle_replays_erase_nothing_that_was_learnt(folder: Path) -> None:
    """A captured batch whose rows are all slack, again and again."""
    gpu = planned(folder, weights="fp8")
    backend, cache = gpu.backend, gpu.new_cache(3, 64)

    def idle() -> None:
        requests = Requests.packed([0], 16, cache.host_table([0]), rows=8)
        x = backend.embed(torch.full((8,), -1))
        for layer in range(gpu.config.layers):
            x = backend.block(layer, x, requests, cache)
        assert (x.values == 0).all()

    idle()  # tells nothing: the next one is calibrated on
    gpu.prefill([prompts()[0]], cache)
    assert backend.group.saturated.sum() == 0
    backend.group.roll()
    before = backend.group.state_dict()
    for _ in range(17):
        idle()
    backend.group.roll()
    for name, tensor in before.items():
        assert_equal_bits(backend.group.state_dict()[name], tensor, name)


def test_an_fp8_cache(folder: Path) -> None:
    gpu = planned(folder, weights="bf16", cache=FP8)
    cpu = Llama.from_folder(folder, device="cpu", weights="bf16")
    scales = (0.05, torch.full((3, 2), 0.001))
    caches = [
        gpu.new_cache(1, 32, scales=scales),
        cpu.new_cache(1, 32, scales=scales, dtype=FP8, page_size=16),
    ]
    assert caches[0].spec.dtype == FP8
    ids = prompts()[0]
    found = gpu.prefill(ids, caches[0], logits="all")
    assert_within(found, cpu.prefill(ids, caches[1], logits="all"), WHOLE["bf16"])
    assert torch.equal(caches[0].saturated[0], caches[1].saturated[0])
    assert (caches[0].saturated[:, 1] > 0).all()


def test_prompts_longer_than_the_memory_come_in_chunks(folder: Path) -> None:
    gpu = planned(folder, weights="bf16")
    small = planned(folder, weights="bf16", max_rows=7)
    ids = prompts()[0]
    whole = gpu.prefill(ids, gpu.new_cache(1, 32), logits="all")
    chunks = small.prefill(ids, small.new_cache(1, 32), logits="all")
    assert_within(chunks, whole, WHOLE["bf16"])
    assert int(small.backend.strays) == 0


def test_two_caches_do_not_mix(folder: Path) -> None:
    gpu = planned(folder, weights="bf16")
    one, two = gpu.new_cache(1, 64), gpu.new_cache(1, 64)
    first, _, other = prompts()
    expected = gpu.prefill(first, gpu.new_cache(1, 64))
    gpu.prefill(first[:20], one)
    gpu.prefill(other, two)
    assert_within(gpu.prefill(first[20:], one), expected, WHOLE["bf16"])


def test_what_it_was_not_planned_for(folder: Path) -> None:
    gpu = planned(folder, weights="bf16")
    for change in ({"page_size": 32}, {"dtype": torch.float32}):
        cache = gpu.new_cache(1, 64, pages=4, **change)
        with pytest.raises(
            ArgumentError, match=r"^cache: got .*bfloat16 in pages of 16.*new_cache"
        ):
            gpu.prefill([1, 2], cache)
        assert (cache.held, cache.free_pages) == ((0,), 4)
    with pytest.raises(UnsupportedError, match="^weights.*cpu"):
        planned(folder, weights="exact")
    with pytest.raises(ArgumentError, match="format"):
        planned(folder, weights="nvfp4")


@pytest.mark.parametrize("vocabulary", [161, 162, 168])
def test_any_vocabulary(vocabulary: int, tmp_path: Path) -> None:
    """Rows of logits that do not end on 16 bytes."""
    model = random_model(FAMILIES["llama"])
    model.resize_token_embeddings(vocabulary)
    save(model, tmp_path)
    gpu = planned(tmp_path, weights="bf16")
    cpu = Llama.from_folder(tmp_path, device="cpu")
    ids = [vocabulary - 1, 3]
    found = gpu.prefill(ids, gpu.new_cache(1, 16), logits="all")
    assert found.shape == (2, vocabulary)
    assert_within(found, cpu.prefill(ids, cpu.new_cache(1, 16), logits="all"), WHOLE["bf16"])


def test_the_last_layer_leaves_no_fp8_copy(folder: Path) -> None:
    """Nobody would read it. All layers share kernels and scratch memory, but for that projection."""
    for scaling, quantised in (("delayed", 0), ("row", 4 * 3)):
        gpu = planned(folder, weights="fp8", scaling=scaling)
        blocks = gpu.backend.blocks
        assert [block.spec.last for block in blocks] == [False, False, True]
        assert len({block.workspace.q.data_ptr() for block in blocks}) == 1
        assert blocks[0].projections is blocks[1].projections
        titles = [block.spec.compositions["down"].title for block in blocks]
        assert [title.endswith("EmitFP8") for title in titles] == [scaling == "delayed"] * 2 + [
            False
        ]
        launches = blocks[0].attention.launches
        gpu.prefill(prompts()[0], gpu.new_cache(1, 64))
        launches.clear()
        blocks[-1].attention.launches.clear()
        gpu.prefill(prompts()[0], gpu.new_cache(1, 64))
        assert launches.count("quantize_rows") == quantised
        if scaling == "delayed":
            assert "3.x" not in gpu.backend.group.names
            assert gpu.backend.scales[-1].y is None
