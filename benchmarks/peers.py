"""What epicute is timed beside: cuBLAS, torch._scaled_mm, torch.compile of the same fused
operation, quack.

Peers get every favour that keeps the result: preallocated outputs where the function takes them,
RMSNorm's row factor folded into the activation scale of the FP8 product, cosines and sines from a
table, caches seen as flat rows so that the compiler updates them in place, and no saturation or NaN
counters.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.data import Layer
from benchmarks.timing import Run
from epicute.quant import E4M3_MAX

__all__ = [
    "EPS",
    "Tail",
    "Tensors",
    "compiled",
    "cublas",
    "emit_fp8",
    "partial_sums",
    "quack_gemm",
    "rotate",
    "row_factor",
    "scaled_mm",
    "swiglu",
    "weight_scale",
]

EPS = 1e-5
"""Of RMSNorm."""

Tensors = dict[str, Tensor]
Tail = Callable[[Tensor, Tensors], Tensors]


# --- plain products ---


def cublas(layer: Layer) -> Run:
    """torch.mm in BF16."""
    outputs = _outputs(layer)

    def run(copy: int) -> dict[str, Tensor]:
        torch.mm(layer.x[copy], layer.weight[copy].t(), out=outputs[copy])
        return {"out": outputs[copy]}

    return run


def scaled_mm(layer: Layer, fast: bool) -> Run:
    """torch._scaled_mm with one scale per row of x and one per output channel, BF16 out."""
    outputs = _outputs(layer)
    codes, scale = layer.x_rows
    scale_a, scale_b = scale[:, None].contiguous(), weight_scale(layer)

    def run(copy: int) -> dict[str, Tensor]:
        torch._scaled_mm(
            codes[copy],
            layer.codes[copy].t(),
            scale_a=scale_a,
            scale_b=scale_b,
            out_dtype=torch.bfloat16,
            use_fast_accum=fast,
            out=outputs[copy],
        )
        return {"out": outputs[copy]}

    return run


QUACK = "quack-kernels==0.6.5"
"""What the peer was written against."""


def quack_gemm(layer: Layer) -> Run:
    """quack's BF16 GEMM, tuned by its own autotuner when a copy is first run.

    Importing quack replaces parts of the DSL, its argument conversion and its tensors, for the
    whole process. Add it last, when every kernel of ours is compiled and loaded; a table that is
    measured in the same process afterwards compiles in other processes all the same.

    Raises RuntimeError, with what to install, where quack is not there or does not import.
    """
    try:
        from quack.gemm_interface import gemm  # type: ignore[import-not-found]
    except Exception as error:  # whatever a package of others raises while it patches the DSL
        raise RuntimeError(
            f"quack does not import here ({type(error).__name__}: {error}): pip install "
            f"--no-deps {QUACK}, or leave --quack out"
        ) from error

    outputs = _outputs(layer)

    def run(copy: int) -> dict[str, Tensor]:
        gemm(layer.x[copy], layer.weight[copy].t(), out=outputs[copy], tuned=True)
        return {"out": outputs[copy]}

    return run


def _outputs(layer: Layer) -> list[Tensor]:
    shape = (layer.M, layer.N)
    return [layer.poisoned(*shape, dtype=torch.bfloat16) for _ in range(layer.copies)]


def weight_scale(layer: Layer) -> Tensor:
    """(1, N) float32."""
    scale = layer.quantized.scale
    assert scale is not None  # FP8 always has one
    return scale.reshape(1, -1).contiguous()


# --- pieces of the fused operations in any float type: for torch.compile and the reference ---


def row_factor(sumsq: Tensor, width: int) -> Tensor:
    """(M, 1) of RMSNorm, from the partial sums of squares of rows of ``width``."""
    return torch.rsqrt(sumsq.sum(dim=1, keepdim=True) / width + EPS)


def swiglu(y: Tensor) -> Tensor:
    """(M, N/2): silu of the first half times the second."""
    gate, up = y.chunk(2, dim=1)
    return F.silu(gate) * up


def rotate(y: Tensor, cos: Tensor, sin: Tensor, dtype: torch.dtype) -> Tensor:
    """Half-split RoPE of (M, heads * head_dim) with cos and sin (M, head_dim/2), as ``dtype``.

    Rounded before the halves meet: otherwise a compiler would write the wider halves out first.
    """
    heads = y.view(y.shape[0], -1, 2, cos.shape[1])
    a, b = heads[:, :, 0], heads[:, :, 1]
    c, s = cos[:, None], sin[:, None]
    halves = (a * c - b * s).to(dtype), (b * c + a * s).to(dtype)
    return torch.stack(halves, dim=2).view_as(y)


def partial_sums(stored: Tensor) -> Tensor:
    """(M, n/64) sums of squares over 64 columns."""
    return stored.square().view(stored.shape[0], -1, 64).sum(dim=2)


def emit_fp8(y: Tensor, scale: Tensor, amax: Tensor) -> Tensor:
    """E4M3 codes of y / scale with a delayed scale; raises ``amax`` to the largest magnitude."""
    amax.copy_(torch.maximum(amax, y.abs().amax()))
    return (y * (1.0 / scale)).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)


# --- whole projections for torch.compile: product, then tail ---


def bf16_product(x: Tensor, w: Tensor, given: Tensors) -> Tensor:
    """(M, N) float32 of a BF16 product, times RMSNorm's row factor where ``sumsq`` is given."""
    y = F.linear(x, w).float()
    return y * row_factor(given["sumsq"], x.shape[1]) if "sumsq" in given else y


def fp8_product(x: Tensor, w: Tensor, given: Tensors) -> Tensor:
    """(M, N) float32 of an FP8 product with fast accumulation.

    ``scale_a`` (M, 1) and ``scale_b`` (1, N) are its scales; RMSNorm's row factor joins the former
    where ``sumsq`` is given.
    """
    scale_a = given["scale_a"]
    if "sumsq" in given:
        scale_a = scale_a * row_factor(given["sumsq"], x.shape[1])
    y = torch._scaled_mm(
        x,
        w.t(),
        scale_a=scale_a,
        scale_b=given["scale_b"],
        out_dtype=torch.bfloat16,
        use_fast_accum=True,
    )
    return y.float()


def compiled(
    layer: Layer,
    weights: str,
    tail: Tail,
    operands: Callable[[], Tensors],
    updated: tuple[str, ...],
) -> Run:
    """torch.compile, default mode, static shapes, of a product and the ``tail`` of its epilogue as
    one graph.

    Args:
        layer: sizes, activations (FP8 with one scale) and weights.
        weights: ``bf16`` or ``fp8``, the format of both operands.
        tail: from the float32 product and the operands to the outputs, by name.
        operands: makes the operands of one copy.
        updated: operands the tail updates in place, returned beside its outputs.
    """
    product, x, w = bf16_product, layer.x, layer.weight
    scales: Tensors = {}
    if weights == "fp8":
        product, w = fp8_product, layer.codes
        x, scale = layer.x_tensor
        scale_a = scale.expand(layer.M).reshape(-1, 1).contiguous()
        scales = {"scale_a": scale_a, "scale_b": weight_scale(layer)}

    def fused(x: Tensor, w: Tensor, given: Tensors) -> Tensors:
        return tail(product(x, w, given), given)

    function = torch.compile(fused, dynamic=False, fullgraph=True)
    bound = [scales | operands() for _ in range(layer.copies)]

    def run(copy: int) -> dict[str, Tensor]:
        found = function(x[copy], w[copy], bound[copy])
        return {**found, **{name: bound[copy][name] for name in updated}}

    return run
