"""From a kernel's description to launches on any device: what the small kernels' plans share.

A plan is made once and runs often. What it needs of a device (code, an anchor that tells the launch where it is, the
number of multiprocessors) is there after ``Launcher.prepare``, so that a run allocates nothing, waits for nothing and
may be captured in a CUDA graph. On the CPU a plan runs in PyTorch, and nothing is compiled.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch

from epicute.errors import ArgumentError, CompileError, require
from epicute.jit import Kernel, ObjectCache, Report, Target, compile

__all__ = [
    "Launcher",
    "anchor_and_stream",
    "check_apart",
    "check_matrix",
    "check_vector",
    "device_of",
    "wrong",
]


@dataclass(frozen=True)
class _Device:
    """A kernel on one device; ``anchor`` is what the launch takes device and stream from."""

    function: Callable[..., Any]
    anchor: torch.Tensor
    multiprocessors: int


class Launcher:
    """One kernel, compiled once for an architecture and loaded once on each device that asks.

    Attributes:
        report: what the compiler said; None until a device asked.
        origin: where the code was found, ``"memory"``, ``"disk"`` or ``"compiled"``; empty until then.
    """

    def __init__(
        self,
        describe: Callable[[Target], Kernel],
        idle: tuple[int, ...],
        device: torch.device | str | None,
        cache: ObjectCache | None = None,
    ) -> None:
        """``idle``: arguments of a launch of one block that touches no memory. ``device``: see ``prepare``."""
        self._describe, self._idle, self._cache = describe, idle, cache
        self._devices: dict[int, _Device] = {}
        self.report: Report | None = None
        self.origin = ""
        self.prepare(device)

    def prepare(self, device: torch.device | str | None) -> None:
        """Compile for a device and load there; None is the current GPU, or the CPU where there is none.

        Raises:
            ArgumentError: neither a CUDA device nor the CPU.
            CompileError: in a CUDA graph capture, in which neither is possible.
        """
        if device is None:
            device = "cuda" if torch.cuda.is_available() else "cpu"
        found = torch.device(device)
        require(
            found.type in ("cuda", "cpu"),
            "device",
            found,
            "a CUDA device or the CPU",
            "name 'cuda' or 'cpu'",
        )
        if found.type == "cuda":
            index = torch.cuda.current_device() if found.index is None else found.index
            self.on(index)

    def on(self, index: int) -> _Device:
        """The kernel on CUDA device ``index``."""
        found = self._devices.get(index)
        if found is None:
            found = self._devices[index] = self._load(index)
        return found

    def _load(self, index: int) -> _Device:
        kernel = self._describe(Target.detect(index))
        compiled = compile(kernel, cache=self._cache)
        if torch.cuda.is_current_stream_capturing():
            raise CompileError(
                f"{kernel.key}: not loaded on cuda:{index} yet, and loading is not possible while a CUDA graph is "
                "captured. Fix: make the plan for that device, or run once, before the capture"
            )
        self.report, self.origin = compiled.report, compiled.origin
        anchor = torch.zeros(16, dtype=torch.uint8, device=f"cuda:{index}")
        properties = torch.cuda.get_device_properties(index)
        with torch.cuda.device(index):
            compiled.function(anchor, self._idle)
        return _Device(compiled.function, anchor, properties.multi_processor_count)

    def multiprocessors(self, device: torch.device) -> int:
        """Of a device; the CPU counts as one."""
        return 1 if device.type == "cpu" else self.on(device.index).multiprocessors

    def launch(self, index: int, arguments: tuple[int, ...]) -> None:
        """Launch on the current stream of CUDA device ``index``."""
        device = self.on(index)
        if index == torch.cuda.current_device():
            device.function(device.anchor, arguments)
        else:
            with torch.cuda.device(index):
                device.function(device.anchor, arguments)


def anchor_and_stream() -> tuple[Any, Any]:
    """Fake arguments of every kernel that a ``Launcher`` launches: before and behind its integers."""
    import cutlass
    from cutlass.cute.runtime import make_fake_stream, make_fake_tensor

    anchor = make_fake_tensor(cutlass.Uint8, (16,), (1,), assumed_align=16)
    return anchor, make_fake_stream(use_tvm_ffi_env_stream=True)


def wrong(name: str, given: Any, expected: str, fix: str) -> ArgumentError:
    """The error of an argument, which shows what a tensor is."""
    got = "None" if given is None else type(given).__name__
    if isinstance(given, torch.Tensor):
        got = f"{tuple(given.shape)} {given.dtype}, strides {given.stride()}, on {given.device}"
    return ArgumentError(f"{name}: got {got}, expected {expected}. Fix: {fix}")


def device_of(name: str, given: Any) -> torch.device:
    """The device of a tensor that the others go by; refuses what is neither on a CUDA device nor on the CPU."""
    if not isinstance(given, torch.Tensor) or given.device.type not in ("cpu", "cuda"):
        raise wrong(name, given, "a tensor on a CUDA device or the CPU", "move it there")
    return given.device


def check_vector(
    name: str, given: Any, length: int, dtypes: tuple[torch.dtype, ...], device: torch.device
) -> None:
    """Refuse all but ``length`` adjacent elements of one of ``dtypes`` on ``device``."""
    kinds = " or ".join(str(d).removeprefix("torch.") for d in dtypes)
    expected = f"({length},) {kinds} on {device}"
    if not isinstance(given, torch.Tensor) or given.device != device:
        raise wrong(name, given, expected, f"make it a tensor on {device}")
    if given.dtype not in dtypes or given.shape != (length,):
        raise wrong(name, given, expected, "pass it with that shape and dtype")
    if not given.is_contiguous():
        raise wrong(name, given, "adjacent elements", f"{name}.contiguous()")


def check_matrix(
    name: str,
    given: Any,
    shape: tuple[int | None, int],
    dtype: torch.dtype,
    device: torch.device,
    alignment: int,
) -> int:
    """Bytes from row to row of a matrix whose rows are adjacent elements at multiples of ``alignment`` bytes.

    ``shape``: (rows, columns); None for any number of rows. On the CPU any strides will do.
    """
    rows, columns = shape
    expected = f"({'M' if rows is None else rows}, {columns}) {dtype} on {device}"
    if not isinstance(given, torch.Tensor) or given.device != device:
        raise wrong(name, given, expected, f"make it a tensor on {device}")
    if given.dtype != dtype or given.dim() != 2 or given.shape[1] != columns:
        raise wrong(name, given, expected, "pass it with that shape and dtype")
    if rows is not None and given.shape[0] != rows:
        raise wrong(name, given, expected, "pass it with that shape and dtype")
    pitch, step = given.stride()
    size, count = given.element_size(), given.shape[0]
    if device.type == "cpu" or count == 0:
        return pitch * size
    if count == 1:
        pitch = -(-columns * size // alignment) * alignment // size
    if (step != 1 and columns > 1) or pitch < columns:
        raise wrong(
            name, given, "rows of adjacent elements, apart from each other", f"{name}.contiguous()"
        )
    if given.data_ptr() % alignment or pitch * size % alignment:
        raise wrong(
            name,
            given,
            f"rows that start at multiples of {alignment} bytes",
            f"allocate rows of a multiple of {alignment} bytes and pass {name}[:, :{columns}]",
        )
    return pitch * size


def check_apart(**given: torch.Tensor | None) -> None:
    """Refuse two matrices or vectors whose memory, from first to last byte, has any in common."""
    spans = []
    for name, x in given.items():
        if x is None or x.numel() == 0:
            continue
        last = sum((n - 1) * s for n, s in zip(x.shape, x.stride(), strict=True))
        start = x.data_ptr()
        spans.append((start, start + (last + 1) * x.element_size(), name, x))
    spans.sort(key=lambda span: span[0])
    for (_, end, other, _), (start, _, name, x) in pairwise(spans):
        if start < end:
            raise wrong(name, x, f"memory apart from {other}", f"allocate it apart from {other}")
