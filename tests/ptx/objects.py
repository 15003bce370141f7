"""Runs the host code of compiled kernels without a driver: loads an object file, and notes what it would launch.

The object that ``epicute.jit`` exports holds the function that plans call: it checks its arguments, encodes tensor maps
and fills in the launch. Nothing of that is emulated. The object is relocated into memory as a linker would do it, with
functions of this module in place of the CUDA runtime's.
"""

from __future__ import annotations

import ctypes
import mmap
import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

__all__ = ["Host", "Launch"]

ALLOCATED, NO_BITS, SYMBOLS, RELOCATIONS = 0x2, 8, 2, 4
ABSOLUTE_64, PC_32, PLT_32, PC_64, GOT_OFFSET_64, GOT_PC_64, GOT_64 = 1, 2, 4, 24, 25, 29, 27
"""Kinds of relocations (System V ABI for x86-64, table 4.10)."""

OPT_IN_SHARED, STATIC_SHARED = 97, 1
"""``cudaDevAttrMaxSharedMemoryPerBlockOptin`` and ``CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES``."""

SHARED_BYTES = 227 * 1024
CLUSTER, COOPERATIVE, PROGRAMMATIC = 4, 2, 6
"""``cudaLaunchAttributeID`` of what is looked at."""

Pointer = ctypes.c_void_p


@dataclass(frozen=True)
class Launch:
    """What a ``cudaLaunchKernelExC`` was given.

    Attributes:
        kernel: its name. grid, block, cluster: along x, y, z. shared: dynamic bytes. stream: its handle.
        attributes: bytes of each, by number. parameters: addresses of the parameters, valid during the call alone.
    """

    kernel: str
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    shared: int
    stream: int
    attributes: dict[int, bytes]
    parameters: int

    @property
    def cluster(self) -> tuple[int, int, int]:
        """CTAs of a cluster."""
        found = self.attributes.get(CLUSTER)
        return (1, 1, 1) if found is None else struct.unpack_from("<3i", found)

    def parameter(self, number: int, size: int) -> bytes:
        """The bytes of a parameter; to be read before the call returns."""
        place = ctypes.cast(self.parameters, ctypes.POINTER(Pointer))[number]
        assert place, f"{self.kernel}: parameter {number} is missing"
        return ctypes.string_at(place, size)


