"""Loads and stores of a few adjacent elements by address. Imports the DSL.

Global addresses are 64-bit integers throughout, so that no offset is formed in 32 bits.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import cutlass
import torch
from cutlass import Float32, Int32, Int64, cute

from epicute.epilogues.dsl import force, pack_words, unpack_bfloat16

__all__ = [
    "DSL_DTYPES",
    "fetched",
    "load_global",
    "load_shared",
    "load_some",
    "packed",
    "store_global",
    "store_word_if",
]

DSL_DTYPES = {
    torch.float32: cutlass.Float32,
    torch.bfloat16: cutlass.BFloat16,
    torch.float16: cutlass.Float16,
    torch.float8_e4m3fn: cutlass.Float8E4M3FN,
    torch.int32: cutlass.Int32,
    torch.int64: cutlass.Int64,
}

UNITS = {1: cutlass.Int8, 2: cutlass.Int16, 4: Int32}
"""Integer stored at once, by bytes."""

PACKED = {torch.bfloat16: "bf16", torch.float16: "f16", torch.float8_e4m3fn: "e4m3"}


def _view(dtype: Any, address: Any, count: int, alignment: int) -> Any:
    pointer = cute.make_ptr(dtype, address, cute.AddressSpace.gmem, assumed_align=alignment)
    return cute.make_tensor(pointer, cute.make_layout(count))


def load_global(dtype: torch.dtype, address: Any, count: int = 1, alignment: int = 0) -> list[Any]:
    """``count`` adjacent elements at ``address``; floats and integers below 64 bits arrive as Float32."""
    native = DSL_DTYPES[dtype]
    alignment = min(max(alignment, dtype.itemsize), count * dtype.itemsize)
    fragment = cute.make_rmem_tensor(count, native)
    cute.autovec_copy(_view(native, address, count, alignment), fragment)
    return fetched(fragment)


def fetched(fragment: Any) -> list[Any]:
    """The fragment's elements as Float32."""
    if fragment.element_type is cutlass.BFloat16 and cute.size(fragment) % 2 == 0:
        words = cute.recast_tensor(fragment, Int32)
        return [x for i in range(cute.size(words)) for x in unpack_bfloat16(words[i])]
    return [fragment[i].to(Float32) for i in range(cute.size(fragment))]


def load_some(dtype: torch.dtype, address: Any, count: int, remaining: Any) -> list[Any]:
    """The first ``remaining`` of ``count`` adjacent elements one by one, zero for the others."""
    fragment = cute.make_rmem_tensor(count, DSL_DTYPES[dtype])
    fragment.fill(0)
    _load_some(_view(DSL_DTYPES[dtype], address, count, dtype.itemsize), fragment, remaining, count)
    return [fragment[i].to(Float32) for i in range(count)]


@cute.jit
def _load_some(
    source: cute.Tensor, target: cute.Tensor, remaining: Int32, count: cutlass.Constexpr
) -> None:
    for i in cutlass.range_constexpr(count):
        if remaining > i:
            target[i] = source[i]


def load_integer(address: Any) -> Any:
    """One int64 at ``address``."""
    return _view(Int64, address, 1, 8)[0]


def load_shared(tensor: Any, index: Any, count: int, alignment: int) -> list[Any]:
    """``count`` adjacent float32 of a flat shared-memory tensor; ``alignment`` in bytes."""
    pointer = cute.make_ptr(
        Float32,
        Int64((tensor.iterator + index).toint()),
        cute.AddressSpace.smem,
        assumed_align=alignment,
    )
    source = cute.make_tensor(pointer, cute.make_layout(count))
    fragment = cute.make_rmem_tensor(count, Float32)
    cute.autovec_copy(source, fragment)
    return [fragment[i] for i in range(count)]


def packed(dtype: torch.dtype, lanes: list[Any]) -> Any:
    """Lanes rounded to ``dtype``, as a register fragment of 32-bit words (of floats where ``dtype`` is float32)."""
    if dtype == torch.float32:
        fragment = cute.make_rmem_tensor(len(lanes), Float32)
        for i, lane in enumerate(lanes):
            fragment[i] = Float32(force(lane))
        return fragment
    words = pack_words(lanes, PACKED[dtype])
    fragment = cute.make_rmem_tensor(len(words), Int32)
    for i, word in enumerate(words):
        fragment[i] = word
    return fragment


def store_global(
    dtype: torch.dtype,
    address: Any,
    lanes: list[Any],
    alignment: int,
    condition: Any,
    remaining: Any = None,
) -> Callable[[], None]:
    """Round ``lanes`` to ``dtype``; what is returned stores them where ``condition``, as wide as ``alignment`` allows.

    ``remaining``: only that many of the lanes, where given.
    """
    count, size = len(lanes), len(lanes) * dtype.itemsize
    fragment = packed(dtype, lanes)
    whole = _recast(fragment, UNITS[min(alignment, size, 4)], size)
    target = _view(whole.element_type, address, cute.size(whole), min(alignment, size))
    if remaining is None:
        return partial(_store_if, whole, target, condition)
    single = _recast(fragment, UNITS[dtype.itemsize], size)
    rest = _view(single.element_type, address, count, dtype.itemsize)
    return partial(_store_some, whole, target, single, rest, condition, remaining, count)


def _recast(fragment: Any, unit: Any, size: int) -> Any:
    """The first ``size`` bytes of a register fragment as elements of ``unit``."""
    if fragment.element_type is Float32 and unit is Int32:
        return fragment
    recast = cute.recast_tensor(fragment, unit) if unit is not fragment.element_type else fragment
    return cute.make_tensor(recast.iterator, cute.make_layout(size * 8 // unit.width))


@cute.jit
def _store_if(source: cute.Tensor, target: cute.Tensor, condition: cutlass.Boolean) -> None:
    if condition:
        cute.autovec_copy(source, target)


@cute.jit
def _store_some(
    whole: cute.Tensor,
    target: cute.Tensor,
    single: cute.Tensor,
    part: cute.Tensor,
    condition: cutlass.Boolean,
    remaining: Int32,
    count: cutlass.Constexpr,
) -> None:
    """All of ``whole``, or the first ``remaining`` elements one by one."""
    if condition:
        if remaining >= count:
            cute.autovec_copy(whole, target)
        else:
            for i in cutlass.range_constexpr(count):
                if remaining > i:
                    part[i] = single[i]


@cute.jit
def store_word_if(address: Int64, value: Float32, condition: cutlass.Boolean) -> None:
    """Store one float32 where ``condition``."""
    if condition:
        cute.make_tensor(
            cute.make_ptr(Float32, address, cute.AddressSpace.gmem, assumed_align=4),
            cute.make_layout(1),
        )[0] = value
