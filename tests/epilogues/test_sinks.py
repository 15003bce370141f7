"""What taps leave behind: FP8 with its statistics, sums of squares, and which value goes on."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from epicute.epilogues import (
    Columns,
    Composition,
    EmitFP8,
    HeadNorm,
    PlaceKV,
    ResidualAdd,
    RoPE,
    Store,
    SumSquares,
    SwiGLU,
)
from epicute.epilogues import reference as ref
from epicute.quant import DelayedScale
from epicute.testing.strategies import matrices
from tests.epilogues.model import assert_same, noise, r32, special_matrix, wide

F32, BF16, FP8 = torch.float32, torch.bfloat16, torch.float8_e4m3fn


class TestEmitFP8:
    emit = staticmethod((EmitFP8() >> Store(F32)).evaluate)

    @pytest.mark.parametrize("scale", [1.0, 0.25, 0.3, 7.0, 1e-30, 2.0**119])
    def test_contract_on_special_values(self, scale: float) -> None:
        acc, out_scale = special_matrix(30, 40), torch.tensor([scale])
        out = self.emit(acc, out_scale=out_scale)
        scaled = r32(wide(acc) * ref.round_to(1 / wide(out_scale), F32))
        codes = ref.round_to(scaled, FP8)
        assert_same(out["out_fp8"], codes)
        assert_same(out["out"], r32(codes * wide(out_scale)))
        finite = acc[acc.isfinite()].abs().max()
        assert float(out["amax"]) == float(finite)
        assert int(out["saturated"]) == int((scaled.abs() > 448).sum())
        assert int(out["nans"]) == int(acc.isnan().sum())

    @given(data=st.data(), scale=st.floats(2.0**-20, 2.0**20, width=32))
    def test_any_values(self, data: st.DataObject, scale: float) -> None:
        acc = torch.from_numpy(data.draw(matrices((4, 24), non_finite=True)))
        out = self.emit(acc, out_scale=torch.tensor([scale]))
        expected = ref.emit_fp8(acc, torch.tensor([scale]))
        assert float(out["amax"]) == expected.amax
        assert int(out["nans"]) == expected.nans
        kept = wide(out["out_fp8"])
        near = (kept - expected.codes).abs() <= ref.round_to(expected.codes, BF16).abs() / 8 + 2**-9
        assert (near | kept.isnan() & expected.codes.isnan()).all()

    def test_statistics_go_on_and_the_given_ones_stay(self) -> None:
        start = {
            "amax": torch.tensor([5.0]),
            "saturated": torch.tensor([7]),
            "nans": torch.tensor([2**33]),
        }
        acc = torch.tensor([[500.0, float("nan"), -2.0, float("-inf")] * 2])
        out = self.emit(acc, out_scale=torch.ones(1), **start)
        assert (float(out["amax"]), int(out["saturated"]), int(out["nans"])) == (500, 11, 2**33 + 2)
        assert (float(start["amax"]), int(start["saturated"])) == (5.0, 7)
        again = self.emit(acc * 0.5, out_scale=torch.ones(1), **{n: out[n] for n in start})
        assert (float(again["amax"]), int(again["saturated"])) == (500.0, 11 + 2)

    @pytest.mark.parametrize("acc", [torch.zeros(0, 16), torch.full((2, 16), float("nan"))])
    def test_nothing_finite_leaves_the_maximum(self, acc: torch.Tensor) -> None:
        """-1 says "nothing seen" to the roll of the scale; a zero is something."""
        operands = {"out_scale": torch.ones(1), "amax": torch.tensor([-1.0])}
        assert float(self.emit(acc, **operands)["amax"]) == -1.0
        assert float(self.emit(torch.zeros(1, 16), **operands)["amax"]) == 0.0

    def test_agrees_with_the_quantiser(self) -> None:
        """The fused store and ``DelayedScale.quantize`` are one contract: codes, maximum, counts."""
        acc, state = special_matrix(30, 40), DelayedScale.create(initial=0.3)
        fields = {"amax": state.amax_next, "saturated": state.saturated, "nans": state.nans}
        start = {name: tensor.clone() for name, tensor in fields.items()}
        out = self.emit(acc, out_scale=state.scale_used, **start)
        codes, _ = state.quantize(acc)
        assert_same(out["out_fp8"], codes)
        for name, tensor in fields.items():
            assert_same(out[name], tensor, name)


def sums_of_squares(kept: np.ndarray) -> np.ndarray:
    """The documented order, as loops: lane t owns columns 8t to 8t + 7 of every 32."""
    rows, columns = kept.shape
    out = np.zeros((rows, -(-columns // 64)), np.float32)
    for m in range(rows):
        for group in range(out.shape[1]):
            lanes = [np.float32(0)] * 4
            for t in range(4):
                for chunk in (0, 32):
                    for c in range(64 * group + chunk + 8 * t, 64 * group + chunk + 8 * t + 8):
                        x = kept[m, c] if c < columns else np.float32(0)
                        lanes[t] = lanes[t] + x * x
            out[m, group] = (lanes[0] + lanes[1]) + (lanes[2] + lanes[3])
    return out


class TestSumSquares:
    @pytest.mark.parametrize("dtype", [F32, BF16, torch.float16])
    @pytest.mark.parametrize("columns", [1, 8, 64, 72, 100, 576])
    def test_order_of_addition(self, dtype: torch.dtype, columns: int) -> None:
        x = noise(3, columns, scale=20.0)
        out = (SumSquares() >> Store(dtype)).evaluate(x)
        kept = ref.store(x, dtype).to(F32).numpy()
        assert_same(out["sumsq_out"], torch.from_numpy(sums_of_squares(kept)))
        assert_same(out["out"], torch.from_numpy(kept))

    @given(data=st.data(), columns=st.integers(1, 200))
    def test_order_on_any_values(self, data: st.DataObject, columns: int) -> None:
        x = data.draw(matrices((2, columns), limit=1e18, spread=12))
        out = (SumSquares() >> Store(F32)).evaluate(x)
        assert_same(out["sumsq_out"], torch.from_numpy(sums_of_squares(x)))

    def test_the_order_is_the_same_behind_pairs_and_heads(self) -> None:
        """Whatever stands before it in the chain, and inside a range of columns."""
        x = noise(3, 256, scale=3.0)
        gated = SwiGLU() >> Store(F32) >> SumSquares()
        found = gated.evaluate(x)
        assert_same(found["sumsq_out"], torch.from_numpy(sums_of_squares(found["out"].numpy())))
        heads = HeadNorm(64) >> RoPE(64) >> Store(F32) >> SumSquares()
        operands = {"head_gain": noise(64), "inv_freq": noise(32), "positions": torch.arange(3)}
        found = heads.evaluate(x, **operands)
        assert_same(found["sumsq_out"], torch.from_numpy(sums_of_squares(found["out"].numpy())))
        ranges = Columns(a=(64, Store(BF16)), b=(192, SumSquares() >> Store(F32)))
        found = Composition((), ranges).evaluate(x)
        assert_same(found["b_sumsq_out"], torch.from_numpy(sums_of_squares(found["b_out"].numpy())))
        before = Composition((SumSquares(),), Columns(a=(64, Store(F32)), b=(192, Store(F32))))
        found = before.evaluate(x)
        assert_same(found["sumsq_out"], torch.from_numpy(sums_of_squares(x.numpy())))

    def test_special_values(self) -> None:
        x = torch.zeros(4, 64)
        x[0, 5], x[1, 5], x[2, 5] = float("nan"), float("-inf"), 1e20
        out = (SumSquares() >> Store(F32)).evaluate(x)["sumsq_out"][:, 0]
        assert out[0].isnan()
        assert out[1:].tolist() == [float("inf"), float("inf"), 0.0]

    def test_the_value_is_the_one_the_next_store_keeps(self) -> None:
        """A store that follows decides, not one that came before, and not one of another value."""
        x = torch.full((1, 64), 1.0 + 2.0**-9)

        def total(composition: Composition, **operands: torch.Tensor) -> float:
            return float(composition.evaluate(x, **operands)["sumsq_out"])

        exact = 64 * float(np.float32((1 + 2.0**-9) ** 2))
        assert total(SumSquares() >> Store(BF16)) == 64.0
        assert total(SumSquares() >> Store(F32) >> Store(BF16, name="second")) == exact
        assert total(Store(BF16) >> SumSquares()) == 64.0
        assert total(Store(F32) >> SumSquares()) == exact
        cells = torch.zeros(1, 16, 1, 64).to(BF16)
        placed = SumSquares() >> PlaceKV(64) >> Store(BF16)
        assert total(placed, cells=cells, slots=torch.tensor([0])) == 64.0
        # EmitFP8 passes code * scale on: what the Store keeps is another value.
        assert total(SumSquares() >> EmitFP8() >> Store(BF16), out_scale=torch.ones(1)) == exact
        added = SumSquares() >> ResidualAdd() >> Store(BF16)
        assert total(added, residual=torch.zeros(1, 64)) == exact


def test_one_epilogue_writes_all_a_block_needs() -> None:
    """h in BF16, its sums of squares and its FP8 copy, each of the value as stored before it."""
    acc, residual = noise(5, 192), noise(5, 192, seed=1).to(BF16)
    out = (ResidualAdd() >> SumSquares() >> Store(BF16) >> EmitFP8()).evaluate(
        acc, residual=residual, out_scale=torch.tensor([0.01])
    )
    h = ref.store(r32(wide(acc) + wide(residual)), BF16)
    assert_same(out["out"], h)
    assert_same(out["sumsq_out"], torch.from_numpy(sums_of_squares(h.to(F32).numpy())))
    inverse = ref.round_to(1 / wide(torch.tensor([0.01])), F32)
    assert_same(out["out_fp8"], ref.round_to(r32(h * inverse), FP8))
    assert float(out["amax"]) == float(h.abs().max())
