"""A layer of every kind, once, for compute-sanitizer.

    python -m tests.models.sanitize --prepare                     # compile, side by side
    compute-sanitizer --tool memcheck  --error-exitcode 9 python -m tests.models.sanitize
    compute-sanitizer --tool racecheck --error-exitcode 9 python -m tests.models.sanitize

Requests of no, one and several tokens, slack rows and unused cells of NaN; results are compared all the same. A tool
that watches every access takes its time: ``--only fp8`` runs one of them.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

os.environ.setdefault("PYTORCH_NO_CUDA_MEMORY_CACHING", "1")  # read when torch first allocates

import torch

from epicute.attention import kernel_for
from epicute.jit import precompile
from epicute.models.requests import Requests
from epicute.testing import Budget, assert_within
from tests.models.blocks import Setting, pad, split, unpad
from tests.models.layers import PAGE, draw, model_of
from tests.models.small_blocks import LENGTHS, SPECS

LOOSE = Budget(0.11, 0.15)
SLACK = 6
MAX_ROWS = 80


def prepare(names: Sequence[str]) -> None:
    """Compile every kernel that is run."""
    kernels = []
    for name in names:
        kernels += SPECS[name].kernels(MAX_ROWS).values()
        kernels += [kernel_for(SPECS[name].attention(packed, PAGE)) for packed in (True, False)]
    precompile(kernels)
    print(f"{len(kernels)} kernels ready")


def run(name: str, packed: bool) -> None:
    """One invocation, compared with float64."""
    spec, count = SPECS[name], sum(LENGTHS)
    at = Setting(spec, device="cuda", page=PAGE, pages=2, max_rows=MAX_ROWS, seed=3)
    values, table = draw(spec, count, 11), at.table(len(LENGTHS))
    if packed:
        blank = torch.full((SLACK, spec.shape.hidden), torch.nan, dtype=spec.dtype)
        rows = torch.cat([values, blank])
        requests = Requests.packed(LENGTHS, PAGE, table, rows=len(rows), device="cuda")
    else:
        rows = pad(values, LENGTHS, max(LENGTHS) + 1)
        requests = Requests.padded(LENGTHS, PAGE, table, width=max(LENGTHS) + 1, device="cuda")
    out = at.run(at.plan(packed=packed), rows, requests, at.cache(len(LENGTHS))).values.cpu()
    out = out[:count] if packed else unpad(out, LENGTHS)
    model = model_of(spec, at.state)
    for x, y in zip(split(values, LENGTHS), split(out, LENGTHS), strict=True):
        if len(x):
            assert_within(y.double() - x.double(), model.layer(x) - x.double(), LOOSE)


def main(arguments: Sequence[str] | None = None) -> int:
    """Compile, or launch and compare."""
    parser = argparse.ArgumentParser(prog="python -m tests.models.sanitize", description=__doc__)
    parser.add_argument("--prepare", action="store_true", help="compile, run nothing")
    parser.add_argument("--only", choices=SPECS, help="one kind of layer")
    given = parser.parse_args(arguments)
    names = [given.only] if given.only else list(SPECS)
    if given.prepare:
        prepare(names)
        return 0
    wrong = 0
    for name in names:
        for packed in (True, False):
            try:
                run(name, packed)
            except AssertionError as error:
                wrong += 1
                print(f"{name}: {error}", flush=True)
            print(f"{name}, {'packed' if packed else 'padded'}", flush=True)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
