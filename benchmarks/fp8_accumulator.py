"""Hopper's FP8 accumulator as probes of the tensor core found it, on the CPU: 13 fraction bits, every term cut.

An instruction adds 32 products to what is there. All 33 terms are aligned to the largest and cut, toward zero, at 2^-13
of its power of two, each on its own; the sum is cut so once more. Measured on an H200: ones that are added one
instruction after the other stop at 16384.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["DEPTH", "FRACTION_BITS", "accumulate"]

DEPTH = 32
"""Products of an instruction."""

FRACTION_BITS = 13


def accumulate(p: Tensor, v: Tensor, promote: int | None = None) -> Tensor:
    """(rows, D) float64 p · v in that accumulator.

    Args:
        p: (rows, n) E4M3 values, any float dtype; n is filled up with zeros to whole instructions.
        v: (n, D) E4M3 values.
        promote: terms after which the accumulator is added to an FP32 sum and begins anew, a multiple of 32
            (``two_level``); None: never (``direct``).
    """
    count = -(-p.shape[1] // DEPTH)
    pad = count * DEPTH - p.shape[1]
    p = torch.nn.functional.pad(p.double(), (0, pad)).unflatten(1, (count, DEPTH))
    v = torch.nn.functional.pad(v.double(), (0, 0, 0, pad)).unflatten(0, (count, DEPTH))
    total = torch.zeros(p.shape[0], v.shape[2], dtype=torch.float32)
    held = total.double()
    every = count if promote is None else promote // DEPTH
    for step in range(count):
        held = _instruction(held, p[:, step, :, None] * v[None, step])
        if promote is not None and (step + 1) % every == 0:
            total, held = total + held.float(), torch.zeros_like(held)
    return (total + held.float()).double()


def _instruction(held: Tensor, products: Tensor) -> Tensor:
    """(rows, D) of it and (rows, 32, D) products."""
    terms = torch.cat([held[:, None], products], dim=1)
    unit = _unit(terms.abs().amax(dim=1))
    total = torch.trunc(terms / unit[:, None]).sum(dim=1) * unit
    unit = _unit(total.abs())
    return torch.trunc(total / unit) * unit


def _unit(largest: Tensor) -> Tensor:
    """What is cut at, of the largest magnitude; 1 where that is 0."""
    _, exponent = torch.frexp(largest)
    return torch.where(
        largest > 0, torch.ldexp(torch.ones_like(largest), exponent - 1 - FRACTION_BITS), 1.0
    )
