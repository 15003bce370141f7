"""Table ``search``: the schedule that ``choose`` gives, beside others that its arithmetic ranks next.

A case is one projection in one format, with the plain epilogue of ``gemm``. Its candidates are the
chosen schedule and the legal ones of least clocks by ``epicute.gemm.model``, named as they print,
tiles among them that are wider than any that is chosen; of those that differ in width alone, the
best three.
All share the packed weights and the outputs, which are poisoned again before each is checked.

168 cases take longer than a session with a card: ``--shapes``, ``--layers`` and ``--M`` name a part
of them, ``--budget`` ends in time, and with either ``--resume`` or ``--budget`` the rows measured
before are kept and their cases passed over. A row that failed is measured again.

A row's ``schedule`` is the chosen one and its time ``ours``; ``best`` is the fastest that was timed,
which may be the chosen one. ``tried`` of ``legal`` schedules were timed.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import islice
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

from benchmarks import floors, gemm
from benchmarks.data import Layer, layers
from benchmarks.harness import Options, Session, fill
from benchmarks.ours import kernel, once, ours, plain_epilogue
from benchmarks.provenance import Provenance
from benchmarks.table import Row, Table, geometric_mean, label
from benchmarks.timing import Run, Timer
from epicute.epilogues import Composition
from epicute.gemm import GemmKernel, Schedule
from epicute.gemm.choice import SMS, ranked, schedules
from epicute.gemm.model import clocks
from epicute.gemm.schedule import ACCUMULATORS
from epicute.weights import Packed

__all__ = ["BEHIND", "PAPER", "Search", "cases", "kernels", "measure", "summary", "table"]

PAPER = "none: whether the library chooses its schedules well"

PROTOCOL = (
    "; candidates: the schedule that choose gives and the {tries} legal ones of least clocks by "
    "epicute.gemm.model, three at most of those that differ in width alone; best: the fastest of them"
)

BEHIND = 1.03
"""Chosen over best beyond which the summary names a case."""

SIZE = ("shape", "layer", "M", "N", "K")

FOUND = ("tried", "legal", "schedule", "best", "variant")
"""What a row says beside its case."""

BUILDING = 6.0
"""Seconds that a case takes beside its slices: data, references, checks, graphs."""


@dataclass
class Search:
    """A projection in one format, and the schedules to time."""

    layer: Layer
    weights: str
    accumulate: str

    @property
    def case(self) -> dict[str, Any]:
        """The fields of the table's case that are known before anything is timed."""
        return {**self.layer.case, "weights": self.weights, "accumulate": self.accumulate}

    @property
    def epilogue(self) -> Composition:
        """That of ``gemm``."""
        return plain_epilogue(self.weights, "row")

    @cached_property
    def kernel(self) -> GemmKernel:
        """Of the schedule that ``choose`` gives."""
        return kernel(self.layer, self.epilogue, self.weights, self.accumulate)

    @property
    def chosen(self) -> Schedule:
        """What ``choose`` gives."""
        return self.kernel.spec.schedule

    @cached_property
    def legal(self) -> list[Schedule]:
        """Every legal schedule, of least clocks first."""
        problem = self.kernel.spec.problem

        def cost(schedule: Schedule) -> float:
            return clocks(schedule, problem, self.layer.M, SMS)

        return sorted(schedules(problem, self.kernel.target, ACCUMULATORS), key=cost)

    @property
    def candidates(self) -> dict[str, Schedule]:
        """The schedules to time by name, the chosen one first."""
        problem, target = self.kernel.spec.problem, self.kernel.target
        found = ranked(problem, target, self.layer.M, ACCUMULATORS)
        wanted = [self.chosen, *islice(found, self.layer.options.tries)]
        return {str(schedule): schedule for schedule in wanted}

    def kernels(self) -> Iterator[GemmKernel]:
        """One per candidate."""
        for schedule in self.candidates.values():
            yield self.kernel.scheduled(schedule)


def cases(options: Options) -> Iterator[Search]:
    """Every layer in BF16 and FP8; only in FP8 where accumulation is precise, which BF16 has not."""
    formats = ("bf16", "fp8") if options.accumulate == "fast" else ("fp8",)
    for layer in layers(options):
        for weights in formats:
            yield Search(layer, weights, options.accumulate)


def left(options: Options) -> Iterator[Search]:
    """Cases that no earlier run has measured."""
    done = [identity(row["case"]) for row in options.progress.rows if "failed" not in row]
    for found in cases(options):
        if identity(found.case) not in done:
            yield found


def identity(case: Mapping[str, Any]) -> dict[str, Any]:
    """What tells cases apart, of a case or of a row's."""
    return {name: value for name, value in case.items() if name not in FOUND}


