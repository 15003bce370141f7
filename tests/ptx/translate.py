"""Instructions to Python: arithmetic becomes lines of NumPy on the registers of a warp, the rest calls of handlers.

A run of instructions up to a branch is one Python function. It exists in two forms: for a whole warp, and for a mask
``m`` of lanes. Registers are rows of 32 lanes that are written in place.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from tests.ptx import convert
from tests.ptx.arithmetic import LANES, Arithmetic
from tests.ptx.floats import flush
from tests.ptx.program import Instruction, Program

__all__ = ["Translator", "blocks_on", "is_collective"]

IGNORED = ("prefetch", "prefetchu", "discard", "nanosleep", "membar", "applypriority",
           "pmevent")  # fmt: skip
COLLECTIVE = ("shfl", "vote", "redux", "elect", "match", "ldmatrix", "stmatrix", "movmatrix", "mma", "wgmma",
              "setmaxnreg")  # fmt: skip
ENDS = ("bra", "ret", "exit", "trap")


def is_collective(x: Instruction) -> bool:
    """Whether all lanes of a mask must come to it together."""
    return x.name in COLLECTIVE or x.opcode.startswith(("bar.", "barrier."))


def blocks_on(x: Instruction) -> bool:
    """Whether the warp may have to wait behind it."""
    if x.opcode.startswith(("bar.warp", "bar.arrive", "barrier.arrive", "barrier.cta.arrive")):
        return False
    if x.opcode.startswith("barrier.cluster"):
        return "wait" in x.parts
    return x.name in ("bar", "barrier") or x.opcode.startswith("setmaxnreg.inc")


class Translator(Arithmetic):
    """The functions of a program's runs, made when first needed.

    ``handlers``: by instruction, what makes of it a function of (warp, mask); see ``machine``.
    """

    def __init__(
        self, program: Program, handler: Callable[[Instruction], Callable[..., Any]]
    ) -> None:
        self.program, self._handler = program, handler
        self.numbers = {}
        self._steps: dict[int, int] = {}
        self.space: dict[str, Any] = {
            "np": np, "K": [], "H": [], "convert": convert, "flush": flush, "fma": convert.fma,
            "ALL": b"\1" * LANES, "NONE": b"\0" * LANES, "copyto": np.copyto,
        }  # fmt: skip
        self._made: dict[tuple[int, bool], Callable[..., Any]] = {}
        self._leaders = {x.target for x in program.code if x.target >= 0}

    def run(self, pc: int, masked: bool) -> Callable[..., Any]:
        """The function of the run that starts at ``pc``."""
        found = self._made.get((pc, masked))
        if found is None:
            found = self._made[pc, masked] = self._make(pc, masked)
        return found

    def _make(self, pc: int, masked: bool) -> Callable[..., Any]:
        lines: list[str] = []
        code = self.program.code
        at = pc
        while True:
            assert at < len(code), "the program runs past its end"
            x = code[at]
            if at > pc and (at in self._leaders or (masked and is_collective(x))):
                lines.append(f"w.go(m, {at})" if masked else f"return {at}")
                break
            if x.name in ENDS:
                lines += self._end(x, at, masked)
                break
            lines += self._one(x, at, masked)
            at += 1
            if blocks_on(x):
                lines.append(f"w.go(m, {at})" if masked else f"return {at}")
                break
        names = "p, h, hs, he, u, s, f, U, S, F = w.lists"
        body = "\n    ".join([names, *lines])
        exec(f"def run(w, m):\n    {body}", self.space)
        return self.space.pop("run")

    def _end(self, x: Instruction, at: int, masked: bool) -> list[str]:
        if x.name == "trap":
            return [f"raise AssertionError('trap at {at}')"]
        if x.name == "bra":
            if not x.guard:
                return [f"w.go(m, {x.target})" if masked else f"return {x.target}"]
            taken = self._guard(x.guard)
            if masked:
                return [f"w.fork(m, {taken}, {x.target}, {at + 1})"]
            yes, no = (x.target, at + 1) if not x.guard.startswith("!") else (at + 1, x.target)
            register = self._register(x.guard.lstrip("!"))
            return [
                f"b = {register}.tobytes()",
                f"if b == ALL: return {yes}",
                f"if b == NONE: return {no}",
                f"return w.fork(None, {taken}, {x.target}, {at + 1})",
            ]
        if x.guard:
            mask = self._guard(x.guard)
            return [f"return w.leave(m, {mask}, {at + 1})"]
        return ["return w.leave(m, None, 0)"]

    def _guard(self, guard: str) -> str:
        register = self._register(guard.lstrip("!"))
        return f"~{register}" if guard.startswith("!") else register

    def _one(self, x: Instruction, at: int, masked: bool) -> list[str]:
        if x.name in IGNORED:
            return []
        mask, lines = ("m" if masked else ""), []
        if x.guard:
            guard = self._guard(x.guard)
            lines.append(f"g = m & {guard}" if masked else f"g = {guard}")
            mask = "g"
        made = self._arithmetic(x, mask)
        if made is None:
            if at not in self._steps:
                self.space["H"].append(self._handler(x))
                self._steps[at] = len(self.space["H"]) - 1
            given = "None if g.all() else g" if x.guard and not masked else mask or "None"
            call = f"w.at = {at}; H[{self._steps[at]}](w, {given})"
            made = [f"if g.any(): {call}"] if x.guard else [call]
        return lines + made
