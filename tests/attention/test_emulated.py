"""The compiled attention kernel on the CPU, in any order of warps and copies, against the float64 reference."""

from __future__ import annotations

from functools import cache

import pytest
import torch

from epicute.attention import AttentionSpec
from tests.attention.cases import FP8, Batch
from tests.attention.emulated import EmulatedAttention, on_cpu
from tests.ptx import Deadlock, Kernel

pytestmark = pytest.mark.compile

NORM, ROW, LSE = 4e-3, 1e-2, 2e-4
"""Budgets of a 16-bit output: of all rows together, of the worst row; and of the LSE, absolute."""

FP8_NORM, FP8_ROW = 4.5e-2, 8e-2

PLAIN = AttentionSpec(2, 1, 128, lse=True)
SINKS = AttentionSpec(2, 1, 64, lse=True, window=33, page=16, sinks=True)
CONVERTED = AttentionSpec(
    4, 2, 64, kv_dtype=FP8, out_dtype=FP8, lse=True, window=150, page=16, sinks=True
)
CASES = {
    "pairs, two tiles of queries and of keys": (PLAIN, [(130, 200)], 1),
    "window, page 16, sinks, two clusters": (SINKS, [(130, 200), (70, 30), (1, 77)], 2),
    "alone, all keys, sinks": (
        AttentionSpec(2, 2, 64, lse=True, sinks=True, causal=False),
        [(5, 200), (30, 40)],
        1,
    ),
    "FP8 in and out, page 16, window, sinks": (CONVERTED, [(130, 300), (3, 3)], 1),
    "heads of 80, softcap, padded, fp16": (
        AttentionSpec(3, 3, 80, dtype=torch.float16, softcap=10.0, packed=False, lse=True),
        [(40, 70), (0, 9), (129, 40)],
        2,
    ),
}
"""Spec, (queries, keys) of requests, clusters of the GPU."""


@cache
def emulated(spec: AttentionSpec) -> EmulatedAttention:
    return EmulatedAttention(spec)


def drawn(spec: AttentionSpec, lengths: list[tuple[int, int]], seed: int = 1) -> Batch:
    return on_cpu(Batch.draw(spec, lengths, seed))


def compare(batch: Batch) -> None:
    """All of a batch against the reference, and nothing written beside it."""
    spec = batch.spec
    batch.out.assert_intact()
    scale = 0.02 if spec.out_is_fp8 else 1.0
    norm, row = (FP8_NORM, FP8_ROW) if spec.out_is_fp8 else (NORM, ROW)
    for i, (found, (queries, keys)) in enumerate(zip(batch.outputs(), batch.lengths, strict=True)):
        if queries == 0:
            continue
        wanted, lse = (x.cpu() for x in batch.wanted(i))
        found = found.double() * scale
        assert torch.isfinite(found).all(), (i, queries, keys)
        error, size = ((x).flatten(1).norm(dim=1) for x in (found - wanted, wanted))
        typical = size.pow(2).mean().sqrt()
        assert error.norm() <= norm * size.norm(), (i, queries, keys)
        assert (error <= row * torch.maximum(size, 0.3 * typical)).all(), (i, queries, keys)
        if batch.lse is not None:
            got = batch.lses()[i].double()
            finite = torch.isfinite(lse)
            assert torch.equal(got[~finite], lse[~finite])
            assert ((got - lse)[finite].abs() <= LSE).all(), (i, queries, keys)
    if not spec.packed:
        for i, (queries, _) in enumerate(batch.lengths):
            assert batch.out.tensor[i, queries:].float().isnan().all()
    if batch.lse is not None:
        batch.lse.assert_intact()


@pytest.mark.parametrize("name", CASES)
def test_attention_against_float64(name: str) -> None:
    spec, lengths, clusters = CASES[name]
    batch = drawn(spec, lengths)
    emulated(spec).run(batch, clusters, seed=1, races=True)
    compare(batch)


@pytest.mark.parametrize("spec", [SINKS, CONVERTED], ids=["bf16", "fp8"])
def test_a_query_that_sees_no_key_gets_0_and_minus_infinity_beside_sinks(
    spec: AttentionSpec,
) -> None:
    batch = drawn(spec, [(3, 0), (70, 30), (1, 0)])
    emulated(spec).run(batch)
    compare(batch)
    for out, lse, blind in zip(batch.outputs(), batch.lses(), (3, 40, 1), strict=True):
        assert (out[:blind].float() == 0).all()
        assert (lse[:, :blind] == -torch.inf).all()
        assert torch.isfinite(lse[:, blind:]).all()
    if spec.out_is_fp8:
        assert batch.operands["nans"].item() == batch.operands["saturated"].item() == 0
        largest = max(float(batch.wanted(i)[0].abs().max()) for i in range(3))
        assert batch.operands["amax"].item() == pytest.approx(largest, rel=1e-2)


def test_the_order_of_warps_and_copies_changes_no_bit() -> None:
    found = []
    for seed in (None, 2, 3):
        batch = drawn(SINKS, [(130, 90), (20, 60)])
        emulated(SINKS).run(batch, seed=seed)
        found.append((batch.out.tensor.view(torch.int16), batch.lse.tensor))  # type: ignore[union-attr]
    for out, lse in found[1:]:
        assert torch.equal(out, found[0][0])
        assert torch.equal(lse, found[0][1])


@pytest.mark.parametrize(
    ("spec", "removed", "which", "error", "said"),
    [
        (SINKS, "bar.sync \t1, 256;", 0, AssertionError, "race"),
        (SINKS, "fence.proxy.async.shared::cta;", 0, AssertionError, "without a fence"),
        (SINKS, "fence.proxy.async.shared::cta;\n\tbar.sync \t1, 256;", 0, AssertionError, "race"),
        (CONVERTED, "fence.proxy.async.shared::cta;", 0, AssertionError, "without a fence"),
        (PLAIN, "wgmma.wait_group.sync.aligned \t0;", 0, AssertionError, "race"),
        (PLAIN, "bar.arrive", 0, Deadlock, "nothing can go on"),
    ],
)  # fmt: skip
def test_what_a_kernel_lacks_is_seen(
    spec: AttentionSpec, removed: str, which: int, error: type[AssertionError], said: str
) -> None:
    kernel = emulated(spec)
    parts = kernel.text.split(removed)
    assert len(parts) > which + 1
    without = parts[which + 1]
    if removed == "bar.arrive":
        without = without.split(";", 1)[1]
    kernel_without = EmulatedAttention.__new__(EmulatedAttention)
    kernel_without.__dict__.update(kernel.__dict__)
    text = removed.join(parts[: which + 1]) + without
    kernel_without.code = Kernel(removed.join([text, *parts[which + 2 :]]))
    with pytest.raises(error, match=said):
        kernel_without.run(drawn(spec, [(130, 200)]), races=True)
