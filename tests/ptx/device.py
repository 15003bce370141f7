"""A GPU that is made up: the package's plans run end to end on the CPU, their kernels in the emulator.

::

    from tests.ptx.device import emulated_device

    with emulated_device(multiprocessors=2) as gpu:
        plan = plan_rows(128, torch.bfloat16, device="cuda")
        x = torch.randn(5, 128, dtype=torch.bfloat16, device="cuda")   # or .cuda(), .to("cuda"), ops on such
        plan.run(x, codes, scale)                                      # codes.cpu() to look at
        assert [launch.name for launch in gpu.launches] == [...]

or, in a test, the fixture ``emulated`` (import it into the module, or into a conftest).

What is real: all Python of the package, its errors and checks, the compiled host function (argument checks, tensor
maps, grid, cluster, shared memory: see ``objects.py``), and the PTX of the kernel. What is not: the memory
(``arena.py``: tensors of the CPU that say they are on ``cuda:0``, poisoned before they are written), ``torch.cuda``
(``cuda.py``: streams without delay, events, graphs that are recorded and replayed), and the GPU. A launch is over when
the call returns; it may touch everything that is allocated on the device and nothing else, and before its
``griddepcontrol.wait`` nothing that the launches in front of it have written. Memory that ends before a read or write
does is therefore found, a stream that does not wait for another one is not.

Kernels are compiled once for each key and kept in the folder of ``EPICUTE_CACHE_DIR``. A launch costs about 1 µs an
instruction of a warp, plus some 10 ms.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.ptx.arena import Arena, DeviceTensor
from tests.ptx.cuda import Current, stand_in
from tests.ptx.descriptors import decoded
from tests.ptx.launch import MAP_BYTES, Kernel
from tests.ptx.objects import COOPERATIVE, PROGRAMMATIC, SHARED_BYTES, Host, Launch
from tests.ptx.program import RESERVED

__all__ = ["Device", "Launched", "claimed", "emulated", "emulated_device"]

FOLDER = "emulated"
GRID = (2**31, 2**16, 2**16)
"""What a grid stays below."""

GRAIN = 16
"""Bytes that count as written together."""
CUDA, DEVICE_TYPE_AT = 2, 8
"""``kDLCUDA``, and where a ``DLTensor`` has its device's type."""


@dataclass(frozen=True)
class Launched:
    """A launch that was emulated.

    Attributes:
        name: the kernel's, of its key. grid, cluster: CTAs. shared: dynamic bytes. stream: its handle.
        programmatic: whether it may start before the kernel before it is done. arguments: its 64-bit integers.
        seconds: that the emulation took.
    """

    name: str
    grid: tuple[int, int, int]
    cluster: tuple[int, int, int]
    shared: int
    stream: int
    programmatic: bool
    arguments: tuple[int, ...]
    seconds: float


class Function:
    """A compiled kernel as plans call it: the real host function, whose launches are emulated."""

    def __init__(self, device: Device, name: str, symbol: str, code: bytes, ptx: str) -> None:
        self.device, self.name = device, name
        self.kernel = Kernel(ptx)
        self._host = Host(code, self._caught, lambda: device.current.stack[-1].cuda_stream)
        self._function = self._host.function(symbol)
        self._waiting: list[tuple[Launch, list[bytes]]] = []

    def __call__(self, *arguments: Any) -> None:
        """Check, encode and launch."""
        self._waiting = []
        self._function(*(claimed(x) if isinstance(x, DeviceTensor) else x for x in arguments))
        self._host.check()
        for launch, parameters in self._waiting:
            self.device.launch(self, launch, parameters)

    def _caught(self, launch: Launch) -> None:
        params = self.kernel.program.params.values()
        self._waiting.append((launch, [launch.parameter(i, p.size) for i, p in enumerate(params)]))


