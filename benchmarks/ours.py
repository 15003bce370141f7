"""epicute as a candidate, and its kernels compiled beforehand, side by side on all cores."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

import epicute
from benchmarks.data import Layer
from benchmarks.timing import Run
from epicute.epilogues import Composition, Dequantize, Policy, Store, compose
from epicute.errors import EpicuteError
from epicute.gemm import GemmKernel, kernel_for
from epicute.jit.pool import precompile

__all__ = ["compile_all", "kernel", "ours", "plain_epilogue"]

DTYPES = {"bf16": torch.bfloat16, "fp8": torch.float8_e4m3fn}


def plain_epilogue(weights: str, activation: str) -> Composition:
    """A BF16 store, behind scales where FP8: of ``activation`` one per ``row`` or ``tensor``."""
    store = Store(torch.bfloat16)
    if weights == "bf16":
        return compose(store)
    return Dequantize(activation=activation) >> store


def ours(
    layer: Layer,
    epilogue: Policy | Composition,
    weights: str,
    x: list[Tensor],
    operands: Callable[[], dict[str, Tensor]],
    outputs: tuple[str, ...],
    accumulate: str = "fast",
) -> Run:
    """Plans the epilogue once, then launches any copy with operands of its own.

    Args:
        layer: sizes and weights.
        epilogue: a policy, or a composition of some.
        weights: format of the packed weight.
        x: activations, one per copy.
        operands: makes the operands of one copy, by name, poisoned outputs among them.
        outputs: the names among them that a run returns.
        accumulate: how float8 products are added.
    """
    composition = compose(epilogue)
    packed = layer.packed(composition, weights)
    plan = epicute.plan(composition, packed[0], x_dtype=x[0].dtype, accumulate=accumulate)
    bound = [operands() for _ in range(layer.copies)]
    returned = [{name: given[name] for name in outputs} for given in bound]

    def run(copy: int) -> dict[str, Tensor]:
        plan.run(x[copy], packed[copy], **bound[copy])
        return returned[copy]

    return run


def kernel(
    layer: Layer, epilogue: Policy | Composition, weights: str, accumulate: str = "fast"
) -> GemmKernel:
    """The kernel that ``ours`` plans for these."""
    dtype = DTYPES[weights]
    return kernel_for(epilogue, n=layer.N, k=layer.K, dtype=dtype, accumulate=accumulate)


def compile_all(kernels: Iterable[GemmKernel]) -> None:
    """Compile into the object cache; a kernel that does not is left for its candidate to report."""
    start = time.perf_counter()
    wanted: list[Any] = list(kernels)
    try:
        precompile(wanted)
    except EpicuteError as error:
        print(f"precompile: {error}")
    print(f"{len(wanted)} kernels ready in {time.perf_counter() - start:.0f} s", flush=True)
