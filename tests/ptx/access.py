"""Where the lanes of a warp read and write: memory by its space and address, registers by their rows."""

from __future__ import annotations

from typing import Any

import numpy as np

from tests.ptx.arithmetic import LANES
from tests.ptx.machine import Warp
from tests.ptx.memory import Segment
from tests.ptx.program import PARAMS, SHARED

__all__ = ["EVERY", "LANE", "RANK", "lanes_of", "owner", "places", "reach", "store"]

RANK = 24
"""Bits of an address of a cluster's shared memory below the rank (plus one) of the CTA; 0 is one's own."""

LANE = np.arange(LANES)
EVERY = np.ones(LANES, bool)


def lanes_of(m: Any) -> Any:
    """Numbers of the lanes of a mask."""
    return range(LANES) if m is None else np.flatnonzero(m)


def store(w: Warp, target: tuple[int, int], value: np.ndarray, m: Any, lanes: Any) -> None:
    """Put values of active lanes (of some of them, by number) in a register."""
    row = w.lists[target[0]][target[1]]
    if lanes is not None:
        row[np.flatnonzero(EVERY if m is None else m)[lanes]] = value
    elif m is None:
        row[:] = value
    else:
        row[m] = value


def owner(w: Warp, address: int) -> tuple[Any, int]:
    """The CTA that an address of the cluster's shared memory is in, and the address there."""
    address &= SHARED - 1
    rank = address >> RANK
    cta = w.cta if rank == 0 else w.cta.cluster.ctas[rank - 1]
    assert not cta.over, f"shared memory of CTA {cta.block[0]}, which has ended"
    return cta, address & ((1 << RANK) - 1)


def reach(w: Warp, a: np.ndarray, size: int) -> None:
    """Refuse memory that the kernel in front may still be at work on."""
    if not w.behind:
        early = w.cta.cluster.memory.is_early(a, size)
        assert early.all(), (
            f"{size} bytes at {int(a[~early][0]):#x} are touched before griddepcontrol.wait"
        )


def places(
    w: Warp, space: str, a: np.ndarray, size: int, writes: bool, atomic: bool = False
) -> list[tuple[Any, Segment, np.ndarray]]:
    """Where ``size`` bytes from each address are: lanes (None: all), the memory, and the offsets in it."""
    if (a & ((size & -size) - 1)).any():
        raise AssertionError(
            f"an address that is no multiple of {size}: {int(a[(a & (size - 1)) != 0][0]):#x}"
        )
    if space == "generic":
        tags = a >> 56
        assert (tags == tags[0]).all(), "generic addresses of several kinds"
        space = {0: "global", 1: "shared", 2: "param"}[int(tags[0])]
        if space == "shared":
            a = a & (SHARED - 1)
    if space == "global":
        reach(w, a, size)
        return [
            (lanes, segment, (a if lanes is None else a[lanes]) - segment.base)
            for lanes, segment in w.cta.cluster.memory.find(a, size)
        ]
    if space == "param":
        return [(None, _parameter(w, a, size), a - PARAMS)]
    assert space == "shared", f"{space} memory is not known"
    ranks = a >> RANK
    found: list[tuple[Any, Segment, np.ndarray]] = []
    same = bool((ranks == ranks[0]).all())
    for rank in (int(ranks[0]),) if same else np.unique(ranks):
        lanes = None if same else np.flatnonzero(ranks == rank)
        cta, _ = owner(w, int(rank) << RANK)
        offset = (a if lanes is None else a[lanes]) & ((1 << RANK) - 1)
        assert cta.shared.has(offset, size), (
            f"shared memory at {int(offset.min()):#x}, beyond {cta.shared.end:#x}"
        )
        races = w.cta.cluster.races
        if races and not atomic:
            touch = races.write if writes else races.read
            touch(w.id, races.clocks[w.id], cta.rank, offset[:, None] + np.arange(size))
        found.append((lanes, cta.shared, offset))
    return found


def _parameter(w: Warp, a: np.ndarray, size: int) -> Segment:
    cluster = w.cta.cluster
    for address in np.unique(a):
        cluster.parameter(int(address), size)
    return Segment(cluster.parameters, 0, 0, len(cluster.parameters))
