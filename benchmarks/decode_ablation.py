"""Table ``decode-ablation``: the decode step with one thing of it replaced, beside the step as it is.

INT4 weights over an INT4 cache, a row for each of FuTransformer's cases; ``benchmarks.ablations.step`` says what its
peers are. And (``variant`` ``projections``) the four BF16 projections of a layer, each with a plain store, one after
the other on inputs of their own, beside a kernel that streams row-major weights (``skinny``).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks import few_rows
from benchmarks.ablations.skinny import BUCKETS, SkinnyKernel, plan_skinny
from benchmarks.ablations.step import FORMAT, AblatedStep, kernels_of_variant, variants_of
from benchmarks.check import checker
from benchmarks.data import clones
from benchmarks.decode_layer_ours import Layers, OurStep, kernels_of
from benchmarks.decode_layer_step import Step, step_bytes
from benchmarks.floors import BANDWIDTH
from benchmarks.harness import LAYERS, Options, Session, fill
from benchmarks.ours import once
from benchmarks.provenance import Provenance
from benchmarks.table import Row, Table
from benchmarks.timing import Run, Timer, copies_for
from epicute.jit import DEFAULT_TARGET
from epicute.models.shapes import SHAPES, LayerShape, projections

__all__ = [
    "CASES",
    "FLOOR",
    "PAPER",
    "PROTOCOL",
    "Case",
    "Projections",
    "cases",
    "columns",
    "kernels",
    "measure",
    "summary",
    "table",
]

PAPER = (
    "FuTransformer (arXiv 2610.23796), section 4.6 and table 7, and the rotation of section 3.3.3: design ablation of "
    "the decode block"
)

PROTOCOL = (
    ". A call is a step of one layer of a model, or its four projections; at least four layers in turn, each with "
    "its own weights and cache. Requests have pages of 64 tokens of their own in a random order; INT4 weights have "
    "groups of 128, the INT4 cache is rotated. A peer is our step with one thing replaced: table, keys and values "
    "by a table of 256 byte codes; natural-k, keys by the table into a tile in shared memory and back; "
    "natural-k-nibbles, that nibble by nibble without a table, values too; row-kernel, the new row quantised by a "
    "kernel before attention; registers, codes made numbers where ours makes integers of activations; bias-mma, "
    "codes with their offset, which a second product for each takes back (by mma.sync where ours takes wgmma); "
    "fma-attention, attention without tensor cores; no-rotation, cached rows as they are. skinny: BF16 projections "
    "from row-major weights. All are checked as ours is, in result, attention's output and stored row"
)

FLOOR = (
    "the bytes of packed weights with their scales and of gains that are operands, of cached keys and values with "
    "theirs, of x and of the result, over 4.8 TB/s"
)

CASES: tuple[tuple[str, int, int], ...] = (
    ("8B", 32, 4096),
    ("8B", 1, 1024),
    ("8B", 8, 1024),
    ("70B", 1, 1024),
    ("70B", 32, 4096),
    ("70B", 8, 1024),
)
"""Shape, requests and context of steps, those that show most first."""

PROJECTIONS: tuple[tuple[str, int], ...] = (("8B", 1), ("8B", 8), ("8B", 32))
"""Shape and rows of x of BF16 projections."""

SKINNY = "skinny"
PLAIN = few_rows.composed("bf16", few_rows.STORE)


@dataclass(frozen=True)
class Case:
    """A step; it holds no data. ``copies``: of the layer, see ``Step``."""

    shape: LayerShape
    batch: int
    context: int
    options: Options
    copies: int = 0

    @property
    def case(self) -> dict[str, Any]:
        """The fields of the table's case."""
        shape = self.shape
        heads = {"heads": shape.heads, "kv_heads": shape.kv_heads, "head_dim": shape.head_dim}
        sizes = {"shape": shape.name, "batch": self.batch, "context": self.context}
        return {**sizes, **heads, "weights": FORMAT, "cache": FORMAT}

    @property
    def floor_us(self) -> float:
        """See FLOOR."""
        moved = step_bytes(self.shape, self.batch, self.context, FORMAT, FORMAT)
        return moved / BANDWIDTH * 1e6

    @cached_property
    def variants(self) -> tuple[str, ...]:
        """What is beside ours."""
        return variants_of(self.shape, self.batch)

    def kernels(self) -> Iterator[Any]:
        """All that is compiled for it."""
        yield from kernels_of(self.shape, self.batch, FORMAT, FORMAT)
        for variant in self.variants:
            yield from kernels_of_variant(self.shape, self.batch, variant)

    def measure(self, session: Session) -> Row:
        """Its row."""
        step = Step(self.shape, self.batch, self.context, self.options, self.copies)
        layers = Layers(step)
        mine = OurStep(layers, FORMAT, FORMAT)
        session.add("ours", mine.runner, mine.check)
        for name in self.variants:
            other = AblatedStep(layers, FORMAT, FORMAT, variant=name)
            session.add(name, other.runner, other.check)
        session.measure(step.copies, self.floor_us)
        return session.row(self.case, "ours", {n: n for n in self.variants}, self.floor_us)


