"""Compositions written on a command line: policies, ``>>``, numbers and dtypes, and nothing else.

The text is not given to ``eval``: only what is listed here is understood.
"""

from __future__ import annotations

import ast
import importlib.util
import sys
from pathlib import Path
from typing import Any

from epicute.errors import ArgumentError

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
    if not file.is_file() or not name:
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
    spec.loader.exec_module(module)
    if not hasattr(module, name):
        raise ArgumentError(
            f"module: {file} has no {name!r}. Fix: name a composition defined in it"
        )
    found = getattr(module, name)
    is_function = callable(found) and not hasattr(found, "__rshift__")
    return found() if is_function else found


def _names() -> dict[str, Any]:
    import torch

    from epicute import epilogues

    names = {name: getattr(epilogues, name) for name in epilogues.__all__}
    return names | {short: getattr(torch, full) for short, full in DTYPES.items()}


def _value(node: ast.expr, names: dict[str, Any], text: str) -> Any:
    match node:
        case ast.BinOp(left=left, op=ast.RShift(), right=right):
            return _value(left, names, text) >> _value(right, names, text)
        case ast.Call(func=ast.Name() as called, args=arguments, keywords=keywords):
            given = {k.arg: _value(k.value, names, text) for k in keywords if k.arg}
            if len(given) == len(keywords):
                return _value(called, names, text)(
                    *(_value(argument, names, text) for argument in arguments), **given
                )
        case ast.Attribute(value=ast.Name(id="torch"), attr=name):
            return _dtype(name)
        case ast.Name(id=name) if name in names:
            return names[name]
        case ast.Constant(value=value) if type(value) in LITERALS:
            return value
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as value)):
            return -value
        case ast.Tuple(elts=parts):
            return tuple(_value(part, names, text) for part in parts)
    raise ArgumentError(
        f"epilogue: does not understand {ast.get_source_segment(text, node)!r}, expected policies "
        f"joined by >>. Fix: use {', '.join(sorted(names))}, or --module for anything else"
    )


def _dtype(name: str) -> Any:
    import torch

    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise ArgumentError(
            f"epilogue: torch.{name} is no dtype. Fix: use one, say torch.bfloat16 or bf16"
        )
    return found
