"""The NVFP4 contract, bit for bit, against a text that looks at one value at a time."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from epicute.errors import ArgumentError
from epicute.quant import E4M3_MAX, reference
from epicute.quant.nvfp4 import (
    BLOCK,
    SIXTH,
    CastCounters,
    decode_e2m1,
    dequantize_nvfp4,
    dequantize_values,
    encode_e2m1,
    fast8_keys,
    inverse_table,
    narrow_scale,
    pack_nibbles,
    quantize_nvfp4,
    quantize_values,
    unpack_nibbles,
)
from epicute.testing.strategies import nvfp4
from tests.quant import nvfp4_naive as naive

GRID = np.array(naive.GRID)
MIDDLES = [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0]
LOWER_ON_TIE = [0, 2, 2, 4, 4, 6, 6]

ALL_CODES = torch.arange(16, dtype=torch.uint8)
SCALE_BYTES = torch.arange(0x7F, dtype=torch.uint8)

k_scales = st.sampled_from([1.0, 0.25, 4.0, 0.3, 3.7, 1e-3, 2.0**-117, 2.0**117]) | st.floats(
    2.0**-20, 2.0**20, width=32
)


@st.composite
def blocks(draw: st.DrawFn, rows: int = 3, width: int = 48) -> np.ndarray:
    """FP32 rows: bit patterns, ordinary noise of any magnitude, and short grids that meet ties."""
    shape = (rows, width)
    kind = draw(st.sampled_from(("bits", "noise", "ties", "mixed")))
    seed = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    if kind == "bits":
        return seed.integers(0, 2**32, shape, np.uint32).view(np.float32)
    if kind == "ties":
        # The maximum 6 * 2^e makes the scale a power of two: multiples of 1/4 meet every tie.
        exponent = draw(st.integers(-8, 8))
        found = seed.integers(-24, 25, shape) / 4.0
        found[:, ::BLOCK] = 6
        return (found * 2.0**exponent).astype(np.float32)
    spread = draw(st.integers(-40, 40))
    found = (seed.standard_normal(shape) * 2.0**spread).astype(np.float32)
    if kind == "mixed":
        places = st.tuples(st.integers(0, found.size - 1), st.integers(0, 2**32 - 1))
        for index, bits in draw(st.lists(places, max_size=6)):
            found.reshape(-1)[index] = np.array(bits, np.uint32).view(np.float32)
    return found


def bits(x: torch.Tensor) -> np.ndarray:
    return x.view(torch.uint8).numpy()


def test_sixth_is_the_constant_of_the_contract() -> None:
    assert np.float32(SIXTH).view(np.uint32) == 0x3E2AAAAB
    assert float(np.float32(1 / 6)) == SIXTH


def test_all_16_codes_are_their_own_nearest() -> None:
    values = decode_e2m1(ALL_CODES)
    assert values.abs()[:8].tolist() == GRID.tolist()
    assert torch.equal(encode_e2m1(values), ALL_CODES)
    assert torch.signbit(values).tolist() == [False] * 8 + [True] * 8


@pytest.mark.parametrize("sign", [1, -1])
def test_ties_go_to_the_even_code_and_their_neighbours_do_not(sign: int) -> None:
    bit = 8 if sign < 0 else 0
    for lower, (middle, tie) in enumerate(zip(MIDDLES, LOWER_ON_TIE, strict=True)):
        steps = [np.nextafter(np.float32(middle), np.float32(to)) for to in (0, 9)]
        x = torch.tensor([middle, float(steps[0]), float(steps[1])]) * sign
        assert encode_e2m1(x).tolist() == [tie | bit, lower | bit, lower + 1 | bit]


@pytest.mark.parametrize(
    ("x", "code"),
    [
        (math.nan, 7),
        (-math.nan, 7),
        (math.inf, 7),
        (-math.inf, 15),
        (6.1, 7),
        (-1e30, 15),
        (-0.0, 8),
        (-1e-45, 8),
        (5.0, 6),
        (-5.0, 14),
    ],
)
def test_named_values(x: float, code: int) -> None:
    assert encode_e2m1(torch.tensor([x])).item() == code == naive.nearest(float(np.float32(x)))


@given(hnp.arrays(np.uint32, hnp.array_shapes(max_dims=2, max_side=12)))
def test_the_cast_agrees_with_a_search_over_all_codes(patterns: np.ndarray) -> None:
    x = patterns.view(np.float32)
    found = encode_e2m1(torch.from_numpy(x)).numpy()
    assert found.tolist() == np.vectorize(naive.nearest)(x.astype(np.float64)).tolist()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_half_precision_value_casts_like_its_float32(dtype: torch.dtype) -> None:
    x = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
    expected = [naive.nearest(v) for v in x.to(torch.float64).tolist()]
    assert encode_e2m1(x).tolist() == expected


@given(blocks(), k_scales)
def test_codes_and_scales_are_those_of_the_contract(x: np.ndarray, k_scale: float) -> None:
    codes, scales = quantize_nvfp4(torch.from_numpy(x), k_scale)
    wanted, wanted_scales = naive.quantize(x, float(np.float32(k_scale)))
    assert np.array_equal(bits(scales), wanted_scales)
    assert np.array_equal(unpack_nibbles(codes).numpy(), wanted)


def test_the_scale_is_a_product_with_one_sixth_and_no_quotient() -> None:
    """Next to the midpoints of E4M3 the two differ, and all sides must take the same one."""
    grid = reference.decode_e4m3(np.arange(0x7F, dtype=np.uint8))
    middle = (6 * (grid[1:] + grid[:-1]) / 2).astype(np.float32)
    near = (middle.view(np.int32)[:, None] + np.arange(-4, 5, dtype=np.int32)).ravel()
    amax = near.view(np.float32)
    x = np.zeros((len(amax), 16), np.float32)
    x[:, 9] = -amax
    codes, scales = quantize_nvfp4(torch.from_numpy(x))
    wanted, wanted_scales = naive.quantize(x)
    assert np.array_equal(bits(scales), wanted_scales)
    assert np.array_equal(unpack_nibbles(codes).numpy(), wanted)
    quotient = reference.encode_e4m3(amax / np.float32(6))
    assert (quotient != wanted_scales[:, 0]).any()


@given(hnp.arrays(np.uint8, (2, 6), elements=st.integers(0, 15)))
def test_nibbles_pack_and_unpack(codes: np.ndarray) -> None:
    packed = pack_nibbles(torch.from_numpy(codes))
    assert packed.shape == (2, 3)
    assert (packed.numpy() & 15 == codes[:, 0::2]).all(), "the low nibble is the even channel"
    assert np.array_equal(unpack_nibbles(packed).numpy(), codes)


def product() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Every scale that is a number with every code: packed codes, scales, exact float64."""
    codes = pack_nibbles(ALL_CODES).expand(len(SCALE_BYTES), 8).contiguous()
    scales = SCALE_BYTES[:, None].contiguous().view(torch.float8_e4m3fn)
    units = np.array([naive.value(c) for c in range(16)])
    exact = reference.decode_e4m3(SCALE_BYTES.numpy())[:, None] * units
    return codes, scales, torch.from_numpy(exact)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_every_code_times_every_scale_is_exact(dtype: torch.dtype) -> None:
    codes, scales, exact = product()
    found = dequantize_nvfp4(codes, scales)
    for shift in (1.0, 2.0**-7):
        assert torch.equal((found * shift).to(dtype).to(torch.float64), exact * shift)
    assert torch.equal(found.signbit(), exact.signbit())
    finite = exact[exact != 0].abs()
    assert (finite.min().item(), finite.max().item()) == (2.0**-10, 2688.0)


