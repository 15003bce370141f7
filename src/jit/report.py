"""What the compiler said about a kernel: registers, spills, shared memory, ptxas' complaints."""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass
from typing import Any

from epicute.errors import CompileError

__all__ = ["FATAL", "Report"]

FATAL = ("C7504", *(f"C{code}" for code in range(7508, 7515)))
"""ptxas advisories that mean slow code: an ignored ``setmaxnreg`` and serialised WGMMA among
them."""

_ANSI = re.compile(r"\x1b\[[0-9;]*m")
_REGISTERS = re.compile(r"Used (\d+) registers")
_SPILLS = re.compile(r"(\d+) bytes spill stores, (\d+) bytes spill loads")
_STATIC = re.compile(r"(\d+) bytes smem")
_ADVISORY = re.compile(r"\((C\d{4,5})\) (.+?)(?= ptxas (?:info|warning|error|\.)|$)")
_WARNING = re.compile(r"ptxas warning : (?!\(C\d)(.+?)(?= ptxas (?:info|warning|error|\.)|$)")


@dataclass(frozen=True)
class Report:
    """One compiled module; where it holds several kernels, the largest registers and the sum of the
    spills.

    Attributes:
        registers: per thread, at launch; None where the compiler did not say.
        spill_stores, spill_loads: bytes per thread.
        shared_memory: bytes per block, static and dynamic; None where unknown.
        warnings: ptxas' warnings and advisories, each with its code.
        seconds: wall time of tracing and compiling.
        ptxas: which ptxas made the machine code; empty where unknown.
    """

    registers: int | None
    spill_stores: int
    spill_loads: int
    shared_memory: int | None
    warnings: tuple[str, ...]
    seconds: float
    ptxas: str

    @staticmethod
    def parse(
        text: str, *, seconds: float = 0.0, dynamic: int | None = None, ptxas: str = ""
    ) -> Report:
        """Read the compiler's output. ``dynamic``: bytes of shared memory the launch asks for."""
        # The DSL wraps ptxas' lines at words and colours them, so that only the sequence of words
        # can be trusted.
        text = " ".join(_ANSI.sub("", text).split())
        registers = [int(count) for count in _REGISTERS.findall(text)]
        spills = [(int(stores), int(loads)) for stores, loads in _SPILLS.findall(text)]
        static = max((int(count) for count in _STATIC.findall(text)), default=0)
        advisories = [f"{code}: {said}" for code, said in _ADVISORY.findall(text)]
        return Report(
            registers=max(registers, default=None),
            spill_stores=sum(stores for stores, _ in spills),
            spill_loads=sum(loads for _, loads in spills),
            shared_memory=None if dynamic is None else dynamic + static,
            warnings=tuple(dict.fromkeys(advisories + _WARNING.findall(text))),
            seconds=seconds,
            ptxas=ptxas,
        )

    def problems(self, smem_limit: int | None = None) -> list[str]:
        """Why this code must not run, in words; empty for good code."""
        found = []
        if self.registers is None:
            found.append(
                "the compiler did not report registers and spills, so that nothing vouches for "
                "the code"
            )
        if self.spill_stores or self.spill_loads:
            found.append(
                f"{self.spill_stores} B of spill stores and {self.spill_loads} B of spill loads"
            )
        if smem_limit is not None and (self.shared_memory or 0) > smem_limit:
            found.append(f"{self.shared_memory} B of shared memory, {smem_limit} B at most")
        return found + [said for said in self.warnings if said.startswith(FATAL)]

    def check(self, kernel: str = "kernel", smem_limit: int | None = None) -> Report:
        """Return the report, or raise CompileError on spills and on ptxas' C7504 and C7508 to
        C7514."""
        problems = self.problems(smem_limit)
        if problems:
            raise CompileError(
                f"{kernel}: compiled to code that must not run: {'; '.join(problems)}. "
                "Fix: a smaller tile or fewer values alive at once; strict=False compiles it all "
                "the same"
            )
        return self

    def to_json(self) -> dict[str, Any]:
        """Plain values for the sidecar."""
        return asdict(self)

    @staticmethod
    def from_json(found: dict[str, Any]) -> Report:
        """Inverse of ``to_json``; raises KeyError or TypeError on anything else."""
        return Report(**{**found, "warnings": tuple(found["warnings"])})

    def __str__(self) -> str:
        def count(value: int | None) -> str:
            return "unknown" if value is None else f"{value:,}"

        rows = [
            ("registers", count(self.registers)),
            ("spills", f"{self.spill_stores:,} B stored, {self.spill_loads:,} B loaded"),
            ("shared memory", f"{count(self.shared_memory)} B"),
            (
                "compiled in",
                f"{self.seconds:.2f} s" + (f", ptxas {self.ptxas}" if self.ptxas else ""),
            ),
            *(("ptxas", warning) for warning in self.warnings),
        ]
        return "\n".join(f"{name:<14} {value}" for name, value in rows)
