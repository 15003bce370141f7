"""Laws that hold whatever the numbers are: what two ways of saying the same must agree on."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from epicute.epilogues import (
    Bias,
    Columns,
    Composition,
    Counter,
    Dequantize,
    EmitFP8,
    Gain,
    HeadNorm,
    Matrix,
    Maximum,
    Output,
    Partials,
    PartialsOutput,
    PlaceKV,
    ResidualAdd,
    RoPE,
    RowScale,
    Slots,
    Store,
    SumSquares,
    SwiGLU,
)
from epicute.epilogues.operands import ColumnVector, Operand
from epicute.testing import Ranges
from epicute.testing.draws import Case, cases
from epicute.testing.strategies import matrices
from tests.epilogues.compositions import compositions
from tests.epilogues.model import assert_same, near, noise, wide

F32, BF16, FP8 = torch.float32, torch.bfloat16, torch.float8_e4m3fn
PER_ROW = (ColumnVector, Matrix, Partials, Slots)
POWERS = st.integers(-20, 20).map(lambda e: torch.tensor([2.0**e]))
ROW_RANGES = Ranges(limit=300.0, rows=20, non_finite=True)


def rows_of(case: Case, composition: Composition, rows: torch.Tensor) -> Case:
    """The case with only these rows, in this order."""
    kinds = composition.operands
    operands = {
        name: x[rows] if isinstance(kinds[name], PER_ROW) else x
        for name, x in case.operands.items()
    }
    return Case(case.acc[rows], operands)


def is_per_row(kind: Operand) -> bool:
    return isinstance(kind, Output | PartialsOutput)


class TestRows:
    """A row's results depend on that row alone, and totals on all of them."""

    @settings(max_examples=60)
    @given(data=st.data())
    def test_permuted_rows(self, data: st.DataObject) -> None:
        composition, columns = data.draw(compositions())
        case = data.draw(cases(composition, [columns], ROW_RANGES))
        order = torch.tensor(data.draw(st.permutations(range(len(case.acc)))), dtype=torch.int64)
        moved = rows_of(case, composition, order)
        straight = composition.evaluate(case.acc, **case.operands)
        found = composition.evaluate(moved.acc, **moved.operands)
        for name, kind in composition.operands.items():
            if kind.written:
                expected = straight[name][order] if is_per_row(kind) else straight[name]
                assert_same(found[name], expected, name)

    @settings(max_examples=60)
    @given(data=st.data())
    def test_any_split_of_the_rows(self, data: st.DataObject) -> None:
        """Two calls, the second going on from the first's totals and cells, are one."""
        composition, columns = data.draw(compositions())
        case = data.draw(cases(composition, [columns], ROW_RANGES))
        cut = data.draw(st.integers(0, len(case.acc)))
        whole = composition.evaluate(case.acc, **case.operands)
        running = dict(case.operands)
        parts = []
        for rows in (torch.arange(cut), torch.arange(cut, len(case.acc))):
            part = rows_of(Case(case.acc, running), composition, rows)
            parts.append(composition.evaluate(part.acc, **part.operands))
            running |= {n: x for n, x in parts[-1].items() if n in running}
        for name, kind in composition.operands.items():
            if is_per_row(kind):
                assert_same(torch.cat([part[name] for part in parts]), whole[name], name)
            elif kind.written:
                assert_same(parts[1][name], whole[name], name)


