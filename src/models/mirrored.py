"""FP8 keys and values beside a main copy in 16 bits: who writes them, and which of the two is read (FuTransformer 4).

    projection of q, k and v ──► row ──► main copy ──► prefill's attention
                                  │
                                  └─► e4m3(row / scale) ──► mirror ──► a step's attention

A prefill's projection and a step's write both, in one epilogue: the codes are those of the row as the main copy keeps
it, so that a mirror holds nothing that its main copy does not.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

import torch

from epicute.epilogues import (
    Cells,
    Columns,
    Composition,
    Counter,
    Operand,
    PerHead,
    PlaceKV,
    Policy,
    Slots,
    Tap,
    compose,
)
from epicute.epilogues.context import Context
from epicute.epilogues.values import Value
from epicute.errors import require
from epicute.kv.cache import KVCache
from epicute.models.block_state import LayerCache
from epicute.models.kernels import Projection
from epicute.quant import E4M3_MAX

__all__ = ["MirroredCache", "PlaceBoth", "mirrored", "mirroring"]

FP8 = torch.float8_e4m3fn


@dataclass(frozen=True)
class PlaceBoth(Tap):
    """``PlaceKV`` into 16-bit ``cells``, and of the row as stored there e4m3(x * (1 / mirror_scale[head])) into
    ``mirror``, which has the same slots.

    ``mirror_saturated`` and ``mirror_nans`` count what was placed there beyond ±448 and as NaN. Passes on what
    ``cells`` keep.

    Args:
        head_dim: channels of a head.
        dtype: of ``cells``, ``torch.bfloat16`` or ``torch.float16``.
    """

    head_dim: int = 0
    dtype: torch.dtype = torch.bfloat16

    def __post_init__(self) -> None:
        require(
            self.dtype in (torch.bfloat16, torch.float16),
            "PlaceBoth.dtype",
            self.dtype,
            "torch.bfloat16 or torch.float16",
            "an FP8 main copy needs no mirror: use PlaceKV",
        )
        PlaceKV(self.head_dim, self.dtype)  # refuses heads that are none

    @property
    def operands(self) -> Mapping[str, Operand]:
        return {
            "cells": Cells(dtype=self.dtype, head_dim=self.head_dim),
            "mirror": Cells(dtype=FP8, head_dim=self.head_dim),
            "slots": Slots(),
            "mirror_scale": PerHead(head_dim=self.head_dim),
            "mirror_saturated": Counter(),
            "mirror_nans": Counter(),
        }

    def apply(self, x: Value, ctx: Context) -> Value:
        # Rounded by name: what ``place`` gives back is as stored only where a policy follows.
        half = self.dtype == torch.float16
        kept = ctx.round_float16(x) if half else ctx.round_bfloat16(x)
        ctx.place("cells", kept)
        scaled = kept * ctx.reciprocal(ctx.mirror_scale)
        placed = ctx.placed("mirror")
        ctx.count("mirror_saturated", placed & (abs(scaled) > E4M3_MAX))
        ctx.count("mirror_nans", placed & ctx.isnan(scaled))
        ctx.place("mirror", scaled)
        return kept


def mirrored(plain: Composition) -> Composition:
    """The same composition with ``PlaceBoth`` for each ``PlaceKV``.

    Raises:
        ArgumentError: it places FP8 rows, or none.
    """

    def both(policy: Policy) -> Policy:
        return PlaceBoth(policy.head_dim, policy.dtype) if isinstance(policy, PlaceKV) else policy

    ranges = () if plain.columns is None else plain.columns.ranges
    require(
        any(isinstance(p, PlaceKV) for _, _, chain in ranges for p in chain.policies),
        "composition",
        plain.title,
        "one that places keys and values",
        "pass that of the projection of q, k and v",
    )
    parts: dict[str, Any] = {
        name: (width, compose(*(both(policy) for policy in chain.policies)))
        for name, width, chain in ranges
    }
    return compose(*plain.policies, Columns(**parts))


def mirroring(block: Any, max_rows: int) -> Projection:
    """The projection of q, k and v of a ``PrefillBlock``'s layers for caches with a mirror; its weights stand alike."""
    spec = block.spec
    chain = mirrored(spec.compositions["qkv"])
    return block.kernels.projection(chain, block.weights.qkv, spec.options("qkv", max_rows))


