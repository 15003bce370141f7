"""Queries, keys and values as operands of m16n8k16, for each format of the cache. Imports the DSL.

A warp multiplies sixteen tokens at a time (a slab). ``keys`` gives for each step of sixteen channels the A operand of
the product with queries, ``values`` for each sixteen channels the A operand of the product with probabilities;
``decode_fragments`` says which channel lies where.
"""

from __future__ import annotations

from typing import Any

import cutlass
import torch
from cutlass import Float32, Int16, Int32, Int64, cute

from epicute.attention.decode_fragments import TileLayout, row_token
from epicute.attention.decode_schedule import TABLE_BYTES, DecodeSchedule
from epicute.attention.decode_spec import DecodeSpec
from epicute.attention.sm90.decode_ptx import (
    fma_pair,
    halves_of_codes,
    load_matrices,
    mask_or,
    permute_bytes,
    shared_load,
    shared_store,
    shift_right,
)
from epicute.epilogues.dsl import pack_words
from epicute.kv.append_row import butterfly, unpack_halves
from epicute.layouts.kv_int4 import SCALE_BYTES, ZERO_CODE, Int4Record, channel_of_nibble
from epicute.quant.dsl import magnitude, maximum, multiply

__all__ = ["fill_table", "operands_of"]

KINDS = {torch.bfloat16: "bf16", torch.float16: "f16"}

EXPONENT, LARGEST, ONE = 0x7F800000, 0x7E800000, 0x3F800000
"""Of a float32: the bits of its exponent; 2^126; 1."""


class Operands:
    """What formats share. ``kind``: of the products with keys; ``value_kind``: of those with values.

    ``shift``: probabilities are multiplied by 2^shift, so that few of them are lost in float16.
    """

    shift = 0

    def __init__(self, spec: DecodeSpec, schedule: DecodeSchedule, lane: Any) -> None:
        self.spec, self.schedule = spec, schedule
        self.lane, self.g, self.t = lane, lane // 4, lane % 4
        self.steps = spec.head_dim // 16
        self.kind = self.value_kind = KINDS[spec.dtype]

    def begin(self, stage: Any, slab: Any) -> None:
        """Set out on a slab of the tile at ``stage``."""
        raise NotImplementedError

    def query(self, address: Any, inside: Any) -> tuple[list[list[Any]], Any]:
        """(B operand of each step, factor of the logits) of this lane's column, whose row of q is at ``address``."""
        raise NotImplementedError

    def _normalised(self, lanes: list[Any]) -> tuple[list[Any], Any]:
        """Lanes of a row, which a quad shares, by a power of two at most 2 in size, and that power.

        float16 then has all of q, whatever its range.
        """
        best = Float32(0.0)
        for x in lanes:
            best = maximum(best, magnitude(x, 0.0))
        for distance in (1, 2):
            best = maximum(best, cute.arch.shuffle_sync_bfly(best, distance))
        bits = best.bitcast(Int32) & EXPONENT
        bits = cutlass.min(bits, Int32(LARGEST))
        bits = Int32(cutlass.select_(bits == 0, Int32(ONE), bits))
        inverse = (Int32(2 * ONE) - bits).bitcast(Float32)
        return [multiply(x, inverse) for x in lanes], bits.bitcast(Float32)

    def key(self, step: int) -> list[Any]:
        """The A operand of a step of sixteen channels of keys."""
        raise NotImplementedError

    def value(self, tile: int, kept: list[Any] | None) -> list[Any]:
        """The A operand of sixteen channels of values. ``kept``: masks of the words, where tokens are not seen."""
        raise NotImplementedError

    def key_scales(self) -> list[Any] | None:
        """Scales of the tokens in rows g and g + 8; None where tokens have none."""
        return None

    def value_scales(self) -> list[Any] | None:
        """Of values, as ``key_scales``."""
        return None


