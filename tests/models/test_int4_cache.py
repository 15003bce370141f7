"""A model over an INT4 cache on the CPU: what is read, what is written, and what the rotation changes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import LlamaConfig

from epicute.errors import ArgumentError
from epicute.kv.cache import KVCache
from epicute.kv.int4 import pack_row, quantize_row
from epicute.models.llama import Llama
from epicute.models.requests import Requests
from epicute.quant.hadamard import rotate
from epicute.testing import Budget, assert_within
from tests.models.decode_oracle import Oracle, walsh
from tests.models.folders import FAMILIES, SIZES, random_model, save
from tests.models.one_thread import single as single

VOCABULARY = 160
TIGHT = Budget(1e-6, 1e-6)
ANGLES = Budget(2e-5, 1e-4)
"""The oracle's angles are float64, a kernel's and a reference's by definition float32."""

CONFIG = LlamaConfig(**{**SIZES, "num_attention_heads": 4}, head_dim=64)


def prompt(length: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(VOCABULARY, (length,), generator=generator).tolist()


@pytest.fixture(scope="module")
def theirs() -> Any:
    return random_model(CONFIG)


@pytest.fixture(scope="module")
def folder(theirs: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(theirs, tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def model(folder: Path) -> Llama:
    """Exact, so that what is measured is the cache."""
    return Llama.from_folder(folder, device="cpu", weights="exact")


def slots_of(cache: KVCache, row: int) -> Tensor:
    place = torch.arange(cache.held[row])
    page = cache.page_table[row][place // cache.spec.page_size].long()
    return page * cache.spec.page_size + place % cache.spec.page_size


def records(cache: KVCache, row: int) -> list[tuple[Tensor, Tensor]]:
    """Of each layer, dequantised keys and values that the cache holds of a request."""
    assert cache.int4 is not None
    return [cache.int4.read(i, slots_of(cache, row)) for i in range(cache.spec.layers)]


def oracle(theirs: Any, rotated: bool) -> Oracle:
    turn = walsh(64) if rotated else torch.eye(64, dtype=torch.float64)
    return Oracle(theirs.state_dict(), 4, 2, 64, 10000.0, 1e-6, turn)


# --- what is read ---


@pytest.mark.parametrize("mirror", [False, True])
@pytest.mark.parametrize("rotated", [True, False])
def test_kd_15_a_step_attends_to_the_dequantised_records_alone(
    rotated: bool, mirror: bool, model: Llama, theirs: Any
) -> None:
    """Against float64 attention on them, the new row's included, over a page's edge."""
    cache = model.new_cache(1, 64, dtype="int4", page_size=16, rotated=rotated, mirror=mirror)
    ids = prompt(19)
    model.prefill(ids[:14], cache)
    for place in range(14, 19):
        found = model.decode([ids[place]], cache)
        right = oracle(theirs, rotated).logits([ids[place]], place, records(cache, 0), own=False)
        assert_within(found, right, ANGLES)


@pytest.mark.parametrize("rotated", [True, False])
def test_kd_15_a_chunk_sees_its_own_rows_as_they_were_and_earlier_ones_as_records(
    rotated: bool, model: Llama, theirs: Any
) -> None:
    cache = model.new_cache(1, 64, dtype="int4", page_size=16, rotated=rotated)
    ids = prompt(40)
    model.prefill(ids[:21], cache)
    before = records(cache, 0)
    found = model.prefill(ids[21:], cache, logits="all")
    right = oracle(theirs, rotated).logits(ids[21:], 21, before, own=True)
    assert_within(found, right, ANGLES)


@pytest.mark.parametrize("rotated", [True, False])
def test_kd_15_the_rotation_leaves_exact_attention_unchanged(rotated: bool, model: Llama) -> None:
    """A whole prompt at once sees no record: turned and turned back, its logits are those of a plain cache."""
    ids = prompt(40)
    plain = model.prefill(ids, model.new_cache(1, 64), logits="all")
    cache = model.new_cache(1, 64, dtype="int4", rotated=rotated)
    assert_within(model.prefill(ids, cache, logits="all"), plain, TIGHT)


def test_a_prefill_beside_a_main_copy_reads_that(model: Llama) -> None:
    """Chunk after chunk, to the bit as without records."""
    ids = prompt(40)
    plain, mirrored = model.new_cache(1, 64), model.new_cache(1, 64, dtype="int4", mirror=True)
    right = model.prefill(ids, plain, chunk=16, logits="all")
    assert torch.equal(model.prefill(ids, mirrored, chunk=16, logits="all"), right)
    for layer in range(3):
        assert torch.equal(mirrored.dense_keys(layer)[:, :40], plain.dense_keys(layer)[:, :40])


def test_a_window_over_records(tmp_path: Path) -> None:
    """Mistral's: the cache of a step ends where that of a prefill would."""
    config = FAMILIES["mistral, window 9"].__class__(
        **{**SIZES, "num_attention_heads": 4}, head_dim=64, sliding_window=9
    )
    model = Llama.from_folder(save(random_model(config), tmp_path), device="cpu", weights="exact")
    ids = prompt(30)
    long, short = (model.new_cache(1, 64, dtype="int4") for _ in range(2))
    for cache, start in ((long, 0), (short, 0)):
        model.prefill(ids[start:29], cache)
    assert short.int4 is not None
    # What stands in front of the window may be anything.
    for layer in range(3):
        slots = slots_of(short, 0)[:21]
        junk = torch.full((21, 2, 64), 7.0)
        short.int4.write(layer, junk, junk, slots)
    assert torch.equal(model.decode([ids[29]], long), model.decode([ids[29]], short))


# --- what is written ---


@pytest.mark.parametrize("weights", ["bf16", "int4"])
@pytest.mark.parametrize("rotated", [True, False])
def test_rows_are_the_quantisers_to_the_bit(rotated: bool, weights: str, folder: Path) -> None:
    """Of all layers and tokens, prefilled and appended: nibbles and scale of the BF16 row beside them."""
    model = Llama.from_folder(folder, device="cpu", weights=weights)
    cache = model.new_cache(2, 48, dtype="int4", mirror=True, rotated=rotated, page_size=16)
    assert cache.int4 is not None
    model.prefill([prompt(18), prompt(5, 1)], cache)
    for token in (3, 77):
        model.decode([token, token + 1], cache)
    record = cache.int4.format.record
    for layer in range(3):
        memory = cache.int4.layer(layer)
        for row in (0, 1):
            for slot in slots_of(cache, row).tolist():
                page, token = divmod(slot, 16)
                for cells, start, scale_start in (
                    (cache.keys(layer), record.key_row(token), record.key_scale(token)),
                    (cache.values(layer), record.value_row(token), record.value_scale(token)),
                ):
                    x = cells[page, token]
                    assert x.dtype == torch.bfloat16
                    nibbles, scale = quantize_row(rotate(x) if rotated else x)
                    found = memory[page, :, start : start + 32]
                    assert torch.equal(found, pack_row(nibbles))
                    raw = memory[page, :, scale_start : scale_start + 4].contiguous()
                    assert torch.equal(raw.view(torch.float32)[:, 0], scale)


def test_records_alone_are_those_of_a_mirror(folder: Path) -> None:
    """A first layer's rows do not depend on the cache: the same bytes, prefilled and appended."""
    model = Llama.from_folder(folder, device="cpu", weights="bf16")
    caches = [model.new_cache(1, 48, dtype="int4", mirror=mirror) for mirror in (False, True)]
    for cache in caches:
        model.prefill(prompt(18), cache)
        model.decode([9], cache)
    first = [cache.int4.layer(0) for cache in caches if cache.int4 is not None]
    assert torch.equal(first[0], first[1])
    assert int(first[0].count_nonzero()) > 0


# --- batches ---


@settings(max_examples=10)
@given(st.data())
def test_kd_01_a_request_does_not_depend_on_its_neighbours(data: st.DataObject) -> None:
    """Any batch in any rows of the cache, pages in any order, NaN scales in all that is not written; steps too."""
    model = SHARED["model"]
    lengths = data.draw(st.lists(st.integers(1, 30), min_size=1, max_size=4))
    rows = data.draw(st.permutations(range(4)))[: len(lengths)]
    chunk = data.draw(st.sampled_from([None, 7, 16]))
    mirror = data.draw(st.booleans())
    cache = model.new_cache(4, 48, pages=12, page_size=16, dtype="int4", mirror=mirror)
    assert cache.int4 is not None
    cache.int4.memory.fill_(0xFF)
    order = data.draw(st.permutations(range(4)))
    cache.reserve([33] * 4, order)  # scatters the pages that come back
    for row in data.draw(st.permutations(order)):
        cache.free(row)
    prompts = [prompt(n, seed) for seed, n in enumerate(lengths)]
    found = [model.prefill(prompts, cache, rows=rows, chunk=chunk)]
    for step in range(2):
        tokens = [-1] * 4
        for row in rows:
            tokens[row] = 5 + step
        found.append(model.decode(tokens, cache)[rows])
    for n, row in enumerate(rows):
        alone = model.new_cache(1, 48, dtype="int4", mirror=mirror, page_size=16)
        sizes = _chunks(lengths, chunk)[n]
        for start, end in sizes:
            expected = [model.prefill(prompts[n][start:end], alone)]
        expected += [model.decode([5 + step], alone) for step in range(2)]
        for mine, right in zip(found, expected, strict=True):
            assert_within(mine[n], right[0], TIGHT)
        for ours, theirs in zip(records(cache, row), records(alone, 0), strict=True):
            assert_within(ours[0], theirs[0], TIGHT)


def _chunks(lengths: list[int], chunk: int | None) -> list[list[tuple[int, int]]]:
    """Of each request, the pieces that a packed prefill runs it in."""
    found: list[list[tuple[int, int]]] = [[] for _ in lengths]
    done = 0
    for request, length in enumerate(lengths):
        at = 0
        while at < length:
            room = length if chunk is None else chunk - done % chunk
            end = min(length, at + room)
            found[request].append((at, end))
            done, at = done + end - at, end
    return found


SHARED: dict[str, Llama] = {}


@pytest.fixture(scope="module", autouse=True)
def _shared(model: Llama) -> None:
    SHARED["model"] = model  # hypothesis runs one test function for all its examples


def test_padded_requests_over_records(model: Llama) -> None:
    """Rows of two requests side by side, the second one shorter: as if each came alone."""
    backend, ids = model.backend, prompt(10)
    padded = model.new_cache(2, 32, dtype="int4")
    padded.reserve([6, 4])
    requests = Requests.padded([6, 4], 64, padded.page_table)
    x = backend.embed(torch.tensor([*ids, 0, 0]))
    for layer in range(3):
        x = backend.block(layer, x, requests, padded)
    padded.advance([6, 4])
    found = backend.logits(x, torch.tensor([5, 9]))
    for n, part in enumerate((ids[:6], ids[6:])):
        alone = model.new_cache(1, 32, dtype="int4")
        assert_within(found[n], model.prefill(part, alone)[0], TIGHT)
        assert_within(records(padded, n)[2][1], records(alone, 0)[2][1], TIGHT)


# --- quality, and what is refused ---


def test_what_the_cache_costs(model: Llama) -> None:
    """Against a cache that rounds nothing: something, and not everything."""
    ids, steps = prompt(40), prompt(8, 3)
    plain, narrow = model.new_cache(1, 64), model.new_cache(1, 64, dtype="int4")
    for cache in (plain, narrow):
        model.prefill(ids, cache)
    for token in steps:
        right, found = model.decode([token], plain), model.decode([token], narrow)
        assert_within(found, right, Budget(0.5, 0.5))
        assert float((found - right).norm() / right.norm()) > 0.001


class TestRefused:
    def test_heads_that_no_record_has(self, tmp_path: Path) -> None:
        folder = save(random_model(FAMILIES["llama"]), tmp_path)
        model = Llama.from_folder(folder, device="cpu")
        with pytest.raises(ArgumentError, match="^head_dim: got 16"):
            model.new_cache(1, 16, dtype="int4")

    @pytest.mark.parametrize(
        ("options", "named"),
        [
            ({"dtype": "int8"}, "^dtype: got 'int8'"),
            ({"mirror": True}, "^mirror"),
            ({"dtype": "bf16", "rotated": False}, "^rotated"),
            ({"dtype": "int4", "scales": (1.0, 1.0)}, "^scales"),
        ],
    )
    def test_options(self, options: dict[str, Any], named: str, model: Llama) -> None:
        with pytest.raises(ArgumentError, match=named):
            model.new_cache(1, 16, **options)

    def test_records_without_a_page_table(self, model: Llama) -> None:
        cache = model.new_cache(1, 64, dtype="int4")
        cache.reserve([4])
        requests = Requests.packed([4], 64)
        x = model.backend.embed(torch.tensor(prompt(4)))
        with pytest.raises(ArgumentError, match="page_table"):
            model.backend.block(0, x, requests, cache)


def test_dtypes_have_names(model: Llama) -> None:
    for name, dtype in (("bf16", torch.bfloat16), ("fp16", torch.float16)):
        assert model.new_cache(1, 16, dtype=name).spec.dtype == dtype
    fp8 = model.new_cache(1, 16, dtype="fp8", scales=(1.0, 1.0))
    assert fp8.spec.dtype == torch.float8_e4m3fn
    int4 = model.new_cache(1, 16, dtype="int4")
    assert (int4.spec.int4, int4.spec.dtype) == ("only", torch.float32)
