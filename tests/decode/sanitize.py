"""A few small launches that touch every format, conversion, cluster and kind of policy, for compute-sanitizer.

    compute-sanitizer --tool memcheck --report-api-errors no --error-exitcode 9 python -m tests.decode.sanitize
    compute-sanitizer --tool racecheck --error-exitcode 9 python -m tests.decode.sanitize

Results are compared all the same. ``cuda-python`` asks the driver for functions that it may lack, which are no errors.
"""

from __future__ import annotations

import os
import sys
from dataclasses import replace

os.environ.setdefault("PYTORCH_NO_CUDA_MEMORY_CACHING", "1")  # read when torch first allocates

from epicute.decode.schedule import CONVERSIONS
from epicute.epilogues import Store, compose
from tests.decode.cases import BF16, FP16, FP32, Few, FewJob, chains, dequantized, in_place, planned

PLAIN = compose(Store(FP32))


def cases() -> list[Few]:
    """Each shows something that the others do not."""
    found = []
    for name in ("residual.fp8", "qkv.128.fp8", "qkv.64.norm", "swiglu"):
        composition, n, exact = chains(600)[name]
        found.append(Few(composition, n, 600, rows=16, exact=exact, changes=(("cluster", 2),)))
    for conversion in CONVERSIONS:
        changes = (("conversion", conversion), ("chunks", 1), ("slots", 3), ("in_flight", 2))
        found.append(Few(PLAIN, 72, 1600, zeros=True, group=32, changes=changes))
    for cluster in (1, 4):
        changes = (("conversion", "integers"), ("cluster", cluster))
        found.append(Few(PLAIN, 200, 4300, gain=cluster > 1, changes=changes))
    found.append(Few(dequantized(PLAIN), 72, 600, "fp8", 32))
    found.append(Few(PLAIN, 72, 600, "bf16", 64, BF16))
    found.append(Few(PLAIN, 72, 603, "fp16", 8, FP16, gain=True))
    forms = (("mma", "wgmma"), ("conversion", "registers"), ("slots", 3), ("in_flight", 2))
    composition, n, exact = chains(1600)["residual"]
    for rows, cluster in ((16, 2), (64, 1)):
        changes = (*forms, ("chunks", 1), ("cluster", cluster))
        found.append(Few(composition, n, 1600, rows=rows, exact=exact, changes=changes))
    changes = (*forms, ("chunks", 1), ("cluster", 1), ("wide", 2), ("sums", 1))
    found.append(Few(composition, 64 * 300, 1100, rows=16, exact=exact, changes=changes))
    found.append(in_place(Few(composition, n, 1600, rows=16, exact=exact), 2))
    # An arrival of one lane for its warp, behind a barrier of that, is a race to racecheck.
    return [replace(case, changes=(*case.changes, ("each_lane", True))) for case in found]


def main() -> int:
    """Run all of them."""
    for case in cases():
        FewJob(case, case.rows - 3, device="cuda").run(planned(case, "cuda"))
        print(case)
    return 0


if __name__ == "__main__":
    sys.exit(main())
