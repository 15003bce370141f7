"""MMA fragments as the PTX ISA draws them, lane by lane, and the products they stand for.

Values are float64: what is proved is where things lie.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

LANES = [(lane // 4, lane % 4) for lane in range(32)]


def a_place(lane: int, register: int, half: int) -> tuple[int, int]:
    """(row, k) of an m16n8k16 A operand; also of one warp's rows of an m64k16 WGMMA operand."""
    g, t = LANES[lane]
    return g + (8 if register in (1, 3) else 0), 2 * t + half + (8 if register >= 2 else 0)


def b_place(lane: int, register: int, half: int) -> tuple[int, int]:
    """(k, column) of an m16n8k16 B operand."""
    g, t = LANES[lane]
    return 2 * t + half + 8 * register, g


def a8_place(lane: int, register: int, byte: int) -> tuple[int, int]:
    """(row, k) of the eight-bit m64k32 WGMMA A operand, rows of one warp."""
    g, t = LANES[lane]
    return g + (8 if register in (1, 3) else 0), 4 * t + byte + (16 if register >= 2 else 0)


def mma(a: Callable[[int, int, int], float], b: Callable[[int, int, int], float]) -> np.ndarray:
    """(16, 8) product of operands given by (lane, register, half)."""
    left, right = np.zeros((16, 16)), np.zeros((16, 8))
    for lane in range(32):
        for half in range(2):
            for register in range(4):
                left[a_place(lane, register, half)] = a(lane, register, half)
            for register in range(2):
                right[b_place(lane, register, half)] = b(lane, register, half)
    return left @ right
