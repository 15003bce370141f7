"""The published shapes, against the parameter counts that FuTransformer's table 1 prints."""

from __future__ import annotations

import dataclasses

import pytest

from epicute.errors import ArgumentError
from epicute.models.shapes import SHAPES, projections


@pytest.mark.parametrize(
    ("name", "millions"), [("1B", 60.82), ("8B", 218.10), ("70B", 855.64), ("405B", 3187.67)]
)
def test_projection_weights(name: str, millions: float) -> None:
    assert round(SHAPES[name].weights / 1e6, 2) == millions


def test_smollm2() -> None:
    assert projections(SHAPES["SmolLM2"]) == {
        "qkv": (960, 576),
        "o": (576, 576),
        "gate_up": (3072, 576),
        "down": (576, 1536),
    }


def test_names_are_keys() -> None:
    assert all(name == shape.name for name, shape in SHAPES.items())


@pytest.mark.parametrize("change", [{"kv_heads": 5}, {"hidden": 0}])
def test_impossible_shapes_are_refused(change: dict[str, int]) -> None:
    with pytest.raises(ArgumentError, match=next(iter(change))):
        dataclasses.replace(SHAPES["8B"], **change)
