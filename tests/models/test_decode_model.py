"""The GPU's backend token by token, its kernels evaluated on the CPU: the reference backend's logits in every form."""

from __future__ import annotations

import gc
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config

from epicute.errors import ArgumentError, UnsupportedError
from epicute.kv.cache import CapacityError, KVCache
from epicute.models.config import ModelConfig
from epicute.models.decode_model import rows_for
from epicute.models.folder import Folder
from epicute.models.generation import greedy
from epicute.models.gpu_backend import GpuBackend
from epicute.models.llama import Llama
from epicute.quant.int4 import Int4Grid
from epicute.testing import Budget, assert_equal_bits, assert_within
from epicute.weights import QuantizedInt4, Weight
from tests.models.decode_kernels import step_kernels
from tests.models.folders import SIZES, random_model, save
from tests.models.one_thread import single as single

FP8 = torch.float8_e4m3fn
WIDE: dict[str, Any] = SIZES | {
    "hidden_size": 128,
    "intermediate_size": 160,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
}
FAMILIES = {
    "llama": LlamaConfig(**WIDE),
    "mistral, window 9": MistralConfig(**WIDE, sliding_window=9),
    "qwen2, tied": Qwen2Config(**{**WIDE, "hidden_size": 256}, tie_word_embeddings=True),
    "qwen3": Qwen3Config(**WIDE),
}
PAGE = 16
SAME = Budget(0.006, 0.012)
"""All layers: sums in another order, and here and there a rounding to 16 bits that falls the other way."""

NIBBLES = Budget(0.015, 0.03)
"""The same where such a rounding moves a nibble of the cache, whose steps are a seventh of a row's largest value."""

EXPANDED = Budget(0.03, 0.05)
"""A prefill with INT4 weights, whose values are rounded to BF16 for the large GEMM."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(random_model(FAMILIES["llama"]), tmp_path_factory.mktemp("model"))


def planned(folder: Path, made: list[str] | None = None, **options: Any) -> Llama:
    """The model as a GPU would run it; ``made`` notes its launches."""
    config = ModelConfig.from_folder(folder)
    options = {"max_rows": 40, "page_size": PAGE, "scaling": "row", **options}
    kernels = step_kernels(made)
    backend = GpuBackend(config, Folder(folder), device="cpu", kernels=kernels, **options)
    return Llama(config, backend, "cpu")


def prompt(length: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(160, (length,), generator=generator).tolist()


def pair(folder: Path, weights: str, cache: str, **options: Any) -> tuple[list[Llama], list[Any]]:
    """Both backends, and an empty cache of each for three requests."""
    given = {"cache": FP8} if cache == "fp8" else {}
    models = [
        planned(folder, weights=weights, **given, **options),
        Llama.from_folder(folder, device="cpu", weights=weights, scaling="row", **options),
    ]
    kind: dict[str, Any] = {"dtype": cache.split()[0], "page_size": PAGE}
    if cache == "fp8":
        kind["scales"] = (0.02, 0.02)
    if cache == "int4 mirror":
        kind["mirror"] = True
    if weights == "fp16" and cache == "bf16":
        kind["dtype"] = "fp16"
    return models, [model.new_cache(3, 48, **kind) for model in models]


def steps(models: list[Llama], caches: list[KVCache], prefill: Budget, step: Budget) -> None:
    """Ragged steps, of which not all requests are part, with a prefill of one between, by two models side by side.

    A step of the first is compared over what the second one's prefill has left in the cache.
    """

    def prefilled(ids: list[list[int]], rows: list[int]) -> None:
        mine, right = (m.prefill(ids, c, rows=rows) for m, c in zip(models, caches, strict=True))
        assert_within(mine, right, prefill)
        for layer in range(models[0].config.layers):
            if caches[0].spec.int4 != "only":
                for view in ("keys", "values"):
                    there, here = (getattr(c, view)(layer).view(torch.uint8) for c in caches[::-1])
                    here.copy_(there)
            if caches[0].int4 is not None and caches[1].int4 is not None:
                caches[0].int4.layer(layer).copy_(caches[1].int4.layer(layer))

    def stepped(tokens: list[int]) -> None:
        mine, right = (m.decode(tokens, c) for m, c in zip(models, caches, strict=True))
        live = torch.tensor(tokens) >= 0
        assert_within(mine[live], right[live], step)
        assert (mine[~live] == 0).all()

    prefilled([prompt(15), prompt(4, 1)], [0, 2])
    stepped([7, -1, 9])
    stepped([-1, -1, 11])
    prefilled([prompt(18, 2), prompt(3, 3)], [1, 2])
    for seed in (4, 5):
        stepped(prompt(3, seed))
    assert caches[0].held == caches[1].held == (18, 20, 11)
    assert caches[0].lengths.tolist() == [18, 20, 11]


@pytest.mark.parametrize("cache", ["bf16", "fp8", "int4", "int4 mirror"])
@pytest.mark.parametrize("weights", ["bf16", "fp16", "fp8", "int4"])
def test_steps_are_those_of_the_reference_backend(weights: str, cache: str, folder: Path) -> None:
    models, caches = pair(folder, weights, cache)
    # 8-bit activations of a prefill: see ``test_gpu_backend``.
    prefill = {"fp8": Budget(0.1, 0.2), "int4": EXPANDED}.get(weights, SAME)
    if "int4" in cache or (weights == "int4" and cache == "fp8"):
        prefill = Budget(0.15, 0.25) if weights == "fp8" else Budget(0.06, 0.12)
    steps(models, caches, prefill, NIBBLES if "int4" in cache else SAME)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family(family: str, tmp_path: Path) -> None:
    folder = save(random_model(FAMILIES[family], seed=len(family)), tmp_path)
    for weights, prefill in (("bf16", SAME), ("int4", EXPANDED)):
        steps(*pair(folder, weights, "bf16"), prefill, SAME)


def test_the_launches_of_a_step_are_five_a_layer_and_the_head(folder: Path) -> None:
    made: list[str] = []
    model = planned(folder, made, weights="bf16")
    cache = model.new_cache(1, 32)
    model.prefill(prompt(5), cache)
    model.prepare(cache)
    made.clear()
    model.decode([3], cache)
    assert len(made) == 5 * model.config.layers + 1
    assert [name.split(" ")[0] for name in made[:5]] == [
        "RowScale",
        "decode",
        "ResidualAdd",
        "RowScale",
        "ResidualAdd",
    ]


def test_int4_weights_are_there_once(folder: Path) -> None:
    """Prefill expands, right before each product, what a step streams."""
    made: list[str] = []
    model = planned(folder, made, weights="int4")
    cache = model.new_cache(1, 32)
    made.clear()
    model.prefill(prompt(5), cache)
    assert made.count("dequantize") == 4 * model.config.layers
    made.clear()
    model.decode([3], cache)
    assert "dequantize" not in made
    streamed = model.backend._streamed()
    for block, layer in zip(model.backend.blocks, streamed, strict=True):
        assert block.weights.qkv.packed.data.data_ptr() == layer.qkv.data.data_ptr()


def test_int4_codes_that_were_chosen_before(folder: Path) -> None:
    """Asymmetric groups of 32 in some projections, the model's own in others: both backends read the same."""
    state = dict(Folder(folder))
    given = {}
    for name in (
        "model.layers.0.self_attn.o_proj.weight",
        "model.layers.1.mlp.gate_proj.weight",
        "model.layers.1.mlp.up_proj.weight",
    ):
        codes = Weight(state[name], name).quantize("int4", Int4Grid(32, symmetric=False))
        assert isinstance(codes, QuantizedInt4)
        given[name] = codes
    models, caches = pair(folder, "int4", "bf16", int4=given)
    steps(models, caches, EXPANDED, SAME)
    assert models[0].backend.blocks[0].weights.o.packed.group == 32
    with pytest.raises(ArgumentError, match="parts"):
        planned(folder, weights="int4", int4={n: c for n, c in given.items() if "gate" in n})


