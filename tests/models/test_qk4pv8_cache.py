"""A model over QK4PV8 records, and over FP8 ones in mixed precision, on the CPU: what is written, and what is read."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import LlamaConfig

from epicute.errors import ArgumentError, UnsupportedError
from epicute.kv.cache import CacheSpec, KVCache
from epicute.kv.qk4pv8_layers import QK4PV8Form
from epicute.models.llama import Llama
from epicute.models.reference_means import observe_means
from epicute.models.requests import Requests
from epicute.quant import cast_e4m3
from epicute.quant.nvfp4 import fast8_keys
from epicute.quant.smoothing import Calibration
from epicute.testing import Budget, assert_within
from tests.attention.mixed_cases import power_of
from tests.models.decode_oracle import Oracle
from tests.models.folders import FAMILIES, SIZES, random_model, save
from tests.models.one_thread import single as single

VOCABULARY = 160
TIGHT = Budget(1e-5, 1e-4)
ANGLES = Budget(4e-3, 2e-2)
"""Angles and powers of two are FP32, in the oracle float64: now and then an E4M3 code is its neighbour."""

CONFIG = LlamaConfig(**{**SIZES, "num_attention_heads": 4}, head_dim=64)
SHARED: dict[str, Any] = {}


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


@pytest.fixture(scope="module")
def calibration(model: Llama) -> Calibration:
    return observe_means(model, [prompt(30, 7), prompt(12, 8)])


@pytest.fixture(scope="module", autouse=True)
def _shared(model: Llama, calibration: Calibration) -> None:
    SHARED.update(model=model, means=calibration)  # hypothesis runs one function for all examples


def form(smoothing: str, qk: str = "exact16", **more: Any) -> QK4PV8Form:
    return QK4PV8Form(
        smoothing, qk=qk, means=SHARED["means"] if smoothing == "static" else None, **more
    )


def slots_of(cache: KVCache, row: int) -> Tensor:
    place = torch.arange(cache.held[row])
    page = cache.page_table[row][place // cache.spec.page_size].long()
    return page * cache.spec.page_size + place % cache.spec.page_size


class Mixed(Oracle):
    """The oracle over the records of one request, multiplied as kernels do, key by key of one tile."""

    def __init__(self, theirs: Any, cache: KVCache, row: int = 0, wide: bool = True) -> None:
        super().__init__(
            theirs.state_dict(), 4, 2, 64, 10000.0, 1e-6, torch.eye(64, dtype=torch.float64)
        )
        assert cache.qk4pv8 is not None
        self.cache, self.halves, self.calls = cache, wide, 0
        self.layers = cache.spec.layers
        self.owner = row if cache.qk4pv8.form.smoothing == "sequence" else 0
        self.rows = [
            cache.qk4pv8.format.fetch(cache.qk4pv8.layer(i), slots_of(cache, row))
            for i in range(self.layers)
        ]

    def predict(self, ids: list[int], start: int) -> Tensor:
        """Logits of tokens whose records, and those in front of them, are in the cache."""
        self.calls, self.count = 0, len(ids)
        nothing = torch.zeros(start + len(ids), 2, 64)
        return self.logits(ids, start, [(nothing, nothing)] * self.layers, own=False)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, position: int) -> Tensor:
        layer = self.calls // self.count
        self.calls += 1
        memory, rows = self.cache.qk4pv8, self.rows[layer]
        assert memory is not None
        keys, values, delta = memory.format.dequantize(rows)
        if not self.halves:
            keys = fast8_keys(rows.codes, rows.scales).float()
        means = memory.means(layer)
        q = q.float() if means is None else q.float() - means.q[self.owner]
        if self.halves:
            q = q.half().double()
        else:
            scale = power_of(q).double()
            q = cast_e4m3((q / scale).float()).double() * scale
        out, seen = [], slice(position + 1)
        assert position < 128
        for head in range(4):
            logits = keys[seen, head // 2].double() @ q[head]
            if delta is not None:
                logits = logits + delta[seen, head].double()
            logits = logits / 8
            p = 448 * torch.exp(logits - logits.max())
            codes = cast_e4m3(p.float()).double()
            out.append(codes @ values[seen, head // 2].double() / p.sum())
        return torch.cat(out)


# --- what is read ---


@pytest.mark.parametrize("smoothing", ["none", "sequence", "static"])
@pytest.mark.parametrize("qk", ["exact16", "fast8"])
def test_a_prefill_attends_to_the_records_alone(
    smoothing: str, qk: str, model: Llama, theirs: Any
) -> None:
    """Its own rows included, two chunks, over a page's edge; fast8 multiplies E4M3."""
    cache = model.new_cache(1, 64, dtype=form(smoothing, qk), page_size=32)
    ids = prompt(40)
    model.prefill(ids[:21], cache)
    found = model.prefill(ids[21:], cache, logits="all")
    oracle = Mixed(theirs, cache, wide=qk == "exact16")
    assert_within(found, oracle.predict(ids[21:], 21), ANGLES)


