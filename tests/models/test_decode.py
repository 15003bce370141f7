"""One token of every request: the bits of a prefill, the tokens of transformers, and what is refused."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from epicute.errors import ArgumentError
from epicute.kv.cache import CapacityError, KVCache
from epicute.models.config import ModelConfig
from epicute.models.folder import Folder
from epicute.models.llama import Llama
from epicute.testing import Budget, assert_within
from tests.models.folders import FAMILIES, random_model, save
from tests.models.one_thread import single as single

VOCABULARY = 160
TIGHT = Budget(1e-6, 1e-6)
FLOAT32 = Budget(norm=2e-5, worst_row=1e-4)
"""transformers computes in float32: three layers of rounding, and frequencies that are a few units off."""


def prompt(length: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(VOCABULARY, (length,), generator=generator).tolist()


@pytest.fixture(scope="module")
def theirs() -> Any:
    return random_model(FAMILIES["llama"])


@pytest.fixture(scope="module")
def folder(theirs: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(theirs, tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def model(folder: Path) -> Llama:
    return Llama.from_folder(folder, device="cpu", weights="exact")


def cells(cache: KVCache, row: int) -> Tensor:
    """(layers, 2, tokens, kv_heads, head_dim) that the cache holds of a request, as raw numbers."""
    place = torch.arange(cache.held[row])
    page = cache.page_table[row][place // cache.spec.page_size].long()
    at = page, place % cache.spec.page_size
    layers = range(cache.spec.layers)
    return torch.stack(
        [torch.stack([cache.keys(i)[at], cache.values(i)[at]]).float() for i in layers]
    )


# --- the numbers ---


@pytest.mark.parametrize("dtype", ["bf16", "fp8"])
@pytest.mark.parametrize("weights", ["exact", "bf16", "fp16", "int4"])
def test_a_step_is_a_prefill_of_one_token_to_the_bit(
    weights: str, dtype: str, folder: Path
) -> None:
    """Ragged requests over page edges; logits and cells."""
    model = Llama.from_folder(folder, device="cpu", weights=weights)
    kind = "fp16" if (weights, dtype) == ("fp16", "bf16") else dtype
    scales = (0.01, 0.02) if dtype == "fp8" else None
    stepped, prefilled = (
        model.new_cache(3, 40, dtype=kind, page_size=16, scales=scales) for _ in range(2)
    )
    for cache in (stepped, prefilled):
        model.prefill([prompt(14), prompt(1, 1), prompt(31, 2)], cache)
    for step in range(4):
        tokens = prompt(3, 7 + step)
        right = model.prefill([[token] for token in tokens], prefilled)
        assert torch.equal(model.decode(tokens, stepped), right)
    assert stepped.held == prefilled.held == (18, 5, 35)
    assert stepped.lengths.tolist() == [18, 5, 35]
    assert torch.equal(stepped.saturated, prefilled.saturated)
    for row in range(3):
        assert torch.equal(cells(stepped, row), cells(prefilled, row))


@pytest.mark.parametrize("scaling", ["delayed", "row"])
def test_fp8_weights_meet_16_bit_activations_in_a_step(scaling: str, folder: Path) -> None:
    """The bits of a 16-bit model with the FP8 weights' values; scales of activations stay as they were."""
    model = Llama.from_folder(folder, device="cpu", weights="fp8", scaling=scaling)
    wide = Llama.from_folder(folder, device="cpu", weights="bf16")
    wide.backend._layers = model.backend._layers
    caches = [model.new_cache(1, 40) for _ in range(3)]
    for cache in caches:
        model.prefill(prompt(20), cache)
    sites = [site for block in model.backend.scales for site in block.sites]
    before = [site.state_dict() for site in (*sites, model.backend.entry)]
    stepped = model.decode([5], caches[0])
    after = [site.state_dict() for site in (*sites, model.backend.entry)]
    for was, now in zip(before, after, strict=True):
        assert all(torch.equal(was[name], now[name]) for name in was)
    assert torch.equal(stepped, wide.prefill([[5]], caches[1]))
    prefilled = model.prefill([[5]], caches[2])
    assert_within(stepped, prefilled, Budget(0.3, 0.3))
    assert not torch.equal(stepped, prefilled)


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_those_of_transformers(family: str, tmp_path: Path) -> None:
    """Every family, token by token behind a prompt of three."""
    theirs = random_model(FAMILIES[family], seed=len(family))
    mine = Llama.from_folder(save(theirs, tmp_path), device="cpu", weights="exact")
    ids = prompt(24, 1)
    with torch.no_grad():
        expected = theirs(torch.tensor([ids])).logits[0]
    cache = mine.new_cache(1, 32, page_size=16)
    mine.prefill(ids[:3], cache)
    found = torch.cat([mine.decode([token], cache) for token in ids[3:]])
    assert_within(found, expected[3:], FLOAT32)


