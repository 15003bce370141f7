"""One decode step of a layer: random weights, requests of equal length, what the step reads and gives, in float64.

Every request has ``context`` keys, of which the step itself makes the newest: its place in every cache holds NaN until
a candidate has written it. Keys and values of earlier steps are N(0, 1), the residual stream and the weights are those
of ``blocks``. Candidates quantise the same BF16 weights and the same history; each is checked against float64 on its
own codes, so that an error is the kernels' and not the format's.

A step's bytes are those that it has to read and write, whoever does it:

    weights, their scales, gains that are operands   keys and values of all requests, their scales   x in, result out
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.blocks import GAINS, Block
from benchmarks.check import Error, WrongResult, compare
from benchmarks.data import CHUNK, exactly
from benchmarks.harness import Options
from benchmarks.peers import EPS, rotate
from benchmarks.timing import copies_for
from epicute.models.shapes import LayerShape, projections
from epicute.weights import Quantized, QuantizedInt4

__all__ = [
    "ATTENDED",
    "GROUP",
    "NEWEST",
    "RESULT",
    "TERMS",
    "Product",
    "Step",
    "cache_bytes",
    "expect",
    "products",
    "step_bytes",
    "weight_bytes",
]

GROUP = 128
"""Input features that share a scale of an INT4 weight."""

TERMS = 1
"""BF16 terms of ΔS of a QK4PV8 cache, whose means are static."""

PLAIN, MIXED = ("bf16", "fp8", "int4"), ("qk4pv8",)

RESULT = dict.fromkeys(PLAIN, Error(0.01, 0.02)) | dict.fromkeys(MIXED, Error(0.02, 0.04))
"""What a step's result may be off by, by the cache's format: probabilities over QK4PV8 caches are FP8."""

ATTENDED = dict.fromkeys(PLAIN, Error(0.015, 0.03)) | dict.fromkeys(MIXED, Error(0.06, 0.12))
"""The same of attention's output."""

NEWEST = {
    "bf16": Error(0.01, 0.02),
    "fp8": Error(0.04, 0.06),
    "int4": Error(0.17, 0.3),
    "qk4pv8": Error(0.2, 0.4),
}
"""The same of the row that the step has stored, the format's own rounding included."""

Product = Callable[[Tensor, str], Tensor]
"""(rows, K) float64 and a projection's name to (rows, N)."""


# --- bytes ---


