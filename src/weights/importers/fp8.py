"""FP8 checkpoints: E4M3 codes with static scales, one for each output feature or one for the tensor.

    weight          (N, K) float8_e4m3fn
    weight_scale    (N, 1) or (N,), or () or (1,) for all     value = code * scale

As llm-compressor writes them (compressed-tensors, ``float-quantized``), AutoFP8 and transformers (``quant_method: fp8``
without blocks, whose scale is called ``weight_scale_inv`` and multiplies all the same). Scales of activations that a
checkpoint brings along (``input_scale``) are not read: what runs here takes its own from what it sees.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from epicute.errors import UnsupportedError, require
from epicute.weights.importers.checks import refuse_foreign
from epicute.weights.importers.source import tensor_of
from epicute.weights.quantized import Quantized

__all__ = ["Fp8", "fp8_weight"]

FP8 = torch.float8_e4m3fn
FLOATS = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Fp8:
    """How an FP8 checkpoint is written.

    Attributes:
        scale: what the tensor of scales is called behind the linear's name.
    """

    scale: str = "weight_scale"

    @property
    def marker(self) -> str:
        """The tensor that quantised linears alone have."""
        return self.scale

    def read(self, tensors: Mapping[str, torch.Tensor], prefix: str) -> Quantized:
        """The linear ``prefix`` (without ``.weight``); its gain has to be an operand.

        Raises:
            ArgumentError: a tensor is missing or of another shape or dtype, or holds NaN.
            UnsupportedError: scales of blocks.
        """
        refuse_foreign(tensors, prefix)
        fix = "check the prefix, and that the configuration belongs to this checkpoint"
        codes = tensor_of(tensors, f"{prefix}.weight", fix)
        scale = tensor_of(tensors, f"{prefix}.{self.scale}", fix)
        return fp8_weight(codes, scale, f"{prefix}.weight", f"{prefix}.{self.scale}")


def fp8_weight(
    codes: torch.Tensor, scale: torch.Tensor, name: str, scale_name: str = ""
) -> Quantized:
    """Codes (N, K) and their scale as a checkpoint has them; ``name`` and ``scale_name`` are for errors.

    Raises:
        ArgumentError: another dtype or shape, NaN among the codes, a scale that is negative or not finite.
        UnsupportedError: scales of blocks.
    """
    where = scale_name or f"{name}_scale"
    require(
        codes.dtype == FP8 and codes.ndim == 2,
        name,
        f"{tuple(codes.shape)} {codes.dtype}",
        f"(N, K) {FP8}",
        "check that the configuration belongs to this checkpoint",
    )
    rows = codes.shape[0]
    require(
        tuple(scale.shape) in ((), (1,), (1, 1), (rows,), (rows, 1)),
        where,
        f"{tuple(scale.shape)}",
        f"one for the tensor, or ({rows},) or ({rows}, 1) for its output features",
        "scales of blocks are not served: decode the checkpoint, or take one with scales of channels",
        UnsupportedError,
    )
    require(
        scale.dtype in FLOATS,
        f"{where}.dtype",
        scale.dtype,
        ", ".join(map(str, FLOATS)),
        "check the checkpoint",
    )
    values = scale.to(codes.device, torch.float32).reshape(-1)
    wrong = int((~(values.isfinite() & (values >= 0))).sum())
    require(
        wrong == 0,
        where,
        f"{wrong} values that are negative or not finite",
        "multipliers",
        "check the checkpoint",
    )
    broken = int(((codes.view(torch.uint8) & 0x7F) == 0x7F).sum())
    require(broken == 0, name, f"{broken} codes of NaN", "numbers", "check the checkpoint")
    return Quantized("fp8", codes, values, name)
