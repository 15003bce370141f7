"""What decides the kernels of a layer's decode step, and the compositions that follow from it.

    qkv      [Dequantize >>] RowScale [>> Bias] >> Columns(
                 q: [HeadNorm >>] RoPE >> Store,  k: [HeadNorm >>] RoPE >> PlaceKV [>> Store],  v: PlaceKV [>> Store])
    o        [Dequantize >>] ResidualAdd >> KeepRows >> SumSquares >> Store
    gate_up  [Dequantize >>] RowScale >> SwiGLU >> Store
    down     [Dequantize >>] ResidualAdd >> SumSquares >> Store

They are those of a prefill in 16 bits, since activations are never quantised here: a step is bound by the bytes of
weights and cache. ``Dequantize`` is for FP8 weights; INT4 scales are applied within the sum. Where INT4 or QK4PV8
records are all the cache there is, ``PlaceKV`` fills a buffer of one row a request, so that it is the same kernel; with
a main copy beside them, ``Store`` fills it too. Beside an FP8 cache that is the mirror of a main copy, ``PlaceBoth``
stands for ``PlaceKV``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch

from epicute.attention.decode_schedule import DecodeSchedule, choose_decode
from epicute.attention.decode_spec import DecodeSpec
from epicute.epilogues import Columns, Composition, Dequantize, HeadNorm, PlaceKV, Store, compose
from epicute.errors import UnsupportedError, require
from epicute.models.block_spec import FORMATS as BLOCK_FORMATS
from epicute.models.block_spec import BlockSpec
from epicute.models.decode_cache import CacheForm
from epicute.models.mirrored import mirrored

__all__ = ["WEIGHTS", "DecodeBlockSpec", "chain_schedule"]

WEIGHTS = ("bf16", "fp16", "fp8", "int4")
"""Formats of weights that a step streams."""

FP8 = torch.float8_e4m3fn

CARVEOUT = 100
"""Percent of an SM's memory that is shared memory: kernels that overlap need the same, and projections have this."""

SHARED_OF_TWO = 113 * 1024
"""Bytes of shared memory of a CTA beside which another fits."""

WIDEST_OF_EIGHT = 80
"""Channels of a head up to which eight warps leave registers for another CTA."""


def chain_schedule(spec: DecodeSpec) -> DecodeSchedule:
    """How attention goes about it between projections: as alone, but as one of two CTAs on an SM where registers and
    shared memory allow that: one's latencies are the other's time.
    """
    found = replace(choose_decode(spec), carveout=CARVEOUT)
    narrow = found.warps == 4 or spec.head_dim <= WIDEST_OF_EIGHT
    single = found.column_tiles(spec) == 1 and not (spec.packed and spec.page is None)
    if narrow and single and found.shared_memory(spec) <= SHARED_OF_TWO:
        found = replace(found, resident=2)
    return found


