"""A projection weight as the checkpoint has it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce

import torch

from epicute.errors import require
from epicute.quant import ClipSearch, Int4Grid, quantize_int4, quantize_rows
from epicute.weights.quantized import DTYPES, Quantized, require_same_width
from epicute.weights.quantized_int4 import QuantizedInt4

__all__ = ["FORMATS", "Weight"]

FORMATS = (*DTYPES, "int4")
"""What a weight can be rounded to."""

_SOURCES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True, eq=False)
class Weight:
    """Values of y = x W^T, before quantisation.

    Attributes:
        values: (N, K) float32, bfloat16 or float16, any strides (a transposed view is read as what
            it shows).
        name: how errors call it.
        tied: whether the values also serve elsewhere, as an embedding does.
    """

    values: torch.Tensor
    name: str = "weight"
    tied: bool = False

    def __post_init__(self) -> None:
        require(
            isinstance(self.values, torch.Tensor),
            self.name,
            type(self.values).__name__,
            "a torch.Tensor",
            "torch.from_numpy(array), or torch.tensor(…)",
        )
        require(
            self.values.ndim == 2 and self.values.numel() > 0,
            f"{self.name}.shape",
            tuple(self.values.shape),
            "(N, K), both at least 1",
            "pass the matrix with output features first",
        )
        require(
            self.values.dtype in _SOURCES,
            f"{self.name}.dtype",
            self.values.dtype,
            "float32, bfloat16 or float16",
            "cast it, or wrap stored codes in Quantized",
        )

    def __repr__(self) -> str:
        values, tied = self.values, ", tied" if self.tied else ""
        at = f"{tuple(values.shape)} on {values.device}"
        return f"Weight({self.name!r}, {values.dtype}, {at}{tied})"

    def fold_gain(self, gain: torch.Tensor, offset: float = 0.0, copy: bool = False) -> Weight:
        """The weight that reads an activation without its norm gain (FuTransformer 3.2.2).

        Args:
            gain: (K,) float32, bfloat16 or float16, in a dtype of its own, any stride.
            offset: added to the gain first; 1 for models that store gain - 1.
            copy: fold a tied weight all the same, into a copy of its own.

        Returns:
            float32 values * (gain + offset); sum and product are each rounded once, in FP32.

        Raises:
            ArgumentError: the gain has another shape or dtype or a non-finite value, or the weight
                is tied.
        """
        require(
            copy or not self.tied,
            self.name,
            "a tied weight",
            "a weight of its own, since folding a gain would change its other use",
            "pass copy=True to fold into a copy",
        )
        require(
            gain.shape == (self.values.shape[1],),
            "gain.shape",
            tuple(gain.shape),
            f"({self.values.shape[1]},), one per input feature of {self.name}",
            "pass the gain of the norm that feeds this projection",
        )
        require(
            gain.dtype in _SOURCES,
            "gain.dtype",
            gain.dtype,
            "float32, bfloat16 or float16",
            "cast the gain",
        )
        _require_finite("gain", gain)
        factor = gain.to(torch.float32) + offset
        return Weight(self.values.to(torch.float32) * factor, self.name)

    def quantize(
        self,
        format: str,
        grid: Int4Grid | None = None,
        clip: ClipSearch | None = None,
        importance: torch.Tensor | None = None,
    ) -> Quantized:
        """Round to ``format``: "bf16", "fp16", "fp8" (E4M3, amax / 448 of each output feature) or "int4".

        Args:
            format: one of ``FORMATS``.
            grid: int4 alone: groups, zero points, dtype of the scales; symmetric groups of 128 unless given.
            clip: int4 alone: search each group's scale.
            importance: int4 alone: (K,) weights of the error that the search minimises.

        Returns:
            contiguous codes; for fp8 one float32 scale per output feature, 1 for a feature of
            zeros; for int4 a ``QuantizedInt4``.

        Raises:
            ArgumentError: unknown format, a non-finite value, one beyond the range of fp16, or
                arguments of int4 for another format.
        """
        require(format in FORMATS, "format", repr(format), f"one of {FORMATS}", "name one")
        _require_finite(self.name, self.values)
        if format == "int4":
            codes = quantize_int4(self.values, grid, clip, importance)
            return QuantizedInt4.of(codes, self.name)
        for argument, got in (("grid", grid), ("clip", clip), ("importance", importance)):
            require(got is None, argument, got, f"None for format {format!r}", "quantise to int4")
        if format == "fp8":
            values, scale = quantize_rows(self.values)
            return Quantized(format, values, scale, self.name)
        values = self.values.to(DTYPES[format]).contiguous()
        _require_finite(f"{self.name} as {format}", values)
        return Quantized(format, values, None, self.name)

    @staticmethod
    def concat(weights: Sequence[Weight], name: str | None = None) -> Weight:
        """Output features of ``weights`` one after the other: the fused QKV, the fused gate and up.

        Values of several dtypes become the one that holds them all. The result is a copy, so it
        counts as tied only where asking for a copy is in order: when one of its parts is.

        Raises:
            ArgumentError: no weights, or different K.
        """
        require_same_width("weights", [w.values for w in weights])
        dtype = reduce(torch.promote_types, (w.values.dtype for w in weights))
        return Weight(
            torch.cat([w.values.to(dtype) for w in weights]),
            name or "+".join(w.name for w in weights),
            any(w.tied for w in weights),
        )


def _require_finite(argument: str, values: torch.Tensor) -> None:
    """Values of a checkpoint are looked at once, here; this waits for the device."""
    broken = int((~values.isfinite()).sum())
    require(
        broken == 0,
        argument,
        f"{broken} non-finite values",
        "finite values",
        "check the checkpoint, or choose a format with more range",
    )
