"""PTX text to instructions: scopes resolved, registers numbered by width, labels and parameters placed."""

from __future__ import annotations

import re
from dataclasses import dataclass

__all__ = ["CLASSES", "PARAMS", "SHARED", "Instruction", "Param", "Program", "known"]

CLASSES = {"pred": "p", "8": "h", "16": "h", "32": "u", "64": "U"}
"""Register files: predicates, 16, 32 and 64 bits."""

PARAMS = 2 << 56
"""Where parameters lie in the generic address space."""

SHARED = 1 << 56
"""Where shared memory lies in the generic address space."""

RESERVED = 1024
"""Bytes at the start of shared memory that are the system's, on Hopper."""

TOKEN = re.compile(r"\s*(?:([\w$]+):(?!:)|([{}])|([^;{}\s][^;]*);)")
OPERAND = re.compile(r"\[[^\]]*\]|\{[^}]*\}|[^,\s]+")
NAME = re.compile(r"(?<![\w%$.])([A-Za-z_]\w*)(?![\w.])")


@dataclass
class Instruction:
    """One instruction. ``guard``: predicate register, with ``!`` in front where it is negated, or empty."""

    guard: str
    opcode: str
    operands: list[str]
    target: int = -1

    @property
    def name(self) -> str:
        """The opcode up to its first dot."""
        return self.opcode.split(".", 1)[0]

    @property
    def parts(self) -> list[str]:
        """What follows the name, dot by dot."""
        return self.opcode.split(".")[1:]

    def __str__(self) -> str:
        guard = f"@{self.guard} " if self.guard else ""
        return f"{guard}{self.opcode} {', '.join(self.operands)}"[:200]


def known(x: Instruction, *conditions: object) -> None:
    """Refuse a form of an instruction that is not emulated."""
    if not all(conditions):
        raise AssertionError(f"{x.opcode} is not known: {x}")


@dataclass(frozen=True)
class Param:
    """A parameter of the entry: bytes from ``offset`` of parameter space; ``array`` where it is declared as such."""

    name: str
    offset: int
    size: int
    array: bool


