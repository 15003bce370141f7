"""``epicute demo``: fused projections of a real layer, composed, compiled, evaluated and, with a
GPU, run; then a few words of the whole model, with INT4 weights and an INT4 cache.

Takes layer 0 of the packaged SmolLM2-135M checkpoint and a real prompt. Every step is public API:
the compositions are printed, their kernels compiled for sm_90a, every row is evaluated on the CPU
and compared with float64, and on a GPU the same objects run and are timed. Ends in a table, and in
text that the model wrote; the exit status is 1 if a budget is exceeded.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from epicute.cli.generate import one_thread, packaged
from epicute.cli.layer import Job, LayerSource, jobs_of
from epicute.errors import UnsupportedError, require
from epicute.gemm.explain import TRADED, report_text
from epicute.models.generation import device_for
from epicute.models.smollm2 import Checkpoint
from epicute.testing import Errors, measure

__all__ = ["PROMPT", "Outcome", "add_arguments", "run"]

PROMPT = (
    "When the river rose in the spring of 1903, the ferryman's daughter kept a list of everything "
    "that floated past the landing: two doors, a cradle, 14 barrels marked with the same blue "
    "star, and, on the third day, a clock that was still running. She wrote the hour beside each "
    "of them. Years later an engineer who was to build the first bridge asked the town for "
    "measurements, and nobody had any but her. From the list he worked out how fast the water had "
    "moved, and how high the arches had to be."
)
"""Plain prose of a little over a hundred tokens."""

STORY = "Once upon a time, there was a little"
"""What the whole model goes on with."""

LEAST_TOKENS = 64
TIMED_RUNS = 50

Planner = Callable[[Job], Any]
"""Compiles a job's kernel and returns its ``gemm.Plan``."""


@dataclass
class Outcome:
    """What one job gave.

    ``cpu`` and ``gpu`` hold the errors of every output; ``cost`` is what the weight and activation
    format costs against unquantised float64; ``failures`` say which budgets were exceeded.
    """

    job: Job
    report: Any = None
    cpu: dict[str, Errors] = field(default_factory=dict)
    gpu: dict[str, Errors] = field(default_factory=dict)
    cost: Errors | None = None
    microseconds: float | None = None
    failures: list[str] = field(default_factory=list)

    def judge(self, where: str, outputs: Mapping[str, torch.Tensor]) -> dict[str, Errors]:
        """Compare every output with its reference; exceeded budgets are added to ``failures``."""
        found = {}
        for name, expected in self.job.expected.items():
            budget = self.job.budgets[name]
            found[name] = errors = measure(outputs[name], expected, budget.floor)
            if not errors.within(budget):
                self.failures.append(
                    f"{self.job.name}: {name} ({where}): {errors}; allowed {budget}"
                )
        return found


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the demo's options to ``parser``."""
    parser.add_argument(
        "--prompt", default=PROMPT, help=f"text of at least {LEAST_TOKENS} tokens to run through"
    )
    parser.add_argument("--layer", type=int, default=0, help="decoder layer (default: the first)")
    parser.add_argument(
        "--checkpoint", type=Path, help="the GGUF file (default: fetched once and cached)"
    )
    parser.add_argument("--story", default=STORY, help="text that the model goes on with")
    parser.add_argument(
        "--tokens", type=int, default=24, help="tokens that it adds (default: 24; 0 for none)"
    )


def run(
    args: argparse.Namespace,
    source: LayerSource | None = None,
    planner: Planner | None = None,
) -> int:
    """Run the demo.

    Args:
        args: what ``add_arguments`` parsed.
        source: a checkpoint other than the packaged one.
        planner: another way to compile a job.

    Returns:
        0, or 1 where a budget is exceeded.

    Raises:
        CheckpointError: no checkpoint, and none to be had.
        ArgumentError: the prompt is too short, there is no such layer, or a negative number of tokens.
        CompileError: a kernel that must not run.
    """
    start = time.perf_counter()
    require(args.tokens >= 0, "--tokens", args.tokens, "0 or more", "pass 0 for no text")
    source = source or _packaged(args.checkpoint)
    source.layer(args.layer)  # refuses one that there is not, before the layers in front of it run
    tokens = len(source.layer_inputs(args.prompt)[0])
    require(
        tokens >= LEAST_TOKENS,
        "prompt",
        f"{tokens} tokens",
        f"at least {LEAST_TOKENS}",
        "give a longer text",
    )
    shape = source.config.shape
    print(
        f"{shape.name}, layer {args.layer}, {tokens} tokens: hidden {shape.hidden}, "
        f"{shape.heads}:{shape.kv_heads} heads of {shape.head_dim}, MLP {shape.intermediate}"
    )
    outcomes = []
    for job in jobs_of(source, args.prompt, args.layer):
        outcomes.append(_play(job, planner or plan_job))
    print(f"\n{table(outcomes)}\n")
    if any(outcome.report and outcome.report.registers for outcome in outcomes):
        print(
            "registers of a thread at launch; {} and {} once the warpgroups have traded".format(
                *TRADED
            )
        )
    if not any(outcome.gpu for outcome in outcomes):
        print("no Hopper GPU here: the kernels were compiled and not run")
    failures = [text for outcome in outcomes for text in outcome.failures]
    for text in failures:
        print(f"exceeded: {text}")
    verdict = "a budget was exceeded" if failures else "every row is within its budget"
    print(f"{verdict}; {time.perf_counter() - start:.0f} s")
    if isinstance(source, Checkpoint) and args.tokens:
        _speak(source, args.story, args.tokens)
    return 1 if failures else 0


