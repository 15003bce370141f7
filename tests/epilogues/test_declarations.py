"""Policies of the user's own: what a declaration and a body may say, and how a mistake is answered."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

from epicute import Target, kernel_for
from epicute.epilogues import (
    Cells,
    ColumnVector,
    Counter,
    Dequantize,
    Elementwise,
    HeadNorm,
    HeadVector,
    Matrix,
    Maximum,
    Operand,
    Output,
    Partials,
    PartialsOutput,
    PerHead,
    PlaceKV,
    Policy,
    RoPE,
    RowScale,
    RowVector,
    Scalar,
    Slots,
    Store,
    SwiGLU,
    pairwise,
    policy,
    reducing,
    tap,
)
from epicute.epilogues.operands import as_operand
from epicute.errors import ArgumentError, CompositionError, EpicuteError
from epicute.jit import compile
from tests.epilogues.emulator import emulate
from tests.epilogues.model import assert_same, noise

F32, BF16, FP8 = torch.float32, torch.bfloat16, torch.float8_e4m3fn


def evaluate(made: Policy, columns: int = 64, **operands: Any) -> torch.Tensor:
    return (made >> Store(F32, name="last")).evaluate(noise(3, columns), **operands)["last_out"]


@policy(table=RowVector, row=ColumnVector)
def full(x, ctx, *, cap: float, gain: float = 2.0):
    """Fields with and without defaults, and operands."""
    return ctx.min(x * gain, cap) + ctx.table * ctx.row


@pairwise(pairs="interleaved", keeps=True, head_dim=32)
def swapped(first, second, ctx):
    """Neighbours change places."""
    return second, first


@reducing(over=32)
def normed(x, ctx, *, eps: float = 1.0):
    """x by the root of the sum of squares of its 32 columns."""
    return x * ctx.rsqrt(ctx.total(x * x) + eps)


@tap(hits=Counter, peak=Maximum, limit=Scalar)
def watched(x, ctx):
    """Nothing is returned, so x passes."""
    ctx.count("hits", x > ctx.limit)
    ctx.record_max("peak", abs(x))


@tap(hits=Counter, all=Counter, row=ColumnVector, one=Scalar)
def row_watched(x, ctx):
    """Counts what is the same in a whole row, and everywhere."""
    ctx.count("hits", ctx.row > 0.0)
    ctx.count("all", ctx.one == ctx.one)


class TestDecorators:
    def test_fields_operands_and_title(self) -> None:
        made = full(cap=1.5)
        assert made.title == "full"
        assert str(made) == "full(cap=1.5, gain=2.0)"
        assert list(made.operands) == ["table", "row"]
        assert full.__doc__ == "Fields with and without defaults, and operands."
        acc, table, row = noise(3, 64), noise(64, seed=1), noise(3, seed=2)
        expected = (acc * 2.0).clamp(max=1.5) + table * row[:, None]
        assert_same(evaluate(made, table=table, row=row), expected)

    def test_without_parentheses(self) -> None:
        @policy
        def doubled(x, ctx, *, by: float = 2.0):
            return x * by

        @pairwise
        def product(first, second, ctx):
            return first * second

        @tap
        def seen(x, ctx):
            return x + 1.0

        x = noise(3, 64)
        assert_same(evaluate(doubled()), x * 2.0)
        assert_same(evaluate(product()), x[:, :32] * x[:, 32:])
        assert_same(evaluate(seen()), x + 1.0)
        assert product().consumes
        assert product().pairs == "halves"

    def test_the_body_may_come_with_operands_in_one_call(self) -> None:
        made = policy(scaled_by_row, row=ColumnVector)()
        assert list(made.operands) == ["row"]

    def test_equal_fields_make_equal_policies(self) -> None:
        assert full(cap=1.5) == full(cap=1.5, gain=2.0)
        assert full(cap=1.5) != full(cap=1.5, name="other")
        assert hash(full(cap=1.5)) == hash(full(gain=2.0, cap=1.5))

    def test_kept_pairs(self) -> None:
        expected = noise(3, 64).reshape(3, 32, 2).flip(2).reshape(3, 64)
        assert_same(evaluate(swapped()), expected)

    def test_groups(self) -> None:
        x = noise(3, 64).reshape(3, 2, 32).double()
        expected = x / (x.square().sum(2, keepdim=True) + 1).sqrt()
        assert torch.allclose(evaluate(normed()).double(), expected.reshape(3, 64), rtol=1e-6)

    def test_a_tap_passes_what_it_does_not_replace(self) -> None:
        x = noise(3, 64)
        out = (watched() >> Store(F32)).evaluate(x, limit=torch.zeros(1))
        assert_same(out["out"], x)
        assert int(out["hits"]) == int((x > 0).sum())
        assert float(out["peak"]) == float(x.abs().max())

    def test_a_count_is_of_elements(self) -> None:
        """A truth value of a row, or of the call, counts once for each of the columns."""
        x = noise(3, 64)
        rows = (row_watched() >> Store(F32)).evaluate(
            x, row=torch.tensor([1.0, -1.0, 2.0]), one=torch.ones(1)
        )
        assert int(rows["hits"]) == 2 * 64
        assert int(rows["all"]) == 3 * 64

    def test_integers_of_a_row_arrive_as_floats(self) -> None:
        row = torch.tensor([1, 2**24, -3])
        one = torch.ones(64)
        found = evaluate(full(cap=0.0, gain=0.0), table=one, row=row)
        assert_same(found, row.to(F32)[:, None].expand(3, 64))


def body(x, ctx):
    """Some body."""
    return x


def body_of_pair(first, second, ctx):
    """Some body of a pair."""
    return first


def scaled_by_row(x, ctx):
    """An operand of the row's."""
    return x * ctx.row


