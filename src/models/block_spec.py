"""What decides a layer's kernels beside its weights, and the four compositions that follow from it.

    qkv      Dequantize >> RowScale [>> Bias] >> Columns(
                 q: [HeadNorm >>] RoPE >> Store,  k: [HeadNorm >>] RoPE >> PlaceKV,  v: PlaceKV)
    o        Dequantize >> ResidualAdd >> KeepRows >> SumSquares >> Store [>> EmitFP8]
    gate_up  Dequantize >> RowScale >> SwiGLU >> EmitFP8 | Store
    down     Dequantize >> ResidualAdd >> SumSquares >> Store [>> EmitFP8]

With 16-bit weights ``Dequantize`` and ``EmitFP8`` fall away. With row-wise scales ``EmitFP8`` does, and each FP8
activation is made by a kernel of its own. Behind the last layer the final norm reads 16 bits, so that ``down`` has no
``EmitFP8`` there. Weights that could not absorb the gain of the norm before them read an activation that has it:
``o`` and ``down`` then end in ``Gain >> EmitFP8``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from epicute.attention import AttentionSpec
from epicute.epilogues import (
    Bias,
    Columns,
    ColumnVector,
    Composition,
    Dequantize,
    Elementwise,
    EmitFP8,
    Gain,
    HeadNorm,
    Operand,
    PlaceKV,
    Policy,
    ResidualAdd,
    RoPE,
    RowScale,
    Store,
    SumSquares,
    SwiGLU,
    compose,
)
from epicute.epilogues.context import Context
from epicute.epilogues.values import Value
from epicute.errors import require
from epicute.gemm import GemmKernel, kernel_for
from epicute.jit import Target
from epicute.models.shapes import LayerShape, projections

__all__ = ["PROJECTIONS", "BlockSpec", "KeepRows"]

PROJECTIONS = ("qkv", "o", "gate_up", "down")
"""The layer's projections in the order in which they run; attention stands behind the first."""

FORMATS = {"fp8": torch.bfloat16, "bf16": torch.bfloat16, "fp16": torch.float16}
"""Format of the weights to the dtype of the residual stream and of q."""

FP8 = torch.float8_e4m3fn

SILU = SwiGLU()
"""silu(gate) * up."""


@dataclass(frozen=True)
class KeepRows(Elementwise):
    """x in rows that have a cache slot, 0 in all others, NaN included.

    Rows that pad a request or a captured batch reach no result: behind the output projection they are zeros, which the
    MLP maps to zeros. Zeros raise no counter, and no maximum above 0; a maximum of 0, where there are no other rows, is
    passed by when delayed scales are rolled.

    Operand: ``slots`` (M,) int64, negative for a row that is no token.
    """

    @property
    def operands(self) -> Mapping[str, Operand]:
        # As float32 a slot keeps its sign.
        return {"slots": ColumnVector(dtypes=(torch.int64,), dtype=torch.int64)}

    def apply(self, x: Value, ctx: Context) -> Value:
        return ctx.where(ctx.slots >= 0.0, x, 0.0)


