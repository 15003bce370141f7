"""Table ``gemm``: the four projections with a plain store, beside cuBLAS and torch._scaled_mm."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from benchmarks import floors, peers
from benchmarks.check import Error, checker
from benchmarks.data import Layer, layers
from benchmarks.harness import Options, Session, fill
from benchmarks.ours import kernel, once, ours, plain_epilogue
from benchmarks.provenance import Provenance
from benchmarks.table import Row, Table
from benchmarks.timing import Run, Timer
from epicute.gemm import GemmKernel

__all__ = ["PAPER", "check", "floor", "kernels", "measure", "table"]

PAPER = (
    "FuTransformer (arXiv 2610.23796), sections 3.2 and 4.1: projection GEMMs of the shapes of "
    "table 1"
)

PEERS = {
    ("bf16", "fast"): ("cublas-bf16", "quack-gemm"),
    ("fp8", "fast"): ("scaled-mm-fast", "scaled-mm-precise", "cublas-bf16", "ours-bf16"),
    ("fp8", "precise"): ("scaled-mm-precise", "scaled-mm-fast", "cublas-bf16", "ours-bf16"),
}
"""Peers by format of the weights and accumulation."""


def measure(layer: Layer, session: Session) -> list[Row]:
    """All rows of one layer: BF16 and FP8 candidates share a session."""
    bf16 = check(layer, "bf16")
    session.add("ours-bf16", partial(plain, layer, "bf16"), bf16)
    session.add("cublas-bf16", partial(peers.cublas, layer), bf16)
    fp8 = check(layer, "fp8")
    session.add("ours-fp8", partial(plain, layer, "fp8"), fp8)
    session.add("ours-fp8-precise", partial(plain, layer, "fp8", "precise"), fp8)
    session.add("scaled-mm-fast", partial(peers.scaled_mm, layer, fast=True), fp8)
    session.add("scaled-mm-precise", partial(peers.scaled_mm, layer, fast=False), fp8)
    if layer.options.quack:
        # Last: it changes the DSL, and ours are compiled and loaded by now.
        session.add("quack-gemm", partial(peers.quack_gemm, layer), bf16)
    session.measure(layer.copies, layer.least_us)
    return [row(layer, *variant, session) for variant in PEERS]


def check(layer: Layer, weights: str) -> Callable[[Run], Error]:
    """Compares ``out`` with the product in float64."""
    if weights == "bf16":
        exact = layer.product(layer.x[0], "bf16")
    else:
        codes, scale = layer.x_rows
        exact = layer.product(codes[0], "fp8") * scale[layer.rows, None].double()
    return checker({"out": exact}, lambda _, tensor: tensor[layer.rows])


def floor(layer: Layer, weights: str) -> float:
    """The floor of the product with its store, µs."""
    size = floors.Gemm(layer.M, layer.N, layer.K, weights)
    return size.floor(layer.M * layer.N * floors.BYTES["bf16"]).us


def plain(layer: Layer, weights: str, accumulate: str = "fast") -> Run:
    """epicute with nothing but scales and a BF16 store behind the product."""
    x, scale = (layer.x, None) if weights == "bf16" else layer.x_rows

    def operands() -> dict[str, Tensor]:
        out = {"out": layer.poisoned(layer.M, layer.N, dtype=torch.bfloat16)}
        return out if scale is None else out | {"scale": scale}

    epilogue = plain_epilogue(weights, "row")
    return ours(layer, epilogue, weights, x, operands, ("out",), accumulate)


def kernels(options: Options) -> Iterator[GemmKernel]:
    """Every kernel the table runs, each once."""
    return once(
        kernel(layer, plain_epilogue(weights, "row"), weights, accumulate)
        for layer in layers(options)
        for weights, accumulate in PEERS
    )


def row(layer: Layer, weights: str, accumulate: str, session: Session) -> Row:
    """The layer's row for one format of weights and accumulation."""
    case = {**layer.case, "weights": weights, "accumulate": accumulate, "out": "bf16"}
    names = {name: name for name in PEERS[weights, accumulate]}
    ours_name = f"ours-{weights}-precise" if accumulate == "precise" else f"ours-{weights}"
    return session.row(case, ours_name, names, floor(layer, weights))


def table(options: Options, timer: Timer, source: Provenance, folder: Path) -> Table:
    """Measure every layer and write ``gemm.json`` into ``folder``."""
    path = folder / "gemm.json"
    found = Table("gemm", PAPER, options.protocol, floors.SENTENCE, source, path)
    return fill(found, layers(options), measure, timer, options.rounds)
