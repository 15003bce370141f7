"""A Hugging Face folder as a model's weights, whether they are in 16 bits or were quantised before.

    StoredModel.open(path, config)    what it holds, checked from the files' headers
        .tensors("fp8")               names → tensors as a backend reads them: FP8 codes and scales as they are
        .tensors("bf16")              the same names, every weight decoded
        .int4                         names → INT4 codes

A quantised checkpoint has all projections of all layers in one format of ``weights.importers``; embedding and norms are
never quantised, a separate head may be and is decoded. Codes keep what they are: a norm's gain is not folded into them,
but multiplied into what they are multiplied with.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch

from epicute.errors import UnsupportedError, require
from epicute.models.config import ModelConfig
from epicute.models.folder import HEAD, Folder, tensors_of
from epicute.models.smollm2 import CheckpointError
from epicute.weights import Quantized, QuantizedInt4
from epicute.weights import importers as formats
from epicute.weights.importers.source import CONFIGS, config_of

__all__ = ["StoredModel", "format_of"]

WEIGHT = ".weight"
SCALE = ".weight_scale"

BESIDE = {
    formats.Gptq: ("qweight", "qzeros", "scales", "g_idx"),
    formats.Awq: ("qweight", "qzeros", "scales"),
    formats.CompressedTensors: (
        *("weight_packed", "weight_scale", "weight_zero_point"),
        *("weight_shape", "weight_g_idx"),
    ),
    formats.Fp8: ("weight", "weight_scale", "weight_scale_inv", "input_scale", "activation_scale"),
}
"""Tensors that a quantised linear may have beside its bias."""


def format_of(path: str | Path) -> formats.Format | None:
    """How a folder's weights were quantised, as its configuration says; None where they were not.

    Raises:
        UnsupportedError: in a way that is not read here, by the name of the field.
        ArgumentError: a field that is missing, or a file that is not JSON.
    """
    folder = Path(path)
    told = json.loads((folder / CONFIGS[0]).read_text(encoding="utf-8"))
    if told.get("quantization_config") or told.get("compression_config"):
        return formats.detect(config_of(folder))
    if any((folder / name).is_file() for name in CONFIGS[1:]):
        return formats.detect(config_of(folder))
    return None


@dataclass(frozen=True, eq=False)
class StoredModel:
    """A folder, checked against its configuration. Make it with ``open``.

    Attributes:
        folder: the files.
        config: what the model is.
        format: how projections are stored; None for float tensors.
    """

    folder: Folder
    config: ModelConfig
    format: formats.Format | None = None

    @staticmethod
    def open(path: str | Path, config: ModelConfig) -> StoredModel:
        """Read headers, and nothing else.

        Raises:
            CheckpointError: files that are missing or broken, tensors that are missing, unexpected or of another shape.
            UnsupportedError: a quantisation that is not read here; projections in 16 bits beside quantised ones.
        """
        found = StoredModel(Folder(path), config, format_of(path))
        found.check()
        return found

    @property
    def form(self) -> str:
        """The form of the weights that keeps what is stored, as ``Llama.from_folder`` calls it."""
        if self.format is None:
            return "bf16"
        return "fp8" if isinstance(self.format, formats.Fp8) else "int4"

    @cached_property
    def projections(self) -> tuple[str, ...]:
        """Full names of all linears of all layers, without ``.weight``."""
        inside = [n for n in tensors_of(self.config) if n.endswith(f"_proj{WEIGHT}")]
        return tuple(name.removesuffix(WEIGHT) for name in inside)

    @cached_property
    def coded(self) -> frozenset[str]:
        """Those that are stored in ``format``, and the head where it is."""
        if self.format is None:
            return frozenset()
        linears = (*self.projections, HEAD.removesuffix(WEIGHT))
        return frozenset(n for n in linears if f"{n}.{self.format.marker}" in self.folder)

    def check(self) -> None:
        """Raise unless the folder holds the configuration's model; see ``open``."""
        self.folder.check(self.config, self._beside())
        if self.config.tied:
            self.folder.head(self.config)
        if self.format is None:
            return
        plain = [name for name in self.projections if name not in self.coded]
        require(
            not plain,
            f"{plain[0]}{WEIGHT}" if plain else "",
            f"no {self.format.marker}, and {len(self.coded)} of {len(self.projections)} projections that have one",
            "all projections of all layers quantised",
            "take a checkpoint that leaves only the head out, or one that is not quantised",
            UnsupportedError,
        )
        if isinstance(self.format, formats.Fp8):
            self._check_codes()

    def _beside(self) -> dict[str, str]:
        """Every tensor of a coded linear that the configuration of a plain model does not know → whose it is."""
        if self.format is None:
            return {}
        names = BESIDE[type(self.format)]
        found = {f"{n}.{x}": n for n in self.coded for x in names if f"{n}.{x}" in self.folder}
        return found | dict(self._zero_biases())

    def _zero_biases(self) -> Iterator[tuple[str, str]]:
        """Biases of zeros, which some quantisers give to every linear: they do nothing."""
        wanted = tensors_of(self.config)
        for linear in self.coded:
            name = f"{linear}.bias"
            if name in self.folder and name not in wanted and not self.folder[name].any():
                yield name, linear

    def _check_codes(self) -> None:
        wanted = tensors_of(self.config)
        for linear in sorted(self.coded):
            name = f"{linear}{WEIGHT}"
            require(
                name in self.folder and self.folder.header(name) == (wanted[name], "F8_E4M3"),
                name,
                self.folder.header(name) if name in self.folder else "no such tensor",
                f"{wanted[name]} F8_E4M3, as config.json has it",
                "check that configuration and weights are of one model",
                CheckpointError,
            )

    def linear(self, name: str) -> Quantized:
        """Codes of the linear ``name`` (without ``.weight``), of ``coded``."""
        assert self.format is not None
        shape = tensors_of(self.config)[f"{name}{WEIGHT}"]
        return formats.Checkpoint(self.folder, self.format).linear(name, (shape[0], shape[1]))

    def tensors(self, form: str) -> Mapping[str, torch.Tensor]:
        """What a backend is given for weights in ``form``: the names of ``tensors_of``, each read when asked for.

        Coded weights are decoded, to float32; but for the form "fp8" of an FP8 checkpoint they are the codes, and each
        has its ``weight_scale``.
        """
        return self.folder if self.format is None else _Tensors(self, form == self.form == "fp8")

    @property
    def int4(self) -> Mapping[str, QuantizedInt4]:
        """Names of the projections' weights → their codes, each read when asked for; empty where there are none."""
        return _Codes(self, self.form == "int4")


