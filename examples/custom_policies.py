"""Four policies of one's own: an elementwise, a pairwise, a reducing one and a tap, each with an operand.

    python examples/custom_policies.py

Needs hypothesis: pip install -e '.[test]' in the checkout.

Every policy has its formula in float64 beside it. ``check`` draws cases and compares the two; the
same bodies then run in a composition on the CPU, and are compiled for Hopper, GPU or not. Where
there is a GPU the fused kernel is checked as well.
"""

from __future__ import annotations

import sys

import torch
from torch import Tensor

from epicute import (
    Composition,
    Counter,
    Dequantize,
    Maximum,
    RowVector,
    Scalar,
    Store,
    Target,
    Weight,
    kernel_for,
    pairwise,
    policy,
    reducing,
    tap,
)

# --- the bodies: straight-line arithmetic on values; constants are fields, data are operands ---


@policy(cap=RowVector)
def soft_cap(x, ctx):
    """Squash every column to its own (-cap, cap):  cap * tanh(x / cap)."""
    return ctx.cap * ctx.tanh(x / ctx.cap)


@pairwise(up_scale=RowVector)
def squared_relu_glu(gate, up, ctx):
    """relu(gate)² * (up * up_scale); the first half of the columns is the gate."""
    positive = ctx.max(gate, 0.0)
    return positive * positive * (up * ctx.up_scale)


@reducing(over=64, group_gain=RowVector)
def group_norm(x, ctx, *, eps: float = 1e-5):
    """RMSNorm over each 64 columns:  x / sqrt(mean(x²) + eps) * group_gain."""
    return x * ctx.rsqrt(ctx.mean(x * x) + eps) * ctx.group_gain


@tap(threshold=Scalar, outliers=Counter, peak=Maximum)
def watch_outliers(x, ctx):
    """Count |x| > threshold and keep the largest |x|; x passes on."""
    size = abs(x)
    ctx.count("outliers", size > ctx.threshold)
    ctx.record_max("peak", size)


# --- the same in float64 PyTorch, operands by name ---


def soft_cap_reference(x: Tensor, cap: Tensor) -> Tensor:
    """cap * tanh(x / cap)."""
    return cap * torch.tanh(x / cap)


def squared_relu_glu_reference(x: Tensor, up_scale: Tensor) -> Tensor:
    """relu(gate)² * up * up_scale."""
    gate, up = x.chunk(2, dim=1)
    return gate.clamp(min=0.0) ** 2 * up * up_scale


def group_norm_reference(x: Tensor, group_gain: Tensor, eps: float = 1e-5) -> Tensor:
    """x / sqrt(mean over 64 columns of x² + eps) * group_gain."""
    groups = x.reshape(len(x), x.shape[1] // 64, 64)
    normed = groups / (groups.square().mean(dim=2, keepdim=True) + eps).sqrt()
    return normed.reshape(x.shape) * group_gain


def watch_outliers_reference(
    x: Tensor, threshold: Tensor, outliers: Tensor, peak: Tensor
) -> dict[str, Tensor]:
    """Totals go on from what they were."""
    finite = x[x.isfinite()].abs()
    return {
        "outliers": outliers + (x.abs() > threshold).sum(),
        "peak": torch.cat([peak, finite]).max(),
    }


def fused() -> Composition:
    """One epilogue of all four: what a gated projection with a capped, normed output would have."""
    return (
        Dequantize("tensor", "column")
        >> squared_relu_glu()
        >> group_norm()
        >> soft_cap()
        >> watch_outliers()
        >> Store(torch.bfloat16)
    )


def check_all(examples: int = 50, device: str = "cpu") -> None:
    """Property-test each policy against its reference; prints the worst error of each."""
    from hypothesis import strategies as st

    from epicute.testing import Ranges, check

    caps = {"cap": lambda shape: st.just(torch.rand(shape) * 30 + 1)}
    check(
        soft_cap(),
        soft_cap_reference,
        examples=examples,
        device=device,
        ranges=Ranges(operands=caps),
    )
    check(squared_relu_glu(), squared_relu_glu_reference, examples=examples, device=device)
    check(group_norm(), group_norm_reference, examples=examples, device=device)
    check(watch_outliers(), watch_outliers_reference, examples=examples, device=device)


def evaluate(rows: int = 16, columns: int = 512, depth: int = 256) -> dict[str, Tensor]:
    """Run the composition on the CPU on an FP8 product, operands in logical order."""
    generator = torch.Generator().manual_seed(0)
    composition = fused()
    weight = Weight(torch.randn(columns, depth, generator=generator) / depth**0.5)
    packed = weight.quantize("fp8").pack(composition.row_order(columns))
    x = torch.randn(rows, depth, generator=generator).to(torch.float8_e4m3fn)
    acc = x.float() @ packed.unpack().codes.float().T
    half = columns // 2
    return composition.evaluate(
        acc,
        scale=torch.ones(1),
        weight_scale=packed.scale,
        up_scale=torch.full((half,), 2.0),
        group_gain=torch.ones(half),
        cap=torch.full((half,), 3.0),
        threshold=torch.full((1,), 2.5),
    )


def main() -> None:
    """Draw, check, evaluate, compile."""
    print(fused(), end="\n\n")
    check_all(device="cuda" if torch.cuda.is_available() else "cpu")
    out = evaluate()
    print(f"\nout {tuple(out['out'].shape)}, largest |x| {float(out['peak']):.3f}")
    print(f"above the threshold: {int(out['outliers'])} of {out['out'].numel()}\n")
    if sys.platform != "linux":
        print("The compiler of the kernels exists for Linux alone.")
        return
    from epicute.jit import compile

    kernel = kernel_for(fused(), n=512, k=256, dtype=torch.float8_e4m3fn, target=Target("sm_90a"))
    print(compile(kernel).report)


if __name__ == "__main__":
    main()
