"""A Llama layer in float64 from its formulas (FuTransformer 2.1), one request at a time, with nothing of epicute."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Model:
    """Weights under Hugging Face's names and the numbers beside them."""

    state: Mapping[str, Tensor]
    heads: int
    kv_heads: int
    head_dim: int
    inv_freq: Tensor
    eps: float = 1e-5
    offset: float = 0.0
    rotary_dim: int = 0
    interleaved: bool = False
    window: int | None = None
    softcap: float | None = None

    def wide(self, name: str) -> Tensor:
        """A weight in float64, decoded where it is FP8."""
        found = self.state[name].double()
        scale = self.state.get(f"{name}_scale")
        return found if scale is None else found * scale.double().reshape(-1, 1)

    def norm(self, x: Tensor, name: str) -> Tensor:
        return (
            x
            / (x.square().mean(-1, keepdim=True) + self.eps).sqrt()
            * (self.wide(name) + self.offset)
        )

    def linear(self, x: Tensor, name: str) -> Tensor:
        y = x @ self.wide(f"{name}.weight").T
        return y + self.wide(f"{name}.bias") if f"{name}.bias" in self.state else y

    def head(self, x: Tensor, name: str) -> Tensor:
        """(T, heads, head_dim) of q or k, normalised and rotated."""
        y = self.linear(x, f"self_attn.{name}_proj").unflatten(1, (-1, self.head_dim))
        if f"self_attn.{name}_norm.weight" in self.state:
            y = self.norm(y, f"self_attn.{name}_norm.weight")
        return self.rotate(y)

    def rotate(self, x: Tensor) -> Tensor:
        width = self.rotary_dim or self.head_dim
        turned, rest = x[..., :width], x[..., width:]
        angle = torch.arange(len(x)).double()[:, None] * self.inv_freq.double()
        cos, sin = angle.cos()[:, None], angle.sin()[:, None]
        if self.interleaved:
            a, b = turned[..., 0::2], turned[..., 1::2]
            both = torch.stack([a * cos - b * sin, b * cos + a * sin], dim=-1).flatten(-2)
        else:
            a, b = turned.chunk(2, dim=-1)
            both = torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)
        return torch.cat([both, rest], dim=-1)

    def keys(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """(T, kv_heads, head_dim) rotated keys, and values."""
        x = self.norm(x.double(), "input_layernorm.weight")
        v = self.linear(x, "self_attn.v_proj").unflatten(1, (-1, self.head_dim))
        return self.head(x, "k"), v

    def attention(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        group = self.heads // self.kv_heads
        k, v = (y.repeat_interleave(group, dim=1) for y in (k, v))
        scores = torch.einsum("ihd,jhd->hij", q, k) / self.head_dim**0.5
        if self.softcap is not None:
            scores = self.softcap * torch.tanh(scores / self.softcap)
        behind = torch.arange(len(q))[:, None] - torch.arange(len(k))
        hidden = behind < 0
        if self.window is not None:
            hidden |= behind >= self.window
        weights = torch.softmax(scores.masked_fill(hidden, float("-inf")), dim=-1)
        return torch.einsum("hij,jhd->ihd", weights, v).flatten(1)

    def layer(self, x: Tensor) -> Tensor:
        """(T, hidden) to the same: a whole prompt from position 0."""
        x = x.double()
        q = self.head(self.norm(x, "input_layernorm.weight"), "q")
        x = x + self.linear(self.attention(q, *self.keys(x)), "self_attn.o_proj")
        y = self.norm(x, "post_attention_layernorm.weight")
        gate, up = self.linear(y, "mlp.gate_proj"), self.linear(y, "mlp.up_proj")
        return x + self.linear(gate * torch.sigmoid(gate) * up, "mlp.down_proj")
