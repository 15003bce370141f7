"""Layer shapes of published Llama-style models: what every benchmark and test calls 1B, 8B, 70B,
405B.

Source: FuTransformer, table 1 (section 4.1), and the configuration of SmolLM2-135M.
"""

from __future__ import annotations

from dataclasses import dataclass

from epicute.errors import require

__all__ = ["SHAPES", "LayerShape", "projections"]


@dataclass(frozen=True)
class LayerShape:
    """One decoder layer.

    Attributes:
        hidden: width of the residual stream.
        intermediate: width of the MLP.
        heads: query heads.
        kv_heads: key and value heads; divides ``heads``.
        head_dim: channels of a head.
        name: what tables call it.
    """

    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    name: str

    def __post_init__(self) -> None:
        for field in ("hidden", "intermediate", "heads", "kv_heads", "head_dim"):
            value = getattr(self, field)
            require(value > 0, field, value, "a positive count", "check the configuration")
        require(
            self.heads % self.kv_heads == 0,
            "kv_heads",
            self.kv_heads,
            f"a divisor of heads={self.heads}",
            "check the configuration",
        )

    @property
    def q_width(self) -> int:
        """Columns of q."""
        return self.heads * self.head_dim

    @property
    def kv_width(self) -> int:
        """Columns of k, and of v."""
        return self.kv_heads * self.head_dim

    @property
    def weights(self) -> int:
        """Parameters of the four projections."""
        return sum(n * k for n, k in projections(self).values())


SHAPES = {
    shape.name: shape
    for shape in (
        LayerShape(576, 1536, 9, 3, 64, "SmolLM2"),
        LayerShape(2048, 8192, 32, 8, 64, "1B"),
        LayerShape(4096, 14336, 32, 8, 128, "8B"),
        LayerShape(8192, 28672, 64, 8, 128, "70B"),
        LayerShape(16384, 53248, 128, 8, 128, "405B"),
    )
}


def projections(shape: LayerShape) -> dict[str, tuple[int, int]]:
    """(N, K) of the fused projections: ``qkv``, ``o``, ``gate_up``, ``down``."""
    return {
        "qkv": (shape.q_width + 2 * shape.kv_width, shape.hidden),
        "o": (shape.hidden, shape.q_width),
        "gate_up": (2 * shape.intermediate, shape.hidden),
        "down": (shape.hidden, shape.intermediate),
    }
