"""Memory of a device that is made up: tensors that say they are on ``cuda:0`` and lie in an arena of the CPU.

``Arena`` is a mode of PyTorch's: while it is entered, whatever is made with ``device="cuda"``, moved there or computed
from what is there becomes a ``DeviceTensor`` in the arena. What a GPU would refuse is refused: tensors of two devices
in one operation, NumPy arrays of device memory; and under ``waiting = "error"`` whatever waits for the device. Memory
is poisoned with bytes 0xff when it is allocated and when it is given back.
"""

from __future__ import annotations

import mmap
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch.overrides import TorchFunctionMode

__all__ = ["SIZE", "Arena", "DeviceTensor", "is_cuda"]

ALIGNMENT = 512
"""Of allocations, as of PyTorch's caching allocator; as many bytes at least are between them."""

SIZE = 1 << 32
"""Bytes of the device; memory is taken as it is touched."""

POISON = 0xFF
T = torch.Tensor
DEVICE = torch.device("cuda", 0)

FILLED = {
    torch.empty, torch.empty_like, torch.empty_strided, T.new_empty, T.new_empty_strided, torch.empty_permuted,
}  # fmt: skip
"""Functions that give memory as it is."""

WAITS = {
    T.item, T.tolist, T.__bool__, T.__int__, T.__float__, T.__index__, T.nonzero, torch.nonzero, T.cpu,
    torch.equal, T.equal, torch.allclose, T.allclose, T.masked_select, torch.masked_select, torch.unique, T.unique,
    T.__repr__, T.__format__, T.__contains__,
}  # fmt: skip
"""Functions that wait for the device, or whose result's shape does."""

ACROSS = {T.copy_, T.__setitem__, T.__getitem__, T.to, T.type_as, T.set_}
"""Functions that take tensors of both devices."""

METADATA = {
    T.data_ptr, T.size, T.stride, T.dim, T.ndimension, T.numel, T.nelement, T.element_size, T.storage_offset,
    T.is_contiguous, T.untyped_storage, T.get_device, T.__hash__, T.is_floating_point, T.__len__, T.is_complex,
}  # fmt: skip
"""Functions that look at no element."""

IN_PLACE = {
    T.__setitem__, T.__iadd__, T.__isub__, T.__imul__, T.__itruediv__, T.__ior__, T.__iand__, T.__ixor__,
}  # fmt: skip


class DeviceTensor(torch.Tensor):
    """A tensor in an arena. Its class is all that tells it from others; ``Arena`` does the rest."""

    __torch_function__ = torch._C._disabled_torch_function_impl


def is_cuda(device: Any) -> bool:
    """Whether a device, or its name, is the one that is made up. Another CUDA device is refused."""
    if isinstance(device, bool) or not isinstance(device, (str, int, torch.device)):
        return False
    found = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
    if found.type != "cuda":
        return False
    if found.index not in (None, 0):
        raise RuntimeError(f"CUDA error: invalid device ordinal ({found})")
    return True


def _same_kind(x: torch.Tensor, y: torch.Tensor) -> None:
    """Refuse to make a tensor one of the device in place, as ``torch.nn.Module.to`` does."""
    if isinstance(x, DeviceTensor) != isinstance(y, DeviceTensor):
        raise NotImplementedError(
            "modules do not move to a GPU that is made up: make their tensors there"
        )


def _set_data(x: torch.Tensor, value: torch.Tensor) -> None:
    _same_kind(x, value)
    T.data.__set__(x, value)  # type: ignore[attr-defined]


def _shallow(x: torch.Tensor, y: torch.Tensor) -> bool:
    _same_kind(x, y)
    return bool(torch._has_compatible_shallow_copy_type(x, y))


def _in_place(func: Any, kwargs: dict[str, Any]) -> bool:
    """Whether a function writes what it is given."""
    name = getattr(func, "__name__", "")
    trailing = name.endswith("_") and not name.endswith("__")
    return func in IN_PLACE or "out" in kwargs or trailing


def _tensors(tree: Any) -> Iterator[torch.Tensor]:
    if isinstance(tree, torch.Tensor):
        yield tree
    elif isinstance(tree, (tuple, list)):
        for part in tree:
            yield from _tensors(part)
    elif isinstance(tree, dict):
        yield from _tensors(list(tree.values()))


