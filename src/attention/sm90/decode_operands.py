"""Queries, keys and values as operands of m16n8k16, for each format of the cache. Imports the DSL.

A warp multiplies sixteen tokens at a time (a slab). ``keys`` gives for each step of sixteen channels the A operand of
the product with queries, ``values`` for each sixteen channels the A operand of the product with probabilities;
``decode_fragments`` says which channel lies where.
"""

from __future__ import annotations

from typing import Any

import cutlass
import torch
from cutlass import Boolean, Float32, Int16, Int32, Int64, cute

from epicute.attention.decode_fragments import TileLayout, row_token
from epicute.attention.decode_schedule import DecodeSchedule
from epicute.attention.decode_spec import DecodeSpec
from epicute.attention.sm90.decode_ptx import (
    halves_of_codes,
    permute_bytes,
    rotate_lanes,
    shared_load,
    shared_store,
    shift_right,
)
from epicute.decode.sm90.ptx import load_matrices
from epicute.epilogues.dsl import pack_words
from epicute.kv.append_row import unpack_halves
from epicute.layouts import split
from epicute.layouts.kv_int4 import SCALE_BYTES, ZERO_CODE, Int4Record, nibble_of_channel
from epicute.quant.dsl import magnitude, maximum, multiply

__all__ = ["Operands", "fill_table", "level_of", "query_place"]

KINDS = {torch.bfloat16: "bf16", torch.float16: "f16"}

EXPONENT, LARGEST, ONE = 0x7F800000, 0x7E800000, 0x3F800000
"""Of a float32: the bits of its exponent; 2^126; 1."""


