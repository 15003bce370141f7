"""Accesses of shared memory that nothing orders, found by vector clocks.

Every warp has a clock, and so has every mbarrier, for the copies that complete on it, and every warp's bulk stores.
Each byte of shared memory remembers who wrote it last and when, and when each has read it last. An access must come
behind all of those that it meets, in the order that barriers make.
"""

from __future__ import annotations

from typing import Any

import numpy as np

__all__ = ["Races"]

EXTRA = 96
"""Actors beside warps."""


class Races:
    """The clocks of a cluster."""

    def __init__(self, cluster: Any, warps: int, size: int) -> None:
        self.warps, self.count = warps, warps * 2 + EXTRA
        self.names = [f"CTA {w.cta.block[0]} warp {w.index}" for w in cluster.warps]
        self.names += [f"bulk stores of {name}" for name in self.names]
        self.clocks = np.zeros((self.count, 2, self.count), np.int32)
        self.clocks[np.arange(self.count), 0, np.arange(self.count)] = 1
        ctas = len(cluster.ctas)
        self.writer = np.zeros((ctas, size), np.int16)
        self.written = np.zeros((ctas, size), np.int32)
        self.read_at = np.zeros((ctas, self.count, size), np.int32)
        self._actors: dict[tuple[int, int], int] = {}

    # --- order

    def release(self, warp: Any, clock: np.ndarray | None) -> np.ndarray:
        """``clock`` with all that the warp has done; what the warp does from now on is behind it."""
        own = self.clocks[warp.id]
        found = own.copy() if clock is None else np.maximum(clock, own)
        own[0, warp.id] += 1
        return found

    def acquire(self, warp: Any, clock: np.ndarray | None) -> None:
        """What ``clock`` holds is before all that the warp does from now on."""
        if clock is not None:
            np.maximum(self.clocks[warp.id], clock, out=self.clocks[warp.id])

    def fork(self, warp: Any) -> np.ndarray:
        """The order as a copy that the warp begins sees it."""
        found = self.clocks[warp.id].copy()
        self.clocks[warp.id, 0, warp.id] += 1
        return found

    def fence(self, warp: Any) -> None:
        """What the warp knows to be written may be read by copies and WGMMAs."""
        own = self.clocks[warp.id]
        own[1] = own[0]
        own[0, warp.id] += 1

    def actor(self, cta: int, address: int) -> int:
        """The number of the copies that complete on an mbarrier."""
        key = (cta, address)
        if key not in self._actors:
            number = 2 * self.warps + len(self._actors)
            assert number < self.count, "too many mbarriers"
            self._actors[key] = number
            self.names.append(f"copies on mbarrier {address:#x} of rank {cta}")
        return self._actors[key]

    def tick(self, actor: int, clock: np.ndarray | None) -> np.ndarray:
        """``clock`` with all that a copying actor has done so far."""
        found = np.zeros((2, self.count), np.int32) if clock is None else clock.copy()
        found[0, actor] = self.epoch(actor)
        self.clocks[actor, 0, actor] += 1
        return found

    def ticket(self, actor: int) -> int:
        """The number of a bulk store that begins."""
        found = self.epoch(actor)
        self.clocks[actor, 0, actor] += 1
        return found

    def reached(self, warp: Any, actor: int, ticket: int) -> None:
        """A warp has waited for an actor's bulk stores up to a number."""
        own = self.clocks[warp.id, 0]
        own[actor] = max(own[actor], ticket)

    def epoch(self, actor: int) -> int:
        """An actor's own time."""
        return int(self.clocks[actor, 0, actor])

    # --- accesses: ``places`` are bytes of the shared memory of rank ``cta``

    def read(
        self,
        actor: int,
        clock: np.ndarray,
        cta: int,
        places: np.ndarray,
        fenced: bool = False,
        ticket: int | None = None,
    ) -> None:
        """An actor reads; ``fenced``: by the asynchronous proxy, which sees what warps write only behind a fence."""
        self.check(actor, clock, cta, places, fenced)
        self.read_at[cta, actor, places] = self.epoch(actor) if ticket is None else ticket

    def check(
        self, actor: int, clock: np.ndarray, cta: int, places: np.ndarray, fenced: bool = False
    ) -> None:
        """Whoever wrote the bytes must have done so before."""
        writer, written = self.writer[cta, places], self.written[cta, places]
        bad = (written > clock[0][writer]) & (writer != actor)
        what = "reads"
        if fenced and not bad.any():
            bad = (written > clock[1][writer]) & (writer < self.warps)
            what = "reads without a fence"
        if bad.any():
            i = np.unravel_index(int(np.argmax(bad)), bad.shape)
            where = int(np.broadcast_to(places, bad.shape)[i])
            raise AssertionError(
                f"race: {self.names[actor]} {what} byte {where:#x} of rank {cta}, which "
                f"{self.names[int(writer[i])]} writes"
            )

    def write(
        self,
        actor: int,
        clock: np.ndarray,
        cta: int,
        places: np.ndarray,
        fenced: bool = False,
    ) -> None:
        """An actor writes; ``fenced``: by the asynchronous proxy, which may pass what warps wrote without a fence."""
        places = np.unique(places)
        writer, written = self.writer[cta, places], self.written[cta, places]
        bad = (written > clock[0][writer]) & (writer != actor)
        what = "writes"
        if fenced and not bad.any():
            bad = (written > clock[1][writer]) & (writer < self.warps)
            what = "writes without a fence"
        if bad.any():
            where, other = int(places[np.argmax(bad)]), int(writer[np.argmax(bad)])
            raise AssertionError(
                f"race: {self.names[actor]} {what} byte {where:#x} of rank {cta}, which {self.names[other]} writes"
            )
        used = len(self.names)
        late = self.read_at[cta, :used, places] > clock[0][:used]
        late[:, actor] = False
        if late.any():
            i, by = np.unravel_index(int(np.argmax(late)), late.shape)
            raise AssertionError(
                f"race: {self.names[actor]} writes byte {int(places[i]):#x} of rank {cta}, which "
                f"{self.names[int(by)]} reads"
            )
        self.writer[cta, places] = actor
        self.written[cta, places] = self.epoch(actor)
