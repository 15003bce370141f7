"""Table ``outliers``: what each cache format does to attention where a few key channels are large, on the CPU.

Nothing is timed and no GPU kernel runs: formats are their own quantisers, attention is float64 on what they give back.
Three kinds of rows, all of 8B's heads, 32 of queries and 8 of keys and values, 128 channels:

    layer       a decode layer over 128 cached tokens (FuTransformer table 9, which does not say how many; more of them
                average more away): INT4 rotated beside INT4 as it is, E4M3 and BF16 caches; normal inputs, and four
                channels of each head's keys 8 times as large
    attention   the same of attention alone
    qk4pv8      one channel of keys 30 times as large, the same in every token: smoothing, where ΔS is added, and what
                is multiplied; long contexts with values of mean 0.5: FP8 sums promoted every 128 tokens, and not
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.check import Error, compare
from benchmarks.fp8_accumulator import accumulate
from benchmarks.harness import Options
from benchmarks.provenance import Provenance
from benchmarks.table import Row, Table
from epicute.kv.int4 import dequantize_row, quantize_row
from epicute.models.reference_attention import P_SCALE, attend_mixed, multiplied_queries
from epicute.models.shapes import SHAPES, LayerShape
from epicute.quant import cast_e4m3, dequantize_nvfp4, quantize_nvfp4, rotate
from epicute.quant.nvfp4 import fast8_keys
from epicute.quant.smoothing import centre, delta, scores, sequence_means, split_terms

__all__ = [
    "FLOOR",
    "PAPER",
    "PROTOCOL",
    "Cached",
    "Smoothed",
    "kernels",
    "long_context",
    "placements",
    "table",
]

PAPER = (
    "FuTransformer (arXiv 2610.23796), section 4.7, table 9: INT4 22.2 % without and 7.4 % with rotation at 8B; MpFA "
    "(arXiv 2609.04521), sections 4.2 and 5"
)

PROTOCOL = (
    "computed on the CPU, no GPU kernel involved; the {queries} last tokens of a context, each as a decode has it; "
    "INT4: x and weights N(0, 1) and N(0, 1/K), no RoPE, error of the layer's output, residual stream included, or of "
    "attention's, against float64 on the unquantised rows, ours rotated; qk4pv8: queries, keys and values N(0, 1), the "
    "large channel {loud:g} more in keys and {loud_q:g} more in queries, ours with sequence smoothing, P scale 448; "
    "long contexts: error against exact sums of the same codes, in the tensor core's accumulator as "
    "benchmarks.fp8_accumulator has it"
)

FLOOR = "none (0): nothing is timed"

LAYER_CONTEXT = 128
CONTEXT = 1024
QUERIES = 32
LOUD = 30.0
LOUD_QUERY = 8.0
"""Of the large channel of keys and of queries in rows of QK4PV8."""

CHANNELS, TIMES = (5, 38, 77, 110), 8.0
"""Large channels of each head's keys, and how much larger they are (FuTransformer, table 9)."""

LONG = (1024, 8192, 32768, 131072)
LONG_QUERIES = 2
MEAN = 0.5


# --- caches of rows ---


def _e4m3(x: Tensor) -> Tensor:
    """Under one scale for each head."""
    scale = x.abs().amax(dim=(0, 2), keepdim=True) / 448
    return cast_e4m3(x / scale).float() * scale


def _int4(x: Tensor, rotated: bool) -> Tensor:
    turned = rotate(x) if rotated else x
    values = dequantize_row(*quantize_row(turned))
    return rotate(values) if rotated else values


CACHES: dict[str, Callable[[Tensor], Tensor]] = {
    "ours": lambda x: _int4(x, rotated=True),
    "int4, not rotated": lambda x: _int4(x, rotated=False),
    "fp8": _e4m3,
    "bf16": lambda x: x.bfloat16().float(),
}
"""Rows (n, kv_heads, D) float32 as the cache gives them back; rotated ones turned back."""