def test_kv_17_head_norms_stand_before_the_rotation(tmp_path: Path) -> None:
    """Qwen3's norms with a gain that varies by channel: after the rotation they would give something else."""
    theirs = random_model(FAMILIES["qwen3"])
    with torch.no_grad():
        for layer in theirs.model.layers:
            layer.self_attn.q_norm.weight.copy_(1 + torch.arange(32) / 32)
            layer.self_attn.k_norm.weight.copy_(1 + torch.arange(32) / 16)
        mine = Llama.from_folder(save(theirs, tmp_path), device="cpu", weights="exact")
        ids = prompt(20)
        expected = theirs(torch.tensor([ids])).logits[0, -1:]
    cache = mine.new_cache(1, 32)
    mine.prefill(ids[:19], cache)
    assert_within(mine.decode(ids[19:], cache), expected, FLOAT32)


NEAR = 0.05
"""Logits that a BF16 model may be off by: where transformers' two likeliest are nearer, either may win."""


@pytest.mark.parametrize("seed", range(4))
def test_greedy_tokens_are_those_of_transformers(seed: int, theirs: Any, folder: Path) -> None:
    """BF16 weights and cache against float32, 64 tokens of prompt, 16 behind: token for token, but for near ties."""
    mine = Llama.from_folder(folder, device="cpu", weights="bf16")
    ids = prompt(64, 40 + seed)
    whole, rows = list(ids), []
    with torch.no_grad():
        for _ in range(16):
            rows.append(theirs(torch.tensor([whole])).logits[0, -1:])
            whole.append(int(rows[-1].argmax()))
    logits = torch.cat(rows)
    cache = mine.new_cache(1, 80)
    found = [mine.prefill(ids, cache)]
    found += [mine.decode([token], cache) for token in whole[64:-1]]
    chosen = torch.cat(found).argmax(1)
    lost = logits.amax(1) - logits.gather(1, chosen[:, None])[:, 0]
    assert float(lost.max()) <= NEAR, (whole[64:], chosen.tolist(), lost.tolist())
    assert int((lost > 0).sum()) <= 2


# --- who takes part ---


@pytest.mark.parametrize("weights", ["bf16", "fp8"])
def test_cg_06_requests_that_take_no_part_are_seen_by_nothing(weights: str, folder: Path) -> None:
    """Empty rows and rows that wait, with NaN in every cell that nobody owns."""
    model = Llama.from_folder(folder, device="cpu", weights=weights, scaling="row")
    cache = model.new_cache(5, 40, page_size=16)
    for layer in range(3):
        cache.keys(layer).fill_(math.nan)
        cache.values(layer).fill_(math.nan)
    model.prefill([prompt(9), prompt(17, 1), prompt(4, 2)], cache, rows=[1, 2, 4])
    waiting = cells(cache, 2)
    found = model.decode([-1, 11, -1, -1, 12], cache)
    assert cache.held == (0, 10, 17, 0, 5)
    assert (found[[0, 2, 3]] == 0).all()
    assert torch.equal(cells(cache, 2), waiting)
    assert cells(cache, 1).isfinite().all()
    for row, ids, token in ((1, prompt(9), 11), (4, prompt(4, 2), 12)):
        alone = model.new_cache(1, 40, page_size=16)
        model.prefill(ids, alone)
        assert_within(found[row], model.decode([token], alone)[0], TIGHT)


def test_nobody_takes_part(model: Llama) -> None:
    cache = model.new_cache(2, 32)
    assert torch.equal(model.decode([-1, -1], cache), torch.zeros(2, VOCABULARY))
    assert cache.held == (0, 0)


def test_steps_and_prefills_in_turn(model: Llama) -> None:
    """A request decodes while another is prefilled, and each goes on where it stands."""
    cache = model.new_cache(2, 64, pages=6, page_size=16)
    a, b = prompt(30), prompt(30, 1)
    model.prefill(a[:10], cache)
    model.decode([a[10], -1], cache)
    model.prefill([b[:20]], cache, rows=[1])
    model.decode([a[11], b[20]], cache)
    model.prefill([a[12:20]], cache, rows=[0])
    found = model.decode([a[20], b[21]], cache)
    for n, ids in enumerate((a[:21], b[:22])):
        right = model.prefill(ids, model.new_cache(1, 64))
        assert_within(found[n], right[0], TIGHT)


