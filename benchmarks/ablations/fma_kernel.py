"""Attention of few query rows by FMA, without tensor cores (FuTransformer 4.6). Imports the DSL.

    lanes        eight channels of a token in each: half a warp has a token of heads of 128, a quarter one of 64
    scores       eight FMA for each query row, then a sum over the token's lanes by shuffles
    softmax      each group of lanes has a maximum, sums and outputs of its own
    outputs      eight FMA for each query row
    end          groups of a warp meet by shuffles, warps in shared memory as in the library's kernel

Work list, ring, new rows and the merging of partial results are the library's.
"""

from __future__ import annotations

from typing import Any

import cutlass
import torch
from cutlass import Boolean, Float32, Int32, Int64, cute

from epicute.attention.decode_arguments import at
from epicute.attention.decode_fragments import TileLayout
from epicute.attention.sm90.decode_kernel import HopperDecode
from epicute.attention.sm90.decode_merge import Merge, _store_global, _store_pair
from epicute.attention.sm90.decode_operands import load_words
from epicute.attention.sm90.decode_ptx import (
    fma_pair,
    mask_or,
    shared_load,
    shared_store,
    shift_right,
)
from epicute.attention.sm90.decode_steps import DecodeSteps
from epicute.attention.sm90.softmax import LOG2_E, exp2, fma, maximum
from epicute.kv.append_row import butterfly, unpack_halves
from epicute.layouts.kv_int4 import Int4Record

__all__ = ["HopperFma"]

WIDTH = 8
"""Channels of a lane."""

SLAB = 16
"""Tokens of a warp at a time."""


class Rows:
    """Cached rows as float32: of a lane's token the lane's channels.

    ``turn``: of the slab's, ``tokens`` tokens each.
    """

    def __init__(self, spec: Any, schedule: Any, lane: Any) -> None:
        self.spec, self.schedule = spec, schedule
        self.lanes = spec.head_dim // WIDTH
        self.tokens = 32 // self.lanes
        self.part, self.row = lane % self.lanes, lane // self.lanes

    def begin(self, stage: Any, slab: Any) -> None:
        """Set out on a slab of the tile at ``stage``."""
        raise NotImplementedError

    def key(self, turn: int) -> tuple[list[Any], Any]:
        """(channels, scale or None) of keys."""
        raise NotImplementedError

    def value(self, turn: int, seen: Any) -> tuple[list[Any], Any]:
        """The same of values. ``seen``: whether a token is, or None where all are: others may be NaN in memory."""
        raise NotImplementedError


