"""Single instructions of few-row kernels: products, copies, barriers. Imports the DSL.

Shared memory is addressed by 32-bit integers.
"""

from __future__ import annotations

from typing import Any

import torch
from cutlass import Float32, Int32, Int64, Uint8, Uint32, cute
from cutlass._mlir.dialects import llvm

from epicute.epilogues.dsl import pure_asm

__all__ = [
    "add",
    "arrive",
    "arrive_remote",
    "barrier_at",
    "bulk_copy",
    "expect",
    "fma",
    "load_byte",
    "load_four",
    "load_half",
    "load_matrices",
    "load_pair",
    "load_words",
    "mma",
    "multiply_bytes",
    "prefetch_line",
    "remote",
    "store_async",
    "store_float",
    "store_pair",
    "store_words",
    "streaming",
    "wgmma",
    "wgmma_bytes",
    "wgmma_commit",
    "wgmma_descriptor",
    "wgmma_fence",
    "wgmma_wait",
]

KINDS = {torch.bfloat16: "bf16", torch.float16: "f16"}


def effect(text: str, constraints: str, *arguments: Any) -> None:
    """PTX that does something to memory; neither dropped nor moved."""
    llvm.inline_asm(
        None,
        [a.ir_value() for a in arguments],
        text,
        constraints + ",~{memory}",
        has_side_effects=True,
        is_align_stack=False,
        asm_dialect=llvm.AsmDialect.AD_ATT,
    )


def signed(word: int) -> Int32:
    """A constant of 32 bits."""
    return Int32(word - (1 << 32) if word >> 31 else word)


def fma(a: Any, b: Any, c: Any) -> Any:
    """a * b + c, rounded once."""
    return pure_asm("fma.rn.f32 $0, $1, $2, $3;", "=f,f,f,f", Float32, a, b, c)


def add(a: Any, b: Any) -> Any:
    """a + b, rounded once and never fused with a multiplication."""
    return pure_asm("add.rn.f32 $0, $1, $2;", "=f,f,f", Float32, a, b)


def mma(dtype: torch.dtype, a: list[Any], b: list[Any], c: list[Any]) -> list[Any]:
    """c + a·b of one m16n8k16: four, two and four registers of a lane; sums in float32."""
    kind = KINDS[dtype]
    text = (
        f"mma.sync.aligned.m16n8k16.row.col.f32.{kind}.{kind}.f32 "
        "{$0, $1, $2, $3}, {$4, $5, $6, $7}, {$8, $9}, {$10, $11, $12, $13};"
    )
    return _product(text, Float32, "f", a, b, c)


def multiply_bytes(signed: bool, a: list[Any], b: list[Any], c: list[Any]) -> list[Any]:
    """c + a·b of one m16n8k32 in 32-bit integers, of unsigned bytes ``a`` and bytes ``b``, ``signed`` or not.

    Lane 4g + t has of A rows g and g + 8 at depths 4t to 4t + 3 (words 0, 1) and 4t + 16 to 4t + 19 (words 2, 3); of B
    column g at the same depths; of C rows g (two) and g + 8 (two) at columns 2t and 2t + 1.
    """
    kind = "s8" if signed else "u8"
    text = (
        f"mma.sync.aligned.m16n8k32.row.col.s32.u8.{kind}.s32 "
        "{$0, $1, $2, $3}, {$4, $5, $6, $7}, {$8, $9}, {$10, $11, $12, $13};"
    )
    return _product(text, Int32, "r", a, b, c)


def _product(text: str, result: Any, kind: str, a: list[Any], b: list[Any], c: list[Any]) -> Any:
    """Four sums of type ``result``, in registers of ``kind``."""
    of_sums = ",".join([kind] * 4)
    found = llvm.inline_asm(
        llvm.StructType.get_literal([result.mlir_type] * 4),
        [x.ir_value() for x in (*map(Int32, (*a, *b)), *map(result, c))],
        text,
        f"={of_sums.replace(',', ',=')},r,r,r,r,r,r,{of_sums}",
        has_side_effects=False,
        is_align_stack=False,
        asm_dialect=llvm.AsmDialect.AD_ATT,
    )
    return [result(llvm.extractvalue(result.mlir_type, found, [i])) for i in range(4)]


ADJACENT = 1 << 16
SWIZZLED = (1 << 30 | 1024 >> 4) << 32
"""Of a matrix descriptor: k is adjacent; the 128-byte swizzle, 1024 bytes from eight rows to the next."""


def wgmma_descriptor(address: Any) -> Any:
    """The low word of where WGMMA finds B: rows of 64 16-bit k in the 128-byte swizzle, eight rows at a multiple of
    1024 bytes. It grows by one for each 16 bytes.
    """
    return Uint32(address) >> 4 | Uint32(ADJACENT)


