"""A case with inputs: runs it on the device and says what the NumPy interpreter makes of the same accumulators."""

from __future__ import annotations

from functools import cache, lru_cache
from typing import Any

import numpy as np
import torch

import epicute
from epicute.epilogues.operands import (
    Cells,
    ColumnVector,
    Counter,
    HeadVector,
    Matrix,
    Maximum,
    Operand,
    Partials,
    PartialsOutput,
    PerHead,
    Scalar,
    Slots,
)
from epicute.gemm import Plan
from epicute.gemm.arguments import OperandSpec
from epicute.testing import Budget, assert_equal_bits, assert_within, ulp
from epicute.weights import Packed, Quantized
from tests.gemm.compositions import FP8, Case
from tests.gemm.device import DEVICE, Output, bits, embed, embed_rows, integers, unchanged

FORMATS = {torch.bfloat16: "bf16", torch.float16: "fp16", FP8: "fp8"}
ROWS = (0, 1, 2, 15, 17, 63, 65, 127, 129, 2047)
"""M on either side of what a quad, a warp, a warpgroup and a tile hold."""

PAGE_SIZE = 16


@lru_cache(maxsize=4)
def codes_of(n: int, k: int, dtype: torch.dtype, seed: int = 1) -> torch.Tensor:
    """(N, K) of -1, 0 and 1."""
    return integers(n, k, dtype=dtype, seed=seed)


def pack(case: Case, codes: torch.Tensor, scale: torch.Tensor | None = None) -> Packed:
    """Codes in the case's order; FP8 gets scales, drawn unless given."""
    if case.dtype == FP8 and scale is None:
        kind = case.composition.operands.get("weight_scale")
        count = 1 if isinstance(kind, Scalar) else case.n
        scale = torch.rand(count, generator=torch.Generator().manual_seed(2)) + 0.05
    if scale is not None:
        scale = embed(scale)
    quantised = Quantized(FORMATS[case.dtype], codes.to(DEVICE).to(case.dtype), scale)
    return quantised.pack(case.composition.row_order(case.n))


@lru_cache(maxsize=4)
def weight_of(case: Case) -> Packed:
    """The exact weight of a case."""
    return pack(case, codes_of(case.n, case.k, case.dtype))


@cache
def plan_of(case: Case) -> Plan:
    """The case's plan; from the object cache, which the session filled before."""
    schedule = None if case.tile is None else case.kernel().spec.schedule
    return epicute.plan(case.composition, weight_of(case), schedule=schedule, **case.options)