def test_fp8_scales_are_neither_seen_nor_changed(folder: Path) -> None:
    model = planned(folder, weights="fp8", scaling="delayed")
    cache = model.new_cache(1, 32)
    model.prefill(prompt(9), cache)
    before = model.backend.group.state_dict()
    for token in prompt(5, 1):
        model.decode([token], cache)
    for name, tensor in model.backend.group.state_dict().items():
        assert_equal_bits(tensor, before[name], name)


@pytest.mark.parametrize("kind", ["bf16", "int4"])
def test_cg_06_requests_that_wait_keep_their_cells(kind: str, folder: Path) -> None:
    """A waiting request's last token is not written over, in records either."""
    model = planned(folder, weights="bf16")
    cache = model.new_cache(3, 48, dtype=kind)
    model.prefill([prompt(9), prompt(17, 1), prompt(4, 2)], cache)

    def held() -> Tensor:
        if cache.int4 is not None:
            return cache.int4.memory[:, 3:6].clone()
        return torch.stack([cache.keys(i)[3:6] for i in range(2)]).float()

    before = held()
    found = model.decode([5, -1, 6], cache)
    assert cache.held == (10, 17, 5)
    assert (found[1] == 0).all()
    assert_equal_bits(held(), before)


def test_kv_18_int4_chunks_read_what_the_records_have(folder: Path) -> None:
    """A prompt in pieces over records alone: later ones read dequantised rows, as the reference backend does."""
    models, caches = pair(folder, "bf16", "int4")
    ids = prompt(40, 9)
    for model, cache in zip(models, caches, strict=True):
        for part in (ids[:17], ids[17:18], ids[18:33]):
            model.prefill([part], cache, rows=[1])
    found, right = (
        model.prefill([ids[33:]], cache, rows=[1], logits="all")
        for model, cache in zip(models, caches, strict=True)
    )
    assert_within(found, right, Budget(0.03, 0.05))
    whole = models[0].new_cache(1, 48, dtype="int4")
    alone = models[0].prefill(ids, whole)
    assert_within(found[-1:], alone, Budget(0.5, 0.5))
    assert not torch.equal(found[-1:], alone)


