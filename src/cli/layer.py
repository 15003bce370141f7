"""The fused projections of one real layer, each with its inputs, its weight and what it must give.

What a decoder layer computes before and after attention (FuTransformer 3.2): QKV with RoPE and KV
placement on what enters the layer, gate and up with SwiGLU on what attention left. The expected
outputs are float64 on the same quantised operands, so that a budget bounds the epilogue and not the
format; what the format costs is a figure beside it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from epicute.epilogues import (
    Columns,
    Composition,
    Dequantize,
    EmitFP8,
    PlaceKV,
    RoPE,
    RowScale,
    Store,
    SwiGLU,
)
from epicute.epilogues import reference as policies
from epicute.gemm import reference as gemm
from epicute.kv import slots_for
from epicute.models.shapes import LayerShape
from epicute.quant import dequantize, quantize_rows, scale_for
from epicute.testing import Budget, storage_budget
from epicute.weights import Packed, Weight

__all__ = ["Job", "LayerSource", "jobs_of"]

PAGE_SIZE = 16
BF16, FP8 = torch.bfloat16, torch.float8_e4m3fn

BUDGET_BF16 = storage_budget(BF16, arithmetic=1e-4)
"""One BF16 rounding, and what FP32 sums over K = 576 and FP32 epilogues add."""

BUDGET_FP8 = Budget(norm=0.04, worst_row=0.0625)
"""One E4M3 rounding: half a unit in the last place is 2^-4."""


class LayerSource(Protocol):
    """What a checkpoint must offer; ``models.smollm2.Checkpoint`` does."""

    @property
    def config(self) -> Any:
        """``shape``, ``rms_eps`` and ``inv_freq``."""

    def layer(self, index: int) -> Mapping[str, Tensor]:
        """Weights by Hugging Face name."""

    def layer_inputs(self, prompt: str, layer: int = 0) -> tuple[Tensor, Tensor]:
        """Token ids (T,) and the residual stream (T, hidden)."""


@dataclass(frozen=True, eq=False)
class Job:
    """One fused projection on real data.

    Attributes:
        name: what the table calls it.
        composition: the epilogue.
        packed: the weight, in the composition's row order.
        x: (M, K) activation, codes or BF16.
        operands: all that the composition reads, and the start values of cells, amax and counters.
        expected: float64 outputs on the same quantised operands, before storage rounding.
        unquantised: ``quality`` compares these (float64, from unrounded weights and activations).
        quality: turns outputs into what ``unquantised`` holds.
        budgets: allowed error of every output; (0, 0) means equal.
    """

    name: str
    composition: Composition
    packed: Packed
    x: Tensor
    operands: dict[str, Tensor]
    expected: dict[str, Tensor]
    unquantised: Tensor
    quality: Callable[[Mapping[str, Tensor]], Tensor]
    budgets: dict[str, Budget]

    @property
    def problem(self) -> tuple[int, int, int]:
        """(M, N, K)."""
        return (self.x.shape[0], *self.packed.shape)

    def accumulator(self) -> Tensor:
        """(M, N) x · codesᵀ, exact up to one FP32 rounding: what the mainloop hands the epilogue."""
        codes = self.packed.unpack().codes.to(torch.float64)
        return (self.x.to(torch.float64) @ codes.T).to(torch.float32)

    def outputs(self, device: str | torch.device) -> dict[str, Tensor]:
        """Fresh output tensors of every written operand, by name."""
        like = self.composition.evaluate(self.accumulator()[:0], **_no_rows(self.operands))
        return {
            name: self.operands[name].to(device, copy=True)
            if name in self.operands
            else torch.empty((self.x.shape[0], *found.shape[1:]), dtype=found.dtype, device=device)
            for name, found in like.items()
        }


@dataclass(frozen=True, eq=False)
class _Stream:
    """A residual stream as a kernel meets it: BF16 rows, their partial sums, and a form to multiply.

    ``codes`` and ``scale`` are the row-wise FP8 form; both forms share the row factor.
    """

    exact: Tensor
    stored: Tensor
    partials: Tensor
    codes: Tensor
    scale: Tensor

    @staticmethod
    def of(x: Tensor) -> _Stream:
        stored = x.to(BF16)
        codes, scale = quantize_rows(stored)
        partials = policies.sum_squares(stored).to(torch.float32)
        return _Stream(x.to(torch.float64), stored, partials, codes, scale)


def jobs_of(source: LayerSource, prompt: str, index: int = 0) -> list[Job]:
    """QKV and gate/up of layer ``index`` on ``prompt``, each with FP8 and with BF16 weights."""
    _, x = source.layer_inputs(prompt, index)
    layer = _Layer(source, index, x)
    return [build(fp8) for fp8 in (True, False) for build in (layer.qkv, layer.gate_up)]


class _Layer:
    """Builds the jobs of a layer for one prompt."""

    def __init__(self, source: LayerSource, index: int, x: Tensor) -> None:
        self.shape: LayerShape = source.config.shape
        self.eps: float = source.config.rms_eps
        self.weights = source.layer(index)
        self.positions = torch.arange(len(x), dtype=torch.int64)
        self.rotary = gemm.Rotary(self.positions, source.config.inv_freq, self.shape.head_dim)
        self.entering = _Stream.of(x)
        self.exact_qkv = self._exact_qkv()
        self.after = _Stream.of(self._after_attention().to(torch.float32))

    def _fused(self, names: tuple[str, ...], norm: str) -> Weight:
        """Projections one below the other, with the gain of the norm before them folded in."""
        parts = [Weight(self.weights[name], name) for name in names]
        return Weight.concat(parts).fold_gain(self.weights[norm])

    @property
    def _qkv_weight(self) -> Weight:
        names = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
        return self._fused(names, "input_layernorm")

    @property
    def _gate_up_weight(self) -> Weight:
        return self._fused(("mlp.gate_proj", "mlp.up_proj"), "post_attention_layernorm")

    @property
    def _widths(self) -> tuple[int, int, int]:
        return self.shape.q_width, self.shape.kv_width, self.shape.kv_width

    def _exact_qkv(self) -> dict[str, Tensor]:
        """q, k and v from unquantised weights and activations."""
        x = self.entering.exact
        linear = gemm.Linear(x, self._qkv_weight.values)
        return gemm.qkv_projection(linear, self._widths, self.rotary, gemm.partials(x), self.eps)

    def _after_attention(self) -> Tensor:
        """Residual stream between attention and MLP, unquantised."""
        q, k, v = (self.exact_qkv[n] for n in "qkv")
        attended = gemm.attention(q, k, v, self.shape.head_dim)
        linear = gemm.Linear(attended, self.weights["self_attn.o_proj"])
        return gemm.output_projection(linear, self.entering.exact)["h"]

    def _inputs(
        self, stream: _Stream, weight: Weight, composition: Composition, fp8: bool
    ) -> tuple[Packed, Tensor, gemm.Linear, dict[str, Tensor]]:
        """Packed weight, activation, the same product for the reference, and its operands."""
        quantised = weight.quantize("fp8" if fp8 else "bf16")
        packed = quantised.pack(composition.row_order(weight.values.shape[0]))
        operands = {"sumsq": stream.partials}
        if not fp8:
            return packed, stream.stored, gemm.Linear(stream.stored, quantised.codes), operands
        assert quantised.scale is not None
        operands |= {"scale": stream.scale, "weight_scale": quantised.scale}
        linear = gemm.Linear(stream.codes, quantised.codes, stream.scale, quantised.scale)
        return packed, stream.codes, linear, operands

    def _head(self, fp8: bool) -> Composition:
        """What both projections begin with: scales, then the row factor of RMSNorm."""
        scale = RowScale(width=self.shape.hidden, eps=self.eps)
        return Dequantize(activation="row") >> scale if fp8 else Composition((scale,))

    def qkv(self, fp8: bool) -> Job:
        """x -> q (rotated), k (rotated) and v, the latter two straight into a paged cache."""
        dim, (q_width, kv_width, _) = self.shape.head_dim, self._widths
        composition = self._head(fp8) >> Columns(
            q=(q_width, RoPE(dim) >> Store(BF16)),
            k=(kv_width, RoPE(dim) >> PlaceKV(dim)),
            v=(kv_width, PlaceKV(dim)),
        )
        inputs = self._inputs(self.entering, self._qkv_weight, composition, fp8)
        packed, x, linear, operands = inputs
        slots, cells = self._cache(len(x))
        expected = gemm.qkv_projection(
            linear, self._widths, self.rotary, self.entering.partials, self.eps
        )
        placed = {
            f"{n}_cells": policies.place_kv(expected[n], slots, cells, torch.float64).cells
            for n in "kv"
        }

        def quality(outputs: Mapping[str, Tensor]) -> Tensor:
            flat = [outputs[f"{n}_cells"].reshape(-1, kv_width)[slots] for n in "kv"]
            return torch.cat([outputs["q_out"], *flat], dim=1)

        return Job(
            name=f"qkv, {'fp8' if fp8 else 'bf16'}",
            composition=composition,
            packed=packed,
            x=x,
            operands=operands
            | {"positions": self.positions, "inv_freq": self.rotary.inv_freq, "slots": slots}
            | {"k_cells": cells, "v_cells": cells.clone()},
            expected={"q_out": expected["q"], **placed},
            unquantised=torch.cat([self.exact_qkv[n] for n in "qkv"], dim=1),
            quality=quality,
            budgets=dict.fromkeys(("q_out", "k_cells", "v_cells"), BUDGET_BF16),
        )

    def _cache(self, tokens: int) -> tuple[Tensor, Tensor]:
        """Slots of a sequence whose pages lie in no order, and a cache with a page to spare."""
        pages = -(-tokens // PAGE_SIZE) + 1
        table = torch.randperm(pages, generator=torch.Generator().manual_seed(0))[None]
        slots = slots_for(table, self.positions, torch.zeros_like(self.positions), PAGE_SIZE)
        shape = (pages, PAGE_SIZE, self.shape.kv_heads, self.shape.head_dim)
        return slots, torch.zeros(shape, dtype=BF16)

    def gate_up(self, fp8: bool) -> Job:
        """x after attention -> silu(gate) * up, as FP8 codes for the down projection, or BF16."""
        composition = self._head(fp8) >> SwiGLU() >> (EmitFP8() if fp8 else Store(BF16))
        inputs = self._inputs(self.after, self._gate_up_weight, composition, fp8)
        packed, x, linear, operands = inputs
        z = gemm.gate_up_projection(linear, self.after.partials, self.eps)["z"]
        exact_linear = gemm.Linear(self.after.exact, self._gate_up_weight.values)
        exact = gemm.gate_up_projection(exact_linear, gemm.partials(self.after.exact), self.eps)
        # The delayed scale of an invocation before, whose largest value was a quarter larger.
        out_scale = scale_for(z.abs().max().to(torch.float32).reshape(1) * 1.25)
        emitted = _emitted(z, out_scale)
        return Job(
            name=f"gate/up, {'fp8' if fp8 else 'bf16'}",
            composition=composition,
            packed=packed,
            x=x,
            operands=operands | (emitted.operands if fp8 else {}),
            expected=emitted.expected if fp8 else {"out": z},
            unquantised=exact["z"],
            quality=lambda outputs: (
                dequantize(outputs["out_fp8"], out_scale) if fp8 else outputs["out"]
            ),
            budgets=emitted.budgets if fp8 else {"out": BUDGET_BF16},
        )


@dataclass(frozen=True, eq=False)
class _Emitted:
    """Operands, expected outputs and budgets of ``EmitFP8``."""

    operands: dict[str, Tensor]
    expected: dict[str, Tensor]
    budgets: dict[str, Budget]


def _emitted(z: Tensor, out_scale: Tensor) -> _Emitted:
    found = policies.emit_fp8(z, out_scale)
    counters = {"saturated": found.saturated, "nans": found.nans}
    start = {name: torch.zeros(1, dtype=torch.int64) for name in counters}
    counted = {name: torch.tensor([count]) for name, count in counters.items()}
    inverse = policies.round_to(1 / out_scale, torch.float32)
    return _Emitted(
        operands={"out_scale": out_scale, "amax": torch.zeros(1), **start},
        expected={
            "out_fp8": z * inverse,
            "amax": torch.tensor([found.amax], dtype=torch.float64),
            **counted,
        },
        budgets={
            "out_fp8": BUDGET_FP8,
            "amax": Budget(1e-4, 1e-4),
            **dict.fromkeys(counters, Budget(0.0, 0.0)),
        },
    )


def _no_rows(operands: Mapping[str, Tensor]) -> dict[str, Tensor]:
    rows = ("sumsq", "scale", "positions", "slots")
    return {name: x[:0] if name in rows else x for name, x in operands.items()}
