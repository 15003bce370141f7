"""Shared memory of the QK4PV8 decode kernel: what lies where. Imports the DSL.

k        key stages of a tile's pages, each as in memory: nibbles, then scales
v        stages of V^T, page blocks of head_dim rows of page_size bytes, swizzled as TMA writes them and WGMMA reads
delta    key stages of a tile's pages of ΔS: (query head, term, token) of each
q        two of (columns, head_dim) float16, channels in the order of ``layouts.kv_fragments``, 128-byte swizzle
p        a tile's probabilities of each warpgroup: (columns, 128) E4M3 in the token order of V^T, 128-byte swizzle
rows     two new tokens: nibbles, scales, values, ΔS
peaks    of each warpgroup: (warp, column), of a tile
sums     of each warpgroup: (warp, column) sums of a part, then (column) maxima
out      (heads of a block, head_dim + 4) float32: where warpgroups meet
folded   as out: a head's parts so far, with their maximum and sum behind the outputs
"""

from __future__ import annotations

from typing import Any, NamedTuple

import cutlass
from cutlass import Int32, Int64, cute
from cutlass import memory as cutlass_memory
from cutlass.cute.nvgpu import warpgroup

from epicute.attention.mixed_decode_spec import (
    GROUPS,
    MAIL_SLOTS,
    ROW_PAD,
    TILE,
    MixedDecodeSchedule,
    MixedDecodeSpec,
)

__all__ = [
    "FULL_TURNS",
    "Barriers",
    "Layout",
    "Shared",
    "global_view",
    "load_from",
    "shared_view",
    "value_place",
]

MAIL_FIELDS = 12
MAIL_BYTES = 48
"""Of a slot of the mailbox."""

FULL_TURNS = 2
"""Turns of the ring that have mbarriers of their own for what has come; see ``mixed_decode``."""


class Shared(NamedTuple):
    """Addresses in shared memory, and the tensors that products are made of."""

    k: Any
    v: Any
    delta: Any
    q: Any
    p: Any
    rows: Any
    peaks: Any
    sums: Any
    out: Any
    folded: Any
    flag: Any
    mail: Any
    v_tensor: Any
    q_tensor: Any
    p_tensor: Any


class Barriers(NamedTuple):
    """mbarriers: of the ring, of the mailbox, of the queries."""

    full: Any
    empty: Any
    keys_empty: Any
    posted: Any
    taken: Any
    q_full: Any
    q_empty: Any


def _view(dtype: Any, address: Any, count: int, alignment: int, space: Any) -> Any:
    pointer = cute.make_ptr(dtype, address, space, assumed_align=alignment)
    return cute.make_tensor(pointer, cute.make_layout(count))


def shared_view(dtype: Any, address: Any, count: int = 1, alignment: int = 0) -> Any:
    """``count`` elements of shared memory."""
    alignment = alignment or dtype.width // 8 * count
    return _view(dtype, address, count, alignment, cute.AddressSpace.smem)


def global_view(dtype: Any, address: Any, count: int = 1, alignment: int = 0) -> Any:
    """``count`` elements of global memory."""
    alignment = alignment or dtype.width // 8 * count
    return _view(dtype, address, count, alignment, cute.AddressSpace.gmem)


def load_from(source: Any) -> list[Any]:
    """A tensor's elements, in registers."""
    found = cute.make_rmem_tensor(cute.size(source), source.element_type)
    cute.autovec_copy(source, found)
    return [found[i] for i in range(cute.size(source))]


