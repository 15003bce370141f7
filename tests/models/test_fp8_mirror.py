"""A model with an FP8 mirror beside its main cache: who writes which copy, who reads which, on both backends."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from epicute.decode import kernel_for
from epicute.epilogues import Columns, PlaceKV, RoPE, Store, compose
from epicute.errors import ArgumentError, UnsupportedError
from epicute.gemm import kernel_for as gemm_kernel_for
from epicute.gemm.fitting import compile_fitting
from epicute.jit import DEFAULT_TARGET, compile
from epicute.kv import KVCache
from epicute.kv.reference import scatter
from epicute.models import SHAPES, LayerShape
from epicute.models.block_spec import BlockSpec
from epicute.models.block_state import LayerCache
from epicute.models.decode_block_spec import DecodeBlockSpec
from epicute.models.decode_cache import CacheForm, DecodeCache
from epicute.models.llama import Llama
from epicute.models.mirrored import MirroredCache, PlaceBoth, mirrored
from epicute.models.shapes import projections
from epicute.testing import Budget, assert_equal_bits, assert_within
from tests.models.decode_blocks import Scene
from tests.models.decode_kernels import step_kernels
from tests.models.folders import random_model, save
from tests.models.mirrored_scenes import MirroredScene, others_unchanged
from tests.models.one_thread import single as single
from tests.models.test_decode_block import LENGTHS, PLAIN
from tests.models.test_decode_model import EXPANDED, FAMILIES, SAME, planned, prompt

FP8 = torch.float8_e4m3fn
PAGE = 16
SCALES = (0.02, 0.03)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(random_model(FAMILIES["llama"]), tmp_path_factory.mktemp("model"))


def both(model: Llama, requests: int = 3, length: int = 48, **options: Any) -> KVCache:
    """An empty cache with a main copy and a mirror."""
    given_: dict[str, Any] = {"dtype": "fp8", "mirror": True, "scales": SCALES, "page_size": PAGE}
    return model.new_cache(requests, length, **{**given_, **options})


def slots_of(cache: KVCache, row: int) -> Tensor:
    place, size = torch.arange(cache.held[row]), cache.spec.page_size
    page = cache.page_table[row].cpu()[place // size].long()
    return page * size + place % size


def assert_mirrored(cache: KVCache) -> None:
    """Codes of all that is held are those of the main copy's rows, to the bit; what did not fit was counted."""
    assert cache.fp8 is not None
    for layer in range(cache.spec.layers):
        views = ((cache.keys, cache.fp8.keys), (cache.values, cache.fp8.values))
        for which, (main, mirror) in enumerate(views):
            cells, pool, saturated = main(layer).cpu(), mirror(layer).cpu(), 0
            assert pool.dtype == FP8
            for row in range(cache.requests):
                slots = slots_of(cache, row)
                at = slots // cache.spec.page_size, slots % cache.spec.page_size
                wanted = torch.zeros(pool.shape).to(FP8)
                scale = torch.full((cache.spec.kv_heads,), SCALES[which])
                saturated += scatter(wanted, cells[at].float(), slots, scale)
                assert_equal_bits(pool.view(torch.uint8)[at], wanted.view(torch.uint8)[at])
            assert int(cache.saturated[layer, which]) == saturated
            assert int(cache.nans[layer, which]) == 0


# --- who writes, who reads ---


@pytest.mark.parametrize("weights", ["bf16", "fp16", "fp8", "int4"])
def test_both_copies_are_written_by_prefill_and_step(weights: str, folder: Path) -> None:
    """On both backends; their steps are alike over the same rows, with requests that wait and others that come."""
    models = [
        planned(folder, weights=weights),
        Llama.from_folder(folder, device="cpu", weights=weights, scaling="row"),
    ]
    caches = [both(m) for m in models]
    rough = {"fp8": Budget(0.1, 0.2), "int4": EXPANDED}.get(weights, SAME)

    def prefilled(ids: list[list[int]], rows: list[int]) -> None:
        mine, right = (m.prefill(ids, c, rows=rows) for m, c in zip(models, caches, strict=True))
        assert_within(mine, right, rough)
        for cache in caches:
            assert_mirrored(cache)
        mine_, theirs = caches
        assert mine_._memory is not None
        assert theirs._memory is not None
        mine_._memory.copy_(theirs._memory)
        assert mine_.fp8 is not None
        assert theirs.fp8 is not None
        mine_.fp8.memory.copy_(theirs.fp8.memory)

    def stepped(tokens: list[int]) -> None:
        mine, right = (m.decode(tokens, c) for m, c in zip(models, caches, strict=True))
        live = torch.tensor(tokens) >= 0
        assert_within(mine[live], right[live], SAME)
        assert (mine[~live] == 0).all()
        for cache in caches:
            assert_mirrored(cache)

    prefilled([prompt(15), prompt(4, 1)], [0, 2])
    stepped([7, -1, 9])
    prefilled([prompt(18, 2), prompt(3, 3)], [1, 2])
    stepped(prompt(3, 4))
    assert caches[0].held == caches[1].held == (17, 19, 9)


