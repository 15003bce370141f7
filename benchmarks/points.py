"""The measurements of table ``gemm``, each once, with the rates that follow from them.

A row of the table repeats its peers beside each format and accumulation of ours; here a candidate
stands with the operands and the accumulation that it has itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from statistics import median
from typing import Any

from benchmarks.floors import BYTES, Gemm, peak_at
from benchmarks.table import label
from epicute.errors import require

__all__ = ["CANDIDATES", "Point", "median_mhz", "points"]

CANDIDATES = {
    "cublas-bf16": ("cublas-bf16", "bf16", "fast"),
    "quack-gemm": ("quack-gemm", "bf16", "fast"),
    "ours-bf16": ("ours", "bf16", "fast"),
    "scaled-mm-fast": ("scaled-mm-fast", "fp8", "fast"),
    "scaled-mm-precise": ("scaled-mm-precise", "fp8", "precise"),
}
"""Peer in the table → candidate, type of its operands, its accumulation."""


@dataclass(frozen=True)
class Point:
    """One candidate on one product.

    Attributes:
        product: shape, layer and sizes in words.
        candidate: ``ours`` or a peer.
        accumulate: how its products are added.
        size: sizes and operands of the product.
        us: time of a call.
        mhz: SM clock meanwhile, where it was read.
        watts: power meanwhile, where it was read.
    """

    product: str
    candidate: str
    accumulate: str
    size: Gemm
    us: float
    mhz: float | None = None
    watts: float | None = None

    @property
    def weights(self) -> str:
        """Type of both operands."""
        return self.size.weights

    @property
    def bytes(self) -> int:
        """Bytes that must move: operands read once, a BF16 result written once."""
        return self.size.input_bytes + self.size.M * self.size.N * BYTES["bf16"]

    @property
    def intensity(self) -> float:
        """FLOP per byte that must move."""
        return self.size.flops / self.bytes

    @property
    def rate(self) -> float:
        """FLOP/s reached."""
        return self.size.flops / self.us * 1e6

    @property
    def share(self) -> float | None:
        """``rate`` over the tensor peak at the clock that was read."""
        return None if self.mhz is None else self.rate / peak_at(self.weights, self.mhz)


def points(table: Mapping[str, Any]) -> list[Point]:
    """Every measurement of table ``gemm``, in its order; one that rows share is taken once."""
    found: dict[tuple[str, str, str, str], Point] = {}
    for row in table["rows"]:
        for point in _of(row):
            key = (point.product, point.candidate, point.weights, point.accumulate)
            found.setdefault(key, point)
    return list(found.values())


def _of(row: Mapping[str, Any]) -> Iterator[Point]:
    case = row["case"]
    product = label({key: case[key] for key in ("shape", "layer", "M", "N", "K") if key in case})
    clocks, watts = row.get("clocks_mhz", {}), row.get("watts", {})
    for name, us in {"ours": row["ours_us"], **row["peers_us"]}.items():
        if us is None:
            continue
        candidate, weights, accumulate = _candidate(name, case)
        size = Gemm(case["M"], case["N"], case["K"], weights)
        sensed = clocks.get(name), watts.get(name)
        yield Point(product, candidate, accumulate, size, us, *sensed)


def _candidate(name: str, case: Mapping[str, Any]) -> tuple[str, str, str]:
    if name == "ours":
        return name, case["weights"], case["accumulate"]
    require(name in CANDIDATES, "peer", repr(name), f"one of {', '.join(CANDIDATES)}", "add it")
    return CANDIDATES[name]


def median_mhz(found: list[Point]) -> float | None:
    """Median of the clocks that were read, None of none."""
    clocks = [point.mhz for point in found if point.mhz is not None]
    return median(clocks) if clocks else None