def weight_bytes(shape: LayerShape, weights: str) -> int:
    """Of the four projections, their scales, and the gains of both norms where they are operands."""
    sizes = projections(shape).values()
    if weights == "int4":
        found = sum(n * (k // 2 + 2 * -(-k // GROUP)) for n, k in sizes)
        return found + 2 * 4 * shape.hidden
    each = {"fp8": 1, "bf16": 2}[weights]
    return sum(n * (k * each + (4 if weights == "fp8" else 0)) for n, k in sizes)


def cache_bytes(shape: LayerShape, cache: str) -> int:
    """Of one token's keys and values, of all heads."""
    dim = shape.head_dim
    if cache == "qk4pv8":
        return shape.kv_heads * (dim // 2 + dim // 16 + dim) + 2 * shape.heads * TERMS
    return shape.kv_heads * {"bf16": 4 * dim, "fp8": 2 * dim, "int4": dim + 8}[cache]


def step_bytes(shape: LayerShape, batch: int, context: int, weights: str, cache: str) -> int:
    """Read and written by a step; what one kernel leaves for the next is not counted."""
    stream = 2 * 2 * batch * shape.hidden
    read = batch * context * cache_bytes(shape, cache)
    return weight_bytes(shape, weights) + read + stream


# --- data ---


@dataclass
class Step:
    """A step of ``batch`` requests with ``context`` keys each, the new ones among them.

    Attributes:
        copies: of weights, caches, inputs and results; as many as keep the L2 cold where not given.
        seed: of the random values.
    """

    shape: LayerShape
    batch: int
    context: int
    options: Options
    copies: int = 0
    seed: int = 0
    block: Block = field(init=False)

    def __post_init__(self) -> None:
        least = step_bytes(self.shape, self.batch, self.context, "int4", "int4")
        self.copies = self.copies or copies_for(least)
        lengths = (1,) * self.batch
        self.block = Block(self.shape, lengths, self.options, copies=self.copies, seed=self.seed)

    @property
    def device(self) -> str:
        """torch's name of it."""
        return self.options.device

    @property
    def position(self) -> int:
        """Of the new token in its request."""
        return self.context - 1

    @property
    def x(self) -> list[Tensor]:
        """(batch, hidden) bfloat16, one per copy."""
        return self.block.x

    @cached_property
    def history(self) -> tuple[Tensor, Tensor]:
        """Keys, rotated, and values (batch, context, kv_heads, head_dim) bfloat16, the newest NaN."""
        shape = self.shape
        size = (self.batch, self.context, shape.kv_heads, shape.head_dim)
        k, v = (self.block.normal(*size) for _ in "kv")
        for x in (k, v):
            x[:, -1] = float("nan")
        return k, v

    def state(self) -> dict[str, Tensor]:
        """The weights as a checkpoint names them in a layer."""
        return {f"{name}.weight": x for name, x in self.block.weights.items()}

    # --- in float64 ---

    def heads(self, product: Product, gained: bool) -> tuple[Tensor, Tensor, Tensor]:
        """(batch, heads, head_dim) float64 queries, and new keys and values, rotated.

        ``gained``: the norm's gain is still to be multiplied in.
        """
        shape = self.shape
        widths = [shape.q_width, shape.kv_width, shape.kv_width]
        h = self._normed(exactly(self.x[0]), GAINS[0] if gained else None)
        q, k, v = product(h, "qkv").split(widths, dim=1)
        at = torch.full((self.batch,), self.position, device=self.device)
        cos, sin = self.block.angles(at)
        q, k = (rotate(y, cos, sin, torch.float64) for y in (q, k))
        views = [x.reshape(self.batch, -1, shape.head_dim) for x in (q, k, v)]
        return views[0], views[1], views[2]

    def result(self, product: Product, gained: bool, attended: Tensor) -> Tensor:
        """(batch, hidden) float64 of the layer, from attention's output (batch, q_width)."""
        x = exactly(self.x[0]) + product(attended, "o")
        h = self._normed(x, GAINS[1] if gained else None)
        gate, up = product(h, "gate_up").chunk(2, dim=1)
        return x + product(F.silu(gate) * up, "down")

    def _normed(self, x: Tensor, gain: str | None) -> Tensor:
        factor = torch.rsqrt(x.square().mean(dim=1, keepdim=True) + EPS)
        found = x * factor
        return found if gain is None else found * exactly(self.block.weights[gain])


def products(sources: Callable[[str], Tensor | Quantized]) -> Product:
    """Products with a projection's weight in logical order, some of its rows at a time."""

    def product(x: Tensor, name: str) -> Tensor:
        source = sources(name)
        rows = len(source) if isinstance(source, Tensor) else len(source.codes)
        spans = (slice(at, at + CHUNK) for at in range(0, rows, CHUNK))
        return torch.cat([x @ _wide(source, span).T for span in spans], dim=1)

    return product


def _wide(source: Tensor | Quantized, rows: slice) -> Tensor:
    """Some rows of a weight in float64, dequantised."""
    if isinstance(source, Tensor):
        return exactly(source[rows])
    if isinstance(source, QuantizedInt4):
        some = replace(source, codes=source.codes[rows], scale=source.scales[rows])
        return some.int4.dequantize(torch.float64)
    found = exactly(source.codes[rows])
    return found if source.scale is None else found * source.scale[rows, None].double()


def expect(what: str, found: Tensor, wanted: Tensor, allowed: Error) -> Error:
    """The error of ``found``, any float type, as rows; raises WrongResult beyond ``allowed``."""
    rows = wanted.shape[0]
    error = compare(found.reshape(rows, -1).double(), wanted.reshape(rows, -1))
    if not error.within(allowed):
        raise WrongResult(f"{what}: {error}, allowed {allowed}")
    return error
