"""FP8 keys and values to the dtype of q, in shared memory, by two warps of the producer's. Imports the DSL.

A raw tile has its rows as in memory, ``head_dim`` bytes each; the converted one has the layout that WGMMA reads, chunks
of 64 columns with 128 bytes a row, in which 16-byte unit u of row r stands at u ^ (r mod 8). A thread takes 16 bytes,
the threads of a quarter warp one or two rows, so that neither reads nor writes meet in a bank.
"""

from __future__ import annotations

from typing import Any

import cutlass
import torch
from cutlass import Float32, Int32, cute

from epicute.attention.schedule import AttentionSchedule
from epicute.attention.spec import AttentionSpec
from epicute.epilogues.dsl import pack_words, pure_asm

__all__ = ["CONVERTERS", "Converter"]

CONVERTERS = 64
"""Threads that convert: warps 2 and 3."""


class Converter:
    """Device code of the converting warps."""

    def __init__(self, spec: AttentionSpec, schedule: AttentionSchedule) -> None:
        self.spec, self.schedule = spec, schedule
        self.units = spec.head_dim // 16
        self.kind = {torch.bfloat16: "bf16", torch.float16: "f16"}[spec.dtype]

    @cute.jit
    def tile(self, raw, target, thread) -> None:
        """Convert a tile; ``raw`` and ``target`` are addresses of shared memory."""
        count = self.schedule.tile_n * self.units
        for i in cutlass.range(thread, count, CONVERTERS, unroll=2):
            row, unit = i // self.units, i % self.units
            words = load_vector(raw + i * 16)
            halves = [self._converted(words, 2 * part) for part in range(2)]
            # Threads of the second chunk write their odd unit first: the others have the even banks.
            late = Int32(unit >= 4)
            for turn in cutlass.range_constexpr(2):
                part = late ^ turn
                to = 2 * (unit % 4) + part
                place = (to ^ (row % 8)) * 16 + row * 128 + unit // 4 * (self.schedule.tile_n * 128)
                chosen = [
                    Int32(cutlass.select_(part == 0, a, b)) for a, b in zip(*halves, strict=True)
                ]
                store_vector(target + place, chosen)

    def _converted(self, words: list[Any], first: int) -> list[Any]:
        """Eight elements, two words of raw bytes, as four words."""
        found = []
        for word in words[first : first + 2]:
            pairs = to_halves(word)
            if self.kind == "bf16":
                pairs = [pack_words(floats(pair), "bf16")[0] for pair in pairs]
            found += pairs
        return found


def to_halves(word: Any) -> list[Any]:
    """Four e4m3 as two words of float16, which holds them exactly."""
    low = pure_asm(
        "{ .reg .b16 l, h; mov.b32 {l, h}, $1; cvt.rn.f16x2.e4m3x2 $0, l; }", "=r,r", Int32, word
    )
    high = pure_asm(
        "{ .reg .b16 l, h; mov.b32 {l, h}, $1; cvt.rn.f16x2.e4m3x2 $0, h; }", "=r,r", Int32, word
    )
    return [low, high]


def floats(word: Any) -> list[Any]:
    """Two float16 of a word as float32."""
    texts = (
        "{ .reg .b16 l, h; mov.b32 {l, h}, $1; cvt.f32.f16 $0, l; }",
        "{ .reg .b16 l, h; mov.b32 {l, h}, $1; cvt.f32.f16 $0, h; }",
    )
    return [pure_asm(text, "=f,r", Float32, word) for text in texts]


def _vector(address: Any) -> Any:
    pointer = cute.make_ptr(Int32, address, cute.AddressSpace.smem, assumed_align=16)
    return cute.make_tensor(pointer, cute.make_layout(4))


def load_vector(address: Any) -> list[Any]:
    """Four words of shared memory."""
    fragment = cute.make_rmem_tensor(4, Int32)
    cute.autovec_copy(_vector(address), fragment)
    return [fragment[i] for i in range(4)]


def store_vector(address: Any, words: list[Any]) -> None:
    """Four words to shared memory."""
    fragment = cute.make_rmem_tensor(4, Int32)
    for i, word in enumerate(words):
        fragment[i] = word
    cute.autovec_copy(fragment, _vector(address))