@pytest.mark.parametrize("smoothing", ["none", "sequence", "static"])
def test_a_step_multiplies_keys_exactly_whatever_prefill_does(
    smoothing: str, model: Llama, theirs: Any
) -> None:
    cache = model.new_cache(1, 64, dtype=form(smoothing, "fast8"), page_size=32)
    ids = prompt(34)
    model.prefill(ids[:30], cache)
    for place in range(30, 34):
        found = model.decode([ids[place]], cache)
        assert_within(found, Mixed(theirs, cache).predict([ids[place]], place), ANGLES)


@pytest.mark.parametrize("dtype", ["int4", "qk4pv8", "bf16"])
def test_a_prefill_as_decoded_is_the_steps(dtype: str, model: Llama, folder: Path) -> None:
    forced = Llama.from_folder(folder, device="cpu", weights="exact", as_decoded=True)
    ids, first = prompt(20), 1 if dtype == "int4" else 8
    # Both begin with the same prefill: means of a request are those of its first one.
    one, other = (m.new_cache(1, 64, dtype=dtype, page_size=32) for m in (model, forced))
    for cache in (one, other):
        forced.prefill(ids[:first], cache)
    found = forced.prefill(ids[first:], other, logits="all")
    steps = torch.cat([model.decode([token], one) for token in ids[first:]])
    assert_within(found, steps, TIGHT)


def test_qk_smoothing_gives_exact_attention_back(model: Llama) -> None:
    """Where keys are one constant and little else, the unsmoothed codes hold nothing but it."""
    ids = prompt(60)
    right = model.prefill(ids, model.new_cache(1, 64), logits="all")
    lost = {}
    for smoothing in ("none", "sequence", "static"):
        cache = model.new_cache(1, 64, dtype=form(smoothing))
        found = model.prefill(ids, cache, logits="all")
        lost[smoothing] = float((found - right).norm() / right.norm())
    assert 0.01 < lost["sequence"] < 0.5
    assert 0.01 < lost["static"] < 0.5
    assert 0.01 < lost["none"] < 0.7


# --- FP8 in mixed precision ---


