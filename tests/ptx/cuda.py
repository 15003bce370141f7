"""What stands in for ``torch.cuda`` where a GPU is made up: one device, streams that run at once, and graphs.

A launch is over when the call returns, so that streams and events have nothing to order. A graph notes what is launched
and computed between its begin and its end, does none of it meanwhile, and does it with each replay.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.ptx.arena import SIZE, Arena, is_cuda

__all__ = ["stand_in"]

NAME = "an emulated GPU"


class Stream:
    """A stream: in order, and never behind."""

    made = 0

    def __init__(self, *_: Any, **__: Any) -> None:
        Stream.made += 1
        self.cuda_stream = 0x1000 * Stream.made
        self.device = torch.device("cuda", 0)

    def record_event(self, event: Event | None = None) -> Event:
        return (event or Event()).recorded()

    def wait_stream(self, stream: Stream) -> None:
        pass

    def wait_event(self, event: Event) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def query(self) -> bool:
        return True


class Event:
    """An event, which has passed as soon as it is recorded."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self._recorded = False

    def recorded(self) -> Event:
        self._recorded = True
        return self

    def record(self, stream: Stream | None = None) -> None:
        self.recorded()

    def wait(self, stream: Stream | None = None) -> None:
        pass

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, other: Event) -> float:
        assert self._recorded, "an event that was not recorded has no time"
        assert other._recorded, "an event that was not recorded has no time"
        return 1.0


class Current:
    """The current stream, as nested ``torch.cuda.stream`` blocks make it."""

    def __init__(self) -> None:
        self.default = Stream()
        self.default.cuda_stream = 0
        self.stack = [self.default]

    @contextmanager
    def stream(self, stream: Stream | None) -> Any:
        self.stack.append(stream or self.stack[-1])
        try:
            yield
        finally:
            self.stack.pop()


def generators(real: Any) -> type:
    """``torch.Generator`` for either device."""

    class Kind(type):
        def __instancecheck__(cls, found: Any) -> bool:
            return isinstance(found, real)

    class Generator(metaclass=Kind):
        """Makes generators of the CPU, whose numbers go wherever they are asked for."""

        def __new__(cls, device: Any = "cpu") -> Any:
            return real("cpu" if is_cuda(device) else device)

    return Generator


def graphs(arena: Arena, current: Current) -> tuple[type, Callable[..., Any]]:
    """``CUDAGraph`` and ``graph`` for an arena."""

    class Graph:
        """What was launched in a capture, to be done again. It has no nodes that could be looked at."""

        def __init__(self) -> None:
            self.steps: list[Callable[[], Any]] = []

        def capture_begin(self, *_: Any, **__: Any) -> None:
            assert arena.captured is None, "a capture within a capture"
            arena.captured = []

        def capture_end(self) -> None:
            assert arena.captured is not None, "no capture"
            self.steps, arena.captured = arena.captured, None

        def replay(self) -> None:
            assert arena.captured is None, "a replay within a capture"
            for step in self.steps:
                step()

        def reset(self) -> None:
            self.steps = []

        def pool(self) -> tuple[int, int]:
            return (0, 0)

    @contextmanager
    def graph(captured: Graph, *_: Any, stream: Stream | None = None, **__: Any) -> Any:
        with current.stream(stream or Stream()):
            captured.capture_begin()
            try:
                yield
            finally:
                captured.capture_end()

    return Graph, graph


def stand_in(patch: pytest.MonkeyPatch, arena: Arena, multiprocessors: int) -> Current:
    """Replace what product code and tests ask of ``torch.cuda``."""
    current = Current()
    properties = SimpleNamespace(
        name=NAME,
        major=9,
        minor=0,
        multi_processor_count=multiprocessors,
        total_memory=SIZE,
        shared_memory_per_block_optin=227 * 1024,
        shared_memory_per_multiprocessor=228 * 1024,
        regs_per_multiprocessor=65536,
        max_threads_per_multi_processor=2048,
        warp_size=32,
        L2_cache_size=50 << 20,
    )

    def checked(answer: Any) -> Callable[..., Any]:
        def found(device: Any = None) -> Any:
            assert device is None or is_cuda(device), f"{device} is no CUDA device"
            return answer

        return found

    @contextmanager
    def device(device: Any) -> Any:
        if device is not None and device != -1:
            assert is_cuda(device), f"{device} is no CUDA device"
        yield

    def synchronize(device: Any = None) -> None:
        assert device is None or is_cuda(device), f"{device} is no CUDA device"
        if arena.captured is not None:
            raise RuntimeError("CUDA error: operation not permitted when stream is capturing")
        arena.kernels += 1

    def memory_stats(device: Any = None) -> dict[str, int]:
        return {
            "allocation.all.allocated": arena.count,
            "allocated_bytes.all.current": arena.allocated,
            "allocated_bytes.all.peak": arena.peak,
            "num_alloc_retries": 0,
        }

    def reset_peak(device: Any = None) -> None:
        arena.peak = arena.allocated

    graph_class, graph = graphs(arena, current)
    found: dict[str, Any] = {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "init": lambda: None,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "set_device": checked(None),
        "get_device_properties": checked(properties),
        "get_device_capability": checked((9, 0)),
        "get_device_name": checked(NAME),
        "is_current_stream_capturing": lambda: arena.captured is not None,
        "synchronize": synchronize,
        "device": device,
        "stream": current.stream,
        "current_stream": lambda device=None: current.stack[-1],
        "default_stream": lambda device=None: current.default,
        "Stream": Stream,
        "Event": Event,
        "CUDAGraph": graph_class,
        "graph": graph,
        "set_sync_debug_mode": lambda mode: setattr(arena, "waiting", mode),
        "get_sync_debug_mode": lambda: 2 if arena.waiting == "error" else 0,
        "memory_stats": memory_stats,
        "memory_allocated": lambda device=None: arena.allocated,
        "memory_reserved": lambda device=None: arena.allocated,
        "max_memory_allocated": lambda device=None: arena.peak,
        "reset_peak_memory_stats": reset_peak,
        "empty_cache": lambda: None,
        "manual_seed": lambda seed: None,
        "manual_seed_all": lambda seed: None,
        "_sleep": lambda cycles: None,
        "_lazy_init": lambda: None,
    }
    for name, value in found.items():
        patch.setattr(torch.cuda, name, value)
    patch.setattr(torch, "Generator", generators(torch.Generator))
    return current
