"""The tuple that every launch passes: each operand's place, what it promises, and what is refused."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from epicute.epilogues import (
    Bias,
    Columns,
    Dequantize,
    EmitFP8,
    PlaceKV,
    ResidualAdd,
    RoPE,
    RowScale,
    Store,
    SumSquares,
    SwiGLU,
    compose,
)
from epicute.epilogues.resolve import resolve
from epicute.errors import ArgumentError
from epicute.gemm.arguments import HEAD, ArgumentLayout
from tests.gemm.compositions import DTYPES, SKELETONS, WIDTHS

BF16, FP32, FP8 = torch.bfloat16, torch.float32, torch.float8_e4m3fn
QKV = Dequantize("row") >> Columns(
    q=(128, RoPE(64) >> Store(BF16)), k=(64, RoPE(64) >> PlaceKV(64)), v=(64, PlaceKV(64, FP8))
)


def layout_of(composition, n: int, **options) -> ArgumentLayout:
    return ArgumentLayout.of(resolve(compose(composition), n), **options)


@given(
    skeleton=st.sampled_from(sorted(SKELETONS)),
    width=st.sampled_from(WIDTHS),
    dtype=st.sampled_from(sorted(DTYPES)),
)
def test_every_field_has_a_place_of_its_own(skeleton: str, width: int, dtype: str) -> None:
    case = SKELETONS[skeleton].case(dtype, width, 576)
    layout = layout_of(case.composition, case.n, dtypes=dict(case.dtypes))
    places = [spec.at(field) for spec in layout.operands for field in spec.fields]
    assert places == list(range(len(HEAD), layout.count))
    assert [spec.name for spec in layout.operands] == sorted(case.composition.operands)
    for spec in layout.operands:
        assert layout[spec.name] is spec
        assert spec.alignment % spec.dtype.itemsize == 0


def test_what_each_kind_passes() -> None:
    fields = {spec.name: spec.fields for spec in layout_of(QKV, 256).operands}
    cell = ("address", "page_stride", "token_stride", "head_stride", "page_size", "capacity")
    assert fields == {
        "inv_freq": ("address",),
        "k_cells": cell,
        "positions": ("address",),
        "q_out": ("address", "row_stride"),
        "scale": ("address",),
        "slots": ("address",),
        "v_cell_scale": ("address",),
        "v_cells": cell,
        "v_cells_nans": ("address",),
        "v_cells_saturated": ("address",),
        "weight_scale": ("address",),
    }
    chain = RowScale(576) >> ResidualAdd() >> SumSquares() >> Store(BF16)
    fields = {spec.name: spec.fields for spec in layout_of(chain, 64).operands}
    assert set(fields.values()) == {("address", "row_stride")}


@pytest.mark.parametrize(
    ("n", "dtype", "expected"),
    [(64, BF16, 16), (100, BF16, 8), (98, BF16, 4), (97, BF16, 2), (100, FP8, 4), (97, FP8, 1)],
)
def test_rows_promise_what_a_contiguous_tensor_keeps(n: int, dtype, expected: int) -> None:
    assert layout_of(Store(dtype), n)["out"].alignment == expected


def test_vectors_and_partials_promise_their_element() -> None:
    chain = RowScale(576) >> Bias() >> SumSquares() >> Store(BF16)
    layout = layout_of(chain, 4096)
    assert {s.name: s.alignment for s in layout.operands} == {
        "bias": 4,
        "out": 16,
        "sumsq": 4,
        "sumsq_out": 4,
    }


def test_a_stated_alignment_is_taken() -> None:
    chain = ResidualAdd() >> Store(BF16)
    layout = layout_of(chain, 64, alignments={"out": 2, "residual": 8})
    assert [layout[n].alignment for n in ("out", "residual")] == [2, 8]
    assert layout.key() != layout_of(chain, 64).key()


def test_a_read_operand_has_any_dtype_of_its_kind() -> None:
    chain = ResidualAdd() >> Bias() >> Store(BF16)
    layout = layout_of(chain, 64, dtypes={"residual": FP32, "bias": BF16})
    assert layout["residual"].dtype == FP32
    assert layout["residual"].alignment == 16
    assert layout["bias"].alignment == 2
    assert layout.key() != layout_of(chain, 64).key()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"dtypes": {"biass": FP32}}, r"dtypes: got operand 'biass', expected one of bias, out"),
        ({"alignments": {"x": 8}}, r"alignments: got operand 'x', expected one of bias, out"),
        ({"dtypes": {"bias": torch.int32}}, r"dtypes\['bias'\]: got torch.int32, expected torch.f"),
        ({"dtypes": {"bias": FP8}}, r"dtypes\['bias'\]: got torch.float8_e4m3fn"),
        ({"dtypes": {"out": FP32}}, r"dtypes\['out'\]: got torch.float32, expected torch.bfloat16"),
        ({"alignments": {"out": 1}}, r"alignments\['out'\]: got 1, expected a power of two from 2"),
        ({"alignments": {"out": 12}}, r"alignments\['out'\]: got 12, expected a power of two"),
        ({"alignments": {"out": 32}}, r"alignments\['out'\]: got 32, expected a power of two"),
    ],
)
def test_refusals_name_the_operand(options, said: str) -> None:
    with pytest.raises(ArgumentError, match=said):
        layout_of(Bias() >> Store(BF16), 64, **options)


def test_a_written_dtype_is_the_policys() -> None:
    with pytest.raises(ArgumentError, match="set the dtype in the policy"):
        layout_of(EmitFP8(), 64, dtypes={"out_fp8": BF16})


def test_names_of_two_halves_do_not_meet() -> None:
    chain = Bias() >> SwiGLU() >> Bias(name="down") >> Store(BF16)
    layout = layout_of(chain, 200)
    assert {s.name: s.shape for s in layout.operands} == {
        "bias": (200,),
        "down_bias": (100,),
        "out": ("M", 100),
    }
