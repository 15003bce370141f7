"""How a candidate is timed: a CUDA graph of whole passes over its copies, replayed between events.

A candidate is a function ``run(copy)`` that launches one call on the current stream with the
inputs, weights and outputs of that copy, and returns its outputs by name. Rotating the copies
keeps at least 300 MB between two reads of a byte.

    graph    copy 0, copy 1, … copy n-1, copy 0, …       passes over all copies, about 1 ms
    slice    replay … replay | replay | replay | …       an event after each but the lead-in's
             lead-in, untimed  timed

A card at its power limit lowers its clock, and the controller takes some tens of milliseconds: a
candidate right behind one that draws less runs at a higher clock (on an H200 up to 15 %) until it
has caught up. The lead-in, the candidate's own replays, outlasts that.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from benchmarks.power import Reader, Reading, silent

__all__ = ["COLD_BYTES", "CudaTimer", "Run", "Sample", "Slice", "Timer", "copies_for"]


@dataclass(frozen=True)
class Sample:
    """One slice: µs per call of each timed replay, and the card's sensors in their middle."""

    times: list[float]
    reading: Reading = field(default_factory=Reading)


Run = Callable[[int], Mapping[str, Tensor]]
Slice = Callable[[], Sample]

COLD_BYTES = 300e6
"""Bytes between two reads of the same byte, five times the L2."""


def copies_for(call_bytes: int) -> int:
    """Copies to rotate over, four at least, where a call touches ``call_bytes`` of its own."""
    return max(4, math.ceil(COLD_BYTES / call_bytes) + 1)


class Timer(Protocol):
    """Something that makes a candidate ready and times slices of it."""

    def prepare(self, run: Run, copies: int, least_us: float) -> Slice:
        """Warm up; a function that runs one slice and gives its sample.

        ``least_us``: a time no candidate's call is below, from which all get equally many calls.
        """


class CudaTimer:
    """Times graph replays with events."""

    def __init__(
        self, slice_us: float, lead_us: float, read: Reader = silent, graph_us: float = 1000.0
    ) -> None:
        """Slices of ``slice_us`` behind ``lead_us`` untimed, of graphs of at least ``graph_us``.

        ``read`` reads the card's sensors, once in each slice.
        """
        self.slice_us, self.lead_us, self.read, self.graph_us = slice_us, lead_us, read, graph_us

    def prepare(self, run: Run, copies: int, least_us: float) -> Slice:
        """See Timer. Compiling, loading and first allocations happen before the capture."""
        passes = math.ceil(self.graph_us / (copies * least_us))
        self._warm_up(run, copies)
        graph = _captured(run, copies, passes)
        duration = _duration(graph)
        # One at least: nothing hides the launch of the first, and the L2 holds others' data.
        lead = max(1, math.ceil(self.lead_us / duration))
        replays = max(2, math.ceil(self.slice_us / duration))
        events = [torch.cuda.Event(enable_timing=True) for _ in range(replays + 1)]

        def sample() -> Sample:
            for _ in range(lead):
                graph.replay()
            events[0].record()
            for event in events[1:]:
                graph.replay()
                event.record()
            events[replays // 2].synchronize()  # the sensors are read while the rest, queued, runs
            reading = self.read()
            torch.cuda.synchronize()
            spans = itertools.pairwise(events)
            calls = passes * copies
            return Sample([a.elapsed_time(b) * 1e3 / calls for a, b in spans], reading)

        return sample

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
