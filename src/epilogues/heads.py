"""Policies that know heads: RoPE, QK-norm and KV placement."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from epicute.epilogues.context import Context
from epicute.epilogues.operands import (
    CELLS,
    Cells,
    ColumnVector,
    Counter,
    HeadVector,
    Operand,
    PerHead,
    Slots,
)
from epicute.epilogues.policy import Pairwise, Reducing, Tap
from epicute.epilogues.values import Value
from epicute.errors import require

__all__ = ["HeadNorm", "PlaceKV", "RoPE"]

E4M3_MAX = 448.0


def _whole_head(policy: str, head_dim: int) -> None:
    require(
        head_dim % 16 == 0 and 16 <= head_dim <= 256,
        f"{policy}.head_dim",
        head_dim,
        "a multiple of 16 up to 256",
        "give the model's head dimension",
    )


@dataclass(frozen=True)
class RoPE(Pairwise):
    """Rotate channel pairs by position * inv_freq (FuTransformer 3.2.1).

    The angle is the float32 product of position and frequency; sine and cosine are good to 1e-6 absolute. Channels from
    ``rotary_dim`` on pass bit for bit. Llama-3 and YaRN scaling are in the frequencies the caller gives; ``magnitude``
    is YaRN's factor on cosine and sine (a final value, applied once).

    Operands: ``positions`` (M,) int32 or int64, ``inv_freq`` (rotary_dim/2,) float32.

    Args:
        head_dim: channels of a head.
        rotary_dim: channels that rotate, from the first; 0 means all.
        style: ``"half"`` pairs j with j + rotary_dim/2 (Llama, Qwen), ``"interleaved"`` pairs 2j with 2j + 1 (GPT-J).
        magnitude: factor on the rotated channels.
    """

    head_dim: int = 0
    rotary_dim: int = 0
    style: str = "half"
    magnitude: float = 1.0

    def __post_init__(self) -> None:
        _whole_head("RoPE", self.head_dim)
        object.__setattr__(self, "rotary_dim", self.rotary_dim or self.head_dim)
        require(
            0 < self.rotary_dim <= self.head_dim and self.rotary_dim % 16 == 0,
            "RoPE.rotary_dim",
            self.rotary_dim,
            f"a multiple of 16 up to head_dim={self.head_dim} (0: the whole head)",
            "give the model's rotary dimension",
        )
        require(
            self.style in ("half", "interleaved"),
            "RoPE.style",
            repr(self.style),
            "'half' or 'interleaved'",
            "name the pairing of the checkpoint",
        )

    @property
    def pairs(self) -> str:
        return "halves" if self.style == "half" else "interleaved"

    @property
    def consumes(self) -> bool:
        return False

    @property
    def operands(self) -> Mapping[str, Operand]:
        positions = ColumnVector(dtypes=(torch.int64, torch.int32), dtype=torch.int64)
        frequencies = HeadVector(length=self.rotary_dim // 2, shared=True, dtypes=(torch.float32,))
        return {"positions": positions, "inv_freq": frequencies}

    def apply(self, first: Value, second: Value, ctx: Context) -> tuple[Value, Value]:
        angle = ctx.positions * ctx.inv_freq
        sine, cosine = ctx.sin(angle), ctx.cos(angle)
        if self.magnitude != 1.0:
            sine, cosine = sine * self.magnitude, cosine * self.magnitude
        return first * cosine - second * sine, second * cosine + first * sine


@dataclass(frozen=True)
class HeadNorm(Reducing):
    """RMSNorm over each head: x * rsqrt(mean(x²) + eps) * (head_gain + offset) (QK-norm).

    Operand: ``head_gain`` (head_dim,).
    """

    head_dim: int = 0
    eps: float = 1e-6
    offset: float = 0.0

    def __post_init__(self) -> None:
        _whole_head("HeadNorm", self.head_dim)

    @property
    def over(self) -> int:
        return self.head_dim

    @property
    def operands(self) -> Mapping[str, Operand]:
        return {"head_gain": HeadVector(length=self.head_dim)}

    def apply(self, x: Value, ctx: Context) -> Value:
        factor = ctx.rsqrt(ctx.total(x * x) * (1.0 / self.head_dim) + self.eps)
        return x * factor * (ctx.head_gain + self.offset if self.offset else ctx.head_gain)


@dataclass(frozen=True)
class PlaceKV(Tap):
    """Write heads of K or V straight to their cache cells (FuTransformer 3.2.1).

    Row m, head h goes to ``cells[page, token, h]`` with (page, token) = divmod(slots[m], page_size); a slot that is
    negative or past the cache is skipped. ``cells`` is the cache viewed as (pages, page_size, heads, head_dim) whatever
    its strides (NHD, HND, K and V interleaved), or (batch, max_len, heads, head_dim) where it is contiguous.

    Float8 cells: code = x * (1 / cell_scale[head]), saturating; ``cells_saturated`` and ``cells_nans`` count what was
    placed beyond ±448 and as NaN.

    Args:
        head_dim: channels of a head.
        dtype: ``torch.bfloat16``, ``torch.float16`` or ``torch.float8_e4m3fn`` cells.
    """

    head_dim: int = 0
    dtype: torch.dtype = torch.bfloat16

    def __post_init__(self) -> None:
        _whole_head("PlaceKV", self.head_dim)
        require(
            self.dtype in CELLS,
            "PlaceKV.dtype",
            self.dtype,
            "torch.bfloat16, torch.float16 or torch.float8_e4m3fn",
            "choose a cell type",
        )

    @property
    def operands(self) -> Mapping[str, Operand]:
        found: dict[str, Operand] = {
            "cells": Cells(dtype=self.dtype, head_dim=self.head_dim),
            "slots": Slots(),
        }
        if self.dtype == torch.float8_e4m3fn:
            found["cell_scale"] = PerHead(head_dim=self.head_dim)
            found["cells_saturated"] = Counter()
            found["cells_nans"] = Counter()
        return found

    def apply(self, x: Value, ctx: Context) -> Value:
        if self.dtype != torch.float8_e4m3fn:
            return ctx.place("cells", x)
        scale = ctx.cell_scale
        scaled = x * ctx.reciprocal(scale)
        placed = ctx.placed("cells")
        ctx.count("cells_saturated", placed & (abs(scaled) > E4M3_MAX))
        ctx.count("cells_nans", placed & ctx.isnan(scaled))
        return ctx.place("cells", scaled) * scale
