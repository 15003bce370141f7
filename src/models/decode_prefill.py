"""Prefill with INT4 weights: the same bytes that a step streams, expanded for the large GEMM right before it.

    x ─► x · gain ─┐
                   ├─► GEMM >> the prefill's epilogue            one scratch for all projections of all layers
    codes ─► W ────┘

With many rows a product is bound by the tensor cores, and the weight's bytes matter little; INT4 alone then serves both
(FuTransformer 3.3.4). Gains that the codes have not taken up are multiplied into x, each product rounded to 16 bits, as
a step does on its way in.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from epicute.epilogues import Composition
from epicute.errors import require
from epicute.models.block_spec import PROJECTIONS, BlockSpec
from epicute.models.block_state import matrix
from epicute.models.decode_weights import DecodeWeights
from epicute.models.kernels import Kernels, Projection
from epicute.weights import FragmentPacked, Packed

__all__ = ["ExpandedLayer", "expanded_layers", "expanding"]


@dataclass(frozen=True, eq=False)
class Coded:
    """A projection's codes, and the gain that goes into what they are multiplied with; None without."""

    packed: FragmentPacked
    gain: torch.Tensor | None


@dataclass(frozen=True, eq=False)
class ExpandedLayer:
    """INT4 weights in the place of ``LayerWeights``: ``expanding``'s projections take them."""

    spec: BlockSpec
    qkv: Coded
    o: Coded
    gate_up: Coded
    down: Coded
    bias: torch.Tensor | None = None
    q_gain: torch.Tensor | None = None
    k_gain: torch.Tensor | None = None
    x_gain: None = None
    x1_gain: None = None
    y_gain: None = None

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self.qkv.packed.device


def expanded_layers(layers: Sequence[DecodeWeights], spec: BlockSpec) -> list[ExpandedLayer]:
    """A model's INT4 weights as its prefill blocks take them; ``spec``: of those, in 16 bits."""
    found = []
    for index, layer in enumerate(layers):
        gains = {"qkv": layer.x_gain, "gate_up": layer.x1_gain}
        parts: dict[str, Any] = {
            name: Coded(getattr(layer, name), gains.get(name)) for name in PROJECTIONS
        }
        parts |= {name: getattr(layer, name) for name in ("bias", "q_gain", "k_gain")}
        found.append(ExpandedLayer(replace(spec, last=index == len(layers) - 1), **parts))
    return found


def expanding(kernels: Kernels, layers: Sequence[ExpandedLayer], max_rows: int) -> Kernels:
    """The same kernels with projections that take ``Coded`` weights, up to ``max_rows`` rows of x at a time.

    All projections share one scratch: an invocation's kernels run one after the other.
    """
    require(len(layers) > 0, "layers", "none", "one at least", "pass the weights of a model")
    first = layers[0]
    dtype, device = first.spec.dtype, first.device
    coded = [getattr(first, name) for name in PROJECTIONS]
    plans = {c.packed.shape: kernels.dequantize(c.packed, dtype) for c in coded}
    elements = max(plan.elements for plan in plans.values())
    buffer = torch.empty(elements, dtype=dtype, device=device)
    widths = [c.packed.shape[1] for c in coded if c.gain is not None]
    gained = matrix(max_rows, max(widths), dtype, device) if widths else None

    def projection(composition: Composition, given: Any, options: dict[str, Any]) -> Projection:
        expand = kernels.dequantize(given.packed, dtype)
        weight = expand.view(buffer)
        large = kernels.projection(composition, weight, options)
        return _Expanding(expand, weight, large, gained)

    return replace(kernels, projection=projection)


@dataclass(frozen=True, eq=False)
class _Expanding:
    """What runs a projection of ``Coded`` weights.

    Attributes:
        expand: codes to a matrix. weight: that matrix, in the scratch. large: the GEMM. gained: x with its gain.
    """

    expand: Any
    weight: Packed
    large: Projection
    gained: torch.Tensor | None

    def run(self, x: torch.Tensor, packed: Any, **operands: torch.Tensor) -> None:
        """As ``epicute.gemm.Plan.run``, of ``Coded`` weights."""
        self.expand.run(packed.packed, self.weight)
        if packed.gain is not None:
            assert self.gained is not None
            read = self.gained[: x.shape[0], : x.shape[1]]
            torch.mul(x, packed.gain, out=read)
            x = read
        self.large.run(x, self.weight, **operands)

    def __str__(self) -> str:
        return f"expanded, {self.large}"
