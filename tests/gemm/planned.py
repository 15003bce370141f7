"""Plans without a GPU: a stand-in for the compiled function, and a device index for CPU tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from epicute.epilogues import (
    Columns,
    Dequantize,
    EmitFP8,
    PlaceKV,
    ResidualAdd,
    RoPE,
    RowScale,
    Store,
    SumSquares,
    compose,
)
from epicute.epilogues.operands import Cells, Counter, Maximum, Operand, Scalar
from epicute.errors import ArgumentError
from epicute.gemm import Plan, kernel_for
from epicute.jit import Report
from epicute.weights import Packed, Weight

CPU = torch.empty(0).get_device()
"""What a CPU tensor calls its device: no device at all."""

PAGES, PAGE_SIZE = 3, 16
N, K, M = 192, 64, 5
BF16 = torch.bfloat16
OUT = Dequantize() >> ResidualAdd() >> SumSquares() >> Store(BF16) >> EmitFP8()
QKV = RowScale(K) >> Columns(
    q=(64, RoPE(64) >> Store(BF16)), k=(64, RoPE(64) >> PlaceKV(64)), v=(64, PlaceKV(64))
)


class Recorder:
    """A compiled function that notes its calls."""

    report = Report(168, 0, 0, 1000, (), 1.0, "none")
    origin = "memory"

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def function(self, *arguments: Any) -> None:
        """One launch."""
        self.calls.append(arguments)


def fake_plan(composition: Any, n: int, k: int, dtype: torch.dtype, **options: Any) -> Plan:
    """A plan that takes CPU tensors for those of a GPU that runs 66 clusters, and launches nothing."""
    plan = Plan(kernel_for(composition, n=n, k=k, dtype=dtype, **options), Recorder())
    plan._clusters[CPU] = 66
    return plan


def weight(composition: Any, n: int, k: int, format: str = "bf16", device: str = "cpu") -> Packed:
    """A packed weight of small integers."""
    values = torch.randint(-2, 3, (n, k), generator=torch.Generator().manual_seed(n * k))
    quantised = Weight(values.float(), "w").quantize(format)
    return quantised.pack(compose(composition).row_order(n)).to(device)


def operands_for(plan: Plan, rows: int) -> dict[str, torch.Tensor]:
    """An operand of the right shape and dtype for every name."""
    found = {}
    sizes: dict[int | str, int] = {"M": rows, "pages": PAGES, "page_size": PAGE_SIZE}
    for spec in plan.kernel.spec.layout.operands:
        shape = [sizes.get(d, d) for d in spec.shape]
        found[spec.name] = _filled(spec.kind, shape, spec.dtype)
    return found


def _filled(kind: Operand, shape: list[Any], dtype: torch.dtype) -> torch.Tensor:
    if isinstance(kind, (Scalar, Cells, Counter, Maximum)):
        return torch.ones(shape, dtype=dtype)
    return torch.zeros(shape, dtype=dtype)


class Launch:
    """One call that is right, to be spoilt."""

    def __init__(self, composition: Any, dtype: torch.dtype = BF16, format: str = "bf16") -> None:
        self.plan = fake_plan(composition, N, K, dtype)
        self.x = torch.zeros(M, K).to(dtype)
        self.packed = weight(composition, N, K, format)
        self.operands: dict[str, Any] = operands_for(self.plan, M)

    def bind(self) -> tuple[int, ...] | None:
        """The kernel's arguments."""
        return self.plan.bind(self.x, self.packed, self.operands)

    def refused(self, name: str, said: str, error: type[Exception] = ArgumentError) -> None:
        """``run`` raises in the family's form, naming ``name``, and launches nothing."""
        with pytest.raises(error, match=said) as found:
            self.plan.run(self.x, self.packed, **self.operands)
        text = str(found.value)
        assert text.startswith(f"{name}: got "), text
        assert ", expected " in text
        assert ". Fix: " in text
        assert self.calls == []

    @property
    def calls(self) -> list[Any]:
        """Launches so far."""
        return self.plan._function.__self__.calls


class EvaluatedPlan(Plan):
    """Checks as a plan does, then evaluates on the CPU instead of launching, and makes a mistake if it has one."""

    mistake: Callable[[torch.Tensor, dict[str, Any]], None] | None = None

    @classmethod
    def of(cls, composition: Any, packed: Packed, **options: Any) -> EvaluatedPlan:
        """In place of ``epicute.plan``."""
        n, k = packed.shape
        plan = cls(kernel_for(composition, n=n, k=k, dtype=packed.dtype, **options), Recorder())
        plan._clusters[CPU] = 66
        return plan

    def run(self, x: torch.Tensor, packed: Packed, **operands: torch.Tensor) -> None:
        """Everything but the launch."""
        if self.bind(x, packed, operands) is not None:
            acc = x.float() @ packed.unpack().codes.float().T
            found = self.kernel.spec.resolved.composition.evaluate(acc, **operands)
            for name, value in found.items():
                operands[name].copy_(value)
        if self.mistake is not None:
            type(self).mistake(x, operands)
