"""The example's policies pass all that the built-in ones pass: references, maps, keys, compilation."""

from __future__ import annotations

import contextlib
import io

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from epicute import Columns, Composition, Policy, Store, Target, compose, kernel_for
from epicute.errors import CompositionError
from epicute.jit import compile
from epicute.jit.key import encode
from epicute.testing import Ranges
from epicute.testing.draws import cases
from examples import custom_policies as example
from tests.epilogues.emulator import emulate
from tests.epilogues.model import assert_same

MINE: list[Policy] = [
    example.soft_cap(),
    example.squared_relu_glu(),
    example.group_norm(eps=1e-3),
    example.watch_outliers(),
]


@pytest.mark.parametrize("made", MINE, ids=lambda made: made.title)
def test_the_lanes_of_the_kernel_give_the_same(made: Policy) -> None:
    composition = made >> Store(torch.float32)

    @settings(max_examples=8)
    @given(data=st.data())
    def agree(data: st.DataObject) -> None:
        case = data.draw(cases(composition, [64, 192, 384], Ranges(rows=70, non_finite=True)))
        found = emulate(composition, case.acc, case.operands)
        for name, out in composition.evaluate(case.acc, **case.operands).items():
            assert_same(found[name], out, name)

    agree()


def test_they_have_keys_of_their_own() -> None:
    keys = {str(encode(made.key())) for made in (*MINE, example.group_norm())}
    assert len(keys) == 5


def test_they_compose_with_ranges_and_refuse_what_others_refuse() -> None:
    both = compose(
        Columns(
            a=(128, example.soft_cap() >> Store(torch.bfloat16)),
            b=(256, example.squared_relu_glu() >> example.group_norm() >> Store(torch.bfloat16)),
        )
    )
    assert set(both.operands) == {"a_cap", "a_out", "b_up_scale", "b_group_gain", "b_out"}
    with pytest.raises(CompositionError, match="squared_relu_glu >> squared_relu_glu"):
        example.squared_relu_glu() >> example.squared_relu_glu(name="again")
    with pytest.raises(CompositionError, match="operand 'cap'"):
        example.soft_cap() >> example.soft_cap()


def test_main_prints_the_drawing_the_checks_and_the_values() -> None:
    composition: Composition = example.fused()
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        example.check_all(examples=10)
    assert printed.getvalue().count("out: worst norm") == 3
    assert "outliers: worst norm 0, worst row 0" in printed.getvalue()
    out = example.evaluate()
    assert out["out"].shape == (16, 256)
    assert out["out"].isfinite().all()
    assert 0 < int(out["outliers"]) < out["out"].numel()
    assert float(out["peak"]) <= 3.0
    assert set(composition.operands) >= set(out)


@pytest.mark.compile
def test_main_ends_with_the_report_of_the_compiler(capsys: pytest.CaptureFixture[str]) -> None:
    example.main()
    printed = capsys.readouterr().out
    assert printed.startswith(str(example.fused()))
    assert "0 B stored, 0 B loaded" in printed
    kernel = kernel_for(
        example.fused(), n=512, k=256, dtype=torch.float8_e4m3fn, target=Target("sm_90a")
    )
    assert compile(kernel).report.problems() == []


@pytest.mark.gpu
@pytest.mark.compile
def test_the_fused_kernel_agrees_with_the_references() -> None:
    example.check_all(device="cuda")
