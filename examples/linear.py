"""From a weight to a projection: quantise, pack, and call it in one line, on the CPU or on a GPU.

    python examples/linear.py

The output projection of a layer: y = x Wᵀ + residual, stored in BF16, with the partial sums of squares that the next
RMSNorm needs. Once in BF16 and once in FP8, beside the unquantised result.
"""

import torch

from epicute import Composition, Dequantize, ResidualAdd, Store, SumSquares, Weight, linear
from epicute.quant import quantize_rows

M, N, K = 100, 2048, 2048


def project(
    format: str, weight: Weight, x: torch.Tensor, residual: torch.Tensor
) -> dict[str, torch.Tensor]:
    """The outputs of one format, on the device of ``x``."""
    tail = ResidualAdd() >> SumSquares() >> Store(torch.bfloat16)
    fused: Composition = tail if format == "bf16" else Dequantize(activation="row") >> tail
    packed = weight.quantize(format).pack(fused.row_order(N)).to(x.device)
    if format == "bf16":
        return linear(x.to(torch.bfloat16), packed, fused, residual=residual)
    codes, scale = quantize_rows(x)
    # weight_scale comes with the packed weight.
    return linear(codes, packed, fused, residual=residual, scale=scale)


def main() -> None:
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    weight = Weight(torch.randn(N, K) / K**0.5, "o_proj")
    x = torch.randn(M, K, device=device)
    residual = torch.randn(M, N, device=device).to(torch.bfloat16)
    exact = x.double() @ weight.values.double().T.to(device) + residual.double()

    print(f"{M} x {N} x {K} on {device}")
    for format, most in (("bf16", 0.01), ("fp8", 0.04)):
        out = project(format, weight, x, residual)
        y, sumsq = out["out"].double(), out["sumsq_out"].double()
        error = float((y - exact).norm() / exact.norm())
        # Row factors are computed from the values as stored, so that whoever reads y agrees.
        drift = float((sumsq.sum(1) - y.square().sum(1)).abs().max() / sumsq.sum(1).max())
        print(
            f"{format:<5} error {error:.1e} against unquantised float64, sums of squares {drift:.0e}"
        )
        assert error < most
        assert drift < 1e-6


if __name__ == "__main__":
    main()
