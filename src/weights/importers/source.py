"""Tensors of a checkpoint by name: a state dict, or a folder of safetensors files read tensor by tensor."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from epicute.errors import ArgumentError, require

__all__ = ["Folder", "config_of", "tensor_of"]

CONFIGS = ("config.json", "quantize_config.json", "quant_config.json")
"""Where checkpoints say how they were quantised; the first that does is believed."""


class Folder(Mapping[str, torch.Tensor]):
    """The tensors of all ``*.safetensors`` of a folder; each is read when asked for.

    Raises:
        ArgumentError: the path is no folder, holds no such file, or two files hold a tensor of one name.
    """

    def __init__(self, path: str | os.PathLike[str], device: torch.device | str = "cpu") -> None:
        from safetensors import safe_open

        self.path, self.device = Path(path), str(device)
        files = sorted(self.path.glob("*.safetensors"))
        require(
            bool(files),
            str(self.path),
            "no *.safetensors file",
            "a folder of a safetensors checkpoint",
            "name the folder that holds config.json and the weights",
        )
        self._places: dict[str, Path] = {}
        for file in files:
            with safe_open(file, framework="pt") as opened:
                for name in opened.keys():  # noqa: SIM118
                    require(
                        name not in self._places,
                        name,
                        f"in {self._places.get(name)} and in {file}",
                        "every tensor once",
                        "keep one copy of the checkpoint in the folder",
                    )
                    self._places[name] = file

    def __getitem__(self, name: str) -> torch.Tensor:
        from safetensors import safe_open

        with safe_open(self._places[name], framework="pt", device=self.device) as opened:
            found: torch.Tensor = opened.get_tensor(name)
            return found

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)


def config_of(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The quantisation part of a checkpoint folder's configuration.

    Raises:
        ArgumentError: no file of ``CONFIGS`` says how the weights were quantised.
    """
    folder = Path(path)
    require(
        folder.is_dir(),
        "source",
        os.fspath(path),
        "a folder with a checkpoint",
        "fetch the checkpoint, and name its folder",
    )
    for name in CONFIGS:
        file = folder / name
        if not file.is_file():
            continue
        try:
            read = json.loads(file.read_text(encoding="utf-8"))
        except ValueError as error:
            raise ArgumentError(
                f"{file}: got {error}, expected JSON. Fix: fetch the checkpoint again"
            ) from error
        found = read.get("quantization_config", read.get("compression_config"))
        if found is None and name != "config.json":
            found = read
        if isinstance(found, dict):
            return found
    raise ArgumentError(
        f"{folder}: got no quantization_config in {' or '.join(CONFIGS)}, expected one. Fix: pass the "
        "format yourself, or read an unquantised checkpoint as Weight"
    )


def tensor_of(tensors: Mapping[str, torch.Tensor], name: str, fix: str) -> torch.Tensor:
    """The tensor called ``name``.

    Raises:
        ArgumentError: there is none.
    """
    require(name in tensors, name, "no such tensor", "a tensor of the checkpoint", fix)
    return tensors[name]
