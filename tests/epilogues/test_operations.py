"""The tables of operations: equal keys, and every operation of either within its own error of the truth."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from epicute.epilogues import reference as ref
from epicute.epilogues.numpy_ops import NUMPY_OPERATIONS, round_to
from epicute.epilogues.values import OPERATIONS, Value
from epicute.jit import Target, compile
from epicute.testing.strategies import float32s
from tests.epilogues.model import SPECIALS
from tests.epilogues.operations_kernel import NAMES, THREADS, TRUTHS, EveryOperation

Array = np.ndarray

STORED = {
    "round_bfloat16": torch.bfloat16,
    "round_float16": torch.float16,
    "round_float8": torch.float8_e4m3fn,
}


def _rounding(dtype: torch.dtype) -> Callable[[Array], Array]:
    return lambda x: ref.round_to(x, dtype).numpy()


def _extreme(largest: bool) -> Callable[[Array, Array], Array]:
    """NaN beside anything, and 0 above -0."""

    def call(a: Array, b: Array) -> Array:
        signs = (np.signbit(a) & np.signbit(b)) if largest else (np.signbit(a) | np.signbit(b))
        zero = np.where(signs, -0.0, 0.0)
        found = np.maximum(a, b) if largest else np.minimum(a, b)
        return np.where((a == 0) & (b == 0), zero, found)

    return call


EXACT: dict[str, Callable[..., Array]] = {
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "min": _extreme(False),
    "max": _extreme(True),
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
    "eq": np.equal,
    "ne": np.not_equal,
    "logical_and": np.logical_and,
    "logical_or": np.logical_or,
    "logical_not": np.logical_not,
    "isnan": np.isnan,
    "neg": np.negative,
    "abs": np.abs,
    "floor": np.floor,
    "sqrt": np.sqrt,
    "reciprocal": lambda x: 1 / x,
    "where": np.where,
    **{name: _rounding(dtype) for name, dtype in STORED.items()},
}
"""Correctly rounded to float32 (float64 of float32 arguments, rounded once more, is that)."""

CLOSE: dict[str, tuple[Callable[..., Array], Callable[..., Any]]] = {
    "div": (np.divide, lambda x, y, t: np.abs(t) * 2.0**-22),
    "exp": (np.exp, lambda x, t: np.abs(t) * (2.0**-21 + np.abs(x) * 2.0**-23)),
    "exp2": (np.exp2, lambda x, t: np.abs(t) * 2.0**-21),
    "log": (np.log, lambda x, t: np.abs(t) * 2.0**-21 + 2.0**-21),
    "log2": (np.log2, lambda x, t: np.abs(t) * 2.0**-21 + 2.0**-21),
    "rsqrt": (lambda x: 1 / np.sqrt(x), lambda x, t: np.abs(t) * 2.0**-21),
    "sin": (np.sin, lambda x, t: 1e-6 + np.abs(x) * 2.0**-44),
    "cos": (np.cos, lambda x, t: 1e-6 + np.abs(x) * 2.0**-44),
    "tanh": (np.tanh, lambda x, t: np.abs(t) * 2.0**-20),
    "sigmoid": (
        lambda x: 1 / (1 + np.exp(-x)),
        lambda x, t: np.abs(t) * (2.0**-20 + np.abs(x) * 2.0**-23),
    ),
}
"""(truth, allowed error of arguments and truth); results below FP32's normal numbers may be zero."""

ANGLES = ("sin", "cos")
LARGEST_ANGLE = 2.0**20


def check(name: str, arguments: tuple[Array, ...], out: Array) -> None:
    """``out`` of float32 ``arguments`` (truth values for logical ones) is what it should be."""
    wide = [a.astype(np.float64) if a.dtype == np.float32 else a for a in arguments]
    with np.errstate(all="ignore"):
        truth = (EXACT.get(name) or CLOSE[name][0])(*wide)
        expected = ref.round_to(np.asarray(truth, np.float64), torch.float32).numpy()
        got = np.asarray(out, np.float64)
        if name in EXACT:
            same = (got == expected) & (np.signbit(got) == np.signbit(expected))
        else:
            finite = np.nan_to_num(expected, nan=0.0, posinf=0.0, neginf=0.0)
            allowed = CLOSE[name][1](*wide, finite) + 2.0**-126
            same = (np.abs(got - expected) <= allowed) | (got == expected)
            edge = 3.4e38  # next to overflow either side of it is right
            same |= (np.abs(expected) >= edge) & (np.abs(got) >= edge) & (got * expected > 0)
        if name in ANGLES:
            same |= np.abs(wide[0]) > LARGEST_ANGLE
    same |= np.isnan(got) & np.isnan(expected)
    if not same.all():
        i = int(np.argmin(same))
        given = [float(a[i]) for a in arguments]
        raise AssertionError(f"{name}{tuple(given)}: got {got[i]!r}, expected {expected[i]!r}")


