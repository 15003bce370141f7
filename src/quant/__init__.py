"""What a value becomes when it is stored in fewer bits: FP8 codes, scales, their delayed state."""

from epicute.quant.delayed import NOT_RUN, DelayedScale
from epicute.quant.fp8 import (
    E4M3_MAX,
    NAN_CODE,
    SCALE_MAX,
    SCALE_MIN,
    cast_e4m3,
    delayed_scale,
    dequantize,
    inverse,
    quantize_rows,
    quantize_tensor,
    scale_for,
)
from epicute.quant.gptq import GptqConfig, GptqResult, Hessian, quantize_gptq
from epicute.quant.gptq_run import GptqRun, Linear, Progress, ProgressBar
from epicute.quant.group import DelayedGroup
from epicute.quant.hadamard import rotate
from epicute.quant.int4 import (
    ClipSearch,
    Int4Codes,
    Int4Grid,
    quantize_int4,
)
from epicute.quant.nvfp4 import dequantize_nvfp4, quantize_nvfp4
from epicute.quant.roll import plan_roll
from epicute.quant.rowwise import plan_rows

__all__ = [
    "E4M3_MAX",
    "NAN_CODE",
    "NOT_RUN",
    "SCALE_MAX",
    "SCALE_MIN",
    "ClipSearch",
    "DelayedGroup",
    "DelayedScale",
    "GptqConfig",
    "GptqResult",
    "GptqRun",
    "Hessian",
    "Int4Codes",
    "Int4Grid",
    "Linear",
    "Progress",
    "ProgressBar",
    "cast_e4m3",
    "delayed_scale",
    "dequantize",
    "dequantize_nvfp4",
    "inverse",
    "plan_roll",
    "plan_rows",
    "quantize_gptq",
    "quantize_int4",
    "quantize_nvfp4",
    "quantize_rows",
    "quantize_tensor",
    "rotate",
    "scale_for",
]