def test_a_prefill_is_as_without_a_mirror(folder: Path) -> None:
    """It reads the main copy: the same bits, chunk after chunk, and the same launches, of which one writes more."""
    made: list[str] = []
    for model in (planned(folder, made, weights="bf16"), Llama.from_folder(folder, device="cpu")):
        plain, two, ids = model.new_cache(1, 48, page_size=PAGE), both(model, 1), prompt(40)
        counts = []
        for cache in (plain, two):
            made.clear()
            cache_logits = model.prefill(ids, cache, chunk=16, logits="all")
            counts.append(len(made))
            if cache is plain:
                right = cache_logits
        assert_equal_bits(cache_logits, right)
        for layer in range(model.config.layers):
            assert_equal_bits(two.dense_keys(layer)[:, :40], plain.dense_keys(layer)[:, :40])
            assert_equal_bits(two.dense_values(layer)[:, :40], plain.dense_values(layer)[:, :40])
        assert counts[0] == counts[1]
        assert_mirrored(two)


@pytest.mark.parametrize("backend", ["kernels", "reference"])
def test_a_step_reads_the_mirror_alone(backend: str, folder: Path) -> None:
    kernels = backend == "kernels"
    model = planned(folder) if kernels else Llama.from_folder(folder, device="cpu")
    found = []
    for spoiled in ("neither", "main", "mirror"):
        cache = both(model, 1)
        model.prefill(prompt(20), cache)
        assert cache._memory is not None
        assert cache.fp8 is not None
        if spoiled == "main":
            cache._memory.fill_(torch.nan)
        elif spoiled == "mirror":
            cache.fp8.memory.view(torch.uint8).fill_(0x7F)
        found.append(model.decode([5], cache))
    assert_equal_bits(found[1], found[0])
    assert found[0].isfinite().all()
    assert found[2].isnan().all()


def test_a_step_is_five_launches_a_layer_and_the_head(folder: Path) -> None:
    made: list[str] = []
    model = planned(folder, made, weights="bf16")
    cache = both(model, 1)
    model.prefill(prompt(5), cache)
    model.prepare(cache)
    made.clear()
    model.decode([3], cache)
    assert len(made) == 5 * model.config.layers + 1
    assert made[0] == "RowScale >> Columns(q: RoPE >> Store, k: RoPE >> PlaceBoth, v: PlaceBoth)"


