"""Timing schedules instead of trusting arithmetic, once for a device: the finding is kept in the object cache."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from itertools import islice
from statistics import median
from typing import Any

import torch

from epicute.epilogues.operands import Cells
from epicute.errors import CompileError, EpicuteError, require
from epicute.gemm.choice import choose, ranked
from epicute.gemm.plan import Plan
from epicute.gemm.schedule import Schedule
from epicute.gemm.spec import CHOOSING, GemmKernel
from epicute.jit import CompileKey, ObjectCache, compile, modules_digest, precompile
from epicute.weights import Packed

__all__ = ["TRIES", "autotune"]

log = logging.getLogger("epicute.gemm")

TRIES = 16
"""Schedules that are timed beside the plan's own."""

ROUNDS, SLICE_MS, CALLS = 5, 30.0, 8
"""Each round times every schedule once, for so long and after so long untimed: at a board's power limit the clock
depends on what ran before, and slices of 10 ms ranked ping-pong too high. Calls stand in graphs of so many."""


def autotune(
    plan: Plan,
    x: torch.Tensor,
    packed: Packed,
    operands: Mapping[str, torch.Tensor],
    *,
    tries: int = TRIES,
    cache: ObjectCache | None = None,
) -> Plan:
    """The plan with the schedule that is fastest for these tensors.

    Compiles the legal schedules that the model of ``choose`` ranks first, side by side, and times them on x's device,
    the plan's own among them. The finding is kept in the object cache, for this kernel, M and model of GPU: the next
    process times nothing. Times are those of repeated calls, so that a weight that fits L2 is read from there.

    Args:
        plan: what is to become faster. x, packed: as for ``Plan.run``; x has the M to tune for.
        operands: all of them by name, as for ``Plan.run``. Cells are written as one run would; of everything else that
            is written, copies are.
        tries: schedules to time beside the plan's own.
        cache: object cache; by default the user's.

    Raises ArgumentError as ``Plan.run`` does, and inside a CUDA graph capture.
    """
    require(
        type(tries) is int and tries >= 1, "tries", tries, "a count from 1", f"leave it at {TRIES}"
    )
    given = dict(operands)
    if plan.bind(x, packed, given) is None:
        return plan
    require(
        not torch.cuda.is_current_stream_capturing(),
        "autotune",
        "a call inside a CUDA graph capture",
        "one before it",
        "tune before the capture; the plan that is returned may be captured",
    )
    cache = ObjectCache() if cache is None else cache
    key = key_of(plan.kernel, x.shape[0], torch.cuda.get_device_name(x.device), tries)
    found = read(cache, key, plan.kernel)
    if found is None:
        found = _measured(plan, x, packed, given, tries, cache)
        write(cache, key, found)
    if found.schedule == plan.schedule:
        return plan
    found.load(packed)
    return found


def key_of(kernel: GemmKernel, rows: int, device: str, tries: int) -> CompileKey:
    """Of the finding: the kernel's key with the schedule that ``choose`` gives, and what was timed."""
    problem = replace(kernel.spec.problem, expected_m=rows)
    chosen = kernel.scheduled(choose(problem, kernel.target))
    return CompileKey(
        kernel="gemm.autotune",
        fields=(*chosen.key.fields, ("M", rows), ("device", device), ("tries", tries)),
        sources=(*kernel.key.sources, modules_digest(*CHOOSING)),
        target=kernel.target,
    )


def read(cache: ObjectCache, key: CompileKey, kernel: GemmKernel) -> Plan | None:
    """The plan that was found before; None where none was, or it is of no use any more."""
    entry = cache.read(key.digest)
    if entry is None:
        return None
    with suppress(OSError, ValueError, TypeError, EpicuteError):
        schedule = Schedule(**json.loads(entry.object.read_text()))
        schedule.check(kernel.spec.problem, kernel.target)
        return planned(kernel, schedule, cache)
    return None


def write(cache: ObjectCache, key: CompileKey, found: Plan) -> None:
    """Keep the finding, where the cache can be written to."""
    with cache.lock(key.digest) as held:
        if held:
            cache.write(key, found.report, json.dumps(asdict(found.schedule)).encode())


def planned(kernel: GemmKernel, schedule: Schedule, cache: ObjectCache) -> Plan:
    """The kernel with another schedule, compiled; raises CompileError where that spills."""
    kernel = kernel.scheduled(schedule)
    return Plan(kernel, compile(kernel, cache=cache))


def _measured(
    plan: Plan,
    x: torch.Tensor,
    packed: Packed,
    operands: dict[str, Any],
    tries: int,
    cache: ObjectCache,
) -> Plan:
    kernel = plan.kernel
    found = ranked(kernel.spec.problem, kernel.target, x.shape[0])
    wanted = [s for s in islice(found, tries) if s != plan.schedule]
    if cache.unusable() is None:
        with suppress(CompileError):  # of one; each is compiled again below, and passed over
            precompile([kernel.scheduled(s) for s in wanted], cache=cache, strict=False)
    plans = [plan]
    for schedule in wanted:
        with suppress(CompileError):
            plans.append(planned(kernel, schedule, cache))
    for each in plans:
        each.load(packed)
    times = time_all(plans, x, packed, scratch(plan, operands))
    best = min(range(len(plans)), key=times.__getitem__)
    log.info(
        "%s at M = %d: %s takes %.1f µs, the fastest of %d; %s takes %.1f µs",
        kernel.key,
        x.shape[0],
        plans[best].schedule,
        times[best],
        len(plans),
        plan.schedule,
        times[0],
    )
    return plans[best]


def scratch(plan: Plan, operands: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The operands, those that are written as copies, but for cells."""
    written = {
        s.name
        for s in plan.kernel.spec.layout.operands
        if s.kind.written and not isinstance(s.kind, Cells)
    }
    return {name: t.clone() if name in written else t for name, t in operands.items()}


def time_all(
    plans: Sequence[Plan], x: torch.Tensor, packed: Packed, operands: Mapping[str, torch.Tensor]
) -> list[float]:
    """µs of a call of each plan: medians of rounds that are interleaved."""
    with torch.cuda.device(x.device):
        graphs = [_graph(plan, x, packed, operands) for plan in plans]
        counts = [max(1, round(SLICE_MS / _ms(graph, 1))) for graph in graphs]
        times: list[list[float]] = [[] for _ in plans]
        for turn in range(ROUNDS):
            for i in range(len(plans)):
                at = (i + turn) % len(plans)
                _ms(graphs[at], counts[at])
                times[at].append(_ms(graphs[at], counts[at]) / counts[at] / CALLS * 1000)
    return [median(found) for found in times]


def _graph(
    plan: Plan, x: torch.Tensor, packed: Packed, operands: Mapping[str, torch.Tensor]
) -> torch.cuda.CUDAGraph:
    plan.run(x, packed, **operands)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(CALLS):
            plan.run(x, packed, **operands)
    graph.replay()
    return graph


def _ms(graph: torch.cuda.CUDAGraph, count: int) -> float:
    """Of ``count`` replays."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(count):
        graph.replay()
    end.record()
    end.synchronize()
    return max(float(start.elapsed_time(end)), 1e-3)
