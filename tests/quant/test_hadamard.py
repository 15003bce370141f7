"""The rotation: orthogonal, its own inverse, and unseen by exact attention."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from epicute.errors import ArgumentError
from epicute.quant.hadamard import block_width, fold_output, fold_value, hadamard, rotate

HEAD_DIMS = (64, 80, 96, 112, 128, 192, 256)


@st.composite
def sizes(draw: st.DrawFn) -> tuple[int, int]:
    """(head_dim, width): any even head and any block that divides it."""
    head_dim = draw(st.sampled_from(HEAD_DIMS) | st.integers(1, 130).map(lambda n: 2 * n))
    most = (head_dim & -head_dim).bit_length() - 1
    return head_dim, 2 ** draw(st.integers(1, most))


def popcount_signs(width: int) -> np.ndarray:
    """Walsh–Hadamard signs from their closed form: (-1)^popcount(i & j)."""
    index = np.arange(width)
    ones = np.vectorize(lambda v: int(v).bit_count())(index[:, None] & index[None, :])
    return np.where(ones % 2, -1.0, 1.0)


@given(sizes())
def test_the_matrix_is_block_diagonal_orthogonal_and_symmetric(size: tuple[int, int]) -> None:
    head_dim, width = size
    matrix = hadamard(head_dim, width).numpy()
    assert np.abs(matrix @ matrix.T - np.eye(head_dim)).max() < 1e-12
    assert np.array_equal(matrix, matrix.T)
    assert np.allclose(matrix[:width, :width] * np.sqrt(width), popcount_signs(width), atol=1e-12)
    blocks = np.kron(np.eye(head_dim // width), np.ones((width, width)))
    assert (matrix[blocks == 0] == 0).all()


@given(sizes(), st.integers(0, 2**16 - 1))
def test_butterflies_are_the_matrix_and_undo_themselves(size: tuple[int, int], seed: int) -> None:
    head_dim, width = size
    x = torch.from_numpy(np.random.default_rng(seed).standard_normal((3, head_dim), np.float32))
    found = rotate(x, width)
    exact = x.double() @ hadamard(head_dim, width)
    bound = x.norm(dim=-1, keepdim=True).double() * 2.0**-20
    assert ((found.double() - exact).abs() <= bound).all()
    assert ((rotate(found, width) - x).abs() <= bound).all()


@given(st.integers(0, 2**16 - 1), st.sampled_from([(128, 128), (64, 64), (80, 16), (96, 8)]))
def test_bits_are_those_of_the_stated_order(seed: int, size: tuple[int, int]) -> None:
    """One channel at a time: strides rise, partners differ in one bit, one product at the end."""
    head_dim, width = size
    x = np.random.default_rng(seed).standard_normal(head_dim).astype(np.float32)
    values, stride = list(x), 1
    while stride < width:
        values = [
            values[c] + values[c + stride]
            if c // stride % 2 == 0
            else values[c - stride] - values[c]
            for c in range(head_dim)
        ]
        stride *= 2
    wanted = np.array(values, np.float32) * np.float32(width**-0.5)
    assert np.array_equal(rotate(torch.from_numpy(x), width).numpy(), wanted)


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_kd_14_the_block_divides_the_head_and_products_are_kept(head_dim: int) -> None:
    width = block_width(head_dim)
    assert head_dim % width == 0
    assert (head_dim // width) % 2 == 1
    q, k = torch.randn(16, head_dim), torch.randn(16, head_dim)
    exact = (q.double() * k.double()).sum(-1)
    found = (rotate(q).double() * rotate(k).double()).sum(-1)
    assert ((found - exact).abs() <= 1e-5 * (q.norm(dim=-1) * k.norm(dim=-1)).double()).all()


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """(M, D), (N, D), (N, D) in float64."""
    weights = torch.softmax(q.double() @ k.double().T * q.shape[-1] ** -0.5, dim=-1)
    return weights @ v.double()


@given(st.sampled_from(HEAD_DIMS), st.integers(1, 40), st.integers(0, 2**16 - 1))
def test_kd_15_exact_attention_is_unchanged(head_dim: int, keys: int, seed: int) -> None:
    torch.manual_seed(seed)
    q, k, v = torch.randn(3, head_dim), torch.randn(keys, head_dim), torch.randn(keys, head_dim)
    k[:, head_dim // 3] *= 30
    v = torch.eye(max(keys, head_dim))[:keys, :head_dim]  # one-hot: an inverse left out shows
    exact = attention(q, k, v)
    rotated = attention(rotate(q), rotate(k), rotate(v))
    found = rotate(rotated.float())
    assert (found - exact).abs().max() <= 1e-4
    one_sided = attention(rotate(q), k, v)
    assert keys == 1 or (one_sided - exact).abs().max() > 1e-6


def test_kd_15_rotation_comes_after_rope() -> None:
    """At position 1000 the two do not commute, which is why keys cannot be folded."""
    head_dim, position = 128, 1000
    frequency = 10000.0 ** (-torch.arange(head_dim // 2) / (head_dim // 2))
    angle = position * frequency.double()

    def rope(x: torch.Tensor) -> torch.Tensor:
        first, second = x.double().chunk(2, dim=-1)
        turned = (
            first * angle.cos() - second * angle.sin(),
            second * angle.cos() + first * angle.sin(),
        )
        return torch.cat(turned, dim=-1).float()

    q, k = torch.randn(head_dim), torch.randn(head_dim)
    exact = rope(q) @ rope(k)
    assert abs(rotate(rope(q)) @ rotate(rope(k)) - exact) < 1e-3
    assert (rotate(rope(k)) - rope(rotate(k))).abs().max() > 0.1


@pytest.mark.parametrize(("head_dim", "width"), [(128, None), (64, 16), (80, None), (96, None)])
def test_folding_into_the_projections_costs_nothing_at_run_time(
    head_dim: int, width: int | None
) -> None:
    kv_heads, group, hidden, tokens = 2, 3, 32, 9
    x = torch.randn(tokens, hidden, dtype=torch.float64)
    w_v = torch.randn(kv_heads * head_dim, hidden, dtype=torch.float64)
    b_v = torch.randn(kv_heads * head_dim, dtype=torch.float64)
    w_o = torch.randn(hidden, kv_heads * group * head_dim, dtype=torch.float64)

    def mixed(weight: torch.Tensor, bias: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        values = (x @ weight.T + bias).view(tokens, kv_heads, head_dim)
        mean = values.mean(dim=0).repeat_interleave(group, dim=0)  # any weights of a softmax
        return mean.reshape(-1) @ out.T

    folded = fold_value(w_v, head_dim, width), fold_value(b_v, head_dim, width)
    found = mixed(*folded, fold_output(w_o, head_dim, width))
    assert torch.allclose(found, mixed(w_v, b_v, w_o), atol=1e-9)
    values = (x @ w_v.T + b_v).view(tokens, kv_heads, head_dim)
    here = (x @ folded[0].T + folded[1]).view(tokens, kv_heads, head_dim)
    assert torch.allclose(here, values @ hadamard(head_dim, width), atol=1e-9)


def test_folding_keeps_shape_and_dtype() -> None:
    weight = torch.randn(128, 48).bfloat16()
    for folded in (fold_value(weight, 64), fold_output(weight.T.contiguous(), 64).T):
        assert folded.shape == weight.shape
        assert folded.dtype == torch.bfloat16
        assert not torch.equal(folded, weight)


def test_outliers_are_spread() -> None:
    x = torch.randn(256, 128)
    x[:, 5] *= 100
    before = x.abs().amax(-1) / x.square().mean(-1).sqrt()
    after = rotate(x).abs().amax(-1) / rotate(x).square().mean(-1).sqrt()
    assert after.median() < before.median() / 4


def test_qk_11_inputs_are_left_alone() -> None:
    x = torch.randn(4, 2, 160)[..., 16:144].bfloat16()
    before = x.clone()
    rotate(x)
    fold_value(x[:, 0], 2)
    assert torch.equal(x, before)


def test_mistakes_are_refused_by_name() -> None:
    for call, named in (
        (lambda: block_width(71), "^head_dim"),
        (lambda: block_width(0), "^head_dim"),
        (lambda: block_width(80, 128), "^width"),
        (lambda: block_width(128, 24), "^width"),
        (lambda: block_width(128, 256), "^width"),
        (lambda: block_width(128, 1), "^width"),
        (lambda: rotate(torch.randn(2, 64).double()), r"^x\.dtype"),
        (lambda: fold_value(torch.randn(100, 8), 64), r"^weight\.shape"),
        (lambda: fold_output(torch.randn(8, 100), 64), r"^weight\.shape"),
        (lambda: fold_value(torch.zeros(64, 8, dtype=torch.int32), 64), "^weight"),
    ):
        with pytest.raises(ArgumentError, match=named):
            call()
