"""Rows of keys and values to the pages of a QK4PV8 cache, as one kernel (MpFA 4.3, 6): ``quantize`` and ``place``.

One pass centres keys, quantises both, computes ΔS = q̄·k_c from the keys before their quantisation and scatters all to
pages. Nibbles, scale bytes, value bytes and the terms of a given FP32 ΔS have the bits of ``QK4PV8Cache.quantize``;
ΔS itself is summed in FP32, by tensor cores from two TF32 terms of each factor, or without them where rows have means
of their own; within 1e-6 of the sum of magnitudes, and the same for a row whatever stands beside it.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any

import numpy as np
import torch

from epicute.errors import UnsupportedError, require
from epicute.jit import CompileKey, ObjectCache, Report, Target, modules_digest
from epicute.kv.pages import slot_is_valid, slots_for
from epicute.kv.qk4pv8 import Memory, QK4PV8Cache
from epicute.layouts.qk4pv8 import QK4PV8Page
from epicute.quant.launch import (
    Launcher,
    anchor_and_stream,
    check_apart,
    check_vector,
    device_of,
    wrong,
)
from epicute.quant.nvfp4 import CastCounters
from epicute.quant.smoothing import Means

__all__ = ["CacheWriteKernel", "CacheWritePlan", "WriteSpec", "plan_cache_write"]

ROWS = 64
"""Rows of a block."""

THREADS = 128
"""Threads of a block."""

CHUNKS = 4
"""Chunks of a wave."""

TOKENS = 16
"""Tokens of a chunk: the group in which V^T permutes them."""

BLOCK = 16
"""Channels of a scale."""

ARGUMENTS = (
    *("keys", "keys_stride", "keys_head", "values", "values_stride", "values_head"),
    *("slots", "page_table", "table_stride", "table_rows", "table_columns"),
    *("positions", "positions_step", "requests", "requests_step", "group", "group_step"),
    *("k_mean", "k_mean_heads", "q_mean", "q_mean_heads"),
    *("records", "page_stride", "head_stride", "delta", "k_scale", "v_scale"),
    *("k_nans", "k_infinities", "k_saturated", "k_flushed"),
    *("v_nans", "v_infinities", "v_saturated"),
    *("rows", "kv_heads", "capacity", "blocks"),
)
"""The kernel's integers: addresses, 0 where there is none; strides in bytes; scales as bits of FP32; sizes."""

MODULES = ("epicute.kv.qk4pv8_write_kernel", "epicute.kv.qk4pv8_write")

DTYPES = (torch.bfloat16, torch.float16)

KERNEL_ORDERS = ("exact16", "fast8")

LARGEST_GROUP = 64
"""Query heads of a KV head whose ΔS shared memory holds."""

LARGEST_T = 2**31 - 2**16
"""Rows that 32-bit block arithmetic can count."""


@dataclass(frozen=True)
class WriteSpec:
    """What decides the kernel's code.

    Attributes:
        page: layout of a page's head, order exact16 or fast8.
        group: query heads of a KV head, 1 to 64.
        terms: BF16 terms of ΔS; 0 without smoothing.
        dtype: of keys and values, bfloat16 or float16.
        grouped: rows have means of their own group (a request's); else one group serves all.
        table: slots come from a page table, positions and requests.
        k_scaled, v_scaled: whether the scales are other than 1.
        counted: losses are counted.
    """

    page: QK4PV8Page
    group: int
    terms: int
    dtype: torch.dtype
    grouped: bool
    table: bool
    k_scaled: bool
    v_scaled: bool
    counted: bool

    def __post_init__(self) -> None:
        require(
            self.page.order in KERNEL_ORDERS,
            "cache.page.order",
            self.page.order,
            f"one of {KERNEL_ORDERS}",
            "write tcgen05 pages with QK4PV8Cache.place",
            UnsupportedError,
        )
        require(
            self.group <= LARGEST_GROUP,
            "cache.q_heads",
            f"{self.group} for each KV head",
            f"at most {LARGEST_GROUP}",
            "repeat the KV heads",
            UnsupportedError,
        )
        require(
            self.dtype in DTYPES,
            "dtype",
            self.dtype,
            " or ".join(map(str, DTYPES)),
            "convert the rows, or write them with QK4PV8Cache.place",
        )
        require(
            self.terms > 0 or not self.grouped,
            "grouped",
            self.grouped,
            "False for a cache without terms of ΔS",
            "leave it out, or give the cache the terms its smoothing needs",
        )

    @property
    def fields(self) -> tuple[tuple[str, Any], ...]:
        """For the compile key."""
        page = ("page_size", "head_dim", "order")
        found = [(name, getattr(self.page, name)) for name in page]
        return tuple(found + [(f.name, getattr(self, f.name)) for f in fields(self)[1:]])


