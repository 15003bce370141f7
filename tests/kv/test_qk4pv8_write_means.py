"""Sequence means as kernels: ``sequence_means`` within the contract's tolerance, whatever is packed beside them."""

from __future__ import annotations

import functools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from epicute.errors import ArgumentError
from epicute.jit import DEFAULT_TARGET, compile
from epicute.kv.qk4pv8_write_means import (
    STAGES,
    TILE,
    MeansKernel,
    MeansPlan,
    MeansSpec,
    plan_sequence_means,
)
from epicute.quant.smoothing import Means, sequence_means
from tests.ptx import Emulated

BF16, FP16 = torch.bfloat16, torch.float16


@functools.cache
def planned(head_dim: int, dtype: torch.dtype, masked: bool) -> MeansPlan:
    return plan_sequence_means(head_dim, dtype, masked=masked, device="cpu")


@functools.cache
def emulated(spec: MeansSpec) -> Emulated:
    return Emulated(MeansKernel(spec, DEFAULT_TARGET))


def draw(
    lengths: list[int], heads: tuple[int, int], spec: MeansSpec, seed: int = 0
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """q, k, starts and valid; rows that do not count hold NaN."""
    make = torch.Generator().manual_seed(seed)
    rows = sum(lengths)
    q, k = ((torch.randn(rows, n, spec.head_dim, generator=make) + 3).to(spec.dtype) for n in heads)
    starts = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    valid = None
    if spec.masked:
        valid = torch.rand(rows, generator=make) < 0.7
        q[~valid] = torch.nan
        k[~valid] = torch.nan
    return q, k, starts, valid


def empty(requests: int, heads: tuple[int, int], head_dim: int) -> Means:
    return Means(
        "sequence",
        torch.full((requests, heads[0], head_dim), torch.nan),
        torch.full((requests, heads[1], head_dim), torch.nan),
    )


def launched(
    q: torch.Tensor,
    k: torch.Tensor,
    starts: torch.Tensor,
    valid: torch.Tensor | None,
    spec: MeansSpec,
) -> Means:
    """What the compiled code makes of them."""
    plan = planned(spec.head_dim, spec.dtype, spec.masked)
    requests, heads = len(starts) - 1, (q.shape[1], k.shape[1])
    means = empty(requests, heads, spec.head_dim)
    workspace = plan.workspace(q.shape[0], requests, sum(heads), "cpu")
    workspace.partials.fill_(torch.nan)
    workspace.counts.fill_(-1)
    arguments, blocks = plan.bind(q, k, starts, means, workspace, valid)
    tensors = [q, k, starts, means.q, means.k, workspace.partials, workspace.counts]
    tensors += [] if valid is None else [valid]
    for stage, count in zip(STAGES, blocks, strict=True):
        kernel = emulated(MeansSpec(spec.head_dim, spec.dtype, spec.masked, stage))
        kernel.launch((*arguments, count), *tensors)
    return means


def compare(found: Means, wanted: Means, q: torch.Tensor, k: torch.Tensor) -> None:
    for a, b, x in ((found.q, wanted.q, q), (found.k, wanted.k, k)):
        size = x.float().nan_to_num().abs().amax()
        assert ((a - b).abs() <= 1e-6 * size).all()


@pytest.mark.compile
class TestKernel:
    @pytest.mark.parametrize("head_dim", [64, 128])
    @pytest.mark.parametrize("stage", STAGES)
    def test_no_spills(self, head_dim: int, stage: str) -> None:
        kernel = MeansKernel(MeansSpec(head_dim, BF16, True, stage), DEFAULT_TARGET)
        report = compile(kernel, strict=False).report
        assert report.problems(DEFAULT_TARGET.smem_per_block) == []

    @pytest.mark.parametrize(
        ("spec", "lengths"),
        [
            (MeansSpec(128, BF16, False), [300]),
            (MeansSpec(128, BF16, False), [1, 127, 128, 0, 129, 5]),
            (MeansSpec(64, FP16, True), [100, 0, 257, 3]),
            (MeansSpec(128, FP16, True), [130, 2]),
        ],
        ids=str,
    )
    def test_means_of_each_request(self, spec: MeansSpec, lengths: list[int]) -> None:
        q, k, starts, valid = draw(lengths, (4, 2), spec)
        found = launched(q, k, starts, valid, spec)
        compare(found, sequence_means(q, k, starts, valid), q, k)
        for i, n in enumerate(lengths):
            assert n > 0 or (found.q[i] == 0).all()

    def test_kd_17_a_request_has_the_same_means_alone(self) -> None:
        spec = MeansSpec(128, BF16, False)
        lengths = [77, 300, 1]
        q, k, starts, _ = draw(lengths, (2, 1), spec, 3)
        together = launched(q, k, starts, None, spec)
        for i in range(3):
            rows = slice(int(starts[i]), int(starts[i + 1]))
            alone = torch.tensor([0, lengths[i]], dtype=torch.int32)
            found = launched(q[rows], k[rows], alone, None, spec)
            assert torch.equal(found.q[0], together.q[i])
            assert torch.equal(found.k[0], together.k[i])


@given(st.lists(st.integers(0, 60), min_size=1, max_size=5), st.booleans())
def test_a_plan_on_the_cpu_is_sequence_means(lengths: list[int], masked: bool) -> None:
    spec = MeansSpec(64, BF16, masked)
    q, k, starts, valid = draw(lengths, (4, 2), spec)
    means = empty(len(lengths), (4, 2), 64)
    planned(64, BF16, masked).run(q, k, starts, means=means, valid=valid)
    wanted = sequence_means(q, k, starts, valid)
    assert torch.equal(means.q, wanted.q)
    assert torch.equal(means.k, wanted.k)


@given(st.lists(st.integers(0, 1000), min_size=1, max_size=40))
def test_tiles_of_requests_are_apart_and_within_the_workspace(lengths: list[int]) -> None:
    start, last = 0, -1
    for request, n in enumerate(lengths):
        base = start // TILE + request
        tiles = -(-n // TILE)
        assert base > last
        last = base + max(tiles, 1) - 1
        start += n
    assert last < start // TILE + len(lengths)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"q": torch.zeros(5, 4, 128, dtype=BF16)}, "q: got"),
        ({"q": torch.zeros(5, 4, 64)}, "q: got"),
        ({"k": torch.zeros(4, 2, 64, dtype=BF16)}, "k: got"),
        ({"starts": torch.zeros(2, dtype=torch.int64)}, "starts: got"),
        ({"means": empty(2, (4, 2), 64)}, "means.q: got"),
        ({"valid": torch.ones(5, dtype=torch.bool)}, "valid"),
    ],
)
def test_wrong_arguments_are_refused_by_name(change: dict[str, object], named: str) -> None:
    given: dict[str, object] = {
        "q": torch.zeros(5, 4, 64, dtype=BF16),
        "k": torch.zeros(5, 2, 64, dtype=BF16),
        "starts": torch.tensor([0, 5], dtype=torch.int32),
        "means": empty(1, (4, 2), 64),
    }
    with pytest.raises(ArgumentError, match=named):
        planned(64, BF16, False).run(**{**given, **change})  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="head_dim"):
        plan_sequence_means(80, device="cpu")
