"""What a value becomes when it is stored in fewer bits: FP8 codes, scales, their delayed state."""

from epicute.quant.delayed import NOT_RUN, DelayedScale
from epicute.quant.fp8 import (
    E4M3_MAX,
    NAN_CODE,
    SCALE_MAX,
    SCALE_MIN,
    cast_e4m3,
    dequantize,
    inverse,
    quantize_rows,
    quantize_tensor,
    scale_for,
)

__all__ = [
    "E4M3_MAX",
    "NAN_CODE",
    "NOT_RUN",
    "SCALE_MAX",
    "SCALE_MIN",
    "DelayedScale",
    "cast_e4m3",
    "dequantize",
    "inverse",
    "quantize_rows",
    "quantize_tensor",
    "scale_for",
]
