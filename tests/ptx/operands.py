"""Values, rows and addresses of operands, for handlers."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np

from tests.ptx.arithmetic import KINDS, LANES
from tests.ptx.program import Program
from tests.ptx.translate import Translator

__all__ = ["ROWS", "Operands"]

ROWS = ("p", "h", "hs", "he", "u", "s", "f", "U", "S", "F")
"""The order of a warp's lists."""

Value = Callable[[Any], np.ndarray]


class Operands:
    """Makes functions of a warp that fetch operands."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self._names = Translator(program, lambda x: lambda w, m: None)

    def row(self, name: str, signed: bool) -> tuple[int, int]:
        """(list, number) of the row of a register that results go to; narrower ones are extended by their sign."""
        assert name in self.program.registers, f"{name} is no register"
        file, number = self.program.registers[name]
        rows = {"h": "hs", "u": "s", "U": "S"}.get(file, file) if signed else file
        return ROWS.index(rows), number

    def number(self, name: str) -> tuple[str, int]:
        """(class, number) of a register that is read."""
        assert name in self.program.registers, f"{name} is no register"
        assert name in self.program.written, f"{name} is not set"
        return self.program.registers[name]

    def value(self, operand: str, kind: str) -> Value:
        """32 values of an operand."""
        file, rows, dtype = KINDS[kind]
        if operand.startswith("!"):
            held = self.value(operand[1:], kind)
            return lambda w: ~held(w)
        if operand in self.program.registers:
            there, number = self.number(operand)
            if there == file and rows:
                at = ROWS.index(rows)
                return lambda w: w.lists[at][number]
            at = ROWS.index(there)
            return lambda w: w.lists[at][number].astype(dtype)
        if operand.startswith("%"):
            return lambda w: w.special(operand).astype(dtype)
        constant = self._names.constant(operand, kind)
        return lambda w: constant

    def address(self, operand: str) -> Value:
        """int64 addresses of ``[register + offset]``."""
        found = re.fullmatch(r"\[\s*([^+\s\]]+)\s*(?:\+\s*(-?\d+))?\s*\]", operand)
        assert found is not None, f"{operand} is no address"
        base, offset = found[1], int(found[2] or 0)
        if base in self.program.registers:
            file, number = self.number(base)
            at = ROWS.index("S" if file == "U" else file)
            if file == "U" and not offset:
                return lambda w: w.lists[at][number]
            return lambda w: w.lists[at][number].astype(np.int64) + offset
        constant = self._names.constant(base, "s64") + offset
        assert constant.shape == (LANES,)
        return lambda w: constant