class Operands:
    """What formats share. ``kind``: of the products with keys; ``value_kind``: of those with values.

    Attributes:
        shift: probabilities are multiplied by 2^shift, so that few of them are lost in float16.
        slack: a column's reference stays until a logit is 2^slack above it.
        joint: slabs, each of a tile of its own, that a warp has in flight where it can.
        codes: whether products with keys are of integers (``key_codes``).
        value_zeros: words of values whose codes are of the value 0, of rows g and g + 8 of the tile behind the last:
            low nibbles and bytes; None where codes are values.
        shared: whether queries stay in shared memory, where a CTA's warps have rotated them (``prepare``).
    """

    shift, slack, joint, shared, codes = 0, 8, 1, False, False
    value_zeros: tuple[int, int] | None = None

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

    def prepare(
        self, address: Any, inside: Any, scale: Any, row: Any, levels: Any, mine: Any
    ) -> None:
        """A whole warp rotates a row of q, where queries are ``shared``, and leaves it at ``row``.

        What products with keys are multiplied by goes to ``levels``, of lanes that are ``mine``; where sums of codes
        begin, which is minus the product with codes of zero, an int32, two words further.
        """
        raise NotImplementedError

    def prepared(self, row: Any, step: int) -> list[list[Any]]:
        """B operands of an even step and the next of this lane's column, whose row ``prepare`` left at ``row``.

        Of ``codes``: of step ``step // 2``, the upper plane's and the lower one's.
        """
        raise NotImplementedError

    def _normalised(
        self, lanes: list[Any], distances: tuple[int, ...] = (1, 2), lift: float = 1.0
    ) -> tuple[list[Any], Any]:
        """Lanes of a row by a power of two at most 2 in size, times ``lift``, and that power.

        float16 then has all of q, whatever its range. ``distances``: between lanes that share the row.
        """
        best = Float32(0.0)
        for x in lanes:
            best = maximum(best, magnitude(x, 0.0))
        # Bits of what is not negative order like integers.
        bits = best.bitcast(Int32)
        if len(distances) == 5:
            bits = cute.arch.warp_redux_sync(bits, "max")
        else:
            for distance in distances:
                bits = cutlass.max(bits, cute.arch.shuffle_sync_bfly(bits, distance))
        bits = bits & EXPONENT
        bits = cutlass.min(bits, Int32(LARGEST))
        bits = Int32(cutlass.select_(bits == 0, Int32(ONE), bits))
        inverse = (Int32(2 * ONE) - bits).bitcast(Float32)
        if lift != 1.0:
            inverse = multiply(inverse, lift)
        return [multiply(x, inverse) for x in lanes], bits.bitcast(Float32)

    def key(self, step: int) -> list[Any]:
        """The A operand of a step of sixteen channels of keys."""
        raise NotImplementedError

    def fetch(self) -> None:
        """Start to load values where they are few, ahead of the softmax."""

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
        self.shift, self.slack = (12, 3) if self.kind == "f16" else (0, 8)
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

    shift, slack = 12, 3

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
    """Records of nibbles: where they lie, and queries of float16 that a CTA's warps rotate for each other."""

    shift, slack, shared = 12, 3, True

    def __init__(self, spec: DecodeSpec, schedule: DecodeSchedule, lane: Any) -> None:
        super().__init__(spec, schedule, lane)
        self.kind = self.value_kind = "f16"
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
        number, within = split(slab, per_unit)
        base, first = stage + number * self.record.bytes, within * 16
        self.base = base + first * self.spec.row_bytes
        self.scales = base + (self.scale_place + first * SCALE_BYTES)
        self.words: list[list[list[Any]]] = []
        self.merged: list[list[Any]] = []

    def _keys(self, half: int) -> list[list[Any]]:
        """Words of one half of the two tokens' runs."""
        while len(self.words) <= half:
            count = self.run // 2
            first = self.base + (self.key_place + len(self.words) * (4 * count))
            places = [first + row * self.spec.row_bytes for row in (0, 8)]
            self.words.append([shared_load(Int32, place, count) for place in places])
        return self.words[half]

    def _key_words(self, step: int) -> list[Any]:
        """Words of the two tokens that have a step's channels."""
        half, word = divmod(step // 2, self.run // 2)
        return [row[word] for row in self._keys(half)]

    def fetch(self) -> None:
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

    def _rotated(self, address: Any, inside: Any) -> list[Any]:
        """This lane's channels of a row of q."""
        spec, lane = self.spec, self.lane
        count = spec.head_dim // 32
        width = count // 2
        words = load_words(address + Int64(lane * (2 * count)), width, 4 * width, width, inside)
        return rotate_lanes(unpack_halves(words, spec.dtype), spec.rotation, lane, count)

    def prepare(
        self, address: Any, inside: Any, scale: Any, row: Any, levels: Any, mine: Any
    ) -> None:
        lanes = self._rotated(address, inside)
        lanes, power = self._normalised(lanes, (1, 2, 4, 8, 16))
        self._put_query(row, self.lane * len(lanes), pack_words(lanes, "f16"))
        self.put_levels(levels, mine, power * scale, Int32(0))

    def put_levels(self, levels: Any, mine: Any, factor: Any, origin: Any) -> None:
        """Where a lane is ``mine``, store what products with keys are multiplied by, and where sums of codes begin."""
        _store_if(levels, factor.bitcast(Int32), mine)
        _store_if(levels + 8, origin, mine)

    def _put_query(self, row: Any, channel: Any, words: list[Any]) -> None:
        """Store adjacent channels from ``channel`` on."""
        shared_store(Int32, row + query_place(channel, self.spec.head_dim), words)

    def prepared(self, row: Any, step: int) -> list[list[Any]]:
        start = query_place(self.t * (self.spec.head_dim // 4), self.spec.head_dim)
        words = shared_load(Int32, row + start + 8 * step, 4)
        return [words[:2], words[2:]]


def query_place(channel: Any, head_dim: int) -> Any:
    """Byte of a channel in a rotated query: quarters of the row lie 16 bytes apart, and meet in no bank."""
    return channel * 2 + split(channel, head_dim // 4)[0] * 16


def level_of(
    rows: Any, column: Any, lane: Any, spec: DecodeSpec, schedule: DecodeSchedule
) -> tuple[Any, Any]:
    """Where a lane of the scribe puts a column's two words, and whether it does: each has one of eight rows.

    They are behind a quarter of every row; two factors and two origins of neighbours lie together.
    """
    row = (column & ~7) + lane
    # A quarter is the 16 bytes apart longer.
    quarter = (column >> 1 & 3) * (spec.head_dim // 2 + 16)
    place = rows + row * schedule.query_pitch(spec) + quarter
    inside = (lane < 8) & (row < schedule.live_columns(spec))
    return place + (spec.head_dim // 2 + (column & 1) * 4), Boolean(inside)


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

    def _looked_up(self, word: Any, byte: int) -> Any:
        code = shift_right(word, 8 * byte) & 0xFF
        return shared_load(Int32, self.table + code * 4)[0]

    def key(self, step: int) -> list[Any]:
        words, first = self._key_words(step), step % 2 * 2
        return [self._looked_up(w, first + byte) for byte in range(2) for w in words]

    def value(self, tile: int, kept: list[Any] | None) -> list[Any]:
        codes = [self._looked_up(words[tile // 4], tile % 4) for words in self.merged]
        return [
            permute_bytes(codes[j], codes[j + 1], selection)
            for j in (0, 2)
            for selection in (0x5410, 0x7632)
        ]

    def fetch(self) -> None:
        self.merged = self._value_words()

    def _put_query(self, row: Any, channel: Any, words: list[Any]) -> None:
        for i, word in enumerate(words):
            for half in range(2):
                place = nibble_of_channel(channel + (2 * i + half))
                address = row + query_place(place, self.spec.head_dim)
                shared_store(Int16, address, [Int16(shift_right(word, 16 * half) & 0xFFFF)])


def fill_table(table: Any, thread: Any, threads: int) -> None:
    """Write the table; ``thread`` of ``threads``."""
    for first in range(0, 256, threads):
        code = thread + first
        both = [(code >> shift & 0xF).to(Float32) - float(ZERO_CODE) for shift in (0, 4)]
        word = pack_words(both, "f16")[0]
        _store_if(table + code * 4, word, cutlass.Boolean(code < 256))


@cute.jit
def _store_if(address: Int32, word: Int32, condition: cutlass.Boolean) -> None:
    if condition:
        shared_store(Int32, address, [word])
