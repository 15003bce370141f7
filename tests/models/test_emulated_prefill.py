"""Prefill on a GPU that is made up: compiled kernels, the real host code, in the emulator.

A layer against float64, against the block of the CPU and in every layout, and a small model against the reference
backend. What a run on a GPU adds is the order of memory accesses and time; wrong arguments, strides, dtypes, anchors
and tensor maps show here.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GemmaConfig, LlamaConfig, PretrainedConfig, Qwen2Config, Qwen3Config

from epicute.models import LayerShape
from epicute.models.block_spec import BlockSpec
from epicute.models.block_state import BlockScales, LayerCache, Stream, model_sites
from epicute.models.embedding import PADDING, plan_embedding
from epicute.models.final_norm import plan_final_norm
from epicute.models.llama import Llama
from epicute.models.requests import Requests
from epicute.quant import DelayedGroup
from epicute.quant.roll import roll_sites
from epicute.testing import Budget, assert_equal_bits, assert_within
from tests.models.blocks import Setting, pad, split, tokens, unpad
from tests.models.cpu_kernels import Launches
from tests.models.folders import random_model, save
from tests.models.layers import FP8, draw, model_of
from tests.ptx.device import Device, emulated_device

SHAPE = LayerShape(128, 128, 2, 1, 64, "2:1 of 64")
SPECS = {
    "bf16": BlockSpec(SHAPE, "bf16"),
    "bf16, bias, norms": BlockSpec(SHAPE, "bf16", bias=True, qk_norm=True, gain_offset=1.0),
    "fp8": BlockSpec(SHAPE),
    "fp8, rows": BlockSpec(SHAPE, scaling="row", bias=True),
    "fp8, fp8 cache": BlockSpec(SHAPE, cache=FP8, qk_norm=True),
}
LENGTHS, PAGE, MAX_ROWS = (5, 9), 16, 64
LAYER = ("gemm.hopper", "attention.hopper", "gemm.hopper", "gemm.hopper", "gemm.hopper")

BUDGETS = {"bf16": Budget(0.01, 0.025), "fp8": Budget(0.11, 0.15)}
"""Of what the layer adds to the stream, against float64 on unquantised weights."""

SAME = {"bf16": Budget(0.008, 0.02), "fp8": Budget(0.04, 0.08)}
"""The same against the block on the CPU, whose rounding to 16 and 8 bits is at the same places: wider than that of a
real layer, as here few roundings that fall the other way are many."""


@pytest.fixture(scope="module")
def gpu() -> Iterator[Device]:
    """Two multiprocessors, on which everything of this module is planned once."""
    with emulated_device(2) as device:
        yield device
    setting.cache_clear()


@lru_cache
def setting(name: str, page: int = PAGE, pages: int = 2) -> Setting:
    return Setting(SPECS[name], device="cuda", page=page, pages=pages, max_rows=MAX_ROWS, seed=3)


def names(gpu: Device) -> list[str]:
    """Of the kernels launched since the last call."""
    found = [launch.name for launch in gpu.launches]
    gpu.launches.clear()
    return found


def assert_layer(at: Setting, out: torch.Tensor, values: torch.Tensor) -> None:
    """What the layer adds to packed rows, against float64."""
    model, out = model_of(at.spec, at.state), out.cpu()
    for x, y in zip(split(values, LENGTHS), split(out, LENGTHS), strict=True):
        exact = model.layer(x)
        assert_within(y.double() - x.double(), exact - x.double(), BUDGETS[at.spec.format])


def assert_cells(at: Setting, cache: LayerCache, values: torch.Tensor, table: torch.Tensor) -> None:
    """The tokens' keys and values, against float64."""
    model = model_of(at.spec, at.state)
    loose = Budget(0.06, 0.1) if FP8 in (at.spec.cache, at.spec.operand) else Budget(0.01, 0.02)
    for b, x in enumerate(split(values, LENGTHS)):
        for cells, scale, exact in zip(
            (cache.k, cache.v), (cache.k_scale, cache.v_scale), model.keys(x), strict=True
        ):
            placed = tokens(cells, table, b, len(x)).double()
            placed = placed if scale is None else placed * scale.double()[:, None]
            assert_within(placed.cpu(), exact, loose, f"request {b}")


