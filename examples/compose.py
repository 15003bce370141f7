"""Compose an epilogue, draw it, evaluate it on the CPU, and compile it for Hopper without a GPU.

    python examples/compose.py

The epilogue is that of a gate/up projection: scales, RMSNorm's row factor, SwiGLU, FP8 codes with a delayed scale.
"""

import torch

from epicute import Dequantize, EmitFP8, RowScale, SwiGLU, explain
from epicute.testing import assert_within, storage_budget

M, N, K = 100, 3072, 576
EPS = 1e-5


def main() -> None:
    torch.manual_seed(0)

    # 1. Compose. A policy is a frozen value, and >> is associative.
    head = Dequantize(activation="row") >> RowScale(width=K, eps=EPS)
    fused = head >> (SwiGLU() >> EmitFP8())
    assert fused == head >> SwiGLU() >> EmitFP8()

    # 2. Draw: fields, operands read, operands written.
    print(fused, end="\n\n")

    # 3. Evaluate any accumulator. Operands are bound by name, in logical order.
    acc = torch.randn(M, N)
    sumsq = 64 * (0.5 + torch.rand(M, K // 64))
    scale, weight_scale = 0.5 + torch.rand(M), 0.5 + torch.rand(N)
    out_scale = torch.tensor([0.05])  # delayed scaling: from the largest value of earlier calls
    out = fused.evaluate(
        acc, scale=scale, weight_scale=weight_scale, sumsq=sumsq, out_scale=out_scale
    )
    for name, value in out.items():
        print(f"{name:<10} {tuple(value.shape)} {str(value.dtype).removeprefix('torch.')}")

    # The same in float64, from the formulas.
    x = acc.double() * scale[:, None] * weight_scale
    x = x * torch.rsqrt(sumsq.double().sum(1, keepdim=True) / K + EPS)
    gate, up = x.chunk(2, dim=1)
    z = gate * torch.sigmoid(gate) * up
    codes = (z / out_scale).clamp(-448, 448)
    budget = storage_budget(torch.float8_e4m3fn)
    print(f"against float64: {assert_within(out['out_fp8'], codes, budget)}", end="\n\n")

    # 4. Compile and explain: operands, row order, schedule, registers, spills, shared memory.
    print(explain(fused, n=N, k=K, dtype=torch.float8_e4m3fn))


if __name__ == "__main__":
    main()
