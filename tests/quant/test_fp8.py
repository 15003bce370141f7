"""The E4M3 contract, bit for bit, against a text that knows no casts."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from epicute.errors import ArgumentError
from epicute.quant import (
    E4M3_MAX,
    SCALE_MAX,
    SCALE_MIN,
    cast_e4m3,
    dequantize,
    inverse,
    quantize_rows,
    quantize_tensor,
    reference,
    scale_for,
)
from epicute.testing import assert_equal_bits

ALL_CODES = np.arange(256, dtype=np.uint8)
FINITE = np.array([c for c in range(256) if c & 0x7F != 0x7F], np.uint8)


def codes_of(tensor: torch.Tensor) -> np.ndarray:
    return tensor.view(torch.uint8).numpy()


def cast(values: object) -> np.ndarray:
    return codes_of(cast_e4m3(torch.tensor(np.asarray(values, np.float32))))


def floats(shape: object) -> st.SearchStrategy[np.ndarray]:
    """FP32 as bit patterns: NaNs, infinities, subnormals and zeros of both signs among them."""
    whole = hnp.arrays(np.uint32, shape).map(lambda bits: bits.view(np.float32))
    usual = hnp.arrays(np.float32, shape, elements=st.floats(-600, 600, width=32))
    return whole | usual


scales = st.floats(SCALE_MIN, SCALE_MAX, width=32)
shapes = hnp.array_shapes(min_dims=2, max_dims=2, min_side=1, max_side=9)


def test_all_256_codes_decode_as_the_format_says() -> None:
    decoded = torch.from_numpy(ALL_CODES).view(torch.float8_e4m3fn).to(torch.float64).numpy()
    np.testing.assert_array_equal(decoded, reference.decode_e4m3(ALL_CODES))
    assert np.isnan(decoded).nonzero()[0].tolist() == [0x7F, 0xFF]
    assert decoded[0x7E] == E4M3_MAX
    assert decoded[0x01] == 2.0**-9
    assert np.signbit(decoded[0x80])


def test_every_finite_code_is_its_own_nearest() -> None:
    assert np.array_equal(cast(reference.decode_e4m3(FINITE)), FINITE)


def test_midpoints_go_to_the_even_code_and_their_neighbours_do_not() -> None:
    values = reference.decode_e4m3(np.arange(0x7F, dtype=np.uint8))
    middle = ((values[1:] + values[:-1]) / 2).astype(np.float32)
    low = np.arange(0x7E, dtype=np.uint8)
    for sign, bit in ((1, 0), (-1, 0x80)):
        assert np.array_equal(cast(sign * middle), low + low % 2 | bit)
        assert np.array_equal(cast(sign * np.nextafter(middle, np.float32(0))), low | bit)
        assert np.array_equal(cast(sign * np.nextafter(middle, np.float32(1e9))), low + 1 | bit)


@pytest.mark.parametrize(
    ("value", "code"),
    [
        (0.0, 0x00),
        (-0.0, 0x80),
        (448.0, 0x7E),
        (-448.0, 0xFE),
        (449.0, 0x7E),
        (464.0, 0x7E),
        (np.nextafter(np.float32(464), np.float32(465)), 0x7E),
        (465.0, 0x7E),
        (-465.0, 0xFE),
        (3.4e38, 0x7E),
        (np.inf, 0x7E),
        (-np.inf, 0xFE),
        (np.nan, 0x7F),
        (-np.nan, 0x7F),
        (2.0**-10, 0x00),
        (-(2.0**-10), 0x80),
        (np.nextafter(np.float32(2**-10), np.float32(1)), 0x01),
        (3 * 2.0**-10, 0x02),
        (2.0**-6, 0x08),
        (1.4e-45, 0x00),
        (-1.4e-45, 0x80),
    ],
)
def test_named_values(value: float, code: int) -> None:
    assert cast([value])[0] == code
    assert reference.encode_e4m3(np.float64(np.float32(value))) == code


@given(floats(hnp.array_shapes(max_dims=3, max_side=8)))
def test_cast_agrees_with_the_reference(values: np.ndarray) -> None:
    assert np.array_equal(cast(values), reference.encode_e4m3(values))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_half_precision_value_casts_like_its_float32(dtype: torch.dtype) -> None:
    values = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
    expected = reference.encode_e4m3(values.to(torch.float64).numpy())
    assert np.array_equal(codes_of(cast_e4m3(values)), expected)


def test_cast_leaves_its_input_alone() -> None:
    values = torch.tensor([np.nan, 1e9, -0.0, 3.0])
    before = values.clone()
    cast_e4m3(values)
    assert torch.equal(values.view(torch.int32), before.view(torch.int32))


@pytest.mark.parametrize("dtype", [torch.float64, torch.int32, torch.float8_e4m3fn])
def test_other_dtypes_are_refused(dtype: torch.dtype) -> None:
    with pytest.raises(ArgumentError, match=r"x\.dtype"):
        cast_e4m3(torch.zeros(3).to(dtype))


def test_ge_12_float32_is_rounded_once() -> None:
    value = torch.tensor([4.25 + 2.0**-10])
    assert cast_e4m3(value).to(torch.float32).item() == 4.5
    for half in (torch.bfloat16, torch.float16):
        assert cast_e4m3(value.to(half)).to(torch.float32).item() == 4.0
    codes = quantize_tensor(value, torch.tensor([1.0]))
    assert codes.to(torch.float32).item() == 4.5


@given(scales)
@example(SCALE_MIN)
@example(SCALE_MAX)
def test_inverse_is_correctly_rounded_and_normal(scale: float) -> None:
    found = inverse(torch.tensor([scale])).item()
    assert found == np.float32(1 / np.float64(np.float32(scale)))
    assert 2.0**-126 <= found < np.inf


@pytest.mark.parametrize("scale", [SCALE_MIN, SCALE_MAX])
def test_bounds_of_scales_keep_decoded_values_normal(scale: float) -> None:
    codes = torch.from_numpy(FINITE).view(torch.float8_e4m3fn)
    values = dequantize(codes, torch.tensor([scale])).numpy()
    exact = reference.decode_e4m3(FINITE) * scale
    assert np.array_equal(values, exact)
    assert (np.abs(values[exact != 0]) >= 2.0**-126).all()


@given(floats(hnp.array_shapes(max_dims=3, max_side=6)), scales)
def test_quantize_tensor_agrees_with_the_reference(values: np.ndarray, scale: float) -> None:
    codes = quantize_tensor(torch.from_numpy(values), torch.tensor([scale]))
    assert np.array_equal(codes_of(codes), reference.quantize_tensor(values, np.float32(scale)))


@given(shapes.flatmap(floats))
def test_quantize_rows_agrees_with_the_reference(values: np.ndarray) -> None:
    codes, scale = quantize_rows(torch.from_numpy(values))
    wanted, wanted_scale = reference.quantize_rows(values)
    assert np.array_equal(scale.numpy(), wanted_scale)
    assert np.array_equal(codes_of(codes), wanted)


@given(hnp.arrays(np.uint8, shapes), scales)
def test_codes_survive_a_round_trip(codes: np.ndarray, scale: float) -> None:
    """Decoding and quantising again with a power of two as scale gives the code back."""
    scale = float(2.0 ** np.round(np.log2(scale)))
    as_codes = torch.from_numpy(codes).view(torch.float8_e4m3fn)
    again = quantize_tensor(dequantize(as_codes, torch.tensor([scale])), torch.tensor([scale]))
    assert np.array_equal(codes_of(again), np.where(codes == 0xFF, 0x7F, codes))


@given(shapes.flatmap(lambda s: hnp.arrays(np.float32, s, elements=st.floats(-1e3, 1e3, width=32))))
def test_rows_are_within_half_a_step(values: np.ndarray) -> None:
    codes, scale = quantize_rows(torch.from_numpy(values))
    error = np.abs(dequantize(codes, scale).numpy() - np.float64(values))
    step = np.maximum(np.abs(values) / 16, scale.numpy()[:, None] * 2.0**-10)
    assert (error <= step * (1 + 1e-6)).all()


def test_scale_per_row_and_per_tensor_multiply() -> None:
    codes = cast_e4m3(torch.tensor([[1.0, 2.0], [4.0, -8.0]]))
    rows = dequantize(codes, torch.tensor([0.5, 0.25]))
    assert rows.tolist() == [[0.5, 1.0], [1.0, -2.0]]
    assert dequantize(codes, torch.tensor([2.0])).tolist() == [[2.0, 4.0], [8.0, -16.0]]


def test_strided_inputs_are_read_as_they_show() -> None:
    big = torch.randn(8, 200)
    for view in (big[:, 64:130], big[::2], big[:, ::2], big.t()):
        codes, scale = quantize_rows(view)
        wanted, wanted_scale = quantize_rows(view.clone())
        assert torch.equal(codes.view(torch.uint8), wanted.view(torch.uint8))
        assert torch.equal(scale, wanted_scale)


@pytest.mark.parametrize("amax", [1e-37, 1e-40, 0.0])
def test_df_01_a_tiny_row_gets_a_finite_scale(amax: float) -> None:
    values = torch.tensor([[amax, -amax, 0.0]])
    codes, scale = quantize_rows(values)
    assert 0 < scale.item() < np.inf
    assert np.isfinite(inverse(scale).item())
    back = dequantize(codes, scale)
    assert back[0, 2] == 0
    assert (back - values).abs().max() <= scale.item() * 2.0**-9


def test_df_02_a_zero_row_among_normal_rows() -> None:
    values = torch.randn(5, 16)
    values[2] = 0
    codes, scale = quantize_rows(values)
    assert scale[2] == 1
    assert (codes.view(torch.uint8)[2] == 0).all()
    others = [0, 1, 3, 4]
    alone, alone_scale = quantize_rows(values[others])
    assert torch.equal(scale[others], alone_scale)
    assert torch.equal(codes.view(torch.uint8)[others], alone.view(torch.uint8))


@pytest.mark.parametrize(("broken", "code"), [(np.nan, 0x7F), (np.inf, 0x7E), (-np.inf, 0xFE)])
def test_df_03_a_broken_value_changes_no_neighbour(broken: float, code: int) -> None:
    clean = torch.ones(3, 16)
    values = clean.clone()
    values[1, 4] = broken
    codes, scale = quantize_rows(values)
    wanted, wanted_scale = quantize_rows(clean)
    assert torch.equal(scale, wanted_scale)
    assert codes.view(torch.uint8)[1, 4] == code
    values[1, 4] = 1
    different = codes.view(torch.uint8) != wanted.view(torch.uint8)
    assert different.nonzero().tolist() in ([[1, 4]], [])


def test_df_09_overflow_saturates() -> None:
    values = torch.tensor([1000.0, 449, 464, 465, -1000, np.inf])
    codes = quantize_tensor(values, torch.tensor([1.0]))
    assert codes.to(torch.float32).tolist() == [448, 448, 448, 448, -448, 448]


def test_df_10_a_scale_is_the_multiplier_of_a_code() -> None:
    codes = quantize_tensor(torch.tensor([2.0]), torch.tensor([0.25]))
    assert codes.view(torch.uint8).item() == 0x50  # 8.0
    assert dequantize(codes, torch.tensor([0.25])).item() == 2.0


def test_scale_for_is_amax_over_448() -> None:
    amax = torch.tensor([448.0, 1.0, 0.0, 1e-40, 3.4e38])
    found = scale_for(amax)
    expected = [1.0, np.float32(1 / 448), 1.0, SCALE_MIN, SCALE_MAX]
    assert found.tolist() == [float(np.float32(e)) for e in expected]


def test_refusals_name_the_argument() -> None:
    one, codes = torch.tensor([1.0]), cast_e4m3(torch.zeros(3, 4))
    with pytest.raises(ArgumentError, match=r"^x\.shape"):
        quantize_rows(torch.zeros(4))
    with pytest.raises(ArgumentError, match=r"^x\.shape"):
        quantize_rows(torch.zeros(4, 0))
    with pytest.raises(ArgumentError, match="^scale"):
        quantize_tensor(torch.zeros(4), torch.ones(4))
    with pytest.raises(ArgumentError, match="^scale"):
        quantize_tensor(torch.zeros(4), one.double())
    with pytest.raises(ArgumentError, match=r"^codes\.dtype"):
        dequantize(codes.to(torch.float32), one)
    with pytest.raises(ArgumentError, match="^scale"):
        dequantize(codes, torch.ones(4))


def test_no_rows_give_no_codes() -> None:
    codes, scale = quantize_rows(torch.zeros(0, 8))
    assert codes.shape == (0, 8)
    assert scale.shape == (0,)


def test_a_number_will_do_for_the_scale_of_a_tensor() -> None:
    x = torch.randn(5, 7)
    by_tensor = quantize_tensor(x, torch.tensor([0.05]))
    assert_equal_bits(quantize_tensor(x, 0.05), by_tensor)
    for bad in (0.0, -1.0, math.nan, math.inf, 1e39, "1", None):
        with pytest.raises(ArgumentError, match="scale: got .*expected a finite number above 0"):
            quantize_tensor(x, bad)  # type: ignore[arg-type]
