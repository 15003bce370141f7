"""Where a block gets its kernels from: compiled for a GPU, or whatever a caller puts in their place."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from epicute.attention import AttentionSpec, plan_attention
from epicute.epilogues import Composition
from epicute.gemm import plan
from epicute.models.block_state import BlockScales
from epicute.quant.rowwise import RowsPlan, plan_rows
from epicute.weights import Packed

__all__ = ["GPU", "Kernels", "Projection"]


class Projection(Protocol):
    """What runs a projection: ``epicute.gemm.Plan``, or what stands in for it."""

    def run(self, x: torch.Tensor, packed: Packed, **operands: torch.Tensor) -> None:
        """Launch; see ``epicute.gemm.Plan.run``."""


def _projection(composition: Composition, packed: Packed, options: dict[str, Any]) -> Projection:
    return plan(composition, packed, **options)


def _rows(columns: int, dtype: torch.dtype, device: torch.device) -> RowsPlan:
    return plan_rows(columns, dtype, device=device)


@dataclass(frozen=True)
class Kernels:
    """Where a block gets its kernels from; whoever has others, or none, replaces these functions.

    Attributes:
        projection: (composition, packed, options of ``epicute.gemm.plan``) to what runs it.
        attention: an ``AttentionSpec`` to what runs it as ``AttentionPlan.run``.
        rows: (columns, dtype, device) to what quantises rows as ``epicute.quant.rowwise.RowsPlan.run``.
        roll: takes what the last invocation saw into the scales.
    """

    projection: Callable[[Composition, Packed, dict[str, Any]], Projection] = _projection
    attention: Callable[[AttentionSpec], Any] = plan_attention
    rows: Callable[[int, torch.dtype, torch.device], Any] = _rows
    roll: Callable[[BlockScales], None] = BlockScales.roll


GPU = Kernels()
"""Compiled for the GPU that the weights are on."""
