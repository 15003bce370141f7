"""The digest of a user's function, with every helper, class and constant that it refers to.

What cannot be followed is refused: a kernel found under the key of other code would be wrong
without a sign of it.
"""

from __future__ import annotations

import ast
import builtins
import dis
import inspect
import json
import linecache
import os
import sys
import textwrap
import tokenize
import types
from collections.abc import Callable, Iterator
from typing import Any

from epicute.errors import KeyingError
from epicute.jit.environment import version_of
from epicute.jit.key import encode
from epicute.jit.modules import modules_digest, normal_form, require_unedited, sha

__all__ = ["source_digest"]

LIBRARIES = {"cutlass": "nvidia-cutlass-dsl", "numpy": "numpy", "torch": "torch"}
"""Packages a function may use, by name and version, beside pure modules and epicute."""

PURE = frozenset(
    (
        *("__future__", "abc", "bisect", "builtins", "cmath", "collections", "contextlib", "copy"),
        *("dataclasses", "decimal", "enum", "fractions", "functools", "heapq", "itertools"),
        *("math", "numbers", "operator", "re", "string", "struct", "types", "typing", "warnings"),
    )
)
"""Modules of the standard library that give the same in every process."""

IMPURE = frozenset(
    (
        *("__import__", "breakpoint", "compile", "eval", "exec", "globals", "hash", "id", "input"),
        *("locals", "open"),
    )
)
"""Built-in functions that do not."""

OWN = "epicute"


def source_digest(function: Callable[..., Any]) -> str:
    """SHA-256, in hex, of what a function does.

    Covered are its source, the values of its defaults, and at any depth the functions, classes and
    constants of modules that it names. Libraries (NumPy, torch, the DSL, epicute, pure modules of
    the standard library) count by version.

    Raises KeyingError, with the fix, for lambdas, methods, closures over variables, functions whose
    source is not on disk or was edited there after the import, for globals that can change or
    cannot be keyed, and for what gives another value in another process (os, random, time, …).
    """
    walk = _Walk()
    walk.function(inspect.unwrap(function), getattr(function, "__name__", repr(function)))
    return sha(json.dumps(walk.found, sort_keys=True))


