"""Casts of the emulator against PyTorch's."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from tests.ptx import convert, floats

BITS = arrays.arrays(np.uint32, 32, elements=st.integers(0, 2**32 - 1))
NEAR = arrays.arrays(np.float32, 32, elements=st.floats(-600, 600, width=32))


def same(found: np.ndarray, wanted: torch.Tensor) -> None:
    """Equal patterns; of NaN that it is one."""
    nan = wanted.float().isnan().numpy()
    bits = wanted.view(torch.uint8 if wanted.element_size() == 1 else torch.int16).numpy()
    assert (found[~nan] == bits.view(f"u{bits.itemsize}")[~nan]).all()


@given(st.one_of(BITS.map(lambda u: u.view(np.float32)), NEAR))
def test_casts_of_float32(x: np.ndarray) -> None:
    whole = torch.from_numpy(x)
    with np.errstate(all="ignore"):
        for bits, dtype in ((floats.bf16_bits, torch.bfloat16), (floats.f16_bits, torch.float16)):
            found = bits(x)
            same(found, whole.to(dtype))
            assert (found[np.isnan(x)] == 0x7FFF).all()
        found = floats.e4m3_bits(x)
        same(found, whole.clamp(-448, 448).to(torch.float8_e4m3fn))
        assert (found[np.isnan(x)] == 0x7F).all()
        same(floats.e5m2_bits(x), whole.clamp(-57344, 57344).to(torch.float8_e5m2))


@given(BITS, BITS)
def test_sums_of_halves_are_rounded_once(a: np.ndarray, b: np.ndarray) -> None:
    for kind, dtype in (("bf16", torch.bfloat16), ("f16", torch.float16)):
        x, y = (
            torch.from_numpy((u & 0xFFFF).astype(np.uint16).view(np.int16)).view(dtype)
            for u in (a, b)
        )
        with np.errstate(all="ignore"):
            found = convert.halves("add", kind, [], a & 0xFFFF, b & 0xFFFF)
        same(found, (x.double() + y.double()).to(dtype) if kind == "f16" else x + y)


def test_casts_of_all_codes() -> None:
    codes = np.arange(256, dtype=np.uint32)
    with np.errstate(invalid="ignore"):
        for name, dtype in (("e4m3", torch.float8_e4m3fn), ("e5m2", torch.float8_e5m2)):
            wanted = torch.arange(256, dtype=torch.uint8).view(dtype).float().numpy()
            np.testing.assert_array_equal(getattr(floats, f"{name}_value")(codes), wanted)
            finite = codes[np.isfinite(wanted)]
            encoded = getattr(floats, f"{name}_bits")(wanted[np.isfinite(wanted)])
            assert (encoded == finite).all()
    e2m1 = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    assert floats.e2m1_value(np.arange(8, dtype=np.uint32)).tolist() == e2m1
    x = np.array([0.25, 0.75, 2.5, 5.0, 100.0, -0.26], np.float32)
    assert floats.e2m1_bits(x).tolist() == [0, 2, 4, 6, 7, 9]
    assert floats.tf32(np.array([1 + 2.0**-11], np.float32)).tolist() == [1 + 2.0**-10]
