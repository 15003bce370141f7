"""``epicute compile``: a composition's kernel, its report, and nothing run."""

from __future__ import annotations

import argparse
import dataclasses
import re
from typing import Any

from epicute.cli.expression import DTYPES, composition_in, composition_of
from epicute.errors import require

__all__ = ["add_arguments", "run"]

EXAMPLE = "Dequantize() >> SwiGLU() >> EmitFP8()"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The problem, the composition, and the schedule where it is not to be chosen."""
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--epilogue", metavar="EXPR", help=f'policies, say "{EXAMPLE}"')
    what.add_argument("--module", metavar="PATH:NAME", help="a composition of a Python file")
    parser.add_argument("--n", type=int, required=True, help="output features")
    parser.add_argument("--k", type=int, required=True, help="reduction depth")
    parser.add_argument(
        "--dtype",
        choices=("bf16", "fp16", "fp8"),
        help="of A and B; by default fp8 for a composition that begins with a Dequantize of weight scales, else bf16",
    )
    parser.add_argument(
        "--accumulate", choices=("fast", "precise"), help="how fp8 products are added; see the docs"
    )
    parser.add_argument("--expected-m", type=int, metavar="ROWS", help="rows to tune for")
    parser.add_argument("--target", help="sm_90a; by default this machine's GPU, or sm_90a")
    parser.add_argument("--tile", metavar="MxN", help="rows and packed columns, say 128x256")
    parser.add_argument("--cluster", metavar="MxN", help="blocks of a cluster, say 2x1")
    parser.add_argument("--stages", type=int, help="pipeline stages")
    parser.add_argument("--slots", type=int, help="panels of each output ring; 0 for none")
    parser.add_argument("--pingpong", action="store_true", help="tiles of one warpgroup each")
    parser.add_argument("--anyway", action="store_true", help="accept spills and the like")


def run(args: argparse.Namespace) -> int:
    """Compile and print composition, schedule and report."""
    import torch

    from epicute.epilogues import compose
    from epicute.gemm import kernel_for
    from epicute.gemm.explain import CACHES, report_text
    from epicute.gemm.fitting import compile_fitting
    from epicute.gemm.spec import default_dtype
    from epicute.jit import Target, compile

    found = composition_in(args.module) if args.module else composition_of(args.epilogue)
    composition = compose(found)
    chosen = getattr(torch, DTYPES[args.dtype]) if args.dtype else default_dtype(composition)
    dtype = next(short for short, full in DTYPES.items() if getattr(torch, full) == chosen)
    problem = {
        "n": args.n,
        "k": args.k,
        "dtype": chosen,
        "target": Target.parse(args.target) if args.target else Target.detect(),
        "expected_m": args.expected_m,
        "accumulate": args.accumulate,
    }
    kernel = kernel_for(composition, **problem)
    if changes := _changes(args):
        schedule = dataclasses.replace(kernel.spec.schedule, **changes)
        kernel = kernel_for(composition, **problem, schedule=schedule)
        compiled = compile(kernel, strict=not args.anyway)
    else:
        kernel, compiled = compile_fitting(kernel, strict=not args.anyway)
    print(composition)
    print()
    if args.dtype is None and dtype == "fp8":
        print("fp8, as the composition begins with Dequantize; --dtype bf16 for another dtype")
    spec = kernel.spec
    print(
        f"{args.n} x {args.k} {dtype} for {problem['target']}: {spec.schedule}; "
        f"{spec.problem.accumulate} accumulation"
    )
    print(report_text(compiled.report))
    print(f"{'from':<14} {CACHES.get(compiled.origin, 'the compiler')}")
    return 0


def _changes(args: argparse.Namespace) -> dict[str, Any]:
    """What the user says of the schedule."""
    changes: dict[str, Any] = {}
    if args.tile:
        changes["tile_m"], changes["tile_n"] = _pair("tile", args.tile)
    if args.cluster:
        changes["cluster_m"], changes["cluster_n"] = _pair("cluster", args.cluster)
    for name in ("stages", "slots"):
        if (given := getattr(args, name)) is not None:
            changes[name] = given
    if args.pingpong:
        changes["pingpong"] = True
    return changes


def _pair(name: str, text: str) -> tuple[int, int]:
    found = re.fullmatch(r"(\d+)[x×](\d+)", text)
    require(found is not None, name, repr(text), "two numbers, as 128x256", "write it so")
    assert found is not None
    return int(found[1]), int(found[2])
