"""A captured step that is replayed while requests grow and begin anew, from its kernels' PTX."""

from __future__ import annotations

import pytest

from tests.models.one_thread import single as single
from tests.models.replays import Replays, Walk
from tests.models.test_decode_block_emulated import scene
from tests.ptx.device import emulated_device

WALKS = (Walk(30, 34), Walk(0, 1, 1), Walk(0, 0, 1), Walk(0, 3, 1))
"""Over a page's edge; a first token every other time; nobody; three tokens of a request that then waits."""

CACHES = ("int4", "bf16", "fp8", "qk4pv8")


@pytest.mark.compile
@pytest.mark.parametrize(
    "cache",
    [name if name == "int4" else pytest.param(name, marks=pytest.mark.gates) for name in CACHES],
)
def test_cg_04_what_repeats_gives_the_same_bits(cache: str) -> None:
    with emulated_device(multiprocessors=3, seed=5):
        at = scene("int4", cache, Replays.lengths(WALKS))
        Replays(at, at.plan(prefetch=True), WALKS).run(10)
