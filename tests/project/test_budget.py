"""Size as a discipline: files under 500 lines, functions under 120, at most 10 parameters.

An exception carries its reason, and one that is no longer needed fails too.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

FILE_LINES = 500
FUNCTION_LINES = 120
PARAMETERS = 10

# path under src, or path::function -> why it may be larger
FILE_EXCEPTIONS: dict[str, str] = {}
FUNCTION_EXCEPTIONS: dict[str, str] = {}
PARAMETER_EXCEPTIONS: dict[str, str] = {}

Function = ast.FunctionDef | ast.AsyncFunctionDef


def functions(node: ast.AST, prefix: str = "") -> Iterator[tuple[str, Function]]:
    """Every function below ``node`` with its dotted name."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, Function | ast.ClassDef):
            name = f"{prefix}.{child.name}" if prefix else child.name
            if isinstance(child, Function):
                yield name, child
            yield from functions(child, name)
        else:
            yield from functions(child, prefix)


def parameters(function: Function) -> int:
    """Parameters a caller may give, ``self`` and ``cls`` apart."""
    given = function.args
    names = [a.arg for a in (*given.posonlyargs, *given.args, *given.kwonlyargs)]
    return len(names) - (names[:1] in (["self"], ["cls"]))


def measured(root: Path, sources: list[Path]) -> Iterator[tuple[str, Function]]:
    for path in sources:
        text = (root / "src" / path).read_text(encoding="utf-8")
        for name, function in functions(ast.parse(text)):
            yield f"{path.as_posix()}::{name}", function


def check(sizes: dict[str, int], most: int, exceptions: dict[str, str]) -> None:
    over = {where: size for where, size in sizes.items() if size > most}
    unexplained = {where: size for where, size in over.items() if where not in exceptions}
    assert not unexplained, f"over {most}: {unexplained}"
    assert set(exceptions) <= set(over), f"exceptions not needed: {set(exceptions) - set(over)}"
    assert all(exceptions.values()), "an exception needs its reason"


def test_files(root: Path, sources: list[Path]) -> None:
    sizes = {}
    for path in sources:
        text = (root / "src" / path).read_text(encoding="utf-8")
        sizes[path.as_posix()] = len(text.splitlines())
    check(sizes, FILE_LINES - 1, FILE_EXCEPTIONS)


def test_functions(root: Path, sources: list[Path]) -> None:
    sizes = {}
    for where, function in measured(root, sources):
        last = function.end_lineno or function.lineno
        sizes[where] = last - function.lineno + 1
    check(sizes, FUNCTION_LINES - 1, FUNCTION_EXCEPTIONS)


def test_parameters(root: Path, sources: list[Path]) -> None:
    sizes = {where: parameters(function) for where, function in measured(root, sources)}
    check(sizes, PARAMETERS, PARAMETER_EXCEPTIONS)


def test_the_measure_itself() -> None:
    text = "class A:\n    def f(self, a, /, b, *, c):\n        def g(x): ...\n        return g\n"
    found = dict(functions(ast.parse(text)))
    assert {name: parameters(function) for name, function in found.items()} == {
        "A.f": 3,
        "A.f.g": 1,
    }
