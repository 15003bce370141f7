"""A composition's key changes with its fields and with the source of its bodies, and with nothing else."""

from __future__ import annotations

import dataclasses
import importlib.util
import itertools
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from epicute.epilogues import (
    Bias,
    Columns,
    Dequantize,
    EmitFP8,
    Gain,
    HeadNorm,
    PlaceKV,
    Policy,
    ResidualAdd,
    RoPE,
    RowScale,
    RowVector,
    Store,
    SumSquares,
    SwiGLU,
    compose,
    pairwise,
    policy,
    reducing,
    tap,
)
from epicute.errors import KeyingError
from epicute.jit.key import encode

BF16, FP8 = torch.bfloat16, torch.float8_e4m3fn

BUILT_IN: list[Policy] = [
    *(Dequantize(a, w) for a in ("tensor", "row", None) for w in ("tensor", "column", None)),
    *(Bias(), Bias(name="b"), Gain(), Gain(1.0), ResidualAdd(), SumSquares(), EmitFP8()),
    *(RowScale(64), RowScale(576), RowScale(64, 1e-6)),
    *(SwiGLU(), SwiGLU(1.702), SwiGLU(limit=7.0)),
    *(RoPE(64), RoPE(128), RoPE(128, 64), RoPE(64, 64, "interleaved"), RoPE(64, magnitude=1.5)),
    *(HeadNorm(64), HeadNorm(128), HeadNorm(64, 1e-5), HeadNorm(64, offset=1.0)),
    *(PlaceKV(64), PlaceKV(128), PlaceKV(64, FP8), PlaceKV(64, torch.float16)),
    *(Store(BF16), Store(torch.float16), Store(FP8), Store(torch.float32)),
]


def keyed(made: Policy) -> str:
    """The key as it enters a compile key."""
    return str(encode(made.key()))


def test_different_policies_have_different_keys() -> None:
    keys = [keyed(made) for made in BUILT_IN]
    assert len(set(keys)) == len(keys)
    for made in BUILT_IN:
        assert keyed(dataclasses.replace(made)) == keyed(made)


def test_every_field_of_a_built_in_policy_is_in_its_key() -> None:
    """A field that someone adds is keyed without being named anywhere."""
    for made in BUILT_IN:
        named = {name for name, _ in made.settings()}
        assert named == {f.name for f in dataclasses.fields(made)}


def test_ranges_are_in_the_key() -> None:
    def one(name: str, width: int, policy: Policy) -> str:
        return str(encode(compose(Columns(**{name: (width, policy)})).key()))

    keys = [one(*x) for x in itertools.product("ab", (64, 128), (Store(BF16), Store(FP8)))]
    assert len(set(keys)) == len(keys)


MODULE = '''
"""A module of a user."""
from dataclasses import dataclass
from functools import cached_property

from epicute.epilogues import Elementwise, RowVector, policy, reducing

LIMIT = 3.0


def helper(x, ctx):
    """Half of it."""
    return x * 0.5


@policy(bias_values=RowVector)
def shaped(x, ctx, *, gain: float = 1.0):
    """Some body."""
    return ctx.min(helper(x, ctx) * gain, LIMIT) + ctx.bias_values


@reducing(over=64)
def centred(x, ctx):
    return x - ctx.total(x)


class Mixed:
    def twice(self, x):
        return x + x


@dataclass(frozen=True)
class Own(Mixed, Elementwise):
    """A policy as a class."""
    width: int = 4
    factor = 1.5

    @property
    def scale(self):
        return 1.0 / self.width

    @cached_property
    def shift(self):
        return 0.25

    @staticmethod
    def bent(x, ctx):
        return ctx.tanh(x)

    def apply(self, x, ctx):
        return self.twice(self.bent(x, ctx)) * self.scale * self.factor + self.shift
'''


