"""The kernel driver's walk over units, blocks and lanes gives what the interpreter gives, bit for bit."""

from __future__ import annotations

from collections import Counter as Tally
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from epicute.epilogues import (
    Bias,
    Columns,
    Composition,
    Dequantize,
    EmitFP8,
    HeadNorm,
    PlaceKV,
    Policy,
    ResidualAdd,
    RoPE,
    RowScale,
    Store,
    SumSquares,
    SwiGLU,
)
from epicute.epilogues.resolve import Domain
from epicute.errors import UnsupportedError
from epicute.testing import Ranges
from epicute.testing.draws import Case, cases
from tests.epilogues.compositions import (
    GROUPED,
    HEADS,
    PAIRS,
    PLAIN,
    blend,
    by_channel,
    compositions,
)
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
OUTSIDE = (
    blend()
    >> by_channel()
    >> SumSquares()
    >> Columns(a=(64, Store(BF16)), b=(256, SwiGLU() >> Store(BF16)), c=(80, Store(BF16)))
)
GATED = Dequantize() >> RowScale(width=200) >> SwiGLU(limit=7.0) >> EmitFP8()


@pytest.mark.parametrize(
    ("composition", "columns"),
    [
        (QKV, 384),
        (RESIDUAL, 576),
        (RESIDUAL, 72),
        (RESIDUAL, 1001),
        (GATED, 400),
        (GATED, 66),
        (OUTSIDE, 400),
    ],
)
@settings(max_examples=5)
@given(data=st.data())
def test_the_main_projections(composition: Composition, columns: int, data: st.DataObject) -> None:
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


@pytest.mark.parametrize("wrong", ["offset", "remaining"])
def test_a_wrong_map_is_noticed(wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Columns one lane off, and padding that is taken for columns: both show."""
    composition = Bias() >> SwiGLU() >> Store(torch.float32)
    case = Case(torch.randn(3, 72), {"bias": torch.randn(72)})
    agree(composition, case, 1)
    offset = Domain.offset
    maps = {
        "offset": lambda self, slot: offset(self, slot ^ 1),
        "remaining": lambda self, index, slot: None,
    }
    monkeypatch.setattr(Domain, wrong, maps[wrong])
    with pytest.raises((AssertionError, IndexError)):
        agree(composition, case, 1)


ALONE = [(make, (72, 320)) for make in (*PLAIN, *PAIRS)]
ALONE += [(make, (128, 384)) for make in GROUPED]
ALONE += [(make, (dim, 3 * dim)) for (dim, _), made in HEADS.items() for make in made]


def legal(composition: Composition, columns: int) -> bool:
    try:
        composition.row_order(columns)
    except UnsupportedError:
        return False
    return True


def test_every_policy_of_the_pool_alone() -> None:
    """Each is legal by itself, but for interleaved pairs that a quad lane would share with none."""
    refused = 0

    @settings(max_examples=1, phases=[Phase.generate])
    @given(data=st.data())
    def one(make: Callable[[str], Policy], columns: tuple[int, ...], data: st.DataObject) -> None:
        composition = make("p") >> Store(torch.float32, name="last")
        case = data.draw(cases(composition, columns, Ranges(non_finite=True)))
        agree(composition, case, 1)

    for make, columns in ALONE:
        if legal(make("p") >> Store(name="last"), columns[0]):
            one(make, columns)
        else:
            refused += 1
    assert refused == 10  # rotary_dim 16 and 48 of five head dimensions


def test_what_is_drawn_is_varied() -> None:
    """Most drawn compositions are of some length, and all forms and raggedness are among them."""
    seen: Tally[str] = Tally()

    @settings(max_examples=200, database=None)
    @given(drawn=compositions())
    def look(drawn: tuple[Composition, int]) -> None:
        composition, columns = drawn
        seen["ranges" if composition.columns else "one chain"] += 1
        seen["ragged"] += columns % 32 != 0
        for _, _, policies in composition.branches():
            kind = Composition(policies).form.kind
            seen[kind or "plain"] += 1
            seen["long"] += len(policies) > 2

    look()
    wanted = ("ranges", "one chain", "ragged", "plain", "halves", "heads", "long")
    assert min(seen[name] for name in wanted) >= 20, dict(seen)
