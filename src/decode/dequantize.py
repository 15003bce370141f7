"""INT4 weights as 16-bit matrices for the large GEMM, one layer at a time into one scratch.

With many rows of x a product is bound by the tensor cores, and the weight's bytes matter little: what is streamed for
few rows is expanded for many, right before the large GEMM reads it. INT4 alone then serves prefill and decode.

    plan = plan_dequantize(packed)
    buffer = torch.empty(plan.elements, dtype=torch.bfloat16, device="cuda")    # the largest of all layers
    scratch = plan.view(buffer)
    plan.run(packed, scratch)
    large.run(x, scratch, out=y)

The scratch may serve the next layer once the GEMM is queued: kernels of a stream keep their order.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from epicute.decode.spec import WeightForm
from epicute.errors import require
from epicute.jit import CompileKey, ObjectCache, Target, modules_digest
from epicute.quant.launch import Launcher, anchor_and_stream
from epicute.weights import FragmentPacked, Packed, QuantizedInt4
from epicute.weights.packed import pitch_of

__all__ = ["DequantizeKernel", "DequantizePlan", "plan_dequantize"]

ARGUMENTS = ("codes", "target", "pieces", "blocks")
"""Addresses of records and matrix; pieces of 16 rows x 64 k; blocks of the launch."""

WARPS = 8
RESIDENT = 8
"""Blocks that share an SM."""

FORMATS = {torch.bfloat16: "bf16", torch.float16: "fp16"}
MODULES = ("epicute.decode.dequantize_kernel", "epicute.decode.dequantize")


@dataclass(frozen=True)
class DequantizeKernel:
    """What is compiled: a form of weight, the rows of its matrix and what its elements become."""

    form: WeightForm
    rows: int
    dtype: torch.dtype
    target: Target

    @cached_property
    def key(self) -> CompileKey:
        """Everything that decides the machine code."""
        record = self.form.records.record
        return CompileKey(
            kernel="decode.dequantize",
            fields=(
                ("rows", self.rows),
                ("K", self.form.depth),
                ("record", (record.depth, record.tiles, record.group, record.zeros)),
                ("along", self.form.records.along),
                ("scale_dtype", self.form.scale_dtype),
                ("dtype", self.dtype),
            ),
            sources=(modules_digest(*MODULES),),
            target=self.target,
        )

    @property
    def pitch(self) -> int:
        """Elements from one row to the next."""
        return pitch_of(self.form.depth, 2)

    def trace(self) -> tuple[Any, tuple[Any, ...]]:
        """The DSL function and its fake arguments."""
        import cutlass

        from epicute.decode.dequantize_kernel import Dequantizer

        anchor, stream = anchor_and_stream()
        arguments = tuple(cutlass.Int64(0) for _ in ARGUMENTS)
        return Dequantizer(self), (anchor, arguments, stream)


def plan_dequantize(
    packed: FragmentPacked,
    dtype: torch.dtype = torch.bfloat16,
    *,
    cache: ObjectCache | None = None,
) -> DequantizePlan:
    """Choose, compile (or load) and return what expands weights of ``packed``'s form and order.

    Args:
        packed: int4, from ``pack_few_rows`` or ``pack_fragments``.
        dtype: bfloat16 or float16, each value rounded once.
        cache: object cache; by default the user's.

    Raises:
        ArgumentError: another format or dtype.
    """
    require(
        isinstance(packed, FragmentPacked) and packed.format == "int4",
        "packed",
        getattr(packed, "format", type(packed).__name__),
        "an int4 FragmentPacked",
        "other formats are packed for the large GEMM as they are: Quantized.pack",
    )
    require(dtype in FORMATS, "dtype", dtype, "bfloat16 or float16", "choose x's dtype")
    return DequantizePlan(packed, dtype, cache)


class DequantizePlan:
    """A compiled expansion. Make one with ``plan_dequantize``."""

    def __init__(
        self, packed: FragmentPacked, dtype: torch.dtype, cache: ObjectCache | None = None
    ) -> None:
        self.form, self.order, self.dtype = WeightForm.of(packed), packed.order, dtype
        records = self.form.records
        self._pieces = records.down * records.along * records.record.blocks * records.record.tiles

        def describe(target: Target) -> DequantizeKernel:
            return DequantizeKernel(self.form, self.order.rows, dtype, target)

        self._launcher = Launcher(describe, (0, 0, 0, 1), packed.device, cache)

    @property
    def elements(self) -> int:
        """Elements of the matrix, padding included."""
        return self.order.rows * pitch_of(self.form.depth, 2)

    def view(self, buffer: torch.Tensor) -> Packed:
        """The first ``elements`` of a flat buffer as the weight that ``run`` writes and the large GEMM reads.

        Raises:
            ArgumentError: a buffer of another dtype, with gaps, or too short.
        """
        fits = (
            isinstance(buffer, torch.Tensor)
            and buffer.dtype == self.dtype
            and buffer.dim() == 1
            and buffer.is_contiguous()
            and buffer.numel() >= self.elements
            and buffer.data_ptr() % 16 == 0
        )
        require(
            fits,
            "buffer",
            f"{tuple(buffer.shape)} {buffer.dtype}" if isinstance(buffer, torch.Tensor) else buffer,
            f"at least {self.elements} adjacent {self.dtype}, one dimension, at a multiple of 16 bytes",
            "allocate torch.empty(plan.elements, dtype=…)",
        )
        pitch = pitch_of(self.form.depth, 2)
        codes = buffer[: self.elements].view(self.order.rows, pitch)
        shape = (self.form.columns, self.form.depth)
        return Packed(FORMATS[self.dtype], codes, None, self.order, shape, "dequantised")

    def run(self, packed: FragmentPacked, into: Packed) -> None:
        """Write the values of ``packed``, in its order, padding included; on the current stream.

        Raises ArgumentError before the launch: another form or order than the plan's, another device, an ``into`` that
        is not the plan's ``view``.
        """
        require(
            isinstance(packed, FragmentPacked)
            and WeightForm.of(packed) == self.form
            and packed.order_matches(self.order),
            "packed",
            repr(packed),
            f"{self.form} in order [{self.order}]",
            "plan again for that weight",
        )
        require(
            isinstance(into, Packed)
            and into.dtype == self.dtype
            and into.shape == packed.shape
            and into.order_matches(self.order)
            and into.device == packed.device,
            "into",
            repr(into),
            f"{FORMATS[self.dtype]} {packed.shape} in the same order on {packed.device}",
            "take plan.view(buffer)",
        )
        if packed.device.type == "cpu":
            quantized = packed.unpack()
            assert isinstance(quantized, QuantizedInt4)
            rows = torch.from_numpy(self.order.physical())
            into.codes.zero_()
            into.codes[rows, : self.form.depth] = quantized.dequantize().to(self.dtype)
            return
        index = packed.device.index
        most = self._launcher.multiprocessors(packed.device) * RESIDENT
        blocks = min(-(-self._pieces // WARPS), most)
        found = (packed.data.data_ptr(), into.codes.data_ptr(), self._pieces, blocks)
        self._launcher.launch(index, found)
