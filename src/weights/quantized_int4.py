"""A weight on INT4 grids, in logical order: what the quantisers make and the importers read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from epicute.errors import ArgumentError, UnsupportedError, require
from epicute.quant.int4 import MIDDLE, Int4Codes, group_width, require_int4
from epicute.weights.quantized import Quantized, require_same_width

if TYPE_CHECKING:
    from epicute.layouts import RowOrder

__all__ = ["QuantizedInt4"]


@dataclass(frozen=True, eq=False, repr=False)
class QuantizedInt4(Quantized):
    """value (n, k) = (codes (n, k) - zero (n, g)) * scale (n, g), g = k // group.

    Attributes:
        format: "int4".
        codes: (N, K) uint8, 0 to 15.
        scale: (N, G) float16 or bfloat16; G = ceil(K / group), 1 for group -1.
        name: how errors call it.
        zero: (N, G) uint8, 0 to 15; None: 8 everywhere.
        group: 32, 64, 128, or -1 for one scale per output feature.
        gain_operand: whether the gain of the norm that feeds this projection, if one does, has to be an operand of
            whoever reads it. True of imported weights: their codes were chosen without it, and cannot take it up later.
    """

    zero: torch.Tensor | None = None
    group: int = 128
    gain_operand: bool = False

    def __post_init__(self) -> None:
        require(
            self.format == "int4",
            f"{self.name}.format",
            repr(self.format),
            "'int4'",
            "use Quantized for the others",
        )
        require(
            self.scale is not None,
            f"{self.name}.scale",
            None,
            "one scale per group",
            "pass the scales",
        )
        require_int4(self.name, self.codes, self.scales, self.zero, self.group)

    def __repr__(self) -> str:
        at = f"{tuple(self.codes.shape)} on {self.codes.device}"
        kind = "symmetric" if self.zero is None else "asymmetric"
        group = "one group a feature" if self.group < 0 else f"groups of {self.group}"
        gain = ", gain as operand" if self.gain_operand else ""
        return f"QuantizedInt4({self.name!r}, {kind}, {group}, {at}{gain})"

    @staticmethod
    def of(source: Int4Codes, name: str = "weight", gain_operand: bool = False) -> QuantizedInt4:
        """The codes that a quantiser chose, under a name."""
        return QuantizedInt4(
            "int4", source.codes, source.scale, name, source.zero, source.group, gain_operand
        )

    @property
    def scales(self) -> torch.Tensor:
        """(N, G): ``scale``, which is never None here."""
        assert self.scale is not None
        return self.scale

    @property
    def int4(self) -> Int4Codes:
        """The same tensors as the quantisers know them."""
        return Int4Codes(self.codes, self.scales, self.zero, self.group, self.name)

    def dequantize(self) -> torch.Tensor:
        """(N, K) float32 values; the product is rounded once."""
        return self.int4.dequantize()

    def pack(self, order: RowOrder) -> NoReturn:
        """Refused: matrices of rows are read by the large GEMM, which multiplies no INT4.

        Raises:
            UnsupportedError: always.
        """
        raise UnsupportedError(
            f"{self.name}: got int4 in row order [{order}], expected bf16, fp16 or fp8. Fix: "
            "pack_fragments(order) for the few-row kernels, or Weight(q.dequantize()).quantize('bf16')"
        )

    def fold_gain(self, *_: Any) -> NoReturn:
        """Refused: the gain differs inside a group, whose codes share one scale.

        Raises:
            ArgumentError: always.
        """
        raise ArgumentError(
            f"{self.name}: got a gain for INT4 codes, whose groups share one scale, expected none. "
            "Fix: pass the gain as an operand of the projection, or fold it into the Weight before "
            "quantising"
        )

    def columns(self, start: int, stop: int) -> QuantizedInt4:
        """Input features ``start`` to ``stop``: a shard along K, with the scales of its groups.

        Raises:
            ArgumentError: the range is empty or outside K, or an end that is not K's stands inside a group, whose
                scale two shards would then share.
        """
        width = self.codes.shape[1]
        wide = group_width(width, self.group)
        inside = [end for end in (start, stop) if end % wide and end != width]
        require(
            0 <= start < stop <= width and not inside,
            f"{self.name}.columns",
            f"{start} to {stop}",
            f"a range of K = {width} whose ends are multiples of the group, {wide}",
            "shard at group edges, or quantise the shards",
        )
        groups = slice(start // wide, -(-stop // wide))
        zero = None if self.zero is None else self.zero[:, groups]
        return QuantizedInt4(
            "int4",
            self.codes[:, start:stop],
            self.scales[:, groups],
            self.name,
            zero,
            self.group,
            self.gain_operand,
        )

    @staticmethod
    def concat(parts: Sequence[Quantized], name: str | None = None) -> QuantizedInt4:
        """Output features one after the other, each with its own scales and zero points.

        Raises:
            ArgumentError: no parts, or parts that differ in format, K, group, dtype of the scales or in whether the
                gain has to be an operand.
        """
        require_same_width("parts", [p.codes for p in parts])
        known = [p for p in parts if isinstance(p, QuantizedInt4)]
        kinds = {(p.group, str(p.scales.dtype), p.gain_operand) for p in known}
        require(
            len(known) == len(parts) and len(kinds) == 1,
            "parts",
            f"{[p.format for p in parts]}, (group, scales, gain_operand) {sorted(kinds)}",
            "int4 alike",
            "quantise or import all parts alike",
        )
        zero = None
        if any(p.zero is not None for p in known):
            points = [
                torch.full_like(p.scales, MIDDLE, dtype=torch.uint8) if p.zero is None else p.zero
                for p in known
            ]
            zero = torch.cat(points)
        return QuantizedInt4(
            "int4",
            torch.cat([p.codes for p in known]),
            torch.cat([p.scales for p in known]),
            name or "+".join(p.name for p in known),
            zero,
            known[0].group,
            known[0].gain_operand,
        )
