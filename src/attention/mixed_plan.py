"""Plan mixed-precision attention once, run it many times: ``run`` checks, collects addresses and launches.

As ``attention.plan`` has it: nothing is allocated on the device or waited for, and a run may be captured.
"""

from __future__ import annotations

from typing import Any

import torch

from epicute.attention.build import AttentionKernel
from epicute.attention.mixed import (
    MIXED_ARGUMENTS,
    MixedKernel,
    MixedSchedule,
    MixedSpec,
    mixed_kernel_for,
)
from epicute.attention.plan import (
    REMEMBERED,
    SECTION_BYTES,
    AttentionPlan,
    Rows,
    _check_steps,
    _index,
    _overlap,
    _place,
    _take,
    _wrong,
)
from epicute.errors import require
from epicute.jit import ObjectCache, Target

__all__ = ["MixedPlan", "plan_mixed"]


SHIFTS = 64
"""Powers of two that fast8 may take out of keys."""


def plan_mixed(
    spec: MixedSpec,
    *,
    target: Target | None = None,
    schedule: MixedSchedule | None = None,
    device: torch.device | str | int | None = None,
    cache: ObjectCache | None = None,
) -> MixedPlan | AttentionPlan:
    """Choose, compile (or load) and return what runs ``spec``; of ``bf16/bf16`` the plan of ``spec.plain()``.

    Args:
        spec: what to compute.
        target: by default the device's, or sm_90a without one.
        schedule: by default ``choose_mixed(spec)``.
        device: as of ``plan_attention``.
        cache: object cache; by default the user's.

    Raises UnsupportedError for what ``MIXED_LEGALITY`` refuses, ArgumentError for a schedule that does not fit,
    CompileError where the kernel would spill or serialise.
    """
    require(
        isinstance(spec, MixedSpec),
        "spec",
        type(spec).__name__,
        "a MixedSpec",
        "write plan_mixed(MixedSpec(heads=32, kv_heads=8, head_dim=128, page=128))",
    )
    index = _index(device)
    target = Target.detect(index) if target is None else target
    kernel = mixed_kernel_for(spec, target=target, schedule=schedule)
    if isinstance(kernel, AttentionKernel):
        return AttentionPlan(kernel, cache, index)
    return MixedPlan(kernel, cache, index)


