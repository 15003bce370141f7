"""The decode step that PyTorch users compile: BF16, or INT4 weights by ``_weight_int4pack_mm`` (FuTransformer 4.4).

    RMSNorm, QKV, RoPE, new row to its place, SDPA over the cache, O, residual,
    RMSNorm, gate and up, SwiGLU, down, residual

One graph by torch.compile, static shapes, with the favours of ``torch_block``: norms and RoPE in float32 right behind
each other, cosines and sines from a table, q, k and v in one product, gate and up in another. The BF16 cache
(requests, heads, context, head_dim) is exactly as long as what is read, so that attention needs no mask; positions are
read on the device, as a graph that serves every step must. Attention is by the back-end, and in the form, that is
fastest for this case:

    enable_gqa    query heads (requests, heads, 1, head_dim), fewer heads in the cache
    grouped       the query heads of a KV head as rows of one product: (requests, kv_heads, heads / kv_heads, head_dim)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.blocks import GAINS
from benchmarks.check import Error
from benchmarks.data import clones, exactly
from benchmarks.decode_attention import attended
from benchmarks.decode_layer_ours import Layers
from benchmarks.decode_layer_step import GROUP, NEWEST, RESULT, Step, cache_bytes, expect, products
from benchmarks.floors import BANDWIDTH
from benchmarks.peers import Tensors, rotate, swiglu
from benchmarks.timing import Run, Timer
from benchmarks.torch_block import normed
from epicute.weights import QuantizedInt4

__all__ = ["BACKENDS", "FORMATS", "Form", "TorchStep"]

BF16 = torch.bfloat16
FORMATS = ("bf16", "int4")
"""Of weights."""

BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
}
"""Of scaled_dot_product_attention."""

INNER_TILES = 8
"""Of ``_convert_weight_to_int4pack``: tiles of K that lie together."""

Function = Callable[[Tensor, Tensors, Tensors], Tensor]


@dataclass(frozen=True)
class Form:
    """How attention is asked for.

    Attributes:
        backend: of ``BACKENDS``. grouped: whether heads of a group are rows of one product.
    """

    backend: str
    grouped: bool

    def __str__(self) -> str:
        return f"sdpa {self.backend}{', grouped' if self.grouped else ''}"

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """(batch, q_width) of q (batch, heads, head_dim) over all of k and v (batch, kv_heads, context, head_dim)."""
        batch, heads, dim = q.shape
        if self.grouped:
            q = q.view(batch, k.shape[1], heads // k.shape[1], dim)
        else:
            q = q.view(batch, heads, 1, dim)
        with sdpa_kernel(BACKENDS[self.backend]):
            out = F.scaled_dot_product_attention(q, k, v, enable_gqa=not self.grouped)
        return out.reshape(batch, heads * dim)


# --- weights ---


def bf16(x: Tensor, given: Tensors, name: str) -> Tensor:
    """(batch, N) of a BF16 weight."""
    return F.linear(x, given[name])


def int4(x: Tensor, given: Tensors, name: str) -> Tensor:
    """(batch, N) of an INT4 weight in groups of 128."""
    scales = given[f"{name}_scales"]
    if x.device.type == "cpu":
        return torch._weight_int4pack_mm_for_cpu(x, given[name], GROUP, scales)
    return torch._weight_int4pack_mm(x, given[name], GROUP, scales)


def packed_int4(weight: QuantizedInt4) -> tuple[Tensor, Tensor]:
    """The same codes as PyTorch's kernel takes them, and scales and zeros (K/128, N, 2) bfloat16."""
    codes, scale = weight.codes, weight.scales.to(BF16).T
    scales = torch.stack([scale, torch.zeros_like(scale)], dim=2).contiguous()
    if codes.device.type == "cpu":
        return torch._convert_weight_to_int4pack_for_cpu(codes.to(torch.int32), 1), scales
    pairs = (codes[:, 0::2] << 4 | codes[:, 1::2]).contiguous()
    return torch._convert_weight_to_int4pack(pairs, INNER_TILES), scales


PROJECT: dict[str, Callable[[Tensor, Tensors, str], Tensor]] = {"bf16": bf16, "int4": int4}


# --- the step ---


def step_of(step: Step, weights: str, form: Form) -> Function:
    """The layer over (batch, hidden), for torch.compile."""
    shape, batch, project = step.shape, step.batch, PROJECT[weights]
    widths = [shape.q_width, shape.kv_width, shape.kv_width]

    def heads_of(x: Tensor) -> Tensor:
        return x.reshape(batch, -1, shape.head_dim)

    def layer(x: Tensor, given: Tensors, cells: Tensors) -> Tensor:
        at, rows = given["positions"], given["rows"]
        cos, sin = given["cos"][at], given["sin"][at]
        q, k, v = project(normed(x, given[GAINS[0]]).to(BF16), given, "qkv").split(widths, dim=1)
        q, k = (rotate(y.float(), cos, sin, BF16) for y in (q, k))
        for name, y in (("k", k), ("v", v)):
            cells[name][rows, :, at] = heads_of(y)
        o = form.attend(heads_of(q), cells["k"], cells["v"])
        x = x + project(o, given, "o")
        both = project(normed(x, given[GAINS[1]]).to(BF16), given, "gate_up")
        return x + project(swiglu(both.float()).to(BF16), given, "down")

    return layer


