"""Where a block gets its kernels from: compiled for a GPU, or whatever a caller puts in their place."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch

from epicute.attention import AttentionSpec, plan_attention
from epicute.attention.decode import plan_decode
from epicute.attention.decode_schedule import DecodeSchedule
from epicute.attention.decode_spec import DecodeSpec
from epicute.attention.mixed import MixedSpec
from epicute.attention.mixed_decode import plan_mixed_decode
from epicute.attention.mixed_plan import plan_mixed
from epicute.decode import plan_dequantize, plan_few_rows
from epicute.epilogues import Composition
from epicute.errors import CompileError
from epicute.gemm import plan
from epicute.kv import Int4Cache, QK4PV8Cache
from epicute.kv.append import plan_append
from epicute.kv.qk4pv8_write import plan_cache_write
from epicute.kv.qk4pv8_write_means import plan_sequence_means
from epicute.models.block_state import BlockScales
from epicute.quant.rowwise import RowsPlan, plan_rows
from epicute.weights import FragmentPacked, Packed

__all__ = ["GPU", "Kernels", "Projection", "Streamed"]


class Projection(Protocol):
    """What runs a projection: ``epicute.gemm.Plan``, or what stands in for it."""

    def run(self, x: torch.Tensor, packed: Packed, **operands: torch.Tensor) -> None:
        """Launch; see ``epicute.gemm.Plan.run``."""


class Streamed(Protocol):
    """What runs a projection of few rows: ``epicute.decode.FewRowsPlan``, or what stands in for it."""

    def run(self, x: torch.Tensor, packed: FragmentPacked, **operands: torch.Tensor) -> None:
        """Launch; see ``epicute.decode.FewRowsPlan.run``."""

    def admit(self, packed: FragmentPacked) -> None:
        """Take note of a weight that is in memory; see ``epicute.decode.FewRowsPlan.admit``."""


def _projection(composition: Composition, packed: Packed, options: dict[str, Any]) -> Projection:
    return plan(composition, packed, **options)


def _rows(columns: int, dtype: torch.dtype, device: torch.device, gain: bool) -> RowsPlan:
    return plan_rows(columns, dtype, gain=gain, device=device)


def _few_rows(
    composition: Composition, packed: FragmentPacked, options: dict[str, Any]
) -> Streamed:
    return plan_few_rows(composition, packed, **options)


def _decode(spec: DecodeSpec, schedule: DecodeSchedule) -> Any:
    try:
        return plan_decode(spec, schedule=schedule)
    except CompileError:
        if schedule.resident == 1:
            raise
        # Half of an SM's registers do not suffice.
        return plan_decode(spec, schedule=replace(schedule, resident=1))


def _mixed_decode(cache: QK4PV8Cache, dtype: torch.dtype, options: dict[str, Any]) -> Any:
    return plan_mixed_decode(cache, dtype, **options)


def _append(kind: Int4Cache, dtype: torch.dtype, device: torch.device) -> Any:
    return plan_append(kind, dtype, device=device)


def _write(cache: QK4PV8Cache, dtype: torch.dtype, grouped: bool, device: torch.device) -> Any:
    return plan_cache_write(cache, dtype, grouped=grouped, device=device)


def _means(head_dim: int, dtype: torch.dtype, device: torch.device) -> Any:
    return plan_sequence_means(head_dim, dtype, device=device)


@dataclass(frozen=True)
class Kernels:
    """Where a block gets its kernels from; whoever has others, or none, replaces these functions.

    Attributes:
        projection: (composition, packed, options of ``epicute.gemm.plan``) to what runs it.
        attention: an ``AttentionSpec`` to what runs it as ``AttentionPlan.run``.
        rows: (columns, dtype, device, whether a gain goes in) to what quantises rows as
            ``epicute.quant.rowwise.RowsPlan.run``.
        roll: takes what the last invocation saw into the scales.
        few_rows: (composition, packed, options of ``epicute.decode.plan_few_rows``) to what runs it.
        decode: (``DecodeSpec``, its schedule) to what runs it as ``DecodePlan.run``.
        mixed_decode: (a cache, dtype of rows, options of ``plan_mixed_decode``) to what runs it as
            ``MixedDecodePlan.run``.
        dequantize: (a packed INT4 weight, 16-bit dtype) to what expands it as ``epicute.decode.DequantizePlan``.
        append: (an INT4 cache, dtype of rows, device) to what stores rows as ``epicute.kv.append.AppendPlan.run``.
        write: (a QK4PV8 cache, dtype of rows, whether each has means of its own group, device) to what stores rows as
            ``CacheWritePlan.run``.
        means: (head_dim, dtype of rows, device) to what takes the means of requests as ``MeansPlan.run``.
        mixed: a ``MixedSpec`` to what runs it as ``MixedPlan.run``.
    """

    projection: Callable[[Composition, Packed, dict[str, Any]], Projection] = _projection
    attention: Callable[[AttentionSpec], Any] = plan_attention
    rows: Callable[[int, torch.dtype, torch.device, bool], Any] = _rows
    roll: Callable[[BlockScales], None] = BlockScales.roll
    few_rows: Callable[[Composition, FragmentPacked, dict[str, Any]], Streamed] = _few_rows
    decode: Callable[[DecodeSpec, DecodeSchedule], Any] = _decode
    mixed_decode: Callable[[QK4PV8Cache, torch.dtype, dict[str, Any]], Any] = _mixed_decode
    dequantize: Callable[[FragmentPacked, torch.dtype], Any] = plan_dequantize
    append: Callable[[Int4Cache, torch.dtype, torch.device], Any] = _append
    write: Callable[[QK4PV8Cache, torch.dtype, bool, torch.device], Any] = _write
    means: Callable[[int, torch.dtype, torch.device], Any] = _means
    mixed: Callable[[MixedSpec], Any] = plan_mixed


GPU = Kernels()
"""Compiled for the GPU that the weights are on."""