def fitting(options: Options) -> Iterator[Search]:
    """Those left for which there should be time, so that no others are compiled."""
    deadline = options.progress.deadline
    start = time.monotonic()
    for found in left(options):
        yield found
        start += seconds(found)
        if deadline is not None and start > deadline:
            return


def seconds(found: Search) -> float:
    """What a case should take."""
    options = found.layer.options
    slices = (options.rounds + 1) * (options.lead_us + options.slice_us) / 1e6
    return slices * (options.tries + 1) + BUILDING


def measure(found: Search, session: Session) -> list[Row]:
    """The row of one projection in one format."""
    layer = found.layer
    packed = layer.packed(found.epilogue, found.weights)
    outputs = [layer.poisoned(layer.M, layer.N, dtype=torch.bfloat16) for _ in range(layer.copies)]
    check = gemm.check(layer, found.weights)
    for name, schedule in found.candidates.items():
        session.add(name, partial(scheduled, found, schedule, packed, outputs), check)
    session.measure(layer.copies, layer.least_us)
    return [row(found, session)]


def scheduled(
    found: Search, schedule: Schedule, packed: list[Packed], outputs: list[Tensor]
) -> Run:
    """epicute with this schedule, on weights and outputs that the candidates share."""
    layer = found.layer
    x, scale = (layer.x, None) if found.weights == "bf16" else layer.x_rows
    left = iter(outputs)

    def operands() -> dict[str, Tensor]:
        out = {"out": next(left).fill_(float("nan"))}
        return out if scale is None else out | {"scale": scale}

    return ours(
        layer,
        found.epilogue,
        found.weights,
        x,
        operands,
        ("out",),
        found.accumulate,
        schedule,
        packed,
    )


def row(found: Search, session: Session) -> Row:
    """The chosen schedule beside the fastest; those that failed stand under their own names."""
    mine = str(found.chosen)
    case = {
        **found.case,
        "tried": len(session.times),
        "legal": len(found.legal),
        "schedule": mine,
    }
    peers = {name: name for name in session.failed if name != mine}
    if session.times:
        fastest = min(session.times, key=lambda name: median(session.times[name]))
        case["best"] = peers["best"] = fastest
    return session.row(case, mine, peers, gemm.floor(found.layer, found.weights))


def kernels(options: Options) -> Iterator[GemmKernel]:
    """Every kernel the table runs, each once."""
    return once(made for found in fitting(options) for made in found.kernels())


def table(options: Options, timer: Timer, source: Provenance, folder: Path) -> Table:
    """Measure every case that is left and write ``search.json``, with the rows of earlier runs, into ``folder``."""
    protocol = options.protocol + PROTOCOL.format(tries=options.tries)
    found = Table("search", PAPER, protocol, floors.SENTENCE, source, folder / "search.json")
    wanted = list(left(options))
    again = [identity(case.case) for case in wanted]
    kept = [row for row in options.progress.rows if identity(row["case"]) not in again]
    progress = replace(options.progress, rows=kept, identity=identity)
    return fill(found, wanted, measure, timer, options.rounds, progress)


def summary(content: Mapping[str, Any]) -> str:
    """Per format and M: cases, mean and worst of best over chosen, and who is ``BEHIND``."""
    groups: dict[tuple[str, str, int], list[Mapping[str, Any]]] = {}
    for row in content["rows"]:
        case = row["case"]
        groups.setdefault((case["weights"], case["accumulate"], case["M"]), []).append(row)
    lines = []
    for (weights, accumulate, rows), found in sorted(groups.items()):
        timed = [row for row in found if row["ours_us"] and "best" in row["peers_us"]]
        shares = [row["peers_us"]["best"] / row["ours_us"] for row in timed]
        text = f"{weights} weights, accumulate {accumulate}, M = {rows}: "
        text += f"{len(timed)} case" if len(timed) == 1 else f"{len(timed)} cases"
        if shares:
            text += f", best over chosen {geometric_mean(shares):.3f}, worst {min(shares):.3f}"
        if lost := len(found) - len(timed):
            text += f"; {lost} without a time of the chosen schedule"
        lines.append(text)
        lines += [_behind(row) for row in timed if _ratio(row) > BEHIND]
    return "\n".join(lines)


def _ratio(row: Mapping[str, Any]) -> float:
    """Chosen over best."""
    return float(row["ours_us"] / row["peers_us"]["best"])


def _behind(row: Mapping[str, Any]) -> str:
    case = row["case"]
    name = label({key: case[key] for key in SIZE if key in case})
    chosen = f"chosen {case['schedule']}: {row['ours_us']:.1f} µs"
    best = f"best {case['best']}: {row['peers_us']['best']:.1f} µs"
    return f"  {name}  {_ratio(row) - 1:.1%} behind  {chosen}  {best}"