def with_name(x, ctx, *, name: str = "x"):
    """``name`` is every policy's own."""
    return x


@dataclass(frozen=True)
class Misnamed(Elementwise):
    """An operand that linear takes for its activations."""

    @property
    def operands(self) -> Mapping[str, Operand]:
        return {"x": RowVector()}

    def apply(self, x, ctx):
        return x


MISDECLARED: dict[str, tuple[Callable[[], Any], str]] = {
    "positional field": (
        lambda: policy(lambda x, ctx, cap: x),
        r"signature .*expected \(x, ctx, \*",
    ),
    "no context": (lambda: policy(lambda x: x), r"signature .*make every field keyword-only"),
    "a pair without second": (lambda: pairwise()(body), r"expected \(first, second, ctx, \*"),
    "a field called name": (lambda: policy(with_name), r"with_name: got signature .*call none of"),
    "an operand called exp": (lambda: policy(exp=RowVector)(body), r"body: operand: got exp"),
    "an operand called store": (
        lambda: policy(store=Scalar)(body),
        r"operand: got store, expected",
    ),
    "an operand called as_kept": (lambda: policy(as_kept=Scalar)(body), r"operand: got as_kept"),
    "an operand with an underscore": (
        lambda: policy(_a=Scalar)(body),
        r"operand: got _a, expected",
    ),
    **{
        f"an operand called {name}": (
            lambda name=name: policy(**{name: RowVector})(body),
            rf"body: operand: got {name}, expected .*no argument of linear.*e.g. {name}_values",
        )
        for name in ("x", "packed", "epilogue", "composition", "accumulate", "acc", "self")
    },
    "an operand of a class": (
        lambda: Misnamed() >> Store(F32),
        r"Misnamed: operand: got x, expected a name that is no argument",
    ),
    "reducing without over": (
        lambda: reducing(body),
        r"reducing: over: got nothing, expected the number.*write @reducing\(over=64\) above",
    ),
    "reducing of operands alone": (lambda: reducing(gain=RowVector), r"over: got nothing"),
    "reducing over less": (lambda: reducing(over=-64), r"over: got -64"),
    "a kind by position": (lambda: policy(RowVector), r"policy body: got <class .*RowVector"),
    "a number by position": (lambda: tap(64), r"policy body: got 64, expected a function"),
    "no kind": (lambda: policy(bias=torch.float32)(body), r"operand kind: got torch.float32"),
    "pairs": (lambda: pairwise(pairs="adjacent"), r"pairs: got adjacent, expected 'halves' or"),
    "unknown field": (lambda: full(cap=1.0, gian=2.0), r"full: got field 'gian', expected cap, ga"),
    "missing field": (lambda: full(), r"full: cap: got nothing, expected a value. Fix: call full"),
    "dtype of a kind": (lambda: Scalar(dtype=torch.int64), r"Scalar.dtype: got torch.int64"),
    "Dequantize": (
        lambda: Dequantize("rows"),
        r"Dequantize.activation: got 'rows', expected 'tens",
    ),
    "Dequantize weight": (lambda: Dequantize("row", "row"), r"Dequantize.weight: got 'row'"),
    "RowScale": (lambda: RowScale(width=0), r"RowScale.width: got 0"),
    "SwiGLU": (lambda: SwiGLU(limit=0.0), r"SwiGLU.limit: got 0.0, expected a positive"),
    "RoPE style": (lambda: RoPE(64, 64, "neox"), r"RoPE.style: got 'neox', expected 'half' or"),
    "RoPE rotary": (lambda: RoPE(64, 128), r"RoPE.rotary_dim: got 128, expected .*head_dim=64"),
    "RoPE rotary of 8": (lambda: RoPE(64, 8), r"RoPE.rotary_dim: got 8"),
    "RoPE without a head": (lambda: RoPE(), r"RoPE.head_dim: got 0, expected a multiple of 16"),
    "HeadNorm": (lambda: HeadNorm(512), r"HeadNorm.head_dim: got 512, expected .* up to 256"),
    "PlaceKV": (lambda: PlaceKV(24), r"PlaceKV.head_dim: got 24"),
    "PlaceKV cells": (
        lambda: PlaceKV(64, F32),
        r"PlaceKV.dtype: got torch.float32, expected torch.b",
    ),
    "Store": (lambda: Store(torch.float64), r"Store.dtype: got torch.float64"),
}


