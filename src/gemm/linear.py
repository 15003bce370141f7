"""The functional entry: allocate outputs, plan behind the scenes, run on CPU or GPU."""

from __future__ import annotations

from functools import lru_cache
from math import gcd
from typing import Any

import torch

from epicute.epilogues.composition import Composition, check_operands, compose
from epicute.epilogues.operands import (
    Cells,
    ColumnVector,
    Counter,
    Matrix,
    Maximum,
    Output,
    PartialsOutput,
    Scalar,
    check_number,
    per_row_fix,
)
from epicute.epilogues.policy import Policy
from epicute.epilogues.resolve import Resolved, resolve
from epicute.errors import ArgumentError, require
from epicute.gemm.plan import (
    Plan,
    align_rows,
    check_composition,
    check_packed,
    check_pair,
    check_scaled,
    check_x,
    plan,
    x_fix,
)
from epicute.gemm.schedule import accumulation
from epicute.weights import Packed

__all__ = ["linear"]

CALL = "linear(x, packed, epilogue)"
"""How errors show the order of its arguments."""


def linear(
    x: torch.Tensor,
    packed: Packed,
    epilogue: Composition | Policy,
    *,
    accumulate: str | None = None,
    **operands: Any,
) -> torch.Tensor | dict[str, torch.Tensor]:
    """``epilogue(x @ packed.T)`` in one call.

    Compiles at the first call for a weight shape and composition, allocates the outputs that are not given, pads rows
    of x where they are not aligned. For CPU tensors the composition is evaluated with NumPy instead. For a hot loop
    make a ``plan``.

    For inference alone: no gradient flows through it.

    Args:
        x: (…, K), in the weight's dtype. M, in the shapes of operands, is the product of its leading dimensions.
        packed: weight packed with ``epilogue.row_order(N)``.
        epilogue: a complete composition.
        accumulate: ``"fast"`` or ``"precise"`` for float8; by default ``accumulation``'s rule. CPU tensors are added
            up in float32 either way.
        **operands: its operands by name, as tensors in their own flat shapes, (M, …), whatever the leading dimensions
            of x; for ``Scalar`` ones ints and floats will do.

    Returns:
        The output where there is exactly one, with x's leading dimensions; else every written operand by name, as
        matrices of M rows.
    """
    check_x(x, CALL)
    check_packed(packed, "epilogue", CALL)
    check_composition("epilogue", epilogue, CALL)
    composition = compose(epilogue)
    n, k = packed.shape
    require(
        x.dim() > 0 and x.shape[-1] == k and x.dtype == packed.dtype,
        "x",
        f"{tuple(x.shape)} {x.dtype}",
        f"(…, {k}) {packed.dtype}, as {packed.name}",
        x_fix(x, packed.dtype, k),
    )
    leading = x.shape[:-1]
    x = x.reshape(-1, k)
    resolved = resolve(composition, n)
    check_pair("epilogue", resolved, packed)
    accumulation(packed.dtype, k, accumulate)  # refuses; on the CPU there is nothing to choose
    if packed.scale is not None:
        operands.setdefault("weight_scale", packed.scale)
    check_scaled(packed, operands, resolved.kinds)
    check_operands(composition, operands)
    given = {n: _tensor(n, resolved, v, x) for n, v in operands.items()}
    if x.device.type == "cpu":
        acc = x.float() @ packed.unpack().codes.float().T
        found = composition.evaluate(acc, **given)
        found |= {n: given[n].copy_(value) for n, value in found.items() if n in given}
    else:
        found = _run(x, packed, composition, resolved, given, accumulate)
    outputs = [n for n, kind in resolved.kinds.items() if isinstance(kind, Output)]
    if len(found) == 1 and outputs:
        return found[outputs[0]].reshape(*leading, found[outputs[0]].shape[1])
    return found


