"""Operations of attention and of whole layers, and the rates and floors that follow from them.

Causal attention counts as half of the scores, both products: 4 · S² · head_dim · heads / 2 for a
request of S tokens (FuTransformer, section 4.1). Norms, RoPE and softmax are not counted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from benchmarks.floors import BANDWIDTH, BYTES, PEAK
from benchmarks.mixes import LONGEST, requests
from epicute.models.shapes import SHAPES, LayerShape

__all__ = [
    "ATTENTION_FLOOR",
    "LAYER_FLOOR",
    "UNITS",
    "attention_floor",
    "attention_flops",
    "flops",
    "layer_floor",
    "layer_flops",
    "rate",
]

ATTENTION_FLOOR = (
    "the larger of 4·S²·head_dim·heads/2, summed over requests of S tokens, over the dense BF16 "
    "tensor peak (989.5 TFLOP/s, nominal at boost clocks) and of the bytes of q, k, v and the "
    "result over 4.8 TB/s"
)

LAYER_FLOOR = (
    "the larger of two sums: 2 FLOP per token and projection weight over the dense tensor peak of "
    "the weights' format (BF16 989.5 TFLOP/s, FP8 1979 TFLOP/s, nominal at boost clocks) plus "
    "attention's 4·S²·head_dim·heads/2 over BF16's; and the bytes of weights, of the residual "
    "stream in and out and of keys and values over 4.8 TB/s"
)


def attention_flops(lengths: Iterable[int], heads: int, head_dim: int) -> int:
    """Operations of causal self-attention over requests of these lengths."""
    return sum(2 * tokens * tokens for tokens in lengths) * heads * head_dim


def attention_floor(lengths: Iterable[int], heads: int, kv_heads: int, head_dim: int) -> float:
    """The floor of causal BF16 self-attention, µs."""
    lengths = tuple(lengths)
    moved = BYTES["bf16"] * 2 * sum(lengths) * (heads + kv_heads) * head_dim
    flop_us = attention_flops(lengths, heads, head_dim) / PEAK["bf16"] * 1e6
    return max(flop_us, moved / BANDWIDTH * 1e6)


def layer_flops(shape: LayerShape, lengths: Iterable[int]) -> int:
    """Operations of one layer: projections, and causal self-attention."""
    lengths = tuple(lengths)
    projected = 2 * sum(lengths) * shape.weights
    return projected + attention_flops(lengths, shape.heads, shape.head_dim)


def layer_floor(shape: LayerShape, lengths: Iterable[int], weights: str) -> float:
    """The floor of one layer with ``weights`` and BF16 attention, µs."""
    lengths = tuple(lengths)
    tokens = sum(lengths)
    attended = attention_flops(lengths, shape.heads, shape.head_dim) / PEAK["bf16"]
    projected = 2 * tokens * shape.weights / PEAK[weights]
    rows = 2 * tokens * (shape.hidden + shape.kv_width) * BYTES["bf16"]  # in and out; k and v
    moved = shape.weights * BYTES[weights] + rows
    return max(projected + attended, moved / BANDWIDTH) * 1e6


# --- of a row of a table ---


def _attention(case: Mapping[str, Any]) -> int:
    return attention_flops(_lengths(case), case["heads"], case["head_dim"])


def _layer(case: Mapping[str, Any]) -> int:
    return layer_flops(SHAPES[case["shape"]], _lengths(case))


def _lengths(case: Mapping[str, Any]) -> tuple[int, ...]:
    """Tokens of each request: of a mix as long as its longest may be, or ``batch`` equal ones."""
    if "mix" in case:
        return requests(case["mix"], case["length"] // LONGEST)
    return (case["length"],) * case["batch"]


COUNTED: dict[str, Callable[[Mapping[str, Any]], int]] = {
    "attention": _attention,
    "qk4pv8-prefill": _attention,
    "prefill-layer": _layer,
    "packed-prefill": _layer,
}
"""Table → operations of a case. Of a mix those that its tokens need, however they are laid out."""


UNITS = {**dict.fromkeys(COUNTED, "TFLOP/s"), "prefill-model": "tokens/s"}
"""Table → unit of the rate that its times are also shown as."""


def rate(table: str, case: Mapping[str, Any], us: float) -> float:
    """What a case that takes ``us`` reaches, in the table's unit."""
    if UNITS[table] == "tokens/s":
        return case["batch"] * case["length"] / us * 1e6
    return flops(table, case) / us / 1e6


def flops(table: str, case: Mapping[str, Any]) -> int:
    """Operations of a case of a table that counts them."""
    return COUNTED[table](case)
