"""Instructions of the decode kernel: matrix products, loads and stores, bulk copies. Imports the DSL.

Addresses of shared memory are 32-bit, those of global memory 64-bit integers. Loads have effects, so that none moves
above the barrier that it waited for; arithmetic has none.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from cutlass import Boolean, Float32, Int16, Int32, Int64, cute
from cutlass._mlir import ir
from cutlass._mlir.dialects import llvm

from epicute.epilogues.dsl import pure_asm

ONE = 0x3F800000
"""The bits of 1.0."""

__all__ = [
    "bulk_copy",
    "copy_if",
    "floats_at",
    "fma_pair",
    "halves_of_codes",
    "load_float",
    "mask_or",
    "multiply",
    "permute_bytes",
    "rotate_lanes",
    "shared_load",
    "shared_store",
    "shift_right",
    "store_runs_if",
    "store_words",
    "turn_matrix",
]


def _several(text: str, constraints: str, result: Any, count: int, *arguments: Any) -> list[Any]:
    """A block with ``count`` results of one type."""
    struct = llvm.StructType.get_literal([result.mlir_type] * count)
    found = llvm.inline_asm(
        struct,
        [a.ir_value() for a in arguments],
        text,
        constraints,
        has_side_effects=False,
        is_align_stack=False,
        asm_dialect=llvm.AsmDialect.AD_ATT,
    )
    places = (ir.DenseI64ArrayAttr.get([i]) for i in range(count))
    return [result(llvm.extractvalue(result.mlir_type, found, place)) for place in places]


def multiply(kind: str, a: list[Any], b: list[Any], c: list[Any]) -> list[Any]:
    """C + A · B of 16 × 8 × 16, ``kind`` "f16" or "bf16", sums in float32.

    Lane 4g + t has of A rows g and g + 8 at depths 2t, 2t + 1 (words 0, 1) and 2t + 8, 2t + 9 (words 2, 3); of B
    column g at the same depths; of C rows g (two) and g + 8 (two) at columns 2t and 2t + 1.
    """
    text = (
        f"mma.sync.aligned.m16n8k16.row.col.f32.{kind}.{kind}.f32 "
        "{$0, $1, $2, $3}, {$4, $5, $6, $7}, {$8, $9}, {$10, $11, $12, $13};"
    )
    constraints = "=f,=f,=f,=f,r,r,r,r,r,r,f,f,f,f"
    return _several(text, constraints, Float32, 4, *a, *b, *(Float32(x) for x in c))


def turn_matrix(word: Any) -> Any:
    """Transpose an 8 × 8 matrix of 16-bit elements of which lane 4g + t has row g, columns 2t and 2t + 1."""
    found = llvm.inline_asm(
        Int32.mlir_type,
        [word.ir_value()],
        "movmatrix.sync.aligned.m8n8.trans.b16 $0, $1;",
        "=r,r",
        has_side_effects=True,
        is_align_stack=False,
        asm_dialect=llvm.AsmDialect.AD_ATT,
    )
    return Int32(found)


def permute_bytes(a: Any, b: Any, selection: int) -> Any:
    """Four bytes of ``a`` and, from number 4 on, ``b``."""
    return pure_asm(f"prmt.b32 $0, $1, $2, {selection:#x};", "=r,r,r", Int32, a, b)


def mask_or(word: Any, mask: int, bits: int) -> Any:
    """(word & mask) | bits, in one instruction."""
    text = f"lop3.b32 $0, $1, {mask:#x}, {bits:#x}, 0xea;"
    return pure_asm(text, "=r,r", Int32, word)


def shift_right(word: Any, count: int) -> Any:
    """A logical shift."""
    return pure_asm(f"shr.u32 $0, $1, {count};", "=r,r", Int32, word) if count else word


def fma_pair(kind: str, word: Any, factor: int, addend: int) -> Any:
    """word · factor + addend of two 16-bit floats, the constants given as patterns of one."""
    both = [f"{(x << 16 | x):#010x}" for x in (factor, addend)]
    text = (
        f"{{ .reg .b32 a, b; mov.b32 a, {both[0]}; mov.b32 b, {both[1]}; "
        f"fma.rn.{kind}x2 $0, $1, a, b; }}"
    )
    return pure_asm(text, "=r,r", Int32, word)


def halves_of_codes(word: Any) -> list[Any]:
    """Four e4m3 as two words of float16, which holds them exactly."""
    texts = (
        "{ .reg .b16 l, h; mov.b32 {l, h}, $1; cvt.rn.f16x2.e4m3x2 $0, l; }",
        "{ .reg .b16 l, h; mov.b32 {l, h}, $1; cvt.rn.f16x2.e4m3x2 $0, h; }",
    )
    return [pure_asm(text, "=r,r", Int32, word) for text in texts]


def rotate_lanes(lanes: list[Any], width: int, position: Any, count: int) -> list[Any]:
    """``kv.append_row.butterfly`` to the bit, of one row or several beside each other.

    Which of two lanes subtracts is the sign of a factor, not a predicate: of those there are too few for all strides,
    and the channels' shuffles would wait for each other.
    """
    if not width:
        return lanes
    stride = 1
    while stride < width:
        if stride < count:
            lanes = [_pair(lanes, i, stride) for i in range(len(lanes))]
        else:
            distance = stride // count
            sign = (position & distance) << (32 - distance.bit_length())
            factor = (sign | ONE).bitcast(Float32)
            other = [cute.arch.shuffle_sync_bfly(x, distance) for x in lanes]
            lanes = [_fused(x, factor, y) for x, y in zip(lanes, other, strict=True)]
        stride *= 2
    return [x * float(np.float32(width**-0.5)) for x in lanes]


def _pair(lanes: list[Any], i: int, stride: int) -> Any:
    """Sum, or difference, of two channels of a lane."""
    return _fused(lanes[i], -1.0 if i & stride else 1.0, lanes[i ^ stride])


def _fused(a: Any, b: Any, c: Any) -> Any:
    """a · b + c, rounded once."""
    return pure_asm(
        "fma.rn.f32 $0, $1, $2, $3;", "=f,f,f,f", Float32, *(Float32(x) for x in (a, b, c))
    )


def _shared(dtype: Any, address: Any, count: int) -> Any:
    size = dtype.width // 8 * count
    pointer = cute.make_ptr(dtype, address, cute.AddressSpace.smem, assumed_align=size)
    return cute.make_tensor(pointer, cute.make_layout(count))


def shared_load(dtype: Any, address: Any, count: int = 1) -> list[Any]:
    """``count`` adjacent elements of shared memory, at a multiple of their size together."""
    fragment = cute.make_rmem_tensor(count, dtype)
    cute.autovec_copy(_shared(dtype, address, count), fragment)
    return [fragment[i] for i in range(count)]


def shared_store(dtype: Any, address: Any, values: list[Any]) -> None:
    """Adjacent elements to shared memory."""
    fragment = cute.make_rmem_tensor(len(values), dtype)
    for i, value in enumerate(values):
        fragment[i] = value
    cute.autovec_copy(fragment, _shared(dtype, address, len(values)))


def bulk_copy(target: Any, source: Any, size: Any, barrier: Any) -> None:
    """Start a copy of ``size`` bytes, a multiple of 16, to shared memory; ``barrier`` counts them."""
    llvm.inline_asm(
        None,
        [x.ir_value() for x in (Int32(target), Int64(source), Int32(size), Int32(barrier))],
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [$0], [$1], $2, [$3];",
        "r,l,r,r",
        has_side_effects=True,
        is_align_stack=False,
        asm_dialect=llvm.AsmDialect.AD_ATT,
    )


def load_float(address: Any) -> Any:
    """One float32 of global memory."""
    pointer = cute.make_ptr(Float32, address, cute.AddressSpace.gmem, assumed_align=4)
    return cute.make_tensor(pointer, cute.make_layout(1))[0]


@cute.jit
def store_runs_if(addresses: list, runs: list, condition: Boolean) -> None:
    if condition:
        _store_runs(addresses, runs)


def _store_runs(addresses: list[Any], runs: list[list[Any]]) -> None:
    """Adjacent floats to shared memory, for each address some."""
    for address, values in zip(addresses, runs, strict=True):
        shared_store(Float32, address, values)


def floats_at(address: Any, count: int) -> Any:
    """``count`` floats at a multiple of their size together."""
    pointer = cute.make_ptr(Float32, address, cute.AddressSpace.gmem, assumed_align=4 * count)
    return cute.make_tensor(pointer, cute.make_layout(count))


@cute.jit
def copy_if(source: cute.Tensor, target: cute.Tensor, condition: Boolean) -> None:
    if condition:
        cute.autovec_copy(source, target)


def store_words(address: Any, words: list[Any], size: int, condition: Any) -> None:
    """The first ``size`` bytes of packed words."""
    unit = Int32 if size >= 4 else Int16
    fragment = cute.make_rmem_tensor(max(1, size // 4), unit)
    for i in range(max(1, size // 4)):
        fragment[i] = unit(words[i])
    pointer = cute.make_ptr(unit, address, cute.AddressSpace.gmem, assumed_align=size)
    layout = cute.make_layout(max(1, size // 4))
    copy_if(fragment, cute.make_tensor(pointer, layout), condition)