@dataclass(frozen=True)
class BlockSpec:
    """A decoder layer as its kernels see it.

    Attributes:
        shape: sizes.
        format: of weights: "fp8" (E4M3, one scale per output feature; activations are FP8 too), "bf16" or "fp16".
        scaling: of FP8 activations: "delayed", one scale per tensor from invocations before, written by the producing
            epilogue; or "row", one scale per row, by a kernel of its own.
        cache: dtype of the KV cache: the residual stream's, or float8_e4m3fn.
        eps: of all RMSNorms, positive.
        gain_offset: added to every norm gain in float32; 1 for models that store gain - 1.
        bias: whether q, k and v have a bias.
        qk_norm: whether each head of q and k is normalised before the rotation.
        rope: how heads rotate; by default all channels, halves paired.
        activation: of the MLP.
        window: keys a query sees, itself included; None for all before it.
        softcap: of attention scores; None for none.
        softmax_scale: None for head_dim ** -0.5.
        accumulate: FP8 products, "fast" or "precise"; None for the rule of ``epicute.gemm.accumulation``.
        gains: of the two norms: "folded" into the weights behind them; or "operand", for FP8 weights that were
            quantised before: who writes an FP8 activation multiplies by the gain of the norm that its reader has.
        last: whether the final norm follows, which reads 16 bits: what leaves has no FP8 form.
    """

    shape: LayerShape
    format: str = "fp8"
    scaling: str = "delayed"
    cache: torch.dtype = torch.bfloat16
    eps: float = 1e-5
    gain_offset: float = 0.0
    bias: bool = False
    qk_norm: bool = False
    rope: RoPE | None = None
    activation: SwiGLU = SILU
    window: int | None = None
    softcap: float | None = None
    softmax_scale: float | None = None
    accumulate: str | None = None
    gains: str = "folded"
    last: bool = False

    def __post_init__(self) -> None:
        require(
            isinstance(self.shape, LayerShape),
            "BlockSpec.shape",
            repr(self.shape),
            "a LayerShape",
            "take one of epicute.models.SHAPES, or a ModelConfig's",
        )
        require(
            self.format in FORMATS,
            "BlockSpec.format",
            repr(self.format),
            f"one of {tuple(FORMATS)}",
            "name the format of the weights",
        )
        require(
            self.scaling in ("delayed", "row"),
            "BlockSpec.scaling",
            repr(self.scaling),
            "'delayed' or 'row'",
            "name the granularity of activation scales",
        )
        require(
            self.cache in (self.dtype, FP8),
            "BlockSpec.cache",
            self.cache,
            f"{self.dtype} or {FP8}",
            "give the dtype of the KV cache",
        )
        require(
            self.gains in (("folded", "operand") if self.format == "fp8" else ("folded",)),
            "BlockSpec.gains",
            repr(self.gains),
            "'folded' or 'operand'"
            if self.format == "fp8"
            else "'folded', as weights have 16 bits",
            "say where the norms' gains go",
        )
        require(
            self.eps > 0,
            "BlockSpec.eps",
            self.eps,
            "a positive number, without which a row of zeros has no norm",
            "give the model's rms_norm_eps",
        )
        if self.rope is None:
            object.__setattr__(self, "rope", RoPE(self.shape.head_dim))
        assert self.rope is not None
        require(
            self.rope.head_dim == self.shape.head_dim and not self.rope.name,
            "BlockSpec.rope",
            self.rope,
            f"unnamed, with head_dim={self.shape.head_dim}",
            "write RoPE(head_dim, rotary_dim)",
        )
        require(
            not self.activation.name,
            "BlockSpec.activation",
            self.activation,
            "an unnamed SwiGLU",
            "leave name out",
        )

    @property
    def dtype(self) -> torch.dtype:
        """Of the residual stream, q and, without FP8, every activation."""
        return FORMATS[self.format]

    @property
    def operand(self) -> torch.dtype:
        """Of weights and of the activations they are multiplied with."""
        return FP8 if self.format == "fp8" else self.dtype

    @property
    def delayed(self) -> bool:
        """Whether epilogues write FP8 activations."""
        return self.format == "fp8" and self.scaling == "delayed"

    @property
    def rowwise(self) -> bool:
        """Whether FP8 activations have a scale per row."""
        return self.format == "fp8" and self.scaling == "row"

    @property
    def partials(self) -> int:
        """Sums of squares that a row of the residual stream has: one per 64 columns."""
        return -(-self.shape.hidden // 64)

    @property
    def rotary_dim(self) -> int:
        """Channels of a head that rotate."""
        assert self.rope is not None
        return self.rope.rotary_dim

    @cached_property
    def compositions(self) -> Mapping[str, Composition]:
        """The epilogue of each projection, by the names of ``PROJECTIONS``."""
        shape, emit = self.shape, [EmitFP8()] if self.delayed else []
        scales = [Dequantize("row" if self.rowwise else "tensor")] if self.format == "fp8" else []
        norm = RowScale(width=shape.hidden, eps=self.eps)
        gain = [Gain()] if self.delayed and self.gains == "operand" else []
        stored: list[Policy] = [SumSquares(), Store(self.dtype)]
        coded: list[Policy] = [*stored, *gain, *emit]
        activated: Policy = EmitFP8() if self.delayed else Store(self.dtype)
        bias = [Bias()] if self.bias else []
        return {
            "qkv": compose(*scales, norm, *bias, self._heads()),
            "o": compose(*scales, ResidualAdd(), KeepRows(), *coded),
            "gate_up": compose(*scales, norm, self.activation, activated),
            "down": compose(*scales, ResidualAdd(), *(stored if self.last else coded)),
        }

    def _heads(self) -> Columns:
        shape, place = self.shape, PlaceKV(self.shape.head_dim, self.cache)
        assert self.rope is not None
        head = [HeadNorm(shape.head_dim, self.eps)] if self.qk_norm else []
        return Columns(
            q=(shape.q_width, compose(*head, self.rope, Store(self.dtype))),
            k=(shape.kv_width, compose(*head, self.rope, place)),
            v=(shape.kv_width, compose(place)),
        )

    def options(self, name: str, expected_m: int | None = None) -> dict[str, Any]:
        """What ``plan`` and ``kernel_for`` are told of the projection ``name`` beside its composition."""
        found: dict[str, Any] = {"expected_m": expected_m}
        if self.format == "fp8":
            found["accumulate"] = self.accumulate
        if name in ("o", "down"):
            found["dtypes"] = {"residual": self.dtype}
        return found

    def kernels(
        self, expected_m: int | None = None, target: Target | str | None = None
    ) -> dict[str, GemmKernel]:
        """The four projection kernels by name, described and not compiled; ``epicute.jit.precompile`` takes them.

        Args:
            expected_m: rows to choose the schedules for, as in ``PrefillBlock.plan``.
            target: see ``epicute.gemm.kernel_for``.
        """
        return {
            name: kernel_for(
                self.compositions[name],
                n=n,
                k=k,
                dtype=self.operand,
                target=target,
                **self.options(name, expected_m),
            )
            for name, (n, k) in projections(self.shape).items()
        }

    def attention(self, packed: bool = True, page: int | None = None) -> AttentionSpec:
        """The layer's attention kernel.

        Args:
            packed: requests row after row; else padded to one length.
            page: tokens of a page, None for a dense cache (batch, max_len, kv_heads, head_dim).
        """
        shape, scale = self.shape, self.softmax_scale
        return AttentionSpec(
            shape.heads,
            shape.kv_heads,
            shape.head_dim,
            self.dtype,
            self.cache,
            FP8 if self.delayed else self.dtype,
            window=self.window,
            softcap=self.softcap,
            page=page,
            packed=packed,
            scale=shape.head_dim**-0.5 if scale is None else scale,
        )

    def __str__(self) -> str:
        shape = self.shape
        scales = f", {self.scaling} scales" if self.format == "fp8" else ""
        heads = f"{shape.heads}:{shape.kv_heads} heads of {shape.head_dim}"
        cache = {FP8: "fp8", torch.bfloat16: "bf16"}.get(self.cache, "fp16")
        return (
            f"{shape.name}: hidden {shape.hidden}, {heads}, MLP {shape.intermediate}; "
            f"{self.format} weights{scales}, {cache} cache"
        )
