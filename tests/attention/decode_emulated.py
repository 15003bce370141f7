"""Decode attention without a GPU: the compiled PTX, run on the CPU."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import torch

from epicute.attention.decode import DecodeWorkspace
from epicute.attention.decode_build import decode_kernel_for
from epicute.attention.decode_fragments import TileLayout
from epicute.attention.decode_operands import Binder
from epicute.attention.decode_schedule import DecodeSchedule, choose_decode
from epicute.attention.decode_spec import DecodeSpec
from epicute.jit import DEFAULT_TARGET
from tests.attention.decode_cases import Decoded
from tests.ptx import Kernel, TensorMap, ptx_of

__all__ = ["emulate", "workspace"]


@cache
def kernel(spec: DecodeSpec, schedule: DecodeSchedule) -> Kernel:
    """The compiled kernel."""
    return Kernel(ptx_of(decode_kernel_for(spec, target=DEFAULT_TARGET, schedule=schedule)))


def workspace(spec: DecodeSpec, schedule: DecodeSchedule, batch: int, ctas: int) -> DecodeWorkspace:
    """Counters of zero; all else holds NaN."""
    counters, data = Binder(spec, schedule).workspace(batch, ctas)
    return DecodeWorkspace(
        torch.zeros(counters, dtype=torch.int32), torch.full((data,), float("nan"))
    )


def tensor_map(x: torch.Tensor, spec: DecodeSpec, schedule: DecodeSchedule) -> TensorMap:
    """What TMA knows of keys, or values (pages, page, kv_heads, head_dim)."""
    size, layout = x.element_size(), TileLayout(schedule.tile, spec.row_bytes)
    axes = [(3, layout.chunk // size), (1, schedule.unit(spec)), (2, 1), (0, 1)]
    if spec.kv_heads == 1:
        del axes[2]
    return TensorMap(
        x.data_ptr(),
        size,
        tuple(x.shape[axis] for axis, _ in axes),
        tuple(x.stride(axis) * size for axis, _ in axes[1:]),
        tuple(count for _, count in axes),
        layout.chunk if layout.swizzled else 0,
    )


def emulate(
    batch: Decoded,
    ctas: int = 3,
    *,
    schedule: DecodeSchedule | None = None,
    seed: int | None = 0,
    races: bool = False,
    memory: DecodeWorkspace | None = None,
    early: Sequence[torch.Tensor] | None = None,
) -> DecodeWorkspace:
    """Run a batch on ``ctas`` CTAs, one after the other; the workspace, whose counters are zero again.

    ``early``: what may be touched before the kernel in front has ended; by default what the spec says.
    """
    spec = batch.spec
    schedule = choose_decode(spec) if schedule is None else schedule
    memory = workspace(spec, schedule, len(batch.lengths), ctas) if memory is None else memory
    given = {**batch.given(), "workspace": memory}
    arguments = Binder(spec, schedule).bind(batch.q, batch.cache, ctas, given)
    assert arguments is not None
    cached = [batch.cache] if spec.packed else list(batch.cache)
    maps = [] if spec.packed else [tensor_map(x, spec, schedule) for x in cached]
    touched = [batch.q, *cached, memory.counters, memory.data, *batch.given().values()]
    if early is None:
        known = [given["kv_lengths"], given.get("page_table", given["kv_lengths"]), *cached]
        early = known if spec.prefetch else ()
    kernel(spec, schedule).launch(
        arguments,
        *touched,
        grid=ctas,
        maps=maps,
        seed=seed,
        races=races,
        early=early,
    )
    assert not memory.counters.any(), "counters are not zero again"
    return memory
