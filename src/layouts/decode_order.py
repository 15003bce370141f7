"""The order in which few-row kernels stream a weight: fragments of the MMA's A operand, as they lie in registers.

Weights are the A operand of `mma.sync.m16n8k16` (16 rows of a row tile) or of `wgmma` with A in registers (four row
tiles, one a warp): in both, lane 4g + t of a warp holds rows g and g + 8, so that one arrangement serves both. A block
is 64 k, four steps of 16; k stays in its order, so that activations come to shared memory by TMA as they are:

    register j of step s        row        k, counted from 16 s      half h
    0                           g          2t + h                    low, high 16 bits
    1                           g + 8      2t + h
    2                           g          8 + 2t + h
    3                           g + 8      8 + 2t + h

A lane's codes of one block of 16 rows x 64 k are 8, 16 or 32 bits wide loads of 16 bytes each:

    bits   loads   word of a load                   inside the word
    4      1       step                             nibble j + 4h, lowest first
    8      2       2 (step % 2) + j // 2            byte 2 (j % 2) + h
    16     4       j, load = step                   half h

A **record** is what one work item reads, `tiles` row tiles by `depth` k in one contiguous piece:

    codes [block][tile][load][lane] 16 bytes | scales [set][row][width] 16 bits | zero points, the same order, bytes

where a set is eight groups wide, or 1, 2, 4 where the record has no more. A lane reads a row's scales of a set in one
load of 16 bytes, and a warp those of MMA columns 2t, 2t + 1 (M = 1, one group per column) in one of 128 adjacent
bytes. Records lie row tile by row tile, along k inside one.

The functions are integer algebra alone and run on int, on NumPy arrays and on DSL integers alike.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from epicute.errors import require

__all__ = [
    "BLOCK",
    "CHANNEL",
    "GROUPS",
    "LANE_BYTES",
    "RECORD_BYTES",
    "TILE_ROWS",
    "WARP",
    "Record",
    "Records",
    "bf16_pair",
    "code_place",
    "fp16_pair",
    "fragment_cell",
    "fragment_place",
]

TILE_ROWS = 16
"""Rows of a row tile, the M of an MMA's A operand."""

BLOCK = 64
"""k of a block: what a lane's loads cover."""

STEP = 16
"""k of an MMA step."""

WARP = 32
LANE_BYTES = 16
"""Bytes of one load of one lane."""

RECORD_BYTES = 8192
"""Bytes of codes in a record, at most, unless asked for more: 1024 k of INT4, 512 of FP8, 256 of BF16."""

GROUPS = (32, 64, 128)
"""k that share one INT4 scale."""

CHANNEL = -1
"""In place of a group: one scale for the whole output feature."""

_SET = 8
_SCALE_BYTES = 2
_BITS = (4, 8, 16)


def fragment_place(row: Any, k: Any) -> tuple[Any, Any, Any, Any]:
    """(lane, step, register, half) that hold cell (``row`` < 16, ``k`` < 64) of a block."""
    return row % 8 * 4 + k % 8 // 2, k // STEP, row // 8 + k % STEP // 8 * 2, k % 2


def fragment_cell(lane: Any, step: Any, register: Any, half: Any) -> tuple[Any, Any]:
    """(row, k) of a block: the inverse of ``fragment_place``."""
    return lane // 4 + register % 2 * 8, step * STEP + register // 2 * 8 + lane % 4 * 2 + half


def code_place(step: Any, register: Any, half: Any, bits: int) -> tuple[Any, Any]:
    """(load, bit): the lane's load, and the lowest bit of the code inside its 16 bytes."""
    if bits == 4:
        return step * 0, step * 32 + register * 4 + half * 16
    if bits == 8:
        return step // 2, step % 2 * 64 + register // 2 * 32 + register % 2 * 16 + half * 8
    return step, register * 32 + half * 16


def bf16_pair(word: Any, register: int) -> Any:
    """Two BF16 values 128 + code of a word of eight nibbles: ``register`` 0 to 3 of its step.

    One shift and one LOP3 on the device. ``word`` is 32 bits wide, signed or not.
    """
    return (word >> (4 * register)) & 0x000F000F | 0x43004300


