"""Printed compositions: golden texts."""

from __future__ import annotations

import torch

from epicute.epilogues import (
    Columns,
    Dequantize,
    EmitFP8,
    HeadNorm,
    PlaceKV,
    ResidualAdd,
    RoPE,
    RowScale,
    Store,
    SumSquares,
    SwiGLU,
    compose,
    pairwise,
    policy,
    tap,
)
from epicute.epilogues import composition as module

BF16 = torch.bfloat16

RESIDUAL = """\
acc (M, N)
 ├─ Dequantize(activation=tensor, weight=column)    scale, weight_scale
 ├─ ResidualAdd()    residual
 ├─ SumSquares()    → sumsq_out
 ├─ Store(dtype=bfloat16)    → out
 └─ EmitFP8()    out_scale → out_fp8, amax, saturated, nans"""

QKV = """\
acc (M, N = 256)
 ├─ Dequantize(activation=row, weight=column)    scale, weight_scale
 ├─ RowScale(width=576, eps=1e-05)    sumsq
 ├─ q: columns 0 to 127
 │   ├─ HeadNorm(head_dim=64, eps=1e-06, offset=0.0)    q_head_gain
 │   ├─ RoPE(head_dim=64, rotary_dim=64, style=half, magnitude=1.0)    positions, inv_freq
 │   └─ Store(dtype=bfloat16)    → q_out
 ├─ k: columns 128 to 191
 │   ├─ RoPE(head_dim=64, rotary_dim=64, style=half, magnitude=1.0)    positions, inv_freq
 │   └─ PlaceKV(head_dim=64, dtype=bfloat16)    slots → k_cells
 └─ v: columns 192 to 255
     └─ PlaceKV(name=late, head_dim=64, dtype=bfloat16)    late_slots → v_late_cells"""


def test_a_chain() -> None:
    fused = Dequantize() >> ResidualAdd() >> SumSquares() >> Store(BF16) >> EmitFP8()
    assert str(fused) == RESIDUAL


def test_ranges() -> None:
    rope = RoPE(64)
    fused = (
        Dequantize("row")
        >> RowScale(576)
        >> Columns(
            q=(128, HeadNorm(64) >> rope >> Store(BF16)),
            k=(64, rope >> PlaceKV(64)),
            v=(64, PlaceKV(64, name="late")),
        )
    )
    assert str(fused) == QKV
    for name in fused.operands:
        assert name in QKV, "drawn as run binds it"


def test_pairs_halve_the_columns_and_users_policies_show_their_fields() -> None:
    @policy
    def soft_cap(x, ctx, *, cap: float):
        return cap * ctx.tanh(x / cap)

    lines = str(SwiGLU() >> soft_cap(cap=30.0) >> Store(BF16)).splitlines()
    assert lines[1] == " ├─ SwiGLU(alpha=1.0)    columns: n → n/2"
    assert lines[2] == " ├─ soft_cap(cap=30.0)"


def test_what_is_left_at_its_default_is_not_drawn() -> None:
    def one(first, second, ctx):
        return first

    def both(first, second, ctx):
        return second, first

    def same(x, ctx):
        return x

    assert str(pairwise(one)()) == "one()"
    kept = pairwise(pairs="interleaved", keeps=True, head_dim=32)(both)()
    assert str(kept) == "both(pairs=interleaved, keeps=True, head_dim=32)"
    assert str(tap(same)()) == "same()"
    assert str(tap(over=32)(same)()) == "same(over=32)"
    assert ("over", 0) in tap(same)().settings(), "in the key all the same"


def test_ranges_alone() -> None:
    ranges = Columns(a=(64, Store(BF16)), b=(32, SumSquares()))
    assert str(ranges) == str(compose(ranges))
    assert str(ranges).startswith("acc (M, N = 96)\n ├─ a: columns 0 to 63\n")


def test_the_example_in_the_docs() -> None:
    example = (module.__doc__ or "").split(">>> print(")[1]
    drawn = str(Dequantize() >> SwiGLU() >> EmitFP8())
    assert example.split(")\n", 1)[1].strip().splitlines() == drawn.splitlines()
