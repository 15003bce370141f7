"""The decode chain on the GPU: every pair of formats against float64, under CUDA graphs, beside any other request.

``tests.ptx.plugin`` runs the smaller ones without a GPU.
"""

from __future__ import annotations

import random
import warnings
from dataclasses import replace
from typing import Any

import pytest
import torch

from benchmarks.footprint import launches, peak_bytes
from epicute.epilogues import RoPE
from epicute.models import SHAPES, LayerShape
from epicute.models.block_spec import BlockSpec
from epicute.models.decode_block import DecodeBlock
from epicute.models.decode_step import DecodeStep
from epicute.testing import assert_equal_bits
from tests.models.decode_blocks import CACHES, WEIGHTS, Scene
from tests.models.layers import inv_freq
from tests.models.replays import Replays, Walk

pytestmark = pytest.mark.gpu

TINY = BlockSpec(LayerShape(128, 128, 2, 1, 64, "tiny"), "bf16")
SMOL = BlockSpec(SHAPES["SmolLM2"], "bf16")
WIDE = BlockSpec(LayerShape(1024, 2048, 16, 4, 128, "16:4 of 128"), "bf16")
SPECS = {"tiny": TINY, "SmolLM2": SMOL, "16:4 of 128": WIDE}
PAIRS = [(weights, cache) for weights in WEIGHTS for cache in CACHES]

RAGGED = (1, 0, 63, 64, 65, 255, 256, 257, 700)
"""A first token, a row that takes no part, page edges and part edges."""

LONG = (4097, 3)


