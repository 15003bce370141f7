"""epicute as a candidate, and its kernels compiled beforehand, side by side on all cores."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

import epicute
from benchmarks.data import Layer
from benchmarks.timing import Run
from epicute.epilogues import Composition, Dequantize, Policy, Store, compose
from epicute.errors import EpicuteError
from epicute.gemm import GemmKernel, Schedule, kernel_for
from epicute.jit.pool import precompile
from epicute.weights import Packed

__all__ = ["compile_all", "kernel", "once", "ours", "plain_epilogue"]

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
    schedule: Schedule | None = None,
    packed: list[Packed] | None = None,
) -> Run:
    """Plans the epilogue once, for the layer's rows, then launches any copy with its operands.

    Args:
        layer: sizes and weights.
        epilogue: a policy, or a composition of some.
        weights: format of the packed weight.
        x: activations, one per copy.
        operands: makes the operands of one copy, by name, poisoned outputs among them.
        outputs: the names among them that a run returns.
        accumulate: how float8 products are added.
        schedule: by default the one that ``choose`` gives, or a narrower one where that spills.
        packed: weights, one per copy, where they are packed already.
    """
    composition = compose(epilogue)
    if packed is None:
        packed = layer.packed(composition, weights)
    plan = epicute.plan(
        composition,
        packed[0],
        x_dtype=x[0].dtype,
        schedule=schedule,
        expected_m=layer.M,
        accumulate=accumulate,
    )
    bound = [operands() for _ in range(layer.copies)]
    returned = [{name: given[name] for name in outputs} for given in bound]

    def run(copy: int) -> dict[str, Tensor]:
        plan.run(x[copy], packed[copy], **bound[copy])
        return returned[copy]

    return run


def kernel(
    layer: Layer, epilogue: Policy | Composition, weights: str, accumulate: str = "fast"
) -> GemmKernel:
    """The kernel that ``ours`` plans for these, of the schedule that ``choose`` gives."""
    return kernel_for(
        epilogue,
        n=layer.N,
        k=layer.K,
        dtype=DTYPES[weights],
        expected_m=layer.M,
        accumulate=accumulate,
    )


def once(kernels: Iterable[GemmKernel]) -> Iterator[GemmKernel]:
    """``kernels`` without repeats: the same code may serve several M."""
    seen: set[str] = set()
    for found in kernels:
        if found.key.digest not in seen:
            seen.add(found.key.digest)
            yield found


def compile_all(kernels: Iterable[GemmKernel]) -> None:
    """Compile into the object cache; a kernel that does not is left for its candidate to report."""
    start = time.perf_counter()
    wanted: list[Any] = list(kernels)
    try:
        precompile(wanted)
    except EpicuteError as error:
        print(f"precompile: {error}")
    print(f"{len(wanted)} kernels ready in {time.perf_counter() - start:.0f} s", flush=True)