def test_two_caches_of_two_forms_take_turns(folder: Path) -> None:
    model = planned(folder, weights="bf16")
    kinds: list[dict[str, Any]] = [{}, {"dtype": "int4"}, {"dtype": "int4", "mirror": True}]
    alone = []
    for kind in kinds:
        cache = model.new_cache(1, 32, **kind)
        model.prefill(prompt(9), cache)
        alone.append([model.decode([t], cache) for t in prompt(3, 5)])
    caches = [model.new_cache(2, 32, **kind) for kind in kinds]
    for cache in caches:
        model.prefill([prompt(9)], cache, rows=[1])
    for place, token in enumerate(prompt(3, 5)):
        for cache, right in zip(caches, alone, strict=True):
            assert torch.equal(model.decode([-1, token], cache)[1:], right[place])


def test_greedy_text_is_that_of_the_reference_backend(folder: Path) -> None:
    gpu = planned(folder, weights="bf16")
    cpu = Llama.from_folder(folder, device="cpu", weights="bf16")
    for seed in range(3):
        ids = prompt(12, seed)
        texts = [list(greedy(m, ids, m.new_cache(1, 32), 12)) for m in (gpu, cpu)]
        assert texts[0] == texts[1]


def test_the_likeliest_token_of_each_request(folder: Path) -> None:
    model = planned(folder, weights="bf16")
    cache = model.new_cache(3, 32)
    model.prefill([prompt(4), prompt(5, 1)], cache)
    logits = model.decode([1, 2, -1], cache)
    assert torch.equal(model.likeliest(logits, cache)[:2], logits[:2].argmax(1))


@pytest.mark.parametrize("kind", ["bf16", "int4"])
def test_cg_08_what_steps_of_a_cache_hold_goes_with_it_and_not_before(
    kind: str, folder: Path
) -> None:
    model = planned(folder, weights="bf16")
    caches = [model.new_cache(1, 32, dtype=kind) for _ in range(2)]
    for cache in caches:
        model.prefill(prompt(4), cache)
        model.decode([1], cache)
    known = model.backend._steps._steps
    logits = [steps.logits for steps in known.values()]
    assert len(logits) == 2
    del cache, caches[0]
    gc.collect()
    assert len(known) == 1
    assert next(iter(known.values())).logits is logits[1]
    assert model.decode([2], caches[0]).isfinite().all()


def test_steps_of_a_cache_may_change_their_kind(folder: Path) -> None:
    """Planned anew where batch mates are to make no difference; a cache goes on where it stands."""
    model = planned(folder, weights="bf16")
    cache = model.new_cache(2, 32)
    model.prefill([prompt(4), prompt(5, 1)], cache)
    model.decode([1, 2], cache)
    steps = model.backend._steps
    before = steps._of(cache)
    model.prepare(cache)
    assert steps._of(cache) is before
    model.prepare(cache, batch_invariant=True)
    after = steps._of(cache)
    assert after.invariant
    assert after.planned is not before.planned
    model.decode([3, 4], cache)
    assert steps._of(cache) is after
    assert cache.held == (6, 7)


def test_rows_are_powers_of_two() -> None:
    assert [rows_for(n) for n in (1, 2, 3, 4, 5, 32, 33, 200, 256)] == [
        *(1, 2, 4, 4, 8, 32, 64, 256, 256)
    ]


class TestRefused:
    def test_more_requests_than_a_step_serves(self, folder: Path) -> None:
        model = planned(folder, weights="bf16")
        cache = model.new_cache(257, 16)
        model.prefill([[1, 2]], cache, rows=[256])
        with pytest.raises(UnsupportedError, match="^cache: got request 256.*at most 256"):
            model.decode([*[-1] * 256, 3], cache)
        assert cache.held[256] == 2
        # Those below have room.
        other = model.new_cache(257, 16)
        model.prefill([[1, 2]], other, rows=[3])
        assert model.decode([-1, -1, -1, 3, *[-1] * 253], other).shape == (257, 160)

    def test_a_cache_of_another_form(self, folder: Path) -> None:
        model = planned(folder, weights="bf16")
        cache = model.new_cache(1, 32, page_size=32)
        with pytest.raises(
            ArgumentError, match="^cache: got .*pages of 32, expected .*pages of 16"
        ):
            model.prepare(cache)
        wide = KVCache.dense(replace(model.new_cache(1, 16).spec, dtype=FP8), 1, 16, scales=(1, 1))
        with pytest.raises(ArgumentError, match="^cache: got torch.float8_e4m3fn"):
            model.prepare(wide)

    def test_int4_rows_beside_an_fp8_cache(self, folder: Path) -> None:
        model = planned(folder, weights="bf16", cache=FP8)
        with pytest.raises(ArgumentError, match="rows of 16 or 32 bits"):
            model.new_cache(1, 32, dtype="int4")

    def test_a_full_cache_changes_nothing(self, folder: Path) -> None:
        model = planned(folder, weights="bf16")
        cache = model.new_cache(1, 16)
        model.prefill(prompt(16), cache)
        with pytest.raises(CapacityError):
            model.decode([1], cache)
        assert cache.held == (16,)
        assert cache.lengths.tolist() == [16]
