"""The fused QKV projection of a Llama layer: RMSNorm's factor, RoPE, and K and V straight into a paged cache.

    python examples/fused_qkv.py [1B | 8B | 70B | SmolLM2]

Evaluates on the CPU and compares every written cell with float64, compiles the kernel and prints its report. On a
Hopper GPU it runs the same composition and compares again.
"""

import sys

import torch

from epicute import Columns, Dequantize, PlaceKV, Plan, RoPE, RowScale, Store, Weight, linear, plan
from epicute.kv import slots_for
from epicute.models import SHAPES
from epicute.quant import quantize_rows

BF16 = torch.bfloat16
PAGE, EPS, THETA = 16, 1e-5, 500000.0


def rotate(x: torch.Tensor, positions: torch.Tensor, inv_freq: torch.Tensor) -> torch.Tensor:
    """RoPE of (M, heads, head_dim) in float64, halves paired."""
    angle = (positions[:, None] * inv_freq).double()[:, None]
    first, second = x.chunk(2, dim=-1)
    return torch.cat(
        [
            first * angle.cos() - second * angle.sin(),
            second * angle.cos() + first * angle.sin(),
        ],
        dim=-1,
    )


def report(where: str, out: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    """Print the worst row of every output; fail where one is beyond a BF16 rounding."""
    for name, right in expected.items():
        rows, right = out[name].double().reshape(right.shape), right
        worst = float(((rows - right).norm(dim=-1) / right.norm(dim=-1).clamp_min(1e-30)).max())
        print(f"{where}: {name:<8} worst row {worst:.1e}")
        assert worst < 2**-8 + 1e-4, name


def main(name: str = "8B") -> None:
    torch.manual_seed(0)
    shape = SHAPES[name]
    K, dim = shape.hidden, shape.head_dim
    N = shape.q_width + 2 * shape.kv_width

    fused = (
        Dequantize(activation="row")
        >> RowScale(width=K, eps=EPS)
        >> Columns(
            q=(shape.q_width, RoPE(dim) >> Store(BF16)),
            k=(shape.kv_width, RoPE(dim) >> PlaceKV(dim)),
            v=(shape.kv_width, PlaceKV(dim)),
        )
    )
    print(f"{name}: N = {N}, K = {K}\n{fused}\n")

    # Two requests in one batch: 50 new tokens after 14 cached ones, and 30 from the start.
    positions = torch.cat([torch.arange(14, 64), torch.arange(30)])
    requests = torch.cat([torch.zeros(50, dtype=torch.int64), torch.ones(30, dtype=torch.int64)])
    pages = torch.tensor([[5, 0, 3, 7], [2, 6, -1, -1]])  # pages lie anywhere
    slots = slots_for(pages, positions, requests, PAGE)
    cache = torch.zeros(8, PAGE, shape.kv_heads, dim, dtype=BF16)

    weight = Weight(torch.randn(N, K) / K**0.5, "qkv").quantize("fp8")
    packed = weight.pack(fused.row_order(N))
    x = torch.randn(len(positions), K)
    codes, scale = quantize_rows(x)
    operands = {
        "scale": scale,
        "sumsq": x.reshape(len(x), -1, 64).square().sum(2),
        "positions": positions,
        "inv_freq": THETA ** (-torch.arange(0, dim, 2) / dim),
        "slots": slots,
        "k_cells": cache,
        "v_cells": cache.clone(),
    }

    # Float64 on the same codes.
    y = (codes.double() @ weight.codes.double().T) * scale[:, None] * weight.scale
    y = y * torch.rsqrt(operands["sumsq"].double().sum(1, keepdim=True) / K + EPS)
    q, k, v = (
        part.reshape(len(x), -1, dim)
        for part in y.split([shape.q_width, shape.kv_width, shape.kv_width], dim=1)
    )
    q, k = (rotate(part, positions, operands["inv_freq"]) for part in (q, k))

    def placed(part: torch.Tensor) -> torch.Tensor:
        found = cache.double().reshape(-1, shape.kv_heads, dim)
        found[slots] = part
        return found

    expected = {"q_out": q, "k_cells": placed(k), "v_cells": placed(v)}
    report("CPU", linear(codes, packed, fused, **operands), expected)

    compiled: Plan = plan(fused, packed)
    print(f"\n{compiled.schedule}; {compiled.kernel.target}\n{compiled.report}\n")

    if torch.cuda.is_available():
        on_gpu = {name: value.cuda() for name, value in operands.items()}
        q_out = torch.empty(len(x), shape.q_width, dtype=BF16, device="cuda")
        compiled.run(codes.cuda(), packed.to("cuda"), **on_gpu, q_out=q_out)
        written = {"q_out": q_out, "k_cells": on_gpu["k_cells"], "v_cells": on_gpu["v_cells"]}
        report("GPU", {name: value.cpu() for name, value in written.items()}, expected)


if __name__ == "__main__":
    main(*sys.argv[1:2])