def value_place(channel: Any, position: Any, head_dim: int, page_size: int) -> Any:
    """Byte of a tile of V^T in shared memory at which a ``channel`` and a physical token ``position`` lie."""
    within = channel * page_size + position % page_size
    swizzled = within ^ ((within // 128 % (page_size // 16)) * 16)
    return position // page_size * (head_dim * page_size) + swizzled


class Layout:
    """Shared memory of a spec and schedule."""

    def __init__(self, spec: MixedDecodeSpec, schedule: MixedDecodeSchedule) -> None:
        self.spec, self.schedule = spec, schedule
        page = spec.page
        self.page_tokens, self.pages = page.page_size, TILE // page.page_size
        self.key_page = page.page_size * (page.row_bytes + page.blocks)
        self.key_stage = self.pages * self.key_page
        self.value_stage = TILE * page.head_dim
        self.delta_page = spec.group * spec.terms * page.page_size * 2
        self.delta_stage = self.pages * self.delta_page
        self.query_bytes = spec.columns * page.head_dim * 2
        self.p_bytes = spec.columns * TILE
        self.pitch = page.head_dim + ROW_PAD
        # Of a new token's row: nibbles, scales, values, ΔS.
        self.row_scales = page.row_bytes
        self.row_values = page.row_bytes + 16
        self.row_delta = self.row_values + page.head_dim
        size = self.row_delta + 2 * spec.columns * max(spec.terms, 1)
        self.row_bytes = -(-size // 16) * 16

    def _atom(self, dtype: Any, width: int) -> Any:
        kinds = warpgroup.SmemLayoutAtomKind
        kind = {128: kinds.K_SW128, 64: kinds.K_SW64, 32: kinds.K_SW32}[width]
        return warpgroup.make_smem_layout_atom(kind, dtype)

    def value_atom(self) -> Any:
        """Of a page's rows of V^T."""
        return self._atom(cutlass.Float8E4M3FN, self.page_tokens)

    def tensors(self) -> dict[str, Any]:
        """Layouts of what products are made of: values, queries, probabilities."""
        columns, width = self.spec.columns, self.spec.page.head_dim
        shapes = {
            "v": (self.value_atom(), (width, TILE, self.schedule.stages)),
            "q": (self._atom(cutlass.Float16, 128), (columns, width, 2)),
            "p": (self._atom(cutlass.Float8E4M3FN, 128), (columns, TILE, GROUPS)),
        }
        return {
            name: cute.tile_to_shape(atom, shape, (0, 1, 2))
            for name, (atom, shape) in shapes.items()
        }

    def stages(self, ring: Any) -> tuple[Any, Any]:
        """Stages of keys and of values of the ``ring``-th tile of a CTA."""
        return ring % self.schedule.key_stages, ring % self.schedule.stages

    def full(self, ring: Any) -> tuple[Any, Any]:
        """(mbarrier of ``full``, parity) of the ``ring``-th tile of a CTA."""
        count = FULL_TURNS * self.schedule.stages
        return ring % count, ring // count % 2

    def allocate(self, layouts: dict[str, Any]) -> tuple[Shared, Barriers]:
        """All of it."""
        allocator = cutlass_memory.SmemAllocator()
        tensors = {}
        for name, dtype in (
            ("v", cutlass.Float8E4M3FN),
            ("q", cutlass.Float16),
            ("p", cutlass.Float8E4M3FN),
        ):
            layout = layouts[name]
            tensors[name] = allocator.allocate_tensor(
                dtype, layout.outer, 1024, swizzle=layout.inner
            )
        stages, keys = self.schedule.stages, self.schedule.key_stages
        columns = self.spec.columns
        sizes = {
            "k": keys * self.key_stage,
            "delta": max(keys * self.delta_stage, 16),
            "rows": MAIL_SLOTS * self.row_bytes,
            "peaks": GROUPS * 4 * columns * 4,
            "sums": GROUPS * 5 * columns * 4,
            "out": min(self.spec.group, columns) * self.pitch * 4,
            "folded": min(self.spec.group, columns) * self.pitch * 4,
            "flag": 16,
            "mail": MAIL_SLOTS * MAIL_BYTES,
        }
        found = {
            name: Int32(allocator.allocate_array(cutlass.Uint8, n, byte_alignment=16).toint())
            for name, n in sizes.items()
        }
        for name, tensor in tensors.items():
            found[name] = Int32(tensor.iterator.toint())
        shared = Shared(
            **found,
            v_tensor=tensors["v"],
            q_tensor=tensors["q"],
            p_tensor=tensors["p"],
        )
        counts = (FULL_TURNS * stages, stages, keys, MAIL_SLOTS, MAIL_SLOTS, 2, 2)
        return shared, Barriers(*(allocator.allocate_array(Int64, n) for n in counts))
