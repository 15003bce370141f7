"""INT4 records of all layers of a model, under the page table of a ``KVCache``."""

from __future__ import annotations

import torch

from epicute.errors import require
from epicute.kv.int4 import Int4Cache

__all__ = ["Int4Layers"]


class Int4Layers:
    """The memory of every layer's records, which all have one format.

    Attributes:
        format: of each layer, see ``Int4Cache``: how rows are rotated, quantised and laid out.
        memory: (layers, pages, kv_heads, record bytes) uint8.
    """

    def __init__(self, format: Int4Cache, layers: int, device: torch.device | str = "cpu") -> None:
        self.format = format
        shape = (layers, format.pages, format.kv_heads, format.record.bytes)
        self.memory = torch.zeros(shape, dtype=torch.uint8, device=device)

    def __repr__(self) -> str:
        turned = f"rotated in blocks of {self.format.width}" if self.format.width else "not rotated"
        return f"Int4Layers({len(self.memory)} layers, {self.format.record}, {turned})"

    def layer(self, layer: int) -> torch.Tensor:
        """(pages, kv_heads, record bytes) uint8 of one layer, a view: what kernels take.

        Raises:
            ArgumentError: no such layer.
        """
        require(
            0 <= layer < len(self.memory),
            "layer",
            layer,
            f"0 to {len(self.memory) - 1}",
            "count layers from 0",
        )
        return self.memory[layer]

    def write(
        self, layer: int, keys: torch.Tensor, values: torch.Tensor, slots: torch.Tensor
    ) -> None:
        """Rotate, quantise and store rows of one layer, see ``Int4Cache.write``."""
        self.format.write(self.layer(layer), keys, values, slots)

    def read(self, layer: int, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Dequantised keys and values of one layer, still rotated, see ``Int4Cache.read``."""
        return self.format.read(self.layer(layer), slots)
