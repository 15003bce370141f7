"""The output of a work item: rounded, exchanged within quads and stored 16 bytes at a time. Imports the DSL."""

from __future__ import annotations

from typing import Any

import cutlass
import torch
from cutlass import Boolean, Float32, Int32, Int64, cute

from epicute.epilogues.dsl import pack_words, pure_asm
from epicute.gemm.memory import PACKED

__all__ = ["store_rows"]

LOW, HIGH = 0x5410, 0x7632
"""Byte selections: the low halves of two words, and the high ones."""


def choose(condition: Any, a: Any, b: Any) -> Any:
    """``a`` where ``condition``, else ``b``, of integers."""
    return Int32(cutlass.select_(condition, a, b))


def halves(a: Any, b: Any, selection: int) -> Any:
    """Two 16-bit halves of two words as one."""
    text = f"prmt.b32 $0, $1, $2, {selection:#x};"
    return pure_asm(text, "=r,r,r", Int32, a, b)


def exchange_words(words: list[Any], lane: Any) -> list[Any]:
    """Thread t of a quad has word b of block b; afterwards it has all four words of block t, in order."""
    high, odd = (lane & 2) != 0, (lane & 1) != 0
    kept, got = [], []
    for i in range(2):
        kept.append(choose(high, words[2 + i], words[i]))
        sent = choose(high, words[i], words[2 + i])
        got.append(cute.arch.shuffle_sync_bfly(sent, 2))
    # (block of parity 0, of parity 1), from the lower pair of threads and from the upper one.
    lower = [choose(high, g, k) for g, k in zip(got, kept, strict=True)]
    upper = [choose(high, k, g) for g, k in zip(got, kept, strict=True)]
    found = []
    for pair in (lower, upper):
        mine = choose(odd, pair[1], pair[0])
        other = cute.arch.shuffle_sync_bfly(choose(odd, pair[0], pair[1]), 1)
        found += [choose(odd, other, mine), choose(odd, mine, other)]
    return found


def exchange_halves(words: list[Any], lane: Any) -> list[Any]:
    """The same of 16-bit pieces: in, blocks 0 and 1 in one word and 2 and 3 in another; out, block t as two words."""
    high, odd = (lane & 2) != 0, (lane & 1) != 0
    kept = choose(high, words[1], words[0])
    got = cute.arch.shuffle_sync_bfly(choose(high, words[0], words[1]), 2)
    lower, upper = choose(high, got, kept), choose(high, kept, got)
    even_blocks, odd_blocks = halves(lower, upper, LOW), halves(lower, upper, HIGH)
    mine = choose(odd, odd_blocks, even_blocks)
    other = cute.arch.shuffle_sync_bfly(choose(odd, even_blocks, odd_blocks), 1)
    first, second = choose(odd, other, mine), choose(odd, mine, other)
    return [halves(first, second, LOW), halves(first, second, HIGH)]


def store_rows(dtype: torch.dtype, values: list[Any], address: Any, lane: Any, inside: Any) -> None:
    """Store a thread's share of a row of heads.

    ``values``: its columns 8b + 2t, 8b + 2t + 1 in order, float32. ``address``: of the row's first column, a multiple
    of 16. ``inside``: whether the row is one.
    """
    quad = lane % 4
    size = dtype.itemsize
    blocks = len(values) // 2
    whole = blocks // 4 * 4
    for b in range(0, whole, 4):
        lanes = values[2 * b : 2 * b + 8]
        words = pack_words(lanes, PACKED[dtype])
        words = exchange_halves(words, lane) if size == 1 else exchange_words(words, lane)
        store_words(words, address + Int64((b * 8) * size) + Int64(quad) * (8 * size), inside)
    for b in range(whole, blocks):
        word = pack_words(values[2 * b : 2 * b + 2], PACKED[dtype])[0]
        store_pair(word, address + Int64(8 * b * size) + Int64(quad) * (2 * size), inside, size)


def store_words(words: list[Any], address: Any, inside: Any) -> None:
    fragment = cute.make_rmem_tensor(len(words), Int32)
    for i, word in enumerate(words):
        fragment[i] = word
    pointer = cute.make_ptr(Int32, address, cute.AddressSpace.gmem, assumed_align=4 * len(words))
    copy_if(fragment, cute.make_tensor(pointer, cute.make_layout(len(words))), Boolean(inside))


def store_pair(word: Any, address: Any, inside: Any, size: int) -> None:
    """Two elements of ``size`` bytes, from a word's low end."""
    unit = Int32 if size == 2 else cutlass.Int16
    fragment = cute.make_rmem_tensor(1, unit)
    fragment[0] = unit(word)
    pointer = cute.make_ptr(unit, address, cute.AddressSpace.gmem, assumed_align=2 * size)
    copy_if(fragment, cute.make_tensor(pointer, cute.make_layout(1)), Boolean(inside))


@cute.jit
def copy_if(source: cute.Tensor, target: cute.Tensor, condition: Boolean) -> None:
    if condition:
        cute.autovec_copy(source, target)


@cute.jit
def store_float_if(address: Int64, value: Float32, condition: Boolean) -> None:
    """Store one float32 where ``condition``."""
    if condition:
        pointer = cute.make_ptr(Float32, address, cute.AddressSpace.gmem, assumed_align=4)
        cute.make_tensor(pointer, cute.make_layout(1))[0] = value