@dataclass
class TorchStep:
    """Both candidates of a step.

    Attributes:
        layers: whose weights and history they are.
        timer: how the forms of attention are timed.
    """

    layers: Layers
    timer: Timer

    @property
    def step(self) -> Step:
        """What is computed."""
        return self.layers.step

    @cached_property
    def cells(self) -> list[Tensors]:
        """One per copy: keys and values (batch, kv_heads, context, head_dim), the newest NaN."""
        sides = [x.transpose(1, 2).contiguous() for x in self.step.history]
        copies = zip(*(clones(x, self.step.copies) for x in sides), strict=True)
        return [dict(zip("kv", pair, strict=True)) for pair in copies]

    @cached_property
    def form(self) -> Form:
        """The form of attention that takes least, timed alone. Raises the last error where none runs."""
        shape, step = self.step.shape, self.step
        q = clones(step.block.normal(step.batch, shape.heads, shape.head_dim), step.copies)
        least = step.batch * step.context * cache_bytes(shape, "bf16") / BANDWIDTH * 1e6
        times: dict[Form, float] = {}
        failure: Exception | None = None
        for form in (Form(name, grouped) for name in BACKENDS for grouped in (False, True)):

            def run(copy: int, form: Form = form) -> Tensors:
                cells = self.cells[copy]
                return {"out": form.attend(q[copy], cells["k"], cells["v"])}

            try:
                times[form] = median(self.timer.prepare(run, step.copies, least)().times)
            except Exception as error:
                failure = error
        if not times:
            raise failure or RuntimeError("no back-end to choose from")
        return min(times, key=lambda form: times[form])

    # --- candidates ---

    def runner(self, weights: str) -> Run:
        """torch.compile, default mode, of the whole step."""
        step = self.step
        function = torch.compile(step_of(step, weights, self.form), dynamic=False, fullgraph=True)
        shared = self._shared()
        given = [shared | held for held in self._weights(weights)]
        cells = self.cells

        def run(copy: int) -> Tensors:
            return {"out": function(step.x[copy], given[copy], cells[copy])}

        return run

    def _shared(self) -> Tensors:
        """What all copies read: gains, tables of angles, positions."""
        step, device = self.step, self.step.device
        cos, sin = step.block.angles(torch.arange(step.context, device=device))
        positions = torch.full((step.batch,), step.position, device=device)
        found = {"cos": cos.float(), "sin": sin.float(), "positions": positions}
        found["rows"] = torch.arange(step.batch, device=device)
        return found | {name: step.block.weights[name] for name in GAINS}

    def _weights(self, weights: str) -> list[Tensors]:
        """The four projections, one set per copy."""
        held: dict[str, list[Tensor]] = {}
        for name in ("qkv", "o", "gate_up", "down"):
            if weights == "int4":
                codes, scales = packed_int4(self._codes(name))
                held[name] = clones(codes, self.step.copies)
                held[f"{name}_scales"] = clones(scales, self.step.copies)
            else:
                held[name] = clones(self.step.block.fused(name), self.step.copies)
        return [dict(zip(held, each, strict=True)) for each in zip(*held.values(), strict=True)]

    def _codes(self, name: str) -> QuantizedInt4:
        """A projection's codes, those of ours, with scales in BF16 as the kernel wants them."""
        found = getattr(self.layers.weights("int4")[0], name).unpack()
        return replace(found, scale=found.scales.to(BF16))

    # --- check ---

    def check(self, weights: str, run: Run) -> Error:
        """The largest error of all copies' results against float64; raises WrongResult beyond the budget."""
        step = self.step
        cells: dict[str, Any] = self.cells[0]
        for name in "kv":
            cells[name][:, :, -1] = float("nan")  # both candidates write it
        outs = [run(copy)["out"].clone() for copy in range(step.copies)]
        product = products(self._codes if weights == "int4" else step.block.fused)
        q, k, v = step.heads(product, gained=True)
        for name, wanted in (("k", k), ("v", v)):
            expect(f"the new row of {name}", cells[name][:, :, -1], wanted, NEWEST["bf16"])
        found = []
        for request in range(step.batch):
            rows = (exactly(cells[name][request].transpose(0, 1)) for name in "kv")
            found.append(attended(q[request], *rows))
        exact = step.result(product, True, torch.stack(found).flatten(1))
        errors = [expect("out", out, exact, RESULT["bf16"]) for out in outs]
        return Error(max(e.norm for e in errors), max(e.worst_row for e in errors))
