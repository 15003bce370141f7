"""A key is total and typed: equal keys are equal values of equal types, in every process."""

from __future__ import annotations

import enum
import itertools
import json
import math
import struct
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from epicute.errors import KeyingError
from epicute.jit import CompileKey, Target
from epicute.jit import environment as environment_module
from tests.jit.processes import finish, start
from tests.jit.tiny import Tiny

SM90 = Target("sm_90a")


class Colour(enum.Enum):
    RED = 1
    ONE = "RED"


class Level(enum.IntEnum):
    RED = 1


@dataclass(frozen=True)
class Pair:
    first: Any
    second: Any


@dataclass(frozen=True)
class OtherPair:
    first: Any
    second: Any


@dataclass
class Mutable:
    first: int = 1


ATOMS = (
    st.sampled_from(
        [
            *(None, True, False, 0, 1, 0.0, -0.0, 1.0, math.nan, math.inf, -math.inf),
            *("", "1", "1.0", "True", "None", "int", "RED", "torch.float16", "()"),
            *(Colour.RED, Colour.ONE, Level.RED, torch.float16, torch.bfloat16, (), ((),)),
        ]
    )
    | st.integers()
    | st.floats()
    | st.text()
)
VALUES = st.recursive(
    ATOMS,
    lambda inner: (
        st.lists(inner, max_size=3).map(tuple)
        | st.builds(Pair, inner, inner)
        | st.builds(OtherPair, inner, inner)
    ),
    max_leaves=6,
)


def key(value: Any) -> CompileKey:
    return CompileKey("k", {"value": value}, SM90)


def same(a: Any, b: Any) -> bool:
    """Equality of value and type, bit for bit in floats, said without the key's own code."""
    if type(a) is not type(b):
        return False
    if isinstance(a, float):
        return (a != a and b != b) or struct.pack("d", a) == struct.pack("d", b)
    if isinstance(a, tuple):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, Pair | OtherPair):
        return same(a.first, b.first) and same(a.second, b.second)
    return a is b if isinstance(a, enum.Enum | torch.dtype) else a == b


@given(VALUES, VALUES)
def test_keys_are_equal_exactly_for_equal_values_of_equal_type(a: Any, b: Any) -> None:
    assert (key(a) == key(b)) == same(a, b)
    assert (key(a).digest == key(b).digest) == same(a, b)
    assert (key(a).difference(key(b)) == "") == same(a, b)
    assert key((a, b)) == key((a, b))
    assert (key((a, b)) == key((b, a))) == same(a, b)


@given(VALUES)
def test_canonical_text_is_json_and_names_its_types(value: Any) -> None:
    text = key(value).canonical()
    assert text == json.dumps(json.loads(text), sort_keys=True, separators=(",", ":"))
    assert text.isascii()


def test_true_one_one_point_zero_and_text_never_alias() -> None:
    alike = [True, 1, 1.0, "1", (1,), Level.RED, "True", None]
    for a, b in itertools.combinations(alike, 2):
        assert key(a) != key(b), (a, b)
        assert len({key(a): 0, key(b): 0}) == 2


def test_classes_of_equal_content_are_told_apart() -> None:
    assert key(Pair(1, 2)) != key(OtherPair(1, 2))
    assert key(Colour.RED) != key(Level.RED)
    assert key(torch.float16) != key("torch.float16")


def test_order_of_fields_does_not_matter_and_their_names_do() -> None:
    assert CompileKey("k", {"a": 1, "b": 2}, SM90) == CompileKey("k", (("b", 2), ("a", 1)), SM90)
    assert CompileKey("k", {"a": 1}, SM90) != CompileKey("k", {"b": 1}, SM90)
    with pytest.raises(KeyingError, match="a given twice"):
        CompileKey("k", (("a", 1), ("a", 2)), SM90)


def local_class() -> Any:
    @dataclass(frozen=True)
    class Local:
        n: int = 1

    return Local()


