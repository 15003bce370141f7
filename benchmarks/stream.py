"""A plain streaming read: what any kernel that reads these bytes once has to take, its own launch included.

264 blocks of 1024 threads (two an SM) read 16 bytes a thread, eight loads under way, and keep nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from benchmarks.timing import Run
from epicute.jit import CompileKey, Target
from epicute.quant.launch import Launcher, anchor_and_stream

__all__ = ["ReadKernel", "reading"]

THREADS = 1024
DEPTH = 8
"""Loads of a thread that are under way together."""

PER_SM = 2
VECTOR = 16


@dataclass(frozen=True)
class ReadKernel:
    """What is compiled."""

    target: Target

    @property
    def key(self) -> CompileKey:
        """The kernel has no variants."""
        return CompileKey("benchmarks.read", (("depth", DEPTH), ("version", 1)), self.target)

    def trace(self) -> tuple[Any, tuple[Any, ...]]:
        """The DSL function and its fake arguments."""
        import cutlass

        from benchmarks.stream_kernel import Read

        anchor, stream = anchor_and_stream()
        return Read(), (anchor, (cutlass.Int64(0),) * 3, stream)


def reading(tensors: list[Tensor]) -> Run:
    """Reads the bytes of each of ``tensors``; returns no outputs."""
    device = tensors[0].device
    if device.type == "cpu":

        def sum_of(copy: int) -> dict[str, Tensor]:
            tensors[copy].view(torch.uint8).sum()
            return {}

        return sum_of
    launcher = Launcher(ReadKernel, (0, 0, 1), device)
    blocks = PER_SM * launcher.multiprocessors(device)
    given = [(t.data_ptr(), t.nbytes // VECTOR, blocks) for t in tensors]

    def run(copy: int) -> dict[str, Tensor]:
        launcher.launch(device.index, given[copy])
        return {}

    return run
