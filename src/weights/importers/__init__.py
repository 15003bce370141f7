"""Checkpoints that others quantised, read tensor by tensor: the same codes, scales and zero points.

    checkpoint = open_checkpoint(folder)
    for name in checkpoint.linears():
        packed = checkpoint.linear(name).pack_fragments(order)

Read into ``QuantizedInt4``: GPTQ v1 and v2, AWQ (GEMM), compressed-tensors (pack-quantized); 4 bits, groups of 32, 64,
128 or one scale per output feature. Read into ``Quantized``: E4M3 of compressed-tensors (float-quantized), AutoFP8 and
transformers, with one scale per output feature or per tensor. Everything else is refused by tensor, field and value.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from epicute.errors import require
from epicute.weights.importers.awq import Awq
from epicute.weights.importers.checks import refuse_foreign
from epicute.weights.importers.compressed_tensors import CompressedTensors
from epicute.weights.importers.config import Format, detect
from epicute.weights.importers.fp8 import Fp8
from epicute.weights.importers.gptq import Gptq
from epicute.weights.importers.source import Folder, config_of
from epicute.weights.quantized import Quantized

__all__ = [
    "Awq",
    "Checkpoint",
    "CompressedTensors",
    "Folder",
    "Format",
    "Fp8",
    "Gptq",
    "detect",
    "open_checkpoint",
]


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """Tensors by name and the format they are written in.

    Attributes:
        tensors: a state dict, or a ``Folder``.
        format: ``Gptq``, ``Awq``, ``CompressedTensors`` or ``Fp8``.
    """

    tensors: Mapping[str, torch.Tensor]
    format: Format

    def linears(self) -> list[str]:
        """Names of all quantised linears, such as ``model.layers.0.self_attn.q_proj``."""
        end = f".{self.format.marker}"
        return sorted(name.removesuffix(end) for name in self.tensors if name.endswith(end))

    def linear(self, name: str, shape: tuple[int, int] | None = None) -> Quantized:
        """Codes, scales and zero points of one linear, as stored; its gain has to be an operand.

        Args:
            name: one of ``linears()``. A bias, where it has one, is the tensor ``<name>.bias`` like any other.
            shape: (N, K) that the model's configuration expects, to be compared.

        Raises:
            ArgumentError: there is no such linear, or it is not quantised, or a tensor contradicts the format or the
                expected shape.
            UnsupportedError: groups in activation order, or tensors of a format that is not read here.
        """
        refuse_foreign(self.tensors, name)
        plain = f"{name}.weight" in self.tensors
        require(
            f"{name}.{self.format.marker}" in self.tensors,
            f"{name}.{self.format.marker}",
            f"{name}.weight, which is not quantised" if plain else "no such tensor",
            f"a quantised linear of {type(self.format).__name__}",
            f"Weight(tensors['{name}.weight'])" if plain else "pick one of linears()",
        )
        found = self.format.read(self.tensors, name)
        got = tuple(found.codes.shape)
        require(
            shape is None or got == tuple(shape),
            f"{name}.{self.format.marker}",
            f"(N, K) = {got} in {'8' if isinstance(self.format, Fp8) else '4'} bits",
            f"{shape}",
            "check that this linear has as many bits as the configuration says",
        )
        return found


def open_checkpoint(
    source: str | os.PathLike[str] | Mapping[str, torch.Tensor],
    format: Format | None = None,
    device: torch.device | str = "cpu",
) -> Checkpoint:
    """A checkpoint whose linears can be read one by one.

    Args:
        source: a folder of safetensors files, or a state dict.
        format: how it is written; taken from the folder's configuration unless given. Give it where a checkpoint is
            known to carry the wrong label, such as zero points of GPTQ v2 under ``checkpoint_format: gptq``.
        device: where a folder's tensors are put.

    Raises:
        ArgumentError: no tensors, no configuration, or a state dict without a format.
        UnsupportedError: a format that is not read here.
    """
    if isinstance(source, Mapping):
        require(
            format is not None,
            "format",
            None,
            "Gptq, Awq, CompressedTensors or Fp8 for a state dict",
            "pass detect(quantization_config)",
        )
        assert format is not None
        return Checkpoint(source, format)
    read = format or detect(config_of(source))
    return Checkpoint(Folder(source, device), read)