def test_fp8_fp8_is_the_formula_on_the_cache(folder: Path, model: Llama, theirs: Any) -> None:
    """One layer's worth: E4M3 queries and probabilities, one tile; and not what a 16-bit product gives."""
    mixed = Llama.from_folder(folder, device="cpu", weights="exact", attention="fp8/fp8")
    ids, scales = prompt(40), (0.02, 0.02)
    caches = [m.new_cache(1, 64, dtype="fp8", scales=scales) for m in (mixed, model)]
    found, plain = (
        m.prefill(ids, c, logits="all") for m, c in zip((mixed, model), caches, strict=True)
    )
    change = float((found - plain).norm() / plain.norm())
    assert 0.001 < change < 0.2
    scale = caches[0].k_scale

    class Fp8(Oracle):
        def attend(self, q: Tensor, k: Tensor, v: Tensor, position: int) -> Tensor:
            assert scale is not None
            unit = power_of(q.float()).double()
            q = cast_e4m3((q.float() / unit).float()).double() * unit
            out = []
            for head in range(4):
                logits = k[: position + 1, head // 2] @ q[head] / 8
                p = 448 * torch.exp(logits - logits.max())
                codes = cast_e4m3(p.float()).double()
                out.append(codes @ v[: position + 1, head // 2] / p.sum())
            return torch.cat(out)

    oracle = Fp8(theirs.state_dict(), 4, 2, 64, 10000.0, 1e-6, torch.eye(64).double())
    cells = [
        tuple(
            x[0, :40].double() * 0.02 for x in (caches[0].dense_keys(i), caches[0].dense_values(i))
        )
        for i in range(3)
    ]
    assert_within(found, oracle.logits(ids, 0, cells, own=False), ANGLES)


def test_a_step_over_fp8_multiplies_16_bits(folder: Path, model: Llama) -> None:
    mixed = Llama.from_folder(folder, device="cpu", weights="exact", attention="fp8/fp8")
    caches = [m.new_cache(1, 64, dtype="fp8", scales=(0.02, 0.02)) for m in (mixed, model)]
    for cache in caches:
        model.prefill(prompt(20), cache)
    assert torch.equal(mixed.decode([3], caches[0]), model.decode([3], caches[1]))


# --- what is written ---


@pytest.mark.parametrize("smoothing", ["none", "sequence", "static"])
@pytest.mark.parametrize("weights", ["bf16", "fp8"])
def test_qk_bytes_are_the_formats(smoothing: str, weights: str, folder: Path) -> None:
    """A first layer's rows do not depend on the cache: its pages are those of the BF16 rows beside them, to the bit."""
    model = Llama.from_folder(folder, device="cpu", weights=weights)
    plain = model.new_cache(2, 64, page_size=32)
    cache = model.new_cache(2, 64, page_size=32, dtype=form(smoothing))
    again = Llama.from_folder(folder, device="cpu", weights=weights)
    for m, c in ((model, plain), (again, cache)):
        m.prefill([prompt(18), prompt(5, 1)], c)
        for token in (3, 77):
            m.decode([token, token + 1], c)
    assert cache.qk4pv8 is not None
    format, means = cache.qk4pv8.format, cache.qk4pv8.means(0)
    for row in (0, 1):
        slots = slots_of(cache, row)
        page, token = slots // 32, slots % 32
        k, v = (x[page, token] for x in (plain.keys(0), plain.values(0)))
        assert k.dtype == torch.bfloat16
        group = None
        if smoothing == "sequence":
            group = torch.full((len(k),), row)
        wanted = format.quantize(k, v, means, group)
        found = format.fetch(cache.qk4pv8.layer(0), slots)
        for name in ("codes", "scales", "values", "delta"):
            mine, right = getattr(found, name), getattr(wanted, name)
            if right is None:
                assert mine is None
                continue
            assert torch.equal(mine.view(torch.uint8), right.view(torch.uint8)), (row, name)


def test_qk_07_means_are_of_the_first_prefill_and_frozen(folder: Path) -> None:
    """The valid tokens of each request, of no other one; later chunks and steps change nothing."""
    model = Llama.from_folder(folder, device="cpu", weights="bf16")
    cache = model.new_cache(3, 64, dtype="qk4pv8")
    assert cache.qk4pv8 is not None
    model.prefill([prompt(9), prompt(14, 1)], cache, rows=[2, 0])
    first = [cache.qk4pv8.means(i) for i in range(3)]
    kept = [(m.q.clone(), m.k.clone()) for m in first if m is not None]
    for row, ids in ((2, prompt(9)), (0, prompt(14, 1))):
        seen = observe_means(model, [ids]).means(0)
        assert_within(kept[0][0][row], seen.q[0], Budget(1e-6, 1e-6))
        assert_within(kept[0][1][row], seen.k[0], Budget(1e-6, 1e-6))
    assert not kept[0][0][1].any()
    model.prefill([prompt(20, 3)], cache, rows=[2])
    model.decode([5, -1, 6], cache)
    for layer, (q, k) in enumerate(kept):
        means = cache.qk4pv8.means(layer)
        assert means is not None
        assert torch.equal(means.q, q)
        assert torch.equal(means.k, k)
    cache.free(2)
    model.prefill([prompt(9, 5)], cache, rows=[2])  # another request, other means
    assert not torch.equal(first[0].q[2], kept[0][0][2])  # type: ignore[union-attr]
    assert torch.equal(first[0].q[0], kept[0][0][0])  # type: ignore[union-attr]


def test_qk_07_static_pages_do_not_depend_on_chunks(folder: Path) -> None:
    """The first layer's bytes are the same however a prompt is cut, so that a prefix can be shared."""
    model = Llama.from_folder(folder, device="cpu", weights="bf16")
    found = []
    for chunk in (None, 7):
        cache = model.new_cache(1, 64, dtype=form("static"))
        model.prefill(prompt(50), cache, chunk=chunk)
        assert cache.qk4pv8 is not None
        found.append(cache.qk4pv8)
    assert torch.equal(found[0].records[0], found[1].records[0])
    assert torch.equal(found[0].delta[0], found[1].delta[0])  # type: ignore[index]


def test_losses_are_counted(model: Llama) -> None:
    cache = model.new_cache(1, 64, dtype=QK4PV8Form("none", v_scale=2.0**-14))
    model.prefill(prompt(30), cache)
    assert cache.qk4pv8 is not None
    keys, values = cache.qk4pv8.counters
    assert int(values.saturated) > 0
    assert int(keys.nans) == int(values.nans) == 0
    cache.reset()
    assert int(values.saturated) == 0


# --- batches ---


@settings(max_examples=8)
@given(st.data())
def test_kd_01_a_request_does_not_depend_on_its_neighbours_in_records(data: st.DataObject) -> None:
    """Any batch in any rows, pages in any order, NaN in all that is not written; steps too."""
    model = SHARED["model"]
    smoothing = data.draw(st.sampled_from(["none", "sequence", "static"]))
    lengths = data.draw(st.lists(st.integers(1, 40), min_size=1, max_size=3))
    rows = data.draw(st.permutations(range(3)))[: len(lengths)]
    cache = model.new_cache(3, 64, pages=7, page_size=32, dtype=form(smoothing))
    cache.qk4pv8.records.fill_(0x7F)
    if cache.qk4pv8.delta is not None:
        cache.qk4pv8.delta.fill_(torch.nan)
    if smoothing == "sequence":
        cache.qk4pv8.q_means.fill_(torch.nan)
        cache.qk4pv8.k_means.fill_(torch.nan)
    order = data.draw(st.permutations(range(3)))
    cache.reserve([33] * 3, order)  # scatters the pages that come back
    for row in data.draw(st.permutations(order)):
        cache.free(row)
    prompts = [prompt(n, seed) for seed, n in enumerate(lengths)]
    found = [model.prefill(prompts, cache, rows=rows)]
    tokens = [5 if row in rows else -1 for row in range(3)]
    found.append(model.decode(tokens, cache)[rows])
    for n, _ in enumerate(rows):
        alone = model.new_cache(1, 64, dtype=form(smoothing), page_size=32)
        expected = [model.prefill(prompts[n], alone), model.decode([5], alone)]
        for mine, right in zip(found, expected, strict=True):
            assert_within(mine[n], right[0], ANGLES)


def test_padded_requests_over_records(model: Llama) -> None:
    """Rows of two requests side by side, the second one shorter: as if each came alone."""
    backend, ids = model.backend, prompt(10)
    padded = model.new_cache(2, 32, dtype="qk4pv8", page_size=32)
    padded.reserve([6, 4])
    requests = Requests.padded([6, 4], 32, padded.page_table)
    x = backend.embed(torch.tensor([*ids, 0, 0]))
    for layer in range(3):
        x = backend.block(layer, x, requests, padded)
    padded.advance([6, 4])
    found = backend.logits(x, torch.tensor([5, 9]))
    for n, part in enumerate((ids[:6], ids[6:])):
        alone = model.new_cache(1, 32, dtype="qk4pv8", page_size=32)
        assert_within(found[n], model.prefill(part, alone)[0], TIGHT)


def test_long_prompts_without_logits_in_memory(model: Llama, monkeypatch: Any) -> None:
    """What a prompt of thousands of tokens takes instead of the reference is the same attention."""
    from epicute.models import reference_backend

    ids = prompt(40)
    for dtype in ("bf16", "int4"):
        right = model.prefill(ids, model.new_cache(1, 64, dtype=dtype), logits="all")
        with monkeypatch.context() as patch:
            patch.setattr(reference_backend, "LONG", 16)
            patch.setattr(reference_backend, "attend", None)  # which is not asked
            found = model.prefill(ids, model.new_cache(1, 64, dtype=dtype), logits="all")
        assert_within(found, right, Budget(1e-6, 1e-6))


# --- sizes, means, and what is refused ---


def test_qk_bytes_of_a_token() -> None:
    """MpFA 6: 2.56 times fewer than BF16 without ΔS, 2.46 times with one term of four query heads."""
    plain = CacheSpec(32, 8, 128, page_size=128)
    for smoothing, terms, times in (("none", 2, 2.56), ("sequence", 1, 2.46)):
        spec = CacheSpec(32, 8, 128, page_size=128, qk4pv8=QK4PV8Form(smoothing, terms), heads=32)
        assert round(plain.token_bytes / spec.token_bytes, 2) == times
        assert spec.recorded


def test_observed_means_are_the_means(model: Llama, calibration: Calibration) -> None:
    """Of all tokens of all prompts, a prompt at a time; nothing is left behind."""
    parts = [observe_means(model, [p]) for p in (prompt(30, 7), prompt(12, 8))]
    for layer in range(3):
        wanted = (parts[0].q[layer] + parts[1].q[layer]) / 42
        assert_within(calibration.means(layer).q[0], wanted, Budget(1e-6, 1e-6))
    assert calibration.tokens.tolist() == [42] * 3
    assert model.backend.observed is None


class TestRefused:
    @pytest.mark.parametrize(
        ("options", "named"),
        [
            ({"smoothing": "static"}, "^means: got None"),
            ({"smoothing": "sequence", "means": Calibration(3, 4, 2, 64)}, "^means: got Calib"),
            ({"smoothing": "channel"}, "^smoothing: got 'channel'"),
            ({"qk": "exact8"}, "^qk: got 'exact8'"),
            ({"terms": 4}, "^terms: got 4"),
        ],
    )
    def test_forms(self, options: dict[str, Any], named: str) -> None:
        with pytest.raises(ArgumentError, match=named):
            QK4PV8Form(**options)

    def test_means_of_another_model(self, model: Llama) -> None:
        other = Calibration(3, 8, 2, 64)
        with pytest.raises(ArgumentError, match=r"^means.q: got \(3, 8, 64\)"):
            model.new_cache(1, 64, dtype=QK4PV8Form("static", means=other))

    def test_means_of_no_token(self, model: Llama) -> None:
        with pytest.raises(ArgumentError, match="no token"):
            model.new_cache(1, 64, dtype=QK4PV8Form("static", means=Calibration(3, 4, 2, 64)))
        with pytest.raises(ArgumentError, match="^prompts: got no token"):
            observe_means(model, [])

    def test_qk_10_pages_and_heads_that_no_record_has(self, model: Llama, tmp_path: Path) -> None:
        with pytest.raises(ArgumentError, match="^page_size: got 16"):
            model.new_cache(1, 64, dtype="qk4pv8", page_size=16)
        small = Llama.from_folder(save(random_model(FAMILIES["llama"]), tmp_path), device="cpu")
        with pytest.raises(ArgumentError, match="^head_dim: got 16"):
            small.new_cache(1, 64, dtype="qk4pv8")

    @pytest.mark.parametrize(
        "options", [{"mirror": True}, {"rotated": False}, {"scales": (1.0, 1.0)}], ids=str
    )
    def test_options_of_others(self, options: dict[str, Any], model: Llama) -> None:
        with pytest.raises(ArgumentError, match=f"^{next(iter(options))}"):
            model.new_cache(1, 64, dtype="qk4pv8", **options)

    def test_a_backend_without_a_decode(self, model: Llama, monkeypatch: Any) -> None:
        monkeypatch.setattr(type(model.backend), "decodes", False)
        with pytest.raises(UnsupportedError, match="QK4PV8Form"):
            model.new_cache(1, 64, dtype="qk4pv8")

    def test_a_main_copy_is_not_there(self, model: Llama) -> None:
        cache = model.new_cache(1, 64, dtype="qk4pv8")
        with pytest.raises(ArgumentError, match="^cache: got QK4PV8 records alone"):
            cache.keys(0)

    def test_records_of_two_kinds(self) -> None:
        with pytest.raises(ArgumentError, match="^qk4pv8"):
            CacheSpec(1, 2, 64, int4="only", qk4pv8=QK4PV8Form(), heads=4)
        with pytest.raises(ArgumentError, match="^heads"):
            CacheSpec(1, 2, 64, qk4pv8=QK4PV8Form())

    def test_records_without_a_page_table(self, model: Llama) -> None:
        cache = model.new_cache(1, 64, dtype="qk4pv8")
        cache.reserve([4])
        x = model.backend.embed(torch.tensor(prompt(4)))
        with pytest.raises(ArgumentError, match="page_table"):
            model.backend.block(0, x, Requests.packed([4], 64), cache)

    def test_attention(self, folder: Path) -> None:
        with pytest.raises(ArgumentError, match="^attention: got 'fp8'"):
            Llama.from_folder(folder, device="cpu", attention="fp8")


def test_owners_are_found_by_their_first_page(model: Llama) -> None:
    cache = model.new_cache(4, 64, pages=8, page_size=32, dtype="qk4pv8")
    cache.reserve([40, 0, 1, 64], [3, 1, 0, 2])
    assert cache.owners(cache.host_table([2, 3, 0])).tolist() == [2, 3, 0]
    assert math.isclose(cache.nbytes / cache.pages, cache.spec.token_bytes * 32)
    assert "QK4PV8 only, smoothing sequence" in repr(cache)
    assert "smoothing sequence" in repr(cache.qk4pv8)
