"""What ``Plan.bind`` hands to the kernel: addresses, strides in bytes, and the grid."""

from __future__ import annotations

import pytest
import torch

from epicute.epilogues import ResidualAdd, Store
from epicute.errors import ArgumentError
from epicute.gemm import align_rows
from epicute.gemm.plan import REMEMBERED
from tests.gemm.planned import CPU, OUT, QKV, K, Launch, M, N, fake_plan, operands_for, weight

BF16, FP8 = torch.bfloat16, torch.float8_e4m3fn


@pytest.fixture
def out() -> Launch:
    return Launch(OUT, FP8, "fp8")


@pytest.fixture
def qkv() -> Launch:
    return Launch(QKV)


def test_the_arguments_are_addresses_and_strides_in_bytes(out: Launch) -> None:
    found = out.bind()
    layout = out.plan.kernel.spec.layout
    assert found is not None
    assert len(found) == layout.count
    assert found[:3] == (out.x.data_ptr(), K, M)
    assert found[layout["residual"].at("row_stride")] == 2 * N
    assert found[layout["sumsq_out"].at("row_stride")] == 4 * 3
    for name, tensor in out.operands.items():
        assert found[layout[name].at("address")] == tensor.data_ptr()


def test_cells_pass_their_strides_and_capacity(qkv: Launch) -> None:
    big = torch.zeros(3, 2, 1, 16, 64, dtype=BF16)
    qkv.operands["k_cells"] = big[:, 1].transpose(1, 2)  # pages, heads, tokens: HND beside V
    found = qkv.bind()
    spec = qkv.plan.kernel.spec.layout["k_cells"]
    assert found is not None
    assert found[spec.at("page_stride")] == 2 * 2 * 16 * 64
    assert found[spec.at("token_stride")] == 2 * 64
    assert found[spec.at("page_size")] == 16
    assert found[spec.at("capacity")] == 48


def test_the_grid_is_what_is_there_or_what_fits(out: Launch) -> None:
    assert out.bind()[3] == 1  # one tile
    plan = fake_plan(Store(BF16), 4096, K, BF16)
    x = torch.zeros(2048, K, dtype=BF16)
    packed = weight(Store(BF16), 4096, K)
    assert plan.bind(x, packed, {"out": torch.zeros(2048, 4096, dtype=BF16)})[3] == 66


def test_no_rows_launch_nothing(out: Launch, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "current_device", lambda: CPU)
    out.x = out.x[:0]
    out.operands = operands_for(out.plan, 0)
    out.plan.run(out.x, out.packed, **out.operands)
    assert out.calls == []
    launched = Launch(Store(BF16))
    launched.plan.run(launched.x, launched.packed, **launched.operands)
    assert len(launched.calls) == 1


def test_the_weights_scale_is_bound_where_it_is_not_given(out: Launch) -> None:
    address = out.plan.kernel.spec.layout["weight_scale"].at("address")
    given = out.operands.pop("weight_scale")
    assert out.bind()[address] == out.packed.scale.data_ptr()
    out.operands["weight_scale"] = given
    assert out.bind()[address] == given.data_ptr()


@pytest.mark.parametrize("dim", [(), (1,)])
def test_a_scalar_may_have_no_axis(out: Launch, dim: tuple[int, ...]) -> None:
    out.operands["scale"] = torch.ones(dim)
    assert out.bind() is not None


def test_ge_16_strided_rows_are_taken_as_they_are() -> None:
    launch = Launch(ResidualAdd() >> Store(BF16))
    big = torch.zeros(2 * M, K + 128, dtype=BF16)
    launch.x = big[::2, 64 : 64 + K]
    launch.operands["residual"] = torch.zeros(M, N + 16, dtype=BF16)[:, 8 : 8 + N]
    launch.operands["out"] = torch.zeros(M, N + 16, dtype=BF16)[:, 8 : 8 + N]
    found = launch.bind()
    layout = launch.plan.kernel.spec.layout
    assert found is not None
    assert found[:2] == (launch.x.data_ptr(), 2 * 2 * (K + 128))
    for name in ("residual", "out"):
        assert found[layout[name].at("row_stride")] == 2 * (N + 16)


def test_one_row_has_no_stride() -> None:
    launch = Launch(Store(BF16))
    launch.x = torch.zeros(1, K + 3, dtype=BF16)[:, :K]
    launch.operands["out"] = torch.zeros(1, N + 1, dtype=BF16)[:, :N]
    assert launch.bind() is not None


def test_align_rows_makes_any_x_fit() -> None:
    plan = fake_plan(Store(BF16), N, 100, BF16)
    x = torch.randn(M, 100).to(BF16)
    packed = weight(Store(BF16), N, 100)
    given = operands_for(plan, M)
    with pytest.raises(ArgumentError, match=r"x: got .*multiples of 16 bytes. Fix: .*align_rows"):
        plan.bind(x, packed, given)
    aligned = align_rows(x)
    assert torch.equal(aligned, x)
    assert plan.bind(aligned, packed, given) is not None
    with pytest.raises(ArgumentError, match=r"x: got \(5,\), expected \(M, K\)"):
        align_rows(x[:, 0])


def test_what_was_checked_is_remembered(out: Launch, monkeypatch: pytest.MonkeyPatch) -> None:
    first = out.bind()
    monkeypatch.setattr(out.plan, "_bind", lambda *_: pytest.fail("checked again"))
    assert out.bind() is first
    out.operands["residual"] = out.operands["residual"].clone()
    with pytest.raises(pytest.fail.Exception, match="checked again"):
        out.bind()


@pytest.mark.parametrize(
    "spoil",
    [
        lambda t: t.t_(),
        lambda t: t.as_strided_((M, N), (N, 2)),
        lambda t: t.as_strided_((M, N), (0, 1)),
        lambda t: t.resize_(M - 1, N),
        lambda t: t.set_(torch.zeros(M, N, dtype=torch.float32).view(BF16)),
        lambda t: setattr(t, "data", torch.zeros(M, N, dtype=torch.float32)),
    ],
    ids=["t_", "as_strided_", "overlapping", "resize_", "set_", "data"],
)
def test_a_remembered_tensor_that_changed_is_checked_again(out: Launch, spoil: object) -> None:
    out.operands["residual"] = torch.zeros(M, 2 * N, dtype=BF16)[:, :N]
    out.bind()
    spoil(out.operands["residual"])  # type: ignore[operator]
    with pytest.raises(ArgumentError, match="residual: got"):
        out.bind()


def test_the_memory_of_what_was_checked_is_bounded(out: Launch) -> None:
    for _ in range(2 * REMEMBERED + 3):
        out.operands["residual"] = torch.zeros(M, N, dtype=BF16)
        kept = out.operands["residual"]
        assert out.bind() is not None
        assert 1 <= len(out.plan._bound) <= REMEMBERED
        del kept


def test_another_weight_is_checked_though_its_tensors_are_known(out: Launch) -> None:
    out.bind()
    out.packed = weight(Store(BF16), N, 2 * K)
    with pytest.raises(ArgumentError, match="packed: got"):
        out.bind()
