"""Factors that are drawn keep products of two of them in float32's range."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from epicute.epilogues import Dequantize, Gain, Store
from epicute.testing.draws import SMALLEST_FACTOR, Ranges, cases

COMPOSITION = Dequantize("row", "column") >> Gain() >> Store(torch.float32)


@settings(max_examples=200)
@given(st.data())
def test_no_factor_underflows(data: st.DataObject) -> None:
    case = data.draw(cases(COMPOSITION, [8, 24], Ranges()))
    for name in ("scale", "weight_scale", "gain"):
        x = case.operands[name].double().abs()
        assert bool(((x == 0) | (x >= SMALLEST_FACTOR)).all()), name
