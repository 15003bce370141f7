"""Jobs through the compiled GEMM on the CPU."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

from epicute.gemm import GemmKernel, Plan
from epicute.gemm.arguments import OperandSpec
from epicute.gemm.panels import PANEL_COLUMNS, PANEL_ROWS, panelled
from epicute.gemm.stream_plan import WIDE, stream_plan
from tests.gemm.compositions import FP8, Case
from tests.gemm.device import Output, embed, embed_rows, integers
from tests.gemm.jobs import Job, weight_of
from tests.gemm.planned import CPU, Recorder
from tests.ptx import Kernel, TensorMap, ptx_of

__all__ = ["EmulatedJob"]


@cache
def code_of(case: Case) -> Kernel:
    return Kernel(ptx_of(case.kernel()))


class EmulatedJob(Job):
    """A job in the memory of the CPU, whose launch is emulated.

    ``clusters``: of a GPU that is made up; their number is how often the kernel's loop over tiles turns.
    """

    def __init__(self, case: Case, rows: int, clusters: int = 66, seed: int = 0) -> None:
        self.case, self.rows = case, rows
        self.kernel: GemmKernel = case.kernel()
        self.plan = Plan(self.kernel, Recorder())  # type: ignore[arg-type]
        self.plan._clusters[CPU] = clusters
        self.packed = weight_of(case).to("cpu")
        self.x = embed_rows(
            integers(rows, case.k, dtype=case.dtype, seed=seed, most=2).cpu(), "cpu"
        )
        self.operands: dict[str, torch.Tensor] = {}
        self.outputs: dict[str, Output] = {}
        self._generator = torch.Generator().manual_seed(seed)
        for spec in self.kernel.spec.layout.operands:
            if spec.kind.written:
                self.outputs[spec.name] = self._output(spec)
            elif spec.name != "weight_scale" or case.dtype != FP8:
                self.operands[spec.name] = embed(self._drawn(spec), device="cpu")

    def _output(self, spec: OperandSpec) -> Output:
        made = super()._output(spec)
        start = made.tensor.cpu() if not bool(made.unwritten().all()) else None
        return Output(made.shape, spec.dtype, made.strides, start, "cpu", made.name)

    def run(self, **options: Any) -> dict[str, torch.Tensor]:
        """Emulate one launch; outputs by name. Checks guards."""
        tensors = {name: output.tensor for name, output in self.outputs.items()}
        found = self.plan.bind(self.x, self.packed, {**self.operands, **tensors})
        assert found is not None
        memory = [self.x, self.packed.codes, *self.operands.values(), *tensors.values()]
        if self.packed.scale is not None:
            memory.append(self.packed.scale)
        cluster = self.kernel.spec.schedule.cluster
        code_of(self.case).launch(
            found,
            *memory,
            grid=found[3] * cluster,
            cluster=cluster,
            maps=self.maps(found),
            shared=self.kernel.shared_memory + 1024,
            early=(),
            **options,
        )
        for output in self.outputs.values():
            output.assert_intact()
        return tensors

    def maps(self, found: tuple[int, ...]) -> list[TensorMap]:
        """The tensor maps that the launch encodes of these arguments."""
        spec, schedule = self.kernel.spec, self.kernel.spec.schedule
        problem, layout, size = spec.problem, spec.layout, spec.problem.dtype.itemsize
        wide, rows = 128 // size, max(found[2], 1)
        a = TensorMap(
            found[0],
            size,
            (problem.depth, rows),
            (found[1],),
            (wide, schedule.tile_m // schedule.cluster_n),
            128,
        )
        b = TensorMap(
            self.packed.codes.data_ptr(),
            size,
            (spec.pitch, problem.rows),
            (spec.pitch * size,),
            (wide, schedule.tile_n // schedule.parts // schedule.cluster_m),
            128,
        )
        result = [a, b]
        for name in panelled(spec.resolved, layout) if schedule.slots else ():
            box = (PANEL_COLUMNS, PANEL_ROWS)
            result.append(self._matrix(found, layout[name], rows, box, 0))
        stream = stream_plan(spec.resolved, layout, schedule)
        if stream is not None:
            box, swizzle = (stream.columns, schedule.tile_m), WIDE if stream.swizzled else 0
            result.append(self._matrix(found, layout[stream.name], rows, box, swizzle))
        return result

    @staticmethod
    def _matrix(
        found: tuple[int, ...], spec: OperandSpec, rows: int, box: tuple[int, int], swizzle: int
    ) -> TensorMap:
        address, stride = found[spec.at("address")], found[spec.at("row_stride")]
        shape = (int(spec.shape[1]), rows)
        return TensorMap(address, spec.dtype.itemsize, shape, (stride,), box, swizzle)
