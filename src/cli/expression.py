"""Compositions written on a command line: policies, ``>>``, numbers and dtypes, and nothing else.

The text is not given to ``eval``: only what is listed here is understood.
"""

from __future__ import annotations

import ast
import difflib
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from epicute.errors import ArgumentError, EpicuteError

__all__ = ["DTYPES", "composition_in", "composition_of"]

DTYPES = {
    "bf16": "bfloat16",
    "fp16": "float16",
    "fp32": "float32",
    "fp8": "float8_e4m3fn",
}
"""Short names of dtypes; ``torch.bfloat16`` is understood too."""

LITERALS = (bool, int, float, str, type(None))


def composition_of(text: str) -> Any:
    """The composition that ``text`` spells, say ``"Dequantize() >> SwiGLU() >> EmitFP8()"``.

    Raises ArgumentError for anything but the public names of ``epicute.epilogues``, dtypes, calls
    of such, ``>>``, tuples and literals.
    """
    try:
        tree = ast.parse(text.strip(), mode="eval")
    except SyntaxError as error:
        raise ArgumentError(
            f"epilogue: {error.msg} at column {error.offset}, expected policies joined by >>. "
            "Fix: quote the whole expression for the shell"
        ) from None
    return _value(tree.body, _names(), text.strip())


def composition_in(place: str) -> Any:
    """The composition that ``path.py:name`` names, or that the function of that name gives."""
    path, _, name = place.rpartition(":")
    file = Path(path)
    if not file.is_file() or file.suffix != ".py" or not name:
        raise ArgumentError(
            f"module: got {place!r}, expected path.py:name of an existing file. "
            "Fix: name the file and, after a colon, the composition in it"
        )
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # Findable by name, as the source of its functions becomes part of the key.
    sys.modules[spec.name] = module
    try:
        with _explained(file):
            spec.loader.exec_module(module)
    except ArgumentError:
        del sys.modules[spec.name]
        raise
    if not hasattr(module, name):
        raise ArgumentError(
            f"module: {file} has no {name!r}. Fix: name a composition defined in it"
        )
    found = getattr(module, name)
    if not callable(found) or hasattr(found, "__rshift__"):
        return found
    _refuse_arguments(file, name, found)
    with _explained(file):
        return found()


@contextmanager
def _explained(file: Path) -> Iterator[None]:
    """What goes wrong in a user's file as one line that says where."""
    try:
        yield
    except EpicuteError:
        raise
    except SyntaxError as error:
        raise ArgumentError(
            f"module: {error.filename or file}, line {error.lineno}: {error.msg}, expected a file of "
            "valid Python. Fix: mend that line"
        ) from None
    except Exception as error:
        frames = traceback.extract_tb(error.__traceback__)
        lines = [frame.lineno for frame in frames if frame.filename == str(file.absolute())]
        where = f", line {lines[-1]}" if lines else ""
        said = " ".join(str(error).split())
        raise ArgumentError(
            f"module: {file}{where}: got {type(error).__name__}: {said}, expected a file that can "
            "be imported. Fix: see that it runs with python alone"
        ) from error


def _refuse_arguments(file: Path, name: str, function: Any) -> None:
    signature = inspect.signature(function)
    try:
        signature.bind()
    except TypeError as error:
        raise ArgumentError(
            f"module: got {name}{signature} of {file} ({error}), expected a composition or a "
            f"function that needs no arguments. Fix: write fused = {name}(…) in the file and name "
            f"{file}:fused"
        ) from None


def _names() -> dict[str, Any]:
    import torch

    from epicute import epilogues

    names = {name: getattr(epilogues, name) for name in epilogues.__all__}
    return names | {short: getattr(torch, full) for short, full in DTYPES.items()}


def _value(node: ast.expr, names: dict[str, Any], text: str) -> Any:
    match node:
        case ast.BinOp(left=left, op=ast.RShift(), right=right):
            return _joined(_value(left, names, text), _value(right, names, text))
        case ast.Call(func=ast.Name() as called, args=arguments, keywords=keywords):
            given = {k.arg: _value(k.value, names, text) for k in keywords if k.arg}
            if len(given) == len(keywords):
                made = _value(called, names, text)
                return _made(called.id, made, [_value(a, names, text) for a in arguments], given)
        case ast.Attribute(value=ast.Name(id="torch"), attr=name):
            return _dtype(name)
        case ast.Name(id=name) if name in names:
            return names[name]
        case ast.Name(id=name):
            raise ArgumentError(
                f"epilogue: got {name!r}, expected the name of a policy or dtype. "
                f"Fix: {_meant(name, names)}"
            )
        case ast.Constant(value=value) if type(value) in LITERALS:
            return value
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as value)):
            return -value
        case ast.Tuple(elts=parts):
            return tuple(_value(part, names, text) for part in parts)
    raise ArgumentError(
        f"epilogue: does not understand {ast.get_source_segment(text, node)!r}, expected policies "
        f"joined by >>. Fix: use the policies of epicute.epilogues, numbers, tuples and "
        f"{', '.join(DTYPES)}, or --module for anything else"
    )


def _meant(name: str, names: dict[str, Any]) -> str:
    """The name nearest to an unknown one, as a fix."""
    meant = {full: short for short, full in DTYPES.items()} | {known: known for known in names}
    folded = {known.lower(): short for known, short in meant.items()}
    near = difflib.get_close_matches(name.lower(), folded, n=1)
    if near:
        return f"write {folded[near[0]]}"
    return "name a policy of epicute.epilogues, or use --module for policies of your own"


def _joined(left: Any, right: Any) -> Any:
    try:
        return left >> right
    except EpicuteError:
        raise
    except TypeError:
        bare = [x.__name__ for x in (left, right) if isinstance(x, type)]
        raise ArgumentError(
            f"epilogue: got {left!r} >> {right!r}, expected policies joined by >>. "
            f"Fix: {f'call the policy, as {bare[0]}()' if bare else 'join policies alone'}"
        ) from None


def _made(name: str, called: Any, arguments: list[Any], given: dict[str, Any]) -> Any:
    try:
        return called(*arguments, **given)
    except EpicuteError:
        raise
    except TypeError as error:
        takes = f"{name}{inspect.signature(called)}" if callable(called) else f"{name} alone"
        raise ArgumentError(
            f"epilogue: got {name}(…) with arguments that do not fit ({error}), expected {takes}. "
            "Fix: give it those arguments"
        ) from None


def _dtype(name: str) -> Any:
    import torch

    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise ArgumentError(
            f"epilogue: torch.{name} is no dtype. Fix: use one, say torch.bfloat16 or bf16"
        )
    return found
