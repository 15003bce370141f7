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
    policy,
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


def test_the_example_in_the_docs() -> None:
    example = (module.__doc__ or "").split(">>> print(")[1]
    drawn = str(Dequantize() >> SwiGLU() >> EmitFP8())
    assert example.split(")\n", 1)[1].strip().splitlines() == drawn.splitlines()
