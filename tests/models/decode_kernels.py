"""Kernels of a step on a machine without a GPU: compositions and attention in float64, under the plans' contracts.

Sums are exact to one float32 rounding, so that a row has the same bits in any batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from epicute.attention.decode_spec import CACHES, DecodeSpec
from epicute.attention.reference import attend
from epicute.decode import plan_dequantize
from epicute.epilogues import Composition
from epicute.kv import Int4Cache, slots_for
from epicute.layouts.kv_int4 import SCALE_BYTES, Int4Record
from epicute.models.kernels import Kernels
from epicute.quant.hadamard import rotate
from epicute.weights import FragmentPacked, QuantizedInt4
from tests.models.cpu_kernels import Launches


@dataclass
class Streamed:
    """A few-row projection."""

    composition: Composition
    options: dict[str, Any]
    launches: list[str]

    def admit(self, packed: FragmentPacked) -> None:
        """All memory is there at once."""

    def run(self, x: Tensor, packed: FragmentPacked, **operands: Any) -> None:
        self.launches.append(self.composition.title)
        packed.require_order(self.composition.row_order(packed.shape[0]), "the composition")
        assert x.dtype == self.options["x_dtype"]
        assert x.shape[0] <= max(self.options["max_rows"], 1)
        gain = operands.pop("norm_gain", None)
        assert (gain is not None) == self.options.get("norm_gain", False)
        quantized = packed.unpack()
        if isinstance(quantized, QuantizedInt4):
            weight = quantized.int4.dequantize(torch.float64)
        else:
            weight = quantized.codes.double()
        if packed.scale is not None:
            operands["weight_scale"] = packed.scale
        values = x if gain is None else (x.float() * gain).to(x.dtype)
        sums = (values.double() @ weight.T).float()
        for name, value in self.composition.evaluate(sums, **operands).items():
            operands[name].copy_(value)


@dataclass
class Decoding:
    """Attention of a step with ``DecodePlan.run``'s contract."""

    spec: DecodeSpec
    launches: list[str]

    def workspace(self, batch: int, device: torch.device) -> int:
        return batch

    def run(
        self,
        q: Tensor,
        cache: Tensor | tuple[Tensor, Tensor],
        *,
        out: Tensor,
        kv_lengths: Tensor,
        workspace: int,
        page_table: Tensor | None = None,
        **given: Any,
    ) -> None:
        self.launches.append("decode attention")
        assert workspace >= len(q)
        assert set(given) == self._operands()
        for row, length in enumerate(kv_lengths.tolist()):
            if length == 0:
                out[row] = 0.0
                continue
            k, v = self._rows(cache, row, length, page_table, given)
            mine = q[row : row + 1]
            if self.spec.rotation:
                mine = rotate(mine, self.spec.rotation)
            found, _ = attend(
                mine,
                k,
                v,
                window=self.spec.window,
                softcap=self.spec.softcap,
                scale=self.spec.scale,
            )
            if self.spec.rotation:
                found = rotate(found.float(), self.spec.rotation)
            out[row] = found[0].to(out.dtype)

    def _operands(self) -> set[str]:
        found = {"new_k", "new_v"} if self.spec.append else set()
        return found | ({"k_scale", "v_scale"} if self.spec.cache == "fp8" else set())

    def _rows(
        self, cache: Any, row: int, length: int, table: Tensor | None, given: dict[str, Any]
    ) -> tuple[Tensor, Tensor]:
        spec = self.spec
        if spec.packed:
            size = spec.page or cache.shape[2] // (2 * (spec.row_bytes + SCALE_BYTES))
        else:
            assert cache[0].dtype == cache[1].dtype == CACHES[spec.cache]
            size = cache[0].shape[1]
        pages = torch.arange(len(cache if spec.packed else cache[0]))[:, None]
        pages = pages[row : row + 1] if table is None else table[row : row + 1]
        slots = slots_for(pages, torch.arange(length), torch.zeros(length, dtype=torch.int64), size)
        if not spec.packed:
            found = [x[slots // size, slots % size].double() for x in cache]
            if spec.cache == "fp8":
                scales = (given["k_scale"], given["v_scale"])
                found = [x * s.double()[:, None] for x, s in zip(found, scales, strict=True)]
            return found[0], found[1]
        record = Int4Record(size, spec.head_dim)
        kind = Int4Cache(len(cache), spec.kv_heads, record, spec.rotation)
        new = [given[name][row : row + 1] for name in ("new_k", "new_v")]
        kind.write(cache, *new, slots[-1:])
        return kind.read(cache, slots)


@dataclass
class Appended:
    """A writer of INT4 rows, which has a CPU path of its own."""

    kind: Int4Cache
    launches: list[str]

    def run(self, memory: Tensor, keys: Tensor, values: Tensor, slots: Tensor) -> None:
        self.launches.append("append")
        self.kind.write(memory, keys, values, slots)


@dataclass
class Expanded:
    """An expansion of INT4 codes, which has a CPU path of its own."""

    packed: FragmentPacked
    dtype: torch.dtype
    launches: list[str]

    def __post_init__(self) -> None:
        self.plan = plan_dequantize(self.packed, self.dtype)
        self.elements, self.view = self.plan.elements, self.plan.view

    def run(self, packed: FragmentPacked, into: Any) -> None:
        self.launches.append("dequantize")
        self.plan.run(packed, into)


def step_kernels(made: list[str] | None = None) -> Kernels:
    """All kernels of prefill and step; what they launch is noted in ``made``, in order."""
    from dataclasses import replace

    made = [] if made is None else made
    return replace(
        Launches(made).kernels,
        few_rows=lambda composition, packed, options: Streamed(composition, options, made),
        decode=lambda spec, schedule: Decoding(spec, made),
        dequantize=lambda packed, dtype: Expanded(packed, dtype, made),
        append=lambda kind, dtype, device: Appended(kind, made),
    )
