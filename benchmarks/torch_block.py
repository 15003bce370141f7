"""The layer that PyTorch users compile: RMSNorm, row-wise dynamic FP8, RoPE, SDPA (FuTransformer,
section 4.1).

One graph by torch.compile, static shapes, with the favours of ``peers``: quantisation and norms in
float32 right behind each other, cosines and sines from a table, keys and values into a dense cache
beside what attention reads, padding left to the causal mask.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.attention import BACKENDS, Attention, sdpa
from benchmarks.blocks import FUSED, GAINS, Block
from benchmarks.peers import EPS, Tensors, rotate, swiglu
from benchmarks.timing import Run, Timer
from epicute.quant import E4M3_MAX, SCALE_MIN, quantize_rows

__all__ = ["chosen", "compiled_block", "fastest"]

BF16 = torch.bfloat16
Layer = Callable[[Tensor, Tensors, Tensors], Tensor]


def quantized(x: Tensor) -> tuple[Tensor, Tensor]:
    """E4M3 codes of ``x`` float32 and one scale per row, (M, 1)."""
    scale = (x.abs().amax(dim=1, keepdim=True) / E4M3_MAX).clamp(min=SCALE_MIN)
    return (x / scale).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn), scale


def project_fp8(x: Tensor, given: Tensors, name: str, fast: bool = True) -> Tensor:
    """(M, N) bfloat16 of x float32 and a weight with one scale per channel. ``fast``: how products are added."""
    codes, scale = quantized(x)
    return torch._scaled_mm(
        codes,
        given[name].t(),
        scale_a=scale,
        scale_b=given[f"{name}_scale"],
        out_dtype=BF16,
        use_fast_accum=fast,
    )


def project_bf16(x: Tensor, given: Tensors, name: str) -> Tensor:
    """(M, N) bfloat16 of x float32 and a weight."""
    return F.linear(x.to(BF16), given[name])


def normed(x: Tensor, gain: Tensor) -> Tensor:
    """RMSNorm in float32."""
    x = x.float()
    return x * torch.rsqrt(x.square().mean(dim=1, keepdim=True) + EPS) * gain.float()


def layer_of(
    block: Block, weights: str, backend: SDPBackend | None, accumulate: str = "fast"
) -> Layer:
    """The layer over padded rows (batch * longest, hidden), for torch.compile.

    ``backend``: of attention; None leaves the choice to PyTorch. ``accumulate``: of FP8 products.
    """
    shape, batch, length = block.shape, block.batch, block.longest
    project = project_bf16
    if weights == "fp8":
        project = partial(project_fp8, fast=accumulate == "fast")
    widths = [shape.q_width, shape.kv_width, shape.kv_width]

    def heads_of(x: Tensor) -> Tensor:
        return x.view(batch, length, -1, shape.head_dim).transpose(1, 2)

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with using(backend):
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return out.transpose(1, 2).reshape(batch * length, shape.q_width)

    def layer(x: Tensor, given: Tensors, cells: Tensors) -> Tensor:
        q, k, v = project(normed(x, given[GAINS[0]]), given, "qkv").split(widths, dim=1)
        cos, sin = given["cos"], given["sin"]
        q, k = (rotate(y.float(), cos, sin, BF16) for y in (q, k))
        cells["k_cells"].copy_(k)
        cells["v_cells"].copy_(v)
        o = attention(*map(heads_of, (q, k, v)))
        x = x + project(o.float(), given, "o")
        both = project(normed(x, given[GAINS[1]]), given, "gate_up")
        return x + project(swiglu(both.float()), given, "down")

    return layer


def using(backend: SDPBackend | None) -> AbstractContextManager[Any]:
    """Restricts attention to a back-end."""
    return nullcontext() if backend is None else sdpa_kernel(backend)


def compiled_block(
    block: Block, weights: str, backend: SDPBackend | None, accumulate: str = "fast"
) -> Run:
    """torch.compile, default mode, of the whole layer over padded rows. See ``layer_of``."""
    layer = layer_of(block, weights, backend, accumulate)
    function = torch.compile(layer, dynamic=False, fullgraph=True)
    cos, sin = (table.float() for table in block.angles(_padded_positions(block)))
    shared: Tensors = {name: block.weights[name] for name in GAINS} | {"cos": cos, "sin": sin}
    if weights not in block.compiled:
        block.compiled[weights] = [_weights(block, weights) for _ in range(block.copies)]
    given = [shared | some for some in block.compiled[weights]]
    cells = [_cells(block) for _ in range(block.copies)]
    inputs = [x.view(-1, block.shape.hidden) for x in block.x_padded]

    def run(copy: int) -> dict[str, Tensor]:
        return {"out": function(inputs[copy], given[copy], cells[copy])}

    return run


def _padded_positions(block: Block) -> Tensor:
    return torch.arange(block.longest, device=block.options.device).repeat(block.batch)


def _weights(block: Block, weights: str) -> Tensors:
    """One copy of the four projections."""
    found: Tensors = {}
    for name in FUSED:
        found[name] = block.fused(name)
        if weights == "fp8":
            found[name], scale = quantize_rows(found[name])
            found[f"{name}_scale"] = scale.reshape(1, -1).contiguous()
    return found


def _cells(block: Block) -> Tensors:
    """One copy of a dense cache, poisoned."""
    size = (block.batch * block.longest, block.shape.kv_width)
    device = block.options.device
    return {
        name: torch.full(size, float("nan"), dtype=BF16, device=device)
        for name in ("k_cells", "v_cells")
    }


# --- attention's back-ends ---


def fastest(block: Block, timer: Timer) -> SDPBackend:
    """The back-end whose attention of this block takes least, timed alone.

    Raises the last error where none runs.
    """
    found = _attention(block)
    times: dict[SDPBackend, float] = {}
    failure: Exception | None = None
    for backend in BACKENDS.values():
        try:
            sample = timer.prepare(sdpa(found, backend), found.copies, found.floor_us)()
            times[backend] = median(sample.times)
        except Exception as error:
            failure = error
    if not times:
        raise failure or RuntimeError("no back-end to choose from")
    return min(times, key=lambda backend: times[backend])


def chosen(block: Block) -> SDPBackend:
    """The back-end that PyTorch would choose for this block."""
    found = _attention(block)
    q, k, v = (found.laid_out(x[0]).transpose(1, 2) for x in (found.q, found.k, found.v))
    return SDPBackend(torch._fused_sdp_choice(q, k, v, is_causal=True, enable_gqa=True))


def _attention(block: Block) -> Attention:
    """The block's attention alone, as padded rows."""
    shape = block.shape
    return Attention(
        (block.longest,) * block.batch,
        shape.head_dim,
        block.options,
        heads=shape.heads,
        kv_heads=shape.kv_heads,
        copies=2,
    )
