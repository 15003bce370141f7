"""The four projections of a Llama block in float64 PyTorch, from raw inputs to the values before
storage rounding.

An independent text for tests, the test kit and the demo; kernels and planners never import it.
Activations and weights are given as codes with their scales, or as plain values without. All
operands in logical order.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from epicute.epilogues import reference as policies
from epicute.epilogues.reference import round_to, wide

__all__ = [
    "Linear",
    "Rotary",
    "attention",
    "down_projection",
    "gate_up_projection",
    "output_projection",
    "partials",
    "product",
    "qkv_projection",
    "rms_norm",
    "round_to",
]


@dataclass(frozen=True)
class Linear:
    """A matrix product as the kernel sees its inputs.

    Attributes:
        x: (M, K) activation, values or FP8 codes.
        weight: (N, K) weight, values or codes, any RMSNorm gain folded in.
        scale: (M,) or (1,) activation scale, None for plain values.
        weight_scale: (N,) or (1,) weight scale, None for plain values.
        bias: (N,) or None.
    """

    x: Any
    weight: Any
    scale: Any = None
    weight_scale: Any = None
    bias: Any = None


@dataclass(frozen=True)
class Rotary:
    """How heads rotate: positions (M,), inv_freq (rotary_dim / 2,), and the fields of
    ``reference.rope``.
    """

    positions: Any
    inv_freq: Any
    head_dim: int
    rotary_dim: int | None = None
    style: str = "half"
    magnitude: float = 1.0

    def apply(self, x: Any) -> Tensor:
        """Rotate x (M, heads * head_dim)."""
        return policies.rope(
            x,
            self.positions,
            self.inv_freq,
            self.head_dim,
            self.rotary_dim,
            self.style,
            self.magnitude,
        )


def product(linear: Linear) -> Tensor:
    """(M, N) x · weightᵀ with its scales, without bias: the accumulator after ``Dequantize``."""
    acc = wide(linear.x) @ wide(linear.weight).T
    return policies.dequantize(acc, linear.scale, linear.weight_scale)


def partials(x: Any) -> Tensor:
    """(M, ceil(K / 64)) partial sums of squares of x (M, K) as given."""
    return policies.sum_squares(x, torch.float64)


def rms_norm(x: Any, gain: Any, eps: float, offset: float = 0.0) -> Tensor:
    """x (M, K) / sqrt(mean(x²) + eps) * (gain (K,) + offset)."""
    x = wide(x)
    return policies.gain(policies.row_scale(x, partials(x), x.shape[1], eps), gain, offset)


def _scaled(linear: Linear, sumsq: Any, eps: float) -> Tensor:
    """Product, row factor of the normalised input (none where ``sumsq`` is None), bias."""
    value = product(linear)
    if sumsq is not None:
        value = policies.row_scale(value, sumsq, wide(linear.x).shape[1], eps)
    return value if linear.bias is None else policies.bias(value, linear.bias)


def qkv_projection(
    linear: Linear,
    widths: tuple[int, int, int],
    rotary: Rotary,
    sumsq: Any = None,
    eps: float = 1e-5,
    q_gain: Any = None,
    k_gain: Any = None,
) -> dict[str, Tensor]:
    """Fused QKV: product, row factor, bias, head norms, RoPE on q and k.

    Args:
        linear: N = sum(widths).
        widths: columns of q, k, v.
        rotary: positions and frequencies.
        sumsq: (M, ceil(K / 64)) partial sums of squares of the row before it was quantised; None
            for no norm.
        eps: of the row norm and of the head norms.
        q_gain: (head_dim,) gain of the per-head norm of q; None for no norm. k_gain likewise.

    Returns:
        ``q``, ``k`` (rotated) and ``v``, (M, width) each, before any store.
    """
    q, k, v = _scaled(linear, sumsq, eps).split(list(widths), dim=1)
    if q_gain is not None:
        q = policies.head_norm(q, q_gain, rotary.head_dim, eps)
    if k_gain is not None:
        k = policies.head_norm(k, k_gain, rotary.head_dim, eps)
    return {"q": rotary.apply(q), "k": rotary.apply(k), "v": v}


def gate_up_projection(
    linear: Linear,
    sumsq: Any = None,
    eps: float = 1e-5,
    alpha: float = 1.0,
    limit: float | None = None,
) -> dict[str, Tensor]:
    """Fused gate and up: product, row factor, bias, SwiGLU. Returns ``z`` (M, N / 2)."""
    return {"z": policies.swiglu(_scaled(linear, sumsq, eps), alpha, limit)}


def _residual(linear: Linear, residual: Any, stored_as: torch.dtype) -> dict[str, Tensor]:
    value = policies.residual_add(_scaled(linear, None, 0.0), residual)
    return {"h": value, "sumsq": policies.sum_squares(value, stored_as)}


def output_projection(
    linear: Linear, residual: Any, stored_as: torch.dtype = torch.bfloat16
) -> dict[str, Tensor]:
    """Attention output plus residual (M, N).

    Returns ``h`` (M, N) before the store and ``sumsq`` (M, ceil(N / 64)) of h as ``stored_as``
    keeps it.
    """
    return _residual(linear, residual, stored_as)


def down_projection(
    linear: Linear, residual: Any, stored_as: torch.dtype = torch.bfloat16
) -> dict[str, Tensor]:
    """MLP output plus residual; as ``output_projection``."""
    return _residual(linear, residual, stored_as)


def attention(q: Any, k: Any, v: Any, head_dim: int) -> Tensor:
    """Causal grouped-query attention of one sequence, softmax scale 1/sqrt(head_dim).

    q (T, heads * head_dim), k and v (T, kv_heads * head_dim), rotated already; returns (T, heads *
    head_dim).
    """

    def heads(x: Any) -> Tensor:
        x = wide(x)
        return x.reshape(x.shape[0], x.shape[1] // head_dim, head_dim).transpose(0, 1)

    q, k, v = heads(q), heads(k), heads(v)
    group, tokens = q.shape[0] // k.shape[0], q.shape[1]
    k, v = k.repeat_interleave(group, dim=0), v.repeat_interleave(group, dim=0)
    scores = q @ k.transpose(1, 2) / head_dim**0.5
    future = torch.ones(tokens, tokens, dtype=torch.bool).triu(diagonal=1)
    weights = torch.softmax(scores.masked_fill(future, float("-inf")), dim=2)
    return (weights @ v).transpose(0, 1).reshape(tokens, q.shape[0] * head_dim)
