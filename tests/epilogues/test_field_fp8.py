"""Field failures of delayed FP8 scaling, through the epilogues that write FP8 and its statistics."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
import torch

from epicute.epilogues import (
    Composition,
    EmitFP8,
    ResidualAdd,
    RowScale,
    Store,
    SumSquares,
    SwiGLU,
    compose,
)
from epicute.quant import DelayedScale
from tests.epilogues.model import assert_same, noise

BF16, FP8 = torch.bfloat16, torch.float8_e4m3fn
NAN, INF = float("nan"), float("inf")


def create() -> DelayedScale:
    return DelayedScale.create(history=4)


@dataclass
class Site:
    """A place in a model whose epilogue writes FP8: each call rolls the state, runs and records."""

    composition: Composition = field(default_factory=lambda: compose(EmitFP8()))
    state: DelayedScale = field(default_factory=create)

    def run(self, acc: torch.Tensor, **operands: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(codes, the scale that they were written with)."""
        self.state.roll()
        statistics = {
            "amax": self.state.amax_next,
            "saturated": self.state.saturated,
            "nans": self.state.nans,
        }
        scale = self.state.scale_used.clone()
        found = self.composition.evaluate(acc, out_scale=scale, **statistics, **operands)
        for name, tensor in statistics.items():
            tensor.copy_(found[name])
        return found["out_fp8"], scale

    def value(self, acc: torch.Tensor, **operands: torch.Tensor) -> torch.Tensor:
        """What a reader of the codes sees, in float64."""
        codes, scale = self.run(acc, **operands)
        return codes.double() * scale.double()


def residual() -> tuple[Composition, Callable[[int], dict[str, torch.Tensor]]]:
    chain = ResidualAdd() >> SumSquares() >> Store(BF16) >> EmitFP8()
    return chain, lambda rows: {"residual": torch.zeros(rows, 64).to(BF16)}


def gated() -> tuple[Composition, Callable[[int], dict[str, torch.Tensor]]]:
    chain = RowScale(64, 0.0) >> SwiGLU() >> EmitFP8()
    return chain, lambda rows: {"sumsq": torch.full((rows, 1), 64.0)}


def alone() -> tuple[Composition, Callable[[int], dict[str, torch.Tensor]]]:
    return compose(EmitFP8()), lambda rows: {}


FUSED = pytest.mark.parametrize("fused", [alone, residual, gated], ids=lambda f: f.__name__)


@pytest.mark.parametrize("amax", [1e-37, 1e-40, 0.0])
def test_df_01_a_tiny_maximum_makes_a_finite_scale(amax: float) -> None:
    site, acc = Site(), torch.full((2, 16), amax)
    acc[0, 0] = 0.0
    for _ in range(6):
        out = site.value(acc)
        assert out.isfinite().all()
        assert float(out[0, 0]) == 0.0
        scale = float(site.state.scale_used)
        assert 0 < scale < INF
        assert (out - acc.double()).abs().max() <= 2.0**-9 * scale


@FUSED
def test_df_02_zeros_stay_zeros(fused: Callable) -> None:
    """As the first call, as one row among others, and with no effect on the next call."""
    chain, operands = fused()
    x = noise(4, 64)
    x[1] = 0.0
    with_zeros, without = Site(chain), Site(chain)
    first = with_zeros.value(torch.zeros(4, 64), **operands(4))
    assert (first == 0).all()
    assert float(with_zeros.state.scale_used) == 1.0
    for site in (with_zeros, without):
        out = site.value(x, **operands(4))
        assert (out[1] == 0).all()
    assert_same(with_zeros.value(x, **operands(4)), without.value(x, **operands(4)))