@dataclass(frozen=True, eq=False)
class MirroredCache(LayerCache):
    """One layer's keys and values in both copies: what ``LayerCache`` says is of the one that is read, ``cells`` of
    both. Make it with ``both`` or ``both_of_model``.

    Attributes:
        main: the copy in 16 bits.
        mirror: that in FP8, with its scales and counters.
    """

    main: LayerCache
    mirror: LayerCache

    @staticmethod
    def both(main: LayerCache, mirror: LayerCache, *, step: bool) -> MirroredCache:
        """Both copies, of which a ``step`` reads the mirror, and a prefill the main one.

        Raises:
            ArgumentError: a main copy that is not of 16 bits or a mirror that is not FP8; other pages or heads.
        """
        for name, copy, dtypes in (
            ("main", main, (torch.bfloat16, torch.float16)),
            ("mirror", mirror, (FP8,)),
        ):
            require(
                copy.k.dtype in dtypes and type(copy) is LayerCache,
                name,
                f"{type(copy).__name__} of {copy.k.dtype}",
                f"a LayerCache of {' or '.join(map(str, dtypes))}",
                "allocate a main copy in 16 bits and a mirror in FP8",
            )
        require(
            (main.k.shape, main.page, main.k.device)
            == (mirror.k.shape, mirror.page, mirror.k.device),
            "mirror",
            f"{tuple(mirror.k.shape)} in pages of {mirror.page} on {mirror.k.device}",
            f"{tuple(main.k.shape)} in pages of {main.page} on {main.k.device}, as the main copy",
            "allocate both for the same slots",
        )
        read = mirror if step else main
        given = {f.name: getattr(read, f.name) for f in fields(LayerCache)}
        return MirroredCache(**{**given, "counters": _renamed(mirror)}, main=main, mirror=mirror)

    @staticmethod
    def both_of_model(cache: KVCache, layer: int, *, step: bool) -> MirroredCache:
        """One layer of a model's cache that has an FP8 mirror, in pages."""
        fp8 = cache.fp8
        require(
            fp8 is not None,
            "cache",
            repr(cache),
            "one with an FP8 mirror",
            "allocate it with dtype='fp8' and mirror=True",
        )
        assert fp8 is not None
        mirror = LayerCache(
            fp8.keys(layer),
            fp8.values(layer),
            cache.spec.page_size,
            fp8.k_scale[layer],
            fp8.v_scale[layer],
            fp8.counters(layer),
        )
        return MirroredCache.both(LayerCache.of_model(cache, layer), mirror, step=step)

    def cells(self) -> dict[str, torch.Tensor]:
        """The operands that ``PlaceBoth`` writes K and V by."""
        mirror = self.mirror
        assert mirror.k_scale is not None
        assert mirror.v_scale is not None
        found = {"k_cells": self.main.k, "v_cells": self.main.v}
        found |= {"k_mirror": mirror.k, "v_mirror": mirror.v}
        found |= {"k_mirror_scale": mirror.k_scale, "v_mirror_scale": mirror.v_scale}
        return found | dict(self.counters)

    def in_pages(self, page: int = 128) -> tuple[MirroredCache, torch.Tensor]:
        """As of ``LayerCache``: both copies, whose pages are the same."""
        (main, table), (mirror, _) = self.main.in_pages(page), self.mirror.in_pages(page)
        return MirroredCache.both(main, mirror, step=self.k_scale is not None), table

    def first(self, requests: int) -> MirroredCache:
        """The same for the first ``requests`` stretches of contiguous memory."""
        main, mirror = (
            replace(copy, k=copy.k[:requests], v=copy.v[:requests])
            for copy in (self.main, self.mirror)
        )
        return MirroredCache.both(main, mirror, step=self.k_scale is not None)


def _renamed(mirror: LayerCache) -> dict[str, torch.Tensor]:
    """A mirror's counters as ``PlaceBoth`` calls them."""
    return {name.replace("_cells_", "_mirror_"): x for name, x in mirror.counters.items()}
