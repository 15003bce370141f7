"""Runs a mixed-precision kernel's PTX on the CPU."""

from __future__ import annotations

from functools import cache

import torch

from epicute.attention.mixed import MIXED_ARGUMENTS, MixedSchedule, MixedSpec, mixed_kernel_for
from epicute.attention.mixed_places import value_width
from epicute.jit import Target
from tests.attention.mixed_cases import MixedBatch
from tests.gemm.device import Output
from tests.ptx import Kernel, TensorMap, ptx_of


@cache
def compiled(
    spec: MixedSpec, schedule: MixedSchedule | None = None
) -> tuple[Kernel, MixedSchedule]:
    """The emulated kernel of a spec."""
    kernel = mixed_kernel_for(spec, target=Target("sm_90a"), schedule=schedule)
    return Kernel(ptx_of(kernel)), kernel.schedule


def maps(batch: MixedBatch, q: torch.Tensor, schedule: MixedSchedule) -> list[TensorMap]:
    """Tensor maps in the order of the kernel's parameters."""
    spec, d = batch.spec, batch.spec.head_dim
    rows, batches = q.shape[-3], (1 if spec.packed else q.shape[0])
    step = q.stride(-3) * 2
    lead = [(d, 2, 64), (rows, step, schedule.tile_m), (spec.heads, 2 * d, 1)]
    tail = [(batches, 16 if spec.packed else q.stride(0) * 2, 1)]
    found = [dynamic(q, 0, 2, lead, tail, 128)]
    share = schedule.tile_n // schedule.cluster
    box = share if spec.page is None else min(spec.page, share)
    if not spec.recorded:
        for x in batch.memory:
            lead = [(d, 1, d), (x.shape[-3], x.stride(-3), box), (spec.kv_heads, x.stride(-2), 1)]
            tail = [(1, 16, 1) if x.ndim == 3 else (x.shape[0], x.stride(0), 1)]
            found.append(dynamic(x, 0, 1, lead, tail, d))
        return found
    records, record = batch.memory[0], spec.record
    heads = (spec.kv_heads, records.stride(1), 1)
    pages = [(records.shape[0], records.stride(0), 1)]
    page = spec.page
    assert page is not None
    lead = [(d // 2, 1, d // 2), (page, d // 2, box), heads]
    found.append(dynamic(records, 0, 1, lead, pages, d // 2))
    lead = [(page * d // 64, 4, box * d // 64), heads]
    found.append(dynamic(records, record.scales_start, 4, lead, pages, 0))
    width = value_width(page)
    lead = [(page, 1, width), (d, page, d // schedule.cluster), heads]
    found.append(dynamic(records, record.values_start, 1, lead, pages, width))
    if spec.terms:
        delta, mean = batch.memory[1], batch.operands["q_mean"]
        steps = [2 * s for s in delta.stride()]
        lead = [(page, 2, page), (spec.terms, steps[2], spec.terms), (spec.heads, steps[1], 1)]
        found.append(dynamic(delta, 0, 2, lead, [(delta.shape[0], steps[0], 1)], 0))
        lead = [(d, 4, d), (spec.heads, 4 * d, 1)]
        found.append(dynamic(mean, 0, 4, lead, [(mean.shape[0], 4 * d * spec.heads, 1)], 0))
    return found


def dynamic(
    x: torch.Tensor,
    offset: int,
    size: int,
    known: list[tuple[int, int, int]],
    unknown: list[tuple[int, int, int]],
    swizzle: int,
) -> TensorMap:
    """A map whose dimensions of extent 1 are left out where the kernel knows them."""
    kept = [d for i, d in enumerate(known) if i == 0 or d[0] != 1] + unknown
    return TensorMap(
        x.data_ptr() + offset,
        size,
        tuple(d[0] for d in kept),
        tuple(d[1] for d in kept[1:]),
        tuple(d[2] for d in kept),
        swizzle,
    )


def arguments(
    batch: MixedBatch, q: torch.Tensor, out: Output, lse: Output | None
) -> dict[str, int]:
    """The kernel's integers."""
    spec = batch.spec
    found = dict.fromkeys(MIXED_ARGUMENTS, 0)
    given = [("q", q), ("out", out.tensor)]
    if not spec.recorded:
        given += list(zip(("k", "v"), batch.memory, strict=True))
    for name, x in given:
        found[name] = x.data_ptr()
        found[f"{name}_row"], found[f"{name}_head"] = x.stride(-3), x.stride(-2)
        found[f"{name}_batch"] = x.stride(0) if x.ndim == 4 else spec.head_dim
    if spec.recorded:
        records = batch.memory[0]
        found["records"], found["record_pages"] = records.data_ptr(), records.shape[0]
        found["record_page"], found["record_head"] = records.stride(0), records.stride(1)
        if spec.terms:
            delta = batch.memory[1]
            found["delta"] = delta.data_ptr()
            found["delta_page"], found["delta_head"], found["delta_term"] = delta.stride()[:3]
            found["mean_groups"] = batch.operands["q_mean"].shape[0]
        found["shift"] = batch.shift
    else:
        k = batch.memory[0]
        found["kv_rows"], found["kv_batches"] = k.shape[-3], (1 if k.ndim == 3 else k.shape[0])
    for name, x in batch.operands.items():
        found[name] = x.data_ptr()
    if "page_table" in batch.operands:
        found["table_row"] = batch.operands["page_table"].stride(0)
    if lse is not None:
        found["lse"], found["lse_head"] = lse.tensor.data_ptr(), lse.tensor.stride(-2)
        found["lse_batch"] = 0 if spec.packed else lse.tensor.stride(0)
    found["batch"], found["q_rows"] = len(batch.lengths), q.shape[-3]
    found["section"] = spec.kv_heads
    return found


def emulate(
    batch: MixedBatch,
    clusters: int = 1,
    seed: int | None = None,
    races: bool = False,
    schedule: MixedSchedule | None = None,
) -> tuple[Output, Output | None]:
    """Run a batch; (out, lse)."""
    kernel, chosen = compiled(batch.spec, schedule)
    q = batch.queries()
    out, lse = batch.results()
    found = arguments(batch, q, out, lse) | {"clusters": clusters}
    tensors = [q, out.buffer, *batch.memory, *batch.operands.values()]
    if lse is not None:
        tensors.append(lse.buffer)
    kernel.launch(
        list(found.values()),
        *tensors,
        grid=clusters * chosen.cluster,
        cluster=chosen.cluster,
        maps=maps(batch, q, chosen),
        seed=seed,
        races=races,
        early=(),
    )
    return out, lse
