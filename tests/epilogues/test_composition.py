"""``>>`` is associative, operands have one owner, and what cannot compose is refused with both names."""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from epicute.epilogues import (
    Bias,
    Columns,
    ColumnVector,
    Composition,
    Dequantize,
    EmitFP8,
    Gain,
    HeadNorm,
    PlaceKV,
    Policy,
    ResidualAdd,
    RoPE,
    RowScale,
    RowVector,
    Store,
    SumSquares,
    SwiGLU,
    compose,
    pairwise,
    policy,
)
from epicute.errors import ArgumentError, CompositionError, EpicuteError, UnsupportedError
from epicute.jit.key import encode
from tests.epilogues.compositions import by_channel, chains
from tests.epilogues.model import assert_same, noise

F32, BF16 = torch.float32, torch.bfloat16


@policy(scale=RowVector)
def another_scale(x, ctx):
    """Its ``scale`` is one per column, where ``Dequantize`` has one per row."""
    return x * ctx.scale


@policy(positions=ColumnVector)
def by_position(x, ctx):
    """Reads ``positions`` as another kind than RoPE's int64."""
    return x * ctx.positions


@policy
def scaled(x, ctx, *, factor: Any):
    """x times a constant."""
    return x * factor


@pairwise(keeps=True)
def kept_pair(first, second, ctx):
    """A pair that is kept, outside heads."""
    return second, first


@pairwise(pairs="interleaved")
def interleaved_pair(first, second, ctx):
    """Neighbours, consumed."""
    return first * second


@pairwise(head_dim=64)
def consumed_head_pair(first, second, ctx):
    """The halves of a head, consumed."""
    return first * second


class TestLaws:
    @settings(max_examples=60)
    @given(data=st.data(), form=st.sampled_from(["plain", "pairs", "heads"]))
    def test_associative(self, data: st.DataObject, form: str) -> None:
        """However a chain is grouped it is one composition with one key."""
        parts: list[Any] = [*data.draw(chains(form, 64)), Store(BF16)]
        try:
            whole = reduce(lambda a, b: a >> b, parts)
        except EpicuteError:
            parts = [Dequantize(), Bias(), Store(BF16)]
            whole = reduce(lambda a, b: a >> b, parts)
        while len(parts) > 1:
            i = data.draw(st.integers(0, len(parts) - 2))
            parts[i : i + 2] = [parts[i] >> parts[i + 1]]
        assert parts[0] == whole
        assert hash(parts[0]) == hash(whole)
        assert parts[0].key() == whole.key()
        assert str(parts[0]) == str(whole)

    def test_associative_with_columns(self) -> None:
        a, b = Dequantize("row"), Bias()
        c = Columns(q=(64, RoPE(64) >> Store(BF16)), v=(32, Store(BF16)))
        assert (a >> b) >> c == a >> (b >> c) == compose(a, b, c)
        assert ((a >> b) >> c).key() == (a >> (b >> c)).key()

    def test_order_matters(self) -> None:
        assert Bias() >> Gain() != Gain() >> Bias()
        assert (Bias() >> Gain()).key() != (Gain() >> Bias()).key()

    def test_composing_changes_neither_side(self) -> None:
        first, second = Bias() >> Gain(), compose(Store(BF16))
        both = first >> second
        assert first.policies == (Bias(), Gain())
        assert second.policies == (Store(BF16),)
        assert both.policies == (*first.policies, *second.policies)

    @pytest.mark.parametrize(("one", "other"), [(1, 1.0), (1, True), (0.0, -0.0)])
    def test_equal_numbers_of_other_types_make_another_composition(
        self, one: Any, other: Any
    ) -> None:
        """Or the second of the two would be resolved, evaluated and compiled as the first."""
        a, b = (scaled(factor=f) >> Store(F32) for f in (one, other))
        assert one == other
        assert a != b
        assert encode(a.key()) != encode(b.key())
        out = b.evaluate(torch.ones(1, 8))["out"]
        assert_same(out, torch.full((1, 8), float(other)))


