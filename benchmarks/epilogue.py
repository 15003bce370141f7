"""Table ``epilogue``: each projection with its whole epilogue, beside the plain store and
torch.compile.

``ours-plain`` is epicute's product of the same shape and format with nothing but scales and a BF16
store: what the fused epilogue costs, or saves, is the difference. The compiled peers do the same
operation, in FP8 or in BF16.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from benchmarks import floors
from benchmarks.check import checker
from benchmarks.data import Layer, layers
from benchmarks.harness import Options, Session, fill
from benchmarks.ours import kernel, once, ours, plain_epilogue
from benchmarks.peers import compiled
from benchmarks.projections import Projection, projection
from benchmarks.provenance import Provenance
from benchmarks.table import Row, Table
from benchmarks.timing import Run, Timer
from epicute.gemm import GemmKernel

__all__ = ["PAPER", "kernels", "measure", "table"]

PAPER = (
    "FuTransformer (arXiv 2610.23796), sections 3.2.1 to 3.2.3 and table 2: projections with their "
    "epilogues"
)


def measure(layer: Layer, session: Session) -> list[Row]:
    """The rows of one layer, one per format of weights: all candidates share a session."""
    torch._dynamo.reset()  # its cache is per function and full after eight shapes
    found = projection(layer)
    for weights in ("fp8", "bf16"):
        y = product(layer, weights)
        exact = checker(found.exact(y), found.view)
        session.add(f"compile-{weights}", partial(peer, found, weights), exact)
        if weights in found.formats:
            session.add(f"ours-{weights}", partial(fused, found, weights), exact)
            stored = checker({"out": y}, lambda _, tensor: tensor[layer.rows])
            session.add(f"plain-{weights}", partial(plain, layer, weights), stored)
    session.measure(layer.copies, layer.least_us)
    return [row(found, weights, session) for weights in found.formats]


def product(layer: Layer, weights: str) -> Tensor:
    """(rows, N) float64 of the checked rows, dequantised."""
    if weights == "bf16":
        return layer.product(layer.x[0], "bf16")
    codes, scale = layer.x_tensor
    return layer.product(codes[0], "fp8") * scale.double()


def fused(found: Projection, weights: str) -> Run:
    """epicute with the layer's whole epilogue."""
    _, composition = found.composition(weights)
    x, scale = activations(found.layer, weights)
    outputs = found.outputs(weights)
    return ours(
        found.layer, composition, weights, x, lambda: scale | found.operands(weights), outputs
    )


def plain(layer: Layer, weights: str) -> Run:
    """epicute with nothing but scales and a BF16 store."""
    x, scale = activations(layer, weights)

    def operands() -> dict[str, Tensor]:
        return scale | {"out": layer.poisoned(layer.M, layer.N, dtype=torch.bfloat16)}

    return ours(layer, plain_epilogue(weights, "tensor"), weights, x, operands, ("out",))


def kernels(options: Options) -> Iterator[GemmKernel]:
    """Every kernel the table runs, each once."""
    return once(_kernels(options))


def _kernels(options: Options) -> Iterator[GemmKernel]:
    for layer in layers(options):
        found = projection(layer)
        for weights in found.formats:
            yield kernel(layer, found.composition(weights)[1], weights)
            yield kernel(layer, plain_epilogue(weights, "tensor"), weights)


def activations(layer: Layer, weights: str) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Activations of every copy, and the operand that scales them."""
    if weights == "bf16":
        return layer.x, {}
    codes, scale = layer.x_tensor
    return codes, {"scale": scale}


def peer(found: Projection, weights: str) -> Run:
    """torch.compile of the layer's whole epilogue."""
    tail, updated = found.tail(weights), found.updated
    return compiled(found.layer, weights, tail, lambda: found.peer_operands(weights), updated)


def row(found: Projection, weights: str, session: Session) -> Row:
    """The layer's row for one format of weights."""
    layer = found.layer
    text, _ = found.composition(weights)
    case = {
        **layer.case,
        "weights": weights,
        "accumulate": "fast",
        **found.case,
        "composition": text,
    }
    case["out"] = "fp8" if "out_fp8" in found.outputs(weights) else "bf16"
    peers = {"ours-plain": f"plain-{weights}", "compile-bf16": "compile-bf16"}
    if weights == "fp8":
        peers["compile-fp8"] = "compile-fp8"
    floor = floors.Gemm(layer.M, layer.N, layer.K, weights).floor(found.bytes(weights)).us
    return session.row(case, f"ours-{weights}", peers, floor)


def table(options: Options, timer: Timer, source: Provenance, folder: Path) -> Table:
    """Measure every layer and write ``epilogue.json`` into ``folder``."""
    path = folder / "epilogue.json"
    found = Table("epilogue", PAPER, options.protocol, floors.SENTENCE, source, path)
    return fill(found, layers(options), measure, timer, options.rounds)