def test_a_nan_scale_makes_its_own_block_nan() -> None:
    codes = torch.full((1, 16), 0x11, dtype=torch.uint8)
    scales = torch.tensor([[0x38, 0x7F]], dtype=torch.uint8).view(torch.float8_e4m3fn)
    found = dequantize_nvfp4(codes, scales)
    assert (found[0, :16] == 0.5).all()
    assert found[0, 16:].isnan().all()


@pytest.mark.parametrize("shift", [0, 3, -4])
def test_fast8_keys_are_the_product_rounded_once(shift: int) -> None:
    codes, scales, exact = product()
    found = fast8_keys(codes, scales, shift)
    assert np.array_equal(bits(found), reference.encode_e4m3((exact * 2.0**-shift).numpy()))


@given(k_scales)
def test_the_table_of_inverses(k_scale: float) -> None:
    table = inverse_table(k_scale)
    assert table.shape == (127,)
    assert table[0] == 0
    k = float(np.float32(k_scale))
    values = reference.decode_e4m3(np.arange(1, 127, dtype=np.uint8))
    wanted = [naive.single(1.0 / naive.single(v * k)) for v in values]
    assert table[1:].tolist() == wanted
    assert (np.abs(table[1:]) >= 2.0**-126).all()
    assert np.isfinite(table).all()


@given(nvfp4(3, 64), k_scales)
def test_drawn_bit_patterns_dequantise(drawn: object, k_scale: float) -> None:
    codes, scales = torch.from_numpy(drawn.codes), torch.from_numpy(drawn.scales)  # type: ignore[attr-defined]
    found = dequantize_nvfp4(codes, scales.view(torch.float8_e4m3fn), k_scale)
    units = np.vectorize(naive.value)(unpack_nibbles(codes).numpy())
    exact = units * reference.decode_e4m3(scales.numpy()).repeat(16, axis=-1)
    with np.errstate(over="ignore"):
        assert np.array_equal(
            found.numpy(), (exact * float(np.float32(k_scale))).astype(np.float32)
        )