@FUSED
@pytest.mark.parametrize("broken", [NAN, INF, -INF])
def test_df_03_a_broken_value_is_counted_and_leaves_no_trace(
    fused: Callable, broken: float
) -> None:
    """Seen in a counter; the next clean calls are as if it had never come."""
    chain, operands = fused()
    clean = torch.ones(3, 64)
    bad = clean.clone()
    bad[1, 5] = broken
    broken_site, clean_site = Site(chain), Site(chain)
    broken_site.run(bad, **operands(3))
    clean_site.run(clean, **operands(3))
    counts = (int(broken_site.state.saturated), int(broken_site.state.nans))
    if fused is gated and broken == -INF:  # -inf * sigmoid(-inf) is NaN, in the formula too
        assert counts == (0, 1)
    else:
        assert counts == ((0, 1) if broken != broken else (1, 0))
    for _ in range(3):
        again = [site.run(clean, **operands(3)) for site in (broken_site, clean_site)]
        assert_same(again[0][0], again[1][0])
        assert_same(again[0][1], again[1][1])
        assert broken_site.state.history.isfinite().all()


def test_df_04_a_call_without_rows_rolls_nothing() -> None:
    """A maximum of 8 stays through ten calls of no rows, and leaves with the fourth real one."""
    site, acc = Site(), torch.ones(2, 16)
    site.run(acc * 8)
    for _ in range(10):
        site.run(torch.zeros(0, 16))
    peaks = []
    for _ in range(6):
        site.run(acc)
        peaks.append(float(site.state.history.max()))
    assert peaks == [8.0, 8.0, 8.0, 8.0, 1.0, 1.0]
    assert float(site.state.scale_used) == float(torch.tensor(1.0) / 448)


def test_df_06_a_scale_follows_traffic_and_sites_do_not_mix() -> None:
    """Warm-up at 0.001 is over one call after real data; two sites used in turn are as if alone."""
    site = Site()
    for _ in range(5):
        site.run(torch.full((2, 16), 0.001))
    real = noise(8, 64, scale=50.0)
    site.run(real)
    codes, scale = site.run(real)
    error = codes.double() * scale.double() - real.double()
    assert error.norm() < 0.04 * real.double().norm()
    written = codes.double() * scale.double()
    site.run(real * 100)
    site.run(real * 100)
    assert torch.equal(codes.double() * scale.double(), written)

    small, large, alone_small = Site(), Site(), Site()
    for i in range(6):
        acc = noise(4, 32, seed=i)
        out = small.run(acc)
        large.run(acc * 400)
        expected = alone_small.run(acc)
        assert_same(out[0], expected[0])
        assert_same(out[1], expected[1])


def test_df_08_a_saved_site_continues_bit_for_bit() -> None:
    site, steps = Site(), [noise(4, 32, seed=i, scale=2.0**i) for i in range(10)]
    for acc in steps[:5]:
        site.run(acc)
    restored = Site()
    restored.state.load_state_dict(site.state.state_dict())
    for acc in steps[5:]:
        found, expected = restored.run(acc), site.run(acc)
        assert_same(found[0], expected[0])
        assert_same(found[1], expected[1])


def test_df_09_overflow_saturates_and_the_next_call_fits() -> None:
    acc = torch.tensor([[1000.0, 449.0, 464.0, 465.0, -1000.0, INF, -INF, 448.0]])
    out = compose(EmitFP8()).evaluate(acc, out_scale=torch.ones(1))
    assert out["out_fp8"].double().tolist() == [[448.0] * 4 + [-448.0, 448.0, -448.0, 448.0]]
    assert int(out["saturated"]) == 7
    assert float(out["amax"]) == 1000.0
    unscaled = compose(Store(FP8)).evaluate(acc)["out"]
    assert_same(unscaled, out["out_fp8"])

    site, stale = Site(), torch.full((2, 16), 1000.0)
    site.run(torch.ones(2, 16))
    first = site.value(stale)
    assert (first - 1.0).abs().max() < 1e-6, "448 of the old scale, which was 1 / 448"
    assert int(site.state.saturated) == 32
    second = site.value(stale)
    assert (second - 1000.0).abs().max() <= 1000.0 / 16
    assert int(site.state.saturated) == 32


def test_df_10_the_scale_is_the_multiplier_of_a_code() -> None:
    """2.0 under a scale of 0.25 is code 8.0, byte 0x50, not 0.5."""
    acc = torch.full((1, 8), 2.0)
    out = (EmitFP8() >> Store(torch.float32)).evaluate(acc, out_scale=torch.tensor([0.25]))
    assert (out["out_fp8"].view(torch.uint8) == 0x50).all()
    assert (out["out"] == 2.0).all()