@dataclass
class Cached:
    """A layer's last tokens over a cache of all."""

    shape: LayerShape
    outliers: bool

    @property
    def case(self) -> dict[str, Any]:
        """The fields of the table's case."""
        variant = "4 key channels 8 times as large" if self.outliers else "normal"
        sizes = {"cache": "int4", "context": LAYER_CONTEXT}
        return {"shape": self.shape.name, **sizes, "variant": variant}

    @cached_property
    def _random(self) -> torch.Generator:
        return torch.Generator().manual_seed(7)

    def _weight(self, n: int, k: int) -> Tensor:
        return torch.randn(n, k, generator=self._random) / k**0.5

    @cached_property
    def rows(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """x (QUERIES, hidden); q (QUERIES, heads, D); k and v (LAYER_CONTEXT, kv_heads, D): float32."""
        shape = self.shape
        x = torch.randn(LAYER_CONTEXT, shape.hidden, generator=self._random)
        last = x[-QUERIES:]
        q, k, v = (
            (some @ self._weight(width, shape.hidden).T).unflatten(1, (-1, shape.head_dim))
            for some, width in ((last, shape.q_width), (x, shape.kv_width), (x, shape.kv_width))
        )
        if self.outliers:
            k[..., [c % shape.head_dim for c in CHANNELS]] *= TIMES
        return last, q, k, v

    def attention(self, cache: Callable[[Tensor], Tensor] | None) -> Tensor:
        """(QUERIES, q_width) float64, of cached rows; of the rows themselves without a cache."""
        _, q, k, v = self.rows
        k, v = (x if cache is None else cache(x) for x in (k, v))
        return plain(q, k, v).flatten(1)

    def layer(self, attended: list[Tensor]) -> list[Tensor]:
        """(QUERIES, hidden) float32: what the rest of the layer makes of each."""
        shape, functional = self.shape, torch.nn.functional
        o = self._weight(shape.hidden, shape.q_width)
        gate, up = (self._weight(shape.intermediate, shape.hidden) for _ in range(2))
        down = self._weight(shape.hidden, shape.intermediate)
        found = []
        for part in attended:
            x = self.rows[0] + part.float() @ o.T
            h = functional.rms_norm(x, x.shape[-1:])
            found.append(x + (functional.silu(h @ gate.T) * (h @ up.T)) @ down.T)
        return found


def plain(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """(Sq, heads, D) float64, causal, queries the last of the keys."""
    group = q.shape[1] // k.shape[1]
    q, k, v = (x.double().transpose(0, 1) for x in (q, k, v))
    logits = q.unflatten(0, (-1, group)) @ k[:, None].transpose(2, 3) / q.shape[2] ** 0.5
    own = torch.arange(q.shape[1])[:, None] + k.shape[1] - q.shape[1]
    logits.masked_fill_(torch.arange(k.shape[1])[None] > own, -math.inf)
    return (logits.softmax(dim=3) @ v[:, None]).flatten(0, 1).transpose(0, 1)


def cached_rows(case: Cached) -> Iterator[Row]:
    """The row of attention, and that of the layer."""
    attended = {name: case.attention(cache) for name, cache in CACHES.items()}
    exact = case.attention(None)
    whole = case.layer([exact, *attended.values()])
    for layer, right, found in (
        ("attention", exact, attended),
        ("decode layer", whole[0].double(), dict(zip(attended, whole[1:], strict=True))),
    ):
        errors = {name: compare(x.double(), right).json() for name, x in found.items()}
        variant = f"{layer}, {case.case['variant']}"
        yield untimed({**case.case, "variant": variant}, errors)


def untimed(case: dict[str, Any], errors: dict[str, dict[str, float]]) -> Row:
    """A row of errors, ours among them."""
    return Row(case, None, 0.0, error=errors.pop("ours"), errors=errors)


# --- QK4PV8 ---


@dataclass
class Smoothed:
    """Attention of QUERIES tokens over QK4PV8 records; ``loud``: of one channel of keys."""

    loud: float
    context: int = CONTEXT
    queries: int = QUERIES
    seed: int = 1

    def __post_init__(self) -> None:
        random = torch.Generator().manual_seed(self.seed)
        shape = SHAPES["8B"]

        def some(rows: int, heads: int) -> Tensor:
            return torch.randn(rows, heads, shape.head_dim, generator=random)

        self.q, self.k = some(self.context, shape.heads), some(self.context, shape.kv_heads)
        self.v = some(self.context, shape.kv_heads)
        self.q[..., 3] += LOUD_QUERY * (self.loud > 0)
        self.k[..., 3] += self.loud
        self.q, self.k, self.v = (x.bfloat16().float() for x in (self.q, self.k, self.v))
        self.means = sequence_means(self.q, self.k)
        self.q = self.q[-self.queries :]
        self.scale = shape.head_dim**-0.5

    @property
    def exact(self) -> Tensor:
        """(queries, heads, D) float64 of the rows themselves."""
        return plain(self.q, self.k, self.v)

    def keys(self, smoothing: bool, qk: str = "exact16") -> tuple[Tensor, Tensor, Tensor | None]:
        """Queries and keys as they are multiplied, float64, and ΔS (keys, heads) float32."""
        q, k, found = self.q, self.k, None
        if smoothing:
            q, k = centre(q, self.means.q), centre(k, self.means.k)
            found = delta(self.means.q, k)
        codes, scales = quantize_nvfp4(k)
        wide = qk == "exact16"
        k = dequantize_nvfp4(codes, scales) if wide else fast8_keys(codes, scales).float()
        return multiplied_queries(q, wide), k.double(), found

    def attention(self, smoothing: bool, qk: str = "exact16") -> Tensor:
        """(queries, heads, D) float64, values and probabilities E4M3; ΔS in two BF16 terms."""
        q, k, found = self.keys(smoothing, qk)
        v = cast_e4m3(self.v).double()
        if found is not None:
            found = split_terms(found, 2).double().sum(-1)
        return attend_mixed(q, k, v, found, scale=self.scale)

    def values_alone(self) -> Tensor:
        """The same with queries and keys as they are."""
        v = cast_e4m3(self.v).double()
        return attend_mixed(self.q.double(), self.k.double(), v, scale=self.scale)


def placements(case: Smoothed) -> dict[str, Tensor]:
    """(heads, queries, keys) float32 logits, unscaled, of every placement of ΔS, by its name."""
    q, k, found = case.keys(smoothing=True)
    parts = q.float(), k.float(), found
    return {
        "acc_init": scores(*parts, placement="acc_init"),
        "elementwise": scores(*parts, placement="elementwise"),
        **{f"mma, {n} terms": scores(*parts, placement="mma", terms=n) for n in (1, 2, 3)},
    }


def smoothed_rows() -> Iterator[Row]:
    """Smoothing, at outliers and without."""
    for loud in (0.0, LOUD):
        case = Smoothed(loud)
        exact = case.exact.flatten(1)
        alone = compare(case.values_alone().flatten(1), exact).json()
        for qk in ("exact16", "fast8"):
            errors = {
                "ours": compare(case.attention(True, qk).flatten(1), exact).json(),
                "not smoothed": compare(case.attention(False, qk).flatten(1), exact).json(),
                "values and probabilities alone": alone,
            }
            variant = f"one key channel at {loud:g}" if loud else "normal"
            described = {"smoothing": "sequence", "variant": f"attention, {variant}"}
            sizes = {"shape": "8B", "cache": "qk4pv8", "context": CONTEXT, "qk": qk}
            yield untimed({**sizes, **described}, errors)


def placement_row() -> Row:
    """Logits of the placements of ΔS beside float64 on the same codes."""
    case = Smoothed(LOUD)
    q, k, found = case.keys(smoothing=True)
    assert found is not None
    group = q.shape[1] // k.shape[1]
    right = torch.einsum("qhd,khd->hqk", q, k.repeat_interleave(group, 1))
    right = (right + found.double().T[:, None]).flatten(0, 1)
    errors = {
        "ours" if name == "acc_init" else name: compare(x.flatten(0, 1).double(), right).json()
        for name, x in placements(case).items()
    }
    variant = f"logits, one key channel at {LOUD:g}, ΔS placed by acc_init"
    described = {"qk": "exact16", "smoothing": "sequence", "variant": variant}
    return untimed({"shape": "8B", "cache": "qk4pv8", "context": CONTEXT, **described}, errors)


def long_context(context: int) -> dict[str, Error]:
    """Error of the sums of one head over ``context`` tokens, values of mean 0.5, promoted and not: of the codes' exact
    sums.
    """
    random = torch.Generator().manual_seed(context)
    dim = SHAPES["8B"].head_dim
    q = torch.randn(LONG_QUERIES, dim, generator=random)
    k = torch.randn(context, dim, generator=random)
    v = cast_e4m3(torch.randn(context, dim, generator=random) + MEAN).double()
    k = dequantize_nvfp4(*quantize_nvfp4(k))
    logits = q.half().double() @ k.double().T / dim**0.5
    p = P_SCALE * torch.exp(logits - logits.amax(dim=1, keepdim=True))
    # From the last tile back, as the kernels walk.
    codes = cast_e4m3(p.float()).double().flip(1)
    exact = codes @ v.flip(0)
    return {
        "two_level": compare(accumulate(codes, v.flip(0), 128), exact),
        "direct": compare(accumulate(codes, v.flip(0)), exact),
    }


def long_row(context: int) -> Row:
    """Two-level sums beside direct ones."""
    errors = long_context(context)
    case = {"cache": "qk4pv8", "context": context, "head_dim": SHAPES["8B"].head_dim}
    case |= {"pv": "two_level", "variant": f"sums, values of mean {MEAN:g}"}
    return untimed(case, {"ours": errors["two_level"].json(), "direct": errors["direct"].json()})


# --- the table ---


def kernels(options: Options) -> Iterator[Any]:
    """None: formats and references alone."""
    return iter(())


def rows() -> Iterator[Row]:
    """Every row."""
    for shape in ("8B", "1B"):
        for outliers in (False, True):
            yield from cached_rows(Cached(SHAPES[shape], outliers))
    yield from smoothed_rows()
    yield placement_row()
    for context in LONG:
        yield long_row(context)


def table(options: Options, timer: object, source: Provenance, folder: Path) -> Table:
    """Compute every row and write ``outliers.json`` into ``folder``."""
    protocol = PROTOCOL.format(queries=QUERIES, context=CONTEXT, loud=LOUD, loud_q=LOUD_QUERY)
    path = folder / "outliers.json"
    found = Table("outliers", PAPER, protocol, FLOOR, source, path, backend="reference")
    for row in rows():
        found.add(row)
    return found
