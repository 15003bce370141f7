"""Tiles, buffers and warps of a decode attention kernel, and the choice of them."""

from __future__ import annotations

from dataclasses import dataclass, replace

from epicute.attention.decode_fragments import TABLE
from epicute.attention.decode_spec import DecodeSpec
from epicute.attention.decode_work import Cut
from epicute.errors import require
from epicute.layouts.kv_int4 import Int4Record

__all__ = ["DecodeSchedule", "choose_decode"]

SMEM = 227 * 1024

RING = 96 * 1024
"""Bytes of keys and values in shared memory, which keep memory busy."""

RING_OF_RECORDS = 102 * 1024
"""The same of records: as many as the rest leaves room for, as what is at hand lasts while a piece ends."""

MOST_GROUPS = 4
"""Groups of warps with columns of their own."""

SHARED = 110 * 1024
"""Bytes of shared memory of a CTA, where that can be kept: two kernels of a chain then fit on an SM."""

TABLE_BYTES = 1024
"""The table of byte codes: 256 words."""

NEW_ROW_BYTES = 144
"""Of a new row in shared memory: 64 of nibbles of keys and of values each, two scales, to a multiple of 16."""

MAIL_SLOTS = 4
MAIL_FIELDS = 10
"""Work items in shared memory, and their 32-bit integers."""

TRADED = (72, 216)
"""Registers of a thread that loads, and of one that multiplies, where they trade."""

PARTS_OF_REQUEST = 256
"""Parts of all KV heads of a request together: about two for each SM."""