# --- a layer ---


@pytest.mark.compile
def test_from_ids_to_normalised_rows(gpu: Device) -> None:
    """Embedding, roll, five kernels and final norm under delayed scales: eight launches, each with its neighbours."""
    at = setting("fp8")
    hidden = SHAPE.hidden
    embed = plan_embedding(hidden, fp8=True, device="cuda")
    norm = plan_final_norm(hidden, gain_dtype=torch.float32, device="cuda")
    block, group = at.plan(), DelayedGroup.create(model_sites(2), "cuda")
    scales, entry = BlockScales.of(group, 0), group["0.x"]
    for site, largest in zip((entry, *scales.sites), (8.0, 64.0, 16.0, 512.0, 64.0), strict=True):
        site.amax_next.fill_(largest)
    ids = torch.randint(50, (sum(LENGTHS) + 2,), generator=torch.Generator().manual_seed(1))
    ids[-2:] = PADDING
    ids = ids.cuda()
    vectors = draw(at.spec, 50, 2).cuda()
    x, out = (Stream.allocate(at.spec, len(ids), "cuda") for _ in range(2))
    strays, last = torch.zeros(2, 1, dtype=torch.int64, device="cuda")
    table, cache = at.table(2), at.cache(2)
    requests = Requests.packed(LENGTHS, PAGE, table, rows=len(ids), device="cuda")
    gain = torch.rand(hidden, generator=torch.Generator().manual_seed(4)).cuda()
    picked = torch.tensor([LENGTHS[0] - 1, sum(LENGTHS) - 1], device="cuda")
    normal = torch.empty(2, hidden, dtype=at.spec.dtype, device="cuda")
    state = ("scale_used", "amax_next", "history", "cursor")
    expected = {name: getattr(group, name).cpu() for name in state}
    names(gpu)
    torch.cuda.set_sync_debug_mode("error")
    group.roll()
    embed.run(ids, vectors, x.values, x.sumsq, strays, x.codes, entry)
    x = replace(x, scale=entry.scale_used)
    found = block.run(x, requests, cache, out, scales, roll=False)
    norm.run(found.values, gain, normal, sumsq=found.sumsq, rows=picked, strays=last)
    torch.cuda.set_sync_debug_mode("default")
    assert names(gpu) == ["quant.roll", "models.embedding", *LAYER, "models.final_norm"]
    roll_sites(*expected.values(), margin=0)
    for name in ("scale_used", "history", "cursor"):
        assert_equal_bits(getattr(group, name).cpu(), expected[name], name)
    assert all(float(site.amax_next) > 0 for site in (entry, *scales.sites))
    assert group.saturated.tolist() == group.nans.tolist() == [0] * len(group)
    assert (int(strays), int(last)) == (0, 0)
    values = vectors.cpu()[ids.cpu()[: sum(LENGTHS)]]
    assert_equal_bits(x.values.cpu()[: len(values)], values)
    assert_layer(at, found.values, values)
    assert_cells(at, cache, values, table)
    assert (found.values[sum(LENGTHS) :] == 0).all()
    wide = found.values.cpu().double()[picked.cpu()]
    exact = wide * (wide.square().mean(1, keepdim=True) + 1e-5).rsqrt() * gain.cpu().double()
    assert_within(normal.cpu(), exact, Budget(0.004, 0.006))


@pytest.mark.compile
def test_a_dense_cache_and_padded_requests(gpu: Device) -> None:
    at, width = setting("bf16", page=16, pages=1), 11
    values = draw(at.spec, sum(LENGTHS), 63)
    shape = (2, PAGE, SHAPE.kv_heads, SHAPE.head_dim)
    k, v = (torch.full(shape, torch.nan, device="cuda").bfloat16() for _ in "kv")
    requests = Requests.padded(LENGTHS, PAGE, device="cuda", width=width)
    block = at.plan(packed=False, page=None)
    names(gpu)
    found = at.run(block, pad(values, LENGTHS, width), requests, LayerCache.of(k, v, dense=True))
    assert names(gpu) == list(LAYER)
    assert_layer(at, unpad(found.values, LENGTHS), values)
    empty = pad(torch.zeros(sum(LENGTHS), 1), LENGTHS, width).isnan()[:, 0]
    assert (found.values.cpu()[empty] == 0).all()