class MixedPlan(AttentionPlan):
    """A compiled kernel and what its operands must be.

    Attributes:
        kernel: spec, schedule and target.
        report: what the compiler said.
    """

    kernel: MixedKernel  # type: ignore[assignment]

    def __init__(
        self, kernel: MixedKernel, cache: ObjectCache | None = None, index: int | None = None
    ) -> None:
        super().__init__(kernel, cache, index)  # type: ignore[arg-type]

    @property
    def spec(self) -> MixedSpec:  # type: ignore[override]
        """What it computes."""
        return self.kernel.spec

    def run(
        self,
        q: torch.Tensor,
        *memory: torch.Tensor | None,
        out: torch.Tensor,
        shift: int = 0,
        **operands: Any,
    ) -> None:
        """Write the attention of ``q`` over a cache to ``out``.

        Args:
            q, out: as of ``AttentionPlan.run``; q in 16 bits, neither centred nor quantised.
            memory: fp8/fp8: k and v, float8_e4m3fn, as of ``AttentionPlan.run``. nvfp4/fp8: records (pages, kv_heads,
                bytes) uint8, whose keys are ordered for ``spec.qk``, and where the spec has terms delta (pages, heads,
                terms, page) bfloat16: a ``kv.qk4pv8.Memory``, unpacked.
            shift: fast8: keys are rounded as E4M3 times 2^-shift, -64 to 64; it cancels.
            operands: q_starts, kv_starts, q_lengths, kv_lengths, page_table, sinks, lse, out_scale, amax, saturated,
                nans as of ``AttentionPlan.run``; k_scale, v_scale (kv_heads,) float32, positive, in either precision
                (of NVFP4 keys the second-level scale); where the spec has terms q_mean (groups, heads, head_dim)
                float32, ``Means.q`` of one group or of one for each request.

        Keys were centred by the same means, so that the LSE is short of ``quant.smoothing.lse_shift``. Queries less
        their mean must be within ±65504 in exact16.

        Raises ArgumentError before any launch.
        """
        given = tuple(x for x in memory if x is not None)
        operands = {name: x for name, x in operands.items() if x is not None}
        # The checks are functions of these alone: tensors like those of a call before need no other.
        try:
            tensors = (q, out, *given, *operands.values())
            seen = (
                shift,
                *operands,
                *[(t.data_ptr(), t.shape, t.stride(), t.dtype, t.get_device()) for t in tensors],
            )
            arguments = self._bound[seen]
        except (AttributeError, KeyError, RuntimeError, TypeError):
            arguments = self._bind_mixed(q, given, out, operands, shift)
            if len(self._bound) >= REMEMBERED:
                self._bound.clear()
            self._bound[seen] = arguments
        if arguments is not None:
            self._loaded.launch(q.get_device(), arguments)

    def _bind_mixed(
        self,
        q: torch.Tensor,
        memory: tuple[torch.Tensor, ...],
        out: torch.Tensor,
        operands: dict[str, Any],
        shift: int,
    ) -> tuple[int, ...] | None:
        """Check everything and return the kernel's arguments; None where there is nothing to do."""
        spec = self.spec
        names = ("records", "delta")[: 1 + (spec.terms > 0)] if spec.recorded else ("k", "v")
        require(
            len(memory) == len(names) and all(isinstance(x, torch.Tensor) for x in memory),
            "memory",
            f"{len(memory)} tensors",
            " and ".join(names),
            "pass *memory of the cache that this spec reads",
        )
        shifted = spec.recorded and not spec.wide
        require(
            type(shift) is int and abs(shift) <= (SHIFTS if shifted else 0),
            "shift",
            shift,
            f"an integer from {-SHIFTS} to {SHIFTS}" if shifted else "0, unless keys are fast8",
            "leave it out",
        )
        self._check_names(operands)
        queries = self._check_rows("q", q, spec.heads, spec.dtype)
        require(
            q.device.type == "cuda",
            "q",
            f"a tensor on {q.device}",
            "a CUDA tensor",
            "move the operands to a Hopper GPU",
        )
        processors = self._loaded.processors(q.device)
        found = dict.fromkeys(MIXED_ARGUMENTS, 0)
        _take(found, "q", q, spec.packed)
        written = self._check_rows("out", out, spec.heads, spec.out_dtype)
        if written != queries:
            raise _wrong("out", out, f"the shape of q, {tuple(q.shape)}", "allocate it like q")
        _take(found, "out", out, spec.packed)
        if spec.recorded:
            keys = self._take_records(found, *memory)
        else:
            keys = self._take_keys(found, memory[0], memory[1], q)
        vectors = {name: x for name, x in operands.items() if name != "q_mean"}
        batch = self._take_vectors(found, vectors, queries, q)
        if spec.terms:
            self._take_means(found, operands["q_mean"], batch)
        if spec.page is None and not spec.packed and keys.batches != batch:
            raise _wrong("k", memory[0], f"a batch of {batch}", "pass k and v of each request")
        given = dict(zip(names, memory, strict=True))
        for name, tensor in {**given, "out": out, **operands}.items():
            if tensor.device != q.device:
                raise _wrong(name, tensor, f"q's device, {q.device}", f"{name}.to(q.device)")
        for name, x in {"q": q, **given}.items():
            in_place = name == "q" and _place(x) == _place(out)
            if not in_place and x.ndim == out.ndim and _overlap(out, x):
                raise _wrong(
                    "out", out, f"memory apart from {name}", f"allocate it apart from {name}"
                )
        if queries.rows == 0 or batch == 0:
            return None
        found["batch"], found["q_rows"] = batch, queries.rows
        found["kv_rows"], found["kv_batches"] = keys.rows, keys.batches
        found["clusters"] = processors // self.kernel.schedule.cluster
        found["section"] = self._section(keys, batch)
        found["shift"] = shift
        return tuple(found.values())

    def _section(self, keys: Rows, batch: int) -> int:
        """KV heads whose keys and values fit in L2 together: a divisor of them all."""
        spec = self.spec
        if spec.page is not None:
            return spec.kv_heads
        size = 2 * keys.rows * keys.batches * spec.head_dim
        most = max(1, SECTION_BYTES // max(size, 1))
        return max(n for n in range(1, spec.kv_heads + 1) if spec.kv_heads % n == 0 and n <= most)

    def _idle(self, address: int) -> tuple[int, ...]:
        """Arguments of a launch for no request, which loads the code and reads no operand."""
        spec = self.spec
        found = dict.fromkeys(MIXED_ARGUMENTS, 0)
        for name in ("q", "k", "v"):
            for step in ("row", "head", "batch"):
                found[f"{name}_{step}"] = spec.head_dim
        # A tensor map's address and steps are looked at even where nothing is read.
        for name in ("q", "k", "v", "records", "delta", "q_mean", "out_scale"):
            found[name] = address
        for name in ("record_page", "record_head", "delta_page", "delta_head", "delta_term"):
            found[name] = 1024
        found["mean_groups"] = found["record_pages"] = 1
        found["clusters"], found["section"] = 1, spec.kv_heads
        return tuple(found.values())

    def _check_names(self, operands: dict[str, Any]) -> None:
        """Refuse operands that the spec does not know, and the lack of those it needs."""
        smoothed = self.spec.terms > 0
        require(
            isinstance(operands.get("q_mean"), torch.Tensor) == smoothed
            and ("q_mean" in operands) == smoothed,
            "q_mean",
            type(operands.get("q_mean")).__name__,
            "a tensor" if smoothed else "none, as nothing is smoothed",
            "pass Means.q exactly where the spec has terms",
        )
        super()._check_names({name: x for name, x in operands.items() if name != "q_mean"})

    def _take_records(
        self, found: dict[str, int], records: torch.Tensor, delta: torch.Tensor | None = None
    ) -> Rows:
        """Check records and ΔS and put them among the arguments; their rows."""
        spec = self.spec
        wanted = (spec.kv_heads, spec.record.bytes)
        if (
            not isinstance(records, torch.Tensor)
            or records.dtype != torch.uint8
            or records.ndim != 3
            or tuple(records.shape[1:]) != wanted
            or records.shape[0] == 0
        ):
            shape = f"(pages, {wanted[0]}, {wanted[1]}) uint8"
            raise _wrong("records", records, shape, f"allocate QK4PV8Cache of {spec.record}")
        _check_steps("records", records)
        found["records"], found["record_pages"] = records.data_ptr(), records.shape[0]
        steps = _steps(records)
        found["record_page"], found["record_head"] = steps[0], steps[1]
        if delta is not None:
            pages, page = records.shape[0], spec.page
            side = (pages, spec.heads, spec.terms, page)
            if (
                not isinstance(delta, torch.Tensor)
                or delta.dtype != torch.bfloat16
                or tuple(delta.shape) != side
            ):
                raise _wrong("delta", delta, f"{side} bfloat16", "allocate it with the records")
            _check_steps("delta", delta)
            found["delta"] = delta.data_ptr()
            names = ("delta_page", "delta_head", "delta_term")
            found.update(zip(names, _steps(delta), strict=False))
        return Rows(records.shape[0], spec.page or 0)

    def _take_means(self, found: dict[str, int], means: torch.Tensor, batch: int) -> None:
        spec = self.spec
        lead = means.shape[0] if means.ndim == 3 else 0
        if (
            means.dtype != torch.float32
            or tuple(means.shape[1:]) != (spec.heads, spec.head_dim)
            or lead not in (1, batch)
            or not means.is_contiguous()
            or means.data_ptr() % 16
        ):
            shape = f"contiguous (1 or {batch}, {spec.heads}, {spec.head_dim}) float32"
            raise _wrong("q_mean", means, shape, "pass Means.q of this layer")
        found["q_mean"], found["mean_groups"] = means.data_ptr(), lead


def _steps(x: torch.Tensor) -> list[int]:
    """Strides of all axes but the last; an axis of one element has no step, and gets a harmless one."""
    pairs = zip(x.shape[:-1], x.stride()[:-1], strict=True)
    return [step if n > 1 else 128 * x.shape[-1] for n, step in pairs]