class Program:
    """A PTX entry.

    Attributes:
        code: instructions. labels: index of the instruction behind each label. threads: of a CTA.
        registers: (class, number) of each register's name; counts: registers of each class.
        registers_per_thread: that a launch gives, before warps trade them.
        waits: whether it waits for the kernel in front of it.
        params: by name, in order. symbols: addresses of parameters (generic) and of shared arrays (in shared memory).
        static: bytes of shared memory in front of the dynamic ones.
    """

    def __init__(self, text: str) -> None:
        text = re.sub(r"//[^\n]*|/\*.*?\*/", "", text, flags=re.S)
        found = re.search(r"\.entry\s+(\S+?)\s*\((.*?)\)\s*((?:\.\w+[^{]*)?)\{(.*)\}", text, re.S)
        assert found is not None, "no entry with parameters"
        self.name, head, directives, body = found.groups()
        threads = re.search(r"\.reqntid\s+(\d+)(?:\s*,\s*(\d+))?(?:\s*,\s*(\d+))?", directives)
        assert threads is not None, "the entry does not say how many threads it has"
        self.block = tuple(int(n or 1) for n in threads.groups())
        self.threads = self.block[0] * self.block[1] * self.block[2]
        most = re.search(r"\.maxnreg\s+(\d+)", directives)
        ctas = re.search(r"\.minnctapersm\s+(\d+)", directives)
        share = 65536 // (self.threads * int(ctas[1] if ctas else 1))
        self.registers_per_thread = int(most[1]) if most else min(share // 8 * 8, 256)
        self.params = self._parameters(head)
        self.registers: dict[str, tuple[str, int]] = {}
        self.counts = dict.fromkeys("phuU", 0)
        self.symbols = {p.name: PARAMS + p.offset for p in self.params.values()}
        self.static = RESERVED
        self._shared(text[: found.start(4)])
        self.code: list[Instruction] = []
        self.labels: dict[str, int] = {}
        self._branches: list[tuple[Instruction, list[dict[str, int]]]] = []
        self._parse(body)
        self.written = self._written()
        self.waits = any(x.opcode == "griddepcontrol.wait" for x in self.code)

    def _parameters(self, head: str) -> dict[str, Param]:
        found: dict[str, Param] = {}
        end = 0
        pattern = r"\.param\s+(?:\.align\s+(\d+)\s+)?\.(\w+)\s+(?:\.ptr\s+)?(?:\.\w+\s+)*(\w+)(?:\[(\d+)\])?"
        for align, kind, name, count in re.findall(pattern, head):
            size = int(re.sub(r"\D", "", kind)) // 8
            step = max(int(align or 1), size)
            end = -(-end // step) * step
            found[name] = Param(name, end, size * int(count or 1), bool(count))
            end += found[name].size
        self.param_bytes = end
        return found

    def _shared(self, text: str) -> None:
        """Place shared arrays, the one without a size behind all others."""
        dynamic = []
        for line in re.findall(
            r"(\.extern\s+)?\.shared\s+(?:\.align\s+(\d+)\s+)?\.\w?(\d+)\s+(\w+)\[(\d*)\]", text
        ):
            _, align, width, name, count = line
            if not count:
                dynamic.append((name, int(align or 1)))
                continue
            step = int(align or 1)
            self.static = -(-self.static // step) * step
            self.symbols[name] = self.static
            self.static += int(count) * int(width) // 8
        for name, align in dynamic:
            self.symbols[name] = -(-self.static // align) * align

    def _parse(self, body: str) -> None:
        scopes: list[dict[str, str]] = [{}]
        places: list[dict[str, int]] = [self.labels]
        at = 0
        while found := TOKEN.match(body, at):
            at = found.end()
            label, brace, statement = found.groups()
            if label:
                places[-1][label] = len(self.code)
            elif brace == "{":
                scopes.append({})
                places.append({})
            elif brace:
                scopes.pop()
                places.pop()
            elif statement.startswith(".reg"):
                self._declare(statement, scopes)
            elif statement.startswith(".shared"):
                self._shared(statement)
            elif not statement.startswith("."):
                self._add(statement, scopes, places)
        assert not body[at:].strip(), f"not understood: {body[at : at + 80]!r}"
        for instruction, around in self._branches:
            name = instruction.operands[0]
            here = [scope[name] for scope in reversed(around) if name in scope]
            assert here, f"no label {name}"
            instruction.target = here[0]

    def _declare(self, statement: str, scopes: list[dict[str, str]]) -> None:
        kind, names = re.fullmatch(r"\.reg\s+\.(\w+)\s+(.*)", statement, re.S).groups()  # type: ignore[union-attr]
        file = CLASSES[kind if kind == "pred" else re.sub(r"\D", "", kind)]
        for name, count in re.findall(r"([\w%$]+)(?:<(\d+)>)?", names):
            for number in range(int(count)) if count else [-1]:
                plain = name if number < 0 else f"{name}{number}"
                full = plain if len(scopes) == 1 else f"{plain}:{len(self.registers)}"
                if len(scopes) > 1:
                    scopes[-1][plain] = full
                self.registers[full] = (file, self.counts[file])
                self.counts[file] += 1

    def _add(
        self, statement: str, scopes: list[dict[str, str]], places: list[dict[str, int]]
    ) -> None:
        guard, opcode, rest = re.fullmatch(
            r"(?:@(\S+)\s+)?(\S+)\s*(.*)", " ".join(statement.split()), re.S
        ).groups()  # type: ignore[union-attr]
        operands = OPERAND.findall(rest)
        branch = opcode.split(".")[0] == "bra"
        if len(scopes) > 1:

            def inner(found: re.Match[str]) -> str:
                return next((s[found[1]] for s in reversed(scopes) if found[1] in s), found[1])

            if not branch:
                operands = [NAME.sub(inner, x) for x in operands]
            guard = NAME.sub(inner, guard) if guard else guard
        instruction = Instruction(guard or "", opcode, operands)
        if branch:
            self._branches.append((instruction, list(places)))
        self.code.append(instruction)

    def _written(self) -> set[str]:
        """Registers that anything writes: a read of another one is an error."""
        found: set[str] = set()
        for x in self.code:
            if x.operands and x.name not in ("st", "red", "bra"):
                found |= set(re.findall(r"[\w%$:]+", x.operands[0]))
                # Two destinations: shfl and elect, and vectors on the other side of a store.
        return found
