"""Smoothing: what is taken out comes back exactly, wherever a kernel adds it."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from epicute.errors import ArgumentError
from epicute.quant.nvfp4 import dequantize_nvfp4, quantize_nvfp4
from epicute.quant.smoothing import (
    PLACEMENTS,
    Calibration,
    Means,
    centre,
    delta,
    join_terms,
    lse_shift,
    scores,
    sequence_means,
    split_terms,
)
from epicute.testing.strategies import float32s


def heads(rows: int, count: int, dim: int, seed: int, outlier: float = 30.0) -> torch.Tensor:
    """BF16-valued rows with a constant outlier of that size in one channel of every head."""
    made = np.random.default_rng(seed).standard_normal((rows, count, dim))
    made[:, np.arange(count), np.arange(count) * 7 % dim] += outlier
    return torch.from_numpy(made).bfloat16().float()


def attend(s: torch.Tensor, v: torch.Tensor, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Output (M, q_heads, D) and LSE (M, q_heads), float64, of scores (q_heads, M, N)."""
    s = s.double() * scale
    wide = v.double().repeat_interleave(s.shape[0] // v.shape[1], dim=1).transpose(0, 1)
    return (torch.softmax(s, -1) @ wide).transpose(0, 1), torch.logsumexp(s, -1).T


def exact_scores(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    wide = k.double().repeat_interleave(q.shape[1] // k.shape[1], dim=1)
    return q.double().transpose(0, 1) @ wide.transpose(0, 1).transpose(1, 2)


def smoothed_scores(
    q: torch.Tensor, k: torch.Tensor, means: Means, group: torch.Tensor | None = None
) -> torch.Tensor:
    """Float64 q_c·k_c + ΔS without any quantisation; ``group`` of the keys."""
    q_group = None if group is None else group[-len(q) :]
    k_c = centre(k, means.k, group)
    delta_s = delta(means.q, k_c, group).double()
    return exact_scores(centre(q, means.q, q_group), k_c) + delta_s.T[:, None, :]


shapes = st.sampled_from([(2, 2, 16), (8, 2, 64), (4, 1, 128), (9, 3, 64)])


@given(shapes, st.integers(1, 60), st.integers(0, 2**16 - 1))
def test_smoothing_changes_no_exact_output(
    shape: tuple[int, int, int], rows: int, seed: int
) -> None:
    q_heads, kv_heads, dim = shape
    q, k = heads(rows, q_heads, dim, seed), heads(rows, kv_heads, dim, seed + 1)
    v = torch.randn(rows, kv_heads, dim)
    means = sequence_means(q, k)
    scale = dim**-0.5
    wanted, lse = attend(exact_scores(q, k), v, scale)
    found, found_lse = attend(smoothed_scores(q, k, means), v, scale)
    assert (found - wanted).abs().max() <= 1e-4 * (1 + wanted.abs().max())
    shifted = found_lse + lse_shift(q, means.k, scale).double()
    assert ((shifted - lse).abs() <= 1e-5 * (1 + lse.abs())).all()


@given(shapes, st.integers(1, 40), st.integers(0, 2**16 - 1))
def test_sums_are_within_the_contract(shape: tuple[int, int, int], rows: int, seed: int) -> None:
    q_heads, kv_heads, dim = shape
    q, k = heads(rows, q_heads, dim, seed), heads(rows, kv_heads, dim, seed + 1)
    means = sequence_means(q, k)
    for x, mean in ((q, means.q), (k, means.k)):
        bound = 1e-6 * x.double().abs().mean(0)
        assert ((mean[0].double() - x.double().mean(0)).abs() <= bound).all()
    k_c = centre(k, means.k)
    assert torch.equal(k_c, k - means.k)
    wide = k_c.double().repeat_interleave(q_heads // kv_heads, dim=1)
    exact = (means.q.double() * wide).sum(-1)
    bound = 1e-6 * (means.q.double() * wide).abs().sum(-1)
    assert ((delta(means.q, k_c).double() - exact).abs() <= bound).all()


@given(shapes, st.integers(2, 50), st.integers(0, 2**16 - 1))
def test_all_placements_agree_on_keys_with_a_30_fold_outlier(
    shape: tuple[int, int, int], rows: int, seed: int
) -> None:
    q_heads, kv_heads, dim = shape
    q, k = heads(rows, q_heads, dim, seed), heads(rows, kv_heads, dim, seed + 1)
    means = sequence_means(q, k)
    q_c, k_c = centre(q, means.q), centre(k, means.k)
    delta_s = delta(means.q, k_c)
    k_hat = dequantize_nvfp4(*quantize_nvfp4(k_c))
    products = exact_scores(q_c.abs(), k_hat.abs())
    exact = exact_scores(q_c, k_hat) + delta_s.double().T[:, None, :]
    # Contract: the product within 2^-20 of its terms; ΔS within what its BF16 terms can hold.
    whole = 2.0**-20 * (products + delta_s.abs().double().T[:, None, :])
    for placement in PLACEMENTS:
        for terms, lost in ((1, 2.0**-8), (2, 2.0**-16), (3, 2.0**-24)):
            kept = lost if placement == "mma" else 0.0
            bound = whole + kept * delta_s.abs().double().T[:, None, :] + 1e-30
            found = scores(q_c, k_hat, delta_s, placement, terms).double()
            assert ((found - exact).abs() <= bound).all(), (placement, terms)


def test_one_bf16_term_is_worse_than_two() -> None:
    """What the second term is for: the paper's single one moves scores by 1e-2 and more."""
    q, k = heads(64, 4, 128, 1), heads(256, 4, 128, 2)
    means = Means("static", q.mean(0)[None], k.mean(0)[None])
    delta_s = delta(means.q, centre(k, means.k))
    error = [(join_terms(split_terms(delta_s, n)) - delta_s).abs().max().item() for n in (1, 2, 3)]
    assert error[0] > 1e-2
    assert error[1] < error[0] / 100
    assert error[2] == 0


@given(st.lists(float32s(2.0**100), min_size=1, max_size=20))
def test_terms_add_up_to_what_was_split(values: list[float]) -> None:
    x = torch.tensor(values)
    normal = x.abs() >= 2.0**-100
    for terms, bound in ((1, 2.0**-8), (2, 2.0**-16), (3, 0.0)):
        split = split_terms(x, terms)
        assert split.shape == (len(values), terms)
        assert torch.equal(split[:, 0].view(torch.int16), x.to(torch.bfloat16).view(torch.int16))
        found = join_terms(split)
        finite = normal & x.isfinite()
        assert ((found - x).abs() <= bound * x.abs())[finite].all()
        assert torch.equal(found.isfinite(), x.isfinite())
        assert torch.equal(found[x.isinf()], x[x.isinf()])


@given(st.integers(0, 2**16 - 1), st.lists(st.integers(0, 30), min_size=1, max_size=5))
def test_qk_07_sequences_of_a_packed_batch_have_means_of_their_own(
    seed: int, lengths: list[int]
) -> None:
    starts = torch.tensor([0, *np.cumsum(lengths)])
    rows = int(starts[-1])
    q, k = heads(rows, 4, 16, seed), heads(rows, 2, 16, seed + 1)
    for index, (a, b) in enumerate(zip(starts[:-1].tolist(), starts[1:].tolist(), strict=True)):
        sign = 10 if index % 2 else -10
        q[a:b] += sign
        k[a:b] += sign
    means = sequence_means(q, k, starts)
    assert means.q.shape == (len(lengths), 4, 16)
    for index, (a, b) in enumerate(zip(starts[:-1].tolist(), starts[1:].tolist(), strict=True)):
        if a == b:
            assert (means.q[index] == 0).all()
            assert (means.k[index] == 0).all()
            continue
        alone = sequence_means(q[a:b], k[a:b])
        assert torch.equal(means.q[index], alone.q[0])
        assert torch.equal(means.k[index], alone.k[0])
    group = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    whole = delta(means.q, centre(k, means.k, group), group)
    for index, (a, b) in enumerate(zip(starts[:-1].tolist(), starts[1:].tolist(), strict=True)):
        part = delta(means.q[index : index + 1], k[a:b] - means.k[index])
        assert torch.equal(whole[a:b], part)


def test_qk_07_frozen_means_serve_later_chunks_and_decoded_tokens() -> None:
    q, k = heads(208, 4, 64, 3), heads(208, 2, 64, 4)
    v, scale = torch.randn(208, 2, 64), 64**-0.5
    first = sequence_means(q[:64], k[:64])  # the first chunk of 64 + 136, then 8 decoded tokens
    for end in (64, 200, *range(201, 209)):
        start = 0 if end == 64 else 64 if end == 200 else end - 1
        found, _ = attend(smoothed_scores(q[start:end], k[:end], first), v[:end], scale)
        wanted, _ = attend(exact_scores(q[start:end], k[:end]), v[:end], scale)
        assert (found - wanted).abs().max() <= 1e-4


def test_qk_06_halves_smoothed_apart_merge_by_their_true_lse() -> None:
    q, k = heads(5, 8, 64, 5), heads(96, 2, 64, 6) + 3
    v, scale = torch.randn(96, 2, 64), 64**-0.5
    wanted, lse = attend(exact_scores(q, k), v, scale)
    outputs, logs = [], []
    for part in (slice(0, 40), slice(40, 96)):
        means = Means("static", q.mean(0)[None], k[part].mean(0)[None])
        found, found_lse = attend(smoothed_scores(q, k[part], means), v[part], scale)
        outputs.append(found)
        logs.append(found_lse + lse_shift(q, means.k[0], scale).double())
    total = torch.logsumexp(torch.stack(logs), dim=0)
    merged = sum(o * (log - total).exp()[..., None] for o, log in zip(outputs, logs, strict=True))
    assert (merged - wanted).abs().max() <= 1e-4
    assert (total - lse).abs().max() <= 1e-3


def test_padding_counts_nowhere() -> None:
    q, k = heads(20, 4, 16, 7), heads(20, 2, 16, 8)
    valid = torch.arange(20) % 3 != 0
    alone = sequence_means(q[valid], k[valid])
    q[~valid], k[~valid] = torch.nan, torch.inf
    found = sequence_means(q, k, valid=valid)
    assert torch.equal(found.q, alone.q)
    assert torch.equal(found.k, alone.k)


def test_calibration_is_the_mean_over_all_passes_and_survives_saving() -> None:
    q, k = heads(90, 4, 16, 9), heads(90, 2, 16, 10)
    whole, resumed = Calibration(2, 4, 2, 16), Calibration(2, 4, 2, 16)
    whole.observe(1, q[:50], k[:50], torch.arange(50) < 40)
    resumed.load_state_dict(whole.state_dict())
    for calibration in (whole, resumed):
        calibration.observe(1, q[50:].bfloat16(), k[50:].bfloat16())
    kept = torch.cat((torch.arange(40), torch.arange(50, 90)))
    means = whole.means(1)
    assert means.kind == "static"
    assert (means.q[0].double() - q[kept].double().mean(0)).abs().max() <= 1e-6 * 30
    assert torch.equal(means.k, resumed.means(1).k)
    with pytest.raises(ArgumentError, match="^layer"):
        whole.means(0)


def test_static_means_are_the_same_for_every_chunk_of_every_request() -> None:
    """Why pages can be shared: ΔS and codes of a token do not depend on its neighbours."""
    q, k = heads(64, 4, 64, 11), heads(64, 2, 64, 12)
    means = Means("static", q.mean(0)[None], k.mean(0)[None])
    whole = centre(k, means.k)
    codes, scales = quantize_nvfp4(whole)
    for part in (slice(0, 17), slice(17, 64), slice(5, 6)):
        piece = centre(k[part], means.k)
        assert torch.equal(delta(means.q, piece), delta(means.q, whole)[part])
        found, found_scales = quantize_nvfp4(piece)
        assert torch.equal(found, codes[part])
        assert torch.equal(found_scales.view(torch.uint8), scales.view(torch.uint8)[part])


def relative_rms(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found - wanted).square().mean().sqrt() / wanted.square().mean().sqrt())


def test_smoothing_recovers_outlier_channels() -> None:
    """NVFP4 scores with outlier channels are off by half until smoothed; then noise is left."""
    generator = torch.Generator().manual_seed(0)
    offset = torch.zeros(128)
    places = torch.tensor([3, 20, 41, 66, 90, 111])
    offset[places] = torch.tensor([12.0, -10, 8, -15, 9, 7])
    q = (torch.randn(128, 1, 128, generator=generator) + offset).bfloat16().float()
    k = (torch.randn(2048, 1, 128, generator=generator) + offset).bfloat16().float()
    v = torch.randn(2048, 1, 128, generator=generator)
    scale = 128**-0.5
    wanted, _ = attend(exact_scores(q, k), v, scale)

    def through(x: torch.Tensor) -> torch.Tensor:
        return dequantize_nvfp4(*quantize_nvfp4(x))

    plain, _ = attend(scores(through(q), through(k)), v, scale)
    means = sequence_means(k, k)
    means = Means("sequence", q.mean(0)[None], means.k)
    k_c = centre(k, means.k)
    delta_s = delta(means.q, k_c)
    s = scores(through(centre(q, means.q)), through(k_c), delta_s)
    smooth, _ = attend(s, v, scale)
    assert relative_rms(plain, wanted) > 0.4
    assert relative_rms(smooth, wanted) < 0.2


def test_without_smoothing_scores_are_the_product() -> None:
    q, k = heads(3, 4, 16, 13), heads(5, 2, 16, 14)
    assert torch.allclose(scores(q, k).double(), exact_scores(q, k), rtol=1e-5, atol=1e-3)


def test_centring_may_round_to_bf16() -> None:
    k = heads(9, 2, 16, 15)
    mean = k.mean(0)[None]
    rounded = centre(k, mean, bf16=True)
    assert torch.equal(rounded, (k - mean).bfloat16().float())
    assert not torch.equal(rounded, centre(k, mean))


def test_a_broken_key_spoils_its_own_delta_alone() -> None:
    q, k = heads(6, 4, 16, 16), heads(6, 2, 16, 17)
    mean = q.mean(0)[None]
    clean = delta(mean, k)
    k[2, 0, 3] = torch.nan
    found = delta(mean, k)
    assert found[2, :2].isnan().all()
    found[2, :2] = clean[2, :2]
    assert torch.equal(found, clean)


def test_qk_11_inputs_are_left_alone() -> None:
    q, k = heads(8, 4, 16, 18), heads(8, 2, 16, 19)
    before = q.clone(), k.clone()
    means = sequence_means(q, k)
    frozen = means.q.clone(), means.k.clone()
    k_c = centre(k, means.k)
    delta_s = delta(means.q, k_c)
    for placement in PLACEMENTS:
        scores(centre(q, means.q), k_c, delta_s, placement)
    lse_shift(q, means.k, 0.25)
    assert torch.equal(q, before[0])
    assert torch.equal(k, before[1])
    assert torch.equal(means.q, frozen[0])
    assert torch.equal(means.k, frozen[1])


def test_mistakes_are_refused_by_name() -> None:
    q, k = heads(4, 4, 16, 20), heads(4, 2, 16, 21)
    means = sequence_means(q, k)
    two = sequence_means(q, k, torch.tensor([0, 1, 4]))
    broken = q.clone()
    broken[0, 0, 0] = torch.inf
    calibration = Calibration(1, 4, 2, 16)
    for call, named in (
        (lambda: sequence_means(q, heads(4, 3, 16, 0)), "^q"),
        (lambda: sequence_means(q, k[:3]), r"^k\.shape"),
        (lambda: sequence_means(q.double(), k), r"^x\.dtype"),
        (lambda: sequence_means(q, k, torch.tensor([0, 3, 2, 4])), "^starts"),
        (lambda: sequence_means(q, k, torch.tensor([0, 5])), "^starts"),
        (lambda: sequence_means(q, k, valid=torch.ones(3, dtype=torch.bool)), r"^k\.shape"),
        (lambda: Means("none", means.q, means.k), "^kind"),
        (lambda: Means("static", two.q, two.k), "^means"),
        (lambda: Means("sequence", means.q.double(), means.k), "^means"),
        (lambda: centre(k, two.k), "^mean"),
        (lambda: centre(k, means.q), r"^mean\.shape"),
        (lambda: centre(k, two.k, torch.zeros(3, dtype=torch.int64)), "^group"),
        (lambda: delta(means.q, heads(4, 3, 16, 0)), "^q_mean"),
        (lambda: split_terms(torch.zeros(2), 4), "^terms"),
        (lambda: split_terms(torch.zeros(2).double()), "^delta_s"),
        (lambda: scores(q, k, torch.zeros(4, 2)), r"^delta_s\.shape"),
        (lambda: scores(q, k, torch.zeros(4, 4), "after"), "^placement"),
        (lambda: lse_shift(q, means.q[:, :3], 1.0), "^k_mean"),
        (lambda: Calibration(0, 4, 2, 16), "^q_heads"),
        (lambda: calibration.observe(1, q, k), "^layer"),
        (lambda: calibration.observe(0, q, q), r"^k\.shape"),
        (lambda: calibration.observe(0, broken, k), "^q: got NaN"),
        (lambda: calibration.load_state_dict({}), "^state"),
    ):
        with pytest.raises(ArgumentError, match=named):
            call()
    assert (calibration.q == 0).all()