class Arena(TorchFunctionMode):
    """Device memory, and the mode in which PyTorch's functions know of it.

    Attributes:
        live: bytes of each allocation, by its offset. allocated, peak: bytes, now and at most.
        count: allocations so far.
        waiting: "error" to refuse what waits for the device. kernels: operations of PyTorch's so far that wrote memory
            here, each of which begins when everything in front of it has ended.
        captured: what a CUDA graph that is being captured does so far; None outside of a capture.
    """

    def __init__(self) -> None:
        super().__init__()
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0)
        self._map = mmap.mmap(-1, SIZE, flags=flags)
        self.bytes = np.frombuffer(self._map, np.uint8)
        self.base = int(self.bytes.ctypes.data)
        self._end = ALIGNMENT
        self._free: dict[int, list[int]] = {}
        self.live: dict[int, int] = {}
        self.allocated = self.peak = self.count = self.kernels = 0
        self.waiting = "default"
        self.captured: list[Callable[[], Any]] | None = None
        self._handlers: dict[Any, Callable[..., Any]] = {
            T.device.__get__: self._device,  # type: ignore[attr-defined]
            T.is_cuda.__get__: lambda x: isinstance(x, DeviceTensor),  # type: ignore[attr-defined]
            T.is_cpu.__get__: lambda x: not isinstance(x, DeviceTensor),  # type: ignore[attr-defined]
            T.get_device: lambda x: 0 if isinstance(x, DeviceTensor) else -1,
            T.cpu: lambda x, *_, **__: self._to(x, "cpu"),
            T.cuda: self._cuda,
            T.to: self._to,
            T.numpy: self._numpy,
            T.__array__: self._numpy,
            T.__deepcopy__: self._copied,
            T.__format__: self._format,
            T.data.__set__: _set_data,  # type: ignore[attr-defined]
            torch._has_compatible_shallow_copy_type: _shallow,
            T.pin_memory: lambda x, *_: x,
            T.is_pinned: lambda x, *_: False,
        }

    # --- memory ---

    def allocate(self, size: int) -> torch.Tensor:
        """(size,) uint8 of poison, a plain tensor; given back when its storage goes."""
        if size == 0:
            return torch.empty(0, dtype=torch.uint8)
        room = size + ALIGNMENT
        step = max(ALIGNMENT, 1 << max(room.bit_length() - 4, 0))  # few sizes, which fit again
        room = -(-room // step) * step
        found = self._free.get(room)
        if found:
            offset = found.pop()
        elif self._end + room > SIZE:
            raise torch.OutOfMemoryError(f"{size} bytes on a GPU that is made up, of {SIZE}")
        else:
            offset, self._end = self._end, self._end + room
        memory = self.bytes[offset : offset + size]
        memory.fill(POISON)
        self.live[offset] = size
        self.count += 1
        self.allocated += size
        self.peak = max(self.peak, self.allocated)
        weakref.finalize(memory, self._give_back, offset, size, room).atexit = False
        return torch.frombuffer(memory, dtype=torch.uint8)

    def _give_back(self, offset: int, size: int, room: int) -> None:
        self.bytes[offset : offset + size].fill(POISON)
        del self.live[offset]
        self.allocated -= size
        self._free.setdefault(room, []).append(offset)

    def memory(self) -> list[torch.Tensor]:
        """Everything that is allocated, as plain bytes."""
        return [
            torch.from_numpy(self.bytes[offset : offset + size])
            for offset, size in self.live.copy().items()
        ]

    def owns(self, x: torch.Tensor) -> bool:
        """Whether a tensor lies in here."""
        with torch._C.DisableTorchFunction():
            return 0 <= x.untyped_storage().data_ptr() - self.base < SIZE

    def place(self, x: torch.Tensor, filled: bool = True) -> DeviceTensor:
        """A plain tensor's storage in new memory of the device; of poison unless ``filled``."""
        x = x.detach()
        storage = x.untyped_storage()
        raw = self.allocate(storage.nbytes())
        if filled and storage.nbytes():
            raw.copy_(torch.empty(0, dtype=torch.uint8).set_(storage))
        found = torch.empty(0, dtype=x.dtype)
        found.set_(raw.untyped_storage(), x.storage_offset(), x.size(), x.stride())
        return found.as_subclass(DeviceTensor)

    # --- operations ---

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        handler = self._handlers.get(func)
        if handler is not None:
            return handler(*args, **kwargs)
        if "device" in kwargs:
            here = is_cuda(kwargs["device"])
            kwargs = {**kwargs, "device": "cpu" if here else kwargs["device"]}
            given = kwargs["device"] is not None
        else:
            here = given = False
        if kwargs.get("pin_memory"):
            kwargs = {**kwargs, "pin_memory": False}
        flat = list(_tensors((args, kwargs)))
        mine = [isinstance(x, DeviceTensor) for x in flat]
        if not given:
            here = any(mine)
        if any(mine):
            self._check(func, flat, mine, args, kwargs)
        elif here and func in (torch.tensor, torch.as_tensor, torch.asarray):
            self._wait(func)
        if self.captured is not None and (here or any(mine)) and func not in METADATA:
            return self._captured(func, args, kwargs, flat)
        if any(mine):
            self.kernels += _in_place(func, kwargs)
        return self._result(func(*args, **kwargs), flat, here, func not in FILLED)

    def _result(self, found: Any, given: list[torch.Tensor], here: bool, filled: bool) -> Any:
        """Results of an operation, those that are new in the arena if they belong ``here``."""
        if isinstance(found, torch.Tensor):
            if any(found is x for x in given):
                return found
            if not here:
                return found.clone() if isinstance(found, DeviceTensor) else found
            if isinstance(found, DeviceTensor):
                return found
            return (
                found.as_subclass(DeviceTensor) if self.owns(found) else self.place(found, filled)
            )
        if isinstance(found, (tuple, list)) and any(isinstance(x, torch.Tensor) for x in found):
            parts = [self._result(x, given, here, filled) for x in found]
            return type(found)(parts) if type(found).__name__ != "Size" else found
        return found

    def _check(
        self,
        func: Any,
        flat: list[torch.Tensor],
        mine: list[bool],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> None:
        """Refuse what a GPU refuses."""
        others = [x for x, here in zip(flat, mine, strict=True) if not here and x.dim()]
        if others and (func not in ACROSS or (func is T.__getitem__ and not mine[0])):
            shapes = ", ".join(str(tuple(x.shape)) for x in others)
            raise RuntimeError(
                "Expected all tensors to be on the same device, but found at least two devices, cuda:0 and cpu! "
                f"({getattr(func, '__name__', func)} with {shapes} on the CPU)"
            )
        waits = func in WAITS or (
            func is T.__getitem__ and any(x.dtype in (torch.bool, torch.uint8) for x in flat[1:])
        )
        blocking = (
            func is T.copy_ and others and not (kwargs.get("non_blocking") or args[2:] == (True,))
        )
        if waits or blocking:
            self._wait(func)

    def _wait(self, func: Any) -> None:
        name = getattr(func, "__name__", str(func))
        if self.captured is not None:
            raise RuntimeError(
                f"CUDA error: operation not permitted when stream is capturing ({name})"
            )
        if self.waiting == "error":
            raise RuntimeError(f"called a synchronizing CUDA operation ({name})")

    def _captured(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], flat: list[torch.Tensor]
    ) -> Any:
        """Note an operation of a graph; what it gives is memory that a replay writes."""
        assert self.captured is not None

        def step(into: torch.Tensor | None = None) -> None:
            self.kernels += 1
            found = func(*args, **kwargs)
            if into is not None:
                into.copy_(found)

        if _in_place(func, kwargs):
            self.captured.append(step)
            return kwargs.get("out", None if func is T.__setitem__ else args[0])
        found = func(*args, **kwargs)
        made = self._result(found, flat, True, True)
        fresh = isinstance(found, torch.Tensor) and not self.owns(found) and found.numel() > 0
        if fresh and func not in FILLED:
            self.captured.append(lambda: step(made))
        return made

    # --- functions that know of devices ---

    @staticmethod
    def _device(x: torch.Tensor) -> torch.device:
        return DEVICE if isinstance(x, DeviceTensor) else T.device.__get__(x)  # type: ignore[attr-defined]

    @staticmethod
    def _numpy(x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if isinstance(x, DeviceTensor):
            raise TypeError(
                "can't convert cuda:0 device type tensor to numpy. "
                "Use Tensor.cpu() to copy the tensor to host memory first."
            )
        return T.numpy(x) if not args else T.__array__(x, *args, **kwargs)

    def _format(self, x: torch.Tensor, spec: str) -> str:
        if not isinstance(x, DeviceTensor):
            return T.__format__(x, spec)
        self._wait(T.__format__)
        return T.__format__(x.as_subclass(torch.Tensor), spec)

    def _copied(self, x: torch.Tensor, memo: dict[int, Any]) -> Any:
        found = memo.get(id(x))
        if found is None:
            here = isinstance(x, DeviceTensor)
            found = memo[id(x)] = self.place(x) if here else T.__deepcopy__(x, memo)
        return found

    def _cuda(self, x: torch.Tensor, device: Any = "cuda", *_: Any, **kwargs: Any) -> Any:
        return self._to(x, "cuda" if device is None else device, **kwargs)

    def _to(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """``Tensor.to`` in all its forms."""
        target = kwargs.get("device")
        names = list(args)
        if names and isinstance(names[0], (str, int, torch.device)) and type(names[0]) is not bool:
            target = names.pop(0)
            kwargs |= dict(zip(("dtype", "non_blocking", "copy"), names, strict=False))
            names = []
        other = names[0] if names and isinstance(names[0], torch.Tensor) else kwargs.get("other")
        mine = isinstance(x, DeviceTensor)
        if other is not None:
            there = isinstance(other, DeviceTensor)
        else:
            there = mine if target is None else is_cuda(target)
        kwargs = {k: v for k, v in kwargs.items() if k != "device" and v is not None}
        if mine != there:
            if not kwargs.get("non_blocking"):
                self._wait(T.cpu if mine else T.cuda)
            assert self.captured is None, "copies from device to device are not captured here"
        if target is not None and torch.device(target).type not in ("cpu", "cuda"):
            return T.to(x, target, *names, **kwargs)
        if self.captured is not None and mine:
            return self._captured(T.to, (x, *names), kwargs, [x])
        found = T.to(x, *names, **kwargs)
        if mine == there:
            return self._result(found, [x], there, True)
        if there:
            return self.place(found)
        with torch._C.DisableTorchFunction():
            return (
                found.clone().as_subclass(torch.Tensor) if self.owns(found) or found is x else found
            )
