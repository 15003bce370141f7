"""What may be a field of a policy: plain values that fit the annotation of the body's parameter."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import numpy as np
import torch

from epicute.errors import CompositionError, require

__all__ = ["annotations_of", "check_constant", "check_field"]


def annotations_of(function: Callable[..., Any]) -> Mapping[str, Any]:
    """Annotations of a body's parameters as objects; those that cannot be resolved are left out."""
    try:
        return get_type_hints(function)
    except (NameError, TypeError, AttributeError, SyntaxError):
        # Names that only a type checker has.
        found = inspect.signature(function).parameters.values()
        return {p.name: p.annotation for p in found if isinstance(p.annotation, type)}


def check_field(owner: str, name: str, value: Any, annotations: Mapping[str, Any]) -> None:
    """Refuse a ``value`` for the field ``name`` that is no constant, or is not what its annotation says."""
    check_constant(owner, name, value)
    wanted = annotations.get(name, Any)
    shown = getattr(wanted, "__name__", str(wanted)).removeprefix("torch.")
    require(
        _fits(value, wanted),
        f"{owner}: {name}",
        f"{value!r:.60} of type {type(value).__name__}",
        f"{shown}, as the body annotates it",
        f"convert it, or annotate {name} in the body as what it is",
    )


def check_constant(owner: str, name: str, value: Any) -> None:
    """Refuse tensors and arrays, which are data and no part of a kernel's code."""
    require(
        not isinstance(value, (torch.Tensor, np.ndarray)),
        f"{owner}: {name}",
        f"{'a tensor' if isinstance(value, torch.Tensor) else 'an array'} as a field",
        "a constant",
        f"declare an operand for it, as @policy({name}=RowVector), or pass a number: float(…)",
        CompositionError,
    )


def _fits(value: Any, wanted: Any) -> bool:
    """Whether ``value`` is of the annotated type; an int is a float, a bool is neither."""
    if wanted is Any or wanted is inspect.Parameter.empty:
        return True
    if wanted is None:
        return value is None
    if wanted is float:
        return isinstance(value, (int, float)) and not isinstance(value, bool)
    if wanted is int:
        return isinstance(value, int) and not isinstance(value, bool)
    if isinstance(wanted, type) and get_origin(wanted) is None:
        return isinstance(value, wanted)
    origin, inner = get_origin(wanted), get_args(wanted)
    if origin in (Union, UnionType):
        return any(_fits(value, one) for one in inner)
    if origin is Literal:
        return value in inner
    if origin is tuple and isinstance(value, tuple):
        each = inner[:1] * len(value) if inner[1:] == (Ellipsis,) else inner
        return len(each) == len(value) and all(map(_fits, value, each))
    return origin is not tuple