class Int4Rows(Rows):
    """Of records: a word for each lane."""

    def begin(self, stage: Any, slab: Any) -> None:
        unit = self.schedule.unit(self.spec)
        self.record = Int4Record(unit, self.spec.head_dim)
        base, first = stage + slab // (unit // SLAB) * self.record.bytes, slab % (unit // SLAB)
        token = first * SLAB + self.row
        self.codes = base + (token * self.record.row_bytes + self.part * (WIDTH // 2))
        self.scales = base + token * 4

    def _read(self, turn: int, row: int, scale: int) -> tuple[list[Any], Any]:
        token = turn * self.tokens
        word = shared_load(Int32, self.codes + (row + token * self.record.row_bytes))[0]
        factor = shared_load(Float32, self.scales + (scale + token * 4))[0]
        pairs = []
        for half in range(2):
            some = shift_right(word, 8 * half)
            pairs.append(fma_pair("f16", mask_or(some, 0x000F000F, 0x64006400), 0x3C00, 0xE408))
            pairs.append(fma_pair("f16", mask_or(some, 0x00F000F0, 0x64006400), 0x2C00, 0xD480))
        return unpack_halves(pairs, torch.float16), factor

    def key(self, turn: int) -> tuple[list[Any], Any]:
        return self._read(turn, self.record.key_row(0), self.record.key_scale(0))

    def value(self, turn: int, seen: Any) -> tuple[list[Any], Any]:
        found, scale = self._read(turn, self.record.value_row(0), self.record.value_scale(0))
        if seen is not None:
            scale = Float32(cutlass.select_(seen, scale, Float32(0.0)))
        return found, scale


class HalfRows(Rows):
    """Of 16-bit rows, as TMA leaves them: a unit of sixteen bytes for each lane."""

    def begin(self, stage: Any, slab: Any) -> None:
        self.layout = TileLayout(self.schedule.tile, self.spec.row_bytes)
        self.base = stage + slab * (SLAB * self.layout.chunk)

    def _words(self, turn: int, side: int) -> list[Any]:
        layout = self.layout
        row = self.row + turn * self.tokens
        address = self.base + (side * layout.rows * layout.row_bytes)
        return shared_load(Int32, address + layout.offset(row, self.part), 4)

    def key(self, turn: int) -> tuple[list[Any], Any]:
        return unpack_halves(self._words(turn, 0), self.spec.dtype), None

    def value(self, turn: int, seen: Any) -> tuple[list[Any], Any]:
        words = self._words(turn, 1)
        if seen is not None:
            words = [Int32(cutlass.select_(seen, w, Int32(0))) for w in words]
        return unpack_halves(words, self.spec.dtype), None


class FmaSteps(DecodeSteps):
    """The steps over a slab; logits are lists by turn and query row."""

    def __init__(self, spec: Any, schedule: Any, shared: Any, warp: Any, lane: Any) -> None:
        super().__init__(spec, schedule, shared, warp, lane)
        self.rows: Any = (Int4Rows if spec.packed else HalfRows)(spec, schedule, lane)
        self.operands, self.joint = self.rows, 1
        self.turns = SLAB // self.rows.tokens
        count = self.count = spec.columns
        self.out, self.query = (cute.make_rmem_tensor(count * WIDTH, Float32) for _ in range(2))
        self.maximum, self.total = (cute.make_rmem_tensor(count, Float32) for _ in range(2))

    def _load_query(self) -> None:
        spec, arguments = self.spec, self.arguments
        scale = Float32(
            spec.scale * (LOG2_E if spec.softcap is None else 2 * LOG2_E / spec.softcap)
        )
        for column in range(self.count):
            row, head = divmod(column, spec.group)
            offset = (
                Int64(self.item.request) * arguments[at("q_batch")]
                + Int64(row) * arguments[at("q_row")]
                + Int64(self.kv_head * spec.group + head) * arguments[at("q_head")]
                + Int64(self.rows.part * WIDTH)
            )
            words = load_words(arguments[at("q")] + offset * 2, 4, 16, 4, Boolean(True))
            lanes = unpack_halves(words, spec.dtype)
            lanes = butterfly(lanes, spec.rotation, self.rows.part, WIDTH)
            for i, x in enumerate(lanes):
                self.query[column * WIDTH + i] = x * scale

    def _settle(self) -> None:
        """Maxima and outputs are what they are."""

    # A slab is taken in two halves, or their logits would not fit the registers beside queries and outputs.

    def _take(self, stages: list[Any], slab: Any, token: Any, masked: bool) -> None:
        self.rows.begin(stages[0], slab)
        at_once = self.turns // 2
        for first in range(0, self.turns, at_once):
            turns = range(first, first + at_once)
            found = [self._scores(turn) for turn in turns]
            kept: list[Any] = [None] * at_once
            if masked:
                kept = [self._hide(x, token, turn) for x, turn in zip(found, turns, strict=True)]
            self._exponentials(found)
            for turn, lanes, some in zip(turns, found, kept, strict=True):
                self._add(turn, lanes, some)

    def _scores(self, turn: int) -> list[Any]:
        """Logits of a turn's token, in powers of two, by query row."""
        keys, scale = self.rows.key(turn)
        lanes = []
        for column in range(self.count):
            total = Float32(0.0)
            for i, x in enumerate(keys):
                total = fma(x, self.query[column * WIDTH + i], total)
            distance = 1
            while distance < self.rows.lanes:
                total = total + cute.arch.shuffle_sync_bfly(total, distance)
                distance *= 2
            lanes.append(self._capped(total if scale is None else total * scale))
        return lanes

    def _hide(self, lanes: list[Any], token: Any, turn: int) -> Any:
        """Take a turn's token out where a query row does not see it; whether any does."""
        spec = self.spec
        mine = token + (turn * self.rows.tokens + self.rows.row)
        for column in range(self.count):
            limit = self.length - (spec.rows - 1) + column // spec.group
            seen = mine < limit
            if spec.window is not None:
                seen = seen & (mine >= limit - spec.window)
            lanes[column] = Float32(cutlass.select_(seen, lanes[column], -Float32.inf))
        return self._seen(mine)

    def _exponentials(self, logits: list[list[Any]]) -> None:
        """Turn logits into exponentials, and rescale sums and outputs before."""
        for column in range(self.count):
            old = self.maximum[column]
            best = old
            for lanes in logits:
                best = maximum(best, lanes[column])
            reference = Float32(cutlass.select_(best == -Float32.inf, Float32(0.0), best))
            moved = exp2(old - reference)
            self.maximum[column] = best
            total = self.total[column] * moved
            for lanes in logits:
                lanes[column] = exp2(lanes[column] - reference)
                total = total + lanes[column]
            self.total[column] = total
            for i in range(WIDTH):
                place = column * WIDTH + i
                self.out[place] = self.out[place] * moved

    def _add(self, turn: int, lanes: list[Any], seen: Any) -> None:
        """Add a turn's values times exponentials."""
        values, scale = self.rows.value(turn, seen)
        for column, x in enumerate(lanes):
            weight = x if scale is None else x * scale
            for i, value in enumerate(values):
                place = column * WIDTH + i
                self.out[place] = fma(weight, value, self.out[place])


class FmaMerge(Merge):
    """The end of a piece: groups of lanes, then warps; the rest is the library's."""

    def __init__(self, spec: Any, schedule: Any, shared: dict[str, Any]) -> None:
        super().__init__(spec, schedule, shared)
        self.columns, self.order, self.shift = spec.columns, "bf16", 0

    def _meet(self, steps: Any, slot: Any, arguments: Any) -> None:
        lanes = steps.rows.lanes
        distance = lanes
        while distance < 32:
            self._join(steps, distance)
            distance *= 2
        first = Boolean(self.lane == 0)
        for column in range(self.columns):
            address = self.shared["stats"] + self._row(self.sharer, column) * 8
            _store_pair(address, steps.maximum[column], steps.total[column], first)
        self._barrier()
        factors = [self._factor(steps, slot, arguments, c) for c in range(self.columns)]
        for start in range(0, steps.steps, self.tiles):
            count = min(self.tiles, steps.steps - start)
            local = self.lane % lanes * WIDTH - 16 * start
            mine = Boolean((self.lane < lanes) & (local >= 0) & (local < 16 * count))
            for column, factor in enumerate(factors):
                row = self.shared["merge"] + self._row(self.sharer, column) * (4 * self.pitch)
                for i in range(0, WIDTH, 4):
                    some = [steps.out[column * WIDTH + i + e] * factor for e in range(4)]
                    _store_four(row + (local + i) * 4, *some, mine)
            self._barrier()
            self._gather(steps, slot, arguments, start, count)
            self._barrier()

    def _join(self, steps: Any, distance: int) -> None:
        """Two groups of lanes become one."""
        for column in range(self.columns):
            mine, total = steps.maximum[column], steps.total[column]
            other = cute.arch.shuffle_sync_bfly(mine, distance)
            best = maximum(mine, other)
            zero = Float32(cutlass.select_(best == -Float32.inf, Float32(0.0), best))
            factors = [exp2(x - zero) for x in (mine, other)]
            steps.maximum[column] = best
            steps.total[column] = self._sum(total, factors, distance)
            for i in range(WIDTH):
                place = column * WIDTH + i
                steps.out[place] = self._sum(steps.out[place], factors, distance)

    def _sum(self, x: Any, factors: list[Any], distance: int) -> Any:
        other = cute.arch.shuffle_sync_bfly(x, distance)
        return x * factors[0] + other * factors[1]

    def _factor(self, steps: Any, slot: Any, arguments: Any, column: int) -> Any:
        """What this warp's outputs are multiplied by; the CTA's maximum and sum go to the slot."""
        found = [
            shared_load(Float32, self.shared["stats"] + self._row(w, column) * 8, 2)
            for w in range(self.sharers)
        ]
        best = found[0][0]
        for other, _ in found[1:]:
            best = maximum(best, other)
        zero = Float32(cutlass.select_(best == -Float32.inf, Float32(0.0), best))
        total = Float32(0.0)
        for other, part in found:
            total = fma(exp2(other - zero), part, total)
        address = arguments[at("stats")] + (Int64(slot) * self.columns + column) * 8
        _store_global(address, [best, total], Boolean((self.sharer == 0) & (self.lane == 0)))
        return exp2(steps.maximum[column] - zero)


@cute.jit
def _store_four(
    address: Int32, a: Float32, b: Float32, c: Float32, d: Float32, condition: Boolean
) -> None:
    if condition:
        shared_store(Float32, address, [a, b, c, d])


class HopperFma(HopperDecode):
    """The library's kernel with its products by FMA."""

    def _resident(self) -> int:
        return 1

    def _steps(self, shared: dict[str, Any], warp: Any, lane: Any) -> DecodeSteps:
        return FmaSteps(self.spec, self.schedule, shared, warp, lane)

    def _merge(self, shared: dict[str, Any]) -> Merge:
        return FmaMerge(self.spec, self.schedule, shared)
