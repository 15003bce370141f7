"""Arithmetic on registers as lines of NumPy, for ``translate``.

Registers are rows of 32 lanes that are written in place; a mask is the name of a variable, empty for all lanes.
"""

from __future__ import annotations

import re
from typing import Any

import numpy as np

from tests.ptx.program import SHARED, Instruction, Program

__all__ = ["KINDS", "LANES", "Arithmetic"]

LANES = 32
KINDS: dict[str, tuple[str, str, Any]] = {
    "pred": ("p", "p", np.bool_),
    "b8": ("h", "", np.uint8), "u8": ("h", "", np.uint8), "s8": ("h", "", np.int8),
    "b16": ("h", "h", np.uint16), "u16": ("h", "h", np.uint16), "s16": ("h", "hs", np.int16),
    "f16": ("h", "he", np.float16), "bf16": ("h", "h", np.uint16),
    "b32": ("u", "u", np.uint32), "u32": ("u", "u", np.uint32), "s32": ("u", "s", np.int32),
    "f32": ("u", "f", np.float32), "f16x2": ("u", "u", np.uint32), "bf16x2": ("u", "u", np.uint32),
    "tf32": ("u", "f", np.float32),
    "b64": ("U", "U", np.uint64), "u64": ("U", "U", np.uint64), "s64": ("U", "S", np.int64),
    "f64": ("U", "F", np.float64),
}  # fmt: skip
"""Of each type: the class of registers that hold it, the list of their rows in that type, and NumPy's dtype."""

FULL = {"p": ("p", np.bool_), "h": ("h", np.uint16), "u": ("u", np.uint32), "U": ("U", np.uint64)}

UFUNCS = {
    "add": "np.add", "sub": "np.subtract", "mul": "np.multiply", "and": "np.bitwise_and", "or": "np.bitwise_or",
    "xor": "np.bitwise_xor", "not": "np.invert", "neg": "np.negative", "abs": "np.absolute",
}  # fmt: skip
COMPARED = {
    "eq": "np.equal", "ne": "np.not_equal", "lt": "np.less", "le": "np.less_equal", "gt": "np.greater",
    "ge": "np.greater_equal", "lo": "np.less", "ls": "np.less_equal", "hi": "np.greater", "hs": "np.greater_equal",
}  # fmt: skip
UNORDERED = {"equ": "np.equal", "neu": "np.not_equal", "ltu": "np.less", "leu": "np.less_equal",
             "gtu": "np.greater", "geu": "np.greater_equal"}  # fmt: skip


