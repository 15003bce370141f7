"""LLM-inference kernels in CuTe DSL: GEMMs with epilogues composed from policies in Python.

from epicute import Dequantize, EmitFP8, RowScale, SwiGLU, linear, plan

fused = Dequantize() >> RowScale(width=4096) >> SwiGLU() >> EmitFP8()
packed = weight.quantize("fp8").pack(fused.row_order(weight.shape[0]))
"""

from importlib.metadata import PackageNotFoundError, version

from epicute.epilogues import *  # noqa: F403
from epicute.epilogues import __all__ as _policies
from epicute.errors import EpicuteError
from epicute.gemm import (
    Plan,
    Schedule,
    align_rows,
    autotune,
    explain,
    kernel_for,
    linear,
    plan,
)
from epicute.jit import Target
from epicute.weights import Packed, Quantized, Weight

try:
    __version__ = version("epicute")
except PackageNotFoundError:  # a bare checkout on the path
    __version__ = "0.1.0"

__all__ = [
    *_policies,
    "EpicuteError",
    "Packed",
    "Plan",
    "Quantized",
    "Schedule",
    "Target",
    "Weight",
    "align_rows",
    "autotune",
    "explain",
    "kernel_for",
    "linear",
    "plan",
]
