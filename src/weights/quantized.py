"""A weight as codes and scales, in logical order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from epicute.errors import require

if TYPE_CHECKING:
    from epicute.layouts import RowOrder
    from epicute.weights.fragment_pack import FragmentPacked
    from epicute.weights.packed import Packed

__all__ = ["DTYPES", "Quantized", "bits", "require_codes", "require_same_width"]

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp8": torch.float8_e4m3fn}
"""Element type of each weight format; fp8 alone carries scales."""


@dataclass(frozen=True, eq=False)
class Quantized:
    """value (n, k) = codes (n, k) * scale (n); ``QuantizedInt4`` is the kind with groups.

    Attributes:
        format: "bf16", "fp16" or "fp8".
        codes: (N, K) in the format's dtype, any strides.
        scale: fp8: (N,) float32, one per output feature, or (1,) for all; other formats: None.
        name: how errors call it.
    """

    format: str
    codes: torch.Tensor
    scale: torch.Tensor | None = None
    name: str = "weight"

    def __post_init__(self) -> None:
        require_codes(self.name, self.format, self.codes, self.scale, self.codes.shape[0])

    def __repr__(self) -> str:
        at = f"{tuple(self.codes.shape)} on {self.codes.device}"
        return f"Quantized({self.name!r}, {self.format}, {at})"

    def dequantize(self) -> torch.Tensor:
        """(N, K) float32 values; the product is rounded once."""
        values = self.codes.to(torch.float32)
        return values if self.scale is None else values * self.scale[:, None]

    def pack(self, order: RowOrder) -> Packed:
        """The same codes in the row order that a composition reads; see ``Packed.of``."""
        from epicute.weights.packed import Packed

        return Packed.of(self, order)

    def pack_fragments(self, order: RowOrder, tiles: int = 1) -> FragmentPacked:
        """The same codes as few-row kernels stream them; see ``FragmentPacked.of``."""
        from epicute.weights.fragment_pack import FragmentPacked

        return FragmentPacked.of(self, order, tiles)

    @staticmethod
    def concat(parts: Sequence[Quantized], name: str | None = None) -> Quantized:
        """Output features one after the other, each with its own scale.

        A scale per tensor becomes one per feature, so that no part takes over another's.

        Raises:
            ArgumentError: no parts, different formats or different K.
        """
        require_same_width("parts", [p.codes for p in parts])
        formats = {p.format for p in parts}
        require(
            len(formats) == 1,
            "parts",
            f"formats {sorted(formats)}",
            "one format",
            "quantise all parts alike",
        )
        if formats == {"int4"}:
            from epicute.weights.quantized_int4 import QuantizedInt4

            return QuantizedInt4.concat(parts, name)
        scales = [p.scale.expand(p.codes.shape[0]) for p in parts if p.scale is not None]
        return Quantized(
            parts[0].format,
            torch.cat([bits(p.codes) for p in parts]).view(parts[0].codes.dtype),
            torch.cat(scales) if scales else None,
            name or "+".join(p.name for p in parts),
        )


def bits(codes: torch.Tensor) -> torch.Tensor:
    """The same storage as integers: copies and comparisons that no float rule touches."""
    return codes.view({1: torch.uint8, 2: torch.int16}[codes.element_size()])


def require_same_width(argument: str, matrices: Sequence[torch.Tensor]) -> None:
    """Raise unless there is at least one matrix and all have the same K."""
    widths = [m.shape[1] for m in matrices]
    require(
        len(set(widths)) == 1,
        argument,
        f"K = {widths}",
        "at least one matrix, all of one K",
        "concatenate projections that read the same activation",
    )


def require_codes(
    name: str, format: str, codes: torch.Tensor, scale: torch.Tensor | None, columns: int
) -> None:
    """Raise unless codes and scale are what ``format`` says, for ``columns`` output features."""
    require(format in DTYPES, f"{name}.format", repr(format), f"one of {tuple(DTYPES)}", "name one")
    require(
        codes.dtype == DTYPES[format],
        f"{name}.codes.dtype",
        codes.dtype,
        f"{DTYPES[format]} for format {format!r}",
        "cast the codes or name their format",
    )
    require(
        codes.ndim == 2 and codes.numel() > 0,
        f"{name}.codes.shape",
        tuple(codes.shape),
        "(N, K), both at least 1",
        "pass the matrix with output features first",
    )
    if format != "fp8":
        require(
            scale is None,
            f"{name}.scale",
            "a tensor",
            f"None for format {format!r}",
            "multiply the scale into the values, or quantise to fp8",
        )
        return
    require(
        scale is not None
        and scale.dtype == torch.float32
        and scale.shape in ((1,), (columns,))
        and scale.device == codes.device,
        f"{name}.scale",
        None if scale is None else f"{tuple(scale.shape)} {scale.dtype} on {scale.device}",
        f"float32 ({columns},) or (1,) on {codes.device}",
        "pass one multiplier per output feature, or one for the tensor",
    )
