"""RMSNorm of selected rows, a block to a row. Imports the DSL.

    thread       vectors of the row in registers, two of a 64-column group at a time, as in ``embedding_kernel``
    quads        each group's sum of squares to shared memory; nothing where the partial sums are given
    all          the row's sum, left to right over the groups, each thread for itself: the same bits in all of them
    thread       (x * rstd) * (gain + offset), rounded once

Rows that do not exist are never read.
"""

from __future__ import annotations

from typing import Any

import cutlass
from cutlass import Boolean, Float32, Int32, Int64, cute
from cutlass import memory as cutlass_memory

from epicute.models.embedding import PADDING
from epicute.models.final_norm import ARGUMENTS, NormSpec
from epicute.quant.dsl import (
    Launched,
    Vector,
    add,
    add_count,
    again,
    begin,
    load_integer,
    load_vectors,
    multiply,
    pack,
    reciprocal,
    root,
    sum_partials,
    sum_squares,
    unpack,
)

__all__ = ["FinalNorm"]


class FinalNorm(Launched):
    """Device code of one ``NormSpec``; calling it traces the launch. ``arguments``: ``final_norm.ARGUMENTS``."""

    names = ARGUMENTS

    def __init__(self, spec: NormSpec) -> None:
        self.spec = spec

    @cute.jit
    def __call__(self, anchor: cute.Tensor, arguments: Any, stream: Any) -> None:
        """Launch. ``anchor``: see ``Launcher``."""
        self.kernel.set_name_prefix(f"epicute_final_norm_{self.spec.hidden}")
        self.kernel(arguments).launch(
            grid=(cutlass.max(Int32(self.given(arguments, "count")), 1), 1, 1),
            block=(32 * self.spec.warps, 1, 1),
            stream=stream,
            use_pdl=True,
        )

    @cute.kernel
    def kernel(self, arguments: Any) -> None:
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        shared: Any = None
        if cutlass.const_expr(not self.spec.partials):
            layout = cute.make_layout(self.spec.groups)
            shared = cutlass_memory.SmemAllocator().allocate_tensor(Float32, layout, 16)
        begin()
        if block < Int32(self.given(arguments, "count")):
            self._row(arguments, shared, block, thread)

    def _row(self, arguments: Any, shared: Any, block: Any, thread: Any) -> None:
        spec = self.spec
        at, live = self._source(arguments, block, thread)
        source = self.row(arguments, "x", at)
        first = thread // 32 * 8 + thread % 32 // 4
        groups = [first + i * 8 * spec.warps for i in range(spec.passes)]
        vectors, words = [], []
        for group in groups:
            for half in range(2):
                index = group * 8 + half * 4 + thread % 4
                vectors.append(Vector(index, spec.hidden, spec.reach))
                words.append(Vector(index, spec.hidden, spec.reach, live).load(source))
        if spec.partials:
            count = Int32(cutlass.select_(live, Int32(spec.groups), Int32(0)))
            total = sum_partials(self.row(arguments, "sumsq", at), count)
        else:
            for i, group in enumerate(groups):
                lanes = [x for w in words[2 * i : 2 * i + 2] for x in unpack(w, spec.dtype)]
                _put(shared, group, sum_squares(lanes), (thread % 4 == 0) & (group < spec.groups))
            cute.arch.sync_threads()
            total = _sum_shared(shared, spec.groups)
        mean = multiply(total, 1.0 / spec.hidden)
        rstd = reciprocal(root(add(mean, spec.eps)))
        mask = Int32(cutlass.select_(live, Int32(-1), Int32(0)))
        target = self.row(arguments, "out", block)
        for vector, found in zip(vectors, words, strict=True):
            gain = load_vectors(
                self.given(arguments, "gain"), vector, spec.hidden, spec.reach, spec.gain_dtype
            )
            if spec.offset:
                gain = [add(g, spec.offset) for g in gain]
            lanes = unpack(again(found), spec.dtype)
            lanes = [multiply(multiply(x, rstd), g) for x, g in zip(lanes, gain, strict=True)]
            packed = pack(lanes, spec.dtype)
            for i in range(4):
                packed[i] = packed[i] & mask
            vector.store(target, packed, 16)

    def _source(self, arguments: Any, block: Any, thread: Any) -> tuple[Any, Any]:
        """(row of x, whether there is one): row 0 where there is none."""
        spec = self.spec
        if spec.rows_dtype is None:
            return Int64(block), Boolean(True)
        size = spec.rows_dtype.itemsize
        row = load_integer(self.given(arguments, "rows") + Int64(block) * size, spec.rows_dtype)
        live = (row >= 0) & (row < self.given(arguments, "height"))
        stray = ((row < 0) | (row >= self.given(arguments, "height"))) & (row != PADDING)
        add_count(self.given(arguments, "strays"), Int64(1), stray & (thread == 0))
        return Int64(cutlass.select_(live, row, Int64(0))), live


@cute.jit
def _put(shared: cute.Tensor, index: Int32, value: Float32, condition: Boolean) -> None:
    if condition:
        shared[index] = value


@cute.jit
def _sum_shared(shared: cute.Tensor, count: cutlass.Constexpr) -> Float32:
    """Left to right."""
    total = Float32(0.0)
    for i in cutlass.range(count, unroll=8):
        total = add(total, shared[i])
    return total
