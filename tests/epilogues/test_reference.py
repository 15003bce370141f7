"""The float64 references against closed forms, PyTorch's own operators, and the field failures'
worked cases.
"""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from epicute.epilogues import reference as ref
from epicute.errors import ArgumentError
from epicute.gemm import reference as gemm
from epicute.testing.strategies import SPECIAL_FLOATS, matrices, slots

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn)


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def close(a: torch.Tensor, b: torch.Tensor, rtol: float = 1e-12) -> None:
    torch.testing.assert_close(a, b.to(torch.float64), rtol=rtol, atol=1e-12, equal_nan=True)


def test_imports_without_the_dsl() -> None:
    code = (
        "import sys\n"
        "for name in ('cutlass', 'tvm_ffi', 'cuda'): sys.modules[name] = None\n"
        "import epicute.epilogues.reference, epicute.gemm.reference\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


class TestRoundTo:
    @pytest.mark.parametrize("dtype", DTYPES)
    def test_keeps_what_the_dtype_holds(self, dtype: torch.dtype) -> None:
        """Every 8- and 16-bit pattern, and a sample of 32-bit ones, is its own rounding."""
        if dtype == torch.float8_e4m3fn:
            held = torch.arange(256, dtype=torch.uint8).view(dtype)
        elif dtype == torch.float32:
            held = torch.randint(-(2**31), 2**31, (100_000,), dtype=torch.int64).to(torch.int32)
            held = held.view(torch.float32)
        else:
            held = torch.arange(-(2**15), 2**15).to(torch.int16).view(dtype)
        value = held.to(torch.float64)
        out = ref.round_to(value, dtype)
        assert torch.equal(torch.isnan(out), torch.isnan(value))
        number = ~torch.isnan(value)
        assert torch.equal(out[number], value[number])
        assert torch.equal(out[number].signbit(), value[number].signbit())

    @pytest.mark.parametrize("dtype", DTYPES)
    @given(data=st.data())
    def test_nearest_even(self, dtype: torch.dtype, data: st.DataObject) -> None:
        """The result is a value of the dtype, no neighbour is nearer, and a tie goes to the even
        code.
        """
        raw, bits = (torch.int32, 32) if dtype == torch.float32 else (torch.int16, 16)
        if dtype == torch.float8_e4m3fn:
            raw, bits = torch.uint8, 8
        largest = torch.finfo(dtype).max
        top = int(torch.tensor(largest, dtype=dtype).view(raw))
        code = data.draw(st.integers(0, top - 1))
        low, high = torch.tensor([code, code + 1]).to(raw).view(dtype).to(torch.float64)
        weight = data.draw(st.sampled_from([0.5, 0.25, 0.75, 0.5 - 2**-20, 0.5 + 2**-20]))
        between = low + (high - low) * weight
        expected = low if weight < 0.5 else high
        if weight == 0.5:
            expected = low if code % 2 == 0 else high
        for sign in (1.0, -1.0):
            assert float(ref.round_to(sign * between, dtype)) == sign * float(expected)
        assert bits

    def test_past_the_range(self) -> None:
        big = torch.tensor([1e39, -1e39, float("inf"), float("nan")], dtype=torch.float64)
        assert ref.round_to(big, torch.float32)[:3].tolist() == [
            float("inf"),
            float("-inf"),
            float("inf"),
        ]
        assert ref.round_to([65519.0, 65520.0], torch.float16).tolist() == [65504.0, float("inf")]
        fp8 = ref.round_to(big, torch.float8_e4m3fn)
        assert fp8[:3].tolist() == [448.0, -448.0, 448.0]
        assert fp8[3].isnan()

    def test_one_rounding_from_float64(self) -> None:
        """A midpoint of BF16 plus less than FP32 can see rounds up; through FP32 it would round to
        even, down.
        """
        value = 1.0 + 2.0**-8 + 2.0**-40
        assert float(ref.round_to(value, torch.bfloat16)) == 1.0 + 2.0**-7

    def test_unknown_dtype(self) -> None:
        with pytest.raises(ArgumentError, match="dtype"):
            ref.round_to([1.0], torch.int8)


class TestFieldFailures:
    def test_ge_05_shard_scales(self) -> None:
        scale = torch.tensor([1.0, 0.01, 100.0]).repeat_interleave(4)
        linear = gemm.Linear(torch.ones(4, 512), torch.ones(12, 512), None, scale)
        close(gemm.product(linear)[0, ::4], torch.tensor([512.0, 5.12, 51200.0]), rtol=1e-6)

    def test_ge_06_bias_enters_once_before_rope(self) -> None:
        bias = random(3 * 64)
        linear = gemm.Linear(torch.ones(2, 16), torch.zeros(192, 16), bias=bias)
        rotary = gemm.Rotary(torch.tensor([0, 5]), torch.ones(32), 64)
        out = gemm.qkv_projection(linear, (64, 64, 64), rotary)
        close(out["v"][1], bias[128:])
        close(out["k"][0], bias[64:128])
        close(out["k"], ref.rope(bias[64:128].expand(2, 64), [0, 5], torch.ones(32), 64))

    def test_ge_10_gain_in_full_precision(self) -> None:
        gain = torch.tensor([0.00390625, 15.8125], dtype=torch.bfloat16)
        assert ref.gain(torch.ones(1, 2), gain, 1.0)[0].tolist() == [1.00390625, 16.8125]

    def test_ge_12_one_rounding_to_fp8(self) -> None:
        assert float(ref.store(4.25 + 2.0**-10, torch.float8_e4m3fn)) == 4.5

    def test_ge_17_limit(self) -> None:
        out = ref.swiglu(torch.tensor([[20.0, -20.0]]), limit=7.0)
        assert float(out) == pytest.approx(-48.9553, abs=1e-3)

    @pytest.mark.parametrize(("style", "second"), [("half", 2), ("interleaved", 1)])
    def test_kv_03_pairing(self, style: str, second: int) -> None:
        x = torch.tensor([[1.0, 0.0, 0.0, 0.0]])
        out = ref.rope(x, [1], torch.tensor([1.0, 0.0]), 4, style=style)
        expected = torch.zeros(1, 4, dtype=torch.float64)
        expected[0, 0], expected[0, second] = 0.5403023058681398, 0.8414709848078965
        close(out, expected)

    def test_kv_01_partial_rotary_leaves_the_rest(self) -> None:
        x = random(3, 256)
        out = ref.rope(x, [0, 1, 2047], torch.full((32,), 0.7), 128, rotary_dim=64, magnitude=1.5)
        assert torch.equal(out.reshape(3, 2, 128)[..., 64:], x.reshape(3, 2, 128)[..., 64:])

    def test_kv_05_magnitude_once(self) -> None:
        x = random(2, 64)
        close(ref.rope(x, [0, 0], torch.ones(32), 64, magnitude=1.4852), 1.4852 * x)

    def test_kv_17_norm_before_rope(self) -> None:
        x, gain = random(1, 128), 1 + torch.arange(128) / 128
        frequency = 1e4 ** (-torch.arange(64) / 64)
        after = ref.rope(ref.head_norm(x, gain, 128, 1e-6), [5], frequency, 128)
        before = ref.head_norm(ref.rope(x, [5], frequency, 128), gain, 128, 1e-6)
        assert (after - before).norm() / after.norm() > 0.1

    def test_kv_10_skipped_slots(self) -> None:
        cells = torch.full((2, 4, 1, 8), 7.0)
        given = torch.tensor([-1, 3, 8, 2**40 + 17, 4])
        placed = ref.place_kv(torch.ones(5, 8), given, cells)
        assert placed.written[:, :, 0, 0].nonzero().tolist() == [[0, 3], [1, 0]]
        assert torch.equal(placed.cells == 1.0, placed.written)

    def test_kv_11_more_rows_than_slots(self) -> None:
        placed = ref.place_kv(torch.ones(64, 8), torch.arange(40), torch.zeros(4, 16, 1, 8))
        assert int(placed.written.sum()) == 40 * 8

    def test_df_09_saturation(self) -> None:
        x = torch.tensor([[1000.0, 449.0, 464.0, 465.0, -1000.0, float("inf"), float("nan")]])
        out = ref.emit_fp8(x, torch.tensor([1.0]))
        assert out.codes[0, :6].tolist() == [448.0, 448.0, 448.0, 448.0, -448.0, 448.0]
        assert (out.amax, out.saturated, out.nans) == (1000.0, 6, 1)

    def test_df_10_direction_of_the_scale(self) -> None:
        out = ref.emit_fp8([[2.0]], torch.tensor([0.25]))
        assert float(out.codes) == 8.0
        assert float(out.value) == 2.0


class TestAgainstTorch:
    def test_rms_norm(self) -> None:
        x, gain = random(5, 200), random(200, seed=1)
        expected = torch.nn.functional.rms_norm(x, (200,), gain, 1e-5)
        close(gemm.rms_norm(x, gain, 1e-5), expected)

    def test_row_scale_takes_a_ragged_last_group(self) -> None:
        x = random(3, 72)
        sumsq = ref.sum_squares(x, torch.float64)
        assert sumsq.shape == (3, 2)
        close(sumsq.sum(dim=1), (x * x).sum(dim=1))

    def test_sum_squares_of_what_is_stored(self) -> None:
        x = random(4, 64)
        kept = x.to(torch.float32).to(torch.bfloat16).to(torch.float64)
        close(ref.sum_squares(x, torch.bfloat16)[:, 0], (kept * kept).sum(dim=1), rtol=1e-6)

    def test_swiglu(self) -> None:
        x = random(3, 64)
        expected = torch.nn.functional.silu(x[:, :32]) * x[:, 32:]
        close(ref.swiglu(x), expected)

    def test_rope_as_complex_numbers(self) -> None:
        x, positions = random(6, 2 * 64), torch.arange(6) + 1000
        frequency = (1e5 ** (-torch.arange(32, dtype=torch.float64) / 32)).float()
        pairs = x.reshape(6, 2, 2, 32)
        angle = (positions.float()[:, None] * frequency).double()[:, None]
        turned = torch.complex(pairs[:, :, 0], pairs[:, :, 1]) * torch.exp(1j * angle)
        expected = torch.stack([turned.real, turned.imag], dim=2).reshape(6, 128)
        close(ref.rope(x, positions, frequency, 64), expected)

    def test_attention(self) -> None:
        q, k, v = random(7, 6 * 16), random(7, 2 * 16, seed=1), random(7, 2 * 16, seed=2)

        def split(x: torch.Tensor) -> torch.Tensor:
            return x.reshape(7, -1, 16).transpose(0, 1)[None]

        expected = torch.nn.functional.scaled_dot_product_attention(
            split(q), split(k), split(v), is_causal=True, enable_gqa=True
        )
        close(gemm.attention(q, k, v, 16), expected[0].transpose(0, 1).reshape(7, 96))

    def test_projections_are_the_plain_chain(self) -> None:
        """Row factor after the product and gain in the weight, against norm then product."""
        x, gain = random(4, 128), random(128, seed=3)
        weight = random(192, 128, seed=4)
        linear = gemm.Linear(x, weight * gain)
        out = gemm.gate_up_projection(linear, gemm.partials(x))["z"]
        close(out, ref.swiglu(gemm.rms_norm(x, gain, 1e-5) @ weight.T), rtol=1e-10)
        residual = random(4, 192, seed=5)
        for projection in (gemm.output_projection, gemm.down_projection):
            found = projection(gemm.Linear(x, weight), residual, torch.float32)
            close(found["h"], x @ weight.T + residual, rtol=1e-10)
            close(found["sumsq"].sum(dim=1), (found["h"] ** 2).sum(dim=1), rtol=1e-6)


class TestLaws:
    @given(matrices((5, 64), limit=1e4))
    def test_rope_back_and_forth(self, x) -> None:
        frequency = torch.linspace(0.01, 1, 16)
        there = ref.rope(x, torch.arange(5), frequency, 32)
        back = ref.rope(there, -torch.arange(5), frequency, 32)
        close(back, torch.from_numpy(x), rtol=1e-9)

    @given(matrices((4, 96), non_finite=True), st.sampled_from([2.0**-6, 1.0, 3.7]))
    def test_fp8_counters(self, x, scale: float) -> None:
        out = ref.emit_fp8(x, torch.tensor([scale]))
        finite = torch.from_numpy(x)[torch.isfinite(torch.from_numpy(x))]
        assert out.amax == (float(finite.abs().max()) if finite.numel() else 0.0)
        assert out.nans == int(torch.from_numpy(x).isnan().sum())
        assert int((out.codes.abs() == 448).sum()) >= out.saturated
        assert not out.codes.isinf().any()

    @given(st.data())
    def test_placed_rows_can_be_gathered(self, data: st.DataObject) -> None:
        """KVPlace, then gather, is the unplaced row; everything else is untouched."""
        where = data.draw(slots(12, 32, beyond=True))
        x = torch.from_numpy(data.draw(matrices((12, 16)))).to(torch.bfloat16)
        cells = torch.full((4, 8, 2, 8), -3.0)
        placed = ref.place_kv(x, where, cells)
        flat = placed.cells.reshape(32, 16)
        for m, slot in enumerate(where.tolist()):
            if 0 <= slot < 32:
                assert torch.equal(flat[slot], x[m].double())
        assert bool((placed.cells[~placed.written] == -3.0).all())

    def test_two_rows_for_one_slot_are_refused(self) -> None:
        with pytest.raises(ArgumentError, match="slots"):
            ref.place_kv(torch.ones(2, 8), torch.tensor([1, 1]), torch.zeros(1, 4, 1, 8))

    def test_fp8_cells_have_a_scale_per_head(self) -> None:
        x = torch.tensor([[1.0] * 8 + [1000.0] * 8])
        scale = torch.tensor([0.5, 2.0])
        out = ref.place_kv(x, [0], torch.zeros(1, 1, 2, 8), torch.float8_e4m3fn, scale)
        assert out.cells[0, 0, :, 0].tolist() == [2.0, 448.0]
        assert (out.saturated, out.nans) == (8, 0)

    @pytest.mark.parametrize("value", SPECIAL_FLOATS)
    def test_specials_survive_a_float32_store(self, value: float) -> None:
        out = ref.store(torch.tensor([value], dtype=torch.float64), torch.float32)
        assert float(out) == value
        assert bool(out.signbit()) == bool(torch.tensor(value, dtype=torch.float64).signbit())