@pytest.mark.parametrize("case", MISDECLARED)
def test_refused_at_declaration(case: str) -> None:
    make, message = MISDECLARED[case]
    with pytest.raises(EpicuteError, match=message) as caught:
        make()
    assert "Fix: " in str(caught.value)


IMPOSSIBLE: dict[str, tuple[Any, str]] = {
    "heads without width": (
        policy(s=PerHead)(body),
        r"body: operand 's': got PerHead.*s=PerHead\(h",
    ),
    "vector without length": (policy(s=HeadVector)(body), r"expected a positive length"),
    "partials without width": (policy(s=Partials)(body), r"expected a positive width"),
    "cells without slots": (tap(c=Cells(head_dim=64))(body), r"Cells.* without an operand 'slots'"),
    "slots of another kind": (
        tap(c=Cells(head_dim=64), slots=ColumnVector)(body),
        r"without an operand 'slots', expected the slots",
    ),
    "partials of another group": (
        tap(over=64, p=PartialsOutput(over=32))(body),
        r"body: operand 'p': got PartialsOutput\(over=32.* reduces over 64 columns",
    ),
    "partials without a group": (tap(p=PartialsOutput(over=64))(body), r"reduces over 0 columns"),
    "two head dimensions": (
        policy(a=PerHead(head_dim=64), b=PerHead(head_dim=32))(body),
        r"got heads of 32 and of 64",
    ),
    "heads in a pair": (
        pairwise(keeps=True, head_dim=64, s=PerHead(head_dim=64))(body_of_pair),
        r"body_of_pair: got an operand for each head of 64 columns in a pairwise policy",
    ),
}


@pytest.mark.parametrize("case", IMPOSSIBLE)
def test_operands_that_cannot_work_are_refused_at_composition(case: str) -> None:
    make, message = IMPOSSIBLE[case]
    with pytest.raises(CompositionError, match=message):
        make() >> Store(F32)


@policy(head_scale=PerHead(head_dim=64))
def by_head(x, ctx):
    """Says heads through its operand alone."""
    return x * ctx.head_scale


@tap(cells=Cells(dtype=torch.float16, head_dim=64), slots=Slots)
def keep(x, ctx):
    """A cache of the user's own."""
    return ctx.place("cells", x)