class _Walk:
    """Follows what a function refers to.

    ``found`` lists functions and classes in the order of discovery; they refer to each other by
    place, so that recursion ends and no name of a module or file enters.
    """

    def __init__(self) -> None:
        self.found: list[Any] = []
        self._place: dict[int, int] = {}
        self._alive: list[Any] = []

    def function(self, function: Any, name: str) -> Any:
        """Reference to a function, which is followed when met first."""
        _refuse_unfollowable(function, name)
        if (known := self._place.get(id(function))) is not None:
            return ["see", known]
        here = self._reserve(function)
        text, tree = _source(function)
        require_unedited(function, text)
        defaults = [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
        self.found[here] = [
            normal_form(tree),
            [_constant(value, f"{name}: default") for value in defaults],
            self._globals(function, name),
        ]
        return ["see", here]

    def _reserve(self, value: Any) -> int:
        self._place[id(value)] = len(self.found)
        self._alive.append(value)
        self.found.append(None)
        return len(self.found) - 1

    def _globals(self, function: types.FunctionType, name: str) -> dict[str, Any]:
        found = {}
        for used in sorted(_operands(function.__code__, "LOAD_GLOBAL", "LOAD_NAME")):
            if used.startswith("@"):
                continue  # no name of Python's: pytest puts such into asserts
            if used in function.__globals__:
                found[used] = self._value(function.__globals__[used], f"{name}: global {used}")
            elif used in IMPURE:
                raise _impure(f"{name}: {used}()", "the built-in function")
            elif not hasattr(builtins, used):
                raise KeyingError(
                    f"{name}: refers to {used}, which is not defined. "
                    "Fix: define it at module level, above the use"
                )
        for imported in sorted(_operands(function.__code__, "IMPORT_NAME")):
            found[f"import {imported}"] = _library(imported, f"{name}: import {imported}")
        return found

    def _value(self, value: Any, name: str) -> Any:
        if isinstance(value, types.ModuleType):
            return _library(value.__name__, name)
        owner = _owner(value)
        if callable(value) and hasattr(value, "__name__") and _is_library(owner):
            if _top(owner) not in LIBRARIES and value.__name__ in IMPURE:
                raise _impure(name, f"the built-in function {value.__name__}, as")
            if _bound(value) and (_pure(owner) or _top(owner) in LIBRARIES):
                return _constant(value, name)  # which says that it cannot be keyed
            return ["use", value.__name__, _library(owner, name)]
        if isinstance(value, type):
            return self._class(value, name)
        if callable(value) and isinstance(inspect.unwrap(value), types.FunctionType):
            return self.function(inspect.unwrap(value), name)
        return _constant(value, name)

    def _class(self, cls: type, name: str) -> Any:
        if (known := self._place.get(id(cls))) is not None:
            return ["see", known]
        here = self._reserve(cls)
        text, tree = _source(cls)
        found = {}
        for method in _methods(cls, tree):
            require_unedited(method, text)
            found[method.__name__] = self._globals(method, f"{name}.{method.__name__}")
        bases = [self._value(b, f"{name}: base") for b in cls.__bases__ if b is not object]
        self.found[here] = [normal_form(tree), bases, found]
        return ["see", here]


def _methods(cls: type, tree: ast.AST) -> Iterator[types.FunctionType]:
    """The functions written in a class's body, and not made by a decorator."""
    for node in ast.walk(tree):
        value = vars(cls).get(node.name) if isinstance(node, ast.FunctionDef) else None
        inner = getattr(value, "fget", None) or getattr(value, "__func__", value)
        if isinstance(inner, types.FunctionType):
            yield inner


def _operands(code: types.CodeType, *operations: str) -> set[str]:
    """Names that the given operations of a code object and of those nested in it work on."""
    found = {str(s.argval) for s in dis.get_instructions(code) if s.opname in operations}
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            found |= _operands(constant, *operations)
    return found


def _constant(value: Any, name: str) -> Any:
    try:
        return encode(value, name)
    except KeyingError as error:
        said = str(error).partition(" Fix: ")[0]
        raise KeyingError(
            f"{said} Fix: make it a number, a string, a tuple or a frozen dataclass of such, a "
            "plain function, or a keyword parameter of the function"
        ) from None


def _top(module: str) -> str:
    return module.partition(".")[0]


def _pure(module: str) -> bool:
    """Whether it is a pure module of the standard library, or one written in C that makes it up."""
    top = _top(module)
    return top in PURE or top.removeprefix("_") in PURE


def _bound(value: Any) -> bool:
    """Whether a method belongs to an object, on whose value it may depend."""
    method = isinstance(value, (types.BuiltinMethodType, types.MethodType))
    return method and not isinstance(value.__self__, (types.ModuleType, type, type(None)))


def _owner(value: Any) -> str:
    """Name of the module that a global comes from."""
    if isinstance(value, types.BuiltinMethodType) and not value.__module__:
        bound = value.__self__
        if not isinstance(bound, types.ModuleType):
            return (bound if isinstance(bound, type) else type(bound)).__module__
    return getattr(value, "__module__", None) or type(value).__module__


def _impure(name: str, what: str) -> KeyingError:
    return KeyingError(
        f"{name}: is {what} of the standard library, whose answer the key cannot see, expected "
        f"{', '.join(sorted(PURE - {'__future__', 'builtins'}))}, {', '.join(LIBRARIES)} or {OWN}. "
        "Fix: pass the value as a field of the policy"
    )


def _is_library(module: str) -> bool:
    top = _top(module)
    return top in LIBRARIES or top == OWN or top in sys.stdlib_module_names


def _library(module: str, name: str) -> Any:
    """Name and version of a module that is allowed whole."""
    top = _top(module)
    if top == OWN:
        return [module, version_of(OWN), "" if module == OWN else modules_digest(module)]
    if top in LIBRARIES:
        return [module, version_of(LIBRARIES[top])]
    if _pure(module):
        return [module]
    if top in sys.stdlib_module_names:
        raise _impure(name, f"the module {module}")
    raise KeyingError(
        f"{name}: is the module {module}, expected {', '.join(LIBRARIES)} "
        f"or {OWN}. Fix: import what is used by name, at module level: from {module} import ..."
    )


def _refuse_unfollowable(function: Any, name: str) -> None:
    if not isinstance(function, types.FunctionType):
        raise KeyingError(
            f"{name}: got {function!r:.60}, expected a plain function. "
            "Fix: write a def at module level"
        )
    if function.__name__ == "<lambda>":
        raise KeyingError(
            f"{name}: is a lambda, which has no source of its own. "
            "Fix: give it a name with def, in a file"
        )
    captured = ", ".join(function.__code__.co_freevars)
    if captured:
        raise KeyingError(
            f"{name}: captures {captured} from the function around it, which the key cannot see. "
            "Fix: make each a keyword parameter of the function, or a constant of the module"
        )


def _source(value: Any) -> tuple[str, ast.AST]:
    """(text of the module, tree of the function or class)."""
    try:
        text = _module_text(value)
        return text, ast.parse(textwrap.dedent(inspect.getsource(value)))
    except (OSError, TypeError, ImportError, SyntaxError) as error:
        raise KeyingError(
            f"{value.__qualname__}: its source is not on disk. Fix: put it in a file and import "
            "it; what is typed at a prompt or in a notebook cell, or given to python -c or exec(), "
            "has no source that another process could read"
        ) from error


def _module_text(value: Any) -> str:
    """Text of the module that defines ``value``, from its file or from the archive it lies in."""
    file = inspect.getsourcefile(value) or ""
    if os.path.isfile(file):
        linecache.checkcache(file)
        with tokenize.open(file) as opened:
            return opened.read()
    module = inspect.getmodule(value)
    spec = getattr(module, "__spec__", None)
    text = spec.loader.get_source(spec.name) if spec is not None and spec.loader else None
    if not text:
        raise OSError("no source")
    return str(text)
