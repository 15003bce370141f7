"""RoPE, QK-norm and KV placement against their formulas, for the head dimensions of real models."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from epicute.epilogues import HeadNorm, PlaceKV, RoPE, Store
from epicute.epilogues import reference as ref
from epicute.errors import ArgumentError
from epicute.testing.strategies import slots as draw_slots
from tests.epilogues.model import assert_same, near, noise, r32, special_matrix, wide

F32 = torch.float32
HEADS = (64, 80, 96, 128, 256)
POSITIONS = torch.tensor([0, 1, 2, 17, 2047, 32767, 131071, 4095])


def frequencies(rotary: int, base: float = 1e4) -> torch.Tensor:
    return base ** (-torch.arange(0, rotary, 2) / rotary)


def rotate(policy: RoPE, x: torch.Tensor, **operands: torch.Tensor) -> torch.Tensor:
    given = {"positions": POSITIONS, "inv_freq": frequencies(policy.rotary_dim), **operands}
    return (policy >> Store(F32)).evaluate(x, **given)["out"]


@pytest.mark.parametrize("style", ["half", "interleaved"])
@pytest.mark.parametrize("dim", HEADS)
class TestRoPE:
    @pytest.mark.parametrize("share", [1.0, 0.5, 0.25])
    @pytest.mark.parametrize("magnitude", [1.0, 1.4852])
    def test_formula(self, dim: int, style: str, share: float, magnitude: float) -> None:
        step = 32 if style == "interleaved" and share < 1 else 16
        rotary = dim if share == 1 else max(step, int(dim * share) // step * step)
        x = noise(8, 3 * dim, scale=2.0)
        out = rotate(RoPE(dim, rotary, style, magnitude), x)
        inv_freq = frequencies(rotary)
        expected = ref.rope(x, POSITIONS, inv_freq, dim, rotary, style, magnitude)
        size = x.abs().double().reshape(8, 3, dim).amax(2).repeat_interleave(dim, 1)
        near(out, expected, 3e-6 * magnitude * size)
        tail = x.reshape(8, 3, dim)[..., rotary:]
        assert torch.equal(out.reshape(8, 3, dim)[..., rotary:], tail)

    def test_channels_that_stay_keep_their_bits(self, dim: int, style: str) -> None:
        """NaN, infinities and signed zeros beyond ``rotary_dim`` too, whatever the magnitude."""
        x = special_matrix(8, 2 * dim)
        x.reshape(8, 2, dim)[..., :32] = 1.0
        out = rotate(RoPE(dim, 32, style, 1.5), x)
        assert_same(out.reshape(8, 2, dim)[..., 32:], x.reshape(8, 2, dim)[..., 32:])
        assert out.reshape(8, 2, dim)[..., :32].isfinite().all()

    def test_position_zero_is_the_identity(self, dim: int, style: str) -> None:
        x = noise(8, dim)
        assert torch.equal(rotate(RoPE(dim, 0, style), x, positions=torch.zeros(8).long()), x)


class TestRoPEOperands:
    def test_int32_and_int64_positions_agree(self) -> None:
        x, policy = noise(8, 128), RoPE(64)
        assert torch.equal(rotate(policy, x), rotate(policy, x, positions=POSITIONS.int()))

    def test_the_angle_is_the_float32_product(self) -> None:
        """At position 131071 the FP32 angle is up to 2^-8 away from the exact product."""
        x = torch.zeros(1, 64)
        x[0, :32] = 1.0
        inv_freq = frequencies(64)
        operands = {"positions": torch.tensor([131071]), "inv_freq": inv_freq}
        out = rotate(RoPE(64), x, **operands)[0]
        angle = r32(131071.0 * wide(inv_freq))
        near(out[:32], torch.cos(angle), 2e-6)
        near(out[32:], torch.sin(angle), 2e-6)

    def test_wrong_shapes_are_refused_by_name(self) -> None:
        with pytest.raises(
            ArgumentError, match=r"inv_freq: got shape \(64,\), expected HeadVector"
        ):
            rotate(RoPE(64), noise(8, 64), inv_freq=torch.ones(64))
        with pytest.raises(ArgumentError, match=r"positions: got shape \(7,\)"):
            rotate(RoPE(64), noise(8, 64), positions=torch.arange(7))


@pytest.mark.parametrize("dim", HEADS)
class TestHeadNorm:
    @pytest.mark.parametrize("offset", [0.0, 1.0])
    @pytest.mark.parametrize("eps", [1e-6, 1e-2])
    def test_formula(self, dim: int, offset: float, eps: float) -> None:
        x, gain = noise(9, 2 * dim, scale=0.3), noise(dim, seed=4)
        out = (HeadNorm(dim, eps, offset) >> Store(F32)).evaluate(x, head_gain=gain)["out"]
        expected = ref.head_norm(x, gain, dim, eps, offset)
        near(out, expected, expected.abs() * 2**-19 + 1e-12)

    def test_heads_do_not_mix(self, dim: int) -> None:
        """A zero head stays zero and a NaN head stays alone."""
        x = noise(2, 3 * dim)
        x[0, :dim] = 0.0
        x[1, dim] = float("nan")
        out = (HeadNorm(dim) >> Store(F32)).evaluate(x, head_gain=torch.ones(dim))["out"]
        assert_same(out[0, :dim], torch.zeros(dim))
        assert out[1, dim : 2 * dim].isnan().all()
        assert out[1, :dim].isfinite().all()
        assert out[1, 2 * dim :].isfinite().all()

    def test_order_of_the_sum(self, dim: int) -> None:
        """A lane's channels of all chunks ascending, then (0 + 1) + (2 + 3)."""
        x = noise(5, dim, scale=3.0)
        out = (HeadNorm(dim, 0.0) >> Store(F32)).evaluate(x, head_gain=torch.ones(dim))["out"]
        squares = x.numpy() * x.numpy()
        lanes = [np.zeros(5, np.float32)] * 4
        start = 0
        for chunk in (32, 16):
            while dim - start >= chunk:
                for t in range(4):
                    for c in range(start + chunk // 4 * t, start + chunk // 4 * (t + 1)):
                        lanes[t] = lanes[t] + squares[:, c]
                start += chunk
        total = (lanes[0] + lanes[1]) + (lanes[2] + lanes[3])
        factor = np.float32(1) / np.sqrt(total * np.float32(1 / dim))
        assert_same(out, torch.from_numpy(x.numpy() * factor[:, None]))


PAGES, PAGE, H, D = 3, 16, 2, 64


def views(dtype: torch.dtype, fill: float) -> dict[str, torch.Tensor]:
    """One logical cache (pages, page_size, heads, head_dim) in every layout the field has."""
    return {
        "NHD": torch.full((PAGES, PAGE, H, D), fill).to(dtype),
        "HND": torch.full((PAGES, H, PAGE, D), fill).to(dtype).transpose(1, 2),
        "joined": torch.full((PAGES, 2, PAGE, H, D), fill).to(dtype).unbind(1)[1],
        "packed": torch.full((PAGES, H, PAGE, 2 * D), fill).to(dtype).transpose(1, 2)[..., D:],
    }


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float8_e4m3fn])
class TestPlaceKV:
    def place(
        self, dtype: torch.dtype, x: torch.Tensor, slots: torch.Tensor, cells: torch.Tensor
    ) -> dict[str, torch.Tensor]:
        operands = {"slots": slots, "cells": cells}
        if dtype == torch.float8_e4m3fn:
            operands["cell_scale"] = torch.tensor([0.5, 3.0])
        return (PlaceKV(D, dtype) >> Store(F32)).evaluate(x, **operands)

    @settings(max_examples=20)
    @given(data=st.data())
    def test_any_slots(self, dtype: torch.dtype, data: st.DataObject) -> None:
        rows = data.draw(st.integers(0, 20))
        slots = data.draw(draw_slots(rows, PAGES * PAGE, beyond=True))
        cells = data.draw(st.sampled_from(sorted(views(dtype, 7.0).items())))[1]
        x = noise(rows, H * D, scale=300.0)
        out = self.place(dtype, x, slots, cells)
        scale = torch.tensor([0.5, 3.0]) if dtype == torch.float8_e4m3fn else None
        scaled = (
            x if scale is None else r32(x * ref.round_to(1 / wide(scale), F32).repeat_interleave(D))
        )
        expected = ref.place_kv(scaled, slots, cells, dtype)
        assert_same(out["cells"], expected.cells)
        untouched = out["cells"].double()[~expected.written]
        assert (untouched == 7.0).all()
        stored = ref.round_to(scaled, dtype)
        value = stored if scale is None else r32(stored * wide(scale).repeat_interleave(D))
        assert_same(out["out"], value)

    def test_the_given_cache_is_not_changed(self, dtype: torch.dtype) -> None:
        for layout, cells in views(dtype, 7.0).items():
            out = self.place(dtype, noise(4, H * D), torch.arange(4), cells)
            assert bool((cells.double() == 7.0).all()), layout
            assert bool((out["cells"].double() != 7.0).any()), layout

    def test_special_values(self, dtype: torch.dtype) -> None:
        """Float8 saturates and counts; 16 bits overflow to infinity as a cast does. NaN stays."""
        x = special_matrix(9, H * D)
        slots = torch.tensor([0, 5, -1, 16, 47, 48, 2, 2**40, 3])
        kept = [0, 1, 3, 4, 6, 8]
        cells = views(dtype, 0.0)["HND"]
        out = self.place(dtype, x, slots, cells)
        if dtype != torch.float8_e4m3fn:
            assert_same(out["cells"], ref.place_kv(x, slots, cells, dtype).cells)
            assert set(out) == {"cells", "out"}
            return
        scaled = r32(wide(x) * ref.round_to(1 / wide([0.5, 3.0]), F32).repeat_interleave(D))
        assert_same(out["cells"], ref.place_kv(scaled, slots, cells, dtype).cells)
        assert int(out["cells_saturated"]) == int((scaled[kept].abs() > 448).sum())
        assert int(out["cells_nans"]) == int(scaled[kept].isnan().sum())

    def test_a_dense_cache_is_pages_of_max_len(self, dtype: torch.dtype) -> None:
        """(batch, max_len, heads, head_dim): slot = row * max_len + position, for any max_len."""
        cells = torch.zeros(2, 37, H, D).to(dtype)
        x = noise(3, H * D)
        out = self.place(dtype, x, torch.tensor([36, 37, 73]), cells)["cells"].double()
        assert (out[0, 36] != 0).any()
        assert (out[1, 0] != 0).any()
        assert (out[1, 36] != 0).any()
        assert int((out.abs().sum((2, 3)) != 0).sum()) == 3


def test_float8_counters_go_on_from_what_they_were() -> None:
    x = torch.full((2, 64), 1000.0)
    x[1, 0] = float("nan")
    operands = {"cell_scale": torch.ones(1), "slots": torch.tensor([1, 0])}
    operands["cells"] = torch.zeros(1, 16, 1, 64).to(torch.float8_e4m3fn)
    start = {"cells_saturated": torch.tensor([5]), "cells_nans": torch.tensor([2**40])}
    out = (PlaceKV(64, torch.float8_e4m3fn) >> Store(F32)).evaluate(x, **operands, **start)
    assert int(out["cells_saturated"]) == 5 + 127
    assert int(out["cells_nans"]) == 2**40 + 1
    assert int(start["cells_saturated"]) == 5


def test_evaluate_needs_the_cache() -> None:
    with pytest.raises(ArgumentError, match="cells: got nothing, expected the cache"):
        (PlaceKV(64) >> Store(F32)).evaluate(noise(1, 64), slots=torch.tensor([0]))