class TestOperands:
    def test_listing_in_order_of_appearance(self) -> None:
        fused = Dequantize("row") >> Bias() >> ResidualAdd() >> SumSquares() >> Store(F32)
        found = {name: str(kind) for name, kind in fused.operands.items()}
        assert found == {
            "scale": "ColumnVector(float32)",
            "weight_scale": "RowVector(float32)",
            "bias": "RowVector(float32)",
            "residual": "Matrix(bfloat16)",
            "sumsq_out": "PartialsOutput(over=64, float32)",
            "out": "Output(float32)",
        }
        assert list(found) == list(fused.operands)

    def test_columns_prefix_all_but_what_rows_share(self) -> None:
        kv = PlaceKV(64)
        fused = Dequantize("row") >> Columns(
            q=(64, HeadNorm(64) >> RoPE(64) >> Store(BF16)), k=(64, RoPE(64) >> kv), v=(64, kv)
        )
        assert set(fused.operands) == {
            *("scale", "weight_scale", "positions", "inv_freq", "slots"),
            *("q_head_gain", "q_out", "k_cells", "v_cells"),
        }

    def test_a_name_makes_a_second_one_possible(self) -> None:
        fused = Bias() >> Store(F32) >> Bias(name="late") >> Store(BF16, name="second")
        assert list(fused.operands) == ["bias", "out", "late_bias", "second_out"]
        acc, late = noise(3, 24), noise(24, seed=1)
        out = fused.evaluate(acc, bias=torch.zeros(24), late_bias=late)
        assert_same(out["out"], acc)
        assert_same(out["second_out"], (acc + late).to(BF16))

    def test_shared_rows_feed_all_ranges(self) -> None:
        rope = RoPE(64)
        fused = compose(
            Columns(a=(64, rope >> Store(F32)), b=(64, rope >> Store(F32, name="other")))
        )
        x = noise(4, 64)
        operands = {"positions": torch.arange(4), "inv_freq": torch.rand(32)}
        out = fused.evaluate(torch.cat([x, x], dim=1), **operands)
        assert torch.equal(out["a_out"], out["b_other_out"])

    def test_before_ranges_columns_count_from_the_first(self) -> None:
        """Vectors, matrices and vectors that repeat stand where they would without ranges."""
        acc = torch.zeros(2, 160)
        chain = Bias() >> by_channel() >> ResidualAdd()
        operands = {"bias": noise(160), "channel": noise(48, seed=1)}
        operands["residual"] = noise(2, 160, seed=2).to(BF16)
        whole = (chain >> Store(F32)).evaluate(acc, **operands)["out"]
        cut = chain >> Columns(a=(16, Store(F32)), b=(80, Store(F32)), c=(64, Store(F32)))
        parts = cut.evaluate(acc, **operands)
        assert_same(torch.cat([parts[f"{r}_out"] for r in "abc"], dim=1), whole)

    def test_missing_and_unknown_are_listed(self) -> None:
        fused = Dequantize() >> Bias() >> Store(F32)
        with pytest.raises(ArgumentError) as caught:
            fused.evaluate(noise(2, 8), scale=torch.ones(1), biass=torch.ones(8))
        text = str(caught.value)
        assert "missing weight_scale, bias and unknown biass" in text
        assert "bias: RowVector(float32)" in text

    @pytest.mark.parametrize(
        ("name", "value"),
        [("bias", torch.ones(9)), ("residual", torch.ones(2, 9)), ("sumsq", torch.ones(2, 2))],
    )
    def test_shapes_are_refused_by_name(self, name: str, value: torch.Tensor) -> None:
        operands = {"bias": torch.ones(8), "residual": torch.ones(2, 8), "sumsq": torch.ones(2, 3)}
        fused = Bias() >> ResidualAdd() >> RowScale(width=192) >> Store(F32)
        fused.evaluate(noise(2, 8), **operands)
        with pytest.raises(ArgumentError, match=rf"operands: {name}: got shape"):
            fused.evaluate(noise(2, 8), **{**operands, name: value})

    def test_the_accumulator_is_a_matrix(self) -> None:
        with pytest.raises(ArgumentError, match=r"acc: got shape \(8,\), expected \(M, N\)"):
            (Bias() >> Store(F32)).evaluate(noise(8), bias=torch.ones(8))


ROPE, KV = RoPE(64), PlaceKV(64)


def plain_function(x, ctx):
    """Not a policy yet."""
    return x


