"""Small layers with random weights: what the tests of a block share."""

from __future__ import annotations

import torch

from epicute.models import LayerShape
from epicute.models.block_spec import BlockSpec
from epicute.models.block_state import LayerCache
from tests.models.float64_layer import Model

TINY = LayerShape(96, 160, 4, 2, 32, "tiny")
"""A hidden size that is no multiple of 64, so that the last partial sum has 32 columns."""

WIDE = LayerShape(256, 384, 8, 2, 128, "8:2 of 128")
SCALES = {
    "self_attn.v_proj": 8.0,
    "self_attn.o_proj": 1 / 8,
    "mlp.up_proj": 32.0,
    "mlp.down_proj": 1 / 16,
}
THETA = 10000.0
PAGE = 16
FP8 = torch.float8_e4m3fn


def inv_freq(spec: BlockSpec) -> torch.Tensor:
    """(rotary_dim / 2,) float32."""
    half = spec.rotary_dim // 2
    return (THETA ** (-torch.arange(half).double() / half)).float()


def state_of(spec: BlockSpec, seed: int = 0, prefix: str = "") -> dict[str, torch.Tensor]:
    """A layer of a checkpoint in bfloat16, whose gains are about 1 and differ by channel.

    Attention's output is about 8 and z about 32, so that an activation read with another one's scale shows.
    """
    random = torch.Generator().manual_seed(seed)
    shape = spec.shape

    def normal(*size: int, scale: float = 1.0) -> torch.Tensor:
        return (torch.randn(size, generator=random) * scale).to(torch.bfloat16)

    def gain(width: int) -> torch.Tensor:
        found = 0.5 + torch.rand(width, generator=random) - spec.gain_offset
        return found.to(torch.bfloat16)

    sizes = {
        "self_attn.q_proj": (shape.q_width, shape.hidden),
        "self_attn.k_proj": (shape.kv_width, shape.hidden),
        "self_attn.v_proj": (shape.kv_width, shape.hidden),
        "self_attn.o_proj": (shape.hidden, shape.q_width),
        "mlp.gate_proj": (shape.intermediate, shape.hidden),
        "mlp.up_proj": (shape.intermediate, shape.hidden),
        "mlp.down_proj": (shape.hidden, shape.intermediate),
    }
    found = {
        f"{n}.weight": normal(*size, scale=SCALES.get(n, 1.0) * size[1] ** -0.5)
        for n, size in sizes.items()
    }
    for name in ("input_layernorm", "post_attention_layernorm"):
        found[f"{name}.weight"] = gain(shape.hidden)
    if spec.bias:
        found |= {
            f"self_attn.{n}_proj.bias": normal(sizes[f"self_attn.{n}_proj"][0]) for n in "qkv"
        }
    if spec.qk_norm:
        found |= {f"self_attn.{n}_norm.weight": gain(shape.head_dim) for n in "qk"}
    return {prefix + name: tensor for name, tensor in found.items()}


def model_of(spec: BlockSpec, state: dict[str, torch.Tensor]) -> Model:
    """The same layer in float64."""
    assert spec.rope is not None
    return Model(
        state,
        spec.shape.heads,
        spec.shape.kv_heads,
        spec.shape.head_dim,
        inv_freq(spec),
        spec.eps,
        spec.gain_offset,
        spec.rotary_dim,
        spec.rope.style == "interleaved",
        spec.window,
        spec.softcap,
    )


def cache_of(
    spec: BlockSpec, pages: int, page: int = PAGE, dense: bool = False, device: str = "cpu"
) -> LayerCache:
    """A cache whose every cell is NaN."""
    shape = (pages, page, spec.shape.kv_heads, spec.shape.head_dim)
    k, v = (torch.full(shape, torch.nan, device=device).to(spec.cache) for _ in "kv")
    scales = {}
    if spec.cache == FP8:
        ramp = 1 + torch.arange(spec.shape.kv_heads, device=device)
        scales = {"k_scale": 0.02 * ramp, "v_scale": 0.2 / ramp}
    return LayerCache.of(k, v, dense=dense, **scales)


def draw(spec: BlockSpec, rows: int, seed: int = 1) -> torch.Tensor:
    """(rows, hidden) N(0, 1) in the spec's dtype."""
    random = torch.Generator().manual_seed(seed)
    return torch.randn(rows, spec.shape.hidden, generator=random).to(spec.dtype)
