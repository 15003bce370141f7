"""Hypothesis strategies for what kernels take: ragged shapes, awkward floats, low-bit formats as
bit patterns, pages.

Large matrices are a plain base (zeros, ones, small integers or seeded noise) with a few drawn
elements laid over it, so that a failing case shrinks to zeros and the one element that matters.
Needs ``hypothesis`` (extra ``test``).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from hypothesis import strategies as st

__all__ = [
    "NVFP4",
    "RAGGED_ROWS",
    "SPECIAL_FLOATS",
    "PageTable",
    "float32s",
    "fp8",
    "fp8_bits",
    "int4",
    "matrices",
    "nvfp4",
    "page_tables",
    "positions",
    "rows",
    "shapes",
    "slots",
]

RAGGED_ROWS = (0, 1, 2, 8, 15, 16, 17, 31, 33, 63, 64, 65, 127, 128, 129, 255, 2047)
"""Row counts around every boundary a tile, a store or a warp has."""

SPECIAL_FLOATS = tuple(
    float(np.float32(x))
    for x in (
        *(0.0, -0.0, 1.0, -1.0, 1e-45, -1e-45, 1e-40, 1.1754944e-38, 3.4028235e38, -3.4028235e38),
        *(448.0, 464.0, 465.0, -449.0, 65504.0, 65520.0, 4.25 + 2**-10, 2.0**-9, 2.0**-10),
    )
)
"""Signed zeros, subnormals, the ends of FP32, FP16 and E4M3, and a value that double rounding gets
wrong.
"""

NON_FINITE = (float("nan"), float("inf"), float("-inf"))

FP8_SPECIALS = (0x00, 0x80, 0x01, 0x81, 0x07, 0x08, 0x7E, 0xFE)
"""E4M3: zeros, the least subnormals, the subnormal edge, +-448."""

FP8_NANS = (0x7F, 0xFF)


def rows(most: int = 129) -> st.SearchStrategy[int]:
    """M: mostly a boundary case of ``RAGGED_ROWS`` up to ``most``, otherwise any count from 0."""
    known = [m for m in RAGGED_ROWS if m <= most]
    return st.one_of(st.sampled_from(known), st.integers(0, most))


def shapes(
    most_rows: int = 129, columns: Sequence[int] | st.SearchStrategy[int] = (8, 16, 64, 72, 200)
) -> st.SearchStrategy[tuple[int, int]]:
    """(M, N) with ragged M; N from a list or a strategy of your own."""
    wide = columns if isinstance(columns, st.SearchStrategy) else st.sampled_from(list(columns))
    return st.tuples(rows(most_rows), wide)


def float32s(limit: float | None = None, non_finite: bool = True) -> st.SearchStrategy[float]:
    """One FP32 value: special ones often, -0 and subnormals among them; NaN and infinities unless
    refused.

    ``limit`` bounds the magnitude of finite values.
    """
    bound = float(np.float32(3.4028235e38 if limit is None else limit))
    special = [x for x in SPECIAL_FLOATS if abs(x) <= bound]
    choices = [
        st.integers(-8, 8).map(float).filter(lambda x: abs(x) <= bound),
        st.sampled_from(special),
        st.floats(-bound, bound, width=32),
    ]
    if non_finite:
        choices.append(st.sampled_from(NON_FINITE))
    return st.one_of(choices)


def _base(kind: str, seed: int, shape: tuple[int, ...], spread: int) -> np.ndarray:
    generator = np.random.default_rng(seed)
    if kind == "zeros":
        return np.zeros(shape, np.float32)
    if kind == "ones":
        return np.ones(shape, np.float32)
    if kind == "integers":
        return generator.integers(-8, 9, shape).astype(np.float32)
    noise = generator.standard_normal(shape, np.float32)
    return noise * np.exp2(generator.integers(-spread, spread + 1, shape)).astype(np.float32)


@st.composite
def matrices(
    draw: st.DrawFn,
    shape: tuple[int, ...],
    limit: float | None = None,
    non_finite: bool = False,
    specials: int = 8,
    spread: int = 4,
) -> np.ndarray:
    """FP32 array of ``shape``: a base with up to ``specials`` drawn elements over it.

    Args:
        shape: may be empty.
        limit: magnitude of finite values; unbounded overlays by default.
        non_finite: whether NaN and infinities may be among the drawn elements.
        specials: how many elements are drawn one by one.
        spread: powers of two, up and down, over which noise varies.
    """
    kind = draw(st.sampled_from(("zeros", "ones", "integers", "noise", "noise")))
    found = _base(kind, draw(st.integers(0, 2**16 - 1)), shape, spread)
    if limit is not None:
        found = np.clip(found, -limit, limit).astype(np.float32)
    if found.size:
        places = st.tuples(st.integers(0, found.size - 1), float32s(limit, non_finite))
        for index, value in draw(st.lists(places, max_size=specials)):
            found.reshape(-1)[index] = value
    return found


@st.composite
def _bytes(
    draw: st.DrawFn, shape: tuple[int, ...], allowed: np.ndarray, often: Sequence[int]
) -> np.ndarray:
    """uint8 array whose bytes come from ``allowed``, with some of ``often`` laid over."""
    kind = draw(st.sampled_from(("zeros", "seeded", "seeded")))
    generator = np.random.default_rng(draw(st.integers(0, 2**16 - 1)))
    found = np.zeros(shape, np.uint8)
    if kind == "seeded":
        found = allowed[generator.integers(0, len(allowed), shape)]
    if found.size:
        places = st.tuples(st.integers(0, found.size - 1), st.sampled_from(list(often)))
        for index, value in draw(st.lists(places, max_size=8)):
            found.reshape(-1)[index] = value
    return found


def fp8_bits(shape: tuple[int, ...], nan: bool = False) -> st.SearchStrategy[np.ndarray]:
    """uint8 array of E4M3 bit patterns, every one of the 254 numbers (and the 2 NaNs, if asked for)
    reachable.
    """
    numbers = [b for b in range(256) if nan or b not in FP8_NANS]
    return _bytes(shape, np.array(numbers, np.uint8), FP8_SPECIALS + (FP8_NANS if nan else ()))


def fp8(shape: tuple[int, ...], nan: bool = False) -> st.SearchStrategy[torch.Tensor]:
    """float8_e4m3fn tensor drawn as bit patterns."""
    return fp8_bits(shape, nan).map(lambda b: torch.from_numpy(b.copy()).view(torch.float8_e4m3fn))


def int4(shape: tuple[int, ...]) -> st.SearchStrategy[np.ndarray]:
    """uint8 array of packed INT4: two nibbles a byte, so (rows, columns / 2); all 16 patterns, -8
    included.
    """
    return _bytes(shape, np.arange(256, dtype=np.uint8), (0x00, 0x88, 0x77, 0x80, 0x08, 0xFF))


class NVFP4(NamedTuple):
    """An NVFP4 matrix: ``codes`` (rows, columns / 2) uint8, two E2M1 a byte; ``scales`` (rows,
    columns / 16) uint8 E4M3.
    """

    codes: np.ndarray
    scales: np.ndarray


@st.composite
def nvfp4(draw: st.DrawFn, rows: int, columns: int, nan: bool = False) -> NVFP4:
    """NVFP4 drawn as bit patterns; ``columns`` a multiple of 16. Scales are non-negative, NaN
    (0x7F) only if asked for.
    """
    codes = _bytes((rows, columns // 2), np.arange(256, dtype=np.uint8), (0x00, 0x88, 0x77, 0xFF))
    last = 0x80 if nan else 0x7F
    often = (0x00, 0x01, 0x38, 0x7E) + ((0x7F,) if nan else ())
    scales = _bytes((rows, columns // 16), np.arange(last, dtype=np.uint8), often)
    return NVFP4(draw(codes), draw(scales))


@st.composite
def positions(
    draw: st.DrawFn, count: int, last: int = 131071, dtype: torch.dtype | None = None
) -> torch.Tensor:
    """(count,) token positions, int32 or int64 (drawn unless given): a run from anywhere, or in any
    order.
    """
    kind = dtype or draw(st.sampled_from((torch.int32, torch.int64)))
    if draw(st.booleans()):
        start = draw(st.integers(0, max(0, last - count)))
        return torch.arange(start, start + count).to(kind)
    generator = np.random.default_rng(draw(st.integers(0, 2**16 - 1)))
    return torch.from_numpy(generator.integers(0, last + 1, count)).to(kind)


@st.composite
def slots(
    draw: st.DrawFn, count: int, capacity: int, skipped: bool = True, beyond: bool = False
) -> torch.Tensor:
    """(count,) int64 KV slots, each at most once.

    Args:
        count: rows; more than ``capacity`` only together with ``skipped``.
        capacity: pages * page_size.
        skipped: some rows get -1.
        beyond: some rows get ``capacity`` or 2**40 + 17, which a kernel must skip too.
    """
    generator = np.random.default_rng(draw(st.integers(0, 2**16 - 1)))
    found = np.full(count, -1, np.int64)
    kept = min(count, capacity)
    chosen = generator.permutation(capacity)[:kept] if draw(st.booleans()) else np.arange(kept)
    found[generator.permutation(count)[:kept]] = chosen
    drop: list[int] = []
    if skipped:
        drop.append(-1)
    if beyond:
        drop += [capacity, 2**40 + 17]
    if drop and count:
        places = st.tuples(st.integers(0, count - 1), st.sampled_from(drop))
        for index, value in draw(st.lists(places, max_size=count)):
            found[index] = value
    return torch.from_numpy(found)


class PageTable(NamedTuple):
    """``table`` (batch, most pages) int32, -1 where unused; ``lengths`` (batch,) int32 tokens;
    ``page_size``; ``pages``.
    """

    table: torch.Tensor
    lengths: torch.Tensor
    page_size: int
    pages: int


@st.composite
def page_tables(
    draw: st.DrawFn, batch: int, most_tokens: int, page_sizes: Sequence[int] = (16, 32, 64, 128)
) -> PageTable:
    """Page tables of ``batch`` sequences of 0 to ``most_tokens`` tokens: no page shared, pages
    shuffled, some unused.
    """
    page_size = draw(st.sampled_from(list(page_sizes)))
    edges = {0, 1, page_size - 1, page_size, page_size + 1, most_tokens}
    length = st.one_of(
        st.sampled_from(sorted(e for e in edges if e <= most_tokens)), st.integers(0, most_tokens)
    )
    lengths = draw(st.lists(length, min_size=batch, max_size=batch))
    counts = [-(-n // page_size) for n in lengths]
    pages = sum(counts) + draw(st.integers(1, 3))
    order = np.random.default_rng(draw(st.integers(0, 2**16 - 1))).permutation(pages)
    table = np.full((batch, max(counts, default=0)), -1, np.int32)
    start = 0
    for row, count in enumerate(counts):
        table[row, :count] = order[start : start + count]
        start += count
    return PageTable(
        torch.from_numpy(table), torch.tensor(lengths, dtype=torch.int32), page_size, pages
    )