@dataclass(frozen=True)
class CacheWriteKernel:
    """The kernel as the compiler room sees it."""

    spec: WriteSpec
    target: Target

    @cached_property
    def key(self) -> CompileKey:
        """Everything that decides the machine code."""
        return CompileKey(
            "kv.qk4pv8_write", self.spec.fields, self.target, (modules_digest(*MODULES),)
        )

    def trace(self) -> tuple[Any, tuple[Any, ...]]:
        """The DSL function and its fake arguments."""
        from cutlass import Int64

        from epicute.kv.qk4pv8_write_kernel import CacheWriter

        anchor, stream = anchor_and_stream()
        return CacheWriter(self.spec), (anchor, tuple(Int64(0) for _ in ARGUMENTS), stream)


def plan_cache_write(
    cache: QK4PV8Cache,
    dtype: torch.dtype = torch.bfloat16,
    *,
    grouped: bool = False,
    table: bool = False,
    counted: bool = True,
    device: torch.device | str | None = None,
    objects: ObjectCache | None = None,
) -> CacheWritePlan:
    """Compile (or load) what writes rows to ``cache``. One plan serves every T, including 0, and every pool.

    Args:
        cache: shape and scales, order exact16 or fast8, up to 64 query heads a KV head.
        dtype: of keys and values, bfloat16 or float16.
        grouped: for means of kind ``sequence`` of several requests: each row names its group.
        table: ``run`` takes a page table, positions and requests instead of slots.
        counted: ``run`` takes counters.
        device: where it will run; None is the current GPU, or the CPU where there is none. Others are prepared at
            their first run.
        objects: object cache; by default the user's.

    Raises ArgumentError or UnsupportedError, naming the argument, before anything is compiled.
    """
    require(
        isinstance(cache, QK4PV8Cache),
        "cache",
        type(cache).__name__,
        "a QK4PV8Cache",
        "describe it",
    )
    group = cache.q_heads // cache.kv_heads
    scaled = cache.k_scale != 1.0, cache.v_scale != 1.0
    spec = WriteSpec(cache.page, group, cache.terms, dtype, grouped, table, *scaled, counted)
    idle = dict.fromkeys(ARGUMENTS, 0) | {"kv_heads": 1, "blocks": 1}
    launcher = Launcher(
        lambda target: CacheWriteKernel(spec, target), tuple(idle.values()), device, objects
    )
    return CacheWritePlan(cache, spec, launcher)


@dataclass(frozen=True)
class _Rows:
    """What ``run`` was given, checked."""

    memory: Memory
    keys: torch.Tensor
    values: torch.Tensor
    vectors: dict[str, torch.Tensor]
    means: Means | None
    counters: tuple[CastCounters, CastCounters] | None


