"""What a call takes beside its time: launches, and the memory it needs for anything but weights,
inputs and caches.

Launches are the kernels, copies and fills of a captured call. Bytes are the most that the allocator
held during a call, its result included, over what it held before, and the memory that was planned
for it.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from benchmarks.timing import Run

__all__ = ["Footprints", "launches", "peak_bytes"]


@dataclass
class Footprints:
    """Launches and bytes of each candidate, by its name; nothing without a GPU, or where they cannot be told."""

    launches: dict[str, int] = field(default_factory=dict)
    peak_bytes: dict[str, int] = field(default_factory=dict)

    def watched(
        self, name: str, build: Callable[[], Run], planned: Callable[[], int] = lambda: 0
    ) -> Callable[[], Run]:
        """``build`` that also notes what its candidate takes.

        ``planned``: bytes that the candidate holds from call to call, asked when it is built.
        """

        def built() -> Run:
            run = build()
            if torch.cuda.is_available():
                self._note(name, run, planned)
            return run

        return built

    def _note(self, name: str, run: Run, planned: Callable[[], int]) -> None:
        self.peak_bytes[name] = peak_bytes(run) + planned()
        try:
            count = launches(run)
        except RuntimeError as error:  # times of a candidate that cannot be counted still count
            print(f"{name}: launches are not counted: {error}")
            return
        if count is not None:
            self.launches[name] = count


def peak_bytes(run: Run) -> int:
    """Most bytes that a call allocates at a time, after one that compiles and loads."""
    run(0)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    outputs = run(0)
    torch.cuda.synchronize()
    del outputs
    return torch.cuda.max_memory_allocated() - before


def launches(run: Run) -> int | None:
    """Kernels, copies and fills of one call; None where a graph's nodes cannot be read."""
    try:
        graph: Any = torch.cuda.CUDAGraph(keep_graph=True)  # type: ignore[call-arg]
        runtime: Any = importlib.import_module("cuda.bindings.runtime")
    except (ImportError, TypeError) as error:
        print(f"launches are not counted: {type(error).__name__}: {error}")
        return None
    with torch.cuda.graph(graph):
        outputs = run(0)
    found = _counted(runtime, graph.raw_cuda_graph())
    del outputs
    return found


def _counted(runtime: Any, graph: Any) -> int:
    """Nodes of a graph that do something: all but the empty ones."""
    _, _, count = _said(runtime.cudaGraphGetNodes(graph))
    if not count:
        return 0
    _, nodes, _ = _said(runtime.cudaGraphGetNodes(graph, count))
    kinds = [_said(runtime.cudaGraphNodeGetType(node))[1] for node in nodes[:count]]
    return sum(kind != runtime.cudaGraphNodeType.cudaGraphNodeTypeEmpty for kind in kinds)


def _said(result: tuple[Any, ...]) -> tuple[Any, ...]:
    """What a runtime call returns; raises where it failed."""
    if int(result[0]) != 0:
        raise RuntimeError(f"the CUDA runtime said {result[0]}")
    return result
