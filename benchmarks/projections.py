"""The epilogues of a layer's four projections: composition, operands, float64 result, and the same
for torch.compile.

| layer | composition |
|---|---|
| qkv | Dequantize >> RowScale >> Columns(q: RoPE >> Store, k: RoPE >> PlaceKV, v: PlaceKV) |
| o, down | Dequantize >> ResidualAdd >> SumSquares >> Store >> EmitFP8 |
| gate_up | Dequantize >> RowScale >> SwiGLU >> EmitFP8, and in BF16 RowScale >> SwiGLU >> Store |

With BF16 weights ``Dequantize`` falls away, and nothing is stored in FP8.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from benchmarks.data import Layer, exactly, rows_of
from benchmarks.peers import EPS, Tail, Tensors, emit_fp8, partial_sums, rotate, row_factor, swiglu
from epicute.epilogues import (
    Columns,
    Dequantize,
    EmitFP8,
    PlaceKV,
    ResidualAdd,
    RoPE,
    RowScale,
    Store,
    SumSquares,
    SwiGLU,
)
from epicute.models.shapes import LayerShape
from epicute.quant import E4M3_MAX

__all__ = ["Projection", "projection"]

BF16 = torch.bfloat16

PAGE = 64
"""Tokens of a KV page."""

THETA = 500000.0
"""Base of the rotary frequencies."""

LARGEST = {"gate_up": 32.0, "o": 16.0, "down": 16.0}
"""What an FP8 output's delayed scale can represent; products of N(0, 1) stay below."""


class Projection:
    """One layer's fused epilogue for ``fp8`` or ``bf16`` weights; draws what candidates share."""

    formats: tuple[str, ...] = ("fp8",)
    updated: tuple[str, ...] = ()

    def __init__(self, layer: Layer) -> None:
        self.layer = layer

    @cached_property
    def out_scale(self) -> Tensor:
        """The FP8 output's delayed scale."""
        return self.layer.scalar(LARGEST[self.layer.name] / E4M3_MAX)

    @cached_property
    def sumsq(self) -> Tensor:
        """Partial sums of squares of the layer's input."""
        return partial_sums(self.layer.x[0].float())

    def policies(self, weights: str) -> list[tuple[str, Any]]:
        """(what a table calls it, policy) from left to right, behind Dequantize."""
        raise NotImplementedError

    def operands(self, weights: str) -> Tensors:
        """One copy's operands of epicute, the activation's scale apart; outputs poisoned."""
        raise NotImplementedError

    def outputs(self, weights: str) -> tuple[str, ...]:
        """Outputs among the operands that are checked."""
        raise NotImplementedError

    def bytes(self, weights: str) -> int:
        """What the epilogue must read and write."""
        raise NotImplementedError

    def exact(self, y: Tensor) -> Tensors:
        """Outputs in float64 from the checked rows of the product, (rows, N) float64."""
        raise NotImplementedError

    def tail(self, weights: str) -> Tail:
        """The epilogue for torch.compile."""
        raise NotImplementedError

    def peer_operands(self, weights: str) -> Tensors:
        """One copy's operands of ``tail``."""
        raise NotImplementedError

    @property
    def case(self) -> dict[str, Any]:
        """More fields of the table's case."""
        return {}

    def composition(self, weights: str) -> tuple[str, Any]:
        """Text and value of the whole epilogue."""
        parts = self.policies(weights)
        if weights == "fp8":
            parts = [("Dequantize", Dequantize()), *parts]
        whole = parts[0][1]
        for _, policy in parts[1:]:
            whole = whole >> policy
        return " >> ".join(text for text, _ in parts), whole

    def view(self, name: str, tensor: Tensor) -> Tensor:
        """The checked rows of an output, dequantised."""
        found = exactly(rows_of(tensor, self.layer.rows))
        return found * self.out_scale.double() if name.endswith("fp8") else found

    def fp8_output(self, columns: int) -> Tensors:
        """EmitFP8's operands."""
        layer = self.layer
        return {
            "out_fp8": layer.poisoned(layer.M, columns, dtype=torch.float8_e4m3fn),
            "out_scale": self.out_scale,
            "amax": layer.scalar(0.0),
            "saturated": layer.scalar(0, torch.int64),
            "nans": layer.scalar(0, torch.int64),
        }

    def delayed(self) -> Tensors:
        """What ``emit_fp8`` reads and updates."""
        return {"out_scale": self.out_scale, "amax": self.layer.scalar(0.0)}

    def row_scale(self) -> tuple[str, Any]:
        """RowScale over the layer's input."""
        return "RowScale", RowScale(width=self.layer.K, eps=EPS)


