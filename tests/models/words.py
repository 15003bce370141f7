"""A tokenizer of whole words, for small random checkpoints: word 7 is token 7."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers


def save_words(folder: Path, vocabulary: int, stop: int | list[int] | None = None) -> Path:
    """Write ``tokenizer.json``, and with ``stop`` a ``generation_config.json``."""
    words = {f"w{i}": i for i in range(vocabulary)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.decoder = decoders.Fuse()
    tokenizer.save(str(folder / "tokenizer.json"))
    if stop is not None:
        (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": stop}))
    return folder
