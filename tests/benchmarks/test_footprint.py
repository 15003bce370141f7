"""Launches of a graph, and what is noted of a candidate."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks import footprint
from benchmarks.footprint import Footprints, launches, peak_bytes

KINDS = SimpleNamespace(cudaGraphNodeTypeEmpty=5, cudaGraphNodeTypeKernel=0)


class Runtime:
    """The CUDA runtime's two functions; a graph is the list of its nodes' kinds."""

    cudaGraphNodeType = KINDS

    def cudaGraphGetNodes(self, graph: list[int], count: int = 0) -> tuple[Any, ...]:
        return 0, graph[:count], len(graph)

    def cudaGraphNodeGetType(self, node: int) -> tuple[Any, ...]:
        return (0, node) if node >= 0 else (700, None)


def test_empty_nodes_are_no_launches() -> None:
    assert footprint._counted(Runtime(), [0, 0, 5, 1, 0]) == 4
    assert footprint._counted(Runtime(), []) == 0
    with pytest.raises(RuntimeError, match="700"):
        footprint._counted(Runtime(), [0, -1])


def test_without_a_gpu_nothing_is_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    prints = Footprints()
    run = prints.watched("ours", lambda: lambda copy: {})()
    assert run(0) == {}
    assert prints == Footprints()


def test_planned_memory_is_asked_when_it_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    built: list[str] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(footprint, "peak_bytes", lambda run: 100)
    monkeypatch.setattr(footprint, "launches", lambda run: None)

    def build() -> Any:
        built.append("here")
        return lambda copy: {}

    prints = Footprints()
    prints.watched("ours", build, lambda: 11 * len(built))()
    assert prints.peak_bytes == {"ours": 111}
    assert prints.launches == {}


@pytest.mark.gpu
def test_a_call_is_counted_and_weighed() -> None:
    x = torch.randn(1024, 1024, device="cuda")

    def run(copy: int) -> dict[str, torch.Tensor]:
        return {"out": (x + 1.0) * 2.0}  # two kernels, and twice 4 MiB at a time

    assert launches(run) == 2
    assert peak_bytes(run) == 2 * x.nbytes
