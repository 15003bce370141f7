"""What a multiplying warp of decode does with each sixteen tokens of its columns. Imports the DSL.

    S = K · Qᵀ        sixteen tokens × eight or sixteen columns, K from shared memory straight to fragments
    softmax           against a reference that follows a column's maximum only where that is far above it; then alone do
                      the lanes that share a column meet. Sums stay in their lanes
    Oᵀ += Vᵀ · Pᵀ     P turned from C to B operand by movmatrix

Accumulators of S and of Oᵀ have the same columns in a lane, 2t and 2t + 1 of each eight, so that rescaling is local.
A warp keeps references, sums and outputs of its own until the piece ends.

References are whole powers of two, so that rescaling is exact. Where tokens have scales, that of a token's value is
part of its exponent: e^x · scale is one exponential, which float16 holds whatever the scales are, as the reference
follows the largest; the sum of e^x takes the scale out again.

Of narrow rows two sixteens of tokens, one of each of two tiles, are in flight at once: neither waits for the other.
"""

from __future__ import annotations

from copy import copy
from typing import Any

import cutlass
from cutlass import Boolean, Float32, Int32, Int64, cute

from epicute.attention.decode_arguments import at
from epicute.attention.decode_fragments import row_token
from epicute.attention.decode_schedule import DecodeSchedule
from epicute.attention.decode_spec import DecodeSpec
from epicute.attention.sm90.decode_append import Appender
from epicute.attention.sm90.decode_codes import operands_of
from epicute.attention.sm90.decode_operands import Operands, query_place
from epicute.attention.sm90.decode_ptx import (
    load_float,
    multiply,
    shared_load,
    turn_matrix,
)
from epicute.attention.sm90.decode_references import UNSEEN, move_references
from epicute.attention.sm90.softmax import LOG2_E, exp2, fma, maximum
from epicute.decode.sm90.ptx import multiply_bytes
from epicute.epilogues.dsl import opaque, pack_words, pure_asm
from epicute.layouts import split

__all__ = ["MERGING", "DecodeSteps"]

MERGING = 1
"""Named barrier of the warps that multiply."""

LEAST_SCALE = 2.0**-96
"""Of a token's values: what is below is taken for it, so that float32 holds the sum where no token has a value, and a
token of none still counts in it beside others."""


