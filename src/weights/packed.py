"""A weight as kernels read it: rows in the order a composition asks for, padded with zeros."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch

from epicute.errors import ArgumentError, require
from epicute.layouts import RowOrder
from epicute.weights.quantized import Quantized, bits, require_codes
from epicute.weights.storage import (
    read_file,
    require_columns,
    require_positive_scales,
    same_order,
    write_file,
)

__all__ = ["LAYOUT_VERSION", "Packed"]

LAYOUT_VERSION = 1
"""Number of the arrangement of bytes below; files of any other are refused."""

ROW_BYTES = 16
"""Rows are padded with zeros to a multiple of this many bytes, as TMA demands of a stride."""


@dataclass(frozen=True, eq=False)
class Packed:
    """Codes in physical row order; everything else stays in logical order.

    Attributes:
        format: "bf16", "fp16" or "fp8".
        codes: (rows, K_pitch) contiguous in the format's dtype. Row r holds output feature
            ``order.logical()[r]``; padding rows and the columns from K on are zero bytes.
        scale: fp8: (N,) or (1,) float32 in logical order; other formats: None.
        order: where each output feature stands.
        shape: (N, K).
        name: how errors call it.
    """

    format: str
    codes: torch.Tensor
    scale: torch.Tensor | None
    order: RowOrder
    shape: tuple[int, int]
    name: str = "weight"

    def __post_init__(self) -> None:
        columns, width = self.shape
        require_columns(self.name, self.order, columns)
        require_codes(self.name, self.format, self.codes, self.scale, columns)
        expected = (self.order.rows, pitch_of(width, self.codes.element_size()))
        require(
            tuple(self.codes.shape) == expected and self.codes.is_contiguous(),
            f"{self.name}.codes",
            f"{tuple(self.codes.shape)}, strides {self.codes.stride()}",
            f"contiguous {expected} for shape {self.shape} in order [{self.order}]",
            "build it with Quantized.pack",
        )

    def __repr__(self) -> str:
        at = f"{self.shape} on {self.device}"
        return f"Packed({self.name!r}, {self.format}, {at}, order [{self.order}])"

    @staticmethod
    def of(source: Quantized, order: RowOrder) -> Packed:
        """Pack ``source`` in ``order``. Looks at the scales once, so it waits for the device.

        Raises:
            ArgumentError: ``order`` is no RowOrder, or for another number of output features, or a
                scale is not finite and positive.
        """
        columns, width = source.codes.shape
        require_columns(source.name, order, columns)
        require_positive_scales(source.name, source.scale)
        shape = (order.rows, pitch_of(width, source.codes.element_size()))
        codes = torch.zeros(shape, dtype=source.codes.dtype, device=source.codes.device)
        rows = torch.from_numpy(order.physical()).to(codes.device)
        bits(codes)[rows, :width] = bits(source.codes)
        return Packed(
            source.format, codes, source.scale, order, (int(columns), int(width)), source.name
        )

    def unpack(self) -> Quantized:
        """The codes and scales that were packed, bit for bit, in logical order."""
        rows = torch.from_numpy(self.order.physical()).to(self.device)
        codes = bits(self.codes)[rows, : self.shape[1]].view(self.dtype)
        return Quantized(self.format, codes, self.scale, self.name)

    @property
    def device(self) -> torch.device:
        """Where the codes are."""
        return self.codes.device

    @property
    def dtype(self) -> torch.dtype:
        """Element type of the codes."""
        return self.codes.dtype

    @property
    def pitch(self) -> int:
        """Elements from one row to the next."""
        return self.codes.shape[1]

    @cached_property
    def nbytes(self) -> int:
        """Bytes of codes and scales, padding included."""
        scale = 0 if self.scale is None else self.scale.nbytes
        return self.codes.nbytes + scale

    @cached_property
    def raw(self) -> torch.Tensor:
        """The codes as (rows, bytes) uint8, the same memory."""
        return self.codes.view(torch.uint8)

    def to(self, device: torch.device | str) -> Packed:
        """The same weight on ``device``."""
        scale = None if self.scale is None else self.scale.to(device)
        return replace(self, codes=self.codes.to(device), scale=scale)

    def order_matches(self, order: RowOrder) -> bool:
        """Whether every row stands where ``order`` would put it, whatever it calls its ranges."""
        return same_order(self.order, order)

    def require_order(self, order: RowOrder, reader: str) -> None:
        """Raise unless ``reader`` (a composition, in words) finds rows in the ``order`` it needs.

        Raises:
            ArgumentError: naming both orders.
        """
        require(
            self.order_matches(order),
            f"{self.name}.order",
            f"[{self.order}]",
            f"[{order}] for {reader}",
            f"pack again: packed.unpack().pack(epilogue.row_order({self.shape[0]}))",
        )

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a safetensors file: tensors ``codes`` and ``scale``, the rest as metadata.

        The file appears whole or not at all.
        """
        tensors = {"codes": self.codes}
        if self.scale is not None:
            tensors["scale"] = self.scale.contiguous()
        metadata = {
            "layout_version": str(LAYOUT_VERSION),
            "format": self.format,
            "shape": json.dumps(self.shape),
            "order": self.order.to_json(),
            "name": self.name,
        }
        write_file(path, tensors, metadata)

    @staticmethod
    def load(path: str | os.PathLike[str], device: torch.device | str = "cpu") -> Packed:
        """Read what ``save`` wrote.

        Raises:
            ArgumentError: another layout version, or a file that is not a packed weight.
        """
        packed = _from_file(path, *read_file(path, device, LAYOUT_VERSION))
        require_positive_scales(packed.name, packed.scale)
        return packed


def pitch_of(width: int, element_size: int) -> int:
    """K padded to a multiple of 16 bytes, in elements."""
    step = ROW_BYTES // element_size
    return -(-width // step) * step


def _from_file(
    path: str | os.PathLike[str], found: dict[str, str], tensors: dict[str, Any]
) -> Packed:
    try:
        columns, width = json.loads(found["shape"])
        order = RowOrder.from_json(found["order"])
        codes, format, name = tensors["codes"], found["format"], found["name"]
    except (KeyError, TypeError, ValueError) as error:
        raise ArgumentError(
            f"{os.fspath(path)}: got unreadable contents ({error!r}), expected a packed weight. "
            "Fix: write it with Packed.save"
        ) from error
    return Packed(format, codes, tensors.get("scale"), order, (columns, width), name)
