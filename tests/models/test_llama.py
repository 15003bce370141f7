"""Prefill of a whole model on the CPU: against transformers, against itself in pieces, and what it refuses."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import AutoModelForCausalLM

from epicute.errors import ArgumentError, UnsupportedError
from epicute.kv import split_slot
from epicute.kv.cache import CacheSpec, CapacityError, KVCache
from epicute.models.config import ModelConfig
from epicute.models.llama import Llama
from epicute.models.requests import Requests
from epicute.testing import Budget, assert_within
from tests.models.folders import FAMILIES, random_model, save

VOCABULARY = 160
FLOAT32 = Budget(norm=2e-5, worst_row=1e-4)
"""transformers computes in float32: three layers of rounding, and frequencies that are a few units off."""


def prompt(length: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(VOCABULARY, (length,), generator=generator).tolist()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A sharded llama."""
    return save(random_model(FAMILIES["llama"]), tmp_path_factory.mktemp("llama"), "200KB")


@pytest.fixture(scope="module")
def model(folder: Path) -> Llama:
    return Llama.from_folder(folder, device="cpu", weights="exact")


def logits_of(model: Any, ids: list[int]) -> Tensor:
    with torch.no_grad():
        return model(torch.tensor([ids])).logits[0]


def cells_of(cache: KVCache, row: int) -> Tensor:
    """(layers, 2, tokens, kv_heads, head_dim) that the cache holds of a request."""
    count = cache.held[row]
    place = torch.arange(count)
    page = cache.page_table[row][place // cache.spec.page_size].long()
    token = place % cache.spec.page_size
    layers = range(cache.spec.layers)
    return torch.stack(
        [
            torch.stack([cache.keys(i)[page, token], cache.values(i)[page, token]]).float()
            for i in layers
        ]
    )


# --- the numbers ---


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_those_of_transformers(family: str, tmp_path: Path) -> None:
    """Every token of a ragged batch; each family's own parts are random, so that each counts."""
    theirs = random_model(FAMILIES[family], seed=len(family))
    mine = Llama.from_folder(save(theirs, tmp_path), device="cpu", weights="exact")
    prompts = [prompt(33, 1), prompt(1, 2), prompt(64, 3)]
    cache = mine.new_cache(3, 64, page_size=16)
    found = mine.prefill(prompts, cache, logits="all")
    expected = torch.cat([logits_of(theirs, ids) for ids in prompts])
    assert_within(found, expected, FLOAT32)
    assert cache.held == (33, 1, 64)


def test_kv_17_head_norms_stand_before_the_rotation(tmp_path: Path) -> None:
    """Qwen3's norms with a gain that varies by channel: after the rotation they would give something else."""
    theirs = random_model(FAMILIES["qwen3"])
    with torch.no_grad():
        for layer in theirs.model.layers:
            layer.self_attn.q_norm.weight.copy_(1 + torch.arange(32) / 32)
            layer.self_attn.k_norm.weight.copy_(1 + torch.arange(32) / 16)
    mine = Llama.from_folder(save(theirs, tmp_path), device="cpu", weights="exact")
    ids = prompt(20)
    found = mine.prefill(ids, mine.new_cache(1, 32), logits="all")
    assert_within(found, logits_of(theirs, ids), FLOAT32)


def test_a_bf16_checkpoint(tmp_path: Path) -> None:
    """Read as it is stored; transformers widens it to float32."""
    theirs = random_model(FAMILIES["llama tied, llama3 RoPE"]).bfloat16()
    mine = Llama.from_folder(save(theirs, tmp_path), device="cpu", weights="exact")
    wide = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    ids = prompt(40)
    found = mine.prefill(ids, mine.new_cache(1, 64), logits="all")
    assert_within(found, logits_of(wide, ids), FLOAT32)


@pytest.mark.parametrize(
    ("weights", "scaling", "budget"),
    [
        ("bf16", "delayed", Budget(0.03, 0.08)),
        ("fp16", "delayed", Budget(0.004, 0.01)),
        ("fp8", "delayed", Budget(0.35, 0.7)),
        ("fp8", "row", Budget(0.35, 0.7)),
    ],
)
def test_what_rounding_costs(
    weights: str, scaling: str, budget: Budget, folder: Path, model: Llama
) -> None:
    """Each form against the exact one; 16 bits are far nearer than 8, and none is without effect."""
    rounded = Llama.from_folder(folder, device="cpu", weights=weights, scaling=scaling)
    ids = prompt(64)
    cache = rounded.new_cache(1, 64)
    assert cache.spec.dtype == (torch.float16 if weights == "fp16" else torch.bfloat16)
    found = rounded.prefill(ids, cache, logits="all")
    exact = model.prefill(ids, model.new_cache(1, 64), logits="all")
    assert_within(found, exact, budget)
    error = float((found - exact).norm() / exact.norm())
    assert error > budget.norm / 20


def test_delayed_scales_come_from_what_was_seen(folder: Path) -> None:
    model = Llama.from_folder(folder, device="cpu", weights="fp8")
    sites = [site for block in model.backend.scales for site in block.sites]
    cache = model.new_cache(2, 128)
    model.prefill(prompt(64, 1), cache)
    first = [float(site.scale_used) for site in sites]
    seen = [float(site.amax_next) for site in sites]
    assert first == pytest.approx([amax / 448 for amax in seen])
    assert all(int(site.nans) == 0 for site in sites)
    model.prefill(prompt(16, 2), cache, rows=[1])
    second = [float(site.scale_used) for site in sites]
    assert second == pytest.approx([amax / 448 for amax in seen])
    assert [float(site.amax_next) for site in sites] != seen


@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_an_fp8_cache(layout: str, model: Llama) -> None:
    """Keys and values as codes with scales of their heads: near the exact cache, and counted where they do not fit."""
    ids = prompt(40)
    exact = model.new_cache(1, 64)
    expected = model.prefill(ids, exact, logits="all")
    amax = cells_of(exact, 0).abs().amax(dim=(2, 4))
    wanted = {"dtype": torch.float8_e4m3fn, "layout": layout}
    fitting = model.new_cache(1, 64, scales=(amax[:, 0] / 400, amax[:, 1] / 400), **wanted)
    found = model.prefill(ids, fitting, logits="all")
    assert_within(found, expected, Budget(0.2, 0.6))
    assert not torch.equal(found, expected)
    assert (fitting.saturated == 0).all()
    narrow = model.new_cache(1, 64, scales=(amax[:, 0] / 400, amax[:, 1] / 4480), **wanted)
    model.prefill(ids, narrow)
    assert (narrow.saturated[:, 0] == 0).all()
    assert (narrow.saturated[:, 1] > 0).all()
    assert (narrow.nans == 0).all()


# --- the same in pieces ---


def test_kv_18_chunks_fill_the_cache_with_the_same_bytes(model: Llama) -> None:
    """A prompt of 300 tokens at once, in 37s, as 299 and 1, and after 128 that were there before; BF16 cells."""
    ids = prompt(300)

    def run(*cuts: int, chunk: int | None = None) -> tuple[Tensor, Tensor]:
        cache = model.new_cache(1, 300, dtype=torch.bfloat16)
        for start, end in zip((0, *cuts), (*cuts, 300), strict=True):
            found = model.prefill(ids[start:end], cache, chunk=chunk)
        return cells_of(cache, 0), found

    cells, last = run()
    for other in (run(chunk=37), run(299), run(128)):
        assert torch.equal(other[0], cells)
        assert_within(other[1], last, Budget(1e-6, 1e-6))


@settings(max_examples=12)
@given(st.data())
def test_a_request_does_not_depend_on_its_neighbours(data: st.DataObject) -> None:
    """Any batch, any rows of the cache, any chunks, pages in any order, NaN in every cell that is not written."""
    model = SHARED["model"]
    lengths = data.draw(st.lists(st.integers(1, 30), min_size=1, max_size=4))
    rows = data.draw(st.permutations(range(4)))[: len(lengths)]
    chunk = data.draw(st.sampled_from([None, 1, 5, 16, 29]))
    layout = data.draw(st.sampled_from(["NHD", "HND"]))
    cache = model.new_cache(4, 40, pages=12, page_size=16, layout=layout)
    for layer in range(model.config.layers):
        cache.keys(layer).fill_(math.nan)
        cache.values(layer).fill_(math.nan)
    order = data.draw(st.permutations(range(4)))
    cache.reserve([33] * 4, order)  # scatters the pages that come back
    for row in data.draw(st.permutations(order)):
        cache.free(row)
    prompts = [prompt(n, seed) for seed, n in enumerate(lengths)]
    found = model.prefill(prompts, cache, rows=rows, chunk=chunk)
    for n, row in enumerate(rows):
        alone = model.new_cache(1, 40)
        expected = model.prefill(prompts[n], alone)
        assert_within(found[n], expected[0], Budget(1e-6, 1e-6))
        assert_within(cells_of(cache, row), cells_of(alone, 0), Budget(1e-6, 1e-6))


SHARED: dict[str, Llama] = {}


@pytest.fixture(scope="module", autouse=True)
def _shared(model: Llama) -> None:
    SHARED["model"] = model  # hypothesis runs one test function for all its examples


def test_prompts_may_be_lists_or_tensors(model: Llama) -> None:
    ids = prompt(12)

    def run(given_ids: Any) -> Tensor:
        return model.prefill(given_ids, model.new_cache(2, 32))

    one = run(ids)
    assert one.shape == (1, VOCABULARY)
    assert one.dtype == torch.float32
    assert torch.equal(run(torch.tensor(ids)), one)
    assert torch.equal(run([ids]), one)
    two = run([ids, ids])
    assert_within(two, one.expand(2, -1), Budget(1e-6, 1e-6))
    for same in (torch.tensor([ids, ids]), [torch.tensor(ids), ids], (ids, tuple(ids))):
        assert torch.equal(run(same), two)


class Recorder:
    """A backend whose logits are the ids themselves; it notes what it was asked."""

    cache_dtype, page_size, max_rows = torch.float32, 16, 25

    def __init__(self) -> None:
        self.asked: list[Requests] = []

    def check_cache(self, cache: KVCache) -> None:
        """Any will do."""

    def embed(self, ids: Tensor) -> Tensor:
        return ids

    def block(self, layer: int, x: Tensor, requests: Requests, cache: KVCache) -> Tensor:
        if layer == 0:
            self.asked.append(requests)
        return x

    def logits(self, x: Tensor, rows: Tensor) -> Tensor:
        return x[rows, None].to(torch.float32)


@given(
    st.lists(st.tuples(st.integers(1, 20), st.integers(0, 20)), min_size=1, max_size=4),
    st.sampled_from([None, 1, 3, 7, 100]),
    st.sampled_from(["last", "all"]),
)
def test_rows_positions_and_slots_of_any_batch(
    sizes: list[tuple[int, int]], chunk: int | None, wanted: str
) -> None:
    """New tokens behind cached ones: every token runs once, in order, at its position, and into its own slot."""
    recorder = Recorder()
    model = Llama(SHARED["model"].config, recorder, "cpu")
    cache = model.new_cache(4, 40, page_size=16)
    for row, (_, cached) in enumerate(sizes):
        cache.reserve([cached], [row])
        cache.advance([cached], [row])
    prompts = [prompt(new, seed) for seed, (new, _) in enumerate(sizes)]
    found = model.prefill(prompts, cache, chunk=chunk, logits=wanted)
    ids = [i for p in prompts for i in (p if wanted == "all" else p[-1:])]
    assert found[:, 0].tolist() == ids
    assert cache.held[: len(sizes)] == tuple(a + b for a, b in sizes)
    places = []
    for asked in recorder.asked:
        assert asked.starts is not None
        page, token = split_slot(asked.slots, 16)
        owner = (cache.page_table[None] == page[:, None, None]).nonzero()
        assert torch.equal(owner[:, 2] * 16 + token, asked.positions)
        places += list(zip(owner[:, 1].tolist(), asked.positions.tolist(), strict=True))
    expected = [(r, b + i) for r, (a, b) in enumerate(sizes) for i in range(a)]
    assert sorted(places) == expected
    rows = [asked.rows for asked in recorder.asked]
    assert rows[:-1] == [min(chunk or 25, 25)] * (len(rows) - 1)


def test_cg_06_rows_without_a_slot_reach_nothing(model: Llama) -> None:
    """Rows without a slot, as a padded or captured batch has them, with NaN where a token would be."""
    backend, ids = model.backend, prompt(10)
    plain, padded = model.new_cache(2, 32), model.new_cache(2, 32)
    expected = model.prefill([ids[:6], ids[6:]], plain, logits="all")
    padded.reserve([6, 4])
    requests = Requests.padded([6, 4], 64, padded.page_table)
    x = backend.embed(torch.tensor([*ids, 0, 0]))
    values = x.values.clone()
    values[10:] = math.nan
    x = replace(x, values=values)
    for layer in range(model.config.layers):
        x = backend.block(layer, x, requests, padded)
    padded.advance([6, 4])
    assert_within(backend.logits(x, torch.arange(10)), expected, Budget(1e-6, 1e-6))
    assert (x.values[10:] == 0).all()
    for row in (0, 1):
        assert_within(cells_of(padded, row), cells_of(plain, row), Budget(1e-6, 1e-6))


# --- what is refused ---


class TestRefused:
    @pytest.mark.parametrize(
        ("ids", "named"),
        [
            ([], r"^ids\[0\]: got no token"),
            ([[1], []], r"^ids\[1\]: got no token"),
            ([1, VOCABULARY], r"^ids\[0\]: got \[160\]"),
            ([[1], [-1]], r"^ids\[1\]: got \[-1\]"),
            (torch.tensor([0.5]), "^ids"),
            (torch.zeros(1, 1, 1, dtype=torch.int64), "^ids"),
            ([torch.zeros(1, 2, dtype=torch.int64)], "^ids"),
            ([1.5], r"^ids\[0\]: got \[1\.5\]"),
            (torch.ones(3, dtype=torch.bool), "^ids: got .*bool"),
            ([torch.ones(3, dtype=torch.bool)], "^ids: got .*bool"),
            ([1, True], r"^ids\[0\]: got \[True\]"),
        ],
    )
    def test_prompts(self, ids: Any, named: str, model: Llama) -> None:
        cache = model.new_cache(2, 32)
        with pytest.raises(ArgumentError, match=named):
            model.prefill(ids, cache)
        assert cache.held == (0, 0)

    def test_settings(self, model: Llama, folder: Path) -> None:
        for wrong, named in (
            ({"chunk": 0}, "^chunk"),
            ({"chunk": 2.5}, "^chunk: got 2.5"),
            ({"logits": "first"}, "^logits"),
            ({"rows": 1}, "^rows: got 1"),
            ({"rows": [0.5]}, "^rows"),
        ):
            pool = model.new_cache(2, 32, pages=2, page_size=16)
            with pytest.raises(ArgumentError, match=named):
                model.prefill([1], pool, **wrong)
            assert pool.free_pages == 2
        with pytest.raises(ArgumentError, match=r"^cache: got NoneType.*new_cache"):
            model.prefill([1], None)
        for wrong, named in (
            ({"weights": "int8"}, "^weights"),
            ({"scaling": "block"}, "^scaling"),
            ({"max_rows": 7}, "^options"),
        ):
            with pytest.raises(ArgumentError, match=named):
                Llama.from_folder(folder, device="cpu", **wrong)
        with pytest.raises(UnsupportedError, match="^device"):
            Llama.from_folder(folder, device="meta")
        with pytest.raises(ArgumentError, match="^device: got 'gpu'"):
            Llama.from_folder(folder, device="gpu")

    def test_a_cache_of_another_model(self, model: Llama) -> None:
        cache = KVCache.dense(CacheSpec(3, 2, 32, torch.float32), 1, 32)
        with pytest.raises(ArgumentError, match="^cache"):
            model.prefill([1], cache)

    def test_no_room(self, model: Llama) -> None:
        """Nothing has run, though the first chunk would have fitted."""
        cache = model.new_cache(2, 64, pages=3, page_size=16)
        for prompts in ([prompt(65)], [prompt(30), prompt(20)]):
            with pytest.raises(CapacityError):
                model.prefill(prompts, cache, chunk=8)
            assert cache.held == (0, 0)
            assert cache.free_pages == 3

    def test_a_layer_that_fails_leaves_the_lengths(self, model: Llama) -> None:
        class Failing(Recorder):
            def block(self, layer: int, x: Tensor, requests: Requests, cache: KVCache) -> Tensor:
                if layer == 2:
                    raise RuntimeError("broken")
                return x

        broken = Llama(model.config, Failing(), "cpu")
        cache = broken.new_cache(1, 32)
        with pytest.raises(RuntimeError, match="broken"):
            broken.prefill(prompt(5), cache)
        assert cache.held == (0,)
        assert model.prefill(prompt(5), cache).shape == (1, VOCABULARY)


def test_pages_are_the_host_s_to_know(model: Llama) -> None:
    """A prefill asks the device for nothing that the host has decided itself: here it could not answer."""
    wanted = model.prefill(prompt(30), model.new_cache(2, 64, page_size=16), chunk=7)
    cache = model.new_cache(2, 64, page_size=16)
    cache.page_table = cache.page_table.to("meta")
    assert torch.equal(model.prefill(prompt(30), cache, chunk=7), wanted)


def test_it_says_what_it_is(model: Llama, folder: Path) -> None:
    assert repr(model) == f"Llama(llama {folder.name}, 3 layers, ReferenceBackend on cpu)"
    assert model.config == ModelConfig.from_folder(folder)
