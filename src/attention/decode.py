"""Decode attention: plan once, run at every step, on lengths and pages that only the device knows.

``run`` allocates nothing, waits for nothing, launches one kernel on the current stream of q's device and may be
captured: a graph that was captured with short requests serves long ones.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from epicute.attention.decode_arguments import DECODE_ARGUMENTS
from epicute.attention.decode_build import DecodeKernel, decode_kernel_for
from epicute.attention.decode_operands import Binder
from epicute.attention.decode_schedule import DecodeSchedule
from epicute.attention.decode_spec import DecodeSpec
from epicute.attention.launch import Loaded
from epicute.errors import CompileError, require
from epicute.jit import ObjectCache, Report, Target

__all__ = ["DecodePlan", "DecodeWorkspace", "plan_decode"]


@dataclass(frozen=True)
class DecodeWorkspace:
    """Memory between the CTAs of a run. Runs that may overlap need one each; layers of a model share one.

    Attributes:
        counters: int32, zero between runs. A run that was aborted may leave others: make a new one.
        data: float32, partial results.
    """

    counters: torch.Tensor
    data: torch.Tensor


def plan_decode(
    spec: DecodeSpec,
    *,
    target: Target | None = None,
    schedule: DecodeSchedule | None = None,
    cache: ObjectCache | None = None,
) -> DecodePlan:
    """Choose, compile (or load) and return what runs ``spec``.

    One plan serves every batch, length, stride and page table. What recompiles: another field of the spec, schedule or
    target.

    Args:
        spec: what to compute.
        target: by default the current GPU's, or sm_90a without one.
        schedule: by default ``choose_decode(spec)``.
        cache: object cache; by default the user's.

    Raises UnsupportedError for what ``DECODE_LEGALITY`` refuses, ArgumentError for a schedule that does not fit,
    CompileError where the kernel would spill.
    """
    require(
        isinstance(spec, DecodeSpec),
        "spec",
        type(spec).__name__,
        "a DecodeSpec",
        "write plan_decode(DecodeSpec(heads=32, kv_heads=8, head_dim=128, page=64))",
    )
    kernel = decode_kernel_for(spec, target=target, schedule=schedule)
    try:
        return DecodePlan(kernel, cache)
    except CompileError:
        if schedule is not None or kernel.schedule.resident == 1:
            raise
    # Half of an SM's registers do not suffice: a CTA has the SM to itself.
    alone = replace(kernel.schedule, resident=1)
    return DecodePlan(decode_kernel_for(spec, target=target, schedule=alone), cache)


class DecodePlan:
    """A compiled kernel and what its operands must be.

    Attributes:
        kernel: spec, schedule and target.
        report: what the compiler said.
    """

    def __init__(self, kernel: DecodeKernel, cache: ObjectCache | None = None) -> None:
        self.kernel = kernel
        self._binder = Binder(kernel.spec, kernel.schedule)
        self._loaded = Loaded(kernel, kernel.target, self._idle, cache)
        self.report: Report = self._loaded.report
        self._loaded.prepare()

    @property
    def spec(self) -> DecodeSpec:
        """What it computes."""
        return self.kernel.spec

    def workspace(self, batch: int, device: torch.device | str | None = None) -> DecodeWorkspace:
        """Memory for runs of up to ``batch`` requests on ``device``, by default the current GPU."""
        found = torch.device("cuda" if device is None else device)
        ctas = self._loaded.processors(found) if found.type == "cuda" else 1
        counters, data = self._binder.workspace(batch, ctas)
        return DecodeWorkspace(
            torch.zeros(counters, dtype=torch.int32, device=found),
            torch.empty(data, dtype=torch.float32, device=found),
        )

    def run(
        self,
        q: torch.Tensor,
        cache: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
        *,
        out: torch.Tensor,
        kv_lengths: torch.Tensor,
        workspace: DecodeWorkspace,
        **operands: Any,
    ) -> None:
        """Write the attention of the last tokens of B requests to ``out``.

        Args:
            q, out: (B, rows, heads, head_dim), or (B, heads, head_dim) for one row. With ``rows`` R, row r is the token
                at position kv_lengths - R + r.
            cache: keys and values, each (pages, page, kv_heads, head_dim), or contiguous (B, max_len, kv_heads,
                head_dim), any strides with the channels of a head adjacent. INT4: records (pages, kv_heads, bytes)
                uint8 (``Int4Cache``), contiguous one of max_len tokens for each request.
            kv_lengths: (B,) int32, keys of each request, the new ones included. 0: a row of padding; its output is 0,
                its LSE -inf, and neither counters nor cache see it.
            workspace: of ``workspace(batch)`` for this many requests or more.
            page_table: paged: (B, pages) int32; entries behind a request's end are not read.
            new_k, new_v: with ``append``: (B, rows, kv_heads, head_dim), or without rows for one, of the dtype of q:
                the new tokens, keys after RoPE. Nibbles and scales are those of ``kv.int4.quantize_row``, to the bit.
            sinks: (heads,) float32. lse: (B, heads, rows), or (B, heads) for one row, float32, written.
            k_scale, v_scale: (kv_heads,) float32 of an FP8 cache.
            out_scale: (1,) float32; amax (1,) float32, saturated and nans (1,) int64, raised: of a float8 output, as
                ``EmitFP8`` says.

        A query that sees no key gets 0 and lse -inf. Keys and values behind a length take no part, NaN or not, in
        scales too. The numbers in lengths and tables are trusted: they must lie within what was passed.

        Raises ArgumentError before any launch.
        """
        given = {"out": out, "kv_lengths": kv_lengths, "workspace": workspace, **operands}
        self._binder.check_device(q)
        processors = self._loaded.processors(q.device)
        arguments = self._binder.bind(q, cache, processors, given)
        if arguments is not None:
            self._loaded.launch(q.get_device(), arguments)

    def _idle(self, address: int) -> tuple[int, ...]:
        """Arguments of a launch for no request, which loads the code and reads no operand."""
        found = dict.fromkeys(DECODE_ARGUMENTS, 0)
        for name in ("k", "v"):
            found[name] = address
            for step in ("page", "token", "head"):
                found[f"{name}_{step}"] = self.spec.head_dim
        found["out_scale"] = address
        found["ctas"] = 1
        return tuple(found.values())

    def __str__(self) -> str:
        return f"{self.spec}\n{self.kernel.schedule}; {self.kernel.target}\n{self.report}"
