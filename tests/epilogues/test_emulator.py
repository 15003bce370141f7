"""The kernel driver's walk over units, blocks and lanes gives what the interpreter gives, bit for bit."""

from __future__ import annotations

from collections import Counter as Tally
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from epicute.epilogues import (
    Bias,
    Columns,
    Composition,
    Dequantize,
    EmitFP8,
    HeadNorm,
    PlaceKV,
    ResidualAdd,
    RoPE,
    RowScale,
    Store,
    SumSquares,
    SwiGLU,
)
from epicute.epilogues.resolve import Domain
from epicute.testing import Ranges
from epicute.testing.draws import Case, cases
from tests.epilogues.compositions import compositions
from tests.epilogues.emulator import emulate
from tests.epilogues.model import assert_same


def agree(composition: Composition, case: Case, units: int) -> None:
    with np.errstate(all="ignore"):
        found = emulate(composition, case.acc, case.operands, units)
        expected = composition.evaluate(case.acc, **case.operands)
    assert set(found) == set(expected)
    for name, out in found.items():
        assert_same(out, expected[name], name)


@settings(max_examples=150)
@given(data=st.data())
def test_any_composition(data: st.DataObject) -> None:
    composition, columns = data.draw(compositions())
    ranges = Ranges(limit=300.0, rows=70, non_finite=True)
    case = data.draw(cases(composition, [columns], ranges))
    agree(composition, case, data.draw(st.integers(1, 3)))


BF16 = torch.bfloat16
QKV = Dequantize("row") >> Columns(
    q=(192, RoPE(64) >> Store(BF16)),
    k=(128, Bias() >> HeadNorm(64) >> RoPE(64, 32, name="part") >> PlaceKV(64)),
    v=(64, PlaceKV(64, torch.float8_e4m3fn)),
)
RESIDUAL = ResidualAdd() >> SumSquares() >> Store(BF16) >> EmitFP8()
GATED = Dequantize() >> RowScale(width=200) >> SwiGLU(limit=7.0) >> EmitFP8()


@pytest.mark.parametrize(
    ("composition", "columns"),
    [(QKV, 384), (RESIDUAL, 576), (RESIDUAL, 72), (RESIDUAL, 1001), (GATED, 400), (GATED, 66)],
)
@settings(max_examples=5)
@given(data=st.data())
def test_the_main_projections(
    composition: Composition, columns: int, data: st.DataObject
) -> None:
    case = data.draw(cases(composition, [columns], Ranges(rows=130)))
    agree(composition, case, data.draw(st.integers(1, 2)))


@pytest.mark.parametrize("dim", [64, 80, 96, 128, 256])
@pytest.mark.parametrize("style", ["half", "interleaved"])
@settings(max_examples=3)
@given(data=st.data())
def test_rotary_heads(dim: int, style: str, data: st.DataObject) -> None:
    rotary = data.draw(st.sampled_from([r for r in (32, 64, dim) if r <= dim]))
    composition = HeadNorm(dim) >> RoPE(dim, rotary, style) >> PlaceKV(dim) >> Store(BF16)
    case = data.draw(cases(composition, [dim, 3 * dim], Ranges()))
    agree(composition, case, 1)


def test_a_wrong_map_is_noticed() -> None:
    """Columns one lane off, and a padding column that is taken for real: both show."""
    composition = Bias() >> SwiGLU() >> Store(torch.float32)
    case = Case(torch.randn(3, 72), {"bias": torch.randn(72)})
    agree(composition, case, 1)
    offset = Domain.offset
    with mock.patch.object(Domain, "offset", lambda self, slot: offset(self, slot ^ 1)):
        with pytest.raises(AssertionError, match="out: "):
            agree(composition, case, 1)
    with mock.patch.object(Domain, "remaining", lambda self, index, slot: None):
        with pytest.raises((AssertionError, IndexError)):
            agree(composition, case, 1)


def test_what_is_drawn_is_varied() -> None:
    """Most drawn compositions are legal, of every form, and hold every kind of policy."""
    seen: Tally[str] = Tally()

    @settings(max_examples=200, database=None)
    @given(drawn=compositions())
    def look(drawn: tuple[Composition, int]) -> None:
        composition, columns = drawn
        seen["columns" if composition.columns else "plain"] += 1
        seen["ragged"] += columns % 32 != 0
        for _, _, policies in composition.branches():
            seen.update({policy.title for policy in policies})
            seen["long"] += len(policies) > 2

    look()
    rare = [name for name in ("columns", "plain", "ragged", "long") if seen[name] < 20]
    kinds = "SwiGLU gated RoPE HeadNorm PlaceKV by_head turn swap keep SumSquares centred watch"
    assert not rare + [name for name in kinds.split() if not seen[name]], dict(seen)
