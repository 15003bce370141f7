"""How a candidate is timed: a CUDA graph of whole passes over its copies, replayed between events.

A candidate is a function ``run(copy)`` that launches one call on the current stream with the
inputs, weights and outputs of that copy, and returns its outputs by name. Rotating the copies
keeps at least 300 MB between two reads of a byte.

    graph    copy 0, copy 1, … copy n-1, copy 0, …       passes over all copies, about 1 ms
    slice    replay (untimed) | replay | replay | …      an event after each
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping
from typing import Protocol

import torch
from torch import Tensor

__all__ = ["COLD_BYTES", "CudaTimer", "Run", "Slice", "Timer", "copies_for"]

Run = Callable[[int], Mapping[str, Tensor]]
Slice = Callable[[], list[float]]

COLD_BYTES = 300e6
"""Bytes between two reads of the same byte, five times the L2."""


def copies_for(call_bytes: int) -> int:
    """Copies to rotate over, four at least, where a call touches ``call_bytes`` of its own."""
    return max(4, math.ceil(COLD_BYTES / call_bytes) + 1)


class Timer(Protocol):
    """Something that makes a candidate ready and times slices of it."""

    def prepare(self, run: Run, copies: int, least_us: float) -> Slice:
        """Warm up; a function that times one slice and gives µs per call, one entry per replay.

        ``least_us``: a time no candidate's call is below, from which all get equally many calls.
        """


class CudaTimer:
    """Times graph replays with events."""

    def __init__(self, slice_us: float, graph_us: float = 1000.0) -> None:
        """Slices of ``slice_us`` made of graphs of at least ``graph_us``."""
        self.slice_us, self.graph_us = slice_us, graph_us

    def prepare(self, run: Run, copies: int, least_us: float) -> Slice:
        """See Timer. Compiling, loading and first allocations happen before the capture."""
        passes = math.ceil(self.graph_us / (copies * least_us))
        self._warm_up(run, copies)
        graph = _captured(run, copies, passes)
        replays = max(2, math.ceil(self.slice_us / _duration(graph)))
        events = [torch.cuda.Event(enable_timing=True) for _ in range(replays + 1)]

        def times() -> list[float]:
            graph.replay()  # untimed: nothing hides its launch, and the L2 holds others' data
            events[0].record()
            for event in events[1:]:
                graph.replay()
                event.record()
            torch.cuda.synchronize()
            spans = itertools.pairwise(events)
            return [begin.elapsed_time(end) * 1e3 / (passes * copies) for begin, end in spans]

        return times

    def _warm_up(self, run: Run, copies: int) -> None:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for copy in range(copies):
                run(copy)
        torch.cuda.synchronize()


def _captured(run: Run, copies: int, passes: int) -> torch.cuda.CUDAGraph:
    graph = torch.cuda.CUDAGraph()
    outputs: dict[int, Mapping[str, Tensor]] = {}  # held: no two copies may share their memory
    with torch.cuda.graph(graph):
        for _ in range(passes):
            for copy in range(copies):
                outputs[copy] = run(copy)
    return graph


def _duration(graph: torch.cuda.CUDAGraph) -> float:
    """µs of one replay, at least 1."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    graph.replay()
    begin.record()
    graph.replay()
    end.record()
    torch.cuda.synchronize()
    return max(begin.elapsed_time(end) * 1e3, 1.0)