class Job:
    """Inputs and outputs of one launch. Change them before ``run``.

    x: (rows, K), whole numbers, with NaN beyond its columns and rows. operands: what is read, in NaN too. outputs: in
    guards, rows apart.
    """

    def __init__(self, case: Case, rows: int, seed: int = 0, packed: Packed | None = None) -> None:
        self.case, self.rows = case, rows
        self.plan = plan_of(case)
        self.packed = weight_of(case) if packed is None else packed
        self.x = embed_rows(integers(rows, case.k, dtype=case.dtype, seed=seed, most=2))
        self.operands: dict[str, torch.Tensor] = {}
        self.outputs: dict[str, Output] = {}
        self._generator = torch.Generator().manual_seed(seed)
        for spec in self.plan.kernel.spec.layout.operands:
            if spec.kind.written:
                self.outputs[spec.name] = self._output(spec)
            elif spec.name != "weight_scale" or case.dtype != FP8:
                self.operands[spec.name] = embed(self._drawn(spec))

    def _shape(self, spec: OperandSpec) -> list[int]:
        sizes: dict[int | str, int] = {
            "M": self.rows,
            "pages": -(-self.rows // PAGE_SIZE) + 2,
            "page_size": PAGE_SIZE,
        }
        return [sizes.get(d, d) for d in spec.shape]  # type: ignore[arg-type]

    def _output(self, spec: OperandSpec) -> Output:
        shape, kind = self._shape(spec), spec.kind
        start, strides = None, None
        if isinstance(kind, (Maximum, Counter)):
            start = torch.full(shape, 0 if isinstance(kind, Maximum) else 5).to(spec.dtype)
        elif not isinstance(kind, Cells):
            strides = (shape[1] + (3 if isinstance(kind, PartialsOutput) else 16), 1)
        return Output(shape, spec.dtype, strides, start, name=spec.name)

    def _drawn(self, spec: OperandSpec) -> torch.Tensor:
        return drawn(spec.kind, self._shape(spec), spec, self._generator)

    def run(self, **options: Any) -> dict[str, torch.Tensor]:
        """Launch once; outputs by name. Checks guards and inputs."""
        tensors = {name: output.tensor for name, output in self.outputs.items()}
        with unchanged(x=self.x, codes=self.packed.codes, **self.operands):
            self.plan.run(self.x, self.packed, **self.operands, **tensors, **options)
        for output in self.outputs.values():
            output.assert_intact()
        return tensors

    def accumulators(self) -> torch.Tensor:
        """(rows, N) x · codesᵀ in float32, exact for whole numbers."""
        return (self.x.float() @ self.packed.unpack().codes.float().T).cpu()

    def expected(self, acc: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        """What the NumPy interpreter gives. Call it before ``run``: it starts from the outputs as they are."""
        read = {name: x.cpu() for name, x in self.operands.items()}
        if "weight_scale" in self.case.composition.operands and self.packed.scale is not None:
            read.setdefault("weight_scale", self.packed.scale.cpu())
        running = (Cells, Counter, Maximum)
        kinds = self.case.composition.operands
        starts = {
            name: output.tensor.cpu().clone()
            for name, output in self.outputs.items()
            if isinstance(kinds[name], running)
        }
        acc = self.accumulators() if acc is None else acc
        return self.case.composition.evaluate(acc, **read, **starts)

    def check(self) -> dict[str, torch.Tensor]:
        """Run, and compare with the NumPy interpreter: bit for bit where the case is exact."""
        wanted = self.expected()
        found = self.run()
        kinds = self.case.composition.operands
        for name, value in wanted.items():
            compare(
                f"{self.case} M={self.rows}: {name}",
                kinds[name],
                found[name],
                value,
                self.case.exact,
            )
        return found


def drawn(
    kind: Operand, shape: list[int], spec: OperandSpec, generator: torch.Generator
) -> torch.Tensor:
    """Values for an operand that is read."""
    if isinstance(kind, Slots):
        return slots(shape[0], generator)
    if isinstance(kind, ColumnVector) and not spec.dtype.is_floating_point:
        return torch.randint(0, 131072, shape, generator=generator).to(spec.dtype)
    if spec.name.endswith("inv_freq"):
        return 10000.0 ** -(torch.arange(shape[0]) / shape[0])
    if isinstance(kind, Partials):
        return torch.rand(shape, generator=generator) * 64
    if isinstance(kind, (Scalar, PerHead, ColumnVector)) or spec.name.endswith("scale"):
        return (torch.rand(shape, generator=generator) + 0.05).to(spec.dtype)
    assert isinstance(kind, Matrix | HeadVector | Operand)
    return (torch.randn(shape, generator=generator) * 4).to(spec.dtype)


def slots(rows: int, generator: torch.Generator) -> torch.Tensor:
    """Slots in no order, a quarter of them nowhere: negative, at the end of the cache, or far past 32 bits."""
    capacity = (-(-rows // PAGE_SIZE) + 2) * PAGE_SIZE
    found = torch.randperm(capacity, generator=generator)[:rows]
    nowhere = torch.tensor([-1, capacity, 2**40 + 17, -(2**40)])
    return torch.where(torch.arange(rows) % 4 == 1, nowhere[torch.arange(rows) // 4 % 4], found)


def compare(name: str, kind: Operand, got: torch.Tensor, wanted: torch.Tensor, exact: bool) -> None:
    """Equal bits, or as near as approximate functions leave it."""
    got = got.cpu()
    if exact:
        assert_equal_bits(got, wanted, name)
    elif isinstance(kind, Counter):
        assert abs(int(got) - int(wanted)) <= 2, f"{name}: got {int(got)}, expected {int(wanted)}"
    elif isinstance(kind, Maximum):
        assert_within(got, wanted, Budget(1e-5, 1e-5), name)
    elif isinstance(kind, PartialsOutput):
        assert_within(got, wanted, Budget(2e-3, 1e-2), name)
    else:
        if isinstance(kind, Cells):
            untouched = bits(wanted) == bits(Output((1,), wanted.dtype, device="cpu").tensor)
            assert torch.equal(bits(got)[untouched], bits(wanted)[untouched]), (
                f"{name}: stray cells"
            )
            got, wanted = (x.reshape(-1, x.shape[-1]) for x in (got, wanted))
        assert_near(name, got, wanted)


def assert_near(name: str, got: torch.Tensor, wanted: torch.Tensor) -> None:
    """Every element within a unit in the last place (float32: 16) and 4e-6 of its row's largest; NaN where NaN is."""
    out, ref = got.double().numpy(), wanted.double().numpy()
    assert np.array_equal(np.isnan(out), np.isnan(ref)), f"{name}: NaN elsewhere"
    ref = np.nan_to_num(ref)
    units = 16 if got.dtype == torch.float32 else 1
    largest = np.abs(ref).max(axis=-1, keepdims=True, initial=0.0)
    allowed = units * ulp(ref, got.dtype) * (1 + 1e-9) + 4e-6 * largest
    far = np.abs(np.nan_to_num(out) - ref) > allowed
    assert not far.any(), _worst(name, far, out, ref)
    finite = np.isfinite(out)
    if ref.size > 256:
        budget = Budget(5e-2 if got.dtype == FP8 else 2e-3, np.inf)
        assert_within(np.where(finite, out, 0), np.where(finite, ref, 0), budget, name)


def _worst(name: str, far: np.ndarray, out: np.ndarray, ref: np.ndarray) -> str:
    at = tuple(int(i) for i in np.argwhere(far)[0])
    return f"{name}: {int(far.sum())} of {far.size} far off, first at {at}: {out[at]!r}, expected {ref[at]!r}"


def device_operands(**values: Any) -> dict[str, torch.Tensor]:
    """Operands on the device, each in NaN."""
    return {name: embed(torch.as_tensor(x, device=DEVICE)) for name, x in values.items()}