def fp16_pair(word: Any, register: int) -> Any:
    """Two FP16 values of a word of eight nibbles: 1024 + code for rows g (``register`` 0, 2), 1024 +
    16 code for rows g + 8 (1, 3).

    One shift serves all four registers. The factor 16 belongs to the row, so its scale takes it back.
    """
    mask = 0x00F000F0 if register % 2 else 0x000F000F
    return (word >> (register // 2 * 8)) & mask | 0x64006400


@dataclass(frozen=True)
class Record:
    """One contiguous piece of a weight: ``16 tiles`` rows by ``depth`` k.

    Attributes:
        bits: of a code: 4, 8 or 16.
        depth: k of the record, a multiple of 64 and of ``group``.
        tiles: row tiles: 1 for `mma.sync`, 4 for the four warps of `wgmma`, or any other count.
        group: k per scale, from 32 up; 0: the record has no scales. Where it equals ``depth`` a row has one.
        zeros: whether zero points follow the scales.

    Sizes and offsets are bytes.
    """

    bits: int
    depth: int
    tiles: int = 1
    group: int = 0
    zeros: bool = False

    def __post_init__(self) -> None:
        require(
            self.bits in _BITS, "bits", self.bits, f"one of {_BITS}", "use INT4, FP8 or 16 bits"
        )
        require(self.tiles >= 1, "tiles", self.tiles, "at least 1", "give whole row tiles")
        require(
            self.depth > 0 and self.depth % BLOCK == 0,
            "depth",
            self.depth,
            f"a multiple of {BLOCK}",
            "pad k to whole blocks",
        )
        known = self.group in (0, *GROUPS) or self.group == self.depth
        require(
            known and (self.group == 0 or self.depth % self.group == 0),
            "group",
            self.group,
            f"0, {', '.join(map(str, GROUPS))} or the depth {self.depth}, and a divisor of it",
            "pad k to whole groups",
        )
        require(
            self.group > 0 or not self.zeros,
            "zeros",
            self.zeros,
            "no zero points without scales",
            "name a group",
        )

    @property
    def rows(self) -> int:
        """Rows of the record."""
        return self.tiles * TILE_ROWS

    @property
    def blocks(self) -> int:
        """Blocks of 64 k."""
        return self.depth // BLOCK

    @property
    def loads(self) -> int:
        """16-byte loads per lane, block and row tile."""
        return self.bits // 4

    @property
    def groups(self) -> int:
        """Scales of a row."""
        return self.depth // self.group if self.group else 0

    @property
    def width(self) -> int:
        """Groups that stand side by side: 8, or the power of two that holds a record's fewer ones."""
        return min(_SET, 1 << max(self.groups - 1, 0).bit_length())

    @property
    def slots(self) -> int:
        """Places for a row's scales: the groups in whole sets."""
        return -(-self.groups // self.width) * self.width

    @property
    def scales_start(self) -> int:
        """Where the scales begin: the bytes of all codes."""
        return self.rows * self.depth * self.bits // 8

    @property
    def zeros_start(self) -> int:
        """Where the zero points begin."""
        return self.scales_start + self.rows * self.slots * _SCALE_BYTES

    @property
    def size(self) -> int:
        """Bytes of the record, a multiple of 16."""
        return self.zeros_start + (self.rows * self.slots if self.zeros else 0)

    def load_offset(self, block: Any, tile: Any, load: Any, lane: Any) -> Any:
        """Where the 16 bytes of one load of one lane begin."""
        return (((block * self.tiles + tile) * self.loads + load) * WARP + lane) * LANE_BYTES

    def code_bit(self, row: Any, k: Any) -> Any:
        """Lowest bit, from the record's start, of the code of ``row`` (< rows) and ``k`` (< depth)."""
        lane, step, register, half = fragment_place(row % TILE_ROWS, k % BLOCK)
        load, bit = code_place(step, register, half, self.bits)
        return self.load_offset(k // BLOCK, row // TILE_ROWS, load, lane) * 8 + bit

    def scale_slot(self, row: Any, group: Any) -> Any:
        """Place of a scale or zero point among those of the record."""
        return (group // self.width * self.rows + row) * self.width + group % self.width

    def scale_offset(self, row: Any, group: Any) -> Any:
        """Where the 16-bit scale of ``row`` and ``group`` (< groups, of this record) begins."""
        return self.scales_start + self.scale_slot(row, group) * _SCALE_BYTES

    def zero_offset(self, row: Any, group: Any) -> Any:
        """Where the zero point (one byte, 0 to 15) of ``row`` and ``group`` stands."""
        return self.zeros_start + self.scale_slot(row, group)

    @cached_property
    def code_sources(self) -> np.ndarray:
        """(rows * depth,) int64: row * depth + k of the codes of a record as they follow each other
        in memory, the low nibble of a byte first.
        """
        row, k = np.meshgrid(np.arange(self.rows), np.arange(self.depth), indexing="ij")
        found = np.empty(self.rows * self.depth, np.int64)
        found[self.code_bit(row, k).ravel() // self.bits] = np.arange(found.size)
        return found

    @cached_property
    def slot_sources(self) -> np.ndarray:
        """(rows * slots,) int64: row * slots + group of the scales as they follow each other."""
        row, group = np.meshgrid(np.arange(self.rows), np.arange(self.slots), indexing="ij")
        found = np.empty(self.rows * self.slots, np.int64)
        found[self.scale_slot(row, group).ravel()] = np.arange(found.size)
        return found


@dataclass(frozen=True)
class Records:
    """All records of a weight: ``down`` along its rows, ``along`` its k; padded to whole records.

    Attributes:
        record: one of them.
        down: records along the rows, outermost in memory.
        along: records along k.
    """

    record: Record
    down: int
    along: int

    def __post_init__(self) -> None:
        for name in ("down", "along"):
            got = getattr(self, name)
            require(
                got >= 1, name, got, "at least 1", "give a weight of at least one row and one k"
            )

    @staticmethod
    def of(
        rows: int,
        width: int,
        bits: int,
        group: int = 0,
        zeros: bool = False,
        tiles: int = 1,
        record_bytes: int = RECORD_BYTES,
    ) -> Records:
        """Records of equal depth with little padding: SmolLM2's 576 k in groups of 128 is one of 640.

        Args:
            rows: physical rows of the weight.
            width: its k.
            bits: of a code.
            group: one of ``GROUPS``, ``CHANNEL``, or 0 for codes whose scales stand elsewhere.
            zeros: whether zero points stand beside the scales.
            tiles: row tiles of a record.
            record_bytes: of its codes, at most; one block or one group always fits.

        Raises:
            ArgumentError: no rows, no k, unknown bits or group.
        """
        require(
            group in (0, CHANNEL, *GROUPS),
            "group",
            group,
            f"one of {GROUPS}, {CHANNEL} for one scale a feature, or 0 for none",
            "choose a supported group",
        )
        require(bits in _BITS, "bits", bits, f"one of {_BITS}", "use INT4, FP8 or 16 bits")
        counts = {"rows": rows, "width": width, "tiles": tiles, "record_bytes": record_bytes}
        for name, got in counts.items():
            require(got >= 1, name, got, "at least 1", "give a weight and whole row tiles")
        unit = max(BLOCK, group)
        most = max(record_bytes * 8 // (bits * TILE_ROWS * tiles) // unit, 1)
        units = -(-width // unit)
        along = -(-units // most)
        depth = -(-units // along) * unit
        record = Record(bits, depth, tiles, depth if group == CHANNEL else group, zeros)
        return Records(record, -(-rows // record.rows), along)

    @property
    def rows(self) -> int:
        """Physical rows, padding included."""
        return self.down * self.record.rows

    @property
    def width(self) -> int:
        """k, padding included."""
        return self.along * self.record.depth

    @property
    def nbytes(self) -> int:
        """Bytes of the whole weight."""
        return self.down * self.along * self.record.size

    def record_offset(self, down: Any, along: Any) -> Any:
        """Where a record begins, in 64 bits: weights pass 2^31 bytes.

        Raises:
            ArgumentError: a DSL integer narrower than 64 bits.
        """
        if isinstance(down, np.ndarray | np.integer):
            down = down.astype(np.int64)
        bits = getattr(down, "width", 64)
        require(bits >= 64, "down", f"{bits} bits", "64 bits", "widen first: Int64(down)")
        return (down * self.along + along) * self.record.size
