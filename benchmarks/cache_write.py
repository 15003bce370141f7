"""Table ``cache-write``: prefill rows of keys and values to QK4PV8 pages, beside a copy of as many bytes.

Rows of one request, packed, with adjacent slots; BF16, heads of 128 channels, pages of 128 tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.check import Error, WrongResult
from benchmarks.data import clones
from benchmarks.floors import BANDWIDTH
from benchmarks.harness import Options, Session, fill
from benchmarks.ours import once
from benchmarks.provenance import Provenance
from benchmarks.table import Row, Table
from benchmarks.timing import Run, Timer, copies_for
from epicute.jit import Target
from epicute.kv.qk4pv8 import Memory, QK4PV8Cache
from epicute.kv.qk4pv8_write import CacheWriteKernel, plan_cache_write
from epicute.layouts.qk4pv8 import QK4PV8Page
from epicute.quant.smoothing import Means

__all__ = ["FLOOR", "PAPER", "CacheWrite", "cases", "kernels", "measure", "table"]

PAPER = "MpFA, sections 4.2, 4.3 and 6: the pass that centres, quantises and writes the cache"

FLOOR = "the bytes of keys and values, and of the pages and ΔS written, over 4.8 TB/s"

HEADS = ((32, 8), (40, 8))
HEAD_DIM, PAGE = 128, 128
LENGTHS = (4096, 16384, 65536)
TERMS = {"none": 0, "static": 1}


@dataclass
class CacheWrite:
    """Rows of one request; keys N(1, 1), values N(0, 1).

    Attributes:
        rows: T. heads, kv_heads: of queries, and of keys and values.
        smoothing: ``none``, or ``static`` with one term of ΔS.
        copies: of keys, values and pages.
    """

    rows: int
    heads: int
    kv_heads: int
    smoothing: str
    options: Options
    copies: int = 0
    seed: int = 0
    random: torch.Generator = field(init=False)

    def __post_init__(self) -> None:
        self.copies = self.copies or copies_for(self.bytes)
        self.random = torch.Generator(self.options.device).manual_seed(self.seed)

    @property
    def case(self) -> dict[str, Any]:
        """The fields of the table's case."""
        heads = {"heads": self.heads, "kv_heads": self.kv_heads, "head_dim": HEAD_DIM}
        return {
            "cache": "qk4pv8",
            "M": self.rows,
            **heads,
            "page": PAGE,
            "smoothing": self.smoothing,
        }

    @property
    def bytes(self) -> int:
        """Read and written."""
        read = 2 * 2 * HEAD_DIM
        written = HEAD_DIM // 2 + HEAD_DIM // 16 + HEAD_DIM
        side = 2 * self.heads * TERMS[self.smoothing]
        return self.rows * (self.kv_heads * (read + written) + side)

    @property
    def cache(self) -> QK4PV8Cache:
        """Of as many pages as the rows take."""
        page = QK4PV8Page(PAGE, HEAD_DIM)
        pages = -(-self.rows // PAGE)
        return QK4PV8Cache(pages, self.kv_heads, self.heads, page, TERMS[self.smoothing])

    def _normal(self, heads: int, mean: float) -> Tensor:
        size = (self.rows, heads, HEAD_DIM)
        made = torch.randn(size, device=self.options.device, generator=self.random)
        return (made + mean).to(torch.bfloat16)

    @cached_property
    def keys(self) -> list[Tensor]:
        """(T, kv_heads, 128) bfloat16, one per copy."""
        return clones(self._normal(self.kv_heads, 1.0), self.copies)

    @cached_property
    def values(self) -> list[Tensor]:
        """(T, kv_heads, 128) bfloat16, one per copy."""
        return clones(self._normal(self.kv_heads, 0.0), self.copies)

    @cached_property
    def means(self) -> Means | None:
        """Static means, where keys are smoothed."""
        if self.smoothing == "none":
            return None
        q = self._normal(self.heads, 1.0)[: 4 * PAGE].float().mean(0)[None]
        return Means("static", q, self.keys[0].float().mean(0)[None])

    @cached_property
    def slots(self) -> Tensor:
        """(T,) int64, adjacent."""
        return torch.arange(self.rows, device=self.options.device)

    def check(self, memory: Memory) -> Error:
        """Bit for bit the contract's bytes, on some rows."""
        some = torch.randperm(self.rows, generator=self.random, device=self.options.device)
        some = some[: self.options.check_rows]
        found = self.cache.fetch(memory, some)
        wanted = self.cache.quantize(self.keys[0][some], self.values[0][some], self.means)
        for name in ("codes", "scales", "values"):
            a, b = (getattr(x, name).view(torch.uint8) for x in (found, wanted))
            if not torch.equal(a, b):
                raise WrongResult(f"{name}: {int((a != b).sum())} bytes differ")
        if found.delta is None or wanted.delta is None:
            return Error(0.0, 0.0)
        a, b = (x.delta.double().sum(-1) for x in (found, wanted))  # type: ignore[union-attr]
        error = ((a - b).norm() / b.norm()).item()
        if not error <= 2.0**-8:
            raise WrongResult(f"delta: {error}")
        return Error(error, error)


def ours(found: CacheWrite) -> Run:
    """The writer."""
    plan = plan_cache_write(found.cache, counted=False)
    memories = [found.cache.allocate(found.options.device) for _ in range(found.copies)]

    def run(copy: int) -> dict[str, Any]:
        memory = memories[copy]
        plan.run(memory, found.keys[copy], found.values[copy], means=found.means, slots=found.slots)
        return {"memory": memory}

    return run


def copy(found: CacheWrite) -> Run:
    """PyTorch's copy of half of the bytes, which reads and writes as many."""
    size, device = found.bytes // 2, found.options.device
    sources = [torch.zeros(size, dtype=torch.uint8, device=device) for _ in range(found.copies)]
    targets = [torch.empty_like(x) for x in sources]

    def run(number: int) -> dict[str, Tensor]:
        targets[number].copy_(sources[number])
        return {"out": targets[number]}

    return run


PEERS: dict[str, Callable[[CacheWrite], Run]] = {"copy": copy}


def measure(found: CacheWrite, session: Session) -> list[Row]:
    """The row of one case."""
    session.add("ours", partial(ours, found), lambda run: found.check(run(0)["memory"]))  # type: ignore[arg-type]
    for name, build in PEERS.items():
        session.add(name, partial(build, found))
    floor = found.bytes / BANDWIDTH * 1e6
    session.measure(found.copies, floor)
    return [session.row(found.case, "ours", {name: name for name in PEERS}, floor)]


def cases(options: Options) -> Iterator[CacheWrite]:
    """Both ratios of heads, without and with smoothing."""
    for heads, kv_heads in HEADS:
        for smoothing in TERMS:
            for length in options.lengths or LENGTHS:
                yield CacheWrite(length, heads, kv_heads, smoothing, options)


def kernels(options: Options) -> Iterator[Any]:
    """Every kernel the table runs, each once."""
    target = Target.detect()
    plans = (plan_cache_write(c.cache, counted=False, device="cpu") for c in cases(options))
    return once(CacheWriteKernel(plan.spec, target) for plan in plans)


def table(options: Options, timer: Timer, source: Provenance, folder: Path) -> Table:
    """Measure every case and write ``cache-write.json`` into ``folder``."""
    path = folder / "cache-write.json"
    found = Table("cache-write", PAPER, options.protocol, FLOOR, source, path)
    return fill(found, cases(options), measure, timer, options.rounds)
