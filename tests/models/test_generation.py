"""Text token by token: what is chosen, where it ends, what is printed of it, and the scales that an FP8 cache takes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from epicute.errors import ArgumentError
from epicute.kv.cache import CapacityError
from epicute.models import generation
from epicute.models.generation import TextStream, device_for, fp8_scales, greedy
from epicute.models.llama import Llama
from tests.models.folders import FAMILIES, random_model, save
from tests.models.one_thread import single as single


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Llama:
    folder = save(random_model(FAMILIES["llama"]), tmp_path_factory.mktemp("llama"))
    return Llama.from_folder(folder, device="cpu", weights="bf16")


def prompt(length: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(160, (length,), generator=generator).tolist()


class TestGreedy:
    def test_each_token_is_the_likeliest_behind_all_before_it(self, model: Llama) -> None:
        ids = prompt(9)
        found = list(greedy(model, ids, model.new_cache(1, 32), 12))
        logits = model.prefill(ids + found, model.new_cache(1, 32), logits="all")
        assert found == logits[8:-1].argmax(1).tolist()
        assert len(set(found)) > 1

    def test_a_backend_that_does_not_decode_prefills_one_by_one(
        self, model: Llama, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        ids = prompt(9)
        right = list(greedy(model, ids, model.new_cache(1, 32), 12))
        monkeypatch.setattr(model.backend, "decodes", False, raising=False)
        monkeypatch.setattr(model.backend, "decode", None)
        assert list(greedy(model, ids, model.new_cache(1, 32), 12)) == right

    def test_it_ends_at_a_stop_and_says_so(self, model: Llama) -> None:
        right = list(greedy(model, prompt(9), model.new_cache(1, 32), 12))
        stop = right[5]
        found = list(greedy(model, prompt(9), model.new_cache(1, 32), 12, {stop}))
        assert found == right[: right.index(stop) + 1]

    def test_the_last_token_is_not_run(self, model: Llama) -> None:
        """The cache need not have room for it."""
        cache = model.new_cache(1, 16, page_size=16)
        assert len(list(greedy(model, prompt(9), cache, 8))) == 8
        assert cache.held == (16,)

    def test_tokens_come_before_the_next_is_computed(self, model: Llama) -> None:
        cache = model.new_cache(1, 32)
        stream = greedy(model, prompt(9), cache, 5)
        next(stream)
        assert cache.held == (9,)
        next(stream)
        assert cache.held == (10,)

    def test_what_is_refused(self, model: Llama) -> None:
        with pytest.raises(ArgumentError, match="^count: got 0"):
            next(greedy(model, [1], model.new_cache(1, 16), 0))
        with pytest.raises(ArgumentError, match="^cache: got 2 requests"):
            next(greedy(model, [1], model.new_cache(2, 16), 1))
        used = model.new_cache(1, 16)
        model.prefill([1], used)
        with pytest.raises(ArgumentError, match="^cache"):
            next(greedy(model, [1], used, 1))
        with pytest.raises(CapacityError):
            list(greedy(model, prompt(9), model.new_cache(1, 16, page_size=16), 9))


class TestStream:
    """A token is a byte: what a byte-level tokenizer may give."""

    @staticmethod
    def decode(ids: list[int]) -> str:
        return bytes(ids).decode("utf-8", errors="replace")

    @given(st.text(st.characters(exclude_characters="\N{REPLACEMENT CHARACTER}", codec="utf-8")))
    def test_whole_characters_in_order(self, text: str) -> None:
        stream = TextStream(self.decode)
        parts = [stream.add(byte) for byte in text.encode()]
        assert "\N{REPLACEMENT CHARACTER}" not in "".join(parts)
        assert "".join(parts) + stream.end() == text == stream.text
        assert len([part for part in parts if part]) == len(text)

    def test_what_stays_broken_comes_at_the_end(self) -> None:
        stream = TextStream(self.decode)
        assert [stream.add(byte) for byte in b"a\xe2\x82"] == ["a", "", ""]
        assert stream.end() == "\N{REPLACEMENT CHARACTER}"
        assert stream.end() == ""


class TestScales:
    @staticmethod
    def amax(model: Llama, ids: list[int], which: int) -> Tensor:
        cache = model.new_cache(1, len(ids))
        model.prefill(ids, cache)
        cells = (cache.dense_keys, cache.dense_values)[which]
        layers = range(model.config.layers)
        return torch.stack([cells(i)[0, : len(ids)].float().abs().amax((0, 2)) for i in layers])

    def test_the_largest_of_each_head_and_half_as_much_again(self, model: Llama) -> None:
        ids = prompt(30)
        for which, scale in enumerate(fp8_scales(model, ids)):
            assert scale.shape == (3, 2)
            largest = self.amax(model, ids, which)[0] * 1.5 / 448
            torch.testing.assert_close(scale[0], largest, rtol=0.07, atol=0)
        cache = model.new_cache(1, 30, dtype="fp8", scales=fp8_scales(model, ids))
        model.prefill(ids, cache)
        assert int(cache.saturated.sum()) == 0

    @pytest.mark.parametrize("factor", [3000.0, 0.0])
    def test_kd_13_values_that_are_very_large_or_all_zero(
        self, factor: float, tmp_path: Path
    ) -> None:
        theirs = random_model(FAMILIES["llama"])
        with torch.no_grad():
            theirs.model.layers[1].self_attn.v_proj.weight.mul_(factor)
        model = Llama.from_folder(save(theirs, tmp_path), device="cpu")
        ids = prompt(8)
        k, v = fp8_scales(model, ids)
        cache = model.new_cache(1, 8, dtype="fp8", scales=(k, v))
        assert torch.isfinite(model.prefill(ids, cache)).all()
        assert int(cache.saturated.sum()) == 0
        assert (float(v[1].min()) > 1) == (factor > 1)

    def test_what_is_not_finite_is_refused(
        self, model: Llama, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        embedded = model.backend._embedded
        monkeypatch.setattr(model.backend, "_embedded", lambda ids: embedded(ids) * torch.nan)
        with pytest.raises(ArgumentError, match="^cache: got .* that are not finite"):
            fp8_scales(model, [1, 2])


def test_a_gpu_runs_what_it_has_kernels_for(monkeypatch: pytest.MonkeyPatch) -> None:
    present: Any = {"gpu": True}
    monkeypatch.setattr(generation.torch.cuda, "is_available", lambda: present["gpu"])
    assert device_for("bf16", "fp8").type == "cuda"
    assert device_for("int4", "int4").type == "cuda"
    assert device_for("exact", "bf16").type == "cpu"
    assert device_for("bf16", "qk4pv8").type == "cuda"
    present["gpu"] = False
    assert device_for("bf16", "bf16").type == "cpu"
