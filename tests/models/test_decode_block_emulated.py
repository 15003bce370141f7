"""The chain on the CPU, from its kernels' PTX: every weight over every cache against float64, launch after launch.

A launch may begin before the one in front of it has ended; what it then touches before it has waited may not be what
others write, which is checked on the way, as are warps, barriers and copies.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from epicute.epilogues import RoPE
from epicute.models import LayerShape
from epicute.models.block_spec import BlockSpec
from epicute.testing import assert_equal_bits
from tests.models.decode_blocks import CACHES, WEIGHTS, Scene
from tests.models.one_thread import single as single
from tests.ptx.device import emulated_device

TINY = LayerShape(128, 128, 2, 1, 64, "tiny")
PLAIN = BlockSpec(TINY, "bf16")
LENGTHS = (37, 0, 5)
"""Over a page's edge, a row that takes no part, and within a page."""

PAIRS = [(weights, cache) for weights in WEIGHTS for cache in CACHES]
COVERING = (("bf16", "bf16"), ("fp8", "fp8"), ("int4", "int4"), ("int4", "qk4pv8"))
"""Of each pair of formats one half at least; ``make gates`` has all."""


def scene(weights: str, cache: str, lengths: tuple[int, ...] = LENGTHS, **options: Any) -> Scene:
    """A layer on the emulated GPU."""
    spec = options.pop("spec", PLAIN)
    return Scene(spec, weights, cache, lengths, device="cuda", **options)


def run(at: Scene, **options: Any) -> tuple[torch.Tensor, list[Any]]:
    """A step that is checked against float64, and its launches."""
    with_launches = options.pop("gpu")
    block = at.plan(**options)
    with_launches.launches.clear()
    found = at.run(block)
    launches = list(with_launches.launches)
    at.check(block, found)
    return found, launches


def assert_chain(launches: list[Any]) -> None:
    """Five kernels, each of which may start before the one in front of it has ended."""
    names = [launch.name for launch in launches]
    assert [name.split(".")[0] for name in names] == ["decode", "attention", *["decode"] * 3]
    assert all(launch.programmatic for launch in launches)


@pytest.mark.compile
@pytest.mark.parametrize(("weights", "cache"), COVERING)
def test_a_step_is_the_layer_in_float64(weights: str, cache: str) -> None:
    with emulated_device(multiprocessors=2, seed=1) as gpu:
        _, launches = run(scene(weights, cache), gpu=gpu, prefetch=True)
        assert_chain(launches)


@pytest.mark.gates
@pytest.mark.parametrize(("weights", "cache"), [p for p in PAIRS if p not in COVERING])
def test_every_other_pair_of_formats(weights: str, cache: str) -> None:
    with emulated_device(multiprocessors=3, seed=2) as gpu:
        _, launches = run(scene(weights, cache), gpu=gpu, prefetch=True)
        assert_chain(launches)


@pytest.mark.gates
@pytest.mark.parametrize("weights", ["bf16", "fp8", "int4"])
@pytest.mark.parametrize("cache", ["int4", "qk4pv8"])
def test_a_main_copy_beside_records_holds_the_new_rows_too(weights: str, cache: str) -> None:
    with emulated_device(multiprocessors=2) as gpu:
        at = scene(weights, cache, mirror=True)
        run(at, gpu=gpu)
        main, memory = at.cache.main, at.cache
        assert main is not None
        assert memory.form.main
        for request, length in enumerate(LENGTHS):
            if length:
                slot = int(at.slots(request, length)[-1])
                for cells in (main.k, main.v):
                    row = cells.cpu()[slot // at.tokens, slot % at.tokens]
                    assert row.isfinite().all()


OPTIONS = {
    "bias, norms of heads, offset": (
        BlockSpec(TINY, "bf16", bias=True, qk_norm=True, gain_offset=1.0),
        "int4",
    ),
    "half of a head, window, cap": (
        BlockSpec(TINY, "bf16", rope=RoPE(64, 32), window=9, softcap=20.0),
        "bf16",
    ),
    "interleaved, float16": (
        BlockSpec(
            TINY, "fp16", cache=torch.float16, rope=RoPE(64, style="interleaved"), softmax_scale=0.2
        ),
        "fp16",
    ),
}


@pytest.mark.gates
@pytest.mark.parametrize("name", OPTIONS)
def test_every_option_of_a_layer(name: str) -> None:
    spec, cache = OPTIONS[name]
    weights = "fp16" if spec.format == "fp16" else "int4"
    with emulated_device(multiprocessors=2) as gpu:
        run(scene(weights, cache, spec=spec), gpu=gpu)


@pytest.mark.gates
@pytest.mark.parametrize("cache", ["bf16", "int4"])
def test_a_contiguous_cache(cache: str) -> None:
    with emulated_device(multiprocessors=2) as gpu:
        run(scene("int4", cache, page=None), gpu=gpu)


@pytest.mark.gates
@pytest.mark.parametrize("cache", ["bf16", "int4", "qk4pv8"])
def test_kd_17_iw_11_a_row_depends_on_no_batch_mate_page_or_gpu(cache: str) -> None:
    """The same request alone, among others, in other pages and on more multiprocessors: the same bits."""
    found = []
    for lengths, processors in (((37,), 2), ((37, 0, 5), 3), ((37, 64, 90, 1, 2), 5)):
        with emulated_device(multiprocessors=processors, seed=processors):
            at = scene("int4", cache, lengths, seed=7)
            first = scene("int4", cache, (37,), seed=7)
            at.x[:1] = first.x
            at.cache = replace(at.cache, means=first.cache.means)
            # Where its pages are differs from batch to batch; what is in them does not.
            at.store(*first.history[0], at.slots(0, 36))
            block = at.plan(batch_invariant=True, max_batch=8)
            found.append(at.run(block)[0])
    for other in found[1:]:
        assert_equal_bits(other, found[0])


@pytest.mark.gates
@pytest.mark.parametrize("cache", ["bf16", "int4", "qk4pv8"])
def test_cg_04_a_graph_that_was_captured_short_replays_long(cache: str) -> None:
    """Captured with nobody, replayed with other requests, lengths and pages."""
    with emulated_device(multiprocessors=2):
        at = scene("int4", cache, (37, 90, 5), seed=3)
        block, step = at.plan(prefetch=True), at.step()
        x, out = at.stream(), at.out()
        held = type(step).allocate(3, at.pages, "cuda")
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            block.run(x, held, at.cache, out)
        held.copy_(step)
        graph.replay()
        at.check(block, out.values.cpu().clone())