class CacheWritePlan:
    """A compiled writer. Make one with ``plan_cache_write``."""

    def __init__(self, cache: QK4PV8Cache, spec: WriteSpec, launcher: Launcher) -> None:
        self.cache, self.spec = cache, spec
        self._launcher = launcher

    @property
    def report(self) -> Report | None:
        """What the compiler said; None where no GPU asked for code."""
        return self._launcher.report

    def run(
        self,
        memory: Memory,
        keys: torch.Tensor,
        values: torch.Tensor,
        *,
        means: Means | None = None,
        counters: tuple[CastCounters, CastCounters] | None = None,
        **places: torch.Tensor,
    ) -> None:
        """Quantise every row that has a place and store it there.

        On a GPU one launch on the current stream of the keys' device, without waiting or allocating; it may be
        captured. On the CPU the same in PyTorch, for any strides.

        Args:
            memory: of the plan's cache; any strides between records, ΔS contiguous.
            keys, values: (T, kv_heads, D) of the plan's dtype, keys after RoPE; adjacent channels, heads and rows at
                multiples of 16 bytes. Left as they are.
            means: of this layer, exactly where the cache has terms; one group, or with ``grouped`` any number.
            counters: of keys and of values, exactly where the plan counts; losses of the rows written are added.
            slots: (T,) int64; negative ones and those past the end are skipped, no two may be the same. Or, with
                ``table``: page_table (requests, pages) int32, rows of adjacent elements; positions and requests (T,)
                int32 or int64; rows outside the table, or on a negative page, are skipped.
            group: with ``grouped``: (T,) int32 or int64, the row's group of means; by default the requests of the
                table. That of a skipped row is not read.

        Raises:
            ArgumentError: naming the argument, before the launch.
        """
        given = self._check(memory, keys, values, means, counters, places)
        if keys.shape[0] == 0:
            return
        if keys.device.type == "cpu":
            self._run_here(given)
        else:
            self._launcher.launch(keys.get_device(), self._arguments(given))

    def bind(
        self,
        memory: Memory,
        keys: torch.Tensor,
        values: torch.Tensor,
        *,
        means: Means | None = None,
        counters: tuple[CastCounters, CastCounters] | None = None,
        **places: torch.Tensor,
    ) -> tuple[int, ...]:
        """Check everything as ``run`` does and return the kernel's arguments."""
        return self._arguments(self._check(memory, keys, values, means, counters, places))

    def _check(
        self,
        memory: Memory,
        keys: torch.Tensor,
        values: torch.Tensor,
        means: Means | None,
        counters: tuple[CastCounters, CastCounters] | None,
        places: dict[str, torch.Tensor],
    ) -> _Rows:
        device = device_of("keys", keys)
        rows = keys.shape[0] if keys.ndim else 0
        for name, x in (("keys", keys), ("values", values)):
            self._check_rows(name, x, rows, device)
        self.cache.pool(memory)
        for name, held in (("memory.records", memory.records), ("memory.delta", memory.delta)):
            if held is not None and held.device != device:
                raise wrong(name, held, f"a tensor on {device}", "allocate the cache there")
        if memory.delta is not None and not _whole(memory.delta):
            expected = "contiguous memory at a multiple of 16 bytes"
            raise wrong("memory.delta", memory.delta, expected, "allocate() it")
        self._check_means(means, device)
        require(
            (counters is not None) == self.spec.counted,
            "counters",
            None if counters is None else "counters",
            "two CastCounters" if self.spec.counted else "none, of a plan with counted=False",
            "pass (CastCounters.create(device), CastCounters.create(device))",
        )
        for one in counters or ():
            for f in fields(one):
                check_vector(f"counters.{f.name}", getattr(one, f.name), 1, (torch.int64,), device)
        vectors = self._check_places(places, rows, device)
        check_apart(keys=keys, values=values, records=memory.records, delta=memory.delta)
        return _Rows(memory, keys, values, vectors, means, counters)

    def _check_rows(self, name: str, x: Any, rows: int, device: torch.device) -> None:
        shape = (rows, self.cache.kv_heads, self.cache.page.head_dim)
        expected = f"{shape} {self.spec.dtype} on {device}"
        if not isinstance(x, torch.Tensor) or x.device != device or x.shape != shape:
            raise wrong(name, x, expected, "view it by heads")
        if x.dtype != self.spec.dtype or rows > LARGEST_T:
            raise wrong(name, x, expected, "plan for its dtype, and split what is too long")
        if device.type == "cpu":
            return
        steps = zip(x.shape[:2], x.stride()[:2], strict=True)
        whole = all(n == 1 or step * 2 % 16 == 0 for n, step in steps)
        if x.stride(2) != 1 or not whole or x.data_ptr() % 16:
            raise wrong(
                name,
                x,
                "adjacent channels, and heads and rows at multiples of 16 bytes",
                f"pass {name}.contiguous()",
            )

    def _check_means(self, means: Means | None, device: torch.device) -> None:
        require(
            (means is not None) == (self.spec.terms > 0),
            "means",
            None if means is None else means.kind,
            "means" if self.spec.terms else "None, for a cache without terms of ΔS",
            "create the cache with the terms its smoothing needs",
        )
        if means is None:
            return
        width = self.cache.page.head_dim
        for name, x, heads in (
            ("means.q", means.q, self.cache.q_heads),
            ("means.k", means.k, self.cache.kv_heads),
        ):
            expected = f"contiguous (groups, {heads}, {width}) float32 on {device}, at 16 bytes"
            fits = x.shape[1:] == (heads, width) and x.device == device and _whole(x)
            if not fits:
                raise wrong(name, x, expected, "pass the means of this layer")
        require(
            self.spec.grouped or len(means.q) == 1,
            "means",
            f"{len(means.q)} groups",
            "one group",
            "plan with grouped=True and pass the group of each row",
        )

    def _check_places(
        self, places: dict[str, torch.Tensor], rows: int, device: torch.device
    ) -> dict[str, torch.Tensor]:
        found = {name: x for name, x in places.items() if x is not None}
        needed = {"page_table", "positions", "requests"} if self.spec.table else {"slots"}
        if self.spec.grouped and not (self.spec.table and "group" not in found):
            needed.add("group")
        require(
            set(found) == needed,
            "places",
            ", ".join(sorted(found)) or "nothing",
            ", ".join(sorted(needed)),
            "plan with table=True or grouped=True for the others",
        )
        for name, x in found.items():
            if name != "page_table":
                dtypes = (torch.int64,) if name == "slots" else (torch.int32, torch.int64)
                check_vector(name, x, rows, dtypes, device)
        if "page_table" in found:
            x = found["page_table"]
            fits = isinstance(x, torch.Tensor) and x.ndim == 2 and x.numel() > 0
            if not fits or x.dtype != torch.int32 or x.device != device or x.stride(1) != 1:
                expected = f"(requests, pages) int32 on {device}, adjacent pages"
                raise wrong("page_table", x, expected, "pass one row per request")
        return found

    def _arguments(self, given: _Rows) -> tuple[int, ...]:
        cache, memory = self.cache, given.memory
        pool = cache.pool(memory)
        found = dict.fromkeys(ARGUMENTS, 0)
        for name, x in (("keys", given.keys), ("values", given.values)):
            found[name] = x.data_ptr()
            found[f"{name}_stride"], found[f"{name}_head"] = (2 * s for s in x.stride()[:2])
        for name, x in given.vectors.items():
            found[name] = x.data_ptr()
            if name in ("positions", "requests", "group"):
                found[f"{name}_step"] = x.element_size()
        if self.spec.table:
            table = given.vectors["page_table"]
            found["table_stride"] = table.stride(0) * 4
            found["table_rows"], found["table_columns"] = table.shape
            if self.spec.grouped and "group" not in given.vectors:
                found["group"], found["group_step"] = found["requests"], found["requests_step"]
        if given.means is not None:
            found["k_mean"], found["q_mean"] = given.means.k.data_ptr(), given.means.q.data_ptr()
        found["k_mean_heads"], found["q_mean_heads"] = cache.kv_heads, cache.q_heads
        found["records"] = memory.records.data_ptr()
        found["page_stride"], found["head_stride"] = pool.page_stride, pool.head_stride
        found["delta"] = 0 if memory.delta is None else memory.delta.data_ptr()
        found["k_scale"], found["v_scale"] = _bits(cache.k_scale), _bits(cache.v_scale)
        for side, one in zip("kv", given.counters or (), strict=False):
            for f in fields(one):
                if f"{side}_{f.name}" in found:
                    found[f"{side}_{f.name}"] = getattr(one, f.name).data_ptr()
        rows = given.keys.shape[0]
        found["rows"], found["kv_heads"] = rows, cache.kv_heads
        found["capacity"] = cache.capacity
        found["blocks"] = -(-rows // ROWS) * cache.kv_heads
        return tuple(found.values())

    def _run_here(self, given: _Rows) -> None:
        vectors = given.vectors
        if self.spec.table:
            table, place = vectors["page_table"], (vectors["positions"], vectors["requests"])
            slots = slots_for(table, *place, self.cache.page.page_size, check=False)
        else:
            slots = vectors["slots"]
        kept = slot_is_valid(slots, self.cache.capacity).nonzero()[:, 0]
        group = vectors.get("group", vectors.get("requests")) if self.spec.grouped else None
        rows = self.cache.quantize(
            given.keys[kept],
            given.values[kept],
            given.means,
            None if group is None else group[kept],
            given.counters,
        )
        self.cache.place(given.memory, rows, slots[kept])


def _whole(x: torch.Tensor) -> bool:
    """Whether vectors of 16 bytes follow each other in a tensor."""
    return x.is_contiguous() and x.data_ptr() % 16 == 0


def _bits(scale: float) -> int:
    return int(np.float32(scale).view(np.int32))
