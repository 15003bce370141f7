"""Table ``calls``: what a kernel costs before and around its run: compiling, loading, calling from
Python.

Each is measured in a fresh process on two cores: once with an empty object cache (``compile``),
once more with the same, now full (``load``, ``call``). The first plan of a process also imports the
DSL and stands apart (``first-compile``, ``first-load``). A call is timed without waiting for the
device, beside the compiled function called with the very arguments that ``run`` handed it: the
difference is the Python of ``run``.
"""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

import epicute
from benchmarks import peers
from benchmarks.data import Layer
from benchmarks.epilogue import activations
from benchmarks.harness import Options, told
from benchmarks.ours import plain_epilogue
from benchmarks.projections import projection
from benchmarks.provenance import ROOT, Provenance
from benchmarks.table import Row, Table
from benchmarks.timing import Timer
from epicute import jit
from epicute.gemm import GemmKernel
from epicute.models.shapes import LayerShape
from epicute.weights import Packed

__all__ = ["FLOOR", "PAPER", "PROTOCOL", "kernels", "measure", "per_call", "rows", "table"]

PAPER = "none: what the library adds to its kernels"
PROTOCOL = (
    "a fresh process on two cores, its object cache empty (compile) or full (load, call); first-: "
    "the process's first plan, with the import of the DSL; first-run: the first launch of a loaded "
    "plan, waited for; Python collects no garbage meanwhile, which over the DSL's objects takes a tenth of a second; "
    "call: median of 30 batches of 200 calls that do not wait for the device, "
    "M = 16, interleaved with the compiled function called with its arguments bound (the floor) "
    "and with torch.mm"
)
FLOOR = (
    "call: the compiled function called with its arguments already bound; compiling, loading and "
    "the first run have no floor (0)"
)

TINY = LayerShape(256, 256, 4, 2, 64, "tiny")
KINDS = (("qkv", "fp8"), ("o", "fp8"), ("gate_up", "fp8"), ("gate_up", "bf16"))
CORES = 2
CALLS, BATCHES = 200, 30
ROWS = 16
Report = dict[str, Any]


# --- in the child process ---


def measure(device: str = "cuda") -> list[Report]:
    """Plan every kind of projection, run it, and time its call; times in µs.

    The first entry is a plain store, whose plan pays for the process's imports. A kind that fails
    has ``failed``.
    """
    options = Options(shapes=(), device=device, check_rows=1)
    found = []
    for name, weights in (("plain", "bf16"), *KINDS):
        layer = Layer(TINY, "o" if name == "plain" else name, ROWS, options, copies=1)
        try:
            found.append(_measure(layer, weights, plain=name == "plain"))
        except Exception as error:
            found.append({"composition": name, "weights": weights, "failed": told(error)})
    return found


def _measure(layer: Layer, weights: str, plain: bool) -> Report:
    text, composition, operands = _epilogue(layer, weights, plain)
    (packed,) = layer.packed(composition, weights)
    x = activations(layer, weights)[0][0]
    torch.cuda.synchronize()
    gc.collect()
    gc.disable()
    try:
        start = time.perf_counter()
        plan = epicute.plan(composition, packed, x_dtype=x.dtype)
        planned = time.perf_counter()
        plan.run(x, packed, **operands)
        torch.cuda.synchronize()
        ran = time.perf_counter()
    finally:
        gc.enable()

    bare = _bare(plan, x, packed, operands)
    torch_mm = peers.cublas(layer)
    call, floor, peer = per_call(
        lambda: plan.run(x, packed, **operands),
        bare,
        lambda: torch_mm(0),
        wait=torch.cuda.synchronize,
    )
    return {
        "composition": text,
        "weights": weights,
        "plan": (planned - start) * 1e6,
        "run": (ran - planned) * 1e6,
        "call": call,
        "bare": floor,
        "peer": peer,
    }


def _epilogue(layer: Layer, weights: str, plain: bool) -> tuple[str, Any, dict[str, Tensor]]:
    if plain:
        out = layer.poisoned(layer.M, layer.N, dtype=torch.bfloat16)
        return "Store", plain_epilogue(weights, "tensor"), {"out": out}
    found = projection(layer)
    text, composition = found.composition(weights)
    return text, composition, activations(layer, weights)[1] | found.operands(weights)


def per_call(
    *functions: Callable[[], Any],
    wait: Callable[[], None],
    calls: int = CALLS,
    batches: int = BATCHES,
) -> list[float]:
    """µs per call of each function on the host: median of batches, which are interleaved.

    ``wait`` drains the device before each.
    """
    times: list[list[float]] = [[] for _ in functions]
    for batch in range(batches + 1):
        for function, found in zip(functions, times, strict=True):
            wait()
            start = time.perf_counter()
            for _ in range(calls):
                function()
            spent = (time.perf_counter() - start) * 1e6 / calls
            if batch:  # the first one warms up
                found.append(spent)
    wait()
    return [median(found) for found in times]


def _bare(
    plan: epicute.Plan, x: Tensor, packed: Packed, operands: Mapping[str, Tensor]
) -> Callable[[], Any]:
    """The plan's compiled function with the arguments of this run bound."""
    function = jit.compile(plan.kernel).function
    tensor, arguments = packed.raw, plan.bind(x, packed, dict(operands))
    return lambda: function(tensor, arguments)


def child() -> None:
    """Measure in this process on two cores and print the reports as the last line."""
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:CORES])
    print(json.dumps(measure()))


# --- in the parent ---


def _fresh(cache: str) -> list[Report]:
    """Reports of a fresh process whose object cache is ``cache``."""
    done = subprocess.run(
        [sys.executable, "-c", "from benchmarks.calls import child; child()"],
        cwd=ROOT,
        env={**os.environ, "EPICUTE_CACHE_DIR": cache},
        capture_output=True,
        text=True,
    )
    if done.returncode != 0:
        raise RuntimeError(
            f"the measuring process ended with {done.returncode}: {done.stderr[-2000:]}"
        )
    reports: list[Report] = json.loads(done.stdout.splitlines()[-1])
    return reports


def rows(cold: list[Report], warm: list[Report]) -> Iterator[Row]:
    """The table's rows from the reports of both processes."""
    for reports, word in ((cold, "compile"), (warm, "load")):
        for index, report in enumerate(reports):
            yield _row(report, word if index else f"first-{word}", "plan")
    for report in warm:
        yield _row(report, "first-run", "run")
    for report in warm:
        yield _row(report, "call", "call")


def _row(report: Report, variant: str, field: str) -> Row:
    case = {key: report[key] for key in ("weights", "composition")} | {"variant": variant}
    if "failed" in report:
        return Row(case, None, 0.0, failed={"ours": report["failed"]})
    if field == "call":
        case["M"] = ROWS
        return Row(case, report["call"], report["bare"], {"cublas-bf16": report["peer"]})
    return Row(case, report[field], 0.0)


def kernels(options: Options) -> Iterator[GemmKernel]:
    """None: the table is about compiling them."""
    return iter(())


def table(options: Options, timer: Timer, source: Provenance, folder: Path) -> Table:
    """Measure and write ``calls.json`` into ``folder``; the same whatever ``options`` say."""
    found = Table("calls", PAPER, PROTOCOL, FLOOR, source, folder / "calls.json")
    with tempfile.TemporaryDirectory(prefix="epicute-calls-") as cache:
        try:
            measured = list(rows(_fresh(cache), _fresh(cache)))
        except Exception as error:
            failed = {"ours": told(error)}
            measured = [Row({"variant": "compile"}, None, 0.0, failed=failed)]
    for row in measured:
        found.add(row)
    return found