def test_kd_18_what_does_not_fit_is_counted_once(folder: Path) -> None:
    """Calibration runs a first layer several times: cells are written again, and nothing is counted again."""
    tiny = (1e-4, 1e-4)
    for options in ({"weights": "fp8", "scaling": "delayed"}, {"weights": "bf16"}):
        model = planned(folder, **options)
        cache = both(model, 1, scales=tiny)
        assert cache.fp8 is not None
        ids = prompt(20)
        model.prefill(ids, cache)
        model.decode([3], cache)
        for layer in range(model.config.layers):
            pools = (cache.keys(layer), cache.values(layer))
            for which, pool in enumerate(pools):
                rows = pool[slots_of(cache, 0) // PAGE, slots_of(cache, 0) % PAGE].float()
                beyond = (rows * (1 / torch.tensor(tiny[which]))).abs() > 448
                assert int(cache.saturated[layer, which]) == int(beyond.sum())
        assert int(cache.saturated.min()) > 0


def test_int4_records_beside_a_main_copy_are_the_quantisers_to_the_bit(folder: Path) -> None:
    """The kernels' backend, prefilled and appended: each record is that of the 16-bit row beside it."""
    for weights in ("bf16", "int4"):
        model = planned(folder, weights=weights)
        cache = model.new_cache(2, 48, dtype="int4", mirror=True)
        model.prefill([prompt(18), prompt(5, 1)], cache)
        for token in (3, 77):
            model.decode([token, token + 1], cache)
        assert cache.int4 is not None
        for layer in range(model.config.layers):
            wanted = torch.zeros_like(cache.int4.layer(layer))
            for row in (0, 1):
                slots = slots_of(cache, row)
                at = slots // PAGE, slots % PAGE
                k, v = cache.keys(layer)[at], cache.values(layer)[at]
                cache.int4.format.write(wanted, k, v, slots)
                for mine, right in zip(
                    cache.int4.read(layer, slots),
                    cache.int4.format.read(wanted, slots),
                    strict=True,
                ):
                    assert_equal_bits(mine, right)


# --- batches, pages, failures ---


@settings(max_examples=8)
@given(st.data())
def test_kd_01_a_request_does_not_depend_on_its_neighbours(data: st.DataObject) -> None:
    """Any batch in any rows, pages in any order, NaN in all that is nobody's, steps of some of them: both copies."""
    model = SHARED["model"]
    lengths = data.draw(st.lists(st.integers(1, 30), min_size=1, max_size=4))
    rows = data.draw(st.permutations(range(4)))[: len(lengths)]
    cache = both(model, 4, pages=12)
    assert cache._memory is not None
    assert cache.fp8 is not None
    cache._memory.fill_(torch.nan)
    cache.fp8.memory.view(torch.uint8).fill_(0x7F)
    order = data.draw(st.permutations(range(4)))
    cache.reserve([33] * 4, order)  # scatters the pages that come back
    for row in data.draw(st.permutations(order)):
        cache.free(row)
    prompts = [prompt(n, seed) for seed, n in enumerate(lengths)]
    found = [model.prefill(prompts, cache, rows=rows)]
    waits = data.draw(st.sampled_from([None, *rows]))
    tokens = [6 if r in rows and r != waits else -1 for r in range(4)]
    found.append(model.decode(tokens, cache)[rows])
    assert_mirrored(cache)
    for n, row in enumerate(rows):
        alone = both(model, 1)
        assert_equal_bits(found[0][n : n + 1], model.prefill(prompts[n], alone))
        if row != waits:
            assert_equal_bits(found[1][n : n + 1], model.decode([6], alone))


SHARED: dict[str, Llama] = {}


@pytest.fixture(scope="module", autouse=True)
def _shared(folder: Path) -> None:
    SHARED["model"] = planned(folder)  # hypothesis runs one test function for all its examples


@pytest.mark.parametrize("kind", ["fp8", "int4"])
@pytest.mark.parametrize("pages", [None, 8])
def test_a_prefill_that_fails_leaves_both_copies_of_others(
    pages: int | None, kind: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tokens and pages go back; what the cache holds is in both copies as before, and the prefill succeeds after."""
    model = planned(folder)
    scales = SCALES if kind == "fp8" else None
    cache, right = (both(model, 2, pages=pages, dtype=kind, scales=scales) for _ in range(2))
    mirror = cache.fp8 or cache.int4
    assert mirror is not None
    for c in (cache, right):
        model.prefill([prompt(20)], c, rows=[1])
    slots = slots_of(cache, 1)
    at = slots // PAGE, slots % PAGE
    before = [cache.keys(1)[at].clone(), *mirror.read(1, slots)]
    table, free = cache.page_table.clone(), cache.free_pages
    whole = model.backend.block

    def failing(layer: int, *given_: Any) -> Any:
        if layer == 1:
            raise RuntimeError("broken")
        return whole(layer, *given_)

    monkeypatch.setattr(model.backend, "block", failing)
    with pytest.raises(RuntimeError, match="broken"):
        model.prefill([prompt(30, 3)], cache, rows=[0])
    monkeypatch.setattr(model.backend, "block", whole)
    assert (cache.held, cache.free_pages) == ((0, 20), free)
    assert torch.equal(cache.page_table, table)
    after = [cache.keys(1)[at], *mirror.read(1, slots)]
    for mine, then in zip(after, before, strict=True):
        assert_equal_bits(mine, then)
    logits = [model.prefill([prompt(30, 3)], c, rows=[0]) for c in (cache, right)]
    assert_equal_bits(*logits)
    assert_equal_bits(*[model.decode([1, 2], c) for c in (cache, right)])


def test_caches_of_all_forms_take_turns(folder: Path) -> None:
    model = planned(folder, weights="bf16")
    kinds: list[dict[str, Any]] = [
        {},
        {"dtype": "fp8", "mirror": True, "scales": SCALES},
        {"dtype": "int4", "mirror": True},
    ]
    alone = []
    for kind in kinds:
        cache = model.new_cache(1, 32, **kind)
        model.prefill(prompt(9), cache)
        alone.append([model.decode([t], cache) for t in prompt(3, 5)])
    assert not torch.equal(alone[0][2], alone[1][2])
    caches = [model.new_cache(2, 32, **kind) for kind in kinds]
    for cache in caches:
        model.prefill([prompt(9)], cache, rows=[1])
    for place, token in enumerate(prompt(3, 5)):
        for cache, right in zip(caches, alone, strict=True):
            assert_equal_bits(model.decode([-1, token], cache)[1:], right[place])


# --- the block ---


@pytest.mark.parametrize("page", [32, None], ids=["paged", "contiguous"])
@pytest.mark.parametrize("cache", ["fp8", "int4"])
@pytest.mark.parametrize("weights", ["bf16", "fp16", "fp8", "int4"])
def test_a_step_is_the_layer_in_float64(weights: str, cache: str, page: int | None) -> None:
    """Both copies of each new row to the bit, and no cell of anybody else's."""
    made: list[str] = []
    at = MirroredScene(PLAIN, weights, cache, LENGTHS, page=page, kernels=step_kernels(made))
    block, before = at.plan(), at.snapshot()
    made.clear()
    at.check(block, at.run(block))
    others_unchanged(at, before)
    assert len(made) == 5


def test_fewer_requests_than_stretches_of_memory() -> None:
    """The first of a contiguous cache's, in both copies."""
    at = MirroredScene(PLAIN, "bf16", "fp8", LENGTHS, page=None, kernels=step_kernels())
    block, step, x, out = at.plan(), at.step(), at.stream(), at.out()
    whole = block.run(x, step, at.cache, out).values.clone()
    again = MirroredScene(PLAIN, "bf16", "fp8", LENGTHS, page=None, kernels=step_kernels())
    some = type(step)(step.positions[:2], step.slots[:2], step.lengths[:2])
    found = block.run(x.first(2), some, again.cache, out.first(2))
    assert_equal_bits(found.values, whole[:2])
    first, all_of_it = again.cache.first(2), again.cache
    for mine, right in zip(
        (first.main.main.k, first.main.mirror.v, first.main.k),  # type: ignore[union-attr]
        (all_of_it.main.main.k, all_of_it.main.mirror.v, all_of_it.main.mirror.k),  # type: ignore[union-attr]
        strict=True,
    ):
        assert mine.data_ptr() == right.data_ptr()
        assert len(mine) == 2


@given(
    st.sampled_from([torch.bfloat16, torch.float16]),
    st.integers(1, 3),
    st.lists(st.integers(-2, 40), min_size=1, max_size=6, unique=True),
    st.booleans(),
)
@settings(max_examples=25)
def test_the_policy_is_two_of_place_kv(
    dtype: torch.dtype, heads: int, slots: list[int], odd: bool
) -> None:
    """The second of what the first one kept; NaN and what is too large included."""
    random = torch.Generator().manual_seed(len(slots))
    x = 40 * torch.randn(len(slots), heads * 16, generator=random)
    if odd:
        x[0, 3], x[-1, 5] = torch.nan, 1e6
    size = (2, 16, heads, 16)
    main, mirror = torch.zeros(size, dtype=dtype), torch.zeros(size).to(FP8)
    scale = 0.01 * (1 + torch.arange(heads, dtype=torch.float32))
    given_ = {"slots": torch.tensor(slots), "mirror_scale": scale}
    found = PlaceBoth(16, dtype).evaluate(x, cells=main, mirror=mirror, **given_)
    first = PlaceKV(16, dtype).evaluate(x, cells=main, slots=given_["slots"])
    assert_equal_bits(found["cells"], first["cells"])
    rows = x.to(dtype).float().unflatten(1, (heads, 16))
    wanted = torch.zeros(size).to(FP8)
    saturated = scatter(wanted, rows, given_["slots"], scale)
    mine, right = found["mirror"].float(), wanted.float()
    assert torch.equal(mine.nan_to_num(999.0), right.nan_to_num(999.0))
    assert int(found["mirror_saturated"]) == saturated
    live = (given_["slots"] >= 0) & (given_["slots"] < 32)
    assert int(found["mirror_nans"]) == int(rows[live].isnan().sum())


def test_what_is_composed() -> None:
    spec = DecodeBlockSpec.of(PLAIN, CacheForm("fp8", main=True), "fp8")
    assert spec.block.cache == torch.bfloat16
    assert str(spec.cache) == "fp8 cache beside a main copy, pages of 64"
    assert spec.compositions["qkv"].title == (
        "Dequantize >> RowScale >> Columns(q: RoPE >> Store, k: RoPE >> PlaceBoth, v: PlaceBoth)"
    )
    plain = PLAIN.compositions["qkv"]
    assert (mirrored(plain).row_order(512).physical() == plain.row_order(512).physical()).all()
    assert spec.attention().cache == "fp8"


def test_a_dense_cache_in_pages_is_so_in_both_copies() -> None:
    size = (2, 32, 2, 64)
    main = LayerCache.of(*torch.zeros(2, *size, dtype=torch.bfloat16), dense=True)
    codes = torch.zeros(2, *size).to(FP8)
    mirror = LayerCache.of(*codes, torch.ones(2), torch.ones(2), dense=True)
    for step, read in ((True, mirror), (False, main)):
        pages, table = MirroredCache.both(main, mirror, step=step).in_pages(16)
        assert table.tolist() == [[0, 1], [2, 3]]
        assert pages.k.data_ptr() == read.k.data_ptr()
        assert pages.k.shape == (4, 16, 2, 64)
        assert pages.cells()["k_mirror"].shape == pages.cells()["v_cells"].shape == (4, 16, 2, 64)


# --- kernels ---


@pytest.mark.compile
def test_the_projection_compiles() -> None:
    """Behind FP8 scales, biases and norms of heads, with a gain on the way in."""
    _compiled("fp8", 8, BlockSpec(PLAIN.shape, "bf16", bias=True, qk_norm=True))


@pytest.mark.gates
@pytest.mark.parametrize("rows", [8, 16, 32, 64])
@pytest.mark.parametrize("weights", ["bf16", "fp8", "int4"])
def test_projections_of_the_published_heads_compile(weights: str, rows: int) -> None:
    shape = LayerShape(1024, 1024, 8, 2, 128, "8:2 of 128")
    _compiled(weights, rows, BlockSpec(shape, "bf16", bias=True, qk_norm=True))


def _compiled(weights: str, rows: int, block: BlockSpec) -> None:
    at = MirroredScene(block, weights, "fp8", [3])
    chain, gain = at.layer.spec.compositions["qkv"], at.layer.spec.norm_gain
    kernel = kernel_for(chain, at.layer.qkv, rows, gain=gain, target=DEFAULT_TARGET)
    compile(kernel).report.check(kernel.spec.name, DEFAULT_TARGET.smem_per_block)


@pytest.mark.gates
@pytest.mark.parametrize("rows", [64, 8192])
@pytest.mark.parametrize(
    "spec",
    [
        BlockSpec(SHAPES["8B"], "bf16", qk_norm=True, bias=True),
        BlockSpec(SHAPES["8B"], "fp8"),
        BlockSpec(SHAPES["8B"], "fp8", scaling="row"),
        BlockSpec(SHAPES["SmolLM2"], "fp16", cache=torch.float16),
    ],
    ids=["bf16", "fp8", "fp8, rows", "fp16"],
)
def test_projections_of_a_prefill_compile(spec: BlockSpec, rows: int) -> None:
    n, k = projections(spec.shape)["qkv"]
    options = spec.options("qkv", rows)
    chain = mirrored(spec.compositions["qkv"])
    wide = gemm_kernel_for(chain, n=n, k=k, dtype=spec.operand, **options)
    kernel, compiled = compile_fitting(wide)
    compiled.report.check(kernel.spec.name, DEFAULT_TARGET.smem_per_block)


# --- what is refused ---


class TestRefused:
    def test_caches(self, folder: Path) -> None:
        model = Llama.from_folder(folder, device="cpu")
        for options, named in (
            ({"dtype": "fp8", "mirror": True}, "^scales: got None, expected K's and V's"),
            ({"dtype": "bf16", "mirror": True}, "^mirror: got True.*'int4' or 'fp8'"),
            ({"dtype": "qk4pv8", "mirror": True}, "^mirror"),
            ({"dtype": "fp8", "rotated": False, "scales": SCALES}, "^rotated.*dtype='int4'"),
        ):
            with pytest.raises(ArgumentError, match=named):
                model.new_cache(1, 16, **options)
        same = model.new_cache(1, 16, dtype=FP8, mirror=True, scales=SCALES)
        assert same.spec.fp8_mirror
        assert same.spec.dtype == torch.bfloat16

    def test_a_backend_that_was_planned_for_fp8(self, folder: Path) -> None:
        model = planned(folder, weights="bf16", cache=FP8)
        with pytest.raises(ArgumentError, match="^dtype: got torch.float8_e4m3fn.*an FP8 mirror"):
            both(model, 1)

    def test_a_backend_without_steps(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        model = planned(folder)
        monkeypatch.setattr(type(model.backend), "decodes", False)
        with pytest.raises(UnsupportedError, match="^dtype: got 'fp8' with a main copy"):
            both(model, 1)

    def test_copies_that_do_not_fit(self) -> None:
        def copy(dtype: torch.dtype, pages: int = 3, size: int = 16, **options: Any) -> LayerCache:
            scales = (torch.ones(2), torch.ones(2)) if dtype == FP8 else ()
            pools = torch.zeros(2, pages, size, 2, 64).to(dtype)
            return LayerCache.of(*pools, *scales, **options)

        main, mirror = copy(torch.bfloat16), copy(FP8)
        assert DecodeCache.fp8(mirror, main).form == CacheForm("fp8", 16, True)
        for first, second, named in (
            (main, main, "^mirror: got LayerCache of torch.bfloat16"),
            (mirror, mirror, "^main: got LayerCache of torch.float8_e4m3fn"),
            (copy(FP8, 4), main, r"^mirror: got \(4, 16, 2, 64\)"),
            (copy(FP8, 3, 32), main, "^mirror: got .*pages of 32"),
            (copy(FP8, dense=True), main, "^mirror: got .*pages of None"),
            (mirror, MirroredCache.both(main, mirror, step=False), "^main: got MirroredCache"),
        ):
            with pytest.raises(ArgumentError, match=named):
                DecodeCache.fp8(first, second)

    def test_a_model_cache_without_a_mirror(self, folder: Path) -> None:
        cache = Llama.from_folder(folder, device="cpu").new_cache(1, 16)
        with pytest.raises(ArgumentError, match="^cache: got .*expected one with an FP8 mirror"):
            MirroredCache.both_of_model(cache, 0, step=True)

    def test_forms(self) -> None:
        with pytest.raises(ArgumentError, match="^cache.main: got True, expected False for bf16"):
            CacheForm("bf16", main=True)
        with pytest.raises(ArgumentError, match="^PlaceBoth.dtype"):
            PlaceBoth(64, FP8)
        with pytest.raises(ArgumentError, match="head_dim: got 24"):
            PlaceBoth(24)
        for chain in (compose(Store()), compose(Columns(a=(64, RoPE(64) >> Store())))):
            with pytest.raises(ArgumentError, match="^composition"):
                mirrored(chain)
        with pytest.raises(ArgumentError, match="^PlaceBoth.dtype"):
            mirrored(replace(PLAIN, cache=FP8).compositions["qkv"])

    def test_a_step_of_another_form(self) -> None:
        """Kernels for one copy get no cache of two, nor the other way round."""
        two = MirroredScene(PLAIN, "bf16", "fp8", LENGTHS, kernels=step_kernels())
        one = Scene(PLAIN, "bf16", "fp8", LENGTHS, kernels=step_kernels())
        for block, cache in ((two.plan(), one.cache), (one.plan(), two.cache)):
            with pytest.raises(ArgumentError, match="^cache: got fp8 cache"):
                block.run(two.stream(), two.step(), cache, two.out())