@dataclass(frozen=True)
class Projections:
    """The four BF16 projections of a layer, with plain stores. ``copies``: of everything."""

    shape: LayerShape
    M: int
    options: Options
    copies: int = 0

    @property
    def case(self) -> dict[str, Any]:
        """The fields of the table's case."""
        found = {"shape": self.shape.name, "M": self.M, "weights": "bf16"}
        return {**found, "variant": "projections"}

    @property
    def bytes(self) -> int:
        """Read and written."""
        found = 0
        for n, k in projections(self.shape).values():
            records = few_rows.records_of(PLAIN, "bf16", n, k)
            found += records.nbytes + 2 * self.M * (n + k)
        return found

    @property
    def floor_us(self) -> float:
        """See FLOOR."""
        return self.bytes / BANDWIDTH * 1e6

    def kernels(self) -> Iterator[Any]:
        """All that is compiled for it."""
        bucket = next(b for b in BUCKETS if self.M <= b)
        for n, k in projections(self.shape).values():
            yield few_rows.kernel_of(PLAIN, "bf16", n, k, self.M)
            yield SkinnyKernel(n, k, bucket, DEFAULT_TARGET)

    def measure(self, session: Session) -> Row:
        """Its row."""
        copies = self.copies or copies_for(self.bytes)
        given = (self.M, "bf16", self.options, copies)
        parts = {name: few_rows.Few(self.shape, name, *given) for name in LAYERS}
        check = checker({n: part.exact() for n, part in parts.items()}, lambda _, out: out)
        for name, build in (("ours", few_rows.ours), (SKINNY, skinny)):
            session.add(name, partial(one_after_the_other, parts, build), check)
        session.measure(copies, self.floor_us)
        return session.row(self.case, "ours", {SKINNY: SKINNY}, self.floor_us)


def one_after_the_other(parts: Mapping[str, few_rows.Few], build: Any) -> Run:
    """All projections by ``build``'s kernel."""
    runs = {name: build(part) for name, part in parts.items()}

    def run(copy: int) -> dict[str, Tensor]:
        return {name: one(copy)["out"] for name, one in runs.items()}

    return run


def skinny(found: few_rows.Few) -> Run:
    """The kernel that streams row-major weights."""
    device = found.options.device
    plan = plan_skinny(found.N, found.K, found.M, device=device)
    weights = clones(found.values, found.copies)
    first = torch.full((found.M, found.N), torch.nan, dtype=torch.bfloat16, device=device)
    out = clones(first, found.copies)

    def run(copy: int) -> dict[str, Tensor]:
        plan.run(found.x[copy], weights[copy], out=out[copy])
        return {"out": out[copy]}

    return run


# --- the table ---


def measure(case: Case | Projections, session: Session) -> list[Row]:
    """The row of one case."""
    found = case.measure(session)
    for name, why in session.failed.items():
        print(f"{name} failed: {' '.join(why.split())[:300]}", flush=True)
    timed = [name for name in found.peers_us if name in session.errors]
    return [replace(found, errors={name: session.errors[name].json() for name in timed})]


def cases(options: Options) -> Iterator[Case | Projections]:
    """Those that are not measured yet, of the shapes, contexts (``lengths``) and requests (``M``) that are named.

    ``M`` that names none of the table's numbers of requests stands for all; projections have no context.
    """
    batches = {batch for _, batch, _ in CASES} & set(options.M) or {b for _, b, _ in CASES}
    wanted = [(name, b) for name, b in PROJECTIONS if b in batches and name in options.shapes]
    steps = [
        Case(SHAPES[name], batch, context, options)
        for name, batch, context in CASES
        if name in options.shapes
        and batch in batches
        and context in (options.lengths or (context,))
    ]
    found: list[Case | Projections] = [*steps[:4]]
    if not options.lengths:
        found += [Projections(SHAPES[name], b, options) for name, b in wanted]
    yield from options.progress.left([*found, *steps[4:]], 1)


def kernels(options: Options) -> Iterator[Any]:
    """Every kernel the table runs, each once."""
    return once(kernel for case in cases(options) for kernel in case.kernels())


def table(options: Options, timer: Timer, source: Provenance, folder: Path) -> Table:
    """Measure every case and write ``decode-ablation.json`` into ``folder``."""
    path = folder / "decode-ablation.json"
    found = Table("decode-ablation", PAPER, options.protocol + PROTOCOL, FLOOR, source, path)
    return fill(found, cases(options), measure, timer, options.rounds, options.progress)


# --- how it is shown ---

HEADS = ("step", "as it is, µs", "replaced", "µs", "slower by", "error")


def columns(content: Mapping[str, Any]) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Heads and rows of the table: a line for each thing that was replaced."""
    return HEADS, [line for row in content["rows"] for line in _lines(row)]


def _lines(row: Mapping[str, Any]) -> Iterator[tuple[str, ...]]:
    case, ours = row["case"], row["ours_us"]
    what = f"{case['shape']}, {case.get('M') or case['batch']} requests"
    what += f" of {case['context']}" if "context" in case else ", BF16 projections"
    for name, time in row["peers_us"].items():
        error = row.get("errors", {}).get(name)
        yield (
            what,
            f"{ours:.1f}" if ours else "failed",
            name,
            f"{time:.1f}",
            f"{(time / ours - 1) * 100:+.1f} %" if ours else "-",
            f"{error['norm']:.4f}" if error else "-",
        )


def summary(content: Mapping[str, Any]) -> str:
    """The columns as text."""
    heads, rows = columns(content)
    widths = [max(map(len, column)) for column in zip(heads, *rows, strict=True)]
    return "\n".join(_line(cells, widths) for cells in (heads, *rows))


def _line(cells: Sequence[str], widths: Sequence[int]) -> str:
    return "  ".join(cell.rjust(width) for cell, width in zip(cells, widths, strict=True))
