"""Table ``decode-layer``: one token of each request through one layer, weights and cache in every format.

A case is a shape, a number of requests and a context. All its candidates share a session, and it has a row for each
pair of formats: all pairs where FuTransformer's table 5 has them and in all cases of 70B, INT4 weights over INT4 and
BF16 caches elsewhere. Beside each row stand PyTorch's compiled step in BF16 (``compile-bf16``) and with INT4 weights
(``compile-int4``), both over a BF16 cache. Candidates that are tried and not chosen: ``ours-4-warps``, attention with
four warps and two CTAs an SM; ``ours-nhd``, tokens of a page before its heads.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks.decode_layer_ours import Layers, OurStep, kernels_of
from benchmarks.decode_layer_step import Step, step_bytes
from benchmarks.floors import BANDWIDTH
from benchmarks.harness import Options, Session, fill
from benchmarks.ours import once
from benchmarks.provenance import Provenance
from benchmarks.stream import ReadKernel, reading
from benchmarks.table import Row, Table
from benchmarks.timing import Timer
from benchmarks.torch_decode_block import FORMATS, TorchStep
from epicute.jit import DEFAULT_TARGET
from epicute.models.shapes import SHAPES, LayerShape

__all__ = [
    "CASES",
    "PAPER",
    "PROTOCOL",
    "Case",
    "cases",
    "columns",
    "kernels",
    "measure",
    "summary",
    "table",
]

PAPER = "FuTransformer (arXiv 2610.23796), section 4.4, tables 3, 4 and 5: the decode layer; and its 405B shape"

PROTOCOL = (
    ". A call is a step of one layer of a model: from the residual stream to the residual stream and its sums of "
    "squares, the new keys and values stored; at least four layers in turn, each with its own weights and cache. "
    "Requests have pages of their own in a random order, of 64 tokens (QK4PV8: 128, static means, one term of ΔS); "
    "INT4 weights have groups of 128, INT4 caches are rotated. Ours is checked in its result, attention's output and "
    "the stored row, against float64 on its own codes. compile-bf16, compile-int4: the step by torch.compile, its "
    "attention by the fastest back-end and form of SDPA over a contiguous BF16 cache. ours-4-warps, ours-nhd: tried, "
    "not chosen"
)

FLOOR = (
    "the bytes of packed weights with their scales and of gains that are operands, of cached keys and values with "
    "theirs, of x and of the result, over the bandwidth of a plain read of 2 GiB in the same run ({:.3f} TB/s in the "
    "last)"
)

Pair = tuple[str, str]
"""Formats of weights and cache."""

TWO: tuple[Pair, ...] = (("int4", "int4"), ("int4", "bf16"))
ALL: tuple[Pair, ...] = (
    *((weights, cache) for weights in ("int4", "fp8", "bf16") for cache in ("int4", "fp8", "bf16")),
    ("int4", "qk4pv8"),
)

CASES: tuple[tuple[str, int, int, tuple[Pair, ...]], ...] = (
    ("8B", 1, 1024, ALL),
    ("8B", 8, 1024, ALL),
    ("8B", 16, 1024, TWO),
    ("8B", 32, 4096, ALL),
    ("70B", 1, 1024, ALL),
    ("70B", 8, 1024, ALL),
    ("70B", 32, 4096, ALL),
    ("1B", 1, 1024, ALL),
    ("8B", 32, 1024, TWO),
    ("405B", 1, 1024, TWO),
    ("405B", 8, 1024, TWO),
    ("405B", 32, 4096, TWO),
)
"""Shape, requests, context and formats, those that matter most first."""

READ_BYTES = 2**31
"""Of the read that a floor's bandwidth is measured with."""

TRIED = "int4"
"""Weights beside which other schedules and layouts are tried."""


@dataclass(frozen=True)
class Case:
    """What a session measures; it holds no data.

    Attributes:
        formats: of weights and cache, a row each.
        bandwidth: bytes a second that a plain read reaches.
        copies: of the layer, see ``Step``.
    """

    shape: LayerShape
    batch: int
    context: int
    formats: tuple[Pair, ...]
    options: Options
    bandwidth: float = BANDWIDTH
    copies: int = 0

    @property
    def case(self) -> dict[str, Any]:
        """The fields of the table's case that every row has."""
        shape = self.shape
        heads = {"heads": shape.heads, "kv_heads": shape.kv_heads, "head_dim": shape.head_dim}
        return {"shape": shape.name, "batch": self.batch, "context": self.context, **heads}

    def floor_us(self, weights: str, cache: str) -> float:
        """See FLOOR."""
        moved = step_bytes(self.shape, self.batch, self.context, weights, cache)
        return moved / self.bandwidth * 1e6

    @property
    def least_us(self) -> float:
        """A time no candidate's call is below."""
        return min(self.floor_us(*pair) for pair in self.formats)

    def tried(self, weights: str, cache: str) -> dict[str, dict[str, Any]]:
        """Candidates beside ours that may be faster, by their names in the table; options of ``OurStep``."""
        if weights != TRIED or cache == "qk4pv8":
            return {}
        found: dict[str, dict[str, Any]] = {"ours-4-warps": {"narrow": True}}
        return found | ({"ours-nhd": {"layout": "NHD"}} if cache == "bf16" else {})


# --- one case ---