class TestScales:
    @given(a=POWERS, b=POWERS, x=matrices((3, 24), limit=1e6, spread=3))
    def test_powers_of_two_combine(self, a: torch.Tensor, b: torch.Tensor, x) -> None:
        acc = torch.from_numpy(x)
        one = Dequantize("tensor", None) >> Store(F32)
        two = Dequantize("tensor", None) >> Dequantize("tensor", None, name="b") >> Store(F32)
        found = two.evaluate(acc, scale=a, b_scale=b)["out"]
        expected = one.evaluate(acc, scale=a * b)["out"]
        normal = (acc.abs() >= 1e-20) | (acc == 0)  # a subnormal in between would round
        assert_same(found[normal], expected[normal])

    @given(exponent=st.integers(-8, 8), x=matrices((4, 48), limit=100.0))
    def test_an_fp8_scale_moves_with_its_values(self, exponent: int, x) -> None:
        acc = torch.from_numpy(x)
        power = torch.tensor([2.0**exponent])
        emit = EmitFP8() >> Store(F32)
        at_one = emit.evaluate(acc, out_scale=torch.ones(1))
        moved = emit.evaluate(acc * power, out_scale=power)
        assert_same(moved["out_fp8"], at_one["out_fp8"])
        assert_same(moved["out"], at_one["out"] * power)
        assert_same(moved["amax"], at_one["amax"] * power)
        assert_same(moved["saturated"], at_one["saturated"])

    @given(
        scale=st.sampled_from([0.1, 0.37, 1.0, 5.0]),
        x=matrices((5, 64), non_finite=True, limit=1e4),
    )
    def test_statistics_of_an_fp8_store(self, scale: float, x) -> None:
        """amax bounds what is stored (up to a rounding of it), and clipped is what exceeds 448."""
        acc = torch.from_numpy(x)
        out = (EmitFP8() >> Store(F32)).evaluate(acc, out_scale=torch.tensor([scale]))
        finite = acc.isfinite()
        stored = out["out"][finite].abs()
        bound = float(out["amax"]) * (1 + 2.0**-4) + 2.0**-10 * scale
        assert (stored <= bound).all()
        clipped = (wide(acc) / scale).abs() > 448.0 * (1 + 2.0**-23)
        edge = ((wide(acc) / scale).abs() - 448.0).abs() < 1e-3
        assert int(clipped.sum()) <= int(out["saturated"]) <= int((clipped | edge).sum())
        assert int(out["nans"]) == int(out["out_fp8"].float().isnan().sum())


class TestRotation:
    @pytest.mark.parametrize("style", ["half", "interleaved"])
    @pytest.mark.parametrize(("dim", "rotary"), [(64, 64), (128, 64), (80, 80), (256, 128)])
    def test_there_and_back(self, style: str, dim: int, rotary: int) -> None:
        x, positions = noise(6, 2 * dim), torch.tensor([0, 1, 77, 2047, 32767, 131071])
        both = RoPE(dim, rotary, style) >> RoPE(dim, rotary, style, name="back") >> Store(F32)
        inv_freq = 1e4 ** -(torch.arange(0, rotary, 2) / rotary)
        operands = {"positions": positions, "inv_freq": inv_freq}
        back = both.evaluate(x, **operands, back_positions=positions, back_inv_freq=-inv_freq)
        near(back["out"], x, 4e-6 * x.abs().max())

    def test_lengths_stay(self) -> None:
        x = noise(4, 128)
        operands = {"positions": torch.arange(4) * 1000, "inv_freq": torch.rand(32)}
        out = (RoPE(64) >> Store(F32)).evaluate(x, **operands)["out"]
        pairs = [t.double().reshape(4, 2, 2, 32).square().sum(2) for t in (x, out)]
        near(pairs[1], pairs[0], 1e-5)

    def test_styles_differ_by_a_permutation(self) -> None:
        x, operands = noise(4, 64), {"positions": torch.arange(4), "inv_freq": torch.rand(32)}
        order = torch.arange(64).reshape(2, 32).T.ravel()  # 0, 32, 1, 33, …
        half = (RoPE(64) >> Store(F32)).evaluate(x, **operands)["out"]
        mixed = (RoPE(64, 64, "interleaved") >> Store(F32)).evaluate(x[:, order], **operands)
        assert_same(mixed["out"], half[:, order])


class TestPlacement:
    @given(data=st.data(), dtype=st.sampled_from([BF16, torch.float16]))
    def test_gathered_cells_are_the_unplaced_output(
        self, data: st.DataObject, dtype: torch.dtype
    ) -> None:
        slots = torch.tensor(data.draw(st.permutations(range(48)))[:11])
        x, cells = noise(11, 128), torch.zeros(3, 16, 2, 64).to(dtype)
        placed = (PlaceKV(64, dtype) >> Store(dtype)).evaluate(x, slots=slots, cells=cells)
        gathered = placed["cells"].reshape(48, 128)[slots]
        assert_same(gathered, x.to(dtype))
        assert_same(placed["out"], gathered)


