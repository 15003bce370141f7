"""The composed float64 projections against PyTorch's own modules and closed forms."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention, silu

from epicute.gemm import reference as gemm
from epicute.gemm.reference import Linear, Rotary

F64 = torch.float64


def normal(*shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=generator, dtype=F64)


def close(got: torch.Tensor, wanted: torch.Tensor) -> None:
    assert got.dtype == F64
    torch.testing.assert_close(got, wanted, rtol=1e-12, atol=1e-13)


def rotary(rows: int, head_dim: int = 16, **fields) -> Rotary:
    inv_freq = 10000.0 ** -(torch.arange(head_dim // 2) / (head_dim // 2))
    return Rotary(torch.arange(rows) + 3, inv_freq, head_dim, **fields)


def rotated(x: torch.Tensor, turn: Rotary) -> torch.Tensor:
    """Complex multiplication of the halves of every head."""
    heads = x.reshape(len(x), -1, turn.head_dim)
    half = turn.head_dim // 2
    angle = (turn.positions.float()[:, None] * turn.inv_freq).double()
    pairs = torch.complex(heads[..., :half], heads[..., half:])
    pairs = pairs * torch.polar(torch.ones_like(angle), angle)[:, None]
    return torch.cat([pairs.real, pairs.imag], dim=2).reshape(x.shape)


def test_a_product_is_linear_of_what_codes_stand_for() -> None:
    x, weight, scale, columns = normal(5, 48), normal(32, 48), normal(5), normal(32)
    found = gemm.product(Linear(x, weight, scale, columns))
    close(found, (x * scale[:, None]) @ (weight * columns[:, None]).T)
    close(gemm.product(Linear(x, weight)), nn.functional.linear(x, weight))
    one = gemm.product(Linear(x, weight, torch.tensor([0.5]), torch.tensor([4.0])))
    close(one, 2 * nn.functional.linear(x, weight))


def test_the_norm_is_torchs() -> None:
    x, gain = normal(5, 128), normal(128)
    norm = nn.RMSNorm(128, eps=1e-5, dtype=F64)
    with torch.no_grad():
        norm.weight.copy_(gain)
    close(gemm.rms_norm(x, gain, 1e-5), norm(x).detach())
    with torch.no_grad():
        norm.weight.add_(1)
    close(gemm.rms_norm(x, gain, 1e-5, offset=1.0), norm(x).detach())


@pytest.mark.parametrize("columns", [64, 100, 576])
def test_partials_sum_to_the_square_of_the_row(columns: int) -> None:
    x = normal(3, columns)
    found = gemm.partials(x)
    assert found.shape == (3, math.ceil(columns / 64))
    close(found.sum(1), (x * x).sum(1))
    close(found[:, 0], (x[:, :64] ** 2).sum(1))


def test_the_row_factor_moves_behind_the_product() -> None:
    """Folding gain into the weight and multiplying by 1/rms afterwards is the norm before the projection."""
    x, gain, weight = normal(5, 128), normal(128), normal(64, 128)
    linear = Linear(x, weight * gain)
    z = gemm.gate_up_projection(linear, gemm.partials(x), 1e-5)["z"]
    gate, up = (gemm.rms_norm(x, gain, 1e-5) @ weight.T).chunk(2, dim=1)
    close(z, silu(gate) * up)


def test_gate_and_up_are_clipped_first() -> None:
    x = torch.tensor([[1.0]])
    linear = Linear(x, torch.tensor([[20.0], [-20.0]]))
    z = gemm.gate_up_projection(linear, limit=7.0)["z"]
    assert float(z) == pytest.approx(-49 / (1 + math.exp(-7)), rel=1e-12)  # GE-17: -48.96
    assert float(gemm.gate_up_projection(linear)["z"]) == pytest.approx(-400, rel=1e-8)
    z = gemm.gate_up_projection(linear, alpha=1.702, limit=7.0)["z"]
    assert float(z) == pytest.approx(-49 / (1 + math.exp(-1.702 * 7)), rel=1e-12)


def test_qkv_is_norm_bias_head_norm_and_rope_in_that_order() -> None:
    x, weight, bias, q_gain = normal(6, 64), normal(64, 64), normal(64), normal(16)
    turn = rotary(6)
    linear = Linear(x, weight, bias=bias)
    found = gemm.qkv_projection(linear, (32, 16, 16), turn, gemm.partials(x), 1e-5, q_gain)
    normed = gemm.rms_norm(x, torch.ones(64), 1e-5)
    q, k, v = (normed @ weight.T + bias).split([32, 16, 16], dim=1)
    heads = q.reshape(6, 2, 16)
    heads = heads / torch.sqrt((heads**2).mean(2, keepdim=True) + 1e-5) * q_gain
    close(found["q"], rotated(heads.reshape(6, 32), turn))
    close(found["k"], rotated(k, turn))
    close(found["v"], v)


def test_rope_turns_what_rotary_dim_says() -> None:
    x = normal(4, 32)
    partly = rotary(4, 8)
    turn = Rotary(partly.positions, partly.inv_freq, 32, rotary_dim=8, magnitude=1.5)
    found = turn.apply(x)
    close(found[:, :8], 1.5 * rotated(x[:, :8], partly))
    assert torch.equal(found[:, 8:], x[:, 8:])


@pytest.mark.parametrize("project", [gemm.output_projection, gemm.down_projection])
def test_the_residual_is_added_and_its_stored_squares_summed(project) -> None:
    x, weight, residual = normal(5, 32), normal(100, 32), normal(5, 100)
    found = project(Linear(x, weight), residual)
    h = x @ weight.T + residual
    close(found["h"], h)
    stored = h.to(torch.bfloat16).double() ** 2
    close(found["sumsq"], torch.stack([stored[:, :64].sum(1), stored[:, 64:].sum(1)], dim=1))
    exact = project(Linear(x, weight), residual, stored_as=F64)
    close(exact["sumsq"].sum(1), (h * h).sum(1))


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (4, 2), (9, 3), (6, 1)])
def test_attention_is_torchs(heads: int, kv_heads: int) -> None:
    tokens, dim = 7, 16
    q = normal(tokens, heads * dim)
    k, v = normal(tokens, kv_heads * dim), normal(tokens + 1, kv_heads * dim)[:tokens]

    def split(x: torch.Tensor) -> torch.Tensor:
        return x.reshape(tokens, -1, dim).transpose(0, 1)

    wanted = scaled_dot_product_attention(
        split(q), split(k), split(v), is_causal=True, enable_gqa=True
    )
    close(gemm.attention(q, k, v, dim), wanted.transpose(0, 1).reshape(tokens, heads * dim))