@dataclass(frozen=True, eq=False)
class _Tensors(Mapping[str, torch.Tensor]):
    """A quantised checkpoint under the names of one that is not; ``codes``: FP8 projections as they are."""

    checkpoint: StoredModel
    codes: bool

    @cached_property
    def _names(self) -> tuple[str, ...]:
        found = tuple(tensors_of(self.checkpoint.config))
        scales = [f"{name}{SCALE}" for name in self.checkpoint.projections]
        return (*found, *scales) if self.codes else found

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def __getitem__(self, name: str) -> torch.Tensor:
        held, linear = self.checkpoint, name.rpartition(".")[0]
        if linear not in held.coded or name.endswith(".bias"):
            return held.folder[name]
        kept = self.codes and linear in held.projections
        if name == f"{linear}{SCALE}" and kept:
            assert isinstance(held.format, formats.Fp8)
            return held.folder[f"{linear}.{held.format.scale}"]
        if name != f"{linear}{WEIGHT}":
            raise KeyError(name)
        return held.folder[name] if kept else held.linear(linear).dequantize()


@dataclass(frozen=True, eq=False)
class _Codes(Mapping[str, QuantizedInt4]):
    """INT4 codes by the names of the weights."""

    checkpoint: StoredModel
    there: bool

    @property
    def _names(self) -> tuple[str, ...]:
        return tuple(f"{n}{WEIGHT}" for n in self.checkpoint.projections) if self.there else ()

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def __getitem__(self, name: str) -> QuantizedInt4:
        if name not in self._names:
            raise KeyError(name)
        found = self.checkpoint.linear(name.removesuffix(WEIGHT))
        assert isinstance(found, QuantizedInt4)
        return found