@dataclass(frozen=True)
class DecodeBlockSpec:
    """A layer's decode step as its kernels see it. Make it with ``of``.

    Attributes:
        block: the layer with 16-bit activations; ``block.cache`` is the dtype of rows that are placed.
        weights: of ``WEIGHTS``; 16-bit ones have the activations' dtype.
        cache: what is read and extended.
        norm_gain: whether the gains of the two norms are operands, by which activations are multiplied on their way
            in: for weights that have not taken them up.
    """

    block: BlockSpec
    weights: str = "bf16"
    cache: CacheForm = CacheForm()  # noqa: RUF009  # a frozen value
    norm_gain: bool = False

    def __post_init__(self) -> None:
        require(
            self.weights in WEIGHTS,
            "weights",
            repr(self.weights),
            f"one of {WEIGHTS}",
            "name what a step streams",
        )
        block = self.block
        require(
            block.format in ("bf16", "fp16") and self.weights in (block.format, "fp8", "int4"),
            "block.format",
            f"{block.format!r} activations beside {self.weights} weights",
            "'bf16' or 'fp16', that of the weights where these have 16 bits",
            "make it with DecodeBlockSpec.of",
        )
        wanted = {"fp8": FP8, "bf16": torch.bfloat16, "fp16": torch.float16}
        placed = block.dtype if self.cache.main else wanted.get(self.cache.format, block.dtype)
        require(
            block.cache == placed and (placed == FP8 or placed == block.dtype),
            "cache.format",
            f"{self.cache.format}, of rows of {block.cache}",
            f"fp8, int4, qk4pv8, or {block.format} as the activations",
            "make it with DecodeBlockSpec.of",
        )
        if self.cache.format != "qk4pv8":
            return
        for name in ("window", "softcap"):
            require(
                getattr(block, name) is None,
                name,
                getattr(block, name),
                "None for a QK4PV8 cache, whose kernel knows no such mask",
                "keep this model's keys in a BF16, FP8 or INT4 cache",
                UnsupportedError,
            )
        kind, shape = self.cache.records, block.shape
        assert kind is not None
        require(
            (kind.q_heads, kind.kv_heads, kind.page.head_dim)
            == (shape.heads, shape.kv_heads, shape.head_dim),
            "cache.records",
            f"{kind.q_heads}:{kind.kv_heads} heads of {kind.page.head_dim}",
            f"{shape.heads}:{shape.kv_heads} heads of {shape.head_dim}",
            "describe the cache for this layer",
        )

    @staticmethod
    def of(
        block: BlockSpec,
        cache: CacheForm,
        weights: str | None = None,
        norm_gain: bool | None = None,
    ) -> DecodeBlockSpec:
        """The step of a layer whose prefill is ``block``.

        Args:
            block: in any format; its FP8 activations become BF16 ones.
            cache: what is read and extended; need not be what ``block`` places.
            weights: of ``WEIGHTS``, the prefill's unless given.
            norm_gain: whether gains are operands; by default where ``block`` says so, and of INT4 weights.
        """
        weights = block.format if weights is None else weights
        if norm_gain is None:
            norm_gain = weights == "int4" or block.gains == "operand"
        format = "fp16" if block.format == "fp16" or weights == "fp16" else "bf16"
        only = cache.format == "fp8" and not cache.main
        placed = FP8 if only else BLOCK_FORMATS[format]
        changes = {"scaling": "delayed", "accumulate": None, "gains": "folded", "last": False}
        plain = replace(block, format=format, cache=placed, **changes)  # type: ignore[arg-type]
        return DecodeBlockSpec(plain, weights, cache, norm_gain)

    @property
    def dtype(self) -> torch.dtype:
        """Of all activations."""
        return self.block.dtype

    @cached_property
    def compositions(self) -> Mapping[str, Composition]:
        """The epilogue of each projection, by the names of ``PROJECTIONS``."""
        found = dict(self.block.compositions)
        if self.cache.main and self.cache.writes_records:
            found["qkv"] = self._both(found["qkv"])
        elif self.cache.main:
            found["qkv"] = mirrored(found["qkv"])
        if self.weights == "fp8":
            found = {name: compose(Dequantize(None), chain) for name, chain in found.items()}
        return found

    def _both(self, plain: Composition) -> Composition:
        """The QKV chain that places rows in the main copy and leaves them for attention too."""
        block, shape = self.block, self.block.shape
        assert block.rope is not None
        head = [HeadNorm(shape.head_dim, block.eps)] if block.qk_norm else []
        both = (PlaceKV(shape.head_dim, block.cache), Store(self.dtype))
        ranges = Columns(
            q=(shape.q_width, compose(*head, block.rope, Store(self.dtype))),
            k=(shape.kv_width, compose(*head, block.rope, *both)),
            v=(shape.kv_width, compose(*both)),
        )
        return compose(*plain.policies, ranges)

    def options(self, name: str) -> dict[str, Any]:
        """What ``plan_few_rows`` is told of the projection ``name`` beside its composition."""
        found: dict[str, Any] = {"x_dtype": self.dtype}
        if name in ("o", "down"):
            found["dtypes"] = {"residual": self.dtype}
        elif self.norm_gain:
            found["norm_gain"] = True
        return found

    def attention(self, batch_invariant: bool = False, prefetch: bool = False) -> DecodeSpec:
        """The layer's attention, over any cache but QK4PV8's.

        Raises:
            ArgumentError: what ``DecodeSpec`` refuses.
        """
        block, shape, cache = self.block, self.block.shape, self.cache
        return DecodeSpec(
            shape.heads,
            shape.kv_heads,
            shape.head_dim,
            cache.format,
            self.dtype,
            window=block.window,
            softcap=block.softcap,
            page=cache.page,
            scale=shape.head_dim**-0.5 if block.softmax_scale is None else block.softmax_scale,
            batch_invariant=batch_invariant,
            rotation=cache.rotation,  # type: ignore[arg-type]  # becomes a width
            values_folded=cache.values_folded,
            prefetch=prefetch,
        )

    def __str__(self) -> str:
        shape = self.block.shape
        heads = f"{shape.heads}:{shape.kv_heads} heads of {shape.head_dim}"
        gains = ", norm gains as operands" if self.norm_gain else ""
        return (
            f"{shape.name}: hidden {shape.hidden}, {heads}, MLP {shape.intermediate}; "
            f"{self.weights} weights{gains}, {self.cache}"
        )
