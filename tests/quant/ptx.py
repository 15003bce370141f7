"""Runs a kernel's PTX on the CPU, thread by thread, so that its arithmetic is tested without a GPU.

A block's threads are arrays; each has its own place in the program. The rearmost ones step first, which brings threads
together again behind every branch, and a barrier waits for all that live. Only instructions that the kernels here
compile to are known, any other is an error; so is a warp-wide one without its whole warp, and any access to memory that
was not given.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from epicute.quant.reference import encode_e4m3

NATIVE = {
    **{f"{k}{n}": np.dtype(f"u{n // 8}") for k in "bu" for n in (8, 16, 32, 64)},
    **{f"s{n}": np.dtype(f"i{n // 8}") for n in (8, 16, 32, 64)},
    "f32": np.dtype(np.float32),
    "pred": np.dtype(np.uint8),
}
UNSIGNED = {n: np.dtype(f"u{n}") for n in (1, 2, 4, 8)}


class Memory:
    """The tensors of a launch at their own addresses; nothing beside them may be touched."""

    def __init__(self, *tensors: torch.Tensor) -> None:
        self.spans: list[tuple[int, np.ndarray]] = []
        for tensor in tensors:
            size = tensor.element_size()
            last = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
            raw = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
            start = tensor.storage_offset() * size
            if tensor.numel():
                found = raw[start : start + (last + 1) * size].numpy()
                self.spans.append((tensor.data_ptr(), found))

    def at(self, addresses: np.ndarray, size: int) -> tuple[np.ndarray, np.ndarray]:
        """(threads, size) places of aligned elements, and the bytes of the one tensor that has them all."""
        assert (addresses % size == 0).all(), f"an address that is no multiple of {size}"
        for start, store in self.spans:
            first = addresses - start
            if ((first >= 0) & (first + size <= len(store))).all():
                return first[:, None] + np.arange(size), store
        raise AssertionError("memory that was not given")


class Program:
    """A PTX entry: instructions as (guard, opcode, operands), labels and parameters."""

    def __init__(self, text: str) -> None:
        text = re.sub(r"//[^\n]*", "", text)
        head, body = re.search(
            r"\.entry\s+\S+\((.*?)\)\s*(?:\.\w+[^{]*)?\{(.*)\}", text, re.S
        ).groups()  # type: ignore[union-attr]
        threads = re.search(r"\.reqntid\s+(\d+)", text)
        assert threads is not None
        self.threads = int(threads[1])
        self.params = {name: i for i, name in enumerate(re.findall(r"(\S*_param_\d+)", head))}
        self.code: list[tuple[str, str, list[str]]] = []
        self.labels: dict[str, int] = {}
        self._parse(body)
        self.barriers = np.array([opcode == "bar.sync" for _, opcode, _ in self.code] + [False])
        self.immediates: dict[tuple[str, str], np.ndarray] = {}

    def _parse(self, body: str) -> None:
        scopes: list[dict[str, str]] = [{}]
        count = 0
        while body := body.lstrip():
            if label := re.match(r"(\$\w+):", body):
                self.labels[label[1]] = len(self.code)
                body = body[label.end() :]
            elif body[0] in "{}":
                scopes.append({}) if body[0] == "{" else scopes.pop()
                body = body[1:]
            else:
                statement, _, body = body.partition(";")
                if statement.startswith(".reg") and len(scopes) > 1:
                    for name in re.findall(r"\w+", statement.split(None, 2)[2]):
                        scopes[-1][name] = f"{name}:{count}"
                        count += 1
                elif not statement.startswith("."):
                    self._add(statement, scopes)

    def _add(self, statement: str, scopes: list[dict[str, str]]) -> None:
        guard, opcode, rest = re.fullmatch(r"(?:@(\S+)\s+)?(\S+)\s*(.*)", statement, re.S).groups()  # type: ignore[union-attr]
        operands = re.findall(r"\{[^}]*\}|\[[^\]]*\]|[^,\s]+", rest)
        for scope in scopes:
            pattern = re.compile(r"(?<![\w%$.])(\w+)(?![\w.])")
            operands = [pattern.sub(lambda m: scope.get(m[1], m[1]), x) for x in operands]  # noqa: B023
        self.code.append((guard or "", opcode, operands))

    def immediate(self, operand: str, kind: str) -> np.ndarray:
        """A value that is the same in every block."""
        found = self.immediates.get((operand, kind))
        if found is None:
            found = self.immediates[operand, kind] = self._immediate(operand, NATIVE[kind])
        return found

    def _immediate(self, operand: str, native: np.dtype) -> np.ndarray:
        if operand == "%tid.x":
            return np.arange(self.threads).astype(native)
        if operand.startswith("__dynamic_shmem"):
            return np.zeros(self.threads, native)
        if re.fullmatch(r"0[fF][0-9A-Fa-f]{8}", operand):
            value = int(operand[2:], 16)
        else:
            assert re.fullmatch(r"-?(\d+|0x[0-9A-Fa-f]+)U?", operand), f"{operand} is not set"
            value = int(operand.rstrip("U"), 0)
        bits = 8 * native.itemsize
        return np.full(self.threads, value % (1 << bits), UNSIGNED[native.itemsize]).view(native)


class Block:
    """The threads of one block, running."""

    def __init__(
        self, program: Program, memory: Memory, arguments: tuple[int, ...], block: int
    ) -> None:
        self.program, self.memory, self.arguments, self.block = program, memory, arguments, block
        self.registers: dict[str, np.ndarray] = {}
        self.shared = np.zeros(1 << 16, np.uint8)
        self.pc = np.zeros(program.threads, np.int64)
        self.live = np.ones(program.threads, bool)
        self.on = self.live
        self.type = ""

    def run(self) -> None:
        code = self.program.code
        while self.live.any():
            waits = self.program.barriers[self.pc] & self.live
            ready = self.live & ~waits
            free = ready if ready.any() else self.live
            pc = int(self.pc[free].min())
            self.on = free & (self.pc == pc)
            assert ready.any() or (self.on == self.live).all(), "two barriers"
            guard, opcode, operands = code[pc]
            self.pc[self.on] += 1
            if guard:
                name = guard.lstrip("!")
                self.on = self.on & ((self.get(name, "pred") != 0) ^ guard.startswith("!"))
            if self.on.any():
                self._step(opcode, operands)

    def get(self, operand: str, kind: str) -> np.ndarray:
        """An operand's value in all threads."""
        native = NATIVE[kind]
        if operand in self.registers:
            return self.registers[operand].astype(UNSIGNED[native.itemsize]).view(native)
        if operand == "%ctaid.x":
            return np.full(self.program.threads, self.block).astype(native)
        return self.program.immediate(operand, kind)

    def set(self, name: str, values: np.ndarray, kind: str) -> None:
        """Set a register in the threads that are on."""
        native = NATIVE[kind]
        values = np.ascontiguousarray(np.broadcast_to(values, self.live.shape).astype(native))
        register = self.registers.setdefault(name, np.zeros(len(self.live), np.uint64))
        register[self.on] = values.view(UNSIGNED[native.itemsize])[self.on]

    def _address(self, operand: str) -> np.ndarray:
        base, offset = re.fullmatch(r"\[([^+\]]+)(?:\+(-?\d+))?\]", operand).groups()  # type: ignore[union-attr]
        return (self.get(base, "s64") + int(offset or 0))[self.on]

    def _step(self, opcode: str, operands: list[str]) -> None:
        name, *parts = opcode.split(".")
        self.type = parts[-1] if parts and parts[-1] in NATIVE else ""
        if name == "griddepcontrol" or opcode == "bar.sync":
            return
        if name == "ret":
            self.live = self.live & ~self.on
        elif name == "bra":
            self.pc[self.on] = self.program.labels[operands[0]]
        elif name in ("ld", "st", "atom"):
            getattr(self, f"_{name}")(parts, operands)
        elif name in ("shfl", "redux"):
            whole = self.on.reshape(-1, 32)
            assert (whole.all(axis=1) == whole.any(axis=1)).all(), (
                f"{opcode} without the whole warp"
            )
            getattr(self, f"_{name}")(parts, operands)
        elif name == "cvt":
            self._convert(parts, operands)
        elif name == "mov" and any(x.startswith("{") for x in operands):
            self._regroup(operands)
        elif name == "setp":
            a, b = (self.get(x, self.type) for x in operands[1:])
            self.set(operands[0], COMPARED[parts[0]](a, b), "pred")
        elif name == "selp":
            a, b = (self.get(x, self.type) for x in operands[1:3])
            self.set(operands[0], np.where(self.get(operands[3], "pred") != 0, a, b), self.type)
        elif parts[0] == "wide":
            big = self.type[0] + "64"
            a, b = (self.get(x, self.type).astype(NATIVE[big]) for x in operands[1:])
            self.set(operands[0], a * b, big)
        else:
            key = ".".join([name, *[p for p in parts[:-1] if p == "NaN"]])
            assert key in COMPUTED, f"{opcode} is not known"
            given = [
                self.get(x, "u32" if name[:2] == "sh" and i else self.type)
                for i, x in enumerate(operands[1:])
            ]
            with np.errstate(all="ignore"):
                self.set(operands[0], COMPUTED[key](*given), self.type)

    def _ld(self, parts: list[str], operands: list[str]) -> None:
        if parts[0] == "param":
            value = self.arguments[self.program.params[operands[1][1:-1]]]
            native = NATIVE[self.type]
            self.set(
                operands[0], np.full(len(self.live), value, np.int64).astype(native), self.type
            )
            return
        names, places, store = self._vector(parts, operands[0], operands[1])
        size = NATIVE[self.type].itemsize
        kind = {"b": "u", "u": "u", "s": "s"}[self.type[0]] + self.type[1:]
        for i, register in enumerate(names):
            raw = np.ascontiguousarray(store[places[:, i * size : (i + 1) * size]]).view(
                NATIVE[kind]
            )[:, 0]
            wide = "s64" if kind == "s32" else kind  # a signed load extends to its register
            values = np.zeros(len(self.live), NATIVE[wide])
            values[self.on] = raw
            self.set(register, values, wide)

    def _st(self, parts: list[str], operands: list[str]) -> None:
        names, places, store = self._vector(parts, operands[1], operands[0])
        size = NATIVE[self.type].itemsize
        for i, source in enumerate(names):
            raw = np.ascontiguousarray(self.get(source, self.type)[self.on])
            store[places[:, i * size : (i + 1) * size]] = raw.view(np.uint8).reshape(-1, size)

    def _vector(
        self, parts: list[str], names: str, address: str
    ) -> tuple[list[str], np.ndarray, np.ndarray]:
        """Registers of a load or store, the places of their bytes, and the memory these are in."""
        found = re.findall(r"[^{},\s]+", names)
        size, first = NATIVE[self.type].itemsize * len(found), self._address(address)
        if parts[0] == "shared":
            assert ((first >= 0) & (first + size <= len(self.shared)) & (first % size == 0)).all()
            return found, first[:, None] + np.arange(size), self.shared
        assert parts[0] == "global", parts
        return found, *self.memory.at(first, size)

    def _atom(self, parts: list[str], operands: list[str]) -> None:
        native = NATIVE[parts[2]]
        places, store = self.memory.at(self._address(operands[1]), native.itemsize)
        for place, value in zip(places, self.get(operands[2], parts[2])[self.on], strict=True):
            cell = store[place].view(native)
            found = cell + value if parts[1] == "add" else np.maximum(cell, value)
            store[place] = found.astype(native).view(np.uint8)

    def _shfl(self, parts: list[str], operands: list[str]) -> None:
        lane, other = np.arange(len(self.live)) % 32, self.get(operands[2], "u32").astype(np.int64)
        source = lane ^ other if parts[1] == "bfly" else other
        self.set(
            operands[0],
            self.get(operands[1], "b32")[np.arange(len(self.live)) - lane + source],
            "b32",
        )

    def _redux(self, parts: list[str], operands: list[str]) -> None:
        warps = self.get(operands[1], self.type).reshape(-1, 32)
        found = warps.max(axis=1) if parts[1] == "max" else warps.sum(axis=1, dtype=warps.dtype)
        self.set(operands[0], np.repeat(found, 32), self.type)

    def _regroup(self, operands: list[str]) -> None:
        target, source = (re.findall(r"[^{},\s]+", x) for x in operands)
        if len(target) == 2:
            whole = self.get(source[0], "u32")
            self.set(target[0], whole & 0xFFFF, "u16")
            self.set(target[1], whole >> 16, "u16")
        else:
            low, high = (self.get(x, "u16").astype(np.uint32) for x in source)
            self.set(target[0], low | high << 16, "u32")

    def _convert(self, parts: list[str], operands: list[str]) -> None:
        to, of = parts[-2:]
        if to == "e4m3x2":
            high, low = (encode_e4m3(self.get(x, "f32")).astype(np.uint16) for x in operands[1:])
            self.set(operands[0], low | high << 8, "u16")
        elif to in ("bf16x2", "f16x2"):
            high, low = (rounded(self.get(x, "f32"), to) for x in operands[1:])
            self.set(operands[0], low | high << 16, "u32")
        elif of == "f16":
            self.set(
                operands[0], self.get(operands[1], "u16").view(np.float16).astype(np.float32), to
            )
        else:
            self.set(operands[0], self.get(operands[1], of).astype(NATIVE[to]), to)


