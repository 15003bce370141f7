"""Few-row projections: INT4, FP8 and 16-bit weights streamed at the memory's speed, the composition on their sums."""

from epicute.decode.dequantize import DequantizePlan, plan_dequantize
from epicute.decode.plan import MOST_ROWS, FewRowsPlan, plan_few_rows
from epicute.decode.schedule import BUCKETS, FewRowSchedule
from epicute.decode.spec import FewRowKernel, kernel_for, pack_few_rows

__all__ = [
    "BUCKETS",
    "MOST_ROWS",
    "DequantizePlan",
    "FewRowKernel",
    "FewRowSchedule",
    "FewRowsPlan",
    "kernel_for",
    "pack_few_rows",
    "plan_dequantize",
    "plan_few_rows",
]
