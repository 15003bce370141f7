"""INT4 codes as checkpoints store them: eight to an int32, along one axis."""

from __future__ import annotations

from collections.abc import Sequence

import torch

__all__ = ["PER_WORD", "unpack_words"]

PER_WORD = 8
"""Nibbles of an int32."""


def unpack_words(
    words: torch.Tensor, axis: int, order: Sequence[int] = tuple(range(PER_WORD))
) -> torch.Tensor:
    """uint8 codes of int32 ``words``, eight times as many along ``axis``.

    Args:
        words: (A, B) int32, any strides.
        axis: 0 or 1, the packed one.
        order: nibble (0 the lowest) that holds each of a word's eight codes.
    """
    shifts = torch.tensor([4 * nibble for nibble in order], device=words.device)
    codes = (words.unsqueeze(axis + 1) >> shifts.reshape((-1,) + (1,) * (1 - axis))) & 15
    return codes.flatten(axis, axis + 1).to(torch.uint8)
