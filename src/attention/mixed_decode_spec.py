"""What a decode kernel over QK4PV8 pages is compiled for, how it is cut, and how it gets its operands."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

import torch

from epicute.attention.decode_work import Cut
from epicute.attention.spec import HALVES
from epicute.errors import UnsupportedError, require
from epicute.layouts.qk4pv8 import QK4PV8Page

__all__ = [
    "MIXED_DECODE_ARGUMENTS",
    "MixedDecodeSchedule",
    "MixedDecodeSpec",
    "choose_mixed_decode",
    "decode_at",
]

MIXED_DECODE_ARGUMENTS = (
    *("q", "q_batch", "q_head", "out", "out_batch", "out_head", "lse", "lse_batch", "lse_head"),
    *("records", "page_stride", "head_stride", "pages", "delta"),
    *("new_k", "new_k_batch", "new_k_head", "new_v", "new_v_batch", "new_v_head"),
    *("k_mean", "q_mean", "mean_groups"),
    *("kv_lengths", "page_table", "table_row"),
    *("k_scale", "v_scale", "unit", "counters", "stats", "partials"),
    *("batch", "ctas"),
)
"""Addresses, 0 where there is none; strides in bytes. ``unit``: bits of the FP32 number that makes powers of two of the
products, scale · k_scale · 2^7 · log2 e. ``stats``: (slots, group, 2) float32, maximum in powers of two and sum;
``partials``: (slots, group, head_dim) float32; ``counters``: int32, one for each head of each request."""

PLACES = {name: i for i, name in enumerate(MIXED_DECODE_ARGUMENTS)}

TILE = 128
"""Tokens of a step: what FP8 sums are promoted after."""

COLUMNS = (8, 16)
"""Query heads that are multiplied at once, those that pad included."""

GROUPS = 2
"""Warpgroups that multiply; tiles of a part are dealt to them in turn."""

MAIL_SLOTS = 2

SMEM_OF_TWO = 113 * 1024
"""Bytes of a CTA of which an SM holds two, of one launch or of two in a chain."""

ROW_PAD = 4
"""Floats behind a column's outputs where warpgroups meet: its maximum and sum among them."""


def decode_at(name: str) -> int:
    """Index of an argument in the tuple."""
    return PLACES[name]