class TestHeadsFromOperands:
    """An operand for heads makes the policy head-wide, or its unit could cut a head."""

    def test_the_order_holds_whole_heads(self) -> None:
        for made in (by_head(), keep()):
            order = (made >> Store(F32)).row_order(192)
            assert (order.ranges[0].kind, order.ranges[0].head_dim) == ("heads", 64)
            assert order.unit % 64 == 0

    def test_values(self) -> None:
        scale = torch.tensor([2.0, 3.0, 4.0])
        found = evaluate(by_head(), 192, head_scale=scale)
        assert_same(found, noise(3, 192) * scale.repeat_interleave(64))

    def test_refused_next_to_other_heads_and_halves(self) -> None:
        with pytest.raises(CompositionError, match="RoPE >> by_head: got heads of 128 and of 64"):
            RoPE(128) >> by_head()
        with pytest.raises(CompositionError, match="SwiGLU >> by_head: got a head-wide policy"):
            SwiGLU() >> by_head()


def unknown(x, ctx):
    return x + ctx.bais


def reads_output(x, ctx):
    return x + ctx.out_values


def stores_elsewhere(x, ctx):
    ctx.store("copy", x)


def stores_vector(x, ctx):
    ctx.store("bias", x)


def branches(x, ctx):
    return x if x > 0 else -x


def converts(x, ctx):
    return x * float(x)


def too_few(x, ctx):
    return ctx.where(x > 0, x)


def sums_alone(x, ctx):
    return x - ctx.total(x)


def returns_nothing(x, ctx):
    x * 2.0


def returns_number(x, ctx):
    return 1.0


def returns_two(x, ctx):
    return x, x


def one_of_two(first, second, ctx):
    return first


def squares(x, ctx):
    return x**2


def cubes(x, ctx):
    return 3.0**x


def wraps(x, ctx):
    return x % 2.0


def floors(x, ctx):
    return x // 2.0


def indexes(x, ctx):
    return x[0]


def unpacks(x, ctx):
    first, second = x
    return first + second


def rounds(x, ctx):
    return round(x)


def truncates(x, ctx):
    return x * int(x)


def in_torch(x, ctx):
    return torch.relu(x)


def in_numpy(x, ctx):
    return np.exp(x)


def chosen_in_numpy(x, ctx):
    return np.where(x > 0.0, x, 0.0)


def as_array(x, ctx):
    return np.asarray(x)


def asks_for_erf(x, ctx):
    return ctx.erf(x)


OUT = Output(dtype=F32)
WRONG_BODIES: dict[str, tuple[Any, str]] = {
    "unknown name": (policy(bias=RowVector)(unknown), r"ctx.bais: got an unknown name.*\(bias\)"),
    "read of an output": (tap(out_values=OUT)(reads_output), r"ctx.out_values: got a read of Out"),
    "undeclared output": (tap(copy_=OUT)(stores_elsewhere), r"'copy': got None, expected a decl"),
    "store to a vector": (tap(bias=RowVector)(stores_vector), r"'bias': got RowVector.* Output"),
    "branch": (policy(branches), r"a branch on a value.*ctx.where"),
    "float": (policy(converts), r"a conversion of a value to a Python float"),
    "arguments": (policy(too_few), r"ctx.where: got 2 arguments, expected 3"),
    "sum without a group": (policy(sums_alone), r"ctx.total: got a policy without a group"),
    "sum in a tap without one": (tap()(sums_alone), r"@reducing\(over=64\) or @tap\(over=64\)"),
    "no result": (policy(returns_nothing), r"returns_nothing: body: got a result of NoneType"),
    "a number": (policy(returns_number), r"returns_number: body: got a result of float"),
    "two results": (policy(returns_two), r"result of Value, Value, expected one value"),
    "power": (policy(squares), r"got \*\* on a value, expected .*sqrt.*Fix: write x \* x"),
    "power of a number": (policy(cubes), r"got \*\* on a value"),
    "modulo": (policy(wraps), r"got % on a value.*write x - y \* ctx.floor\(x / y\)"),
    "floor division": (policy(floors), r"got // on a value.*write ctx.floor\(x / y\)"),
    "index": (policy(indexes), r"got an index on a value"),
    "unpacking": (policy(unpacks), r"got iteration on a value"),
    "rounding": (policy(rounds), r"got round\(\) on a value"),
    "int": (policy(truncates), r"got a conversion to int on a value"),
    "torch": (policy(in_torch), r"got torch's relu of a value.*Fix: write ctx.max\(x, 0.0\)"),
    "numpy": (policy(in_numpy), r"got np.exp of a value, .*Fix: write ctx.exp\(…\)"),
    "numpy's where": (policy(chosen_in_numpy), r"got np.where of a value.*write ctx.where"),
    "an array": (policy(as_array), r"got a conversion of a value to an array"),
    "an operation there is not": (
        policy(asks_for_erf),
        r"ctx.erf: got an unknown name in asks_for_erf, expected an operation \(min, .*tanh",
    ),
    "one for a kept pair": (
        pairwise(keeps=True, head_dim=32)(one_of_two),
        r"one_of_two: body: got a result of Value, expected two values",
    ),
}


