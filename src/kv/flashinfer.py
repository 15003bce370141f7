"""FlashInfer's NVFP4 cache, read and written: four tensors and two numbers.

    k, v              uint8          (pages, page_size, kv_heads, D/2)   NHD, or
                                     (pages, kv_heads, page_size, D/2)   HND; low nibble even channel
    k_scales, v_scales float8_e4m3fn  the same with D/16
    k_scale, v_scale  FP32           value = e2m1 * scale * this

Scales of K lie in natural order. Those of V do so in caches that its append functions write
(``fa2``), while ``trtllm-gen`` wants them interleaved: within a (page, head) the scale of token t
and block s is at flat place (t // 4) * 4S + 4s + t % 4 of S scales a token.

Keys cross in both directions bit for bit. Values are FP8 here and NVFP4 there: each direction
rounds them once more. A cache of smoothed keys exports k_c, which gives attention the same output
as k does where all keys of a row share one mean, and a log-sum-exp that is less by
``quant.smoothing.lse_shift``.

Only layouts are shared; the library itself is not imported.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from epicute.errors import require
from epicute.kv.pages import slot_is_valid, split_slot
from epicute.kv.qk4pv8 import Memory, QK4PV8Cache, Rows
from epicute.kv.records import writable_rows
from epicute.quant import nvfp4

__all__ = ["FlashInferNVFP4", "export_rows", "import_rows", "interleaved_scale"]

LAYOUTS = ("NHD", "HND")

_NOT_A_SCALE = 0x7F
"""E4M3 bytes from here up are NaN or negative: no scale."""


def interleaved_scale(token: Any, block: Any, blocks: int) -> tuple[Any, Any]:
    """(row, column) of a (page_size, blocks) page where an interleaved V scale lies.

    ``blocks`` is a multiple of 4 and the page a multiple of 4 tokens. Runs on int, NumPy arrays and
    torch tensors.
    """
    flat = token // 4 * 4 * blocks + block * 4 + token % 4
    return flat // blocks, flat % blocks


@dataclass(frozen=True, eq=False)
class FlashInferNVFP4:
    """A FlashInfer NVFP4 cache; the tensors are used in place.

    Attributes:
        k, v: uint8, see the module.
        k_scales, v_scales: float8_e4m3fn.
        k_scale, v_scale: second-level scales, Python numbers.
        layout: ``NHD`` or ``HND``.
        interleaved: V scales as ``trtllm-gen`` wants them.
    """

    k: torch.Tensor
    v: torch.Tensor
    k_scales: torch.Tensor
    v_scales: torch.Tensor
    k_scale: float = 1.0
    v_scale: float = 1.0
    layout: str = "NHD"
    interleaved: bool = False

    def __post_init__(self) -> None:
        require(self.layout in LAYOUTS, "layout", self.layout, f"one of {LAYOUTS}", "name it")
        for name in ("k_scale", "v_scale"):
            object.__setattr__(self, name, nvfp4.narrow_scale(getattr(self, name), name))
        require(
            self.k.ndim == 4 and self.k.shape[-1] % 8 == 0 and self.k.shape[-1] > 0,
            "k.shape",
            tuple(self.k.shape),
            "(pages, page_size, kv_heads, D/2) or (pages, kv_heads, page_size, D/2)",
            "split a joined cache into K and V first",
        )
        scales = (*self.k.shape[:3], self.k.shape[3] // 8)
        expected = {
            "k": (torch.uint8, tuple(self.k.shape)),
            "v": (torch.uint8, tuple(self.k.shape)),
            "k_scales": (torch.float8_e4m3fn, scales),
            "v_scales": (torch.float8_e4m3fn, scales),
        }
        for name, (dtype, shape) in expected.items():
            tensor = getattr(self, name)
            require(
                tensor.dtype == dtype and tensor.shape == shape,
                name,
                f"{tuple(tensor.shape)} {tensor.dtype}",
                f"{shape} {dtype}",
                "pass the four tensors of one cache",
            )
        require(
            not self.interleaved or (self.page_size % 4 == 0 and scales[-1] % 4 == 0),
            "interleaved",
            f"pages of {self.page_size}, {scales[-1]} scales a token",
            "multiples of 4",
            "pass interleaved=False",
        )

    @property
    def page_size(self) -> int:
        """Tokens per page, any number."""
        return self.k.shape[1 if self.layout == "NHD" else 2]

    @property
    def kv_heads(self) -> int:
        """Heads of keys and values."""
        return self.k.shape[2 if self.layout == "NHD" else 1]

    @property
    def head_dim(self) -> int:
        """Channels of a head."""
        return self.k.shape[3] * 2

    @property
    def capacity(self) -> int:
        """Slots of the cache."""
        return self.k.shape[0] * self.page_size

    def nhd(self, tensor: torch.Tensor) -> torch.Tensor:
        """A view of one of the four tensors as (pages, page_size, kv_heads, ...)."""
        return tensor if self.layout == "NHD" else tensor.transpose(1, 2)

    def value_scale_cells(self, slots: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Indices (T, kv_heads, D/16) into ``nhd(v_scales)``."""
        page, token = split_slot(slots, self.page_size)
        device = slots.device
        block = torch.arange(self.head_dim // nvfp4.BLOCK, device=device)[None, None, :]
        row, column = token[:, None, None], block
        if self.interleaved:
            row, column = interleaved_scale(row, block, self.head_dim // nvfp4.BLOCK)
        heads = torch.arange(self.kv_heads, device=device)[None, :, None]
        return page[:, None, None], row, heads, column


def _check(theirs: FlashInferNVFP4, cache: QK4PV8Cache) -> None:
    shape = (cache.kv_heads, cache.page.head_dim)
    require(
        (theirs.kv_heads, theirs.head_dim) == shape,
        "theirs",
        (theirs.kv_heads, theirs.head_dim),
        f"{shape} (kv_heads, head_dim)",
        "convert into a cache of the same heads",
    )
    require(
        theirs.k_scale == cache.k_scale,
        "theirs.k_scale",
        theirs.k_scale,
        f"{cache.k_scale}, this cache's",
        "create the cache with k_scale=theirs.k_scale: codes and block scales are not changed",
    )


@torch.no_grad()
def import_rows(
    theirs: FlashInferNVFP4,
    their_slots: torch.Tensor,
    cache: QK4PV8Cache,
    memory: Memory,
    slots: torch.Tensor,
    counters: nvfp4.CastCounters | None = None,
) -> None:
    """Copy tokens of a FlashInfer cache into ``memory``: keys bit for bit, values rounded to FP8.

    Args:
        theirs: the source.
        their_slots: (T,) int64, page * page_size + token in ``theirs``, each a place.
        cache: without smoothing, with ``k_scale`` of the source.
        memory: of ``cache``.
        slots: (T,) int64 distinct, places in ``cache``; negative ones and those past the end are
            skipped.
        counters: of values. With v_scale = 8 * theirs.v_scale none can saturate.

    Raises:
        ArgumentError: heads, scales or slots that do not belong together; a smoothed cache; a
            block scale of K that is negative or NaN.
    """
    _check(theirs, cache)
    require(
        cache.terms == 0,
        "cache.terms",
        cache.terms,
        "0: imported keys are not centred, and their ΔS is not known",
        "import into a cache without smoothing",
    )
    require(
        bool(slot_is_valid(their_slots, theirs.capacity).all()),
        "their_slots",
        f"{their_slots[~slot_is_valid(their_slots, theirs.capacity)][:8].tolist()}",
        f"0 to {theirs.capacity - 1}",
        "leave out padding",
    )
    page, token = split_slot(their_slots, theirs.page_size)
    codes = theirs.nhd(theirs.k)[page, token]
    raw = theirs.nhd(theirs.k_scales.view(torch.uint8))[page, token]
    require(
        not bool((raw >= _NOT_A_SCALE).any()),
        "theirs.k_scales",
        f"{int((raw >= _NOT_A_SCALE).sum())} bytes from 0x7f up",
        "E4M3 numbers without sign",
        "import written tokens alone",
    )
    cells = theirs.value_scale_cells(their_slots)
    v_scales = theirs.nhd(theirs.v_scales.view(torch.uint8))[cells].view(torch.float8_e4m3fn)
    found = nvfp4.dequantize_nvfp4(theirs.nhd(theirs.v)[page, token], v_scales, theirs.v_scale)
    values = nvfp4.quantize_values(found, cache.v_scale, counters)
    cache.place(memory, Rows(codes, raw.view(torch.float8_e4m3fn), values, None), slots)


@torch.no_grad()
def export_rows(
    cache: QK4PV8Cache,
    memory: Memory,
    slots: torch.Tensor,
    theirs: FlashInferNVFP4,
    their_slots: torch.Tensor,
    counters: nvfp4.CastCounters | None = None,
) -> None:
    """Copy tokens into a FlashInfer cache: keys bit for bit, values rounded to NVFP4.

    Args:
        cache: the source, smoothed or not (see the module).
        memory: of ``cache``.
        slots: (T,) int64, places in ``cache``.
        theirs: written in place.
        their_slots: (T,) int64 distinct; negative ones and those past the end are skipped.
        counters: of values.

    Raises:
        ArgumentError: heads, scales or slots that do not belong together.
    """
    _check(theirs, cache)
    kept = writable_rows(their_slots, slots.numel(), theirs.capacity)
    rows = cache.fetch(memory, slots[kept])
    their_slots = their_slots[kept]
    page, token = split_slot(their_slots, theirs.page_size)
    values = nvfp4.dequantize_values(rows.values, cache.v_scale)
    codes, scales = nvfp4.quantize_nvfp4(values, theirs.v_scale, counters)
    theirs.nhd(theirs.k)[page, token] = rows.codes
    theirs.nhd(theirs.v)[page, token] = codes
    theirs.nhd(theirs.k_scales.view(torch.uint8))[page, token] = rows.scales.view(torch.uint8)
    cells = theirs.value_scale_cells(their_slots)
    theirs.nhd(theirs.v_scales.view(torch.uint8))[cells] = scales.view(torch.uint8)
