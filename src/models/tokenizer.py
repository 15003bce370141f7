"""Text to token ids and back, as a folder says: by ``tokenizers``, or by transformers where only that can."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from epicute.models.smollm2 import Checkpoint, CheckpointError

__all__ = ["TextTokens", "packaged_tokens", "tokens_of_folder"]

FAST = "tokenizer.json"
SLOW = ("tokenizer.model", "vocab.json", "tokenizer_config.json")
STOPS = ("generation_config.json", "config.json")
"""Files that may name the tokens behind which a text ends, the first that does is believed."""


@dataclass(frozen=True)
class TextTokens:
    """A tokenizer.

    Attributes:
        encode: ids of a text, with what the tokenizer puts in front.
        decode: text of ids, control tokens left out.
        stops: ids behind which a text ends; empty where the checkpoint names none.
    """

    encode: Callable[[str], list[int]]
    decode: Callable[[list[int]], str]
    stops: frozenset[int] = frozenset()


def tokens_of_folder(folder: str | Path) -> TextTokens:
    """The tokenizer in a Hugging Face folder.

    Raises:
        CheckpointError: the folder has none, it cannot be read, or neither package is there to read it.
    """
    folder = Path(folder)
    fast, slow = folder / FAST, [name for name in SLOW if (folder / name).is_file()]
    packages = {name for name in ("tokenizers", "transformers") if importlib.util.find_spec(name)}
    try:
        if fast.is_file() and "tokenizers" in packages:
            return _fast(fast, _stops(folder))
        if (fast.is_file() or slow) and "transformers" in packages:
            return _slow(folder, _stops(folder))
    except Exception as error:  # tokenizers itself raises nothing narrower
        raise CheckpointError(
            f"{folder}: got {error}, expected a tokenizer. Fix: download the checkpoint's tokenizer again"
        ) from error
    if fast.is_file() or slow:
        raise CheckpointError(
            f"{folder}: got a tokenizer and nothing to read it with, expected the package tokenizers. "
            "Fix: pip install tokenizers"
            + ("" if fast.is_file() else " transformers, which reads older files too")
        )
    raise CheckpointError(
        f"{folder}: got no tokenizer, expected {FAST} or one of {', '.join(SLOW)}. "
        "Fix: download all files of the checkpoint, or pass token ids to Llama.prefill"
    )


def packaged_tokens(checkpoint: Checkpoint) -> TextTokens:
    """The tokenizer of the packaged checkpoint."""
    return _tokens(checkpoint.tokenizer, frozenset({checkpoint.stop}))


def _fast(path: Path, stops: frozenset[int]) -> TextTokens:
    from tokenizers import Tokenizer

    return _tokens(Tokenizer.from_file(str(path)), stops)


def _tokens(tokenizer: Any, stops: frozenset[int]) -> TextTokens:
    return TextTokens(lambda text: tokenizer.encode(text).ids, tokenizer.decode, stops)


def _slow(folder: Path, stops: frozenset[int]) -> TextTokens:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    return TextTokens(
        lambda text: list(tokenizer(text)["input_ids"]),
        lambda ids: str(tokenizer.decode(ids, skip_special_tokens=True)),
        stops,
    )


def _stops(folder: Path) -> frozenset[int]:
    for name in STOPS:
        path = folder / name
        found = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
        ids = found.get("eos_token_id")
        if ids is not None:
            return frozenset(ids if isinstance(ids, list) else [ids])
    return frozenset()