def scene(name: str, weights: str, cache: str, lengths: Any, **options: Any) -> Scene:
    """A layer on the GPU, in pages of 64."""
    spec = options.pop("spec", None) or SPECS[name]
    page = options.pop("page", 64)
    pages = options.pop("pages", -(-max(lengths) // (page or 32)) + 1)
    return Scene(
        spec, weights, cache, lengths, page=page, pages=pages, device="cuda", terms=2, **options
    )


def checked(at: Scene, **options: Any) -> torch.Tensor:
    """A step compared with float64."""
    block = at.plan(max_len=2**20, **options)
    found = at.run(block)
    at.check(block, found)
    return found


# --- numbers ---


@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize(("weights", "cache"), PAIRS)
def test_kd_01_kd_04_a_step_is_the_layer_in_float64(name: str, weights: str, cache: str) -> None:
    """Fresh weights, ragged requests, NaN in all memory that is nobody's."""
    lengths = RAGGED[:3] if name == "tiny" else RAGGED
    checked(scene(name, weights, cache, lengths, seed=len(weights) + len(cache)), prefetch=True)


@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("weights", ["bf16", "int4"])
def test_kd_03_long_contexts_are_split(weights: str, cache: str) -> None:
    checked(scene("16:4 of 128", weights, cache, LONG), prefetch=True)


@pytest.mark.parametrize("batch", [1, 8, 9, 17, 33, 65])
@pytest.mark.parametrize("weights", WEIGHTS)
def test_every_number_of_rows(weights: str, batch: int) -> None:
    lengths = [1 + 37 * row % 130 for row in range(batch)]
    checked(scene("16:4 of 128", weights, "int4", lengths))


@pytest.mark.parametrize("cache", ["int4", "qk4pv8"])
@pytest.mark.parametrize("weights", WEIGHTS)
def test_a_main_copy_beside_records(weights: str, cache: str) -> None:
    at = scene("16:4 of 128", weights, cache, RAGGED, mirror=True)
    checked(at)
    main, live = at.cache.main, [n for n in RAGGED if n]
    assert main is not None
    rows = [at.slots(i, n)[-1] for i, n in enumerate(RAGGED) if n]
    for cells in (main.k, main.v):
        placed = cells.cpu().flatten(0, 1)[torch.stack(rows)]
        assert placed.isfinite().all()
        assert len(placed) == len(live)


OPTIONS = {
    "bias, norms of heads, offset": replace(WIDE, bias=True, qk_norm=True, gain_offset=1.0),
    "half of a head, window, cap": replace(WIDE, rope=RoPE(128, 64), window=70, softcap=20.0),
    "interleaved": replace(WIDE, rope=RoPE(128, style="interleaved"), softmax_scale=0.1),
    "float16": replace(WIDE, format="fp16", cache=torch.float16, qk_norm=True),
}


@pytest.mark.parametrize("name", OPTIONS)
def test_every_option_of_a_layer(name: str) -> None:
    spec = OPTIONS[name]
    for weights, cache in ((spec.format, spec.format), ("int4", "int4"), ("fp8", "fp8")):
        checked(scene("", weights, cache, RAGGED, spec=spec))


@pytest.mark.parametrize("page", [None, 16, 32, 128])
@pytest.mark.parametrize("cache", ["bf16", "fp8", "int4"])
def test_kd_11_contiguous_caches_and_other_pages(cache: str, page: int | None) -> None:
    lengths = RAGGED[:6]
    options = {"pages": 10} if page is None else {}
    checked(scene("16:4 of 128", "int4", cache, lengths, page=page, **options))


# --- what belongs to nobody, and what does not matter ---


@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("weights", WEIGHTS)
def test_kd_17_iw_11_a_row_depends_on_no_batch_mate_and_no_page(weights: str, cache: str) -> None:
    """The same request alone, among few and among many, each in pages of its own: the same bits."""
    found = []
    first = scene("16:4 of 128", weights, cache, (300,), seed=7, pages=8)
    for batch in (1, 3, 9, 40):
        lengths = (300, *(1 + 97 * row % 500 for row in range(1, batch)))
        at = scene("16:4 of 128", weights, cache, lengths, seed=7, pages=8)
        at.x[:1] = first.x
        at.cache = replace(at.cache, means=first.cache.means)
        at.store(*first.history[0], at.slots(0, 299))
        block = at.plan(batch_invariant=True, max_len=2**20)
        found.append(at.run(block)[0])
    for other in found[1:]:
        assert_equal_bits(other, found[0])


@pytest.mark.parametrize("cache", CACHES)
def test_cg_06_rows_that_take_no_part_are_seen_by_nothing(cache: str) -> None:
    """Other rows get the bits that they get without them, whatever they hold."""
    at = scene("16:4 of 128", "int4", cache, (300, 0, 65, 0), seed=9)
    block = at.plan(max_len=2**20, batch_invariant=True)
    wanted = at.run(block)
    for x in (block.memory.q, block.memory.attended, block.memory.z):
        x.fill_(torch.nan)
    x, out = at.stream(), at.out()
    x.values[1::2] = torch.nan
    x.sumsq[1::2] = torch.nan
    found = block.run(x, at.step(), at.cache, out)
    assert_equal_bits(found.values.cpu(), wanted)
    assert (found.sumsq[1::2] == 0).all()


# --- launches, memory, graphs ---


@pytest.mark.parametrize("cache", CACHES)
def test_a_layer_is_five_launches_and_allocates_nothing(cache: str) -> None:
    at = scene("16:4 of 128", "int4", cache, (300, 7))
    block, x, out, step = at.plan(max_len=2**20), at.stream(), at.out(), at.step()

    def call(_: int) -> dict[str, torch.Tensor]:
        return {"out": block.run(x, step, at.cache, out).values}

    assert peak_bytes(call) == 0
    assert launches(call) == 5
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        block.run(x, step, at.cache, out)
    finally:
        torch.cuda.set_sync_debug_mode("default")


REPLAYS = 1000


@pytest.mark.parametrize(("weights", "cache"), [p for p in PAIRS if p[0] != "fp8"])
def test_cg_04_replays_with_changing_lengths(weights: str, cache: str) -> None:
    """Captured with nobody; then requests of any length, batch after batch, each in pages of its own.

    A graph's result has the bits of a run without one, and the cache that it leaves is the same.
    """
    batches = [
        (1, 1, 1),
        (700, 0, 33),
        (64, 65, 0),
        (0, 0, 0),
        (256, 257, 511),
        (2, 900, 128),
        (0, 5, 0),
        (127, 129, 1000),
    ]
    width = 16
    whole = scene("16:4 of 128", weights, cache, sum(batches, ()), seed=11, pages=width)
    assert whole.table is not None
    block = whole.plan(max_batch=3, max_len=2**20, prefetch=True)
    steps, streams = [], []
    for number, lengths in enumerate(batches):
        rows = slice(3 * number, 3 * number + 3)
        steps.append(DecodeStep.of(lengths, 64, whole.table[rows], device="cuda"))
        streams.append(whole.stream().values[rows])
    held, x, out = (
        DecodeStep.allocate(3, width, "cuda"),
        whole.stream().first(3),
        whole.out().first(3),
    )
    sums = whole.stream().sumsq
    wanted = []
    for number, step in enumerate(steps):
        x.values.copy_(streams[number])
        x.sumsq.copy_(sums[3 * number : 3 * number + 3])
        wanted.append(block.run(x, step, whole.cache, out).values.clone())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        block.run(x, held, whole.cache, out)
    order = random.Random(13)
    for _ in range(REPLAYS):
        number = order.randrange(len(batches))
        held.copy_(steps[number])
        x.values.copy_(streams[number])
        x.sumsq.copy_(sums[3 * number : 3 * number + 3])
        out.values.fill_(torch.nan)
        graph.replay()
        assert_equal_bits(out.values, wanted[number], f"{batches[number]}")
    for number, lengths in enumerate(batches):
        assert (wanted[number].cpu()[[n == 0 for n in lengths]] == 0).all()


WALKS = (
    *(Walk(0, 1200), Walk(0, 299, 1), Walk(200, 264, 36), Walk(3900, 4300), Walk(0, 1, 7)),
    *(Walk(60, 65), Walk(250, 262), Walk(4095, 4098), Walk(0, 0, 1)),
)
"""Periods of 1200 and its divisors: edges of pages and parts, long contexts, first tokens, and one that never comes."""

MANY_REPLAYS = 10_000


@pytest.mark.parametrize(
    ("weights", "cache"),
    [("bf16", "bf16"), ("fp8", "fp8"), ("int4", "int4"), ("int4", "qk4pv8")],
)
def test_cg_04_requests_grow_for_ten_thousand_replays(weights: str, cache: str) -> None:
    """One graph; positions go on between replays, on the device. What a step sees repeats every 1200 replays, and
    result and cache repeat to the bit; the last one is the layer in float64.
    """
    at = scene("SmolLM2", weights, cache, Replays.lengths(WALKS), pages=68)
    Replays(at, at.plan(max_len=2**20, prefetch=True), WALKS).run(MANY_REPLAYS)


def test_layers_chain() -> None:
    """Eight layers, one set of kernels and one scratch memory, two streams in turn: a graph gives what a loop does."""
    scenes = [scene("16:4 of 128", "int4", "int4", (300, 7, 0), seed=s) for s in range(8)]
    first = scenes[0]
    blocks = DecodeBlock.chain(
        [at.layer for at in scenes],
        inv_freq(WIDE).to("cuda"),
        max_batch=3,
        max_len=2**20,
        prefetch=True,
    )
    x, other = first.stream(), first.out()
    steps, begin = [at.step() for at in scenes], first.stream()

    def through() -> torch.Tensor:
        a, b = x, other
        for block, at, step in zip(blocks, scenes, steps, strict=True):
            block.run(a, step, at.cache, b)
            a, b = b, a
        return a.values

    def restart() -> None:
        x.values.copy_(begin.values)
        x.sumsq.copy_(begin.sumsq)

    restart()
    wanted = through().clone()
    graph = torch.cuda.CUDAGraph()
    restart()
    with torch.cuda.graph(graph):
        made = through()
    for _ in range(50):
        restart()
        graph.replay()
        assert_equal_bits(made, wanted)
    assert made.isfinite().all()


@pytest.fixture(scope="module", autouse=True)
def compiled() -> None:
    """The projections of the wide layer side by side, ahead of the tests that need them."""
    from epicute.decode import kernel_for
    from epicute.errors import EpicuteError
    from epicute.jit import precompile

    kernels: list[Any] = []
    for weights in WEIGHTS:
        at = Scene(WIDE, weights, "bf16", (1,))
        spec = at.layer.spec
        for name, chain in spec.compositions.items():
            options = spec.options(name)
            gain = options.pop("norm_gain", False)
            for rows in (8, 16):
                packed = getattr(at.layer, name)
                kernels.append(kernel_for(chain, packed, rows, gain=gain, **options))
    try:
        precompile(kernels)
    except EpicuteError as error:
        warnings.warn(f"precompile: {error}", stacklevel=1)
