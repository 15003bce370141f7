"""What the epilogue does with lanes beyond what a policy writes: squares added in one instruction, words of maxima,
operations that rows share. Plain Python stands for instructions where their number is what counts."""

from __future__ import annotations

import pytest

pytest.importorskip("cutlass")

from types import SimpleNamespace

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from epicute.epilogues.dsl import Lazy, Rounded, Shared, add_square, force, lanes_of
from epicute.gemm import Schedule
from epicute.gemm.driver import Driver
from tests.gemm.compositions import SKELETONS

KINDS = {torch.bfloat16: torch.int16, torch.float16: torch.int16, torch.float8_e4m3fn: torch.int8}


def every(dtype: torch.dtype) -> np.ndarray:
    """All finite values of a type of 16 or 8 bits, in float64."""
    bits = 8 * dtype.itemsize
    codes = torch.arange(-(2 ** (bits - 1)), 2 ** (bits - 1)).to(KINDS[dtype])
    found = codes.view(dtype).to(torch.float64).numpy()
    return found[np.isfinite(found)]


@pytest.mark.parametrize("dtype", KINDS, ids=str)
def test_squares_of_rounded_values_are_exact(dtype: torch.dtype) -> None:
    """So that a fused multiply and add has the bits of a product rounded first; float64 holds the square exactly."""
    squares = every(dtype) ** 2
    with np.errstate(over="ignore"):
        rounded = squares.astype(np.float32).astype(np.float64)
    normal = (squares >= 2.0**-126) | (squares == 0)
    assert ((rounded == squares) | np.isinf(rounded))[normal].all()
    assert normal.all() == (dtype != torch.bfloat16)
    least = np.abs(every(torch.bfloat16) ** 2)
    assert least[(least < 2.0**-126) & (least > 0)].max() < 2.0**-126  # |x| < 2**-63
    overflows = np.isinf(rounded)
    assert (squares[overflows] >= 2.0**128).all()  # and so does the fused sum


class Count:
    """A function that counts its calls."""

    def __init__(self, function: object) -> None:
        self.function, self.calls = function, 0

    def __call__(self, *arguments: object) -> object:
        self.calls += 1
        return self.function(*arguments)  # type: ignore[operator]


def test_rows_share_what_does_not_depend_on_them() -> None:
    product = Count(lambda a, b: a * b)
    times = lanes_of(product, "mul")
    tile = Shared()
    unit = Shared(tile)
    load = Count(lambda: 3.0)
    scale = tile.lane("scale", load)
    rows = []
    for row in (10.0, 20.0):
        columns = [unit.lane(("weight", i), lambda i=i: float(i)) for i in range(4)]
        factors = times(columns, [scale])
        assert all(f.shared is unit for f in factors)
        own = [Lazy(lambda row=row: row) for _ in range(4)]
        rows.append([force(x) for x in times(own, factors)])
    assert rows == [[row * 3.0 * i for i in range(4)] for row in (10.0, 20.0)]
    assert load.calls == 1
    assert product.calls == 4 + 2 * 4


def test_what_mixes_scopes_that_do_not_nest_is_no_ones() -> None:
    times = lanes_of(lambda a, b: a * b, "mul")
    tile = Shared()
    one, other = Shared(tile), Shared(tile)
    (mixed,) = times([one.lane("a", lambda: 2.0)], [other.lane("b", lambda: 3.0)])
    assert mixed.shared is None
    assert force(mixed) == 6.0
    (alone,) = times([one.lane("a", lambda: 2.0)], [Lazy(lambda: 3.0)])
    assert alone.shared is None


@given(st.lists(st.sampled_from((0, 1, True, 1.0, 2.0)), min_size=1, max_size=12))
def test_constants_are_told_apart_by_type(numbers: list[float]) -> None:
    times = lanes_of(lambda a, b: (a, b, type(b)), "mul")
    scope = Shared()
    lane = scope.lane("x", lambda: 5.0)
    for number in numbers:
        (found,) = times([lane], number)
        assert force(found) == (5.0, number, type(number))


def test_only_squares_of_rounded_values_are_added_at_once() -> None:
    times = lanes_of(lambda a, b: a * b, "mul")
    plain = Lazy(lambda: 3.0)
    pair = Lazy(lambda: [1.5, 2.5])
    first, second = (Rounded(pair, half, "bf16") for half in (0, 1))
    for lane in (*times([plain], [plain]), *times([first], [second]), first, 4.0):
        assert add_square(1.0, lane) is None
    (known,) = times([first], [first])
    force(known)
    assert add_square(1.0, known) is None  # it is there already


NOTHING = SimpleNamespace(stream=None, ring=None)


@pytest.mark.parametrize(
    ("skeleton", "width", "tile_n", "found"),
    [
        ("qkv.64.half.bf16", 1000, 128, True),  # 18, 6 and 6 heads, two to a tile
        ("qkv.64.half.bf16", 1000, 256, False),  # four to a tile, and 18 are no multiple
        ("qkv.64.half.bf16", 1000, 64, False),  # a head alone
        ("qkv.64.half.norm.bf16", 1000, 128, False),  # a norm needs a whole head at once
        ("rope.128.interleaved", 1000, 256, True),
        ("swiglu.store", 1000, 256, False),  # nothing turns
    ],
)
def test_heads_that_turn_alike_are_walked_row_by_row(
    skeleton: str, width: int, tile_n: int, found: bool
) -> None:
    case = SKELETONS[skeleton].case("bf16", width, 72)
    spec = case.kernel().spec
    driver = Driver(spec.resolved, spec.layout, Schedule(tile_n=tile_n))
    assert driver._by_rows(NOTHING) == found
    for name in ("stream", "ring"):  # what needs a unit at a time
        given = SimpleNamespace(**{"stream": None, "ring": None, name: object()})
        assert not driver._by_rows(given)
