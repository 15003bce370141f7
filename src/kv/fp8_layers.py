"""E4M3 rows of all layers of a model, the mirror of a main copy under the page table of a ``KVCache``.

    code = e4m3(x * float32(1 / scale)) of a row x as the main copy has it, a scale for each layer and KV head

So a mirror can be made again from its main copy, to the bit. A step reads the mirror alone, a prefill the main copy
(FuTransformer 3.3.2, table 5); projections write both.
"""

from __future__ import annotations

import torch

from epicute.errors import require
from epicute.kv.pages import slot_is_valid, split_slot
from epicute.kv.records import writable_rows
from epicute.quant import E4M3_MAX, cast_e4m3, inverse
from epicute.quant.fp8 import as_float32

__all__ = ["Fp8Layers"]


class Fp8Layers:
    """The mirrors of all layers, which lie in memory as the main copy does.

    Attributes:
        memory: (layers, 2, pages, page_size, kv_heads, head_dim) float8_e4m3fn, keys and values; heads before tokens
            for layout HND.
        k_scale, v_scale: (layers, kv_heads) float32, value = code * scale.
        saturated, nans: (layers, 2) int64, K and V: what was clipped and what was NaN when it was written.
    """

    def __init__(
        self,
        shape: tuple[int, ...],
        layout: str,
        scales: tuple[torch.Tensor, torch.Tensor],
        device: torch.device | str = "cpu",
    ) -> None:
        """``shape``: of ``memory``, in the order of ``layout``. ``scales``: as ``kv.cache_scales`` has made them."""
        self.memory = torch.zeros(shape, dtype=torch.float8_e4m3fn, device=device)
        self.layout = layout
        self.k_scale, self.v_scale = scales
        self.saturated, self.nans = torch.zeros(2, shape[0], 2, dtype=torch.int64, device=device)

    def __repr__(self) -> str:
        pages = self.keys(0).shape
        return f"Fp8Layers({len(self.memory)} layers, {pages[0]} pages of {pages[1]} tokens)"

    def keys(self, layer: int) -> torch.Tensor:
        """(pages, page_size, kv_heads, head_dim) of one layer's keys, a view.

        Raises:
            ArgumentError: no such layer.
        """
        return self._pool(layer, 0)

    def values(self, layer: int) -> torch.Tensor:
        """The same of its values."""
        return self._pool(layer, 1)

    def _pool(self, layer: int, which: int) -> torch.Tensor:
        require(
            0 <= layer < len(self.memory),
            "layer",
            layer,
            f"0 to {len(self.memory) - 1}",
            "count layers from 0",
        )
        pool = self.memory[layer, which]
        return pool if self.layout == "NHD" else pool.transpose(1, 2)

    def counters(self, layer: int) -> dict[str, torch.Tensor]:
        """``k_cells_saturated``, ``k_cells_nans`` and v's, (1,) int64 each: views, which grow."""
        found = {}
        for at, name in enumerate("kv"):
            found[f"{name}_cells_saturated"] = self.saturated[layer, at : at + 1]
            found[f"{name}_cells_nans"] = self.nans[layer, at : at + 1]
        return found

    @torch.no_grad()
    def write(
        self, layer: int, keys: torch.Tensor, values: torch.Tensor, slots: torch.Tensor
    ) -> None:
        """Quantise rows of the main copy and store them in place; count what does not fit.

        Args:
            layer: whose.
            keys: (T, kv_heads, head_dim) as the main copy has them: float32, bfloat16 or float16.
            values: the same shape.
            slots: (T,) int64 distinct; negative ones and those past the end are skipped.

        Raises:
            ArgumentError: rows of another shape, two rows for one slot, no such layer.
        """
        pages, size, *row = self.keys(layer).shape
        for name, x in (("keys", keys), ("values", values)):
            shape = (len(keys), *row)
            require(
                x.shape == shape, f"{name}.shape", tuple(x.shape), f"{shape}", "view it by heads"
            )
        kept = writable_rows(slots, len(keys), pages * size)
        page, token = split_slot(slots[kept], size)
        wide = as_float32(keys[kept], "keys"), as_float32(values[kept], "values")
        for at, (x, scale) in enumerate(zip(wide, (self.k_scale, self.v_scale), strict=True)):
            pool = self._pool(layer, at)
            scaled = x * inverse(scale[layer])[:, None]
            pool[page, token] = cast_e4m3(scaled)
            self.saturated[layer, at] += (scaled.abs() > E4M3_MAX).sum()
            self.nans[layer, at] += scaled.isnan().sum()

    def read(self, layer: int, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values at slots (T,) int64: (T, kv_heads, head_dim) float32, dequantised.

        NaN in rows whose slot is no place, so that no use of them goes unseen.

        Raises:
            ArgumentError: no such layer.
        """
        found = []
        for at, scale in enumerate((self.k_scale, self.v_scale)):
            pool = self._pool(layer, at)
            valid = slot_is_valid(slots, pool.shape[0] * pool.shape[1])
            page, token = split_slot(torch.where(valid, slots, 0), pool.shape[1])
            rows = pool[page, token].to(torch.float32) * scale[layer][:, None]
            found.append(torch.where(valid[:, None, None], rows, torch.nan))
        return found[0], found[1]