def _tensor(name: str, resolved: Resolved, value: Any, x: torch.Tensor) -> torch.Tensor:
    """An operand as given, or a number on x's device."""
    if isinstance(value, torch.Tensor):
        return value
    kind = resolved.kinds[name]
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        check_number(name, kind, value)
        shape = tuple(x.shape[0] if d == "M" else d for d in resolved.shapes[name])
        require(
            shape == (1,),
            name,
            f"the number {value}",
            f"{kind} of shape {shape}",
            per_row_fix(name) if isinstance(kind, ColumnVector) else "pass a tensor of that shape",
        )
        return torch.full((1,), float(value), dtype=torch.float32, device=x.device)
    got = "None" if value is None else type(value).__name__
    expected, fix = "a tensor", "make a tensor of it"
    if isinstance(kind, Scalar):
        expected, fix = "a tensor, an int or a float", f"{name}=0.5, or a float32 tensor of one"
    elif kind.written and not isinstance(kind, Cells):
        fix = f"call without {name} to have it allocated"
    raise ArgumentError(f"{name}: got {got}, expected {expected}. Fix: {fix}")


def _run(
    x: torch.Tensor,
    packed: Packed,
    composition: Composition,
    resolved: Resolved,
    given: dict[str, Any],
    accumulate: str | None,
) -> dict[str, torch.Tensor]:
    for name, kind in resolved.kinds.items():
        if kind.written and name not in given:
            given[name] = _allocate(name, resolved, x)
    if x.stride(1) != 1 or x.stride(0) * x.element_size() % 16 or x.data_ptr() % 16:
        x = align_rows(x)
    dtypes = tuple(
        (n, v.dtype)
        for n, v in given.items()
        if n in resolved.kinds and not resolved.kinds[n].written
    )
    matrices = [n for n, k in resolved.kinds.items() if isinstance(k, (Matrix, Output, Cells))]
    alignments = tuple((n, _alignment(given[n])) for n in matrices if n in given)
    found = _plan_for(composition, _Weight(packed), dtypes, alignments, accumulate)
    found.run(x, packed, **given)
    return {n: given[n] for n, kind in resolved.kinds.items() if kind.written}


def _allocate(name: str, resolved: Resolved, x: torch.Tensor) -> torch.Tensor:
    kind = resolved.kinds[name]
    require(
        isinstance(kind, (Output, PartialsOutput, Maximum, Counter)),
        f"operands: {name}",
        "nothing",
        f"{kind} to write to",
        f"pass {name}=…",
    )
    shape = [x.shape[0] if d == "M" else int(d) for d in resolved.shapes[name]]
    zero = isinstance(kind, (Maximum, Counter))
    return (torch.zeros if zero else torch.empty)(shape, dtype=kind.dtype, device=x.device)


def _alignment(tensor: torch.Tensor) -> int:
    """Bytes, up to 16, that address and outer strides are multiples of."""
    size = tensor.element_size()
    return gcd(16, tensor.data_ptr(), *(s * size for s in tensor.stride()[:-1]))


class _Weight:
    """A packed weight as far as planning looks at it."""

    def __init__(self, packed: Packed) -> None:
        self.packed: Packed | None = packed
        scaled = packed.scale is not None
        self.key = (packed.shape, packed.dtype, packed.order, packed.device, scaled)

    def __hash__(self) -> int:
        return hash(self.key)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Weight) and self.key == other.key


@lru_cache(maxsize=512)
def _plan_for(
    composition: Composition,
    weight: _Weight,
    dtypes: tuple[tuple[str, torch.dtype], ...],
    alignments: tuple[tuple[str, int], ...],
    accumulate: str | None,
) -> Plan:
    read = {n: d for n, d in dtypes if not isinstance(composition.operands[n], Scalar)}
    packed, weight.packed = weight.packed, None  # the cache must not keep the weight alive
    assert packed is not None
    return plan(
        composition,
        packed,
        dtypes=read,
        alignments=dict(alignments),
        accumulate=accumulate,
    )
