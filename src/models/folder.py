"""A Hugging Face folder's weights: one ``model.safetensors``, or shards with an index, read tensor by tensor.

A folder is a mapping from names to tensors that opens a file when the first of its tensors is asked for. What a model
of a given configuration must hold is checked from the files' headers, before any weight is read.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from epicute.errors import require
from epicute.models.config import ModelConfig
from epicute.models.smollm2 import CheckpointError

__all__ = ["EMBEDDING", "HEAD", "NORM", "Folder", "layer_prefix", "tensors_of"]

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"

EMBEDDING = "model.embed_tokens.weight"
NORM = "model.norm.weight"
HEAD = "lm_head.weight"

DERIVED = ".self_attn.rotary_emb.inv_freq"
"""End of the name of a buffer in old checkpoints that follows from the configuration and is not read."""

DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
"""Dtypes that weights may have, by the names that safetensors gives them."""


def layer_prefix(layer: int) -> str:
    """What the names of a layer's tensors begin with."""
    return f"model.layers.{layer}."


def tensors_of(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor that a checkpoint of this configuration holds."""
    shape = config.shape
    layer: dict[str, tuple[int, ...]] = {
        "input_layernorm.weight": (shape.hidden,),
        "self_attn.q_proj.weight": (shape.q_width, shape.hidden),
        "self_attn.k_proj.weight": (shape.kv_width, shape.hidden),
        "self_attn.v_proj.weight": (shape.kv_width, shape.hidden),
        "self_attn.o_proj.weight": (shape.hidden, shape.q_width),
        "post_attention_layernorm.weight": (shape.hidden,),
        "mlp.gate_proj.weight": (shape.intermediate, shape.hidden),
        "mlp.up_proj.weight": (shape.intermediate, shape.hidden),
        "mlp.down_proj.weight": (shape.hidden, shape.intermediate),
    }
    if config.bias:
        layer["self_attn.q_proj.bias"] = (shape.q_width,)
        layer |= {f"self_attn.{name}_proj.bias": (shape.kv_width,) for name in "kv"}
    if config.qk_norm:
        layer |= {f"self_attn.{name}_norm.weight": (shape.head_dim,) for name in "qk"}
    found: dict[str, tuple[int, ...]] = {
        EMBEDDING: (config.vocabulary, shape.hidden),
        NORM: (shape.hidden,),
    }
    if not config.tied:
        found[HEAD] = (config.vocabulary, shape.hidden)
    for index in range(config.layers):
        found |= {layer_prefix(index) + name: size for name, size in layer.items()}
    return found


class Folder(Mapping[str, torch.Tensor]):
    """The tensors of a folder by name. ``folder[name]`` reads one, mapped from its file where that is possible.

    Attributes:
        path: the folder.
        files: name of each tensor -> the file that holds it.
    """

    def __init__(self, path: str | Path) -> None:
        """Find the files and read their headers.

        Raises:
            CheckpointError: no safetensors, both a single file and an index, a shard that is missing or broken, or a
                tensor that is in two shards, in none, or not where the index says.
        """
        self.path = Path(path)
        self._opened: dict[Path, Any] = {}
        index, single = self.path / INDEX, self.path / SINGLE
        require(
            index.is_file() != single.is_file(),
            str(self.path),
            f"{'both' if single.is_file() else 'neither'} {SINGLE} and {INDEX}",
            "one of the two",
            "give the folder of a checkpoint in safetensors"
            if not single.is_file()
            else "remove the one that does not belong to the checkpoint",
            CheckpointError,
        )
        claimed = self._claims(index) if index.is_file() else None
        shards = [single] if claimed is None else sorted({*claimed.values()})
        self.files: dict[str, Path] = {}
        for shard in shards:
            for name in self._open(shard).keys():  # noqa: SIM118 - the handle is no mapping
                require(
                    name not in self.files,
                    name,
                    f"in {self.files.get(name, shard).name} and in {shard.name}",
                    "in one shard",
                    "download the checkpoint again",
                    CheckpointError,
                )
                self.files[name] = shard
        if claimed is not None:
            self._check_claims(claimed)

    def _claims(self, index: Path) -> dict[str, Path]:
        """Tensor name -> shard, as the index says."""
        try:
            weights = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
            claimed = {str(name): self.path / file for name, file in weights.items()}
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(
                f"{index}: got {error!r}, expected an object with a weight_map. "
                "Fix: download the index again"
            ) from error
        outside = [str(file) for file in claimed.values() if file.parent != self.path]
        require(
            not outside,
            str(index),
            outside[:3],
            "shards beside the index",
            "download the checkpoint again",
            CheckpointError,
        )
        return claimed

    def _check_claims(self, claimed: Mapping[str, Path]) -> None:
        wrong = {
            name: f"{file.name} does not hold it"
            for name, file in claimed.items()
            if self.files.get(name) != file
        }
        wrong |= {
            name: f"{file.name} holds it, the index does not name it"
            for name, file in self.files.items()
            if name not in claimed
        }
        require(
            not wrong,
            next(iter(wrong), ""),
            next(iter(wrong.values()), ""),
            f"every tensor where {INDEX} says ({len(wrong)} are not)",
            "download the checkpoint again",
            CheckpointError,
        )

    def _open(self, file: Path) -> Any:
        if file not in self._opened:
            try:
                self._opened[file] = safe_open(file, framework="pt", device="cpu")
            except (OSError, SafetensorError) as error:
                raise CheckpointError(
                    f"{file}: got {error}, expected a safetensors file. Fix: download it again"
                ) from error
        return self._opened[file]

    def __iter__(self) -> Iterator[str]:
        return iter(self.files)

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, name: str) -> torch.Tensor:
        """The tensor, in the dtype it is stored in. Do not write to it: it may be the file's own memory."""
        found: torch.Tensor = self._open(self.files[name]).get_tensor(name)
        return found

    def header(self, name: str) -> tuple[tuple[int, ...], str]:
        """Shape, and dtype as safetensors calls it, without reading the tensor."""
        found = self._open(self.files[name]).get_slice(name)
        return tuple(found.get_shape()), str(found.get_dtype())

    def check(self, config: ModelConfig, beside: Mapping[str, str] | None = None) -> None:
        """Raise unless the folder holds the tensors of ``config``, all of them and no others.

        A tied model may keep a copy of its embedding as the head; ``head`` compares the two.

        Args:
            config: the model.
            beside: names of tensors that stand for the weight of a linear, or beside it → the linear; left unchecked.

        Raises:
            CheckpointError: names missing or unexpected, shapes or dtypes that are not the configuration's.
        """
        beside = beside or {}
        wanted = tensors_of(config)
        self._check_names(wanted, config, beside)
        for name in self.files:
            if name.endswith(DERIVED) or name in beside:
                continue
            shape, dtype = self.header(name)
            right = wanted.get(name, wanted[EMBEDDING])  # only a tied head is not in wanted
            require(
                shape == right,
                f"{name}.shape",
                shape,
                f"{right}, as config.json has it",
                "check that configuration and weights are of one model",
                CheckpointError,
            )
            require(
                dtype in DTYPES,
                f"{name}.dtype",
                dtype,
                f"one of {', '.join(DTYPES)}",
                "check that config.json says how the checkpoint was quantised, or use one that was not",
                CheckpointError,
            )

    def _check_names(
        self, wanted: Mapping[str, Any], config: ModelConfig, beside: Mapping[str, str]
    ) -> None:
        coded = {f"{linear}.weight" for linear in beside.values()}
        missing = [name for name in wanted if name not in self.files and name not in coded]
        allowed = {HEAD} if config.tied else set()
        extra = [
            name
            for name in self.files
            if not (name in wanted or name in allowed or name in beside or name.endswith(DERIVED))
        ]
        fix = "check that configuration and weights are of one model"
        for names, what in ((missing, "missing"), (extra, "unexpected")):
            shown = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
            require(
                not names,
                names[0] if names else "",
                f"{what}: {shown}",
                f"the {len(wanted)} tensors of a {config.family} model with {config.layers} layers",
                fix,
                CheckpointError,
            )

    def layer(self, index: int) -> dict[str, torch.Tensor]:
        """The tensors of a layer, by their names without ``model.layers.N.``."""
        prefix = layer_prefix(index)
        return {
            name[len(prefix) :]: self[name]
            for name in self.files
            if name.startswith(prefix) and not name.endswith(DERIVED)
        }

    def head(self, config: ModelConfig) -> torch.Tensor:
        """(vocabulary, hidden) of the LM head, which a tied model shares with its embedding.

        Raises:
            CheckpointError: the model is tied, and a head of other values lies beside the embedding.
        """
        if not config.tied:
            return self[HEAD]
        embedding = self[EMBEDDING]
        require(
            HEAD not in self.files or torch.equal(self[HEAD], embedding),
            HEAD,
            f"other values than {EMBEDDING}",
            "the same, since tie_word_embeddings is set",
            'set "tie_word_embeddings": false in config.json if the head is to be used',
            CheckpointError,
        )
        return embedding