class User:
    """Loads versions of ``MODULE`` as modules of their own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.count = 0

    def load(self, text: str) -> ModuleType:
        self.count += 1
        path = self.folder / f"user_{self.count}.py"
        path.write_text(text)
        spec = importlib.util.spec_from_file_location(path.stem, path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module

    def key(self, text: str, make: str) -> str:
        return keyed(eval(make, vars(self.load(text))))


@pytest.fixture
def user(tmp_path: Path) -> User:
    return User(tmp_path)


CHANGES = {
    "the body": ("shaped()", "* gain, LIMIT)", "+ gain, LIMIT)"),
    "a helper": ("shaped()", "return x * 0.5", "return x * 0.25"),
    "a constant of the module": ("shaped()", "LIMIT = 3.0", "LIMIT = 4.0"),
    "an operand's kind": (
        "shaped()",
        "bias_values=RowVector",
        "bias_values=RowVector(shared=True)",
    ),
    "a default": ("shaped()", "gain: float = 1.0", "gain: float = 2.0"),
    "the group": ("centred()", "over=64", "over=32"),
    "a method": ("Own()", "* self.scale *", "+ self.scale *"),
    "a property": ("Own()", "return 1.0 / self.width", "return 2.0 / self.width"),
    "a cached property": ("Own()", "return 0.25", "return 0.5"),
    "a static method": ("Own()", "ctx.tanh(x)", "ctx.exp(x)"),
    "a constant of the class": ("Own()", "factor = 1.5", "factor = 2.5"),
    "a base that is no policy": ("Own()", "return x + x", "return x * 3.0"),
    "a field's default": ("Own()", "width: int = 4", "width: int = 5"),
}


@pytest.mark.parametrize("case", CHANGES)
def test_a_change_changes_the_key(case: str, user: User) -> None:
    make, old, new = CHANGES[case]
    assert MODULE.count(old) == 1
    assert user.key(MODULE, make) != user.key(MODULE.replace(old, new), make)


@pytest.mark.parametrize("make", ["shaped()", "centred()", "Own()"])
@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('"""Some body."""', '"""Another text."""'),
        ("LIMIT = 3.0", "LIMIT = 3.0  # why\n\nOTHER = 5"),
        ("helper(x, ctx) * gain, LIMIT)", "helper( x,ctx )*gain,\n        LIMIT)"),
        ("class Mixed:", "class Unused:\n    pass\n\n\nclass Mixed:"),
    ],
)
def test_what_does_not_run_does_not_change_it(make: str, old: str, new: str, user: User) -> None:
    assert MODULE.count(old) == 1
    assert user.key(MODULE, make) == user.key(MODULE.replace(old, new), make)


@pytest.mark.parametrize(("make", "other"), [("shaped(gain=2.0)", "shaped(gain=3.0)")])
def test_a_field_changes_the_key_and_not_the_source(make: str, other: str, user: User) -> None:
    assert user.key(MODULE, make) != user.key(MODULE, other)
    assert user.key(MODULE, make) == user.key(MODULE, make)


class TestRefused:
    """A function whose source does not say what it does has no key; it may still be evaluated."""

    def check(self, made: Policy, message: str) -> None:
        with pytest.raises(KeyingError, match=message) as caught:
            encode((made >> Store(BF16)).key())
        assert "Fix: " in str(caught.value)
        (made >> Store(BF16)).evaluate(torch.ones(1, 64))

    def test_captured_variables(self) -> None:
        factor = 2.0

        @policy
        def times(x, ctx):
            return x * factor

        self.check(times(), r"times: captures factor .*keyword parameter")

    def test_lambdas(self) -> None:
        self.check(policy(lambda x, ctx: x)(), "is a lambda")

    @pytest.mark.parametrize("decorator", [policy, reducing(over=64), tap()])
    def test_functions_without_a_source(self, decorator: Any) -> None:
        space: dict[str, Any] = {}
        exec("def typed(x, ctx):\n    return x", space)
        self.check(decorator(space["typed"])(), "typed: its source is not on disk")

    def test_pairs_without_a_source(self) -> None:
        space: dict[str, Any] = {}
        exec("def typed(first, second, ctx):\n    return first", space)
        self.check(pairwise()(space["typed"])(), "typed: its source is not on disk")

    def test_globals_that_can_change(self, user: User) -> None:
        module = user.load(
            MODULE.replace("LIMIT = 3.0", "LIMIT = [3.0][0]; TABLE = {}").replace(
                "helper(x, ctx) * gain, LIMIT)", "helper(x, ctx) * len(TABLE), LIMIT)"
            )
        )
        with pytest.raises(KeyingError, match="TABLE"):
            module.shaped().key()

    def test_a_changing_constant_of_a_class(self, user: User) -> None:
        module = user.load(MODULE.replace("factor = 1.5", "factor = 1.5\n    table = {}"))
        with pytest.raises(KeyingError, match="dict"):
            encode(module.Own().key())

    def test_a_field_that_cannot_be_keyed(self) -> None:
        @policy(bias_values=RowVector)
        def shifted(x, ctx, *, by: Any):
            return x + ctx.bias_values

        with pytest.raises(KeyingError, match="complex"):
            encode(shifted(by=1j).key())
