"""Which instructions of a program are not known."""

from __future__ import annotations

from tests.ptx.handlers import Handlers
from tests.ptx.program import Program
from tests.ptx.translate import ENDS, Translator

__all__ = ["unknown"]


def unknown(program: Program) -> list[str]:
    """Each instruction of the program that running it would stumble over, with the reason."""
    code = Translator(program, Handlers(program))
    found = {}
    for at, x in enumerate(program.code):
        if x.name in ENDS:
            continue
        try:
            code._one(x, at, True)
        except (AssertionError, KeyError, ValueError, IndexError, AttributeError) as error:
            found[x.opcode] = f"{x}: {type(error).__name__} {error}"
    return list(found.values())