@dataclass
class Host:
    """An object's functions in memory.

    Attributes:
        code: the object file's bytes. launched: called with each launch, while its parameters are there.
        stream: gives the handle of the current stream.
    """

    code: bytes
    launched: Callable[[Launch], None]
    stream: Callable[[], int] = lambda: 0
    symbols: dict[str, int] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        self._kernels: list[str] = []
        self._error: Exception | None = None
        self._libraries: dict[int, Any] = {}
        self._stand_ins: dict[str, Any] = self._runtime()
        self._load()

    def function(self, symbol: str) -> Any:
        """The tvm-ffi function that was exported as ``symbol``."""
        from tvm_ffi.core import Function

        return Function.__from_extern_c__(
            self.symbols[f"__tvm_ffi_{symbol}"], keep_alive_object=self
        )

    # --- linking ---

    def _load(self) -> None:
        code = self.code
        assert code[:6] == b"\x7fELF\x02\x01", "expected a little-endian ELF file of 64 bits"
        assert struct.unpack_from("<HH", code, 16) == (1, 62), "expected an x86-64 object file"
        (table,) = struct.unpack_from("<Q", code, 40)
        _, count, _ = struct.unpack_from("<HHH", code, 58)
        sections = [struct.unpack_from("<IIQQQQIIQQ", code, table + 64 * i) for i in range(count)]
        symbols = self._symbols(sections)
        places, end = _placed(sections)
        got = -(-end // 64) * 64
        slots = [got + 8 * i for i in range(len(symbols))]
        flags = mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC
        self._memory = mmap.mmap(-1, got + 8 * len(symbols), prot=flags)
        base = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        for i, place in places.items():
            _, kind, _, _, offset, length, *_ = sections[i]
            if kind != NO_BITS:
                self._memory[place : place + length] = code[offset : offset + length]
        addresses = []
        for (name, section, value), slot in zip(symbols, slots, strict=True):
            if name == "_GLOBAL_OFFSET_TABLE_":
                address = base + got
            elif section == 0:
                address = self._outside(name) if name else 0
            else:
                address = base + places[section] + value if section in places else 0
                self.symbols[name] = address
            addresses.append(address)
            struct.pack_into("<Q", self._memory, slot, address)
        for _, kind, _, _, offset, length, _, into, _, _ in sections:
            if kind == RELOCATIONS and into in places:
                for at in range(offset, offset + length, 24):
                    self._relocate(at, places[into], base, got, slots, addresses)

    def _relocate(
        self,
        at: int,
        section: int,
        base: int,
        got: int,
        slots: list[int],
        addresses: list[int],
    ) -> None:
        offset, info, addend = struct.unpack_from("<QQq", self.code, at)
        kind, symbol = info & 0xFFFFFFFF, info >> 32
        place, value, table = base + section + offset, addresses[symbol] + addend, base + got
        if kind in (PC_32, PLT_32):
            struct.pack_into("<i", self._memory, section + offset, value - place)
            return
        found = {
            ABSOLUTE_64: value,
            PC_64: value - place,
            GOT_OFFSET_64: value - table,
            GOT_PC_64: table + addend - place,
            GOT_64: slots[symbol] - got + addend,
        }
        assert kind in found, f"relocation {kind} of x86-64 is not known"
        struct.pack_into("<Q", self._memory, section + offset, found[kind] % 2**64)

    def _symbols(self, sections: list[tuple[int, ...]]) -> list[tuple[str, int, int]]:
        """(name, section, value) of each."""
        table = next(s for s in sections if s[1] == SYMBOLS)
        names = sections[table[6]][4]
        found = []
        for at in range(table[4], table[4] + table[5], 24):
            name, _, _, section, value, _ = struct.unpack_from("<IBBHQQ", self.code, at)
            end = self.code.index(b"\0", names + name)
            found.append((self.code[names + name : end].decode(), section, value))
        return found

    def _outside(self, name: str) -> int:
        """Address of what the object does not define."""
        found = self._stand_ins.get(name)
        if found is None and name.startswith("TVMFFI"):
            found = getattr(_tvm_ffi(), name)
        assert found is not None, f"host code calls {name}, for which there is no stand-in"
        return int(ctypes.cast(found, Pointer).value or 0)

    # --- the runtime ---

    def _runtime(self) -> dict[str, Any]:
        """What the host code calls, by name. None of it fails."""

        def store(value: int, kind: Any, place: int) -> int:
            ctypes.cast(place, ctypes.POINTER(kind))[0] = value
            return 0

        integer, address = ctypes.c_int, Pointer

        def kernel(out: int, library: int, name: int) -> int:
            self._kernels.append(ctypes.string_at(name).decode())
            return store(len(self._kernels), ctypes.c_uint64, out)

        def device(out: int, attribute: int, _: int) -> int:
            assert attribute == OPT_IN_SHARED, f"device attribute {attribute} is not known"
            return store(SHARED_BYTES, integer, out)

        def attribute(out: int, number: int, _: int, __: int) -> int:
            assert number == STATIC_SHARED, f"kernel attribute {number} is not known"
            return store(0, integer, out)

        return {
            "_cudaLibraryLoadData": _called(
                lambda out, *_: store(1, ctypes.c_uint64, out),
                *(address, address, address, address, integer, address, address, integer),
            ),
            "_cudaLibraryGetKernel": _called(kernel, address, address, address),
            "_cudaGetDevice": _called(lambda out: store(0, integer, out), address),
            "_cudaSetDevice": _called(lambda device: int(device != 0), integer),
            "_cudaDeviceGetAttribute": _called(device, address, integer, integer),
            "_cuKernelGetAttribute": _called(attribute, address, integer, address, integer),
            "_cudaFuncSetAttribute": _called(lambda *_: 0, address, integer, integer),
            "_cudaKernelSetAttributeForDevice": _called(
                lambda *_: 0, address, integer, integer, integer
            ),
            "_cudaLaunchKernelEx": _called(self._launch, address, address, address),
            "cuda_dialect_init_library_once": _called(
                self._library, address, address, address, address
            ),
            "cuda_dialect_unload_library_once": _called(lambda *_: 0, address, address),
            "CuteDSLRT_TVMFFISetRaisedCudaError": _called(lambda *_: 0, address, address),
            "TVMFFIEnvGetStream": ctypes.CFUNCTYPE(address, integer, integer)(
                lambda *_: self.stream()
            ),
        }

    def _library(self, state: int, init: int, load: int, _: int) -> int:
        """What happens with the first call of a process."""
        if state in self._libraries:
            return 0
        cell = self._libraries[state] = ctypes.c_void_p()
        where = ctypes.addressof(cell)
        return int(
            ctypes.CFUNCTYPE(ctypes.c_int, Pointer)(init)(where)
            or ctypes.CFUNCTYPE(ctypes.c_int, Pointer, ctypes.c_int)(load)(where, 0)
        )

    def _launch(self, config: int, kernel: int, parameters: int) -> int:
        raw = ctypes.string_at(config, 60)
        sizes = struct.unpack_from("<6I", raw)
        shared, stream, attributes, count = struct.unpack_from("<QQQI", raw, 24)
        found = {}
        for i in range(count):
            number, value = struct.unpack("<i4x64s", ctypes.string_at(attributes + 72 * i, 72))
            found[number] = value
        name = self._kernels[kernel - 1]
        try:
            self.launched(Launch(name, sizes[:3], sizes[3:], shared, stream, found, parameters))
        except Exception as error:  # which cannot pass through compiled code
            self._error = error
        return 0

    def check(self) -> None:
        """Raise what ``launched`` raised since the last check."""
        error, self._error = self._error, None
        if error is not None:
            raise error


def _placed(sections: list[tuple[int, ...]]) -> tuple[dict[int, int], int]:
    """(offset in memory of each section that is there at run time, their end)."""
    places: dict[int, int] = {}
    end = 0
    for i, (_, _, flags, _, _, size, _, _, align, _) in enumerate(sections):
        if flags & ALLOCATED:
            places[i] = -(-end // max(align, 1)) * max(align, 1)
            end = places[i] + size
    return places, end


def _called(function: Callable[..., int], *kinds: Any) -> Any:
    return ctypes.CFUNCTYPE(ctypes.c_int, *kinds)(function)


def _tvm_ffi() -> Any:
    from tvm_ffi.libinfo import find_libtvm_ffi

    return ctypes.CDLL(find_libtvm_ffi())
