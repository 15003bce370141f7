"""What a multiplying warp of decode does with each sixteen tokens of its columns. Imports the DSL.

    S = K · Qᵀ        sixteen tokens × eight or sixteen columns, K from shared memory straight to fragments
    softmax           a column's maximum over the lanes that share it; sums stay in their lanes
    Oᵀ += Vᵀ · Pᵀ     P turned from C to B operand by movmatrix

Accumulators of S and of Oᵀ have the same columns in a lane, 2t and 2t + 1 of each eight, so that rescaling is local.
A warp keeps a maximum, sums and outputs of its own until the piece ends.
"""

from __future__ import annotations

from typing import Any

import cutlass
from cutlass import Boolean, Float32, Int32, Int64, cute

from epicute.attention.decode_arguments import at
from epicute.attention.decode_fragments import row_token
from epicute.attention.decode_schedule import DecodeSchedule
from epicute.attention.decode_spec import DecodeSpec
from epicute.attention.sm90.decode_append import Appender
from epicute.attention.sm90.decode_operands import operands_of
from epicute.attention.sm90.decode_ptx import multiply, turn_matrix
from epicute.attention.sm90.softmax import LOG2_E, exp2, fma, maximum
from epicute.epilogues.dsl import opaque, pack_words, pure_asm

__all__ = ["DecodeSteps"]


