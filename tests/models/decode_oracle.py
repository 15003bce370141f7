"""A step of a llama in float64 from its formulas, over keys and values that are given: an independent text.

Nothing of epicute is in it. Rotations are matrices, built by doubling.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor


def walsh(size: int) -> Tensor:
    """(size, size) float64, orthogonal and symmetric; ``size`` a power of two."""
    found = torch.ones(1, 1, dtype=torch.float64)
    while len(found) < size:
        found = torch.cat([torch.cat([found, found], 1), torch.cat([found, -found], 1)])
    return found / size**0.5


@dataclass
class Oracle:
    """A llama by its Hugging Face names; ``turn`` is the rotation that cached rows have had."""

    state: Mapping[str, Tensor]
    heads: int
    kv_heads: int
    dim: int
    theta: float
    eps: float
    turn: Tensor

    def wide(self, name: str) -> Tensor:
        return self.state[name].double()

    def norm(self, x: Tensor, name: str) -> Tensor:
        return x / (x.square().mean(-1, keepdim=True) + self.eps).sqrt() * self.wide(name)

    def rotary(self, x: Tensor, positions: Tensor) -> Tensor:
        half = self.dim // 2
        angle = positions.double()[:, None] * self.theta ** (-torch.arange(half).double() / half)
        cos, sin = angle.cos()[:, None], angle.sin()[:, None]
        a, b = x[..., :half], x[..., half:]
        return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, position: int) -> Tensor:
        """(heads * dim,) of one query (heads, dim) over the keys (n, kv_heads, dim) up to its position."""
        out = []
        for head in range(self.heads):
            of = head // (self.heads // self.kv_heads)
            keys, values = k[: position + 1, of], v[: position + 1, of]
            weights = torch.softmax(keys @ q[head] / self.dim**0.5, 0)
            out.append(weights @ values)
        return torch.cat(out)

    def logits(
        self, ids: list[int], start: int, cached: list[tuple[Tensor, Tensor]], own: bool
    ) -> Tensor:
        """(len(ids), vocabulary) of new tokens from position ``start`` on.

        ``cached``: of each layer, rotated keys and values (n, kv_heads, dim). ``own``: they end in front of ``start``,
        and new tokens see each other's as they are; else they hold those of the new tokens too.
        """
        positions = start + torch.arange(len(ids))
        x = self.wide("model.embed_tokens.weight")[ids]
        for layer, (k, v) in enumerate(cached):
            at = f"model.layers.{layer}."
            h = self.norm(x, f"{at}input_layernorm.weight")
            q, new_k, new_v = (
                (h @ self.wide(f"{at}self_attn.{n}_proj.weight").T).unflatten(1, (-1, self.dim))
                for n in "qkv"
            )
            q, new_k = self.rotary(q, positions), self.rotary(new_k, positions)
            k, v = k.double() @ self.turn.T, v.double() @ self.turn.T
            if own:
                k, v = torch.cat([k, new_k]), torch.cat([v, new_v])
            attended = [self.attend(q[i], k, v, start + i) for i in range(len(ids))]
            x = x + torch.stack(attended) @ self.wide(f"{at}self_attn.o_proj.weight").T
            h = self.norm(x, f"{at}post_attention_layernorm.weight")
            gate, up = (h @ self.wide(f"{at}mlp.{n}_proj.weight").T for n in ("gate", "up"))
            x = x + (gate * torch.sigmoid(gate) * up) @ self.wide(f"{at}mlp.down_proj.weight").T
        return self.norm(x, "model.norm.weight") @ self.wide("lm_head.weight").T
