"""Activations from memory to shared memory, in the order in which fragments read them. Imports the DSL."""

from __future__ import annotations

from typing import Any

import cutlass
import torch
from cutlass import Int32, Int64, cute

from epicute.decode.geometry import WARPS, vector_place
from epicute.decode.schedule import LINE, FewRowProblem, FewRowSchedule
from epicute.decode.sm90.ptx import prefetch_line, store_words
from epicute.epilogues.dsl import opaque
from epicute.layouts import split
from epicute.quant.dsl import WIDTH, Vector, load_vectors, multiply, pack, unpack

__all__ = ["Activations"]

THREADS = 32 * WARPS
BATCH = 8
"""Vectors of a thread under way at once: 32 KB an SM is what L2's latency asks for."""

FEWER = 4
"""The same where gains take registers too.

Tried and gone, as slower: `cp.async` in place of loads and stores, also of the next part of x while one is multiplied.
"""


class Activations:
    """Copies rows of x, zeros in place of those beyond M and of columns beyond K."""

    def __init__(self, problem: FewRowProblem, schedule: FewRowSchedule) -> None:
        self.problem, self.rows = problem, schedule.rows
        self.vectors = problem.record.depth // WIDTH
        self.beyond = problem.records.width // WIDTH - 1
        self.batch = FEWER if problem.gain else BATCH

    @cute.jit
    def copy(
        self,
        source: Int64,
        stride: Int64,
        gain: Int64,
        target: Int32,
        span: Any,
        live: Int32,
        thread: Int32,
    ) -> None:
        """Fill shared memory from ``target`` on.

        ``source``: of the first row; ``live``: rows that there are. ``span``: (first record along k, how many).
        """
        first, count = span
        total = count * (self.vectors * self.rows)
        for start in cutlass.range(thread, total, THREADS * self.batch, unroll=1):
            found = []
            for i in cutlass.range_constexpr(self.batch):
                at = start + i * THREADS
                row, vector = self._cell(at)
                inside = (row < live) & (at < total)
                words = Vector(
                    first * self.vectors + vector, self.problem.depth, self.beyond, inside
                ).load(source + Int64(row) * stride)
                found.append(words)
            # Anew, or registers hold where everything goes while it comes.
            again = opaque(start)
            for i in cutlass.range_constexpr(self.batch):
                at, words = again + i * THREADS, found[i]
                row, vector = self._cell(at)
                inside = at < total
                words = self._taken(words, self._gains(gain, first * self.vectors + vector))
                put(words, target + vector_place(row, vector, self.rows), inside)

    def _cell(self, at: Any) -> tuple[Any, Any]:
        """(row, vector) of a copy's ``at``-th vector: a warp takes 64 k of four rows, and stores them adjacent."""
        line, lane = split(at, 32)
        column, four = split(line, self.rows // 4)
        row, vector = split(lane, 8)
        return four * 4 + row, column * 8 + vector

    def _gains(self, gain: Any, vector: Any) -> list[Any] | None:
        """Those of a vector of x, where there are any."""
        if not self.problem.gain:
            return None
        # Threads beyond the copy have vectors beyond it, which gains have none of.
        depth, beyond = self.problem.depth, self.beyond
        some = Vector(cutlass.min(vector, beyond), depth, beyond)
        return load_vectors(gain, some, depth, beyond, torch.float32)

    def _taken(self, words: Any, gains: list[Any] | None) -> Any:
        """Eight values, times their gains where there are any, each product rounded once to x's dtype."""
        if gains is None:
            return words
        dtype = self.problem.dtype
        lanes = unpack(words, dtype)
        return pack([multiply(x, g) for x, g in zip(lanes, gains, strict=True)], dtype)

    @cute.jit
    def prefetch(self, gain: Int64, first: Int32, count: Int32, thread: Int32) -> None:
        """Have L2 fetch the gains of ``count`` records along k from the ``first`` on, which no kernel writes."""
        if cutlass.const_expr(self.problem.gain):
            size = self.problem.depth * 4
            for line in cutlass.range(thread, count * (self.vectors // 4), THREADS, unroll=1):
                at = cutlass.min(first * (self.vectors * 32) + line * LINE, size - 4)
                prefetch_line(gain + Int64(at))


@cute.jit
def put(words: cute.Tensor, place: Int32, inside: cutlass.Boolean) -> None:
    if inside:
        store_words(place, words)