def test_tokens_may_be_a_list_or_a_tensor(model: Llama) -> None:
    def run(tokens: Any) -> Tensor:
        cache = model.new_cache(2, 32)
        model.prefill([prompt(5), prompt(6)], cache)
        return model.decode(tokens, cache)

    right = run([3, 4])
    assert right.shape == (2, VOCABULARY)
    assert right.dtype == torch.float32
    for tokens in ((3, 4), torch.tensor([3, 4]), torch.tensor([3, 4], dtype=torch.int32)):
        assert torch.equal(run(tokens), right)


def test_matrices_are_kept_or_made_anew_with_the_same_bits(folder: Path) -> None:
    kept, made = (
        Llama.from_folder(folder, device="cpu", weights="int4", resident=resident)
        for resident in (True, False)
    )
    logits = []
    for model in (kept, made):
        cache = model.new_cache(1, 32)
        logits.append([model.prefill(prompt(9), cache), model.decode([1], cache)])
    for mine, right in zip(*logits, strict=True):
        assert torch.equal(mine, right)


# --- what is refused ---


class TestRefused:
    @pytest.mark.parametrize(
        ("tokens", "named"),
        [
            ([1], "^tokens: got 1 tokens, expected 2"),
            ([1, 2, 3], "^tokens: got 3 tokens"),
            ([1, VOCABULARY], r"^tokens: got \[160\]"),
            ([1, -2], r"^tokens: got \[-2\]"),
            ([1, 0.5], r"^tokens: got \[0\.5\]"),
            ([1, 2], r"^tokens: got tokens for requests \[1\], which hold none.*prefill"),
            (torch.tensor([[1, -1]]), "^tokens"),
            (torch.tensor([1.0, -1.0]), "^tokens"),
        ],
    )
    def test_tokens(self, tokens: Any, named: str, model: Llama) -> None:
        cache = model.new_cache(2, 32)
        model.prefill([prompt(4)], cache)
        with pytest.raises(ArgumentError, match=named):
            model.decode(tokens, cache)
        assert cache.held == (4, 0)
        assert model.decode([1, -1], cache).shape == (2, VOCABULARY)

    def test_a_tensor_that_is_missing(self, folder: Path) -> None:
        tensors = dict(Folder(folder))
        config = ModelConfig.from_folder(folder)
        found = Llama.from_tensors(config, tensors | {"more": torch.ones(1)}, device="cpu")
        assert repr(found).startswith("Llama(llama ")
        del tensors["model.layers.1.mlp.up_proj.weight"]
        with pytest.raises(ArgumentError, match=r"^tensors: got none called model\.layers\.1\.mlp"):
            Llama.from_tensors(config, tensors, device="cpu")

    def test_a_cache_of_another_model(self, model: Llama, tmp_path: Path) -> None:
        folder = save(random_model(FAMILIES["qwen3"]), tmp_path)
        other = Llama.from_folder(folder, device="cpu", weights="exact")
        cache = other.new_cache(1, 32)
        other.prefill(prompt(3), cache)
        with pytest.raises(ArgumentError, match="^cache"):
            model.decode([1], cache)

    def test_no_room(self, model: Llama) -> None:
        """Of the request's length, and of the pool: nothing has run for the others either."""
        cache = model.new_cache(2, 16, page_size=16)
        model.prefill([prompt(16), prompt(3)], cache)
        with pytest.raises(CapacityError):
            model.decode([1, 1], cache)
        assert cache.held == (16, 3)
        assert cache.lengths.tolist() == [16, 3]
        pool = model.new_cache(2, 32, pages=2, page_size=16)
        model.prefill([prompt(16), prompt(16)], pool)
        with pytest.raises(CapacityError):
            model.decode([1, -1], pool)
        assert pool.held == (16, 16)

    def test_a_step_that_fails_leaves_the_lengths(
        self, model: Llama, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        cache = model.new_cache(1, 32)
        model.prefill(prompt(5), cache)
        right = model.prefill([[7]], _copy(model))
        with monkeypatch.context() as patch:
            patch.setattr(model.backend, "logits", _broken)
            with pytest.raises(RuntimeError, match="broken"):
                model.decode([7], cache)
        assert cache.held == (5,)
        assert cache.lengths.tolist() == [5]
        assert torch.equal(model.decode([7], cache), right)


def _copy(model: Llama) -> KVCache:
    cache = model.new_cache(1, 32)
    model.prefill(prompt(5), cache)
    return cache


def _broken(*_: Any) -> Tensor:
    raise RuntimeError("broken")
