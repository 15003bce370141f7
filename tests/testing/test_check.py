"""``check`` must pass what is right and catch what is wrong, with the smallest case and both values
in the message.
"""

from __future__ import annotations

import importlib.util
from typing import Any

import hypothesis
import pytest
import torch
from hypothesis import strategies as st

from epicute import testing
from epicute.epilogues import (
    Bias,
    ColumnVector,
    Counter,
    HeadNorm,
    Matrix,
    Output,
    PartialsOutput,
    PlaceKV,
    RowVector,
    Scalar,
    Store,
    SumSquares,
    pairwise,
    policy,
    reducing,
    tap,
)
from epicute.errors import ArgumentError, CompositionError, UnsupportedError
from epicute.testing import EXACT, Budget, Ranges, check, draws


@policy
def soft_cap(x, ctx, *, cap: float):
    """Squash to (-cap, cap)."""
    return cap * ctx.tanh(x / cap)


@policy(bias_values=RowVector)
def shift(x, ctx):
    """Add one value per column."""
    return x + ctx.bias_values


@policy(factor=ColumnVector, low=Scalar, other=Matrix)
def mix(x, ctx):
    """One operand of each other kind."""
    return x * ctx.factor + ctx.low * ctx.other


@pairwise()
def geglu_like(first, second, ctx):
    """tanh(first) * second."""
    return ctx.tanh(first) * second


@reducing(over=64)
def centred(x, ctx):
    """x minus the mean of its 64 columns."""
    return x - ctx.total(x) * (1.0 / 64)


@tap(over=64, sums=PartialsOutput(over=64), copy=Output(dtype=torch.bfloat16), large=Counter)
def watch(x, ctx):
    """Sums, a copy, and how many are above 1."""
    ctx.partials("sums", ctx.total(x))
    ctx.count("large", x > 1.0)
    ctx.store("copy", x)
    return x