@given(blocks().filter(lambda x: bool(np.isfinite(x).all())))
def test_values_are_within_a_scale_of_what_they_were(x: np.ndarray) -> None:
    counters = CastCounters.create()
    codes, scales = quantize_nvfp4(torch.from_numpy(x), counters=counters)
    if counters.saturated.item() == 0:
        error = np.abs(dequantize_nvfp4(codes, scales).numpy().astype(np.float64) - x)
        scale = scales.to(torch.float64).numpy().repeat(16, axis=-1)
        assert (
            error <= np.maximum(scale, 6.01 * 2.0**-10)
        ).all()  # the scale is off by half of 2**-9


def test_a_block_is_flushed_or_clipped_at_the_ends_and_counted() -> None:
    edge = 6 * 2.0**-10  # amax / 6 = 2^-10 is a tie that goes to the even scale, 0
    amax = [0.0, 1e-45, edge, float(np.nextafter(np.float32(edge), np.float32(1))), 2688.0, 2700.0]
    x = torch.zeros(len(amax), 16)
    x[:, 3] = torch.tensor(amax)
    counters = CastCounters.create()
    codes, scales = quantize_nvfp4(x, counters=counters)
    assert bits(scales)[:, 0].tolist() == [0, 0, 0, 1, 0x7E, 0x7E]
    assert dequantize_nvfp4(codes, scales)[:, 3].tolist() == [0, 0, 0, 3 * 2.0**-9, 2688, 2688]
    assert (counters.flushed.item(), counters.saturated.item()) == (2, 1)
    counters.reset()
    assert (counters.flushed.item(), counters.saturated.item()) == (0, 0)


@pytest.mark.parametrize(("broken", "code"), [(math.nan, 7), (math.inf, 7), (-math.inf, 15)])
def test_a_broken_value_enters_no_scale_and_is_counted(broken: float, code: int) -> None:
    x = torch.randn(4, 64)
    clean = x.clone()
    clean[1, 20] = 0.0
    x[1, 20] = broken
    counters = CastCounters.create()
    codes, scales = quantize_nvfp4(x, counters=counters)
    wanted, wanted_scales = quantize_nvfp4(clean)
    assert torch.equal(scales.view(torch.uint8), wanted_scales.view(torch.uint8))
    found, wanted = unpack_nibbles(codes), unpack_nibbles(wanted)
    assert found[1, 20] == code
    found[1, 20] = wanted[1, 20]
    assert torch.equal(found, wanted)
    counted = (counters.nans.item(), counters.infinities.item())
    assert counted == ((1, 0) if math.isnan(broken) else (0, 1))


def test_qk_03_a_zero_block_has_scale_zero_and_decodes_to_zeros() -> None:
    for k_scale in (1.0, 0.01 / 2688, 7.3):
        k = torch.randn(8, 128) * 0.01 / 4
        k[2, 32:48] = 0
        codes, scales = quantize_nvfp4(k, k_scale)
        assert (bits(scales) < 0x7F).all()
        assert bits(scales)[2, 2] == 0
        found = dequantize_nvfp4(codes, scales, k_scale)
        assert (found[2, 32:48] == 0).all()
        assert found.isfinite().all()


def test_qk_04_a_key_beyond_2688_is_counted_and_a_second_level_holds_it() -> None:
    k = torch.randn(4, 128).clamp(-2, 2)
    k[1, 37] = 6000.0
    counters = CastCounters.create()
    codes, scales = quantize_nvfp4(k, counters=counters)
    assert dequantize_nvfp4(codes, scales)[1, 37] == 2688
    assert counters.saturated.item() == 1
    counters.reset()
    k_scale = narrow_scale(6000 / 2688, "k_scale")
    codes, scales = quantize_nvfp4(k, k_scale, counters)
    found = dequantize_nvfp4(codes, scales, k_scale)
    assert counters.saturated.item() == 0
    assert abs(found[1, 37] - 6000) / 6000 <= 0.07
    others = torch.ones(4, 128, dtype=torch.bool)
    others[1, 32:48] = False
    assert ((found - k)[others].abs() <= 0.5).all()


