"""The NumPy table: float32 arrays, rounded after every operation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from epicute.epilogues.values import Table

__all__ = ["NUMPY_OPERATIONS", "round_to"]

E4M3_MAX = 448.0


def round_to(x: np.ndarray, dtype: torch.dtype) -> np.ndarray:
    """Round float32 once to ``dtype`` (ties to even; float8 saturates, NaN stays NaN); returns float32."""
    if dtype == torch.float32:
        return np.asarray(x, np.float32)
    given = np.array(x, np.float32)
    if dtype == torch.float8_e4m3fn:
        given = np.where(np.isnan(given), given, np.clip(given, -E4M3_MAX, E4M3_MAX))
    return torch.from_numpy(given).to(dtype).to(torch.float32).numpy()


def _float(function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*arguments: Any) -> Any:
        with np.errstate(all="ignore"):
            return np.asarray(function(*(np.asarray(a, np.float32) for a in arguments)), np.float32)

    return call


def _truth(function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*arguments: Any) -> Any:
        return np.asarray(function(*map(np.asarray, arguments)), np.bool_)

    return call


def _maximum(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """The larger number, NaN beside NaN, and 0 beside -0, of which NumPy alone would return either."""
    return np.where((a == 0) & (b == 0), a + b, np.maximum(a, b))


def _one() -> np.float32:
    return np.float32(1)


def _where(mask: Any, a: Any, b: Any) -> np.ndarray:
    return np.where(mask, np.asarray(a, np.float32), np.asarray(b, np.float32))


NUMPY_OPERATIONS: Table = {
    "add": _float(np.add),
    "sub": _float(np.subtract),
    "mul": _float(np.multiply),
    "div": _float(np.divide),
    "min": _float(lambda a, b: -_maximum(-a, -b)),
    "max": _float(_maximum),
    "lt": _truth(np.less),
    "le": _truth(np.less_equal),
    "gt": _truth(np.greater),
    "ge": _truth(np.greater_equal),
    "eq": _truth(np.equal),
    "ne": _truth(np.not_equal),
    "logical_and": _truth(np.logical_and),
    "logical_or": _truth(np.logical_or),
    "logical_not": _truth(np.logical_not),
    "isnan": _truth(np.isnan),
    "neg": _float(np.negative),
    "abs": _float(np.abs),
    "floor": _float(np.floor),
    "exp": _float(np.exp),
    "exp2": _float(np.exp2),
    "log": _float(np.log),
    "log2": _float(np.log2),
    "sqrt": _float(np.sqrt),
    "rsqrt": _float(lambda x: _one() / np.sqrt(x)),
    "reciprocal": _float(lambda x: _one() / x),
    "sin": _float(np.sin),
    "cos": _float(np.cos),
    "tanh": _float(np.tanh),
    "sigmoid": _float(lambda x: _one() / (_one() + np.exp(-x))),
    "round_bfloat16": lambda x: round_to(np.asarray(x), torch.bfloat16),
    "round_float16": lambda x: round_to(np.asarray(x), torch.float16),
    "round_float8": lambda x: round_to(np.asarray(x), torch.float8_e4m3fn),
    "where": _where,
}