def _speak(source: Checkpoint, story: str, tokens: int) -> None:
    """The whole model goes on with ``story``: INT4 weights, rounded to nearest, and a rotated INT4 cache."""
    with one_thread(source.config.layers * source.config.shape.weights):
        speaker = packaged(source, "int4", "int4", device_for("int4", "int4"))
        print(f"\n=== {speaker}\n")
        spoken = speaker.speak(story, tokens, lambda text: print(text, end="", flush=True))
    print(f"\n\n{spoken}")


def _packaged(path: Path | None) -> LayerSource:
    """The checkpoint of the file ``path``, or the packaged one; says where it is."""
    from epicute.models.smollm2 import locate, model_folder

    require(
        path is None or path.is_file(),
        "--checkpoint",
        f"{path}, where no file is",
        "a GGUF file of SmolLM2-135M",
        "leave it out: the packaged one is fetched once, 98 MB",
    )
    if path is None and locate() is None:
        print(f"fetching the checkpoint, 98 MB, into {model_folder()}", flush=True)
    source = Checkpoint(path) if path else Checkpoint.open()
    print(f"checkpoint {path or locate()}")
    return source


def plan_job(job: Job) -> Any:
    """Compile the job's kernel for this machine's GPU, or for sm_90a without one."""
    from epicute.gemm import plan

    return plan(job.composition, job.packed)


def _play(job: Job, planner: Planner) -> Outcome:
    """Compose, compile, evaluate, run: one job from its drawing to its errors."""
    outcome = Outcome(job)
    m, n, k = job.problem
    print(f"\n=== {job.name}: {m} x {n} x {k}, {_dtype(job.x.dtype)} inputs\n")
    print(job.composition)
    print(f"row order: {job.packed.order}\n")
    made = _compiled(job, planner)
    outcome.report = None if made is None else made.report
    evaluated = job.composition.evaluate(job.accumulator(), **job.operands)
    outcome.cpu = outcome.judge("CPU", evaluated)
    outcome.cost = measure(job.quality(evaluated), job.unquantised)
    _print_errors("CPU evaluation against float64, every row", job, outcome.cpu)
    print(f"  cost of the format: {outcome.cost.norm:.2%} against the unquantised layer")
    if made is not None and torch.cuda.is_available():
        outputs, outcome.microseconds = _on_gpu(job, made)
        outcome.gpu = outcome.judge("GPU", outputs)
        _print_errors("GPU run against float64, every row", job, outcome.gpu)
        print(f"  {outcome.microseconds:.1f} µs")
    return outcome


def _compiled(job: Job, planner: Planner) -> Any:
    """The job's plan, its report printed; None where this machine cannot compile or run it."""
    try:
        made = planner(job)
    except UnsupportedError as error:
        print(f"not compiled: {error}\n")
        return None
    print(f"{report_text(made.report, getattr(made, 'origin', 'compiled'))}\n")
    return made


def _print_errors(title: str, job: Job, found: Mapping[str, Errors]) -> None:
    print(f"{title}:")
    for name, errors in found.items():
        print(f"  {name:<10} {errors}")
        print(f"  {'':<10} allowed: {job.budgets[name]}")


def _on_gpu(job: Job, made: Any) -> tuple[dict[str, torch.Tensor], float]:
    """Run the plan on the current GPU; its outputs and the median µs of a launch."""
    device = torch.device("cuda", torch.cuda.current_device())
    packed = job.packed.to(device)
    x = job.x.to(device)
    read = {name: value.to(device) for name, value in job.operands.items()}
    outputs = job.outputs(device)
    made.run(x, packed, **{**read, **outputs})
    torch.cuda.synchronize()
    kept = {name: value.cpu() for name, value in outputs.items()}
    times = []
    for _ in range(TIMED_RUNS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        made.run(x, packed, **{**read, **outputs})
        end.record()
        end.synchronize()
        times.append(1e3 * begin.elapsed_time(end))
    return kept, sorted(times)[len(times) // 2]


def _dtype(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _worst(found: Mapping[str, Errors]) -> str:
    if not found:
        return "-"
    worst = max(found.values(), key=lambda errors: errors.worst_row)
    return f"{worst.worst_row:.2g}"


def table(outcomes: Sequence[Outcome]) -> str:
    """The summary: one line per job, aligned."""
    heads = ("projection", "M x N x K", "registers", "spills", "smem", "worst row CPU", "GPU")
    lines = [(*heads, "allowed", "format costs", "µs")]
    for outcome in outcomes:
        report = outcome.report
        spills = "-" if report is None else f"{report.spill_stores + report.spill_loads} B"
        smem = "-" if report is None else f"{(report.shared_memory or 0) / 1024:.0f} KB"
        allowed = max(b.worst_row for b in outcome.job.budgets.values())
        lines.append(
            (
                outcome.job.name,
                " x ".join(map(str, outcome.job.problem)),
                "-" if report is None else str(report.registers),
                spills,
                smem,
                _worst(outcome.cpu),
                _worst(outcome.gpu),
                f"{allowed:.2g}",
                "-" if outcome.cost is None else f"{outcome.cost.norm:.1%}",
                "-" if outcome.microseconds is None else f"{outcome.microseconds:.1f}",
            )
        )
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    text = [
        "  ".join(
            c.ljust(w) if i == 0 else c.rjust(w)
            for i, (c, w) in enumerate(zip(line, widths, strict=True))
        )
        for line in lines
    ]
    return "\n".join([text[0], "-" * len(text[0]), *text[1:]])