@pytest.mark.parametrize("case", WRONG_BODIES)
def test_a_wrong_body_is_named(case: str) -> None:
    make, message = WRONG_BODIES[case]
    operands = {"bias": torch.ones(64)} if "bias" in make().operands else {}
    with pytest.raises(CompositionError, match=message):
        evaluate(make(), **operands)


@pytest.mark.parametrize("given", [2.0, 2, torch.tensor(2.0), np.float32(2.0)], ids=repr)
def test_numbers_stand_for_operands_of_one_element(given: Any) -> None:
    @policy(one=Scalar, row=ColumnVector)
    def scaled(x, ctx):
        return x * ctx.one + ctx.row

    made = scaled() >> Store(F32)
    x = noise(1, 64)
    assert_same(made.evaluate(x, one=given, row=given)["out"], x * 2.0 + 2.0)
    with pytest.raises(ArgumentError, match=r"operands: row: got shape \(\), expected"):
        made.evaluate(noise(2, 64), one=given, row=given)


def test_numpy_scalars_are_numbers() -> None:
    @policy
    def scaled(x, ctx):
        return np.float32(2.0) * x + np.float64(1.0)

    assert_same(evaluate(scaled()), noise(3, 64) * 2.0 + 1.0)


def passes(x, ctx):
    """Writes nothing."""
    return x


def writes_one(x, ctx):
    """Writes one of two."""
    ctx.store("copy", x)
    return x


FORGOTTEN: dict[str, tuple[Any, str]] = {
    "an output": (tap(copy=OUT)(passes), r"ctx.store\('copy', x\)"),
    "one of two": (tap(copy=OUT, more=OUT)(writes_one), r"ctx.store\('more', x\)"),
    "partial sums": (
        tap(over=64, sums=PartialsOutput(over=64))(passes),
        r"ctx.partials\('sums', ctx.total\(x\)\)",
    ),
    "a counter": (tap(hits=Counter)(passes), r"ctx.count\('hits', mask\)"),
    "a maximum": (tap(peak=Maximum)(passes), r"ctx.record_max\('peak', abs\(x\)\)"),
    "cells": (tap(c=Cells(head_dim=64), slots=Slots)(passes), r"ctx.place\('c', x\)"),
    "an output of no tap": (policy(copy=OUT)(passes), r"ctx.store\('copy', x\)"),
}


@pytest.mark.parametrize("case", FORGOTTEN)
def test_what_is_declared_as_written_is_written(case: str) -> None:
    make, call = FORGOTTEN[case]
    given: dict[str, Any] = {}
    if case == "cells":
        given = {"c": torch.zeros(1, 16, 1, 64).to(BF16), "slots": torch.zeros(3).long()}
    message = rf"{make().title}: operand .* that the body does not write.*Fix: call {call}"
    with pytest.raises(CompositionError, match=message):
        evaluate(make(), **given)
    with pytest.raises(CompositionError, match=message):
        emulate(make() >> Store(F32), noise(3, 64), given)


@pytest.mark.compile
def test_a_kernel_that_leaves_an_output_unwritten_is_not_compiled() -> None:
    fused = tap(copy=OUT)(passes)() >> Store(F32)
    kernel = kernel_for(fused, n=64, k=64, dtype=BF16, target=Target("sm_90a"))
    with pytest.raises(EpicuteError, match=r"passes: operand 'copy': got Output"):
        compile(kernel)


def test_kinds_by_class_or_by_value() -> None:
    assert as_operand(Matrix) == Matrix()
    assert as_operand(Matrix(dtype=F32)).dtype == F32
    with pytest.raises(ArgumentError, match="operand kind"):
        as_operand(3)  # type: ignore[arg-type]
