"""Which outputs leave through the ring: whole panels, and no padding but behind the last column."""

from __future__ import annotations

import pytest
import torch

from epicute.epilogues import (
    Columns,
    HeadNorm,
    Output,
    ResidualAdd,
    RoPE,
    Store,
    SumSquares,
    SwiGLU,
    compose,
    pairwise,
)
from epicute.epilogues.resolve import resolve
from epicute.gemm.arguments import ArgumentLayout
from epicute.gemm.panels import panelled

BF16 = torch.bfloat16


@pairwise(keeps=True, head_dim=64, pairs="interleaved", sums=Output)
def summed(first, second, ctx):
    """Stores what two neighbours make."""
    ctx.store("sums", first + second)
    return first, second


def names(chain: object, n: int) -> tuple[str, ...]:
    """Outputs that leave through the ring."""
    resolved = resolve(compose(chain), n)
    return panelled(resolved, ArgumentLayout.of(resolved))


@pytest.mark.parametrize(
    ("chain", "n"),
    [
        (Store(BF16), 192),
        (Store(BF16), 200),  # TMA writes nothing behind the last column
        (ResidualAdd() >> SumSquares() >> Store(BF16), 256),
        (SwiGLU() >> Store(BF16), 256),
    ],
)
def test_whole_panels_leave_through_the_ring(chain: object, n: int) -> None:
    assert names(chain, n) == ("out",)


def test_padding_between_ranges_does_not() -> None:
    """Range a has 64 columns and a unit of 128: its padding would fall into b's columns of the shared output."""
    ranges = Columns(
        a=(64, compose(SumSquares())),
        b=(128, HeadNorm(head_dim=128) >> Store(BF16, name="n")),
    )
    found = names(Store(BF16) >> ranges, 192)
    assert "out" not in found
    assert len(found) == 1


def test_what_a_pair_stores_is_judged_by_the_pairs_columns() -> None:
    assert names(summed() >> Store(BF16), 256) == ("out",)


def test_narrow_groups_do_not() -> None:
    assert names(RoPE(64, 32) >> Store(BF16), 256) == ()