class Written:
    """What launches have written since everything on the device had last ended, as far as it changed."""

    def __init__(self, arena: Arena) -> None:
        self.arena = arena
        self._places: dict[int, np.ndarray] = {}
        self._kernels = 0

    def elsewhere(self, programmatic: bool) -> list[torch.Tensor]:
        """What was not written. A launch that is not ``programmatic`` begins when all in front have ended."""
        if not programmatic or self._kernels != self.arena.kernels:
            self._places.clear()
        self._kernels = self.arena.kernels
        found = []
        for offset, size in self.arena.live.copy().items():
            clean = ~self._flags(offset, size)
            edges = np.flatnonzero(np.diff(clean, prepend=False, append=False)).reshape(-1, 2)
            for first, last in (edges * GRAIN).tolist():
                found.append(self.arena.bytes[offset + first : offset + min(last, size)])
        return [torch.from_numpy(x) for x in found]

    @contextmanager
    def noted(self) -> Iterator[None]:
        """What changes within is written."""
        bytes_ = self.arena.bytes
        before = {o: bytes_[o : o + size].copy() for o, size in self.arena.live.copy().items()}
        yield
        for offset, old in before.items():
            changed = np.flatnonzero(bytes_[offset : offset + len(old)] != old) // GRAIN
            if len(changed):
                flags = self._places[offset] = self._flags(offset, len(old))
                flags[changed] = True

    def _flags(self, offset: int, size: int) -> np.ndarray:
        """Which grains of an allocation are written; there may have been another one at its place."""
        found = np.zeros(-(-size // GRAIN), bool)
        known = self._places.get(offset, found)[: len(found)]
        found[: len(known)] = known
        return found


@dataclass
class Device:
    """What an ``emulated_device`` block gives.

    Attributes:
        arena: its memory. current: its streams. launches: so far, in order; clear it at will.
        seed: warps and copies of a launch take turns at random; None for round robin. late: share of the copies that
            come only when nothing else can go on.
        races: look for unordered accesses of shared memory in every launch. resident: clusters at a time; 0 for all.
        ordered: refuse what is touched before ``griddepcontrol.wait`` though a kernel in front has written it.
        skip: names of kernels, by the start of their key's, that are not emulated, only encoded and noted.
    """

    arena: Arena
    current: Current
    seed: int | None = None
    races: bool = False
    resident: int = 1
    ordered: bool = True
    skip: tuple[str, ...] = ()
    late: float = 0.0

    def __post_init__(self) -> None:
        self.launches: list[Launched] = []
        self._written = Written(self.arena)
        self._functions: dict[str, Function] = {}

    def launch(self, function: Function, launch: Launch, parameters: list[bytes]) -> None:
        """Emulate a launch, or note it where a graph is captured."""
        if self.arena.captured is not None:
            self.arena.captured.append(lambda: self._run(function, launch, parameters))
        else:
            self._run(function, launch, parameters)

    def _run(self, function: Function, launch: Launch, parameters: list[bytes]) -> None:
        start = time.perf_counter()
        program, name = function.kernel.program, function.name
        assert launch.kernel == program.name, f"{name}: {launch.kernel} is not {program.name}"
        assert launch.block == program.block, f"{name}: {launch.block} threads, not {program.block}"
        assert all(0 < n < most for n, most in zip(launch.grid, GRID, strict=True)), (
            f"{name}: a grid of {launch.grid}"
        )
        assert launch.cluster[1:] == (1, 1), f"{name}: a cluster of {launch.cluster}"
        bytes_ = program.static - RESERVED + launch.shared
        assert bytes_ <= SHARED_BYTES, f"{name}: {bytes_} bytes of shared memory"
        clusters = launch.grid[0] * launch.grid[1] * launch.grid[2] // launch.cluster[0]
        together = self.resident or clusters
        if any(launch.attributes.get(COOPERATIVE, b"")[:4]):
            together = clusters
        found = list(zip(program.params.values(), parameters, strict=True))
        scalars = [
            int.from_bytes(d, "little", signed=True)
            for p, d in found
            if p in function.kernel.scalars
        ]
        others = {
            i: d
            for i, (p, d) in enumerate(found)
            if p.size != MAP_BYTES and p not in function.kernel.scalars
        }
        programmatic = any(launch.attributes.get(PROGRAMMATIC, b"")[:4])
        if not name.startswith(self.skip or ("\0",)):
            self._emulate(
                function,
                scalars,
                maps=[decoded(d) for p, d in found if p.size == MAP_BYTES],
                parameters=others,
                grid=launch.grid,
                cluster=launch.cluster[0],
                shared=program.static + launch.shared,
                resident=together,
                early=self._written.elsewhere(programmatic) if self.ordered else None,
            )
        self.launches.append(
            Launched(
                name,
                launch.grid,
                launch.cluster,
                launch.shared,
                launch.stream,
                programmatic,
                tuple(scalars),
                time.perf_counter() - start,
            )
        )

    def _emulate(self, function: Function, scalars: list[int], **options: Any) -> None:
        with torch._C.DisableTorchFunction(), self._written.noted():
            try:
                function.kernel.launch(
                    scalars,
                    *self.arena.memory(),
                    seed=self.seed,
                    races=self.races,
                    late=self.late,
                    **options,
                )
            except AssertionError as error:
                error.add_note(f"in {function.name}, grid {options['grid']}, arguments {scalars}")
                raise

    # --- in place of the object cache and the compiler ---

    def compiled(self, kernel: Any, cache: Any) -> Any:
        """In place of ``epicute.jit.compile``'s look into the disk and the compiler."""
        from epicute.jit import Compiled, Report

        key = kernel.key
        digest = key.digest
        place = _folder() / digest
        origin: Any = "disk"
        if not place.with_suffix(".json").exists():
            _compile(kernel, place)
            origin = "compiled"
        function = self._functions.get(digest)
        if function is None:
            code, ptx = place.with_suffix(".o").read_bytes(), place.with_suffix(".ptx").read_text()
            symbol = _jit()._symbol(key)
            function = self._functions[digest] = Function(self, key.kernel, symbol, code, ptx)
        report = Report.from_json(json.loads(place.with_suffix(".json").read_text()))
        return Compiled(key, function, report, origin)


def _jit() -> Any:
    import epicute.jit

    assert epicute.jit is not None
    return sys.modules["epicute.jit.compile"]  # the package has a function of that name


def _folder() -> Path:
    found = os.environ.get("EPICUTE_CACHE_DIR")
    folder = Path(found or tempfile.gettempdir()) / FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _compile(kernel: Any, place: Path) -> None:
    """Compile as ``epicute.jit`` does, and keep the PTX too: object, PTX and, at last, report appear whole."""
    import cutlass.cute as cute

    from epicute.jit import Report

    jit, key = _jit(), kernel.key
    start = time.perf_counter()
    with jit._compiling, tempfile.TemporaryDirectory(dir=place.parent) as folder:
        with jit._compiler_output() as output:
            function, arguments = kernel.trace()
            options = f"{key.compiler_options} --keep-ptx --dump-dir {folder}"
            module = cute.compile(function, *arguments, options=options)
        report = Report.parse(
            output.text,
            seconds=time.perf_counter() - start,
            dynamic=jit._dynamic_shared_memory(module, kernel),
            ptxas=jit._ptxas(key),
        )
        made = Path(folder) / "kernel"
        module.export_to_c(
            object_file_path=str(made.with_suffix(".o")), function_name=jit._symbol(key)
        )
        made.with_suffix(".ptx").write_text(str(module.__ptx__))
        made.with_suffix(".json").write_text(json.dumps(report.to_json()))
        for suffix in (".o", ".ptx", ".json"):
            made.with_suffix(suffix).replace(place.with_suffix(suffix))


_pointer: Any = ctypes.pythonapi.PyCapsule_GetPointer
_pointer.restype, _pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]


def claimed(x: torch.Tensor) -> Any:
    """The tensor as tvm-ffi sees one of a GPU."""
    import tvm_ffi

    with torch._C.DisableTorchFunction():
        capsule = torch.utils.dlpack.to_dlpack(x.as_subclass(torch.Tensor))
    place = _pointer(capsule, b"dltensor") + DEVICE_TYPE_AT
    ctypes.cast(place, ctypes.POINTER(ctypes.c_int32))[0] = CUDA
    return tvm_ffi.from_dlpack(capsule)


def _forget() -> None:
    """Drop what is kept by device in caches of the process."""
    from epicute.decode import occupancy
    from epicute.gemm import linear
    from epicute.jit import target
    from epicute.quant import group

    caches = (
        target._of_device,
        group._plan_on,
        sys.modules[linear.__module__]._plan_for,
        occupancy.resident_clusters,
    )
    for cache in caches:
        cache.cache_clear()


@contextmanager
def emulated_device(
    multiprocessors: int = 4,
    *,
    seed: int | None = None,
    races: bool = False,
    resident: int = 1,
    ordered: bool = True,
    skip: tuple[str, ...] = (),
) -> Iterator[Device]:
    """Make up ``cuda:0``: see the module.

    Args:
        multiprocessors: of the GPU; persistent kernels launch at most so many CTAs.
        seed, races, resident, ordered, skip: see ``Device``, whose attributes they are, to be changed at any time.
    """
    with pytest.MonkeyPatch.context() as patch:
        arena = Arena()
        current = stand_in(patch, arena, multiprocessors)
        device = Device(arena, current, seed, races, resident, ordered, skip)
        patch.setattr(_jit(), "_loaded", {})
        patch.setattr(_jit(), "_from_disk_or_compiler", device.compiled)
        _forget()
        try:
            with arena:
                yield device
        finally:
            _forget()


@pytest.fixture
def emulated() -> Iterator[Device]:
    """A GPU of four multiprocessors."""
    with emulated_device() as device:
        yield device