BAD: dict[str, tuple[Callable[[], Any], str]] = {
    "second pair": (lambda: SwiGLU() >> SwiGLU(), r"SwiGLU >> SwiGLU: got a second pairwise"),
    "pair after heads": (lambda: ROPE >> SwiGLU(), r"RoPE >> SwiGLU: got a pair of halves after"),
    "heads of halves": (lambda: SwiGLU() >> ROPE, r"SwiGLU >> RoPE: got a head-wide policy on"),
    "cells of halves": (lambda: SwiGLU() >> KV, r"SwiGLU >> PlaceKV: got a head-wide policy on"),
    "two head dimensions": (
        lambda: HeadNorm(64) >> RoPE(128),
        r"HeadNorm >> RoPE: got heads of 64 and of 128",
    ),
    "two rotary dimensions": (
        lambda: RoPE(64, 64) >> RoPE(64, 32, name="b"),
        r"RoPE >> RoPE: got rotary dimensions 64 and 32",
    ),
    "kept pair": (lambda: Bias() >> kept_pair(), r"kept_pair: got pairs that are kept outside"),
    "interleaved pair": (lambda: Bias() >> interleaved_pair(), r"interleaved_pair: got a pair con"),
    "pair of a head": (lambda: Bias() >> consumed_head_pair(), r"consumed_head_pair: got a pair c"),
    "heads before ranges": (
        lambda: ROPE >> Columns(q=(64, Store(BF16))),
        r"RoPE >> Columns: got pairs or heads before the ranges",
    ),
    "pair before ranges": (
        lambda: SwiGLU() >> Columns(q=(64, Store(BF16))),
        r"SwiGLU >> Columns: got pairs or heads before",
    ),
    "after ranges": (
        lambda: compose(Bias(), Columns(q=(64, Store(BF16))), Bias(name="b")),
        r"Columns >> Bias: got a policy after the ranges",
    ),
    "a function": (
        lambda: Bias() >> scaled,
        r"got scaled, which is not called, expected a policy, .*call the policy, as scaled\(factor=…\)",
    ),
    "a function first": (lambda: scaled >> Bias(), r"got scaled, .*as scaled\(factor=…\)"),
    "a class first": (lambda: Bias >> Store(BF16), r"got Bias, .*call the policy, as Bias\(\)"),
    "a class before a composition": (lambda: Bias >> compose(Store(BF16)), r"got Bias, which"),
    "a function before ranges": (
        lambda: scaled >> Columns(q=(64, Store(BF16))),
        r"got scaled, which is not called",
    ),
    "a number first": (lambda: 3 >> Bias(), r">>: got 3, expected a policy.*join policies alone"),
    "after ranges alone": (
        lambda: Columns(q=(64, Store(BF16))) >> Store(BF16),
        r"Columns >> Store: got a policy after the ranges.*put Store inside each range",
    ),
    "a plain function": (
        lambda: Bias() >> plain_function,
        r"got plain_function, .*make one of the function with @policy above def plain_function",
    ),
    "a number": (lambda: Bias() >> 3, r">>: got 3, expected a policy"),
    "range without width": (lambda: Columns(q=Store(BF16)), r"Columns\(q=…\): got .*\(width, ch"),
    "ranges in ranges": (
        lambda: Columns(q=(64, compose(Columns(a=(64, Store(BF16)))))),
        r"Columns\(q=…\): got Columns inside Columns",
    ),
    "odd width": (lambda: Columns(q=(24, Store(BF16))), r"Columns\(q=…\) width: got 24"),
    "no width": (lambda: Columns(q=(0, Store(BF16))), r"Columns\(q=…\) width: got 0"),
    "half a head": (
        lambda: Columns(k=(96, ROPE >> KV)),
        r"Columns\(k=…\): RoPE: got half a head \(96 columns, heads of 64\)",
    ),
    "one name twice": (
        lambda: Bias() >> Gain() >> Bias(),
        r"operand 'bias': got used by Bias as RowVector.*and by Bias.*, expected a name for each. "
        r"Fix: name one of them: Bias\(…, name='second'\), whose operands then begin with second_",
    ),
    "one name, two kinds": (
        lambda: Dequantize("row") >> another_scale(),
        r"'scale': got used by Dequantize as ColumnVector.*by another_scale as RowVector",
    ),
    "shared, but twice on one column": (
        lambda: Dequantize("row") >> Columns(q=(64, Dequantize("row", None) >> Store(BF16))),
        r"operand 'scale': got used by Dequantize .* and by Dequantize",
    ),
    "shared, but of two kinds": (
        lambda: compose(Columns(q=(64, ROPE >> Store(BF16)), k=(64, by_position() >> Store(BF16)))),
        r"operand 'positions': got used by RoPE as .*int64.* and by by_position",
    ),
    "outside and inside": (
        lambda: Store(BF16, name="q") >> Columns(q=(64, Store(BF16))),
        r"operand 'q_out': got used by Store",
    ),
    "a field that changes": (lambda: Bias() >> scaled(factor=[1.0]), r"scaled: got a field that"),
}


