"""Attention in mixed precision on the CPU, with the numbers of its kernels (MpFA 4, 5; ``attention.mixed``).

    queries        centred in FP32, then FP16 (exact16) or E4M3 under a power of two of their row (fast8, fp8/fp8)
    logits         S = q_c·k_c + ΔS
    probabilities  p = 2^(S·λ - m·λ + log2 P), m the largest logit of the tiles so far; E4M3 when they meet the values
    a row's sum    of p before that rounding
    order          tiles of 128 keys, the last one first

Every rounding of the formats is there; sums and products in between are float64, where kernels have FP32 and, over 128
tokens, the tensor core's accumulator.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from epicute.quant import E4M3_MAX, cast_e4m3

__all__ = ["P_SCALE", "TILE", "attend_mixed", "multiplied_queries"]

TILE = 128
"""Keys under one maximum."""

P_SCALE = 448.0
"""What a probability of 1 is as E4M3."""

ROWS = 64
"""Queries whose logits are in memory at a time."""

EXPONENTS = (-32, 100)
"""Of a query's scale."""


def multiplied_queries(q: Tensor, wide: bool) -> Tensor:
    """Queries as the tensor core gets them.

    Args:
        q: (..., D) float32, centred where keys are.
        wide: FP16; else E4M3 times the least power of two that keeps the row within 448.

    Returns:
        (..., D) float64.
    """
    if wide:
        return q.to(torch.float16).to(torch.float64)
    peak = q.abs().amax(dim=-1, keepdim=True).to(torch.float64)
    scale = torch.exp2(torch.ceil(torch.log2(peak / E4M3_MAX)).clamp(*EXPONENTS))
    return cast_e4m3((q / scale).to(torch.float32)).to(torch.float64) * scale


def attend_mixed(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    delta: Tensor | None = None,
    *,
    scale: float,
    window: int | None = None,
    p_scale: float = P_SCALE,
) -> Tensor:
    """Causal attention of one request, its probabilities E4M3.

    Args:
        q: (Sq, heads, D) float64 as multiplied; query i stands at position i + Sk - Sq.
        k: (Sk, kv_heads, D) float64 as multiplied; ``v`` likewise.
        delta: (Sk, heads) float64, ΔS; None where keys are not smoothed.
        scale: of logits.
        window: keys a query sees at most, its own included.
        p_scale: 448, or 256.

    Returns:
        (Sq, heads, D) float64; zeros for a query that sees no key.
    """
    queries, heads, dim = q.shape
    keys, kv_heads, _ = k.shape
    group, first = heads // kv_heads, keys - queries
    found = torch.zeros_like(q)
    width = -(-keys // TILE) * TILE
    k, v = (torch.nn.functional.pad(x, (0, 0, 0, 0, 0, width - keys)) for x in (k, v))
    memory = (
        q.new_empty(group * ROWS * width),
        q.new_empty(group * ROWS * width, dtype=torch.float32),
    )
    for head in range(kv_heads):
        mine = slice(head * group, (head + 1) * group)
        own_keys = k[:, head].T.contiguous() * (scale * math.log2(math.e))
        own_values = v[:, head].to(torch.float32).contiguous()
        for start in range(0, queries, ROWS):
            rows = slice(start, min(start + ROWS, queries))
            own = first + torch.arange(rows.start, rows.stop)
            end = -(-(int(own[-1]) + 1) // TILE) * TILE  # of the last tile that these queries see
            shape = (group, len(own), end)
            logits, weights = (x[: math.prod(shape)].view(shape) for x in memory)
            some = q[rows, mine].transpose(0, 1).reshape(-1, dim)
            torch.mm(some, own_keys[:, :end], out=logits.flatten(0, 1))
            if delta is not None:
                logits[..., :keys] += delta[:end, mine].T[:, None] * (scale * math.log2(math.e))
            _hide(logits, own, keys, window)
            found[rows, mine] = _weigh(logits, weights, own_values[:end], p_scale).transpose(0, 1)
    return found


def _hide(logits: Tensor, own: Tensor, keys: int, window: int | None) -> None:
    """-inf in place where a key is behind the query's own position or the last key, or in front of the window."""
    first = 0 if window is not None else max(0, int(own[0]) + 1)
    key = torch.arange(first, logits.shape[-1])[None]
    hidden = (key > own[:, None]) | (key >= keys)
    if window is not None:
        hidden |= key <= own[:, None] - window
    logits[..., first:].masked_fill_(hidden, -math.inf)


def _weigh(logits: Tensor, weights: Tensor, v: Tensor, p_scale: float) -> Tensor:
    """(group, queries, D) of logits (group, queries, whole tiles) in powers of two; both are overwritten."""
    tiles, p = (x.unflatten(-1, (-1, TILE)) for x in (logits, weights))
    best = tiles.amax(dim=-1).flip(-1).cummax(dim=-1).values.flip(-1)  # of a tile and those behind
    finite = best.masked_fill(best == -math.inf, 0.0)
    p.copy_(tiles.sub_((finite - math.log2(p_scale))[..., None]))
    p.exp2_()
    factor = torch.exp2(best - finite[..., :1])
    total = (p.sum(dim=-1, dtype=torch.float64) * factor).sum(dim=-1, keepdim=True)
    p.copy_(p.clamp_(max=E4M3_MAX).to(torch.float8_e4m3fn))
    p.mul_(factor[..., None])
    out = (weights.flatten(0, 1) @ v).unflatten(0, weights.shape[:2]).to(torch.float64)
    return out / total.masked_fill(total == 0, 1.0)
