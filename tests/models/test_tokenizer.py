"""Tokenizers of folders: which file is read, by what, and where a text ends."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

from epicute.models import tokenizer
from epicute.models.smollm2 import Checkpoint, CheckpointError
from epicute.models.tokenizer import packaged_tokens, tokens_of_folder
from tests.models.words import save_words


def test_a_fast_tokenizer(tmp_path: Path) -> None:
    tokens = tokens_of_folder(save_words(tmp_path, 20))
    assert tokens.encode("w3 w19  w0") == [3, 19, 0]
    assert tokens.decode([3, 19]) == "w3w19"
    assert tokens.stops == frozenset()


def _hide(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    known = importlib.util.find_spec

    def find(name: str, *package: Any) -> Any:
        return None if name in names else known(name, *package)

    monkeypatch.setattr(tokenizer.importlib.util, "find_spec", find)


def test_transformers_reads_what_tokenizers_is_not_there_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_words(tmp_path, 20)
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "w0"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    _hide(monkeypatch, "tokenizers")
    tokens = tokens_of_folder(tmp_path)
    assert tokens.encode("w3 w19") == [3, 19]
    assert tokens.decode([3, 19]).replace(" ", "") == "w3w19"


@pytest.mark.parametrize(("stop", "found"), [(3, {3}), ([3, 5], {3, 5}), (0, {0})])
def test_where_a_text_ends(stop: Any, found: set[int], tmp_path: Path) -> None:
    """generation_config.json is believed before config.json."""
    save_words(tmp_path, 20, stop)
    (tmp_path / "config.json").write_text('{"eos_token_id": 9}')
    assert tokens_of_folder(tmp_path).stops == found
    (tmp_path / "generation_config.json").write_text("{}")
    assert tokens_of_folder(tmp_path).stops == {9}


class TestRefused:
    def test_no_tokenizer(self, tmp_path: Path) -> None:
        with pytest.raises(CheckpointError, match=r"got no tokenizer.*tokenizer\.json"):
            tokens_of_folder(tmp_path)

    def test_a_broken_one(self, tmp_path: Path) -> None:
        (tmp_path / "tokenizer.json").write_text('{"model": 7}')
        with pytest.raises(CheckpointError, match="expected a tokenizer. Fix: download"):
            tokens_of_folder(tmp_path)

    def test_broken_settings(self, tmp_path: Path) -> None:
        save_words(tmp_path, 20)
        (tmp_path / "generation_config.json").write_text("{")
        with pytest.raises(CheckpointError, match="Fix: download"):
            tokens_of_folder(tmp_path)

    def test_nothing_to_read_it_with(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        save_words(tmp_path, 20)
        _hide(monkeypatch, "tokenizers", "transformers")
        with pytest.raises(CheckpointError, match="Fix: pip install tokenizers$"):
            tokens_of_folder(tmp_path)
        (tmp_path / "tokenizer.json").unlink()
        (tmp_path / "tokenizer.model").write_bytes(b"")
        with pytest.raises(CheckpointError, match="pip install tokenizers transformers"):
            tokens_of_folder(tmp_path)


def test_the_packaged_one() -> None:
    checkpoint = Checkpoint.open()
    tokens = packaged_tokens(checkpoint)
    ids = tokens.encode("Once upon a time<|im_end|>")
    assert tokens.stops == {ids[-1]}
    assert tokens.decode(ids) == "Once upon a time"