@pytest.mark.parametrize("case", BAD)
def test_refused_at_composition(case: str) -> None:
    make, message = BAD[case]
    with pytest.raises(CompositionError, match=message) as caught:
        make()
    assert ". Fix: " in str(caught.value)


def test_columns_need_a_range() -> None:
    with pytest.raises(ArgumentError, match="Columns: got no range"):
        Columns()


INCOMPLETE: dict[str, tuple[Composition, str]] = {
    "nothing written": (compose(Bias()), r"composition: got a chain that ends in Bias"),
    "written, then changed": (Store(BF16) >> Bias(), r"ends in Bias, which no tap or sink reads"),
    "one range": (
        compose(Columns(q=(64, Store(BF16)), k=(64, Bias()))),
        r"composition in range 'k': got a chain that ends in Bias",
    ),
    "empty": (compose(), r"composition: got a chain that ends in nothing"),
}


@pytest.mark.parametrize("case", INCOMPLETE)
def test_a_composition_must_write_what_it_computes(case: str) -> None:
    composition, message = INCOMPLETE[case]
    for use in (composition.complete, lambda: composition.evaluate(noise(2, 128))):
        with pytest.raises(CompositionError, match=message):
            use()


UNRESOLVED: dict[str, tuple[Composition | Policy, int, type[EpicuteError], str]] = {
    "widths": (
        compose(Columns(q=(64, Store(BF16)), k=(32, Store(BF16)))),
        128,
        ArgumentError,
        r"Columns widths: got 64 \+ 32 = 96, expected N = 128",
    ),
    "heads": (ROPE >> Store(BF16), 96, CompositionError, r"RoPE: got 96 columns, heads of 64"),
    "odd halves": (
        SwiGLU() >> Store(BF16),
        33,
        ArgumentError,
        r"columns: got 33, expected an even",
    ),
    "unit": (
        compose(Columns(q=(80, PlaceKV(80)), v=(64, SwiGLU() >> Store(BF16)))),
        144,
        UnsupportedError,
        r"a unit of 320 columns \(PlaceKV 80, SwiGLU 64\)",
    ),
    "interleaved": (
        RoPE(96, 48, "interleaved") >> Store(BF16),
        96,
        UnsupportedError,
        r"RoPE.rotary_dim: got 48, expected a multiple of 32, or head_dim=96",
    ),
    "halves of a group": (
        SumSquares() >> SwiGLU() >> Store(BF16),
        192,
        CompositionError,
        r"SumSquares: got halves of 96 columns, groups of 64",
    ),
    "a range inside a group": (
        SumSquares() >> Columns(q=(96, Store(BF16)), k=(32, Store(BF16))),
        128,
        CompositionError,
        r"SumSquares: got range 'k' from column 96, groups of 64",
    ),
    "sums in another order": (
        RoPE(64, 32) >> SumSquares() >> Store(BF16),
        64,
        UnsupportedError,
        r"SumSquares: got chunks of 16 columns, expected chunks of 32",
    ),
}


@pytest.mark.parametrize("case", UNRESOLVED)
def test_refused_for_these_columns(case: str) -> None:
    composition, columns, error, message = UNRESOLVED[case]
    with pytest.raises(error, match=message) as caught:
        compose(composition).row_order(columns)
    assert ". Fix: " in str(caught.value)


def test_emit_passes_on_what_it_stored() -> None:
    """A chain may go on behind every tap."""
    acc = noise(2, 16, scale=100.0)
    fused = EmitFP8() >> Bias() >> Store(F32)
    out = fused.evaluate(acc, out_scale=torch.ones(1), bias=torch.ones(16))
    assert_same(out["out"], out["out_fp8"].to(F32) + 1)
