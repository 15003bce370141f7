"""Rows into an INT4 cache by a kernel of its own, to the bit as ``Int4Cache.write`` writes them.

In a chain of decode kernels the attention kernel does this for the new row (``epicute.attention.decode``). This one
serves prefill, callers outside a chain, and the ablation that quantises the row between projection and attention.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from epicute.errors import UnsupportedError, require
from epicute.jit import CompileKey, ObjectCache, Report, Target, modules_digest
from epicute.kv.int4 import Int4Cache
from epicute.kv.pages import check_slots
from epicute.quant.launch import Launcher, anchor_and_stream, device_of, wrong

__all__ = ["AppendKernel", "AppendPlan", "AppendSpec", "plan_append"]

ARGUMENTS = (
    *("k", "k_stride", "k_head", "v", "v_stride", "v_head", "slots"),
    *("memory", "page_stride", "head_stride", "tokens", "pages", "rows", "blocks"),
)
"""The kernel's integers: addresses; strides of rows in elements, of the cache in bytes; tokens of a page; counts."""

MODULES = ("epicute.kv.append_kernel", "epicute.kv.append")

WARPS = 8
"""Of a block, each with a row of a head."""

DTYPES = (torch.bfloat16, torch.float16)

LARGEST_ROWS = 2**20
"""Rows that 32-bit arithmetic on rows and heads can count."""


@dataclass(frozen=True)
class AppendSpec:
    """What decides the kernel's code.

    Attributes:
        kv_heads, head_dim: of the cache.
        dtype: of the rows, bfloat16 or float16.
        width, values_folded: as of ``Int4Cache``.
    """

    kv_heads: int
    head_dim: int
    dtype: torch.dtype = torch.bfloat16
    width: int = 0
    values_folded: bool = False

    def __post_init__(self) -> None:
        require(
            self.head_dim in (64, 128),
            "head_dim",
            self.head_dim,
            "64 or 128, whose lanes hold whole pairs of one word",
            "write such heads with Int4Cache.write",
            UnsupportedError,
        )
        require(
            self.dtype in DTYPES,
            "dtype",
            self.dtype,
            " or ".join(map(str, DTYPES)),
            "convert the rows, or write them with Int4Cache.write",
            UnsupportedError,
        )


@dataclass(frozen=True)
class AppendKernel:
    """The kernel as the compiler room sees it."""

    spec: AppendSpec
    target: Target

    @cached_property
    def key(self) -> CompileKey:
        """Everything that decides the machine code."""
        return CompileKey(
            "kv.append", tuple(vars(self.spec).items()), self.target, (modules_digest(*MODULES),)
        )

    def trace(self) -> tuple[Any, tuple[Any, ...]]:
        """The DSL function and its fake arguments."""
        from cutlass import Int64

        from epicute.kv.append_kernel import Append

        anchor, stream = anchor_and_stream()
        return Append(self.spec), (anchor, tuple(Int64(0) for _ in ARGUMENTS), stream)


def plan_append(
    kind: Int4Cache,
    dtype: torch.dtype = torch.bfloat16,
    *,
    device: torch.device | str | None = None,
    cache: ObjectCache | None = None,
) -> AppendPlan:
    """Compile (or load) what writes rows into caches like ``kind``. One plan serves any number of rows, pages too.

    Args:
        kind: the cache's shape and rotation.
        dtype: of the rows, bfloat16 or float16.
        device: where it will run; None is the current GPU, or the CPU where there is none.
        cache: object cache; by default the user's.

    Raises UnsupportedError, naming the argument, before anything is compiled.
    """
    spec = AppendSpec(kind.kv_heads, kind.record.head_dim, dtype, kind.width, kind.values_folded)
    idle = (0,) * (len(ARGUMENTS) - 1) + (1,)
    return AppendPlan(
        kind, spec, Launcher(lambda target: AppendKernel(spec, target), idle, device, cache)
    )


class AppendPlan:
    """A compiled writer of rows. Make one with ``plan_append``."""

    def __init__(self, kind: Int4Cache, spec: AppendSpec, launcher: Launcher) -> None:
        self.kind, self.spec = kind, spec
        self._launcher = launcher

    @property
    def report(self) -> Report | None:
        """What the compiler said; None where no GPU asked for code."""
        return self._launcher.report

    def run(
        self, memory: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, slots: torch.Tensor
    ) -> None:
        """Rotate, quantise and store one row per slot, in place.

        On a GPU one launch on the current stream of the rows' device, without waiting or allocating; two rows for one
        slot are not noticed there. On the CPU ``Int4Cache.write``.

        Args:
            memory: (pages, kv_heads, record bytes) uint8 of the plan's cache.
            keys: (T, kv_heads, D) of the plan's dtype, after RoPE; heads at multiples of 16 bytes.
            values: the same shape.
            slots: (T,) int64; negative ones and those past the end are skipped.

        Raises:
            ArgumentError: naming the argument, before the launch.
        """
        arguments = self.bind(memory, keys, values, slots)
        if arguments is None:
            return
        if keys.device.type == "cpu":
            self.kind.write(memory, keys, values, slots)
        else:
            self._launcher.launch(keys.get_device(), arguments)

    def bind(
        self, memory: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, slots: torch.Tensor
    ) -> tuple[int, ...] | None:
        """Check everything and return the kernel's arguments; None where there is no row."""
        device = device_of("keys", keys)
        for name, x in (("memory", memory), ("values", values), ("slots", slots)):
            if not isinstance(x, torch.Tensor) or x.device != device:
                raise wrong(name, x, f"a tensor on {device}", "move all to one device")
        rows, strides = keys.shape[0] if keys.ndim else 0, []
        for name, x in (("keys", keys), ("values", values)):
            strides += self._check_rows(name, x, rows)
        check_slots(slots, rows)
        if slots.stride(0) != 1 and rows > 1:
            raise wrong("slots", slots, "adjacent slots", "slots.contiguous()")
        pool = self.kind.pool(memory)
        found = (
            *(keys.data_ptr(), *strides[:2], values.data_ptr(), *strides[2:], slots.data_ptr()),
            *(memory.data_ptr(), pool.page_stride, pool.head_stride),
            *(pool.page_size, pool.pages, rows, -(-rows * self.spec.kv_heads // WARPS)),
        )
        return found if rows else None

    def _check_rows(self, name: str, x: torch.Tensor, rows: int) -> list[int]:
        """Strides of rows and heads, in elements."""
        spec = self.spec
        shape = (rows, spec.kv_heads, spec.head_dim)
        if x.dtype != spec.dtype or tuple(x.shape) != shape or rows > LARGEST_ROWS:
            expected = f"(T, {spec.kv_heads}, {spec.head_dim}) {spec.dtype}, T up to {LARGEST_ROWS}"
            raise wrong(name, x, expected, "view it by heads, both alike, or plan for its dtype")
        steps = [s if n > 1 else spec.head_dim for n, s in zip(x.shape, x.stride(), strict=True)]
        whole = all(step % 8 == 0 for step in steps[:2])
        if rows and (x.stride(2) != 1 or not whole or x.data_ptr() % 16):
            raise wrong(
                name,
                x,
                "adjacent channels, and heads that start at multiples of 16 bytes",
                f"{name}.contiguous()",
            )
        return steps[:2]