@dataclass(frozen=True)
class DecodeSchedule:
    """How the kernel is cut.

    Attributes:
        tile: tokens of a tile of keys and values.
        warps: that multiply.
        stages: tiles in shared memory.
        part: tokens of a part at least (``batch_invariant``).
        unpack: how nibbles become numbers: ``arithmetic``, or ``table``, the paper's table of 256 byte codes.
        resident: CTAs for which an SM's registers suffice: 1, or 2, so that the next kernel's stands beside this one's.
        carveout: percent of an SM's memory that is shared memory; None for the driver's choice. Kernels of one chain
            need the same.
    """

    tile: int = 64
    warps: int = 4
    stages: int = 3
    part: int = 256
    unpack: str = "arithmetic"
    resident: int = 1
    carveout: int | None = None

    def __post_init__(self) -> None:
        for name, allowed in (
            ("tile", (32, 64, 128)),
            ("warps", (1, 2, 4, 8)),
            ("stages", tuple(range(1, 17))),
            ("unpack", ("arithmetic", "table")),
            ("resident", (1, 2)),
            ("carveout", (None, *range(101))),
        ):
            value = getattr(self, name)
            require(value in allowed, name, value, f"one of {allowed}", "choose another")
        require(
            self.resident == 1 or self.carveout is not None,
            "carveout",
            None,
            "a number where two CTAs are to be resident, as the compiler asks the driver else",
            "write carveout=100",
        )
        require(
            type(self.part) is int and self.part > 0 and self.part % self.tile == 0,
            "part",
            self.part,
            f"a multiple of the tile's {self.tile} tokens",
            "choose another",
        )

    def trades(self, spec: DecodeSpec) -> bool:
        """Whether the warps that multiply take registers of the loading one, as their outputs need more."""
        return self.warps == 8 and spec.head_dim * self.column_tiles(spec) > 128

    def threads(self, spec: DecodeSpec) -> int:
        """Threads of a CTA: the warps that multiply, one that loads, a scribe; registers are traded by four warps."""
        return 32 * (self.warps + (4 if self.trades(spec) else 2))

    @property
    def tabled(self) -> bool:
        """Whether nibbles become numbers by a table."""
        return self.unpack == "table"

    def order(self, spec: DecodeSpec) -> str:
        """Order of channels in fragments, see ``decode_fragments``."""
        return TABLE if self.tabled else spec.cache

    def blocks(self, spec: DecodeSpec) -> int:
        """Blocks of columns of a KV head, each with CTAs of its own."""
        return -(-spec.columns // self.block_columns(spec))

    def block_columns(self, spec: DecodeSpec) -> int:
        """Columns of a block: what a CTA multiplies at once."""
        return 8 * self.column_tiles(spec) * MOST_GROUPS

    def column_tiles(self, spec: DecodeSpec) -> int:
        """Tiles of eight columns of a warp; one of heads of 256, of whose outputs registers hold no more."""
        return 1 if spec.columns <= 8 or spec.head_dim > 128 else 2

    def groups(self, spec: DecodeSpec) -> int:
        """Groups of warps, each with columns of its own; a power of two."""
        columns = min(spec.columns, self.block_columns(spec))
        needed = -(-columns // (8 * self.column_tiles(spec)))
        return 1 << (needed - 1).bit_length()

    def sharers(self, spec: DecodeSpec) -> int:
        """Warps of a group, which share the tokens of a tile."""
        return self.warps // self.groups(spec)

    def columns(self, spec: DecodeSpec) -> int:
        """Columns of a CTA, those that pad included."""
        return 8 * self.column_tiles(spec) * self.groups(spec)

    def live_columns(self, spec: DecodeSpec) -> int:
        """Columns of a CTA that are query rows, in some block."""
        return min(self.columns(spec), spec.columns)

    def unit(self, spec: DecodeSpec) -> int:
        """Tokens that are copied at a time: a page, or a tile where that is smaller."""
        return self.tile if spec.page is None else min(spec.page, self.tile)

    def stage_bytes(self, spec: DecodeSpec) -> int:
        """Bytes of a tile of keys and values, with their scales."""
        if spec.packed:
            unit = self.unit(spec)
            return self.tile // unit * Int4Record(unit, spec.head_dim).bytes
        return 2 * self.tile * spec.row_bytes

    def merge_tiles(self, spec: DecodeSpec) -> int:
        """Sixteens of channels that warps exchange at a time: as many as there is room for.

        A CTA that takes all registers stands alone on its SM, and has all of its memory.
        """
        least = self._least_tiles
        room = SMEM if self.trades(spec) else SHARED
        for count in self._tile_counts(spec):
            if self.borrows(spec):
                fits = self._exchanged(spec, count) <= self.stage_bytes(spec)
            else:
                fits = self._total(spec, count) <= room
            if fits:
                return count
        return least

    @property
    def _least_tiles(self) -> int:
        return 4 if self.tabled else 2

    def _tile_counts(self, spec: DecodeSpec) -> list[int]:
        """What may be exchanged at a time, the most first."""
        everything = spec.head_dim // 16
        return [n for n in (everything, 8, 4, 2) if self._least_tiles <= n <= everything]

    def _exchanged(self, spec: DecodeSpec, tiles: int) -> int:
        return self.sharers(spec) * self.live_columns(spec) * (16 * tiles + 4) * 4

    def borrows(self, spec: DecodeSpec) -> bool:
        """Whether warps meet in the stage of a piece's last tile, which is given back only then."""
        return self._exchanged(spec, self._least_tiles) <= self.stage_bytes(spec)

    def merge_bytes(self, spec: DecodeSpec) -> int:
        """Bytes of their own in which warps meet with their outputs at a piece's end."""
        return 0 if self.borrows(spec) else self._exchanged(spec, self.merge_tiles(spec))

    def query_bytes(self, spec: DecodeSpec) -> int:
        """Bytes of a piece's rotated queries; between quarters of a row lie two words for each of its columns."""
        return self.live_columns(spec) * self.query_pitch(spec) if spec.packed else 0

    def query_pitch(self, spec: DecodeSpec) -> int:
        """Bytes of a rotated query in shared memory: four runs of channels, apart so that no two meet in a bank."""
        return 4 * (spec.head_dim // 2 + 16)

    def append_bytes(self, spec: DecodeSpec) -> int:
        """Bytes of a piece's new rows, quantised: their nibbles of keys and of values, and two scales."""
        return spec.rows * NEW_ROW_BYTES if spec.append else 0

    def shared_memory(self, spec: DecodeSpec) -> int:
        """Bytes of shared memory of a CTA, the allocator's alignment included."""
        return self._total(spec, self.merge_tiles(spec))

    def _total(self, spec: DecodeSpec, tiles: int) -> int:
        found = self.stages * self.stage_bytes(spec)
        found += 0 if self.borrows(spec) else self._exchanged(spec, tiles)
        found += TABLE_BYTES * self.tabled + 2 * (self.append_bytes(spec) + self.query_bytes(spec))
        return found + self.warps * 8 * self.column_tiles(spec) * 8 + 16 * self.stages + 512

    def parts(self, spec: DecodeSpec) -> int | None:
        """Most parts of a head of a request; None where work is cut by tiles."""
        if not spec.batch_invariant:
            return None
        return max(8, PARTS_OF_REQUEST // (spec.kv_heads * self.blocks(spec)))

    def cut(self, spec: DecodeSpec) -> Cut:
        """What decides the pieces."""
        return Cut(
            self.tile,
            spec.rows,
            spec.window,
            spec.kv_heads * self.blocks(spec),
            self.parts(spec),
            self.part // self.tile,
        )

    def check(self, spec: DecodeSpec) -> None:
        """Refuse what does not fit."""
        used = self.shared_memory(spec)
        require(
            used <= SMEM,
            "schedule",
            f"{self}, {used} bytes of shared memory",
            f"at most {SMEM}",
            "use fewer stages or a smaller tile",
        )
        sharers = self.sharers(spec)
        require(
            sharers >= 1 and self.tile // 16 % sharers == 0,
            "warps",
            self.warps,
            f"{self.groups(spec)} groups of warps that divide {self.tile // 16} sixteens of tokens",
            "choose more warps, or a larger tile",
        )
        # What one CTA trades for is all that an SM has, and warps would wait for it forever.
        require(
            self.resident == 1 or not self.trades(spec),
            "resident",
            self.resident,
            f"1 where {self.warps} warps take registers of the loading ones",
            "choose 4 warps, or leave resident out",
        )
        require(
            self.unpack == "arithmetic" or spec.packed,
            "unpack",
            self.unpack,
            "arithmetic for a cache without nibbles",
            "leave it out",
        )
        require(
            not spec.packed or spec.page is None or spec.page <= self.tile,
            "tile",
            self.tile,
            f"at least the page's {spec.page} tokens, as records are copied whole",
            "choose a tile of 128",
        )

    def __str__(self) -> str:
        shown = f"tiles of {self.tile}, {self.stages} stages, {self.warps} warps"
        return shown + (", table" if self.tabled else "")


def choose_decode(spec: DecodeSpec) -> DecodeSchedule:
    """The schedule for ``spec`` on Hopper.

    Wide rows keep four warps at the pace of memory; narrow ones need eight, or their latency shows. Of records so
    little is read that the beginning and the end of a kernel show: where they can, the next one's CTAs stand beside
    this one's. Four warps leave registers for that of themselves.
    """
    tile, warps = (128, 8) if spec.row_bytes <= 128 else (64, 4)
    one = DecodeSchedule(tile, warps, 1).stage_bytes(spec)
    found = DecodeSchedule(tile, warps, max(2, min(8, RING // one)))
    if spec.packed:
        more = replace(found, stages=min(8, RING_OF_RECORDS // one))
        found = more if more.shared_memory(spec) <= SHARED else found
    fits = _leaves_registers(spec, found) and found.shared_memory(spec) <= SHARED
    return replace(found, resident=2, carveout=100) if fits else found


def _leaves_registers(spec: DecodeSpec, schedule: DecodeSchedule) -> bool:
    """Whether two CTAs of eight warps have registers enough, 96 for each thread."""
    if schedule.warps < 8 or schedule.column_tiles(spec) > 1:
        return False
    # A cap needs more, and so do the statistics of an output that is quantised.
    if spec.softcap is not None or spec.out_is_fp8:
        return False
    plain = spec.rows == 1 and spec.window is None and spec.head_dim <= 128 and spec.page != 16
    return spec.packed or (spec.cache == "fp8" and plain)
