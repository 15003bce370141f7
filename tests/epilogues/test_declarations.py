"""Policies of the user's own: what a declaration and a body may say, and how a mistake is answered."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from epicute import Target, kernel_for
from epicute.epilogues import (
    Cells,
    Columns,
    ColumnVector,
    Counter,
    Dequantize,
    Elementwise,
    EmitFP8,
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
    SumSquares,
    SwiGLU,
    compose,
    pairwise,
    policy,
    reducing,
    tap,
)
from epicute.epilogues.operands import as_operand
from epicute.errors import ArgumentError, CompositionError, EpicuteError, KeyingError
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
    "reducing over nought": (lambda: reducing(over=0), r"reducing: over: got 0, expected"),
    "reducing over a text": (lambda: reducing(over="64"), r"reducing: over: got '64'"),
    "reducing over no head": (lambda: reducing(over=20), r"over: got 20, .*a multiple of 16"),
    "a tap over no head": (lambda: tap(over=20), r"tap: over: got 20, .*@tap\(over=64\)"),
    "a kind by position": (lambda: policy(RowVector), r"policy body: got <class .*RowVector"),
    "a number by position": (lambda: tap(64), r"policy body: got 64, expected a function"),
    "no kind": (lambda: policy(bias=torch.float32)(body), r"operand kind: got torch.float32"),
    "pairs": (lambda: pairwise(pairs="adjacent"), r"pairs: got adjacent, expected 'halves' or"),
    "unknown field": (lambda: full(cap=1.0, gian=2.0), r"full: got field 'gian', expected cap, ga"),
    "a text for a number": (
        lambda: full(cap="1"),
        r"full: cap: got '1' of type str, expected float, as the body annotates it",
    ),
    "truth for a number": (lambda: full(cap=True), r"full: cap: got True of type bool"),
    "a tensor for a number": (
        lambda: full(cap=torch.ones(1)),
        r"full: cap: got a tensor as a field.*@policy\(cap=RowVector\)",
    ),
    "an array for a number": (lambda: full(cap=np.ones(1)), r"full: cap: got an array as a field"),
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
    "Store of a name": (
        lambda: Store("bf16"),
        r"Store.dtype: got 'bf16', .*Fix: write torch.bfloat16",
    ),
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


def keeps_both(first, second, ctx):
    return second, first


def largest_in_python(x, ctx):
    return max(x, 0.0)


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
    "branch": (policy(branches), r"^branches: body: got a branch on a value.*ctx.where"),
    "Python's max": (policy(largest_in_python), r"a branch .*max\(a, b\) is ctx.max\(a, b\)"),
    "float": (policy(converts), r"^converts: body: got a conversion of a value to a Python float"),
    "arguments": (policy(too_few), r"^too_few: body: ctx.where: got 2 arguments, expected 3"),
    "sum without a group": (policy(sums_alone), r"ctx.total: got a policy without a group"),
    "sum in a tap without one": (tap()(sums_alone), r"@reducing\(over=64\) or @tap\(over=64\)"),
    "no result": (policy(returns_nothing), r"returns_nothing: body: got a result of NoneType"),
    "a number": (policy(returns_number), r"returns_number: body: got a result of float"),
    "two results": (policy(returns_two), r"result of Value, Value, expected one value"),
    "two results of a pair": (
        pairwise(keeps_both),
        r"keeps_both: body: got a result of Value, Value.*Fix: say @pairwise\(keeps=True, head_dim",
    ),
    "power": (
        policy(squares),
        r"^squares: body: got \*\* on a value, expected .*sqrt.*Fix: write x \* x",
    ),
    "power of a number": (policy(cubes), r"got \*\* on a value"),
    "modulo": (policy(wraps), r"got % on a value.*write x - y \* ctx.floor\(x / y\)"),
    "floor division": (policy(floors), r"got // on a value.*write ctx.floor\(x / y\)"),
    "index": (policy(indexes), r"got an index on a value"),
    "unpacking": (policy(unpacks), r"got iteration on a value"),
    "rounding": (policy(rounds), r"got round\(\) on a value"),
    "int": (policy(truncates), r"got a conversion to int on a value"),
    "torch": (policy(in_torch), r"got torch's relu of a value.*Fix: write ctx.max\(x, 0.0\)"),
    "numpy": (
        policy(in_numpy),
        r"^in_numpy: body: got np.exp of a value, .*Fix: write ctx.exp\(…\)",
    ),
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


def test_one_number_for_all_rows_is_told_of_the_tensor_scale() -> None:
    fused = Dequantize("row") >> Store(F32)
    for one in (1.0, torch.ones(1)):
        with pytest.raises(ArgumentError, match=r"scale: got shape .*write Dequantize\('tensor'\)"):
            fused.evaluate(noise(3, 64), scale=one, weight_scale=torch.ones(64))


@pytest.mark.parametrize("bad", [0.0, -1.0, float("nan"), float("inf"), 0])
def test_a_number_that_is_no_scale_is_refused(bad: float) -> None:
    x = noise(3, 64)
    with pytest.raises(ArgumentError, match=rf"out_scale: got {bad}, expected a finite number"):
        EmitFP8().evaluate(x, out_scale=bad)
    with pytest.raises(ArgumentError, match=rf"scale: got {bad}, expected a finite number"):
        (Dequantize("tensor", None) >> Store(F32)).evaluate(x, scale=bad)
    assert EmitFP8().evaluate(x, out_scale=torch.tensor([float(bad)])), (
        "whose value is not looked at"
    )


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


def skips_bias(x, ctx, *, shifted: bool = False):
    """Reads an operand where a field says so."""
    return x + ctx.bias if shifted else x


@pytest.mark.parametrize(
    "make",
    [
        policy(bias=RowVector)(passes),
        tap(bias=RowVector)(passes),
        policy(bias=RowVector)(skips_bias),
    ],
)
def test_what_is_declared_is_read(make: Any) -> None:
    message = rf"{make().title}: operand 'bias': got RowVector.* does not read.*Fix: use ctx.bias"
    with pytest.raises(CompositionError, match=message):
        evaluate(make(), bias=torch.ones(64))
    with pytest.raises(CompositionError, match=message):
        emulate(make() >> Store(F32), noise(3, 64), {"bias": torch.ones(64)})


def test_slots_are_read_by_the_cells_that_name_them() -> None:
    cells = torch.zeros(1, 16, 1, 64, dtype=torch.float16)
    keep().evaluate(noise(3, 64), cells=cells, slots=torch.arange(3))


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


@policy
def annotated(
    x,
    ctx,
    *,
    count: int = 1,
    scale: float = 1.0,
    on: bool = True,
    how: str = "so",
    kept: torch.dtype = BF16,
    some: tuple[int, ...] = (1,),
    pair: tuple[int, float] = (1, 1.0),
    least: float | None = None,
    mode: Literal["a", "b"] = "a",
    anything=1,
):
    """A field of every type that one may have."""
    return x * (scale * count)


class TestFields:
    """A value that a kernel cannot hold, or that the annotation contradicts, is refused where it is given."""

    @pytest.mark.parametrize(
        "given",
        [
            {"count": 2},
            {"scale": 2},
            {"scale": 2.5},
            {"on": False},
            {"how": "else"},
            {"kept": F32},
            {"some": ()},
            {"some": (1, 2, 3)},
            {"pair": (1, 2)},
            {"least": 0.5},
            {"least": None},
            {"mode": "b"},
            {"anything": "text"},
            {"anything": (1, "two")},
        ],
    )
    def test_taken(self, given: dict[str, Any]) -> None:
        assert dict(annotated(**given).parameters) | given == dict(annotated(**given).parameters)

    @pytest.mark.parametrize(
        "given",
        [
            {"count": 2.0},
            {"count": True},
            {"scale": "2"},
            {"scale": None},
            {"scale": np.float32(2.0)},
            {"on": 1},
            {"how": 3},
            {"kept": "bf16"},
            {"some": [1]},
            {"some": (1, 2.0)},
            {"pair": (1,)},
            {"least": "none"},
            {"mode": "c"},
            {"anything": torch.ones(1)},
            {"count": np.ones(2)},
        ],
        ids=str,
    )
    def test_refused_by_name(self, given: dict[str, Any]) -> None:
        (name,) = given
        with pytest.raises(EpicuteError, match=rf"^annotated: {name}: got .*expected .*Fix: "):
            annotated(**given)

    def test_a_tensor_in_a_class_is_refused_at_composition(self) -> None:
        @dataclass(frozen=True)
        class Scaled(Elementwise):
            by: Any = 1.0

            def apply(self, x, ctx):
                return x * self.by

        with pytest.raises(CompositionError, match="Scaled: by: got a tensor as a field"):
            Scaled(torch.ones(1)) >> Store(F32)

    def test_what_cannot_be_keyed_is_named(self) -> None:
        fused = annotated(anything=frozenset((1, 2))) >> Store(F32)
        with pytest.raises(KeyingError, match=r"annotated: field 'anything': got frozenset"):
            fused.key()


@reducing(over=32, ragged=True)
def centred(x, ctx):
    """x less the mean of its group."""
    return x - ctx.mean(x)


@tap(over=64, ragged=True, sums=PartialsOutput(over=64))
def means(x, ctx):
    """The mean of each group."""
    ctx.partials("sums", ctx.mean(x))


class TestRaggedGroups:
    """A last group that is not whole: refused unless the policy says that it knows, and then right."""

    @given(columns=st.integers(1, 300), over=st.sampled_from((32, 64, 128)))
    def test_whole_groups_or_none(self, columns: int, over: int) -> None:
        def body(x, ctx):
            return x * (1.0 / over) * ctx.total(x)

        fused = reducing(over=over)(body)() >> Store(F32)
        if columns % over == 0:
            fused.row_order(columns)
            return
        left = columns % over
        said = rf"body: got {columns} columns in groups of {over}, the last of which has {left}, .*ragged=True"
        with pytest.raises(CompositionError, match=said):
            fused.row_order(columns)
        (reducing(over=over, ragged=True)(body)() >> Store(F32)).row_order(columns)

    def test_taps_and_the_last_range_too(self) -> None:
        whole = tap(over=64, sums=PartialsOutput(over=64))(sums_of_group)
        with pytest.raises(CompositionError, match="96 columns in groups of 64"):
            (whole() >> Store(F32)).row_order(96)
        with pytest.raises(CompositionError, match="80 columns in groups of 64"):
            compose(Columns(a=(64, whole() >> Store()), b=(80, whole() >> Store()))).row_order(144)
        assert SumSquares.ragged, "whose last sum is of what is left, by definition"

    @given(columns=st.integers(1, 200), rows=st.integers(0, 4))
    def test_a_mean_is_of_the_columns_that_there_are(self, columns: int, rows: int) -> None:
        x = noise(rows, columns)
        groups = x.double().split(32, dim=1)
        wanted = torch.cat([g - g.mean(dim=1, keepdim=True) for g in groups], dim=1)
        fused = centred() >> Store(F32)
        found = fused.evaluate(x)["out"]
        assert torch.allclose(found.double(), wanted, rtol=0, atol=1e-5)
        assert_same(emulate(fused, x, {})["out"], found)
        sums = means().evaluate(x)["sums"]
        wanted = torch.stack([g.mean(dim=1) for g in x.double().split(64, dim=1)], dim=1)
        assert torch.allclose(sums.double(), wanted, rtol=0, atol=1e-5)

    def test_a_mean_of_whole_groups_is_the_total_by_their_width(self) -> None:
        def by_hand(x, ctx):
            return x - ctx.total(x) * (1.0 / 96)

        def by_name(x, ctx):
            return x - ctx.mean(x)

        one, other = (evaluate(reducing(over=96)(f)(), 192) for f in (by_hand, by_name))
        assert_same(one, other)

    def test_a_mean_needs_a_group(self) -> None:
        def alone(x, ctx):
            return ctx.mean(x)

        with pytest.raises(CompositionError, match="alone: ctx.mean: got a policy without a group"):
            evaluate(policy(alone)())

    @pytest.mark.compile
    @pytest.mark.parametrize("columns", [192, 200])
    def test_both_compile(self, columns: int) -> None:
        fused = centred() >> means() >> Store(F32)
        kernel = kernel_for(fused, n=columns, k=64, dtype=BF16, target=Target("sm_90a"))
        report = compile(kernel).report
        assert report.spill_stores == report.spill_loads == 0


def sums_of_group(x, ctx):
    """Writes the group's sum."""
    ctx.partials("sums", ctx.total(x))