@pytest.mark.gates
@pytest.mark.parametrize("name", SPECS)
def test_packed_padded_and_one_by_one_are_the_layer(name: str, gpu: Device) -> None:
    """Against float64, and to the bit the same in every layout, with rows and pages of nobody."""
    at, values = setting(name), draw(SPECS[name], sum(LENGTHS), 11)
    table, caches = at.table(2, 5), [at.cache(2) for _ in range(3)]
    packed, padded = at.plan(), at.plan(packed=False)
    slack = torch.cat([values, torch.full((3, SHAPE.hidden), torch.nan).to(values)])
    requests = Requests.packed(LENGTHS, PAGE, table, rows=len(slack), device="cuda")
    one = at.run(packed, slack, requests, caches[0])
    assert_layer(at, one.values, values)
    assert_cells(at, caches[0], values, table)
    assert (one.values[len(values) :] == 0).all()
    requests = Requests.padded(LENGTHS, PAGE, table, width=12, device="cuda")
    two = at.run(padded, pad(values, LENGTHS, 12), requests, caches[1])
    assert_equal_bits(unpad(two.values.cpu(), LENGTHS), one.values[: len(values)].cpu(), "padded")
    three = [
        at.run(
            packed,
            x,
            Requests.packed([len(x)], PAGE, table[b : b + 1], device="cuda"),
            caches[2],
        ).values
        for b, x in enumerate(split(values, LENGTHS))
    ]
    assert_equal_bits(torch.cat(three).cpu(), one.values[: len(values)].cpu(), "one by one")
    for which in ("k", "v"):
        for cache in caches[1:]:
            assert_equal_bits(getattr(cache, which).cpu(), getattr(caches[0], which).cpu(), which)


@pytest.mark.gates
@pytest.mark.parametrize("name", SPECS)
def test_it_is_the_block_of_the_cpu(name: str, gpu: Device) -> None:
    at = setting(name)
    here = replace(at, kernels=Launches().kernels, device="cpu")
    values, table = draw(at.spec, sum(LENGTHS), 21), at.table(2)
    scales, mine = at.scales(), here.scales()
    caches = at.cache(2), here.cache(2)
    requests = Requests.packed(LENGTHS, PAGE, table, device="cuda")
    found = at.run(at.plan(), values, requests, caches[0], scales)
    there = Requests.packed(LENGTHS, PAGE, table)
    wanted = here.run(here.plan(), values, there, caches[1], mine)
    x = values.double()
    budget = SAME["fp8" if FP8 in (at.spec.cache, at.spec.operand) else at.spec.format]
    assert_within(found.values.cpu().double() - x, wanted.values.double() - x, budget)
    for counter, other in zip(*(c.counters.values() for c in caches), strict=True):
        assert abs(int(counter) - int(other)) <= 2
    if scales is not None:
        for site, other in zip(scales.sites, mine.sites, strict=True):
            assert_within(site.amax_next.cpu(), other.amax_next, Budget(0.06, 0.06))
            assert int(site.nans) == int(other.nans) == 0


