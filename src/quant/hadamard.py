"""The normalised block-diagonal Walsh–Hadamard rotation of a head (FuTransformer 3.3.3).

A few large channels spoil the scale of a row. Rotated, their energy is spread over the block, and
with H symmetric and orthogonal nothing else changes:

    (Hq)·(Hk) = q·k          Σ p (Hv) = H Σ p v,  turned back once by H itself

A block is the whole head where its size is a power of two, else the largest power of two that
divides it (80 -> 16, 96 -> 32), or narrower on request.

The order of operations is part of the contract, since kernels quantise what comes out and must find
the same bits: butterflies of stride 1, 2, 4, ... in FP32, (a, b) -> (a + b, a - b), then one
product with RN(width^-1/2).

The value's side can be folded into the projections offline, ``fold_value`` and ``fold_output``, and
then costs nothing. The key's cannot: it comes after RoPE.
"""

from __future__ import annotations

import numpy as np
import torch

from epicute.errors import require
from epicute.quant.fp8 import as_float32

__all__ = ["block_width", "fold_output", "fold_value", "hadamard", "rotate"]


def block_width(head_dim: int, width: int | None = None) -> int:
    """Width of a rotation block: ``width``, or the largest power of two that divides ``head_dim``.

    Raises:
        ArgumentError: an odd ``head_dim``, or a ``width`` that is no power of two or does not
            divide it.
    """
    require(
        head_dim >= 2 and head_dim % 2 == 0,
        "head_dim",
        head_dim,
        "an even number of channels",
        "rotate heads whose size a power of two divides, or turn the rotation off",
    )
    largest = head_dim & -head_dim
    if width is None:
        return largest
    require(
        2 <= width <= largest and width & (width - 1) == 0,
        "width",
        width,
        f"a power of two from 2 to {largest}, which divides head_dim={head_dim}",
        "leave it out for the widest block",
    )
    return width


def hadamard(head_dim: int, width: int | None = None) -> torch.Tensor:
    """(head_dim, head_dim) float64: the rotation as a matrix, symmetric and its own inverse."""
    width = block_width(head_dim, width)
    block = np.ones((1, 1))
    while block.shape[0] < width:
        block = np.kron(np.array([[1.0, 1.0], [1.0, -1.0]]), block)
    blocks = np.kron(np.eye(head_dim // width), block / np.sqrt(width))
    return torch.from_numpy(blocks)


def rotate(x: torch.Tensor, width: int | None = None) -> torch.Tensor:
    """Rotate the last axis; applied twice, it gives ``x`` back within FP32 rounding.

    Args:
        x: (..., head_dim) float32, bfloat16 or float16, any strides; left as it is.
        width: of a block, see ``block_width``.

    Returns:
        (..., head_dim) float32, contiguous.

    Raises:
        ArgumentError: a dtype, ``head_dim`` or ``width``.
    """
    width = block_width(x.shape[-1] if x.ndim else 0, width)
    found = as_float32(x).contiguous()
    stride = 1
    while stride < width:
        pairs = found.unflatten(-1, (-1, 2, stride))
        first, second = pairs[..., 0, :], pairs[..., 1, :]
        found = torch.stack((first + second, first - second), dim=-2).flatten(-3)
        stride *= 2
    return found * float(np.float32(width**-0.5))


def _rotate_exactly(x: torch.Tensor, head_dim: int, width: int | None) -> torch.Tensor:
    """The last axis of ``x``, head by head, in float64."""
    matrix = hadamard(head_dim, width).to(x.device)
    return (x.to(torch.float64).unflatten(-1, (-1, head_dim)) @ matrix).flatten(-2)


def fold_value(weight: torch.Tensor, head_dim: int, width: int | None = None) -> torch.Tensor:
    """Weight (or bias) of a value projection whose heads come out rotated.

    Args:
        weight: (kv_heads * head_dim, K), or a bias (kv_heads * head_dim,).
        head_dim: channels of a head.
        width: of a block, see ``block_width``.

    Returns:
        the same shape and dtype, computed in float64 and rounded once.

    Raises:
        ArgumentError: the features are no whole heads, or a wrong ``width``.
    """
    _check_heads(weight, 0, head_dim)
    rotated = _rotate_exactly(weight.movedim(0, -1), head_dim, width).movedim(-1, 0)
    return rotated.to(weight.dtype).contiguous()


def fold_output(weight: torch.Tensor, head_dim: int, width: int | None = None) -> torch.Tensor:
    """Weight (N, q_heads * head_dim) of an output projection that turns rotated heads back.

    Raises:
        ArgumentError: the columns are no whole heads, or a wrong ``width``.
    """
    _check_heads(weight, -1, head_dim)
    return _rotate_exactly(weight, head_dim, width).to(weight.dtype)


def _check_heads(weight: torch.Tensor, axis: int, head_dim: int) -> None:
    require(
        weight.ndim in (1, 2) and weight.is_floating_point(),
        "weight",
        f"{tuple(weight.shape)} {weight.dtype}",
        "a floating-point weight (N, K) or bias (N,)",
        "fold before quantising the weight",
    )
    require(
        weight.shape[axis] > 0 and weight.shape[axis] % head_dim == 0,
        "weight.shape",
        tuple(weight.shape),
        f"whole heads of {head_dim} on axis {axis}",
        "pass this layer's head_dim",
    )
