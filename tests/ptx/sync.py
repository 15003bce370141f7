"""Barriers of a CTA: named ones, and mbarriers in shared memory."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

__all__ = ["MBarrier", "Named"]


@dataclass
class Named:
    """A named barrier: warps arrive until ``count`` threads have, then all that wait go on."""

    count: int = 0
    arrived: int = 0
    waiting: list[Any] = field(default_factory=list)
    clock: Any = None
    behind: bool = False


@dataclass
class MBarrier:
    """An mbarrier: a phase ends when ``pending`` arrivals and ``bytes`` of copies are none.

    ``maker``, ``made``: the warp that initialised it, and when; ``fenced``: whether it has said so to the others;
    ``shown``: whether a barrier of the cluster has passed behind that. ``behind``, ``over``: whether any that arrive in
    this phase, or arrived in the one before, have waited for the kernel in front.
    """

    count: int
    pending: int = 0
    bytes: int = 0
    phase: int = 0
    name: str = ""
    clock: Any = None
    done: Any = None
    maker: int = -1
    made: int = 0
    fenced: bool = False
    shown: bool = False
    behind: bool = False
    over: bool = False

    def __post_init__(self) -> None:
        self.pending = self.count

    def arrive(self, count: int = 1) -> int:
        """Arrive ``count`` times; the phase's parity before."""
        assert count <= self.pending, (
            f"{self.name}: {count} arrivals where {self.pending} of {self.count} are awaited"
        )
        before = self.phase
        self.pending -= count
        self._turn()
        return before

    def expect(self, size: int) -> None:
        """Await ``size`` more bytes in this phase."""
        self.bytes += size
        assert self.bytes < 1 << 20, f"{self.name}: more than 2^20 - 1 bytes are awaited"

    def complete(self, size: int) -> None:
        """``size`` bytes have come."""
        self.bytes -= size
        assert self.bytes > -(1 << 20), f"{self.name}: more than 2^20 - 1 bytes that nobody awaits"
        self._turn()

    def _turn(self) -> None:
        if self.pending == 0 and self.bytes == 0:
            self.phase ^= 1
            self.pending = self.count
            self.done, self.clock = self.clock, None
            self.over, self.behind = self.behind, False

    def passed(self, parity: int) -> bool:
        """Whether the phase of that parity is over."""
        return self.phase != parity