@given(hnp.arrays(np.uint32, (3, 2, 5)).map(lambda b: b.view(np.float32)), k_scales)
def test_values_are_divided_and_cast(v: np.ndarray, v_scale: float) -> None:
    scale = np.float32(v_scale)
    with np.errstate(all="ignore"):
        wanted = reference.encode_e4m3(v / scale)
    found = quantize_values(torch.from_numpy(v), v_scale)
    assert np.array_equal(bits(found), wanted)
    per_head = torch.tensor([float(scale), 2.0])
    both = bits(quantize_values(torch.from_numpy(v), per_head))
    assert np.array_equal(both[:, 0], wanted[:, 0])
    with np.errstate(all="ignore"):
        assert np.array_equal(both[:, 1], reference.encode_e4m3(v[:, 1] / np.float32(2)))


def test_values_count_what_they_lose() -> None:
    v = torch.tensor([[math.nan, math.inf, -math.inf, 900.0, 896.0, -897.0, 1.0, 0.0]])
    counters = CastCounters.create()
    codes = quantize_values(v, 2.0, counters)
    assert bits(codes)[0, :3].tolist() == [0x7F, 0x7E, 0xFE]
    counted = [counters.nans, counters.infinities, counters.saturated, counters.flushed]
    assert [c.item() for c in counted] == [1, 2, 2, 0]
    assert dequantize_values(codes, 2.0)[0, 3:].tolist() == [896.0, 896.0, -896.0, 1.0, 0.0]


def test_qk_02_values_of_zero_stay_zero() -> None:
    v = torch.randn(5, 2, 16)
    whole = dequantize_values(quantize_values(v))
    v[:, 1, 7] = 0
    found = dequantize_values(quantize_values(v))
    assert (found[:, 1, 7] == 0).all()
    found[:, 1, 7] = whole[:, 1, 7]
    assert torch.equal(found, whole)
    assert (dequantize_values(quantize_values(torch.zeros(5, 2, 16))) == 0).all()


def test_qk_11_inputs_are_left_alone_and_strides_are_read() -> None:
    big = torch.randn(6, 2, 160)
    for x in (big[:, :, 32:96], big[::2, :, :64], big.transpose(0, 1)[..., :32]):
        before = x.clone()
        codes, scales = quantize_nvfp4(x)
        values = quantize_values(x)
        assert torch.equal(x, before)
        wanted, wanted_scales = quantize_nvfp4(before.contiguous())
        assert torch.equal(codes, wanted)
        assert torch.equal(scales.view(torch.uint8), wanted_scales.view(torch.uint8))
        again = quantize_values(before.contiguous())
        assert torch.equal(values.view(torch.uint8), again.view(torch.uint8))


@pytest.mark.parametrize("scale", [0, -1, math.nan, math.inf, 1e-50, 1e300, -0.0, 1e-40])
def test_kd_18_scales_are_checked_after_narrowing(scale: float) -> None:
    for given_ in (scale, torch.tensor(scale, dtype=torch.float64)):
        with pytest.raises(ArgumentError, match="^k_scale"):
            quantize_nvfp4(torch.zeros(1, 16), given_)  # type: ignore[arg-type]
        with pytest.raises(ArgumentError, match="^v_scale"):
            quantize_values(torch.zeros(1, 16), given_)


def test_narrowing_gives_the_kernel_s_number() -> None:
    assert narrow_scale(0.1, "k_scale") == float(np.float32(0.1))
    assert narrow_scale(torch.tensor([0.1]), "k_scale") == float(np.float32(0.1))
    with pytest.raises(ArgumentError, match="^k_scale"):
        narrow_scale(torch.ones(2), "k_scale")


def test_mistakes_are_refused_by_name() -> None:
    codes, scales = quantize_nvfp4(torch.zeros(2, 32))
    for call, named in (
        (lambda: quantize_nvfp4(torch.zeros(2, 24)), r"^x\.shape"),
        (lambda: quantize_nvfp4(torch.zeros(2, 0)), r"^x\.shape"),
        (lambda: quantize_nvfp4(torch.zeros(2, 16).double()), r"^x\.dtype"),
        (lambda: quantize_values(torch.zeros(2, 16).double()), r"^v\.dtype"),
        (lambda: quantize_values(torch.zeros(2, 16), torch.ones(3)), "^v_scale"),
        (lambda: dequantize_nvfp4(codes, scales[:, :1]), r"^scales\.shape"),
        (lambda: dequantize_nvfp4(codes.to(torch.int32), scales), r"^codes\.dtype"),
        (lambda: fast8_keys(codes, scales, 65), "^shift"),
    ):
        with pytest.raises(ArgumentError, match=named):
            call()


def test_no_rows_give_no_codes() -> None:
    codes, scales = quantize_nvfp4(torch.zeros(0, 4, 64), counters=CastCounters.create())
    assert codes.shape == (0, 4, 32)
    assert scales.shape == (0, 4, 4)
    assert E4M3_MAX == 448