def measure(case: Case, session: Session) -> list[Row]:
    """The rows of one case, one for each pair of formats."""
    torch._dynamo.reset()  # its cache is per function and full after eight shapes
    step = Step(case.shape, case.batch, case.context, case.options, case.copies)
    layers = Layers(step)
    for pair in case.formats:
        for name, options in {"ours": {}, **case.tried(*pair)}.items():
            mine = OurStep(layers, *pair, **options)
            if name != "ours-4-warps" or mine.narrowed:
                session.add(called(name, *pair), mine.runner, mine.check)
    peers = TorchStep(layers, session.timer)
    for weights in FORMATS:
        build, check = partial(peers.runner, weights), partial(peers.check, weights)
        session.add(f"compile-{weights}", build, check)
    session.measure(step.copies, case.least_us)
    for name, why in session.failed.items():
        print(f"{name} failed: {' '.join(why.split())[:300]}", flush=True)
    return [row(case, pair, peers, session) for pair in case.formats]


def called(name: str, weights: str, cache: str) -> str:
    """A candidate's name in its session."""
    return f"{name} {weights}/{cache}"


def row(case: Case, pair: Pair, peers: TorchStep, session: Session) -> Row:
    """The row of one pair of formats. What was only tried and does not run is left out."""
    names = {f"compile-{weights}": f"compile-{weights}" for weights in FORMATS}
    names |= {n: called(n, *pair) for n in case.tried(*pair) if called(n, *pair) in session.times}
    said = {**case.case, "weights": pair[0], "cache": pair[1]}
    if form := peers.__dict__.get("form"):  # as it was chosen
        said["variant"] = str(form)
    found = session.row(said, called("ours", *pair), names, case.floor_us(*pair))
    timed = {n: c for n, c in names.items() if c in session.times}
    return replace(found, errors={n: session.errors[c].json() for n, c in timed.items()})


# --- the table ---


def cases(options: Options, bandwidth: float = BANDWIDTH) -> Iterator[Case]:
    """Those that are not measured yet, of the shapes, contexts (``lengths``) and requests (``M``) that are named.

    ``M`` that names none of the table's numbers of requests stands for all.
    """
    batches = {batch for _, batch, _, _ in CASES}
    batches = batches & set(options.M) or batches
    for name, batch, context, formats in CASES:
        if (
            name in options.shapes
            and batch in batches
            and context in (options.lengths or (context,))
        ):
            made = Case(SHAPES[name], batch, context, formats, options, bandwidth)
            yield from options.progress.left([made], len(formats))


def kernels(options: Options) -> Iterator[Any]:
    """Every kernel the table runs, each once."""

    def all_() -> Iterator[Any]:
        for case in cases(options):
            for pair in case.formats:
                narrow = "ours-4-warps" in case.tried(*pair)
                yield from kernels_of(case.shape, case.batch, *pair, narrow=narrow)
            yield ReadKernel(DEFAULT_TARGET)

    return once(all_())


def read_bandwidth(timer: Timer, device: str) -> float:
    """Bytes a second that a plain read reaches, over two buffers of random bytes in turn."""
    random = torch.Generator(device).manual_seed(0)
    tensors = [torch.empty(READ_BYTES, dtype=torch.uint8, device=device) for _ in range(2)]
    for x in tensors:
        x.random_(0, 256, generator=random)
    sample = timer.prepare(reading(tensors), len(tensors), READ_BYTES / BANDWIDTH * 1e6)()
    return READ_BYTES / median(sample.times) * 1e6


def table(options: Options, timer: Timer, source: Provenance, folder: Path) -> Table:
    """Measure every case and write ``decode-layer.json`` into ``folder``."""
    bandwidth = read_bandwidth(timer, options.device)
    print(f"plain read: {bandwidth / 1e12:.3f} TB/s", flush=True)
    floor, path = FLOOR.format(bandwidth / 1e12), folder / "decode-layer.json"
    found = Table("decode-layer", PAPER, options.protocol + PROTOCOL, floor, source, path)
    left = cases(options, bandwidth)
    return fill(found, left, measure, timer, options.rounds, options.progress)


# --- how it is shown ---

HEADS = (
    *("shape", "requests", "context", "weights", "cache"),
    *("ours, µs", "floor, µs", "over the floor", "faster PyTorch, µs", "speed-up", "MB"),
)


def columns(content: Mapping[str, Any]) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Heads and rows of the table: ours beside the floor and beside the faster of PyTorch's steps, with the bytes."""
    return HEADS, [_columns(row) for row in content["rows"] if "weights" in row["case"]]


def _columns(row: Mapping[str, Any]) -> tuple[str, ...]:
    case, ours, floor = row["case"], row["ours_us"], row["floor_us"]
    name, time = faster(row)
    sizes = (case["batch"], case["context"], case["weights"], case["cache"])
    moved = step_bytes(SHAPES[case["shape"]], *sizes)
    return (
        *(case["shape"], *map(str, sizes)),
        f"{ours:.1f}" if ours else "failed",
        f"{floor:.1f}",
        f"{ours / floor:.2f}×" if ours and floor else "-",
        f"{time:.1f} ({name})" if time else "failed",
        f"{time / ours:.2f}×" if time and ours else "-",
        f"{moved / 1e6:.1f}",
    )


def faster(row: Mapping[str, Any]) -> tuple[str, float | None]:
    """Weights and time of the faster of PyTorch's steps."""
    times = {w: row["peers_us"].get(f"compile-{w}") for w in FORMATS}
    found = {weights: time for weights, time in times.items() if time}
    best = min(found, key=lambda weights: found[weights], default="")
    return best, found.get(best)


def summary(content: Mapping[str, Any]) -> str:
    """The columns as text."""
    heads, rows = columns(content)
    widths = [max(map(len, column)) for column in zip(heads, *rows, strict=True)]
    return "\n".join(_line(cells, widths) for cells in (heads, *rows))


def _line(cells: Sequence[str], widths: Sequence[int]) -> str:
    return "  ".join(cell.rjust(width) for cell, width in zip(cells, widths, strict=True))
