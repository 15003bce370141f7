"""A layer's decode step over two copies: FP8 rows that it reads, beside 16-bit ones for a prefill."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from epicute.kv.reference import scatter
from epicute.models.block_spec import BlockSpec
from epicute.models.block_state import LayerCache
from epicute.models.decode_block import DecodeBlock
from epicute.models.decode_cache import DecodeCache
from epicute.models.mirrored import MirroredCache
from epicute.testing import assert_equal_bits, assert_within
from tests.models.decode_blocks import FP8, NEW, Scene


@dataclass(eq=False)
class MirroredScene(Scene):
    """As ``Scene``; ``format`` is "fp8" or "int4", ``mirror`` True: there is a main copy beside either."""

    mirror: bool = True

    def _cache(self, spec: BlockSpec) -> DecodeCache:
        if self.format != "fp8":
            return super()._cache(spec)
        shape = spec.shape
        size = (self._pages(), self.tokens, shape.kv_heads, shape.head_dim)
        ramp = 1 + torch.arange(shape.kv_heads, device=self.device)
        copies = []
        for dtype, scales in (
            (spec.dtype, {}),
            (FP8, {"k_scale": 0.02 * ramp, "v_scale": 0.2 / ramp}),
        ):
            k, v = (torch.full(size, math.nan, device=self.device).to(dtype) for _ in "kv")
            copies.append(LayerCache.of(k, v, dense=self.page is None, **scales))
        return DecodeCache.fp8(copies[1], copies[0])

    @property
    def copies(self) -> tuple[LayerCache, LayerCache | None]:
        """The main copy, and the FP8 mirror where there is one."""
        main = self.cache.main
        assert main is not None
        return (main.main, main.mirror) if isinstance(main, MirroredCache) else (main, None)

    def store(self, k: Tensor, v: Tensor, slots: Tensor) -> None:
        super().store(k, v, slots)
        main, mirror = self.copies
        if mirror is None:
            return
        at = slots // self.tokens, slots % self.tokens
        for cells, x in ((main.k, k), (main.v, v)):
            here = cells.cpu()
            here[at] = x.to(here.dtype)
            cells.copy_(here)

    def check(self, block: DecodeBlock, found: Tensor) -> None:
        """The layer as ever; and the new row in both copies, to the bit, and nowhere else."""
        super().check(block, found)
        main, mirror = self.copies
        live = [request for request, length in enumerate(self.lengths) if length]
        if not live:
            return
        slots = torch.cat([self.slots(r, self.lengths[r])[-1:] for r in live])
        at = slots // self.tokens, slots % self.tokens
        placed = [cells.cpu()[at] for cells in (main.k, main.v)]
        _, k, v = self._heads()
        for mine, right in zip(placed, (k, v), strict=True):
            assert_within(mine, right[live], NEW)
        if mirror is None:
            memory = block.memory
            for mine, rows in zip(placed, (memory.new_k, memory.new_v), strict=True):
                assert rows is not None
                assert_equal_bits(mine, rows.cpu()[live])  # what the records are made of
            return
        assert mirror.k_scale is not None
        assert mirror.v_scale is not None
        for cells, rows, scale in (
            (mirror.k, placed[0], mirror.k_scale),
            (mirror.v, placed[1], mirror.v_scale),
        ):
            wanted = torch.zeros(cells.shape).to(FP8)
            scatter(wanted, rows.float(), slots, scale.cpu())
            assert_equal_bits(cells.cpu().view(torch.uint8)[at], wanted.view(torch.uint8)[at])

    def snapshot(self) -> list[Tensor]:
        """Bytes of every copy, on the CPU."""
        main, mirror = self.copies
        tensors: list[Any] = [main.k, main.v]
        tensors += [] if mirror is None else [mirror.k, mirror.v]
        tensors += [] if self.cache.records is None else [self.cache.records]
        return [x.cpu().contiguous().view(torch.uint8).clone() for x in tensors]


def others_unchanged(at: MirroredScene, before: list[Tensor]) -> None:
    """A step has changed the new rows' cells of main copy and FP8 mirror, and no other."""
    slots = torch.cat(
        [at.slots(request, n)[-1:] for request, n in enumerate(at.lengths) if n] or [torch.zeros(0)]
    ).long()
    for mine, right in zip(at.snapshot()[:4], before[:4], strict=False):
        if mine.dim() != 4:
            continue
        kept = torch.ones(mine.shape[:2], dtype=torch.bool)
        kept[slots // at.tokens, slots % at.tokens] = False
        assert_equal_bits(mine[kept], right[kept])
