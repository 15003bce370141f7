"""A warp's share of a record: fragments from shared memory, products, scales once a group. Imports the DSL."""

from __future__ import annotations

from typing import Any

import cutlass
import torch
from cutlass import Float32, Int32, cute

from epicute.decode.geometry import (
    BAND,
    OPERAND_ROW,
    partial_place,
    segment_blocks,
    segments_of,
    share_of,
    span_of,
    vector_place,
    warp_rows,
)
from epicute.decode.schedule import FewRowProblem, FewRowSchedule, Shared
from epicute.decode.sm90.convert import Convert
from epicute.decode.sm90.ptx import (
    arrive,
    fma,
    load_byte,
    load_half,
    load_matrices,
    load_words,
    mma,
    store_float,
)
from epicute.layouts import BLOCK, TILE_ROWS
from epicute.quant.int4 import MIDDLE

__all__ = ["Multiplier"]

EIGHT = 8 * OPERAND_ROW
"""Bytes of eight rows of x of a block."""

WIDEST = 4
"""Eights of rows of x that are multiplied at once: more take registers, fewer convert each code once more."""

NATIVE = {torch.float16: cutlass.Float16, torch.bfloat16: cutlass.BFloat16}


class Multiplier:
    """A consumer thread's sums of a band, and what it does with each record.

    Attributes:
        sums: (band, row tile, eight rows of x, register) float32, where the MMA leaves them.
        which: the band whose sums are added to, or sent.
    """

    def __init__(
        self,
        problem: FewRowProblem,
        schedule: FewRowSchedule,
        scale_dtype: torch.dtype | None,
        warp: Any,
        lane: Any,
    ) -> None:
        self.problem, self.schedule, self.record = problem, schedule, problem.record
        self.shared = Shared(problem, schedule)
        self.scale_dtype = scale_dtype
        self.convert = Convert(self.record.bits, problem.dtype, schedule.conversion)
        rows = warp_rows(self.record.bits, schedule.mma)
        self.row_tiles, self.columns = rows // TILE_ROWS, schedule.rows // 8
        self.shares, parts = self.shared.shares, BAND // rows
        self.part, self.team = warp % parts, warp // parts
        self.share = self.team if self.shares > 1 else 0
        self.lane = lane
        self.row = self.part * rows + lane // 4
        self.count = self.row_tiles * self.columns * 4
        self.sums = cute.make_rmem_tensor(self.held() * self.count, Float32)
        self.which = 0

    def held(self) -> int:
        """Bands whose sums are held together."""
        return self.schedule.wide

    def _register(self, tile: int, column: int, i: int) -> int:
        return self.which * self.count + (tile * self.columns + column) * 4 + i

    def clear(self) -> None:
        """Begin all bands that are held together."""
        self.sums.fill(0.0)

    @cute.jit
    def run(
        self,
        record: Int32,
        x: Int32,
        which: cutlass.Constexpr = 0,
        piece: cutlass.Constexpr = 0,
    ) -> None:
        """Multiply the warp's share of the record at ``record`` with the activations at ``x``.

        ``which``: of the bands that are held together, the record's. ``piece``: of the record; here all is one.
        """
        self.which = which
        segments = segments_of(self.record)
        if cutlass.const_expr(segments % self.shares == 0):
            count = segments // self.shares
            for i in cutlass.range_constexpr(count):
                self._segment(record, x, self.share * count + i)
        else:
            first, end = share_of(self.share, self.shares, segments)
            for i in cutlass.range(first, end, unroll=1):
                self._segment(record, x, i)

    def _segment(self, record: Any, x: Any, segment: Any) -> None:
        blocks = segment_blocks(self.record)
        first = segment * blocks
        tile = self.part * self.row_tiles
        codes = Int32(record) + Int32(self.record.load_offset(first, tile, 0, self.lane))
        vectors = self._vectors(x, first)
        span = span_of(self.record)
        per_group = span // TILE_ROWS
        for group in range(blocks * BLOCK // span):
            number = index = segment * (blocks * BLOCK // span) + group
            if self.record.group == self.record.depth:
                index = index * 0
            # Sums of the activations are one more set of sums.
            wide = WIDEST // 2 if self.columns > WIDEST and self.convert.summed else WIDEST
            for start in range(0, self.columns, wide):
                if self.columns > wide:
                    # A wall to loads, which else are all moved up here, and then do not fit the registers.
                    cute.arch.sync_warp()
                columns = range(start, min(start + wide, self.columns))
                steps = range(group * per_group, (group + 1) * per_group)
                self._group((record, codes, vectors, x), number, index, steps, columns)

    def _group(
        self, at: tuple[Any, ...], number: Any, index: Any, steps: range, columns: range
    ) -> None:
        """The steps of one span for some of the rows of x, and their scales.

        Args:
            at: the record, the lane's first codes and its first activations of the segment, the record's activations.
            number: of the span in the record. index: of its scale.
        """
        record, codes, vectors, _ = at
        zeros = self._zeros(record, index)
        nothing = [Float32(0.0)] * 4
        scaled = self.record.group > 0
        places = [(t, j) for t in range(self.row_tiles) for j in columns]
        found = {p: list(nothing) if scaled else self._held(*p) for p in places}
        ones = {j: list(nothing) for j in columns}
        negatives = self._negatives(zeros)
        loads: list[Any] = []
        halves: dict[int, Any] = {}
        for at_step in steps:
            block, step = divmod(at_step, 4)
            if step == 0 or at_step == steps[0]:
                loads = [self._loads(codes, block, t) for t in range(self.row_tiles)]
            if step % 2 == 0:
                halves = {j: self._half(vectors, block, j, step // 2) for j in columns}
            b = {j: half[2 * (step % 2) : 2 * (step % 2) + 2] for j, half in halves.items()}
            self._step(found, loads, b, step, negatives)
            if self.convert.summed:
                for j in columns:
                    ones[j] = mma(self.problem.dtype, self.convert.ones(), b[j], ones[j])
        self._finish(self._scales(record, index), found, ones, zeros)

    def _step(self, found: Any, loads: Any, b: Any, step: int, negatives: Any) -> None:
        dtype = self.problem.dtype
        for t in range(self.row_tiles):
            minus: Any = None if negatives is None else negatives[t]
            a = self.convert.fragment(loads[t], step, minus)
            for j, pair in b.items():
                found[t, j] = mma(dtype, a, pair, found[t, j])
                if self.convert.biased:
                    found[t, j] = mma(dtype, self.convert.bias(minus), pair, found[t, j])

    def _held(self, tile: int, column: int) -> list[Any]:
        return [self.sums[self._register(tile, column, r)] for r in range(4)]

    def _loads(self, codes: Any, block: int, tile: int) -> list[list[Any]]:
        """All loads of a lane for one row tile of a block."""
        return [
            load_words(codes + self.record.load_offset(block, tile, load, 0))
            for load in range(self.record.loads)
        ]

    def _vectors(self, x: Any, first: Any) -> list[Any]:
        """Where a lane's rows of `ldmatrix` are, of each half of block ``first``."""
        place = vector_place(self.lane % 8, self.lane // 8, self.schedule.rows)
        start = Int32(x) + Int32(first * (self.schedule.rows * OPERAND_ROW) + place)
        return [start, start ^ 64]

    def _half(self, vectors: list[Any], block: int, column: int, half: int) -> list[Any]:
        """Two steps' words of eight rows of x."""
        return load_matrices(vectors[half] + (block * self.columns + column) * EIGHT)

    def _rows(self) -> list[tuple[int, int, Any]]:
        """(row tile, row of it, row of the record) of each of a lane's rows."""
        return [
            (t, half, self.row + (t * TILE_ROWS + half * 8))
            for t in range(self.row_tiles)
            for half in range(2)
        ]

    def _zeros(self, record: Any, index: Any) -> Any:
        """Zero points of the group, by row tile and row."""
        if not self.record.zeros:
            return {(t, half): MIDDLE for t, half, _ in self._rows()}
        return {
            (t, half): load_byte(Int32(record) + Int32(self.record.zero_offset(row, index)))
            for t, half, row in self._rows()
        }

    def _negatives(self, zeros: Any) -> Any:
        if not self.convert.integer or self.convert.summed:
            return None
        return [
            [self.convert.negative(half, zeros[t, half]) for half in range(2)]
            for t in range(self.row_tiles)
        ]

    def _scales(self, record: Any, index: Any) -> dict[tuple[int, int], Any]:
        """Scales of the group, by row tile and row; none without groups."""
        if self.record.group == 0:
            return {}
        assert self.scale_dtype is not None
        native, found = NATIVE[self.scale_dtype], {}
        for t, half, row in self._rows():
            at = Int32(record) + Int32(self.record.scale_offset(row, index))
            found[t, half] = load_half(native, at)
            if half and self.convert.odd_factor() != 1.0:
                found[t, half] = found[t, half] * Float32(self.convert.odd_factor())
        return found

    def _finish(self, scales: Any, found: Any, ones: Any, zeros: Any) -> None:
        """Scale a group's sums and add them to the band's. ``ones``: by eight rows of x, what offsets multiply."""
        if not scales:
            for (t, j), sums in found.items():
                for r in range(4):
                    self.sums[self._register(t, j, r)] = sums[r]
            return
        for (t, half), scale in scales.items():
            offset = -self.convert.offset(half, zeros[t, half]) if self.convert.summed else None
            for j in ones:
                for e in range(2):
                    r = 2 * half + e
                    value = found[t, j][r]
                    if offset is not None:
                        value = fma(offset, ones[j][e], value)
                    at = self._register(t, j, r)
                    self.sums[at] = fma(scale, value, self.sums[at])

    def send(self, base: Any, band: Any, which: int = 0) -> None:
        """Leave a band's sums in shared memory, where they are added up.

        ``base``: the start of shared memory, or what the buffer of sums is behind its first. ``band``: of the tile.
        """
        self.which = which
        start = Int32(base) + self.shared.sums
        for j in range(self.columns):
            for e in range(2):
                m = 8 * j + 2 * (self.lane % 4) + e
                for t, half, row in self._rows():
                    feature = band * BAND + row
                    at = partial_place(
                        self.share, m, feature, self.schedule.rows, self.problem.tile
                    )
                    value = self.sums[self._register(t, j, 2 * half + e)]
                    if self.convert.last_factor() != 1.0:
                        value = value * Float32(self.convert.last_factor())
                    store_float(start + Int32(at) * 4, value)

    def announce(self, barrier: Any) -> None:
        """Tell whoever adds a tile's sums up that this warp's are there."""
        cute.arch.sync_warp()
        arrive(barrier, Int32(self.lane < self.schedule.arriving_lanes))