class GateUp(Projection):
    """RMSNorm's row factor and SwiGLU."""

    formats = ("fp8", "bf16")

    def policies(self, weights: str) -> list[tuple[str, Any]]:
        store = ("EmitFP8", EmitFP8()) if weights == "fp8" else ("Store", Store(BF16))
        return [self.row_scale(), ("SwiGLU", SwiGLU()), store]

    def operands(self, weights: str) -> Tensors:
        layer, columns = self.layer, self.layer.N // 2
        if weights == "fp8":
            return {"sumsq": self.sumsq, **self.fp8_output(columns)}
        return {"sumsq": self.sumsq, "out": layer.poisoned(layer.M, columns, dtype=BF16)}

    def outputs(self, weights: str) -> tuple[str, ...]:
        return ("out_fp8",) if weights == "fp8" else ("out",)

    def bytes(self, weights: str) -> int:
        size = 1 if weights == "fp8" else 2
        return self.layer.M * (self.layer.N // 2) * size + self.sumsq.nbytes

    def exact(self, y: Tensor) -> Tensors:
        found = swiglu(y * row_factor(self.sumsq[self.layer.rows].double(), self.layer.K))
        return {"out": found, "out_fp8": found}

    def tail(self, weights: str) -> Tail:
        return _gate_up_fp8 if weights == "fp8" else _gate_up

    def peer_operands(self, weights: str) -> Tensors:
        return {"sumsq": self.sumsq} | (self.delayed() if weights == "fp8" else {})


def _gate_up(y: Tensor, given: Tensors) -> Tensors:
    return {"out": swiglu(y).to(BF16)}


def _gate_up_fp8(y: Tensor, given: Tensors) -> Tensors:
    return {"out_fp8": emit_fp8(swiglu(y), given["out_scale"], given["amax"])}


class Residual(Projection):
    """The residual stream, its sums of squares, and the next projection's FP8 input."""

    @cached_property
    def residual(self) -> Tensor:
        """(M, N), what the projection is added to."""
        return self.layer.normal(self.layer.M, self.layer.N)

    def policies(self, weights: str) -> list[tuple[str, Any]]:
        found = [
            ("ResidualAdd", ResidualAdd()),
            ("SumSquares", SumSquares()),
            ("Store", Store(BF16)),
        ]
        return [*found, ("EmitFP8", EmitFP8())] if weights == "fp8" else found

    def operands(self, weights: str) -> Tensors:
        layer = self.layer
        found = {
            "residual": self.residual.clone(),
            "out": layer.poisoned(layer.M, layer.N, dtype=BF16),
            "sumsq_out": layer.poisoned(layer.M, -(-layer.N // 64), dtype=torch.float32),
        }
        return found | (self.fp8_output(layer.N) if weights == "fp8" else {})

    def outputs(self, weights: str) -> tuple[str, ...]:
        return ("out", "sumsq_out") + (("out_fp8",) if weights == "fp8" else ())

    def bytes(self, weights: str) -> int:
        M, N = self.layer.M, self.layer.N
        size = 5 if weights == "fp8" else 4  # residual in, BF16 out, FP8 out
        return size * M * N + 4 * M * -(-N // 64)

    def exact(self, y: Tensor) -> Tensors:
        found = y + self.residual[self.layer.rows].double()
        stored = found.to(BF16).double()  # what SumSquares and EmitFP8 are given
        return {"out": found, "out_fp8": stored, "sumsq_out": partial_sums(stored)}

    def tail(self, weights: str) -> Tail:
        return _residual_fp8 if weights == "fp8" else _residual

    def peer_operands(self, weights: str) -> Tensors:
        found = {"residual": self.residual.clone()}
        return found | (self.delayed() if weights == "fp8" else {})


def _residual(y: Tensor, given: Tensors) -> Tensors:
    out = (y + given["residual"]).to(BF16)
    return {"out": out, "sumsq_out": partial_sums(out.float())}


def _residual_fp8(y: Tensor, given: Tensors) -> Tensors:
    found = _residual(y, given)
    codes = emit_fp8(found["out"].float(), given["out_scale"], given["amax"])
    return found | {"out_fp8": codes}


class QKV(Projection):
    """RMSNorm's row factor, RoPE, and k and v into a paged BF16 cache, pages in random order."""

    updated = ("k_cells", "v_cells")

    @property
    def shape(self) -> LayerShape:
        """The model's."""
        shape = self.layer.shape
        assert shape is not None  # a shard has no q, k and v
        return shape

    @cached_property
    def positions(self) -> Tensor:
        """(M,) int64, from 0."""
        return torch.arange(self.layer.M, device=self.layer.options.device)

    @cached_property
    def inv_freq(self) -> Tensor:
        """(head_dim/2,) float32."""
        half = self.shape.head_dim // 2
        exponent = torch.arange(half, device=self.layer.options.device).double() / half
        return (THETA**-exponent).float()

    @cached_property
    def tables(self) -> tuple[Tensor, Tensor]:
        """Cosine and sine (M, head_dim/2) in float64 of the float32 angles."""
        angle = (self.positions.float()[:, None] * self.inv_freq).double()
        return angle.cos(), angle.sin()

    @property
    def pages(self) -> int:
        """Pages that hold M tokens."""
        return -(-self.layer.M // PAGE)

    @cached_property
    def slots(self) -> Tensor:
        """(M,) int64: tokens in order inside pages in random order."""
        device, generator = self.layer.options.device, self.layer.random
        page = torch.randperm(self.pages, generator=generator, device=device)
        return page[self.positions // PAGE] * PAGE + self.positions % PAGE

    @property
    def case(self) -> dict[str, Any]:
        shape = self.shape
        heads = {"heads": shape.heads, "kv_heads": shape.kv_heads, "head_dim": shape.head_dim}
        return {"cache": "bf16", **heads, "page": PAGE}

    def policies(self, weights: str) -> list[tuple[str, Any]]:
        shape = self.shape
        turn, place = RoPE(head_dim=shape.head_dim), PlaceKV(head_dim=shape.head_dim)
        ranges = Columns(
            q=(shape.q_width, turn >> Store(BF16)),
            k=(shape.kv_width, turn >> place),
            v=(shape.kv_width, place),
        )
        text = "Columns(q: RoPE >> Store, k: RoPE >> PlaceKV, v: PlaceKV)"
        return [self.row_scale(), (text, ranges)]

    def operands(self, weights: str) -> Tensors:
        layer = self.layer
        return {
            "sumsq": self.sumsq,
            "positions": self.positions,
            "inv_freq": self.inv_freq,
            "slots": self.slots,
            "q_out": layer.poisoned(layer.M, self.shape.q_width, dtype=BF16),
            **self.caches(),
        }

    def caches(self) -> Tensors:
        """Poisoned cells (pages, page, kv_heads, head_dim) of k and v."""
        shape = self.shape
        size = (self.pages, PAGE, shape.kv_heads, shape.head_dim)
        return {name: self.layer.poisoned(*size, dtype=BF16) for name in self.updated}

    def outputs(self, weights: str) -> tuple[str, ...]:
        return ("q_out", *self.updated)

    def bytes(self, weights: str) -> int:
        return 2 * self.layer.M * self.layer.N + self.sumsq.nbytes

    def _widths(self) -> list[int]:
        shape = self.shape
        return [shape.q_width, shape.kv_width, shape.kv_width]

    def exact(self, y: Tensor) -> Tensors:
        rows = self.layer.rows
        y = y * row_factor(self.sumsq[rows].double(), self.layer.K)
        q, k, v = y.split(self._widths(), dim=1)
        cos, sin = (table[rows] for table in self.tables)
        q, k = (rotate(x, cos, sin, torch.float64) for x in (q, k))
        return {"q_out": q, "k_cells": k, "v_cells": v}

    def view(self, name: str, tensor: Tensor) -> Tensor:
        if name in self.updated:
            flat = tensor.reshape(-1, self.shape.kv_width)
            return flat[self.slots[self.layer.rows]]
        return super().view(name, tensor)

    def tail(self, weights: str) -> Tail:
        widths = self._widths()

        def qkv(y: Tensor, given: Tensors) -> Tensors:
            q, k, v = y.split(widths, dim=1)
            cos, sin, slots = given["cos"], given["sin"], given["slots"]
            given["k_cells"].index_put_((slots,), rotate(k, cos, sin, BF16))
            given["v_cells"].index_put_((slots,), v.to(BF16))
            return {"q_out": rotate(q, cos, sin, BF16)}

        return qkv

    def peer_operands(self, weights: str) -> Tensors:
        width = self.shape.kv_width
        flat = {name: cells.reshape(-1, width) for name, cells in self.caches().items()}
        cos, sin = (table.float() for table in self.tables)
        return {"sumsq": self.sumsq, "slots": self.slots, "cos": cos, "sin": sin, **flat}


KINDS: dict[str, type[Projection]] = {
    "qkv": QKV,
    "o": Residual,
    "gate_up": GateUp,
    "down": Residual,
}


def projection(layer: Layer) -> Projection:
    """The epilogue that belongs to the layer."""
    return KINDS[layer.name](layer)
