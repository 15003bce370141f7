"""The WGMMA accumulator map: a bijection, the same for int and NumPy."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from epicute.errors import ArgumentError
from epicute.layouts import (
    WGMMA_ROWS,
    WGMMA_THREADS,
    accumulator_coord,
    accumulator_owner,
    accumulator_registers,
)

widths = st.integers(1, 32).map(lambda n: 8 * n)


def tile(columns: int) -> tuple[np.ndarray, np.ndarray]:
    """All (thread, register) of a 64 x columns accumulator, as two grids."""
    return np.meshgrid(
        np.arange(WGMMA_THREADS), np.arange(accumulator_registers(columns)), indexing="ij"
    )


@given(widths)
def test_coord_is_a_bijection_onto_the_tile(columns: int) -> None:
    row, column = accumulator_coord(*tile(columns))
    cells = np.sort((row * columns + column).ravel())
    assert np.array_equal(cells, np.arange(WGMMA_ROWS * columns))


@given(widths)
def test_owner_is_the_inverse(columns: int) -> None:
    thread, register = tile(columns)
    owner = accumulator_owner(*accumulator_coord(thread, register))
    assert np.array_equal(owner, (thread, register))


@given(st.integers(0, WGMMA_THREADS - 1), st.integers(0, 127))
def test_int_and_numpy_agree(thread: int, register: int) -> None:
    coord = accumulator_coord(thread, register)
    assert all(type(value) is int for value in coord)
    assert np.array_equal(accumulator_coord(np.array(thread), np.array(register)), coord)
    assert accumulator_owner(*coord) == (thread, register)


def test_cells_spelled_out_from_the_ptx_isa() -> None:
    assert accumulator_coord(0, 0) == (0, 0)
    assert accumulator_coord(0, 1) == (0, 1)
    assert accumulator_coord(0, 2) == (8, 0)
    assert accumulator_coord(0, 4) == (0, 8)
    assert accumulator_coord(3, 0) == (0, 6)
    assert accumulator_coord(4, 0) == (1, 0)
    assert accumulator_coord(31, 3) == (15, 7)
    assert accumulator_coord(32, 0) == (16, 0)
    assert accumulator_coord(127, 127) == (63, 255)


@pytest.mark.parametrize("columns", [0, 4, 12, 257, 264, -8])
def test_illegal_widths_are_refused(columns: int) -> None:
    with pytest.raises(ArgumentError, match="columns"):
        accumulator_registers(columns)