class DecodeSteps:
    """A thread's fragments and the steps over them; one object for all pieces.

    Attributes:
        out: accumulators of Oᵀ, for each eight columns and sixteen channels four, and behind them four of the products
            with codes of zero, where codes have one (``Operands.value_zeros``).
        bias: of the lane's columns, what is added to logits: minus the reference, a whole number, plus ``shift``.
            ``UNSEEN`` where nothing was seen.
        limit: above which a biased logit of any column may move its reference; -inf until all have seen something.
        maximum, total: of the lane's columns, in powers of two; ``total`` of its own tokens alone. ``maximum`` is the
            reference, and there behind the last tile (``settle``).
        joint: tiles of which a sixteen each is multiplied at once.
        columns: of a warp, in eights. column: the warp's first one in its CTA.
        sharer: the warp's number among those that share tokens.
    """

    def __init__(
        self,
        spec: DecodeSpec,
        schedule: DecodeSchedule,
        shared: dict[str, Any],
        warp: Any,
        lane: Any,
        operands: Operands | None = None,
    ) -> None:
        self.spec, self.schedule, self.lane = spec, schedule, lane
        self.columns, self.sharers = schedule.column_tiles(spec), schedule.sharers(spec)
        self.sharer, group = warp % self.sharers, warp // self.sharers
        self.column = group * (8 * self.columns)
        self.block_columns = schedule.block_columns(spec)
        self.slabs = schedule.tile // 16 // self.sharers
        self.steps = spec.head_dim // 16
        if operands is None:
            operands = operands_of(spec, schedule, lane, shared.get("table"))
        self.operands: Operands = operands
        self.shared, self.warp = shared, warp
        self.joint = self.operands.joint if schedule.stages > self.operands.joint else 1
        self.tiles = self.steps + (self.operands.value_zeros is not None)
        self.out = cute.make_rmem_tensor(self.columns * self.tiles * 4, Float32)
        if not self.operands.shared:
            self.query = cute.make_rmem_tensor(self.columns * self.steps * 2, Int32)
        self.factor, self.maximum, self.total, self.correction, self.bias = (
            cute.make_rmem_tensor(2 * self.columns, Float32) for _ in range(5)
        )
        self.limit = cute.make_rmem_tensor(1, Float32)
        if spec.append:
            self.appender = Appender(spec, schedule, lane)
        # Whose rotation of queries others share, whatever multiplies them.
        self.preparer: Any = operands

    def open(self, item: Any, arguments: Any, turn: Any) -> None:
        """Say which piece it is, and where what the scribe makes of its queries and new rows is."""
        self.arguments = arguments
        DecodeSteps.read(self, item)
        self.length = item.length
        self.turn = turn
        if self.spec.packed:
            self.prepared = self.shared["queries"] + (turn & 1) * self.schedule.query_bytes(
                self.spec
            )

    def new_rows(self) -> tuple[Any, Any, Any]:
        """(where quantised new rows are, the barrier that tells when, its phase)."""
        # Anew each time, or registers hold it through the tiles.
        turn, desk = split(opaque(self.turn), 2)
        place = self.shared["append"] + desk * self.schedule.append_bytes(self.spec)
        return place, self.shared["rows"] + desk, turn & 1

    def begin(self, item: Any, arguments: Any, turn: Any) -> None:
        """Set out on the ``turn``-th piece: its queries, and nothing seen yet."""
        spec = self.spec
        DecodeSteps.open(self, item, arguments, turn)
        self.until = item.length - (spec.rows - 1 + spec.append)
        self.since, self.since_all = Int32(0), Int32(0)
        if spec.window is not None:
            self.since = cutlass.max(item.length - (spec.rows + spec.window - 1), 0)
            self.since_all = item.length - spec.window
        self._load_query()
        self.maximum.fill(-Float32.inf)
        self.bias.fill(UNSEEN)
        self.limit.fill(-Float32.inf)
        self.total.fill(0.0)
        self.out.fill(0.0)

    def read(self, item: Any) -> None:
        """Which head a piece is of."""
        blocks = self.schedule.blocks(self.spec)
        self.item = item
        self.kv_head, self.block = split(item.head, blocks)

    def _load_query(self) -> None:
        spec = self.spec
        if self.operands.shared:
            self._find_queries()
            return
        scale = self.scale()
        for j in range(self.columns):
            column = self.block * self.block_columns + self.column + 8 * j + self.lane // 4
            address = self.row_of_query(column)
            words, power = self.operands.query(address, Boolean(column < spec.columns))
            self._keep_query(j, words)
            for e in range(2):
                source = self.lane % 4 * 8 + 4 * e
                self.factor[2 * j + e] = cute.arch.shuffle_sync(power, source) * scale

    def scale(self) -> Any:
        """What logits are multiplied by, to be exponents of two."""
        spec = self.spec
        slope = LOG2_E if spec.softcap is None else 2.0 * LOG2_E / spec.softcap
        scale = Float32(spec.scale * slope)
        if spec.cache == "fp8":
            address = self.arguments[at("k_scale")] + Int64(self.kv_head) * 4
            scale = scale * load_float(address)
        return scale

    def row_of_query(self, column: Any) -> Any:
        """Address of the row of q in a column of the KV head."""
        spec, arguments = self.spec, self.arguments
        row, head = split(column, spec.group) if spec.rows > 1 else (0, column)
        offset = (
            Int64(self.item.request) * arguments[at("q_batch")]
            + Int64(row) * arguments[at("q_row")]
            + Int64(self.kv_head * spec.group + head) * arguments[at("q_head")]
        )
        return arguments[at("q")] + offset * 2

    def _keep_query(self, j: int, words: list[list[Any]]) -> None:
        for s, pair in enumerate(words):
            for h in range(2):
                self.query[(j * self.steps + s) * 2 + h] = pair[h]

    def _find_queries(self) -> None:
        """Where the lane's rotated queries are; lanes of columns that pad read others' rows, times 0."""
        live, pitch = self.schedule.live_columns(self.spec), self.schedule.query_pitch(self.spec)
        columns = [self.column + 8 * j + self.lane // 4 for j in range(self.columns)]
        self.queries = [self.prepared + cutlass.min(c, live - 1) * pitch for c in columns]

    def _levels(self) -> list[Any]:
        """Where the lane's columns have factors and origins: behind the lane's quarter of every row."""
        behind = query_place(self.lane % 4 * (self.spec.head_dim // 4), self.spec.head_dim)
        return [row + (behind + self.spec.head_dim // 2) for row in self.queries]

    def _factors(self) -> list[list[Any]]:
        """What products with keys are multiplied by, in the lane's two of each eight columns."""
        if self.operands.shared:
            return [shared_load(Float32, place, 2) for place in self._levels()]
        return [[self.factor[2 * j + e] for e in range(2)] for j in range(self.columns)]

    def _origins(self) -> list[list[Any]]:
        """Where sums of codes begin, likewise."""
        return [shared_load(Int32, place + 8, 2) for place in self._levels()]

    def _queries(self, step: int) -> list[list[list[Any]]]:
        """B operands of an even step and the next, of each eight columns."""
        steps = range(step, min(step + 2, self.steps))
        if not self.operands.shared:
            places = [[(j * self.steps + s) * 2 for j in range(self.columns)] for s in steps]
            return [[[self.query[p], self.query[p + 1]] for p in some] for some in places]
        found = [self.operands.prepared(row, step) for row in self.queries]
        return [[pairs[i] for pairs in found] for i in range(len(steps))]

    @cute.jit
    def take(self, stages, tile, left) -> None:
        """All of this warp's tokens of the ``joint`` tiles from ``tile`` on, which lie at ``stages``.

        ``left``: how many there are, at least one.
        """
        for i in cutlass.range(self.slabs, unroll=1):
            slab = i * self.sharers + self.sharer
            token = tile * self.schedule.tile + slab * 16
            if cutlass.const_expr(self.joint == 1):
                if (token < self.length) & (token + 16 > self.since):
                    if (token >= self.since_all) & (token + 16 <= self.until):
                        self._take(stages, slab, token, False)
                    else:
                        DecodeSteps.cut(self, stages[0], slab, token)
            else:
                DecodeSteps.both(self, stages, slab, token, left)

    @cute.jit
    def both(self, stages, slab, token, left) -> None:
        """Sixteen tokens from ``token`` on, and, if a second tile is left, sixteen a tile further."""
        further = token + self.schedule.tile
        if (left > 1) & (token >= self.since_all) & (further + 16 <= self.until):
            self._take(stages, slab, token, False)
        else:
            for i in cutlass.range(cutlass.select_(left > 1, Int32(2), Int32(1)), unroll=1):
                stage = Int32(cutlass.select_(i == 0, stages[0], stages[1]))
                mine = token + i * self.schedule.tile
                if (mine < self.length) & (mine + 16 > self.since):
                    DecodeSteps.cut(self, stage, slab, mine)

    @cute.jit
    def cut(self, stage, slab, token) -> None:
        """Sixteen tokens of which not every query sees all; new ones may be among them."""
        if cutlass.const_expr(self.spec.append):
            Appender.run(self.appender, self, stage, slab, token)
        self._take([stage], slab, token, True)

    def _take(self, stages: list[Any], slab: Any, token: Any, masked: bool) -> None:
        """A slab of each of ``stages``; the first one begins with ``token``."""
        parts = []
        for stage in stages:
            parts.append(copy(self.operands))
            parts[-1].begin(stage, slab)
        seen = self._place(token) if masked else None
        products = self._products(parts)
        factors = self._factors()
        scales = [self._value_scales(part, seen) for part in parts]
        logits = [
            self._logits(part, lanes, scale, factors)
            for part, lanes, scale in zip(parts, products, scales, strict=True)
        ]
        if masked:
            for lanes in logits:
                self._mask(lanes)
        logits = self._soften(logits, scales)
        for n, lanes in enumerate(logits):
            parts[n].fetch()
            self._weigh(parts[n], lanes, seen)

    def _products(self, parts: list[Operands]) -> list[list[list[Any]]]:
        """For each part and each eight columns four sums of products."""
        if self.operands.codes:
            return self._products_of_codes(parts)
        chains = 2 if self.columns * len(parts) == 1 else 1
        zeros = [Float32(0.0)] * 4
        sums = [[[zeros] * chains for _ in range(self.columns)] for _ in parts]
        for first in range(0, self.steps, 2):
            for s, queries in enumerate(self._queries(first), first):
                for part, mine in zip(parts, sums, strict=True):
                    a = part.key(s)
                    for one, b in zip(mine, queries, strict=True):
                        one[s % chains] = multiply(part.kind, a, b, one[s % chains])
        if chains == 1:
            return [[one[0] for one in mine] for mine in sums]
        return [[[x + y for x, y in zip(*one, strict=True)] for one in mine] for mine in sums]

    def _products_of_codes(self, parts: list[Any]) -> list[list[list[Any]]]:
        """The same of integers: a chain for each plane of the query."""
        zeros, half = [Int32(0)] * 4, self.steps // 4
        sums = [[[zeros, zeros] for _ in range(self.columns)] for _ in parts]
        for part, mine in zip(parts, sums, strict=True):
            for step in range(2 * half):
                if step == half:
                    self._join_codes(mine)
                # No step's operands are loaded before it, or registers do not hold them.
                cute.arch.sync_warp()
                a = part.key_codes(step)
                for one, row in zip(mine, self.queries, strict=True):
                    for plane, b in enumerate(self.operands.prepared(row, 2 * step)):
                        one[plane] = multiply_bytes(True, a, b, one[plane])
        return [
            [[(x * 256 + y).to(Float32) for x, y in zip(*one, strict=True)] for one in mine]
            for mine in sums
        ]

    def _join_codes(self, sums: list[list[Any]]) -> None:
        """Low nibbles' products in the unit of bytes' and with their origin."""
        for one, pair in zip(sums, self._origins(), strict=True):
            one[0] = [x * 16 for x in one[0]]
            one[1] = [x * 16 + y for x, y in zip(one[1], [*pair, *pair], strict=True)]

    def _value_scales(self, part: Operands, seen: list[Any] | None) -> list[Any] | None:
        """Logarithms and inverses of the scales of values in rows g and g + 8; None where there are none."""
        scales = part.value_scales()
        if scales is None:
            return None
        found = []
        for i, scale in enumerate(scales):
            if seen is not None:
                # What memory holds beside the tokens may be NaN.
                scale = Float32(cutlass.select_(seen[i], scale, Float32(1.0)))
            text = "max.NaN.f32 $0, $1, $2;"
            scale = pure_asm(text, "=f,f,f", Float32, scale, Float32(LEAST_SCALE))
            logarithm = pure_asm("lg2.approx.ftz.f32 $0, $1;", "=f,f", Float32, scale)
            inverse = pure_asm("rcp.approx.ftz.f32 $0, $1;", "=f,f", Float32, scale)
            found.append((logarithm, inverse))
        return found

    def _logits(
        self,
        part: Operands,
        products: list[list[Any]],
        values: list[Any] | None,
        factors: list[list[Any]],
    ) -> list[list[Any]]:
        """Biased logits, and of tokens with scales plus the logarithms of their values' scales, in powers of two."""
        found = []
        scales = part.key_scales()
        for j, sums in enumerate(products):
            lanes = []
            for i, x in enumerate(sums):
                factor, bias = factors[j][i % 2], self.bias[2 * j + i % 2]
                if scales is not None:
                    factor = factor * scales[i // 2]
                if values is not None:
                    bias = bias + values[i // 2][0]
                if self.spec.softcap is None:
                    lanes.append(fma(x, factor, bias))
                else:
                    lanes.append(self._capped(x * factor) + bias)
            found.append(lanes)
        return found

    def _capped(self, x: Any) -> Any:
        """softcap · tanh(x / softcap) of an x that comes as exponent of e^2x, in powers of two; without a cap x."""
        softcap = self.spec.softcap
        if softcap is None:
            return x
        inverse = pure_asm("rcp.approx.ftz.f32 $0, $1;", "=f,f", Float32, exp2(x) + 1.0)
        return fma(inverse, -2.0 * softcap * LOG2_E, softcap * LOG2_E)

    def _place(self, token: Any) -> list[Any]:
        """Where the lane is in a slab that is cut; whether any query sees the tokens in its rows g and g + 8."""
        # Anew for each slab that is cut, or registers hold places all the way.
        self.first, self.place = token, opaque(self.lane)
        row = row_token(self.spec.cache, self.place // 4)
        self.tokens = [token + (row + 8 * i) for i in range(2)]
        return [self._seen(mine) for mine in self.tokens]

    def _mask(self, logits: list[list[Any]]) -> None:
        """Take tokens out that a column does not see."""
        spec = self.spec
        for j, lanes in enumerate(logits):
            for e in range(2):
                limit = self.length
                if spec.rows > 1:
                    column = (
                        self.block * self.block_columns + self.column + 8 * j + self.place % 4 * 2
                    )
                    limit = limit - (spec.rows - 1) + (column + e) // spec.group
                for i, mine in enumerate(self.tokens):
                    seen = mine < limit
                    if spec.window is not None:
                        seen = seen & (mine >= limit - spec.window)
                    x = lanes[2 * i + e]
                    lanes[2 * i + e] = Float32(cutlass.select_(seen, x, -Float32.inf))

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

    def _soften(self, logits: list[Any], scales: list[Any]) -> list[list[list[Any]]]:
        """Exponentials of each part's biased logits, which are added up."""
        size = 4 * self.columns
        heights = cute.make_rmem_tensor(size * len(logits), Float32)
        above = Boolean(False)
        for c in range(2 * self.columns):
            best = None
            for n, lanes in enumerate(logits):
                for i in (c % 2, 2 + c % 2):
                    x = lanes[c // 2][i]
                    heights[n * size + c // 2 * 4 + i] = x
                    best = x if best is None else maximum(best, x)
            above = above | (best > self.limit[0])
        DecodeSteps._follow(self, heights, Boolean(above))
        found = []
        for n, values in enumerate(scales):
            powers = [exp2(heights[n * size + i]) for i in range(size)]
            for i, x in enumerate(powers):
                c = i // 4 * 2 + i % 2
                if values is None:
                    self.total[c] = self.total[c] + x
                else:
                    self.total[c] = fma(x, values[i % 4 // 2][1], self.total[c])
            found.append([powers[4 * j : 4 * j + 4] for j in range(self.columns)])
        return found

    @cute.jit
    def _follow(self, heights, above) -> None:
        """Move the references of columns that have a logit above their limit in any lane of the warp."""
        state = (self.bias, self.limit, self.total, self.correction)
        out, levels = self.out, (self.operands.shift, self.operands.slack)
        if cute.arch.vote_any_sync(above):
            move_references(heights, state, out, levels)

    def _weigh(self, part: Operands, logits: list[list[Any]], seen: list[Any] | None) -> None:
        """Add a part's values times exponentials."""
        kept = None
        if seen is not None and not self.spec.packed:
            kept = self._kept()
        columns = []
        for lanes in logits:
            columns.append([turn_matrix(w) for w in pack_words(lanes, part.value_kind)])
        for tile in range(self.tiles):
            last = tile == self.steps
            a = [Int32(x) for x in part.value_zeros or ()] * 2 if last else part.value(tile, kept)
            for j, b in enumerate(columns):
                place = (j * self.tiles + tile) * 4
                c = [self.out[place + i] for i in range(4)]
                for i, x in enumerate(multiply(part.value_kind, a, b, c)):
                    self.out[place + i] = x

    def _settle(self) -> None:
        """Maxima, and outputs of codes turned into such of values."""
        shift, operands = float(self.operands.shift), self.operands
        for c in range(2 * self.columns):
            nothing = self.bias[c] == Float32(UNSEEN)
            reference = shift - self.bias[c]
            self.maximum[c] = Float32(cutlass.select_(nothing, -Float32.inf, reference))
        if operands.value_zeros is None:
            return
        for j in range(self.columns):
            first = j * self.tiles * 4
            zeros = [self.out[first + self.steps * 4 + i] for i in range(4)]
            for low in range(first, first + 4 * self.steps, 8):
                for i in range(low, low + 4):
                    # Of bytes, 16h + l, and of their low nibbles: both in the same unit.
                    nibble = self.out[i] - zeros[i % 2]
                    byte = self.out[i + 4] - zeros[2 + i % 2]
                    self.out[i + 4] = (byte - nibble) * 2.0**20
                    self.out[i] = nibble * 2.0**24
