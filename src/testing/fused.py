"""Runs drawn cases through the fused kernel, exactly: the weight is the identity.

With B = I, (N, K), D = A · Bᵀ is A's first N columns, so that the accumulator is the drawn BF16 matrix
and every difference is the epilogue's. K is N, or what a ``RowScale`` names, the rest of A being zeros.
Outputs are poisoned and guarded, inputs hashed.
"""

from __future__ import annotations

from typing import Any

import torch

from epicute.epilogues import Cells, Composition, Counter, Maximum
from epicute.epilogues.resolve import resolve
from epicute.testing.check import Runner
from epicute.testing.draws import Case
from epicute.testing.poison import (
    Guarded,
    assert_fully_written,
    assert_guards_intact,
    guarded,
    inputs_unchanged,
)
from epicute.weights import Packed, Quantized

__all__ = ["FusedRunner"]

RUNNING = (Cells, Counter, Maximum)
"""Outputs that start from a value."""


class FusedRunner(Runner):
    """The fused kernel of ``composition`` on ``device``, of K = ``depth`` or else N; one plan per N."""

    name = "fused kernel"

    def __init__(
        self, composition: Composition, device: torch.device, depth: int | None = None
    ) -> None:
        self._composition = composition
        self._depth = depth
        self._device = device
        self._plans: dict[int, tuple[Any, Packed]] = {}

    def _plan(self, columns: int) -> tuple[Any, Packed]:
        from epicute.gemm import plan

        if columns not in self._plans:
            depth = self._depth or columns
            identity = torch.eye(columns, depth, dtype=torch.bfloat16)
            order = self._composition.row_order(columns)
            packed = Quantized("bf16", identity, name="identity").pack(order).to(self._device)
            made = plan(self._composition, packed, x_dtype=torch.bfloat16)
            self._plans[columns] = made, packed
        return self._plans[columns]

    def _outputs(self, case: Case) -> dict[str, Guarded]:
        rows, columns = case.acc.shape
        resolved = resolve(self._composition, columns)
        found = {}
        for name, kind in resolved.kinds.items():
            if not kind.written:
                continue
            if isinstance(kind, RUNNING):
                start = case.operands[name]
                found[name] = guarded(start.shape, start.dtype, device=self._device, name=name)
                found[name].tensor.copy_(start)
            else:
                shape = [rows if d == "M" else int(d) for d in resolved.shapes[name]]
                found[name] = guarded(shape, kind.dtype, device=self._device, name=name)
        return found

    def run(self, case: Case) -> dict[str, torch.Tensor]:
        """Outputs of the case, checked for missing and stray writes."""
        made, packed = self._plan(case.acc.shape[1])
        x = case.acc.to(torch.bfloat16).to(self._device)
        spare = packed.shape[1] - x.shape[1]
        x = torch.nn.functional.pad(x, (0, spare))
        outputs = self._outputs(case)
        read = {n: v.to(self._device) for n, v in case.operands.items() if n not in outputs}
        with inputs_unchanged(x=x, weight=packed.codes, **read):
            made.run(x, packed, **read, **{n: g.tensor for n, g in outputs.items()})
            if self._device.type == "cuda":
                torch.cuda.synchronize(self._device)
        assert_guards_intact(*outputs.values())
        for name, output in outputs.items():
            if name not in case.operands:
                assert_fully_written(output)
        return {name: output.tensor for name, output in outputs.items()}
