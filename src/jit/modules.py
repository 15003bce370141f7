"""Digests of whole modules, and the check that a module's file still says what is running.

A digest stands for what the code does: docstrings, comments, layout and the place of a file do not
enter.
"""

from __future__ import annotations

import ast
import dis
import functools
import hashlib
import importlib.machinery
import importlib.util
import inspect
import json
import pkgutil
import sys
import types
from collections.abc import Iterator
from typing import Any

from epicute.errors import KeyingError
from epicute.jit.environment import version_of

__all__ = ["modules_digest", "normal_form", "require_unedited", "sha"]

NOT_CODE = ("epicute.cli", "epicute.errors", "epicute.jit")
"""Modules that serve a kernel without shaping it; what matters of them is in its key otherwise."""


def modules_digest(*names: str, follow: bool = True, aside: tuple[str, ...] = ()) -> str:
    """SHA-256, in hex, of the source of modules of a package: a wheel, a checkout or a zip alike.

    A package stands for all modules beneath it. With ``follow`` the modules of the same package
    that they import, at any depth, are included, so that a key stays whole when a kernel moves code
    into a new file; references are not, as no kernel imports one, nor those ``aside``, whose
    results are in the key by value. Where only bytecode is installed, its instructions and the
    package's version count.

    Raises KeyingError for a name that is no module, and for a module edited since it was imported.
    """
    todo, seen = list(names), dict[str, str]()
    while todo:
        name = todo.pop()
        if name not in seen:
            seen[name], imported, beneath = _module(name)
            todo += (*beneath, *(m for m in imported if follow and m not in aside))
    return sha(json.dumps(seen, sort_keys=True))


@functools.cache
def _module(name: str) -> tuple[str, tuple[str, ...], tuple[str, ...]]:
    """(digest, modules of its package it imports, modules beneath it) of one module."""
    spec = _spec(name)
    if spec is None or spec.loader is None:
        raise KeyingError(f"modules: {name!r} is no module here. Fix: name an importable module")
    places = spec.submodule_search_locations
    found = pkgutil.iter_modules(places) if places else ()
    beneath = tuple(f"{name}.{m.name}" for m in found if m.name != "reference")
    source = getattr(spec.loader, "get_source", lambda _: None)(name)
    if source is None:
        code = _code(name, spec)
        digest = sha(json.dumps([version_of(name.partition(".")[0]), _instructions(code)]))
        imports = _imports_of_code(code)
    else:
        _refuse_edited(name, source)
        tree = ast.parse(source)
        imports = _imports_of_tree(tree)
        digest = sha(normal_form(tree))
    return digest, tuple(_own(imports, name, bool(places))), beneath


def _code(name: str, spec: importlib.machinery.ModuleSpec) -> types.CodeType:
    code = getattr(spec.loader, "get_code", lambda _: None)(name)
    if code is None:
        raise KeyingError(
            f"modules: {name!r} has neither source nor bytecode. Fix: install it from a wheel"
        )
    return code


def _spec(name: str) -> importlib.machinery.ModuleSpec | None:
    """Where a module lies; nothing is imported on the way, as a kernel's module needs the DSL."""
    top, *rest = name.split(".")
    try:
        spec = importlib.util.find_spec(top)
    except (ModuleNotFoundError, ValueError):
        return None
    for part in rest:
        if spec is None or spec.submodule_search_locations is None:
            return None
        full = f"{spec.name}.{part}"
        spec = importlib.machinery.PathFinder.find_spec(full, spec.submodule_search_locations)
    return spec


Import = tuple[str, tuple[str, ...], int]
"""(module, names taken from it, dots before it) of one import statement."""