@pytest.mark.parametrize(
    ("value", "fix"),
    [
        ([1], "tuple"),
        ({"a": 1}, "tuple or a frozen dataclass"),
        ({1}, "tuple"),
        (np.int64(1), "value.item()"),
        (np.float64(1.0), "value.item()"),
        (np.zeros(2), "value.item()"),
        (torch.zeros(2), "run()"),
        (torch.zeros(()), "run()"),
        (lambda: 1, "source_digest"),
        (Mutable(), "frozen=True"),
        (local_class(), "module level"),
        (object(), "numbers, strings and dtypes"),
        (b"x", "numbers, strings and dtypes"),
        (Pair(1, [2]), "tuple"),
        ((1, (2, [3])), "tuple"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_cannot_be_keyed_is_refused_by_name(value: Any, fix: str) -> None:
    with pytest.raises(KeyingError, match=r"fields\.value") as caught:
        key(value)
    assert fix in str(caught.value)


def test_the_error_names_the_inner_field() -> None:
    with pytest.raises(KeyingError, match=r"fields\.value\.second\[1\]"):
        key(Pair(1, (2, [3])))


def test_jc_03_the_exact_constant_is_keyed() -> None:
    keys = [CompileKey("combine", {"splits": n}, SM90) for n in (1, 2, 3, 128, 129)]
    assert len({k.digest for k in keys}) == 5
    assert keys[1].difference(keys[2]) == "fields.splits: int 2, was int 3"


def test_jc_04_the_key_is_the_same_in_every_process(tmp_path: Path) -> None:
    script = (
        "from epicute.jit import CompileKey, Target\n"
        "from tests.jit.tiny import Tiny\n"
        "fields = {'a': (1, 2.5, None), 'b': {'x', 'y'} > {'x'}, 'tile': Tiny(2.5)}\n"
        "print(CompileKey('k', fields, Target('sm_90a'), sources=('s',)).digest)\n"
    )
    fields = {"a": (1, 2.5, None), "b": True, "tile": Tiny(2.5)}
    here = CompileKey("k", fields, SM90, sources=("s",)).digest
    assert finish(start(script, folder=tmp_path, PYTHONHASHSEED="77")).strip() == here


def test_jc_04_what_varies_at_run_time_is_refused_rather_than_keyed() -> None:
    for value in (torch.zeros((), dtype=torch.int32), np.int32(7), torch.zeros(3)):
        with pytest.raises(KeyingError):
            CompileKey("k", {"max_seqlen": value}, SM90)


def test_jc_06_whatever_shapes_the_code_is_in_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    base = CompileKey("k", {"n": 1}, SM90, sources=("s",))
    others = [
        replace(base, kernel="l"),
        replace(base, fields={"n": 2}),
        replace(base, target=Target("sm_100a")),
        replace(base, sources=("t",)),
        replace(base, sources=("s", "s")),
        replace(base, options=("--opt-level 2",)),
    ]
    for name, _ in base.environment:
        changed = {**dict(base.environment), name: "other"}
        others.append(replace(base, environment=tuple(changed.items())))
    for variable in ("CUTE_DSL_LINEINFO", "CUTE_DSL_COMPILER_OPT", "CUTE_DSL_ENABLE_ASSERTIONS"):
        with monkeypatch.context() as patch:
            patch.setenv(variable, "1")
            others.append(CompileKey("k", {"n": 1}, SM90, sources=("s",)))
    assert len({k.digest for k in [base, *others]}) == len(others) + 1
    assert CompileKey("k", {"n": 1}, SM90, sources=("s",)) == base


def test_jc_06_the_environment_names_every_version() -> None:
    assert [name for name, _ in environment_module.environment()][:5] == [
        "python",
        "nvidia-cutlass-dsl",
        "flavour",
        "apache-tvm-ffi",
        "epicute",
    ]


@pytest.mark.parametrize(
    ("installed", "driver", "flavour"),
    [
        ((12,), None, "cu12"),
        ((12, 13), None, "cu13"),
        ((12, 13), (12, 8), "cu12"),
        ((12, 13), (13, 0), "cu13"),
        ((12,), (13, 0), "cu12"),
        ((13,), (12, 8), "unsupported"),
        ((), (13, 0), "absent"),
    ],
)
def test_jc_06_the_flavour_is_the_one_the_driver_will_load(
    installed: tuple[int, ...],
    driver: tuple[int, int] | None,
    flavour: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    names = {f"nvidia-cutlass-dsl-libs-cu{n}": "4.8.1" for n in installed}
    monkeypatch.setattr(environment_module, "version_of", lambda n: names.get(n, "absent"))
    monkeypatch.setattr(environment_module, "driver_version", lambda: driver)
    assert environment_module.dsl_flavour() == flavour


def test_no_path_enters_a_key() -> None:
    text = CompileKey("k", {"tiny": Tiny()}, SM90).canonical()
    assert __file__ not in text
    assert "/" not in text


def test_the_difference_names_the_first_few_fields_and_counts_the_rest() -> None:
    many = CompileKey("k", {f"f{i}": i for i in range(6)}, SM90)
    other = CompileKey("k", {f"f{i}": i + 1 for i in range(6)}, SM90)
    assert many.difference(other).startswith("fields.f0: int 0, was int 1; fields.f1")
    assert many.difference(other).endswith("and 3 more")
    assert "fields.f1: absent" in CompileKey("k", {"f0": 0}, SM90).difference(many)
    nested = key(Pair(1, (2.5, torch.float16)))
    assert nested.difference(key(Pair(1, (2.5, torch.bfloat16)))) == (
        "fields.value.second[1]: dtype torch.float16, was dtype torch.bfloat16"
    )
    assert nested.difference(key(Pair(1, (0.5, torch.float16)))) == (
        "fields.value.second[0]: float 2.5, was float 0.5"
    )


def test_a_key_reads_well() -> None:
    shown = str(CompileKey("gemm", {"n": 64, "dtype": torch.bfloat16, "c": Colour.RED}, SM90))
    assert shown == "gemm(c=RED, dtype=bfloat16, n=64) for sm_90a"