class Arithmetic:
    """Makes lines of instructions on registers alone.

    ``space``: the names that the lines use; immediates are added to its list ``K``.
    """

    program: Program
    space: dict[str, Any]
    numbers: dict[tuple[str, str], int]

    # --- operands

    def _register(self, name: str) -> str:
        file, number = self._number(name)
        return f"{file}[{number}]"

    def _number(self, name: str) -> tuple[str, int]:
        assert name in self.program.registers, f"{name} is no register"
        assert name in self.program.written, f"{name} is not set"
        return self.program.registers[name]

    def constant(self, text: str, kind: str) -> np.ndarray:
        """An immediate, or the address of a symbol, in all lanes."""
        dtype = np.dtype(KINDS[kind][2])
        base = text.split("+")[0]
        if base in self.program.symbols:
            value = self.program.symbols[base] + sum(map(int, text.split("+")[1:]))
        elif found := re.fullmatch(r"0[fFdD]([0-9A-Fa-f]+)", text):
            value = int(found[1], 16)
        else:
            assert re.fullmatch(r"-?(\d+|0x[0-9A-Fa-f]+)U?", text), f"{text} is not set"
            digits = text.rstrip("U")
            octal = re.fullmatch(r"-?0\d+", digits)
            value = int(digits, 8) if octal else int(digits, 0)
        if kind == "pred":
            return np.full(LANES, bool(value))
        bits = 8 * dtype.itemsize
        return np.full(LANES, value % (1 << bits), np.dtype(f"u{dtype.itemsize}")).view(dtype)

    def source(self, operand: str, kind: str) -> str:
        """An expression for an operand's 32 values."""
        file, rows, dtype = KINDS[kind]
        if operand.startswith("!"):
            return f"~{self.source(operand[1:], kind)}"
        if operand in self.program.registers:
            held, number = self._number(operand)
            if held == file and rows:
                return f"{rows}[{number}]"
            return f"{held}[{number}].astype(np.{np.dtype(dtype).name})"
        if operand.startswith("%"):
            cast = "" if kind in ("u32", "b32") else f".astype(np.{np.dtype(dtype).name})"
            return f"w.special({operand!r}){cast}"
        key = (operand, kind)
        if key not in self.numbers:
            self.numbers[key] = len(self.space["K"])
            self.space["K"].append(self.constant(operand, kind))
        return f"K[{self.numbers[key]}]"

    def target(self, operand: str, kind: str) -> tuple[str, bool]:
        """The row that a result is written to, and whether it has the result's type."""
        file, rows, dtype = KINDS[kind]
        assert operand in self.program.registers, f"{operand} is no register"
        held, number = self.program.registers[operand]
        if held == file and rows:
            return f"{rows}[{number}]", True
        signed = np.dtype(dtype).kind == "i"
        wide = {
            "h": "hs" if signed else "h",
            "u": "s" if signed else "u",
            "U": "S" if signed else "U",
        }
        return f"{wide[held]}[{number}]", False

    def _put(self, operand: str, kind: str, value: str, mask: str) -> list[str]:
        where = f", where={mask}" if mask else ""
        row, _ = self.target(operand, kind)
        return [f"copyto({row}, {value}, casting='unsafe'{where})"]

    def _call(
        self, function: str, operand: str, kind: str, sources: list[str], mask: str
    ) -> list[str]:
        row, exact = self.target(operand, kind)
        where = f", where={mask}" if mask else ""
        if not exact:
            return self._put(operand, kind, f"{function}({', '.join(sources)})", mask)
        return [f"{function}({', '.join(sources)}, out={row}{where})"]

    # --- arithmetic

    def _arithmetic(self, x: Instruction, mask: str) -> list[str] | None:
        """Lines for an instruction on registers alone, or None."""
        made = getattr(self, f"_do_{x.name}", None)
        if made is not None:
            return made(x, mask)
        if x.name in UFUNCS:
            return self._simple(x, mask)
        return None

    def _simple(self, x: Instruction, mask: str) -> list[str]:
        parts, kind = x.parts, x.parts[-1]
        if kind in ("f16x2", "bf16x2", "f16", "bf16"):
            return self._packed(x, mask)
        if "wide" in parts:
            return self._wide(x, mask)
        sources = [self.source(o, kind) for o in x.operands[1:]]
        if "hi" in parts and x.name == "mul":
            return self._put(x.operands[0], kind, f"convert.high({', '.join(sources)})", mask)
        if "sat" in parts or "ftz" in parts or "cc" in parts or x.opcode.startswith("sub.s32.sat"):
            assert kind == "f32", f"{x.opcode} is not known"
            value = f"{UFUNCS[x.name]}({', '.join(sources)})"
            if "ftz" in parts:
                value = f"flush({value})"
            if "sat" in parts:
                value = f"convert.saturated({value})"
            return self._put(x.operands[0], kind, value, mask)
        return self._call(UFUNCS[x.name], x.operands[0], kind, sources, mask)

    def _wide(self, x: Instruction, mask: str) -> list[str]:
        kind = x.parts[-1]
        big = f"{kind[0]}{2 * int(kind[1:])}"
        name = np.dtype(KINDS[big][2]).name
        a, b = (self.source(o, kind) for o in x.operands[1:3])
        if x.name == "mul":
            row, _ = self.target(x.operands[0], big)
            where = f", where={mask}" if mask else ""
            return [f"np.multiply({a}, {b}, out={row}, dtype=np.{name}{where})"]
        c = self.source(x.operands[3], big)
        return self._put(x.operands[0], big, f"np.multiply({a}, {b}, dtype=np.{name}) + {c}", mask)

    def _packed(self, x: Instruction, mask: str) -> list[str]:
        """Arithmetic on halves, alone or two to a word."""
        kind = x.parts[-1]
        sources = [self.source(o, "b32" if kind.endswith("x2") else "b16") for o in x.operands[1:]]
        flags = [p for p in x.parts[:-1] if p in ("sat", "relu", "NaN", "ftz")]
        value = f"convert.halves({x.name!r}, {kind!r}, {flags!r}, {', '.join(sources)})"
        return self._put(x.operands[0], "b32" if kind.endswith("x2") else "b16", value, mask)

    def _do_mad(self, x: Instruction, mask: str) -> list[str]:
        if "wide" in x.parts:
            return self._wide(x, mask)
        kind = x.parts[-1]
        if kind == "f32":
            return self._do_fma(x, mask)
        a, b, c = (self.source(o, kind) for o in x.operands[1:])
        if "hi" in x.parts:
            return self._put(x.operands[0], kind, f"convert.high({a}, {b}) + {c}", mask)
        return self._call("np.add", x.operands[0], kind, [f"{a} * {b}", c], mask)

    def _do_fma(self, x: Instruction, mask: str) -> list[str]:
        kind = x.parts[-1]
        if kind not in ("f32", "f64"):
            return self._packed(x, mask)
        assert kind == "f32", f"{x.opcode} is not known"
        a, b, c = (self.source(o, kind) for o in x.operands[1:])
        row, _ = self.target(x.operands[0], kind)
        if "ftz" in x.parts or "sat" in x.parts:
            value = f"fma({a}, {b}, {c})"
            value = f"flush({value})" if "ftz" in x.parts else value
            value = f"convert.saturated({value})" if "sat" in x.parts else value
            return self._put(x.operands[0], kind, value, mask)
        where = f", where={mask}" if mask else ""
        product = f"np.multiply({a}, {b}, dtype=np.float64)"
        return [f"np.add({product}, {c}, out={row}, casting='same_kind'{where})"]

    def _do_min(self, x: Instruction, mask: str) -> list[str]:
        kind = x.parts[-1]
        if kind in ("f16x2", "bf16x2", "f16", "bf16"):
            return self._packed(x, mask)
        function = "np.minimum" if x.name == "min" else "np.maximum"
        if kind == "u16x2":
            a, b = (self.source(o, "u32") for o in x.operands[1:])
            return self._put(x.operands[0], "u32", f"convert.pairs({function}, {a}, {b})", mask)
        if kind[0] == "f" and "NaN" not in x.parts:
            function = "np.fmin" if x.name == "min" else "np.fmax"
        sources = [self.source(o, kind) for o in x.operands[1:]]
        if "relu" in x.parts:
            value = f"np.maximum({function}({', '.join(sources)}), 0)"
            return self._put(x.operands[0], kind, value, mask)
        found = self._call(function, x.operands[0], kind, sources[:2], mask)
        if len(sources) == 3:
            value = f"{function}({function}({sources[0]}, {sources[1]}), {sources[2]})"
            return self._put(x.operands[0], kind, value, mask)
        return found

    _do_max = _do_min

    def _do_div(self, x: Instruction, mask: str) -> list[str]:
        kind = x.parts[-1]
        a, b = (self.source(o, kind) for o in x.operands[1:])
        if kind[0] == "f":
            return self._call("np.divide", x.operands[0], kind, [a, b], mask)
        return self._put(x.operands[0], kind, f"convert.divided({a}, {b})", mask)

    def _do_rem(self, x: Instruction, mask: str) -> list[str]:
        kind = x.parts[-1]
        a, b = (self.source(o, kind) for o in x.operands[1:])
        return self._put(x.operands[0], kind, f"{a} - convert.divided({a}, {b}) * {b}", mask)

    def _do_shl(self, x: Instruction, mask: str) -> list[str]:
        kind = x.parts[-1]
        a, n = self.source(x.operands[1], kind), x.operands[2]
        width = 8 * np.dtype(KINDS[kind][2]).itemsize
        function = "np.left_shift" if x.name == "shl" else "np.right_shift"
        if n in self.program.registers or n.startswith("%"):
            arguments = f"{a}, {self.source(n, 'u32')}, {x.name == 'shl'}"
            return self._put(x.operands[0], kind, f"convert.shifted({arguments})", mask)
        if int(n, 0) < width:
            return self._call(function, x.operands[0], kind, [a, self.source(n, kind)], mask)
        value = f"{a} >> {width - 1}" if x.name == "shr" and kind[0] == "s" else "0"
        return self._put(x.operands[0], kind, value, mask)

    _do_shr = _do_shl

    def _do_shf(self, x: Instruction, mask: str) -> list[str]:
        a, b, n = (self.source(o, "u32") for o in x.operands[1:])
        value = f"convert.funnel({a}, {b}, {n}, {x.parts[0] == 'l'}, {'wrap' in x.parts})"
        return self._put(x.operands[0], "b32", value, mask)

    def _do_mov(self, x: Instruction, mask: str) -> list[str] | None:
        kind = x.parts[-1]
        to, of = x.operands
        if to.startswith("{") or of.startswith("{"):
            return self._regroup(to, of, kind, mask)
        return self._put(to, kind, self.source(of, kind), mask)

    def _regroup(self, to: str, of: str, kind: str, mask: str) -> list[str]:
        """Pieces of a register to registers, or registers to pieces of one."""
        names = re.findall(r"[^{},\s]+", to if to.startswith("{") else of)
        width = int(kind[1:]) // len(names)
        assert width >= 16, "pieces of less than 16 bits"
        piece = f"b{width}"
        if to.startswith("{"):
            whole = self.source(of, kind)
            lines = [f"t = {whole}.copy()"]
            for i, name in enumerate(names):
                if name != "_":
                    lines += self._put(name, piece, f"t >> {i * width}", mask)
            return lines
        name = np.dtype(KINDS[kind][2]).name
        value = " | ".join(
            f"({self.source(n, piece)}.astype(np.{name}) << {i * width})"
            for i, n in enumerate(names)
        )
        return self._put(to, kind, value, mask)

    def _do_setp(self, x: Instruction, mask: str) -> list[str]:
        parts, kind = x.parts, x.parts[-1]
        assert kind not in ("f16", "bf16", "f16x2", "bf16x2"), f"{x.opcode} is not known"
        a, b = (self.source(o, kind) for o in x.operands[1:3])
        if parts[0] in COMPARED:
            if parts[0] == "ne" and kind[0] == "f":
                value = f"({a} < {b}) | ({a} > {b})"
            else:
                value = f"{COMPARED[parts[0]]}({a}, {b})"
                if len(x.operands) == 3 and "|" not in x.operands[0]:
                    return self._call(COMPARED[parts[0]], x.operands[0], "pred", [a, b], mask)
        elif parts[0] in UNORDERED:
            value = f"{UNORDERED[parts[0]]}({a}, {b}) | np.isnan({a}) | np.isnan({b})"
        elif parts[0] == "nan":
            value = f"np.isnan({a}) | np.isnan({b})"
        else:
            assert parts[0] == "num", f"{x.opcode} is not known"
            value = f"~(np.isnan({a}) | np.isnan({b}))"
        names = x.operands[0].split("|")
        lines = [f"t = {value}"]
        values = ["t", "~t"]
        if len(x.operands) == 4:
            other = self.source(x.operands[3], "pred")
            sign = {"and": "&", "or": "|", "xor": "^"}[parts[1]]
            values = [f"(t {sign} {other})", f"(~t {sign} {other})"]
        for name, some in zip(names, values, strict=False):
            if name != "_":
                lines += self._put(name, "pred", some, mask)
        return lines

    def _do_selp(self, x: Instruction, mask: str) -> list[str]:
        kind = x.parts[-1]
        a, b = (self.source(o, kind) for o in x.operands[1:3])
        return self._put(
            x.operands[0], kind, f"np.where({self.source(x.operands[3], 'pred')}, {a}, {b})", mask
        )

    def _do_slct(self, x: Instruction, mask: str) -> list[str]:
        kind = x.parts[-2]
        a, b = (self.source(o, kind) for o in x.operands[1:3])
        c = self.source(x.operands[3], x.parts[-1])
        return self._put(x.operands[0], kind, f"np.where({c} >= 0, {a}, {b})", mask)

    def _unary(self, x: Instruction, mask: str) -> list[str]:
        kind = x.parts[-1]
        assert kind in ("f32", "f16x2", "bf16x2", "f16", "bf16"), f"{x.opcode} is not known"
        if kind != "f32":
            return self._packed(x, mask)
        ftz = "ftz" in x.parts
        value = f"convert.function({x.name!r}, {self.source(x.operands[1], kind)}, {ftz})"
        return self._put(x.operands[0], kind, value, mask)

    _do_ex2 = _do_lg2 = _do_rcp = _do_sqrt = _do_rsqrt = _do_sin = _do_cos = _do_tanh = _unary

    def _do_copysign(self, x: Instruction, mask: str) -> list[str]:
        a, b = (self.source(o, "f32") for o in x.operands[1:])
        return self._call("np.copysign", x.operands[0], "f32", [b, a], mask)

    def _do_testp(self, x: Instruction, mask: str) -> list[str]:
        value = {"finite": "np.isfinite({})", "infinite": "np.isinf({})", "notanumber": "np.isnan({})",
                 "number": "~np.isnan({})"}[x.parts[0]].format(self.source(x.operands[1], "f32"))  # fmt: skip
        return self._put(x.operands[0], "pred", value, mask)

    def _bits(self, x: Instruction, mask: str) -> list[str]:
        """Operations on bits by functions of ``convert``."""
        kind = x.parts[-1]
        sources = [
            self.source(
                o,
                kind
                if i == 0 or (x.name == "bfi" and i == 1) or x.name in ("lop3", "prmt")
                else "u32",
            )
            for i, o in enumerate(x.operands[1:])
        ]
        extra = [repr(p) for p in x.parts[:-1]]
        to = "b32" if x.name in ("popc", "clz", "bfind") else kind
        return self._put(
            x.operands[0],
            to,
            f"convert.{x.name}({', '.join(sources)}{''.join(', ' + e for e in extra)})",
            mask,
        )

    _do_popc = _do_clz = _do_brev = _do_bfe = _do_bfi = _do_bfind = _bits

    def _do_lop3(self, x: Instruction, mask: str) -> list[str]:
        a, b, c = (self.source(o, "b32") for o in x.operands[1:4])
        return self._put(
            x.operands[0], "b32", f"convert.lop3({a}, {b}, {c}, {int(x.operands[4], 0)})", mask
        )

    def _do_prmt(self, x: Instruction, mask: str) -> list[str]:
        assert x.parts == ["b32"], f"{x.opcode} is not known"
        a, b = (self.source(o, "b32") for o in x.operands[1:3])
        selector = x.operands[3]
        if selector in self.program.registers:
            value = f"convert.permuted({a}, {b}, {self.source(selector, 'b32')})"
        else:
            number = int(selector.rstrip("U"), 0) & 0xFFFF
            value = f"convert.permuted_by({a}, {b}, {number})"
        return self._put(x.operands[0], "b32", value, mask)

    def _do_dp4a(self, x: Instruction, mask: str) -> list[str]:
        a, b = (self.source(o, "b32") for o in x.operands[1:3])
        kinds = x.parts[-2:]
        c = self.source(x.operands[3], kinds[0])
        return self._put(x.operands[0], kinds[0], f"convert.dp4a({a}, {b}, {c}, {kinds!r})", mask)

    def _do_cvta(self, x: Instruction, mask: str) -> list[str]:
        """Addresses of shared memory and of parameters are told from others in the generic space."""
        a = self.source(x.operands[1], "u64")
        shared = any(p.startswith("shared") for p in x.parts)
        if shared:
            a = (
                f"{a} & np.uint64({SHARED - 1})"
                if "to" in x.parts
                else f"{a} | np.uint64({SHARED})"
            )
        return self._put(x.operands[0], "u64", a, mask)

    def _do_cvt(self, x: Instruction, mask: str) -> list[str]:
        parts = x.parts
        to, of = parts[-2:]
        if parts[-3:-2] == ["pack"] or x.opcode.startswith("cvt.pack"):
            raise AssertionError(f"{x.opcode} is not known")
        packed = to in ("bf16x2", "f16x2", "e4m3x2", "e5m2x2", "e2m1x2") or of in (
            "e4m3x2",
            "e5m2x2",
            "e2m1x2",
        )
        if packed:
            kinds = {"e4m3x2": "b16", "e5m2x2": "b16", "e2m1x2": "b8"}
            sources = [self.source(o, kinds.get(of, of)) for o in x.operands[1:]]
            flags = [p for p in parts[:-2] if p in ("relu", "satfinite", "rz")]
            value = f"convert.pair({to!r}, {of!r}, {flags!r}, {', '.join(sources)})"
            if to in ("e4m3x2", "e5m2x2", "e2m1x2"):
                return self._put(x.operands[0], "b8" if to == "e2m1x2" else "b16", value, mask)
            return self._put(x.operands[0], "b32", value, mask)
        source = self.source(x.operands[1], of)
        if to[0] in "us" and of[0] in "us" and "sat" not in parts:
            return self._put(
                x.operands[0], to, f"{source}.astype(np.{np.dtype(KINDS[to][2]).name})", mask
            )
        flags = list(parts[:-2])
        return self._put(
            x.operands[0], to, f"convert.single({to!r}, {of!r}, {flags!r}, {source})", mask
        )
