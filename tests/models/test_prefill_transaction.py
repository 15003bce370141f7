"""A prefill that fails leaves the cache as it was: tokens, pages, what the device knows of both."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from epicute.kv.cache import KVCache
from epicute.models.config import ModelConfig
from epicute.models.llama import Llama
from epicute.models.requests import Requests
from tests.models.folders import FAMILIES

LAYERS = 3
PAGE = 16


class Failing:
    """A backend without layers whose ``fails``-th call of a block or of the logits raises; None: none does."""

    cache_dtype, page_size, max_rows = torch.float32, PAGE, None
    decodes = False

    def __init__(self, fails: int | None = None, error: BaseException | None = None) -> None:
        self.left, self.error = fails, error or RuntimeError("broken")

    def check_cache(self, cache: KVCache) -> None:
        """Any will do."""

    def embed(self, ids: Tensor) -> Tensor:
        return ids

    def _call(self) -> None:
        if self.left is not None:
            self.left -= 1
            if self.left < 0:
                raise self.error

    def block(self, layer: int, x: Tensor, requests: Requests, cache: KVCache) -> Tensor:
        self._call()
        return x

    def logits(self, x: Tensor, rows: Tensor) -> Tensor:
        self._call()
        return x[rows, None].float()


def model(*given_: Any) -> Llama:
    config = ModelConfig.from_dict(FAMILIES["llama"].to_dict())
    return Llama(config, Failing(*given_), "cpu")


def state(cache: KVCache) -> tuple[Any, ...]:
    """Everything that a prefill moves; free pages in any order."""
    return (
        cache.held,
        cache.page_table.tolist(),
        cache.lengths.tolist(),
        sorted(cache._free),
        cache._owned,
    )


@given(
    held=st.lists(st.integers(0, 40), min_size=4, max_size=4),
    new=st.lists(st.integers(1, 40), min_size=1, max_size=4),
    chunk=st.sampled_from([None, 1, 7, 20, 64]),
    fails=st.integers(0, 40),
    dense=st.booleans(),
)
@settings(max_examples=60)
def test_what_a_failed_prefill_was_given_goes_back(
    held: list[int], new: list[int], chunk: int | None, fails: int, dense: bool
) -> None:
    """Whichever layer of whichever chunk fails; and the same prefill succeeds afterwards as if nothing had been."""
    cache = model().new_cache(4, 80, pages=None if dense else 20)
    cache.reserve(held)
    cache.advance(held)
    cache.reserve([17], [3])  # pages beyond what is held are the caller's
    before = repr(state(cache))
    prompts = [list(range(n)) for n in new]
    with suppress(RuntimeError):
        model(fails).prefill(prompts, cache, chunk=chunk)
    if repr(state(cache)) == before:  # else it was through before its turn to fail
        model().prefill(prompts, cache, chunk=chunk)
    extended = [n + (new[row] if row < len(new) else 0) for row, n in enumerate(held)]
    assert list(cache.held) == extended == cache.lengths.tolist()
    owned = [page for pages in cache._owned for page in pages]
    assert sorted(owned + cache._free) == list(range(cache.pages))


@pytest.mark.parametrize("error", [KeyboardInterrupt(), MemoryError("none left")])
def test_an_interrupted_one_too(error: BaseException) -> None:
    cache = model().new_cache(1, 64, pages=4)
    with pytest.raises(type(error)):
        model(2, error).prefill([1, 2, 3], cache)
    assert (cache.held, cache.free_pages) == ((0,), 4)
    assert (cache.page_table == -1).all()


def test_a_step_that_waits_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """The host counts its token already and the device does not: a failed prefill of a neighbour leaves both so."""
    cache = model().new_cache(2, 64, pages=6)
    cache.reserve([16, 0])
    cache.advance([16, 0])
    cache.reserve_step()
    with pytest.raises(RuntimeError, match="broken"):
        model(1).prefill([[1] * 20], cache, rows=[1])
    assert (cache.held, cache.lengths.tolist()) == ((17, 0), [16, 0])
    assert (cache.step_waiting.tolist(), cache.free_pages) == ([1, 0], 4)
    cache.begin_step()
    assert cache.step_positions.tolist() == [16, -1]
    cache.end_step()
    assert cache.lengths.tolist() == [17, 0]


def test_nothing_was_changed_where_there_is_no_room() -> None:
    cache = model().new_cache(2, 64, pages=2)
    before = repr(state(cache))
    with pytest.raises(RuntimeError, match="pages: got 2 free"):
        model().prefill([[1] * 20, [1] * 20], cache)
    assert repr(state(cache)) == before