class TestRanges:
    def test_a_fused_projection_is_its_parts(self) -> None:
        """Column slices of a fused QKV are separate projections, to the bit."""
        acc, scale = noise(9, 384, scale=9.0), torch.rand(9) + 0.1
        weight_scale, slots = torch.rand(384) + 0.5, torch.randperm(32)[:9]
        rows = {"scale": scale, "positions": torch.arange(9) * 99, "inv_freq": torch.rand(32)}
        gain, cells = noise(64, seed=8), torch.zeros(2, 16, 1, 64).to(BF16)
        chains = {
            "q": (256, HeadNorm(64) >> RoPE(64) >> Store(BF16)),
            "k": (64, RoPE(64) >> PlaceKV(64)),
            "v": (64, PlaceKV(64)),
        }
        fused = (Dequantize("row") >> Columns(**chains)).evaluate(
            acc,
            **rows,
            weight_scale=weight_scale,
            slots=slots,
            q_head_gain=gain,
            k_cells=cells,
            v_cells=cells,
        )
        given = {**rows, "slots": slots, "head_gain": gain, "cells": cells}
        start = 0
        for name, (width, chain) in chains.items():
            alone = Dequantize("row") >> chain
            span = slice(start, start + width)
            operands = {n: given[n] for n in alone.operands if n in given}
            found = alone.evaluate(acc[:, span], weight_scale=weight_scale[span], **operands)
            for local, out in found.items():
                assert_same(out, fused[f"{name}_{local}"], f"{name}_{local}")
            start += width

    def test_sums_of_squares_do_not_see_how_columns_are_cut(self) -> None:
        x = noise(5, 384, scale=4.0)
        whole = (SumSquares() >> Store(BF16)).evaluate(x)["sumsq_out"]
        halves = Columns(a=(128, SumSquares() >> Store(BF16)), b=(256, SumSquares() >> Store(BF16)))
        parts = Composition((), halves).evaluate(x)
        assert_same(torch.cat([parts["a_sumsq_out"], parts["b_sumsq_out"]], dim=1), whole)
        wider = (SumSquares() >> Store(BF16)).evaluate(torch.cat([x, x], dim=1))["sumsq_out"]
        assert_same(wider, torch.cat([whole, whole], dim=1))

    def test_a_row_factor_has_the_same_bits_whoever_computes_it(self) -> None:
        """The partials of one projection scale the next: fused in two ways, the same rows."""
        x, acc = noise(5, 192, scale=3.0), noise(5, 64, seed=1)
        taken = (SumSquares() >> Store(BF16)).evaluate(x)["sumsq_out"]
        zero = torch.zeros(5, 192)
        again = (ResidualAdd() >> SumSquares() >> Store(BF16) >> EmitFP8()).evaluate(
            x, residual=zero, out_scale=torch.ones(1)
        )["sumsq_out"]
        assert_same(again, taken)
        scaled = (RowScale(192) >> Store(F32)).evaluate(acc, sumsq=taken)["out"]
        ratio = scaled.double() / acc.double()
        assert (ratio.amax(1) - ratio.amin(1) < 1e-6 * ratio.amax(1)).all()


class TestNeutralElements:
    """Operands that change nothing, to the bit."""

    @given(x=matrices((4, 72), non_finite=True))
    def test_ones_and_zeros(self, x) -> None:
        acc = torch.from_numpy(x)
        neutral = Dequantize("row") >> Gain() >> Gain(1.0, name="g") >> Bias() >> Store(F32)
        zeros, ones = torch.zeros(72), torch.ones(72)
        out = neutral.evaluate(
            acc,
            scale=torch.ones(4),
            weight_scale=ones,
            gain=ones,
            g_gain=zeros,
            bias=-zeros,
        )["out"]
        assert_same(out, acc)

    def test_swiglu_of_swapped_halves(self) -> None:
        """With a gate of ones the sigmoid is a constant, so halves can be told apart."""
        ones, up = torch.ones(2, 24), noise(2, 24)
        out = (SwiGLU() >> Store(F32)).evaluate(torch.cat([ones, up], 1))["out"]
        near(out, up * 0.7310585786300049, 1e-6)

    def test_running_outputs_start_from_zero_when_left_out(self) -> None:
        fused = EmitFP8() >> Store(F32)
        acc = noise(3, 24, scale=300.0)
        kinds = {n: k for n, k in fused.operands.items() if isinstance(k, Counter | Maximum)}
        start = {n: torch.zeros(1, dtype=k.dtype) for n, k in kinds.items()}
        given = fused.evaluate(acc, out_scale=torch.ones(1), **start)
        left_out = fused.evaluate(acc, out_scale=torch.ones(1))
        for name in kinds:
            assert_same(given[name], left_out[name], name)