class DecodeSteps:
    """A thread's fragments and the steps over them; one object for all pieces.

    Attributes:
        out: accumulators of Oᵀ, for each eight columns and sixteen channels four.
        maximum, total: of the lane's columns, in powers of two; ``total`` of its own tokens alone.
        columns: of a warp, in eights. column: the warp's first one in its CTA.
        sharer: the warp's number among those that share tokens.
    """

    def __init__(
        self,
        spec: DecodeSpec,
        schedule: DecodeSchedule,
        table: Any,
        warp: Any,
        lane: Any,
    ) -> None:
        self.spec, self.schedule, self.lane = spec, schedule, lane
        self.columns, self.sharers = schedule.column_tiles(spec), schedule.sharers(spec)
        self.sharer, group = warp % self.sharers, warp // self.sharers
        self.column = group * (8 * self.columns)
        self.block_columns = schedule.block_columns(spec)
        self.slabs = schedule.tile // 16 // self.sharers
        self.steps = spec.head_dim // 16
        self.operands = operands_of(spec, schedule, lane, table)
        self.out = cute.make_rmem_tensor(self.columns * self.steps * 4, Float32)
        self.query = cute.make_rmem_tensor(self.columns * self.steps * 2, Int32)
        self.factor, self.maximum, self.total, self.correction = (
            cute.make_rmem_tensor(2 * self.columns, Float32) for _ in range(4)
        )
        if spec.append:
            self.appender = Appender(spec, schedule, lane)

    def begin(self, item: Any, arguments: Any) -> None:
        """Set out on a piece: its queries, and nothing seen yet."""
        spec = self.spec
        blocks = self.schedule.blocks(spec)
        self.arguments, self.item = arguments, item
        self.kv_head, self.block = item.head // blocks, item.head % blocks
        self.length = item.length
        self.until = item.length - (spec.rows - 1 + spec.append)
        self.since, self.since_all = Int32(0), Int32(0)
        if spec.window is not None:
            self.since = cutlass.max(item.length - (spec.rows + spec.window - 1), 0)
            self.since_all = item.length - spec.window
        self._load_query()
        self.maximum.fill(-Float32.inf)
        self.total.fill(0.0)
        self.out.fill(0.0)

    def _load_query(self) -> None:
        spec, arguments = self.spec, self.arguments
        slope = LOG2_E if spec.softcap is None else 2.0 * LOG2_E / spec.softcap
        scale = Float32(spec.scale * slope)
        if spec.cache == "fp8":
            scale = scale * load_float(arguments[at("k_scale")] + Int64(self.kv_head) * 4)
        for j in range(self.columns):
            column = self.block * self.block_columns + self.column + 8 * j + self.lane // 4
            row, head = column // spec.group, column % spec.group
            offset = (
                Int64(self.item.request) * arguments[at("q_batch")]
                + Int64(row) * arguments[at("q_row")]
                + Int64(self.kv_head * spec.group + head) * arguments[at("q_head")]
            )
            words, power = self.operands.query(
                arguments[at("q")] + offset * 2, Boolean(column < spec.columns)
            )
            for s, pair in enumerate(words):
                for h in range(2):
                    self.query[(j * self.steps + s) * 2 + h] = pair[h]
            for e in range(2):
                source = self.lane % 4 * 8 + 4 * e
                self.factor[2 * j + e] = cute.arch.shuffle_sync(power, source) * scale

    @cute.jit
    def tile(self, stage, tile) -> None:
        """All of this warp's tokens of a tile, which lies at ``stage``."""
        for i in cutlass.range(self.slabs, unroll=1):
            slab = i * self.sharers + self.sharer
            DecodeSteps.slab(self, stage, slab, tile * self.schedule.tile + slab * 16)

    @cute.jit
    def slab(self, stage, slab, token) -> None:
        """Sixteen tokens from ``token`` on, unless no query sees any."""
        if (token < self.length) & (token + 16 > self.since):
            if (token >= self.since_all) & (token + 16 <= self.until):
                DecodeSteps._slab(self, stage, slab, token, False)
            else:
                if cutlass.const_expr(self.spec.append):
                    Appender.run(self.appender, self, stage, slab, token)
                DecodeSteps._slab(self, stage, slab, token, True)

    @cute.jit
    def _slab(self, stage, slab, token, masked: cutlass.Constexpr) -> None:
        operands = self.operands
        operands.begin(stage, slab)
        logits = self._logits()
        seen = None
        if cutlass.const_expr(masked):
            seen = self._mask(logits, token)
        self._soften(logits)
        DecodeSteps._rescale(self)
        self._weigh(logits, seen)

    def _logits(self) -> list[list[Any]]:
        """For each eight columns four logits, in powers of two."""
        found = []
        chains = 2 if self.columns == 1 else 1
        sums = [[[Float32(0.0)] * 4 for _ in range(chains)] for _ in range(self.columns)]
        for s in range(self.steps):
            a = self.operands.key(s)
            for j in range(self.columns):
                place = (j * self.steps + s) * 2
                b = [self.query[place], self.query[place + 1]]
                sums[j][s % chains] = multiply(self.operands.kind, a, b, sums[j][s % chains])
        scales = self.operands.key_scales()
        for j in range(self.columns):
            lanes = sums[j][0]
            if chains == 2:
                lanes = [x + y for x, y in zip(*sums[j], strict=True)]
            for i in range(4):
                factor = self.factor[2 * j + i % 2]
                if scales is not None:
                    factor = factor * scales[i // 2]
                lanes[i] = self._capped(lanes[i] * factor)
            found.append(lanes)
        return found

    def _capped(self, x: Any) -> Any:
        """softcap · tanh(x / softcap) of an x that comes as exponent of e^2x, in powers of two; without a cap x."""
        softcap = self.spec.softcap
        if softcap is None:
            return x
        inverse = pure_asm("rcp.approx.ftz.f32 $0, $1;", "=f,f", Float32, exp2(x) + 1.0)
        return fma(inverse, -2.0 * softcap * LOG2_E, softcap * LOG2_E)

    def _mask(self, logits: list[list[Any]], token: Any) -> list[Any]:
        """Take tokens out that a column does not see; whether any column sees the tokens in rows g and g + 8."""
        # Anew for each slab that is cut, or registers hold places all the way.
        spec, self.place = self.spec, opaque(self.lane)
        tokens = [token + (row_token(spec.cache, self.place // 4) + 8 * i) for i in range(2)]
        for j, lanes in enumerate(logits):
            for e in range(2):
                limit = self.length
                if spec.rows > 1:
                    column = (
                        self.block * self.block_columns + self.column + 8 * j + self.place % 4 * 2
                    )
                    limit = limit - (spec.rows - 1) + (column + e) // spec.group
                for i, mine in enumerate(tokens):
                    seen = mine < limit
                    if spec.window is not None:
                        seen = seen & (mine >= limit - spec.window)
                    x = lanes[2 * i + e]
                    lanes[2 * i + e] = Float32(cutlass.select_(seen, x, -Float32.inf))
        self.first = token
        return [self._seen(mine) for mine in tokens]

    def _seen(self, token: Any) -> Any:
        """Whether any query sees a token."""
        seen = token < self.length
        return seen & (token >= self.since) if self.spec.window is not None else seen

    def _kept(self) -> list[Any]:
        """Masks of the words that hold values of tokens 2t and 2t + 1, and eight behind."""
        found = []
        for first in (0, 8):
            token = self.first + (self.place % 4 * 2 + first)
            low = Int32(cutlass.select_(self._seen(token), Int32(0xFFFF), Int32(0)))
            high = Int32(cutlass.select_(self._seen(token + 1), Int32(-65536), Int32(0)))
            found.append(low | high)
        return found

    def _soften(self, logits: list[list[Any]]) -> None:
        """Turn logits into exponentials, in place; ``correction`` is what the sums before are multiplied by."""
        for j, lanes in enumerate(logits):
            for e in range(2):
                c = 2 * j + e
                best = maximum(lanes[e], lanes[2 + e])
                for distance in (4, 8, 16):
                    best = maximum(best, cute.arch.shuffle_sync_bfly(best, distance))
                old = self.maximum[c]
                best = maximum(best, old)
                # -inf - -inf is NaN; where nothing was seen, any other reference will do.
                reference = Float32(cutlass.select_(best == -Float32.inf, Float32(0.0), best))
                self.correction[c] = exp2(old - reference)
                self.maximum[c] = best
                for i in (e, 2 + e):
                    lanes[i] = exp2(lanes[i] - reference + float(self.operands.shift))
                both = lanes[e] + lanes[2 + e]
                self.total[c] = fma(self.total[c], self.correction[c], both)

    @cute.jit
    def _rescale(self) -> None:
        """Multiply the output before by ``correction``, where any column of the warp has one other than 1."""
        out, correction = self.out, self.correction
        moved = correction[0] != 1.0
        for c in cutlass.range_constexpr(1, 2 * self.columns):
            moved = moved | (correction[c] != 1.0)
        if cute.arch.vote_any_sync(moved):
            scale_columns(out, correction)

    def _weigh(self, logits: list[list[Any]], seen: list[Any] | None) -> None:
        """Add values times exponentials."""
        operands = self.operands
        scales = operands.value_scales()
        kept = None
        if seen is not None:
            if scales is not None:
                # What memory holds beside the tokens may be NaN.
                scales = [
                    Float32(cutlass.select_(s, x, Float32(0.0)))
                    for s, x in zip(seen, scales, strict=True)
                ]
            else:
                kept = self._kept()
        columns = []
        for lanes in logits:
            if scales is not None:
                lanes = [x * scales[i // 2] for i, x in enumerate(lanes)]
            words = pack_words(lanes, operands.value_kind)
            columns.append([turn_matrix(w) for w in words])
        for tile in range(self.steps):
            a = operands.value(tile, kept)
            for j, b in enumerate(columns):
                place = (j * self.steps + tile) * 4
                c = [self.out[place + i] for i in range(4)]
                for i, x in enumerate(multiply(operands.value_kind, a, b, c)):
                    self.out[place + i] = x


def scale_columns(out: Any, correction: Any) -> None:
    """Multiply accumulators by the factor of their column."""
    share = cute.size(out) // (cute.size(correction) // 2)
    for i in range(cute.size(out)):
        out[i] = out[i] * correction[i // share * 2 + i % 2]


def load_float(address: Any) -> Any:
    """One float32 of global memory."""
    pointer = cute.make_ptr(Float32, address, cute.AddressSpace.gmem, assumed_align=4)
    return cute.make_tensor(pointer, cute.make_layout(1))[0]
