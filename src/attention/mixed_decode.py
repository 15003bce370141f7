"""Decode attention over QK4PV8 pages: plan once, run at every step, on lengths and pages that only the device knows.

    keys       NVFP4, dequantised exactly; queries centred by their means, then float16
    logits     S = q_c·k_c + ΔS, the product begins with ΔS, in FP32 (``acc_init``)
    P          2^(S·λ - m·λ + log2 448) as E4M3; its sum is of FP32 before rounding
    O          sums of 128 tokens in the FP8 accumulator, promoted to FP32 (``two_level``)

A head's keys are cut in parts whose bounds depend on the request's own length alone; each is walked from its last tile
back, and parts are added in the order of their keys. So a request's bits depend on nothing else in the batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import log2
from typing import Any

import numpy as np
import torch

from epicute.attention.launch import Loaded
from epicute.attention.mixed_decode_build import MixedDecodeKernel, mixed_decode_kernel_for
from epicute.attention.mixed_decode_spec import (
    MIXED_DECODE_ARGUMENTS,
    MixedDecodeSchedule,
    MixedDecodeSpec,
)
from epicute.errors import require
from epicute.jit import ObjectCache, Report, Target
from epicute.kv.qk4pv8 import Memory, QK4PV8Cache
from epicute.quant.launch import check_apart, check_vector, wrong
from epicute.quant.smoothing import Means

__all__ = ["MixedDecodePlan", "MixedDecodeWorkspace", "plan_mixed_decode"]

LOG2_E = log2(2.718281828459045)

MOST_LENGTH = 2**31 - 2**16
"""Tokens that 32-bit arithmetic can count."""


@dataclass(frozen=True)
class MixedDecodeWorkspace:
    """Memory between the CTAs of a run. Runs that may overlap need one each; layers of a model share one.

    Attributes:
        counters: int32, zero between runs. A run that was aborted may leave others: make a new one.
        stats, partials: float32, partial results.
    """

    counters: torch.Tensor
    stats: torch.Tensor
    partials: torch.Tensor


def plan_mixed_decode(
    cache: QK4PV8Cache,
    dtype: torch.dtype = torch.bfloat16,
    *,
    append: bool = True,
    lse: bool = False,
    scale: float | None = None,
    p_scale: int = 448,
    prefetch: bool = False,
    target: Target | None = None,
    schedule: MixedDecodeSchedule | None = None,
    objects: ObjectCache | None = None,
) -> MixedDecodePlan:
    """Choose, compile (or load) and return what attends to ``cache``.

    One plan serves every batch, length, page table and pool of that shape.

    Args:
        cache: shape and scales, order exact16 or fast8.
        dtype, append, lse, scale, p_scale, prefetch: see ``MixedDecodeSpec``.
        target: by default the current GPU's, or sm_90a without one.
        schedule: by default ``choose_mixed_decode``'s.
        objects: object cache; by default the user's.

    Raises UnsupportedError for what there is no kernel for, ArgumentError for what makes no sense, CompileError where
    the kernel would spill or serialise.
    """
    require(
        isinstance(cache, QK4PV8Cache),
        "cache",
        type(cache).__name__,
        "a QK4PV8Cache",
        "describe it",
    )
    spec = MixedDecodeSpec(
        cache.q_heads,
        cache.kv_heads,
        cache.page,
        cache.terms,
        dtype,
        p_scale,
        lse,
        append,
        append and cache.k_scale != 1.0,
        append and cache.v_scale != 1.0,
        scale,  # type: ignore[arg-type]  # becomes a number
        prefetch,
    )
    kernel = mixed_decode_kernel_for(spec, target=target, schedule=schedule)
    return MixedDecodePlan(cache, kernel, objects)


class MixedDecodePlan:
    """A compiled kernel and what its operands must be.

    Attributes:
        cache: shape and scales of what it reads. kernel: spec, schedule and target. report: what the compiler said.
    """

    def __init__(
        self, cache: QK4PV8Cache, kernel: MixedDecodeKernel, objects: ObjectCache | None = None
    ) -> None:
        self.cache, self.kernel = cache, kernel
        self._loaded = Loaded(kernel, kernel.target, self._idle, objects)
        self.report: Report = self._loaded.report
        self._loaded.prepare()

    @property
    def spec(self) -> MixedDecodeSpec:
        """What it computes."""
        return self.kernel.spec

    def workspace(self, batch: int, device: torch.device | str = "cuda") -> MixedDecodeWorkspace:
        """Memory for up to ``batch`` requests of any length."""
        return workspace_of(self.kernel, batch, device)

    def run(
        self,
        q: torch.Tensor,
        memory: Memory,
        *,
        out: torch.Tensor,
        workspace: MixedDecodeWorkspace,
        kv_lengths: torch.Tensor,
        page_table: torch.Tensor,
        **operands: Any,
    ) -> None:
        """Write the attention of every request's last token to ``out``, and its new row to the cache.

        Allocates nothing, waits for nothing, launches one kernel on the current stream of q's device; may be captured.

        Args:
            q, out: (B, heads, head_dim), channels adjacent, heads and requests at multiples of 16 bytes. Queries beyond
                65504 behind centring overflow float16.
            memory: of the plan's cache; ΔS contiguous.
            workspace: of ``workspace(B)`` or more.
            kv_lengths: (B,) int32, keys of each request, the newest included.
            page_table: (B, pages) int32, adjacent pages; entries behind a request's end are not read. The page of a
                newest token belongs to its request alone.
            new_k, new_v: with ``append``: (B, kv_heads, head_dim), the newest token's row, after RoPE.
            means: of this layer, exactly where the cache has terms: one group, or one for each request.
            lse: with ``lse``: (B, heads) float32, written.

        A request of length 0 gets 0 and lse -inf. Tokens behind a length take no part, NaN or not. Numbers in lengths
        and table are trusted.

        Raises ArgumentError before the launch.
        """
        if not isinstance(q, torch.Tensor) or q.device.type != "cuda":
            raise wrong("q", q, "a CUDA tensor", "move q and the cache to a Hopper GPU")
        processors = self._loaded.processors(q.device)
        arguments = self.bind(
            q,
            memory,
            out=out,
            workspace=workspace,
            kv_lengths=kv_lengths,
            page_table=page_table,
            ctas=self.kernel.schedule.launched(self.spec, q.shape[0], processors),
            **operands,
        )
        if q.shape[0]:
            self._loaded.launch(q.get_device(), arguments)

    def bind(
        self,
        q: torch.Tensor,
        memory: Memory,
        *,
        ctas: int,
        out: torch.Tensor,
        workspace: MixedDecodeWorkspace,
        kv_lengths: torch.Tensor,
        page_table: torch.Tensor,
        **operands: Any,
    ) -> tuple[int, ...]:
        """Check everything as ``run`` does and return the kernel's arguments. ``ctas``: to be launched."""
        binder = Binder(self.cache, self.kernel)
        operands = {name: x for name, x in operands.items() if x is not None}
        return binder.bind(q, memory, out, workspace, (kv_lengths, page_table), operands, ctas)

    def _idle(self, address: int) -> tuple[int, ...]:
        """Arguments of a launch for no request, which loads the code and reads no operand."""
        found = dict.fromkeys(MIXED_DECODE_ARGUMENTS, 0)
        found["records"] = address
        found["page_stride"] = found["head_stride"] = self.spec.page.bytes
        found["ctas"] = 1
        return tuple(found.values())

    def __str__(self) -> str:
        return f"{self.spec}\n{self.kernel.schedule}; {self.kernel.target}\n{self.report}"


