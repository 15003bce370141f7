"""GPTQ checkpoints, as AutoGPTQ and GPTQModel write them.

    qweight  (K / 8, N) int32    nibble i of word r: input feature 8r + i
    scales   (K / group, N)      float16
    qzeros   (K / group, N / 8)  nibble i: output feature 8c + i; v1 stores the zero point less 1, v2 as it is
    g_idx    (K,)                group of each input feature; only k // group is read here

Both versions keep four bits, so that v1 stores zero point 0 as 15. Which one a file is written in stands in the
configuration alone (``checkpoint_format``); a symmetric checkpoint under the wrong label is refused.
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

__all__ = ["Gptq"]


@dataclass(frozen=True)
class Gptq:
    """How a GPTQ checkpoint is written.

    Attributes:
        version: 1 (zero points less 1) or 2.
        group: 32, 64, 128 or -1.
        symmetric: whether all zero points have to be 8.
        act_order: whether ``desc_act`` is declared; then ``g_idx`` must show that groups are adjacent.
    """

    version: int = 1
    group: int = 128
    symmetric: bool = True
    act_order: bool = False

    marker = "qweight"

    def __post_init__(self) -> None:
        require(
            self.version in (1, 2),
            "version",
            self.version,
            "1 or 2",
            "take it from checkpoint_format: 'gptq' is 1, 'gptq_v2' is 2",
        )
        require_group("group", self.group)

    def read(self, tensors: Mapping[str, torch.Tensor], prefix: str) -> QuantizedInt4:
        """The linear ``prefix`` (without ``.qweight``); its gain has to be an operand.

        Raises:
            ArgumentError: a tensor is missing or of another shape or dtype, or contradicts the configuration.
            UnsupportedError: groups in activation order, or tensors of a format that is not read here.
        """
        refuse_foreign(tensors, prefix)
        fix = "check the prefix, and that the configuration belongs to this checkpoint"
        words = tensor_of(tensors, f"{prefix}.qweight", fix)
        require(
            words.ndim == 2 and words.numel() > 0,
            f"{prefix}.qweight",
            tuple(words.shape),
            "(K / 8, N)",
            fix,
        )
        columns, width = words.shape[1], words.shape[0] * PER_WORD
        require_words(f"{prefix}.qweight", words, (width // PER_WORD, columns))
        groups = groups_of(width, self.group)
        stored = tensor_of(tensors, f"{prefix}.scales", fix)
        scale = scales_16(f"{prefix}.scales", stored, (groups, columns), self.group)
        self._require_order(tensors, f"{prefix}.g_idx", width)
        points = tensor_of(tensors, f"{prefix}.qzeros", fix)
        require_words(f"{prefix}.qzeros", points, (groups, -(-columns // PER_WORD)))
        zero = unpack_words(points, 1)[:, :columns].t().contiguous()
        if self.version == 1:
            zero = (zero + 1) & 15
        codes = Int4Codes(
            unpack_words(words, 0).t().contiguous(),
            scale.t().contiguous(),
            zero_points(f"{prefix}.qzeros", zero, self.symmetric),
            self.group,
            prefix,
        )
        return QuantizedInt4.of(codes, prefix, gain_operand=True)

    def _require_order(self, tensors: Mapping[str, torch.Tensor], name: str, width: int) -> None:
        order = tensors.get(name)
        require(
            order is not None or not self.act_order or self.group < 0,
            name,
            "no such tensor",
            "one, since desc_act is True",
            "quantise with desc_act=False",
            UnsupportedError,
        )
        plain_order(name, order, width, self.group)
