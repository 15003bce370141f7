"""Compositions on a command line: what is understood, and that nothing else is."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from epicute.cli.expression import composition_in, composition_of
from epicute.epilogues import Dequantize, EmitFP8, RowScale, Store, SwiGLU
from epicute.errors import ArgumentError, CompositionError


def test_policies_are_joined() -> None:
    assert composition_of("Dequantize() >> SwiGLU() >> EmitFP8()") == (
        Dequantize() >> SwiGLU() >> EmitFP8()
    )
    assert composition_of(" (Dequantize() >> SwiGLU()) >> EmitFP8() ") == (
        Dequantize() >> SwiGLU() >> EmitFP8()
    )


@pytest.mark.parametrize("dtype", ["torch.bfloat16", "bf16"])
def test_arguments(dtype: str) -> None:
    found = composition_of(f"RowScale(width=4096, eps=1e-5) >> Store({dtype})")
    assert found == RowScale(width=4096, eps=1e-5) >> Store(torch.bfloat16)


@pytest.mark.parametrize(
    "text",
    [
        "__import__('os').system('true')",
        "().__class__.__bases__",
        "Dequantize().__class__",
        "Dequantize() >> print('x')",
        "[Dequantize()]",
        "Dequantize() + Store(bf16)",
        "Dequantize() >> Store(**{})",
        "Dequantize() >> (lambda: 1)()",
        "torch.load('x')",
        "torch.load",
        "torch.nn.Linear",
        "f'{Dequantize()}'",
        "x := Dequantize()",
        "b'x'",
        "Unknown()",
        "Dequantize(",
        "",
    ],
)
def test_nothing_else_is_understood(text: str) -> None:
    with pytest.raises(ArgumentError, match="Fix: "):
        composition_of(text)


@pytest.mark.parametrize(
    ("text", "fix"),
    [
        ("Dequantise() >> Store(bf16)", "write Dequantize"),
        ("Swiglu()", "write SwiGLU"),
        ("Store(bfloat16)", "write bf16"),
        ("Store(float16)", "write fp16"),
        ("Store(float8_e4m3)", "write fp8"),
        ("quite_else()", "--module"),
        ("Dequantize >> Store(bf16)", r"as Dequantize\(\)"),
        ("Store(bf16, bits=3)", "give it those arguments"),
        ("bf16()", "give it those arguments"),
        ("Dequantize() >> 3", ""),
    ],
)
def test_the_fix_names_what_was_meant(text: str, fix: str) -> None:
    with pytest.raises((ArgumentError, CompositionError), match=f"got .*Fix: .*{fix}") as caught:
        composition_of(text)
    assert len(str(caught.value)) < 300


def test_a_composition_that_does_not_compose_says_so_itself() -> None:
    with pytest.raises(CompositionError):
        composition_of("SwiGLU() >> SwiGLU() >> EmitFP8()")


FILE = """
import torch
from epicute.epilogues import Dequantize, Store, policy

@policy
def double(x, ctx):
    return x * 2.0

fused = Dequantize() >> double() >> Store(torch.bfloat16)

def made():
    return fused

broken = 1 / 0 if False else None
"""


def test_a_file_gives_a_value_or_makes_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "mine_for_the_command.py"
    path.write_text(FILE)
    monkeypatch.delitem(sys.modules, path.stem, raising=False)
    found = composition_in(f"{path}:fused")
    assert "double" in str(found)
    assert found.key()  # the source of its policies can be found
    assert str(composition_in(f"{path}:made")) == str(found)
    monkeypatch.delitem(sys.modules, path.stem)


@pytest.mark.parametrize("place", ["missing.py:fused", "{}", "{}:", "{}:other", ":fused"])
def test_a_place_that_is_none(place: str, tmp_path: Path) -> None:
    path = tmp_path / "another_for_the_command.py"
    path.write_text(FILE)
    with pytest.raises(ArgumentError, match="Fix: "):
        composition_in(place.format(path))
    sys.modules.pop(path.stem, None)
