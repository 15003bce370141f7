"""AWQ checkpoints in AutoAWQ's GEMM layout.

qweight  (K, N / 8) int32        eight output features a word, in the order 0 2 4 6 1 3 5 7 from the lowest nibble
qzeros   (K / group, N / 8)      the same order
scales   (K / group, N)          float16
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from epicute.errors import require
from epicute.quant.int4 import Int4Codes, groups_of
from epicute.weights.importers.checks import (
    refuse_foreign,
    require_group,
    require_words,
    scales_16,
    zero_points,
)
from epicute.weights.importers.nibbles import PER_WORD, unpack_words
from epicute.weights.importers.source import tensor_of
from epicute.weights.quantized_int4 import QuantizedInt4

__all__ = ["ORDER", "Awq"]

ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
"""Nibble that holds each of a word's eight output features."""


@dataclass(frozen=True)
class Awq:
    """How an AWQ checkpoint is written.

    Attributes:
        group: 32, 64, 128 or -1.
        symmetric: whether all zero points have to be 8 (``zero_point`` is False).
    """

    group: int = 128
    symmetric: bool = False

    marker = "qweight"

    def __post_init__(self) -> None:
        require_group("group", self.group)

    def read(self, tensors: Mapping[str, torch.Tensor], prefix: str) -> QuantizedInt4:
        """The linear ``prefix`` (without ``.qweight``); its gain has to be an operand.

        Raises:
            ArgumentError: a tensor is missing or of another shape or dtype, or contradicts the configuration.
            UnsupportedError: tensors of a format that is not read here.
        """
        refuse_foreign(tensors, prefix)
        fix = "check the prefix, and that the configuration belongs to this checkpoint"
        words = tensor_of(tensors, f"{prefix}.qweight", fix)
        require(
            words.ndim == 2 and words.numel() > 0,
            f"{prefix}.qweight",
            tuple(words.shape),
            "(K, N / 8)",
            fix,
        )
        width, columns = words.shape[0], words.shape[1] * PER_WORD
        require_words(f"{prefix}.qweight", words, (width, columns // PER_WORD))
        groups = groups_of(width, self.group)
        stored = tensor_of(tensors, f"{prefix}.scales", fix)
        scale = scales_16(f"{prefix}.scales", stored, (groups, columns), self.group)
        points = tensor_of(tensors, f"{prefix}.qzeros", fix)
        require_words(f"{prefix}.qzeros", points, (groups, columns // PER_WORD))
        zero = unpack_words(points, 1, ORDER).t().contiguous()
        codes = Int4Codes(
            unpack_words(words, 1, ORDER).t().contiguous(),
            scale.t().contiguous(),
            zero_points(f"{prefix}.qzeros", zero, self.symmetric),
            self.group,
            prefix,
        )
        return QuantizedInt4.of(codes, prefix, gain_operand=True)
