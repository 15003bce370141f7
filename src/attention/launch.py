"""A compiled kernel on the devices that it runs on: what the plans of attention share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from epicute.errors import CompileError, UnsupportedError, require
from epicute.jit import Kernel, ObjectCache, Target, compile

__all__ = ["Loaded"]

ANCHOR_BYTES = 16


class Loaded:
    """A kernel, compiled once for its target and loaded on each device that asks.

    Attributes:
        report: what the compiler said.
    """

    def __init__(
        self,
        kernel: Kernel,
        target: Target,
        idle: Callable[[int], tuple[int, ...]],
        cache: ObjectCache | None = None,
    ) -> None:
        """``idle``: arguments of a launch for no request, given a device address that may stand for any operand."""
        self._compiled = compile(kernel, cache=cache)
        self.report = self._compiled.report
        self._target, self._idle = target, idle
        self._devices: dict[int, tuple[Any, int]] = {}

    def prepare(self, index: int | None = None) -> None:
        """Load on a CUDA device, by default the current one, where it is one of the target."""
        if torch.cuda.is_available():
            index = torch.cuda.current_device() if index is None else index
            if torch.cuda.get_device_capability(index) == self._target.capability:
                self.processors(index)

    def processors(self, device: torch.device | int) -> int:
        """SMs of a CUDA device, on which the kernel is loaded from here on.

        Raises UnsupportedError for a GPU that the code is not for, CompileError while a graph is captured.
        """
        index = device if isinstance(device, int) else device.index
        index = torch.cuda.current_device() if index is None else index
        if index not in self._devices:
            properties = torch.cuda.get_device_properties(index)
            capability = (properties.major, properties.minor)
            require(
                capability == self._target.capability,
                "q.device",
                f"{properties.name}, compute capability {capability[0]}.{capability[1]}",
                f"a GPU for {self._target.arch}",
                "plan with target=Target.detect(device)",
                UnsupportedError,
            )
            require(
                not torch.cuda.is_current_stream_capturing(),
                "plan",
                f"not loaded on cuda:{index} yet, while a CUDA graph is captured",
                "a plan that was made for that device, or run once on it, before",
                "plan, or run once, with that device current, before the capture",
                CompileError,
            )
            dtype = torch.uint8
            memory = torch.zeros(ANCHOR_BYTES, dtype=dtype, device=f"cuda:{index}")
            self._devices[index] = (memory, properties.multi_processor_count)
            # So that the first run may be captured: loading is not possible then.
            self.launch(index, self._idle(memory.data_ptr()))
        return self._devices[index][1]

    def launch(self, index: int, arguments: tuple[int, ...]) -> None:
        """Launch on the current stream of a device that the kernel is loaded on."""
        anchor = self._devices[index][0]
        if index == torch.cuda.current_device():
            self._compiled(anchor, arguments)
        else:
            with torch.cuda.device(index):
                self._compiled(anchor, arguments)
