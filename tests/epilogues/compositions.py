"""Random compositions, built-in and user-made policies alike, for any number of columns."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from hypothesis import strategies as st

from epicute.epilogues import (
    Bias,
    Cells,
    Columns,
    ColumnVector,
    Composition,
    Counter,
    Dequantize,
    EmitFP8,
    Gain,
    HeadNorm,
    HeadVector,
    Matrix,
    Maximum,
    Output,
    PartialsOutput,
    PerHead,
    PlaceKV,
    Policy,
    ResidualAdd,
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
from epicute.epilogues.resolve import resolve
from epicute.errors import EpicuteError

__all__ = ["GROUPED", "HEADS", "PAIRS", "PLAIN", "compositions"]

STORED = (torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn)


@policy(shift=RowVector, slope=ColumnVector, level=Scalar, other=Matrix(dtype=torch.float16))
def blend(x, ctx):
    """One operand of each kind that every column may have."""
    return ctx.where(x > ctx.level, x * ctx.slope + ctx.shift, ctx.max(x, ctx.other))


@policy(channel=HeadVector(length=48))
def by_channel(x, ctx):
    """A vector that repeats every 48 columns, whatever the unit."""
    return x + ctx.channel


@pairwise(mix=RowVector, row=ColumnVector)
def gated(first, second, ctx):
    """A pair consumed, with an operand for each pair."""
    return ctx.max(first, 0.0) * second + ctx.mix * ctx.row


@reducing(over=64, ragged=True, weight=RowVector)
def centred(x, ctx):
    """x minus the mean of its 64 columns, or of those that are left, and their largest."""
    return (x - ctx.mean(x)) * ctx.weight + ctx.largest(x)


@tap(
    over=64,
    ragged=True,
    sums=PartialsOutput(over=64),
    copy=Output(dtype=torch.float16),
    large=Counter,
    peak=Maximum,
)
def watch(x, ctx):
    """Everything a tap can write, and nothing passed on."""
    ctx.partials("sums", ctx.total(x))
    ctx.count("large", x > 1.0)
    ctx.record_max("peak", abs(x))
    ctx.store("copy", x)


def head_policies(dim: int, rotary: int) -> list[Callable[[str], Policy]]:
    """Policies that see heads of ``dim`` columns; where halves pair, the first ``rotary`` of them."""

    @policy(head_scale=PerHead(head_dim=dim))
    def by_head(x, ctx):
        return x * ctx.head_scale

    @pairwise(keeps=True, head_dim=dim, angles=HeadVector(length=dim // 2))
    def turn(first, second, ctx):
        return first - second * ctx.angles, second + first * ctx.angles

    @pairwise(pairs="interleaved", keeps=True, head_dim=dim)
    def swap(first, second, ctx):
        return second, first

    @tap(cells=Cells(dtype=torch.float16, head_dim=dim), slots=Slots, missed=Counter)
    def keep(x, ctx):
        ctx.count("missed", ~ctx.placed("cells"))
        return ctx.place("cells", x)

    return [
        lambda n: RoPE(dim, rotary, "half", 1.25, name=n),
        lambda n: RoPE(dim, rotary, "half", name=n),
        lambda n: RoPE(dim, rotary, "interleaved", 1.25, name=n),
        lambda n: RoPE(dim, dim, "interleaved", name=n),
        lambda n: HeadNorm(dim, 1e-5, 1.0, name=n),
        lambda n: PlaceKV(dim, name=n),
        lambda n: PlaceKV(dim, torch.float8_e4m3fn, name=n),
        *(lambda n, f=f: f(name=n) for f in (by_head, turn if rotary == dim else swap, swap, keep)),
    ]


PLAIN: list[Callable[[str], Policy]] = [
    lambda n: Dequantize("row", "column", name=n),
    lambda n: Dequantize("tensor", "tensor", name=n),
    lambda n: Bias(name=n),
    lambda n: Gain(1.0, name=n),
    lambda n: RowScale(200, 1e-5, name=n),
    lambda n: ResidualAdd(name=n),
    lambda n: EmitFP8(name=n),
    lambda n: blend(name=n),
    lambda n: by_channel(name=n),
    *(lambda n, d=d: Store(d, name=n) for d in STORED),
]
GROUPED: list[Callable[[str], Policy]] = [
    lambda n: SumSquares(name=n),
    lambda n: centred(name=n),
    lambda n: watch(name=n),
]
PAIRS: list[Callable[[str], Policy]] = [
    lambda n: SwiGLU(name=n),
    lambda n: SwiGLU(1.702, 7.0, name=n),
    lambda n: gated(name=n),
]
HEADS = {
    (dim, rotary): head_policies(dim, rotary)
    for dim in (16, 64, 80, 96, 128, 256)
    for rotary in (16, 32, 48, 64, dim)
    if rotary <= dim
}


@st.composite
def chains(draw: st.DrawFn, form: str, dim: int, prefix: str = "p") -> list[Policy]:
    """Policies without a closing store; ``form`` is plain, pairs or heads."""
    pool = PLAIN + (GROUPED if draw(st.booleans()) else [])
    heads = HEADS[dim, draw(st.sampled_from([r for d, r in HEADS if d == dim]))]
    if form == "heads":
        pool = pool + heads * 2
    found = draw(st.lists(st.sampled_from(pool), min_size=0 if form == "pairs" else 1, max_size=4))
    if form == "heads":
        found.append(draw(st.sampled_from(heads)))
    if form == "pairs":
        found.insert(draw(st.integers(0, len(found))), draw(st.sampled_from(PAIRS)))
    return [make(f"{prefix}{i}") for i, make in enumerate(found)]


FORMS = st.sampled_from(("plain", "pairs", "heads"))
WIDTHS = st.one_of(st.sampled_from((1, 8, 24, 64, 72, 96, 200, 320)), st.integers(1, 400))


def _width(draw: Any, form: str, dim: int, step: int) -> int:
    if form == "heads":
        return dim * draw(st.integers(1, max(1, 320 // dim)))
    width = -(-draw(WIDTHS) // step) * step
    return width + width % 2 if form == "pairs" else width


@st.composite
def compositions(draw: st.DrawFn) -> tuple[Composition, int]:
    """(a complete composition, a number of columns it accepts)."""
    store = Store(draw(st.sampled_from(STORED)), name="last")
    dim = draw(st.sampled_from(sorted({d for d, _ in HEADS})))
    if draw(st.integers(0, 2)):
        form = draw(FORMS)
        columns = _width(draw, form, dim, 1)
        parts = [*draw(chains(form, dim)), store]
        return _legal(lambda: compose(*parts), columns)
    outside = draw(st.lists(st.sampled_from(PLAIN + GROUPED), max_size=2))
    before = [make(f"b{i}") for i, make in enumerate(outside)]
    shared = draw(
        st.booleans()
    )  # the same names in all ranges, so that per-row operands are shared
    ranges = {}
    for name in draw(st.sampled_from(("q", "qk", "qkv"))):
        form = draw(FORMS)
        chain = draw(chains(form, dim, "p" if shared else name))
        ranges[name] = (_width(draw, form, dim, 16), chain)
    columns = sum(width for width, _ in ranges.values())
    return _legal(
        lambda: compose(
            *before, Columns(**{n: (w, compose(*chain, store)) for n, (w, chain) in ranges.items()})
        ),
        columns,
    )


def _legal(make: Callable[[], Composition], columns: int) -> tuple[Composition, int]:
    """What was drawn; where it is refused, a plain composition of as many columns."""
    try:
        composition = make()
        resolve(composition, columns)
    except EpicuteError:
        return compose(PLAIN[0]("p"), Store(torch.bfloat16)), columns
    return composition, columns
