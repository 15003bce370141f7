"""Kernels of a block on a machine without a GPU: compositions evaluated in float32, attention in float64.

Every operand is bound by name and every output written in place, as the compiled kernels do it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from epicute.attention import AttentionSpec
from epicute.attention.reference import attend_batch
from epicute.epilogues import Composition
from epicute.models.block_state import BlockScales
from epicute.models.kernels import Kernels
from epicute.quant import E4M3_MAX, cast_e4m3, inverse
from epicute.quant.rowwise import RowsPlan, plan_rows
from epicute.weights import Packed


@dataclass
class Evaluated:
    """A projection. Sums are exact to one float32 rounding, so that a row has the same bits in any batch."""

    composition: Composition
    launches: list[str]

    def run(self, x: torch.Tensor, packed: Packed, **operands: torch.Tensor) -> None:
        self.launches.append(self.composition.title)
        packed.require_order(self.composition.row_order(packed.shape[0]), "the composition")
        codes = packed.unpack().codes
        assert x.dtype == codes.dtype
        if packed.scale is not None:
            operands["weight_scale"] = packed.scale
        acc = (x.double() @ codes.double().T).float()
        found = self.composition.evaluate(acc, **operands)
        for name, value in found.items():
            operands[name].copy_(value)


@dataclass
class Attended:
    """Attention with ``AttentionPlan.run``'s contract."""

    spec: AttentionSpec
    launches: list[str]

    def run(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, out: torch.Tensor, **given: Any
    ) -> None:
        self.launches.append("attention")
        assert (q.dtype, k.dtype, out.dtype) == (
            self.spec.dtype,
            self.spec.kv_dtype,
            self.spec.out_dtype,
        )
        fp8 = {n: given.pop(n, None) for n in ("out_scale", "amax", "saturated", "nans")}
        found, _ = attend_batch(self.spec, q, k, v, **given)
        rows = self._tokens(found, given)
        value = found[rows].to(torch.float32)
        if not self.spec.out_is_fp8:
            out[rows] = value.to(out.dtype)
            return
        scaled = value * inverse(fp8["out_scale"])
        flat = out.view(torch.uint8)
        flat[rows] = cast_e4m3(scaled).view(torch.uint8)
        seen = value[value.isfinite()].abs()
        if seen.numel():
            fp8["amax"].copy_(torch.maximum(fp8["amax"], seen.max().reshape(1)))
        fp8["saturated"].add_((scaled.abs() > E4M3_MAX).sum())
        fp8["nans"].add_(value.isnan().sum())

    def _tokens(self, out: torch.Tensor, given: dict[str, Any]) -> torch.Tensor:
        """Mask of the rows that are written."""
        if self.spec.packed:
            return torch.arange(out.shape[0]) < int(given["q_starts"][-1])
        return torch.arange(out.shape[1]) < given["q_lengths"][:, None]


@dataclass
class Rows:
    """A quantiser of rows, which has a CPU path of its own."""

    plan: RowsPlan
    launches: list[str]

    def run(
        self, x: torch.Tensor, codes: torch.Tensor, scale: torch.Tensor, **gain: torch.Tensor
    ) -> None:
        self.launches.append("quantize_rows")
        self.plan.run(x, codes, scale, **gain)


@dataclass
class Launches:
    """``kernels`` that note what is launched, in order."""

    made: list[str] = field(default_factory=list)

    @property
    def kernels(self) -> Kernels:
        def roll(scales: BlockScales) -> None:
            self.made.append("roll")
            scales.roll()

        return Kernels(
            projection=lambda composition, packed, options: Evaluated(composition, self.made),
            attention=lambda spec: Attended(spec, self.made),
            rows=lambda columns, dtype, device, gain: Rows(
                plan_rows(columns, dtype, gain=gain), self.made
            ),
            roll=roll,
        )