def wgmma(
    dtype: torch.dtype, a: list[Any], descriptor: Any, columns: int, c: list[Any] | None
) -> list[Any]:
    """Begin c + a·b of one m64nNk16, N = ``columns``; without ``c``, a·b. Sums in float32, ``columns // 2`` a thread.

    ``descriptor``: the low word of b's. The result may be given to the next product; it may be read behind
    ``wgmma_wait``.
    """
    kind = KINDS[dtype]
    shape = f"m64n{columns}k16.f32.{kind}.{kind}"
    return _begin(shape, ", 1, 1, 0", Float32, a, descriptor, columns, c)


def wgmma_bytes(a: list[Any], descriptor: Any, columns: int, c: list[Any] | None) -> list[Any]:
    """The same of one m64nNk32 in 32-bit integers: of unsigned bytes ``a`` and signed bytes ``b``."""
    return _begin(f"m64n{columns}k32.s32.u8.s8", "", Int32, a, descriptor, columns, c)


def _begin(
    shape: str,
    modes: str,
    result: Any,
    a: list[Any],
    descriptor: Any,
    columns: int,
    c: list[Any] | None,
) -> list[Any]:
    """Begin one product with sums of type ``result``. ``modes``: signs and orders, where its kind has them."""
    count = columns // 2
    tied = [] if c is None else [str(i) for i in range(count)]
    first = count + len(tied)
    d = ", ".join(f"${i}" for i in range(count))
    text = (
        f"{{ .reg .pred p; setp.ne.b32 p, {int(c is not None)}, 0; "
        f"wgmma.mma_async.sync.aligned.{shape} {{{d}}}, "
        f"{{${first}, ${first + 1}, ${first + 2}, ${first + 3}}}, ${first + 4}, p{modes}; }}"
    )
    register = "=f" if result is Float32 else "=r"
    constraints = ",".join([register] * count + tied + ["r"] * 4 + ["l"])
    whole = Int64(Uint32(descriptor)) | Int64(SWIZZLED)
    return _several(text, constraints, [result] * count, [*(c or []), *a, whole])


def wgmma_fence(a: list[Any], c: list[Any] | None) -> tuple[list[Any], list[Any] | None]:
    """``a`` and ``c`` as products that are begun from now on may read them."""
    found = _through("wgmma.fence.sync.aligned;", [*a, *(c or [])])
    return found[: len(a)], None if c is None else found[len(a) :]


def wgmma_commit() -> None:
    """Close a group of products."""
    _several("wgmma.commit_group.sync.aligned;", "", [], [])


def wgmma_wait(pending: int, c: list[Any]) -> list[Any]:
    """``c`` when all but the last ``pending`` groups of products are done."""
    return _through(f"wgmma.wait_group.sync.aligned {pending};", c)


def _through(text: str, values: list[Any]) -> list[Any]:
    """An instruction before which, or behind which, registers must not be touched: they go through it."""
    kinds = [type(x) for x in values]
    out = ["=f" if kind is Float32 else "=r" for kind in kinds]
    constraints = ",".join([*out, *(str(i) for i in range(len(values)))])
    return _several(text, constraints, kinds, values)


def _several(text: str, constraints: str, kinds: list[Any], values: list[Any]) -> list[Any]:
    """An instruction with any number of results, which keeps its place among others of the sort."""
    types = [kind.mlir_type for kind in kinds]
    whole = types[0] if len(types) == 1 else llvm.StructType.get_literal(types)
    found = llvm.inline_asm(
        whole if types else None,
        [x.ir_value() for x in values],
        text,
        constraints,
        has_side_effects=True,
        is_align_stack=False,
        asm_dialect=llvm.AsmDialect.AD_ATT,
    )
    if len(kinds) == 1:
        return [kinds[0](found)]
    return [
        kind(llvm.extractvalue(type_, found, [i]))
        for i, (kind, type_) in enumerate(zip(kinds, types, strict=True))
    ]


def _shared(dtype: Any, address: Any, count: int, alignment: int) -> Any:
    pointer = cute.make_ptr(dtype, address, cute.AddressSpace.smem, assumed_align=alignment)
    return cute.make_tensor(pointer, cute.make_layout(count))


def load_words(address: Any, count: int = 4) -> list[Any]:
    """``count`` adjacent words, in one load."""
    fragment = cute.make_rmem_tensor(count, Int32)
    cute.autovec_copy(_shared(Int32, address, count, 4 * count), fragment)
    return [fragment[i] for i in range(count)]


def load_matrices(address: Any, count: int = 4, turned: bool = False) -> list[Any]:
    """``count`` (2 or 4) matrices of 8 rows of 16 bytes; lane l gives the address of row l mod 8 of matrix l // 8.

    Lane 4g + t gets bytes 4t to 4t + 3 of row g; ``turned``: the 16-bit elements g of rows 2t and 2t + 1.
    """
    registers = ", ".join(f"${i}" for i in range(count))
    kind = ".trans" if turned else ""
    found = llvm.inline_asm(
        llvm.StructType.get_literal([Int32.mlir_type] * count),
        [address.ir_value()],
        f"ldmatrix.sync.aligned.m8n8.x{count}{kind}.shared.b16 {{{registers}}}, [${count}];",
        ",".join(["=r"] * count) + ",r",
        has_side_effects=True,
        is_align_stack=False,
        asm_dialect=llvm.AsmDialect.AD_ATT,
    )
    return [Int32(llvm.extractvalue(Int32.mlir_type, found, [i])) for i in range(count)]