@dataclass(frozen=True)
class MixedDecodeSpec:
    """Attention of each request's last token over its QK4PV8 cache, of one layer (MpFA 5.4).

    Every field is part of the compile key; lengths, batch, page tables and strides are not.

    Attributes:
        heads, kv_heads: heads of q, and of the cache; ``kv_heads`` divides ``heads`` (any ratio).
        page: layout of the cache's pages, order exact16 or fast8; NVFP4 keys are dequantised exactly in either.
        terms: BF16 terms of ΔS beside the records; 0 where keys are not smoothed.
        dtype: of q, the output and new rows, bfloat16 or float16.
        p_scale: of probabilities, 448 or 256.
        lse: also write the natural logarithm of the sum of exponentials, float32; of smoothed keys it lacks
            ``quant.smoothing.lse_shift``.
        append: the newest token is in no page yet: its key and value come as 16-bit rows, are quantised, used, and
            stored by the CTA that owns the request's last part.
        k_scaled, v_scaled: with ``append``: whether the cache's scales are other than 1.
        scale: of the logits. None: head_dim ** -0.5.
        prefetch: pages, lengths and the page table are read before the kernel in front has ended. The caller vouches
            that it writes none of them.
    """

    heads: int
    kv_heads: int
    page: QK4PV8Page
    terms: int = 0
    dtype: torch.dtype = torch.bfloat16
    p_scale: int = 448
    lse: bool = False
    append: bool = True
    k_scaled: bool = False
    v_scaled: bool = False
    scale: float = None  # type: ignore[assignment]  # becomes head_dim ** -0.5
    prefetch: bool = False

    def __post_init__(self) -> None:
        for name, value in (("scale", float(self.page.head_dim) ** -0.5),):
            if getattr(self, name) is None:
                object.__setattr__(self, name, value)
        for name in ("heads", "kv_heads"):
            value = getattr(self, name)
            require(
                type(value) is int and value > 0,
                name,
                value,
                "a positive integer",
                "read it from the model's configuration",
            )
        require(
            self.heads % self.kv_heads == 0,
            "kv_heads",
            self.kv_heads,
            f"a divisor of heads={self.heads}",
            "check the configuration; under tensor parallelism repeat the KV heads",
        )
        require(
            self.page.order in ("exact16", "fast8"),
            "page.order",
            self.page.order,
            "exact16 or fast8",
            "tcgen05 pages are Blackwell's",
            UnsupportedError,
        )
        for name, allowed in (
            ("terms", (0, 1, 2, 3)),
            ("dtype", HALVES),
            ("p_scale", (448, 256)),
        ):
            value = getattr(self, name)
            require(value in allowed, name, value, f"one of {allowed}", "choose another")
        require(
            0 < self.scale < math.inf,
            "scale",
            self.scale,
            "a positive finite number, or None",
            "leave it out for head_dim ** -0.5",
        )

    @property
    def group(self) -> int:
        """Query heads of a KV head."""
        return self.heads // self.kv_heads

    @property
    def columns(self) -> int:
        """Columns of a product."""
        return COLUMNS[0] if self.group <= COLUMNS[0] else COLUMNS[1]

    @property
    def blocks(self) -> int:
        """Blocks of columns of a KV head, each of which reads its keys."""
        return -(-self.group // self.columns)

    @property
    def fields(self) -> tuple[tuple[str, object], ...]:
        """For the compile key."""
        page = [(name, getattr(self.page, name)) for name in ("page_size", "head_dim", "order")]
        own = [(f.name, getattr(self, f.name)) for f in fields(self) if f.name != "page"]
        return tuple(page + own)

    def __str__(self) -> str:
        shown = f"{self.heads}:{self.kv_heads} heads of {self.page.head_dim}, {self.page.order}, "
        shown += f"page {self.page.page_size}, {self.terms} terms, {str(self.dtype)[6:]}"
        return shown + ("" if self.append else ", all in pages")


@dataclass(frozen=True)
class MixedDecodeSchedule:
    """How the kernel is cut.

    Attributes:
        stages: tiles' values in shared memory.
        key_stages: tiles' keys and ΔS there, which are done with sooner.
        part: tokens of a part at least; a request's parts depend on its own length alone.
        ctas: of an SM, at most.
        carveout: percent of an SM's memory that is shared memory, or -1 for the driver's choice, which may leave room
            for one CTA alone. Kernels that overlap in a chain need the same.
    """

    stages: int
    key_stages: int = 2
    part: int = 256
    ctas: int = 2
    carveout: int = 100

    def __post_init__(self) -> None:
        require(
            min(self.stages, self.key_stages) >= 2
            and self.part % TILE == 0
            and self.part > 0
            and self.ctas in (1, 2)
            and -1 <= self.carveout <= 100,
            "schedule",
            self,
            f"two stages or more, a part of whole tiles of {TILE}, one or two CTAs, a carveout from -1 to 100",
            "choose another",
        )

    def parts(self, spec: MixedDecodeSpec) -> int:
        """Most parts of a head of a request: about one of all heads together for each SM."""
        return max(8, 128 // (spec.kv_heads * spec.blocks))

    def cut(self, spec: MixedDecodeSpec) -> Cut:
        """What decides the parts, as ``decode_work`` takes it."""
        heads = spec.kv_heads * spec.blocks
        return Cut(TILE, 1, None, heads, self.parts(spec), self.part // TILE)

    def launched(self, spec: MixedDecodeSpec, batch: int, processors: int) -> int:
        """CTAs of a launch.

        One on each SM where two have little to share: then the next launch's first tiles come while this one ends.
        """
        parts = batch * spec.kv_heads * spec.blocks * self.parts(spec)
        return processors * (1 if parts <= 2 * processors else self.ctas)

    @staticmethod
    def stage_bytes(spec: MixedDecodeSpec) -> tuple[int, int]:
        """Bytes of a tile's values, and of its keys, scales and ΔS."""
        delta = spec.group * spec.terms * TILE * 2
        return TILE * spec.page.head_dim, TILE * (spec.page.row_bytes + spec.page.blocks) + delta

    @staticmethod
    def fixed_bytes(spec: MixedDecodeSpec) -> int:
        """Bytes of shared memory beside the ring, mailbox and mbarriers included."""
        columns, width = spec.columns, spec.page.head_dim
        queries = 2 * columns * width * 2
        probabilities = GROUPS * columns * TILE
        outputs = 2 * min(spec.group, columns) * (width + ROW_PAD) * 4
        meeting = GROUPS * 9 * columns * 4
        rows = MAIL_SLOTS * (2 * width + 2 * columns * max(spec.terms, 1))
        return queries + probabilities + outputs + meeting + rows + 512

    def shared_memory(self, spec: MixedDecodeSpec) -> int:
        """Bytes of shared memory of a CTA."""
        values, keys = self.stage_bytes(spec)
        return self.stages * values + self.key_stages * keys + self.fixed_bytes(spec)


def choose_mixed_decode(spec: MixedDecodeSpec) -> MixedDecodeSchedule:
    """The schedule for ``spec`` on Hopper: two CTAs on an SM, each with as many tiles in flight as there is room for.

    One, where two tiles do not fit twice, or where sixteen columns of 128 channels take more registers than two leave.
    """
    two = _stages(spec, SMEM_OF_TWO)
    if two is not None and spec.columns * spec.page.head_dim <= 1024:
        return MixedDecodeSchedule(*two)
    one = _stages(spec, 2 * SMEM_OF_TWO)
    require(
        one is not None,
        "heads",
        f"{spec.group} for each KV head, {spec.terms} terms of ΔS",
        "two tiles in shared memory",
        "store fewer terms, or repeat the KV heads",
        UnsupportedError,
    )
    return MixedDecodeSchedule(*one, ctas=1)  # type: ignore[misc]  # there is one


def _stages(spec: MixedDecodeSpec, room: int) -> tuple[int, int] | None:
    """Most tiles of values, and of keys as many or one fewer, that fit; None where there are fewer than two."""
    values, keys = MixedDecodeSchedule.stage_bytes(spec)
    room -= MixedDecodeSchedule.fixed_bytes(spec)
    for count in range(8, 1, -1):
        for other in (count, max(count - 1, 2)):
            if count * values + other * keys <= room:
                return count, other
    return None
