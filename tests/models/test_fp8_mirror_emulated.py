"""Two copies of keys and values on the CPU, from the PTX of the kernels that write and read them."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import LlamaConfig

from tests.models import test_gpu_decode_mirror as on_gpu
from tests.models.folders import random_model, save
from tests.models.mirrored_scenes import MirroredScene, others_unchanged
from tests.models.one_thread import single as single
from tests.models.replays import Replays
from tests.models.test_decode_block_emulated import LENGTHS, PLAIN, assert_chain
from tests.models.test_decode_model import WIDE
from tests.models.test_decode_replays_emulated import WALKS
from tests.ptx.device import emulated_device

CASES = [
    (weights, cache, page)
    for weights in ("bf16", "fp8", "int4")
    for cache in ("fp8", "int4")
    for page in (32, None)
]
COVERING = [("int4", "fp8", 32), ("bf16", "int4", None)]
"""Both formats, paged and contiguous; ``make gates`` has all."""


def cases() -> list[object]:
    rest = [pytest.param(*case, marks=pytest.mark.gates) for case in CASES if case not in COVERING]
    return [*COVERING, *rest]


@pytest.mark.compile
@pytest.mark.parametrize(("weights", "cache", "page"), cases())
def test_both_copies_hold_what_the_quantisers_give(
    weights: str, cache: str, page: int | None
) -> None:
    """The layer in float64 over the copy that is read; each new row in both, to the bit; other cells as before."""
    with emulated_device(multiprocessors=2, seed=len(weights)) as gpu:
        at = MirroredScene(PLAIN, weights, cache, LENGTHS, device="cuda", page=page)
        block, before = at.plan(prefetch=True), at.snapshot()
        gpu.launches.clear()
        found = at.run(block)
        assert_chain(list(gpu.launches))
        at.check(block, found)
        others_unchanged(at, before)


SIZES = {"num_attention_heads": 2, "num_key_value_heads": 1, "intermediate_size": 128}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(random_model(LlamaConfig(**(WIDE | SIZES))), tmp_path_factory.mktemp("model"))


@pytest.mark.gates
@pytest.mark.parametrize(("weights", "scaling"), on_gpu.FORMS)
def test_steps_are_those_of_the_reference_backend(weights: str, scaling: str, folder: Path) -> None:
    with emulated_device(multiprocessors=2):
        on_gpu.test_steps_are_those_of_the_reference_backend(weights, scaling, folder)


@pytest.mark.gates
def test_a_prefill_is_as_without_a_mirror(folder: Path) -> None:
    with emulated_device(multiprocessors=2):
        on_gpu.test_a_prefill_is_as_without_a_mirror(folder)


@pytest.mark.gates
@pytest.mark.parametrize("cache", ["fp8", "int4"])
def test_cg_04_what_repeats_gives_the_same_bits(cache: str) -> None:
    """In both copies; see ``tests.models.replays``."""
    with emulated_device(multiprocessors=3, seed=5):
        at = MirroredScene(PLAIN, "int4", cache, Replays.lengths(WALKS), device="cuda")
        Replays(at, at.plan(prefetch=True), WALKS).run(10)