class TestPasses:
    def test_elementwise(self) -> None:
        summary = check(soft_cap(cap=30.0), lambda x: 30 * torch.tanh(x / 30))
        assert summary.cases >= 100
        assert 0 < summary.worst["out"].worst_row < 1e-5

    def test_prints_the_worst(self, capsys: pytest.CaptureFixture[str]) -> None:
        check(soft_cap(cap=2.0), lambda x: 2 * torch.tanh(x / 2), examples=20)
        printed = capsys.readouterr().out
        assert "soft_cap:" in printed
        assert "out: worst norm" in printed

    def test_operands_of_every_kind(self) -> None:
        check(shift(), lambda x, bias_values: x + bias_values)
        check(
            mix(), lambda x, factor, low, other: x * factor[:, None] + low * other, columns=[8, 72]
        )

    def test_pairs_and_groups(self) -> None:
        def halves(x: torch.Tensor) -> torch.Tensor:
            first, second = x.chunk(2, dim=1)
            return torch.tanh(first) * second

        check(geglu_like(), halves)

        def mean_of_64(x: torch.Tensor) -> torch.Tensor:
            groups = x.reshape(len(x), x.shape[1] // 64, 64)
            return (groups - groups.mean(dim=2, keepdim=True)).reshape(x.shape)

        check(centred(), mean_of_64, columns=[64, 128])

    def test_groups_are_whole_by_default(self) -> None:
        """Only widths that a reference with groups can take are drawn; a head's own if no other fits."""

        def mean_of_64(x: torch.Tensor) -> torch.Tensor:
            groups = x.reshape(len(x), x.shape[1] // 64, 64)
            return (groups - groups.mean(dim=2, keepdim=True)).reshape(x.shape)

        check(centred(), mean_of_64)
        whole = draws.legal_columns(HeadNorm(112) >> Store(torch.float32), None)
        assert whole == [112, 336]
        ragged = draws.legal_columns(SumSquares() >> Store(torch.float32), None)
        assert {8, 64, 72, 200} <= set(ragged)

    def test_several_outputs_and_start_values(self) -> None:
        def reference(x: torch.Tensor, large: torch.Tensor) -> dict[str, torch.Tensor]:
            groups = x.reshape(len(x), x.shape[1] // 64, 64)
            return {"sums": groups.sum(dim=2), "copy": x, "large": large + (x > 1).sum()}

        check(watch(), reference, columns=[64, 128])

    def test_a_composition_with_its_own_store(self) -> None:
        check(
            shift() >> Store(torch.bfloat16),
            lambda x, bias_values: x + bias_values,
            columns=[40],
        )

    def test_non_finite_accumulators(self) -> None:
        ranges = Ranges(non_finite=True)
        check(soft_cap(cap=3.0), lambda x: 3 * torch.tanh(x / 3), ranges=ranges)


class TestCatches:
    def test_a_wrong_policy(self) -> None:
        with pytest.raises(AssertionError) as caught:
            check(soft_cap(cap=30.0), lambda x: 31 * torch.tanh(x / 31))
        text = str(caught.value)
        assert "soft_cap: out (NumPy interpreter)" in text
        assert "worst row" in text
        assert "case       Case(acc=" in text

    def test_the_case_is_small(self) -> None:
        with pytest.raises(AssertionError, match=r"Case\(acc=<1x8"):
            check(shift(), lambda x, bias_values: x - bias_values)

    def test_a_wrong_column(self) -> None:
        @policy(bias_values=RowVector)
        def reversed_bias(x, ctx):
            return x + ctx.bias_values

        with pytest.raises(AssertionError):
            check(reversed_bias(), lambda x, bias_values: x + bias_values.flip(0))

    def test_a_wrong_row(self) -> None:
        """Row 0's factor everywhere: needs two rows, and the error names one."""

        def reference(x, factor, low, other):
            return x * factor[:1, None] + low * other if len(x) else x

        with pytest.raises(AssertionError, match=r"worst row  \[\d+\]"):
            check(mix(), reference)

    def test_a_nan_for_a_zero(self) -> None:
        @policy
        def unsafe(x, ctx):
            return x * x / x

        with pytest.raises(AssertionError, match="NaN or infinite without reference"):
            check(unsafe(), lambda x: x)

    def test_a_wrong_counter(self) -> None:
        def reference(x: torch.Tensor, large: torch.Tensor) -> dict[str, torch.Tensor]:
            groups = x.reshape(len(x), x.shape[1] // 64, 64)
            return {"sums": groups.sum(dim=2), "copy": x, "large": large + (x >= 1).sum()}

        with pytest.raises(AssertionError, match="watch: large"):
            check(watch(), reference, columns=[64])

    def test_a_counter_that_is_reset(self) -> None:
        def reference(x: torch.Tensor) -> dict[str, torch.Tensor]:
            groups = x.reshape(len(x), x.shape[1] // 64, 64)
            return {"sums": groups.sum(dim=2), "copy": x, "large": (x > 1).sum()}

        with pytest.raises(AssertionError, match="watch: large"):
            check(watch(), reference, columns=[64])

    def test_a_cell_written_for_a_skipped_row(self) -> None:
        """A reference that takes slot -1 for the last cell disagrees."""

        def reference(x, slots, cells):
            flat = cells.reshape(-1, cells.shape[2] * cells.shape[3]).clone()
            for m, slot in enumerate(slots.tolist()):
                if slot < len(flat):
                    flat[slot] = x[m]
            return flat.reshape(cells.shape)

        with pytest.raises(AssertionError, match="PlaceKV: cells"):
            check(PlaceKV(head_dim=16), reference, columns=[16, 32])

    def test_a_budget_of_the_callers_own(self) -> None:
        def reference(x: torch.Tensor) -> torch.Tensor:
            return 30 * torch.tanh(x / 30)

        check(soft_cap(cap=30.0), reference, budget=Budget(1e-4, 1e-4, floor=1e-3), examples=30)
        with pytest.raises(AssertionError):
            check(soft_cap(cap=30.0), reference, budget=EXACT)


class TestRefusals:
    def test_an_operand_the_reference_does_not_name(self) -> None:
        with pytest.raises(ArgumentError, match=r"parameters \(x\).*bias"):
            check(Bias(), lambda x: x)

    def test_an_unknown_parameter(self) -> None:
        with pytest.raises(ArgumentError, match="offset"):
            check(Bias(), lambda x, bias, offset: x)

    def test_a_missing_output(self) -> None:
        with pytest.raises(ArgumentError, match="sumsq_out"):
            check(SumSquares() >> Store(torch.float32), lambda x: {"out": x})

    def test_columns_the_composition_refuses(self) -> None:
        with pytest.raises(ArgumentError, match="whole heads"):
            check(PlaceKV(head_dim=64), lambda x, slots: x, columns=[72])

    def test_ranges_of_an_operand_there_is_not(self) -> None:
        drawn = Ranges(operands={"bounds": lambda shape: st.just(torch.zeros(shape))})
        with pytest.raises(ArgumentError, match=r"ranges.operands: got bounds, .*: bias_values\."):
            check(shift(), lambda x, bias_values: x + bias_values, ranges=drawn)
        drawn = Ranges(operands={"out": lambda shape: st.just(torch.zeros(shape))})
        with pytest.raises(ArgumentError, match=r"got out, expected operands that are .*none here"):
            check(Store(torch.float32), lambda x: x, ranges=drawn)

    @pytest.mark.parametrize(
        ("returned", "came"),
        [
            (lambda x: None, "None"),
            (lambda x: x.T[:1], r"shape \(1, \d+\)"),
            (lambda x: x[:, :-1], r"shape \(\d+, \d+\)"),
            (lambda x: x.reshape(-1), r"shape \(\d+,\)"),
            (lambda x: 0.0, r"shape \(\)"),
            (lambda x: "x", "str"),
            (lambda x: {"out": None}, "None"),
        ],
    )
    def test_what_the_reference_returns(self, returned: Any, came: str) -> None:
        message = (
            rf"reference: out: got {came}, expected a tensor of shape \(\d+, 64\)\. Fix: return"
        )
        with pytest.raises(ArgumentError, match=message):
            check(soft_cap(cap=30.0), returned, columns=64)

    def test_a_reference_that_raises_is_told_as_the_references(self) -> None:
        def of_whole_groups(x):
            return (x.reshape(len(x), -1, 64) - x.reshape(len(x), -1, 64).mean(2, True)).reshape(
                x.shape
            )

        said = r"reference: got RuntimeError: .* on acc of shape \(0, 64\).*M = 0 is drawn too"
        with pytest.raises(ArgumentError, match=said) as caught:
            check(centred(), of_whole_groups)
        assert isinstance(caught.value.__cause__, RuntimeError)

        def of_one_width(x):
            return torch.tanh(x) + torch.zeros(8)

        with pytest.raises(ArgumentError, match=r"\(\d+, \d+\), .*pass columns=\[…\]"):
            check(soft_cap(cap=1.0), of_one_width)

    def test_one_error_where_two_things_are_wrong(self) -> None:
        """A group of exceptions would be neither of the documented types."""

        def wrong_or_raising(x):
            return x + torch.zeros(8)

        for _ in range(3):
            with pytest.raises((AssertionError, ArgumentError)):
                check(soft_cap(cap=1.0), wrong_or_raising)

    def test_assumptions_of_a_reference_are_hypothesis_own(self) -> None:
        def not_all_zero(x):
            hypothesis.assume(bool((x != 0).any()) or not len(x))
            return torch.tanh(x)

        assert check(soft_cap(cap=1.0), not_all_zero, examples=20).cases >= 20

    def test_without_hypothesis(self, monkeypatch: pytest.MonkeyPatch) -> None:
        find = importlib.util.find_spec
        monkeypatch.setattr(
            importlib.util,
            "find_spec",
            lambda name, *rest: None if name == "hypothesis" else find(name, *rest),
        )
        said = r"epicute.testing.{}: got no hypothesis.*Fix: pip install -e '.\[test\]'"
        with pytest.raises(UnsupportedError, match=said.format("check")):
            check(soft_cap(cap=1.0), torch.tanh)
        with pytest.raises(UnsupportedError, match=said.format("Ranges")):
            _ = testing.Ranges

    def test_a_device_that_is_not_there(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
        for device in ("cuda", "cuda:0", torch.device("cuda")):
            with pytest.raises(UnsupportedError, match=r"device: got 'cuda.*Fix: leave device out"):
                check(soft_cap(cap=1.0), torch.tanh, device=device)
        for device in ("gpu", "mps", "cudaa"):
            with pytest.raises(ArgumentError, match=rf"device: got '{device}', expected 'cpu'"):
                check(soft_cap(cap=1.0), torch.tanh, device=device)

    def test_columns_that_are_no_numbers(self) -> None:
        for columns in ("64", 64.0, [64.0], ["64"], 0, [-8]):
            with pytest.raises(
                ArgumentError, match=r"columns: got .*Fix: pass columns=\[64, 128\]"
            ):
                check(soft_cap(cap=1.0), torch.tanh, columns=columns)  # type: ignore[arg-type]

    def test_a_tap_that_does_not_write(self) -> None:
        @tap(copy=Output)
        def forgets(x, ctx):
            return x

        with pytest.raises(CompositionError, match="forgets: operand 'copy'"):
            check(forgets(), lambda x: x)


def test_one_number_of_columns() -> None:
    check(soft_cap(cap=1.0), torch.tanh, columns=64, examples=10)


def test_ranges_of_the_callers_own() -> None:
    def positive(shape: tuple[int, ...]) -> st.SearchStrategy[torch.Tensor]:
        return st.floats(1.0, 2.0, width=32).map(lambda low: torch.full(shape, low))

    def reference(x: torch.Tensor, factor, low, other) -> torch.Tensor:
        assert bool((factor >= 1).all())
        return x * factor[:, None] + low * other

    check(mix(), reference, ranges=Ranges(operands={"factor": positive}), examples=20)
