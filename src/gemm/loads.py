"""TMA loads of A and B, as the producer issues them. Imports the DSL."""

from __future__ import annotations

from typing import Any, NamedTuple

from cutlass import Int64, cute
from cutlass.cute.nvgpu import cpasync

__all__ = ["EVICT_FIRST", "EVICT_LAST", "Loader", "loader"]

EVICT_FIRST, EVICT_LAST = 0x12F0 << 48, 0x14F0 << 48
"""L2 policies of loads, as ``createpolicy.fractional`` encodes them for all of the lines."""


class Loader(NamedTuple):
    """An operand's tiles in memory and its stages, for one CTA.

    atom, source, target: what ``tma_partition`` made of them. mask: the CTAs of the cluster that a load goes to; None
    for this one alone. policy: of L2; None for its own.
    """

    atom: Any
    source: Any
    target: Any
    mask: Any
    policy: int | None

    def load(self, tile: Any, k: Any, stage: Any, barrier: Any) -> None:
        """Load this CTA's share of a stage, or all of it where nobody shares."""
        options: dict[str, Any] = {"tma_bar_ptr": barrier}
        if self.mask is not None:
            options["mcast_mask"] = self.mask
        if self.policy is not None:
            options["cache_policy"] = Int64(self.policy)
        cute.copy(self.atom, self.source[None, tile, k], self.target[None, stage], **options)


def loader(
    atom: cute.CopyAtom,
    tensor: cute.Tensor,
    stages: cute.Tensor,
    shape: tuple[int, int],
    rank: Any,
    sharing: int,
    mask: Any,
    policy: int | None,
) -> Loader:
    """The loader of ``tensor`` in tiles of ``shape`` for the CTA ``rank`` of ``sharing``."""
    tiles = cute.local_tile(tensor, shape, (None, None))
    target, source = cpasync.tma_partition(
        atom,
        rank,
        cute.make_layout(sharing),
        cute.group_modes(stages, 0, 2),
        cute.group_modes(tiles, 0, 2),
    )
    return Loader(atom, source, target, mask if sharing > 1 else None, policy)
