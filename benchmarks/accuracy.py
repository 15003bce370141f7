"""Table ``accuracy``: what FP8 accumulation does to a product, ours and torch._scaled_mm's, fast and
precise, over K.

Hopper's tensor core adds float8 products with 13 fraction bits and truncates each; operands with a
mean make every truncation err in the same direction. Nothing is timed: rows hold ``error``, ours,
and ``errors``, the peers'.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import epicute
from benchmarks.check import Error, checker
from benchmarks.data import exactly, rows_of
from benchmarks.harness import Options, Session, fill
from benchmarks.provenance import Provenance
from benchmarks.table import Row, Table
from benchmarks.timing import Run, Timer
from epicute.epilogues import Dequantize, Store
from epicute.gemm import GemmKernel, kernel_for
from epicute.weights import Quantized

__all__ = [
    "DEPTHS",
    "FLOOR",
    "MEANS",
    "PAPER",
    "PROTOCOL",
    "Product",
    "kernels",
    "measure",
    "table",
]

PAPER = "none: how the tensor core adds is the card's, and the way around it the library's"
PROTOCOL = (
    "x (M, K) and W (N, K) of 0.5·N(0, 1) + mean, rounded to e4m3 as they are (one scale per tensor, "
    "1), the product stored in float32; error: against float64 of the same codes on {rows} rows"
)
FLOOR = "none (0): nothing is timed"

M, N = 256, 512
DEPTHS = (1024, 4096, 16384, 65536)
"""K."""

MEANS = (0.0, 0.5)
"""Of both operands."""

FP8 = torch.float8_e4m3fn
EPILOGUE = Dequantize(activation=None, weight="tensor") >> Store(torch.float32)
ACCUMULATE = ("fast", "precise")
PEERS = ("scaled-mm-fast", "scaled-mm-precise")

COMPUTED = Error(0.5, 0.5)
"""Beyond any accumulation's error: something else was computed."""

ALLOWED = {"fast": COMPUTED, "precise": Error(1e-3, 2e-3)}
"""What ours may be off by: precise adds float32 sums of 128 products, whatever K."""


@dataclass
class Product:
    """D (M, N) = x Wᵀ of e4m3 operands over K, both with ``mean``."""

    K: int
    mean: float
    options: Options

    @property
    def case(self) -> dict[str, Any]:
        """The fields of the table's case that every row of it has."""
        variant = f"mean {self.mean:g}"
        return {"M": M, "N": N, "K": self.K, "weights": "fp8", "out": "f32", "variant": variant}

    @cached_property
    def codes(self) -> tuple[Tensor, Tensor]:
        """x (M, K) and W (N, K), e4m3."""
        device = self.options.device
        random = torch.Generator(device).manual_seed(0)
        x, w = (torch.randn(n, self.K, device=device, generator=random) for n in (M, N))
        return (0.5 * x + self.mean).to(FP8), (0.5 * w + self.mean).to(FP8)

    @cached_property
    def scale(self) -> Tensor:
        """(1,), 1: of either operand."""
        return torch.ones(1, device=self.options.device)

    @cached_property
    def rows(self) -> Tensor:
        """Rows that are checked, evenly apart, the first and the last among them."""
        count = min(self.options.check_rows, M)
        return torch.linspace(0, M - 1, count, device=self.options.device).long()

    def exact(self) -> Tensor:
        """(rows, N) float64 of the checked rows."""
        x, w = self.codes
        return exactly(rows_of(x, self.rows)) @ exactly(w).T

    def poisoned(self) -> Tensor:
        """(M, N) float32 of NaN, so that an element that nobody writes is seen."""
        return torch.full((M, N), float("nan"), device=self.options.device)


def ours(product: Product, accumulate: str) -> Run:
    """epicute with a float32 store."""
    x, w = product.codes
    packed = Quantized("fp8", w, product.scale).pack(EPILOGUE.row_order(N))
    plan = epicute.plan(EPILOGUE, packed, x_dtype=FP8, accumulate=accumulate)
    out = product.poisoned()

    def run(copy: int) -> dict[str, Tensor]:
        plan.run(x, packed, out=out)
        return {"out": out}

    return run


def scaled_mm(product: Product, fast: bool) -> Run:
    """torch._scaled_mm with one scale per operand, float32 out."""
    x, w = product.codes
    out = product.poisoned()

    def run(copy: int) -> dict[str, Tensor]:
        torch._scaled_mm(
            x,
            w.t(),
            scale_a=product.scale,
            scale_b=product.scale,
            out_dtype=torch.float32,
            use_fast_accum=fast,
            out=out,
        )
        return {"out": out}

    return run


def measure(product: Product, session: Session) -> list[Row]:
    """The rows of one product, one per accumulation of ours, with the errors of the same peers."""
    exact = {"out": product.exact()}

    def within(allowed: Error) -> Any:
        return checker(exact, lambda _, out: out[product.rows], lambda _: allowed)

    for accumulate in ACCUMULATE:
        check = within(ALLOWED[accumulate])
        session.add(f"ours-{accumulate}", partial(ours, product, accumulate), check)
    for name in PEERS:
        build = partial(scaled_mm, product, fast=name.endswith("fast"))
        session.add(name, build, within(COMPUTED))
    return [row(product, accumulate, session) for accumulate in ACCUMULATE]


def row(product: Product, accumulate: str, session: Session) -> Row:
    """The product's row for one accumulation of ours."""
    names = {"ours": f"ours-{accumulate}", **{name: name for name in PEERS}}
    errors = {n: session.errors[c].json() for n, c in names.items() if c in session.errors}
    failed = {n: session.failed[c] for n, c in names.items() if c in session.failed}
    case = {**product.case, "accumulate": accumulate}
    return Row(case, None, 0.0, error=errors.pop("ours", None), failed=failed, errors=errors)


def kernels(options: Options) -> Iterator[GemmKernel]:
    """Every kernel the table runs."""
    for depth in DEPTHS:
        for accumulate in ACCUMULATE:
            yield kernel_for(EPILOGUE, n=N, k=depth, dtype=FP8, accumulate=accumulate)


def table(options: Options, timer: Timer, source: Provenance, folder: Path) -> Table:
    """Measure and write ``accuracy.json`` into ``folder``; shapes and layers do not matter."""
    protocol = PROTOCOL.format(rows=options.check_rows)
    found = Table("accuracy", PAPER, protocol, FLOOR, source, folder / "accuracy.json")
    products = (Product(depth, mean, options) for depth in DEPTHS for mean in MEANS)
    return fill(found, products, measure, timer, options.rounds)