class HalfOperands(Operands):
    """bfloat16 and float16 rows, by ldmatrix."""

    def __init__(self, spec: DecodeSpec, schedule: DecodeSchedule, lane: Any) -> None:
        super().__init__(spec, schedule, lane)
        self.shift = 12 if self.kind == "f16" else 0
        self.layout = TileLayout(schedule.tile, spec.row_bytes)
        row, matrix = lane % 8, lane // 8
        self._key = self._place(row + matrix % 2 * 8, matrix // 2)
        self._value = self._place(row + matrix // 2 * 8, matrix % 2)

    def _place(self, row: Any, half: Any) -> tuple[Any, Any]:
        """(first byte of a row of a slab, what a unit's even number is xored with for its half)."""
        return row * self.layout.chunk, self.layout.turn(row) ^ half

    def begin(self, stage: Any, slab: Any) -> None:
        layout = self.layout
        base = stage + slab * (16 * layout.chunk)
        size = layout.rows * layout.row_bytes
        self.key_base, self.value_base = base + self._key[0], base + (size + self._value[0])

    def _unit(self, base: Any, turn: Any, unit: int) -> Any:
        place = (turn ^ (unit % self.layout.units)) * 16
        return base + place + self.layout.chunk_offset(unit)

    def key(self, step: int) -> list[Any]:
        return load_matrices(self._unit(self.key_base, self._key[1], 2 * step))

    def value(self, tile: int, kept: list[Any] | None) -> list[Any]:
        words = load_matrices(self._unit(self.value_base, self._value[1], 2 * tile), turned=True)
        return words if kept is None else [w & kept[i // 2] for i, w in enumerate(words)]

    def query(self, address: Any, inside: Any) -> tuple[list[list[Any]], Any]:
        words = load_words(address + Int64(self.t) * 4, 2 * self.steps, 16, 1, inside)
        return [words[2 * s : 2 * s + 2] for s in range(self.steps)], Float32(1.0)


class Fp8Operands(Operands):
    """E4M3 rows, converted to float16, which holds them exactly."""

    shift = 12

    def __init__(self, spec: DecodeSpec, schedule: DecodeSchedule, lane: Any) -> None:
        super().__init__(spec, schedule, lane)
        self.q_kind = self.kind
        self.kind = self.value_kind = "f16"
        self.layout = layout = TileLayout(schedule.tile, spec.row_bytes)
        row, matrix = lane % 8 + lane // 8 % 2 * 8, lane // 16
        self._key = row * layout.chunk, layout.turn(row) ^ matrix
        self._rows = [(r * layout.chunk, layout.turn(r)) for r in (2 * self.t, 2 * self.t + 1)]

    def begin(self, stage: Any, slab: Any) -> None:
        layout = self.layout
        base = stage + slab * (16 * layout.chunk)
        self.key_base = base + self._key[0]
        self.value_base = base + layout.rows * layout.row_bytes
        self._held: dict[int, list[Any]] = {}

    def key(self, step: int) -> list[Any]:
        # Loads come for two steps at once.
        if step not in self._held:
            count = 2 if step + 1 == self.steps else 4
            place = (self._key[1] ^ (step % self.layout.units)) * 16
            address = self.key_base + place + self.layout.chunk_offset(step)
            words = load_matrices(address, count)
            for i in range(count // 2):
                pairs = [halves_of_codes(w) for w in words[2 * i : 2 * i + 2]]
                self._held[step + i] = [pairs[0][0], pairs[1][0], pairs[0][1], pairs[1][1]]
        return self._held[step]

    def value(self, tile: int, kept: list[Any] | None) -> list[Any]:
        # Loads come for two tiles at once, and alone for an odd last one.
        name = -1 - tile
        if name not in self._held:
            self._load_values(tile)
        words = self._held[name]
        return words if kept is None else [w & kept[i // 2] for i, w in enumerate(words)]

    def _load_values(self, tile: int) -> None:
        paired = tile + 1 < self.steps
        dtype, width = (Int32, 4) if paired else (Int16, 2)
        unit, place = self.g * width // 16, self.g * width % 16
        words = []
        # Eight rows on, units lie alike.
        for further in (0, 8 * self.layout.chunk):
            for row, turn in self._rows:
                moved = ((turn ^ unit) ^ (tile % self.layout.units)) * 16 + place
                address = self.value_base + row + moved
                address = address + (self.layout.chunk_offset(tile) + further)
                words.append(Int32(shared_load(dtype, address)[0]))
        for i, selection in enumerate((0x5140, 0x7362)[: 2 if paired else 1]):
            first, second = (
                halves_of_codes(permute_bytes(words[j], words[j + 1], selection)) for j in (0, 2)
            )
            self._held[-1 - tile - i] = [first[0], first[1], second[0], second[1]]

    def query(self, address: Any, inside: Any) -> tuple[list[list[Any]], Any]:
        words = load_words(address + Int64(self.t) * 8, 2 * self.steps, 32, 2, inside)
        lanes, power = self._normalised(unpack_halves(words, self.spec.dtype))
        packed = pack_words(lanes, "f16")
        return [packed[2 * s : 2 * s + 2] for s in range(self.steps)], power


class Int4Operands(Operands):
    """Records of nibbles: keys become float16 and values bfloat16, exactly, without a table."""

    def __init__(self, spec: DecodeSpec, schedule: DecodeSchedule, lane: Any) -> None:
        super().__init__(spec, schedule, lane)
        self.kind, self.value_kind = "f16", "bf16"
        self.unit = schedule.unit(spec)
        self.record = Int4Record(self.unit, spec.head_dim)
        self.run = spec.head_dim // 32
        row, t = row_token("int4", self.g), self.t
        # What a lane adds to the first byte of a slab's keys, values, and scales. Eight rows on, all is alike.
        self.key_place = row * spec.row_bytes + t * (4 * self.run)
        self.value_places = [
            row_token("int4", 2 * t + i) * spec.row_bytes + self.g * (2 * self.run)
            for i in range(2)
        ]
        self.scale_place = row * SCALE_BYTES

    def begin(self, stage: Any, slab: Any) -> None:
        per_unit = self.unit // 16
        base, first = stage + slab // per_unit * self.record.bytes, slab % per_unit * 16
        self.base = base + first * self.spec.row_bytes
        self.scales = base + (self.scale_place + first * SCALE_BYTES)
        self.words: list[list[Any]] = []
        self.merged: list[list[Any]] = []

    def _keys(self) -> list[list[Any]]:
        """Words of the two tokens."""
        if not self.words:
            first = self.base + self.key_place
            for row in (0, 8):
                place = first + row * self.spec.row_bytes
                self.words.append(shared_load(Int32, place, self.run))
        return self.words

    def key(self, step: int) -> list[Any]:
        words = [row[step // 2] for row in self._keys()]
        words = [shift_right(w, 8 * (step % 2)) for w in words]
        # 1024 + u less 1032, and 1024 + 16 u by 1/16 less 72: in float16 both are exact.
        low = [fma_pair("f16", mask_or(w, 0x000F000F, 0x64006400), 0x3C00, 0xE408) for w in words]
        high = [fma_pair("f16", mask_or(w, 0x00F000F0, 0x64006400), 0x2C00, 0xD480) for w in words]
        return low + high

    def value(self, tile: int, kept: list[Any] | None) -> list[Any]:
        # Codes are finite whatever memory holds, and need no mask.
        if not self.merged:
            self._load_values()
        words = [shift_right(w, 4 * (tile % 4)) for w in self.merged[tile // 4]]
        # 128 + u less 136 is exact in bfloat16.
        return [fma_pair("bf16", mask_or(w, 0x000F000F, 0x43004300), 0x3F80, 0xC308) for w in words]

    def _load_values(self) -> None:
        """Words of two tokens each, interleaved: of each word their low and high halves, and of the next two tokens."""
        rows = self._value_words()
        for w in range(self.run // 2):
            self.merged.append(
                [
                    permute_bytes(rows[j][w], rows[j + 1][w], selection)
                    for j in (0, 2)
                    for selection in (0x5410, 0x7632)
                ]
            )

    def _value_words(self) -> list[list[Any]]:
        """Words of the four tokens."""
        found = []
        for row in (0, 8):
            for place in self.value_places:
                address = self.base + place + (self.record.value_row(0) + row * self.spec.row_bytes)
                found.append(shared_load(Int32, address, self.run // 2))
        return found

    def _scales(self, first: int) -> list[Any]:
        """Scales of two tokens, of a side whose first one is at ``first``."""
        places = [self.scales + (first + row * SCALE_BYTES) for row in (0, 8)]
        return [shared_load(Float32, place)[0] for place in places]

    def key_scales(self) -> list[Any]:
        return self._scales(self.record.key_scale(0))

    def value_scales(self) -> list[Any]:
        return self._scales(self.record.value_scale(0))

    def query(self, address: Any, inside: Any) -> tuple[list[list[Any]], Any]:
        count = self.spec.head_dim // 8
        start = address + Int64(self.t) * (self.spec.head_dim // 2)
        words = load_words(start, count, 16, 4, inside)
        lanes = unpack_halves(words, self.spec.dtype)
        lanes = butterfly(lanes, self.spec.rotation, self.t, self.spec.head_dim // 4)
        lanes, power = self._normalised(lanes)
        packed = pack_words(self._ordered(lanes), "f16")
        return [packed[2 * s : 2 * s + 2] for s in range(self.steps)], power

    def _ordered(self, lanes: list[Any]) -> list[Any]:
        """A run of channels in the order in which keys' steps take them."""
        return lanes


def load_words(address: Any, count: int, step: int, width: int, inside: Any) -> list[Any]:
    """``count`` words of global memory, ``width`` adjacent ones at a time, which are ``step`` bytes apart.

    Zeros where not ``inside``.
    """
    fragment = cute.make_rmem_tensor(count, Int32)
    fragment.fill(0)
    _load_words(address, fragment, step, width, inside)
    return [fragment[i] for i in range(count)]


@cute.jit
def _load_words(
    address: Int64,
    fragment: cute.Tensor,
    step: cutlass.Constexpr,
    width: cutlass.Constexpr,
    inside: cutlass.Boolean,
) -> None:
    if inside:
        for i in cutlass.range_constexpr(cute.size(fragment) // width):
            pointer = cute.make_ptr(
                Int32, address + i * step, cute.AddressSpace.gmem, assumed_align=4 * width
            )
            source = cute.make_tensor(pointer, cute.make_layout(width))
            target = cute.make_tensor(fragment.iterator + i * width, cute.make_layout(width))
            cute.autovec_copy(source, target)


class TableOperands(Int4Operands):
    """Records of nibbles by tables of 256 byte codes (FuTransformer 3.3.2), in shared memory.

    A byte is two channels of one token: for values, words of two tokens are joined by channel.
    """

    def __init__(self, spec: DecodeSpec, schedule: DecodeSchedule, lane: Any, table: Any) -> None:
        super().__init__(spec, schedule, lane)
        self.table = table

    def _looked_up(self, word: Any, byte: int, kind: int) -> Any:
        code = shift_right(word, 8 * byte) & 0xFF
        return shared_load(Int32, self.table + kind * (TABLE_BYTES // 2) + code * 4)[0]

    def key(self, step: int) -> list[Any]:
        rows, first = self._keys(), step % 2 * 2
        return [
            self._looked_up(row[step // 2], first + byte, 0) for byte in range(2) for row in rows
        ]

    def value(self, tile: int, kept: list[Any] | None) -> list[Any]:
        if not self.merged:
            self.merged = self._value_words()
        codes = [self._looked_up(words[tile // 4], tile % 4, 1) for words in self.merged]
        return [
            permute_bytes(codes[j], codes[j + 1], selection)
            for j in (0, 2)
            for selection in (0x5410, 0x7632)
        ]

    def _ordered(self, lanes: list[Any]) -> list[Any]:
        return [lanes[channel_of_nibble(i)] for i in range(len(lanes))]


def fill_table(table: Any, thread: Any, threads: int) -> None:
    """Write both tables; ``thread`` of ``threads``."""
    for first in range(0, 256, threads):
        code = thread + first
        both = [(code >> shift & 0xF).to(Float32) - float(ZERO_CODE) for shift in (0, 4)]
        for kind, name in enumerate(("f16", "bf16")):
            word = pack_words(both, name)[0]
            place = table + kind * (TABLE_BYTES // 2) + code * 4
            _store_if(place, word, cutlass.Boolean(code < 256))


@cute.jit
def _store_if(address: Int32, word: Int32, condition: cutlass.Boolean) -> None:
    if condition:
        shared_store(Int32, address, [word])


def operands_of(spec: DecodeSpec, schedule: DecodeSchedule, lane: Any, table: Any) -> Operands:
    """The operands of a spec's cache. ``table``: address of the tables, where the schedule has them."""
    if schedule.tabled:
        return TableOperands(spec, schedule, lane, table)
    if spec.packed:
        return Int4Operands(spec, schedule, lane)
    return (Fp8Operands if spec.cache == "fp8" else HalfOperands)(spec, schedule, lane)
