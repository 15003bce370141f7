"""Buffers, barriers and views of memory of the mixed-precision kernel. Imports the DSL."""

from __future__ import annotations

from typing import Any

import cutlass
from cutlass import Float32, Int32, Int64, cute, pipeline
from cutlass import memory as cutlass_memory
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup

from epicute.attention import mixed_places as places
from epicute.attention.mixed import MixedSchedule, MixedSpec
from epicute.attention.mixed import mixed_at as at
from epicute.attention.schedule import MAILBOX
from epicute.attention.sm90.kernel import HopperAttention
from epicute.attention.sm90.mixed_convert import MixedConverter
from epicute.attention.sm90.mixed_softmax import MixedFinish
from epicute.attention.sm90.scheduler import ITEM_FIELDS, Scheduler
from epicute.gemm.memory import DSL_DTYPES

__all__ = ["CONVERTING", "E4M3", "MixedBuffers"]

E4M3 = cutlass.Float8E4M3FN
CONVERTING = 128
"""Threads that convert."""


class MixedBuffers(HopperAttention):
    """What the roles of the kernel share; of the plain kernel it takes the views and loads of rows."""

    spec: Any
    schedule: Any
    converter: Any

    def __init__(self, given: MixedSpec, cut: MixedSchedule, name: str) -> None:
        # What the plain kernel's rooms read of a spec and a schedule, these have too.
        spec: Any = given
        schedule: Any = cut
        self.spec, self.schedule, self.name = spec, schedule, name
        self.dtype = DSL_DTYPES[spec.dtype]
        self.tile_m, self.tile_n = schedule.tile_m, schedule.tile_n
        self.head_dim, self.cluster = spec.head_dim, schedule.cluster
        self.groups, self.stages = schedule.groups, schedule.stages
        self.chunk = 64
        self.chunks = self.head_dim // 64
        self.share = self.tile_n // self.cluster
        self.box = self.share if spec.page is None else min(spec.page, self.share)
        self.scheduler = Scheduler(spec, schedule)
        self.finish = MixedFinish(spec)
        self.converter = MixedConverter(spec, schedule)
        self.raw_dtype = E4M3
        # For the loads of the plain kernel: rows of keys and values are one box wide.
        self.converted = True
        self.key_dtype = cutlass.Float16 if spec.wide else E4M3
        self.value_width = places.value_width(spec.page if spec.recorded else None)
        self.values_box = self.head_dim // self.cluster
        self.outer = spec.terms > 0 and spec.placement == "mma"

    # --- layouts ---

    def _tile(self, dtype: Any, rows: int, columns: int, width: int, stages: int = 0) -> Any:
        """K-major tile, ``width`` bytes wide chunks; without stages one box."""
        kinds = warpgroup.SmemLayoutAtomKind
        kind = {128: kinds.K_SW128, 64: kinds.K_SW64, 32: kinds.K_SW32}[width]
        atom = warpgroup.make_smem_layout_atom(kind, dtype)
        if stages == 0:
            return cute.tile_to_shape(atom, (rows, columns), (0, 1))
        return cute.tile_to_shape(atom, (rows, columns, stages), (0, 1, 2))

    def _layouts(self) -> dict[str, Any]:
        """Every swizzled buffer: (dtype, layout)."""
        spec, schedule = self.spec, self.schedule
        m, n, d = self.tile_m, self.tile_n, self.head_dim
        narrow = min(d, 128)
        found = {
            "q": (self.dtype, self._tile(self.dtype, m, d, 128, 2)),
            "k": (
                self.key_dtype,
                self._tile(self.key_dtype, n, d, 128 if spec.wide else narrow, self.stages),
            ),
            "v": (E4M3, self._tile(E4M3, d, n, self.value_width, schedule.v_stages)),
        }
        if spec.recorded:
            layout = self._tile(E4M3, n, d // 2, d // 2, schedule.raw_stages)
        else:
            layout = self._tile(E4M3, n, d, narrow, schedule.raw_stages)
        found["raw"] = (E4M3, layout)
        if self.outer:
            half = cutlass.BFloat16
            found["one"] = (half, self._tile(half, m, 16, 32, 2))
            found["delta"] = (half, self._tile(half, n, 16, 32, self.stages))
        return found

    def _allocate_all(self, layouts: dict[str, Any]) -> dict[str, Any]:
        spec, schedule, n = self.spec, self.schedule, self.tile_n
        allocator = cutlass_memory.SmemAllocator()
        shared = {}
        for name, (dtype, layout) in layouts.items():
            shared[name] = allocator.allocate_tensor(
                dtype, layout.outer, 1024, swizzle=layout.inner
            )
        flat: dict[str, tuple[Any, tuple[Any, ...]]]
        flat = {"mail": (Int32, (ITEM_FIELDS, MAILBOX)), "scales": (Float32, (self.tile_m, 2))}
        if spec.recorded:
            flat["factors"] = (Int32, (n * self.head_dim // 64, schedule.raw_stages))
            if spec.terms:
                pages = n // spec.page
                count = places.delta_bytes(spec.page, spec.terms) // 2
                flat["terms"] = (cutlass.BFloat16, (count, pages, schedule.raw_stages))
                flat["mean"] = (Float32, (self.head_dim, 2))
                if not self.outer:
                    flat["delta"] = (Float32, (n, self.stages))
            if not spec.wide:
                flat["table"] = (Int32, (256,))
        for name, (dtype, shape) in flat.items():
            shared[name] = allocator.allocate_tensor(dtype, cute.make_layout(shape), 128)
        counts = {"q": 2, "ready": 2, "k": self.stages, "v": schedule.v_stages}
        for name, count in (counts | {"raw": schedule.raw_stages, "mail": MAILBOX}).items():
            shared[f"{name}_barriers"] = allocator.allocate_array(Int64, 2 * count)
        return shared

    def _multiplied(self, shared: dict[str, Any]) -> None:
        """Queries as the products read them, over the bytes in which they arrived."""
        dtype, columns = self.key_dtype, self.head_dim * (1 if self.spec.wide else 2)
        layout = self._tile(dtype, self.tile_m, columns, 128, 2)
        pointer = cute.recast_ptr(shared["q"].iterator, layout.inner, dtype=dtype)
        shared["q_mma"] = cute.make_tensor(pointer, layout.outer)

    def _products(self) -> Any:
        """The MMAs of S = Q·Kᵀ, of O += P·V with A in registers, and of ones with the terms of ΔS."""
        k_major, source = OperandMajorMode.K, warpgroup.OperandSource
        shape = (64, self.tile_n)
        if self.spec.wide:
            qk = warpgroup.MmaF16BF16Op(
                self.key_dtype, Float32, (*shape, 16), source.SMEM, k_major, k_major
            )
        else:
            qk = warpgroup.MmaF8Op(E4M3, E4M3, Float32, (*shape, 32), source.SMEM, k_major, k_major)
        columns = self.head_dim // self.schedule.halves(self.spec)
        pv = warpgroup.MmaF8Op(
            E4M3, E4M3, Float32, (64, columns, 32), source.RMEM, k_major, k_major
        )
        outer = warpgroup.MmaF16BF16Op(
            cutlass.BFloat16, Float32, (*shape, 16), source.SMEM, k_major, k_major
        )
        layout = (self.groups, 1, 1)
        return tuple(cute.make_tiled_mma(cute.make_mma_atom(op), layout) for op in (qk, pv, outer))

    def _pipelines(self, shared: dict[str, Any]) -> dict[str, Any]:
        group, agent = pipeline.CooperativeGroup, pipeline.Agent.Thread
        spec, schedule, n, d = self.spec, self.schedule, self.tile_n, self.head_dim
        warps = 4 * self.groups
        cluster = cute.make_layout((1, self.cluster, 1, 1))

        def threads(name: str, stages: int, producers: int, consumers: int) -> Any:
            return pipeline.PipelineAsync.create(
                barrier_storage=shared[f"{name}_barriers"],
                num_stages=stages,
                producer_group=group(agent, producers),
                consumer_group=group(agent, consumers),
                defer_sync=True,
            )

        def bytes_of(name: str, stages: int, count: int, consumers: int, shape: Any = None) -> Any:
            return pipeline.PipelineTmaAsync.create(
                barrier_storage=shared[f"{name}_barriers"],
                num_stages=stages,
                producer_group=group(agent),
                consumer_group=group(agent, consumers),
                tx_count=count,
                cta_layout_vmnk=cluster if shape is None else shape,
                defer_sync=name != "raw",
            )

        alone = cute.make_layout((1, 1, 1, 1))
        centred = 4 * d if spec.terms else 0
        found = {
            "mail": threads("mail", MAILBOX, 32, 32 + CONVERTING + 32 * warps),
            "q": bytes_of("q", 2, self.tile_m * d * 2 + centred, warps, alone),
            "ready": threads("ready", 2, CONVERTING, 32 * warps),
        }
        raw = n * d
        if spec.recorded:
            raw = n * (d // 2 + d // 16) + n * spec.terms * 2
            found["k"] = threads("k", self.stages, CONVERTING, 32 * warps)
            found["v"] = bytes_of("v", schedule.v_stages, n * d, warps * self.cluster)
        else:
            found["k"] = bytes_of("k", self.stages, n * d, warps * self.cluster)
            found["v"] = threads("v", schedule.v_stages, CONVERTING, 32 * warps)
        # The last one to be made fences and waits for all.
        found["raw"] = bytes_of("raw", schedule.raw_stages, raw, CONVERTING // 32 * self.cluster)
        return found

    # --- global memory ---

    def _record_views(self, arguments: Any) -> dict[str, Any]:
        """Views of records and of what is beside them."""
        spec = self.spec
        record, d = spec.record, spec.head_dim
        page, head = (Int64(arguments[at(f"record_{x}")]) for x in ("page", "head"))
        pages = cutlass.max(Int32(arguments[at("record_pages")]), 1)
        start = Int64(arguments[at("records")])

        def view(dtype: Any, offset: int, inner: tuple[int, ...], strides: tuple[int, ...]) -> Any:
            size = dtype.width // 8
            steps = [cute.assume(x // size, 16 // size) for x in (head, page)]
            pointer = cute.make_ptr(dtype, start + offset, cute.AddressSpace.gmem, assumed_align=16)
            layout = cute.make_layout(
                (*inner, spec.kv_heads, pages), stride=(*strides, steps[0], steps[1])
            )
            return cute.make_tensor(pointer, layout)

        size = record.page_size
        found = {
            "keys": view(E4M3, 0, (size, d // 2), (d // 2, 1)),
            "factors": view(Int32, record.scales_start, (size * d // 64, 1), (1, size * d // 64)),
            "values": view(E4M3, record.values_start, (d, size), (size, 1)),
        }
        if spec.terms:
            names = ("term", "head", "page")
            steps = [cute.assume(Int64(arguments[at(f"delta_{x}")]), 8) for x in names]
            pointer = cute.make_ptr(
                cutlass.BFloat16, arguments[at("delta")], cute.AddressSpace.gmem, assumed_align=16
            )
            layout = cute.make_layout(
                (size, spec.terms, spec.heads, pages), stride=(1, steps[0], steps[1], steps[2])
            )
            found["terms"] = cute.make_tensor(pointer, layout)
            pointer = cute.make_ptr(
                Float32, arguments[at("q_mean")], cute.AddressSpace.gmem, assumed_align=16
            )
            groups = cutlass.max(Int32(arguments[at("mean_groups")]), 1)
            layout = cute.make_layout(
                (d, 1, spec.heads, groups), stride=(1, d, d, cute.assume(d * spec.heads, 4))
            )
            found["mean"] = cute.make_tensor(pointer, layout)
        return found

    def _boxes_of(self) -> dict[str, Any]:
        """Boxes of records' parts: (layout in shared memory, shape)."""
        spec, d = self.spec, self.head_dim
        words = self.box * d // 64
        found = {
            "keys": (self._tile(E4M3, self.box, d // 2, d // 2), (self.box, d // 2)),
            "factors": (cute.make_layout((words, 1), stride=(1, words)), (words, 1)),
            "values": (
                self._tile(E4M3, self.values_box, self.value_width, self.value_width),
                (self.values_box, self.value_width),
            ),
        }
        if spec.terms:
            shape = (spec.page, spec.terms)
            found["terms"] = (cute.make_layout(shape), shape)
            found["mean"] = (cute.make_layout((d, 1)), (d, 1))
        return found
