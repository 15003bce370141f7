"""Activations from memory to shared memory, in the order in which fragments read them. Imports the DSL."""

from __future__ import annotations

from typing import Any

import cutlass
import torch
from cutlass import Int32, Int64, cute

from epicute.decode.geometry import WARPS, vector_place
from epicute.decode.schedule import FewRowProblem, FewRowSchedule
from epicute.decode.sm90.ptx import store_words
from epicute.quant.dsl import WIDTH, Vector, load_vectors, multiply, pack, unpack

__all__ = ["Activations"]

THREADS = 32 * WARPS
BATCH = 4
"""Vectors of a thread under way at once."""


class Activations:
    """Copies rows of x, zeros in place of those beyond M and of columns beyond K."""

    def __init__(self, problem: FewRowProblem, schedule: FewRowSchedule) -> None:
        self.problem, self.rows = problem, schedule.rows
        self.vectors = problem.record.depth // WIDTH
        self.run = problem.record.run
        self.beyond = problem.records.width // WIDTH - 1

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
        width = count * self.vectors
        total = width * self.rows
        for start in cutlass.range(thread, total, THREADS * BATCH, unroll=1):
            found = []
            for i in cutlass.range_constexpr(BATCH):
                at = start + i * THREADS
                row = at // width
                vector = at - row * width
                inside = (row < live) & (at < total)
                words = Vector(
                    first * self.vectors + vector, self.problem.depth, self.beyond, inside
                ).load(source + Int64(row) * stride)
                found.append((row, vector, words))
            for i in cutlass.range_constexpr(BATCH):
                row, vector, words = found[i]
                if cutlass.const_expr(self.problem.gain):
                    words = self._scaled(words, gain, first * self.vectors + vector)
                put(words, target, vector_place(row, vector, self.rows, self.run), row < self.rows)

    def _scaled(self, words: Any, gain: Any, vector: Any) -> Any:
        """Eight values times their gains, each product rounded once to x's dtype."""
        dtype, depth = self.problem.dtype, self.problem.depth
        factors = load_vectors(
            gain, Vector(vector, depth, self.beyond), depth, self.beyond, torch.float32
        )
        lanes = unpack(words, dtype)
        return pack([multiply(x, g) for x, g in zip(lanes, factors, strict=True)], dtype)


@cute.jit
def put(words: cute.Tensor, target: Int32, vector: Int32, inside: cutlass.Boolean) -> None:
    if inside:
        store_words(target + vector * 16, words)