def load_pair(address: Any) -> list[Any]:
    """Two adjacent float32."""
    fragment = cute.make_rmem_tensor(2, Float32)
    cute.autovec_copy(_shared(Float32, address, 2, 8), fragment)
    return [fragment[i] for i in range(2)]


def load_four(address: Any) -> list[Any]:
    """Four adjacent float32."""
    fragment = cute.make_rmem_tensor(4, Float32)
    cute.autovec_copy(_shared(Float32, address, 4, 16), fragment)
    return [fragment[i] for i in range(4)]


def load_half(dtype: Any, address: Any) -> Any:
    """One 16-bit float, as Float32."""
    return _shared(dtype, address, 1, 2)[0].to(Float32)


def load_byte(address: Any) -> Any:
    """One byte, as Int32."""
    return Int32(_shared(Uint8, address, 1, 1)[0])


def store_words(address: Any, words: Any) -> None:
    """Four words of a register fragment."""
    cute.autovec_copy(words, _shared(Int32, address, 4, 16))


def store_pair(address: Any, first: Any, second: Any) -> None:
    """Two words."""
    words = cute.make_rmem_tensor(2, Int32)
    words[0], words[1] = first, second
    cute.autovec_copy(words, _shared(Int32, address, 2, 8))


def store_float(address: Any, value: Any) -> None:
    """One float32."""
    _shared(Float32, address, 1, 4)[0] = value


def prefetch_line(address: Any) -> None:
    """Have L2 fetch the line at a global address."""
    effect("prefetch.global.L2 [$0];", "l", Int64(address))


def remote(address: Any, rank: Any) -> Any:
    """What CTA ``rank`` of the cluster has at a place in shared memory, as all of the cluster address it."""
    text = "mapa.shared::cluster.u32 $0, $1, $2;"
    return pure_asm(text, "=r,r,r", Int32, Int32(address), Int32(rank))


def store_async(address: Any, values: list[Any], barrier: Any) -> None:
    """Four float32 in the shared memory of a CTA of the cluster; their sixteen bytes arrive at an mbarrier there.

    Whoever waits for them sees them, with no fence of ours: an arrival that releases to the cluster waits until all
    that the thread has stored anywhere is seen by the GPU, and its acquire drops the L1.
    """
    text = "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [$0], {$1, $2, $3, $4}, [$5];"
    effect(text, "r,f,f,f,f,r", Int32(address), *map(Float32, values), Int32(barrier))


def expect(address: Any, size: Any, condition: Any) -> None:
    """Arrive at an mbarrier that is to count ``size`` bytes, where the Int32 ``condition`` is not 0."""
    text = (
        "{ .reg .pred p; .reg .b64 s; setp.ne.s32 p, $2, 0; "
        "@p mbarrier.arrive.expect_tx.release.cta.shared::cta.b64 s, [$0], $1; }"
    )
    effect(text, "r,r,r", Int32(address), Int32(size), Int32(condition))


def barrier_at(address: Any) -> Any:
    """The mbarrier at a place in shared memory."""
    return cute.make_ptr(Int64, Int32(address), cute.AddressSpace.smem, assumed_align=8)


def arrive(address: Any, condition: Any) -> None:
    """Arrive at an mbarrier, where the Int32 ``condition`` is not 0. A predicate in place of a branch."""
    text = (
        "{ .reg .pred p; .reg .b64 s; setp.ne.s32 p, $1, 0; "
        "@p mbarrier.arrive.release.cta.shared::cta.b64 s, [$0]; }"
    )
    effect(text, "r,r", Int32(address), Int32(condition))


def arrive_remote(address: Any, condition: Any) -> None:
    """Arrive at an mbarrier of a CTA of the cluster, behind what the warp has read here: nothing was stored for it."""
    text = (
        "{ .reg .pred p; setp.ne.s32 p, $1, 0; "
        "@p mbarrier.arrive.release.cta.shared::cluster.b64 _, [$0]; }"
    )
    effect(text, "r,r", Int32(address), Int32(condition))


def streaming() -> Any:
    """A policy of L2: what is read so leaves first."""
    text = "createpolicy.fractional.L2::evict_first.b64 $0, 1.0;"
    return pure_asm(text, "=l", Int64)


def bulk_copy(target: Any, source: Any, size: int, barrier: Any, policy: Any = None) -> None:
    """Begin the copy of ``size`` bytes (a multiple of 16) from a global address; its bytes arrive at ``barrier``."""
    name = "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes"
    given = (Int32(target), Int64(source), Int32(barrier))
    if policy is None:
        effect(f"{name} [$0], [$1], {size}, [$2];", "r,l,r", *given)
    else:
        effect(f"{name}.L2::cache_hint [$0], [$1], {size}, [$2], $3;", "r,l,r,l", *given, policy)
