"""Tiles, buffers and clusters of an attention kernel, and the choice of them."""

from __future__ import annotations

from dataclasses import dataclass

from epicute.attention.spec import AttentionSpec
from epicute.errors import require

__all__ = ["AttentionSchedule", "choose"]

SMEM = 227 * 1024
MAILBOX = 2
"""Work items in shared memory: one in work, one waiting."""

RAW_STAGES = 2
"""Tiles of FP8 keys or values in shared memory, to be converted."""


@dataclass(frozen=True)
class AttentionSchedule:
    """How the kernel is cut.

    Attributes:
        tile_m: query rows of a work item: 64 for each consumer warpgroup.
        tile_n: keys of a step.
        stages: buffers of K, and of V.
        q_stages: buffers of Q; with two, the next item's is loaded while this one's is in use.
        cluster: 1, or 2 CTAs with heads of one KV head, which load each half of K and V for both.
        turns: the consumer warpgroups issue their matrix products in turn.
    """

    tile_m: int = 128
    tile_n: int = 128
    stages: int = 2
    q_stages: int = 2
    cluster: int = 1
    turns: bool = True

    def __post_init__(self) -> None:
        for name, allowed in (
            ("tile_m", (128, 192)),
            ("tile_n", (64, 96, 128, 160, 176)),
            ("stages", (1, 2, 3, 4)),
            ("q_stages", (1, 2)),
            ("cluster", (1, 2)),
        ):
            value = getattr(self, name)
            require(value in allowed, name, value, f"one of {allowed}", "choose another")

    @property
    def groups(self) -> int:
        """Consumer warpgroups."""
        return self.tile_m // 64

    @property
    def threads(self) -> int:
        """Threads of a CTA."""
        return 128 * (self.groups + 1)

    @property
    def registers(self) -> tuple[int, int]:
        """Registers per thread of the producer and of the consumers, after they have traded."""
        return (40, 232) if self.groups == 2 else (32, 160)

    def shared_memory(self, spec: AttentionSpec) -> int:
        """Bytes of shared memory of a CTA, the allocator's alignment included."""
        size = spec.dtype.itemsize
        q = self.q_stages * self.tile_m * spec.head_dim * size
        kv = 2 * self.stages * self.tile_n * spec.head_dim * size
        raw = 0
        if spec.kv_dtype != spec.dtype:
            raw = RAW_STAGES * self.tile_n * spec.head_dim
        return q + kv + raw + 2048

    def check(self, spec: AttentionSpec) -> None:
        """Refuse what does not fit."""
        used = self.shared_memory(spec)
        require(
            used <= SMEM,
            "schedule",
            f"{self}, {used} bytes of shared memory",
            f"at most {SMEM}",
            "use fewer stages or a smaller tile",
        )
        require(
            self.cluster == 1 or spec.group % 2 == 0,
            "cluster",
            self.cluster,
            f"1, as {spec.group} query heads share a KV head",
            "pair CTAs only where the group is even",
        )
        rows = self.tile_n // self.cluster
        require(
            spec.page is None or rows % spec.page == 0 or spec.page % rows == 0,
            "tile_n",
            self.tile_n,
            f"{rows} tokens of a CTA that are whole pages of {spec.page}, or divide one",
            "choose a power of two",
        )

    def __str__(self) -> str:
        shown = f"{self.tile_m}x{self.tile_n}, {self.stages} stages, {self.q_stages} of Q"
        return shown + (", pairs of CTAs" if self.cluster == 2 else "")


def choose(spec: AttentionSpec) -> AttentionSchedule:
    """The schedule for ``spec`` on Hopper."""
    cluster = 2 if spec.group % 2 == 0 else 1
    if spec.kv_dtype != spec.dtype:
        return AttentionSchedule(q_stages=1, cluster=cluster)
    if spec.head_dim > 128:
        return AttentionSchedule(tile_n=64, q_stages=1, cluster=cluster)
    return AttentionSchedule(cluster=cluster)