@pytest.mark.gates
@pytest.mark.parametrize("name", ["bf16", "fp8", "fp8, rows", "fp8, fp8 cache"])
def test_cg_01_a_captured_layer_serves_other_lengths(name: str, gpu: Device) -> None:
    """Captured at one batch, replayed at another: all that changes is in device memory."""
    at, rows = setting(name), 16
    block, table = at.plan(), at.table(2)
    x, out = (Stream.allocate(at.spec, rows, "cuda") for _ in range(2))
    cache, scales = at.cache(2), at.scales()
    requests = Requests.packed((3, 4), PAGE, table, rows=rows, device="cuda")
    live = at.stream(torch.zeros(rows, SHAPE.hidden, dtype=at.spec.dtype))
    x = replace(live) if live.scale is not None else x
    names(gpu)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = block.run(x, requests, cache, out, scales, roll=False)
    assert names(gpu) == []
    values = draw(at.spec, sum(LENGTHS), 51)
    fresh = at.stream(torch.cat([values, torch.zeros(rows - len(values), SHAPE.hidden).to(values)]))
    other = Requests.packed(LENGTHS, PAGE, table, rows=rows, device="cuda")
    copied(fresh, x)
    copied(other, requests)
    graph.replay()
    assert_layer(at, found.values[: len(values)], values)
    wanted = at.run(block, fresh.values.cpu(), other, at.cache(2), at.scales())
    assert_equal_bits(found.values.cpu(), wanted.values.cpu())


def copied(source: Any, target: Any) -> None:
    """Every tensor of a dataclass into the same one of another."""
    for name, value in vars(source).items():
        if isinstance(value, torch.Tensor):
            getattr(target, name).copy_(value)


# --- a model ---


SIZES: dict[str, Any] = {
    "vocab_size": 160,
    "hidden_size": SHAPE.hidden,
    "intermediate_size": SHAPE.intermediate,
    "num_hidden_layers": 2,
    "num_attention_heads": SHAPE.heads,
    "num_key_value_heads": SHAPE.kv_heads,
    "max_position_embeddings": 64,
    "initializer_range": 0.1,
}
FAMILIES: dict[str, PretrainedConfig] = {
    "llama": LlamaConfig(**SIZES, head_dim=SHAPE.head_dim),
    "qwen2, tied": Qwen2Config(**SIZES, tie_word_embeddings=True),
    "qwen3": Qwen3Config(**SIZES, head_dim=SHAPE.head_dim),
    "gemma": GemmaConfig(**SIZES, head_dim=SHAPE.head_dim, hidden_act="silu"),
}
"""Two layers of this module's shape."""

WHOLE = {"bf16": Budget(0.008, 0.02), "fp8": Budget(0.1, 0.2)}
"""Both layers, the final norm and the head."""


@pytest.mark.gates
@pytest.mark.parametrize(
    ("family", "weights", "scaling"),
    [
        ("llama", "bf16", "delayed"),
        ("llama", "fp8", "delayed"),
        ("qwen2, tied", "fp8", "row"),
        ("qwen3", "fp8", "delayed"),
        ("gemma", "bf16", "delayed"),
        ("gemma", "fp8", "row"),
    ],
)
def test_logits_are_those_of_the_reference_backend(
    family: str, weights: str, scaling: str, tmp_path: Path, gpu: Device
) -> None:
    """``Llama`` itself, which finds the GPU: two invocations of ragged requests, the second behind cached tokens."""
    folder = save(random_model(FAMILIES[family]), tmp_path)
    options: dict[str, Any] = {"weights": weights, "scaling": scaling}
    there = Llama.from_folder(folder, max_rows=32, page_size=PAGE, **options)
    assert there.device == torch.device("cuda", 0)
    here = Llama.from_folder(folder, device="cpu", **options)
    caches = [there.new_cache(2, 32), here.new_cache(2, 32, page_size=PAGE)]
    generator = torch.Generator().manual_seed(1)
    loose = Budget(0.3, 0.8) if scaling == "delayed" and weights == "fp8" else WHOLE[weights]
    for lengths in (LENGTHS, (1, 4)):
        prompts = [torch.randint(160, (n,), generator=generator).tolist() for n in lengths]
        names(gpu)
        found = there.prefill(prompts, caches[0], logits="all")
        launched = names(gpu)
        assert launched.count("attention.hopper") >= 2
        assert launched[-2:] == ["models.final_norm", "gemm.hopper"]
        assert_within(found.cpu(), here.prefill(prompts, caches[1], logits="all"), loose)
    assert int(there.backend.strays) == int(there.backend.stray_rows) == 0