def workspace_of(
    kernel: MixedDecodeKernel, batch: int, device: torch.device | str
) -> MixedDecodeWorkspace:
    """Memory between the CTAs of a kernel for up to ``batch`` requests."""
    require(batch >= 0, "batch", batch, "a count", "give the largest batch")
    spec = kernel.spec
    heads = batch * spec.kv_heads * spec.blocks
    rows = heads * kernel.schedule.parts(spec) * spec.columns
    return MixedDecodeWorkspace(
        torch.zeros(heads, dtype=torch.int32, device=device),
        torch.empty(rows * 2, dtype=torch.float32, device=device),
        torch.empty(rows * spec.page.head_dim, dtype=torch.float32, device=device),
    )


class Binder:
    """Checks operands and collects a kernel's arguments."""

    def __init__(self, cache: QK4PV8Cache, kernel: MixedDecodeKernel) -> None:
        self.cache, self.kernel, self.spec = cache, kernel, kernel.spec

    def bind(
        self,
        q: torch.Tensor,
        memory: Memory,
        out: torch.Tensor,
        workspace: MixedDecodeWorkspace,
        places: tuple[torch.Tensor, torch.Tensor],
        operands: dict[str, Any],
        ctas: int,
    ) -> tuple[int, ...]:
        """All arguments, in order."""
        spec, page = self.spec, self.spec.page
        self._check_names(operands)
        device = q.device
        batch = q.shape[0] if q.ndim else 0
        found = dict.fromkeys(MIXED_DECODE_ARGUMENTS, 0)
        rows: dict[str, torch.Tensor] = {"q": q, "out": out}
        rows |= {name: operands[name] for name in ("new_k", "new_v") if name in operands}
        for name, x in rows.items():
            heads = spec.kv_heads if name.startswith("new") else spec.heads
            found |= self._row(name, x, (batch, heads, page.head_dim), device)
        if "lse" in operands:
            found |= self._lse(operands["lse"], batch, device)
        pool = self.cache.pool(memory)
        for name, held in (("memory.records", memory.records), ("memory.delta", memory.delta)):
            if held is not None and held.device != device:
                raise wrong(name, held, f"a tensor on {device}", "allocate the cache there")
        if memory.delta is not None and not _whole(memory.delta):
            expected = "contiguous memory at a multiple of 16 bytes"
            raise wrong("memory.delta", memory.delta, expected, "allocate() it")
        found["records"], found["pages"] = memory.records.data_ptr(), self.cache.pages
        found["page_stride"], found["head_stride"] = pool.page_stride, pool.head_stride
        found["delta"] = 0 if memory.delta is None else memory.delta.data_ptr()
        self._means(found, operands.get("means"), batch, device)
        self._places(found, places, batch, device)
        self._workspace(found, workspace, batch, device)
        check_apart(out=out, q=q, records=memory.records, delta=memory.delta)
        k_scale = np.float32(self.cache.k_scale)
        found["k_scale"], found["v_scale"] = _bits(k_scale), _bits(self.cache.v_scale)
        found["unit"] = _bits(np.float32(spec.scale * LOG2_E * 2.0**7 * float(k_scale)))
        found["batch"], found["ctas"] = batch, ctas
        return tuple(found.values())

    def _check_names(self, operands: dict[str, Any]) -> None:
        spec = self.spec
        needed = {"new_k", "new_v"} if spec.append else set()
        needed |= {"means"} if spec.terms else set()
        needed |= {"lse"} if spec.lse else set()
        require(
            set(operands) == needed,
            "operands",
            ", ".join(sorted(operands)) or "none",
            ", ".join(sorted(needed)) or "none",
            "plan with append, lse, or a cache with terms, for the others",
        )

    def _row(
        self, name: str, x: Any, shape: tuple[int, ...], device: torch.device
    ) -> dict[str, int]:
        expected = f"{shape} {self.spec.dtype} on {device}"
        if not isinstance(x, torch.Tensor) or x.shape != shape or x.device != device:
            raise wrong(name, x, expected, "pass one token of each request, by heads")
        if x.dtype != self.spec.dtype:
            raise wrong(name, x, expected, "plan for its dtype")
        steps = zip(x.shape[:2], x.stride()[:2], strict=True)
        whole = all(n <= 1 or step * 2 % 16 == 0 for n, step in steps)
        if x.stride(2) != 1 or not whole or x.data_ptr() % 16:
            raise wrong(
                name,
                x,
                "adjacent channels, and heads and requests at multiples of 16 bytes",
                f"pass {name}.contiguous()",
            )
        batch, head = (2 * step for step in x.stride()[:2])
        return {name: x.data_ptr(), f"{name}_batch": batch, f"{name}_head": head}

    def _lse(self, x: Any, batch: int, device: torch.device) -> dict[str, int]:
        shape = (batch, self.spec.heads)
        fits = isinstance(x, torch.Tensor) and x.shape == shape and x.dtype == torch.float32
        if not fits or x.device != device:
            raise wrong("lse", x, f"{shape} float32 on {device}", "allocate it so")
        return {
            "lse": x.data_ptr(),
            "lse_batch": 4 * x.stride(0),
            "lse_head": 4 * x.stride(1),
        }

    def _means(self, found: dict[str, int], means: Any, batch: int, device: torch.device) -> None:
        if means is None:
            return
        require(
            isinstance(means, Means) and len(means.q) in (1, batch),
            "means",
            f"{len(means.q)} groups" if isinstance(means, Means) else type(means).__name__,
            f"Means of one group, or of {batch}",
            "pass the rows of these requests",
        )
        for name, x, heads in (
            ("q_mean", means.q, self.spec.heads),
            ("k_mean", means.k, self.spec.kv_heads),
        ):
            shape = (len(means.q), heads, self.spec.page.head_dim)
            if x.shape != shape or x.device != device or not _whole(x):
                expected = f"contiguous {shape} on {device}, at a multiple of 16 bytes"
                raise wrong(name, x, expected, "pass this layer's means")
            found[name] = x.data_ptr()
        found["mean_groups"] = len(means.q)

    def _places(
        self,
        found: dict[str, int],
        places: tuple[torch.Tensor, torch.Tensor],
        batch: int,
        device: torch.device,
    ) -> None:
        lengths, table = places
        check_vector("kv_lengths", lengths, batch, (torch.int32,), device)
        fits = isinstance(table, torch.Tensor) and table.ndim == 2 and table.shape[0] == batch
        if not fits or table.dtype != torch.int32 or table.device != device:
            raise wrong("page_table", table, f"({batch}, pages) int32 on {device}", "pass it so")
        if table.shape[1] * self.spec.page.page_size > MOST_LENGTH or (
            table.stride(1) != 1 and table.shape[1] > 1
        ):
            raise wrong("page_table", table, "adjacent pages of each request", "contiguous()")
        found["kv_lengths"], found["page_table"] = lengths.data_ptr(), table.data_ptr()
        found["table_row"] = 4 * table.stride(0)

    def _workspace(
        self,
        found: dict[str, int],
        workspace: Any,
        batch: int,
        device: torch.device,
    ) -> None:
        wanted = workspace_of(self.kernel, batch, "meta")
        for name in ("counters", "stats", "partials"):
            x, like = getattr(workspace, name, None), getattr(wanted, name)
            if (
                not isinstance(x, torch.Tensor)
                or (x.device, x.dtype) != (device, like.dtype)
                or x.numel() < like.numel()
                or not _whole(x)
            ):
                expected = f"{like.numel()} adjacent {like.dtype} or more on {device}, at 16 bytes"
                fix = f"make it with workspace({batch})"
                raise wrong(f"workspace.{name}", x, expected, fix)
            found[name] = x.data_ptr()


def _whole(x: torch.Tensor) -> bool:
    """Whether vectors of 16 bytes follow each other in a tensor."""
    return x.is_contiguous() and x.data_ptr() % 16 == 0


def _bits(scale: Any) -> int:
    return int(np.float32(scale).view(np.int32))
