"""GPTQ against the method written column by column, and against rounding to nearest."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from epicute.errors import ArgumentError
from epicute.layouts import CHANNEL
from epicute.models.smollm2 import Checkpoint, decoder_layer
from epicute.quant import (
    ClipSearch,
    GptqConfig,
    Hessian,
    Int4Codes,
    Int4Grid,
    quantize_gptq,
    quantize_int4,
    reference,
)
from epicute.quant.gptq import output_error
from tests.quant.smollm2_inputs import PROMPT, linear_inputs


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Matrices this small are slower with more, most of all beside other tests."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def correlated(rows: int, width: int, rank: int, seed: int = 0) -> torch.Tensor:
    """(rows, width) float32 inputs that share ``rank`` directions, with channels of very different size."""
    generator = torch.Generator().manual_seed(seed)
    mix = torch.randn(rank, width, generator=generator)
    x = torch.randn(rows, rank, generator=generator) @ mix
    size = torch.exp(torch.randn(width, generator=generator))
    return (x + 0.1 * torch.randn(rows, width, generator=generator)) * size


def hessian_of(x: torch.Tensor) -> torch.Tensor:
    found = Hessian(x.shape[-1])
    found.add(x)
    return found.matrix


def by_columns(
    values: np.ndarray,
    hessian: np.ndarray,
    scale: np.ndarray,
    zero: np.ndarray,
    group: int,
    damping: float,
) -> np.ndarray:
    """The paper's equations (2) and (3), a column at a time: round it, spread its error over the columns that are left
    by the inverse of what is left of H, and take the column out of that inverse by one step of elimination.
    """
    w = values.astype(np.float64).copy()
    h = hessian.copy()
    alive = np.diag(h) != 0
    mean = np.diag(h)[alive].mean() if alive.any() else 1.0
    h[np.diag_indices_from(h)] += np.where(alive, damping * mean, mean)
    inverse = np.linalg.inv(h)
    codes = np.empty(w.shape, np.uint8)
    for i in range(w.shape[1]):
        s, z = scale[:, i // group].astype(np.float64), zero[:, i // group].astype(np.float64)
        codes[:, i] = np.clip(np.rint(w[:, i] / s) + z, 0, 15)
        off = (w[:, i] - (codes[:, i] - z) * s) / inverse[i, i]
        w -= off[:, None] * inverse[i][None, :]
        inverse -= np.outer(inverse[:, i], inverse[i]) / inverse[i, i]
        inverse[i, :] = inverse[:, i] = 0  # the column is out: rounding must not bring it back
    return codes


grids = st.builds(Int4Grid, st.sampled_from([32, 64, 128, CHANNEL]), st.booleans())


@given(
    grids,
    st.integers(1, 12),
    st.integers(2, 150),
    st.integers(1, 64),
    st.sampled_from([0.001, 0.01, 0.3]),
    st.integers(0, 2**32 - 1),
)
@settings(max_examples=30)
def test_codes_are_those_of_the_method_column_by_column(
    grid: Int4Grid, rows: int, width: int, block: int, damping: float, seed: int
) -> None:
    values = torch.randn(rows, width, generator=torch.Generator().manual_seed(seed))
    x = correlated(2 * width, width, max(width // 3, 1), seed)
    h = hessian_of(x)
    found = quantize_gptq(values, h, GptqConfig(grid, damping, block=block)).codes
    wide = width if grid.group == CHANNEL else grid.group
    _, scale, zero = reference.quantize_int4(values.numpy(), wide, grid.symmetric)
    codes = by_columns(values.numpy(), h.numpy(), scale, zero, wide, damping)
    assert np.array_equal(found.codes.numpy(), codes)
    assert np.array_equal(found.scale.numpy(), scale), "the grid is that of the weight as given"
    assert found.zero is None or np.array_equal(found.zero.numpy(), zero)


@pytest.mark.parametrize("grid", [Int4Grid(), Int4Grid(32, False), Int4Grid(CHANNEL)])
@pytest.mark.parametrize("clip", [None, ClipSearch(steps=6)])
def test_it_beats_rounding_to_nearest_on_correlated_inputs(
    grid: Int4Grid, clip: ClipSearch | None
) -> None:
    w, x = (
        torch.randn(48, 256, generator=torch.Generator().manual_seed(1)),
        correlated(600, 256, 40),
    )
    found = quantize_gptq(w, hessian_of(x), GptqConfig(grid, clip=clip))
    importance = None if clip is None else x.double().square().mean(0)
    nearest = quantize_int4(w, grid, clip, importance)
    exact = w.double() @ x.double().t()

    def error(codes: Int4Codes) -> float:
        off = codes.dequantize(torch.float64) @ x.double().t() - exact
        return (off.norm() / exact.norm()).item() ** 2

    assert error(found.codes) < 0.5 * error(nearest)
    assert found.error == pytest.approx(error(found.codes), rel=1e-9)
    assert found.nearest == pytest.approx(error(nearest), rel=1e-3)
    assert output_error(w, nearest, hessian_of(x)) == pytest.approx(error(nearest), rel=1e-9)


def test_without_correlation_it_is_rounding_to_nearest() -> None:
    w = torch.randn(16, 128)
    found = quantize_gptq(w, torch.diag(torch.rand(128, dtype=torch.float64) + 0.1))
    assert torch.equal(found.codes.codes, quantize_int4(w).codes)
    assert found.error == found.nearest


def test_dead_columns_are_rounded_to_nearest_and_disturb_nothing() -> None:
    x = correlated(300, 128, 20)
    dead = torch.zeros(128, dtype=torch.bool)
    dead[[0, 7, 64, 127]] = True
    x[:, dead] = 0
    w = torch.randn(24, 128)
    found = quantize_gptq(w, hessian_of(x)).codes
    nearest = quantize_int4(w)
    assert torch.equal(found.codes[:, dead], nearest.codes[:, dead])
    assert not torch.equal(found.codes, nearest.codes)
    scale, zero = found.scale.numpy(), np.full(found.scale.shape, 8)
    codes = by_columns(w.numpy(), hessian_of(x).numpy(), scale, zero, 128, 0.01)
    assert np.array_equal(found.codes.numpy(), codes)
    # What a dead column holds changes no other column, as long as the group's scale stays.
    other = w.clone()
    other[:, dead] = 0.25 * other[:, dead]
    again = quantize_gptq(other, hessian_of(x)).codes
    kept = (again.scale == found.scale).all(dim=1)
    assert kept.sum() > 12
    assert torch.equal(again.codes[kept][:, ~dead], found.codes[kept][:, ~dead])


def test_inputs_of_nothing_but_zeros() -> None:
    w = torch.randn(4, 64)
    found = quantize_gptq(w, hessian_of(torch.zeros(10, 64)))
    assert torch.equal(found.codes.codes, quantize_int4(w).codes)
    assert (found.error, found.nearest) == (0.0, 0.0)


def test_fewer_rows_than_columns_are_damped() -> None:
    w, x = torch.randn(8, 128), correlated(10, 128, 5)
    found = quantize_gptq(w, hessian_of(x))
    assert found.error < found.nearest


def test_rows_are_independent(monkeypatch: pytest.MonkeyPatch) -> None:
    """q, k and v above each other are quantised like each alone."""
    from epicute.quant import gptq as module

    h = hessian_of(correlated(200, 128, 30))
    parts = [torch.randn(n, 128) for n in (5, 1, 9)]
    whole = quantize_gptq(torch.cat(parts), h).codes
    apart = [quantize_gptq(p, h).codes for p in parts]
    assert torch.equal(whole.codes, torch.cat([a.codes for a in apart]))
    monkeypatch.setattr(module, "_ROWS", 4)
    sliced = quantize_gptq(torch.cat(parts), h).codes
    assert torch.equal(whole.codes, sliced.codes)
    assert torch.equal(whole.scale, sliced.scale)


def test_the_weight_is_left_alone() -> None:
    w = torch.randn(4, 64)
    before = w.clone()
    quantize_gptq(w, hessian_of(correlated(100, 64, 9)))
    assert torch.equal(w, before)


class TestHessian:
    @given(st.integers(1, 40), st.integers(1, 7), st.integers(1, 9))
    def test_batches_and_chunks_add_up(self, rows: int, chunk: int, cut: int) -> None:
        x = torch.randn(rows, 12)
        found = Hessian(12, chunk=chunk)
        for part in x.split(cut):
            found.add(part.reshape(1, -1, 12))
        exact = 2 * x.double().t() @ x.double() / rows
        assert found.rows == rows
        assert torch.allclose(found.matrix, exact, rtol=1e-12, atol=1e-14)
        assert found.matrix.dtype == torch.float64

    def test_float32_products_stay_close(self) -> None:
        x = correlated(500, 64, 9)
        found = Hessian(64, precision=torch.float32, chunk=64)
        found.add(x)
        exact = hessian_of(x)
        assert ((found.matrix - exact).norm() / exact.norm()) < 1e-6
        assert not torch.equal(found.matrix, exact)

    def test_other_dtypes_and_no_rows(self) -> None:
        x = torch.randn(9, 8)
        for dtype in (torch.bfloat16, torch.float16):
            found = Hessian(8)
            found.add(x.to(dtype))
            found.add(x[:0].to(dtype))
            assert torch.equal(found.matrix, hessian_of(x.to(dtype).float()))

    @pytest.mark.parametrize("bad", [math.nan, math.inf])
    def test_broken_activations_are_refused_and_counted(self, bad: float) -> None:
        x = torch.randn(10, 8)
        x[3, 2] = x[7, 0] = bad
        with pytest.raises(ArgumentError, match="^x: got 2 rows with a NaN or an infinity"):
            Hessian(8).add(x)

    def test_reduced_precision_is_refused(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(torch, "get_float32_matmul_precision", lambda: "high")
        Hessian(8)
        with pytest.raises(ArgumentError, match="^precision: got float32 products at 'high'"):
            Hessian(8, precision=torch.float32)

    @pytest.mark.parametrize(
        ("argument", "make"),
        [
            ("width", lambda: Hessian(0)),
            ("chunk", lambda: Hessian(8, chunk=0)),
            ("precision", lambda: Hessian(8, precision=torch.bfloat16)),
            ("x.shape", lambda: Hessian(8).add(torch.ones(3, 9))),
            ("x.dtype", lambda: Hessian(8).add(torch.ones(3, 8).double())),
            ("activations", lambda: Hessian(8).matrix),
        ],
    )
    def test_refused_by_name(self, argument: str, make: object) -> None:
        with pytest.raises(ArgumentError, match=f"^{argument}: got"):
            make()  # type: ignore[operator]


W, EYE = torch.ones(2, 8), torch.eye(8, dtype=torch.float64)


@pytest.mark.parametrize(
    ("argument", "make"),
    [
        ("values.shape", lambda: quantize_gptq(W[0], EYE)),
        ("values.dtype", lambda: quantize_gptq(W.double(), EYE)),
        ("values", lambda: quantize_gptq(W * math.nan, EYE)),
        ("hessian", lambda: quantize_gptq(W, EYE[:4, :4])),
        ("hessian", lambda: quantize_gptq(W, EYE.float())),
        ("hessian", lambda: quantize_gptq(W, EYE * math.nan)),
        ("hessian", lambda: quantize_gptq(W, EYE - 2 * torch.ones(8, 8).double())),
        ("damping", lambda: GptqConfig(damping=0.0)),
        ("damping", lambda: GptqConfig(damping=math.nan)),
        ("block", lambda: GptqConfig(block=0)),
    ],
)
def test_refused_by_name(argument: str, make: object) -> None:
    with pytest.raises(ArgumentError, match=f"^{argument}: got"):
        make()  # type: ignore[operator]


@pytest.fixture(scope="module")
def checkpoint() -> Checkpoint:
    """Trained weights; fetched where they are not on this machine yet."""
    return Checkpoint.open()


@pytest.mark.parametrize("index", [0, 6])
def test_it_beats_rounding_to_nearest_on_smollm2(checkpoint: Checkpoint, index: int) -> None:
    """Activations of a real prompt; K = 576 is no multiple of the group."""
    _, x = checkpoint.layer_inputs(PROMPT, index)
    weights = checkpoint.layer(index)
    inputs, out = linear_inputs(x, weights, checkpoint.config)
    wanted = decoder_layer(x, weights, checkpoint.config)
    assert torch.allclose(out, wanted, rtol=1e-4, atol=1e-4 * wanted.abs().max().item())
    for name, activations in inputs.items():
        found = quantize_gptq(weights[name], hessian_of(activations))
        exact = weights[name].double() @ activations.double().t()
        off = found.codes.dequantize(torch.float64) @ activations.double().t() - exact
        plain = quantize_int4(weights[name]).dequantize(torch.float64)
        nearest = plain @ activations.double().t() - exact
        assert off.norm() < 0.8 * nearest.norm(), name
        assert found.error == pytest.approx((off.norm() / exact.norm()).item() ** 2, rel=1e-6)