def _imports_of_tree(tree: ast.AST) -> list[Import]:
    found: list[Import] = []
    for node in _executed(tree):
        if isinstance(node, ast.Import):
            found += [(alias.name, (), 0) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            found.append((node.module or "", tuple(a.name for a in node.names), node.level))
    return found


def _imports_of_code(code: types.CodeType) -> list[Import]:
    found: list[Import] = []
    for inner in _codes(code):
        steps = list(dis.get_instructions(inner))
        for level, names, step in zip(steps, steps[1:], steps[2:], strict=False):
            if step.opname == "IMPORT_NAME":
                found.append((step.argval, tuple(names.argval or ()), level.argval))
    return found


def _own(imports: list[Import], name: str, package: bool) -> Iterator[str]:
    """Those of the imported modules that belong to the package of ``name`` and shape kernels."""
    top, parts = name.partition(".")[0], name.split(".")
    for module, names, level in imports:
        above = parts[: len(parts) - level + package] if level else []
        base = ".".join(filter(None, (*above, module)))
        if base.partition(".")[0] == top:
            found = [_taken(base, taken) for taken in names] or [base]
            yield from (m for m in found if m != top and not _aside(m))


def _taken(base: str, name: str) -> str:
    """The module that ``from base import name`` needs: a submodule of that name, else ``base``."""
    inner = f"{base}.{name}"
    return base if _spec(inner) is None else inner


def _executed(tree: ast.AST) -> Iterator[ast.AST]:
    """All nodes but those for type checkers alone."""
    todo = [tree]
    while todo:
        node = todo.pop()
        if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
            todo += node.orelse
        else:
            yield node
            todo += ast.iter_child_nodes(node)


def _aside(name: str) -> bool:
    return name.endswith(".reference") or any(f"{name}.".startswith(f"{m}.") for m in NOT_CODE)


def sha(text: str) -> str:
    """SHA-256 of a text, in hex."""
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def normal_form(tree: ast.AST) -> str:
    """A tree as text, without docstrings and positions; takes the docstrings out of ``tree``."""
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if isinstance(body, list) and body and _is_text(body[0]):
            body[:1] = [] if len(body) > 1 else [ast.Pass()]
    return ast.dump(tree)


def _is_text(node: ast.AST) -> bool:
    return (
        isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    )


def _instructions(code: types.CodeType) -> list[Any]:
    """What a code object does, without where it came from."""
    constants = [_constant(constant) for constant in code.co_consts]
    names = [code.co_names, code.co_varnames, code.co_freevars]
    return [code.co_code.hex(), constants, names, code.co_flags]


def _constant(value: Any) -> Any:
    if isinstance(value, types.CodeType):
        return _instructions(value)
    if isinstance(value, frozenset):
        return sorted(repr(item) for item in value)
    return repr(value)


def _codes(code: types.CodeType) -> Iterator[types.CodeType]:
    """A code object and those nested in it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _codes(constant)


def _identity(code: types.CodeType) -> tuple[str, int, str]:
    return code.co_qualname, code.co_firstlineno, json.dumps(_instructions(code))


@functools.lru_cache(maxsize=16)
def _on_disk(source: str) -> frozenset[tuple[str, int, str]]:
    code = compile(source, "module", "exec", dont_inherit=True)
    return frozenset(_identity(inner) for inner in _codes(code))


def require_unedited(function: types.FunctionType, source: str) -> None:
    """Refuse a function whose module's text, ``source``, has been edited since it was imported.

    Its digest would be that of code which is not running, and the object stored under it wrong for
    every later process.
    """
    rewritten = type(function.__globals__.get("__loader__")).__name__ == "AssertionRewritingHook"
    # The DSL puts rewritten code in place of a function's own, and keeps that beside it.
    code = getattr(function, "_original_code", function.__code__)
    if not rewritten and _identity(code) not in _on_disk(source):
        raise KeyingError(
            f"{function.__qualname__}: the file of module {function.__module__} has changed since "
            "it was imported, so that its text no longer says what runs. Fix: restart Python"
        )


def _refuse_edited(name: str, source: str) -> None:
    module = sys.modules.get(name)
    if module is None:
        return
    for value in list(vars(module).values()):
        members = vars(value).values() if isinstance(value, type) else (value,)
        for member in members:
            function = inspect.unwrap(member) if callable(member) else None
            if (
                isinstance(function, types.FunctionType)
                and function.__module__ == name
                and function.__code__.co_filename == getattr(module, "__file__", None)
            ):
                require_unedited(function, source)