def arguments_of(name: str, x: Array, y: Array, z: Array) -> tuple[Array, ...]:
    """What ``EveryOperation`` passes to the operation."""
    if name in TRUTHS:
        return (x < y, y < z)[: OPERATIONS[name]]
    return (x < y, y, z) if name == "where" else (x, y, z)[: OPERATIONS[name]]


def triples() -> tuple[Array, Array, Array]:
    """Special values against each other and ordinary ones, a multiple of the kernel's block."""
    generator = np.random.default_rng(3)
    special = np.array(SPECIALS, np.float32)
    x, y = (a.ravel() for a in np.meshgrid(special, special))
    normal = generator.standard_normal((2, 4096)).astype(np.float32)
    normal *= np.exp2(generator.integers(-6, 7, normal.shape)).astype(np.float32)
    angles = generator.uniform(-(2.0**17), 2.0**17, 1024).astype(np.float32)
    x = np.concatenate([x, normal[0], angles])
    y = np.concatenate([y, normal[1], angles[::-1]])
    pad = -len(x) % THREADS
    x, y = np.pad(x, (0, pad)), np.pad(y, (0, pad))
    return x, y, np.roll(x, 17)


def test_the_tables_have_the_keys_of_operations() -> None:
    assert set(NUMPY_OPERATIONS) == set(OPERATIONS)
    assert set(EXACT) | set(CLOSE) == set(OPERATIONS)
    assert not set(EXACT) & set(CLOSE)


@pytest.mark.compile
def test_the_dsl_table_has_them_too() -> None:
    from epicute.epilogues.dsl import DSL_OPERATIONS

    assert set(DSL_OPERATIONS) == set(OPERATIONS)


@pytest.mark.parametrize("name", NAMES)
def test_numpy_on_special_and_ordinary_values(name: str) -> None:
    arguments = arguments_of(name, *triples())
    check(name, arguments, NUMPY_OPERATIONS[name](*arguments))


@given(name=st.sampled_from(NAMES), values=st.tuples(*[float32s()] * 3))
def test_numpy_on_any_values(name: str, values: tuple[float, float, float]) -> None:
    arguments = arguments_of(name, *(np.array([v], np.float32) for v in values))
    check(name, arguments, NUMPY_OPERATIONS[name](*arguments))


@pytest.mark.parametrize("name", NAMES)
def test_numpy_results_do_not_depend_on_how_values_lie(name: str) -> None:
    """A vector routine and its remainder loop, a column and a row: the same bits."""
    arguments = arguments_of(name, *triples())
    whole = np.asarray(NUMPY_OPERATIONS[name](*arguments))
    for step in (7, 64):
        part = NUMPY_OPERATIONS[name](*(a[3::step] for a in arguments))
        assert np.array_equal(part, whole[3::step], equal_nan=True)
        assert np.array_equal(np.signbit(part), np.signbit(whole[3::step])) or name not in EXACT


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float8_e4m3fn])
def test_rounding_keeps_every_stored_value(dtype: torch.dtype) -> None:
    bits = torch.uint8 if dtype.itemsize == 1 else torch.int16
    held = torch.arange(2 ** (8 * dtype.itemsize)).to(bits).view(dtype).to(torch.float32)
    assert np.array_equal(round_to(held.numpy(), dtype), held.numpy(), equal_nan=True)


def test_python_operators_are_the_operations() -> None:
    x, y = Value(np.float32(3), NUMPY_OPERATIONS), Value(np.float32(-2), NUMPY_OPERATIONS)
    found = [x + y, x - y, x * y, x / y, -x, abs(y), 1.0 + x, 1.0 - x, 2.0 * x, 6.0 / x]
    assert [float(v.raw) for v in found] == [1, 5, -6, -1.5, -3, 2, 4, -2, 6, 2]
    truths = [x < y, x <= y, x > y, x >= y, x == y, x != y, (x > y) & (x < y), (x > y) | (x < y)]
    assert [bool(v.raw) for v in truths] == [False, False, True, True, False, True, False, True]
    assert bool((~(x < y)).raw)


@pytest.mark.compile
def test_every_operation_compiles_for_hopper() -> None:
    report = compile(EveryOperation()).report
    assert report.problems() == []
    assert report.warnings == ()


@pytest.mark.gpu
@pytest.mark.compile
def test_every_operation_on_the_device() -> None:
    inputs = triples()
    x, y, z = (torch.from_numpy(a).cuda() for a in inputs)
    out = torch.full((len(NAMES) * len(x),), torch.nan, device="cuda")
    compile(EveryOperation(Target.detect()))(x, y, z, out)
    for name, found in zip(NAMES, out.cpu().reshape(len(NAMES), -1).numpy(), strict=True):
        check(name, arguments_of(name, *inputs), found)
