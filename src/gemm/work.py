"""What a thread does with the lanes of a row beside arithmetic: maxima, and stores and rare work put off. Imports the
DSL.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from cutlass import Boolean

from epicute.epilogues.dsl import DSL_OPERATIONS, Lazy, force, largest_of_words
from epicute.gemm.staging import when

__all__ = ["Largest", "Work", "operands_of", "scalar"]


def scalar(operation: str, *arguments: Any) -> Any:
    """One register of an operation on registers, now."""
    return force(DSL_OPERATIONS[operation](*([a] for a in arguments))[0])


class Largest:
    """Maxima over lanes of one row, NaN where any lane is, each computed once."""

    def __init__(self) -> None:
        self._magnitudes: dict[tuple[int, ...], Any] = {}

    def of(self, lanes: list[Any]) -> Any:
        """The largest lane."""
        inner = operands_of(lanes, "abs")
        if inner is not None:
            return self.magnitude([x for (x,) in inner])
        found = force(lanes[0])
        for x in lanes[1:]:
            found = scalar("max", found, force(x))
        return found

    def magnitude(self, lanes: list[Any]) -> Any:
        """The largest magnitude; that of products with one factor is the factor's times one that is known."""
        key = tuple(map(id, lanes))
        if key not in self._magnitudes:
            found = self._scaled(lanes)
            self._magnitudes[key] = self._searched(lanes) if found is None else found
        return self._magnitudes[key]

    def _scaled(self, lanes: list[Any]) -> Any:
        """Rounding is monotonic, so that max |x r| = (max |x|) |r| to the bit."""
        factors = operands_of(lanes, "mul")
        if factors is None:
            return None
        for place in (0, 1):
            others = tuple(id(pair[1 - place]) for pair in factors)
            if len({id(pair[place]) for pair in factors}) == 1 and others in self._magnitudes:
                product = scalar("mul", self._magnitudes[others], force(factors[0][place]))
                return scalar("abs", product)
        return None

    def _searched(self, lanes: list[Any]) -> Any:
        words = largest_of_words(lanes)
        if words is not None:
            return words
        found = scalar("abs", force(lanes[0]))
        for x in lanes[1:]:
            found = scalar("max", found, scalar("abs", force(x)))
        return found


def operands_of(lanes: list[Any], operation: str) -> list[tuple[Any, ...]] | None:
    """What each lane applies ``operation`` to; None where one is something else."""
    if all(isinstance(x, Lazy) and x.operation == operation for x in lanes):
        return [x.arguments for x in lanes]
    return None


class Work:
    """Stores and rare work of a unit, kept until all of its rows are computed.

    A branch is a wall to the scheduler: with few of them, the rows' arithmetic overlaps.
    """

    def __init__(self, deferred: bool, ring: Any = None, m_tile: Any = None) -> None:
        self.ring = ring
        self._m_tile = m_tile
        self._panels: dict[tuple[str, int], tuple[dict[int, Any], Any]] = {}
        self._deferred = deferred
        self._stores: list[Callable[[], None]] = []
        self._watched: list[tuple[Any, Callable[[], None]]] = []

    def later(self, store: Callable[[], None]) -> None:
        """Do ``store`` at the end of the unit, or at once where units are too wide to wait."""
        if self._deferred:
            self._stores.append(store)
        else:
            store()

    def panel(self, name: str, slot: int, half: int, fragment: Any, column: Any) -> None:
        """Send a panel through the ring once both halves of it are there."""
        self._panels.setdefault((name, slot), ({}, column))[0][half] = fragment

    def watch(self, unusual: Any, body: Callable[[], None]) -> None:
        """Do ``body`` where any row of the unit is ``unusual``, or this one where units are too wide to wait."""
        if self._deferred:
            self._watched.append((unusual, body))
        else:
            when(unusual, body)

    def settle(self) -> None:
        """Do what was put off."""
        for store in self._stores:
            store()
        for (name, _), (halves, column) in self._panels.items():
            self.ring.send(name, halves, self._m_tile, column)
        unusual = Boolean(False)
        for condition, _ in self._watched:
            unusual = unusual | condition
        if self._watched:
            when(unusual, lambda: [body() for _, body in self._watched])
