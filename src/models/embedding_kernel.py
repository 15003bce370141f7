"""Token ids to rows of the embedding table, their partial sums of squares and their first FP8 copy. Imports the DSL.

    warp         eight adjacent groups of 64 columns of one row at a time; rows and groups are numbered together, and a
                 warp takes every (blocks * WARPS)-th of its kind
    quad         one group
    quad lane t  vectors t and t + 4 of the group, columns 8t … 8t + 7 of each half: the order of ``SumSquares``

    id → table row → 16 bytes twice → stored as they are
                                    → squares: left to right in a lane, then (0 + 1) + (2 + 3)
                                    → [times gain,] times 1 / scale, cast: 8 bytes of codes twice

Maxima and counts stay in registers until the end.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import cutlass
import torch
from cutlass import Boolean, Float32, Int32, Int64, cute

from epicute.models.embedding import ARGUMENTS, PADDING, WARPS, EmbeddingSpec
from epicute.quant.dsl import (
    Launched,
    Peak,
    Tally,
    Vector,
    add_count,
    begin,
    is_nan,
    is_saturated,
    load_float,
    load_integer,
    load_vectors,
    magnitude,
    multiply,
    pack_e4m3,
    raise_maximum,
    reciprocal,
    select,
    store_float,
    sum_squares,
    unpack,
)

__all__ = ["Embedding"]

NOTHING = -1.0


class Seen(NamedTuple):
    """What a thread has seen: largest magnitude, clipped values, NaNs, ids outside the table."""

    peak: Peak
    saturated: Tally
    nans: Tally
    strays: Tally


class Embedding(Launched):
    """Device code of one ``EmbeddingSpec``; calling it traces the launch. ``arguments``: ``embedding.ARGUMENTS``."""

    names = ARGUMENTS

    def __init__(self, spec: EmbeddingSpec) -> None:
        self.spec = spec

    @cute.jit
    def __call__(self, anchor: cute.Tensor, arguments: Any, stream: Any) -> None:
        """Launch. ``anchor``: see ``Launcher``."""
        self.kernel.set_name_prefix(f"epicute_embedding_{self.spec.hidden}")
        self.kernel(arguments).launch(
            grid=(Int32(self.given(arguments, "blocks")), 1, 1),
            block=(32 * WARPS, 1, 1),
            stream=stream,
            use_pdl=True,
        )

    @cute.kernel
    def kernel(self, arguments: Any) -> None:
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        begin()
        first = block * WARPS + cute.arch.make_warp_uniform(thread // 32)
        step, lane = Int32(self.given(arguments, "blocks")) * WARPS, thread % 32
        pieces = Int32(self.given(arguments, "rows")) * self.spec.octets
        if first < pieces:
            seen = Seen(Peak(), Tally(), Tally(), Tally())
            inverse: Any = None
            if cutlass.const_expr(self.spec.fp8):
                inverse = reciprocal(load_float(self.given(arguments, "scale")))
            for i in cutlass.range((pieces - first + step - 1) // step, unroll=1):
                self._piece(arguments, first + i * step, lane, inverse, seen)
            self._flush(arguments, lane, seen)

    def _piece(self, arguments: Any, piece: Any, lane: Any, inverse: Any, seen: Seen) -> None:
        spec = self.spec
        row = piece // spec.octets
        group = (piece - row * spec.octets) * 8 + lane // 4
        token = load_integer(
            self.given(arguments, "ids") + Int64(row) * spec.ids_dtype.itemsize, spec.ids_dtype
        )
        live = (token >= 0) & (token < self.given(arguments, "vocabulary"))
        stray = ((token < 0) | (token >= self.given(arguments, "vocabulary"))) & (token != PADDING)
        stray = stray & (group == 0) & (lane == 0)
        seen.strays.add(cutlass.select_(stray, Int32(1), Int32(0)))
        source = self.row(arguments, "table", cutlass.select_(live, token, Int64(0)))
        target = self.row(arguments, "x", row)
        halves = []
        for half in range(2):
            index = group * 8 + half * 4 + lane % 4
            vector = Vector(index, spec.hidden, spec.reach)
            words = Vector(index, spec.hidden, spec.reach, live).load(source)
            vector.store(target, words, 16)
            halves.append((vector, unpack(words, spec.dtype)))
        total = sum_squares([x for _, lanes in halves for x in lanes])
        partial = self.row(arguments, "sumsq", row) + Int64(group) * 4
        store_float(partial, total, (lane % 4 == 0) & (group < spec.groups))
        if spec.fp8:
            codes = self.row(arguments, "codes", row)
            for vector, lanes in halves:
                if spec.gain:
                    base = self.given(arguments, "gain")
                    gains = load_vectors(base, vector, spec.hidden, spec.reach, torch.float32)
                    lanes = [multiply(x, gain) for x, gain in zip(lanes, gains, strict=True)]
                self._emit(codes, vector, lanes, live, inverse, seen)

    def _emit(
        self, row: Any, vector: Vector, lanes: list[Any], live: Any, inverse: Any, seen: Seen
    ) -> None:
        """Codes of a vector, and what they say of the next scale."""
        scaled = [multiply(x, inverse) for x in lanes]
        vector.store(row, pack_e4m3(scaled), 8)
        found = Peak()
        for x, y in zip(lanes, scaled, strict=True):
            found.see(magnitude(x, NOTHING))
            seen.saturated.add(is_saturated(y))
            seen.nans.add(is_nan(x))
        # Zeros beyond the last column, and those of a row without a token, have not been seen.
        counts = live if vector.inside is True else Boolean(live) & vector.inside
        seen.peak.see(select(counts, found.register[0], Float32(NOTHING)))

    def _flush(self, arguments: Any, lane: Any, seen: Seen) -> None:
        counts = [(seen.strays, "strays")]
        if self.spec.fp8:
            counts += [(seen.saturated, "saturated"), (seen.nans, "nans")]
            bits = seen.peak.of_warp()
            raise_maximum(self.given(arguments, "amax"), bits, (lane == 0) & (bits >= 0))
        for tally, name in counts:
            total = tally.of_warp()
            add_count(self.given(arguments, name), Int64(total), (lane == 0) & (total > 0))
