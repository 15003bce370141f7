"""Batches through the compiled attention kernel on the CPU."""

from __future__ import annotations

from typing import Any

import torch

from epicute.attention import AttentionPlan, AttentionSchedule, AttentionSpec
from epicute.attention.arguments import ARGUMENTS
from epicute.attention.build import AttentionKernel, kernel_for
from epicute.attention.plan import _take
from epicute.jit import DEFAULT_TARGET
from tests.attention.cases import Batch
from tests.gemm.device import Output
from tests.ptx import Kernel, TensorMap, ptx_of

__all__ = ["EmulatedAttention", "on_cpu"]


def on_cpu(batch: Batch) -> Batch:
    """The batch in the memory of the CPU, where it was drawn on a GPU, with outputs of its own."""
    batch.q, batch.k, batch.v = ([x.cpu() for x in part] for part in (batch.q, batch.k, batch.v))
    batch.operands = {name: x.cpu() for name, x in batch.operands.items()}
    batch.tensors = tuple(x.cpu() for x in batch.tensors)  # type: ignore[assignment]
    batch.out = Output(batch.out.shape, batch.spec.out_dtype, device="cpu")
    if batch.lse is not None:
        batch.lse = Output(batch.lse.shape, torch.float32, device="cpu", name="lse")
    return batch


class EmulatedAttention:
    """A compiled attention kernel that runs on tensors of the CPU. ``text``: its PTX."""

    def __init__(self, spec: AttentionSpec, schedule: AttentionSchedule | None = None) -> None:
        self.kernel: AttentionKernel = kernel_for(spec, target=DEFAULT_TARGET, schedule=schedule)
        self.text = ptx_of(self.kernel)
        self.code = Kernel(self.text)
        # The plan's own checks and addresses, without a compiled function to launch.
        self.plan = AttentionPlan.__new__(AttentionPlan)
        self.plan.kernel = self.kernel

    def arguments(self, batch: Batch, clusters: int) -> dict[str, int]:
        """What the plan passes for a batch on a GPU of so many clusters."""
        spec = self.kernel.spec
        q, k, v = batch.tensors
        operands = dict(batch.operands)
        if batch.lse is not None:
            operands["lse"] = batch.lse.tensor
        found = dict.fromkeys(ARGUMENTS, 0)
        self.plan._check_names(operands)
        queries = self.plan._check_rows("q", q, spec.heads, spec.dtype)
        _take(found, "q", q, spec.packed)
        _take(found, "out", batch.out.tensor, spec.packed)
        keys = self.plan._take_keys(found, k, v, q)
        found["batch"] = self.plan._take_vectors(found, operands, queries, q)
        found["q_rows"], found["kv_rows"], found["kv_batches"] = (
            queries.rows,
            keys.rows,
            keys.batches,
        )
        found["clusters"] = clusters
        found["section"] = self.plan._section(keys, found["batch"])
        return found

    def maps(self, found: dict[str, int]) -> list[TensorMap]:
        """The tensor maps that the launch encodes of these arguments."""
        spec, schedule = self.kernel.spec, self.kernel.schedule
        chunk = next(n for n in (64, 32, 16) if spec.head_dim % n == 0)
        share = schedule.tile_n // schedule.cluster
        box = share if spec.page is None else min(spec.page, share)
        size = spec.dtype.itemsize
        converted = spec.kv_dtype != spec.dtype
        queries = 1 if spec.packed else found["batch"]
        shapes = {
            "q": (max(found["q_rows"], 1), spec.heads, queries, schedule.tile_m, chunk, size),
            "k": (max(found["kv_rows"], 1), spec.kv_heads, max(found["kv_batches"], 1), box, chunk, size),
        }  # fmt: skip
        if converted:
            shapes["k"] = (*shapes["k"][:4], spec.head_dim, 1)
        shapes["v"] = shapes["k"]
        result = []
        for name, (rows, heads, batches, box_rows, width, itemsize) in shapes.items():
            dims: list[tuple[int, int, int]] = [(rows, found[f"{name}_row"], box_rows)]
            if heads > 1:
                dims.append((heads, found[f"{name}_head"], 1))
            dims.append((batches, found[f"{name}_batch"], 1))
            result.append(
                TensorMap(
                    found[name],
                    itemsize,
                    (spec.head_dim, *(d[0] for d in dims)),
                    tuple(d[1] * itemsize for d in dims),
                    (width, *(d[2] for d in dims)),
                    0 if itemsize == 1 else chunk * itemsize,
                )
            )
        return result

    def run(self, batch: Batch, clusters: int = 1, **options: Any) -> None:
        """Launch."""
        found = self.arguments(batch, clusters)
        size = self.kernel.schedule.cluster
        memory = [*batch.tensors, batch.out.tensor, *batch.operands.values()]
        if batch.lse is not None:
            memory.append(batch.lse.tensor)
        self.code.launch(
            list(found.values()),
            *memory,
            grid=clusters * size,
            cluster=size,
            maps=self.maps(found),
            shared=self.kernel.shared_memory + 1024,
            early=(),
            **options,
        )
