"""compressed-tensors checkpoints, format ``pack-quantized`` with 4-bit weights (W4A16).

    weight_packed      (N, ceil(K / 8)) int32    nibble i of word w: input feature 8w + i, code = q + 8
    weight_scale       (N, G)                    G = K / group, or 1
    weight_zero_point  (ceil(N / 8), G) int32    asymmetric alone: nibble i of row r: output feature 8r + i, zero + 8
    weight_shape       (2,)                      N, K
    weight_g_idx       (K,)                      with activation order alone; only k // group is read here

q and zero are signed, so that the codes' zero point is the nibble as stored.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from epicute.errors import UnsupportedError, require
from epicute.quant.int4 import Int4Codes, groups_of
from epicute.weights.importers.checks import (
    plain_order,
    refuse_foreign,
    require_group,
    require_words,
    scales_16,
    zero_points,
)
from epicute.weights.importers.nibbles import PER_WORD, unpack_words
from epicute.weights.importers.source import tensor_of
from epicute.weights.quantized_int4 import QuantizedInt4

__all__ = ["CompressedTensors"]


@dataclass(frozen=True)
class CompressedTensors:
    """How a compressed-tensors checkpoint is written.

    Attributes:
        group: 32, 64, 128 or -1 (strategy ``channel``).
        symmetric: whether there are no zero points.
        act_order: whether ``actorder`` is "group"; then ``weight_g_idx`` must show that groups are adjacent.
    """

    group: int = 128
    symmetric: bool = True
    act_order: bool = False

    marker = "weight_packed"

    def __post_init__(self) -> None:
        require_group("group", self.group)

    def read(self, tensors: Mapping[str, torch.Tensor], prefix: str) -> QuantizedInt4:
        """The linear ``prefix`` (without ``.weight_packed``); its gain has to be an operand.

        Raises:
            ArgumentError: a tensor is missing or of another shape or dtype, or contradicts the configuration.
            UnsupportedError: groups in activation order, or tensors of a format that is not read here.
        """
        refuse_foreign(tensors, prefix)
        fix = "check the prefix, and that the configuration belongs to this checkpoint"
        words = tensor_of(tensors, f"{prefix}.weight_packed", fix)
        shape = tensor_of(tensors, f"{prefix}.weight_shape", fix)
        sizes = shape.flatten().tolist()
        require(
            len(sizes) == 2 and min(sizes) > 0,
            f"{prefix}.weight_shape",
            sizes,
            "[N, K]",
            "check the checkpoint",
        )
        columns, width = map(int, sizes)
        require_words(f"{prefix}.weight_packed", words, (columns, -(-width // PER_WORD)))
        stored = tensor_of(tensors, f"{prefix}.weight_scale", fix)
        expected = (columns, groups_of(width, self.group))
        scale = scales_16(f"{prefix}.weight_scale", stored, expected, self.group)
        self._require_order(tensors, f"{prefix}.weight_g_idx", width)
        codes = Int4Codes(
            unpack_words(words, 1)[:, :width].contiguous(),
            scale.contiguous(),
            self._zero(tensors, f"{prefix}.weight_zero_point", expected),
            self.group,
            prefix,
        )
        return QuantizedInt4.of(codes, prefix, gain_operand=True)

    def _zero(
        self, tensors: Mapping[str, torch.Tensor], name: str, expected: tuple[int, int]
    ) -> torch.Tensor | None:
        if self.symmetric and name not in tensors:
            return None
        fix = "check that the configuration belongs to this checkpoint: symmetric is False"
        words = tensor_of(tensors, name, fix)
        require_words(name, words, (-(-expected[0] // PER_WORD), expected[1]))
        zero = unpack_words(words, 0)[: expected[0]].contiguous()
        return zero_points(name, zero, self.symmetric)

    def _require_order(self, tensors: Mapping[str, torch.Tensor], name: str, width: int) -> None:
        order = tensors.get(name)
        require(
            order is not None or not self.act_order or self.group < 0,
            name,
            "no such tensor",
            "one, since actorder is 'group'",
            "quantise with actorder 'static' or none",
            UnsupportedError,
        )
        plain_order(name, order, width, self.group)
