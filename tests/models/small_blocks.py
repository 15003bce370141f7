"""Layers of a few hundred weights that have kernels, for what is slow: the emulator, compute-sanitizer."""

from __future__ import annotations

import torch

from epicute.models import LayerShape
from epicute.models.block_spec import BlockSpec
from tests.models.layers import FP8

SMALL = LayerShape(128, 192, 4, 2, 64, "small")
ODD = LayerShape(72, 144, 3, 1, 64, "odd")
"""A hidden size that is no multiple of 16, which FP8 rows are padded to, and three query heads of one."""

SPECS = {
    "fp8": BlockSpec(SMALL),
    "bf16": BlockSpec(SMALL, "bf16", bias=True, qk_norm=True),
    "fp8, gains as operands": BlockSpec(ODD, gains="operand"),
    "fp8, rows": BlockSpec(SMALL, scaling="row", bias=True),
    "fp8, rows, last, gains as operands": BlockSpec(ODD, scaling="row", gains="operand", last=True),
    "fp8, last, fp8 cache": BlockSpec(SMALL, last=True, cache=FP8, qk_norm=True),
    "fp16, window, softcap": BlockSpec(
        SMALL, "fp16", cache=torch.float16, window=7, softcap=20.0, gain_offset=1.0
    ),
    "bf16, heads of 80": BlockSpec(LayerShape(160, 96, 2, 1, 80, "80"), "bf16"),
    "bf16, heads of 96": BlockSpec(LayerShape(192, 96, 2, 2, 96, "96"), "bf16", qk_norm=True),
    "bf16, heads of 256": BlockSpec(LayerShape(256, 96, 1, 1, 256, "256"), "bf16"),
    "fp8, heads of 128": BlockSpec(LayerShape(256, 96, 2, 1, 128, "128")),
}

LENGTHS = (5, 0, 17, 1)
"""Tokens of the requests of a batch."""