def rounded(x: np.ndarray, kind: str) -> np.ndarray:
    """uint32 patterns of float32 rounded to bf16 or f16; NaN is 0x7fff."""
    dtype = torch.bfloat16 if kind == "bf16x2" else torch.float16
    found = torch.from_numpy(x.copy()).to(dtype).view(torch.int16).numpy().view(np.uint16)
    return np.where(np.isnan(x), 0x7FFF, found).astype(np.uint32)


def permuted(a: np.ndarray, b: np.ndarray, selector: np.ndarray) -> np.ndarray:
    """Four bytes of ``a`` and, from number 4 on, ``b``, by the selector's nibbles; no sign is spread."""
    both = a.astype(np.uint64) | b.astype(np.uint64) << np.uint64(32)
    found = np.zeros_like(both)
    for i in range(4):
        number = (selector >> 4 * i & 0xF).astype(np.uint64)
        assert (number < 8).all()
        found |= (both >> number * np.uint64(8) & np.uint64(0xFF)) << np.uint64(8 * i)
    return found.astype(np.uint32)


COMPARED: dict[str, Callable[[Any, Any], Any]] = {
    "eq": np.equal,
    "ne": np.not_equal,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
    "leu": lambda a, b: ~(a > b),
    "neu": np.not_equal,
    "nan": lambda a, b: np.isnan(a) | np.isnan(b),
}
COMPUTED: dict[str, Callable[..., Any]] = {
    "mov": lambda a: a,
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "mad": lambda a, b, c: a * b + c,
    "neg": np.negative,
    "abs": np.abs,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
    "not": lambda a: (a == 0) if a.dtype == np.uint8 else ~a,
    "shl": lambda a, n: a << n.astype(a.dtype),
    "shr": lambda a, n: a >> n.astype(a.dtype),
    "min": np.fmin,
    "max": np.fmax,
    "max.NaN": np.maximum,
    "prmt": permuted,
    "rcp": lambda a: np.float32(1) / a,
    "sqrt": np.sqrt,
    "div": lambda a, b: a / b if a.dtype == np.float32 else np.trunc(a / b).astype(a.dtype),
}


def ptx_of(kernel: Any) -> str:
    """What a kernel of ``epicute.jit`` compiles to, before ptxas."""
    import tempfile

    import cutlass.cute as cute

    function, arguments = kernel.trace()
    with tempfile.TemporaryDirectory() as folder:
        options = (
            f"--enable-tvm-ffi --gpu-arch {kernel.key.target.arch} --keep-ptx --dump-dir {folder}"
        )
        return str(cute.compile(function, *arguments, options=options).__ptx__)


class Emulated:
    """A kernel that runs on tensors of the CPU; ``blocks`` is the place of the number of blocks in its arguments."""

    def __init__(self, kernel: Any, blocks: int = -1) -> None:
        self.program, self.blocks = Program(ptx_of(kernel)), blocks

    def launch(self, arguments: tuple[int, ...], *tensors: torch.Tensor) -> None:
        """Run all blocks, one after the other; ``tensors`` are all memory they may touch."""
        memory = Memory(*tensors)
        for block in range(arguments[self.blocks]):
            Block(self.program, memory, arguments, block).run()
