"""What enters the linears of a SmolLM2 layer for a real prompt, and the layer's output."""

from __future__ import annotations

import torch

from epicute.models.smollm2 import Config

__all__ = ["PROMPT", "linear_inputs"]

PROMPT = (
    "The history of the steam engine is a history of small improvements. Thomas Newcomen built a machine that "
    "pumped water out of mines, slowly and at the cost of much coal. James Watt saw that most of the heat was lost "
    "by cooling the cylinder at every stroke, and added a separate condenser. Within fifty years the engine had left "
    "the mine and drove mills, ships and, in the end, trains. What did people think when they saw the first of them "
    "pass? Some were afraid; most waved. In 1830 the line between Liverpool and Manchester carried 445,047 people. "
    "def area(width, height): return width * height  # in square metres"
)


def linear_inputs(
    x: torch.Tensor, weights: dict[str, torch.Tensor], config: Config
) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Inputs (T, K) by the name of the linear, from what enters the layer (T, hidden); and its output."""
    functional, shape, dim = torch.nn.functional, config.shape, config.shape.head_dim
    found: dict[str, torch.Tensor] = {}

    def normed(x: torch.Tensor, name: str) -> torch.Tensor:
        return functional.rms_norm(x, (shape.hidden,), weights[name], config.rms_eps)

    def times(x: torch.Tensor, name: str) -> torch.Tensor:
        found[name] = x
        return x @ weights[name].T

    def heads_of(x: torch.Tensor, name: str) -> torch.Tensor:
        return times(x, name).reshape(len(x), -1, dim).transpose(0, 1)

    angle = torch.arange(len(x))[:, None] * config.inv_freq
    cos, sin = angle.cos().repeat(1, 2), angle.sin().repeat(1, 2)

    def rotated(x: torch.Tensor) -> torch.Tensor:
        return x * cos + torch.cat([-x[..., dim // 2 :], x[..., : dim // 2]], dim=-1) * sin

    h = normed(x, "input_layernorm")
    q, k = rotated(heads_of(h, "self_attn.q_proj")), rotated(heads_of(h, "self_attn.k_proj"))
    v = heads_of(h, "self_attn.v_proj")
    attended = functional.scaled_dot_product_attention(
        q[None], k[None], v[None], is_causal=True, enable_gqa=True
    )
    x = x + times(attended[0].transpose(0, 1).reshape(len(x), -1), "self_attn.o_proj")
    h = normed(x, "post_attention_layernorm")
    gate, up = times(h, "mlp.gate_proj"), times(h, "mlp.up_proj")
    return found, x + times(functional.silu(gate) * up, "mlp.down_proj")
